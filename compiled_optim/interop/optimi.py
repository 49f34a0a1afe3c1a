"""optimi: its optimizers and their state dicts, read and written.

The state dicts have the indexed form with another meaning: steps are counted per group, averages are divided by their bias
correction, and an optimizer without betas calls its momentum ``exp_avg``. Lion and SGD count no steps and divide nothing.
Adan keeps the last gradient negated, and StableAdamW a copy of its ``eps``. ``kahan_comp`` means the same as here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from compiled_optim.catalogue import IN_OPTIMI, every_optimizer, named
from compiled_optim.checkpoint.read import (
    OPTIMIS_MARKS,
    Checkpoint,
    Unloadable,
    as_number,
    as_tensor,
    described,
    is_optimis,
    is_set,
    naming,
)
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.parameters import parameter_names, parameters_of
from compiled_optim.interop.forms import indexed
from compiled_optim.interop.replace_files import Keep, in_memory
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.fields import LR_SCALE, is_per_parameter
from compiled_optim.rule.rule import Declaration
from compiled_optim.rule.transforms import DECOUPLED
from compiled_optim.state import StateForm

_BETAS = ("beta1", "beta2", "beta3")
_OPTIONS = {*OPTIMIS_MARKS, *_BETAS, "triton", "foreach", "torch_init", "decouple_lr", "decouple_wd", "max_lr", "step"}

_FORMS: dict[frozenset[str], tuple[str, ...]] = {
    frozenset({"momentum", "dampening"}): ("momentum_buffer",),
    frozenset({"betas"}): ("exp_avg",),
    frozenset({"betas", "eps"}): ("exp_avg", "exp_avg_sq"),
    frozenset({"betas", "eps", "k", "alpha"}): ("exp_avg", "exp_avg_sq", "la_param"),
    frozenset({"betas", "eps", "adam_wd"}): ("exp_avg", "exp_avg_diff", "exp_avg_sq", "prev_grad"),
}
"""The buffers of optimi's optimizers, by the options in their groups besides :data:`_SHARED`."""
_STATE = {"kahan_comp", *itertools.chain(*_FORMS.values())} - {"momentum_buffer"}  # optimi's state, besides step counts
_SHARED = {"lr", "weight_decay", *DECOUPLED, "decouple_lr", "max_lr"}
_STORAGE = {"weights", "kahan_sum", "state_dtype", "exclude", "rounding_seed"}  # that optimi lacks or stores otherwise
_WITHOUT_EFFECT = ("foreach", "capturable", "differentiable", "fused", "params", "param_names")


def _factors(betas: Sequence[float], step: float) -> dict[str, float]:
    """Return the factors that turn optimi's buffers after ``step`` steps into this package's, by name."""
    names = ("exp_avg", "exp_avg_sq") if len(betas) == 2 else ("exp_avg", "exp_avg_diff", "exp_avg_sq")
    return {name: 1 - beta**step for name, beta in zip(names, betas, strict=True)} | {"prev_grad": -1.0}


def matches(state_dict: Mapping[str, Any]) -> bool:
    """Return whether an optimizer of optimi saved ``state_dict``."""
    return is_optimis(state_dict["param_groups"])


def decode(state_dict: Mapping[str, Any], keep: Keep, *, lossy: bool) -> dict[str, Any]:
    """Convert optimi's state dict to this package's names and meaning."""
    return {**state_dict, **from_optimi(state_dict, keep=keep)}


def encode(state_dict: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    """Convert a state dict to optimi's, indexed. A group of Adam's must hold ``decoupled_weight_decay``."""
    for i, group in enumerate(state_dict["param_groups"]):
        if "amsgrad" in group and not group.keys() & {*DECOUPLED}:
            raise ValueError(
                f"param_groups[{i}] has decoupled_weight_decay=unknown: add it to the group, True for AdamW, False for Adam"
            )
    return to_optimi(indexed(state_dict), *every_optimizer(), keep=keep)


def from_optimi(
    state_dict: Mapping[str, Any], declaration: Declaration | None = None, keep: Keep = in_memory
) -> dict[str, Any]:
    """Translate a state dict of optimi to this package's names and meaning, for the optimizer of ``declaration`` or any.

    A parameter without state starts at step 0, where optimi would take the step of its group. New tensors go through
    ``keep``. :class:`Unloadable` is raised for entries without a counterpart here, or that optimi does not save.
    """
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    ignored = {"group"}  # an entry of gradient release
    if declaration is None or not any(s.name in DECOUPLED for s in declaration.statics):
        ignored |= {"eps_sq", "mean_square"}  # of StableAdamW; its other state would fit optimizers that choose their decay
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"param_groups[{i}] of the optimi checkpoint"
        with naming(where):
            betas = tuple(as_number(group[name], f"{name} of {where}") for name in _BETAS if name in group)
            groups.append(_read_group(group, betas, where))
            for param in [param for param in group["params"] if param in state_dict["state"]]:
                entries = {k: v for k, v in state_dict["state"][param].items() if v is not None and k not in ignored}
                state[param] = _keep_all(_read_state(entries, group, betas, where), keep)
    return {"state": state | Checkpoint.of(state_dict).foreign, "param_groups": groups}


def _keep_all(entries: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    return {name: keep(value) if isinstance(value, Tensor) else value for name, value in entries.items()}


def _read_group(group: Mapping[str, Any], betas: tuple[float, ...], where: str) -> dict[str, Any]:
    values = {key: value for key, value in group.items() if key not in _OPTIONS}
    values |= {"adam_wd": False} if "adam_wd" in group else {}  # ignored by optimi
    by_lr = is_set(group, "decouple_lr", where)
    values |= {"decouple_lr": True} if by_lr else {}
    values |= {"max_lr": group["max_lr"]} if group.get("max_lr") is not None else {}
    if "decouple_wd" in group:
        name = "decoupled_weight_decay" if betas and "k" not in group else "decouple_wd"
        values[name] = by_lr or is_set(group, "decouple_wd", where)
    if betas:
        values["betas"] = betas
    elif "dampening" in group:
        values["dampening"] = group.get("momentum", 0.0) if is_set(group, "dampening", where) else 0.0
    return values


def _read_state(entries: dict[str, Any], group: Mapping[str, Any], betas: tuple[float, ...], where: str) -> dict[str, Any]:
    step = entries.pop("step", group.get("step"))
    compensation = entries.get("kahan_comp")
    is_compensated = is_set(group, "kahan_sum", where) and getattr(compensation, "itemsize", 2) == 2
    if not is_compensated or getattr(compensation, "dtype", None) == torch.uint8:
        entries.pop("kahan_comp", None)  # a placeholder for optimi's Triton kernels
    if foreign := [name for name in entries if name not in _STATE]:
        raise Unloadable(f"{where} has state {', '.join(map(described, foreign))}, which has no counterpart here")
    if not entries:
        return {}
    if step is None:
        return {"step": 1.0, **{"momentum_buffer" if k == "exp_avg" and not betas else k: v for k, v in entries.items()}}
    count = as_number(step, f"step of {where}")
    factors = _factors(betas, count).items()
    scaled = {k: as_tensor(entries[k], f"{k} of {where}") * factor for k, factor in factors if k in entries}
    return {"step": count, **entries, **scaled}


def from_optimizer(
    optimizer: Any, source: type[Optimizer], packed: dict[str, Any]
) -> tuple[type[CompiledOptimizer], dict[str, Any]]:
    """Return the class that continues ``optimizer``, and the state dict ``packed`` of it, translated."""
    if optimizer.defaults["gradient_release"]:
        raise ValueError("gradient_release=True: hooks in the backward would go on calling the old optimizer")
    if optimizer.optimizer_accumulation:
        raise ValueError("optimizer_accumulation=True: a step of several micro-batches has not ended")
    kind = named(source.__name__)[1]
    translated = from_optimi(packed, kind._declaration)
    for group, old in zip(translated["param_groups"], packed["param_groups"], strict=True):
        group["kahan_sum"] = old["kahan_sum"]
    return kind, translated


def optimi_state_dict(optimizer: CompiledOptimizer) -> dict[str, Any]:
    """Return a state dict for optimi's optimizer of the same name, with which training continues as with ``optimizer``.

    For SGD, Adam, AdamW, RAdam, Lion, Adan, StableAdamW and Ranger of optimi 0.3. Its tensors are copies, which optimi can
    write into. optimi takes its options from this dict instead of its constructor's arguments, and runs its for-loop
    implementation. In the other direction, :meth:`CompiledOptimizer.load_state_dict` loads optimi's state dicts.

    8-bit codes are decoded. The bits that a weight's dtype lacks become ``kahan_comp``, in that dtype. ``max_grad_norm`` and
    other options outside of groups are not in it. optimi's RAdam adds ``eps`` after the second bias correction, and this
    package before it: the steps differ until that correction is 1.

    Raises:
        ValueError: optimi has no such optimizer or option; or ``weights`` is ``"stochastic"``; or the parameters of a group
            have different step counts, and optimi has one for the group.
    """
    saved = optimizer.state_dict()
    kind = type(optimizer)
    return to_optimi(_in_storage(kind, engine_of(optimizer).groups.distinct, saved), kind)


@torch.no_grad()
def _in_storage(kind: type[Declared], groups: Sequence[ParamGroup], saved: dict[str, Any]) -> dict[str, Any]:
    """Convert the state in ``saved``, of an optimizer of ``kind`` with these groups, to optimi's storage, and return it.

    Codes become numbers, and ``kahan_comp`` replaces other extra bits of weights.

    Raises:
        ValueError: optimi has no optimizer like ``kind``, or lacks an option of a group that state dicts do not hold.
    """
    declaration, update = kind._declaration, getattr(kind, "update", kind)
    hypers = {hyper.name for hyper in declaration.hypers}
    options = _form(hypers | {static.name for static in declaration.statics}) or frozenset()
    is_shared = update.__module__.startswith("compiled_optim.") and update.__qualname__.partition(".")[0] in IN_OPTIMI
    if not is_shared or hypers - {"max_lr"} != {"lr", "weight_decay", *options} - {"adam_wd"}:
        raise ValueError(f"optimi has no {kind.__name__}")
    for index, group in enumerate(groups):
        if (is_scaled := is_per_parameter(group.get(LR_SCALE))) or group.get("weights") == "stochastic":
            choice = "'lr_scale'" if is_scaled else "weights='stochastic'"
            raise ValueError(f"param_groups[{index}] has {choice}, which has no counterpart in optimi")
        keys, forms = saved["param_groups"][index]["params"], StateForm.of_group(declaration, groups, index)
        for i in parameters_of(group).values():
            if entries := saved["state"].get(keys[i]):
                form = forms(i)
                in_kahan = {"weights": form.split and ("kahan", form.split[2]), "state_dtype": ()}
                form = form._replace(choices={**form.choices, **in_kahan})
                present = {name: entry for name, entry in entries.items() if entry is not None}
                saved["state"][keys[i]] = form.converted(present)
    return saved


def to_optimi(state_dict: Mapping[str, Any], *kinds: type[Declared], keep: Keep = in_memory) -> dict[str, Any]:
    """Invert :func:`from_optimi`: return an indexed state dict that optimi's optimizer of the same name loads.

    It shares no memory with ``state_dict``, which an optimizer of one of ``kinds`` saved: in the indexed form, with buffers
    in floating point, and compensations as the only extra bits of weights.

    Raises:
        ValueError: an option or a state entry has no counterpart there.
    """
    Checkpoint.of(state_dict).refuse_foreign("optimi")
    state: dict[int, dict[str, Any]] = {}
    groups, keys = [], {"maximize", *(f.name for kind in kinds for f in kind._declaration.group_fields)} - {LR_SCALE}
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"param_groups[{i}]"
        names = dict(zip(group["params"], parameter_names(group, i), strict=True))
        entries = {param: saved for param in names if (saved := state_dict["state"].get(param))}
        form = _checked_form(group, keys, {name for saved in entries.values() for name in saved}, where)
        default = None if "eps" in form else 1  # an optimizer without eps counts no steps
        counts = {names[p]: _integer(s.get("step", default), f"the step of '{names[p]}'") for p, s in entries.items()}
        first = next(iter(counts), "")
        if default is None and (other := next((name for name in counts if counts[name] != counts[first]), None)):
            raise ValueError(
                f"the parameters of {where} took different numbers of steps, '{first}' {counts[first]} and '{other}' "
                f"{counts[other]}; optimi counts per group"
            )
        step = default or counts.get(first, 0)
        groups.append(_optimi_group(group, keys, form, step, where))
        groups[-1]["kahan_sum"] = any(saved.get("kahan_comp") is not None for saved in entries.values())
        for param, saved in entries.items():
            if counts[names[param]]:
                converted = _optimi_state(saved, form, groups[-1], step, f"the state of '{names[param]}'")
                state[param] = _keep_all(converted, keep)
    return {"state": {param: saved for param, saved in state.items() if saved}, "param_groups": groups}


def _form(options: Collection[str]) -> frozenset[str] | None:
    """Return the one of :data:`_FORMS` that has most in common with ``options``; None if none has any of them."""
    similar = [form for form in _FORMS if form.intersection(options)]
    return max(similar, key=lambda form: len(form.intersection(options)) - len(form.difference(options)), default=None)


def _checked_form(group: Mapping[str, Any], keys: set[str], entries: set[Any], where: str) -> frozenset[str]:
    """Return the form of ``group``, which may hold ``keys`` of this package.

    Raises:
        ValueError: an option that the form needs is missing; or optimi lacks another of ``keys``, or one of ``entries``,
            the names in the states of its parameters.
    """
    present = group.keys() & keys
    if (form := _form(present)) is None:
        raise ValueError(f"optimi has no optimizer with {', '.join(sorted(present))}, which {where} has")
    chosen = {key for key in present if isinstance(group[key], Tensor) or group[key]}
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


def _optimi_group(group: Mapping[str, Any], keys: set[str], form: frozenset[str], step: int, where: str) -> dict[str, Any]:
    """Return ``group`` with optimi's options, and all that are not this package's ``keys``, such as a scheduler's."""
    numbers = {
        k: _number(group[k], f"{k} of {where}") for k in ("lr", "weight_decay", *(form & {"eps", "alpha", "momentum"}))
    }
    options: dict[str, Any] = {**dict.fromkeys(("foreach", "triton", "gradient_release"), False), "setup": step > 0}
    options |= numbers
    if "eps" in form:
        options["step"] = torch.tensor(step, dtype=torch.int32, device="cpu")
    if "betas" in form:
        betas, count = group["betas"], 3 if "adam_wd" in form else 2
        if not isinstance(betas, (list, tuple)) or len(betas) != count:
            raise ValueError(f"{where}['betas'] must be {count} numbers, got {betas!r}")
        options |= {name: _number(b, f"a beta of {where}", below=1) for name, b in zip(_BETAS, betas, strict=False)}
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
    foreign = {key: value for key, value in group.items() if key not in keys and key not in _WITHOUT_EFFECT}
    names = {"param_names": list(group["param_names"])} if group.get("param_names") else {}
    return {**foreign, **options, "params": list(group["params"]), **names}


def _optimi_state(
    entries: Mapping[str, Any], form: frozenset[str], group: Mapping[str, Any], step: int, where: str
) -> dict[str, Any]:
    """Return the state that optimi keeps for ``entries``; an empty dict where optimi would initialize it."""
    buffers = {name: entries[name] for name in _FORMS[form] if entries.get(name) is not None}
    for name, value in buffers.items():
        if not isinstance(value, Tensor) or (value.is_complex() and "betas" in form):
            got = "complex" if isinstance(value, Tensor) else described(value)
            raise ValueError(f"the {name} in {where} is {got}, which optimi cannot use")
    comp = entries.get("kahan_comp")
    compensation = {"kahan_comp": None if comp is None else comp.clone()}
    if "momentum" in form:
        buffer = buffers["momentum_buffer"].clone() if buffers else None
        return {} if buffer is None and comp is None else {"exp_avg": buffer, **compensation}
    if missing := [name for name in _FORMS[form] if name not in buffers]:
        raise ValueError(f"{where} has no {', '.join(missing)}, which optimi needs")
    factors = _factors([group[name] for name in _BETAS if name in group], step) if "eps" in form else {}
    result = {name: value / factors[name] if name in factors else value.clone() for name, value in buffers.items()}
    if form == {"betas", "eps"} and "decouple_wd" not in group:
        like = buffers["exp_avg"]
        result["eps_sq"] = torch.tensor(group["eps"] ** 2, dtype=like.dtype, device=like.device)
    return {**result, **compensation}


def _number(value: Any, what: str, below: float = float("inf")) -> float:
    """Return ``value``, called ``what``, as a float that is at least 0 and less than ``below``."""
    number = as_number(value, what, finite=False)
    if not 0 <= number < below:
        raise ValueError(f"{what} must be a number in [0, {below}), got {number}")
    return number


def _integer(value: Any, what: str) -> int:
    number = _number(value, what, below=2**31)
    if not number.is_integer():
        raise ValueError(f"{what} must be a whole number, got {number}; optimi knows no others")
    return int(number)
