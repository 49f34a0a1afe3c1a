"""Timing of several ways to do one thing: each alone as soon as it is made, then all in turn.

Times become rows at once. So nothing is lost if a way is interrupted, fails, or ends the process.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch

from perf.budget import Deadline
from perf.competitors import OURS, reason
from perf.interrupts import let_in
from perf.results import OUT_OF_TIME, Row, left_out, percentiles

Samples: TypeAlias = dict[str, list[float]]
"""Seconds by the name of a way; entry ``i`` of each list is from the same round."""
T = TypeVar("T")

ALONE = 4
"""Each way alone takes the number of rounds divided by this."""


@dataclass(frozen=True)
class Call:
    """A function ``run`` that is timed, and ``prepare``, which is called before it with the number of the round.

    ``rows`` were measured while the call was made.
    """

    run: Callable[[], object]
    prepare: Callable[[int], object] = lambda index: None
    rows: Sequence[Row] = ()


@dataclass(frozen=True)
class Table:
    """The rows of times, with ratios of the way ``reference`` to each."""

    benchmark: str
    workload: str
    metric: str
    optimizer: str = "adamw"
    reference: str = OURS
    paired: str = field(kw_only=True, default="")  # the metric of ratios within rounds, if not the default

    def alone(self, name: str, seconds: Sequence[float]) -> list[Row]:
        """Return the row of a way that was timed alone."""
        return [self._row(name, f"{self.metric}, alone", "ms", [1e3 * s for s in seconds])] if seconds else []

    def together(self, samples: Samples) -> list[Row]:
        """Return rows of ways that were timed in turn, with the ratio of medians, and of ratios within each round."""
        base = samples.get(self.reference, [])
        rows = []
        for name, seconds in samples.items():
            ratio = percentiles(base)[1] / percentiles(seconds)[1] if base else None
            rows.append(self._row(name, self.metric, "ms", [1e3 * s for s in seconds], ratio))
        for name, seconds in samples.items():
            if base and name != self.reference:
                ratios = [ours / theirs for ours, theirs in zip(base, seconds, strict=True)]
                rows.append(self._row(name, self.paired or f"paired ratio, {self.metric}", "ratio", ratios))
        return rows

    def _row(self, name: str, metric: str, unit: str, values: Sequence[float], ratio: float | None = None) -> Row:
        where = (self.benchmark, self.workload, self.optimizer, name)
        return Row(*where, metric, unit, *percentiles(values), ratio, len(values))


class Shares(Table):
    """Rows of times, and of each as a share of the reference's in the same round, called ``paired``."""

    def together(self, samples: Samples) -> list[Row]:
        rows = []
        for name, seconds in samples.items():
            rows.append(self._row(name, self.metric, "ms", [1e3 * s for s in seconds]))
            if self.reference in samples:
                shares = [ours / theirs for ours, theirs in zip(seconds, samples[self.reference], strict=True)]
                rows.append(self._row(name, self.paired, "ratio", shares))
        return rows


def measured(
    table: Table,
    ways: Mapping[str, Callable[[], Call]],
    device: torch.device,
    *,
    rounds: int,
    warmup: int,
    deadline: Deadline | None = None,
    reasons: dict[str, str] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[list[Row]]:
    """Yield rows of each way as soon as it was made and timed alone, then those of all in turn.

    A way that fails alone has a row with the reason, and the next one begins; one that fails in turn ends the turns. A way
    begins only if it would end before the ``deadline``, were it as long as the longest.

    Args:
        table: turns times into rows.
        ways: functions that make the calls, by name.
        device: the device to wait for.
        rounds: the number of rounds in turn.
        warmup: further rounds before them, which are not timed.
        deadline: shared by all measurements of a command; none by default.
        reasons: gets the reasons why ways did not run. Ways that it already has are left out without a row.
        clock: returns seconds.
    """
    deadline, reasons = deadline or Deadline(), {} if reasons is None else reasons
    calls: dict[str, Call] = {}
    names = [name for name in ways if name not in reasons]

    def absent(why: Mapping[str, str]) -> list[Row]:
        reasons.update(why)
        return left_out(table.benchmark, table.workload, table.optimizer, why)

    for index, name in enumerate(names):
        if not deadline.allows_another():
            yield absent({name: OUT_OF_TIME})
            continue
        samples: Samples = {name: []}
        rows: list[Row] = []
        try:
            with let_in(), deadline.piece():
                call = ways[name]()
                rows += call.rows
                _take(samples, {name: call}, device, -(-rounds // ALONE), warmup, clock, Deadline())
        except Exception as error:  # packages and compilers may raise any error
            traceback.print_exc()
            yield rows + table.alone(name, samples[name]) + absent({name: reason(error)})
            continue
        except BaseException:
            yield rows + table.alone(name, samples[name]) + absent(dict.fromkeys(names[index:], "interrupted"))
            raise
        calls[name] = call
        yield rows + table.alone(name, samples[name])
    if not calls:
        return
    samples, now = {name: [] for name in calls}, [""]
    try:
        with let_in():
            _take(samples, calls, device, rounds, warmup, clock, deadline, now)
    except Exception as error:
        traceback.print_exc()
        yield _whole_rounds(table, samples) + absent({now[-1]: reason(error)})
        return
    except BaseException:
        yield _whole_rounds(table, samples)
        raise
    yield _whole_rounds(table, samples)


def kept(take: Callable[[], object], rows: Callable[[], list[Row]]) -> Iterator[list[Row]]:
    """Yield the ``rows`` after ``take`` has measured them, also if it fails or is interrupted."""
    try:
        with let_in():
            take()
    except BaseException:
        yield rows()
        raise
    yield rows()


def _whole_rounds(table: Table, samples: Samples) -> list[Row]:
    """Return rows of the rounds in which every way was timed."""
    count = min((len(seconds) for seconds in samples.values()), default=0)
    return table.together({name: seconds[:count] for name, seconds in samples.items()}) if count else []


def _take(
    samples: Samples,
    calls: Mapping[str, Call],
    device: torch.device,
    rounds: int,
    warmup: int,
    clock: Callable[[], float],
    deadline: Deadline,
    now: list[str] | None = None,
) -> None:
    """Add the seconds of each call to ``samples``, each round in another order, until the deadline.

    The last of ``now`` becomes the name of the way that runs.
    """
    entrants = list(calls.items())
    with no_garbage_collection():
        for index in range(-warmup, rounds):
            if deadline.is_over():
                return
            for name, call in in_another_order(entrants, index):
                if now is not None:
                    now[-1] = name
                call.prepare(index)
                seconds = timed(call.run, device, clock)
                if index >= 0:
                    samples[name].append(seconds)


def in_turn(calls: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int, warmup: int) -> Samples:
    """Measure seconds of each call, each round in another order."""
    samples: Samples = {name: [] for name in calls}
    timed_calls = {name: Call(call) for name, call in calls.items()}
    _take(samples, timed_calls, device, rounds, warmup, clock_of_processors(device), Deadline())
    return samples


def in_another_order(entrants: Sequence[T], index: int) -> Iterator[T]:
    """Yield ``entrants`` rotated by ``index``, in every second rotation reversed so that neighbours change."""
    count = len(entrants)
    order = [entrants[(index + i) % count] for i in range(count)]
    yield from reversed(order) if (index // count) % 2 else order


def timed(function: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a call and its work on the device."""
    synchronize(device)
    started = clock()
    function()
    synchronize(device)
    return clock() - started


def clock_of_processors(device: torch.device) -> Callable[[], float]:
    """Return the clock: on a CPU of processor time, so that other work on the machine counts little."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def synchronize(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage before the block, and not inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
