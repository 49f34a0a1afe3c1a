"""Functions from rule to rule: first copies, scaled rates, cautious steps, decay, parts of matrices, accumulation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.rule.fields import LR_SCALE, Hyper, Option, Static, check_patterns, is_per_parameter
from compiled_optim.rule.rule import NUMEL, Rule, Values, by_name, mean, number_type
from compiled_optim.rule.symbols import NotWritable
from compiled_optim.rule.vocabulary import floor, maximum, product, sign, where

PARAM = "param"  # the ``init`` of a buffer that begins as a copy of the parameter
_STARTS = "first_step"  # the coefficient that is 1 in a parameter's first step, then 0
_FACTOR = Hyper(1.0, ge=0, name=LR_SCALE)
_COUNT = "elements"  # the coefficient that is the number of a parameter's elements


def started(rule: Rule) -> Rule:
    """Return ``rule`` whose first step reads, as a buffer with such an ``init``, the parameter or a function's result.

    The parameter has all its bits.
    """
    first = {b.name: by_name(b.init) for b in rule.buffers if callable(b.init)}
    names = [b.name for b in rule.buffers if b.init == PARAM or b.name in first]
    if not names:
        return rule
    kind = "a function as init" if names[0] in first else f"init={PARAM!r}"
    if not rule.is_elementwise:
        raise TypeError(f"{rule.name}.{names[0]}: {kind} is for an elementwise update with dense gradients")
    if _STARTS in rule.coefficient_names():
        raise TypeError(f"{rule.name}.coefficients returns {_STARTS}, a name that a buffer with {kind} needs")

    def coefficients(values: Values) -> dict[str, Any]:
        return {**rule.coefficients(values), _STARTS: where(values["step"] == 1, 1.0, 0.0)}

    def seen(values: Values) -> Values:
        is_first = getattr(values["c"], _STARTS) > 0
        present = {name: values[name] for name in names if values.get(name) is not None}
        starts = {name: first[name](values) if name in first else values[PARAM] for name in present}
        return {**values, **{name: where(is_first, starts[name], old) for name, old in present.items()}}

    buffers = tuple(dataclasses.replace(b, init=0.0, is_copy=True) if b.name in names else b for b in rule.buffers)
    return rule.seeing(seen, buffers=buffers, coefficients=coefficients)


def summed(rule: Rule) -> Rule:
    """Return ``rule`` whose sums over a tensor are means, which ``update`` finds multiplied by the number of elements."""
    names = rule.tensor_sums()
    if not names:
        return rule
    if _COUNT in rule.coefficient_names():
        raise TypeError(f"{rule.name}.coefficients returns {_COUNT}, a name that total(..., over='tensor') needs")

    def coefficients(values: Values) -> dict[str, Any]:
        return {**rule.coefficients(values), _COUNT: values[NUMEL]}

    def seen(values: Values) -> Values:
        c = values["c"]
        sums = {name: getattr(c, name) * getattr(c, _COUNT) for name in names if hasattr(c, name)}
        return {**values, "c": c._replace(**sums)}

    def reduce(values: Values) -> dict[str, Any]:
        results = {name: result for function in rule.reductions for name, result in function(seen(values)).items()}
        return {name: mean(result.expression) if name in names else result for name, result in results.items()}

    return rule.seeing(seen, coefficients=coefficients, reductions=(reduce,))


def lr_scaled(rule: Rule) -> Rule:
    """Return ``rule``, if it has ``lr``, with ``lr_scale``, a factor of ``lr`` and ``max_lr`` before ``coefficients``."""
    rates = [h.name for h in rule.hypers if h.name in ("lr", "max_lr")]
    if "lr" not in rates:
        return rule

    def coefficients(values: Values) -> dict[str, Any]:
        scaled = {name: values[name] * values[LR_SCALE] for name in rates if name in values}
        return rule.coefficients({**values, **scaled})

    choice = Option(None, valid=_check_scale, name=LR_SCALE)
    return dataclasses.replace(rule, options=(*rule.options, choice), coefficients=coefficients)


def lr_factor(value: Any, name: str | None, param: Tensor, where: str) -> float:
    """Return the factor of ``lr`` that a ``value`` of ``lr_scale`` assigns to ``param``, ``where`` in messages, or 1.

    Raise an error where it is no finite number >= 0, or where ``name`` is None and ``value`` needs it.
    """
    if not is_per_parameter(value):
        return 1.0
    try:
        number = value.get(name, 1.0) if isinstance(value, Mapping) else value(name, param)
    except (TypeError, ValueError, AttributeError) as error:
        if name is not None:
            raise
        raise type(error)(f"{LR_SCALE} of {where}, a parameter without a name, raises: {error}") from error
    if name is None and isinstance(value, Mapping):
        raise ValueError(f"{LR_SCALE} has numbers by name, and {where} has no name")
    factor = float(_FACTOR.elements(number, where)[0])
    _FACTOR.check(factor, 0, where)
    return factor


def _check_scale(value: Any, what: str) -> None:
    if not is_per_parameter(value):
        raise TypeError(f"{what} must be a dict name -> number or a function (name, parameter) -> number, got {value!r}")


LEAST = 1e-3  # the least share of moving elements by which steps are divided


def cautious(rule: Rule) -> Rule:
    """Return ``rule`` with the choice ``cautious``: only elements whose step descends the gradient move (arXiv:2411.16085).

    Their steps are divided by the share of the tensor's elements that move, or by :data:`LEAST` if that is more. Weight
    decay apart from the step is unchanged, and so are the buffers. All this is as in the authors' C-AdamW; Algorithm 1 of
    the paper adds a small number to the share instead, and C-Lion 1 to the number of elements. It is for elementwise rules
    on dense gradients, but not for one with views, whose parameter follows its state.
    """
    if rule.views or not rule.is_elementwise:
        return rule

    def reduce(values: Values) -> dict[str, Any]:
        return {"moving": mean(where(_goes_down(rule.update(values), values), 1.0, 0.0))} if values["cautious"] else {}

    def update(values: Values) -> dict[str, Any]:
        returned = rule.update(values)
        if not values["cautious"]:
            return returned
        growth = 1 / maximum(values["c"].moving, LEAST)
        return {**returned, "step": where(_goes_down(returned, values), growth, 0.0) * returned["step"]}

    choice = Static(default=False, kw_only=True, name="cautious")
    statics, added = (*rule.statics, choice), (*rule.added, choice.name)
    return dataclasses.replace(rule, statics=statics, reductions=(*rule.reductions, reduce), update=update, added=added)


def _goes_down(returned: Values, values: Values) -> Any:
    """Return whether the step in ``returned`` goes against the gradient; the signs' product does not underflow."""
    return sign(returned["step"]) * sign(values["grad"]) > 0


def decayed(param: Any, grad: Any, c: Any, decoupled: bool) -> tuple[Any, Any]:
    """Return ``param`` and ``grad`` after weight decay: ``c.decay * param`` if ``decoupled``, else with it in the gradient.

    The gradient then gets ``product(c.weight_decay, param)`` added.
    """
    return (c.decay * param, grad) if decoupled else (param, grad + product(c.weight_decay, param))


_TORCHS = "decoupled_weight_decay"  # torch.optim's name of the choice, in optimizers that have it
_WD = Static(default=None, optional=True, kw_only=True, name="decouple_wd")
_LR = Static(default=False, kw_only=True, name="decouple_lr")
LARGEST = 5e-3  # as in optimi: the weight decay with decouple_lr above which there is a warning
DECOUPLED = (_TORCHS, _WD.name)
_CORRECTED = Static(default=False, kw_only=True, name="corrected_weight_decay")
_CAUTIOUS = Static(default=False, kw_only=True, name="cautious_weight_decay")
_BY_MAX_LR = (_LR.name, _CORRECTED.name)
_MAX_LR = Hyper(default=None, ge=0, when=_BY_MAX_LR, like="lr", name="max_lr")
_KEPT = "undecayed_"  # before the name of a coefficient: its value without weight decay


def decay(rule: Rule) -> Rule:
    """Return ``rule`` with ``decouple_lr`` and ``max_lr`` and, if it decays by the gradient, with ``decouple_wd``.

    With ``decouple_lr`` the rule gets ``weight_decay / max_lr`` for ``weight_decay``, and 0 where ``max_lr`` is 0. With
    ``decouple_wd`` a parameter is multiplied by ``1 - lr * weight_decay`` before the step, as in AdamW, and the rule itself
    does not decay; None is True with ``decouple_lr``. A rule that already has such a choice keeps it. A rule without ``lr``
    or ``weight_decay``, or with a field ``decouple_lr`` or ``max_lr``, is unchanged.
    """
    names = {f.name for f in (*rule.hypers, *rule.statics)}
    if not {"lr", "weight_decay"} <= names or names & {_LR.name, _MAX_LR.name}:
        return rule
    adds_wd = rule.decays == "gradient" and _WD.name not in names
    scales = adds_wd and _TORCHS not in names  # true if parameters are multiplied here, and not by the rule

    def coefficients(values: Values) -> dict[str, Any]:
        weight_decay = values["weight_decay"]
        if values[_LR.name]:
            weight_decay = _over_max_lr(weight_decay, values)
        numbers = rule.coefficients({**values, "weight_decay": weight_decay})
        return {**numbers, "weight_decay": 1 - values["lr"] * weight_decay} if scales and is_decoupled(values) else numbers

    def seen(values: Values) -> Values:
        """Return the rule's values: with its own choice true, or with a parameter that has decayed."""
        if not (adds_wd and is_decoupled(values)):
            return values
        if not scales:
            return {**values, _TORCHS: True}
        numbers = values["c"]
        return {**values, "param": numbers.weight_decay * values["param"], "c": numbers._replace(weight_decay=0.0)}

    def update(values: Values) -> dict[str, Any]:
        decayed = seen(values)
        return {"param": decayed["param"], **rule.update(decayed)}

    choices = (_WD, _LR) if adds_wd else (_LR,)
    return rule.seeing(
        seen,
        hypers=(*rule.hypers, _MAX_LR),
        statics=(*rule.statics, *choices),
        coefficients=coefficients,
        update=update,
        added=(*rule.added, *(s.name for s in choices)),
    )


def _over_max_lr(number: Any, values: Values) -> Any:
    """Return ``number / max_lr``, or 0 where ``max_lr`` is 0."""
    zero = values[_MAX_LR.name] == 0
    return where(zero, 0.0, number / where(zero, 1.0, values[_MAX_LR.name]))


def corrected(rule: Rule) -> Rule:
    """Return ``rule``, if :func:`decay` changed it, with the choice ``corrected_weight_decay`` (AdamC, arXiv:2506.02285).

    The rule gets ``weight_decay * lr / max_lr`` for ``weight_decay``, and 0 where ``max_lr`` is 0. A parameter that loses
    the share ``lr * weight_decay`` in a step then loses ``lr**2 / max_lr * weight_decay``.
    """
    if _MAX_LR not in rule.hypers:
        return rule

    def coefficients(values: Values) -> dict[str, Any]:
        if values[_CORRECTED.name]:
            values = {**values, "weight_decay": values["weight_decay"] * _over_max_lr(values["lr"], values)}
        return rule.coefficients(values)

    statics, added = (*rule.statics, _CORRECTED), (*rule.added, _CORRECTED.name)
    return dataclasses.replace(rule, statics=statics, coefficients=coefficients, added=added)


def cautiously_decayed(rule: Rule) -> Rule:
    """Return ``rule``, if it decays, with ``cautious_weight_decay`` (arXiv:2510.12402, Algorithm 1).

    An element then decays only where the rule's step without decay, which is subtracted, and the parameter do not have
    opposite signs: where ``u * x >= 0``. A :func:`cautious` step is masked after that, and decay does not follow its mask.

    An elementwise rule runs twice: without decay for the signs, then with coefficients that decay only such elements. So its
    decay may be anywhere, also in its step. Reductions may depend on decay. Their results count as 1 until they are known:
    they may scale a step, but not turn it. A rule on tensors runs once, and must return ``param`` decayed and a step without
    decay. A rule with views is unchanged: its parameter is no place where steps begin.
    """
    if "weight_decay" not in {h.name for h in rule.hypers} or rule.views or rule.gradients == "sparse":
        return rule
    later = rule.reduced_names()

    def coefficients(values: Values) -> dict[str, Any]:
        numbers = rule.coefficients(values)
        if not (values[_CAUTIOUS.name] and rule.is_elementwise):
            return numbers
        kept = rule.coefficients({**values, "weight_decay": 0.0})
        return {**numbers, **{_KEPT + name: n for name, n in kept.items() if n is not numbers[name]}}

    def seen(values: Values) -> Values:
        """Return the rule's values: with coefficients that decay some elements, and keep others as they are."""
        if not values[_CAUTIOUS.name]:
            return values
        c = values["c"]
        kept = {name: getattr(c, _KEPT + name) for name in c._fields if hasattr(c, _KEPT + name)}
        # Each is a 1 for every element, in every language.
        ones = {name: where(values["param"] == 0, 1.0, 1.0) for name in later if not hasattr(c, name)}
        known = {**c._asdict(), **ones, **kept}
        falls = _do_not_differ(rule.update({**values, "c": number_type(tuple(known))(**known)}), values)
        return {**values, "c": c._replace(**{name: where(falls, getattr(c, name), n) for name, n in kept.items()})}

    def update(values: Values) -> dict[str, Any]:
        returned = rule.update(values)
        if not values[_CAUTIOUS.name]:
            return returned
        if returned.get("param", values["param"]) is values["param"]:
            raise NotWritable(f"returns no decayed param; {_CAUTIOUS.name} is for decay apart from the step")
        return {**returned, "param": where(_do_not_differ(returned, values), returned["param"], values["param"])}

    # Before others, since Rule.check tries the last one with every rule, and this one refuses some.
    statics, added = (*rule.statics, _CAUTIOUS), (_CAUTIOUS.name, *rule.added)
    if rule.is_elementwise:
        return rule.seeing(seen, statics=statics, coefficients=coefficients, added=added)
    return dataclasses.replace(rule, statics=statics, update=update, added=added)


def _do_not_differ(returned: Values, values: Values) -> Any:
    """Return whether the signs of the step in ``returned`` and of the parameter do not differ, or one of them is 0."""
    return sign(returned["step"]) * sign(values["param"]) >= 0


def check_decay(group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where choices of decay exclude each other; warn where their combination is likely a mistake."""
    if group.get(_WD.name) is False and group.get(_TORCHS):
        raise ValueError(f"{_WD.name}=False does not go with {_TORCHS}=True")
    by_lr, by_square = group.get(_LR.name), group.get(_CORRECTED.name)
    if (
        (chosen := by_square or group.get(_CAUTIOUS.name))
        and not group.keys().isdisjoint(DECOUPLED)
        and not is_decoupled(group)
    ):
        name = (_CORRECTED if by_square else _CAUTIOUS).name
        raise ValueError(f"{name}={chosen} does not go with weight decay in the gradient; pass {_WD.name}=True as well")
    if not (by_lr or by_square):
        return
    # A tensor is not read, since that may wait for a device.
    is_0 = {name: isinstance(n := group.get(name), (int, float)) and n == 0 for name in ("lr", "weight_decay")}
    if group.get(_MAX_LR.name) is None and is_0["lr"] and not is_0["weight_decay"]:
        reader = (_LR if by_lr else _CORRECTED).name
        message = f"weights will not decay: max_lr, which {reader} divides by, is the group's first lr, 0"
        warnings.warn(f"{message}; pass the learning rate that a schedule reaches as max_lr", UserWarning, stacklevel=2)
    if not by_lr:
        return
    if group.get(_WD.name) is False:
        message = f"{_WD.name}=False with {_LR.name}=True adds weight_decay / max_lr times the parameter to the gradient"
        warnings.warn(f"{message}; leave {_WD.name} out to shrink parameters, as optimi does", UserWarning, stacklevel=2)
    if isinstance(wd := group["weight_decay"], (int, float)) and wd > LARGEST:
        message = f"with {_LR.name}=True a step at max_lr takes {wd:g} of a parameter away, whatever the learning rate"
        warnings.warn(f"{message}; usual values of weight_decay are then 1e-6 to 1e-4", UserWarning, stacklevel=2)


def is_decoupled(choices: Mapping[str, Any]) -> bool:
    """Return whether weights decay apart from the gradient, for rules with that choice."""
    requested = choices.get(_WD.name)
    return bool(choices.get(_TORCHS) or (choices.get(_LR.name) if requested is None else requested))


Split: TypeAlias = Mapping[str, "int | Sequence[int]"]
"""For each pattern of names, the number of equal parts along the rows, or the rows of each part."""


def in_parts(rule: Rule) -> Rule:
    """Return ``rule``, if on matrices, with the options ``stacks`` and ``split`` (see :class:`CompiledOptimizer`).

    A rule whose state does not have the parameter's rows cannot split it, and only has ``stacks``.
    """
    if rule.granularity != "matrix":
        return rule
    options = [Option((), valid=check_patterns, patterns=True, name="stacks")]
    if all(b.shape is None or b.shape(torch.Size((2, 3)))[0] == 2 for b in rule.buffers):
        options.append(Option(None, of=_sizes, valid=_check_split, patterns=True, name="split"))

    def update(values: Values) -> dict[str, Any]:
        if (sizes := values.get("split")) is None:
            return rule.update(values)
        numbers = values["c"]
        c = type(numbers)(*(number.unsqueeze(-1) for number in numbers))  # equal parts add a dimension
        names = ["param", *(b.name for b in rule.buffers if values.get(b.name) is not None)]
        parts = []
        for start, count, rows in equal_parts(sizes):
            part = {n: values[n].narrow(-2, start, count * rows).unflatten(-2, (count, rows)) for n in (*names, "grad")}
            parts.append(rule.updated({**values, **part, "c": c}))
        joined = {name: torch.cat([part[name].flatten(-3, -2) for part in parts], -2) for name in names}
        return {**joined, "step": 0.0}

    return dataclasses.replace(rule, options=(*rule.options, *options), update=update)


def equal_parts(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first row of each run of equal ``sizes``, their number, and the size."""
    start = 0
    for rows, equal in itertools.groupby(sizes):
        yield start, (count := len(list(equal))), rows
        start += count * rows


def _check_split(value: Any, what: str) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(pattern, str) and pattern for pattern in value):
        raise TypeError(f"{what} must be a dict pattern -> parts, such as {{'*qkv*': 3}}, got {value!r}")
    for pattern, parts in value.items():
        sizes = parts if isinstance(parts, (tuple, list)) else [parts]
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            allowed = "a number of equal parts, or a tuple with the rows of each part"
            raise ValueError(f"{pattern!r} of {what} must be {allowed}, got {parts!r}")


def _sizes(
    group: Mapping[str, Any], is_matched: Callable[[Sequence[str]], bool], param: Tensor, where: str
) -> tuple[int, ...] | None:
    """Return the rows of each part of a parameter; None if it is not split."""
    split = group.get("split") or {}
    matched = {pattern: parts for pattern, parts in split.items() if is_matched((pattern,))}
    if param.dim() < 2:  # flattened after the optimizer was built
        return None
    rows, matches = param.shape[-2], set()
    for pattern, parts in matched.items():
        is_even = isinstance(parts, int)
        sizes = (rows // parts,) * parts if is_even else tuple(parts)
        if sum(sizes) != rows:
            reason = f"{rows} rows are not {parts} equal parts" if is_even else f"it has {rows} rows, the parts {sum(sizes)}"
            raise ValueError(f"split[{pattern!r}]={parts!r} does not fit {where} of shape {tuple(param.shape)}: {reason}")
        matches.add(sizes)
    if len(matches) > 1:
        raise ValueError(f"split: {where} matches both {' and '.join(map(repr, matched))}, which differ")
    return next((sizes for sizes in matches if len(sizes) > 1), None)


TRANSFORMS = (decay, corrected, cautiously_decayed, cautious, lr_scaled, in_parts)
"""The functions that make an optimizer's rule of its declaration, in turn."""


GOES_ON, STAYS = 0.25, 0.5
"""Fractions added to a parameter's step count before a gradient that is not the first, or not the last, of its step."""


@dataclass(frozen=True)
class Accumulation:
    """Declares that a step depends on gradients only through its buffers, and that each buffer is an average of them."""

    kept: tuple[str, ...]  # the coefficients by which a step multiplies buffers
    unless: tuple[str, ...] = ()  # the choices that rule accumulation out


@functools.cache
def accumulating(rule: Rule, accumulation: Accumulation) -> Rule:
    """Return ``rule`` with a call per gradient of a step; the fraction of ``step`` tells which gradient it is.

    The first one lets buffers decay, every one is added to them with its weight, and with the last one the parameter moves
    and decays: in that gradient, if the rule decays by the gradient. A step of one gradient is as in ``rule``.
    """

    def coefficients(values: Values) -> dict[str, Any]:
        step = floor(values["step"])
        part = values["step"] - step
        stays = part >= STAYS
        goes_on = where(stays, part - STAYS, part) >= GOES_ON
        frozen: dict[str, Any] = {name: where(stays, 0.0, values[name]) for name in ("lr", "weight_decay") if name in values}
        numbers = rule.coefficients({**values, **frozen, "step": step})
        return {name: where(goes_on, 1.0, n) if name in accumulation.kept else n for name, n in numbers.items()}

    result = dataclasses.replace(rule, coefficients=coefficients)
    result.check()
    return result
