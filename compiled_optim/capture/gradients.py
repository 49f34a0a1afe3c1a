"""Which gradients a training step drops, finds and leaves, and which autograd graphs somebody holds through it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from compiled_optim.capture.guards import gradient_place
from compiled_optim.groups.parameters import first_three
from compiled_optim.step.engine import Engine


@contextlib.contextmanager
def watching_zero_grad(engines: Sequence[Engine]) -> Iterator[set[Tensor]]:
    """Collect the parameters whose gradients ``zero_grad`` sets to None before anything used or changed them.

    No gradient is kept alive for that.
    """
    runs = [engine.runs for engine in engines]
    params = [p for engine in engines for p in engine.params]
    seen = [_seen(p.grad) for p in params]
    places: set[int] = set()  # in ``params``: Dynamo traces what follows, and knows no sets of tensors
    dropped: set[Tensor] = set()

    def note(optimizer: Engine) -> None:
        used = {id(p) for engine, before in zip(engines, runs, strict=True) if engine.runs > before for p in engine.params}
        wanted = {id(p) for p in optimizer.params if id(p) not in used}
        for place, (param, (reference, version)) in enumerate(zip(params, seen, strict=True)):
            if id(param) in wanted:
                grad = param.grad
                if grad is None or reference is None:
                    is_untouched = grad is None and reference is None
                else:
                    is_untouched = reference() is grad and version == grad._version
                if is_untouched:
                    places.add(place)

    try:
        for engine in engines:
            engine.note_zero_grad = note
        yield dropped
    finally:
        dropped.update(params[place] for place in places)
        for engine in engines:
            engine.note_zero_grad = None


def _seen(grad: Tensor | None) -> tuple[weakref.ref[Tensor] | None, int]:
    """A value that changes when a gradient is replaced or written."""
    return (None, 0) if grad is None else (weakref.ref(grad), grad._version)


class CapturedGradients:
    """Which gradients a captured training step found, and which it left.

    ``zero_grad`` may drop a gradient before anything is added to it. The value of such a gradient does not matter, and the
    capture finds None in its place. Any other gradient is read, or added to, where the capture found it, so the gradient
    that a parameter has later is copied to there. A parameter that no optimizer of the step updates matters only if the step
    changes its gradient.

    The step's optimizers update the first ``updated`` of ``params``, which has their names. ``cleared`` are the parameters
    whose gradients the function drops, as far as is known before the capture.
    """

    def __init__(self, params: Mapping[Tensor, str], updated: int, cleared: Collection[Tensor]) -> None:
        self._params, self._updated, self._cleared = params, updated, cleared
        self._originals: list[Tensor | None] = [p.grad for p in params]
        for param in params:
            if param in cleared:
                param.grad = None
        self._found = [(p.grad, _seen(p.grad)[1]) for p in params]
        self._dropped: Collection[Tensor] = ()
        self._read: list[tuple[Tensor, Tensor | None]] = []  # parameters, and where the graph reads their gradients
        self._left: list[tuple[Tensor, Tensor | None]] = []
        self.repeats = True  # whether the step leaves what it finds: nothing is to be done where no gradient was replaced

    def leave(self, dropped: Collection[Tensor]) -> None:
        """Note what the captured step left; it ``dropped`` the gradients of these parameters."""
        self._dropped = dropped
        for i, (param, (found, version)) in enumerate(zip(self._params, self._found, strict=True)):
            left = param.grad
            if i < self._updated or left is not found or (found is not None and found._version != version):
                self._left.append((param, left))
                if param not in dropped:
                    self._read.append((param, found))
                    self.repeats &= left is found

    def accept(self) -> None:
        """Let go of gradients that nobody reads again, or raise ``RuntimeError`` if one that other calls drop was kept."""
        for param, name in self._params.items():
            if param in self._cleared and param not in self._dropped:
                raise RuntimeError(
                    f"the function drops the gradient of '{name}' in some calls and in others does not; a graph can only "
                    "do the same in every call"
                )
        self._originals, self._found = [], []

    def put_back(self) -> None:
        """Let every parameter have the gradient that it had before a capture that failed."""
        for param, original in zip(self._params, self._originals, strict=True):
            param.grad = original

    def change(self) -> str:
        """Which parameter's gradient is not what the graph finds; empty if all are, or were copied to where it reads."""
        copied: list[tuple[Tensor, Tensor]] = []
        for param, found in self._read:  # none where the function drops its gradients first
            grad = param.grad
            if grad is found:
                continue
            if grad is None or found is None or not _fits(grad, found):
                return f"gradient of '{self._params[param]}' {gradient_place(found)} -> {gradient_place(grad)}"
            copied.append((found, grad))
        with torch.no_grad():
            for found, grad in copied:
                if found.is_sparse:
                    found._indices().copy_(grad._indices())
                    found._values().copy_(grad._values())
                else:
                    found.copy_(grad)
        return ""

    def hand_out(self) -> None:
        """Give every parameter the gradient that the step leaves, as its Python would have."""
        for param, left in self._left:
            if param.grad is not left:
                param.grad = left


def _fits(grad: Tensor, found: Tensor) -> bool:
    if grad.shape != found.shape or grad.layout != found.layout:
        return False
    return not grad.is_sparse or (grad._nnz() == found._nnz() and grad.is_coalesced() == found.is_coalesced())


_KEY = "compiled_optim.capture.gradients"  # in the metadata of a node, which live as long as it does
_ELSEWHERE = "made elsewhere"


class LiveAutograd:
    """The parameters whose autograd nodes were made outside of one runner's calls, and are held through them."""

    def __init__(self) -> None:
        self._through: set[Tensor] = set()  # parameters whose nodes lived through the last call
        self._let_go: set[Tensor] = set()  # those whose nodes did not

    def adopt(self, params: Iterable[Tensor]) -> None:
        """Take the nodes that exist as made on the stream on which the runner captures."""
        for notes in map(_notes, filter(_takes_gradient, params)):
            notes[_KEY] = self

    @contextlib.contextmanager
    def watching(self, params: Collection[Tensor]) -> Iterator[None]:
        """Note which nodes live through a call on the stream of the capture, and take those that it makes."""
        before = self._held(params)
        yield
        self._through = _made_elsewhere(params)
        self._let_go = before - self._through
        self.adopt(p for p in params if p not in self._through)

    def allow_capture(self, params: Mapping[Tensor, str]) -> bool:
        """Whether all autograd nodes that were made outside of the runner are ones that the last call released.

        Raises:
            RuntimeError: a node is still held that was held through the last call; ``params`` has its parameter's name.
        """
        live = self._held(params)
        held = [f"'{name}'" for param, name in params.items() if param in live & self._through]
        if held:
            raise RuntimeError(
                f"a tensor that depends on {first_three(held)}, such as the loss, still holds the autograd graph of an "
                "uncaptured step, so that no backward pass can be captured: detach() it before you keep it. "
                "DistributedDataParallel keeps such a graph; wrap the model on a stream, and pass stream= to the runner"
            )
        return live <= self._let_go

    def _held(self, params: Collection[Tensor]) -> set[Tensor]:
        """Mark the nodes that the runner did not make, and return the parameters whose nodes somebody holds."""
        torch.clear_autocast_cache()  # nobody holds the weights in it
        for notes in map(_notes, filter(_takes_gradient, params)):
            if notes.get(_KEY) is not self:
                notes[_KEY] = _ELSEWHERE
        return _made_elsewhere(params)


def _made_elsewhere(params: Iterable[Tensor]) -> set[Tensor]:
    """The parameters with marked nodes; a mark is gone with its node."""
    torch.clear_autocast_cache()
    return {p for p in params if _takes_gradient(p) and _notes(p).get(_KEY) == _ELSEWHERE}


def _notes(param: Tensor) -> dict[str, Any]:
    """The metadata of the node of a parameter, which is made where there is none."""
    return cast("dict[str, Any]", get_gradient_edge(param).node.metadata)


def _takes_gradient(param: Tensor) -> bool:
    return param.requires_grad and param.is_leaf
