"""A whole training step in a graph: what its capture found and left in Python, and what every replay does besides."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from compiled_optim.capture.gradients import CapturedGradients
from compiled_optim.capture.run import graph_of
from compiled_optim.capture.surroundings import Surroundings
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule.fields import Hyper
from compiled_optim.step.engine import Engine


class RecordedStep:
    """What the capture of a training step found and left outside of the graph.

    Args:
        optimizers: those that the training step uses.
        modules: those that it reads.
        dropped: ids of the parameters whose gradients the step drops, as far as is known.
    """

    def __init__(
        self, optimizers: Sequence[CompiledOptimizer], modules: Sequence[nn.Module], dropped: Collection[int]
    ) -> None:
        self._optimizers = optimizers
        self._engines = [engine_of(o) for o in optimizers]
        self._surroundings = Surroundings(optimizers, modules)
        params = self._surroundings.all_params
        self._params = params
        self._gradients = CapturedGradients(params, self._surroundings.names, len(self._surroundings.params), dropped)
        self._before = [engine.runs for engine in self._engines]
        self._param_versions = [p._version for p in params]
        self._settled: object = None
        self._steps: list[int] = []
        self._hypers = [_hypers_of(o) for o in optimizers]
        self._versions = [{name: t._version for name, t in named.items()} for named in self._hypers]
        self._keys: list[tuple[object, ...] | None] = []
        self._scalers: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def capturing(self, launches: Sequence[int]) -> Iterator[None]:
        """Watch a capture of so many launches of each optimizer."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(watching_zero_grad(self._optimizers, self._gradients.dropped.report))
            for engine, count in zip(self._engines, launches, strict=True):
                stack.enter_context(graph_of(engine.step).reserve(count))
            yield
        self._gradients.leave()
        versions = zip(self._params, self._param_versions, strict=True)
        self._surroundings.mark({id(p) for p, version in versions if p._version != version})
        self._steps = [engine.runs - before for engine, before in zip(self._engines, self._before, strict=True)]
        self._scalers = [graph_of(engine.step).scaler for engine in self._engines]
        self._keys = self._followed()

    def check(self) -> None:
        """Refuse a function whose Python changed what a replay could not change again.

        Raises:
            RuntimeError: naming it.
        """
        for optimizer, named, versions, steps in zip(
            self._optimizers, self._hypers, self._versions, self._steps, strict=True
        ):
            if not steps:
                raise RuntimeError(f"the function did not step {type(optimizer).__name__}, which is one of the optimizers")
            for name, tensor in _hypers_of(optimizer).items():
                if tensor is not named.get(name) or tensor._version != versions[name]:
                    raise RuntimeError(
                        f"the function writes {name}, which every replay would repeat; call schedulers and set "
                        "hyperparameters outside of it"
                    )
        if None in self._keys:
            raise RuntimeError("the function changes groups or state of its optimizers; do that outside of it")
        change = self._surroundings.change()
        if change:
            raise RuntimeError(f"the function itself changes what every replay would find as it was: {change}")
        self._gradients.accept()

    def undo(self) -> None:
        """Put back gradients, and what modules hold, after a capture that failed."""
        self._gradients.put_back()
        self._surroundings.put_back()

    def change(self) -> str:
        """What the graph cannot follow, with old and new value; empty if there is nothing."""
        change = self._surroundings.change()
        if change or (self._gradients.repeats and self._surroundings.gradients == self._settled):
            return change
        self._settled = None
        return self._gradients.change()

    def follow(self) -> bool:
        """Hand over what was assigned since the last call; False if a graph of another step is needed."""
        return self._followed() == self._keys

    def replayed(self) -> None:
        """Do what the function's Python would have done besides."""
        if self._settled is None:
            self._gradients.hand_out()
            self._surroundings.look()
            self._settled = self._surroundings.gradients
        self._surroundings.count_versions()
        for engine, steps in zip(self._engines, self._steps, strict=True):
            engine.steps += steps
            engine.holdings.log.replays += 1

    def _followed(self) -> list[tuple[object, ...] | None]:
        return [followed(engine, scaler) for engine, scaler in zip(self._engines, self._scalers, strict=True)]


def followed(engine: Engine, scaler: tuple[Any, Any] | None = None) -> tuple[object, ...] | None:
    """What a graph of the engine's step depends on, after it took what was assigned; None if the step is not current.

    Args:
        engine: whose.
        scaler: the gradient scaler's tensors that the graph reads; by default those of the last step.
    """
    if engine.step is None:
        return None
    engine.holdings.check_numbers()
    graph = graph_of(engine.step)
    max_grad_norm, *_, skip_nonfinite = engine.clipping
    return graph.follow((max_grad_norm, *(scaler or graph.scaler), skip_nonfinite))


@contextlib.contextmanager
def watching_zero_grad(optimizers: Sequence[CompiledOptimizer], drop: Callable[[Iterable[Tensor]], None]) -> Iterator[None]:
    """Report gradients that ``zero_grad`` of an optimizer is about to set to None before a step used them."""
    engines = [engine_of(o) for o in optimizers]
    before = [engine.runs for engine in engines]

    def watched(optimizer: CompiledOptimizer) -> Callable[..., None]:
        original = optimizer.zero_grad

        @functools.wraps(original)
        def zero_grad(set_to_none: bool = True) -> None:
            if set_to_none:
                stepped = [engine for engine, runs in zip(engines, before, strict=True) if engine.runs > runs]
                used = {id(p) for engine in stepped for p in engine.params}
                drop(p for p in engine_of(optimizer).params if id(p) not in used)
            original(set_to_none)

        return zero_grad

    own = [vars(o).get("zero_grad") for o in optimizers]
    for optimizer in optimizers:
        vars(optimizer)["zero_grad"] = watched(optimizer)
    try:
        yield
    finally:
        for optimizer, assigned in zip(optimizers, own, strict=True):
            del vars(optimizer)["zero_grad"]
            if assigned is not None:
                vars(optimizer)["zero_grad"] = assigned


def _hypers_of(optimizer: CompiledOptimizer) -> dict[str, Tensor]:
    """The live hyperparameter tensors by name, but those that the step itself sets on a schedule."""
    scheduled = engine_of(optimizer).holdings.schedules.functions
    names = [h.name for h in optimizer._fields_of(Hyper)]
    return {
        f"param_groups[{i}][{name!r}]" + (f"[{k}]" if len(tensors) > 1 else ""): tensor
        for i, group in enumerate(optimizer.param_groups)
        for name in names
        if (i, name) not in scheduled
        for tensors in (group.read_only(name),)  # type: ignore[attr-defined]
        for k, tensor in enumerate(tensors)
    }
