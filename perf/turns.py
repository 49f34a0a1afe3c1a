"""Several ways of doing one thing: each is timed as soon as it is made, then all in turn.

What was timed becomes rows at once. So nothing is lost with a way that is interrupted, fails, or ends the process.
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
"""One of so many rounds is also taken by each way alone."""


@dataclass(frozen=True)
class Call:
    """What is timed: ``run``, and not ``prepare``, which is called before it with the number of the round.

    ``found`` are the rows of what was measured while the call was made.
    """

    run: Callable[[], object]
    prepare: Callable[[int], object] = lambda index: None
    found: Sequence[Row] = ()


@dataclass(frozen=True)
class Table:
    """Which rows times become; ratios are those of the way ``own`` to each."""

    benchmark: str
    workload: str
    metric: str
    optimizer: str = "adamw"
    own: str = OURS
    paired: str = field(kw_only=True, default="")  # the metric of ratios within rounds, if it does not follow

    def alone(self, name: str, seconds: Sequence[float]) -> list[Row]:
        """A way that was timed alone."""
        return [self._row(name, f"{self.metric}, alone", "ms", [1e3 * s for s in seconds])] if seconds else []

    def together(self, samples: Samples) -> list[Row]:
        """Ways that were timed in turn: each, with the ratio of medians, and ratios within each round."""
        own = samples.get(self.own, [])
        rows = []
        for name, seconds in samples.items():
            ratio = percentiles(own)[1] / percentiles(seconds)[1] if own else None
            rows.append(self._row(name, self.metric, "ms", [1e3 * s for s in seconds], ratio))
        for name, seconds in samples.items():
            if own and name != self.own:
                ratios = [ours / theirs for ours, theirs in zip(own, seconds, strict=True)]
                rows.append(self._row(name, self.paired or f"paired ratio, {self.metric}", "ratio", ratios))
        return rows

    def _row(self, name: str, metric: str, unit: str, values: Sequence[float], ratio: float | None = None) -> Row:
        where = (self.benchmark, self.workload, self.optimizer, name)
        return Row(*where, metric, unit, *percentiles(values), ratio, len(values))


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
    """Rows of each way as soon as it was made and timed alone, then those of all in turn.

    A way that fails has a row that says why, and the next one begins; one that fails in turn ends the turns. A way begins
    only if it would end before the ``deadline``, were it as long as the longest.

    Args:
        table: what times become.
        ways: by name, what makes what is timed.
        device: to wait for.
        rounds: in turn.
        warmup: further rounds before them, which are not timed.
        deadline: shared by all that a command measures; by default there is none.
        reasons: takes why ways did not run; those that it has already are left out without a word.
        clock: returns seconds.
    """
    deadline, reasons = deadline or Deadline(), {} if reasons is None else reasons
    calls: dict[str, Call] = {}
    names = [name for name in ways if name not in reasons]

    def absent(why: Mapping[str, str]) -> list[Row]:
        reasons.update(why)
        return left_out(table.benchmark, table.workload, table.optimizer, why)

    for place, name in enumerate(names):
        if not deadline.allows_another():
            yield absent({name: OUT_OF_TIME})
            continue
        samples: Samples = {name: []}
        found: list[Row] = []
        try:
            with let_in(), deadline.piece():
                made = ways[name]()
                found += made.found
                _take(samples, {name: made}, device, -(-rounds // ALONE), warmup, clock, Deadline())
        except Exception as error:  # packages raise what they like, compilers too
            traceback.print_exc()
            yield found + table.alone(name, samples[name]) + absent({name: reason(error)})
            continue
        except BaseException:
            yield found + table.alone(name, samples[name]) + absent(dict.fromkeys(names[place:], "interrupted"))
            raise
        calls[name] = made
        yield found + table.alone(name, samples[name])
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
    """The ``rows`` of what ``take`` measures; those of what it had measured where it fails or is interrupted."""
    try:
        with let_in():
            take()
    except BaseException:
        yield rows()
        raise
    yield rows()


def _whole_rounds(table: Table, samples: Samples) -> list[Row]:
    """Rows of the rounds in which every way was timed."""
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
    """Add the seconds of each call to ``samples``, each round in another order, as long as there is time.

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
    """Seconds of each call, each round in another order."""
    samples: Samples = {name: [] for name in calls}
    made = {name: Call(call) for name, call in calls.items()}
    _take(samples, made, device, rounds, warmup, clock_of_processors(device), Deadline())
    return samples


def in_another_order(entrants: Sequence[T], index: int) -> Iterator[T]:
    """``entrants`` rotated by ``index``, and reversed every other time round so that neighbours change."""
    count = len(entrants)
    order = [entrants[(index + i) % count] for i in range(count)]
    yield from reversed(order) if (index // count) % 2 else order


def timed(function: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """The seconds that a call and its work on the device take."""
    synchronize(device)
    started = clock()
    function()
    synchronize(device)
    return clock() - started


def clock_of_processors(device: torch.device) -> Callable[[], float]:
    """On a CPU the time of processors, so that other work on the machine counts little."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def synchronize(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage before and not meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
