"""The fields that an optimizer declares: hyperparameters, options, static choices, facts, state buffers, scalars."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

BUILT_IN = frozenset({bool, int, float, str, type(None)})


def built_in(value: Any) -> Any:
    """Convert ``value`` to Python's own types: arrays, sequences or mappings to list, tuple or dict, and NumPy's numbers."""
    if type(value) in (tuple, list) and BUILT_IN.issuperset(map(type, value)):
        return value
    # A tensor of one element is a number that users may write to, and one that is an element must be such.
    if hasattr(value, "tolist") and not (isinstance(value, Tensor) and (value.numel() < 2 or value.is_meta)):
        value = tuple(value.unbind()) if isinstance(value, Tensor) and value.requires_grad else value.tolist()
    if isinstance(value, Mapping):
        return {built_in(key): built_in(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return (list if isinstance(value, list) else tuple)([e if isinstance(e, Tensor) else built_in(e) for e in value])
    return value


Number: TypeAlias = float | Tensor  # a hyperparameter as a user may give it: a Python number or a 1-element tensor
PerParameter: TypeAlias = Mapping[str, float] | Callable[[Any, Tensor], float]
"""A number for each parameter: by name, or a function of the name, None without names, and the parameter."""

LR_SCALE = "lr_scale"
"""The option that assigns a factor of ``lr`` to each parameter."""

# torch.optim's wording in its own error messages, where it is not "<name> value".
_LABELS = {"lr": "learning rate", "eps": "epsilon value", "betas": "beta parameter at index {index}"}


def is_per_parameter(value: Any) -> bool:
    """Return whether ``value`` is a :data:`PerParameter`: a dict or a function."""
    return isinstance(value, Mapping) or callable(value)


def is_ignored(name: str, value: Any) -> bool:
    """Return whether an entry of a group is one that other code writes, and no step reads.

    A plain number ``lr_scale`` is for the user's code, as in torch.optim; timm's schedulers multiply by it.
    """
    is_number = isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)
    return name in ("foreach", "capturable", "fused") or (name == LR_SCALE and is_number)


def _described(name: str, where: str) -> str:
    """Return ``name`` as messages call it: as an entry of ``where`` or, if that is empty, as a constructor argument."""
    return f"{name} of {where}" if where else f"the argument {name}"


@dataclass(frozen=True)
class Field:
    """One declared name, which is set when the class body is read; ``doc`` is the text of ``help`` about the argument."""

    name: str = dataclasses.field(default="", kw_only=True)
    doc: str = dataclasses.field(default="", kw_only=True)


@dataclass(frozen=True)
class Hyper(Field):
    """A numeric hyperparameter: a 0-dim device tensor in every parameter group, or a tuple of them.

    ``ge``, ``gt``, ``le`` and ``lt`` bound every element, by default to finite numbers. An element whose default is None may
    be None, which is NaN in the tensor. A hyperparameter without a default is a required argument.

    ``fixed`` turns a value that is no number into a hashable choice, which is compiled in, and returns None for all
    others. ``update`` finds the choice, or None, under the hyperparameter's name. The tensors are then not read.
    """

    default: Any
    ge: float | None = None
    gt: float | None = -math.inf
    le: float | None = None
    lt: float | None = math.inf
    when: str | tuple[str, ...] | None = None  # choices with which rules read it; groups have it then, or if it is passed
    like: str | None = None  # another hyperparameter, whose initial value in a group is the default
    fixed: Callable[[Any], Any] | None = None

    @functools.cached_property
    def is_tuple(self) -> bool:
        """Whether the field is a tuple of numbers (``betas``)."""
        return isinstance(self.default, tuple)

    @functools.cached_property
    def readers(self) -> tuple[str, ...]:
        """The choices that make rules read it, each by itself; empty if they always do."""
        return (self.when,) if isinstance(self.when, str) else self.when or ()

    @property
    def needed(self) -> str:
        """The choices that make rules read it, in words: ``decouple_lr=True``."""
        return " or ".join(f"{name}=True" for name in self.readers)

    def is_read(self, choices: Mapping[str, Any]) -> bool:
        """Return whether rules may read it under these choices."""
        return not self.readers or any([choices.get(name) for name in self.readers])

    @property
    def length(self) -> int:
        """The number of scalars this field holds."""
        return len(self.default) if self.is_tuple else 1

    @property
    def allowed(self) -> str:
        """The allowed range in words, such as ``>= 0 and < 1``."""
        least = (">=", self.ge) if self.ge is not None else (">", self.gt)
        most = ("<=", self.le) if self.le is not None else ("<", self.lt)
        return " and ".join(f"{sign} {bound:g}" for sign, bound in (least, most) if bound is not None)

    def element(self, index: int) -> str:
        """Return the name of one element, ``lr`` or ``betas[1]``."""
        return f"{self.name}[{index}]" if self.is_tuple else self.name

    def optional(self, index: int) -> bool:
        """Return whether an element may be None."""
        return self.is_tuple and self.default[index] is None

    @functools.cached_property
    def span(self) -> tuple[float, float]:
        """The least and the greatest number that is in range."""
        above = -math.inf if self.gt is None else math.nextafter(self.gt, math.inf)
        below = math.inf if self.lt is None else math.nextafter(self.lt, -math.inf)
        return above if self.ge is None else self.ge, below if self.le is None else self.le

    def choice(self, value: Any) -> Any:
        """Return the compiled-in choice that ``value`` is; None where ``value`` is numbers."""
        return None if self.fixed is None else self.fixed(value)

    def plain(self, numbers: Sequence[float | Tensor]) -> Any:
        """Convert ``numbers`` to a user's value: a number or a tuple, with None for NaN where that is allowed."""
        if not self.is_tuple:
            return numbers[0]
        is_none = [isinstance(n, float) and math.isnan(n) and self.optional(i) for i, n in enumerate(numbers)]
        return tuple([None if absent else n for n, absent in zip(numbers, is_none, strict=True)])

    def check(self, value: float, index: int, where: str, slack: float = 0.0) -> None:
        """Raise ``ValueError`` if ``value`` is NaN or out of bounds; inclusive bounds get ``slack``.

        ``where`` is the group or schedule that has the value, in words; empty for an argument of the constructor.
        """
        if math.isnan(value) and self.optional(index):
            return
        least, most = self.span
        if not least - slack * (self.ge is not None) <= value <= most + slack * (self.le is not None):
            label = _LABELS.get(self.name, f"{self.name} value").format(index=index)
            raise ValueError(f"Invalid {label}: {value} ({_described(self.element(index), where)} must be {self.allowed})")

    def elements(self, value: Any, where: str) -> tuple[float | Tensor, ...]:
        """Convert ``value`` to a tuple of ``length`` numbers or 1-element tensors.

        Numbers are Python's: integers stay such, others become floats. Raise ``TypeError`` or ``ValueError`` if it is none.
        """
        if not self.is_tuple:
            return (self._number(value, 0, where),)
        if not isinstance(value := built_in(value), (tuple, list)):
            raise TypeError(f"{_described(self.name, where)} must be a tuple of {self.length} numbers, got {value!r}")
        if len(value) != self.length:
            raise ValueError(f"{_described(self.name, where)} must have {self.length} elements, got {value!r}")
        return tuple([self._number(element, index, where) for index, element in enumerate(value)])

    def checked(self, value: Any, where: str) -> tuple[float | Tensor, ...]:
        """Return :meth:`elements` after :meth:`check`. A tensor on an accelerator is not read, since that would wait."""
        elements = self.elements(value, where)
        for index, element in enumerate(elements):
            if not isinstance(element, Tensor) or element.device.type == "cpu":
                self.check(element.item() if isinstance(element, Tensor) else element, index, where)
        return elements

    def _number(self, value: Any, index: int, where: str) -> float | Tensor:
        if type(value) is float:
            return value
        if value is None and self.optional(index):
            return math.nan
        if isinstance(value, Tensor):
            if value.numel() == 1 and not (value.is_complex() or value.is_meta):
                return value
        elif is_number := not isinstance(value, (str, bytes)) and hasattr(value, "__float__"):
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                number = float(value)
                return int(value) if isinstance(value, numbers.Integral) and number == value else number
        name = self.element(index)
        label = _described(name, where)
        if not isinstance(value, Tensor):
            wanted = "a single number" if is_number else "a number or a 1-element tensor"
            raise (ValueError if is_number else TypeError)(f"{label} must be {wanted}, got {value!r}")
        if value.is_meta:
            raise ValueError(f"{label} must have a value, got a tensor on the meta device")
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)} for {label}")
        raise TypeError(f"{label} must be real, got a {value.dtype} tensor")


@dataclass(frozen=True)
class Option(Field):
    """A Python value, such as a bool, which rules do not read unless it is a :class:`Static`.

    Class bodies declare options of the whole optimizer, and torch.optim's flags of groups. Those that transforms add are of
    groups, and decide for each parameter which code updates it and which state it has.

    ``valid`` raises an error where a choice does not fit. Without it, the choice is a bool if the default is one, and with
    ``optional`` a bool or None. ``of`` raises one where a choice does not fit a parameter: it gets the group's entries, a
    function that tells whether one of some patterns matches the parameter's name, the parameter, and its name in messages.
    It returns a hashable value, or None where the choice does not apply to the parameter. ``suits`` tells whether a choice
    other than the default is of use for a parameter that no pattern excludes. The choice itself may be ``patterns``, or a
    dict by patterns. ``kw_only`` is of the constructor's argument; with ``init=False`` there is none, and the class chooses.
    """

    default: Any
    _: dataclasses.KW_ONLY
    optional: bool = False
    kw_only: bool = True
    init: bool = True
    valid: Callable[[Any, str], None] | None = None
    of: Callable[[Mapping[str, Any], Callable[[Sequence[str]], bool], Tensor, str], Any] | None = None
    suits: Callable[[Any, Tensor], bool] | None = None
    patterns: bool = False

    def check(self, value: Any, where: str = "") -> None:
        """Raise ``TypeError`` or ``ValueError`` if ``value`` is no such choice; ``where`` is as in :meth:`Hyper.check`."""
        if self.valid is not None:
            if value is not self.default:
                self.valid(value, _described(self.name, where))
            return
        is_bool = isinstance(value, bool) or (self.optional and value is None)
        if not is_bool and (self.optional or isinstance(self.default, bool)):
            kinds = "a bool or None" if self.optional else "a bool"
            raise TypeError(f"{_described(self.name, where)} must be {kinds}, got {value!r}")


@dataclass(frozen=True)
class Static(Option):
    """An option of groups that rules read, and that shapes the compiled code (``amsgrad``, ``nesterov``)."""

    kw_only: bool = dataclasses.field(default=False, kw_only=True)


def check_patterns(value: Any, what: str) -> None:
    """Raise ``TypeError`` unless ``value``, named ``what`` in messages, is a sequence of patterns."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) and v for v in value):
        raise TypeError(f"{what} must be a sequence of patterns of names, such as ('*.bias', 'lm_head.*'), got {value!r}")


@dataclass(frozen=True)
class Fact(Field):
    """A boolean that shapes the code and follows from a parameter's shape, such as whether it is a matrix."""

    of: Callable[[torch.Size], bool]

    def holds(self, shape: torch.Size, rule: str) -> bool:
        """Return whether it holds for ``shape``. Raise ``TypeError``, with the name of the ``rule``, for another answer."""
        answer: Any = self.of(shape)
        if not isinstance(answer, bool):
            what = f"{rule}.{self.name} is a condition, but its function returns {answer!r} for the shape {tuple(shape)}"
            raise TypeError(f"{what}; coefficients may take numel, the number of elements")
        return answer


@dataclass(frozen=True)
class Buffer(Field):
    """A state tensor of the parameter's dtype and device, and of its shape or the one that ``shape`` makes of it.

    ``shape`` gets the parameter's with its axes in the order of :meth:`Rule.axes_of`. ``when`` names a static field, a fact
    or a hyperparameter: the buffer exists only where that is true, or not 0; or it is a function of the choices. It does not
    exist where the function ``unless`` is true: other buffers store it then. ``init`` is the number that fills a new buffer,
    or the name of a hyperparameter whose value does; both parts of a complex number get it. With ``"param"`` the buffer
    begins as a copy of the parameter at the first step, and with a function as its result: it takes arguments as ``update``
    does, but no buffers. The buffer of the finished rule has ``is_copy`` instead.

    ``int8`` allows 8-bit codes: of ``"signed"`` numbers, or of ``"unsigned"`` ones, which (or whose roots) are divisors.
    Such a buffer starts at 0, and steps replace or average it: 8 bits would lose small additions to a sum.
    ``dtype`` returns another dtype for the choices, or None for the parameter's. A ``grouped`` buffer has a number for each
    group of elements, see :func:`~compiled_optim.rule.formats.group_max`.
    """

    when: str | Callable[[Mapping[str, Any]], bool] | None = None
    init: float | str | Callable[..., Any] = 0.0
    shape: Callable[[torch.Size], tuple[int, ...]] | None = None
    int8: Literal["signed", "unsigned"] | None = None
    dtype: Callable[[Mapping[str, Any]], torch.dtype | None] | None = None
    grouped: bool = False
    unless: Callable[[Mapping[str, Any]], bool] | None = None
    is_copy: bool = False

    def is_present(self, choices: Mapping[str, Any]) -> bool:
        """Return whether the buffer exists under these choices."""
        is_wanted = self.when is None or bool(self.when(choices) if callable(self.when) else choices[self.when])
        return is_wanted and not (self.unless is not None and self.unless(choices))


@dataclass(frozen=True)
class Scalar(Field):
    """A float64 number of state per parameter, which ``coefficients`` updates in each step; ``init`` as for a buffer.

    If ``shared`` it is the same for all parameters of an optimizer, and ``adapt`` updates it.
    """

    init: float | str = 0.0
    shared: bool = False


def hyper(*, default: Any = inspect.Parameter.empty, **bounds: Any) -> Any:
    """Declare a numeric hyperparameter; see :class:`Hyper`. It may be infinite only with ``lt=None`` or ``gt=None``."""
    return Hyper(default, **bounds)


def static(*, default: Any, kw_only: bool = False, init: bool = True, doc: str = "") -> Any:
    """Declare an option that rules read; see :class:`Static`."""
    return Static(default, kw_only=kw_only, init=init, doc=doc)


def option(*, default: Any, kw_only: Literal[True], doc: str = "") -> Any:
    """Declare an option that no rule reads; see :class:`Option`. ``kw_only`` is there for type checkers."""
    return Option(default, doc=doc)


def added(*, default: Any, kw_only: Literal[True]) -> Any:
    """Name an argument that a transform of the rule adds; its default and kind are spelled out for type checkers."""
    return Field()


# No constructor takes these three, so they need no function that type checkers take for values of another type.
buffer, scalar, fact = Buffer, Scalar, Fact
