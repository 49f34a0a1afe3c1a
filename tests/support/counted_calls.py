"""Counts the calls of Python functions in which Inductor compiles a step of AdamW, by device, way and number of tensors."""

from __future__ import annotations

import cProfile
import json
from typing import Any

import torch
from torch import nn

import compiled_optim as co
from perf.lowering.report import Workload, lower

NUMBERS = 8, 16
WAYS = "inlined", "torch"


def _on_cpu(way: str, tensors: int) -> int:
    torch._dynamo.reset()
    params = [nn.Parameter(torch.ones(shape)) for shape in Workload("adamw", tensors, shapes="mixed").sizes]
    for param in params:
        param.grad = torch.ones_like(param)
    kinds: dict[str, Any] = {"torch": torch.optim.AdamW, "inlined": co.AdamW}
    optimizer = kinds[way](params, lr=0.1, **{"torch": {"foreach": True}, "inlined": {"lowering": "inductor"}}[way])
    step, profile = torch.compile(optimizer.step), cProfile.Profile()
    with profile:
        step()
    return sum(entry.callcount for entry in profile.getstats())


def _on_gpu(way: str, tensors: int) -> int:
    calls = lower(way, Workload("adamw", tensors, shapes="mixed"), 90, counted=True).calls
    assert calls is not None
    return calls


def main() -> None:
    """Print the counts as JSON, after what is done once in a process."""
    from torch._functorch import config as autograd
    from torch._inductor import config

    found: dict[str, dict[str, list[int]]] = {}
    with config.patch(fx_graph_cache=False, compile_threads=1), autograd.patch(enable_autograd_cache=False):
        for device, count in (("cpu", _on_cpu), ("cuda", _on_gpu)):
            for way in WAYS:
                count(way, 2)
            found[device] = {way: [count(way, number) for number in NUMBERS] for way in WAYS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
