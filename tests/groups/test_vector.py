"""A group's numbers are one vector on the device: of one address, and told apart where other code may write one of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import LOWERINGS
from interruptions import Interruption
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.memory import torch_internals

NAMES = [name for name in co.list_optimizers() if not name.startswith("mup.") and name not in ("lbfgs", "muon_adamw")]


def made(cls: Any = co.SGD, **options: Any) -> Any:
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    weight.grad = torch.tensor([0.5, 0.25], dtype=torch.float64)
    return cls([("weight", weight)], **{"lr": 0.25} | options)


def live(optimizer: Any, group: int = 0) -> list[Tensor]:
    names = [hyper.name for hyper in type(optimizer)._declaration.hypers]
    shown = [optimizer.hyperparameter(name, group) for name in names if name in optimizer.param_groups[group]]
    return [tensor for each in shown for tensor in (each if isinstance(each, tuple) else (each,))]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_elements_of_one_vector_for_life(name: str) -> None:
    cls = co.optimizer_info(name).cls
    matrix = cls.__name__ in ("Muon", "NorMuon")
    weight = nn.Parameter(torch.ones(2, 2) if matrix else torch.ones(4))
    weight.grad = torch.ones_like(weight)
    if cls is co.SparseAdam:
        weight.grad = weight.grad.to_sparse()
    optimizer = cls([("weight", weight)], lr=0.25)
    tensors = live(optimizer)
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert {(tensor.dtype, tensor.shape) for tensor in tensors} == {(torch.float64, ())}
    assert len({*addresses}) == len(addresses)
    assert tensors[0].untyped_storage().data_ptr() % 16 == 0
    group = optimizer.param_groups[0]
    group["lr"] = 0.125
    group["lr"] = torch.tensor(0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    group["lr"] = 0.0625
    assert [id(tensor) for tensor in live(optimizer)] == [id(tensor) for tensor in tensors]
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert optimizer.hyperparameter("lr").item() == 0.0625


WRITES: dict[str, Callable[[Any], object]] = {
    "assigned": lambda o: o.param_groups[0].update(lr=0.125),
    "a tensor": lambda o: o.param_groups[0].update(lr=torch.tensor(0.125)),
    "another number": lambda o: o.param_groups[0].update(weight_decay=0.125),
    "filled": lambda o: o.hyperparameter("lr").fill_(0.125),
    "loaded": lambda o: o.load_state_dict(o.state_dict()),
    "scheduled": lambda o: (o.schedule(lr=lambda step: 0.125 * step), o.step()),
}


@pytest.mark.parametrize("exposed", [(), ("lr",), ("momentum",), ("lr", "momentum")], ids=str)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_structural_number_stays_known_while_others_are_written(
    write: Callable[[Any], object], exposed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that the host would have to ask: without it, momentum that is 0 would get a buffer."""
    monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    optimizer = made(momentum=0.0)
    optimizer.step()
    for name in exposed:
        optimizer.hyperparameter(name)
    write(optimizer)
    if write is WRITES["filled"] and "momentum" in exposed:
        return  # other code wrote into the vector: the host cannot tell into which of its exposed elements
    built = co.compile_report(optimizer)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("waited"))
            optimizer.step()
        write(optimizer) if write is not WRITES["scheduled"] else None  # each step writes
    assert all("momentum_buffer" not in entries for entries in optimizer.state.values())
    assert co.compile_report(optimizer).table_refreshes == built.table_refreshes


def test_momentum_that_other_code_fills_gets_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    optimizer, reference = made(momentum=0.0), made(torch.optim.SGD, momentum=0.0)
    for fill in (None, 0.5, None, 0.75):
        if fill is not None:
            optimizer.hyperparameter("momentum").fill_(fill)
            optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.25 * fill
            reference.param_groups[0]["momentum"] = fill
        optimizer.step()
        reference.step()
    (ours,), (theirs,) = optimizer.param_groups[0]["params"], reference.param_groups[0]["params"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_an_exposed_number_whose_memory_is_replaced_is_followed(dtype: torch.dtype, lowering: str) -> None:
    optimizer = made(lowering=lowering)
    moved = torch.tensor(0.5, dtype=dtype)
    optimizer.hyperparameter("lr").data = moved
    (weight,) = optimizer.param_groups[0]["params"]
    for rate, wanted in ((0.5, 0.75), (0.25, 0.625)):
        moved.fill_(rate)
        optimizer.step()
        assert weight[0].item() == wanted
        assert optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize(
    "kept",
    ["all", "lr of another sign", "lr written past the group", "lr handed out and written", "memory of eps handed out"],
)
def test_a_load_writes_the_numbers_that_are_not_there(kept: str) -> None:
    optimizer = co.AdamW([nn.Parameter(torch.ones(2))], lr=0.0)
    state_dict = optimizer.state_dict()
    group, before = optimizer.param_groups[0], optimizer.param_groups[0].numbers.vector._version
    if kept == "lr of another sign":
        state_dict["param_groups"][0]["lr"] = -0.0
    elif kept == "lr written past the group":
        dict.__setitem__(group, "lr", 0.5)
    elif kept == "lr handed out and written":
        optimizer.hyperparameter("lr").fill_(0.5)
    elif kept == "memory of eps handed out":
        optimizer.hyperparameter("eps").untyped_storage().fill_(0)
    optimizer.load_state_dict(state_dict)
    wanted = state_dict["param_groups"][0]
    assert {key: repr(group[key]) for key in ("lr", "betas", "eps")} == {k: repr(wanted[k]) for k in ("lr", "betas", "eps")}
    read = [optimizer.hyperparameter(name) for name in ("lr", "betas", "eps")]
    assert repr([read[0].item(), tuple(t.item() for t in read[1]), read[2].item()]) == repr(
        [wanted[k] for k in ("lr", "betas", "eps")]
    )
    assert (group.numbers.vector._version == before) == (kept == "all")


def test_compiled_code_takes_one_vector_for_each_group() -> None:
    shapes: list[list[tuple[int, ...]]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        numbers = [t for t in inputs if isinstance(t, Tensor) and t.dtype == torch.float64 and t.dim() == 1]
        assert all(t.data_ptr() % 16 == 0 for t in numbers)
        shapes.append([tuple(t.shape) for t in numbers])
        return graph.forward

    weights = [nn.Parameter(torch.ones(2)) for _ in range(5)]
    own = torch.tensor(0.5)
    groups = [{"params": [weight]} for weight in weights[:4]] + [{"params": weights[4:], "lr": own}]
    optimizer = co.AdamW(groups, lr=0.25, weight_decay=0.0, lowering="inductor")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    compiled = torch.compile(optimizer.step, backend=backend, fullgraph=True)
    for rate in (0.25, 0.125):
        for group in optimizer.param_groups[:4]:
            group["lr"] = rate
        own.fill_(rate)
        before = [weight.detach().clone() for weight in weights]
        compiled()
        assert {round((b - w)[0].item() / rate, 3) for b, w in zip(before, weights, strict=True)} == {1.0}
    (taken,) = shapes
    count = optimizer.hyperparameter("lr").untyped_storage().nbytes() // 8
    assert [shape for shape in taken if shape == (count,)] == [(count,)] * 5


@pytest.mark.parametrize(("waits", "counted"), [(False, True), (True, True), (False, False)])
def test_a_refused_number_that_other_code_mends_is_used(waits: bool, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write through ``.data``, which no version counts, is seen on a CPU."""
    if waits:
        monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    optimizer, reference = made(momentum=0.5), made(torch.optim.SGD, momentum=0.25)
    momentum = optimizer.hyperparameter("momentum")
    optimizer.param_groups[0]["momentum"] = -0.5
    with pytest.raises(ValueError, match="momentum"):
        optimizer.step()
    (momentum if counted else momentum.data).fill_(0.25)
    for each in (optimizer, reference):
        for _ in range(2):
            each.step()
    (ours,), (theirs,) = optimizer.param_groups[0]["params"], reference.param_groups[0]["params"]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_refused_number_stays_refused_while_compiled_code_reads_it() -> None:
    """``.data =`` gives the live tensor other memory, and compiled code reads the vector."""
    optimizer = made(momentum=0.5)
    momentum = optimizer.hyperparameter("momentum")
    optimizer.param_groups[0]["momentum"] = -0.5
    momentum.data = torch.tensor(0.25, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(ValueError, match="momentum"):
            optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.25
    optimizer.step()


@pytest.mark.parametrize("waits", [False, True])
def test_a_refused_number_is_refused_where_other_code_writes_another(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vector's version tells that something was written, and not what."""
    if waits:
        monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    optimizer = made(co.AdamW)
    _, beta2 = optimizer.hyperparameter("betas")
    optimizer.hyperparameter("lr")
    for key, value in (("betas", (1.0, 0.5)), ("eps", math.nan), ("lr", math.inf)):
        before = optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = value
        for number in (0.25, 0.75):
            beta2.fill_(number)
            with pytest.raises(ValueError, match="Invalid"):
                optimizer.step()
        optimizer.param_groups[0][key] = before
        optimizer.step()


def test_a_zero_that_other_code_fills_over_a_negative_rate_is_read() -> None:
    optimizer = made()
    optimizer.param_groups[0]["lr"] = -1.0
    assert optimizer.param_groups[0]["lr"] == -1.0
    optimizer.hyperparameter("lr").fill_(0.0)
    assert [optimizer.param_groups[0]["lr"], optimizer.hyperparameters()[0]["lr"]] == [0.0, 0.0]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.0


def test_a_float32_number_of_the_user_is_computed_with_in_float64() -> None:
    found = []
    for compiles in (False, True):
        beta = torch.tensor(0.3)
        optimizer = made(co.AdamW, betas=(beta, 0.75), eps=1e-3, lowering="inductor" if compiles else "eager")
        step = torch.compile(optimizer.step, backend="eager", fullgraph=True) if compiles else optimizer.step
        for _ in range(3):
            step()
        found.append(optimizer.param_groups[0]["params"][0].detach())
    torch.testing.assert_close(*found, rtol=1e-14, atol=0)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("scheduled", "read"), [("lr", "lr"), ("lr", "momentum"), ("weight_decay", "lr")])
def test_compiled_code_reads_a_number_beside_a_schedule(scheduled: str, read: str, inside: bool) -> None:
    """The step writes the vector, and the function reads an element of it: both are inputs of one graph."""
    optimizer = made(momentum=0.5, lr=0.25, lowering="inductor")
    optimizer.schedule(**{scheduled: lambda step: 0.125 * step})
    kept = optimizer.hyperparameter(read)

    def function() -> Tensor:
        optimizer.step()
        return (optimizer.hyperparameter(read) if inside else kept) * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for count in range(1, 4):
        expected = 0.125 * count if read == scheduled else {"lr": 0.25, "momentum": 0.5}[read]
        assert compiled().item() == 2 * expected


@pytest.mark.parametrize("write", [lambda g: g.update(lr=0.125), lambda g: g.update(lr=torch.tensor(0.125))])
def test_a_tensor_that_was_passed_is_left_beside_a_schedule(write: Callable[[Any], object]) -> None:
    optimizer = made(lr=torch.tensor(0.5, dtype=torch.float64), lowering="inductor")
    optimizer.schedule(weight_decay=lambda step: 0.0 * step)
    compiled = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    (weight,) = optimizer.param_groups[0]["params"]
    compiled()
    assert weight[0].item() == 0.75
    write(optimizer.param_groups[0])
    compiled()
    assert weight[0].item() == 0.6875


def test_steps_follow_the_vector_where_a_number_that_none_reads_moves_it() -> None:
    optimizer = made(co.AdamW, lr=0.25, weight_decay=0.0)
    (weight,) = optimizer.param_groups[0]["params"]
    optimizer.step()
    optimizer.hyperparameter("max_lr").share_memory_()  # it is read with decouple_lr=True alone
    optimizer.param_groups[0]["lr"] = 0.125
    before = weight.detach().clone()
    optimizer.step()
    assert (before - weight)[0].item() == pytest.approx(0.125, rel=1e-6)


def test_what_was_fetched_is_forgotten_where_a_tensor_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    optimizer = made()
    optimizer.hyperparameter("lr").fill_(0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.param_groups[0]["lr"] = torch.tensor(0.75, dtype=torch.float64, requires_grad=True)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.75


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("passed", [False, True])
def test_an_interrupted_write_leaves_the_old_number_or_the_new(
    passed: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if waits:
        monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    for point in itertools.count():
        optimizer = made(lr=torch.tensor(0.5, dtype=torch.float64) if passed else 0.5)
        group, (weight,) = optimizer.param_groups[0], optimizer.param_groups[0]["params"]
        optimizer.step()
        before = weight.detach().clone()
        is_interrupted = Interruption(point).run(lambda group=group: group.update(lr=0.125))
        optimizer.step()
        rate = (before - weight)[0].item() / 0.5
        assert rate in (0.5, 0.125), point
        assert float(group["lr"]) == optimizer.hyperparameters()[0]["lr"] == rate, point
        if not is_interrupted:
            break
    assert point > 20
    assert rate == 0.125
