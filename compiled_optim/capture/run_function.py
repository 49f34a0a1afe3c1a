"""A whole training step as a graph."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compiled_optim.capture.graph import CudaGraph, Run, difference, graph_of
from compiled_optim.capture.guards import Guards, LiveAutograd, gradient_text, watching_zero_grad
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.step.engine import Engine, recorded_by_runner

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""The types of inputs and outputs besides tensors."""


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
            self._autograd.adopt(Guards(self._engines, modules).params)
        self._dropped: set[Tensor] = set()  # parameters whose gradients the last warm-up dropped
        self._launches: list[int] = []  # of each optimizer in the last warm-up
        self._forget()

    def _forget(self) -> None:
        self._inputs: StaticInputs | None = None
        self._warmed: Guards | None = None  # the facts after the last warm-up
        self._recorded: RecordedStep | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one training step."""
        if self._has_moved():
            if self._recorded is not None:
                self._drop(f"the parameters moved from {self._device}")
            else:
                self._follow_device()
            self._forget()
        if self._inputs is None:
            self._inputs = StaticInputs(self._function, None if self._graph is None else self._device, args, kwargs)
        else:
            leaves, cause = self._inputs.checked(args, kwargs)
            if self._recorded is not None:
                cause = cause or self._recorded.change() or self._recorded.follow()
                if cause:
                    self._drop(cause)
                    self._recorded = None
            elif cause:
                self._pending = max(self._pending, 1)
            self._inputs.load(leaves)
        if self._graph is None:
            outputs = self._call()
        elif self._recorded is None and (self._pending or not self._is_settled()):
            outputs = self._warm_up(self._graph)
        else:
            self._recorded = self._recorded or self._capture(self._graph)
            self._graph.replay()
            self._recorded.replayed()
            outputs = self._recorded.outputs
        return pytree.tree_map_only(Tensor, torch.clone, outputs) if self._clone_outputs else outputs

    def _call(self) -> Any:
        assert self._inputs is not None
        return pytree.tree_map(_detached, self._inputs.call())

    def _record(self) -> Any:
        with recorded_by_runner(self._device):
            return self._call()

    def _warm_up(self, graph: CudaGraph) -> Any:
        """Run the function without capture, and record the facts that the capture assumes."""
        self._pending = max(self._pending - 1, 0)
        launches = [engine.launches for engine in self._engines]
        params = Guards(self._engines, self._modules).params
        with self._autograd.watching(params), watching_zero_grad(self._engines) as dropped:
            outputs = graph.warm_up(self._call)
        self._dropped = dropped
        self._launches = [engine.launches - before for engine, before in zip(self._engines, launches, strict=True)]
        self._warmed = Guards(self._engines, self._modules)
        return outputs

    def _is_settled(self) -> bool:
        """Return whether gradients and parameters are as after the last call, and a capture would rebuild no step.

        It is an error if the autograd graph of an uncaptured step is alive, since no capture is possible then.
        """
        self._common_device()
        stepped = zip(self._engines, self._launches, strict=True)
        is_stale = any(follow(engine) for engine, launches in stepped if launches)  # others raise in the capture
        if is_stale or self._warmed is None or self._warmed.change():
            return False
        return self._autograd.allow_capture(self._warmed.params)

    def _capture(self, graph: CudaGraph) -> RecordedStep:
        assert self._warmed is not None
        recorded = RecordedStep(self._engines, self._warmed, self._dropped)
        torch.clear_autocast_cache()  # weights that were cast outside would not be cast again by a replay
        try:
            with recorded.capturing(self._launches):
                recorded.outputs = graph.capture(self._record)
            recorded.check()
        except BaseException:
            self._pending = 1  # an uncaptured step follows changes that the function may have made
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
    """The gradients, outputs and assumptions of a captured training step of ``engines``.

    The ``guards`` were read just before. ``zero_grad`` may drop a gradient before anything is added to it. The value of such
    a gradient does not matter, and is None during the capture. These are the gradients of the parameters in ``cleared``, as
    far as known before the capture. The graph reads any other gradient, or adds to it, at its address in the capture, so a
    later gradient of the parameter is copied there. A parameter that no optimizer of the step updates matters only if the
    step changes its gradient.
    """

    outputs: Any = None  # of the function, which every replay writes

    def __init__(self, engines: Sequence[Engine], guards: Guards, cleared: Collection[Tensor]) -> None:
        self._engines, self._guards, self._cleared = engines, guards, cleared
        self._runs = [engine.runs for engine in self._engines]
        self._param_versions = [p._version for p in guards.params]
        self._hypers = list(map(_hypers_of, engines))
        self._originals: list[Tensor | None] = [p.grad for p in guards.params]
        for param in guards.params:
            if param in cleared:
                param.grad = None
        self._initial = [(p.grad, 0 if p.grad is None else p.grad._version) for p in guards.params]
        self._read: list[tuple[Tensor, Tensor | None]] = []  # parameters, and the gradients that the graph reads
        self._final: list[tuple[Tensor, Tensor | None]] = []  # parameters, and their gradients after the step
        self._repeats = True  # whether the step leaves the gradients that it reads: only replaced ones are then copied
        self._settled: object = None  # the guards' token of gradients that need no copy

    @contextlib.contextmanager
    def capturing(self, launches: Sequence[int]) -> Iterator[None]:
        """Watch a capture of this number of launches of each optimizer, and record its gradients."""
        with contextlib.ExitStack() as stack:
            self._dropped = stack.enter_context(watching_zero_grad(self._engines))
            for engine, count in zip(self._engines, launches, strict=True):
                stack.enter_context(graph_of(engine.step).reserve(count))
            yield
        for i, (param, (initial, version)) in enumerate(zip(self._guards.params, self._initial, strict=True)):
            final = param.grad
            if i < self._guards.updated or final is not initial or (initial is not None and initial._version != version):
                self._final.append((param, final))
                if param not in self._dropped:
                    self._read.append((param, initial))
                    self._repeats &= final is initial
        versions = zip(self._guards.params, self._param_versions, strict=True)
        self._guards.mark({p for p, version in versions if p._version != version})
        self._steps = [engine.runs - before for engine, before in zip(self._engines, self._runs, strict=True)]
        self._scalers = [engine.clipping.arguments[1:3] for engine in self._engines]
        self._stale = next(filter(None, map(follow, self._engines, self._scalers)), "")
        self._keys = [engine.step.key(whole=True) for engine in self._engines if engine.step is not None]

    def check(self) -> None:
        """Refuse a function whose Python made a change that a replay would not repeat.

        Raises:
            RuntimeError: naming the change.
        """
        for engine, hypers, steps in zip(self._engines, self._hypers, self._steps, strict=True):
            if not steps:
                raise RuntimeError(f"the function did not step {engine.kind.__name__}, which is one of the optimizers")
            if written := [name for name, held in _hypers_of(engine, exposed=True).items() if held != hypers.get(name)]:
                raise RuntimeError(
                    f"the function writes {' or '.join(written)}, which every replay would repeat; call schedulers and set "
                    "hyperparameters outside of it"
                )
        if self._stale:
            raise RuntimeError(
                f"the function changes groups or state of its optimizers; do that outside of it: {self._stale}"
            )
        if change := self._guards.change():
            raise RuntimeError(f"the function changes in Python what a replay cannot change again: {change}")
        for param, name in self._guards.params.items():
            if param in self._cleared and param not in self._dropped:
                raise RuntimeError(
                    f"the function drops the gradient of '{name}' in some calls and in others does not; a graph can only "
                    "do the same in every call"
                )
        self._originals, self._initial = [], []  # unused from now on

    def undo(self) -> None:
        """Restore gradients, and entries of modules, after a failed capture."""
        for param, original in zip(self._guards.params, self._originals, strict=True):
            param.grad = original
        self._guards.put_back()

    def change(self) -> str:
        """Return the change that the graph cannot follow, with old and new value, or "".

        Gradients are copied to the tensors that the graph reads.
        """
        change = self._guards.change()
        if change or (self._repeats and self._guards.gradients == self._settled):
            return change
        self._settled = None
        copied: list[tuple[Tensor, Tensor]] = []
        for param, read in self._read:  # none if the function drops its gradients first
            grad = param.grad
            if grad is read:
                continue
            if grad is None or read is None or not _fits(grad, read):
                return f"gradient of '{self._guards.params[param]}' {gradient_text(read)} -> {gradient_text(grad)}"
            copied.append((read, grad))
        with torch.no_grad():
            for read, grad in copied:
                if read.is_sparse:
                    read._indices().copy_(grad._indices())
                    read._values().copy_(grad._values())
                else:
                    read.copy_(grad)
        return ""

    def follow(self) -> str:
        """Pass values assigned since the last call to the graph. Return why it cannot follow them; empty if it can."""
        for engine, scaler, key in zip(self._engines, self._scalers, self._keys, strict=True):
            reason = follow(engine, scaler)
            assert engine.step is not None
            if reason := difference(key, engine.step.key(whole=True), engine.log.rebuilt) or reason:
                return reason
        return ""

    def replayed(self) -> None:
        """Assign gradients and count steps, as the function's Python would have done."""
        if self._settled is None:
            for param, final in self._final:
                if param.grad is not final:
                    param.grad = final
            self._guards.addresses.read()
            self._settled = self._guards.gradients
        self._guards.addresses.finish()
        for engine, steps in zip(self._engines, self._steps, strict=True):
            engine.steps += steps
            engine.log.replays += 1


def _fits(grad: Tensor, read: Tensor) -> bool:
    if grad.shape != read.shape or grad.layout != read.layout:
        return False
    return not grad.is_sparse or (grad._nnz() == read._nnz() and grad.is_coalesced() == read.is_coalesced())


def follow(engine: Engine, scaler: tuple[Any, ...] | None = None) -> str:
    """Pass assigned values to a graph of the engine's step. Return why it cannot follow them; empty if it can.

    The graph reads the tensors ``scaler``, by default those of the last step.
    """
    if engine.step is None:
        return "no step was built before"
    engine.groups.check_numbers()
    graph = graph_of(engine.step)
    max_grad_norm, *_, skip_nonfinite = engine.clip_args
    return graph.follow((max_grad_norm, *(scaler or engine.clipping.arguments[1:3]), skip_nonfinite))


def _hypers_of(engine: Engine, *, exposed: bool = False) -> dict[str, tuple[int, int]]:
    """Return the ids and versions of hyperparameters' tensors, by name; perhaps only of those that are ``exposed``.

    Those that follow a schedule in the step are left out. Elements of one vector have one version.
    """
    return {
        f"param_groups[{i}][{hyper.name!r}]" + (f"[{k}]" if len(tensors) > 1 else ""): (id(tensor), tensor._version)
        for i, group in enumerate(engine.groups.listed)
        for hyper in group.kind._declaration.hypers
        if (i, hyper.name) not in engine.schedules.functions and (group.is_exposed(hyper.name) or not exposed)
        for tensors in (group.read_only(hyper.name),)
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
        leaves, self._structure = pytree.tree_flatten_with_path((args, dict(sorted(kwargs.items()))))
        self._names = [_name(function, path) for path, _ in leaves]
        for name, (_, leaf) in zip(self._names, leaves, strict=True):
            _check_kind(name, leaf)
            if isinstance(leaf, Tensor) and device is not None and leaf.device != device:
                raise ValueError(f"{name} must be on {device}, where the parameters are, but is on {leaf.device}")
        self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for _, leaf in leaves]

    def checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], str]:
        """Return the tensors and constants of a call, and the first changed constant, with old and new value.

        An error if the arguments' structure or the shape, dtype or device of a tensor differs from the first call.
        """
        leaves, structure = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
        if structure != self._structure:
            raise ValueError(f"the arguments must be structured as in the first call: {self._structure}, got {structure}")
        change = ""
        for name, static, leaf in zip(self._names, self._leaves, leaves, strict=True):
            _check_kind(name, leaf)
            if _form(static) != _form(leaf):
                difference = f"{name} must be {_form_in_words(static)} as in the first call, got {_form_in_words(leaf)}"
                raise ValueError(difference + _remedy(static, leaf))
            if not isinstance(static, Tensor) and (type(static) is not type(leaf) or not (static is leaf or static == leaf)):
                change = change or f"{name} {static!r} -> {leaf!r}"
        return leaves, change

    def load(self, leaves: list[Any]) -> None:
        """Copy the tensors of ``leaves`` in and replace the constants."""
        for i, (static, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if not isinstance(static, Tensor):
                self._leaves[i] = leaf
            elif static is not leaf:
                static.copy_(leaf, non_blocking=True)

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
    """Return the name of an argument or of an entry in one: ``x``, ``batch['ids']`` or ``args[2]``."""
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


def _form(leaf: Any) -> object:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None


def _form_in_words(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    return f"a {str(leaf.dtype).removeprefix('torch.')} tensor of shape {tuple(leaf.shape)} on {leaf.device}"


def _remedy(first: Any, leaf: Any) -> str:
    """Return advice about a tensor that is only shorter than the first one, as in a last batch, or ""."""
    both = isinstance(first, Tensor) and isinstance(leaf, Tensor)
    if not both or first.shape[1:] != leaf.shape[1:] or first.shape[:1] <= leaf.shape[:1]:
        return ""
    return "; for a smaller last batch, give the DataLoader drop_last=True or call the function without the runner"
