"""The checkpoints of optimi, read; :mod:`compiled_optim.optimi` writes them.

They have the indexed form with another meaning: steps are counted per group, averages are divided by their bias correction,
and an optimizer without betas calls its momentum ``exp_avg``. Lion and SGD count no steps and divide nothing. Adan keeps the
last gradient negated, and StableAdamW a copy of its ``eps``. Its ``kahan_comp`` is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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
from compiled_optim.rule.rule import Declaration
from compiled_optim.rule.transforms import DECOUPLED

STATE = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "prev_grad", "la_param", "kahan_comp")  # of a parameter, besides its step
BETAS = ("beta1", "beta2", "beta3")
DEBIASED = {2: ("exp_avg", "exp_avg_sq"), 3: ("exp_avg", "exp_avg_diff", "exp_avg_sq")}  # by the number of betas
_MARKS = {"setup", "gradient_release", "kahan_sum"}
_OPTIONS = {*_MARKS, *BETAS, "triton", "foreach", "torch_init", "decouple_lr", "decouple_wd", "max_lr", "step"}


def is_optimi(state_dict: Mapping[str, Any]) -> bool:
    """Whether an optimizer of optimi saved ``state_dict``."""
    return any([set(group) >= _MARKS for group in state_dict["param_groups"]])


def from_optimi(state_dict: Mapping[str, Any], declaration: Declaration | None = None) -> dict[str, Any]:
    """A state dict of optimi with this package's names and meaning, for the optimizer of ``declaration``, or for any.

    A parameter without state starts anew, where optimi would count it as old as its group. What has no counterpart here, or
    is not what optimi saves, is :class:`Unloadable`.
    """
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    ignored = {"group"}  # which a gradient release puts there
    if declaration is None or not any(s.name in DECOUPLED for s in declaration.statics):
        ignored |= {"eps_sq", "mean_square"}  # of StableAdamW, whose state would fit optimizers that choose their decay
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"param_groups[{i}] of the optimi checkpoint"
        with naming(where):
            betas = tuple(as_number(group[name], f"{name} of {where}") for name in BETAS if name in group)
            groups.append(_group(group, betas, where))
            for param in [param for param in group["params"] if param in state_dict["state"]]:
                entries = {k: v for k, v in state_dict["state"][param].items() if v is not None and k not in ignored}
                state[param] = _entries(entries, group, betas, where)
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
        values["betas"] = betas
    elif "dampening" in group:
        values["dampening"] = group.get("momentum", 0.0) if is_set(group, "dampening", where) else 0.0
    return values


def _entries(entries: dict[str, Any], group: Mapping[str, Any], betas: tuple[float, ...], where: str) -> dict[str, Any]:
    step = entries.pop("step", group.get("step"))
    compensation = entries.get("kahan_comp")
    is_compensated = is_set(group, "kahan_sum", where) and getattr(compensation, "itemsize", 2) == 2
    if not is_compensated or getattr(compensation, "dtype", None) == torch.uint8:
        entries.pop("kahan_comp", None)  # a placeholder for optimi's Triton kernels
    if foreign := [name for name in entries if name not in STATE]:
        raise Unloadable(f"{where} has state {', '.join(map(described, foreign))}, which has no counterpart here")
    if not entries:
        return {}
    if step is None:
        return {"step": 1.0, **{"momentum_buffer" if k == "exp_avg" and not betas else k: v for k, v in entries.items()}}
    count = as_number(step, f"step of {where}")
    factors = {name: 1 - beta**count for name, beta in zip(DEBIASED[len(betas)], betas, strict=True)} | {"prev_grad": -1.0}
    scaled = {k: as_tensor(entries[k], f"{k} of {where}") * factor for k, factor in factors.items() if k in entries}
    return {"step": count, **entries, **scaled}
