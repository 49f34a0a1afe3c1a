"""The forms in which an optimizer's state dict comes.

*Indexed* is torch.optim's: ``state`` by integer, groups with integers as ``params`` and, where parameters have names,
``param_names``. *Named* has names in place of the integers. Both may hold ``aliases`` (further name -> name), for tied
parameters, and ``format_version``. optimi's is indexed with another meaning, which :func:`from_optimi` translates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from compiled_optim.saved_values import Unloadable, as_number, as_tensor, described, naming

FORMAT_VERSION = 1

_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_OPTIMI_MARKS = {"setup", "gradient_release", "kahan_sum"}
_OPTIMI_OPTIONS = {*_OPTIMI_MARKS, "triton", "foreach", "torch_init", "decouple_lr", "decouple_wd", "max_lr", "step"}


def canonical_names(names: Sequence[str]) -> list[str]:
    """``names`` without the prefixes that module wrappers insert at any level, or as they are if two would be equal."""
    short = list(map(canonical_name, names))
    return short if len(set(short)) == len(set(names)) else list(names)


def canonical_name(name: str) -> str:
    """``name`` without the prefixes that module wrappers insert at any level."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(f".{prefix}", ".").removeprefix(prefix)
    return name


def group_names(group: Mapping[str, Any]) -> list[str] | None:
    """The parameter names of one group of a state dict of either form, None where it has none.

    In a named group ``params`` decides: torch.distributed.checkpoint orders them and leaves ``param_names`` as it was.
    """
    params = list(group["params"])
    return params if all(isinstance(p, str) for p in params) else group.get("param_names")


def plain(value: Any, what: str) -> Any:
    """A mapping or list, called ``what``, as a dict or list that says the same every time; anything else as it is."""
    with naming(what):
        if isinstance(value, Mapping):
            return {key: value[key] for key in value}
        return list(value) if isinstance(value, (list, tuple)) else value


@naming("the state dict", passing=(ValueError, TypeError))
def read(state_dict: Any) -> dict[str, Any]:
    """``state_dict`` in plain dicts and lists, checked; shares its values.

    Raises:
        ValueError: as :func:`check`.
    """
    result: dict[str, Any] = plain(state_dict, "the state dict")
    if isinstance(result, dict):
        result |= {key: plain(result[key], f"'{key}'") for key in ("state", "param_groups", "aliases") if key in result}
        states, groups = result.get("state"), result.get("param_groups")
        if isinstance(states, dict):
            result["state"] = {key: plain(v, f"the state of {described(key)}") for key, v in states.items()}
        if isinstance(groups, list):
            result["param_groups"] = [_plain_group(group, f"param_groups[{i}]") for i, group in enumerate(groups)]
    check(result)
    return result


def _plain_group(group: Any, where: str) -> Any:
    group = plain(group, where)
    if isinstance(group, dict):
        group |= {key: plain(group[key], f"{where}['{key}']") for key in ("params", "param_names") if key in group}
    return group


def check(state_dict: Any) -> None:
    """Raise ``ValueError`` unless ``state_dict`` has the indexed or the named form, in a version that can be read."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("not an optimizer state dict: it must be a dict with 'state' and 'param_groups'")
    version = state_dict.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"the checkpoint has format_version {described(version)}; this release reads up to {FORMAT_VERSION}"
        )
    groups, states, aliases = state_dict["param_groups"], state_dict["state"], state_dict.get("aliases", {})
    if not isinstance(groups, (list, tuple)) or not isinstance(states, Mapping):
        raise ValueError("not an optimizer state dict: 'param_groups' must be a list and 'state' a dict")
    for i, group in enumerate(groups):
        _check_group(group, i)
    for key, entries in states.items():
        if not isinstance(entries, Mapping):
            raise ValueError(f"the state of {described(key)} must be a dict, got {described(entries)}")
    if not isinstance(aliases, Mapping) or not all(isinstance(n, str) for pair in aliases.items() for n in pair):
        raise ValueError(f"'aliases' must be a dict name -> name, got {described(aliases)}")
    _refuse_repeated("names", [*(name for group in groups for name in group_names(group) or ()), *aliases])
    _refuse_repeated("lists", (param for group in groups for param in group["params"]))


def _check_group(group: Any, index: int) -> None:
    where = f"param_groups[{index}]"
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
        raise ValueError(f"not an optimizer state dict: {where} must be a dict with a list 'params'")
    params, names = group["params"], group_names(group)
    nameless = [described(key) for key in group if not isinstance(key, str)]
    if nameless:
        raise ValueError(f"the entries of {where} must have names, got {nameless[0]}")
    if not all(isinstance(p, (int, str)) for p in params):
        raise ValueError(f"{where}['params'] must be integers or names, got {described(tuple(params))}")
    if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)):
        raise ValueError(f"{where}['param_names'] must be a list of names, got {described(names)}")
    if names is not None and len(names) != len(params):
        raise ValueError(f"{where} has {len(params)} params but {len(names)} param_names")


def _refuse_repeated(verb: str, values: Iterable[int | str]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise ValueError(f"the checkpoint {verb} parameter {described(value)} twice")


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
        Unloadable: an option or a state entry has no counterpart here, or is not what optimi saves.
    """
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"param_groups[{i}] of the optimi checkpoint"
        with naming(where):
            betas = tuple(as_number(group[name], f"{name} of {where}") for name in ("beta1", "beta2") if name in group)
            groups.append(_group_from_optimi(group, betas, where))
            for param in group["params"]:
                if param in state_dict["state"]:
                    state[param] = _entries_from_optimi(state_dict["state"][param], group, betas, where)
    return {"state": state, "param_groups": groups}


def _group_from_optimi(group: Mapping[str, Any], betas: tuple[float, ...], where: str) -> dict[str, Any]:
    values = _without(group, {*_OPTIMI_OPTIONS, "beta1", "beta2"})
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


def _entries_from_optimi(
    entries: Mapping[str, Any], group: Mapping[str, Any], betas: tuple[float, ...], where: str
) -> dict[str, Any]:
    kept = {k: v for k, v in entries.items() if v is not None and k not in ("step", "group")}
    if not _is_set(group, "kahan_sum", where):
        kept.pop("kahan_comp", None)  # a placeholder for optimi's Triton kernels
    foreign = [k for k in kept if k not in ("exp_avg", "exp_avg_sq", "kahan_comp")]
    if foreign:
        raise Unloadable(f"{where} has state {', '.join(map(described, foreign))}, which has no counterpart here")
    step = entries.get("step", group.get("step"))
    if step is None:
        return {"momentum_buffer" if k == "exp_avg" and not betas else k: v for k, v in kept.items()}
    count = as_number(step, f"step of {where}")
    for name, beta in zip(("exp_avg", "exp_avg_sq"), betas, strict=True):
        if name in kept:
            kept[name] = as_tensor(kept[name], f"{name} of {where}") * (1 - beta**count)
    return {"step": count, **kept}


def _without(group: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in keys}
