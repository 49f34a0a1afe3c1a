"""Reading the checkpoints of optimi.

They have the indexed form with another meaning: steps are counted per group, averages are divided by their bias correction,
and an optimizer without betas calls its momentum ``exp_avg``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiled_optim.checkpoint.forms import beside_parameters, with_others
from compiled_optim.checkpoint.saved_values import Unloadable, as_number, as_tensor, described, naming

STATE = ("exp_avg", "exp_avg_sq", "kahan_comp")  # of a parameter, besides its step count
_MARKS = {"setup", "gradient_release", "kahan_sum"}
_OPTIONS = {*_MARKS, "triton", "foreach", "torch_init", "decouple_lr", "decouple_wd", "max_lr", "step", "beta1", "beta2"}


def is_optimi(state_dict: Mapping[str, Any]) -> bool:
    """Whether an optimizer of optimi saved ``state_dict``."""
    return any(set(group) >= _MARKS for group in state_dict["param_groups"])


def from_optimi(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of optimi with this package's names and meaning.

    What has no counterpart here, or is not what optimi saves, is :class:`Unloadable`.
    """
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"param_groups[{i}] of the optimi checkpoint"
        with naming(where):
            betas = tuple(as_number(group[name], f"{name} of {where}") for name in ("beta1", "beta2") if name in group)
            groups.append(_group(group, betas, where))
            for param in group["params"]:
                if param in state_dict["state"]:
                    state[param] = _param_state(state_dict["state"][param], group, betas, where)
    return {"state": with_others(state, beside_parameters(state_dict)), "param_groups": groups}


def _group(group: Mapping[str, Any], betas: tuple[float, ...], where: str) -> dict[str, Any]:
    values = {key: value for key, value in group.items() if key not in _OPTIONS}
    decoupled = _is_set(group, "decouple_wd", where)
    if _is_set(group, "decouple_lr", where):
        raise Unloadable(f"{where} has decouple_lr=True, which has no counterpart here")
    if betas:
        return values | {"betas": betas, "decoupled_weight_decay": decoupled}
    if decoupled:
        raise Unloadable(f"{where} has decouple_wd=True, which has no counterpart here")
    if "dampening" in group:
        values["dampening"] = group.get("momentum", 0.0) if _is_set(group, "dampening", where) else 0.0
    return values


def _is_set(group: Mapping[str, Any], option: str, where: str) -> bool:
    value = group.get(option)
    return value is not None and as_number(value, f"{option} of {where}") != 0


def _param_state(saved: Mapping[str, Any], group: Mapping[str, Any], betas: tuple[float, ...], where: str) -> dict[str, Any]:
    kept = {k: v for k, v in saved.items() if v is not None and k not in ("step", "group")}
    if not _is_set(group, "kahan_sum", where):
        kept.pop("kahan_comp", None)  # a placeholder for optimi's Triton kernels
    if foreign := [k for k in kept if k not in STATE]:
        raise Unloadable(f"{where} has state {', '.join(map(described, foreign))}, which has no counterpart here")
    if (step := saved.get("step", group.get("step"))) is None:
        return {"momentum_buffer" if k == "exp_avg" and not betas else k: v for k, v in kept.items()}
    count = as_number(step, f"step of {where}")
    for name, beta in zip(("exp_avg", "exp_avg_sq"), betas, strict=True):
        if name in kept:
            kept[name] = as_tensor(kept[name], f"{name} of {where}") * (1 - beta**count)
    return {"step": count, **kept}
