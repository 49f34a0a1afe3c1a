"""A whole training step as a graph."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compiled_optim.capture.graph import CudaGraph, Run, graph_of
from compiled_optim.capture.guards import CapturedGradients, Guards, LiveAutograd, watching_zero_grad
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule.fields import Hyper
from compiled_optim.step.engine import Engine, recorded_by_runner

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""What may stand beside tensors among inputs and outputs."""


class FunctionRun(Run):
    """A whole training step."""

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
        self._autograd = LiveAutograd()
        if stream is not None:
            self._autograd.adopt(Guards(optimizers, modules).params)
        self._dropped: set[Tensor] = set()  # parameters whose gradients the last warm-up dropped
        self._launches: list[int] = []  # of each optimizer in the last warm-up
        self._forget()

    def _forget(self) -> None:
        self._inputs: StaticInputs | None = None
        self._outputs: Any = None
        self._warmed: Guards | None = None  # what the last warm-up left
        self._recorded: RecordedStep | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One training step."""
        if self._has_moved():
            if self._captured:
                self._drop(f"the parameters moved from {self._device}")
            else:
                self._follow_device()
            self._forget()
        if self._inputs is None:
            self._inputs = StaticInputs(self._function, None if self._graph is None else self._device, args, kwargs)
        else:
            given = self._inputs.checked(args, kwargs)
            cause = self._inputs.change(given)
            if self._recorded is not None:
                cause = cause or self._recorded.change() or ("" if self._recorded.follow() else self._explain())
                if cause:
                    self._drop(cause)
                    self._recorded = self._outputs = None
            elif cause:
                self._pending = max(self._pending, 1)
            self._inputs.load(given)
        if self._graph is None:
            return self._hand_out(self._call())
        if self._recorded is None:
            if self._pending or not self._is_settled():
                return self._hand_out(self._warm_up(self._graph))
            self._recorded = self._capture(self._graph)
        self._graph.replay()
        self._recorded.replayed()
        return self._hand_out(self._outputs)

    def release(self) -> None:
        """Free the graph, the copies of the inputs and the outputs."""
        super().release()
        self._forget()

    def _call(self) -> Any:
        assert self._inputs is not None
        return pytree.tree_map(_detached, self._inputs.call())

    def _record(self) -> Any:
        with recorded_by_runner(self._device):
            return self._call()

    def _hand_out(self, outputs: Any) -> Any:
        if not self._clone_outputs:
            return outputs
        return pytree.tree_map_only(Tensor, torch.clone, outputs)

    def _warm_up(self, graph: CudaGraph) -> Any:
        """Run the function as it is, and note what its capture is to find."""
        self._pending = max(self._pending - 1, 0)
        launches = [engine.launches for engine in self._engines]
        params = Guards(self._optimizers, self._modules).params
        with self._autograd.watching(params), watching_zero_grad(self._engines) as dropped:
            outputs = graph.warm_up(self._call)
        self._dropped = dropped
        self._launches = [engine.launches - before for engine, before in zip(self._engines, launches, strict=True)]
        self._warmed = Guards(self._optimizers, self._modules)
        return outputs

    def _is_settled(self) -> bool:
        """Whether a capture would find gradients and parameters as the last call left them, and would rebuild no step.

        It is an error if somebody keeps the graph of an uncaptured step, since no capture is possible then.
        """
        self._common_device()
        stepped = zip(self._engines, self._launches, strict=True)
        known = all(followed(engine) is not None for engine, launches in stepped if launches)  # else the capture refuses
        if not known or self._warmed is None or self._warmed.change():
            return False
        return self._autograd.allow_capture(self._warmed.params)

    def _capture(self, graph: CudaGraph) -> RecordedStep:
        assert self._warmed is not None
        recorded = RecordedStep(self._optimizers, self._warmed, self._dropped)
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
        self._note_capture()
        return recorded


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    if not isinstance(output, CONSTANTS):
        raise TypeError(
            f"a function in a CUDAGraphRunner must return tensors, numbers, strings or None, or tuples, lists or dicts of "
            f"them, got {type(output).__name__}"
        )
    return output


class RecordedStep:
    """What the capture of a training step of ``optimizers`` found and left outside of the graph.

    The capture finds what the ``guards`` saw. The step is known to drop the gradients of ``dropped``.
    """

    def __init__(self, optimizers: Sequence[CompiledOptimizer], guards: Guards, dropped: Collection[Tensor]) -> None:
        self._optimizers = optimizers
        self._engines = [engine_of(o) for o in optimizers]
        self._guards = guards
        self._gradients = CapturedGradients(guards.params, guards.updated, dropped)
        self._runs = [engine.runs for engine in self._engines]
        self._param_versions = [p._version for p in guards.params]
        self._hypers = list(map(_hypers_of, optimizers))
        self._settled: object = None  # the gradients, as the guards saw them, when nothing was to be done about them

    @contextlib.contextmanager
    def capturing(self, launches: Sequence[int]) -> Iterator[None]:
        """Watch a capture of so many launches of each optimizer."""
        with contextlib.ExitStack() as stack:
            dropped = stack.enter_context(watching_zero_grad(self._engines))
            for engine, count in zip(self._engines, launches, strict=True):
                stack.enter_context(graph_of(engine.step).reserve(count))
            yield
        self._gradients.leave(dropped)
        versions = zip(self._guards.params, self._param_versions, strict=True)
        self._guards.mark({p for p, version in versions if p._version != version})
        self._steps = [engine.runs - before for engine, before in zip(self._engines, self._runs, strict=True)]
        self._scalers = [engine.clipping.given[1:3] for engine in self._engines]
        self._keys = self._followed()

    def check(self) -> None:
        """Refuse a function whose Python changed what a replay could not change again.

        Raises:
            RuntimeError: naming it.
        """
        for optimizer, hypers, steps in zip(self._optimizers, self._hypers, self._steps, strict=True):
            if not steps:
                raise RuntimeError(f"the function did not step {type(optimizer).__name__}, which is one of the optimizers")
            for name, (tensor, version) in _hypers_of(optimizer).items():
                before = hypers.get(name)
                if before is None or tensor is not before[0] or version != before[1]:
                    raise RuntimeError(
                        f"the function writes {name}, which every replay would repeat; call schedulers and set "
                        "hyperparameters outside of it"
                    )
        if None in self._keys:
            raise RuntimeError("the function changes groups or state of its optimizers; do that outside of it")
        if change := self._guards.change():
            raise RuntimeError(f"the function changes in Python what a replay cannot change again: {change}")
        self._gradients.accept()

    def undo(self) -> None:
        """Put back gradients, and what modules hold, after a capture that failed."""
        self._gradients.put_back()
        self._guards.put_back()

    def change(self) -> str:
        """The change that the graph cannot follow, with old and new value; empty if there is none."""
        change = self._guards.change()
        if change or (self._gradients.repeats and self._guards.gradients == self._settled):
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
            self._guards.addresses.read()
            self._settled = self._guards.gradients
        self._guards.addresses.finish()
        for engine, steps in zip(self._engines, self._steps, strict=True):
            engine.steps += steps
            engine.log.replays += 1

    def _followed(self) -> list[tuple[object, ...] | None]:
        return list(map(followed, self._engines, self._scalers))


def followed(engine: Engine, scaler: tuple[Any, ...] | None = None) -> tuple[object, ...] | None:
    """Hand what was assigned over to a graph of the engine's step, and return what the graph depends on.

    Returns None if the step is not current. The graph reads the tensors ``scaler``, by default those of the last step.
    """
    if engine.step is None:
        return None
    engine.check_numbers()
    graph = graph_of(engine.step)
    max_grad_norm, *_, skip_nonfinite = engine.clip_args
    return graph.follow((max_grad_norm, *(scaler or engine.clipping.given[1:3]), skip_nonfinite))


def _hypers_of(optimizer: CompiledOptimizer) -> dict[str, tuple[Tensor, int]]:
    """The live hyperparameter tensors by name, with versions, but those that the step itself sets on a schedule."""
    scheduled = engine_of(optimizer).schedules.functions
    return {
        f"param_groups[{i}][{hyper.name!r}]" + (f"[{k}]" if len(tensors) > 1 else ""): (tensor, tensor._version)
        for i, group in enumerate(optimizer.param_groups)
        for hyper in group.kind._fields_of(Hyper)  # type: ignore[attr-defined]
        if (i, hyper.name) not in scheduled
        for tensors in (group.read_only(hyper.name),)  # type: ignore[attr-defined]
        for k, tensor in enumerate(tensors)
    }


class StaticInputs:
    """Copies of the tensors among the arguments of ``function``, made in its first call and written by every later one.

    Arguments are nested lists, tuples and dicts of tensors, all on ``device`` unless that is None, and of constants.

    Raises:
        TypeError: an argument is neither a tensor nor a number, string, dtype, device or None.
        ValueError: a tensor requires grad, or is elsewhere than on ``device``.
    """

    def __init__(
        self, function: Callable[..., Any], device: torch.device | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._function = function
        leaves, self._structure = pytree.tree_flatten_with_path((args, _ordered(kwargs)))
        self._names = [_name(function, path) for path, _ in leaves]
        for name, (_, leaf) in zip(self._names, leaves, strict=True):
            _check_kind(name, leaf)
            if isinstance(leaf, Tensor) and device is not None and leaf.device != device:
                raise ValueError(f"{name} must be on {device}, where the parameters are, but is on {leaf.device}")
        self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for _, leaf in leaves]

    def checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The tensors and constants of a call, for the other methods; an error if they are unlike those of the first call.

        The arguments' structure must be the same, and the shape, dtype and device of each tensor.
        """
        leaves, structure = pytree.tree_flatten((args, _ordered(kwargs)))
        if structure != self._structure:
            raise ValueError(f"the arguments must be structured as in the first call: {self._structure}, got {structure}")
        for name, own, leaf in zip(self._names, self._leaves, leaves, strict=True):
            _check_kind(name, leaf)
            if _form(own) != _form(leaf):
                difference = f"{name} must be {_form_in_words(own)} as in the first call, got {_form_in_words(leaf)}"
                raise ValueError(difference + _remedy(own, leaf))
        return leaves

    def change(self, leaves: list[Any]) -> str:
        """Which constant of ``leaves`` is another than what was loaded last, with old and new value; empty if none is."""
        for name, own, leaf in zip(self._names, self._leaves, leaves, strict=True):
            if not isinstance(own, Tensor) and (type(own) is not type(leaf) or not (own is leaf or own == leaf)):
                return f"{name} {own!r} -> {leaf!r}"
        return ""

    def load(self, leaves: list[Any]) -> None:
        """Copy the tensors of ``leaves`` in and take over the constants."""
        for i, (own, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if not isinstance(own, Tensor):
                self._leaves[i] = leaf
            elif own is not leaf:
                own.copy_(leaf, non_blocking=True)

    def call(self) -> Any:
        """Call the function with the copies and the constants."""
        args, kwargs = pytree.tree_unflatten(self._leaves, self._structure)
        return self._function(*args, **kwargs)


def _check_kind(name: str, leaf: Any) -> None:
    if isinstance(leaf, Tensor):
        if leaf.requires_grad:
            raise ValueError(f"{name} requires grad, but the runner's copy would get the gradient; pass its detach()")
    elif not isinstance(leaf, CONSTANTS):
        raise TypeError(f"{name} must be a tensor, a number, a string or None, got {type(leaf).__name__}")


def _name(function: Callable[..., Any], path: tuple[pytree.KeyEntry, ...]) -> str:
    """The name of an argument or of an entry in one: ``x``, ``batch['ids']`` or ``args[2]``."""
    _, first, *entries = path
    if isinstance(first, pytree.MappingKey):
        return f"{first.key}{pytree.keystr(tuple(entries))}"
    try:
        positional = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        positional = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in positional if p.kind in kinds]
    index: int = first.idx  # type: ignore[attr-defined]
    return (names[index] if index < len(names) else f"args[{index}]") + pytree.keystr(tuple(entries))


def _ordered(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``kwargs`` in an order that no caller decides."""
    return dict(sorted(kwargs.items()))


def _form(leaf: Any) -> object:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None


def _form_in_words(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    return f"a {str(leaf.dtype).removeprefix('torch.')} tensor of shape {tuple(leaf.shape)} on {leaf.device}"


def _remedy(own: Any, leaf: Any) -> str:
    """What to do about a tensor that is only shorter than the first one, as in a last batch."""
    both = isinstance(own, Tensor) and isinstance(leaf, Tensor)
    if not both or own.shape[1:] != leaf.shape[1:] or own.shape[:1] <= leaf.shape[:1]:
        return ""
    return "; for a smaller last batch, give the DataLoader drop_last=True or call the function without the runner"
