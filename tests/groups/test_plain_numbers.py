"""What is given is what is read: a group holds plain numbers, as torch.optim's does, over live tensors that steps read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from group_idioms import IDIOMS, outcome
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch_schedulers import typed

import compiled_optim as co

pytestmark = pytest.mark.usefixtures("one_thread")

DIFFERS = {
    "keys in order": "options follow in the order of the class's declaration",
    "class": "isinstance(opt, torch.optim.AdamW) is False",
    "entries before a step": "state exists from construction",
    "repr": "it also says on which device and in which dtype numbers are stored",
}
"""The idioms whose outcome is not torch.optim's, each in the documentation. At most six."""


def made(cls: type[Optimizer] = co.AdamW, /, **options: Any) -> Optimizer:
    """An optimizer of one parameter, which has a gradient."""
    param = Parameter(torch.ones(2, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    return cls([param], **{"lr": 0.05, **options})


def live(optimizer: Any, key: str = "lr", group: int = 0) -> Any:
    """What steps read, as numbers."""
    held = optimizer.hyperparameter(key, group)
    return tuple(t.item() for t in held) if isinstance(held, tuple) else held.item()


def test_there_are_106_idioms_of_which_at_most_six_differ() -> None:
    assert len(IDIOMS) == 106
    assert DIFFERS.keys() <= IDIOMS.keys()
    assert len(DIFFERS) <= 6


@pytest.mark.parametrize("name", [name for name in IDIOMS if name not in DIFFERS])
def test_an_idiom_does_what_it_does_with_torch(name: str) -> None:
    expected = outcome(IDIOMS[name], made(torch.optim.AdamW))
    assert not isinstance(expected, type), "it raises with torch.optim"
    assert outcome(IDIOMS[name], made()) == expected


@pytest.mark.parametrize("name", DIFFERS)
def test_an_idiom_that_differs(name: str) -> None:
    assert outcome(IDIOMS[name], made()) != outcome(IDIOMS[name], made(torch.optim.AdamW))


def test_repr_says_once_how_numbers_are_stored() -> None:
    shown = repr(co.AdamW([{"params": [Parameter(torch.ones(2))]} for _ in range(3)], lr=0.05))
    assert shown.count("lr: 0.05\n") == 3
    assert shown.count("betas: (0.9, 0.999)\n") == 3
    assert shown.count("float64") == shown.count("cpu") == 1
    assert shown.startswith("AdamW (multi_tensor lowering, numbers are float64 scalars on cpu\n")
    assert repr(co.LBFGS([Parameter(torch.ones(2))])).startswith("LBFGS (eager lowering, ")


WRITES: dict[str, Callable[[Any], object]] = {
    "assigned": lambda o: o.param_groups[0].__setitem__("lr", 0.5),
    "updated": lambda o: o.param_groups[0].update({"lr": 0.5}, betas=(0.5, 0.6)),
    "or": lambda o: o.param_groups[0].__ior__({"lr": 0.5}),
    "a tensor": lambda o: o.param_groups[0].update(lr=torch.tensor(0.5)),
    "the live tensor": lambda o: (o.hyperparameter("lr").fill_(0.5), o.hyperparameter("betas")[0].fill_(0.5)),
    "a scheduler": lambda o: (ExponentialLR(o, 0.5), o.step())[0].step(),
    "a checkpoint": lambda o: o.load_state_dict(made(lr=0.5, betas=(0.5, 0.6)).state_dict()),
    "a schedule": lambda o: (o.schedule(lr=lambda step: 0.5 * step), o.step()),
}
writes = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


@writes
def test_nobodys_later_write_changes_what_was_read(write: Callable[[Any], object]) -> None:
    optimizer = made()
    group = optimizer.param_groups[0]
    lr, betas, snapshot = group["lr"], group["betas"], {k: v for k, v in group.items() if k != "params"}
    before = typed([lr, betas, *snapshot.values()])
    assert before[1][0] == (float, 0.05)
    write(optimizer)
    assert typed([lr, betas, *snapshot.values()]) == before


@writes
def test_a_write_is_read_and_is_live_at_once(write: Callable[[Any], object]) -> None:
    optimizer = made()
    address = optimizer.hyperparameter("lr").data_ptr()
    write(optimizer)
    read = optimizer.param_groups[0]["lr"]
    assert float(read) == live(optimizer) != 0.05
    assert tuple(map(float, optimizer.param_groups[0]["betas"])) == live(optimizer, "betas")
    assert optimizer.hyperparameter("lr").data_ptr() == address
    assert (optimizer.hyperparameter("lr").shape, optimizer.hyperparameter("lr").dtype) == ((), torch.float64)


@pytest.mark.parametrize(
    "fill",
    [
        lambda t, v: t.fill_(v),
        lambda t, v: t.copy_(torch.tensor(v, dtype=t.dtype)),
        lambda t, v: t.zero_().add_(v),
        lambda t, v: torch._foreach_copy_([t], [torch.tensor(v, dtype=t.dtype)]),
        lambda t, v: torch.full((), v, out=t),
    ],
    ids=["fill_", "copy_", "add_", "foreach", "out"],
)
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
def test_the_next_read_sees_what_filled_the_live_tensor(fill: Callable[[Tensor, float], object], stepped: bool) -> None:
    optimizer = made()
    group = optimizer.param_groups[0]
    if stepped:
        optimizer.step()
    for number in (0.25, 0.1, 0.1, 0.7):
        fill(optimizer.hyperparameter("lr"), number)
        fill(optimizer.hyperparameter("betas")[1], number)
        fill(optimizer.hyperparameter("eps"), number)
        assert typed(group["lr"]) == typed(dict(group)["lr"]) == typed(number)
        assert typed(group["betas"]) == typed((0.9, number))
        assert typed(dict(group.items())["eps"]) == typed(number)
        assert optimizer.state_dict()["param_groups"][0]["lr"] == number
    group["lr"] = 0.5
    assert typed(group["lr"]) == typed(live(optimizer)) == typed(0.5)
    group["lr"] *= 0.5
    assert live(optimizer) == 0.25


def test_a_scheduler_goes_on_from_what_filled_the_live_tensor() -> None:
    optimizer = made()
    scheduler = StepLR(optimizer, 1, 0.5)
    optimizer.hyperparameter("lr").fill_(0.8)
    optimizer.step()
    scheduler.step()
    assert typed(optimizer.param_groups[0]["lr"]) == typed(0.4)
    assert scheduler.get_last_lr() == [0.4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("place", ["constructor", "group", "added"])
def test_a_tensor_that_was_given_is_read_itself(place: str, dtype: torch.dtype) -> None:
    rate = torch.tensor(0.5, dtype=dtype)
    if place == "constructor":
        optimizer = made(lr=rate)
    elif place == "group":
        optimizer = co.AdamW([{"params": [Parameter(torch.ones(2))], "lr": rate}])
    else:
        optimizer = made()
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "lr": rate})
    group, index = optimizer.param_groups[-1], len(optimizer.param_groups) - 1
    assert group["lr"] is group.get("lr") is dict(group)["lr"] is optimizer.hyperparameter("lr", index) is rate
    rate.fill_(0.25)
    assert group["lr"] is rate
    group["lr"] *= 0.5
    assert group["lr"] is rate
    assert rate.item() == 0.125
    group["lr"] = 0.75
    assert typed(group["lr"]) == typed(0.75)
    assert rate.item() == 0.125
    rate.fill_(3.0)
    assert group["lr"] == live(optimizer, "lr", index) == 0.75


def test_a_scheduler_fills_a_tensor_that_was_given() -> None:
    rates = []
    for cls in (co.AdamW, torch.optim.AdamW):
        rate = torch.tensor(0.5, dtype=torch.float64)
        optimizer = made(cls, lr=rate, **({"capturable": False, "foreach": False} if cls is torch.optim.AdamW else {}))
        scheduler = ExponentialLR(optimizer, 0.5)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] is rate
        rates.append(rate.item())
    assert rates == [0.0625, 0.0625]


def test_betas_are_a_tuple_of_what_was_given() -> None:
    beta = torch.tensor(0.5, dtype=torch.float64)
    first, second = made(betas=(beta, 0.75)).param_groups[0]["betas"]
    assert first is beta
    assert typed(second) == typed(0.75)
    for given in ([0.5, 0.75], (np.float32(0.5), np.float64(0.75))):
        group = made(betas=given).param_groups[0]
        assert typed(group["betas"]) == typed((0.5, 0.75))
        group["betas"] = [0.25, 0.5]
        assert typed(group["betas"]) == typed((0.25, 0.5))


@pytest.mark.parametrize("cls", [co.AdamW, co.SGD], ids=lambda c: c.__name__)
def test_an_int_stays_one_as_in_torch(cls: type[Optimizer]) -> None:
    sides = []
    for of in (cls, getattr(torch.optim, cls.__name__)):
        optimizer = made(of, lr=1, weight_decay=0)
        group = optimizer.param_groups[0]
        seen = [group["lr"], group["weight_decay"]]
        group.update(lr=2, weight_decay=1)
        seen += [group["lr"], group["weight_decay"], group["lr"] // 2, f"{group['lr']:d}"]
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "lr": 3})
        scheduler = ExponentialLR(optimizer, 0.5)
        optimizer.step()
        seen += [optimizer.param_groups[1]["lr"]]
        scheduler.step()
        sides.append(typed([*seen, group["lr"], optimizer.param_groups[1]["initial_lr"]]))
    assert sides[0] == sides[1]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (np.float64(0.3), 0.3),
        (np.float32(0.3), float(np.float32(0.3))),
        (np.float16(0.3), float(np.float16(0.3))),
        (np.int64(1), 1),
        (np.array(0.3), 0.3),
        (math.pi, math.pi),
        (5e-324, 5e-324),
    ],
    ids=["float64", "float32", "float16", "int64", "0-dim array", "pi", "denormal"],
)
@pytest.mark.parametrize("place", ["constructor", "assigned"])
def test_a_number_of_any_kind_is_read_as_one_of_python(place: str, given: Any, read: float) -> None:
    optimizer = made(lr=given if place == "constructor" else 0.7)
    if place == "assigned":
        optimizer.param_groups[0]["lr"] = given
    assert typed(optimizer.param_groups[0]["lr"]) == typed(read)
    assert live(optimizer) == read


def test_options_stay_what_they_are() -> None:
    options = {"amsgrad": True, "maximize": True, "foreach": False, "capturable": False, "differentiable": False}
    groups = []
    for cls in (co.AdamW, torch.optim.AdamW):
        optimizer = made(cls, **options)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["maximize"] = False
        groups.append({k: typed(v) for k, v in optimizer.param_groups[0].items() if k != "params"})
    assert groups[0] == groups[1]


READS: dict[str, Callable[[Any, Any], Any]] = {
    "a kept group": lambda optimizer, group: group["lr"],
    "through the optimizer": lambda optimizer, group: optimizer.param_groups[0]["lr"],
    "get": lambda optimizer, group: group.get("lr"),
    "items": lambda optimizer, group: dict(group.items())["lr"],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_compiled_code_reads_is_never_frozen(read: Callable[[Any, Any], Any]) -> None:
    torch._dynamo.reset()
    optimizer: Any = made()
    group = optimizer.param_groups[0]
    function = torch.compile(lambda x: x * read(optimizer, group), backend="eager")
    one = torch.ones((), dtype=torch.float64)
    for number in (0.5, 0.25, 0.3, 0.7, 0.9):
        group["lr"] = number
        assert function(one).item() == number
    optimizer.hyperparameter("lr").fill_(0.125)
    assert function(one).item() == 0.125
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: x * read(optimizer, group), backend="eager", fullgraph=True)(one)


def test_compiled_code_reads_the_live_tensor() -> None:
    torch._dynamo.reset()
    optimizer: Any = made()
    counter = CompileCounter()
    function = torch.compile(lambda x: x * optimizer.hyperparameter("lr"), backend=counter, fullgraph=True)
    for number in (0.5, 0.25, 0.3, 0.7, 0.9):
        optimizer.param_groups[0]["lr"] = number
        assert function(torch.ones((), dtype=torch.float64)).item() == number
    assert counter.frame_count == 1


def test_a_tensor_that_compiled_code_returned_is_followed() -> None:
    torch._dynamo.reset()
    optimizer: Any = made()
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.05
    torch.compile(lambda: optimizer.hyperparameter("lr"), backend="eager")().fill_(0.25)
    assert group["lr"] == 0.25


def test_what_a_schedule_drives_is_read_as_a_copy() -> None:
    optimizer: Any = made()
    group = optimizer.param_groups[0]
    optimizer.schedule(lr=lambda step: 0.5 / step)
    optimizer.step()
    read = group["lr"]
    assert isinstance(read, Tensor)
    assert (read.shape, read.item(), read.requires_grad) == ((), 0.5, False)
    assert read.data_ptr() != optimizer.hyperparameter("lr").data_ptr()
    read.fill_(7.0)
    with pytest.warns(UserWarning, match=r"opt\.schedule\(lr=None\) ends that schedule"):
        assert group["lr"].item() == live(optimizer) == 0.5
    optimizer.step()
    assert (read.item(), group["lr"].item()) == (7.0, 0.25)
    assert typed(group["eps"]) == typed(1e-8)
    optimizer.schedule(lr=None)
    assert typed(group["lr"]) == typed(0.25)


@pytest.mark.parametrize("value", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_a_write_past_the_group_is_noticed_by_a_read(value: Any) -> None:
    optimizer: Any = made()
    group, before = optimizer.param_groups[0], optimizer.hyperparameter("lr")
    dict.__setitem__(group, "lr", value)
    assert group["lr"] == 0.25
    assert optimizer.hyperparameter("lr") is before
    assert before == 0.25


def test_a_write_to_a_copy_warns_in_the_next_step() -> None:
    optimizer: Any = made()
    optimizer.schedule(lr=lambda step: 0.5 / step)
    optimizer.step()
    optimizer.param_groups[0]["lr"].mul_(2)
    with pytest.warns(UserWarning, match=r"opt\.schedule\(lr=None\) ends that schedule"):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize(
    "write",
    [
        lambda o, scheduler: o.param_groups[0].__setitem__("lr", 0.1),
        lambda o, scheduler: o.param_groups[0].update(lr=0.1),
        lambda o, scheduler: scheduler.step(),
    ],
    ids=["assigned", "updated", "a scheduler"],
)
def test_a_write_that_a_schedule_overrides_warns(write: Callable[[Any, Any], object]) -> None:
    optimizer: Any = made()
    scheduler = ExponentialLR(optimizer, 0.5)
    optimizer.schedule(lr=lambda step: 0.5 / step)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"schedule\(lr=None\)"):
        write(optimizer, scheduler)
    optimizer.step()
    assert live(optimizer) == 0.25
