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
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
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
        (True, 1),
        (math.pi, math.pi),
        (5e-324, 5e-324),
    ],
    ids=["float64", "float32", "float16", "int64", "0-dim array", "bool", "pi", "denormal"],
)
@pytest.mark.parametrize("place", ["constructor", "assigned"])
def test_a_number_of_any_kind_is_read_as_one_of_python(place: str, given: Any, read: float) -> None:
    optimizer = made(lr=given if place == "constructor" else 0.7)
    if place == "assigned":
        optimizer.param_groups[0]["lr"] = given
    assert typed(optimizer.param_groups[0]["lr"]) == typed(read)
    assert live(optimizer) == read


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([[[0.3]]]),
        torch.tensor(1),
        torch.tensor(0.3, dtype=torch.bfloat16),
        Parameter(torch.tensor(0.3), requires_grad=False),
    ],
    ids=["three dimensions", "int64", "bfloat16", "parameter"],
)
@pytest.mark.parametrize("place", ["constructor", "assigned"])
def test_a_tensor_of_any_kind_is_read_as_a_scalar(place: str, given: Tensor) -> None:
    optimizer = made(lr=given if place == "constructor" else 0.7)
    if place == "assigned":
        optimizer.param_groups[0]["lr"] = given
    read = optimizer.param_groups[0]["lr"]
    assert isinstance(read, Tensor)
    assert (read.shape, read.item(), live(optimizer)) == ((), given.item(), given.item())


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


def test_a_later_group_takes_a_default_that_was_changed() -> None:
    rates = []
    for optim in (co, torch.optim):
        optimizer = optim.SGD([Parameter(torch.ones(3))], lr=torch.tensor(0.5))
        optimizer.defaults["lr"] = 0.125
        optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
        rates.append(float(optimizer.param_groups[1]["lr"]))
    assert rates == [0.125, 0.125]


@pytest.mark.parametrize("number", [0.003, 0.25])
def test_a_loaded_number_is_the_checkpoints(number: float) -> None:
    """The group gets a tensor of its own where the user's, in float32, cannot hold it; else what holds the tensor stays."""
    given = torch.tensor(0.5)
    optimizer = co.AdamW([Parameter(torch.ones(2))], lr=given)
    before = optimizer.hyperparameter("lr")
    saved = co.AdamW([Parameter(torch.ones(2))], lr=number).state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == number
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.state_dict()["param_groups"][0]["lr"] == number
    assert (optimizer.hyperparameter("lr") is before) == (number == 0.25)
    assert given == (0.5 if number == 0.003 else number)
