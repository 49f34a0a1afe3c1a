"""A rule's functions over lists of tensors, in torch operations that Inductor fuses across the lists.

On a GPU Inductor makes one kernel of all results of a ``torch._foreach`` operation, and fuses list operations on the same
tensors into it. Every use of a value in between recomputes it, until the expression is too long: Inductor then makes a
separate kernel for each tensor. So long expressions are ended early, by a list operation.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from compiled_optim.memory.layout import compute_dtype, scalar_dtype
from compiled_optim.rule.rule import INDEX, Rule, Written
from compiled_optim.rule.symbols import WORDS, Dialect, Statement
from compiled_optim.state import filled

ListValues: TypeAlias = dict[str, list[Any]]
"""The values of each name in generated code, one for every tensor of the lists."""

Store: TypeAlias = Callable[[str, list[Tensor]], list[Tensor]]

TORCH = Dialect("{1}", "{}", "&", "|", typed="like.new_full((), {})", typed_words=frozenset({"bias_correction", "where"}))
"""Python expressions of tensors; ``like`` has the dtype of computations."""

_WORDS: dict[str, Any] = {
    **{f"{name}_": word for name, word in WORDS.items()},
    "shift_right_": operator.rshift,
    "inf": math.inf,
    "nan": math.nan,
}

_LIST_OPERATIONS: dict[str, Callable[..., Any]] = {
    "{0} + {1}": torch._foreach_add,
    "{0} - {1}": torch._foreach_sub,
    "{0} * {1}": torch._foreach_mul,
    "{0} / {1}": torch._foreach_div,
    "sqrt_({0})": torch._foreach_sqrt,
}

# Limits of a recomputed expression. Inductor stores one separately if it reads more than 8 numbers, or 4 if several read it,
# or if it reads and computes more than 30. The operations that a step adds to the last expression of a rule must fit, too.
_READS, _SHARED_READS, _OPERATIONS = 7, 4, 24


def fuses_lists(device: torch.device) -> bool:
    """Return True if Inductor fuses operations over lists on ``device``."""
    return device.type != "cpu"


class Programs:
    """The programs of a rule with static choices: one for each of its ``reductions``, and one for its ``update``.

    With ``ends``, expressions end where Inductor would end them.
    """

    def __init__(self, rule: Rule, statics: tuple[tuple[str, Any], ...], ends: bool) -> None:
        choices = dict(statics)
        *self.reductions, self.update = (ListProgram(written, ends) for written in rule.written(choices, TORCH))
        self.buffers = rule.present_buffers(choices)
        self.grouped = rule.grouped_buffers(choices)
        self.integers = rule.integer_buffers(choices)
        self.reads_index = rule.reads_index(choices)


programs = functools.cache(Programs)


class ListProgram:
    """One of a rule's functions, statement by statement, each for all tensors of the lists."""

    def __init__(self, written: Written, ends: bool) -> None:
        self.numbers = len(written.numbers)
        self._results = written.results
        old = ["param", *(f"buffer{i}" for i in range(len(written.results) - 1))]
        self._old = dict(zip(written.results, old, strict=False))
        self._unchanged = {name for name, text in written.results.items() if text == self._old.get(name)}
        self._lines = [_line(s) for s in written.statements]
        defined = {line.name for line in self._lines}
        temporary = defined - {*written.results.values()}
        self._last_reads = {name: line.name for line in self._lines for name in line.reads if name in temporary}
        # The results that may be stored as soon as they are computed, by the statements that define them.
        self._replaceable = {text: name for name, text in written.results.items() if text in defined and name in self._old}
        while True:
            self._ends = _ends(written, self._replaceable) if ends else frozenset[str]()
            self._inputs = self._inputs_of_expressions()
            if (text := next(filter(self._is_read_after, self._replaceable), None)) is None:
                break
            del self._replaceable[text]
        self._fuses_lists = ends

    def run(self, values: ListValues, store: Store | None = None, exact: Collection[str] = ()) -> ListValues:
        """Return the results by name, for ``values`` of ``param``, ``grad``, ``buffer0``, ..., ``k0``, ... and ``index``.

        ``store`` is called with each new result of an update, and returns the stored values. For ``exact`` results, which
        are stored without rounding, the program continues with these.
        """
        values = dict(values)
        early = {text: name for text, name in self._replaceable.items() if store is not None and name in exact}
        together = _together(self._lines, self._ends - early.keys()) if self._fuses_lists else ()
        for line in self._lines:
            operands = [values[name] for name in line.reads]
            if line.name in together:
                assert line.list_operation is not None
                outputs = list(line.list_operation(*operands))
            else:
                outputs = [line.evaluate(*each) for each in zip(values["param"], *operands, strict=True)]
            if line.name in early:
                assert store is not None
                outputs = store(early[line.name], outputs)
            elif line.name in self._ends and outputs[0].dtype != torch.bool:
                outputs = list(torch._foreach_mul(outputs, 1))
            values[line.name] = outputs
            for name in line.reads:
                if self._last_reads.get(name) == line.name:
                    del values[name]
        results = {name: self._result(text, values) for name, text in self._results.items()}
        if store is not None:
            late = [name for name in results if name not in self._unchanged and name not in early.values()]
            for i, name in enumerate(late if self._fuses_lists else ()):
                if not self._inputs_of(self._results[name]).isdisjoint(self._old[other] for other in late[:i]):
                    ended = torch._foreach_mul(results[name], 1)
                    results[name] = [t.as_strided(t.shape, t.stride()) for t in ended]  # must be in memory
            for name in late:
                store(name, results[name])
        return results

    def _inputs_of_expressions(self) -> dict[str, frozenset[str]]:
        """Return the inputs that Inductor reads for each statement's value: of the program, and ended expressions."""
        inputs: dict[str, frozenset[str]] = {}
        for line in self._lines:
            is_end = line.name in self._ends or line.name in self._replaceable
            read = frozenset[str]().union(*(inputs.get(name, {name}) for name in line.reads))
            inputs[line.name] = frozenset({line.name}) if is_end else read
        return inputs

    def _inputs_of(self, text: str) -> frozenset[str]:
        return self._inputs.get(text, frozenset({text}))

    def _is_read_after(self, text: str) -> bool:
        """Return True if the old value of the result that ``text`` defines is read after it, also by recomputed values."""
        old = self._old[self._replaceable[text]]
        after = self._lines[[line.name for line in self._lines].index(text) + 1 :]
        later = [*(name for line in after for name in line.reads), *self._results.values()]
        return any(old in self._inputs_of(name) for name in later)

    def _result(self, text: str, values: ListValues) -> list[Tensor]:
        if text not in values:  # a number
            return [torch.full_like(param, eval(text, dict(_WORDS))) for param in values["param"]]
        is_input = text in ("param", "grad") or text.startswith("buffer")
        return [value.clone() for value in values[text]] if is_input else values[text]


class _Line(NamedTuple):
    name: str
    reads: tuple[str, ...]
    evaluate: Callable[..., Any]
    list_operation: Callable[..., Any] | None
    """The torch function that evaluates it for all tensors of the lists at once, if it exists."""


def _line(statement: Statement) -> _Line:
    reads = tuple(dict.fromkeys(statement.reads))
    forms = {t.format(*reads): operation for t, operation in _LIST_OPERATIONS.items() if t.count("{") == len(reads)}
    evaluate = eval(f"lambda {', '.join(('like', *reads))}: {statement.text}", dict(_WORDS))
    return _Line(statement.name, reads, evaluate, forms.get(statement.text))


NumberProgram: TypeAlias = Callable[[Mapping[str, Any], Tensor], dict[str, Any]]
"""Returns results by name, for values of the names that its statements read, in the dtype of a tensor."""


def number_program(written: Written) -> NumberProgram:
    """Return one of a rule's functions on numbers, ``coefficients`` or ``adapt``, ``written`` in :data:`TORCH`."""
    statements = [(s.name, compile(s.text, "<rule>", "eval")) for s in written.statements]
    results = {name: compile(text, "<rule>", "eval") for name, text in written.results.items()}

    def run(values: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        known = {**values, "like": like}
        for name, code in statements:
            known[name] = eval(code, _WORDS, known)
        return {name: eval(code, _WORDS, known) for name, code in results.items()}

    return run


def _together(lines: Sequence[_Line], ends: Set[str]) -> frozenset[str]:
    """Return the ``lines`` to run as one operation over lists, which compiles faster than one for each tensor.

    Inductor ends an expression only at a list operation that others read. So such operations are at ``ends`` only.
    """
    together: set[str] = set()
    for line in reversed(lines):
        users = {other.name for other in lines if line.name in other.reads}
        if line.list_operation is not None and not ends & {*line.reads} and (line.name in ends or users <= together):
            together.add(line.name)
    return frozenset(together)


def _ends(written: Written, stored: Collection[str]) -> frozenset[str]:
    """Return the statements whose values end an expression, among them those that are ``stored``."""
    ends = set(stored)
    while (name := _too_long(written, ends)) is not None:
        ends.add(name)
    return frozenset(ends)


def _too_long(written: Written, ends: Collection[str]) -> str | None:
    """Return the first statement that must end an expression and is not in ``ends``; None if all are."""
    users = [name for s in written.statements for name in set(s.reads)] + list(set(written.results.values()))
    words = {s.name for s in written.statements if s.word}
    reads: dict[str, frozenset[str]] = {}  # inputs of an expression that is not ended; its statements
    computes: dict[str, frozenset[str]] = {}

    def length(read: Collection[str], computed: Collection[str]) -> int:
        numbers = sum(name.startswith("k") for name in read)  # unpacked and converted
        return len(read) + 2 * numbers + len(computed) + len(words.intersection(computed))

    for s in written.statements:
        read = frozenset[str]().union(*(reads.get(name, {name}) for name in s.reads))
        computed = frozenset({s.name}).union(*(computes.get(name, frozenset()) for name in s.reads))
        inner = [name for name in s.reads if computes.get(name)]
        if inner and (len(read) > _READS or length(read, computed) > _OPERATIONS):
            return max(inner, key=lambda name: length(reads[name], computes[name]))
        if s.name not in ends and users.count(s.name) > 1 and len(read) > _SHARED_READS:
            return s.name
        is_end = s.name in ends
        reads[s.name], computes[s.name] = (frozenset({s.name}), frozenset()) if is_end else (read, computed)
    return None


class Lists:
    """One update of some tensors by the ``programs`` of a rule.

    Args:
        targets: the parameters, and then the tensors of each buffer.
        skips: numbers that are not 0 for tensors to leave unchanged; None to update all.
    """

    def __init__(self, programs: Programs, targets: Sequence[list[Tensor]], skips: Sequence[Tensor] | None) -> None:
        self._programs = programs
        self._targets = dict(zip(("param", *programs.buffers), targets, strict=True))
        self._skips = skips
        self._dtypes = [compute_dtype(p.dtype) for p in targets[0]]
        # If the rule takes groups of elements: the dimensions of each parameter, in order of decreasing stride.
        self._orders = [_order(p) for p in targets[0]] if programs.grouped else None

    def values(
        self, grads: Sequence[Tensor], scales: Sequence[Any] | None, numbers: Sequence[Sequence[Tensor]]
    ) -> ListValues:
        """Return the values for a program. ``scales`` are factors of the gradients, ``numbers`` coefficients by tensor."""
        values: ListValues = {"param": self._as_seen("param"), "grad": self._as_seen("grad", grads)}
        if scales is not None:
            values["grad"] = [scale * grad for scale, grad in zip(scales, values["grad"], strict=True)]
        values |= {f"buffer{i}": self._as_seen(name) for i, name in enumerate(self._programs.buffers)}
        values |= {f"k{i}": list(column) for i, column in enumerate(numbers)}
        if self._programs.reads_index:
            values[INDEX] = list(map(self._index, values["param"], self._targets["param"]))
        return values

    def expressions(self, stage: int, values: ListValues) -> list[list[Tensor]]:
        """Return the expressions of one of the rule's ``reductions``, in the shapes of parameters in the rule."""
        results = self._programs.reductions[stage].run(values).values()
        return [[e.expand_as(param) for e, param in zip(es, values["param"], strict=True)] for es in results]

    def sums(self, stage: int, values: ListValues) -> list[list[Tensor]]:
        """Return the sum of each expression over each tensor, without the padding of groups."""
        params = self._targets["param"]
        return [
            [sum_of(e, p.numel(), scalar_dtype(p.device)) for e, p in zip(es, params, strict=True)]
            for es in self.expressions(stage, values)
        ]

    def update(self, values: ListValues) -> None:
        """Update parameters and buffers in place."""
        exact = {name for name, ts in self._targets.items() if [t.dtype for t in ts] == self._kinds(name)}
        self._programs.update.run(values, self._store, exact)

    def update_by_means(self, values: ListValues) -> None:
        """Compute the rule's means, then :meth:`update`."""
        for stage, program in enumerate(self._programs.reductions):
            for i, sums in enumerate(self.sums(stage, values), program.numbers):
                each = zip(sums, self._targets["param"], self._dtypes, strict=True)
                values[f"k{i}"] = [(total / target.numel()).to(dtype) for total, target, dtype in each]
        self.update(values)

    def updated(self, values: ListValues) -> dict[str, list[Tensor]]:
        """Return new parameters and buffers, by name."""
        return {name: self._storable(name, new) for name, new in self._programs.update.run(values).items()}

    def _index(self, param: Tensor, target: Tensor) -> Tensor:
        """Return the index in the memory of ``target`` of each element that the rule sees."""
        index = torch.arange(param.numel(), dtype=torch.int32, device=target.device)
        return index if self._orders is not None else _out_of_order(index, target, _order(target))

    def _kinds(self, name: str) -> list[torch.dtype]:
        """Return the dtypes in which the rule sees the tensors called ``name``."""
        return [torch.int32] * len(self._dtypes) if name in self._programs.integers else self._dtypes

    def _as_seen(self, name: str, tensors: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the targets called ``name``, or ``tensors`` instead of them, as the rule sees them."""
        tensors = self._targets[name] if tensors is None else tensors
        if name in self._programs.grouped:
            tensors = [t.reshape(-1) for t in tensors]
        elif self._orders is not None:
            tensors = [filled(t.permute(order).reshape(-1)) for t, order in zip(tensors, self._orders, strict=True)]
        return [t.to(kind) for t, kind in zip(tensors, self._kinds(name), strict=True)]

    def _store(self, name: str, new: Sequence[Tensor]) -> list[Tensor]:
        """Store ``new`` values, but for skipped tensors. Return the stored ones as the rule sees them."""
        torch._foreach_copy_(self._targets[name], self._storable(name, new))
        return self._as_seen(name)

    def _storable(self, name: str, new: Sequence[Tensor]) -> list[Tensor]:
        """Return ``new`` values, or the old ones of skipped tensors, in the shapes and dtypes of the targets."""
        targets = self._targets[name]
        if name in self._programs.grouped:
            new = [n.view_as(t) for n, t in zip(new, targets, strict=True)]
        elif self._orders is not None:
            new = list(map(_out_of_order, new, targets, self._orders))
        new = [n.to(t.dtype) for n, t in zip(new, targets, strict=True)]
        if self._skips is None:
            return new
        return [torch.where(skip == 0, n, t) for skip, n, t in zip(self._skips, new, targets, strict=True)]


def sum_of(expression: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the sum over the first ``count`` elements; an expression may have padding of a group after them."""
    return expression.reshape(-1)[:count].sum(dtype=dtype)


def _order(param: Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(param.dim()), key=lambda dim: -param.stride()[dim]))


def _out_of_order(vector: Tensor, like: Tensor, order: Sequence[int]) -> Tensor:
    """Return ``vector``, whose elements are by dimensions in this ``order``, in the shape of ``like``."""
    ordered = vector[: like.numel()].view([like.shape[dim] for dim in order])
    return ordered.permute([order.index(dim) for dim in range(len(order))])


def in_lists(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Return ``tensors`` in lists of ``count``."""
    return [list(tensors[i : i + count]) for i in range(0, len(tensors), count)]
