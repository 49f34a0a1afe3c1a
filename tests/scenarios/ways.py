"""The ways to run a training step, and what each does after a change, as one line."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import simulated_graph
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import compiled_optim as co
from compiled_optim.optimizer import engine_of
from scenarios.changes import CHANGES, Change, Model, Training, values

X = values(6, 4)
BEFORE, AFTER = 4, 3
"""Steps before a change, of which the last ones are steady in each way, and after it."""

_MEMORY = re.compile(r"(?:parameter|state) '[^']*' (?:of '[^']*' )?\(.*|tables were made anew")
"""The part of a cause that names addresses, which may be what they were."""

Step = Callable[[Tensor], Any]
Wrap = Callable[[Step, Training], Step]


def _called(train: Step, t: Training) -> Step:
    return train


def _whole(train: Step, t: Training) -> Step:
    return torch.compile(train, backend="eager", fullgraph=True)


def _in_parts(step: Callable[[Training], Callable[[], Any]]) -> Wrap:
    """Forward and backward run as they are, and what ``step`` makes takes the optimizer's step."""

    def wrap(train: Step, t: Training) -> Step:
        take = step(t)

        def train_in_parts(x: Tensor) -> None:
            t.model(x).square().mean().backward()
            take()
            t.optimizer.zero_grad(set_to_none="keeps" not in t.kept)

        return train_in_parts

    return wrap


def _compiled_alone(t: Training) -> Callable[[], Any]:
    return torch.compile(lambda: t.optimizer.step(), backend="eager", fullgraph=True)


def _captured(t: Training) -> Callable[[], Any]:
    return co.CUDAGraphRunner(t.optimizer, warmup=1).step


def _run(train: Step, t: Training) -> Step:
    return co.CUDAGraphRunner(train, optimizers=t.optimizer, modules=t.model, warmup=1)


WAYS: dict[str, tuple[str, Wrap]] = {
    "called, eager": ("eager", _called),
    "called": ("auto", _called),
    "called, inductor": ("inductor", _called),
    "step": ("auto", _in_parts(_compiled_alone)),
    "step, inlined": ("inductor", _in_parts(_compiled_alone)),
    "whole": ("auto", _whole),
    "whole, inlined": ("inductor", _whole),
    "captured": ("auto", _in_parts(_captured)),
    "runner": ("auto", _run),
}
"""By name, the lowering and what makes a step of a function that trains.

The first, which compiles nothing, is the reference of the others.
"""

COMPILED = ("called, inductor", "step", "step, inlined", "whole", "whole, inlined")


@contextlib.contextmanager
def _world(*, has_graphs: bool) -> Iterator[None]:
    torch._dynamo.reset()
    limits = {"recompile_limit": 100, "accumulated_recompile_limit": 1000, "trace_autograd_ops": True}
    with torch._dynamo.config.patch(limits), pytest.MonkeyPatch.context() as patch:
        if has_graphs:
            simulated_graph.install(patch)
        yield
    torch._dynamo.reset()


def _begun(change: Change, way: str) -> tuple[Training, Step]:
    lowering, wrap = WAYS[way]
    model, options = Model(), dict(change.options)
    rate = torch.tensor(options["lr"], dtype=torch.float64)
    if change.has_tensor_rate:
        options["lr"] = rate
    training = Training(model, change.kind(model.named_parameters(), **options, lowering=lowering), rate)
    change.begin(training)

    def train(x: Tensor) -> None:
        training.model(x).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none="keeps" not in training.kept)

    return training, wrap(train, training)


class _Watch:
    """What happens to an optimizer: steps made anew, other kernels, graphs that were traced or captured.

    Traces are counted where the user compiles. A called step traces a kernel once in a process.
    """

    def __init__(self, training: Training, *, counts_traces: bool) -> None:
        self._engine = engine_of(training.optimizer)
        self._step, self.rebuilt = self._engine.step, 0
        self._keys, self._captures = dict(self._engine.log.keys), len(self._engine.log.captures)
        self._counts_traces = counts_traces
        self._traced = counters["stats"]["unique_graphs"]

    def look(self) -> None:
        self.rebuilt += self._engine.step is not self._step
        self._step = self._engine.step

    def seen(self) -> list[str]:
        pairs = [(self._keys.get(at), key) for at, key in self._engine.log.keys.items()]
        changes = [", ".join(key.changes_from(old)) for old, key in pairs if old not in (None, key)]
        traced = (counters["stats"]["unique_graphs"] - self._traced) * self._counts_traces
        return [
            *["made anew" + f" {self.rebuilt} times" * (self.rebuilt > 1)] * bool(self.rebuilt),
            *[f"another kernel: {change}" for change in dict.fromkeys(changes)],
            *["traced" + f" {traced} times" * (traced > 1)] * bool(traced),
            *[f"captured: {_MEMORY.sub('memory', cause)}" for cause in self._engine.log.captures[self._captures :]],
        ]


def _first_line(error: BaseException | Warning) -> str:
    return str(error).strip().partition("\n")[0]


def _trained(change: Change, way: str) -> tuple[str, list[Tensor]]:
    """What a ``change`` leads to where steps run in a ``way``, in words, and the parameters some steps later."""
    with _world(has_graphs=way.startswith(("captured", "runner"))), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        training, step = _begun(change, way)
        for _ in range(BEFORE):
            step(X)
        params = list(training.model.parameters())
        warned.clear()
        watch, error = (
            _Watch(training, counts_traces=not way.startswith("called")),
            "",
        )  # there, a process traces a kernel once
        try:
            change.do(training)
            watch.look()
            for _ in range(AFTER):
                step(X)
                watch.look()
        except Exception as raised:
            error = f"{type(raised).__name__}: {_first_line(raised)}"
        own = [w for w in warned if "compiled_optim" in str(w.message) or w.category in (UserWarning, RuntimeWarning)]
        said = [f"warns: {_first_line(w.message)}" for w in own]
        params = list({id(p): p for p in [*params, *training.model.parameters()]}.values())
        words = [*watch.seen(), *dict.fromkeys(said), *[f"raises {error}"] * bool(error)]
        return "; ".join(words), [p.detach().clone() for p in params]


def _near(params: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    if [p.shape for p in params] != [p.shape for p in expected]:
        return False
    share = 1e-9 if all(p.dtype == torch.float64 for p in expected) else 1e-4
    return all(torch.allclose(p, e, rtol=share, atol=share / 1000) for p, e in zip(params, expected, strict=True))


@functools.cache
def _reference(name: str) -> list[Tensor]:
    return _trained(CHANGES[name], next(iter(WAYS)))[1]


def outcome(name: str, way: str) -> str:
    """What the change of this ``name`` leads to where steps run in a ``way``.

    The words say, in this order: steps that were made anew, the differences of kernels that others took the place of, graphs
    that Dynamo traced, causes of captures, warnings, an error, and whether the parameters are others than of uncompiled
    steps. They are empty where the step goes on as it was.
    """
    words, params = _trained(CHANGES[name], way)
    return "; ".join([*[words] * bool(words), *["OTHER NUMBERS"] * (not _near(params, _reference(name)))])
