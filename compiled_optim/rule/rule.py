"""What a class body of fields and two functions becomes: a declaration, a rule, and the signature of a constructor."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from typing_extensions import dataclass_transform

from compiled_optim.rule.fields import Buffer, Fact, Field, Flag, Hyper, Scalar, Static, flag, hyper, static
from compiled_optim.rule.symbols import PLAIN, Code, Dialect, NotWritable, Symbol

Gradients: TypeAlias = Literal["dense", "sparse"]
"""The gradients that an optimizer takes; sparse ones are COO tensors."""

Granularity: TypeAlias = Literal["element", "tensor", "matrix"]
"""What a rule's update sees at a time."""


@dataclass(frozen=True)
class Declaration:
    """What a class body declares: enough for the constructor, the groups and checkpoints."""

    name: str
    hypers: tuple[Hyper, ...]
    statics: tuple[Static, ...]
    facts: tuple[Fact, ...]
    buffers: tuple[Buffer, ...]
    scalars: tuple[Scalar, ...]

    @functools.cached_property
    def structural_hypers(self) -> tuple[str, ...]:
        """The hyperparameters that decide, by being 0 or not, whether a buffer exists."""
        conditions = {b.when for b in self.buffers}
        return tuple(h.name for h in self.hypers if h.name in conditions)

    def present_buffers(self, statics: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the buffers that exist under these static choices and facts."""
        return tuple(b.name for b in self.buffers if b.when is None or statics[b.when])


@dataclass(frozen=True)
class Written:
    """A rule's functions in another language: the statements, and the expressions of what they return, by name.

    ``coefficients`` reads ``step``, ``resolution``, ``hyper0``, ``hyper1``, ... and ``scalar0``, ... ; ``numbers`` are its
    results. ``update`` reads ``param``, ``grad``, ``buffer0``, ... of the buffers that are present, and ``k0``, ... for the
    coefficients; ``results`` are the new parameter and the new buffers.
    """

    coefficients: list[str]
    numbers: dict[str, str]
    update: list[str]
    results: dict[str, str]


@dataclass(frozen=True)
class Rule(Declaration):
    """A declaration with an update: everything the engine knows about one optimizer.

    ``coefficients(step, <hyperparameters>, <scalars>, <statics>)`` takes float64 vectors with one entry per tensor. It
    returns a dict: the new scalars, and the numbers that ``update`` needs. ``update(param, grad, c, <buffers>, <statics>)``
    finds those numbers as attributes of ``c``, and returns a dict of the new ``param`` and the new buffers. Both name only
    what they use, in any order; an absent buffer is ``None``. ``advice`` names the optimizer for gradients of the other kind
    than ``gradients``.

    With the granularity ``"element"``, ``update`` is elementwise. Otherwise it sees stacks of equal tensors: the first
    dimension counts tensors, the coefficients broadcast against it, and ``update`` may reduce over all others. With
    ``"tensor"`` a stack is (tensors, columns) or (tensors, batch, rows, columns); ``coefficients`` may take ``resolution``,
    the machine epsilon of each parameter's dtype. With ``"matrix"`` it is (tensors, rows, columns), and ``update`` may
    depend on the numbers of rows and columns.

    Both functions are run when the rule is made, once for every combination of choices.

    Raises:
        TypeError: a function takes or returns a name that is not declared, leaves one out, or does what a kernel cannot.
    """

    coefficients: Callable[..., dict[str, Any]]
    update: Callable[..., dict[str, Any]]
    gradients: Gradients = "dense"
    advice: str = ""
    granularity: Granularity = "element"

    def __post_init__(self) -> None:
        declared = {f.name for f in (*self.hypers, *self.scalars, *self.statics)}
        resolution = {"resolution"} if self.granularity != "element" else set()
        self._check_arguments(self.coefficients, {"step"} | declared | resolution)
        fields = {f.name for f in (*self.buffers, *self.statics, *self.facts)}
        self._check_arguments(self.update, {"param", "grad", "c"} | fields)
        for statics in self._situations():
            if self.granularity == "element":
                self.written(statics, PLAIN)
            else:
                self._write_coefficients(statics, Code(PLAIN, "c"))
                for shape in _STACKS[self.granularity]:
                    self._check_update(statics, shape)

    def _check_arguments(self, function: Callable[..., Any], known: set[str]) -> None:
        if unknown := argument_names(function) - known:
            raise TypeError(f"{self._title(function)} takes {sorted(unknown)}, which the class does not declare")

    def _title(self, function: Callable[..., Any]) -> str:
        return f"{self.name}.{'update' if function is self.update else 'coefficients'}"

    def _situations(self) -> Iterator[dict[str, Any]]:
        """Every combination of the choices that are yes or no."""
        free = [s.name for s in self.statics if isinstance(s.default, bool) and s.init]
        free += [*(f.name for f in self.facts), *self.structural_hypers]
        made = {s.name: s.default for s in self.statics}
        for values in itertools.product((False, True), repeat=len(free)):
            yield {**made, **dict(zip(free, values, strict=True))}

    @functools.cached_property
    def coefficient_names(self) -> tuple[str, ...]:
        """What ``coefficients`` returns besides the scalars, in the order of the kernels' tables."""
        scalars = {s.name for s in self.scalars}
        returned = self._write_coefficients(next(self._situations()), Code(PLAIN, "c"))
        return tuple(name for name in returned if name not in scalars)

    @functools.cached_property
    def numbers(self) -> Callable[..., Any]:
        """What makes ``update``'s argument ``c`` of the coefficients, in the order of their names."""
        return collections.namedtuple("Coefficients", self.coefficient_names)

    def new_scalars(self, returned: Mapping[str, Any]) -> list[Any]:
        """The scalars in what ``coefficients`` returned."""
        return [returned[s.name] for s in self.scalars]

    def written(self, statics: Mapping[str, Any], dialect: Dialect) -> Written:
        """Both functions of an elementwise rule in another language, under these static choices."""
        scalars, body = Code(dialect, "c"), Code(dialect, "e")
        numbers = self._write_coefficients(statics, scalars)
        present = self.present_buffers(statics)
        values: dict[str, Any] = {b.name: None for b in self.buffers}
        values |= {name: Symbol(body, f"buffer{i}") for i, name in enumerate(present)}
        values |= {"param": Symbol(body, "param"), "grad": Symbol(body, "grad")}
        c = self.numbers(*(Symbol(body, f"k{i}") for i in range(len(self.coefficient_names))))
        results = self._run(self.update, {**statics, **values, "c": c})
        self._check_results(self.update, results, ("param", *present), {b.name for b in self.buffers})
        return Written(
            scalars.lines,
            {name: scalars.operand(value) for name, value in numbers.items()},
            body.lines,
            {name: body.operand(results[name]) for name in ("param", *present)},
        )

    def _write_coefficients(self, statics: Mapping[str, Any], code: Code) -> dict[str, Any]:
        count = itertools.count()
        values: dict[str, Any] = {"step": Symbol(code, "step"), "resolution": Symbol(code, "resolution")}
        for h in self.hypers:
            elements = tuple(Symbol(code, f"hyper{next(count)}") for _ in range(h.length))
            values[h.name] = elements if h.is_tuple else elements[0]
        values |= {s.name: Symbol(code, f"scalar{i}") for i, s in enumerate(self.scalars)}
        values |= {s.name: statics[s.name] for s in self.statics}
        results = self._run(self.coefficients, values)
        self._check_results(self.coefficients, results, tuple(s.name for s in self.scalars), set(results))
        return results

    def _check_update(self, statics: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        """Run ``update`` on a small stack."""
        choices = {**statics, **{f.name: f.of(torch.Size(shape[1:])) for f in self.facts}}
        present = self.present_buffers(choices)
        values: dict[str, Any] = {name: torch.ones(shape) for name in ("param", "grad")}
        one = torch.ones(shape[0], *(1 for _ in shape[1:]))
        for b in self.buffers:
            own = shape[1:] if b.shape is None else b.shape(torch.Size(shape[1:]))
            values[b.name] = torch.ones(shape[0], *own) if b.name in present else None
        results = self._run(self.update, {**choices, **values, "c": self.numbers(*[one] * len(self.coefficient_names))})
        self._check_results(self.update, results, ("param", *present), {b.name for b in self.buffers})
        for name in ("param", *present):
            if results[name].shape != values[name].shape:
                was, now = tuple(values[name].shape), tuple(results[name].shape)
                raise TypeError(f"{self.name}.update returns a {name} of shape {now} for one of shape {was}")

    def _run(self, function: Callable[..., dict[str, Any]], values: Mapping[str, Any]) -> dict[str, Any]:
        where = self._title(function)
        try:
            results = function(**{name: values[name] for name in argument_names(function)})
        except NotWritable as error:
            raise TypeError(f"{where} {error}") from error
        except AttributeError as error:
            if error.obj is not values.get("c"):
                raise TypeError(f"{where} cannot be run: {error}") from error
            raise TypeError(f"{where} reads c.{error.name}, which coefficients does not return") from error
        except NameError as error:
            raise TypeError(f"{where} uses {error.name}, which is not defined above the class") from error
        except Exception as error:
            raise TypeError(f"{where} cannot be run: {error}") from error
        if not isinstance(results, dict):
            raise TypeError(f"{where} must return a dict of values by name, got {type(results).__name__}")
        return results

    def _check_results(
        self, function: Callable[..., Any], results: Mapping[str, Any], needed: Sequence[str], known: set[str]
    ) -> None:
        where = self._title(function)
        if missing := [name for name in needed if results.get(name) is None]:
            raise TypeError(f"{where} does not return {', '.join(missing)}")
        if unknown := set(results) - {"param"} - known:
            raise TypeError(f"{where} returns {sorted(unknown)}, which the class does not declare")


# Stacks to try a rule on: tensors without columns of 1, each way round.
_STACKS: dict[str, tuple[tuple[int, ...], ...]] = {"tensor": ((2, 5), (2, 3, 4, 5)), "matrix": ((2, 3, 5), (2, 5, 3))}


def argument_names(function: Callable[..., Any]) -> set[str]:
    """What ``function`` takes."""
    return set(inspect.signature(function).parameters)


@dataclass_transform(field_specifiers=(hyper, static, flag))
class Declared:
    """Turns a class body of fields into a constructor signature and, where the body holds an update, a :class:`Rule`.

    It stands above the optimizer base class because type checkers read constructor fields only from classes *below* the
    one marked as a transform.
    """

    fields: ClassVar[dict[str, Field]] = {}
    declaration: ClassVar[Declaration]
    rule: ClassVar[Rule]
    """The declaration, where it has an update."""

    gradients: ClassVar[Gradients] = "dense"
    """The gradients that the optimizer takes. Of a sparse one it updates the rows that the gradient names."""

    advice: ClassVar[str] = ""
    """The optimizer to advise where a gradient is of the other kind."""

    granularity: ClassVar[Granularity] = "element"
    """What an update sees at a time; see :class:`Rule`."""

    group_flags: ClassVar[tuple[str, ...]] = ()
    """The flags in the groups: torch.optim's, so that checkpoints are interchangeable, and ``maximize`` for every rule."""

    def __init_subclass__(
        cls,
        *,
        gradients: Gradients | None = None,
        advice: str | None = None,
        granularity: Granularity | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls.gradients = gradients or cls.gradients
        cls.advice = cls.advice if advice is None else advice
        cls.granularity = granularity or cls.granularity
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        for name in own:
            delattr(cls, name)
        cls.fields = {**cls.fields, **{name: dataclasses.replace(value, name=name) for name, value in own.items()}}
        flags = _torch_flags(cls)
        cls.group_flags = (*flags, *(("maximize",) if hasattr(cls, "update") and "maximize" not in flags else ()))
        positional = [name for name, by_position in flags.items() if by_position]
        cls.__signature__ = _constructor_signature(cls.fields, positional)  # type: ignore[attr-defined]
        declared = Declaration(cls.__name__, *(cls.fields_of(kind) for kind in (Hyper, Static, Fact, Buffer, Scalar)))
        cls.declaration = declared
        if hasattr(cls, "update"):
            cls.declaration = cls.rule = Rule(
                **{field.name: getattr(declared, field.name) for field in dataclasses.fields(declared)},
                coefficients=cls.coefficients,  # type: ignore[attr-defined]
                update=cls.update,
                gradients=cls.gradients,
                advice=cls.advice,
                granularity=cls.granularity,
            )

    @classmethod
    def fields_of(cls, kind: type[Any]) -> tuple[Any, ...]:
        """The declared fields of one kind, in declared order."""
        return tuple(f for f in cls.fields.values() if isinstance(f, kind))


def _torch_flags(cls: type[Declared]) -> dict[str, bool]:
    """The flags that torch.optim's optimizer of this name takes, and whether by position: after everything else.

    An optimizer that torch.optim lacks takes those that most of torch.optim's take. Type checkers read all in the base
    class, and ask for keywords.
    """
    theirs = getattr(torch.optim, cls.__name__, None)
    if theirs is None:
        return dict.fromkeys(_USUAL_FLAGS, False)
    flags = {f.name for f in cls.fields_of(Flag)}
    parameters = inspect.signature(theirs).parameters
    return {name: p.kind is p.POSITIONAL_OR_KEYWORD for name, p in parameters.items() if name in flags}


_USUAL_FLAGS = ("foreach", "maximize", "capturable", "differentiable", "fused")


def _constructor_signature(fields: Mapping[str, Field], positional_flags: Sequence[str]) -> inspect.Signature:
    positional: list[str] = []
    keyword: list[str] = []
    for name, declared in fields.items():
        if isinstance(declared, Hyper):
            positional.append(name)
        elif isinstance(declared, Static) and declared.init:
            (keyword if declared.kw_only else positional).append(name)
        elif isinstance(declared, Flag) and name not in positional_flags:
            keyword.append(name)
    defaults: Mapping[str, Any] = {
        name: declared.default for name, declared in fields.items() if hasattr(declared, "default")
    }
    return inspect.Signature(
        [
            inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=defaults[name])
                for name in (*positional, *positional_flags)
            ),
            *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name]) for name in keyword),
        ]
    )
