"""What users do between two steps that a graph must not miss, for a runner and for a twin that captures nothing.

Each scenario is called before every step with the side to change and the number of the step. The two sides must stay equal
bit for bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from catalog import required, shifted
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, hyper

Scenario = Callable[["Side", int], None]


@dataclass
class Side:
    """A model and its optimizer, and room for what a scenario keeps between calls."""

    model: nn.Module
    optimizer: CompiledOptimizer
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> list[Tensor]:
        return [p for g in self.optimizer.param_groups for p in g["params"]]

    def tensors(self) -> list[Tensor]:
        """Everything that training changes."""
        states = [self.optimizer.state[p] for p in self.params if p in self.optimizer.state]
        entries = [v for s in states for v in s.values() if isinstance(v, Tensor)]
        return [*self.model.parameters(), *self.params, *entries, self.optimizer.skipped_steps]


class Net(nn.Module):
    """Layers of several sizes, one of them used by a switch only, and a frozen gate; all matrices without ``bias``."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7, bias)
        self.side = nn.Linear(5, 7, bias)
        self.outer = nn.Linear(7, 3, bias)
        self.gate = nn.Parameter(torch.ones(7) if bias else torch.ones(1, 7), requires_grad=False)

    def forward(self, x: Tensor, *, side: bool = False) -> Tensor:
        h = torch.tanh(self.inner(x)) * self.gate
        if side:
            h = h + self.side(x)
        return self.outer(h)


def make(
    optimizer: type[CompiledOptimizer] = co.AdamW,
    groups: int = 2,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    transposed: bool = False,
    **kwargs: Any,
) -> Side:
    """One side; every call makes the same one. The memory of matrices may be ``transposed``."""
    warnings.filterwarnings(
        "ignore", message="compiled_optim: Inductor compiles stacks, since Sorted", category=RuntimeWarning
    )
    torch.manual_seed(4)
    model = Net(bias=optimizer._granularity != "matrix").to(device, dtype)
    for param in (p for p in model.parameters() if transposed and p.dim() > 1):
        param.data = param.data.mT.contiguous().mT
    given = {**required(optimizer), **kwargs}
    named = list(model.named_parameters())
    if groups == 1:
        return Side(model, optimizer(named, **given))
    split = [{"params": named[: len(named) // 2]}, {"params": named[len(named) // 2 :], "lr": 0.02}]
    return Side(model, optimizer(split, **given))


class Tables(nn.Module):
    """Two tables with rows of one size, one with rows of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4, sparse=True)
        self.places = nn.Embedding(7, 4, sparse=True)
        self.kinds = nn.Embedding(5, 3, sparse=True)

    def forward(self, index: Tensor) -> Tensor:
        words, places, kinds = (table(index % len(table.weight)) for table in self.children())
        return words.sum() + places.square().sum() + kinds.pow(3).mean()


def make_tables(device: str = "cpu", lr: float | Tensor = 0.1, **kwargs: Any) -> Side:
    """One side with sparse gradients; every call makes the same one."""
    torch.manual_seed(0)
    model = Tables().to(device)
    return Side(model, co.SparseAdam(list(model.named_parameters()), lr=lr, **kwargs))


def train_by_closure(side: Side, x: Tensor) -> Tensor:
    """A training step of an optimizer that calls for the loss."""

    def closure() -> Tensor:
        side.optimizer.zero_grad()
        loss = side.model(x).square().mean()
        loss.backward()
        return loss

    return side.optimizer.step(closure)


def unchanged(side: Side, i: int) -> None:
    """Nothing happens."""


def lr_assigned(side: Side, i: int) -> None:
    side.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)


def lr_filled(side: Side, i: int) -> None:
    side.optimizer.hyperparameter("lr", 1).fill_(0.1 / (i + 1))


def scheduled(side: Side, i: int) -> None:
    if i == 0:
        cycled = bool({"betas", "momentum"} & side.optimizer.defaults.keys())
        cycle = torch.optim.lr_scheduler.OneCycleLR(side.optimizer, 0.1, total_steps=400, cycle_momentum=cycled)
        side.kept["schedulers"] = [cycle]
    elif i < 400:
        for scheduler in side.kept["schedulers"]:
            scheduler.step()


def lr_saved_and_put_back(side: Side, i: int) -> None:
    group = side.optimizer.param_groups[0]
    if i % 4 == 1:
        side.kept["lr"] = group["lr"]
        group["lr"] = 0.5
    elif i % 4 == 3:
        group["lr"] = side.kept["lr"]


def state_offloaded(side: Side, i: int) -> None:
    if i in (7, 12):
        for entries in side.optimizer.state.values():
            for value in entries.values():
                value.data = value.data.clone()


def overflow(side: Side, i: int) -> None:
    """Weights whose loss is infinite, for two steps."""
    weight = side.model.outer.weight
    if i == 9:
        side.kept["weight"] = weight.detach().clone()
        weight.data.fill_(1e30)
    elif i == 11:
        weight.data.copy_(side.kept["weight"])


def every_hyperparameter(side: Side, i: int) -> None:
    """By assignment, and in the live tensor, in turn."""
    for g, group in enumerate(side.optimizer.param_groups):
        for field_ in side.optimizer._declaration.hypers:
            moved = shifted(side.optimizer, field_, 0.01 * ((i + g) % 7))
            if i % 2:
                group[field_.name] = moved if field_.is_tuple else moved[0]
                continue
            found = side.optimizer.hyperparameter(field_.name, g)
            for tensor, value in zip(found if field_.is_tuple else (found,), moved, strict=True):
                tensor.fill_(value)


def written_in_some_way(side: Side, random: Random) -> None:
    """Write a hyperparameter of some group, in one of all ways there are."""
    optimizer = side.optimizer
    index = random.randrange(len(optimizer.param_groups))
    group = optimizer.param_groups[index]
    hyper = random.choice([h for h in optimizer._declaration.hypers if h.name in group])
    moved = shifted(optimizer, hyper, 0.01 * random.randrange(7))
    value = moved if hyper.is_tuple else moved[0]

    def elements(found: Any) -> tuple[Tensor, ...]:
        return found if hyper.is_tuple else (found,)

    def each(write: Callable[[Tensor, float], object], found: Any) -> None:
        for tensor, number in zip(elements(found), moved, strict=True):
            write(tensor, number)

    def by_a_scheduler() -> None:
        factors = [lambda _, i=i: 0.9 if i == index else 0.99 for i in range(len(optimizer.param_groups))]
        torch.optim.lr_scheduler.MultiplicativeLR(optimizer, factors).step()

    def by_a_load() -> None:
        saved = optimizer.state_dict()
        saved["param_groups"][index][hyper.name] = value
        optimizer.load_state_dict(saved)

    ways: list[Callable[[], object]] = [
        lambda: group.update({hyper.name: value}),
        lambda: group.__ior__({hyper.name: value}),
        lambda: group.__setitem__(hyper.name, tuple(map(torch.tensor, moved)) if hyper.is_tuple else torch.tensor([value])),
        lambda: group.__setitem__(hyper.name, group[hyper.name]),
        lambda: each(lambda t, v: t.copy_(torch.tensor(v)), optimizer.hyperparameter(hyper.name, index)),
        lambda: each(lambda t, v: t.sub_(t - v).clamp_(max=v), optimizer.hyperparameter(hyper.name, index)),
        lambda: each(lambda t, v: t.fill_(v), optimizer.hyperparameter(hyper.name, index)),
        lambda: side.kept["adopted"].fill_(0.01 * random.randrange(1, 7)),
        lambda: group.__setitem__("lr", group["lr"] * 0.95),
        by_a_scheduler,
        by_a_load,
    ]
    random.choice(ways)()


def scheduled_on_device(side: Side, i: int) -> None:
    """A schedule that another one replaces and that ends; what is assigned meanwhile is overridden."""
    if i == 0:
        side.optimizer.schedule(lr=lambda step: 0.1 / (step + 1))
    elif i == 5:
        with pytest.warns(UserWarning, match="ends that schedule"):
            side.optimizer.param_groups[0]["lr"] = 0.5
    elif i == 10:
        side.optimizer.schedule(group=1, lr=lambda step: 0.001 * step)
    elif i == 15:
        side.optimizer.schedule(lr=None)


def clip_norm(side: Side, i: int) -> None:
    """Clipping is switched on, its bound moves in both ways, and it is switched off."""
    optimizer = side.optimizer
    if i == 7:
        optimizer.max_grad_norm = 0.5
    elif 7 < i < 12:
        optimizer.max_grad_norm = 0.3 / i
    elif i == 12:
        side.kept["bound"] = optimizer.max_grad_norm = torch.tensor(0.2)
    elif 12 < i < 17:
        side.kept["bound"].fill_(0.01 * i)
    elif i == 17:
        optimizer.max_grad_norm = torch.tensor(0.05)
    elif i == 20:
        optimizer.max_grad_norm = None


def skipping(side: Side, i: int) -> None:
    if i == 6:
        side.optimizer.skip_nonfinite = True
    elif i == 15:
        side.optimizer.skip_nonfinite = False


def parameter_rebound(side: Side, i: int) -> None:
    if i in (6, 7, 14):
        side.model.outer.weight.data = side.model.outer.weight.data.clone() * 0.9


def module_moved(side: Side, i: int) -> None:
    if i == 6:
        side.model.to(torch.float64)
        for p in side.params:
            p.grad = None
    elif i == 12:
        side.model.to(torch.float32)
        for p in side.params:
            p.grad = None


def group_added(side: Side, i: int) -> None:
    if i == 6:
        extra = nn.Parameter(torch.full((3, 2), 0.5, device=side.model.gate.device, dtype=side.model.gate.dtype))
        side.optimizer.add_param_group({"params": [("extra", extra)], "lr": 0.3})


def checkpoint_loaded(side: Side, i: int) -> None:
    if i == 5:
        side.kept["saved"] = copy.deepcopy((side.model.state_dict(), side.optimizer.state_dict()))
    elif i in (9, 10):
        model, optimizer = side.kept["saved"]
        side.model.load_state_dict(model)
        side.optimizer.load_state_dict(optimizer)


def state_rebound(side: Side, i: int) -> None:
    if i == 7:
        state = side.optimizer.state[side.model.outer.weight]
        name = next(b.name for b in side.optimizer._rule.buffers if b.name in state)
        state[name] = torch.full_like(state[name], 0.1)


def static_choice(side: Side, i: int) -> None:
    choice = next((f for f in side.optimizer._declaration.statics if isinstance(f.default, bool)), None)
    if i == 7 and choice is not None:
        side.optimizer.param_groups[0][choice.name] = not choice.default


def maximized(side: Side, i: int) -> None:
    if i == 7:
        side.optimizer.param_groups[1]["maximize"] = True


def frozen_and_thawed(side: Side, i: int) -> None:
    if i == 6:
        side.model.gate.requires_grad_(True)
    elif i == 11:
        side.model.gate.requires_grad_(False)
        side.model.gate.grad = None


def eager_step_between(side: Side, i: int) -> None:
    """With gradients of its own, which do not stay."""
    if i % 5 == 4:
        before = [p.grad for p in side.params]
        for k, p in enumerate(side.params):
            p.grad = None if (k + i) % 3 == 0 or not p.requires_grad else torch.full_like(p, 0.01 * i)
        side.optimizer.step()
        for p, grad in zip(side.params, before, strict=True):
            p.grad = grad


SCENARIOS: list[Scenario] = [
    unchanged,
    lr_assigned,
    lr_filled,
    scheduled,
    lr_saved_and_put_back,
    every_hyperparameter,
    scheduled_on_device,
    clip_norm,
    skipping,
    parameter_rebound,
    module_moved,
    group_added,
    checkpoint_loaded,
    state_rebound,
    state_offloaded,
    static_choice,
    maximized,
    frozen_and_thawed,
    eager_step_between,
]

IN_16_BITS = [scenario for scenario in SCENARIOS if scenario is not module_moved]
"""Those that leave parameters in a dtype in which they can be stored in fewer bytes."""

RECAPTURES = {
    "scheduled_on_device": 2,
    "clip_norm": 4,  # two of them only where the graph holds the copying of a float32 bound
    "skipping": 2,
    "parameter_rebound": 2,
    "module_moved": 2,
    "group_added": 1,
    "state_rebound": 1,
    "state_offloaded": 2,
    "static_choice": 1,
    "maximized": 1,
}
"""How often a graph of either kind must be captured again; not at all where nothing is listed."""


def give(side: Side, i: int, absent: int = 0, keep: bool = False) -> None:
    """Gradients of step ``i``: new tensors, or written into the old ones; every ``absent``-th is None."""
    generator = torch.Generator().manual_seed(i)
    for k, p in enumerate(side.params):
        value = torch.randn(p.shape, generator=generator, device="cpu", dtype=torch.float32).to(p)
        if (absent and (k + i) % absent == 0) or not p.requires_grad:
            p.grad = None
        elif keep and p.grad is not None:
            p.grad.copy_(value)
        else:
            p.grad = value


def assert_equal(ours: Side, twin: Side, step: int) -> None:
    """Everything that training changes, bit for bit; NaN equals NaN."""
    for a, b in zip(ours.tensors(), twin.tensors(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True), step


class Sorted(co.CompiledOptimizer, granularity="tensor"):
    """A rule that loops cannot run."""

    lr: Number = hyper(default=0.1, ge=0)
    exp_avg = buffer()

    @staticmethod
    def coefficients(lr: Any) -> dict[str, Any]:
        return dict(lr=lr)

    @staticmethod
    def update(param: Any, grad: Any, c: Any, exp_avg: Any) -> dict[str, Any]:
        exp_avg = torch.lerp(exp_avg, grad, 0.3)
        return dict(step=c.lr * torch.sort(exp_avg, dim=-1).values, exp_avg=exp_avg)


KINDS: list[dict[str, Any]] = [
    {"optimizer": co.AdamW},
    {"optimizer": co.Adafactor},
    {"optimizer": co.Muon, "ns_steps": 1},  # one step of its iteration, which compiles sooner
    {"optimizer": co.Adafactor, "transposed": True},
    {"optimizer": Sorted},
]
"""An optimizer of every granularity. Stacks are updated in place, in copies, or by code that Inductor compiles."""


_INT8 = {"optimizer": co.AdamW, "dtype": torch.bfloat16, "state_dtype": "int8"}

_HALF = {"optimizer": co.AdamW, "dtype": torch.float16}

LOW_PRECISION: list[dict[str, Any]] = [
    *({**_INT8, "weights": mode} for mode in ("split8", "stochastic")),
    *({**_HALF, "weights": mode} for mode in ("kahan", "split16", "master")),
]
"""Parameters and state in fewer bytes, where even those of few elements are."""


def kind_name(kwargs: dict[str, Any]) -> str:
    words = [kwargs["optimizer"].__name__, kwargs.get("weights"), "transposed" * kwargs.get("transposed", False)]
    return "-".join(filter(None, words))


def recaptures_of(scenario: Scenario, kind: dict[str, Any]) -> int:
    """How often a graph of either kind must be captured again in this scenario."""
    has_choice = any(isinstance(f.default, bool) for f in kind["optimizer"]._declaration.statics)
    return 0 if scenario.__name__ == "static_choice" and not has_choice else RECAPTURES.get(scenario.__name__, 0)
