"""A whole training step as a graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compiled_optim.capture.gradients import CapturedGradients, DroppedGradients, KeptGraphs
from compiled_optim.capture.graph import Graph
from compiled_optim.capture.guards import Surroundings
from compiled_optim.capture.inputs import CONSTANTS, StaticInputs
from compiled_optim.capture.run_step import Run, graph_of
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule.fields import Hyper
from compiled_optim.step.engine import Engine, recorded_by_runner


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
        self._scalers = [engine.clipping.scaler for engine in self._engines]
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
            engine.log.replays += 1

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
    engine.check_numbers()
    graph = graph_of(engine.step)
    max_grad_norm, *_, skip_nonfinite = engine.clip_args
    return graph.follow((max_grad_norm, *(scaler or engine.clipping.scaler), skip_nonfinite))


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
    scheduled = engine_of(optimizer).schedules.functions
    names = [h.name for h in optimizer._fields_of(Hyper)]
    return {
        f"param_groups[{i}][{name!r}]" + (f"[{k}]" if len(tensors) > 1 else ""): tensor
        for i, group in enumerate(optimizer.param_groups)
        for name in names
        if (i, name) not in scheduled
        for tensors in (group.read_only(name),)  # type: ignore[attr-defined]
        for k, tensor in enumerate(tensors)
    }


class FunctionRun(Run):
    """A whole training step."""

    alone = False

    def __init__(
        self,
        function: Callable[..., Any],
        optimizers: Sequence[CompiledOptimizer],
        modules: Sequence[nn.Module],
        warmup: int,
        recaptures: int,
        stream: torch.Stream | None,
        clone_outputs: bool,
    ) -> None:
        super().__init__(optimizers, warmup, recaptures, stream)
        self._function = function
        self._modules = modules
        self._clone_outputs = clone_outputs
        self._inputs: StaticInputs | None = None
        self._outputs: Any = None
        self._recorded: RecordedStep | None = None
        self._warmed: Surroundings | None = None
        self._kept_graphs = KeptGraphs()
        if stream is not None:
            self._kept_graphs.adopt(Surroundings(optimizers, modules).all_params)
        self._dropped: set[int] = set()
        self._launches: list[int] = []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One training step."""
        if self._moved():
            if self._captured:
                self._drop(f"the parameters moved from {self.device}")
            else:
                self._follow_device()
            self._inputs = self._recorded = self._outputs = self._warmed = None
        cause = ""
        if self._inputs is None:
            device = None if self._graph is None else self.device
            self._inputs = StaticInputs(self._function, device, args, kwargs)
        else:
            given = self._inputs.checked(args, kwargs)
            cause = self._inputs.change(given)
            if self._captured:
                assert self._recorded is not None
                cause = cause or self._recorded.change() or ("" if self._recorded.follow() else self._explain())
                if cause:
                    self._drop(cause)
                    self._recorded = self._outputs = None
            elif cause:
                self._pending = max(self._pending, 1)
            self._inputs.load(given)
        if not self._captured:
            if self._graph is None:
                return self._hand_out(self._call())
            if self._pending or not self._follow_device() or not self._is_settled():
                return self._hand_out(self._warm_up(self._graph))
            self._capture(self._graph)
        assert self._graph is not None
        assert self._recorded is not None
        self._graph.replay()
        self._recorded.replayed()
        return self._hand_out(self._outputs)

    def release(self) -> None:
        """Free the graph, the copies of the inputs and the outputs."""
        super().release()
        self._inputs = self._recorded = self._outputs = self._warmed = None

    def _call(self) -> Any:
        assert self._inputs is not None
        result = self._function(*self._inputs.args, **self._inputs.kwargs)
        return tree_map(_detached, result)

    def _record(self) -> Any:
        with recorded_by_runner(self.device):
            return self._call()

    def _hand_out(self, outputs: Any) -> Any:
        if not self._clone_outputs:
            return outputs
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, outputs)

    def _warm_up(self, graph: Graph) -> Any:
        """Run the function as it is, and note what its capture is to find."""
        self._pending = max(self._pending - 1, 0)
        dropped = DroppedGradients([p for engine in self._engines for p in engine.params])
        launches = [engine.launches for engine in self._engines]
        around = Surroundings(self._optimizers, self._modules)
        with self._kept_graphs.watching(around.all_params), watching_zero_grad(self._optimizers, dropped.report):
            outputs = graph.warm_up(self._call)
        self._dropped = dropped.ids
        self._launches = [engine.launches - before for engine, before in zip(self._engines, launches, strict=True)]
        self._warmed = Surroundings(self._optimizers, self._modules)
        return outputs

    def _is_settled(self) -> bool:
        """Whether a capture would find what the call before left, and no step would be derived anew.

        It is an error if somebody keeps the graph of an uncaptured step, since no capture is possible then.
        """
        stepped = zip(self._engines, self._launches, strict=True)
        known = all(followed(engine) is not None for engine, launches in stepped if launches)  # else the capture refuses
        if not known or self._warmed is None or self._warmed.change():
            return False
        return self._kept_graphs.allow_capture(self._warmed.all_params, self._warmed.names)

    def _capture(self, graph: Graph) -> None:
        recorded = RecordedStep(self._optimizers, self._modules, self._dropped)
        torch.clear_autocast_cache()  # weights that were cast outside would not be cast again by a replay
        try:
            with recorded.capturing(self._launches):
                self._outputs = graph.capture(self._record)
            recorded.check()
        except BaseException:
            self._outputs = None
            self._pending = 1  # a step in between derives what the function may have changed
            graph.release()
            recorded.undo()
            raise
        finally:
            torch.clear_autocast_cache()  # nor do those that the graph casts exist before it is replayed
        self._recorded = recorded
        self._note_capture()


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    if not isinstance(output, CONSTANTS):
        raise TypeError(
            f"a function in a CUDAGraphRunner must return tensors, numbers, strings or None, or tuples, lists or dicts of "
            f"them, got {type(output).__name__}"
        )
    return output
