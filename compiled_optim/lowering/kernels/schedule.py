"""In which order the update of a stack is computed: loops over elements, and products of matrices between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from compiled_optim.rule.stacks import OF_GROUPS, Axes, StackUpdate, Step


@dataclass
class Loop:
    """A loop over the elements of ``axes``: it evaluates steps, adds up ``sums``, and stores what is read after it.

    Among ``sums`` are the largest of groups, too.

    ``loads`` names what it reads from memory, ``kept`` the values that it stores there. ``results`` are the new values of
    parameter and buffers, by the names of these.
    """

    axes: Axes
    steps: list[Step] = field(default_factory=list)
    sums: list[Step] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


Event: TypeAlias = Loop | Step  # of matrices: a product, or one that is to be transposed


class Schedule:
    """The ``events`` of an update, in order.

    Each loop computes again the values that it needs, where these have an element for each of the tensor's, or a single one.
    Other values, sums, what groups share and what products take are computed once and kept. New parameters and buffers are
    stored by the last loop that reads the old ones, if it computes them, and otherwise at the end.
    """

    def __init__(self, update: StackUpdate) -> None:
        self._update = update
        self._steps = {step.name: step for step in update.steps}
        multiplied = {name for s in update.steps if not _is_looped(s) for name in s.reads}
        between = range(1, _rank(update.axes))  # of values with several elements, but not as many as the tensor
        few = {s.name for s in update.steps if _rank(s.axes) in between or OF_GROUPS in s.axes}
        self._once = [s for s in update.steps if s.kind != "element" or s.name in few | multiplied]
        self._names = {s.name for s in self._once}
        self.events: list[Event] = []
        rest, done = list(self._once), set[str]()
        while rest:
            found = self._next([s for s in rest if self._needs(s) <= done], rest, done)
            self.events.append(self._loop(self._space(found[0]), found) if _is_looped(found[0]) else found[0])
            done |= {step.name for step in found}
            rest = [step for step in rest if step.name not in done]
        late = {old: new for old, new in update.results.items() if not self._stored_early(old, new)}
        for axes in sorted({update.inputs[old] for old in late}, key=lambda axes: (-_rank(axes), axes)):
            self.events.append(self._loop(axes, (), {o: n for o, n in late.items() if update.inputs[o] == axes}))
        loops = [event for event in self.events if isinstance(event, Loop)]
        read = multiplied.union(*(loop.loads for loop in loops))
        for loop in loops:
            loop.kept = [step.name for step in loop.steps if step.name in self._names & read]

    def _stored_early(self, old: str, new: str) -> bool:
        """Whether the last loop that reads ``old`` stores ``new``: it computes that, and no other result needs ``old``."""
        readers = [event for event in self.events if isinstance(event, Loop) and old in event.loads]
        others = [value for other, value in self._update.results.items() if other != old]
        if not readers or old in self._read(others) or new not in {step.name for step in readers[-1].steps}:
            return False
        readers[-1].results[old] = new
        return True

    def axes_of(self, name: str) -> Axes:
        """The axes of a value: of a step, of an input, or of a coefficient, which has none."""
        if name in self._steps:
            return self._steps[name].axes
        return self._update.inputs.get(name, ("",) * len(self._update.axes))

    def _next(self, ready: Sequence[Step], rest: Sequence[Step], done: set[str]) -> list[Step]:
        """The steps that one event takes: of small values first, so that loops over all elements are few."""
        elementwise = [s for s in ready if _is_looped(s)]
        small = [s for s in elementwise if _rank(self._space(s)) < _rank(self._update.axes)]
        first = (small or elementwise or ready)[0]
        if first not in elementwise:
            return [first]
        found: list[Step] = []
        for step in (s for s in rest if _is_looped(s) and self._space(s) == self._space(first)):
            if self._needs(step) <= done.union(s.name for s in found if s.kind == "element"):
                found.append(step)
        return found

    def _space(self, step: Step) -> Axes:
        """The axes of the loop that evaluates a step."""
        return self.axes_of(step.reads[0]) if step.reduces else step.axes

    def _needs(self, step: Step) -> set[str]:
        """What must be done before a step can be evaluated."""
        return self._read(step.reads) & self._names

    def _loop(self, axes: Axes, found: Iterable[Step], results: dict[str, str] | None = None) -> Loop:
        loop = Loop(axes, sums=[s for s in found if s.reduces], results=results or {})
        own = {s.name for s in found if s.kind == "element"}
        wanted = [*own, *(s.reads[0] for s in loop.sums), *loop.results.values()]
        read = self._read(wanted, own)
        loop.steps = [s for s in self._update.steps if s.name in read and (s.name in own or s.name not in self._names)]
        evaluated = {s.name for s in loop.steps}
        loop.loads = sorted(read - evaluated)
        return loop

    def _read(self, names: Iterable[str], own: Collection[str] = ()) -> set[str]:
        """Values, and what they are computed from in a loop that evaluates its ``own`` ones."""
        found, rest = set[str](), list(names)
        while rest:
            if (name := rest.pop()) not in found:
                found.add(name)
                rest += self._steps[name].reads if name in self._steps and (name in own or name not in self._names) else ()
        return found


def _is_looped(step: Step) -> bool:
    return step.reduces or step.kind == "element"


def _rank(axes: Axes) -> int:
    return len("".join(axes))
