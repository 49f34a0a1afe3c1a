"""Training on several processes, compared with the same training on one: FSDP2, HSDP, tensor parallelism, experts.

Each layout runs in new processes, with nccl on GPUs and gloo on CPUs. In each of these a model is trained as the layout
spreads it, and unspread. All numbers are float64, so that parameters must be equal up to the order of sums.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import compiled_optim as co
from perf.budget import INTERRUPTED, Deadline
from perf.competitors import OURS, reason
from perf.interrupts import let_in
from perf.layouts import EXPERTS, LAYOUTS, SIZES, Layout, Network, Size
from perf.results import OUT_OF_TIME, Row, left_out, percentiles
from perf.turns import synchronize

LIMIT = 120
"""Seconds after which a process that is still in the same training prints its traceback and ends."""

PRELOADED = ["perf.distributed", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
"""Modules imported once for all processes, not by this module: without them steps need not look for DTensors."""

DIFFERENCE = "largest difference to one process"
ROUNDED = f"{DIFFERENCE}, products in bfloat16"
"""The metric for MuonAdamW on GPUs, where the bits of such products depend on the number of matrices in a call."""

TOLERANCES = {DIFFERENCE: 1e-9, ROUNDED: 1e-3}
"""The largest allowed difference of a parameter."""

ROWS = 48
"""Rows of a batch."""


@dataclass(frozen=True)
class Way:
    """An optimizer of a model, and the norm by which it clips: this package's in its step, torch's by torch's function."""

    competitor: str
    optimizer: str
    make: Callable[..., Any]
    bound: float | None = None

    def __str__(self) -> str:
        return f"{self.competitor}{', clipped' if self.bound else ''}"


_OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
WAYS = [
    Way(competitor, optimizer, make, bound)
    for bound in (None, 0.5)
    for competitor, optimizer, make in (
        (OURS, "adamw", lambda model, **options: co.AdamW(model.named_parameters(), **_OPTIONS, **options)),
        ("torch foreach", "adamw", lambda model: torch.optim.AdamW(model.named_parameters(), foreach=True, **_OPTIONS)),
        (OURS, "muonadamw", lambda model, **options: co.MuonAdamW(model, **_OPTIONS, **options)),
    )
]


class Sent(TorchDispatchMode):
    """A count of collectives, and of the bytes that this process hands to them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it becomes operations on tensors first
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            named = zip(func._schema.arguments, args, strict=False)
            inputs = tree_leaves([value for argument, value in named if not argument.name.startswith("output")])
            self.calls += 1
            self.bytes += sum(tensor.nbytes for tensor in inputs if isinstance(tensor, Tensor))
        return func(*args, **(kwargs or {}))


@dataclass
class Trained:
    """A model after training, the seconds of its steps on the host, and the collectives of the last step."""

    model: Network
    seconds: list[float] = field(default_factory=list)
    sent: Sent = field(default_factory=Sent)


def train(layout: Layout, way: Way, size: Size, device: torch.device, mesh: Any = None) -> Trained:
    """Train a model on this process alone, or spread over a ``mesh``, all of whose processes must call this."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Network(layout.kind, size).double()
    if mesh is not None:
        layout.spread(model, mesh)
    share = slice(dist.get_rank(), None, mesh.size()) if mesh is not None and layout.shares else slice(None)
    optimizer = way.make(model, **({"max_grad_norm": way.bound} if way.bound and way.competitor == OURS else {}))
    trained, generator = Trained(model), torch.Generator().manual_seed(1)
    for step in range(size.steps):
        x = torch.randn(ROWS, size.width, generator=generator, dtype=torch.float64)
        # Half of the topics: in each step there are experts without rows, not the same ones on each process.
        topics = (torch.randint(EXPERTS // 2, (ROWS,), generator=generator) + step) % EXPERTS
        x, topics = x[share].to(device), topics[share].to(device)
        functional.mse_loss(model(x, topics), x.sin().sum(1, keepdim=True)).backward()
        synchronize(device)
        if mesh is not None:
            dist.barrier()
        with trained.sent if step == size.steps - 1 else contextlib.nullcontext():
            started = time.perf_counter()
            if way.bound and way.competitor != OURS:
                nn.utils.clip_grad_norm_(model.parameters(), way.bound)
            optimizer.step()
            trained.seconds.append(time.perf_counter() - started)
        optimizer.zero_grad()
    return trained


def compare(spread: nn.Module, unspread: nn.Module) -> float:
    """Return the largest difference of a parameter on any process. All processes must call this."""
    expected = dict(unspread.named_parameters())
    differences = []
    for name, parameter in spread.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        differences.append((full - expected[name]).abs().max().detach())
    dist.all_reduce(largest := torch.stack(differences).max(), dist.ReduceOp.MAX)
    return float(largest)


def measure_distributed(
    device: torch.device,
    *,
    size: str,
    processes: Sequence[int] = (2, 4),
    layouts: Sequence[str] = tuple(LAYOUTS),
    deadline: Deadline | None = None,
    limit: float = LIMIT,
) -> Iterator[list[Row]]:
    """Yield the rows of each layout and number of processes as soon as it ends. Rows of others name the reason."""
    deadline = deadline or Deadline()
    for count, name in itertools.product(processes, layouts):
        rows, why, interrupt = [], OUT_OF_TIME, None
        if device.type == "cuda" and torch.cuda.device_count() < count:
            lacking = f"needs {count} GPUs, and there are {torch.cuda.device_count()}; with --device cpu it needs none"
            yield left_out("distributed", _workload(name, count), "adamw", {"GPUs": lacking})
            continue
        if deadline.allows_another():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    with let_in(), deadline.piece():
                        _run(count, name, SIZES[size], device.type, folder, limit)
                    why = ""
                except Exception as error:  # raised in any process
                    print(error, file=sys.stderr)
                    why = reason(error)
                except KeyboardInterrupt as error:
                    why, interrupt = INTERRUPTED, error
                if (saved := Path(folder, "rows")).exists():
                    rows = [Row(**json.loads(line)) for line in saved.read_text().splitlines()]
        yield rows + (left_out("distributed", _workload(name, count), "adamw", {OURS: why}) if why else [])
        if interrupt is not None:
            raise interrupt


def _run(count: int, *arguments: Any) -> None:
    """Train in new processes, and end them."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = torch.multiprocessing.start_processes(_work, (count, *arguments), count, join=False, start_method="forkserver")
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()


def _work(rank: int, count: int, name: str, size: Size, kind: str, folder: str, limit: float) -> None:
    """Train in every way; the first process writes the rows."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    faulthandler.dump_traceback_later(limit, exit=True)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    layout = LAYOUTS[name]
    mesh = layout.mesh(device)
    for way in WAYS:
        if way.bound and not layout.clips:
            continue
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            trained = train(layout, way, size, device, mesh)
            rows = _rows(name, count, way, trained, compare(trained.model, train(layout, way, size, device).model))
        except Exception as error:  # the same one on all processes, or the others end at their limit
            rows = left_out("distributed", _workload(name, count), way.optimizer, {str(way): reason(error)})
        if rank == 0:
            with Path(folder, "rows").open("a") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    dist.barrier()
    dist.destroy_process_group()


def _rows(name: str, count: int, way: Way, trained: Trained, difference: float) -> list[Row]:
    is_rounded = way.optimizer == "muonadamw" and torch.cuda.is_initialized()
    metrics = [
        (ROUNDED if is_rounded else DIFFERENCE, "abs", [difference]),
        ("host time of a step", "us", [1e6 * s for s in trained.seconds[2:-1]]),
        ("collectives of a step", "1", [trained.sent.calls]),
        ("bytes that a process hands to them", "B", [trained.sent.bytes]),
    ]
    return [
        Row(
            "distributed",
            _workload(name, count),
            way.optimizer,
            str(way),
            metric,
            unit,
            *percentiles(values),
            None,
            len(values),
        )
        for metric, unit, values in metrics
    ]


def _workload(name: str, count: int) -> str:
    return f"{name}, {count} processes"


def failed(row: Row) -> bool:
    """Return whether training differs from training on one process."""
    return row.benchmark == "distributed" and not row.p50 <= TOLERANCES.get(row.metric, math.inf)
