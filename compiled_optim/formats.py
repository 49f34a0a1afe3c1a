"""The forms in which an optimizer's state dict comes.

*Indexed* is torch.optim's: ``state`` by integer, groups with integers as ``params`` and, where parameters have names,
``param_names``. *Named* has names in place of the integers. Both may hold ``aliases`` (further name -> name), for tied
parameters, and ``format_version``. optimi's is indexed with another meaning, which :func:`from_optimi` translates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

FORMAT_VERSION = 1

_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_OPTIMI_MARKS = {"setup", "gradient_release", "kahan_sum"}
_OPTIMI_OPTIONS = {*_OPTIMI_MARKS, "triton", "foreach", "torch_init", "decouple_lr", "decouple_wd", "max_lr", "step"}


def canonical_names(names: Sequence[str]) -> list[str]:
    """``names`` without the prefixes that module wrappers insert at any level, or as they are if two would be equal."""
    short = list(map(_canonical_name, names))
    return short if len(set(short)) == len(set(names)) else list(names)


def _canonical_name(name: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(f".{prefix}", ".").removeprefix(prefix)
    return name


def group_names(group: Mapping[str, Any]) -> list[str] | None:
    """The parameter names of one group of a state dict of either form, None where it has none.

    In a named group ``params`` decides: torch.distributed.checkpoint orders them and leaves ``param_names`` as it was.
    """
    params = list(group["params"])
    return params if all(isinstance(p, str) for p in params) else group.get("param_names")


def check(state_dict: Any) -> None:
    """Raise ``ValueError`` unless ``state_dict`` has the indexed or the named form, in a version that can be read."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("not an optimizer state dict: it must be a dict with 'state' and 'param_groups'")
    version = state_dict.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(f"the checkpoint has format_version {version!r}; this release reads up to {FORMAT_VERSION}")
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, (list, tuple)) or not isinstance(states, Mapping):
        raise ValueError("not an optimizer state dict: 'param_groups' must be a list and 'state' a dict")
    for i, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"not an optimizer state dict: param_groups[{i}] must be a dict with a list 'params'")
        params, names = group["params"], group_names(group)
        if not all(isinstance(p, (int, str)) for p in params):
            raise ValueError(f"param_groups[{i}]['params'] must be integers or names, got {params!r}")
        if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)):
            raise ValueError(f"param_groups[{i}]['param_names'] must be a list of names, got {names!r}")
        if names is not None and len(names) != len(params):
            raise ValueError(f"param_groups[{i}] has {len(params)} params but {len(names)} param_names")
    for key, entries in states.items():
        if not isinstance(entries, Mapping):
            raise ValueError(f"the state of {key!r} must be a dict, got {type(entries).__name__}")
    aliases = state_dict.get("aliases", {})
    if not isinstance(aliases, Mapping) or not all(isinstance(n, str) for pair in aliases.items() for n in pair):
        raise ValueError(f"'aliases' must be a dict name -> name, got {aliases!r}")


def named(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The named form of ``state_dict``, wrapper prefixes removed; shares its tensors.

    Raises:
        ValueError: the parameters have no names, or it is no state dict.
    """
    check(state_dict)
    groups = state_dict["param_groups"]
    if any(group_names(group) is None for group in groups):
        raise ValueError("the parameters have no names: the optimizer was not made from named_parameters() or a dict")
    aliases = state_dict.get("aliases", {})
    names = [name for group in groups for name in group_names(group) or ()]
    canonical = dict(zip([*names, *aliases], canonical_names([*names, *aliases]), strict=True))
    renamed = {p: canonical[n] for p, n in zip((p for group in groups for p in group["params"]), names, strict=True)}
    result = {
        **state_dict,
        "state": {renamed[key]: dict(entries) for key, entries in state_dict["state"].items() if key in renamed},
        "param_groups": [
            {"params": [renamed[p] for p in g["params"]], **_without(g, {"params", "param_names"})} for g in groups
        ],
    }
    return result | ({"aliases": {canonical[a]: canonical[n] for a, n in aliases.items()}} if aliases else {})


def is_optimi(state_dict: Mapping[str, Any]) -> bool:
    """Whether ``state_dict`` was saved by an optimizer of optimi."""
    return any(set(group) >= _OPTIMI_MARKS for group in state_dict["param_groups"])


def from_optimi(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of optimi with this package's names and meaning.

    optimi counts steps per group, keeps averages divided by their bias correction and, without betas, calls the momentum
    ``exp_avg``.

    Raises:
        ValueError: an option or a state entry has no counterpart here.
    """
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"param_groups[{i}] of the optimi checkpoint"
        if group.get("decouple_lr"):
            raise ValueError(f"{where} has decouple_lr={group['decouple_lr']!r}, which has no counterpart here")
        betas = tuple(group[f"beta{n}"] for n in (1, 2) if f"beta{n}" in group)
        values = _without(group, {*_OPTIMI_OPTIONS, "beta1", "beta2"})
        if betas:
            values |= {"betas": betas, "decoupled_weight_decay": group.get("decouple_wd")}
        elif group.get("decouple_wd"):
            raise ValueError(f"{where} has decouple_wd=True, which has no counterpart here")
        elif "dampening" in group:
            values["dampening"] = group.get("momentum", 0.0) if group["dampening"] else 0.0
        groups.append(values)
        for param in group["params"]:
            if param in state_dict["state"]:
                state[param] = _entries_from_optimi(state_dict["state"][param], group, betas, where)
    return {"state": state, "param_groups": groups}


def _entries_from_optimi(
    entries: Mapping[str, Any], group: Mapping[str, Any], betas: tuple[float, ...], where: str
) -> dict[str, Any]:
    kept = {k: v for k, v in entries.items() if v is not None and k not in ("step", "group")}
    if not group["kahan_sum"]:
        kept.pop("kahan_comp", None)  # a placeholder for optimi's Triton kernels
    foreign = [k for k in kept if k not in ("exp_avg", "exp_avg_sq", "kahan_comp")]
    if foreign:
        raise ValueError(f"{where} has state {', '.join(map(repr, foreign))}, which has no counterpart here")
    step = entries.get("step", group.get("step"))
    if step is None:
        return {"momentum_buffer" if k == "exp_avg" and not betas else k: v for k, v in kept.items()}
    count = float(step)
    for name, beta in zip(("exp_avg", "exp_avg_sq"), betas, strict=True):
        if isinstance(kept.get(name), Tensor):
            kept[name] = kept[name] * (1 - beta**count)
    return {"step": count, **kept}


def _without(group: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in keys}
