"""The GPU that is not there refuses what CUDA refuses, and no step asks it for that."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog import registry, required
from fake_captures import capturing
from torch import nn
from torch.utils._device import _device_constructors

import compiled_optim as co
from compiled_optim.simulated.fake_cuda import fake_cuda

pytest.importorskip("triton")

Given = dict[str, Any]
PINNED = "dense CPU tensors can be pinned"
MIXED = "Expected all tensors to be on the same device"
CAPTURES = "not permitted when stream is capturing"
UNPINNED = "unless the CPU tensor is pinned"

REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "pinned memory of the device": (lambda d: d.gpu.pin_memory(), "cannot pin 'torch.cuda.FloatTensor' only " + PINNED),
    "pinned sparse memory": (lambda d: d.host.to_sparse().pin_memory(), PINNED),
    "a pinned tensor on the device": (lambda d: torch.empty(3, device="cuda", pin_memory=True), PINNED),
    "another device's generator": (
        lambda d: torch.randn(3, device="cuda", generator=torch.Generator()),
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "another device's generator in place": (lambda d: d.gpu.normal_(generator=torch.Generator()), "for generator"),
    "a sum with the host": (lambda d: d.gpu + d.host, MIXED),
    "a sum with another GPU": (lambda d: d.gpu.add_(d.other), MIXED),
    "a sum of lists with the host": (lambda d: torch._foreach_add_([d.gpu, d.gpu], [d.gpu, d.host]), MIXED),
    "a sum of lists with another GPU": (lambda d: torch._foreach_add([d.gpu], [d.other]), MIXED),
    "a quotient of lists": (lambda d: torch._foreach_addcdiv_([d.gpu], [d.gpu], [d.host], 1.0), MIXED),
    "an array": (lambda d: d.gpu.numpy(), "numpy"),
    "a value": (lambda d: d.gpu.sum().item(), "_local_scalar_dense"),
    "a decision": (lambda d: bool(d.gpu.any()), "_local_scalar_dense"),
}
ALLOWED: dict[str, Callable[[Any], object]] = {
    "pinned memory": lambda d: d.host.pin_memory().pin_memory(),
    "the host's generator on the host": lambda d: torch.randn(3, generator=torch.Generator(), device="cpu"),
    "a number of the host": lambda d: d.gpu.mul_(d.number),
    "numbers of the host": lambda d: torch._foreach_mul([d.gpu], [d.number]),
    "lists whose pairs are each on one device": lambda d: torch._foreach_add_([d.gpu, d.other], [d.gpu, d.other]),
    "copies of lists between devices": lambda d: torch._foreach_copy_([d.gpu, d.other], [d.host, d.gpu]),
    "waiting": lambda d: d.gpu.cpu(),
}
"""Outside of a capture."""
REFUSED_IN_CAPTURES: dict[str, tuple[Callable[[Any], object], str]] = {
    "more pinned memory": (lambda d: d.host.pin_memory(), CAPTURES),
    "a copy from the host": (lambda d: d.gpu.copy_(d.host), UNPINNED),
    "a copy from the host that does not wait": (lambda d: d.gpu.copy_(d.host, non_blocking=True), UNPINNED),
    "a tensor from numbers": (lambda d: torch.tensor([1.0], device="cuda"), UNPINNED),
    "a copy to the host": (lambda d: d.gpu.cpu(), UNPINNED),
    "a copy that waits": (lambda d: d.gpu.copy_(d.pinned), CAPTURES),
    "indices of what is not 0": (lambda d: d.gpu.nonzero(), "nonzero"),
    "whether tensors are equal": (lambda d: torch.equal(d.gpu, d.gpu), "equal"),
}
ALLOWED_IN_CAPTURES: dict[str, Callable[[Any], object]] = {
    "memory of the device": lambda d: torch.empty(3, device="cuda").fill_(2.0),
    "work of the host": lambda d: d.host.mul_(2.0).sum().item(),
    "a copy of pinned memory": lambda d: d.gpu.copy_(d.pinned, non_blocking=True),
    "a copy of a view of pinned memory": lambda d: d.gpu[0].copy_(d.pinned[0], non_blocking=True),
}


class _Devices:
    """Tensors here and there."""

    def __init__(self) -> None:
        self.gpu, self.other = (torch.zeros(2, 2, device=f"cuda:{i}") for i in range(2))
        self.host, self.number = torch.ones(2, 2, device="cpu"), torch.tensor(2.0, device="cpu")
        self.pinned = self.host.pin_memory()
        assert self.pinned.is_pinned()
        assert not self.host.is_pinned()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("what", "captured"), [*((what, False) for what in REFUSED), *((what, True) for what in REFUSED_IN_CAPTURES)]
)
def test_what_cuda_refuses_is_refused(what: str, captured: bool) -> None:
    refused, words = (REFUSED_IN_CAPTURES if captured else REFUSED)[what]
    with fake_cuda(90):
        devices = _Devices()
        with capturing() if captured else contextlib.nullcontext(), pytest.raises(Exception, match=re.escape(words)):
            refused(devices)


@pytest.mark.quick
@pytest.mark.parametrize("what", [*ALLOWED, *ALLOWED_IN_CAPTURES])
def test_what_cuda_does_is_done(what: str) -> None:
    with fake_cuda(90):
        devices = _Devices()
        (ALLOWED | ALLOWED_IN_CAPTURES)[what](devices)
        if what in ALLOWED_IN_CAPTURES:
            with capturing():
                ALLOWED_IN_CAPTURES[what](devices)


def _give(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.empty_like(param, requires_grad=False)


CONTROLS: list[Given] = [{}, {"max_grad_norm": 1.0, "skip_nonfinite": True}]


@pytest.mark.parametrize("controls", CONTROLS, ids=["plain", "controlled"])
@pytest.mark.parametrize(
    "kind", [k for k in registry() if k._gradients == "dense" and k is not co.LBFGS], ids=lambda k: k.__name__
)
def test_no_step_asks_for_what_cuda_refuses(kind: type[co.CompiledOptimizer], controls: Given) -> None:
    """Called, after every number was written, and recorded in a graph of the user's."""
    with fake_cuda(90):
        params = [nn.Parameter(torch.empty(16, 16, device="cuda")) for _ in range(3)]
        optimizer = kind(params, **required(kind), **controls)
        for i in range(3):
            _give(params)
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        optimizer.max_grad_norm = 0.5 if controls else None
        optimizer.step()
        with capturing():
            optimizer.step()
        optimizer.hyperparameter("lr").fill_(0.2)
        _give(params)
        optimizer.step()
        with capturing():
            optimizer.step()


DEFAULTS = {"cli/lowering.py": 1, "memory/addresses.py": 3, "groups/group_list.py": 1}
"""Calls, by file, that take the default device: one that is named around them, or what somebody asks for."""


def test_whatever_the_package_makes_it_makes_on_a_device_that_it_names() -> None:
    """A table that lies on the device of the moment lies on the wrong one where that is not the host's."""
    names, found = {function.__name__ for function in _device_constructors()}, dict.fromkeys(DEFAULTS, 0)
    package = Path(co.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = node.func if isinstance(node, ast.Call) else None
            is_made = (
                isinstance(function, ast.Attribute) and ast.unparse(function.value) == "torch" and function.attr in names
            )
            if is_made and not {"device", None} & {keyword.arg for keyword in node.keywords}:  # type: ignore[attr-defined]
                place = path.relative_to(package).as_posix()
                found[place] = found.get(place, 0) + 1
    assert found == DEFAULTS
