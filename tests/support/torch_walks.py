"""Random walks over what a user can do between two steps, done to an optimizer here and to torch.optim's: they stay equal.

A walk is a seed. It draws an optimizer that both have, its numbers, and before each step a few actions. An action is drawn
by looking at the side of torch.optim, which then does it first. That side compiles nothing.

torch.optim.Muon makes its iteration in bfloat16, as here, but rounds elsewhere, as the docstring here says; so it is given
the one that is here. LBFGS is left out: its sums are in another order, and its iteration magnifies that.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
import simulated_graph
import torch
from catalog import Case, configurations, registry, sparse_rows, wide_scalars
from torch import Tensor, nn
from torch.optim import _muon, lr_scheduler

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.optimizers import newton_schulz

STEPS = 6
TOLERANCE = 1e-12
SHAPES = ((3, 2), (3, 2), (2,), ())
MATRICES = ((3, 2), (3, 2), (2, 3), (4, 4))  # for Muon

NUMBERS: dict[str, tuple[float, float] | tuple[tuple[float, float], ...]] = {
    "lr": (0.01, 0.3),
    "betas": ((0.0, 0.9), (0.1, 0.95)),
    "eps": (1e-3, 0.3),
    "weight_decay": (0.0, 0.5),
    "rho": (0.0, 0.95),
    "alpha": (0.1, 0.95),
    "momentum": (0.1, 0.95),
    "dampening": (0.0, 0.8),
    "lambd": (0.0, 0.4),
    "t0": (-1.0, 4.0),
    "lr_decay": (0.0, 0.5),
    "momentum_decay": (0.0, 1.0),
    "etas": ((0.2, 0.9), (1.1, 2.0)),
    "step_sizes": ((0.01, 0.1), (0.4, 2.0)),
    "beta2_decay": (-0.9, -0.1),
    "d": (0.5, 3.0),
}
"""From where to where the hyperparameters of all optimizers are drawn."""

FLAGS = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "maximize": None, "nesterov": None}
"""Options that a user can change in a group, with the state without which torch.optim then fails."""

RUNTIME = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Entries of groups that say nothing about the numbers."""

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=9),
}


class Net(nn.Module):
    """A loss of parameters of any shape, of which any can be exchanged, added, tied and taken away."""

    def __init__(self, random: Random, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.names: list[str] = []
        self.shapes = shapes
        for shape in shapes:
            self.add(drawn(shape, random))

    def add(self, param: nn.Parameter) -> str:
        self.names.append(f"p{len(self.names)}")
        setattr(self, self.names[-1], param)
        return self.names[-1]

    def forward(self, x: Tensor, absent: tuple[str, ...]) -> Tensor:
        total = x.new_zeros(())
        for i, name in enumerate(self.names):
            param = getattr(self, name)
            if param is not None and name not in absent:
                total = total + (param * x[i] + x[i + 1]).sin().sum() + 0.3 * (param * param).sum()
        return total + 0.1 * total * total


@dataclass
class Side:
    """A model in training.

    Attributes:
        params: every parameter that there ever was, in the order in which they came.
        saved: a state dict, and what the groups were.
    """

    model: Net
    optimizer: Any
    params: list[nn.Parameter]
    make: Callable[..., Any]
    is_sparse: bool
    scheduler: Any = None
    saved: tuple[Any, Any] | None = None
    run: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return isinstance(self.optimizer, CompiledOptimizer)

    @property
    def can_be_saved(self) -> bool:
        """Whether torch.optim can: it fails with state of parameters that no group has."""
        own = set(self.own())
        return all(self.index(p) in own for p in self.optimizer.state if isinstance(p, Tensor))

    def index(self, param: Tensor) -> int:
        return next(i for i, p in enumerate(self.params) if p is param)

    def groups(self) -> list[list[int]]:
        return [[self.index(p) for p in group["params"]] for group in self.optimizer.param_groups]

    def stepped(self) -> list[nn.Parameter]:
        """The parameters with state that a step has used. Other state may be there or not, as the README says."""
        return [p for p, s in self.optimizer.state.items() if isinstance(p, Tensor) and s and s.get("step", 1)]

    def own(self) -> list[int]:
        """The parameters that the optimizer has."""
        return [i for group in self.groups() for i in group]

    def added(self, param: nn.Parameter) -> nn.Parameter:
        self.params.append(param)
        return param

    def backward(self, x: Tensor, absent: tuple[str, ...]) -> None:
        loss = self.model(x, absent)
        if loss.requires_grad:
            loss.backward()

    def clear(self, how: str) -> None:
        if how != "keep":
            self.optimizer.zero_grad(set_to_none=how == "none")


Do = Callable[[Side], None]


def drawn(shape: tuple[int, ...], random: Random) -> nn.Parameter:
    size = torch.Size(shape).numel()
    return nn.Parameter(torch.tensor([random.uniform(-1, 1) for _ in range(size)], dtype=torch.float64).view(shape))


def number(name: str, random: Random) -> Any:
    bounds: Any = NUMBERS[name]
    if isinstance(bounds[0], tuple):
        return tuple(random.uniform(*b) for b in bounds)
    return random.uniform(*bounds)


def hyper(side: Side, random: Random) -> tuple[int, str]:
    """A group and the name of a number in it."""
    index = random.randrange(len(side.optimizer.param_groups))
    group = side.optimizer.param_groups[index]
    names = [n for n in NUMBERS if n in group and (n != "eps" or isinstance(group[n], float))]
    return index, random.choice(names)


# --- Groups


def assign(side: Side, random: Random) -> Do | None:
    index, name = hyper(side, random)
    group = side.optimizer.param_groups[index]
    value, how = number(name, random), random.choice(("assign", "update", "unite", "multiply"))
    if name in ("momentum", "weight_decay") and random.random() < 0.3:
        value = 0
    if name == "momentum" and not value and isinstance(side.optimizer, torch.optim.RMSprop):
        return None  # whose docstring says what differs
    if name == "momentum" and value and needs(side, group, "momentum_buffer", torch.optim.RMSprop):
        return None
    if name == "dampening" and group["nesterov"]:
        return None

    def do(side: Side) -> None:
        group = side.optimizer.param_groups[index]
        if how == "assign":
            group[name] = value
        elif how == "unite":
            group |= {name: value}
        elif how == "update" or isinstance(value, tuple):
            group.update({name: value})
        else:
            group[name] *= 0.75

    return do


def needs(side: Side, group: dict[str, Any], name: str | None, *kinds: type) -> bool:
    """Whether torch.optim's class fails without a state that parameters of a group lack."""
    states = [s for p in group["params"] if (s := side.optimizer.state.get(p))]
    return name is not None and isinstance(side.optimizer, kinds or object) and any(name not in s for s in states)


def assign_tensor(side: Side, random: Random) -> Do:
    """One for each group: a tensor that is assigned is copied here."""
    index, value = random.randrange(len(side.optimizer.param_groups)), random.uniform(0.01, 0.3)

    def do(side: Side) -> None:
        side.optimizer.param_groups[index]["lr"] = torch.tensor(value, dtype=torch.float64)

    return do


def write_into_a_tensor(side: Side, random: Random) -> Do | None:
    tensors = [i for i, g in enumerate(side.optimizer.param_groups) if isinstance(g["lr"], Tensor)]
    if not tensors:
        return assign_tensor(side, random)
    index, value = random.choice(tensors), random.uniform(0.01, 0.3)
    return lambda side: side.optimizer.param_groups[index]["lr"].fill_(value)


def change_a_flag(side: Side, random: Random) -> Do | None:
    index = random.randrange(len(side.optimizer.param_groups))
    group = side.optimizer.param_groups[index]
    names = []
    for name, needed in FLAGS.items():
        if name not in group or (name == "nesterov" and not (group["momentum"] and not group.get("dampening"))):
            continue
        if group[name] or not needs(side, group, needed):
            names.append(name)
    if not names:
        return None
    name = random.choice(names)

    def do(side: Side) -> None:
        side.optimizer.param_groups[index][name] = not side.optimizer.param_groups[index][name]

    return do


def write_an_own_key(side: Side, random: Random) -> Do:
    index, value = random.randrange(len(side.optimizer.param_groups)), random.choice((3, "mine", [1, 2], None))

    def do(side: Side) -> None:
        side.optimizer.param_groups[index]["my_key"] = value

    return do


def delete_an_own_key(side: Side, random: Random) -> Do | None:
    found = [i for i, g in enumerate(side.optimizer.param_groups) if "my_key" in g]
    if not found:
        return None
    index = random.choice(found)

    def do(side: Side) -> None:
        del side.optimizer.param_groups[index]["my_key"]

    return do


def reorder_groups(side: Side, random: Random) -> Do:
    how = random.choice(("reverse", "assign"))

    def do(side: Side) -> None:
        if how == "reverse":
            side.optimizer.param_groups.reverse()
        else:
            side.optimizer.param_groups = side.optimizer.param_groups[::-1]

    return do


def replace_a_group(side: Side, random: Random) -> Do:
    index, rate = random.randrange(len(side.optimizer.param_groups)), random.uniform(0.01, 0.3)

    def do(side: Side) -> None:
        groups = side.optimizer.param_groups
        groups[index] = {**groups[index], "lr": rate}

    return do


def change_a_default(side: Side, random: Random) -> Do:
    value = random.uniform(0.01, 0.3)

    def do(side: Side) -> None:
        side.optimizer.defaults["lr"] = value

    return do


def step_a_scheduler(side: Side, random: Random) -> Do | None:
    return (lambda side: side.scheduler.step()) if side.scheduler is not None else None


# --- Parameters


def _tell(side: Side, old: nn.Parameter, new: nn.Parameter, how: str) -> None:
    for group in side.optimizer.param_groups:
        if how == "list":
            group["params"] = [new if p is old else p for p in group["params"]]
        elif how == "tuple":
            group["params"] = tuple(new if p is old else p for p in group["params"])
        elif how == "item":
            group["params"] = [*group["params"]] if isinstance(group["params"], tuple) else group["params"]
            for i, p in enumerate(group["params"]):
                if p is old:
                    group["params"][i] = new


def _own_name(side: Side, random: Random) -> str | None:
    names = [n for n in side.model.names if getattr(side.model, n) is not None]
    return random.choice(names) if names else None


def replace(side: Side, random: Random) -> Do | None:
    if (name := _own_name(side, random)) is None:
        return None
    shape: Any = tuple(getattr(side.model, name).shape)
    if random.random() < 0.3:
        shape = random.choice(side.model.shapes)
    value, how = drawn(shape, random).data, random.choice(("list", "tuple", "item", "not told"))
    keeps_state = how != "not told" and shape == tuple(getattr(side.model, name).shape) and random.random() < 0.4
    keeps_state &= any(p is getattr(side.model, name) for p in side.stepped())

    def do(side: Side) -> None:
        old, new = getattr(side.model, name), side.added(nn.Parameter(value.clone()))
        for other in side.model.names:
            if getattr(side.model, other) is old:
                setattr(side.model, other, new)
        _tell(side, old, new, how)
        if keeps_state:
            side.optimizer.state[new] = side.optimizer.state.pop(old)

    return do


def put_back(side: Side, random: Random) -> Do | None:
    """A parameter that was in the model before."""
    if (name := _own_name(side, random)) is None:
        return None
    current = getattr(side.model, name)
    in_model = {id(getattr(side.model, n)) for n in side.model.names}
    own = set(side.own())
    spare = [i for i, p in enumerate(side.params) if id(p) not in in_model and i not in own]
    if not spare:
        return None
    index, how = random.choice(spare), random.choice(("list", "item"))
    tied = [n for n in side.model.names if getattr(side.model, n) is current]

    def do(side: Side) -> None:
        old, new = getattr(side.model, name), side.params[index]
        for other in tied:
            setattr(side.model, other, new)
        _tell(side, old, new, how)

    return do


def swap(side: Side, random: Random) -> Do | None:
    """In the model, in the groups, or in both."""
    i, j = random.sample(range(len(side.model.names)), 2)
    one, two = side.model.names[i], side.model.names[j]
    where = random.choice(("model", "groups", "both"))

    def do(side: Side) -> None:
        a, b = getattr(side.model, one), getattr(side.model, two)
        if where != "groups":
            setattr(side.model, one, b)
            setattr(side.model, two, a)
        if where != "model":
            for group in side.optimizer.param_groups:
                group["params"] = [b if p is a else a if p is b else p for p in group["params"] if p is not None]
                group["params"] = [p for p in group["params"] if p is not None]

    return do


def tie(side: Side, random: Random) -> Do | None:
    one, two = random.sample(side.model.names, 2)
    if getattr(side.model, one) is None or getattr(side.model, two) is None:
        return None
    told = random.random() < 0.5

    def do(side: Side) -> None:
        old, kept = getattr(side.model, two), getattr(side.model, one)
        setattr(side.model, two, kept)
        if told and old is not kept:
            for group in side.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not old]

    return do


def remove(side: Side, random: Random) -> Do | None:
    if (name := _own_name(side, random)) is None:
        return None
    where = random.choice(("model", "groups", "both"))

    def do(side: Side) -> None:
        old = getattr(side.model, name)
        if where != "groups":
            setattr(side.model, name, None)
        if where != "model":
            for group in side.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not old]

    return do


def move_to_another_group(side: Side, random: Random) -> Do | None:
    own = side.own()
    if len(side.optimizer.param_groups) < 2 or not own:
        return None
    index, target, in_place = random.choice(own), random.randrange(len(side.optimizer.param_groups)), random.random() < 0.5
    group = side.optimizer.param_groups[target]
    state = side.optimizer.state.get(side.params[index])
    needed = [n for name, n in FLAGS.items() if n and group.get(name)]
    needed += ["momentum_buffer"] if isinstance(side.optimizer, torch.optim.RMSprop) and group["momentum"] else []
    if state and not set(needed) <= state.keys():
        return None  # torch.optim fails

    def do(side: Side) -> None:
        param, groups = side.params[index], side.optimizer.param_groups
        for group in groups:
            kept = [p for p in group["params"] if p is not param]
            if in_place and isinstance(group["params"], list):
                group["params"][:] = kept
            else:
                group["params"] = kept
        if in_place:
            groups[target]["params"].append(param)
        else:
            groups[target]["params"] = [*groups[target]["params"], param]

    return do


def reorder_parameters(side: Side, random: Random) -> Do:
    index, in_place = random.randrange(len(side.optimizer.param_groups)), random.random() < 0.5

    def do(side: Side) -> None:
        group = side.optimizer.param_groups[index]
        if in_place and isinstance(group["params"], list):
            group["params"].reverse()
        else:
            group["params"] = group["params"][::-1]

    return do


def add_a_group(side: Side, random: Random) -> Do | None:
    if side.scheduler is not None:
        return None
    own = set(side.own())
    spare = [i for i in range(len(side.params)) if i not in own]
    value, rate, named = drawn(random.choice(side.model.shapes), random), random.uniform(0.01, 0.3), _is_named(side)
    options = random.choice(({"lr": rate}, {}, {"lr": rate, "my_key": 5}))
    index = random.choice(spare) if spare and random.random() < 0.5 else None
    if index is not None and side.optimizer.state.get(side.params[index]):
        state = side.optimizer.state[side.params[index]]
        if any(side.optimizer.defaults.get(name) and needed not in state for name, needed in FLAGS.items() if needed):
            return None  # torch.optim fails
        if isinstance(side.optimizer, torch.optim.RMSprop) and "momentum_buffer" not in state:
            return None
    if index is None and len(side.model.names) >= 6:
        return None
    by_hand = random.random() < 0.3 and not named

    def do(side: Side) -> None:
        if index is None:
            param = side.added(nn.Parameter(value.data.clone()))
            name = side.model.add(param)
        else:
            param, name = side.params[index], f"old.{index}"
        group = {"params": [(name, param)] if named else [param], **options}
        if by_hand:
            side.optimizer.param_groups.append({**side.optimizer.defaults, **group})
        else:
            side.optimizer.add_param_group(group)

    return do


def _is_named(side: Side) -> bool:
    return "param_names" in side.optimizer.param_groups[0]


def remove_a_group(side: Side, random: Random) -> Do | None:
    count = len(side.optimizer.param_groups)
    if side.scheduler is not None or count < 2:
        return None
    index = random.randrange(count)
    return lambda side: side.optimizer.param_groups.pop(index)


def freeze_or_unfreeze(side: Side, random: Random) -> Do:
    index, drops = random.randrange(len(side.params)), random.random() < 0.5

    def do(side: Side) -> None:
        param = side.params[index]
        param.requires_grad_(not param.requires_grad)
        if drops:
            param.grad = None

    return do


def assign_data(side: Side, random: Random) -> Do:
    index = random.randrange(len(side.params))
    value = drawn(tuple(side.params[index].shape), random).data

    def do(side: Side) -> None:
        side.params[index].data = value.clone()

    return do


def write_a_parameter(side: Side, random: Random) -> Do:
    index, factor = random.randrange(len(side.params)), random.uniform(0.5, 1.1)

    def do(side: Side) -> None:
        with torch.no_grad():
            side.params[index].mul_(factor)

    return do


def load_a_model(side: Side, random: Random) -> Do:
    assign, factor = random.random() < 0.7, random.uniform(0.5, 1.1)

    def do(side: Side) -> None:
        values = {name: value.clone() * factor for name, value in side.model.state_dict().items()}
        side.model.load_state_dict(values, assign=assign)
        for param in side.model.parameters():
            if all(p is not param for p in side.params):
                side.added(param)

    return do


def swap_tensors(side: Side, random: Random) -> Do | None:
    index = random.randrange(len(side.params))
    value = drawn(tuple(side.params[index].shape), random).data

    def do(side: Side) -> None:
        param = side.params[index]
        other = nn.Parameter(value.clone(), requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, other)

    return do


# --- Gradients


def _with_grad(side: Side, random: Random) -> int | None:
    found = [i for i, p in enumerate(side.params) if p.grad is not None]
    return random.choice(found) if found else None


def drop_a_gradient(side: Side, random: Random) -> Do | None:
    if (index := _with_grad(side, random)) is None:
        return None

    def do(side: Side) -> None:
        side.params[index].grad = None

    return do


def write_a_gradient(side: Side, random: Random) -> Do | None:
    if (index := _with_grad(side, random)) is None:
        return None
    factor = random.choice((0.0, 0.5, -1.0))

    def do(side: Side) -> None:
        side.params[index].grad.mul_(factor)

    return do


def assign_a_gradient(side: Side, random: Random) -> Do | None:
    if side.is_sparse:
        return None
    index = random.randrange(len(side.params))
    shape = tuple(side.params[index].shape)
    value, is_transposed = drawn(shape, random).data, random.random() < 0.3

    def do(side: Side) -> None:
        grad = value.clone()
        side.params[index].grad = grad.T.contiguous().T if is_transposed and grad.dim() == 2 else grad

    return do


def assign_an_expanded_gradient(side: Side, random: Random) -> Do:
    """Nothing can be added to it."""
    index = random.randrange(len(side.params))

    def do(side: Side) -> None:
        side.params[index].grad = torch.tensor(0.3, dtype=torch.float64).expand(side.params[index].shape)

    return do


# --- State


def _entry(side: Side, random: Random) -> tuple[int, str] | None:
    """A tensor in the state of a parameter."""
    found = [
        (side.index(p), name)
        for p in side.stepped()
        for name, entry in side.optimizer.state[p].items()
        if isinstance(entry, Tensor) and not name.startswith("my_")
    ]
    return random.choice(found) if found else None


def _new_value(name: str, entry: Tensor, seed: int) -> Tensor:
    random = Random(seed)
    if name == "step":
        return torch.full_like(entry, random.randrange(1, 9))
    return entry.detach().clone() * random.uniform(0.5, 1.0)


def _is_differing(side: Side, index: int, name: str) -> bool:
    """Whether an entry that is changed alone has another effect, as a docstring says: RMSprop has no negative variance."""
    return isinstance(side.optimizer, torch.optim.RMSprop) and "grad_avg" in side.optimizer.state[side.params[index]]


def change_state(side: Side, random: Random) -> Do | None:
    if (found := _entry(side, random)) is None:
        return None
    if _is_differing(side, *found):
        return None
    (index, name), seed, how = found, random.randrange(1000), random.choice(("assign", "data", "write", "update"))

    def do(side: Side) -> None:
        entries = side.optimizer.state[side.params[index]]
        value = _new_value(name, entries[name], seed)
        if how == "assign":
            entries[name] = value
        elif how == "update":
            side.optimizer.state[side.params[index]] = {**entries, name: value}
        elif how == "data" and not (name == "step" and "inlined" in side.run):  # a compiled copy of torch.optim's fails too
            entries[name].data = value
        else:
            entries[name].copy_(value)

    return do


def assign_all_state(side: Side, random: Random) -> Do:
    is_empty = random.random() < 0.3

    def do(side: Side) -> None:
        given: Any = defaultdict(dict)
        if not is_empty:
            given.update({p: dict(entries) for p, entries in side.optimizer.state.items()})
        side.optimizer.state = given

    return do


def exchange_state(side: Side, random: Random) -> Do | None:
    """Of two parameters of one shape."""
    found = side.stepped()
    pairs = [(side.index(p), side.index(q)) for p in found for q in found if p is not q and p.shape == q.shape]
    if not pairs:
        return None
    i, j = random.choice(pairs)

    def do(side: Side) -> None:
        state, p, q = side.optimizer.state, side.params[i], side.params[j]
        state[p], state[q] = state[q], state[p]

    return do


def delete_state(side: Side, random: Random) -> Do | None:
    found = [side.index(p) for p in side.stepped()]
    if not found:
        return None
    index, how = random.choice(found), random.choice(("del", "pop", "empty", "clear"))

    def do(side: Side) -> None:
        if how == "clear":
            side.optimizer.state.clear()
        elif how == "empty":
            side.optimizer.state[side.params[index]].clear()
        elif how == "pop":
            side.optimizer.state.pop(side.params[index])
        else:
            del side.optimizer.state[side.params[index]]

    return do


def forget_momentum(side: Side, random: Random) -> Do | None:
    """Of SGD, which then begins anew."""
    found = [side.index(p) for p, s in side.optimizer.state.items() if s.get("momentum_buffer") is not None]
    if not found or not isinstance(side.optimizer, torch.optim.SGD):
        return None
    if any(group["dampening"] for group in side.optimizer.param_groups):
        return None  # the docstring says what differs
    index, how = random.choice(found), random.choice(("None", "pop"))

    def do(side: Side) -> None:
        entries = side.optimizer.state[side.params[index]]
        if how == "None":
            entries["momentum_buffer"] = None
        else:
            entries.pop("momentum_buffer")

    return do


def write_an_own_entry(side: Side, random: Random) -> Do | None:
    found = [side.index(p) for p in side.stepped()]
    if not found:
        return None
    index, value = random.choice(found), random.choice((7, (1, 2), torch.ones(2, dtype=torch.float64)))

    def do(side: Side) -> None:
        side.optimizer.state[side.params[index]]["my_entry"] = value

    return do


# --- Checkpoints and copies


def _renew(side: Side, state: Any) -> None:
    """Go on with a fresh optimizer of the same parameters and options, into which a state dict is loaded."""
    groups = []
    for group in side.optimizer.param_groups:
        params = list(group["params"])
        if "param_names" in group:  # those of torch.optim do not follow its parameters
            names = group["param_names"] if side.is_ours else [f"p{side.index(p)}" for p in params]
            params = [*zip(names, params, strict=True)]  # type: ignore[list-item]
        own = {k: v for k, v in group.items() if k in side.optimizer.defaults and k not in RUNTIME}
        groups.append({"params": params, **copy.deepcopy(own)})
    fresh = side.make(groups)
    fresh.load_state_dict(state)
    side.optimizer = fresh
    _take_numbers(side)
    if side.scheduler is not None:
        side.scheduler.optimizer = fresh


def _take_numbers(side: Side) -> None:
    """A checkpoint of this package has numbers where groups had tensors."""
    for group in side.optimizer.param_groups:
        group["lr"] = float(group["lr"])


def load_into_itself(side: Side, random: Random) -> Do | None:
    if not side.can_be_saved:
        return None
    way = random.choice(("itself", "deepcopy", "file"))

    def do(side: Side) -> None:
        state = side.optimizer.state_dict()
        if way == "deepcopy":
            state = copy.deepcopy(state)
        elif way == "file":
            file = io.BytesIO()
            torch.save(state, file)
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        side.optimizer.load_state_dict(state)
        _take_numbers(side)

    return do


def load_into_a_fresh_one(side: Side, random: Random) -> Do | None:
    if not side.can_be_saved:
        return None
    return lambda side: _renew(side, copy.deepcopy(side.optimizer.state_dict()))


def save(side: Side, random: Random) -> Do | None:
    if not side.can_be_saved:
        return None

    def do(side: Side) -> None:
        flags = [{k: v for k, v in g.items() if k in FLAGS} for g in side.optimizer.param_groups]
        side.saved = copy.deepcopy(side.optimizer.state_dict()), (side.groups(), flags)

    return do


def go_back(side: Side, random: Random) -> Do | None:
    """Options that changed in between are left to the tests of checkpoints."""
    flags = [{k: v for k, v in g.items() if k in FLAGS} for g in side.optimizer.param_groups]
    if side.saved is None or side.saved[1] != (side.groups(), flags):
        return save(side, random)

    def do(side: Side) -> None:
        assert side.saved is not None
        side.optimizer.load_state_dict(copy.deepcopy(side.saved[0]))
        _take_numbers(side)

    return do


def copy_all(side: Side, random: Random) -> Do:
    how = random.choice(("deepcopy", "pickle"))

    def do(side: Side) -> None:
        whole = side.model, side.optimizer, side.params, side.scheduler, [p.grad for p in side.params]
        if how == "deepcopy":
            made: Any = copy.deepcopy(whole)
        else:
            made = pickle.loads(pickle.dumps(whole))
        side.model, side.optimizer, side.params, side.scheduler, grads = made
        for param, grad in zip(side.params, grads, strict=True):
            param.grad = grad

    return do


def clip_gradients(side: Side, random: Random) -> Do:
    limit = random.uniform(0.2, 2.0)

    def do(side: Side) -> None:
        nn.utils.clip_grad_norm_([p for p in side.params if not (p.grad is None or p.grad.is_sparse)], limit)

    return do


def clear_gradients(side: Side, random: Random) -> Do:
    to_none = random.random() < 0.5

    def do(side: Side) -> None:
        side.model.zero_grad(set_to_none=to_none)

    return do


GRADIENT_ACTIONS: list[Callable[[Side, Random], Do | None]] = [
    drop_a_gradient,
    write_a_gradient,
    assign_a_gradient,
    clip_gradients,
    clear_gradients,
]
"""Also between the backward and the step, where the step is not in one function with it."""

ACTIONS: list[Callable[[Side, Random], Do | None]] = [
    assign,
    assign,
    assign_tensor,
    write_into_a_tensor,
    change_a_flag,
    write_an_own_key,
    delete_an_own_key,
    reorder_groups,
    replace_a_group,
    change_a_default,
    step_a_scheduler,
    step_a_scheduler,
    replace,
    put_back,
    swap,
    tie,
    remove,
    move_to_another_group,
    reorder_parameters,
    add_a_group,
    remove_a_group,
    freeze_or_unfreeze,
    assign_data,
    write_a_parameter,
    load_a_model,
    swap_tensors,
    change_state,
    change_state,
    assign_all_state,
    exchange_state,
    delete_state,
    forget_momentum,
    write_an_own_entry,
    load_into_itself,
    load_into_a_fresh_one,
    save,
    go_back,
    copy_all,
    *GRADIENT_ACTIONS,
]


# --- Ways to step


def called(side: Side, x: Tensor, absent: tuple[str, ...], clear: str, do: Do) -> None:
    side.backward(x, absent)
    do(side)
    side.optimizer.step()
    side.clear(clear)


def by_closure(side: Side, x: Tensor, absent: tuple[str, ...], clear: str, do: Do) -> None:
    def closure() -> float:
        side.backward(x, absent)
        do(side)
        return 0.5

    assert side.optimizer.step(closure) == 0.5
    side.clear(clear)


def whole(side: Side, x: Tensor, absent: tuple[str, ...], clear: str, do: Do) -> None:
    def train(model: Net, optimizer: Any, x: Tensor) -> None:
        loss = model(x, absent)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        if clear != "keep":
            optimizer.zero_grad(set_to_none=clear == "none")

    key = f"{absent} {clear}"
    if key not in side.run:
        side.run[key] = torch.compile(train, backend="eager", fullgraph=True)
    side.run[key](side.model, side.optimizer, x)


def step_alone(side: Side, x: Tensor, absent: tuple[str, ...], clear: str, do: Do) -> None:
    side.backward(x, absent)
    do(side)
    if "step" not in side.run:
        side.run["step"] = torch.compile(lambda optimizer: optimizer.step(), backend="eager", fullgraph=True)
    side.run["step"](side.optimizer)
    side.clear(clear)


def captured(side: Side, x: Tensor, absent: tuple[str, ...], clear: str, do: Do) -> None:
    side.backward(x, absent)
    do(side)
    if side.run.get("of") is not side.optimizer:
        side.run["of"] = side.optimizer
        side.run["runner"] = co.CUDAGraphRunner(side.optimizer, warmup=1, recaptures=1000)
    side.run["runner"].step()
    side.clear(clear)


Run = Callable[[Side, Tensor, tuple[str, ...], str, Do], None]

WAYS: dict[str, tuple[str, Run]] = {
    "called": ("auto", called),
    "called, eager": ("eager", called),
    "called, inductor": ("inductor", called),
    "called with a closure": ("auto", by_closure),
    "whole": ("auto", whole),
    "whole, eager": ("eager", whole),
    "whole, inlined": ("inductor", whole),
    "step": ("auto", step_alone),
    "step, inlined": ("inductor", step_alone),
    "captured": ("auto", captured),
}
CALLED = {"called", "called, eager", "called, inductor", "called with a closure", "captured"}
"""Ways that take sparse gradients."""


def optimizers() -> list[type[CompiledOptimizer]]:
    return [c for c in registry() if hasattr(torch.optim, c.__name__) and c is not co.LBFGS]


def _orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    return newton_schulz.orthogonalized(matrix, [coefficients] * steps, eps)


def _is_torchs(case: Case) -> bool:
    """Whether torch.optim has such a configuration."""
    coefficients, how = case.kwargs.get("ns_coefficients", (1.0,)), case.kwargs.get("adjust_lr_fn")
    is_known = isinstance(coefficients[0], float) and how in (None, "original", "match_rms_adamw")
    return is_known and not {"cautious", "max_lr"} & case.kwargs.keys()


def _sides(random: Random, way: str) -> tuple[Side, Side]:
    kinds = [c for c in optimizers() if way in CALLED or c is not co.SparseAdam]
    kind = random.choice(kinds)
    cases = [c for c in configurations(kind) if _is_torchs(c)]
    options = random.choice(cases[1:]).kwargs
    shares = random.random() < 0.15
    seed, named, parts = random.randrange(2**31), random.random() < 0.5, random.choice((1, 2, 3))
    rates = [random.uniform(0.01, 0.3) for _ in range(parts)]
    scheduler, frozen = random.choice([None, None, *SCHEDULERS]), [random.random() < 0.1 for _ in SHAPES]

    def side(make: Callable[..., Any]) -> Side:
        model = Net(Random(seed), MATRICES if kind is co.Muon else SHAPES)
        pairs: list[Any] = list(model.named_parameters()) if named else list(model.parameters())
        if kind is co.SparseAdam:
            pairs = [p for p in pairs if (p[1] if named else p).dim()]
        for param, is_frozen in zip(model.parameters(), frozen, strict=True):
            param.requires_grad_(not is_frozen)
        groups = [{"params": pairs[i::parts], "lr": rate} for i, rate in enumerate(rates)]
        if shares:
            rate = torch.tensor(rates[0], dtype=torch.float64)
            groups = [{**group, "lr": rate} for group in groups]
        optimizer = make(groups)
        made = Side(model, optimizer, list(model.parameters()), make, kind is co.SparseAdam)
        if scheduler is not None:
            cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
            if scheduler != "OneCycleLR" or (cycles and optimizer.defaults.get("momentum", 1)):
                made.scheduler = SCHEDULERS[scheduler](optimizer)
        return made

    theirs = getattr(torch.optim, kind.__name__)
    plain = {} if kind in (co.SparseAdam, co.Muon) else {"foreach": False}
    reference = side(lambda groups: theirs(groups, **options, **plain))
    ours = side(lambda groups: kind(groups, **options, lowering=WAYS[way][0]))
    return reference, ours


@contextmanager
def world(way: str) -> Iterator[None]:
    torch._dynamo.reset()
    limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 10000, "trace_autograd_ops": True}
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(limits))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        patch.setattr(_muon, "_zeropower_via_newtonschulz", _orthogonalized)
        if way == "captured":
            simulated_graph.install(patch)
        yield
    torch._dynamo.reset()


def near(name: str, ours: Any, theirs: Any) -> None:
    """Raise where the two differ."""
    if not isinstance(theirs, Tensor):
        ours = ours.item() if isinstance(ours, Tensor) and not ours.dim() else ours  # SparseAdam's step there is a number
        same = torch.equal(ours, theirs) if isinstance(ours, Tensor) and isinstance(theirs, Tensor) else ours == theirs
        assert same, f"{name}: {ours} instead of {theirs}"
        return
    a, b = torch.as_tensor(ours).detach().double(), theirs.detach().double()
    assert a.shape == b.shape, f"{name}: {tuple(a.shape)} instead of {tuple(b.shape)}"
    if b.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    apart = torch.linalg.vector_norm(a - b)
    assert bool(apart <= TOLERANCE * torch.linalg.vector_norm(b) + 1e-14), f"{name}: {a} instead of {b}"


def _same(name: str, ours: Any, theirs: Any) -> None:
    def plain(value: Any) -> Any:
        return tuple(map(plain, value)) if isinstance(value, tuple) else float(value) if isinstance(value, Tensor) else value

    assert plain(ours) == plain(theirs), f"{name}: {ours} instead of {theirs}"


def check(ours: Side, theirs: Side) -> None:
    """Raise where parameters, gradients, state, step counts or entries of groups differ."""
    assert ours.groups() == theirs.groups(), f"groups: {ours.groups()} instead of {theirs.groups()}"
    for i, (mine, group) in enumerate(zip(ours.optimizer.param_groups, theirs.optimizer.param_groups, strict=True)):
        for name in group.keys() - RUNTIME:
            _same(f"{name} of group {i}", mine[name], group[name])
    for i, (own, param) in enumerate(zip(ours.params, theirs.params, strict=True)):
        near(f"p{i}", own, param)
        assert (own.grad is None) == (param.grad is None), f"gradient of p{i}: {own.grad} instead of {param.grad}"
        if param.grad is not None:
            near(f"gradient of p{i}", own.grad, param.grad)
        expected, found = (dict(side.optimizer.state.get(p, {})) for side, p in ((theirs, param), (ours, own)))
        if not float(expected.get("step", 1)) and not found:
            continue  # what never was stepped goes with its parameter
        for name, value in expected.items():
            if value is not None:
                assert name in found, f"{name} of p{i}: absent instead of {value}"
                near(f"{name} of p{i}", found[name], value)
        if not expected and "step" in found and not isinstance(theirs.optimizer, torch.optim.SGD):  # which counts none
            near(f"step of p{i}", found["step"], torch.zeros(()))
    if theirs.scheduler is not None:
        mine, its = ours.scheduler.state_dict(), theirs.scheduler.state_dict()
        _same("last_lr", tuple(mine["_last_lr"]), tuple(its["_last_lr"]))


def _sparse(side: Side, seed: int, absent: tuple[str, ...]) -> None:
    random = Random(seed)
    for i, param in enumerate(side.params):
        grad = drawn(tuple(param.shape), random).data
        if param.dim() and param.requires_grad and f"p{i}" not in absent:
            param.grad = sparse_rows(grad, seed + i)


def walk(way: str, seed: int, steps: int = STEPS, actions: Any = None) -> Counter[str]:
    """Go one walk; what happened how often.

    Raises:
        AssertionError: the sides differ, or a step here fails. The message has the seed and all that was done.
    """
    random, happened = Random(f"{way} {seed}"), ["begin"]
    _, run = WAYS[way]
    with world(way):
        theirs, ours = _sides(random, way)
        if "inlined" in way:
            theirs.run["inlined"] = ours.run["inlined"] = True
        happened[0] = f"{theirs.optimizer!r}"
        kind = type(theirs.optimizer).__name__

        def both(one: Do, two: Do) -> bool:
            """Let both do something; False where torch.optim fails."""
            with wide_scalars():
                try:
                    one(theirs)
                except Exception as error:
                    happened.append(f"torch.optim fails: {type(error).__name__}: {str(error)[:300]}")
                    return False
            two(ours)
            return True

        try:
            for index in range(steps):
                for _ in range(random.choice((0, 1, 2)) if index else 0):
                    action, number = random.choice(actions or ACTIONS), random.randrange(2**31)
                    do = action(theirs, Random(number))
                    if do is None:
                        continue
                    happened.append(action.__name__)
                    if not both(do, do):
                        return _counted(happened)
                absent = tuple(f"p{i}" for i in range(7) if random.random() < 0.15)
                x = torch.tensor([random.uniform(0.3, 1.5) for _ in range(9)], dtype=torch.float64)
                clear, number = random.choice(("none", "none", "zeros", "keep")), random.randrange(2**31)
                inner: Do | None = None
                if run is not whole and not theirs.is_sparse and random.random() < 0.3:
                    action = random.choice([*GRADIENT_ACTIONS, assign_an_expanded_gradient])
                    inner = action(theirs, Random(number))
                    happened.append(f"{action.__name__} after the backward")
                    clear = "none" if action is assign_an_expanded_gradient else clear
                happened.append(f"step, then {clear}, without {absent}")
                step = partial(_step, x=x, absent=absent, clear=clear, inner=inner or _nothing, seed=number)
                if not both(partial(step, run=by_closure if run is by_closure else called), partial(step, run=run)):
                    return _counted(happened)
                check(ours, theirs)
        except Exception as error:
            raise AssertionError(f"walk {seed} of {kind}, {way}: {type(error).__name__}: {error}\n{happened}") from error
    return _counted(happened)


def _counted(happened: list[str]) -> Counter[str]:
    return Counter(words.partition(",")[0].partition(":")[0] for words in happened)


def _nothing(side: Side) -> None:
    pass


def _step(side: Side, run: Run, x: Tensor, absent: tuple[str, ...], clear: str, inner: Do, seed: int) -> None:
    if side.is_sparse:
        _sparse(side, seed, absent)
        run(side, x, tuple(side.model.names), "none", _nothing)
    else:
        run(side, x, absent, clear, inner)
