"""State for the optimizers of optimi."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.optimi import BETAS, DEBIASED
from compiled_optim.checkpoint.read import as_number, described, foreign_state
from compiled_optim.groups.parameters import parameter_name, parameters_of
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.rule import Declaration
from compiled_optim.rule.storage import PARTS, code_name
from compiled_optim.rule.transforms import DECOUPLED
from compiled_optim.state import converted, part_of, structure

_COUNTERPARTS = ("SGD", "Adam", "AdamW", "RAdam", "Lion", "Adan", "StableAdamW", "Ranger")

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
_WITHOUT_EFFECT = ("foreach", "capturable", "differentiable", "fused", "params", "param_names")


def optimi_state_dict(optimizer: CompiledOptimizer) -> dict[str, Any]:
    """A state dict that optimi's optimizer of the same name loads, with which it goes on as ``optimizer`` does.

    For SGD, Adam, AdamW, RAdam, Lion, Adan, StableAdamW and Ranger of optimi 0.3. Its tensors are copies, which optimi can
    write into. optimi's plain loops then run, with the choices that are saved here and not those of its constructor. Loading
    goes the other way without a call: :meth:`CompiledOptimizer.load_state_dict` takes what optimi saves.

    Codes of 8 bits become numbers, and what a weight's own dtype cannot hold becomes ``kahan_comp``, in that dtype. What is
    not part of a group, such as ``max_grad_norm``, does not go along. RAdam's ``eps`` means something else in optimi
    for as long as its second bias correction is not 1: there it is added to the corrected root.

    Raises:
        ValueError: optimi has no such optimizer or option, or it cannot count as here: the parameters of a group took
            different numbers of steps where it counts them; or ``weights`` are rounded at random.
    """
    kind, declaration = type(optimizer), optimizer._declaration
    update = getattr(kind, "update", kind)
    is_theirs = update.__module__.startswith("compiled_optim.") and update.__qualname__.partition(".")[0] in _COUNTERPARTS
    if not is_theirs or not _has_counterpart(declaration):
        raise ValueError(f"optimi has no {kind.__name__}")
    saved = optimizer.state_dict()
    groups = engine_of(optimizer).distinct_groups
    for index, group in enumerate(groups):
        if isinstance(scale := group.get("lr_scale"), Mapping) or callable(scale):  # no state dict holds it
            raise ValueError(f"param_groups[{index}] has 'lr_scale', which has no counterpart in optimi")
        if group.get("weights") == "stochastic":
            raise ValueError(f"param_groups[{index}] has weights='stochastic', which has no counterpart in optimi")
        keys = saved["param_groups"][index]["params"]
        for param, place in parameters_of(group).items():
            if entries := saved["state"].get(keys[place]):
                choices = structure(declaration, groups, index, place)
                saved["state"][keys[place]] = _in_optimis_storage(declaration, param, entries, choices)
    return to_optimi(saved)


def _has_counterpart(declaration: Declaration) -> bool:
    """Whether optimi has an optimizer with the options and the state of ``declaration``."""
    form, hypers = _form({f.name for f in (*declaration.hypers, *declaration.statics)}), {h.name for h in declaration.hypers}
    if form is None or declaration.scalars or hypers - {"max_lr"} != {"lr", "weight_decay", *form} - {"adam_wd"}:
        return False
    codes = {code_name(b.name) for b in declaration.buffers}
    buffers = {b.name for b in declaration.buffers if not b.grouped and b.name not in PARTS}
    return buffers - codes - {"max_exp_avg_sq"} == set(_FORMS[form])


@torch.no_grad()
def _in_optimis_storage(
    declaration: Declaration, param: Tensor, entries: Mapping[str, Any], choices: Mapping[str, Any]
) -> dict[str, Any]:
    """``entries``, a parameter's state, with ``kahan_comp`` in place of another part of the weight, and without codes."""
    weights = None if part_of(choices) is None else ("kahan", choices["weights"][1])
    stored = {b.name: entries[b.name] for b in declaration.buffers if entries.get(b.name) is not None}
    changes = converted(declaration, param, stored, {**choices, "weights": weights, "state_dtype": ()})
    return {name: value for name, value in {**entries, **changes}.items() if value is not None or name not in changes}


def to_optimi(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`from_optimi`: an indexed state dict that optimi's optimizer of the same name loads.

    It shares no memory with ``state_dict``, which has the indexed form, buffers in floating point, and compensations as the
    only parts of weights.

    Raises:
        ValueError: an option or a state entry has no counterpart there.
    """
    if foreign := foreign_state(state_dict):
        raise ValueError(f"the state holds {min(foreign, key=str)!r}, which is no parameter's and has no place in optimi")
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"param_groups[{i}]"
        names = {param: parameter_name(group, i, j) for j, param in enumerate(group["params"])}
        entries = {param: found for param in names if (found := state_dict["state"].get(param))}
        form = _checked_form(group, {name for found in entries.values() for name in found}, where)
        steps = {names[param]: found.get("step") for param, found in entries.items()}
        step = _common_step(steps, where) if "eps" in form else 1  # an optimizer without eps counts no steps
        groups.append(_optimi_group(group, form, step, where))
        groups[-1]["kahan_sum"] = any(found.get("kahan_comp") is not None for found in entries.values())
        for param, found in entries.items():
            if step and _integer(found.get("step", 1), f"the step of '{names[param]}'"):
                state[param] = _optimi_state(found, form, groups[-1], step, f"the state of '{names[param]}'")
    return {"state": {param: found for param, found in state.items() if found}, "param_groups": groups}


def _form(options: Collection[str]) -> frozenset[str] | None:
    """The one of :data:`_FORMS` that has most in common with ``options``; None if all have nothing."""
    common = {form: len(form.intersection(options)) - len(form.difference(options)) for form in _FORMS}
    return max((form for form in _FORMS if form.intersection(options)), key=lambda form: common[form], default=None)


def _checked_form(group: Mapping[str, Any], entries: set[Any], where: str) -> frozenset[str]:
    """The form of ``group``.

    Raises:
        ValueError: an option that the form needs is missing; or optimi does not know another option of this package, or one
            of ``entries``, the names in the states of its parameters.
    """
    ours = group.keys() & (Declared._every_option_name | {"maximize"})
    if (form := _form(ours)) is None:
        raise ValueError(f"optimi has no optimizer with {', '.join(sorted(ours))}, which {where} has")
    chosen = {key for key in ours if key not in _WITHOUT_EFFECT and (isinstance(group[key], Tensor) or group[key])}
    unknown = (chosen - form - _SHARED - _STORAGE) | (entries - {"step", "kahan_comp", *_FORMS[form]})
    if unknown:
        raise ValueError(f"{where} has {', '.join(sorted(map(described, unknown)))}, which has no counterpart in optimi")
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


def _common_step(steps: Mapping[str, Any], where: str) -> int:
    """The step count of a group of parameters with these ``steps``, by name."""
    counts = {name: _integer(step, f"the step of '{name}'") for name, step in steps.items()}
    first = next(iter(counts), "")
    if other := next((name for name in counts if counts[name] != counts[first]), None):
        raise ValueError(
            f"the parameters of {where} took different numbers of steps, '{first}' {counts[first]} and '{other}' "
            f"{counts[other]}; optimi counts per group"
        )
    return counts.get(first, 0)


def _optimi_group(group: Mapping[str, Any], form: frozenset[str], step: int, where: str) -> dict[str, Any]:
    """``group`` with optimi's options; others than this package's, such as a scheduler's, go along."""
    numbers = {
        k: _number(group[k], f"{k} of {where}") for k in ("lr", "weight_decay", *(form & {"eps", "alpha", "momentum"}))
    }
    options: dict[str, Any] = {**dict.fromkeys(("foreach", "triton", "gradient_release"), False), "setup": step > 0}
    options |= numbers
    if "eps" in form:
        options["step"] = torch.tensor(step, dtype=torch.int32)
    if "betas" in form:
        betas, count = group["betas"], 3 if "adam_wd" in form else 2
        if not isinstance(betas, (list, tuple)) or len(betas) != count:
            raise ValueError(f"{where}['betas'] must be {count} numbers, got {betas!r}")
        options |= {name: _number(b, f"a beta of {where}", below=1) for name, b in zip(BETAS, betas, strict=False)}
    if "k" in form:
        options["k"] = _integer(group["k"], f"k of {where}")
    if "adam_wd" in form:
        options["adam_wd"] = False
    if "dampening" in form:
        momentum, dampening = numbers["momentum"], as_number(group["dampening"], f"dampening of {where}")
        if momentum and dampening not in (0.0, momentum):
            raise ValueError(f"{where} has dampening {dampening}; optimi knows 0 and the momentum")
        options["dampening"] = options["torch_init"] = momentum != 0 and dampening != 0
    options["decouple_lr"] = bool(group.get("decouple_lr"))
    options["max_lr"] = None if group.get("max_lr") is None else _number(group["max_lr"], f"max_lr of {where}")
    if "dampening" in form or any(key in group for key in DECOUPLED):
        options["decouple_wd"] = any(bool(group.get(key)) for key in DECOUPLED)
    ours = Declared._every_option_name | {"maximize", *_WITHOUT_EFFECT}
    foreign = {key: value for key, value in group.items() if key not in ours}
    names = {"param_names": list(group["param_names"])} if group.get("param_names") else {}
    return {**foreign, **options, "params": list(group["params"]), **names}


def _optimi_state(
    entries: Mapping[str, Any], form: frozenset[str], group: Mapping[str, Any], step: int, where: str
) -> dict[str, Any]:
    """The state that optimi keeps for ``entries``; none where it would make it anew."""
    found = {name: entries[name] for name in _FORMS[form] if entries.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, Tensor) or (value.is_complex() and "betas" in form):
            got = "complex" if isinstance(value, Tensor) else described(value)
            raise ValueError(f"the {name} in {where} is {got}, which optimi cannot use")
    comp = entries.get("kahan_comp")
    compensation = {"kahan_comp": None if comp is None else comp.clone()}
    if "momentum" in form:
        buffer = found["momentum_buffer"].clone() if found else None
        return {} if buffer is None and comp is None else {"exp_avg": buffer, **compensation}
    if missing := [name for name in _FORMS[form] if name not in found]:
        raise ValueError(f"{where} has no {', '.join(missing)}, which optimi needs")
    betas = [group[name] for name in BETAS if name in group]
    scales = {"prev_grad": -1.0}
    if "eps" in form:
        scales |= {name: 1 - beta**step for name, beta in zip(DEBIASED[len(betas)], betas, strict=True)}
    result = {name: value / scales[name] if name in scales else value.clone() for name, value in found.items()}
    if form == {"betas", "eps"} and "decouple_wd" not in group:
        like = found["exp_avg"]
        result["eps_sq"] = torch.tensor(group["eps"] ** 2, dtype=like.dtype, device=like.device)
    return {**result, **compensation}


def _number(value: Any, what: str, below: float = float("inf")) -> float:
    """``value``, called ``what``, as a float that is at least 0 and less than ``below``."""
    number = as_number(value, what, finite=False)
    if not 0 <= number < below:
        raise ValueError(f"{what} must be a number in [0, {below}), got {number}")
    return number


def _integer(value: Any, what: str) -> int:
    number = _number(value, what, below=2**31)
    if not number.is_integer():
        raise ValueError(f"{what} must be a whole number, got {number}; optimi knows no others")
    return int(number)
