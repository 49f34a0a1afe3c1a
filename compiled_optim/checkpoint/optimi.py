"""The checkpoints of optimi, read and written.

They have the indexed form with another meaning: steps are counted per group, averages are divided by their bias correction,
and an optimizer without betas calls its momentum ``exp_avg``. Lion and SGD count no steps and divide nothing. Adan keeps the
last gradient negated, and StableAdamW a copy of its ``eps``. Its ``kahan_comp`` is ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.read import (
    Unloadable,
    as_number,
    as_tensor,
    described,
    foreign_state,
    is_set,
    naming,
    with_foreign,
)
from compiled_optim.groups.parameters import parameter_name
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.rule import Declaration
from compiled_optim.rule.storage import PARTS, code_name
from compiled_optim.rule.transforms import DECOUPLED

STATE = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "prev_grad", "la_param", "kahan_comp")  # of a parameter, besides its step
_MARKS = {"setup", "gradient_release", "kahan_sum"}
_BETAS = ("beta1", "beta2", "beta3")
_OPTIONS = {*_MARKS, *_BETAS, "triton", "foreach", "torch_init", "decouple_lr", "decouple_wd", "max_lr", "step"}
_DEBIASED = {2: ("exp_avg", "exp_avg_sq"), 3: ("exp_avg", "exp_avg_diff", "exp_avg_sq")}  # by the number of betas

_FORMS: dict[frozenset[str], tuple[str, ...]] = {
    frozenset({"momentum", "dampening"}): ("momentum_buffer",),
    frozenset({"betas"}): ("exp_avg",),
    frozenset({"betas", "eps"}): ("exp_avg", "exp_avg_sq"),
    frozenset({"betas", "eps", "k", "alpha"}): ("exp_avg", "exp_avg_sq", "la_param"),
    frozenset({"betas", "eps", "adam_wd"}): ("exp_avg", "exp_avg_diff", "exp_avg_sq", "prev_grad"),
}
"""The buffers of the optimizers that optimi has, by the options that groups of each hold besides :data:`_SHARED`."""

_SHARED = {"lr", "weight_decay", *DECOUPLED, "decouple_lr", "max_lr"}
_STORAGE = {"weights", "kahan_sum", "state_dtype", "exclude", "rounding_seed"}  # which optimi has in other ways, or not
_COMPENSATION = "kahan_comp"
_WITHOUT_EFFECT = ("foreach", "capturable", "differentiable", "fused", "params", "param_names")
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("decouple_lr", "kahan_sum", "foreach", "triton", "gradient_release"), False),
    "max_lr": None,
}


def is_optimi(state_dict: Mapping[str, Any]) -> bool:
    """Whether an optimizer of optimi saved ``state_dict``."""
    return any(set(group) >= _MARKS for group in state_dict["param_groups"])


def from_optimi(state_dict: Mapping[str, Any], declaration: Declaration | None = None) -> dict[str, Any]:
    """A state dict of optimi with this package's names and meaning, for the optimizer of ``declaration``, or for any.

    A parameter without state starts anew, where optimi would count it as old as its group. What has no counterpart here, or
    is not what optimi saves, is :class:`Unloadable`.
    """
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    chooses_decay = declaration is not None and any(s.name in DECOUPLED for s in declaration.statics)
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"param_groups[{i}] of the optimi checkpoint"
        with naming(where):
            betas = tuple(as_number(group[name], f"{name} of {where}") for name in _BETAS if name in group)
            groups.append(_group(group, betas, where))
            for param in group["params"]:
                if param in state_dict["state"]:
                    own = {k: v for k, v in state_dict["state"][param].items() if v is not None and k != "group"}
                    if not chooses_decay:  # as StableAdamW, whose state would fit those that do
                        own = {k: v for k, v in own.items() if k not in ("eps_sq", "mean_square")}
                    state[param] = _param_state(own, group, betas, where)
    return {"state": with_foreign(state, foreign_state(state_dict)), "param_groups": groups}


def _group(group: Mapping[str, Any], betas: tuple[float, ...], where: str) -> dict[str, Any]:
    values = {key: value for key, value in group.items() if key not in _OPTIONS}
    by_lr = is_set(group, "decouple_lr", where)
    values |= {"decouple_lr": True} if by_lr else {}
    values |= {"max_lr": group["max_lr"]} if group.get("max_lr") is not None else {}
    if "decouple_wd" in group:
        name = "decoupled_weight_decay" if betas and "k" not in group else "decouple_wd"
        values[name] = by_lr or is_set(group, "decouple_wd", where)
    if betas:
        return values | {"betas": betas}
    if "dampening" in group:
        values["dampening"] = group.get("momentum", 0.0) if is_set(group, "dampening", where) else 0.0
    return values


def _param_state(saved: Mapping[str, Any], group: Mapping[str, Any], betas: tuple[float, ...], where: str) -> dict[str, Any]:
    kept = {key: value for key, value in saved.items() if key != "step"}
    compensation = kept.get("kahan_comp")
    is_compensated = is_set(group, "kahan_sum", where) and getattr(compensation, "itemsize", 2) == 2
    if not is_compensated or getattr(compensation, "dtype", None) == torch.uint8:
        kept.pop("kahan_comp", None)  # a placeholder for optimi's Triton kernels
    if foreign := [k for k in kept if k not in STATE]:
        raise Unloadable(f"{where} has state {', '.join(map(described, foreign))}, which has no counterpart here")
    if not kept:
        return {}
    if (step := saved.get("step", group.get("step"))) is None:
        return {"step": 1.0, **{"momentum_buffer" if k == "exp_avg" and not betas else k: v for k, v in kept.items()}}
    count = as_number(step, f"step of {where}")
    for name, beta in zip(_DEBIASED[len(betas)], betas, strict=True):
        if name in kept:
            kept[name] = as_tensor(kept[name], f"{name} of {where}") * (1 - beta**count)
    if "prev_grad" in kept:
        kept["prev_grad"] = -as_tensor(kept["prev_grad"], f"prev_grad of {where}")
    return {"step": count, **kept}


def has_counterpart(declaration: Declaration) -> bool:
    """Whether optimi has an optimizer with the options and the state of ``declaration``."""
    form, hypers = _form({f.name for f in (*declaration.hypers, *declaration.statics)}), {h.name for h in declaration.hypers}
    if form is None or declaration.scalars or hypers - {"max_lr"} != {"lr", "weight_decay", *form} - {"adam_wd"}:
        return False
    codes = {code_name(b.name) for b in declaration.buffers}
    buffers = {b.name for b in declaration.buffers if not b.grouped and b.name not in PARTS}
    return buffers - codes - {"max_exp_avg_sq"} == set(_FORMS[form])


def to_optimi(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`from_optimi`: an indexed state dict that optimi's optimizer of the same name loads.

    It shares no memory with ``state_dict``, which has the indexed form, buffers in floating point, and compensations as the
    only parts of weights.

    Raises:
        ValueError: an option or a state entry has no counterpart there.
    """
    if apart := foreign_state(state_dict):
        raise ValueError(f"the state holds {min(apart, key=str)!r}, which is no parameter's and has no place in optimi")
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"param_groups[{i}]"
        names = {p: parameter_name(group, i, j) for j, p in enumerate(group["params"])}
        entries = {p: dict(own) for p in names if (own := state_dict["state"].get(p))}
        form = _checked_form(group, {entry for own in entries.values() for entry in own}, where)
        step = _common_step({names[p]: own for p, own in entries.items()}, "eps" in form, where)
        groups.append(_optimi_group(group, form, step, where))
        groups[-1]["kahan_sum"] = any(own.get(_COMPENSATION) is not None for own in entries.values())
        for param, own in entries.items():
            if step and _whole(own.get("step", 1), f"the step of '{names[param]}'"):
                state[param] = _optimi_state(own, form, groups[-1], step, f"the state of '{names[param]}'")
    return {"state": {param: own for param, own in state.items() if own}, "param_groups": groups}


def _form(options: Collection[str]) -> frozenset[str] | None:
    """The one of :data:`_FORMS` that has most in common with ``options``; None if all have nothing."""
    common = {form: len(form.intersection(options)) - len(form.difference(options)) for form in _FORMS}
    return max((form for form in _FORMS if form.intersection(options)), key=lambda form: common[form], default=None)


def _checked_form(group: Mapping[str, Any], entries: set[Any], where: str) -> frozenset[str]:
    """The form of ``group``; ``ValueError`` for an option that it needs and lacks, and what optimi does not know.

    That is an option of another optimizer here, or one of the ``entries`` of its parameters' states.
    """
    ours = group.keys() & (Declared._every_option_name | {"maximize"})
    if (form := _form(ours)) is None:
        raise ValueError(f"optimi has no optimizer with {', '.join(sorted(ours))}, which {where} has")
    chosen = {key for key in ours if key not in _WITHOUT_EFFECT and (isinstance(group[key], Tensor) or group[key])}
    known = {"step", _COMPENSATION, *_FORMS[form]}
    if foreign := sorted(map(described, (chosen - form - _SHARED - _STORAGE) | (entries - known))):
        raise ValueError(f"{where} has {', '.join(foreign)}, which has no counterpart in optimi")
    if missing := [key for key in ("lr", "weight_decay", *sorted(form)) if key not in group]:
        raise ValueError(f"{where} has no {', '.join(missing)}, which optimi needs")
    if group.get("adam_wd") and group["weight_decay"]:
        raise ValueError(f"{where} has adam_wd=True, which has no effect in optimi; with weight_decay=0 it has none here")
    if group.get("decouple_lr") and group.get("decouple_wd") is False and not group.get("decoupled_weight_decay"):
        raise ValueError(
            f"{where} has decouple_lr=True with decouple_wd=False; optimi decouples decay from the gradient too"
        )
    if group.get("decouple_lr") and group["weight_decay"] and not group.get("max_lr"):
        raise ValueError(f"{where} has max_lr={group.get('max_lr')}, by which optimi divides")
    return form


def _common_step(entries: Mapping[str, Mapping[str, Any]], counts: bool, where: str) -> int:
    """The step count of a group with ``entries`` by name. An optimizer of optimi that ``counts`` no steps has 1."""
    if not counts:
        return 1
    steps = {name: _whole(own.get("step"), f"the step of '{name}'") for name, own in entries.items()}
    first = next(iter(steps), "")
    if other := next((name for name in steps if steps[name] != steps[first]), None):
        raise ValueError(
            f"the parameters of {where} took different numbers of steps, '{first}' {steps[first]} and '{other}' "
            f"{steps[other]}; optimi counts per group"
        )
    return steps.get(first, 0)


def _optimi_group(group: Mapping[str, Any], form: frozenset[str], step: int, where: str) -> dict[str, Any]:
    """``group`` with optimi's options; others than this package's, such as a scheduler's, go along."""
    numbers = {
        k: _number(group[k], f"{k} of {where}") for k in ("lr", "weight_decay", *(form & {"eps", "alpha", "momentum"}))
    }
    options: dict[str, Any] = {"setup": step > 0, **_DEFAULTS, **numbers}
    if "eps" in form:
        options["step"] = torch.tensor(step, dtype=torch.int32)
    if "betas" in form:
        count = len(_FORMS[form]) if "adam_wd" in form else 2
        betas = group["betas"]
        if not isinstance(betas, (list, tuple)) or len(betas) != min(count, 3):
            raise ValueError(f"{where}['betas'] must be {min(count, 3)} numbers, got {betas!r}")
        options |= {name: _number(b, f"a beta of {where}", below=1) for name, b in zip(_BETAS, betas, strict=False)}
    if "k" in form:
        options["k"] = _whole(group["k"], f"k of {where}")
    if "adam_wd" in form:
        options["adam_wd"] = False
    if "dampening" in form:
        options |= _dampening(_number(group["dampening"], f"dampening of {where}", least=-float("inf")), numbers, where)
    options["decouple_lr"] = bool(group.get("decouple_lr"))
    options["max_lr"] = None if group.get("max_lr") is None else _number(group["max_lr"], f"max_lr of {where}")
    if "dampening" in form or any(key in group for key in DECOUPLED):
        options["decouple_wd"] = any(bool(group.get(key)) for key in DECOUPLED)
    own = Declared._every_option_name | {"maximize", *_WITHOUT_EFFECT}
    rest = {key: value for key, value in group.items() if key not in own and key != "params"}
    names = {"param_names": list(group["param_names"])} if group.get("param_names") else {}
    return {**rest, **options, "params": list(group["params"]), **names}


def _dampening(dampening: float, numbers: Mapping[str, float], where: str) -> dict[str, bool]:
    """Optimi's options for the part of each gradient that does not get into the momentum, but for the first."""
    momentum = numbers["momentum"]
    if momentum and dampening not in (0.0, momentum):
        raise ValueError(f"{where} has dampening {dampening}; optimi knows 0 and the momentum")
    is_average = momentum != 0 and dampening != 0
    return {"dampening": is_average, "torch_init": is_average}


def _optimi_state(
    entries: Mapping[str, Any], form: frozenset[str], group: Mapping[str, Any], step: int, where: str
) -> dict[str, Any]:
    """The state that optimi keeps for ``entries``; none where it would make it anew."""
    buffers = _FORMS[form]
    found = {name: entries[name] for name in buffers if entries.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, Tensor) or (value.is_complex() and "betas" in form):
            got = "complex" if isinstance(value, Tensor) else described(value)
            raise ValueError(f"the {name} in {where} is {got}, which optimi cannot use")
    comp = entries.get(_COMPENSATION)
    compensation = {_COMPENSATION: None if comp is None else comp.clone()}
    if "momentum" in form:
        buffer = found["momentum_buffer"].clone() if found else None
        return {} if buffer is None and comp is None else {"exp_avg": buffer, **compensation}
    if missing := [name for name in buffers if name not in found]:
        raise ValueError(f"{where} has no {', '.join(missing)}, which optimi needs")
    betas = [group[name] for name in _BETAS if name in group]
    scales = {name: 1 - beta**step for name, beta in zip(_DEBIASED[len(betas)], betas, strict=True)} if "eps" in form else {}
    scales |= {"prev_grad": -1.0}
    result = {name: value / scales[name] if name in scales else value.clone() for name, value in found.items()}
    if form == {"betas", "eps"} and "decouple_wd" not in group:
        like = found["exp_avg"]
        result["eps_sq"] = torch.tensor(group["eps"] ** 2, dtype=like.dtype, device=like.device)
    return {**result, **compensation}


def _number(value: Any, where: str, below: float = float("inf"), least: float = 0.0) -> float:
    """``value``, a number or a tensor with a single one, as a float that is at least ``least`` and less than ``below``."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(number, (int, float)) or not least <= number < below:
        raise ValueError(f"{where} must be a number in [{least}, {below}), got {described(value)}")
    return float(number)


def _whole(value: Any, where: str) -> int:
    number = _number(value, where, below=2**31)
    if not number.is_integer():
        raise ValueError(f"{where} must be a whole number, got {number}; optimi knows no others")
    return int(number)
