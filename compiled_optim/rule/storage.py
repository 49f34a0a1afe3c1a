"""Parameters and state in fewer bytes, for rules on elements and on matrices: ``weights`` and ``state_dtype``.

A step decodes the stored numbers, applies the rule, and encodes the results. So all of the rule's arithmetic on the
parameter, weight decay and lookahead too, is on a number of 32 bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from compiled_optim.rule import formats
from compiled_optim.rule.did_you_mean import hint
from compiled_optim.rule.fields import Buffer, Option, check_patterns
from compiled_optim.rule.rule import EXACT, INDEX, Rule, Values
from compiled_optim.rule.vocabulary import where

AUTO = "auto"
Weights: TypeAlias = Literal["auto", "kahan", "stochastic", "split8", "split16", "master"]
MODES: tuple[Weights, ...] = tuple(mode for mode in get_args(Weights) if mode != AUTO)
"""The modes in which a parameter can be stored; ``"auto"`` chooses one of them, or none."""
REMAINDER_BITS = {"split8": 8, "split16": 16}
ROUNDED = ("stochastic", "kahan", "split8")
"""The modes that round by numbers of each step, so that steps of any size add up."""
_THRESHOLDS = ("threshold0", "threshold1")
"""The coefficients by which averages are rounded in a step, in turn: no more, since each takes a register of a kernel."""
_PART_THRESHOLD = _THRESHOLDS[1]
INT8 = "int8"
MINIMUM = 4096
"""Elements below which a parameter keeps full state and weights, as if ``exclude`` named it."""

HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CODE_DTYPES = {"signed": torch.int8, "unsigned": torch.uint8}
REMAINDER_DTYPES = {"split8": torch.int8, "split16": torch.int16}

_Matcher: TypeAlias = Callable[[Sequence[str]], bool]  # tells whether one of some patterns matches a parameter's name
StateDtype: TypeAlias = "torch.dtype | Literal['int8'] | Mapping[str, torch.dtype | Literal['int8']] | None"


def code_name(buffer: str) -> str:
    """Return the state entry that holds a buffer's codes. The name keeps other optimizers from reading codes as numbers."""
    return f"{buffer}_{INT8}"


def scale_name(buffer: str) -> str:
    """Return the state entry that holds the scales of a buffer's codes."""
    return f"{buffer}_scale"


def _mode(choices: Mapping[str, Any]) -> str | None:
    """Return the mode in which the parameter is stored under these choices; None where it is only rounded."""
    chosen = choices.get("weights")
    return None if chosen is None else chosen[0]


def _codes(choices: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the buffers that are stored in 8 bits under these choices, in the order of generated code."""
    return tuple(name for name, dtype in choices.get("state_dtype", ()) if dtype == INT8)


def _rounded_by_step(choices: Mapping[str, Any], signs: Mapping[str, Any]) -> dict[str, str]:
    """Return the averages with fewer than 32 bits by choice, in order, and their dtypes; thresholds round them."""
    few = (INT8, *HALVES.values())
    return {name: dtype for name, dtype in choices.get("state_dtype", ()) if dtype in few and name in signs}


def _stored_buffer(buffer: Buffer) -> Iterator[Buffer]:
    """Yield the entries that store a buffer of the rule: numbers under its own name, or codes with their scales.

    Without a ``state_dtype``, a buffer with small additions, such as a sum, has 32 bits if ``weights`` stores further bits.
    """

    def is_coded(choices: Mapping[str, Any]) -> bool:
        return buffer.name in _codes(choices)

    def has_codes(choices: Mapping[str, Any]) -> bool:
        return is_coded(choices) and buffer.is_present(choices)

    def dtype(choices: Mapping[str, Any]) -> torch.dtype | None:
        chosen = dict(choices.get("state_dtype", ())).get(buffer.name)
        if chosen is None:
            return torch.float32 if not buffer.int8 and _mode(choices) is not None else None
        return CODE_DTYPES[buffer.int8 or ""] if chosen == INT8 else getattr(torch, chosen)

    yield dataclasses.replace(buffer, dtype=dtype, unless=is_coded if buffer.int8 else None)
    if buffer.int8:
        yield Buffer(has_codes, dtype=dtype, name=code_name(buffer.name))
        yield Buffer(has_codes, dtype=lambda c: torch.float32, grouped=True, name=scale_name(buffer.name))


_PARTS = (
    Buffer(lambda c: _mode(c) == "kahan", name="kahan_comp"),
    Buffer(lambda c: _mode(c) in REMAINDER_BITS, dtype=lambda c: REMAINDER_DTYPES[_mode(c) or ""], name="remainder"),
    Buffer(lambda c: _mode(c) == "master", dtype=lambda c: torch.float32, name="master_param"),
)
PARTS = tuple(part.name for part in _PARTS)
"""The state entries that hold the bits that a parameter's dtype lacks."""


def stored(rule: Rule) -> Rule:
    """Return ``rule``, if elementwise or on matrices, with ``weights``, ``kahan_sum``, ``state_dtype`` and ``exclude``.

    :class:`CompiledOptimizer` explains these options. Weights in ``"split8"`` are within 1/256 ulp of the parameter.
    A compensation in float16 is a multiple of 2**-24, so that ``"kahan"`` keeps fewer bits of small weights.
    """
    if not (rule.is_elementwise or rule.granularity == "matrix"):
        return rule
    signs = {b.name: b.int8 for b in rule.buffers if b.int8}
    buffers = [buffer for b in rule.buffers for buffer in _stored_buffer(b)]

    def opened(values: Values) -> Values:
        """Return ``values`` with decoded numbers."""
        decoded = dict(values)
        for name in _codes(values):
            if values.get(code_name(name)) is not None:
                decoded[name] = formats.decoded(values[code_name(name)], values[scale_name(name)], signs[name])
        if (mode := _mode(values)) is not None:
            decoded["param"] = joined(values["param"], values, mode, values["weights"][1])
        return decoded

    def coefficients(values: Values) -> dict[str, Any]:
        numbers = rule.coefficients(values)
        mode, step, seed = _mode(values), values["step"], values["seed"]
        if mode == "stochastic":
            numbers = {**numbers, "noise": formats.key_of(step, seed)}
        if (mode in ROUNDED and mode != "stochastic") or _rounded_by_step(values, signs):
            threshold = formats.threshold_of(step, seed)
            numbers = numbers | dict(zip(_THRESHOLDS, (threshold, formats.another(threshold)), strict=True))
        return numbers

    def update(values: Values) -> dict[str, Any]:
        stored, mode = _rounded_by_step(values, signs), _mode(values)
        if mode is None and not stored:
            return rule.update(values)
        seen = opened(values)
        new = rule.updated(seen)
        if mode is not None:
            new[EXACT] = seen["param"], new["param"]
            new |= parts_of(new["param"], values, mode, values["weights"][1])
        for (name, dtype), number in zip(stored.items(), itertools.cycle(_THRESHOLDS), strict=False):
            entry = code_name(name) if dtype == INT8 else name
            if values.get(entry) is None:
                continue
            threshold = getattr(values["c"], number)
            if dtype != INT8:
                new[name] = formats.randomly_rounded(new[name], formats.parts_in(threshold, 24), dtype)
                continue
            new[scale_name(name)] = scale = formats.scale_of(new[name])
            new[entry] = formats.encoded(new.pop(name), scale, signs[name], threshold)
        return {**new, "step": 0.0}

    check_state, state_of = functools.partial(_check_state_dtype, rule), functools.partial(_state_dtypes, rule)
    options = (
        Option(None, of=_weights, valid=_check_weights, suits=_suits_weights, name="weights"),
        Option(False, optional=True, name="kahan_sum"),
        Option(None, of=state_of, valid=check_state, suits=_suits_state, name="state_dtype"),
        Option((), valid=check_patterns, patterns=True, name="exclude"),
        Option(0, valid=_check_seed, name="rounding_seed"),
    )
    return rule.seeing(
        opened,
        options=(*rule.options, *options),
        buffers=(*(b for b in buffers if not b.grouped), *_PARTS, *(b for b in buffers if b.grouped)),
        coefficients=coefficients,
        update=update,
        indexed=lambda choices: _mode(choices) == "stochastic",
    )


def joined(param: Any, parts: Mapping[str, Any], mode: str, dtype: str) -> Any:
    """Return the float32 of a parameter that is stored in ``mode`` with its ``parts``, by name."""
    if mode == "kahan":
        return formats.compensated(param, parts["kahan_comp"], dtype)
    if mode in REMAINDER_BITS:
        return formats.joined(param, parts["remainder"], dtype, REMAINDER_BITS[mode])
    if mode == "master":  # unless other code wrote into the parameter since
        return where(formats.nearest(parts["master_param"], dtype) == param, parts["master_param"], param)
    return param


def parts_of(value: Any, values: Mapping[str, Any], mode: str, dtype: str) -> dict[str, Any]:
    """Split a parameter's float32 ``value`` as ``mode`` stores it: into ``param``, as a float32, and parts, by name.

    ``values`` are the arguments of ``update``; without them the parts are rounded to nearest. A step rounds a remainder of
    few bits by a threshold of the step and the tensor, the same for all elements: rounded to nearest, steps of little more
    than its unit would all be too small, or too large.
    """
    if mode == "stochastic":
        return {"param": formats.randomly_rounded(value, formats.noise_of(values["c"].noise, values[INDEX]), dtype)}
    noise = formats.parts_in(getattr(values["c"], _PART_THRESHOLD), 24) if mode in ROUNDED and values else None
    if mode in REMAINDER_BITS:
        param, remainder = formats.split(value, dtype, REMAINDER_BITS[mode], noise)
        return {"param": param, "remainder": remainder}
    param = formats.nearest(value, dtype)
    if mode == "master":
        return {"param": param, "master_param": value}
    comp = value - param
    return {"param": param, "kahan_comp": comp if noise is None else formats.randomly_rounded(comp, noise, dtype)}


def parts_beside(param: Any, value: Any, mode: str, dtype: str) -> dict[str, Any]:
    """Return the parts, by name, that make the unchanged ``param`` stand for ``value`` in ``mode``; both float32.

    They equal those of :func:`parts_of` if that gives the same ``param``. If ``value`` is more than half a unit of ``param``
    away, a remainder and a copy in float32 hold as much of it as they can, and a compensation is not read.
    """
    if mode in REMAINDER_BITS:
        return {"remainder": formats.remainder_beside(value, param, dtype, REMAINDER_BITS[mode])}
    if mode == "master":
        return {"master_param": formats.copy_beside(value, param, dtype)}
    return {"kahan_comp": where((value - value == 0) & (param - param == 0), value - param, 0.0)} if mode == "kahan" else {}


def _suits_weights(value: Any, param: Tensor) -> bool:
    return value == AUTO or (param.dtype in HALVES and (value == "master" or param.numel() >= MINIMUM))


def _suits_state(value: Any, param: Tensor) -> bool:
    return value == torch.float32 or param.numel() >= MINIMUM


def _check_weights(value: Any, what: str) -> None:
    if value is not None and value not in get_args(Weights):
        near = hint(value, get_args(Weights)) if isinstance(value, str) else ""
        raise ValueError(f"{what} must be None or one of {', '.join(map(repr, get_args(Weights)))}, got {value!r}{near}")


def _check_seed(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number, got {value!r}")
    if not 0 <= value < 1 << 24:
        raise ValueError(f"{what} must be >= 0 and < 2**24, got {value!r}")


def _check_state_dtype(rule: Rule, value: Any, what: str) -> None:
    """Raise ``ValueError`` where the buffers of ``rule`` cannot have this ``state_dtype``; warn of a bad mixture."""
    signs = {b.name: b.int8 for b in rule.buffers}
    averages = [name for name, sign in signs.items() if sign]
    by_name = isinstance(value, Mapping)
    chosen: Mapping[str, Any] = value if by_name else dict.fromkeys(averages or signs, value)
    for name, dtype in chosen.items():
        where = f"{what}[{name!r}]" if by_name else what
        if name not in signs:
            raise ValueError(f"{where}: {rule.name} has no buffer of this name; it has {', '.join(signs) or 'none'}")
        if dtype is None or dtype in _STATE_DTYPES:
            continue
        if dtype != INT8:
            kinds = ", ".join(str(d) for d in _STATE_DTYPES)
            raise ValueError(f"{where} must be one of {kinds}, or 'int8' for 8-bit codes with scales, got {dtype!r}")
        if not signs[name]:
            raise ValueError(
                f"{where}: 8 bits are too few for '{name}' of {rule.name}, a sum or a value that steps subtract; "
                "choose torch.bfloat16 or torch.float32 for it"
            )
    if not by_name:
        if value in (INT8, *HALVES) and not averages:
            raise ValueError(f"{what}={value!r}: {rule.name} has no moving averages; choose dtypes by state name, in a dict")
        return
    # With both in codes, an element's square is not 0 where its average is not. Otherwise a small element beside large ones
    # has an average of 0, and in some steps one of a whole code, which is divided by its own small root: many ``lr``.
    present = [b.name for b in rule.buffers if b.when is None or b.name in chosen]
    coded = [name for name in present if signs[name] == "signed" and chosen.get(name) == INT8]
    wide = [name for name in present if signs[name] == "unsigned" and chosen.get(name) != INT8]
    if coded and wide:
        warnings.warn(
            f"state_dtype: with 'int8' for '{coded[0]}' and more bits for '{wide[0]}', by which steps are divided, elements "
            "with small gradients beside large ones may take steps of many lr; choose 'int8' for both, or torch.bfloat16",
            UserWarning,
            stacklevel=2,
        )


def _is_excluded(group: Mapping[str, Any], is_matched: _Matcher, param: Tensor) -> bool:
    return is_matched(group.get("exclude") or ()) or param.numel() < MINIMUM


def _weights(group: Mapping[str, Any], is_matched: _Matcher, param: Tensor, where: str) -> tuple[str, str] | None:
    mode, kahan_sum = group.get("weights"), group.get("kahan_sum", False)
    may_be_none = mode in (None, AUTO)  # for parameters of other dtypes
    if not may_be_none and mode != "kahan" and kahan_sum is not False:
        raise ValueError(f"kahan_sum={kahan_sum} of {where} does not go with weights={mode!r}")
    half = HALVES.get(param.dtype)
    if (mode is None and kahan_sum is False) or (may_be_none and half is None):
        return None
    if group.get("differentiable"):
        raise ValueError(f"weights={mode or 'kahan'!r} of {where} does not go with differentiable=True")
    if _is_excluded(group, is_matched, param):
        return None if half is None else ("master", half)
    if half is None:
        reason = "is for parameters in bfloat16 or float16"
        raise ValueError(f"weights={mode!r} {reason}; {where} is {param.dtype}: name it in exclude=")
    return ("kahan" if mode is None or mode == AUTO else mode), half


def _state_dtypes(
    rule: Rule, group: Mapping[str, Any], is_matched: _Matcher, param: Tensor, where: str
) -> tuple[tuple[str, str], ...] | None:
    chosen = group.get("state_dtype")
    if chosen is None:
        if _weights(group, is_matched, param, where) is None or not _is_excluded(group, is_matched, param):
            return None
        chosen = torch.float32
    if not isinstance(chosen, Mapping):
        is_low = chosen in (INT8, *HALVES)  # too few bits for anything but averages
        chosen = {b.name: chosen if b.int8 or not is_low else None for b in rule.buffers}
    full = torch.float32 if param.dtype in HALVES else param.dtype
    if is_excluded := _is_excluded(group, is_matched, param):
        chosen = {b.name: full for b in rule.buffers}
    elif group.get("differentiable"):
        raise ValueError(f"state_dtype of {where} does not go with differentiable=True")
    elif param.is_complex():
        raise ValueError(f"state_dtype is for real parameters; {where} is {param.dtype}: name it in exclude=")
    elif INT8 in chosen.values() and param.dtype == torch.float64:
        raise ValueError(f"state_dtype='int8' is not for parameters in float64; {where} is one: name it in exclude=")
    dtypes = {b: full if dtype is None else dtype for b, dtype in chosen.items()}
    named = {b: INT8 if dtype == INT8 else str(dtype).removeprefix("torch.") for b, dtype in dtypes.items()}
    if is_excluded and full == param.dtype:  # updated with those of groups that choose nothing
        return None
    return tuple((b.name, named[b.name]) for b in rule.buffers if b.name in named) or None
