"""The performance that this project promises, and verdicts whether a machine keeps the promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import pandas as pd
import torch

from perf.competitors import FUSED, OURS, SHARDED, competitor, end_mesh
from perf.first_step import measure_first_step
from perf.measure import measure_bandwidth, measure_overhead, measure_step
from perf.results import Row, show_table
from perf.schedulers import measure_schedulers
from perf.workloads import TINY

TRIES = 3
ROUNDS = {"gpt2-124m": 21, "small-148": 201, "matrices-148": 401, "small-1000": 101, "half-billion": 21, TINY: 2}
FIRST_STEPS = 3
HOST_CHECKS = 101
SCHEDULER_ROUNDS = 21

Record: TypeAlias = Callable[[Sequence[Row]], None]
Values: TypeAlias = Callable[[Sequence[Row]], Mapping[str, float]]


@dataclass(frozen=True)
class Promise:
    """A limit for one measured number: the most it may be or, with ``at_least``, the least."""

    name: str
    limit: float
    unit: str
    at_least: bool = False

    def kept_by(self, value: float) -> bool:
        """Return whether ``value`` keeps the promise."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        """Return the text of the limit."""
        return f"{'at least' if self.at_least else 'at most'} {self.limit:g} {self.unit}"


@dataclass(frozen=True)
class Check:
    """Promises about numbers that a benchmark measures together; ``measure`` returns them by the promises' names.

    ``values`` finds them in rows of the benchmark.
    """

    benchmark: str
    promises: tuple[Promise, ...]
    measure: Callable[[], Mapping[str, float]]
    values: Values = dict

    def look_up(self, table: pd.DataFrame) -> list[tuple[Promise, float | None]]:
        """Return each promise with its number in a table of one device; None for all if a row is missing."""
        try:
            values = self.values([Row(**row) for row in table[list(Row.__annotations__)].to_dict("records")])
        except KeyError:
            values = {}
        return [(promise, values.get(promise.name)) for promise in self.promises]


def _check(
    benchmark: str,
    promises: tuple[Promise, ...],
    measured: Callable[[], Iterator[list[Row]]],
    values: Values,
    record: Record,
) -> Check:
    def measure() -> Mapping[str, float]:
        rows = []
        for batch in measured():
            record(batch)
            rows += batch
        return values(rows)

    return Check(benchmark, promises, measure, values)


def stored_checks(kind: str) -> list[tuple[str, Check]]:
    """Return the promises for devices of a type, each with the table that has its rows."""
    return [(c.benchmark.replace("-", "_"), c) for c in checks(torch.device(kind), lambda rows: None)]


@dataclass
class Verdict:
    """One promise with every number measured for it."""

    promise: Promise
    tries: list[float] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """True if any try stayed within the limit: then slower tries are due to the machine."""
        return any(self.promise.kept_by(value) for value in self.tries)


def judge(checks: Sequence[Check], tries: int = TRIES) -> list[Verdict]:
    """Measure every check, again up to ``tries`` times in all while one of its promises is missed."""
    verdicts = []
    for check in checks:
        of_check = [Verdict(promise) for promise in check.promises]
        for _ in range(tries):
            measured = check.measure()
            for verdict in of_check:
                verdict.tries.append(measured[verdict.promise.name])
            if all(verdict.kept for verdict in of_check):
                break
        verdicts += of_check
    return verdicts


def checks(device: torch.device, record: Record) -> list[Check]:
    """Return the promises of this project for ``device``. ``record`` gets the rows behind every number."""
    if device.type == "cuda":
        return [
            _step_check("gpt2-124m", 1.00, device, record),
            _step_check("small-1000", 0.70, device, record),
            _bandwidth_check("half-billion", 0.88, device, record),
            _first_step_check(device, record),
            _schedulers_check(device, record),
        ]
    return [
        _step_check("small-148", 1.10, device, record),
        _step_check("gpt2-124m", 1.05, device, record),
        _first_step_check(device, record),
        _host_check(record),
        _sharded_check("matrices-148", device, record),
        _schedulers_check(device, record),
    ]


def rehearsal(device: torch.device, record: Record) -> list[Check]:
    """Return checks with tiny tensors, to see that the benchmarks work. Their limits are no promises."""
    return [
        _step_check(TINY, 1.0, device, record),
        _bandwidth_check(TINY, 1.0, device, record),
        _first_step_check(device, record, counts=(10,), repeats=1),
        _sharded_check(TINY, device, record),
        _schedulers_check(device, record),
    ]


def show(verdicts: Sequence[Verdict]) -> None:
    """Print ``verdicts`` as a table."""
    lines = [
        {
            "promise": v.promise.name,
            "limit": str(v.promise),
            "tries": ", ".join(f"{value:.3f}" for value in v.tries),
            "verdict": "kept" if v.kept else "MISSED",
        }
        for v in verdicts
    ]
    show_table(pd.DataFrame(lines), "gates")


def _step_check(workload: str, limit: float, device: torch.device, record: Record) -> Check:
    metric = "step, fresh gradients"
    promise = Promise(f"AdamW step, {workload}, fresh gradients: time / {FUSED}", limit, "ratio of medians")

    def measured() -> Iterator[list[Row]]:
        competitors = [competitor("adamw", name) for name in (OURS, FUSED)]
        return measure_step(workload, "adamw", competitors, device, rounds=ROUNDS[workload], gradients=("fresh",))

    def values(rows: Sequence[Row]) -> dict[str, float]:
        medians = {r.competitor: r.p50 for r in rows if (r.workload, r.optimizer, r.metric) == (workload, "adamw", metric)}
        return {promise.name: medians[OURS] / medians[FUSED]}

    return _check("step", (promise,), measured, values, record)


def _sharded_check(workload: str, device: torch.device, record: Record) -> Check:
    promises = {
        f"step, {gradients} gradients": Promise(
            f"AdamW step, {workload}, {gradients} gradients: time of DTensors / plain tensors", 1.5, "ratio of medians"
        )
        for gradients in ("same", "fresh")
    }

    def measured() -> Iterator[list[Row]]:
        competitors = [competitor("adamw", name) for name in (OURS, SHARDED)]
        try:
            yield from measure_step(workload, "adamw", competitors, device, rounds=ROUNDS[workload])
        finally:
            end_mesh()

    def values(rows: Sequence[Row]) -> dict[str, float]:
        medians = {(r.metric, r.competitor): r.p50 for r in rows if (r.workload, r.optimizer) == (workload, "adamw")}
        return {p.name: medians[metric, SHARDED] / medians[metric, OURS] for metric, p in promises.items()}

    return _check("step", tuple(promises.values()), measured, values, record)


def _first_step_check(
    device: torch.device, record: Record, counts: Sequence[int] = (10, 148, 1000), repeats: int = FIRST_STEPS
) -> Check:
    few, many = counts[0], counts[-1]
    absolute = {n: Promise(f"AdamW construction and first step, {n} tensors, fresh cache", 10.0, "s") for n in counts}
    # Most of such a second is torch's lazy import and the start of the C++ compiler, for any number of tensors; it varies by
    # tenths of a second and hides how the remainder grows. So the seconds in the compiler are compared too.
    wall = Promise(f"AdamW construction and first step, {many} tensors / {few} tensors", 1.3, "ratio of medians")
    compiling = Promise(f"AdamW seconds compiling, {many} tensors / {few} tensors", 1.3, "ratio of medians")

    def measured() -> Iterator[list[Row]]:
        return measure_first_step([f"small-{n}" for n in counts], "adamw", [OURS], device, repeats=repeats)

    def values(rows: Sequence[Row]) -> dict[str, float]:
        medians = {(r.workload, r.metric): r.p50 for r in rows if (r.optimizer, r.competitor) == ("adamw", OURS)}

        def ratio(metric: str) -> float:
            return medians[f"small-{many}", metric] / medians[f"small-{few}", metric]

        return {
            **{promise.name: medians[f"small-{n}", "both, fresh cache"] for n, promise in absolute.items()},
            wall.name: ratio("both, fresh cache"),
            compiling.name: ratio("compiling, fresh cache"),
        }

    return _check("first-step", (*absolute.values(), wall, compiling), measured, values, record)


def _host_check(record: Record) -> Check:
    limits = {(148, "steady-state check"): 40.0, (148, "runner without replay"): 60.0, (1000, "steady-state check"): 200.0}
    promises = {
        (count, metric): Promise(f"AdamW {metric}, {count} tensors, fresh gradients", limit, "us")
        for (count, metric), limit in limits.items()
    }

    def measured() -> Iterator[list[Row]]:
        counts = dict.fromkeys(count for count, _ in limits)
        for count in counts:
            yield from measure_overhead(f"small-{count}", "adamw", rounds=HOST_CHECKS)

    def values(rows: Sequence[Row]) -> dict[str, float]:
        medians = {(r.workload, r.metric): r.p50 for r in rows if r.optimizer == "adamw"}
        return {p.name: count * medians[f"small-{count}", metric] for (count, metric), p in promises.items()}

    return _check("overhead", tuple(promises.values()), measured, values, record)


def _schedulers_check(device: torch.device, record: Record) -> Check:
    limits = {"LambdaLR": 4.0, "StepLR": 4.25, "CosineAnnealingLR": 4.0, "OneCycleLR": 6.0}
    limits |= {"CosineAnnealingLR": 2.5} if device.type == "cpu" else {}  # where writes do not wait for the step
    ratios = {
        name: Promise(f"step of {name}, 24 groups: time / torch.optim's", limit, "ratio of medians")
        for name, limit in limits.items()
    }
    few = {name: Promise(f"step of {name}, 2 groups", 20.0, "us") for name in ("LambdaLR", "CosineAnnealingLR")}

    def values(rows: Sequence[Row]) -> dict[str, float]:
        medians = {(r.workload, r.metric, r.competitor): r.p50 for r in rows if r.optimizer == "adamw"}
        many = {n: medians["24 groups", n, OURS] / medians["24 groups", n, FUSED] for n in limits}
        return {ratios[n].name: ratio for n, ratio in many.items()} | {
            promise.name: medians["2 groups", n, OURS] for n, promise in few.items()
        }

    def measured() -> Iterator[list[Row]]:
        return measure_schedulers("adamw", device, rounds=SCHEDULER_ROUNDS)

    return _check("schedulers", (*ratios.values(), *few.values()), measured, values, record)


def _bandwidth_check(workload: str, limit: float, device: torch.device, record: Record) -> Check:
    promise = Promise(f"AdamW step, {workload}: bandwidth / a copy's", limit, "ratio of medians", at_least=True)

    def measured() -> Iterator[list[Row]]:
        return measure_bandwidth(workload, "adamw", device, rounds=ROUNDS[workload])

    def values(rows: Sequence[Row]) -> dict[str, float]:
        medians = {r.metric: r.p50 for r in rows if (r.workload, r.optimizer) == (workload, "adamw")}
        return {promise.name: medians["step, float32"] / medians["copy, float32"]}

    return _check("bandwidth", (promise,), measured, values, record)
