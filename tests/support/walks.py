"""Random walks over what may happen between two steps: a called, a compiled, an inlined and a captured step stay equal.

A walk is a seed, which draws an optimizer, the events before each step and its gradients. Every side goes the same walk. A
side is a way to step; those with the same arithmetic must agree bit for bit, others to the last few bits of float64.
"""

from __future__ import annotations

import copy
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from simulated_trees import SimulatedTrees
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer

OPTIMIZERS: list[tuple[type[CompiledOptimizer], dict[str, Any]]] = [
    (co.AdamW, {"betas": (0.6, 0.8), "eps": 1e-2, "weight_decay": 0.3}),
    (co.AdamW, {"betas": (0.6, 0.8), "eps": 1e-2, "amsgrad": True}),
    (co.SGD, {"momentum": 0.7, "weight_decay": 0.2}),
    (co.SGD, {}),
    (co.NAdam, {"betas": (0.6, 0.8), "eps": 1e-2, "momentum_decay": 0.1}),
    (co.Lion, {"betas": (0.6, 0.8), "weight_decay": 0.3}),
    (co.RMSprop, {"alpha": 0.7, "eps": 1e-2}),
]
SHAPES = ((2, 3), (3,), ())
STEPS = 6


@dataclass
class Side:
    """An optimizer, and how it is stepped.

    Attributes:
        scale: of a gradient scaler that calls the steps; None without one.
        overflows: whether the next gradients are infinite.
        is_unseen: whether something happened that only a step outside of a graph sees, which the next one must be.
    """

    name: str
    optimizer: CompiledOptimizer
    params: list[nn.Parameter]
    run: Callable[[Side, list[Tensor | None]], object]
    replays: bool = False
    scale: float | None = None
    overflows: bool = False
    is_unseen: bool = False
    kept: list[Any] = field(default_factory=list)

    def step(self, grads: list[Tensor | None]) -> None:
        """Step with ``grads``, which a gradient scaler has scaled if there is one."""
        optimizer: Any = self.optimizer
        if self.scale is not None:
            optimizer.grad_scale = torch.tensor(self.scale, dtype=torch.float64)
            optimizer.found_inf = torch.tensor(float(self.overflows))
        (called if self.is_unseen else self.run)(self, grads)
        self.is_unseen = self.overflows = False
        if self.scale is not None:
            del optimizer.grad_scale, optimizer.found_inf
        for param in self.params:
            param.grad = None

    @property
    def state(self) -> dict[str, Any]:
        """All that a step decides and computes, by name."""
        optimizer = self.optimizer
        norm = optimizer.grad_norm  # None also before code of no operations, in whose place none is called
        found: dict[str, Any] = {"norm": torch.zeros((), dtype=torch.float64) if norm is None else norm.double()}
        found["skipped steps"] = optimizer.skipped_steps
        for i, param in enumerate(self.params):
            found[f"p{i}"] = param.detach()
            found |= {f"{name} of p{i}": entry for name, entry in optimizer.state.get(param, {}).items()}
        for i, numbers in enumerate(optimizer.hyperparameters()):
            found |= {f"{name} of group {i}": torch.tensor(number) for name, number in numbers.items()}
        return found


def called(side: Side, grads: list[Tensor | None]) -> None:
    """A step of the optimizer itself."""
    for param, grad in zip(side.params, grads, strict=True):
        param.grad = grad
    side.optimizer.step()


def whole(params: list[nn.Parameter], grads: list[Tensor | None], optimizer: CompiledOptimizer) -> None:
    """A training step whose gradients are ``grads``."""
    terms = [(p * g).sum() for p, g in zip(params, grads, strict=True) if g is not None]
    if terms:
        sum(terms[1:], terms[0]).backward()
    optimizer.step()


def compiled(backend: Any, *, with_backward: bool = False) -> Callable[[Side, list[Tensor | None]], object]:
    """A step, or a training step, that is compiled."""
    function = torch.compile(whole, backend=backend, fullgraph=True)
    steps: dict[int, Any] = {}

    def run(side: Side, grads: list[Tensor | None]) -> None:
        if with_backward:
            function(side.params, grads, side.optimizer)
            return
        for param, grad in zip(side.params, grads, strict=True):
            param.grad = grad
        step = steps.setdefault(id(side.optimizer), torch.compile(side.optimizer.step, backend=backend, fullgraph=True))
        step()

    return run


def captured() -> Callable[[Side, list[Tensor | None]], object]:
    """A step that a runner captures and replays."""
    runners: dict[int, co.CUDAGraphRunner] = {}

    def run(side: Side, grads: list[Tensor | None]) -> None:
        for param, grad in zip(side.params, grads, strict=True):
            param.grad = grad
        if id(side.optimizer) not in runners:
            runners[id(side.optimizer)] = co.CUDAGraphRunner(side.optimizer, warmup=1, recaptures=1000)
        runners[id(side.optimizer)].step()

    return run


def make(name: str, lowering: str, run: Callable[[Side, list[Tensor | None]], object], seed: int, **more: Any) -> Side:
    """One side; every call with the same seed makes the same one."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    kind, options = random.choice(OPTIMIZERS)
    params = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]
    for param in params:
        param.requires_grad_(random.random() < 0.7)
    split = random.randrange(1, len(params))
    groups = [{"params": params[:split]}, {"params": params[split:], "lr": 0.02}]
    return Side(name, kind(groups, **{"lr": 0.05, **options}, lowering=lowering), params, run, **more)


def _hyper(side: Side, random: Random) -> tuple[int, str, float]:
    """A group, one of its hyperparameters that is a single number, and a value for it; momentum is 0 half of the time."""
    index = random.randrange(len(side.optimizer.param_groups))
    group = side.optimizer.param_groups[index]
    names = [h.name for h in side.optimizer._declaration.hypers if not h.is_tuple and h.name in group]
    structural = side.optimizer._rule.structural_hypers
    name = random.choice([*names, *[n for n in structural for _ in range(3)]])
    value = random.uniform(0.01, 0.1)
    return index, name, random.choice((0.0, 5 * value)) if name in structural else value


def assign(side: Side, random: Random) -> None:
    index, name, value = _hyper(side, random)
    side.optimizer.param_groups[index][name] = random.choice((value, torch.tensor(value, dtype=torch.float64)))


def multiply(side: Side, random: Random) -> None:
    index, name, value = _hyper(side, random)
    side.optimizer.param_groups[index][name] *= 1 + value


def write_where_it_lies(side: Side, random: Random) -> None:
    index, name, value = _hyper(side, random)
    found: Any = side.optimizer.hyperparameter(name, index)
    group: Any = side.optimizer.param_groups[index]
    random.choice((found, *group.tensors(name))).fill_(value)
    side.is_unseen |= side.replays and name in side.optimizer._rule.structural_hypers


def take_a_tensor(side: Side, random: Random) -> None:
    """It is written later."""
    index, name, _ = _hyper(side, random)
    side.kept.append((name, side.optimizer.hyperparameter(name, index)))


def write_to_a_taken_tensor(side: Side, random: Random) -> None:
    if side.kept:
        name, tensor = side.kept[-1]
        tensor.fill_(random.choice((0.0, 0.3)) if name in side.optimizer._rule.structural_hypers else 0.07)
        side.is_unseen |= side.replays and name in side.optimizer._rule.structural_hypers


def schedule_by_torch(side: Side, random: Random) -> None:
    factor = random.uniform(0.5, 1.0)
    torch.optim.lr_scheduler.MultiplicativeLR(side.optimizer, lambda _: factor).step()


def schedule_on_the_device(side: Side, random: Random) -> None:
    rate = random.uniform(0.01, 0.1)
    names = ["lr", *side.optimizer._rule.structural_hypers]
    side.optimizer.schedule(**{random.choice(names): random.choice((lambda step: rate / step, None))})


def clip(side: Side, random: Random) -> None:
    limit = random.uniform(0.1, 3.0)
    side.optimizer.max_grad_norm = random.choice((None, limit, limit, torch.tensor(limit, dtype=torch.float64)))


def skip(side: Side, random: Random) -> None:
    side.optimizer.skip_nonfinite = not side.optimizer.skip_nonfinite


def scale(side: Side, random: Random) -> None:
    side.scale = None if side.scale is not None else 2.0 ** random.randrange(8)


def overflow(side: Side, random: Random) -> None:
    side.overflows = side.scale is not None or side.optimizer.skip_nonfinite


def freeze_or_unfreeze(side: Side, random: Random) -> None:
    param = random.choice(side.params)
    param.requires_grad_(not param.requires_grad)


def add_a_group(side: Side, random: Random) -> None:
    if len(side.params) < 6:
        value = torch.full((random.randrange(1, 4),), random.uniform(-1, 1), dtype=torch.float64)
        side.params.append(nn.Parameter(value, requires_grad=random.random() < 0.7))
        side.optimizer.add_param_group({"params": [side.params[-1]], "lr": random.uniform(0.01, 0.1)})


def remove_a_group(side: Side, random: Random) -> None:
    if len(side.optimizer.param_groups) > 1:
        side.optimizer.param_groups.pop(random.randrange(len(side.optimizer.param_groups)))


def replace_a_group(side: Side, random: Random) -> None:
    index = random.randrange(len(side.optimizer.param_groups))
    side.optimizer.param_groups[index] = {**side.optimizer.param_groups[index], "lr": random.uniform(0.01, 0.1)}


def choose(side: Side, random: Random) -> None:
    """Another static choice, or sign."""
    own = {f.name for f in side.optimizer._declaration.statics} & {"amsgrad", "centered"}
    group, name = random.choice(side.optimizer.param_groups), random.choice(sorted({"maximize", *own}))
    group[name] = not group[name]


def load(side: Side, random: Random) -> None:
    """A state dict with other numbers. State that no step has used may be there or not: a graph needs it in advance."""
    saved = copy.deepcopy(side.optimizer.state_dict())
    for entries in (e for e in saved["state"].values() if e["step"]):
        for name, entry in entries.items():
            entries[name] = entry + 3 if name == "step" else entry * 0.5
    saved["param_groups"][0]["lr"] = random.uniform(0.01, 0.1)
    side.optimizer.load_state_dict(saved, strict=False)  # a choice that was taken back leaves state


def _entry(side: Side, random: Random) -> tuple[Any, str] | None:
    """The state of a parameter, and the name of an entry of it, if it has any."""
    entries = side.optimizer.state.get(random.choice(side.params))
    return (entries, random.choice(sorted(entries))) if entries else None


def _other(name: str, entry: Tensor, random: Random) -> Tensor:
    return torch.full_like(entry, random.randrange(1, 9)) if name == "step" else entry.clone() * random.uniform(0.5, 1.0)


def replace_state(side: Side, random: Random) -> None:
    if found := _entry(side, random):
        entries, name = found
        entries[name] = _other(name, entries[name], random)


def move_state(side: Side, random: Random) -> None:
    if found := _entry(side, random):
        entries, name = found
        entries[name].data = _other(name, entries[name], random)
        side.is_unseen |= side.replays or not entries[name].dim()


def write_state(side: Side, random: Random) -> None:
    if found := _entry(side, random):
        entries, name = found
        entries[name].copy_(_other(name, entries[name], random))


def drop_state(side: Side, random: Random) -> None:
    side.optimizer.state.pop(random.choice(side.params), None)


def move_a_parameter(side: Side, random: Random) -> None:
    param = random.choice(side.params)
    param.data = param.data.clone() * random.uniform(0.5, 1.0)


def step_outside(side: Side, random: Random) -> None:
    """The next step is called."""
    side.is_unseen = True


EVENTS: list[Callable[[Side, Random], None]] = [
    assign,
    multiply,
    write_where_it_lies,
    take_a_tensor,
    write_to_a_taken_tensor,
    schedule_by_torch,
    schedule_on_the_device,
    clip,
    skip,
    scale,
    overflow,
    freeze_or_unfreeze,
    freeze_or_unfreeze,
    add_a_group,
    remove_a_group,
    replace_a_group,
    choose,
    load,
    replace_state,
    move_state,
    write_state,
    drop_state,
    move_a_parameter,
    step_outside,
]


def gradients(side: Side, seed: int, absent: list[int]) -> list[Tensor | None]:
    """Those of a step; each side gets tensors of its own."""
    generator = torch.Generator().manual_seed(seed)
    members = {p for g in side.optimizer.param_groups for p in g["params"]}
    found: list[Tensor | None] = []
    for i, param in enumerate(side.params):
        grad = torch.randn(param.shape, generator=generator, dtype=param.dtype) * (side.scale or 1.0)
        grad = grad.fill_(math.inf) if side.overflows and i == 1 else grad
        found.append(grad if param.requires_grad and i not in absent and param in members else None)
    if side.overflows and all(g is None or bool(g.isfinite().all()) for g in found):
        first = next((g for g in found if g is not None), None)
        if first is not None:
            first.fill_(math.inf)
    return found


def sides(seed: int, trees: SimulatedTrees | None) -> Iterator[tuple[Side, Side | None]]:
    """The sides of a walk, each with the one that it must equal bit for bit, or with None. Those that trace are drawn."""
    random = Random(seed)
    yield make("eager", "eager", called, seed), None
    reference = make("multi_tensor", "multi_tensor", called, seed)
    yield reference, None
    if trees is not None:
        yield make("a runner", "multi_tensor", captured(), seed), reference
        if random.random() < 0.5:
            yield make("an operator in graphs", "multi_tensor", compiled(trees), seed, replays=True), reference
        else:
            yield make("inlined in graphs", "inductor", compiled(trees), seed, replays=True), None
        return
    if random.random() < 0.3:
        yield make("an operator", "multi_tensor", compiled("eager"), seed), reference
    backend = random.choice(("eager", "aot_eager"))
    if random.random() < 0.5:
        yield make("inlined", "inductor", compiled("eager"), seed), None
    else:
        yield make("inlined after its backward", "inductor", compiled(backend, with_backward=True), seed), None


def check(side: Side, other: Side, *, bitwise: bool) -> None:
    """Raise where the two differ."""
    ours, theirs = side.state, other.state
    assert ours.keys() == theirs.keys(), f"{side.name} has {sorted(ours.keys() ^ theirs.keys())}, or {other.name} has"
    for name, value in ours.items():
        expected = theirs[name]
        same = value is expected or torch.allclose(value, expected, rtol=0, atol=0, equal_nan=True)
        if not same and not bitwise:
            same = torch.allclose(value, expected, rtol=1e-9, atol=1e-11, equal_nan=True)
        assert same, f"{name} is {value} with {side.name}, and {expected} with {other.name}"


@contextmanager
def world(seed: int) -> Iterator[SimulatedTrees | None]:
    """Where a walk goes: every other one where the CPU has graphs."""
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # the simulated graphs look for what is left over
    limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 10000, "trace_autograd_ops": True}
    limits["automatic_dynamic_shapes"] = seed % 2 == 0
    with torch._dynamo.config.patch(limits), pytest.MonkeyPatch.context() as patch:
        yield SimulatedTrees(patch) if seed % 2 else None
    torch._dynamo.reset()
    gc.unfreeze()


def walk(seed: int, steps: int = STEPS) -> Counter[str]:
    """Go one walk; what happened how often.

    Raises:
        AssertionError: two sides differ, or a step fails. The message has the seed and all events.
    """
    random = Random(seed)
    happened: list[str] = []
    with world(seed) as trees:
        own = list(sides(seed, trees))
        reference = own[0][0]
        for index in range(steps):
            events = random.choices(EVENTS, k=random.choice((0, 1, 2, 3, 4)) if index else 0)
            numbers = [random.randrange(2**32) for _ in events]
            absent = [i for i in range(8) if random.random() < 0.1]
            happened += [event.__name__ for event in events]
            side = reference
            try:
                for side, _ in own:
                    for event, number in zip(events, numbers, strict=True):
                        event(side, Random(number))
                    side.step(gradients(side, seed * 1000 + index, absent))
                for side, twin in own[1:]:
                    check(side, reference, bitwise=False)
                    if twin is not None:
                        check(side, twin, bitwise=True)
            except Exception as error:
                kind = type(reference.optimizer).__name__
                raise AssertionError(f"walk {seed} of {kind}, step {index} of {side.name}: {error}; {happened}") from error
            happened.append("step")
    return Counter(happened)


def walks(count: int, first: int) -> int:
    """Go ``count`` walks, from seed ``first`` on; in how many of them sides differ."""
    failed, happened = 0, Counter[str]()
    for done in range(count):
        try:
            happened += walk(first + done)
        except AssertionError as error:
            failed += 1
            print(error, flush=True)
        if done % 10 == 9 or done == count - 1:
            print(f"{done + 1} walks, in {failed} of them sides differ: {dict(happened)}", flush=True)
    return failed
