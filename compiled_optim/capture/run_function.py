"""A whole training step as a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compiled_optim.capture.gradients import DroppedGradients
from compiled_optim.capture.graph import Graph
from compiled_optim.capture.inputs import CONSTANTS, StaticInputs
from compiled_optim.capture.kept_graphs import KeptGraphs
from compiled_optim.capture.recorded_step import RecordedStep, followed, watching_zero_grad
from compiled_optim.capture.run import Run
from compiled_optim.capture.surroundings import Surroundings
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.step.hand_captures import recorded_by_runner


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
