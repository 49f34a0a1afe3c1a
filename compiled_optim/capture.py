"""Optimizer steps and whole training steps as CUDA graphs that follow the training.

A graph repeats what was recorded with the addresses it had then. Kernels of this package read the addresses of gradients
and hyperparameters from tables, which are brought up to date before a replay; whatever a table cannot follow makes the
runner capture again, or refuse. It never replays what is stale.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compiled_optim.events import spend
from compiled_optim.graphs import GRAPHS, Graph
from compiled_optim.kept_graphs import KeptGraphs
from compiled_optim.optimizer import CompiledOptimizer, recorded_by_runner
from compiled_optim.plan import parameter_name
from compiled_optim.recorded_step import RecordedStep, watching_zero_grad
from compiled_optim.referenced_modules import modules_of
from compiled_optim.staleness import DroppedGradients, Surroundings, described, differences
from compiled_optim.static_inputs import CONSTANTS, StaticInputs


class CUDAGraphRunner:
    """Runs an optimizer's step, or a whole training step, as a CUDA graph.

    ``CUDAGraphRunner(opt)`` runs the step alone: :meth:`step` is ``opt.step`` with its launches replayed. Gradients may be
    new tensors, absent or at other addresses in every step. ``CUDAGraphRunner(train_step, optimizers=opt)`` runs a function
    with forward, backward, step and ``zero_grad``: ``runner(*inputs)`` copies the inputs in and replays.

    N calls are N updates: the first ``warmup`` calls run as usual, then one is captured and replayed. Hyperparameters may be
    assigned or written in place between calls, schedulers called, checkpoints loaded and steps taken outside of the runner.
    What a graph cannot follow, such as a parameter that moved, a group that was added, clipping switched on or another
    number of entries in a sparse gradient, takes one call that runs as usual, and is captured again in the next.

    In a captured function everything but tensors is as it was in the capture: its Python runs no more. Gradients that it
    drops first, with ``zero_grad(set_to_none=True)`` of one of the optimizers, are None in the capture from the start; those
    that it leaves are memory of the graph, which the next call writes. Schedulers belong outside; inputs are tensors of the
    first call's shapes, and a number among them that changes is captured again. Other modules and buffers, ``train()``,
    ``eval()``, ``requires_grad`` and autocast are noticed in the modules the function refers to: by closure, default, global
    or attribute of the object it is bound to.

    The step alone of an optimizer that works on whole tensors or sparse gradients copies the gradients to memory of the
    graph first. L-BFGS calls its closure in a step, so that only a function can be captured, with ``fixed_iterations``.

    Where there are no CUDA graphs, everything runs uncaptured, which is said once, with equal checks and results.

    Args:
        target: an optimizer, or a function that steps ``optimizers`` exactly as often in every call.
        optimizers: every optimizer that the function steps.
        warmup: how many calls run as usual before the first capture; at least 1.
        recaptures: how many stale graphs may be replaced before it is an error.
        modules: the modules that the function reads, where it does not refer to them itself.
        clone_outputs: return copies of the function's tensors. Otherwise they are the graph's own memory, which the next
            call overwrites. Either way they are detached.

    Raises:
        TypeError: an argument is not what its description says.
        ValueError: ``warmup`` or ``recaptures`` is out of range, or an optimizer is given twice, or the optimizers'
            parameters are on several devices, or elsewhere than ``stream``, or not updated with
            ``lowering="multi_tensor"``, or L-BFGS would decide on the host when to stop.
    """

    def __init__(
        self,
        target: CompiledOptimizer | Callable[..., Any],
        optimizers: CompiledOptimizer | Sequence[CompiledOptimizer] | None = None,
        warmup: int = 3,
        *,
        recaptures: int = 8,
        modules: nn.Module | Iterable[nn.Module] | None = None,
        clone_outputs: bool = True,
        stream: torch.Stream | None = None,
    ) -> None:
        _check_count("warmup", warmup, 1)
        _check_count("recaptures", recaptures, 0)
        self._run: _StepRun | _FunctionRun
        if isinstance(target, CompiledOptimizer):
            if optimizers is not None or modules is not None:
                raise TypeError("a runner of one optimizer's step takes neither optimizers nor modules")
            self._run = _StepRun(target, warmup, recaptures, stream)
        else:
            if not callable(target):
                raise TypeError(f"target must be an optimizer of compiled_optim or a function, got {type(target).__name__}")
            given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers or ())
            if not given or not all(isinstance(o, CompiledOptimizer) for o in given):
                raise TypeError("optimizers must be the optimizers of compiled_optim that the function steps, at least one")
            if len(set(map(id, given))) < len(given):
                raise ValueError("optimizers holds the same optimizer twice")
            if modules is None:
                found = list(modules_of(target))
            else:
                found = [modules] if isinstance(modules, nn.Module) else list(modules)
            self._run = _FunctionRun(target, given, found, warmup, recaptures, stream, clone_outputs)
        self._finalizer = weakref.finalize(self, self._run.slot.release)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step, as the optimizer's own ``step`` does, hooks included.

        ``torch.amp.GradScaler.step`` takes the runner in the optimizer's place.

        Args:
            closure: re-evaluates the model, with gradients enabled, and returns the loss; it is not captured.

        Raises:
            TypeError: the runner holds a whole training step.
            RuntimeError: it was released, or its graph is stale more often than ``recaptures`` allows, naming what changed.
            RecompileError: the graph is stale inside ``no_recompiles``. The step was not taken.
        """
        if not isinstance(self._alive(), _StepRun):
            raise TypeError("this runner holds a whole training step; call it with the step's inputs")
        assert isinstance(self._run, _StepRun)
        scaler: dict[str, Any] = {name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)}
        return self._run.step(closure, scaler)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step on these inputs and return what the function returns.

        Raises:
            TypeError: the runner holds an optimizer's step alone, or an input or what the function returns is neither a
                tensor nor a constant.
            ValueError: an input's structure, shape, dtype or device is another than in the first call, naming it.
            RuntimeError: as :meth:`step`; or the function does in Python what a replay could not repeat.
            RecompileError: as :meth:`step`.
        """
        if not isinstance(self._alive(), _FunctionRun):
            raise TypeError("this runner holds an optimizer's step; call its step()")
        assert isinstance(self._run, _FunctionRun)
        return self._run(args, kwargs)

    def release(self) -> None:
        """Free the graph and its memory; also done at exit and with the last reference. The runner is of no use then.

        Gradients and outputs that somebody holds stay valid.
        """
        if "_run" in vars(self):
            self._run.release()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer whose step the runner holds."""
        if not isinstance(self._run, _StepRun):
            raise AttributeError("param_groups")
        return self._run.optimizer.param_groups

    _step_supports_amp_scaling = True

    def _alive(self) -> _StepRun | _FunctionRun:
        if self._run.released:
            raise RuntimeError("this CUDAGraphRunner was released; make a new one")
        return self._run

    def __enter__(self) -> CUDAGraphRunner:
        return self

    def __exit__(self, error: object, *details: object) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(RuntimeError):  # which would hide it
            self.release()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a CUDAGraphRunner holds device memory and cannot be copied or pickled; make a new one")


class _Slot:
    """Where a runner's graph is: apart from everything that may lead back to the runner and keep it alive."""

    graph: Graph | None = None

    def release(self) -> None:
        """Free the graph."""
        if self.graph is not None:
            self.graph.release()


class _Run:
    """What both kinds of runner share: one graph, and when it may be captured.

    Args:
        optimizers: whose steps the graph holds.
        warmup: calls to run uncaptured first.
        recaptures: how many stale graphs may be replaced.
        stream: where they are captured; None for one of their own.
    """

    alone: ClassVar[bool]
    """Whether the graph holds a step and nothing else."""

    def __init__(
        self, optimizers: Sequence[CompiledOptimizer], warmup: int, recaptures: int, stream: torch.Stream | None
    ) -> None:
        self._optimizers = list(optimizers)
        self._stream = stream
        self.slot = _Slot()
        self.device = self._common_device()
        self.slot.graph = self._new_graph()
        self._captured = False
        self._facts: list[dict[str, str]] = []
        self._cause = ""
        self._pending = warmup
        self._recaptures = self._left = recaptures
        self.released = False

    @property
    def _graph(self) -> Graph | None:
        return self.slot.graph

    def _common_device(self) -> torch.device:
        placed: dict[torch.device, str] = {
            param.device: parameter_name(group, i, j)
            for o in self._optimizers
            for i, group in enumerate(o.param_groups)
            for j, param in enumerate(group["params"])
        }
        if len(placed) != 1:
            where = ", ".join(f"'{name}' on {device}" for device, name in placed.items())
            raise ValueError(f"a graph holds work of one device; the parameters are on {len(placed)}: {where}")
        return next(iter(placed))

    def _moved(self) -> bool:
        """Whether the parameters are on another device than they were."""
        return next((p.device for o in self._optimizers for p in o.traceable_params()), self.device) != self.device

    def _follow_device(self) -> bool:
        """Go to where the parameters are; whether they were there already.

        Raises:
            ValueError: they are on several devices, or no graph can hold the steps there; nothing has changed.
        """
        device = self._common_device()
        if device == self.device:
            return True
        before, self.device = self.device, device
        try:
            self.slot.graph = self._new_graph()
        except ValueError:
            self.device = before
            raise
        return False

    def _new_graph(self) -> Graph | None:
        make = GRAPHS.get(self.device.type)
        if make is None:
            for optimizer in self._optimizers:
                optimizer.events.fall_back(
                    f"CUDAGraphRunner runs {type(optimizer).__name__} uncaptured: {self.device.type} has no CUDA graphs",
                    "use it for parameters on CUDA",
                )
            return None
        for optimizer in self._optimizers:
            optimizer.check_capturable(alone=self.alone)
        return make(self.device, self._stream)

    def _drop(self, cause: str) -> None:
        """Let go of the stale graph, if that is allowed; the next call captures again.

        Raises:
            RuntimeError, RecompileError, ValueError: it is not; nothing has changed.
        """
        stale = self._graph
        assert stale is not None
        if self._left == 0:
            raise RuntimeError(
                f"CUDAGraphRunner would capture its graph again, after {self._recaptures} times: {cause}; "
                "keep that as it is between calls, or allow more recaptures"
            )
        self._common_device()
        spend(f"CUDAGraphRunner would capture its graph again: {cause}")
        self._follow_device()
        self._left -= 1
        self._cause = cause
        self._pending = 1
        self._captured = False
        stale.release()

    def _note_capture(self) -> None:
        self._captured = True
        self._facts = [described(o) for o in self._optimizers]
        for optimizer in self._optimizers:
            optimizer.events.captures.append(self._cause)

    def _explain(self) -> str:
        """What changed in the optimizers since the capture."""
        for optimizer, facts in zip(self._optimizers, self._facts, strict=True):
            found = differences(facts, described(optimizer))
            if found:
                return found
        return "tables were made anew"

    def release(self) -> None:
        """Free the graph."""
        self.released = True
        self._captured = False
        self.slot.release()


class _StepRun(_Run):
    """The launches of one optimizer's step."""

    alone = True

    def __init__(self, optimizer: CompiledOptimizer, warmup: int, recaptures: int, stream: torch.Stream | None) -> None:
        self.optimizer = optimizer
        self._key: tuple[object, ...] = ()  # of the graph, or of the last launch where there is none
        super().__init__([optimizer], warmup, recaptures, stream)

    def step(self, closure: Callable[[], Any] | None, scaler: dict[str, Any]) -> Any:
        """One step with its launches replayed; ``scaler`` is what a gradient scaler handed over."""
        for name, value in scaler.items():
            setattr(self.optimizer, name, value)
        try:
            with self.optimizer.launched_by(self._launch):
                return self.optimizer.step(closure)
        finally:
            for name in scaler:
                delattr(self.optimizer, name)

    def _launch(self) -> None:
        """In place of ``optimizer.launch``, after ``prepare``."""
        if not self._captured and self._moved():
            self._follow_device()
        if self._graph is None:
            self.optimizer.launch()
            return
        key = self.optimizer.launch_key()
        if self._captured and key != self._key:
            self._drop(self._explain())
        if not self._captured and not self._follow_device():
            self._pending = max(self._pending, 1)
        if self._graph is None or self._pending or key != self._key:
            self.optimizer.launch()  # also loads what a capture could not
            self._pending = max(self._pending - 1, 0)
            self._key = key
            return
        self.optimizer.hold()
        if not self._captured:
            self._graph.capture(self.optimizer.launch)
            self._note_capture()
        self._graph.replay()
        self.optimizer.events.replays += 1


class _FunctionRun(_Run):
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
        self._steps: list[int] = []

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
                cause = cause or self._recorded.change() or ("" if self._recorded.refresh() else self._explain())
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
        dropped = DroppedGradients([p for o in self._optimizers for p in o.traceable_params()])
        steps = [o.events.steps for o in self._optimizers]
        around = Surroundings(self._optimizers, self._modules)
        with self._kept_graphs.watching(around.all_params), watching_zero_grad(self._optimizers, dropped.report):
            outputs = graph.warm_up(self._call)
        self._dropped = dropped.ids
        self._steps = [o.events.steps - count for o, count in zip(self._optimizers, steps, strict=True)]
        self._warmed = Surroundings(self._optimizers, self._modules)
        return outputs

    def _is_settled(self) -> bool:
        """Whether a capture would find what the call before left, and no step would be derived anew.

        Raises:
            RuntimeError: no capture is possible while somebody keeps the graph of an uncaptured step.
        """
        stepped = [o for o, steps in zip(self._optimizers, self._steps, strict=True) if steps]  # else the capture refuses
        known = all(o.refresh(*o.taken_scaler) is not None for o in stepped)
        if not known or self._warmed is None or self._warmed.change():
            return False
        return self._kept_graphs.allow_capture(self._warmed.all_params, self._warmed.names)

    def _capture(self, graph: Graph) -> None:
        recorded = RecordedStep(self._optimizers, self._modules, self._dropped)
        torch.clear_autocast_cache()  # weights that were cast outside would not be cast again by a replay
        try:
            with recorded.capturing(self._steps):
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


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
