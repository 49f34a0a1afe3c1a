"""Whatever users do to the numbers of groups, in any order: what they wrote is what they read, and what the next step uses.

The model holds Python floats, and steps in naive float64 loops. It is written from what the package promises, and knows
nothing of how numbers are stored. A machine makes one optimizer, changes it in a random order, and compares.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import simulated_graph
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from simulated_graph import SimulatedGraph
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import compiled_optim as co
from compiled_optim.memory import torch_internals

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Number:
    """A number that steps read. Hyperparameters that were given one tensor share it.

    Attributes:
        value: what users read, rounded to ``dtype``.
        owner: the tensor of the user's in which it is.
        is_written: whether it was written as a number, not in place: only such a 0 of SGD's momentum needs no buffer.
        handle: what ``hyperparameter`` returned, for the rest of its life.
        is_share: whether it is below 1, as betas are.
        was_negative: whether it was filled after a negative number was written.
        was_given: whether it was in a tensor of the user's until a checkpoint was loaded or it was copied.
        seen: what was in ``handle`` last; the tensor counts writes, and ``version`` is what it counted until then.
    """

    value: float
    dtype: torch.dtype = torch.float64
    owner: Tensor | None = None
    is_written: bool = True
    handle: Tensor | None = None
    is_share: bool = False
    was_negative: bool = False
    was_given: bool = False
    seen: float | None = None
    version: int = 0

    def fill(self, value: float) -> None:
        """Follow an in-place write."""
        self.was_negative |= self.value < 0
        self.value, self.is_written = torch.tensor(value, dtype=self.dtype).item(), False


@dataclass
class Element:
    """One number of one hyperparameter of one group.

    Attributes:
        number: where it is.
        is_tensor: whether users gave a tensor last, and so read one.
        is_driven: whether a schedule in the step sets it.
    """

    number: Number
    is_tensor: bool = False
    is_driven: bool = False

    def write(self, value: Any) -> None:
        """Follow an assignment to the group: it ends what a tensor that was given has to say here."""
        if self.number.owner is not None or self.number.was_given:
            self.number = Number(0.0)
        self.number.value = as_number(value)
        self.number.is_written, self.number.was_negative = True, False
        self.is_tensor = isinstance(value, Tensor) and not self.is_driven


@dataclass
class Group:
    """A parameter group.

    Attributes:
        elements: by hyperparameter.
        others: entries that no rule declares, as schedulers make them.
        refused: hyperparameters that a checkpoint left below 0, where an assignment would be replaced by 0.
    """

    elements: dict[str, list[Element]]
    param: Tensor
    state: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    others: dict[str, Any] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def numbers(self) -> dict[str, list[float]]:
        return {key: [e.number.value for e in elements] for key, elements in self.elements.items()}


def as_number(value: Any) -> Any:
    return value.item() if isinstance(value, (Tensor, np.generic, np.ndarray)) else value


# One step of each optimizer: parameter, gradient, state, count of steps, numbers, whether momentum has a buffer.


def sgd(param: Tensor, grad: Tensor, state: dict[str, Any], t: int, h: dict[str, Any], has_buffer: bool) -> None:
    (momentum,), (dampening,) = h["momentum"], h["dampening"]
    grad = grad + h["weight_decay"][0] * param
    if has_buffer:
        share = 1 if t == 1 or momentum == 0 else 1 - dampening
        grad = state["momentum_buffer"] = momentum * state.get("momentum_buffer", 0) + share * grad
    param -= h["lr"][0] * grad


def adamw(param: Tensor, grad: Tensor, state: dict[str, Any], t: int, h: dict[str, Any], has_buffer: bool) -> None:
    (lr,), (beta1, beta2) = h["lr"], h["betas"]
    (peak,) = h.get("max_lr", [1.0])
    param *= 1 - (lr * h["weight_decay"][0] / peak if peak else 0)
    mean = state["mean"] = beta1 * state.get("mean", 0) + (1 - beta1) * grad
    square = state["square"] = beta2 * state.get("square", 0) + (1 - beta2) * grad**2
    param -= lr / (1 - beta1**t) * mean / (square.sqrt() / math.sqrt(1 - beta2**t) + h["eps"][0])


def rmsprop(param: Tensor, grad: Tensor, state: dict[str, Any], t: int, h: dict[str, Any], has_buffer: bool) -> None:
    (alpha,), (momentum,) = h["alpha"], h["momentum"]
    grad = grad + h["weight_decay"][0] * param
    square = state["square"] = alpha * state.get("square", 0) + (1 - alpha) * grad**2
    direction = grad / (square.sqrt() + h["eps"][0])
    if has_buffer:
        direction = state["momentum_buffer"] = momentum * state.get("momentum_buffer", 0) + direction
    param -= h["lr"][0] * direction


@dataclass(frozen=True)
class Kind:
    """An optimizer, the hyperparameters that it has by name with one value or more, and its step."""

    cls: type[co.CompiledOptimizer]
    step: Callable[..., None]
    start: dict[str, tuple[float, ...]]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def often(self) -> list[str]:
        """Return the hyperparameters, first those that are unlike others."""
        return sorted(self.start, key=lambda key: key not in ("betas", "momentum"))


MOMENTUM = {"lr": (0.3,), "momentum": (0.0,), "weight_decay": (0.125,)}
ADAM = {"lr": (0.3,), "betas": (0.8, 0.95), "eps": (1e-3,), "weight_decay": (0.125,)}
KINDS = {
    "SGD": Kind(co.SGD, sgd, {**MOMENTUM, "dampening": (0.25,)}),
    "AdamW": Kind(co.AdamW, adamw, ADAM),
    "AdamW with max_lr": Kind(co.AdamW, adamw, {**ADAM, "max_lr": (0.5,)}, {"decouple_lr": True}),
    "RMSprop": Kind(co.RMSprop, rmsprop, {**MOMENTUM, "alpha": (0.8,), "eps": (1e-3,)}),
}

RANGES: dict[str, tuple[Sequence[float], float, float, Sequence[float]]] = {
    "lr": ((0.0, 0, 1, 2.0), 1e-3, 2.0, (math.nan, math.inf)),
    "momentum": ((0.0, 0, 0.5), 0.1, 0.9, (-0.5, math.nan)),
    "dampening": ((0.0, 0.5), 0.0, 0.9, (math.inf,)),
    "weight_decay": ((0.0, 0, 0.5), 0.01, 0.5, (-0.25, math.nan)),
    "eps": ((0.25,), 1e-4, 0.5, (-1e-3,)),
    "alpha": ((0.0, 0.5), 0.1, 0.95, (-0.5,)),
    "betas": ((0.0, 0, 0.5), 0.1, 0.95, (1.0, -0.5)),
    "max_lr": ((0.0, 1), 0.5, 2.0, (-1.0,)),
}
"""By hyperparameter: usual values and the range of others, and values that a step refuses."""
SHARES = ("betas", "momentum", "dampening", "alpha")


def values_of(key: str) -> st.SearchStrategy[float]:
    usual, low, high, _ = RANGES[key]
    return st.one_of(st.sampled_from(usual), st.floats(low, high))


FORMS: dict[str, Callable[[float], Any]] = {
    "number": lambda v: v,
    "float": float,
    "float64 of NumPy": np.float64,
    "float32 of NumPy": np.float32,
    "array of NumPy": np.array,
    "tensor": lambda v: torch.tensor(v, dtype=torch.float64),
    "float32 tensor": lambda v: torch.tensor([v], dtype=torch.float32),
    "bfloat16 tensor": lambda v: torch.tensor([[v]], dtype=torch.bfloat16),
}


def read_and_write(group: Any, key: str, value: Any) -> None:
    """Write past the group, which notices it when it is read."""
    dict.__setitem__(group, key, value)
    assert group[key] is not None


WRITES: dict[str, Callable[[Any, str, Any], object]] = {
    "item": operator.setitem,
    "update": lambda group, key, value: group.update({key: value}),
    "keyword": lambda group, key, value: group.update(**{key: value}),
    "pairs": lambda group, key, value: group.update([(key, value)]),
    "or": lambda group, key, value: operator.ior(group, {key: value}),
    "past the group": read_and_write,
}
FILLS: dict[str, Callable[[Tensor, float], object]] = {
    "fill_": lambda t, v: t.fill_(v),
    "copy_": lambda t, v: t.copy_(torch.tensor(v, dtype=torch.float64)),
    "mul_": lambda t, v: t.fill_(1.0).mul_(v),
    "foreach": lambda t, v: torch._foreach_copy_([t], [torch.tensor(v, dtype=t.dtype).view(t.shape)]),
    "add_": lambda t, v: t.zero_().add_(v),
    "an alias": lambda t, v: t.detach().fill_(v),
}
UNCOUNTED: dict[str, Callable[[Tensor, float], object]] = {
    "data": lambda t, v: t.data.fill_(v),
    "other data": lambda t, v: setattr(t, "data", torch.full_like(t, v)),
}
"""Writes that torch does not count. Where there is a GPU, steps use them, and groups may show what was there before."""


def falling(epoch: int) -> float:
    return 1.0 - 0.375 * epoch


def rising(epoch: int) -> float:
    return 0.5 + 0.25 * epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: LambdaLR(o, rising),
    "LambdaLR below 0": lambda o: LambdaLR(o, falling),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 4, eta_min=0.01),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.7, total_steps=40),
}
SCHEDULES: dict[str, Sequence[Callable[[Any], Any]]] = {
    "lr": (lambda step: 0.5 / step, lambda step: 0.1 * step),
    "weight_decay": (lambda step: 0.3 / step,),
    "betas": (lambda step: (1 - 1 / (step + 1), 0.75),),
    "momentum": (lambda step: 0.8 / step,),
}


class Written(dict[str, Any]):
    """A group of torch.optim that notes which entries were assigned."""

    keys_written: list[str]

    def __setitem__(self, key: str, value: Any) -> None:
        self.keys_written.append(key)
        super().__setitem__(key, value)


class Machine(RuleBasedStateMachine):
    """See the module's docstring.

    Attributes:
        ways: to run a step, by name.
        waits: whether numbers wait for the next step, as they do where there is a GPU.
    """

    ways: Sequence[str] = ("called",)
    waits = False
    lowerings: Sequence[str] = ("multi_tensor", "eager")

    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()
        self.groups: list[Group] = []
        self.owned: list[Number] = []  # those of users' tensors
        self.schedules: dict[tuple[int, str], Callable[[Any], Any]] = {}
        self.schedulers: list[tuple[Any, Any]] = []  # of the optimizer, and the model's
        self.saved: list[tuple[dict[str, Any], list[Group]]] = []
        self.left: list[tuple[Any, list[Group], list[Tensor]]] = []  # optimizers of which the machine took a copy
        self.kept: list[tuple[Any, Any]] = []  # what was read, and what it was
        self.stack = ExitStack()
        self.heard = self.stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        self.time = 0
        self.run: dict[str, Any] = {}
        self.structures: dict[str, Any] = {}
        self.epoch = 0

    # What all rules use.

    @property
    def said(self) -> list[str]:
        """The warnings until now, of which :meth:`teardown` knows all that may be."""
        return [str(each.message) for each in self.heard if not issubclass(each.category, DeprecationWarning)]

    def draw_group(self, data: st.DataObject) -> tuple[int, Any, Group]:
        index = data.draw(st.integers(0, len(self.groups) - 1), "group")
        return index, self.optimizer.param_groups[index], self.groups[index]

    def draw_key(self, data: st.DataObject, of: Sequence[str] = ()) -> str:
        keys = [k for k in self.kind.start if not of or k in of]
        return data.draw(st.sampled_from([k for k in keys if k in self.keys] or keys), "key")

    def draw_value(self, data: st.DataObject, key: str) -> Any:
        form = data.draw(st.sampled_from([*FORMS]), "form")
        return FORMS[form](data.draw(values_of(key), "value"))

    def draw_entries(self, data: st.DataObject, entries: dict[str, list[Element]]) -> dict[str, Any]:
        """Return what a constructor or a new group gets, some of it in tensors, and write it into ``entries``."""
        given: dict[str, Any] = {}
        for key in self.keys:
            if not data.draw(st.booleans(), f"is {key} given"):
                continue
            elements, values = [], []
            for _ in self.kind.start[key]:
                how = data.draw(st.sampled_from(["number", "float64", "float32", "one element", "shared"]), "how")
                if how == "float32" and self.lowerings == ["inductor"]:
                    how = "float64"  # where a group leaves it, compiled code is traced once more, for the other dtype
                shared = [n for n in self.owned if self.fits(key, n)]
                if how == "number" or (how == "shared" and not shared):
                    elements.append(Element(Number(data.draw(values_of(key), "value"))))
                    values.append(elements[-1].number.value)
                    continue
                if how == "shared":
                    number = data.draw(st.sampled_from(range(len(shared))).map(shared.__getitem__), "which")
                else:
                    dtype = torch.float32 if how == "float32" else torch.float64
                    owner = torch.full((1,) if how == "one element" else (), data.draw(values_of(key), "value"), dtype=dtype)
                    number = Number(owner.item(), dtype, owner, is_written=False, is_share=key in SHARES)
                    self.owned.append(number)
                elements.append(Element(number, is_tensor=True))
                values.append(number.owner)
            entries[key] = elements
            given[key] = tuple(values) if len(values) > 1 else values[0]
        return given

    @staticmethod
    def fits(key: str, number: Number) -> bool:
        """Whether a tensor may be given for this hyperparameter too: those below 1 share none with others."""
        return number.value >= 0 and number.is_share == (key in SHARES)

    def elements(self) -> Iterator[tuple[int, str, int, Element]]:
        for index, group in enumerate(self.groups):
            for key, elements in group.elements.items():
                for i, element in enumerate(elements):
                    yield index, key, i, element

    def counts_of_structure(self) -> Any:
        """Return what changes where other parameters are updated, or with other buffers."""
        return self.epoch, len(self.groups), [*map(self.has_buffer, self.groups)]

    @contextmanager
    def nothing_compiled(self, way: str) -> Iterator[None]:
        """Refuse to compile anything unless groups, schedules or buffers changed since the last step of this way.

        A compiled step may also be traced anew for a momentum that was 0 meanwhile, or a number that was refused.
        """
        structure = self.counts_of_structure()
        is_same = structure == self.structures.get(way) and (way == "called" or "momentum" not in self.kind.start)
        with co.no_recompiles() if is_same else nullcontext():
            yield
        self.structures[way] = structure

    def has_buffer(self, group: Group) -> bool:
        """Whether momentum has a buffer: unless it is 0, and was written so as a number."""
        momentum = group.elements.get("momentum")
        return momentum is not None and (
            momentum[0].is_driven or not momentum[0].number.is_written or momentum[0].number.value != 0
        )

    def is_negative(self, group: Group) -> bool:
        """Whether the learning rate is one for which steps take 0."""
        (element,) = group.elements["lr"]
        return "lr" not in group.refused and element.number.is_written and -math.inf < element.number.value < 0

    def is_driven(self, index: int, key: str) -> bool:
        """Whether a schedule in the step sets a hyperparameter."""
        return (index, key) in self.schedules

    def is_refused(self, index: int, key: str, element: Element) -> bool:
        """Whether a step refuses a number."""
        value, group = element.number.value, self.groups[index]
        if not element.number.is_written or (key == "lr" and self.is_negative(group)):
            return False
        least, most = -math.inf if key == "dampening" else 0, 1 if key == "betas" else math.inf
        return not least <= value < most or abs(value) == math.inf

    def is_bad(self) -> bool:
        """Whether steps refuse a number."""
        return any(self.is_refused(index, key, element) for index, key, _, element in self.elements())

    def write(self, index: int, key: str, value: Any) -> None:
        """Let the model follow an assignment."""
        group = self.groups[index]
        group.refused.discard(key)
        for element, part in zip(group.elements[key], value if isinstance(value, (tuple, list)) else (value,), strict=True):
            element.write(part)

    # Rules.

    @initialize(
        data=st.data(),
        name=st.sampled_from([*KINDS]),
        count=st.integers(1, 2),
        is_read=st.booleans(),
        is_handed_out=st.booleans(),
    )
    def make(self, data: st.DataObject, name: str, count: int, is_read: bool, is_handed_out: bool) -> None:
        """Make the optimizer. A number whose live tensor was handed out is never again written as others are."""
        self.is_handed_out = is_handed_out
        self.kind, self.is_read = KINDS[name], is_read
        self.keys = data.draw(st.lists(st.sampled_from(self.kind.often), min_size=1, max_size=2, unique=True), "keys")
        self.usual: dict[str, list[Element]] = {}
        self.usual_values = self.draw_entries(data, self.usual)
        for key, start in self.kind.start.items():
            if key not in self.usual:
                self.usual[key] = [Element(Number(v)) for v in start]
                self.usual_values[key] = start if len(start) > 1 else start[0]
        groups = [self.new_group(data) for _ in range(count)]
        lowering = data.draw(st.sampled_from(self.lowerings), "lowering")
        self.optimizer: Any = self.kind.cls(groups, **self.usual_values, **self.kind.options, lowering=lowering)

    def new_group(self, data: st.DataObject) -> dict[str, Any]:
        """Return a group for the optimizer, and add it to the model."""
        own: dict[str, list[Element]] = {}
        given = self.draw_entries(data, own)
        for key, elements in self.usual.items():
            if key not in own and any(
                math.isnan(e.number.value) or (e.number.owner is not None and not any(e.number is n for n in self.owned))
                for e in elements
            ):
                value = RANGES[key][1]  # of a tensor that a checkpoint ended
                own[key] = [Element(Number(value)) for _ in elements]
                given[key] = (value,) * len(elements) if len(elements) > 1 else value
            elif key not in own:
                own[key] = [
                    Element(e.number if e.number.owner is not None else copy.copy(e.number), e.is_tensor) for e in elements
                ]
        param = torch.linspace(-1, 1 + len(self.groups), 3, dtype=torch.float64)
        self.groups.append(Group({key: own[key] for key in self.kind.start}, param.clone()))
        return {"params": [Parameter(param)], **given}

    @precondition(lambda self: len(self.groups) < 3)
    @rule(data=st.data())
    def add_group(self, data: st.DataObject) -> None:
        self.schedulers.clear()  # which know as many groups as there were
        self.optimizer.add_param_group(self.new_group(data))
        self.take_steps(data)

    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        """Write once or more, as a scheduler does, often plain numbers: then the group does less for the later ones."""
        index, group, _ = self.draw_group(data)
        is_plain = data.draw(st.booleans(), "is plain")
        key = self.kind.often[0] if is_plain and data.draw(st.booleans(), "is often") else self.draw_key(data)
        length = len(self.kind.start[key])
        how = "item" if is_plain else data.draw(st.sampled_from([*WRITES]), "how")
        make = tuple if is_plain else data.draw(st.sampled_from([tuple, list]), "type")
        for _ in range(data.draw(st.integers(1, 3), "times")):
            values = [data.draw(values_of(key), "value") if is_plain else self.draw_value(data, key) for _ in range(length)]
            value = make(values) if length > 1 else values[0]
            said = len(self.said)
            WRITES[how](group, key, value)
            self.kept += [(part, float(part)) for part in parts_of(value) if isinstance(part, Tensor)]
            if self.is_driven(index, key):
                assert "so the value that was written is lost" in " ".join(self.said[said:])
            self.write(index, key, value)
        self.take_steps(data)

    @rule(data=st.data())
    def assign_again(self, data: st.DataObject) -> None:
        """Make writes as frequent as all that may happen between them."""
        self.assign(data)

    @rule(data=st.data())
    def assign_what_was_read(self, data: st.DataObject) -> None:
        """Write what a group holds into another, or back: a tensor that was given stays the group's own."""
        source, read_from, other = self.draw_group(data)
        _, group, model = self.draw_group(data)
        key = self.draw_key(data)
        pairs = [*zip(model.elements[key], other.elements[key], strict=True)]
        if any(mine.is_driven or self.is_refused(source, key, theirs) for mine, theirs in pairs):
            return
        group[key] = value = read_from[key]
        for (mine, theirs), part in zip(pairs, parts_of(value), strict=True):
            number = mine.number
            is_own = mine is theirs or (number is theirs.number and number.owner is not None and number.owner.dim() == 0)
            if number.owner is None or not is_own:
                mine.write(part)
        model.refused.discard(key)
        self.take_steps(data)

    @rule(data=st.data())
    def assign_a_negative_rate(self, data: st.DataObject) -> None:
        index, group, model = self.draw_group(data)
        if model.elements["lr"][0].is_driven:
            return
        group["lr"] = value = data.draw(st.sampled_from([-0.25, -1e-3]), "value")
        self.write(index, "lr", value)

    @rule(data=st.data())
    def assign_what_steps_refuse(self, data: st.DataObject) -> None:
        index, group, model = self.draw_group(data)
        key = self.draw_key(data)
        if model.elements[key][0].is_driven:
            return
        self.epoch += 1
        value: Any = data.draw(st.sampled_from(RANGES[key][3]), "value")
        value = (value, 0.5) if len(self.kind.start[key]) > 1 else value
        WRITES[data.draw(st.sampled_from([*WRITES]), "how")](group, key, value)
        self.write(index, key, value)
        if data.draw(st.integers(0, 3), "is left"):
            self.step_once("called")
            group[key] = value = self.kind.start[key] if isinstance(value, tuple) else self.kind.start[key][0]
            self.write(index, key, value)

    @rule(data=st.data())
    def scale(self, data: st.DataObject) -> None:
        index, group, model = self.draw_group(data)
        key = self.draw_key(data, ("lr", "weight_decay", "eps"))
        (element,) = model.elements[key]
        if element.is_driven:
            return
        group[key] *= 0.5
        if element.is_tensor:
            element.number.fill(element.number.value * 0.5)
        else:
            self.write(index, key, element.number.value * 0.5)
        self.take_steps(data)

    @rule(data=st.data())
    def set_several(self, data: st.DataObject) -> None:
        """Write all or nothing."""
        index, group, _ = self.draw_group(data)
        values = {key: data.draw(values_of(key), key) for key in ("lr", "weight_decay")}
        with pytest.raises((TypeError, ValueError)):
            group.update(values, eps_or_alike="?", lr="fast")
        assert group.setdefault("lr", 7.0) is not None
        group.update(values)
        for key, value in values.items():
            self.write(index, key, value)

    @rule(data=st.data())
    def clear_and_update(self, data: st.DataObject) -> None:
        _, group, model = self.draw_group(data)
        if any(e.is_driven for elements in model.elements.values() for e in elements):
            return
        entries = dict(group)
        group.clear()
        group.update(entries)
        for elements in model.elements.values():
            for element in elements:
                if not element.is_tensor:
                    element.write(element.number.value)
        model.refused.clear()
        self.epoch += 1  # with new lists of parameters
        self.take_steps(data)

    @rule(data=st.data())
    def fill_in_place(self, data: st.DataObject) -> None:
        """Write to the live tensor, or to the tensor that is read since one was given."""
        index, group, model = self.draw_group(data)
        key = self.draw_key(data)
        i = data.draw(st.integers(0, len(model.elements[key]) - 1), "index")
        element, value = model.elements[key][i], float(data.draw(values_of(key), "value"))
        if element.is_driven or not (element.is_tensor or self.is_handed_out):
            return
        if element.number.was_given:
            value = torch.tensor(value).item()  # the tensor may still be the user's, in float32
        if element.is_tensor:
            read = group[key]
            target = read[i] if isinstance(read, tuple) else read
        else:
            target = self.live(index, key, i)
        ways = FILLS if self.waits or element.number.owner is not None else FILLS | UNCOUNTED
        if self.lowerings == ["inductor"]:  # whose compiled steps read the memory that was there when they were traced
            ways = {name: fill for name, fill in ways.items() if name != "other data"}
        how = data.draw(st.sampled_from([*ways]), "how")
        is_zero = how in UNCOUNTED and element.number.is_written and value == element.number.value == 0
        ways[how](target, value)
        element.number.fill(value)
        element.number.is_written = is_zero
        if how in UNCOUNTED:
            element.number.seen = None
        self.take_steps(data)

    @precondition(lambda self: self.waits and self.is_handed_out)
    @rule(data=st.data())
    def fill_without_count(self, data: st.DataObject) -> None:
        """Write where numbers wait, let a step use it, and write anew what groups may not show."""
        index, group, model = self.draw_group(data)
        key = self.draw_key(data, ("lr", "weight_decay", "eps", "dampening", "alpha"))
        (element,) = model.elements[key]
        if element.is_driven or self.is_refused(index, key, element):
            return
        value = torch.tensor(data.draw(values_of(key), "value"), dtype=torch.float32).item()
        UNCOUNTED["data"](self.live(index, key, 0), value)
        element.number.fill(value)
        element.number.seen = None
        self.step_once(data.draw(st.sampled_from(self.ways), "way"))
        group[key] = 0.25
        self.write(index, key, 0.25)

    @precondition(lambda self: self.is_handed_out and any("compiled" in way for way in self.ways))
    @rule(data=st.data())
    def read_in_compiled_code(self, data: st.DataObject) -> None:
        key = self.keys[0]
        optimizer = self.optimizer
        if "read" not in self.run:
            read = lambda x: [x * t for t in parts_of(optimizer.hyperparameter(key))]  # noqa: E731
            self.run["read"] = torch.compile(read, backend="eager", fullgraph=True)
        found = self.run["read"](torch.ones((), dtype=torch.float64))
        is_negative = key == "lr" and self.is_negative(self.groups[0])
        for part, element in zip(found, self.groups[0].elements[key], strict=True):
            assert same(part.item(), 0.0 if is_negative else element.number.value)

    def live(self, index: int, key: str, i: int) -> Tensor:
        """Return a live tensor, which is the same one for life."""
        tensors = self.optimizer.hyperparameter(key, index)
        tensor: Tensor = tensors[i] if isinstance(tensors, tuple) else tensors
        element = self.groups[index].elements[key][i]
        number = element.number
        assert tensor.shape == ()
        assert number.owner is None or number.owner.dim() or tensor is number.owner
        assert number.handle is None or number.handle is tensor or number.owner is not None or number.was_given
        number.handle = tensor
        value = tensor.item()
        assert number.seen is None or number.seen == value or element.is_driven or number.version != tensor._version
        number.seen, number.version = None if element.is_driven else value, tensor._version
        return tensor

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def fill_own_tensor(self, data: st.DataObject) -> None:
        number = self.owned[data.draw(st.integers(0, len(self.owned) - 1), "tensor")]
        FILLS[data.draw(st.sampled_from([*FILLS]), "how")](number.owner, value := data.draw(st.floats(0.01, 0.9), "value"))
        number.fill(value)
        self.take_steps(data)

    @precondition(lambda self: len(self.schedulers) < 2)
    @rule(name=st.sampled_from([*SCHEDULERS]))
    def make_scheduler(self, name: str) -> None:
        if name == "OneCycleLR" and not {"momentum", "betas"} & self.kind.start.keys():
            return
        self.schedulers.append((None, None))
        mine = SCHEDULERS[name](self.optimizer)
        with self.followed() as twin:
            theirs = SCHEDULERS[name](twin)
        self.schedulers[-1] = mine, theirs

    @precondition(lambda self: self.schedulers)
    @rule(data=st.data())
    def step_scheduler(self, data: st.DataObject) -> None:
        mine, theirs = self.schedulers[data.draw(st.integers(0, len(self.schedulers) - 1), "scheduler")]
        mine.step()
        with self.followed(theirs.optimizer):
            theirs.step()
        for index, model in enumerate(self.groups):
            (rate,) = model.elements["lr"]
            if rate.is_tensor and rate.number.value < 0:  # only numbers are replaced by 0
                self.optimizer.param_groups[index]["lr"] = 0.25
                self.write(index, "lr", 0.25)
        self.take_steps(data)

    @contextmanager
    def followed(self, twin: Any = None) -> Iterator[Any]:
        """Let a scheduler of the model's work on groups as torch.optim has them, and follow what it does there."""
        if twin is None:
            twin = torch.optim.SGD([torch.zeros(())], lr=1.0)
            twin.defaults = dict.fromkeys(self.kind.start)
        tensors: dict[int, Tensor] = {}
        shown: list[dict[str, list[Any]]] = []
        twin.param_groups = []
        for group in self.groups:
            entries = Written(group.others)
            entries.keys_written = []
            shown.append({})
            for key, elements in group.elements.items():
                parts: list[Any] = []
                for e in elements:
                    part: Any = e.number.value
                    if e.is_driven:
                        part = torch.tensor(part, dtype=torch.float64)
                    elif e.is_tensor:
                        part = tensors.setdefault(id(e.number), torch.tensor(part, dtype=e.number.dtype))
                    parts.append(part)
                shown[-1][key] = parts
                dict.__setitem__(entries, key, tuple(parts) if len(parts) > 1 else parts[0])
            twin.param_groups.append(entries)
        before = {at: tensor.item() for at, tensor in tensors.items()}
        yield twin
        for index, (group, entries) in enumerate(zip(self.groups, twin.param_groups, strict=True)):
            for elements in group.elements.values():
                for e in elements:
                    tensor = tensors.get(id(e.number))
                    if e.is_tensor and tensor is not None and tensor.item() != before[id(e.number)]:
                        e.number.fill(tensor.item())
            for key in dict.fromkeys(entries.keys_written):
                if key in group.elements:
                    group.refused.discard(key)
                    value = entries[key]
                    parts = list(value) if isinstance(value, tuple) else [value]
                    for e, old, part in zip(group.elements[key], shown[index][key], parts, strict=True):
                        if not (isinstance(old, Tensor) and part is old):
                            e.write(part)
            group.others = {k: v for k, v in entries.items() if k not in group.elements}

    @rule(data=st.data())
    def begin_schedule(self, data: st.DataObject) -> None:
        index, _, model = self.draw_group(data)
        key = self.draw_key(data, [*SCHEDULES])
        if any(self.is_refused(index, key, element) for element in model.elements[key]):
            return  # a schedule that ends before a step would leave that number, and no step would refuse it
        function = data.draw(st.sampled_from(SCHEDULES[key]), "function")
        self.optimizer.schedule(index, **{key: function})
        self.schedules[index, key] = function
        self.epoch += 1
        if key == "lr" and self.is_negative(model):
            model.elements[key][0].number.value = 0.0  # which is the live tensor's
        for element in model.elements[key]:
            if element.number.owner is not None or element.number.was_given:
                element.number = Number(element.number.value)
            element.is_tensor, element.is_driven = False, True
            element.number.is_written = False
        self.take_steps(data)

    @precondition(lambda self: self.schedules)
    @rule(data=st.data())
    def end_schedule(self, data: st.DataObject) -> None:
        index, key = data.draw(st.sampled_from([*self.schedules]), "schedule")
        self.optimizer.schedule(index, **{key: None})
        del self.schedules[index, key]
        self.epoch += 1
        for element in self.groups[index].elements[key]:
            element.is_driven = element.number.is_written = False
        self.take_steps(data)

    @precondition(lambda self: not self.is_bad())
    @rule()
    def save(self) -> None:
        saved = copy.deepcopy(self.optimizer.state_dict())
        self.saved.append((saved, copy.deepcopy(self.groups)))
        self.kept.append((saved["param_groups"], copy.deepcopy(saved["param_groups"])))

    @precondition(lambda self: self.saved or not self.is_bad())
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """Load a state dict, as it was or with other numbers. Users' tensors then follow as far as they can, or are left."""
        if not self.is_bad():
            self.save()
        saved, groups = self.saved[data.draw(st.integers(-len(self.saved), -1), "checkpoint")]
        saved, numbers = copy.deepcopy(saved), [group.numbers() for group in groups]
        if len(groups) != len(self.groups):
            with pytest.raises(ValueError, match="groups"):
                self.optimizer.load_state_dict(saved)
            return
        key = self.draw_key(data)
        for index, (entries, own) in enumerate(zip(saved["param_groups"], numbers, strict=True)):
            if self.is_driven(index, "lr") and own["lr"][0] < 0:  # neither is promised to win
                entries["lr"], own["lr"] = 0.25, [0.25]
            if data.draw(st.booleans(), "is changed"):
                own[key] = [data.draw(values_of(key), "value") for _ in own[key]]
                may_be_negative = key == "lr" and not any(k == "lr" for _, k in self.schedules)
                if may_be_negative and data.draw(st.integers(0, 4), "is negative") == 0:
                    own[key] = [-0.25]
                entries[key] = tuple(own[key]) if len(own[key]) > 1 else own[key][0]
        keeps = data.draw(st.integers(0, 4), "keeps") == 0 and not any(key == "momentum" for _, key in self.schedules)
        needs = [
            self.has_buffer(group) if keeps else own.get("momentum", [0]) != [0]
            for group, own in zip(self.groups, numbers, strict=True)
        ]
        if any(need and "momentum_buffer" not in saved["state"][i] for i, need in enumerate(needs)):
            with pytest.raises(ValueError, match="momentum_buffer"):
                self.optimizer.load_state_dict(saved, hyperparameters="keep" if keeps else "checkpoint")
            return
        self.optimizer.load_state_dict(saved, hyperparameters="keep" if keeps else "checkpoint")
        for group, before in zip(self.groups, groups, strict=True):
            group.state, group.steps = copy.deepcopy(before.state), before.steps
        if keeps:
            return
        for group, before, loaded in zip(self.groups, groups, numbers, strict=True):
            group.others.update(before.others)
            group.refused = {"lr"} if loaded["lr"][0] < 0 else set()
            self.epoch += len(group.refused)
        for index, key, i, element in self.elements():
            if (number := element.number).owner is not None:
                self.owned = [n for n in self.owned if n is not number]
                element.number = Number(0.0, was_given=True)
            element.number.value = numbers[index][key][i]
            element.number.is_written, element.number.was_negative = not element.is_driven, False
            element.is_tensor = False
        self.take_steps(data)

    @rule()
    def copy_it(self) -> None:
        """Go on with a copy, and leave the optimizer as it is."""
        params = [group["params"][0].detach().clone() for group in self.optimizer.param_groups]
        self.left.append((self.optimizer, copy.deepcopy(self.groups), params))
        own = [n.owner for n in self.owned]
        mine = [each for each, _ in self.schedulers]
        self.optimizer, mine, own = copy.deepcopy((self.optimizer, mine, own))
        for number, owner in zip(self.owned, own, strict=True):
            number.owner = owner
        self.schedulers = [(each, theirs) for each, (_, theirs) in zip(mine, self.schedulers, strict=True)]
        self.optimizer.hyperparameters()  # until then, a copy does not warn of writes that its schedules override
        self.run, self.structures, self.epoch = {}, {}, self.epoch + 1
        for group in self.groups:
            group.refused.clear()  # a copy takes 0 for a negative rate that came from a checkpoint, too
        self.usual = {
            key: [Element(Number(math.nan)) if e.number.owner is not None else e for e in elements]
            for key, elements in self.usual.items()
        }
        for _, _, _, element in self.elements():
            number = element.number
            number.handle = number.seen = None
            if number.owner is None:
                number.is_written = not element.is_driven and not element.is_tensor
                number.was_given |= element.is_tensor  # a copy takes a tensor that was assigned for one that was given

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.take_steps(data)

    def take_steps(self, data: st.DataObject) -> None:
        for way in data.draw(st.lists(st.sampled_from(self.ways), max_size=3), "steps"):
            self.step_once(way)

    def step_once(self, way: str) -> None:
        self.time += 1
        params = [group["params"][0] for group in self.optimizer.param_groups]
        for i, param in enumerate(params):
            grad = torch.cos(torch.arange(3.0, dtype=torch.float64) + self.time + i)
            if param.grad is None:
                param.grad = grad
            else:
                param.grad.copy_(grad)
        if self.is_bad():
            before = [p.detach().clone() for p in params]
            with pytest.raises(ValueError, match="Invalid "):
                self.optimizer.step()
            assert all(map(torch.equal, params, before))
            return
        WAYS[way](self)
        count = max(group.steps for group in self.groups) + 1
        for (index, key), function in self.schedules.items():
            found = function(torch.tensor(float(count), dtype=torch.float64))
            for element, value in zip(
                self.groups[index].elements[key], found if isinstance(found, tuple) else [found], strict=True
            ):
                element.number.value, element.number.is_written = float(value), False
        if any(map(self.is_negative, self.groups)) and way != "replayed by hand":  # which runs no Python
            assert any("Invalid learning rate" in each for each in self.said)
        for group, param in zip(self.groups, params, strict=True):
            numbers = group.numbers()
            if self.is_negative(group):
                numbers["lr"] = [0.0]
            group.steps += 1
            self.kind.step(group.param, param.grad, group.state, group.steps, numbers, self.has_buffer(group))
            torch.testing.assert_close(param.detach(), group.param, rtol=1e-11, atol=1e-11)

    @invariant()
    def reads(self) -> None:
        if self.groups and self.is_read:
            self.read_all()

    @rule()
    def read_all(self) -> None:
        for group, model in zip(self.optimizer.param_groups, self.groups, strict=True):
            for key, elements in model.elements.items():
                self.read_one(group[key], elements, keep=True)
            assert model.others.keys() <= group.keys()
            assert all(same(float(group[key]), float(value)) for key, value in model.others.items())

    def read_one(self, read: Any, elements: list[Element], *, keep: bool = False) -> None:
        parts = read if isinstance(read, tuple) else (read,)
        for part, element in zip(parts, elements, strict=True):
            assert isinstance(part, Tensor) == (element.is_tensor or element.is_driven), (read, elements)
            if isinstance(part, Tensor):
                assert part.shape == ()
                if element.number.owner is not None and element.number.owner.dim() == 0:
                    assert part is element.number.owner
            else:
                assert type(part) in (int, float)
            assert same(float(part), element.number.value), (read, elements)
            if keep and not element.is_tensor:
                self.kept.append((part, float(part)))

    @rule(data=st.data())
    def read_some(self, data: st.DataObject) -> None:
        index, group, model = self.draw_group(data)
        key = self.draw_key(data)
        how = data.draw(st.sampled_from(["item", "get", "dict", "items", "hyperparameters", "state_dict", "live"]), "how")
        elements = model.elements[key]
        if how in ("item", "get", "dict", "items"):
            read = {"item": lambda: group[key], "get": lambda: group.get(key)}.get(
                how, lambda: dict(group)[key] if how == "dict" else dict(group.items())[key]
            )()
            self.read_one(read, elements, keep=True)
        elif how == "live":
            if not self.is_handed_out:
                return
            for i, element in enumerate(elements):
                is_negative = key == "lr" and self.is_negative(model)
                assert same(self.live(index, key, i).item(), 0.0 if is_negative else element.number.value)
        else:
            found = (
                self.optimizer.hyperparameters() if how == "hyperparameters" else self.optimizer.state_dict()["param_groups"]
            )
            value = found[index][key]
            parts = value if isinstance(value, (tuple, list)) else (value,)
            assert all(type(part) in (int, float) for part in parts)
            assert all(same(part, e.number.value) for part, e in zip(parts, elements, strict=True))
            self.kept.append((found, copy.deepcopy(found)))

    def teardown(self) -> None:
        self.stack.close()
        if not self.groups:
            return
        self.read_all()
        for number in self.owned:
            assert number.owner is not None
            assert same(number.owner.item(), number.value)
        for read, was in self.kept:
            assert same(float(read), was) if isinstance(was, float) else repr(read) == repr(was)
        for optimizer, groups, params in self.left:
            for group, param in zip(optimizer.param_groups, params, strict=True):
                assert torch.equal(group["params"][0], param)
            for group, model in zip(optimizer.param_groups, groups, strict=True):
                for key, elements in model.elements.items():
                    assert all(same(float(p), e.number.value) for p, e in zip(parts_of(group[key]), elements, strict=True))
        assert not [each for each in self.said if not re.search(EXPECTED, each)]


EXPECTED = "Invalid learning rate|opt.schedule sets|lr_scheduler.step|decouple_lr|epoch|declares no|no such|captured"


def parts_of(read: Any) -> Sequence[Any]:
    return read if isinstance(read, tuple) else (read,)


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def called(machine: Machine) -> None:
    """Compile nothing, unless groups or schedules changed since the last step."""
    with machine.nothing_compiled("called"):
        machine.optimizer.step()


def compiled(machine: Machine, backend: str) -> None:
    if backend not in machine.run:
        machine.run[backend] = torch.compile(machine.optimizer.step, backend=backend, fullgraph=True)
    with machine.nothing_compiled(backend):
        machine.run[backend]()


def replayed(machine: Machine) -> None:
    if "runner" not in machine.run:
        machine.run["runner"] = co.CUDAGraphRunner(machine.optimizer, warmup=1, recaptures=1000)
    machine.run["runner"].step()


def replayed_by_hand(machine: Machine) -> None:
    """Replay a graph that the user captured, again only where what is updated, or with which buffers, changed."""
    structure = machine.counts_of_structure()
    graph, captured = machine.run.get("by hand", (None, None))
    is_said = any("after step() was captured" in each for each in machine.said[machine.run.get("said", 0) :])
    is_same = captured == structure
    assert not (is_same and is_said) or "momentum" in machine.kind.start, "numbers ask for no new capture"
    if is_said or not is_same:  # a momentum that was 0 meanwhile says it, too
        machine.optimizer.step()
        graph = SimulatedGraph(torch.device("cpu"))
        with graph.capturing():
            machine.optimizer.step()
        machine.run["by hand"] = graph, structure
    else:
        graph.replay()
    machine.run["said"] = len(machine.said)


WAYS: dict[str, Callable[[Machine], object]] = {
    "called": called,
    "compiled": functools.partial(compiled, backend="eager"),
    "compiled by AOTAutograd": functools.partial(compiled, backend="aot_eager"),
    "replayed": replayed,
    "replayed by hand": replayed_by_hand,
}
MACHINES: dict[str, tuple[dict[str, Any], int, int]] = {
    "called": ({}, 15, 500),
    "waiting": ({"waits": True}, 15, 500),
    "operator": ({"ways": ["called", "compiled"], "lowerings": ["multi_tensor"]}, 3, 60),
    "operator, waiting": ({"ways": ["called", "compiled"], "lowerings": ["multi_tensor"], "waits": True}, 3, 60),
    "inlined": ({"ways": ["compiled"], "lowerings": ["inductor"]}, 3, 60),
    "inlined, waiting": ({"ways": ["compiled"], "lowerings": ["inductor"], "waits": True}, 3, 60),
    "replayed": ({"ways": ["replayed", "called"], "lowerings": ["multi_tensor"], "waits": True}, 3, 200),
    "replayed by hand": ({"ways": ["replayed by hand", "called"], "lowerings": ["multi_tensor"], "waits": True}, 3, 200),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", MACHINES)
def test_numbers_are_what_was_written_last(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes, quick, full = MACHINES[name]
    if "replayed" in name:
        simulated_graph.install(monkeypatch)
    elif attributes.get("waits"):
        monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    machine = type("Machine", (Machine,), attributes)
    with torch._dynamo.config.patch(recompile_limit=64):  # groups and schedules change often
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=full if request.config.option.full else quick,
                stateful_step_count=20,
                report_multiple_bugs=False,
                phases=[Phase.generate, Phase.shrink],
            ),
        )
