"""Adafactor's second moment as the product of two vectors along other axes than the last two."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_optim as co

FACTORED = {(): None, (5,): None, (4, 6): (0, 1), (7, 5, 2, 3): (0, 1), (2, 7, 3, 5): (1, 3), (2, 3, 7): (1, 2)}
FACTORED |= {(3, 3, 3): (1, 2), (5, 2, 5, 2): (0, 2), (2, 4, 4, 4): (2, 3), (6, 1, 1): (0, 2), (3, 1, 3, 3): (2, 3)}
"""Parameter shapes, and the two largest axes of each: of equal ones the later."""

OPTIONS: dict[str, Any] = {"lr": 0.3, "beta2_decay": -0.6, "eps": (0.02, 0.05), "d": 1.5, "weight_decay": 0.4}


def _expected(param: Tensor, grads: list[Tensor], axes: tuple[int, int] | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The parameter after a step with each gradient, and its state, computed element by element (arXiv:1804.04235)."""
    places = list(itertools.product(*map(range, param.shape)))
    x = {at: param[at].item() for at in places}
    first: dict[Any, float] = {}
    second: dict[Any, float] = {}
    for t, grad in enumerate(grads, 1):
        weight, rho = t ** OPTIONS["beta2_decay"], min(OPTIONS["lr"], t**-0.5)
        scale = max(OPTIONS["eps"][1], (sum(v * v for v in x.values()) / len(x)) ** 0.5) * rho
        squares = {at: grad[at].item() ** 2 for at in places}
        estimate = {}
        if axes is None:
            for at in places:
                first[at] = (1 - weight) * first.get(at, 0.0) + weight * squares[at]
            estimate = first
        else:
            for vector, gone in ((first, axes[1]), (second, axes[0])):
                for kept in {_without(at, gone) for at in places}:
                    line = [squares[at] for at in places if _without(at, gone) == kept]
                    vector[kept] = (1 - weight) * vector.get(kept, 0.0) + weight * sum(line) / len(line)
            for at in places:
                row, column = _without(at, axes[1]), _without(at, axes[0])
                rows = [v for k, v in first.items() if _without(k, axes[0]) == _without(row, axes[0])]
                estimate[at] = first[row] * second[column] / max(sum(rows) / len(rows), OPTIONS["eps"][0])
        step = {at: grad[at].item() / max(estimate[at] ** 0.5, OPTIONS["eps"][0]) for at in places}
        excess = (sum(v * v for v in step.values()) / len(step)) ** 0.5 / OPTIONS["d"]
        for at in places:
            x[at] += -OPTIONS["lr"] * OPTIONS["weight_decay"] * x[at] - scale / max(1.0, excess) * step[at]
    result = torch.empty_like(param)
    for at in places:
        result[at] = x[at]
    if axes is None:
        return result, {"variance": _filled(first, param.shape)}
    shapes = [[1 if axis == gone else size for axis, size in enumerate(param.shape)] for gone in (axes[1], axes[0])]
    return result, {"row_var": _filled(first, shapes[0]), "col_var": _filled(second, shapes[1])}


def _without(place: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*place[:axis], 0, *place[axis + 1 :])


def _filled(values: dict[Any, float], shape: Any) -> Tensor:
    tensor = torch.empty(tuple(shape), dtype=torch.float64)
    for at, value in values.items():
        tensor[at] = value
    return tensor


def _grads(shapes: Any, steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes] for _ in range(steps)]


@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor", "eager"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_two_largest_axes(lowering: str, channels_last: bool) -> None:
    """Also of tensors that are stacked, of one whose gradient is absent, and in another memory format."""
    shapes = [*FACTORED, (7, 5, 2, 3), (7, 5, 2, 3)]
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    if channels_last:
        values = [v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v for v in values]
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = co.Adafactor(params, **OPTIONS, factored_dims="largest", lowering=lowering)
    grads = _grads(shapes, 3)
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = None if param is params[-1] else grad.to(memory_format=torch.preserve_format)
        optimizer.step()
    for i, (param, value) in enumerate(zip(params[:-1], values, strict=False)):
        expected, state = _expected(value, [of_step[i] for of_step in grads], FACTORED[tuple(value.shape)])
        torch.testing.assert_close(param.detach(), expected, rtol=1e-12, atol=1e-13)
        for name, vector in state.items():
            torch.testing.assert_close(optimizer.state[param][name], vector, rtol=1e-12, atol=0)
    assert torch.equal(params[-1], values[-1])


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
def test_the_last_two_are_torchs(lowering: str) -> None:
    shapes = [shape for shape in FACTORED if shape]
    ours = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes]
    theirs = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes]
    largest = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes]
    optimizers = [
        co.Adafactor(ours, **OPTIONS, factored_dims="last", lowering=lowering),
        torch.optim.Adafactor(theirs, **OPTIONS),
        co.Adafactor(largest, **OPTIONS, factored_dims="largest", lowering=lowering),
    ]
    for of_step in _grads(shapes, 3):
        for params, optimizer in zip((ours, theirs, largest), optimizers, strict=True):
            for param, grad in zip(params, of_step, strict=True):
                param.grad = grad.clone()
            optimizer.step()
    for shape, own, other, third in zip(shapes, ours, theirs, largest, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-13)
        if FACTORED[shape] in (None, (len(shape) - 2, len(shape) - 1)):
            assert torch.equal(own, third)  # the same kernel, with nothing moved


def test_a_convolution_keeps_much_less() -> None:
    kept = {}
    for choice in ("last", "largest"):
        weight = nn.Parameter(torch.ones(512, 512, 3, 3, device="meta"))
        optimizer = co.Adafactor([weight], factored_dims=choice)
        kept[choice] = {k: tuple(v.shape) for k, v in optimizer.state[weight].items() if k != "step"}
    assert kept["last"] == {"row_var": (512, 512, 3, 1), "col_var": (512, 512, 1, 3)}
    assert kept["largest"] == {"row_var": (512, 1, 3, 3), "col_var": (1, 512, 3, 3)}


def _trained(**options: Any) -> co.Adafactor:
    generator = torch.Generator().manual_seed(1)
    shapes = {"conv": (7, 5, 2, 3), "fc": (4, 6)}
    model = {n: nn.Parameter(torch.randn(s, dtype=torch.float64, generator=generator)) for n, s in shapes.items()}
    optimizer = co.Adafactor(model, **OPTIONS, **options)
    for param in model.values():
        param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("saved", "loading"), [("last", "largest"), ("largest", "last")])
def test_a_checkpoints_choice_is_taken(saved: str, loading: str) -> None:
    saver, optimizer = _trained(factored_dims=saved), _trained(factored_dims=loading)
    report = optimizer.load_state_dict(copy.deepcopy(saver.state_dict()))
    assert report[:3] == ([], [], [])
    assert f"factored_dims is '{saved}' as in the checkpoint, was '{loading}'" in report.changed[0]
    theirs = saver.state_dict()["state"]
    for index, entries in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, theirs[index][key]) for key, value in entries.items())


def test_groups_choose_for_themselves() -> None:
    shape = (7, 5, 2, 3)
    first, second = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    optimizer = co.Adafactor([{"params": [first]}, {"params": [second], "factored_dims": "largest"}])
    assert optimizer.state[first]["row_var"].shape == (7, 5, 2, 1)
    assert optimizer.state[second]["row_var"].shape == (7, 1, 2, 3)
    assert "factored_dims" not in optimizer.param_groups[0]  # which has torch.optim's keys
    assert copy.deepcopy(optimizer).param_groups[1]["factored_dims"] == "largest"


def test_a_change_with_state_is_refused() -> None:
    optimizer = _trained()
    optimizer.param_groups[0]["factored_dims"] = "largest"
    with pytest.raises(
        ValueError, match=r"state 'row_var' of 'conv' must have shape \(7, 1, 2, 3\), got shape \(7, 5, 2, 1\)"
    ):
        optimizer.step()


@pytest.mark.parametrize("value", ["first", None, (0, 1), True])
def test_other_values_are_refused(value: Any) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="factored_dims must be 'last' or 'largest', got"):
        co.Adafactor([weight], factored_dims=value)
    optimizer = co.Adafactor([weight])
    with pytest.raises(ValueError, match="factored_dims must be 'last' or 'largest', got"):
        optimizer.param_groups[0]["factored_dims"] = value
