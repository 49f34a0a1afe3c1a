"""Which gradients a training step drops, finds and leaves, and which autograd graphs somebody keeps through it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from compiled_optim.capture.guards import words

_GRAD = attrgetter("grad")


class DroppedGradients:
    """Which gradients ``zero_grad`` set to None before anything was added to them; none is kept alive for that.

    ``places`` says which of ``params``, whose gradients are those of now, as far as was reported.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        found: list[Tensor | None] = list(map(_GRAD, self._params))
        self._found = [None if g is None else (weakref.ref(g), g._version) for g in found]
        self.places: set[int] = set()

    @property
    def ids(self) -> set[int]:
        """The ids of those parameters."""
        return {id(self._params[i]) for i in self.places}

    def report(self, params: Iterable[Tensor]) -> None:
        """Note that the gradients of ``params``, which no step used yet, are about to become None."""
        wanted = set(map(id, params))
        for i, (param, found) in enumerate(zip(self._params, self._found, strict=True)):
            if id(param) in wanted:
                grad: Tensor | None = param.grad
                if grad is None or found is None:
                    untouched = grad is None and found is None
                else:
                    reference, version = found
                    untouched = reference() is grad and version == grad._version
                if untouched:
                    self.places.add(i)


class CapturedGradients:
    """Which gradients a captured training step found, and which it left.

    ``zero_grad`` may drop a gradient before anything is added to it. The value of such a gradient does not matter, and the
    capture finds None in its place. Any other gradient is read, or added to, where the capture found it, so the gradient
    that a parameter has later is copied to there. A parameter that no optimizer of the step updates matters only if the step
    changes its gradient.

    The step's optimizers update the first ``updated`` of ``params``. ``cleared`` has ids of those whose gradients the
    function drops, as far as is known; ``dropped`` are those that it does drop.
    """

    def __init__(self, params: Sequence[Tensor], names: Sequence[str], updated: int, cleared: Collection[int] = ()) -> None:
        self._params = list(params)
        self._names = list(names)
        self._updated = updated
        self._originals: list[Tensor | None] = list(map(_GRAD, params))
        self._cleared = {i for i, p in enumerate(self._params) if id(p) in cleared}
        for i in self._cleared:
            self._params[i].grad = None
        self._found: list[Tensor | None] = list(map(_GRAD, params))
        self._versions = [None if g is None else g._version for g in self._found]
        self.dropped = DroppedGradients(self._params)
        self._watched: list[int] = []
        self.repeats = False  # whether the step leaves what it finds: nothing is to be done where no gradient was replaced
        self._concerned: list[Tensor] = []
        self._given: list[Tensor | None] = []

    def leave(self) -> None:
        """Note what the captured step left."""
        left_now = list(map(_GRAD, self._params))
        changed = {
            i
            for i, (found, left, version) in enumerate(zip(self._found, left_now, self._versions, strict=True))
            if left is not found or (found is not None and found._version != version)
        }
        concerned = changed.union(range(self._updated))
        self._watched = sorted(concerned - self.dropped.places)
        self._concerned = [self._params[i] for i in sorted(concerned)]
        self._given = [left_now[i] for i in sorted(concerned)]
        self.repeats = all(left_now[i] is self._found[i] for i in self._watched)

    def accept(self) -> None:
        """Let go of gradients that nobody reads again, or raise ``RuntimeError`` if one that other calls drop was kept."""
        if kept := self._cleared - self.dropped.places:
            raise RuntimeError(
                f"the function drops the gradient of '{self._names[min(kept)]}' in some calls and in others does not; "
                "a graph can only do the same in every call"
            )
        self._originals = []
        for i in self.dropped.places:
            self._found[i] = None

    def put_back(self) -> None:
        """Let every parameter have the gradient that it had before a capture that failed."""
        for param, original in zip(self._params, self._originals, strict=True):
            param.grad = original

    def change(self) -> str:
        """Which parameter's gradient is not what the graph finds; empty if all are, or were copied to where it reads."""
        copied: list[tuple[Tensor, Tensor]] = []
        for i in self._watched:  # none where the function drops its gradients first
            found, grad = self._found[i], self._params[i].grad
            if grad is found:
                continue
            if grad is None or found is None or not _fits(grad, found):
                return f"gradient of '{self._names[i]}' {words(found)} -> {words(grad)}"
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
        if not all(map(is_, map(_GRAD, self._concerned), self._given)):
            for param, left in zip(self._concerned, self._given, strict=True):
                param.grad = left


def _fits(grad: Tensor, found: Tensor) -> bool:
    if grad.shape != found.shape or grad.layout != found.layout:
        return False
    return not grad.is_sparse or (grad._nnz() == found._nnz() and grad.is_coalesced() == found.is_coalesced())


_KEY = "compiled_optim.capture.gradients"  # in the metadata of a node, which live as long as it does
_ELSEWHERE = "made elsewhere"


class KeptGraphs:
    """Finds the parameters whose nodes were made outside of one runner's calls and are kept through them."""

    def __init__(self) -> None:
        self._through: set[int] = set()  # ids of parameters
        self._let_go: set[int] = set()

    def adopt(self, params: Sequence[Tensor]) -> None:
        """Take the nodes that exist as made on the stream on which the runner captures."""
        for notes in _notes(params):
            notes[_KEY] = self

    @contextlib.contextmanager
    def watching(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Note which nodes are kept through a call on the stream of the capture, and take those that it makes."""
        before = self._kept(params)
        yield
        self._through = _made_elsewhere(params)
        self._let_go = before - self._through
        self.adopt([p for p in params if id(p) not in self._through])

    def allow_capture(self, params: Sequence[Tensor], names: Sequence[str]) -> bool:
        """Whether a capture finds no node from elsewhere but those that the last call has shown to let go.

        It is an error if a node is kept that was kept through the last call; ``names`` says of which parameter.
        """
        kept = self._kept(params)
        held = [f"'{name}'" for name, p in zip(names, params, strict=True) if id(p) in kept & self._through]
        if held:
            more = f" and {len(held) - 3} more" if len(held) > 3 else ""
            raise RuntimeError(
                f"a loss, or what else depends on {', '.join(held[:3])}{more}, is kept from an uncaptured step with its "
                "autograd graph, through which no CUDA graph can record a backward pass: detach() it before it is kept. "
                "DistributedDataParallel keeps such a graph; wrap the model on a stream that the runner gets as stream="
            )
        return kept <= self._let_go

    def _kept(self, params: Sequence[Tensor]) -> set[int]:
        """The ids of the parameters with nodes that somebody keeps, which are marked, and that the runner did not make."""
        torch.clear_autocast_cache()  # the weights in it are nobody's
        for notes in _notes(params):
            if notes.get(_KEY) is not self:
                notes[_KEY] = _ELSEWHERE
        return _made_elsewhere(params)


def _made_elsewhere(params: Sequence[Tensor]) -> set[int]:
    """The ids of the parameters with marked nodes; a mark is gone with its node."""
    torch.clear_autocast_cache()
    own = filter(_takes_gradient, params)
    return {id(p) for p, notes in zip(own, _notes(params), strict=True) if notes.get(_KEY) == _ELSEWHERE}


def _notes(params: Sequence[Tensor]) -> Iterator[dict[str, object]]:
    """The metadata of the nodes of those that take gradients; a node is made where there is none."""
    for param in filter(_takes_gradient, params):
        notes: Any = get_gradient_edge(param).node.metadata
        yield notes


def _takes_gradient(param: Tensor) -> bool:
    return param.requires_grad and param.is_leaf
