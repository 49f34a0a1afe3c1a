"""Runs modules that Inductor wrote for a GPU, under ``fake_cuda``: memory is counted and kernels are looked at, not run."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_optim.simulated.record import deciding
from perf.lowering.inductor_source import itemsize

_LOAD = re.compile(r"tl\.load\((\w+) \+ (.*), r0_mask", re.MULTILINE)
_SHARED = re.compile(r"^    (x\d+) = xindex // ", re.MULTILINE)


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel of Inductor's.

    Attributes:
        name: as its module calls it.
        walked: the bytes that one of its programs loads for the sums that it makes alone.
    """

    name: str
    walked: int


class Runs:
    """What ran inside :func:`running`: the launches, and the most bytes that were alive at once."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.peak = 0
        self.sources: list[str] = []
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def start(self) -> None:
        """Forget what ran so far; what is alive now does not count."""
        self.launches, self.peak, self._alive = [], 0, {}

    def made(self, tensor: Tensor) -> None:
        """Count the memory of a new tensor."""
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))

    def load(self, source: str) -> Callable[..., Any]:
        """The function of a module that Inductor wrote, whose kernels only note that they were launched."""
        from torch._inductor.async_compile import AsyncCompile

        self.sources.append(source)
        space: dict[str, Any] = {"__name__": "inductor_module", "__file__": "inductor_module"}

        def kernel(_: Any, name: str, text: str, **__: Any) -> Any:
            return _Kernel(self, name, text)

        with mock.patch.object(AsyncCompile, "triton", kernel):
            exec(compile(source, "inductor_module", "exec"), space)
        space["empty_strided_cuda"] = _empty
        space["reinterpret_tensor"] = lambda tensor, *where: tensor.as_strided(*where)
        # Of these, torch's versions write several.
        space |= dict.fromkeys(re.findall(r"\bcopy_\w*misaligned", source), lambda tensor: tensor)
        space |= dict.fromkeys(re.findall(r"\bassert_\w+", source), _nothing)
        space["extern_kernels"] = types.SimpleNamespace(bmm=_nothing)
        call = space["call"]
        return lambda *args: call(list(args))


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=f"cuda:{torch.cuda.current_device()}")


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


# Two functions, since Dynamo has a rule for each of torch's.
def _set_device(device: int) -> None:
    pass


def _stream(device: int) -> int:
    return 0


class _Kernel:
    def __init__(self, runs: Runs, name: str, text: str) -> None:
        from torch._inductor.codecache import PyCodeCache

        self._runs = runs
        self._name = name
        names = re.search(rf"^def {name}\((.*)\):$", text, re.MULTILINE)
        assert names is not None, text
        self._names = names[1].split(", ")
        # Another module than one of equal text that was compiled in this process: that one has given up its configs.
        module = PyCodeCache.load(f"{text}\n# to be read\n")
        self._sums = max(config.kwargs["XBLOCK"] for config in getattr(module, name).configs)
        shared = set(_SHARED.findall(text))  # what is the same for all sums of a program, or all but a few
        loads = [(itemsize(text, pointer), set(re.findall(r"\bx\d+\b", index))) for pointer, index in _LOAD.findall(text)]
        self._own = sum(size for size, used in loads if used - shared)
        self._common = sum(size for size, used in loads if not used - shared)

    def run(self, *values: Any, stream: int) -> None:
        given = dict(zip(self._names, values, strict=False))
        sums = min(self._sums, given.get("xnumel", 1))
        self._runs.launches.append(Launch(self._name, (sums * self._own + self._common) * given.get("r0_numel", 0)))


class _Made(TorchDispatchMode):
    """Counts the memory of what operators return."""

    supports_higher_order_operators = True

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self._runs = runs

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Yes: Dynamo may trace under it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch._guards.TracingContext.try_get() is None and not getattr(func, "is_view", True):
            given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.is_cuda and tensor.untyped_storage()._cdata not in given:
                    self._runs.made(tensor)
        return result


@contextlib.contextmanager
def running() -> Iterator[Runs]:
    """Let Inductor's modules run as far as a device is not needed, under ``fake_cuda``."""
    from torch._inductor import compile_fx
    from triton.runtime.jit import JITFunction

    runs = Runs()
    compile_graph = compile_fx.compile_fx

    def load(module: Any, inputs: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        with deciding() as decisions:
            compile_graph(module, inputs, *args, **kwargs)
        (source,) = decisions.sources
        return runs.load(source)

    with (
        mock.patch.object(compile_fx, "compile_fx", load),
        mock.patch.object(JITFunction, "run", _nothing),
        mock.patch.object(torch.cuda, "set_device", _set_device),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _stream, create=True),
        _Made(runs),
    ):
        yield runs
