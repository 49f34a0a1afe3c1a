"""Autograd graphs that somebody keeps and that lead to a parameter, such as the one of a loss that was not detached.

The node that adds to a parameter's gradient belongs to the stream on which it was made, and all graphs through the parameter
share it until the last of them is gone. A CUDA graph cannot record a backward pass through a node of another stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

_KEY = "compiled_optim.capture.kept_graphs"  # in the metadata of a node, which live as long as it does
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
