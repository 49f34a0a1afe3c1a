"""Graphs that users capture themselves, without a runner: they go on reading what the step used when they were captured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from compiled_optim.memory.torch_internals import current_capture


class HandCaptures:
    """Keeps what such graphs read, since nobody says when they are gone, and warns where the optimizer leaves them."""

    def __init__(self) -> None:
        self._kept: list[object] = []
        self._is_read = False  # whether the present step is among what a graph reads

    def keep(self, memory: object) -> None:
        """Note that a graph is to read ``memory``, which the present step uses."""
        if not self._is_read:
            self._kept.append(memory)
        self._is_read = True

    def leave(self) -> None:
        """Warn where the optimizer no longer uses what a graph reads."""
        if self._is_read:
            self._is_read = False
            warnings.warn(
                "groups, state or clipping changed after step() was captured in a CUDA graph, which goes on with those it "
                "was captured with; capture it again, or with co.CUDAGraphRunner",
                RuntimeWarning,
                stacklevel=3,
            )


_runner_captures: set[object] = set()


@contextlib.contextmanager
def recorded_by_runner(device: torch.device) -> Iterator[None]:
    """Refuse steps that are captured meanwhile, on any thread, of optimizers that the runner was not told of."""
    capture = current_capture(device)
    _runner_captures.add(capture)
    try:
        yield
    finally:
        _runner_captures.discard(capture)


def is_recorded_by_runner(device: torch.device) -> bool:
    """Whether a runner captures what this thread does on ``device``."""
    return current_capture(device) in _runner_captures
