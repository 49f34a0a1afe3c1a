"""Lets the tests marked ``cuda`` run without a GPU, to find the mistakes that are the tests' own.

Tensors are on the CPU, where there are no streams, and graphs are simulated. What else the tests use of ``torch.cuda`` warns
and fails here as it does there.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import cuda_device
import pytest
import simulated_graph
import torch
from simulated_graph import SimulatedGraph


class _Graph:
    """A ``CUDAGraph``."""

    def __init__(self) -> None:
        self.simulated = SimulatedGraph(torch.device("cpu"))

    def replay(self) -> None:
        self.simulated.replay()


@contextlib.contextmanager
def _graph(graph: _Graph) -> Iterator[None]:
    """A ``torch.cuda.graph``; also of a capture that fails it says that it is empty."""
    try:
        with graph.simulated.capturing():
            yield
    finally:
        if graph.simulated.is_empty:
            warnings.warn("The CUDA Graph is empty", stacklevel=2)


class _Stream:
    """The only stream."""

    def wait_stream(self, other: _Stream) -> None:
        pass


class _SyncDebug:
    """``set_sync_debug_mode``, which warns in its first call, when the mode is set already; here nothing waits."""

    def __init__(self) -> None:
        self._warned = False

    def __call__(self, mode: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)


def _make_graphed_callables(model: torch.nn.Module, inputs: tuple[Any, ...], *, allow_unused_input: bool = False) -> Any:
    """``model`` itself, if its gradients can be had."""
    params = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(model(*inputs).sum(), params, allow_unused=allow_unused_input)
    return model


def install() -> None:
    """Make the CPU the device of the tests, for the rest of the process."""
    cuda_device.DEVICE = "cpu"
    stream = _Stream()
    stand_ins = {
        "CUDAGraph": _Graph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "graph": _graph,
        "make_graphed_callables": _make_graphed_callables,
        "memory_stats": lambda: {"allocation.all.allocated": 0},
        "set_sync_debug_mode": _SyncDebug(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)


def simulate_graphs() -> None:
    """Let this package capture on the CPU, for the rest of the process."""
    simulated_graph.install(pytest.MonkeyPatch())
