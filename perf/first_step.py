"""Construction and first step, each in a new process: ``measure_first_step``.

Run as a module, this is that process: it prints its measurement as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

import compiled_optim
from perf.competitors import OURS, PEERS, competitor, reason
from perf.measure import make_gradients, make_params
from perf.results import Row, left_out, percentiles
from perf.turns import kept
from perf.workloads import shapes

WORKLOADS = ("small-10", "small-148", "small-1000", "gpt-matrices")
COMPETITORS = (OURS, f"{OURS}[inductor]", "torch fused", "torch foreach")
COMPILED_LIMIT = 10
"""Tensors beyond which steps that users compile are left out: they unroll and take minutes, each time."""

METRICS = ("construct", "first step", "both", "compiling")


def measure_first_step(
    workloads: Sequence[str], optimizer: str, names: Sequence[str], device: torch.device, *, repeats: int
) -> Iterator[list[Row]]:
    """Measure seconds in a new process with an empty compiler cache, and in a second process with a filled one.

    Each repetition goes through all workloads and competitors, so that a slow time of the machine affects all of them.
    Importing torch and this package is not timed. The import of ``torch._dynamo`` is, as part of ``construct`` where
    torch.optim's optimizers cause it. ``compiling`` is the sum in the report of this package's optimizers. Rows name the
    reason if a competitor did not run.
    """
    samples: dict[tuple[str, str, str], list[float]] = {}
    reasons: dict[str, dict[str, str]] = {}

    def take() -> None:
        for _ in range(repeats):
            for workload, name in itertools.product(workloads, names):
                if PEERS[name].compiled and len(shapes(workload)) > COMPILED_LIMIT:
                    continue
                with tempfile.TemporaryDirectory(prefix="perf-first-step-") as cache:
                    for state in ("fresh cache", "warm cache"):
                        measured = _in_process(workload, optimizer, name, device, cache)
                        if isinstance(measured, str):
                            reasons.setdefault(workload, {})[name] = measured
                            break
                        for metric, seconds in measured.items():
                            samples.setdefault((workload, name, f"{metric}, {state}"), []).append(seconds)

    def rows() -> list[Row]:
        result = []
        for key, values in samples.items():
            workload, name, metric = key
            numbers = (*percentiles(values), _ratio(samples, key), len(values))
            result.append(Row("first_step", workload, optimizer, name, metric, "s", *numbers))
        return result + [r for workload, why in reasons.items() for r in left_out("first_step", workload, optimizer, why)]

    yield from kept(take, rows)


def _ratio(samples: Mapping[tuple[str, str, str], Sequence[float]], key: tuple[str, str, str]) -> float | None:
    workload, _, metric = key
    ours = samples.get((workload, OURS, metric))
    if ours is None or metric.startswith("compiling"):
        return None
    return percentiles(ours)[1] / percentiles(samples[key])[1]


def _in_process(workload: str, optimizer: str, name: str, device: torch.device, cache: str) -> dict[str, float] | str:
    """Return the seconds by metric, or why it did not run."""
    command = [sys.executable, "-m", "perf.first_step", workload, optimizer, name, str(device)]
    caches = {key: str(Path(cache, key.lower())) for key in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    root = Path(__file__).parent.parent
    # Its stderr stays the terminal's, so that errors are seen.
    done = subprocess.run(command, env=os.environ | caches, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] | str = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    """Measure in this process and print the seconds, or why another package does not run, as JSON."""
    parser = argparse.ArgumentParser()
    for argument in ("workload", "optimizer", "competitor", "device"):
        parser.add_argument(argument)
    args = parser.parse_args()
    device = torch.device(args.device)
    sizes = shapes(args.workload)
    params = make_params(sizes, device)
    for param, grad in zip(params, make_gradients(sizes, device, seed=1), strict=True):
        param.grad = grad
    try:
        make = competitor(args.optimizer, args.competitor).make
        started = time.perf_counter()
        optimizer = make(params)
        constructed = time.perf_counter()
        optimizer.step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        stepped = time.perf_counter()
    except Exception as error:
        if args.competitor.startswith(OURS):
            raise
        print(json.dumps(reason(error)))
        return
    seconds = [constructed - started, stepped - constructed, stepped - started]
    if isinstance(optimizer, compiled_optim.CompiledOptimizer):
        seconds.append(compiled_optim.compile_report(optimizer).seconds)
    print(json.dumps(dict(zip(METRICS, seconds, strict=False))))


if __name__ == "__main__":
    main()
