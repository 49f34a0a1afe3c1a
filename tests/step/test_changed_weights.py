"""``opt.changes()`` hands over the elements whose bits differ around any step since the last call, and no others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import simulated_device
import torch
from catalog import registry
from changed_bits import Expected
from output_cases import OutputCase
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.plan.changed_weights import Comparison
from compiled_optim.plan.output_memory import OutputMemory
from compiled_optim.rule import storage


def cases() -> Iterator[OutputCase]:
    """Every rule in every pair of dtypes, and every form of storage of some."""
    single, halves = torch.float32, (torch.bfloat16, torch.float16)
    for kind in registry():
        if hasattr(kind, "_rule"):
            yield from (OutputCase(kind, dtype, torch.bfloat16) for dtype in (single, torch.bfloat16))
    for weights, state in itertools.product(storage.MODES, (None, "int8")):
        for kind, own in ((co.AdamW, halves), (co.Lion, halves[:1]), (co.Muon, halves[:1])):
            yield from (OutputCase(kind, half, half, {"weights": weights, "state_dtype": state}) for half in own)
    for lowering in ("inductor", "eager"):
        yield OutputCase(co.AdamW, torch.bfloat16, single, {"lowering": lowering})
    yield OutputCase(co.AdamW, single, single)
    yield OutputCase(co.AdamW, torch.float64, torch.float16)


FEW = [case for case in cases() if case.optimizer in (co.AdamW, co.Muon, co.SparseAdam)]


def parameters(case: OutputCase) -> dict[str, nn.Parameter]:
    """Within a word of bits and at its ends, of more than a block of a kernel, not contiguous, and with gaps."""
    generator = torch.Generator().manual_seed(3)
    values = {"rows": torch.randn(130, 64, generator=generator), "word": torch.randn(1, 64, generator=generator)}
    values["turned"] = torch.randn(64, 66, generator=generator).t()
    if not case.options.get("state_dtype") and case.optimizer is not co.SparseAdam:
        values["gaps"] = torch.randn(8, 66, generator=generator)[:, ::2]
        values["odd"] = torch.randn(3, 11, generator=generator)
    if case.options.get("state_dtype") and case.optimizer is co.Muon:
        del values["turned"]
    made = {n: torch.empty_strided(v.shape, v.stride(), dtype=case.dtype).copy_(v) for n, v in values.items()}
    return {name: nn.Parameter(value) for name, value in made.items()}


def gradient(param: Tensor, generator: torch.Generator, *, sparse: bool) -> Tensor:
    """A gradient, of some rows if it is sparse."""
    grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    if not sparse:
        return grad
    rows = torch.randperm(len(param), generator=generator)[: max(len(param) // 8, 1)]
    return torch.sparse_coo_tensor(rows[None], grad[rows], param.shape, check_invariants=True)


@pytest.mark.parametrize(
    ("case", "count"),
    [*((case, 7) for case in FEW), *(pytest.param(case, 100, marks=pytest.mark.full) for case in cases())],
    ids=str,
)
def test_changes_are_the_elements_that_differ_around_steps(case: OutputCase, count: int) -> None:
    """With absent gradients, skipped steps, and loads of weights, which change all of their elements."""
    draw, generator = random.Random(str(case)), torch.Generator().manual_seed(5)
    with mock.patch.object(storage, "MINIMUM", 32):
        params = parameters(case)
        optimizer = case.optimizer(params, lr=1e-3, **case.options)
        saved = {name: p.detach().clone() for name, p in params.items()}
        optimizer.track_changes(case.served)
        expected = Expected(params, case.served)
        for step in range(count):
            for param in params.values():
                is_sparse = case.optimizer is co.SparseAdam
                param.grad = gradient(param, generator, sparse=is_sparse) if draw.random() < 0.8 else None
            optimizer.found_inf = torch.tensor(float(step % 5 == 3))
            expected.around(optimizer.step)
            if step % 6 == 4:
                name = draw.choice([*params])
                with torch.no_grad():
                    params[name].copy_(saved[name])
                expected.changed[name].fill_(True)
            if draw.random() < 0.3 or step == count - 1:
                expected.check(optimizer.changes())


def _tied(kind: type[CompiledOptimizer] = co.AdamW, **options: Any) -> tuple[CompiledOptimizer, nn.Parameter, Expected]:
    param = nn.Parameter(torch.linspace(-1, 1, 96))
    optimizer = kind({"w": param}, lr=1e-4, **options)
    optimizer.track_changes()
    param.grad = torch.linspace(1, 2, 96)
    return optimizer, param, Expected({"w": param})


def _loads(param: nn.Parameter) -> None:
    model = nn.ParameterDict({"w": param})
    model.load_state_dict({"w": param.detach().clone()})


def _set(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.set_(param.detach().clone())


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "copy_": lambda param: param.detach().copy_(param.detach().clone()),
    "load_state_dict": _loads,
    "data": lambda param: setattr(param, "data", param.detach().clone()),
    "set_": _set,
    "swap_tensors": lambda param: torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone())),
    "zero_ of a view": lambda param: param.detach()[:5].zero_(),
    "a foreach operation": lambda param: torch._foreach_mul_([param.detach()], 1.0),
}


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_all_of_a_parameter_that_others_write_is_changed(
    write: Callable[[nn.Parameter], object], before: int, after: int
) -> None:
    optimizer, param, _ = _tied()
    steps = [optimizer.step] * after
    for _ in range(before):
        optimizer.step()
    write(param)
    param.grad = torch.linspace(1, 2, 96)
    for step in steps:
        step()
    (change,) = optimizer.changes()
    assert change.indices is None
    assert torch.equal(change.values, param.detach().bfloat16())
    assert optimizer.changes() == []


def test_changes_of_freed_memory_are_refused_by_name_and_handed_over_later() -> None:
    optimizer, param, _ = _tied()
    optimizer.step()
    values, memory = param.detach().clone(), param.untyped_storage()
    size = memory.nbytes()
    memory.resize_(0)
    with pytest.raises(ValueError, match="changes of 'w' cannot be read: it has no memory, since its storage was freed"):
        optimizer.changes()
    memory.resize_(size)
    param.data.copy_(values)
    (change,) = optimizer.changes()
    assert change.indices is None
    assert torch.equal(change.values, values.bfloat16())


def test_parameters_without_memory_have_no_changes() -> None:
    optimizer, _, _ = _tied()
    optimizer.add_param_group({"params": {"meta": nn.Parameter(torch.empty(3, device="meta"))}})
    assert optimizer.changes() == []


def test_a_write_through_data_is_not_seen() -> None:
    optimizer, param, _ = _tied()
    param.data.zero_()
    assert optimizer.changes() == []


def test_weights_shown_as_an_average_are_written_by_others_than_a_step() -> None:
    optimizer, _, expected = _tied(co.AdamWScheduleFree)
    expected.around(optimizer.step)
    expected.check(optimizer.changes())
    optimizer.eval()
    (change,) = optimizer.changes()
    assert change.indices is None


@dataclass
class _Way:
    """One way to take steps."""

    name: str
    step: Callable[[CompiledOptimizer], Callable[[], object]]
    options: dict[str, Any] = field(default_factory=dict)


def _compiled(backend: str) -> Callable[[CompiledOptimizer], Callable[[], object]]:
    return lambda optimizer: torch.compile(optimizer.step, backend=backend)


WAYS = [
    _Way("called", lambda optimizer: optimizer.step),
    _Way("compiled by eager", _compiled("eager")),
    _Way("compiled by aot_eager", _compiled("aot_eager")),
    _Way("compiled", _compiled("inductor")),
    _Way("compiled, lowered to lists", _compiled("inductor"), {"lowering": "inductor"}),
    _Way("compiled, eager", _compiled("aot_eager"), {"lowering": "eager"}),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_way_to_take_a_step_is_tracked(way: _Way) -> None:
    """Compiled code counts up versions of parameters after the operator, when no Python of the package runs."""
    torch._dynamo.reset()
    params = {"a": nn.Parameter(torch.linspace(-1, 1, 999)), "b": nn.Parameter(torch.linspace(-3, 1, 40).view(8, 5))}
    optimizer = co.AdamW(params, lr=1e-4, **way.options)
    optimizer.track_changes()
    step, expected = way.step(optimizer), Expected(params)
    for index in range(8):
        for name, param in params.items():
            param.grad = torch.full_like(param, 1.0 + index) if name == "a" or index not in (2, 3) else None
        expected.around(step)
        if index in (1, 2, 6):
            expected.check(optimizer.changes())
        if index == 4:
            with torch.no_grad():
                params["b"].mul_(2)
            expected.changed["b"].fill_(True)
    expected.check(optimizer.changes())


@pytest.mark.parametrize("kind", [co.AdamW, co.Muon])
def test_steps_in_backward_are_tracked(kind: type[CompiledOptimizer]) -> None:
    model = nn.Sequential(nn.Linear(8, 33, bias=False), nn.Linear(33, 5, bias=False))
    optimizer = kind(model.named_parameters(), lr=1e-4)
    optimizer.track_changes()
    co.prepare_for_gradient_release(model, optimizer)
    expected = Expected(dict(model.named_parameters()))
    for _ in range(3):
        expected.around(lambda: (model(torch.ones(2, 8)).square().mean().backward(), optimizer.step()))
    expected.check(optimizer.changes())


def test_differentiable_steps_are_tracked() -> None:
    start = torch.linspace(-1, 1, 96, requires_grad=True)
    param = start.clone()
    optimizer = co.SGD({"w": param}, lr=1e-4, differentiable=True)
    optimizer.track_changes()
    param.grad = torch.linspace(0, 1, 96)
    expected = Expected({"w": param})
    expected.around(optimizer.step)
    expected.check(optimizer.changes())
    param.sum().backward()
    assert start.grad is not None


@pytest.mark.parametrize("kind", [co.AdamW, co.Muon])
def test_replays_are_tracked(kind: type[CompiledOptimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_device.simulated_device(monkeypatch):
        params = {"w": nn.Parameter(torch.linspace(-1, 1, 96).view(8, 12)), "v": nn.Parameter(torch.ones(4, 4))}
        optimizer = kind(params, lr=1e-4)
        optimizer.track_changes()
        runner = co.CUDAGraphRunner(optimizer)
        expected = Expected(params)
        for index in range(8):
            for param in params.values():
                param.grad = torch.linspace(1, 1.0 + index, param.numel()).view_as(param)
            expected.around(runner.step)
            if index == 5:
                params["v"].detach().mul_(2)
                expected.changed["v"].fill_(True)
            if index in (2, 4):
                expected.check(optimizer.changes())
        expected.check(optimizer.changes())
        assert co.compile_report(optimizer).replays


REFUSED: dict[str, tuple[Callable[[], CompiledOptimizer], torch.dtype, type[Exception], str]] = {
    "another 16-bit dtype": (
        lambda: co.AdamW({"w": nn.Parameter(torch.ones(2, dtype=torch.float16))}),
        torch.bfloat16,
        ValueError,
        "changes of 'w' cannot be tracked: weights in torch.float16 can be served in one of torch.float32, torch.float16",
    ),
    "no dtype of weights": (
        lambda: co.AdamW({"w": nn.Parameter(torch.ones(2))}),
        torch.int8,
        ValueError,
        "changes of 'w' cannot be tracked: weights in torch.float32 can be served in one of .*got torch.int8",
    ),
    "complex": (
        lambda: co.AdamW({"w": nn.Parameter(torch.ones(2, dtype=torch.complex64))}),
        torch.float32,
        ValueError,
        "changes of 'w' cannot be tracked: complex numbers are served in no dtype of real ones",
    ),
    "a closure": (
        lambda: co.LBFGS([nn.Parameter(torch.ones(2))]),
        torch.float32,
        NotImplementedError,
        "LBFGS cannot track changes: its steps need a closure",
    ),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_tracked_is_refused_by_name(
    refused: tuple[Callable[[], CompiledOptimizer], torch.dtype, type[Exception], str],
) -> None:
    make, dtype, error, words = refused
    optimizer = make()
    with pytest.raises(error, match=words):
        optimizer.track_changes(dtype)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    optimizer.step(lambda: param.abs().sum())  # as before
    with pytest.raises(RuntimeError, match=r"changes\(\) returns what steps noted since track_changes\(\)"):
        optimizer.changes()


def test_a_group_that_cannot_be_tracked_is_refused_and_the_others_stay_tracked() -> None:
    optimizer, _, expected = _tied()
    with pytest.raises(ValueError, match="changes of 'half' cannot be tracked"):
        optimizer.add_param_group({"params": {"half": nn.Parameter(torch.ones(2, dtype=torch.float16))}})
    expected.around(optimizer.step)
    expected.check(optimizer.changes())


def test_tracking_ends() -> None:
    optimizer, _, _ = _tied()
    optimizer.track_changes(None)
    optimizer.step()
    with pytest.raises(RuntimeError, match="was not called"):
        optimizer.changes()


def test_parameters_that_share_memory_see_the_updates_of_each_other() -> None:
    memory = torch.linspace(-1, 1, 200)
    params = {"a": nn.Parameter(memory[:150]), "b": nn.Parameter(memory[50:])}
    with pytest.warns(RuntimeWarning, match="share memory"):
        optimizer = co.AdamW(params, lr=1e-3)
    optimizer.track_changes()
    for param in params.values():
        param.grad = torch.ones_like(param)
    expected = Expected(params)
    expected.around(optimizer.step)
    expected.check(optimizer.changes())


def _left_and_returned(optimizer: CompiledOptimizer, model: nn.Module) -> set[str]:
    group = optimizer.param_groups.pop()
    optimizer.step()
    optimizer.param_groups.append(group)
    return {"a.bias"}


def _added(optimizer: CompiledOptimizer, model: nn.Module) -> set[str]:
    optimizer.add_param_group({"params": {"new": nn.Parameter(torch.ones(96))}})
    return {"new"}


def _frozen_and_loaded(optimizer: CompiledOptimizer, model: nn.Module) -> set[str]:
    model.a.bias.requires_grad_(False).copy_(torch.ones(4))
    return {"a.bias"}


def _without_gradient(optimizer: CompiledOptimizer, model: nn.Module) -> set[str]:
    model.a.bias.grad = None
    optimizer.step()
    with torch.no_grad():
        model.a.bias.zero_()
    return {"a.bias"}


def _got_memory(optimizer: CompiledOptimizer, model: nn.Module) -> set[str]:
    torch.utils.swap_tensors(model.meta, nn.Parameter(torch.ones(96)))
    return {"meta"}


def _initialized(optimizer: CompiledOptimizer, model: nn.Module) -> set[str]:
    model.lazy(torch.ones(1, 5))
    return {"lazy.weight", "lazy.bias"}


@pytest.mark.parametrize(
    "act",
    [_left_and_returned, _added, _frozen_and_loaded, _without_gradient, _got_memory, _initialized],
    ids=lambda f: f.__name__,
)
def test_parameters_that_no_step_updates_or_that_come_later_are_seen(
    act: Callable[[CompiledOptimizer, nn.Module], set[str]],
) -> None:
    model = nn.Module()
    model.a, model.lazy = nn.Linear(8, 4), nn.LazyLinear(3)
    model.meta = nn.Parameter(torch.empty(96, device="meta"))
    named = dict(model.named_parameters())
    bias = {"a.bias": named.pop("a.bias")}
    optimizer = co.AdamW([{"params": named}, {"params": bias}], lr=1e-4)
    optimizer.track_changes(torch.float32)
    for param in model.a.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.changes()
    for param in model.a.parameters():
        param.grad = None
    names = act(optimizer, model)
    changes = {change.name: change for change in optimizer.changes()}
    assert changes.keys() == names
    assert all(change.indices is None for change in changes.values())
    assert optimizer.changes() == []


@pytest.mark.filterwarnings("ignore:two parameters are named:UserWarning")
def test_parameters_of_one_name_are_told_apart() -> None:
    first, second = (nn.Parameter(torch.ones(shape)) for shape in (4, 5))
    optimizer = co.AdamW([{"params": [("w", first)]}, {"params": [("w", second)]}], lr=0.1)
    optimizer.track_changes()
    first.grad = torch.ones(4)
    optimizer.step()
    (change,) = optimizer.changes()
    assert change.full_shape == (4,)


def test_compiled_code_follows_when_tracking_begins() -> None:
    torch._dynamo.reset()
    param = nn.Parameter(torch.ones(64))
    optimizer = co.SGD({"w": param}, lr=0.5)
    step = torch.compile(optimizer.step, backend="aot_eager")
    param.grad = (torch.arange(64) == 3).float()
    step()
    optimizer.track_changes()
    for _ in range(3):
        step()
        (change,) = optimizer.changes()
        assert change.indices is not None
        assert change.indices.tolist() == [3]


def test_one_compiled_function_takes_steps_of_different_parameters() -> None:
    torch._dynamo.reset()
    params = {name: nn.Parameter(torch.ones(64)) for name in ("a", "b")}
    optimizer = co.SGD(params, lr=0.5)
    optimizer.track_changes()

    @torch.compile(backend="aot_eager")
    def steps(grad: Tensor) -> None:
        params["a"].grad, params["b"].grad = grad, None
        optimizer.step()
        params["b"].grad = grad
        optimizer.step()

    for _ in range(2):
        steps((torch.arange(64) == 3).float())
        assert {change.name for change in optimizer.changes()} == {"a", "b"}


@pytest.mark.parametrize("where", ["compare", "copies"])
def test_a_comparison_that_is_interrupted_loses_no_change(where: str) -> None:
    """All elements are then changed, since nobody knows which."""
    param = nn.Parameter(torch.ones(8, 8))
    optimizer = co.Muon({"w": param}, lr=1e-2)
    optimizer.track_changes()
    param.grad = torch.eye(8)
    optimizer.step()
    optimizer.changes()
    with mock.patch.object(Comparison, where, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    (change,) = optimizer.changes()
    assert change.indices is None
    assert optimizer.changes() == []


def test_changes_that_are_interrupted_are_handed_over_by_the_next_call() -> None:
    optimizer, _, _ = _tied()
    optimizer.step()
    with mock.patch.object(OutputMemory, "note_step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.changes()
    assert [change.name for change in optimizer.changes()] == ["w"]


def test_tracking_that_is_interrupted_at_its_begin_has_not_begun() -> None:
    param = nn.Parameter(torch.ones(96))
    optimizer = co.AdamW({"w": param})
    with mock.patch.object(OutputMemory, "follow", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.track_changes()
    param.grad = torch.ones(96)
    optimizer.step()
    with pytest.raises(RuntimeError, match="was not called"):
        optimizer.changes()


def test_steps_go_on_after_an_interrupt_while_groups_change() -> None:
    optimizer, _, expected = _tied()
    group = {"params": {"new": nn.Parameter(torch.ones(96))}}
    with mock.patch.object(OutputMemory, "note_step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.add_param_group(group)
    expected.around(optimizer.step)
    changes = {change.name: change for change in optimizer.changes()}
    expected.check([changes["w"]])
