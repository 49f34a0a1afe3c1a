"""The kernels that look at watched steps: which launches a step with them has more, and whether they see what torch sees.

Tables may differ from those of torch's operations by roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.capture import graph
from compiled_optim.lowering.kernels import triton
from compiled_optim.optimizer import engine_of
from compiled_optim.step import watch as watch_module

STEPS = 5
LAUNCHED: list[str] = []  # names of kernels, in order


class LaunchGraph:
    """A graph of launches: what it captures is not done before a replay, and then with the tensors that it had."""

    recording: ClassVar[list[Callable[[], object]] | None] = None

    def __init__(self, device: torch.device, stream: object = None) -> None:
        self._work: list[Callable[[], object]] = []

    def capture(self, work: Callable[[], object]) -> None:
        """Record the launches of ``work``."""
        LaunchGraph.recording = self._work
        work()
        LaunchGraph.recording = None

    def replay(self) -> None:
        """Do them."""
        for launch in self._work:
            launch()

    def release(self) -> None:
        """Do nothing."""


def prepared(function: Any, *arguments: Any, **options: int) -> Callable[[], object]:
    """As ``triton.prepared``, for :class:`LaunchGraph`."""
    plain = PREPARED(function, *arguments, **options)

    def run() -> object:
        LAUNCHED.append(function.__name__)
        return plain()

    return lambda: run() if LaunchGraph.recording is None else LaunchGraph.recording.append(run)


PREPARED = triton.prepared


def shapes(dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters of all forms, the last of which never has a gradient."""

    def made(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    params = {"small": made(3), "scalar": made(), "wide": made(7, 60), "empty": made(0, 3), "turned": made(90, 4).T}
    params |= {"channels": made(8, 4, 3, 3).to(memory_format=torch.channels_last), "offset": made(300)[9:]}
    return {**params, "still": made(200)}


def kinds() -> dict[str, Tensor]:
    """Parameters of several dtypes: kernels of their own, in one plan."""
    dtypes = torch.float32, torch.bfloat16, torch.float64, torch.complex64
    return {str(dtype): torch.randn(20, 9).to(dtype) for dtype in dtypes} | {"still": torch.randn(200)}


CASES: dict[str, tuple[Any, Callable[[], dict[str, Tensor]], dict[str, Any]]] = {
    "float32": (co.AdamW, lambda: shapes(torch.float32), {}),
    "float16": (co.SGD, lambda: shapes(torch.float16), {}),
    "bfloat16": (co.SGD, lambda: shapes(torch.bfloat16), {"momentum": 0.9}),
    "master": (co.AdamW, lambda: shapes(torch.bfloat16), {"weights": "master"}),
    "mixed": (co.Adam, kinds, {}),
    "clipped": (co.AdamW, lambda: shapes(torch.float32), {"max_grad_norm": 0.3}),
    "skipping": (co.AdamW, lambda: shapes(torch.float32), {"skip_nonfinite": True}),
    "averaging": (co.LAMB, lambda: shapes(torch.float32), {}),
    "scheduled": (co.SGD, lambda: shapes(torch.float32), {"schedule": lambda step: 0.1 / (1 + step)}),
    "muon": (co.MuonAdamW, lambda: {name: p for name, p in shapes(torch.float32).items() if name != "empty"}, {}),
    "gaps": (co.SGD, lambda: {"gaps": torch.randn(10, 40)[:, ::2], "still": torch.randn(5)}, {}),
}


def give(params: dict[str, nn.Parameter], step: int) -> None:
    """Give all but the last one gradients; some are zeros, some lie in another order of memory, one is infinite."""
    for place, param in enumerate([*params.values()][:-1]):
        grad = torch.randn_like(param)
        if place == step:
            grad.zero_()
        if place == 4 and step == 3:
            grad = grad.contiguous()
        if place == 2 and step == 2:
            grad.view(-1)[grad.numel() // 2] = torch.inf
        param.grad = None if place == 0 and step == 1 else grad


def tables(case: str, *, captured: bool) -> tuple[list[Tensor], list[str]]:
    """Where the watches of an optimizer are after some steps, their tables, and the last step's launches."""
    kind, make, options = CASES[case]
    torch.manual_seed(0)
    params = {name: nn.Parameter(values) for name, values in make().items()}
    given, schedule = {"lr": 0.01, **options}, options.get("schedule")
    given.pop("schedule", None)
    groups = [{"params": dict([*params.items()][::2])}, {"params": dict([*params.items()][1::2]), "lr": 0.05}]
    optimizer = kind(groups, lowering="multi_tensor", **given)
    optimizer.schedule(lr=schedule)
    optimizer.watch_health()
    step = co.CUDAGraphRunner(optimizer).step if captured else optimizer.step
    for number in range(STEPS):
        give(params, number)
        LAUNCHED.clear()
        if number == 4 and schedule is None:
            optimizer.param_groups[0]["lr"] = 0.03
        step()
    watches = engine_of(optimizer).step.watches.values()
    return [t for watch in watches for t in (watch._table, watch._index[:1])], LAUNCHED[:]


def differences(case: str, *, captured: bool) -> Iterator[str]:
    """What a step with kernels launches, and where its tables differ."""
    found, launched = tables(case, captured=captured)
    with mock.patch.object(watch_module, "TritonKernel", type(None)):
        expected, plain = tables(case, captured=False)
    yield " ".join(name for name in launched if name not in plain)
    for ours, theirs in zip(found, expected, strict=True):
        bound = dict.fromkeys(("rtol", "atol"), 2e-6)
        if not torch.allclose(ours.double(), theirs.double(), equal_nan=True, **bound):
            yield f"{ours} in place of {theirs}"


def interpreted() -> dict[str, list[str]]:
    """Return how the launches end that a step with them has more, and which tables differ, by case."""
    triton.prepared = watch_module.prepared = prepared  # type: ignore[assignment]
    found = {case: [*differences(case, captured=False)] for case in CASES}
    graph.GRAPHS["cpu"] = LaunchGraph  # type: ignore[assignment]
    found |= {f"captured {case}": [*differences(case, captured=True)] for case in ("float32", "skipping")}
    return found
