"""Builds an optimizer from a class body with fields and functions: its rule, and the signature of its constructor."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, get_type_hints

import torch
from typing_extensions import dataclass_transform

from compiled_optim.rule import fields
from compiled_optim.rule.did_you_mean import hint, misspelled
from compiled_optim.rule.fields import LR_SCALE, Buffer, Fact, Field, Hyper, Option, Scalar, Static
from compiled_optim.rule.rule import Decays, Declaration, GradientKind, Granularity, Rule, by_name
from compiled_optim.rule.storage import stored
from compiled_optim.rule.transforms import PARAM, TRANSFORMS, Accumulation, started, summed

_MEANINGS = {
    "coefficients": "Return the numbers for an update, made of step and hyperparameters, once for each tensor and step.",
    "reduce": "Return means over a tensor, and totals over all parameters.",
    "adapt": "Return new values of the numbers that all parameters share, once for each step.",
    "update": "Return new values of an element of a parameter and of its state.",
}
_ARGUMENTS = {
    "lr": "learning rate, about the distance that an element with steady gradients moves in a step.",
    "betas": "how much of the average of gradients, and of their squares, stays from one step to the next.",
    "eps": "is added to the divisor, so that it is never 0; in units of the gradient.",
    "amsgrad": "divide by the largest average of squares so far instead of the last one (arXiv:1904.09237).",
    "decoupled_weight_decay": "decay weights apart from the gradient.",
}
"""The text of ``help`` about an argument whose field has no ``doc``."""
_WEIGHT_DECAY: dict[Decays, str] = {
    "gradient": "this number times the parameter is added to the gradient.",
    "weights": "a step takes ``lr`` times this number times the parameter away from the parameter.",
}


@dataclass_transform(field_specifiers=(fields.hyper, fields.static, fields.option, fields.added))
class Declared:
    """Turns a class body of fields into a constructor signature and, where the body holds an update, a :class:`Rule`.

    Type checkers read constructor fields only from classes *below* the one marked as a transform.
    """

    _body: ClassVar[dict[str, Field]] = {}  # by name, those in the body of the class
    _declared: ClassVar[dict[str, Field]] = {}  # by name, those in the bodies of the class and its bases
    _all_fields: ClassVar[dict[str, Field]] = {}  # by name, those declared and those that transforms add
    _transforms: ClassVar[tuple[Callable[[Rule], Rule], ...]] = (*TRANSFORMS, stored)  # in turn
    _declaration: ClassVar[Declaration]
    _rule: ClassVar[Rule]  # the declaration, where it has an update
    _view_rules: ClassVar[Mapping[str, Rule]] = {}  # by view, the rule whose step converts to it

    _gradients: ClassVar[GradientKind] = "dense"  # a sparse gradient names the rows to update
    _accumulation: ClassVar[Accumulation | None] = None  # how the state takes several gradients for one step, if it can
    _decays: ClassVar[Decays] = None  # the target of weight decay; for "gradient" there is decouple_wd
    _advice: ClassVar[str] = ""  # the optimizer to advise where a gradient is of the other kind
    _granularity: ClassVar[Granularity] = "element"  # the unit of an update; see :class:`Rule`
    _group_flags: ClassVar[tuple[str, ...]] = ()  # of groups: torch.optim's, which checkpoints have, and maximize
    _views: ClassVar[Mapping[str, Callable[..., Any]]] = {}  # other values of a parameter, see :class:`Rule`
    _modes: ClassVar[Mapping[str, bool]] = {}  # further group entries and their initial values; in checkpoints
    _lr_ratio: ClassVar[Callable[..., float] | None] = None  # the factor of ``lr`` by ``shape`` and choices
    _implied_state: ClassVar[Mapping[str, float]] = {}  # entries that torch.optim's checkpoints lack

    def __init_subclass__(
        cls,
        *,
        gradients: GradientKind | None = None,
        advice: str | None = None,
        granularity: Granularity | None = None,
        decays: Decays = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        settings = {"gradients": gradients, "advice": advice, "granularity": granularity, "decays": decays}
        for name in vars(cls).keys() & _MEANINGS:  # for help(), which shows a rule
            getattr(cls, name).__doc__ = getattr(cls, name).__doc__ or _MEANINGS[name]
        body = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        others = {n: vars(cls)[n] for n in {"accumulation", "implied_state", "lr_ratio", "views"} & vars(cls).keys()}
        for name in (*body, *others):
            delattr(cls, name)
        for name, value in (settings | others).items():
            if value is not None:
                setattr(cls, f"_{name}", value)
        cls._body = {n: dataclasses.replace(f, name=n) for n, f in body.items() if type(f) is not Field}
        bodies = [vars(base).get("_body", {}) for base in reversed(cls.__mro__)]
        cls._all_fields = cls._declared = {name: field for body in bodies for name, field in body.items()}
        kinds = (Hyper, Static, Fact, Buffer, Scalar)
        parts: list[Any] = [tuple(f for f in cls._declared.values() if isinstance(f, kind)) for kind in kinds]
        parts.append(by_name(cls.axes) if hasattr(cls, "axes") else None)
        cls._declaration = Declaration(cls.__name__, *parts)
        _check_references(cls._declaration)
        if hasattr(cls, "update"):
            rule = cls._declaration = cls._rule = cls._made_rule()
            added = (*rule.statics, *rule.hypers, *rule.options)
            cls._all_fields = {**cls._declared, **{f.name: f for f in added}}
        flags = _torch_flags(cls)
        cls._group_flags = tuple(dict.fromkeys((*flags, "maximize")))
        cls._announce(_constructor_signature(cls, [name for name, is_by_position in flags.items() if is_by_position]))
        cls._explain()

    @classmethod
    def _announce(cls, signature: inspect.Signature) -> None:
        """Set ``signature`` on the class and its constructor, for tools that inspect them."""
        cls.__signature__ = signature  # type: ignore[attr-defined]
        if "__init__" in vars(cls):
            return

        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            super(cls, self).__init__(*args, **kwargs)

        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        construct.__signature__ = signature.replace(parameters=[self_parameter, *signature.parameters.values()])  # type: ignore[attr-defined]
        construct.__annotations__ = {n: p.annotation for n, p in signature.parameters.items()} | {"return": None}
        construct.__name__, construct.__qualname__ = "__init__", f"{cls.__qualname__}.__init__"
        cls.__init__ = construct  # type: ignore[method-assign]

    @classmethod
    def _explain(cls) -> None:
        """Add a line for each argument that the class declares to a docstring without an ``Args`` section."""
        if (docstring := vars(cls).get("__doc__")) is None or "Args:" in docstring:
            return
        sentences = {**_ARGUMENTS, "weight_decay": _WEIGHT_DECAY[cls._decays or "weights"]}
        declared = [field for field in cls._declared.values() if field.name in cls.__signature__.parameters]  # type: ignore[attr-defined]
        lines = [f"    {f.name}: {doc}" for f in declared if (doc := f.doc or sentences.get(f.name))]
        others = "``help(compiled_optim.CompiledOptimizer)`` explains the other arguments, and the errors."
        widened = "Arithmetic is in float32 for parameters of fewer bits, also of averages, unlike in torch.optim."
        cls.__doc__ = "\n".join([inspect.cleandoc(docstring), "", "Args:", *lines, "", others, widened])

    @classmethod
    def _arguments(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor's arguments by name, with defaults. Raise ``TypeError`` where they do not fit."""
        signature = inspect.signature(cls)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            hints = (hint(name, signature.parameters) for name in kwargs if f"'{name}'" in str(error))
            raise TypeError(f"{cls.__name__}() {error}{''.join(hints)}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        is_made = "_optimizer_step_pre_hooks" in vars(self)  # which torch.optim's constructor writes
        if is_made and name not in vars(self) and name[:1] != "_" and not hasattr(type(self), name):
            self._warn_of_attribute(name)
        super().__setattr__(name, value)

    @classmethod
    def _warn_of_attribute(cls, name: str) -> None:
        """Warn that a new attribute is one of the constructor's arguments, or a misspelled one, which nothing reads."""
        # A class that defines __init__ itself has no signature from here, and may set any attribute.
        arguments = tuple(inspect.signature(cls).parameters) if hasattr(cls.__init__, "__signature__") else ()
        in_group = name in cls._group_flags or name in cls._all_fields.keys() - cls._flags().keys()
        advice = (wanted := misspelled(name, arguments)) and f"did you mean {wanted}?"
        if name in arguments:
            advice = f"assign param_groups[i]['{name}']" if in_group else "pass it to the constructor"
        if advice:
            warnings.warn(f"nothing reads {cls.__name__}.{name}; {advice}", UserWarning, stacklevel=3)

    @classmethod
    def _made_rule(cls) -> Rule:
        def transformed(rule: Rule) -> Rule:
            result = functools.reduce(lambda before, change: change(before), cls._transforms, started(summed(rule)))
            if result is not rule:
                result.check()
            return result

        if not hasattr(cls, "coefficients"):
            advice = "write coefficients, which returns the numbers that update finds in c, or dict()"
            raise TypeError(f"{cls.__name__} has an update without coefficients; {advice}")
        rule = Rule(
            **{field.name: getattr(cls._declaration, field.name) for field in dataclasses.fields(Declaration)},
            coefficients=by_name(cls.coefficients),
            update=by_name(cls.update),  # type: ignore[attr-defined]
            **{name: getattr(cls, f"_{name}") for name in ("gradients", "advice", "granularity", "decays")},
            reductions=(by_name(cls.reduce),) if hasattr(cls, "reduce") else (),
            adapt=by_name(cls.adapt) if hasattr(cls, "adapt") else None,
            views={name: by_name(view) for name, view in cls._views.items()},
        )
        if cls._accumulation and (computed := [b.name for b in rule.buffers if callable(b.init)]):
            raise TypeError(f"{cls.__name__}.{computed[0]}: a function as init does not go with accumulation")
        rule.check()  # before transforms, so that errors point to the author's code
        cls._view_rules = {name: transformed(rule.viewed(name)) for name in rule.views}
        return transformed(rule)

    @staticmethod
    def check(hypers: Mapping[str, Any], statics: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` where fields do not fit each other, when a group is added or a choice is assigned."""

    @classmethod
    def _state_names(cls) -> Iterable[str]:
        """Return the entries that a parameter's state may have; override to add to those of the fields."""
        return "step", *[f.name for f in (*cls._declaration.scalars, *cls._declaration.buffers)]

    @classmethod
    @functools.cache
    def _options(cls) -> tuple[Option, ...]:
        """Return all options, also static ones, in declared order."""
        return tuple(f for f in cls._all_fields.values() if isinstance(f, Option))

    @classmethod
    @functools.cache
    def _flags(cls) -> dict[str, Option]:
        """Return, by name, the options that class bodies declare: the whole optimizer's, and torch.optim's of groups."""
        return {name: f for name, f in cls._declared.items() if isinstance(f, Option) and not isinstance(f, Static)}

    @classmethod
    @functools.cache
    def _containers(cls) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names of choices, and of tuples of numbers. Groups take containers of any type for these."""
        choices = frozenset(f.name for f in cls._options()) - {LR_SCALE}
        return choices, frozenset(h.name for h in cls._declaration.hypers if h.is_tuple)

    @classmethod
    @functools.cache
    def _added_choices(cls) -> dict[str, Any]:
        """Return the options that torch.optim's optimizer of this name lacks, with their defaults.

        A group stores one only when it is not the default, so that groups keep torch.optim's keys.
        """
        choices: list[Hyper | Option] = [*(s for s in cls._declaration.statics if s.init), *cls._declaration.options]
        choices += [flag for name, flag in cls._flags().items() if name in cls._group_flags]
        choices += [h for h in cls._declaration.hypers if h.when]
        known = _torch_arguments(cls.__name__) or cls._declared
        return {choice.name: choice.default for choice in choices if choice.name not in known}


def _check_references(declaration: Declaration) -> None:
    """Raise ``TypeError`` where a field refers to an undeclared field, or has an ``int8`` of no known kind."""
    statics, hypers = [s.name for s in declaration.statics], [h.name for h in declaration.hypers]
    choices = [*statics, *hypers, *(f.name for f in declaration.facts)]
    named: list[tuple[Field, str, Any, Collection[str]]] = [
        *((b, "when", b.when, choices) for b in declaration.buffers),
        *((b, "int8", b.int8, ("signed", "unsigned")) for b in declaration.buffers),
        *((b, "init", b.init, [*hypers, PARAM]) for b in declaration.buffers),
        *((s, "init", s.init, hypers) for s in declaration.scalars),
        *((h, "when", name, statics) for h in declaration.hypers for name in h.readers),
        *((h, "like", h.like, hypers) for h in declaration.hypers),
    ]
    entries: tuple[Buffer | Scalar, ...] = (*declaration.buffers, *declaration.scalars)
    for entry in entries:
        init: Any = entry.init
        if not (isinstance(init, (int, float, str)) or (callable(init) and isinstance(entry, Buffer))):
            wanted = "a number or a name" + ", or a function" * isinstance(entry, Buffer)
            raise TypeError(f"{declaration.name}.{entry.name}: init must be {wanted}, got {init!r}")
    for field, argument, name, known in named:
        if isinstance(name, str) and name not in known:
            there = f"must be one of {', '.join(known)}" if known else "names nothing that the class declares"
            raise TypeError(f"{declaration.name}.{field.name}: {argument}={name!r} {there}{hint(name, known)}")


def no_hyperparameter(cls: type[Declared], name: str) -> str:
    """Return the message that an optimizer of this class has no hyperparameter ``name``."""
    names = [h.name for h in cls._declaration.hypers if not h.when]
    return f"{cls.__name__} has no hyperparameter '{name}'; it has {', '.join(names)}{hint(name, names)}"


def _torch_flags(cls: type[Declared]) -> dict[str, bool]:
    """Return the flags of torch.optim's optimizer of this name (or of most), and whether each is positional, last."""
    if not (arguments := _torch_arguments(cls.__name__)):
        return dict.fromkeys(("foreach", "maximize", "capturable", "differentiable", "fused"), False)
    return {name: p.kind is p.POSITIONAL_OR_KEYWORD for name, p in arguments.items() if name in cls._flags()}


def rule_name(kind: type[Declared]) -> str:
    """Return the name of the class whose ``update`` the optimizers ``kind`` run."""
    return next((base.__name__ for base in kind.__mro__ if "update" in vars(base)), kind.__name__)


@functools.cache
def _torch_arguments(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of torch.optim's optimizer of this name; empty where torch.optim lacks it."""
    torch_class = getattr(torch.optim, name, None)
    return {} if torch_class is None else inspect.signature(torch_class).parameters


def _constructor_signature(cls: type[Declared], positional_flags: Sequence[str]) -> inspect.Signature:
    every, empty = cls._all_fields, inspect.Parameter.empty
    try:
        hints = get_type_hints(cls)
    except NameError:  # take the annotations unevaluated
        hints = {name: hint for base in reversed(cls.__mro__) for name, hint in inspect.get_annotations(base).items()}
    taken = [f for f in every.values() if isinstance(f, Hyper) or (isinstance(f, Option) and f.init)]
    keyword = [f for f in taken if (f.when if isinstance(f, Hyper) else f.kw_only)]
    positional: list[Any] = [f for f in taken if f not in keyword] + [every[name] for name in positional_flags]
    either, only = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    kinds = {f: either for f in positional} | {f: only for f in keyword if f not in positional}
    parameters = [inspect.Parameter("params", either, annotation=hints.get("params", empty))]
    for f, kind in kinds.items():
        parameters.append(inspect.Parameter(f.name, kind, default=f.default, annotation=hints.get(f.name, empty)))
    return inspect.Signature(parameters)
