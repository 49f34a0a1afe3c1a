"""The declaration of one optimizer, its fields and its two functions, as the engine reads it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch

from compiled_optim.rule.did_you_mean import hint
from compiled_optim.rule.fields import LR_SCALE, Buffer, Fact, Hyper, Option, Scalar, Static
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.outputs import SUMS
from compiled_optim.rule.symbols import PLAIN, Code, Dialect, Kind, NotWritable, Statement, Symbol

GradientKind: TypeAlias = Literal["dense", "sparse"]  # of an optimizer's parameters; sparse ones are COO tensors
Granularity: TypeAlias = Literal["element", "tensor", "matrix"]  # the unit that a rule's update sees at a time

Decays: TypeAlias = Literal["gradient", "weights", None]
"""``"gradient"`` where ``update`` adds ``c.weight_decay`` times the parameter to the gradient."""

NUMBERS = ("resolution", LR_SCALE, "seed")
"""Numbers of each parameter for ``coefficients``: its dtype's machine epsilon, its group's choice, a random number."""

NUMEL = "numel"
"""One more, for rules that read it: the number of its real elements, or 1 for none; a DTensor counts in full."""

TRAIN_MODE = "train_mode"
"""The group entry that is true while the parameters are the ones to train, for a rule with other ``views`` of them."""

RULE = "rule"
"""The group entry that names another optimizer, whose rule the parameters of the group follow."""

WHY = "why"
"""The group entry with the reasons, by parameter name, why a parameter is in the group. It is not saved."""

EXACT = "param before rounding"  # no identifier, so that no buffer has this name
"""The result of an update that stores a parameter in few bits: its value before the step, and after it before rounding."""

INDEX = "index"  # an argument that ``update`` may take: the index of the element in the parameter's memory


Values: TypeAlias = Mapping[str, Any]  # the arguments of a rule's functions, by name
F = TypeVar("F", bound=Callable[..., Any])


def by_name(function: Callable[..., Any]) -> Callable[[Values], Any]:
    """Return ``function`` as one of values by name: it gets those in its signature, or all if it ends in ``**``."""
    kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
    names = [name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_KEYWORD]

    def call(values: Values) -> Any:
        if unknown := sorted({*names} - values.keys()):
            raise NotWritable(f"takes {unknown}, which the class does not declare{hint(unknown[0], values)}")
        return function(**({n: values[n] for n in names} if len(names) == len(kinds) else values))

    return call


def _once(method: F) -> F:
    """Cache the results of a declaration's method by its static choices: a class has few, and asks often."""

    @functools.wraps(method)
    def cached(self: Any, statics: Mapping[str, Any], *arguments: Any) -> Any:
        cache: dict[Any, Any] = vars(self).setdefault("_known", {})
        key = (method.__name__, *arguments, *statics.items())
        try:
            if key not in cache:
                cache[key] = method(self, statics, *arguments)
        except TypeError:  # an unhashable choice, or an error of the rule
            return method(self, statics, *arguments)
        return cache[key]

    return cast(F, cached)


@dataclass(frozen=True)
class Declaration:
    """The fields that a class body declares: enough for the constructor, the groups and checkpoints."""

    name: str
    hypers: tuple[Hyper, ...]
    statics: tuple[Static, ...]
    facts: tuple[Fact, ...]
    buffers: tuple[Buffer, ...]
    scalars: tuple[Scalar, ...]
    axes: Callable[[Values], Sequence[int]] | None = None
    options: tuple[Option, ...] = ()  # of groups, which transforms add

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The step count and the scalars, which a rule alone reads."""
        return ()

    @property
    def group_fields(self) -> tuple[Hyper | Option, ...]:
        """The fields for which groups have entries."""
        return *self.hypers, *self.statics, *self.options

    @functools.cached_property
    def scales_lr(self) -> bool:
        """Whether groups have :data:`LR_SCALE`."""
        return any(option.name == LR_SCALE for option in self.options)

    @functools.cached_property
    def structural_hypers(self) -> tuple[str, ...]:
        """The hyperparameters that decide, by being 0 or not, whether a buffer exists."""
        conditions = {b.when for b in self.buffers if isinstance(b.when, str)}
        return tuple(h.name for h in self.hypers if h.name in conditions)

    @functools.cached_property
    def structural_entries(self) -> frozenset[str]:
        """The entries of a group that shape its steps."""
        fixed = (h for h in self.hypers if h.fixed)
        chosen = (field.name for field in (*self.statics, *self.options, *fixed))
        return frozenset({"params", "maximize", "differentiable", TRAIN_MODE, RULE, *chosen})

    @functools.cached_property
    def loaded_options(self) -> dict[str, Any]:
        """The options of a group that a checkpoint decides, with their defaults."""
        seeds = (option for option in self.options if option.name == "rounding_seed")
        chosen: list[Any] = [*(s for s in self.statics if s.init), *seeds, *(h for h in self.hypers if h.fixed)]
        return {"maximize": False, **{field.name: field.default for field in chosen}}

    def choices(self, entries: Mapping[str, Any], loaded: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Return a group's choices, once it has ``loaded`` entries too: static ones, and of ``hyper(fixed=...)`` or None."""
        statics = {s.name: s.default for s in self.statics}
        for values in (entries, loaded):
            statics |= {name: values[name] for name in statics if name in values}
        fixed = [h for h in self.hypers if h.fixed]
        return statics | {h.name: h.choice((loaded if h.name in loaded else entries).get(h.name)) for h in fixed}

    @_once
    def present_hypers(self, statics: Mapping[str, Any]) -> tuple[Hyper, ...]:
        """Return the hyperparameters that a rule may read under these static choices."""
        return tuple(h for h in self.hypers if h.is_read(statics))

    @_once
    def present_buffers(self, statics: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the buffers that exist under these static choices and facts."""
        return tuple(b.name for b in self.buffers if b.is_present(statics))

    @_once
    def grouped_buffers(self, statics: Mapping[str, Any]) -> tuple[str, ...]:
        """Return those of :meth:`present_buffers` that have a number for each group of elements."""
        return tuple(b.name for b in self.buffers if b.grouped and b.is_present(statics))

    @_once
    def integer_buffers(self, statics: Mapping[str, Any]) -> tuple[str, ...]:
        """Return those of :meth:`present_buffers` that hold integers, which an update sees as such."""
        present = (b for b in self.buffers if b.is_present(statics))
        return tuple(b.name for b in present if not self.dtype_of(b, torch.float32, statics).is_floating_point)

    def by_name(self, statics: Mapping[str, Any], elements: Iterable[Any]) -> dict[str, Any]:
        """Build the hyperparameters that a rule may read, by name, from their ``elements`` in order."""
        numbers = iter(elements)
        return {
            h.name: tuple(itertools.islice(numbers, h.length)) if h.is_tuple else next(numbers)
            for h in self.present_hypers(statics)
        }

    def dtype_of(self, buffer: Buffer, param_dtype: torch.dtype, statics: Mapping[str, Any]) -> torch.dtype:
        """Return the dtype of ``buffer`` of a parameter of ``param_dtype``, under these choices."""
        return (buffer.dtype and buffer.dtype(statics)) or param_dtype

    def axes_of(self, shape: torch.Size, statics: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the axes of a parameter of ``shape`` in the order that an update sees, under these static choices."""
        return tuple(range(len(shape)) if self.axes is None else self.axes({**statics, "shape": shape}))

    def shape_of(self, buffer: Buffer, shape: torch.Size, statics: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of ``buffer`` for a parameter of ``shape``; grouped: a vector, unless rows are whole groups."""
        if buffer.grouped:
            columns = shape[-1] if shape else 1
            return (*shape[:-1], columns // GROUP) if columns % GROUP == 0 else (-(-math.prod(shape) // GROUP),)
        if buffer.shape is None:
            return tuple(shape)
        axes = self.axes_of(shape, statics)
        sizes = dict(zip(axes, buffer.shape(torch.Size(shape[axis] for axis in axes)), strict=True))
        return tuple(sizes[axis] for axis in range(len(shape)))


class Reduction(NamedTuple):
    """An elementwise expression to reduce: to a sum over all parameters (``is_total``), or to a mean over each tensor.

    ``is_sum`` is a sum over each tensor; rules have means in place of these before anything runs them.
    """

    expression: Any
    is_total: bool
    is_sum: bool = False


def mean(expression: Any) -> Reduction:
    """Reduce to the mean of ``expression`` over each tensor, over all shards of a DTensor. For ``reduce`` only."""
    return Reduction(expression, is_total=False)


def total(expression: Any, *, over: Literal["all", "tensor"] = "all") -> Reduction:
    """Reduce to the sum of ``expression`` over all parameters with a gradient, devices and processes. For ``reduce`` only.

    With ``over="tensor"`` it is over each tensor, all shards of a DTensor.
    """
    if over not in ("all", "tensor"):
        raise NotWritable(f"has a total over {over!r}; it must be 'all' or 'tensor'")
    return Reduction(expression, is_total=over == "all", is_sum=over == "tensor")


def ema(betas: Sequence[Any]) -> dict[str, Any]:
    """Return ``beta1`` and ``weight1 = 1 - beta1`` of a first moving average, and so on for all ``betas``."""
    pairs = enumerate(betas, 1)
    return {name: number for i, beta in pairs for name, number in ((f"beta{i}", beta), (f"weight{i}", 1 - beta))}


class Indices(NamedTuple):
    """The slices of ``c`` for a stage's ``sums``: means, then ``totals``. ``received``: totals and ``adapt``'s results."""

    sums: slice
    totals: slice
    received: slice


@dataclass(frozen=True)
class Written:
    """One function of a rule as code in another language: its statements, and its results by name.

    Those on an element read ``param``, ``grad``, ``buffer0``, ... of the buffers that are present, ``index``, and ``k0``,
    ... for ``numbers``, the attributes of ``c``. The results of ``update`` are the new parameter and the new buffers; those
    of ``reduce`` its means and its ``totals``, after which ``c`` has ``adapted`` attributes. ``sums`` are the expressions
    that the end of an update adds up, by name.
    """

    numbers: tuple[str, ...]
    statements: list[Statement]
    results: dict[str, str]
    totals: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()
    sums: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """The text of the statements."""
        return [statement.text for statement in self.statements]

    @property
    def reads_index(self) -> bool:
        """Whether the statements read the element's :data:`INDEX`."""
        return any(INDEX in statement.reads for statement in self.statements)


@dataclass(frozen=True)
class Rule(Declaration):
    """A declaration with an update, from which the engine builds the steps of one optimizer.

    The README of this folder explains the functions; here they take their arguments as one mapping, :data:`Values`.
    ``coefficients`` takes float64 vectors with one entry per tensor. An absent buffer is ``None``. The results of each of
    ``reductions`` are in ``c`` for the next ones and ``update``; ``adapt`` takes totals of the first.

    With the granularity ``"element"``, ``update`` is elementwise. Otherwise it sees stacks of equal tensors, against which
    the coefficients broadcast, and may reduce over all dimensions but the first. With ``"tensor"`` a stack is (tensors,
    columns) or (tensors, batch, rows, columns), and ``axes(shape, <statics>)`` may return a parameter's axes in another
    order. With ``"matrix"`` it is (tensors, ..., rows, columns), and ``update`` may depend on the last two.

    ``advice`` names the optimizer for gradients of the other kind than ``gradients``. ``decays`` is ``"gradient"`` if
    ``c.weight_decay`` times the parameter is added to the gradient. ``added`` names choices that transforms added.
    ``indexed`` tells, for choices, whether an update of stacks takes each element's :data:`INDEX`.
    """

    _: dataclasses.KW_ONLY
    coefficients: Callable[[Values], dict[str, Any]]
    update: Callable[[Values], dict[str, Any]]
    gradients: GradientKind = "dense"
    advice: str = ""
    granularity: Granularity = "element"
    reductions: tuple[Callable[[Values], dict[str, Any]], ...] = ()
    adapt: Callable[[Values], dict[str, Any]] | None = None
    decays: Decays = None
    added: tuple[str, ...] = ()
    views: Mapping[str, Callable[[Values], Any]] = dataclasses.field(default_factory=dict, hash=False)
    indexed: Callable[[Values], bool] | None = dataclasses.field(default=None, hash=False, compare=False)

    @property
    def is_elementwise(self) -> bool:
        """Whether ``update`` works element by element on dense gradients."""
        return (self.granularity, self.gradients) == ("element", "dense")

    def check(self) -> None:
        """Run all functions, once for every combination of the rule's boolean choices, with the last ``added`` one true.

        Raise ``TypeError`` where one takes or returns an undeclared name, omits a result, or does what a kernel cannot.
        """
        if self.axes is not None and self.granularity != "tensor":
            raise TypeError(f"{self.name}.axes is for the granularity 'tensor'")
        for fact, shape in itertools.product(self.facts, _SHAPES):
            with contextlib.suppress(IndexError, ValueError):  # of a function for other shapes
                fact.holds(torch.Size(shape), self.name)
        if self.reductions and not self.is_elementwise:
            raise TypeError(f"{self.name}.reduce is for an elementwise update with dense gradients")
        if self.views and not (self.is_elementwise and self.views.keys() == {"eval", "train"}):
            raise TypeError(f"{self.name}.views must be eval and train, for an elementwise update with dense gradients")
        entries = [field.name for field in (*self.scalars, *self.buffers)]
        if twice := [name for name in entries if entries.count(name) > 1]:
            raise TypeError(f"{self.name}.{twice[0]} is a name that the package itself uses in the state; choose another")
        if self.decays == "gradient" and "weight_decay" not in self.coefficient_names():
            raise TypeError(f"{self.name} decays by its gradient, but its coefficients return no weight_decay")
        for statics in self._situations():
            names = self.coefficient_names(statics)
            if self.granularity == "element":
                self.written(statics, PLAIN)
            for name, view in self.views.items():
                values = self._element(statics, Code(PLAIN, "v"), names)
                self._called(f"views[{name!r}]", view, {n: value for n, value in values.items() if n != "grad"})
            for b in self.buffers if self.is_elementwise else ():
                if callable(b.init):
                    values = self._element(statics, code := Code(PLAIN, "b"), names)
                    known = {n: value for n, value in values.items() if n not in {b.name for b in self.buffers}}
                    start = self._called(f"{b.name}.init", by_name(b.init), known)
                    self._called(f"{b.name}.init", code.operand, start)
            for shape in _STACKS.get(self.granularity, ()):
                self._check_stack(statics, names, shape)

    def _situations(self) -> Iterator[dict[str, Any]]:
        """Yield every combination of the boolean choices; of those that transforms added, only the last is true."""
        free = [s.name for s in self.statics if isinstance(s.default, bool) and s.init and s.name not in self.added]
        free += [*(f.name for f in self.facts), *self.structural_hypers]
        fixed = self.choices({}) | dict.fromkeys(self.added[-1:], True)
        for values in itertools.product((False, True), repeat=len(free)):
            yield {**fixed, **dict(zip(free, values, strict=True))}

    def coefficient_names(self, statics: Mapping[str, Any] | None = None) -> tuple[str, ...]:
        """Return the names of ``coefficients`` but scalars, ordered as in kernels' tables; default: of declared choices."""
        written = self.written_coefficients(next(self._situations()) if statics is None else statics, PLAIN)
        return tuple(name for name in written.results if name not in self.scalar_names[1:])

    @_once
    def number_names(self, statics: Mapping[str, Any]) -> list[tuple[str, ...]]:
        """Return the attributes of ``c``, in order, for each of ``reductions`` and then for ``update``."""
        by_stage = [stage.numbers for stage in self.written(statics, PLAIN)] if self.reductions else []
        return by_stage or [self.coefficient_names(statics)]

    @_once
    def stages(self, statics: Mapping[str, Any]) -> dict[int, Indices]:
        """Return, for each of ``reductions`` with results, the indices of these among the attributes of ``c``."""
        indices = {}
        for stage, written in enumerate(self.written(statics, PLAIN)[:-1] if self.reductions else ()):
            start, end = len(written.numbers), len(written.numbers) + len(written.results)
            total = end - len(written.totals)
            if start < end:
                indices[stage] = Indices(slice(start, end), slice(total, end), slice(total, end + len(written.adapted)))
        return indices

    @_once
    def inputs(self, statics: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the numbers of each parameter that ``coefficients`` takes: :data:`NUMBERS`, and what else it reads."""
        written = self.written_coefficients(statics, PLAIN)
        read = {name for statement in written.statements for name in statement.reads}.union(written.results.values())
        return (*NUMBERS, NUMEL) if NUMEL in read else NUMBERS

    def seeing(self, seen: Callable[[Values], Values], **changes: Any) -> Rule:
        """Return this rule with ``changes``; its elementwise functions get ``seen(values)`` instead of their values."""

        def within(function: Callable[[Values], dict[str, Any]]) -> Callable[[Values], dict[str, Any]]:
            return lambda values: function(seen(values))

        changes = {"update": within(self.update), "reductions": tuple(map(within, self.reductions)), **changes}
        return dataclasses.replace(self, **changes)

    def viewed(self, name: str) -> Rule:
        """Return a rule whose step applies the view ``name`` of ``views`` to the parameter."""

        def update(values: Values) -> dict[str, Any]:
            buffers = {b.name: values[b.name] for b in self.buffers if values.get(b.name) is not None}
            return {**buffers, "param": self.views[name](values), "step": 0.0}

        return dataclasses.replace(self, update=update, reductions=(), adapt=None)

    def tensor_sums(self) -> frozenset[str]:
        """Return the names of the sums over a tensor that ``reduce`` returns under any choices."""
        names: dict[bool, set[str]] = {False: set(), True: set()}
        for statics in self._situations() if self.reductions else ():
            for function in self.reductions:
                values = self._element(statics, Code(PLAIN, "e"), self.coefficient_names(statics))
                for name, reduction in function(values).items():
                    names[reduction.is_sum].add(name)
        if both := sorted(names[True] & names[False]):
            raise TypeError(f"{self.name}.reduce returns {both[0]} as a total over a tensor, and as something else")
        return frozenset(names[True])

    def reduced_names(self) -> tuple[str, ...]:
        """Return the attributes of ``c`` that ``reductions`` and ``adapt`` return under any choices."""
        situations = self._situations() if self.reductions else ()
        names = dict.fromkeys(name for statics in situations for name in self.number_names(statics)[-1])
        return tuple(name for name in names if name not in self.coefficient_names())

    def has_totals(self, statics: Mapping[str, Any] | None = None) -> bool:
        """Return whether ``reduce`` sums over all parameters under ``statics``; by default, under the declared ones."""
        statics = next(self._situations()) if statics is None else statics
        return any(indices.totals.start < indices.totals.stop for indices in self.stages(statics).values())

    @_once
    def reads_index(self, statics: Mapping[str, Any]) -> bool:
        """Return whether the update reads the index of its element."""
        if self.granularity == "element":
            return self.written(statics, PLAIN)[-1].reads_index
        return self.indexed is not None and self.indexed(statics)

    @_once
    def written_coefficients(self, statics: Mapping[str, Any], dialect: Dialect) -> Written:
        """Write ``coefficients`` in ``dialect``. It reads ``step``, :meth:`inputs`, ``hyper0``, ... and ``scalar0``, ..."""
        code = Code(dialect, "c")
        values: dict[str, Any] = {name: Symbol(code, name) for name in ("step", *NUMBERS, NUMEL)} | dict(statics)
        values |= self.by_name(statics, _symbols(code, "hyper"))
        values |= {s.name: symbol for s, symbol in zip(self.scalars, _symbols(code, "scalar"), strict=False)}
        results = self._run("coefficients", self.coefficients, values, [s.name for s in self.scalars if not s.shared])
        results = {**{name: values[name] for name in self.shared_scalars}, **results}
        return Written(NUMBERS, code.statements, {name: code.operand(value) for name, value in results.items()})

    @_once
    def written_adapt(self, statics: Mapping[str, Any], totals: tuple[str, ...], dialect: Dialect) -> Written:
        """Write ``adapt`` in ``dialect``. It reads ``total0``, ..., ``hyper0``, ... and ``shared0``, ..."""
        assert self.adapt is not None
        code = Code(dialect, "a")
        values = {**statics, **dict(zip(totals, _symbols(code, "total"), strict=False))}
        values |= dict(zip(self.shared_scalars, _symbols(code, "shared"), strict=False))
        results = self._run("adapt", self.adapt, values | self.by_name(statics, _symbols(code, "hyper")))
        return Written(totals, code.statements, {name: code.operand(value) for name, value in results.items()})

    @_once
    def written(self, statics: Mapping[str, Any], dialect: Dialect, sums: tuple[str, ...] = ()) -> list[Written]:
        """Write each of ``reductions`` and then ``update`` of an elementwise rule in ``dialect``, under these choices.

        ``sums`` are names in :data:`SUMS`.
        """
        present, names, stages = self.present_buffers(statics), self.coefficient_names(statics), []
        for stage, function in enumerate(self.reductions):
            code = Code(dialect, "e")
            reductions = self._run("reduce", function, self._element(statics, code, names))
            for name, value in reductions.items():
                if not isinstance(value, Reduction):
                    raise TypeError(f"{self.name}.reduce returns no mean or total for {name}; write {name}=mean(...)")
            reductions = dict(sorted(reductions.items(), key=lambda item: item[1].is_total))  # means first
            totals = tuple(name for name in reductions if reductions[name].is_total)
            adapted = self._adapted_names(statics, totals) if stage == 0 else ()
            if taken := {*reductions, *adapted} & set(names):
                raise TypeError(f"{self.name}.reduce returns {sorted(taken)}, which c has already")
            texts = {name: code.operand(reduction.expression) for name, reduction in reductions.items()}
            stages.append(Written(names, code.statements, texts, totals, adapted))
            names = (*names, *reductions, *adapted)
        code = Code(dialect, "e")
        values = self._element(statics, code, names)
        results = self._checked_update(values, present)
        texts = {name: code.operand(results[name]) for name in ("param", *present)}
        old, new = results.get(EXACT, (values["param"], results["param"]))
        of_outputs = {name: code.operand(SUMS[name](old, new, values["grad"])) for name in sums}
        return [*stages, Written(names, code.statements, texts, sums=of_outputs)]

    def written_in_full(self, statics: Mapping[str, Any], dialect: Dialect) -> str:
        """Return a text that differs for elementwise rules of other operations under these choices.

        Steps take the functions as they were first written.
        """
        return repr((self.scalar_names, self.written_coefficients(statics, dialect), self.written(statics, dialect)))

    def _adapted_names(self, statics: Mapping[str, Any], totals: tuple[str, ...]) -> tuple[str, ...]:
        """Return the attributes of ``c`` that ``adapt`` returns."""
        if self.adapt is None:
            return ()
        if not totals:
            raise TypeError(f"{self.name}.adapt is for totals, and reduce returns none")
        results = self.written_adapt(statics, totals, PLAIN).results
        return tuple(name for name in results if name not in self.shared_scalars)

    @functools.cached_property
    def scalar_names(self) -> tuple[str, ...]:
        """The step count and the scalars."""
        return "step", *[s.name for s in self.scalars]

    @functools.cached_property
    def shared_scalars(self) -> tuple[str, ...]:
        """The scalars that all parameters share."""
        return tuple(s.name for s in self.scalars if s.shared)

    def _element(self, statics: Mapping[str, Any], code: Code, numbers: tuple[str, ...]) -> dict[str, Any]:
        """Return the arguments of ``update`` as symbols of ``code``; ``c`` has the attributes ``numbers``."""
        values: dict[str, Any] = {n: choice for n, choice in statics.items() if n not in self.structural_hypers}
        values |= dict.fromkeys(b.name for b in self.buffers)
        grouped, integers = self.grouped_buffers(statics), self.integer_buffers(statics)
        for i, name in enumerate(self.present_buffers(statics)):
            values[name] = Symbol(code, f"buffer{i}", Kind(name in integers, per_group=name in grouped))
        values[INDEX] = Symbol(code, INDEX, Kind(is_int=True))
        c = number_type(numbers)(*itertools.islice(_symbols(code, "k"), len(numbers)))
        return {**values, "param": Symbol(code, "param"), "grad": Symbol(code, "grad"), "c": c}

    def _check_stack(self, statics: Mapping[str, Any], names: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Run ``update``, whose ``c`` has the attributes ``names``, on a stack of this shape."""
        count, size = shape[0], torch.Size(shape[1:])
        choices = {**statics, **{f.name: f.holds(size, self.name) for f in self.facts}}
        present = self.present_buffers(choices)
        ones = functools.partial(torch.ones, device="cpu")
        values: dict[str, Any] = {name: ones(shape) for name in ("param", "grad")}
        for b in self.buffers:
            values[b.name] = ones((count, *(b.shape(size) if b.shape else size))) if b.name in present else None
        c = number_type(names)(*[ones((count, *(1 for _ in size)))] * len(names))
        results = self._checked_update({**choices, **values, "c": c}, present)
        for name in ("param", *present):
            if (now := tuple(results[name].shape)) != (was := tuple(values[name].shape)):
                raise TypeError(f"{self.name}.update returns a {name} of shape {now} for one of shape {was}")

    def updated(self, values: Values) -> dict[str, Any]:
        """Return the new ``param`` and the new buffers, by name."""
        return self._moved(values["param"], self.update(values))

    @staticmethod
    def _moved(param: Any, returned: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results of ``update`` with the ``param`` after the step; call those that are functions of it."""
        new, step = returned.get("param", param), returned["step"]
        new = new if isinstance(step, float) and step == 0.0 else new - step
        new = returned["after"](new) if "after" in returned else new
        return {n: v(new) if callable(v) else v for n, v in returned.items() if n != "after"} | {"param": new}

    def _checked_update(self, values: Mapping[str, Any], present: Sequence[str]) -> dict[str, Any]:
        """Run :meth:`updated` while the rule is checked; the results must have the buffers that are ``present``."""
        results = self._run("update", self.update, values, ("step", *present))
        if unknown := results.keys() - {"param", "step", "after", EXACT, *(b.name for b in self.buffers)}:
            raise TypeError(f"{self.name}.update returns {sorted(unknown)}, which the class does not declare")
        if not callable(results.get("after", callable)):
            raise TypeError(f"{self.name}.update returns an after that is no function of the parameter")
        moved: dict[str, Any] = self._called("update", lambda values: self._moved(values["param"], results), values)
        return moved

    def _run(
        self, title: str, function: Callable[[Values], dict[str, Any]], values: Values, needed: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Call ``function``; it must return a dict, which has the ``needed`` names."""
        results, where = self._called(title, function, values), f"{self.name}.{title}"
        if not isinstance(results, dict):
            raise TypeError(f"{where} must return a dict of values by name, got {type(results).__name__}")
        if missing := [name for name in needed if results.get(name) is None]:
            raise TypeError(f"{where} does not return {', '.join(missing)}")
        return results

    def _called(self, title: str, function: Callable[[Values], Any], values: Values) -> Any:
        """Call ``function`` with ``values``. Messages call it ``title``."""
        where = f"{self.name}.{title}"
        try:
            return function(values)
        except Exception as error:
            message = str(error) if isinstance(error, NotWritable) else f"cannot be run: {error}"
            if isinstance(error, NameError):
                message = f"uses {error.name}, which is not defined above the class"
            elif isinstance(error, AttributeError) and "c" in values and error.obj is values["c"]:
                message = f"reads c.{error.name}, which coefficients does not return"
            raise TypeError(f"{where} {message}") from error


def _symbols(code: Code, prefix: str) -> Iterator[Symbol]:
    """Yield symbols named ``prefix`` and a number, without end."""
    return (Symbol(code, f"{prefix}{i}") for i in itertools.count())


_SHAPES = (), (5,), (4, 5), (3, 2, 4, 5)  # to try facts on

# Shapes of stacks to try a rule on: without columns of 1, in both orientations.
_STACKS: dict[str, tuple[tuple[int, ...], ...]] = {"tensor": ((2, 5), (2, 3, 4, 5)), "matrix": ((2, 3, 5), (2, 5, 3))}


@functools.cache
def number_type(names: tuple[str, ...]) -> Callable[..., Any]:
    """Return the constructor of ``update``'s argument ``c``, a named tuple of numbers with these ``names``."""
    return collections.namedtuple("Numbers", names)
