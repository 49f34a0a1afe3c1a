"""A model's state dict with all bits of its weights, and the way back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loading import content
from torch import nn

import compiled_optim as co

PARTS = ("kahan", "split8", "split16", "master")
ERROR = {"kahan": 2.0**-17, "split8": 2.0**-16, "split16": 0.0, "master": 0.0}  # of a number between 1 and 2


class Model(nn.Module):
    """Tied weights, buffers of two kinds, something frozen, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(70, 70)
        self.norm = nn.BatchNorm1d(70)
        self.last = nn.Linear(70, 70, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(70, 70), requires_grad=False)
        with torch.no_grad():
            for param in self.parameters():
                param.uniform_(1, 2)
        self.note = "a"

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        if not isinstance(state, str):
            raise TypeError("a note is a string")
        self.note = state


def _low(weights: str | None = "split8", **options: Any) -> tuple[Model, co.AdamW]:
    model = Model()
    co.to_low_precision(model)
    names = model.named_parameters(remove_duplicate=False)
    return model, co.AdamW(names, lr=1e-2, weights=weights, lowering="eager", **options)


def _train(model: nn.Module, optimizer: co.CompiledOptimizer, steps: int = 3) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn_like(param) if param.requires_grad else None
        optimizer.step()


@pytest.mark.parametrize("weights", PARTS)
def test_round_trip(weights: str) -> None:
    """Weights in float32 come back as exactly as the mode can hold them, and again with all bits."""
    full, (model, optimizer) = Model().state_dict(), _low(weights)
    co.load_full_precision_state_dict(model, optimizer, full)
    for name, entry in model.state_dict().items():
        if isinstance(entry, torch.Tensor):
            torch.testing.assert_close(entry, full[name].to(entry.dtype), rtol=0, atol=2.0**-7)
    found = co.full_precision_state_dict(model, optimizer)
    assert list(found) == list(full)
    assert found._metadata == full._metadata  # type: ignore[attr-defined]
    assert found["last.weight"] is found["first.weight"]
    assert found["_extra_state"] == "a"
    for name in ("first.weight", "first.bias", "norm.weight", "norm.bias"):
        assert found[name].dtype == torch.float32
        bound = ERROR[weights] if name == "first.weight" else 0.0  # the others are small, and have a copy
        torch.testing.assert_close(found[name], full[name], rtol=0, atol=bound)
    assert found["frozen"].data_ptr() == model.frozen.data_ptr()
    assert found["norm.running_mean"].data_ptr() == model.norm.running_mean.data_ptr()  # type: ignore[union-attr]
    Model().load_state_dict(found)
    again, other = _low(weights)
    co.load_full_precision_state_dict(again, other, found)
    repeated = co.full_precision_state_dict(again, other)
    assert all(torch.equal(found[n], repeated[n]) for n in found if n != "_extra_state")


@pytest.mark.parametrize("weights", PARTS)
def test_after_steps(weights: str) -> None:
    """They are what float32 weights would be, within what each mode may round in three steps."""
    model, optimizer = _low(weights)
    twin = Model()
    co.load_full_precision_state_dict(model, optimizer, twin.state_dict())
    reference = co.AdamW(twin.named_parameters(), lr=1e-2, lowering="eager")
    for step in range(3):
        torch.manual_seed(step)
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            if param.requires_grad:
                param.grad = torch.randn_like(param)
                other.grad = param.grad.float()
        optimizer.step()
        reference.step()
    found, wanted = co.full_precision_state_dict(model, optimizer), twin.state_dict()
    for name in ("first.weight", "first.bias"):
        error = (found[name] - wanted[name]).abs().max()
        assert error < 2e-3  # from moments in bfloat16
        assert error < (model.state_dict()[name].float() - wanted[name]).abs().max()


@pytest.mark.parametrize("weights", [None, "stochastic"])
def test_modes_without_more_bits(weights: str | None) -> None:
    model, optimizer = _low(weights)
    _train(model, optimizer)
    found = co.full_precision_state_dict(model, optimizer)
    assert found["first.weight"].dtype == torch.bfloat16
    assert torch.equal(found["first.weight"], model.first.weight)
    full = Model().state_dict()
    co.load_full_precision_state_dict(model, optimizer, full)
    assert torch.equal(model.first.weight, full["first.weight"].bfloat16())


def test_an_average_of_all_bits_is_float32s() -> None:
    torch.manual_seed(0)
    small = nn.Linear(70, 70, bias=False, dtype=torch.bfloat16)
    large = nn.Linear(70, 70, bias=False)
    large.load_state_dict(small.state_dict())
    options: dict[str, Any] = {"lr": 1e-5, "lowering": "eager"}
    ours = co.AdamW(small.named_parameters(), weights="split16", state_dtype=torch.float32, **options)
    reference = co.AdamW(large.named_parameters(), **options)
    averages = [co.full_precision_state_dict(small, ours)["weight"].clone(), large.weight.detach().clone()]
    rounded = torch.optim.swa_utils.AveragedModel(small, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    for _ in range(30):
        small.weight.grad = torch.randn_like(small.weight)
        large.weight.grad = small.weight.grad.float()
        ours.step()
        reference.step()
        averages[0].lerp_(co.full_precision_state_dict(small, ours)["weight"], 0.01)
        averages[1].lerp_(large.weight.detach(), 0.01)
        rounded.update_parameters(small)
    assert torch.equal(*averages)
    assert not torch.equal(rounded.module.weight.float(), averages[1].bfloat16().float())


@pytest.mark.parametrize("weights", PARTS)
def test_weights_loaded_later_keep_the_old_bits(weights: str) -> None:
    """Up to half a unit in the last place, for weights below 4, until the state of the same time is loaded."""
    model, optimizer = _low(weights)
    _train(model, optimizer, 2)
    best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = {
        name: value.clone()
        for name, value in co.full_precision_state_dict(model, optimizer).items()
        if name != "_extra_state"
    }
    _train(model, optimizer, 3)
    model.load_state_dict(best[0])
    found = co.full_precision_state_dict(model, optimizer)
    error = (found["first.weight"] - best[0]["first.weight"].float()).abs().max()
    assert 0 < error <= 2.0**-7
    optimizer.load_state_dict(best[1])
    found = co.full_precision_state_dict(model, optimizer)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_prefixes_and_several_optimizers() -> None:
    model, _ = _low()
    wrapped = nn.ModuleDict({"module": model})
    optimizers = [
        co.AdamW({"w": model.first.weight}, weights="split16", lowering="eager"),
        co.SGD([model.first.bias, model.norm.weight, model.norm.bias], lr=0.1, weights="master", lowering="eager"),
    ]
    full = {f"module.{name}": value for name, value in Model().state_dict().items()}
    co.load_full_precision_state_dict(wrapped, optimizers, full)
    found = co.full_precision_state_dict(wrapped, optimizers)
    assert list(found) == list(full)
    assert torch.equal(found["module.first.weight"], full["module.first.weight"])
    assert torch.equal(found["module.first.bias"], full["module.first.bias"])
    with pytest.raises(ValueError, match="both have the parameter"):
        co.full_precision_state_dict(wrapped, [optimizers[0], co.SGD([model.first.weight])])


def test_a_checkpoint_beside_it() -> None:
    """Both orders of loading go on as an uninterrupted run, and a state without parts keeps those that were loaded."""
    model, optimizer = _low(state_dtype="int8")
    _train(model, optimizer)
    full, state = copy.deepcopy((co.full_precision_state_dict(model, optimizer), optimizer.state_dict()))
    runs = []
    for full_first in (True, False):
        twin, other = _low(state_dtype="int8")
        for loads_full in (full_first, not full_first):
            co.load_full_precision_state_dict(twin, other, full) if loads_full else other.load_state_dict(state)
        runs.append((twin, other))
    _train(model, optimizer)
    for twin, other in runs:
        _train(twin, other)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compensations_of_half_a_unit(dtype: torch.dtype) -> None:
    """A load finds the same parameter and compensation, and so do both orders with the optimizer's checkpoint."""

    def made() -> tuple[nn.Module, co.SGD]:
        model = nn.Linear(70, 70, bias=False).to(dtype)
        return model, co.SGD(model.parameters(), lr=0.1, weights="kahan", lowering="eager")

    unit = torch.finfo(dtype).eps
    model, optimizer = made()
    with torch.no_grad():  # those of odd numbers of units from 1 on, rounded to even ones, would be others
        model.weight.copy_((1 + unit * (torch.arange(4900) % 64)).view(70, 70) * torch.tensor([1, -1]).repeat(35))
        comp = optimizer.state[model.weight]["kahan_comp"]
        comp.copy_(unit / 2 * torch.tensor([1, 1, 0, -1, -1, 0.5, 1]).repeat(10))
        comp[model.weight.abs() == 1] = 0
    full, state = copy.deepcopy((co.full_precision_state_dict(model, optimizer), optimizer.state_dict()))
    for order in ("full", "full state", "state full"):
        twin, other = made()
        for loaded in order.split():
            co.load_full_precision_state_dict(twin, other, full) if loaded == "full" else other.load_state_dict(state)
        assert torch.equal(twin.weight, model.weight)
        assert torch.equal(other.state[twin.weight]["kahan_comp"], comp)
    both = model.weight.double() + comp.double()
    torch.testing.assert_close(full["weight"].double(), both, rtol=2.0**-23, atol=0)
    wide = nn.Linear(70, 70, bias=False)
    wide.load_state_dict(full)
    co.SGD(wide.parameters(), lr=0.1).load_state_dict(state)  # has no compensation, and needs none
    wide.weight.data *= 1 + 2.0**-13
    with pytest.raises(ValueError, match="has no kahan_comp"):
        co.SGD(wide.parameters(), lr=0.1).load_state_dict(state)


def _hooked(model: nn.Module, change: Callable[[Any], Any]) -> None:
    def hook(module: Any, entries: dict[str, Any], prefix: str, metadata: Any) -> None:
        entries.update({name: change(entry) for name, entry in entries.items()})

    model.register_state_dict_post_hook(hook)


def test_hooks_that_copy() -> None:
    """A copy in the model's state dict stands for the parameter of its name."""
    model, optimizer = _low("split16")
    _hooked(model, lambda entry: entry.clone() if isinstance(entry, torch.Tensor) else entry)
    full = Model().state_dict()
    co.load_full_precision_state_dict(model, optimizer, full)
    found = co.full_precision_state_dict(model, optimizer)
    assert found["last.weight"] is found["first.weight"]
    for name in ("first.weight", "norm.bias", "norm.running_mean"):
        assert torch.equal(found[name], full[name]), (name, found[name].dtype)


def test_hooks_that_hide_a_parameter() -> None:
    model, optimizer = _low("split16")
    _hooked(model, lambda entry: entry[:-1] if isinstance(entry, torch.Tensor) and entry.dim() == 2 else entry)
    with pytest.raises(ValueError, match=r"does not have the parameter 'first.weight' as it is: a hook changes it"):
        co.full_precision_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=r"does not have the parameter 'first.weight'"):
        co.load_full_precision_state_dict(model, optimizer, Model().state_dict())


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda full: full.pop(name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("first.weight"), "missing: first.weight"),
        (_without("norm.running_mean"), "missing: norm.running_mean"),
        (lambda full: full.update(more=torch.zeros(3)), "unexpected: more"),
        (lambda full: full.update({"first.bias": torch.zeros(71)}), r"first.bias has shape \(71,\) instead of \(70,\)"),
        (lambda full: full.update({"last.weight": "text"}), "last.weight is not a tensor"),
        (lambda full: full.update({"first.weight": torch.zeros(70, 70, dtype=torch.int8)}), "first.weight is torch.int8"),
        (lambda full: full.update({"frozen": torch.zeros(70, 70, dtype=torch.complex64)}), "frozen is torch.complex64"),
        (lambda full: full.update({"frozen": torch.zeros(70, 70, device="meta")}), "frozen is a meta tensor"),
        (lambda full: full.update({"last.weight": torch.zeros(70, 70)}), "last.weight is not equal to first.weight"),
    ],
)
def test_bad_input_changes_nothing(damage: Callable[[dict[str, Any]], Any], message: str) -> None:
    model, optimizer = _low()
    _train(model, optimizer)
    before, weights = content(optimizer), copy.deepcopy(model.state_dict())
    full = Model().state_dict()
    damage(full)
    with pytest.raises(ValueError, match=f"the state dict does not match the model; .*{message}"):
        co.load_full_precision_state_dict(model, optimizer, full)
    with pytest.raises(TypeError, match="a note is a string"):
        co.load_full_precision_state_dict(model, optimizer, {**Model().state_dict(), "_extra_state": 3})
    assert content(optimizer) == before
    assert all(torch.equal(a, weights[n]) for n, a in model.state_dict().items() if n != "_extra_state")


def test_live_tensors_in_another_order() -> None:
    """Float32 parameters and buffers, which the state dict holds as they are."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(64, 64, dtype=torch.bfloat16))
    optimizer = co.AdamW(model.named_parameters(), weights="split8")
    with torch.no_grad():
        for i, tensor in enumerate([*model.state_dict().values()]):
            tensor.fill_(i)
    found = co.full_precision_state_dict(model, optimizer)
    swapped = {name: found[{"0": "1", "1": "0"}.get(name[0], name[0]) + name[1:]] for name in found}
    expected = {name: entry.clone() for name, entry in swapped.items()}
    co.load_full_precision_state_dict(model, optimizer, swapped)
    assert all(torch.equal(entry, expected[name].to(entry.dtype)) for name, entry in model.state_dict().items())


def test_wrong_arguments() -> None:
    model, optimizer = _low()
    for function in (co.full_precision_state_dict, co.load_full_precision_state_dict):
        arguments = () if function is co.full_precision_state_dict else ({},)
        with pytest.raises(TypeError, match="model must be a module, got a dict"):
            function(dict(model.named_parameters()), optimizer, *arguments)  # type: ignore[operator]
        with pytest.raises(TypeError, match="an optimizer of this package"):
            function(model, torch.optim.SGD(model.parameters()), *arguments)  # type: ignore[operator]
        with pytest.raises(ValueError, match="no parameter of the model is in the optimizer"):
            function(Model(), optimizer, *arguments)  # type: ignore[operator]
    with pytest.raises(TypeError, match="state_dict must be a dict, got 3"):
        co.load_full_precision_state_dict(model, optimizer, 3)  # type: ignore[arg-type]
