"""Steps whose update has outputs that are no arrays, compared with naive comparisons before and after each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from catalog import cases
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import engine_of
from compiled_optim.plan.output_memory import OutputMemory
from compiled_optim.rule import storage
from compiled_optim.rule.outputs import SUMS, Outputs

SIZES = (1, 31, 33, 4160, 8192 + 37)
"""Within a word, at its ends, of whole groups of 64 elements in 8 bits, and more than a block of the C++ kernels."""
MINIMUM = 64  # elements from which weights are stored in parts here
ABSENT = 3  # the parameter without a gradient in the second step


@dataclass(frozen=True)
class OutputCase:
    """An optimizer of parameters in ``dtype``, whose weights are served in another one."""

    optimizer: type[co.CompiledOptimizer]
    dtype: torch.dtype
    served: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = (self.optimizer.__name__, self.dtype, self.served, *self.options.values())
        return "-".join(str(kind).removeprefix("torch.") for kind in kinds)


def output_cases() -> Iterator[OutputCase]:
    """Every elementwise rule, every pair of dtypes, and every form of storage."""
    half, single, double = (torch.bfloat16, torch.float16), torch.float32, torch.float64
    for served in (single, *half):
        yield OutputCase(co.AdamW, single, served)
        yield OutputCase(co.AdamW, double, served)
    for rule in dict.fromkeys(case.optimizer for case in cases("dense")):
        if rule._granularity == "element":
            yield OutputCase(rule, torch.bfloat16, single)
            if rule is not co.AdamW:
                yield OutputCase(rule, single, torch.float16)
    for dtype in half:
        for weights in (None, *storage.MODES):
            for state in (None, "int8"):
                yield OutputCase(co.AdamW, dtype, dtype, {"weights": weights, "state_dtype": state})
    yield OutputCase(co.Lion, single, single, {"state_dtype": "int8"})
    yield OutputCase(co.LAMB, torch.bfloat16, torch.bfloat16, {"weights": "kahan", "state_dtype": "int8"})


def compare(case: OutputCase) -> None:
    """Assert the outputs of four steps: one clipped and without one of the gradients, one skipped."""
    with mock.patch.object(storage, "MINIMUM", MINIMUM):
        plain, ours = _Run(case, Outputs()), _Run(case, Outputs(case.served, tuple(SUMS)))
        changed = [torch.zeros(p.numel(), dtype=torch.bool) for p in ours.params]
        for step in range(4):
            before = [_in_memory(p).clone() for p in ours.params]
            sums = {name: ours.sums(name) for name in SUMS} if step else {}
            grads = _gradients(ours.params, step)
            plain.step(grads, step)
            ours.step(grads, step)
            for i, (param, old) in enumerate(zip(ours.params, before, strict=True)):
                differs = _served(_in_memory(param), case.served) != _served(old, case.served)
                changed[i] |= differs
                assert torch.equal(ours.changed(i), changed[i]), (step, i)
                if step == 2 or (step, i) == (1, ABSENT):
                    assert not differs.any()
                    assert all(ours.sums(name)[i] == sums[name][i] for name in SUMS), (step, i)
            if step == 0:
                _compare_sums(case, ours, before, grads)
            if step == 1:
                total = sum(x for i, x in enumerate(ours.sums("grad").tolist()) if i != ABSENT)
                torch.testing.assert_close(total, 0.7**2, rtol=1e-4, atol=0)
        ulp = 2.0 ** -{torch.bfloat16: 7, torch.float16: 10}.get(case.dtype, 20)
        for i, (param, like) in enumerate(zip(ours.params, plain.params, strict=True)):
            torch.testing.assert_close(param, like, rtol=ulp, atol=1e-6, msg=lambda m, i=i: f"parameter {i}: {m}")


def _compare_sums(case: OutputCase, run: _Run, before: list[Tensor], grads: list[Tensor | None]) -> None:
    """Compare with sums in float64 over a first step of parameters of the same values, which are not rounded."""
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    params = [nn.Parameter(old.to(wide, copy=True)) for old in before]
    for param, like, grad in zip(params, run.params, grads, strict=True):
        assert grad is not None
        twin = like.detach().clone()
        param.grad = _in_memory(twin.copy_(grad) if twin.dim() > 1 else grad).to(wide)
    case.optimizer(list(params), lr=0.01, lowering="eager").step()
    for i, (param, old) in enumerate(zip(params, before, strict=True)):
        assert param.grad is not None
        new = param.detach().double()
        sums = {"grad": param.grad.double(), "param": new, "update": new - old.double()}
        for name, x in sums.items():
            torch.testing.assert_close(
                run.sums(name)[i], x.square().sum(), rtol=1e-3, atol=1e-9, msg=lambda m, n=name: n + m
            )


class _Run:
    """An optimizer all of whose plans have the outputs of ``choice``."""

    def __init__(self, case: OutputCase, choice: Outputs) -> None:
        self._outputs = OutputMemory(choice, torch.device("cpu"))
        generator = torch.Generator().manual_seed(3)
        values = [torch.randn(n, generator=generator) for n in SIZES]
        values += [torch.randn(70, 64, generator=generator).t(), torch.randn(200, generator=generator)[::2]]
        self.params = [nn.Parameter(_like(v, case.dtype)) for v in values]
        self.optimizer = case.optimizer(list(self.params), lr=0.01, **case.options)
        engine = engine_of(self.optimizer)
        engine.outputs = self._outputs
        engine.changes.outdate("steps have outputs")

    def step(self, grads: list[Tensor | None], step: int) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.optimizer.max_grad_norm = 0.7 if step == 1 else None
        self.optimizer.found_inf = torch.tensor(float(step == 2))
        self.optimizer.step()

    def changed(self, index: int) -> Tensor:
        """The changed bits of a parameter, in the order of its memory."""
        param = self.params[index]
        words = self._outputs.words(param)
        bits = (words.view(-1, 1) >> torch.arange(32, dtype=torch.int32)) & 1
        assert not bits.flatten()[param.numel() :].any()
        return bits.flatten()[: param.numel()].bool()

    def sums(self, name: str) -> Tensor:
        """The sums of this name over each parameter."""
        return torch.stack([self._outputs.read(param)[name] for param in self.params])


def _like(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` in ``dtype``, in memory of the same strides."""
    made = torch.empty_strided(values.shape, values.stride(), dtype=dtype)
    return made.copy_(values)


def _gradients(params: list[nn.Parameter], step: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    grads: list[Tensor | None] = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
    if step == 1:
        grads[ABSENT] = None
    return grads


def _in_memory(param: Tensor) -> Tensor:
    """Return the elements in the order of memory."""
    return (param.detach().t() if param.dim() > 1 else param.detach()).reshape(-1)


def _served(values: Tensor, served: torch.dtype) -> Tensor:
    """Return the bits of ``values`` in the dtype ``served``."""
    kinds = {2: torch.int16, 4: torch.int32}
    return values.to(served).view(kinds[served.itemsize])


def interpreted(*names: str) -> list[str]:
    """Compare the cases of these names with Triton's kernels; which were compared."""
    chosen = [case for case in output_cases() if str(case) in names]
    for case in chosen:
        compare(case)
    return [str(case) for case in chosen]
