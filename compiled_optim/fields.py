"""What an optimizer declares: hyperparameters, static choices, flags, state buffers and per-tensor scalars.

A class body is read once, when the class is made, into a :class:`Rule`; the constructor, the validation, the parameter
groups, the state and every lowering are derived from it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import dataclass_transform

Number: TypeAlias = float | Tensor
"""A hyperparameter as a user may give it: a Python number or a 1-element tensor."""

Gradients: TypeAlias = Literal["dense", "sparse"]
"""The gradients that an optimizer takes; sparse ones are COO tensors."""

Granularity: TypeAlias = Literal["element", "tensor", "matrix"]
"""What a rule's update sees at a time."""

# torch.optim's wording in its own error messages, where it is not "<name> value".
_LABELS = {"lr": "learning rate", "eps": "epsilon value", "betas": "beta parameter at index {index}"}


@dataclass(frozen=True)
class Field:
    """One declared name; ``name`` is filled in when the class body is read."""

    name: str = dataclasses.field(default="", kw_only=True)


@dataclass(frozen=True)
class Hyper(Field):
    """A numeric hyperparameter: a 0-dim device tensor in every parameter group, or a tuple of them.

    ``ge``, ``gt``, ``le`` and ``lt`` bound every element; where nothing else is said, it is finite. An element whose default
    is None may be None, which is NaN in the tensor.
    """

    default: float | tuple[float | None, ...]
    ge: float | None = None
    gt: float | None = -math.inf
    le: float | None = None
    lt: float | None = math.inf

    @property
    def is_tuple(self) -> bool:
        """Whether the field is a tuple of numbers (``betas``)."""
        return isinstance(self.default, tuple)

    @property
    def length(self) -> int:
        """The number of scalars this field holds."""
        return len(self.default) if isinstance(self.default, tuple) else 1

    @property
    def allowed(self) -> str:
        """The allowed range in words, such as ``>= 0 and < 1``."""
        least = (">=", self.ge) if self.ge is not None else (">", self.gt)
        most = ("<=", self.le) if self.le is not None else ("<", self.lt)
        return " and ".join(f"{sign} {bound:g}" for sign, bound in (least, most) if bound is not None)

    def element(self, index: int) -> str:
        """The name of one element, ``lr`` or ``betas[1]``."""
        return f"{self.name}[{index}]" if self.is_tuple else self.name

    def optional(self, index: int) -> bool:
        """Whether an element may be None."""
        return isinstance(self.default, tuple) and self.default[index] is None

    def check(self, value: float, index: int, where: str, slack: float = 0.0) -> None:
        """Raise ``ValueError`` if ``value``, of ``where``, is NaN or out of bounds; inclusive ones get ``slack``."""
        if math.isnan(value) and self.optional(index):
            return
        inside = (
            not math.isnan(value)
            and (self.ge is None or value >= self.ge - slack)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le + slack)
            and (self.lt is None or value < self.lt)
        )
        if not inside:
            label = _LABELS.get(self.name, f"{self.name} value").format(index=index)
            raise ValueError(f"Invalid {label}: {value} ({self.element(index)} of {where} must be {self.allowed})")

    def elements(self, value: Any, where: str) -> tuple[float | Tensor, ...]:
        """``value`` as a tuple of ``length`` floats or 1-element tensors.

        Raises:
            TypeError: an element is not a number.
            ValueError: there are more or fewer elements than the field holds.
        """
        if not self.is_tuple:
            return (self._number(value, 0, where),)
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{self.name} of {where} must be a tuple of {self.length} numbers, got {value!r}")
        if len(value) != self.length:
            raise ValueError(f"{self.name} of {where} must have {self.length} elements, got {value!r}")
        return tuple(self._number(element, index, where) for index, element in enumerate(value))

    def checked(self, value: Any, where: str, slack: float = 0.0) -> tuple[float | Tensor, ...]:
        """:meth:`elements` after :meth:`check`; a tensor on an accelerator is not read, since that would wait for it."""
        elements = self.elements(value, where)
        for index, element in enumerate(elements):
            if not isinstance(element, Tensor):
                self.check(element, index, where, slack)
            elif element.device.type == "cpu":
                self.check(element.item(), index, where, slack)
        return elements

    def _number(self, value: Any, index: int, where: str) -> float | Tensor:
        if value is None and self.optional(index):
            return math.nan
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"Tensor {self.element(index)} must be 1-element, got shape {tuple(value.shape)} for {where}"
                )
            if value.is_complex():
                raise TypeError(f"{self.element(index)} of {where} must be real, got a {value.dtype} tensor")
            return value
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            raise TypeError(f"{self.element(index)} of {where} must be a number or a 1-element tensor, got {value!r}")
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{self.element(index)} of {where} must be a single number, got {value!r}") from None


@dataclass(frozen=True)
class Choice(Field):
    """A Python value, such as a bool, that is no number to compute with."""

    default: Any

    def check(self, value: Any, where: str = "") -> None:
        """Raise ``TypeError`` if ``value`` is no bool where the default is one; ``where`` names its group, if any."""
        if isinstance(self.default, bool) and not isinstance(value, bool):
            label = f"{self.name} of {where}" if where else self.name
            raise TypeError(f"{label} must be a bool, got {value!r}")


@dataclass(frozen=True)
class Static(Choice):
    """A choice that shapes the compiled code (``amsgrad``, ``nesterov``).

    With ``init=False`` it is no argument of the constructor: the class has made the choice.
    """

    kw_only: bool = False
    init: bool = True


@dataclass(frozen=True)
class Fact(Field):
    """A choice that shapes the code and that the shape of each parameter makes, such as whether it is a matrix."""

    of: Callable[[torch.Size], bool]


@dataclass(frozen=True)
class Flag(Choice):
    """An option that the engine handles and no rule sees (``maximize``, ``foreach``)."""


@dataclass(frozen=True)
class Buffer(Field):
    """A state tensor of the parameter's dtype and device, and of its shape unless ``shape`` maps that to another one.

    ``when`` names a static field, a fact, or a hyperparameter whose value 0 makes the buffer unnecessary; the buffer exists
    only where that field is true. ``init`` is the number that fills it at first, or the name of the hyperparameter that
    does; both parts of a complex number take it.
    """

    when: str | None = None
    init: float | str = 0.0
    shape: Callable[[torch.Size], tuple[int, ...]] | None = None

    def shape_for(self, param: Tensor) -> tuple[int, ...]:
        """The shape of ``param``'s buffer."""
        return tuple(param.shape) if self.shape is None else self.shape(param.shape)


@dataclass(frozen=True)
class Scalar(Field):
    """One float64 number of state per parameter, advanced by ``coefficients``; ``init`` is as for a buffer."""

    init: float | str = 0.0


def hyper(
    *,
    default: Any,
    ge: float | None = None,
    gt: float | None = -math.inf,
    le: float | None = None,
    lt: float | None = math.inf,
) -> Any:
    """Declare a numeric hyperparameter; see :class:`Hyper`. With ``lt=None`` it may be infinite."""
    return Hyper(default, ge, gt, le, lt)


def static(*, default: Any, kw_only: bool = False, init: bool = True) -> Any:
    """Declare a Python-valued choice; see :class:`Static`."""
    return Static(default, kw_only, init)


def fact(*, of: Callable[[torch.Size], bool]) -> Any:
    """Declare a choice made by each parameter's shape; see :class:`Fact`."""
    return Fact(of)


def flag(*, default: Any, kw_only: Literal[True]) -> Any:
    """Declare an engine option; see :class:`Flag`. ``kw_only`` is spelled out for type checkers."""
    return Flag(default)


def buffer(
    *,
    when: str | None = None,
    init: float | str = 0.0,
    shape: Callable[[torch.Size], tuple[int, ...]] | None = None,
) -> Any:
    """Declare a state tensor; see :class:`Buffer`."""
    return Buffer(when, init, shape)


def scalar(*, init: float | str = 0.0) -> Any:
    """Declare a per-tensor scalar state; see :class:`Scalar`."""
    return Scalar(init)


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
class Rule(Declaration):
    """A declaration with an update: everything the engine knows about one optimizer.

    ``coefficients(step, <hyperparameters>, <scalars>, <statics>)`` takes float64 vectors with one entry per tensor and
    returns the new scalars followed by the numbers that ``update`` needs, in the order in which ``update`` names them.
    ``update(param, grad, <buffers>, <coefficients>, <statics>)`` returns the new parameter followed by every buffer in
    declared order. Both name only what they use; an absent buffer is ``None``. ``advice`` names the optimizer for gradients
    of the other kind than ``gradients``.

    With the granularity ``"element"``, ``update`` is elementwise. Otherwise it sees stacks of equal tensors: the first
    dimension counts tensors, the coefficients broadcast against it, and ``update`` may reduce over all others. With
    ``"tensor"`` a stack is (tensors, columns) or (tensors, batch, rows, columns); ``coefficients`` may take ``resolution``,
    the machine epsilon of each parameter's dtype. With ``"matrix"`` it is (tensors, rows, columns), and ``update`` may
    depend on the numbers of rows and columns.
    """

    coefficients: Callable[..., tuple[Any, ...]]
    update: Callable[..., tuple[Any, ...]]
    gradients: Gradients = "dense"
    advice: str = ""
    granularity: Granularity = "element"

    def __post_init__(self) -> None:
        known = {"step"}.union(f.name for f in (*self.hypers, *self.scalars, *self.statics))
        known |= {"resolution"} if self.granularity != "element" else set()
        unknown = argument_names(self.coefficients) - known
        if unknown:
            raise TypeError(f"{self.name}.coefficients takes {sorted(unknown)}, which the class does not declare")

    @functools.cached_property
    def coefficient_names(self) -> tuple[str, ...]:
        """What ``update`` takes besides the parameter, the gradient, the buffers and the static choices."""
        given = {"param", "grad", *(f.name for f in (*self.buffers, *self.statics, *self.facts))}
        return tuple(name for name in inspect.signature(self.update).parameters if name not in given)


def argument_names(function: Callable[..., Any]) -> set[str]:
    """What ``function`` takes."""
    return set(inspect.signature(function).parameters)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real dtype in which a tensor of ``dtype`` is updated: float64 for 64-bit numbers, float32 for all lower."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor's numbers: a complex number is a pair of real ones."""
    return dtype.to_real() if dtype.is_complex else dtype


def real_numel(tensor: Tensor) -> int:
    """How many real numbers a tensor holds."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


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

    positional_flags: ClassVar[tuple[str, ...]] = ()
    """The flags that torch.optim's optimizer of this name also takes by position, after everything else.

    Type checkers read the declaration in the base class, and ask for keywords.
    """

    gradients: ClassVar[Gradients] = "dense"
    """The gradients that the optimizer takes. Of a sparse one it updates the rows that the gradient names."""

    advice: ClassVar[str] = ""
    """The optimizer to advise where a gradient is of the other kind."""

    granularity: ClassVar[Granularity] = "element"
    """What an update sees at a time; see :class:`Rule`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        for name in own:
            delattr(cls, name)
        cls.fields = {**cls.fields, **{name: dataclasses.replace(value, name=name) for name, value in own.items()}}
        cls.__signature__ = _constructor_signature(cls.fields, cls.positional_flags)  # type: ignore[attr-defined]
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
