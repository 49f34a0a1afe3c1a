"""Captures on the GPU that is not there, which refuse what no CUDA graph can hold."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compiled_optim.simulated.driver import answer
from compiled_optim.simulated.record import Record, _Operators


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Record what follows, under ``fake_cuda``, as ``torch.cuda.graph`` does: nothing can be replayed.

    It refuses to wait for the device, to copy from and to memory of the host that is not pinned, to pin some, and to load
    kernels.
    """
    from triton import runtime

    stream = types.SimpleNamespace(cuda_stream=1)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", functools.partial(answer, True)),
        mock.patch.object(torch.cuda, "current_stream", functools.partial(answer, stream)),
        mock.patch.object(Tensor, "pin_memory", _forbidden),
        mock.patch.object(runtime.driver.active.utils, "load_binary", _forbidden),
        _Capture(Record(), "cuda"),
    ):
        yield


class _Capture(_Operators):
    """What operators ask of the device, which it refuses where a capture does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for operator in self._record.take().operators:
            here = [t for t in tree_leaves((args, result)) if isinstance(t, Tensor) and t.is_cpu]
            if operator.crosses and not all(t.is_pinned() for t in here):
                words = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."
                raise RuntimeError(words)
            if operator.waits:
                _forbidden()
        return result


def _forbidden(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
