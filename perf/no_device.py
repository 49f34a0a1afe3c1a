"""The host's time of a step on a GPU whose driver does nothing: ``python perf/no_device.py TENSORS OPTIMIZER ROUNDS``.

CPU tensors have the lowering of a GPU. Triton compiles for it, and its driver, streams and graphs are stand-ins that return
at once. ``perf overhead`` runs this file with the packages of two checkouts, so it imports nothing else of ``perf``.
It prints JSON: microseconds per step, by the kind of step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import runpy
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import compiled_optim
from compiled_optim.capture import graph
from compiled_optim.lowering import coefficients
from compiled_optim.lowering.kernels import triton
from compiled_optim.memory import torch_internals

# This checkout's: the other package may lack it.
_STAND_INS = runpy.run_path(str(Path(__file__).parents[1] / "compiled_optim" / "simulated" / "driver.py"))
driver, answer = _STAND_INS["driver"], _STAND_INS["answer"]

ARCH = 90
BATCH = 20  # steps of one sample: the clock of processor time is not much finer than a step
COMPILED_LIMIT = 10  # tensors beyond which no step is compiled: inlined ones take minutes
CALLED, REPLAYED, OPERATOR, INLINED = "called step", "replayed step", "compiled operator's step", "compiled inlined step"


@contextlib.contextmanager
def simulated_gpu(arch: int = ARCH) -> Iterator[None]:
    """Let CPU tensors be on a GPU that does nothing, with a current device, a stream and CUDA graphs."""
    from triton.runtime import driver as triton_driver

    capture = torch_internals.CAPTURING["cuda"]
    with contextlib.ExitStack() as stack:
        for patched in (
            mock.patch.object(triton_driver, "_active", driver(arch)),
            mock.patch.dict(coefficients.BACKENDS, {"cpu": triton.TritonKernel}),
            mock.patch.object(coefficients, "_kernels", {}),
            mock.patch.object(triton, "current_device", _current_device),
            mock.patch.object(coefficients, "current_device", _current_device),
            mock.patch.object(torch.cuda, "_exchange_device", functools.partial(answer, 0)),
            mock.patch.object(torch.cuda, "_maybe_exchange_device", functools.partial(answer, 0)),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", functools.partial(answer, False)),
            mock.patch.dict(torch_internals.CAPTURING, {"cpu": capture}),
            mock.patch.dict(graph.GRAPHS, {"cpu": EmptyGraph}),
        ):
            stack.enter_context(patched)
        yield


def _current_device(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(0)


class EmptyGraph:
    """A stand-in for a graph whose replay takes no time."""

    def __init__(self, device: torch.device, stream: object = None) -> None:
        pass

    def warm_up(self, work: Callable[[], Any]) -> Any:
        """Do ``work``."""
        return work()

    capture = warm_up

    def replay(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


def steps(count: int, optimizer: str) -> dict[str, Callable[[], object]]:
    """Return steps of ``count`` small tensors by kind, after all is compiled. Addresses of gradients stay.

    The inlined step has Inductor's kernels for a CPU.
    """
    cls = next(getattr(compiled_optim, name) for name in compiled_optim.__all__ if name.lower() == optimizer)
    lowerings = {CALLED: "multi_tensor", REPLAYED: "multi_tensor"}
    if count <= COMPILED_LIMIT:
        lowerings |= {OPERATOR: "multi_tensor", INLINED: "inductor"}
    optimizers = {name: cls(_parameters(count), lowering=lowering) for name, lowering in lowerings.items()}
    runner = compiled_optim.CUDAGraphRunner(optimizers[REPLAYED], warmup=1)
    calls = {CALLED: optimizers[CALLED].step, REPLAYED: runner.step}
    for name in optimizers.keys() - calls.keys():
        calls[name] = torch.compile(_stepping(optimizers[name]), fullgraph=True)
    for call in calls.values():
        for _ in range(4):
            call()
    return calls


def _parameters(count: int) -> list[Tensor]:
    params = [torch.zeros(16, requires_grad=True) for _ in range(count)]
    for param in params:
        param.grad = torch.zeros(16)
    return params


def _stepping(optimizer: Any) -> Callable[[], None]:
    """Return a function that steps, with a code object of its own: Dynamo keeps guards by code."""

    def step() -> None:
        optimizer.step()

    code = step.__code__.replace(co_name=f"step_{id(optimizer)}")
    return types.FunctionType(code, step.__globals__, code.co_name, None, step.__closure__)


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Measure microseconds of processor time per step, a sample in each round, the steps in turn."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            started = time.process_time()
            for _ in range(BATCH):
                call()
            samples[name].append(1e6 * (time.process_time() - started) / BATCH)
    gc.enable()
    return samples


def main(arguments: Sequence[str]) -> None:
    """Measure in this process and print the samples."""
    count, optimizer, rounds = int(arguments[0]), arguments[1], int(arguments[2])
    torch.set_num_threads(1)
    with simulated_gpu():
        print(json.dumps(measure(steps(count, optimizer), rounds)))


if __name__ == "__main__":
    main(sys.argv[1:])
