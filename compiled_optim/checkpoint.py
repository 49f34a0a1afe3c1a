"""Checkpoints: state that belongs to names.

A state dict has torch.optim's layout: ``state`` by parameter index, ``param_groups`` with Python numbers and, where the
parameters have names, ``param_names``. Loading matches parameters by name whatever their order and grouping, checks
everything first, and then copies into the live tensors, so that whatever holds one of them keeps working.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compiled_optim.fields import Rule
from compiled_optim.hyperparameters import ParamGroup
from compiled_optim.plan import parameter_name
from compiled_optim.state import OptimizerState, ParamState, complete, new_buffer, scalar_inits

FORMAT_VERSION = 1

_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


class LoadReport(NamedTuple):
    """What a load left out: names in the optimizer only, in the checkpoint only, and in both but unlike each other."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]


def canonical_name(name: str) -> str:
    """``name`` without the prefixes that module wrappers insert at any level."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(f".{prefix}", ".").removeprefix(prefix)
    return name


def save(rule: Rule, groups: Sequence[ParamGroup], state: OptimizerState, neutral: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict: hyperparameters as floats, step counts and scalars as copies on the CPU, buffers as they are.

    ``neutral`` gives the value to store for each run-time flag, which is never the optimizer's own.
    """
    hypers = {h.name for h in rule.hypers}
    packed_groups = []
    packed_state = {}
    first = 0
    for group in groups:
        params = group["params"]
        packed = {k: neutral.get(k, v) for k, v in group.items() if k not in hypers and k != "params"}
        packed_groups.append({**group.floats(), **packed, "params": list(range(first, first + len(params)))})
        for index, param in enumerate(params, first):
            entries = state.get(param)
            if entries:
                packed_state[index] = {k: _detached(k, v, rule) for k, v in entries.items()}
        first += len(params)
    return {"state": packed_state, "param_groups": packed_groups, "format_version": FORMAT_VERSION}


def _detached(key: str, value: Any, rule: Rule) -> Any:
    return value.detach().to("cpu", copy=True) if key in scalar_inits(rule) and isinstance(value, Tensor) else value


@dataclass
class _Saved:
    """One parameter of a checkpoint: its name, its group and its state, None where it never had any."""

    name: str
    group: int
    state: Mapping[str, Any] | None


@dataclass
class _Live:
    """One parameter of the optimizer."""

    name: str
    group: int
    param: Tensor


def load(
    rule: Rule,
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    buffers: Sequence[tuple[str, ...]],
    state_dict: Mapping[str, Any],
    *,
    keep: Collection[str],
    strict: bool,
    hyperparameters: Literal["checkpoint", "keep"],
) -> LoadReport:
    """Copy ``state_dict`` into ``groups`` and ``state``.

    Args:
        rule: the optimizer's rule.
        groups: its live groups.
        state: its live state.
        buffers: for each group, the names of the buffers its parameters have.
        keep: group entries that are the optimizer's own whatever the checkpoint says.
        state_dict: what to load; not modified.
        strict: raise where names, shapes or entries do not match; otherwise load what does.
        hyperparameters: whether the groups take the checkpoint's values.

    Raises:
        ValueError, TypeError: the checkpoint is malformed or, with ``strict``, does not match. Nothing is changed then.
    """
    saved_groups, saved = _read(state_dict)
    live = [
        _Live(canonical_name(parameter_name(g, i, j)), i, p) for i, g in enumerate(groups) for j, p in enumerate(g["params"])
    ]
    pairs, missing, unexpected = _match(groups, live, saved_groups, saved)
    entries: list[tuple[_Live, dict[str, Any]]] = []
    mismatched: list[str] = []
    for ours, theirs in pairs:
        problem, values = _entries(rule, buffers[ours.group], ours.param, theirs)
        mismatched += [f"{ours.name}: {problem}"] if problem else []
        entries += [] if problem else [(ours, values)]
    report = LoadReport(missing, unexpected, mismatched)
    numbers: list[tuple[ParamGroup, str, Any]] = []
    if hyperparameters == "checkpoint":
        numbers, conflicts = _group_values(rule, groups, pairs, saved_groups, {*keep, "params", "param_names"})
        mismatched += conflicts
    if strict and any(report):
        parts = [f"{kind}: {', '.join(names)}" for kind, names in zip(report._fields, report, strict=True) if names]
        raise ValueError(f"the checkpoint does not match the optimizer ({rule.name}); {'; '.join(parts)}")
    for ours, values in entries:
        if values or ours.param in state:
            _copy_into(rule, buffers[ours.group], state[ours.param], values, ours.param)
    for group, key, value in numbers:
        group.fill(key, value) if any(h.name == key for h in rule.hypers) else group.set_quietly(key, value)
    return report


def _read(state_dict: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[_Saved]]:
    """The groups and parameters of a state dict, its form checked."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("not an optimizer state dict: it must be a dict with 'state' and 'param_groups'")
    version = state_dict.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(f"the checkpoint has format_version {version!r}; this release reads up to {FORMAT_VERSION}")
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, (list, tuple)) or not isinstance(states, Mapping):
        raise ValueError("not an optimizer state dict: 'param_groups' must be a list and 'state' a dict")
    saved = []
    for i, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"not an optimizer state dict: param_groups[{i}] must be a dict with a list 'params'")
        names = group.get("param_names")
        if names is not None and len(names) != len(group["params"]):
            raise ValueError(f"param_groups[{i}] has {len(group['params'])} params but {len(names)} param_names")
        for j, index in enumerate(group["params"]):
            entries = states.get(index)
            if entries is not None and not isinstance(entries, Mapping):
                raise ValueError(
                    f"the state of '{parameter_name(group, i, j)}' must be a dict, got {type(entries).__name__}"
                )
            saved.append(_Saved(canonical_name(parameter_name(group, i, j)), i, entries))
    return list(groups), saved


def _match(
    groups: Sequence[ParamGroup], live: list[_Live], saved_groups: list[Mapping[str, Any]], saved: list[_Saved]
) -> tuple[list[tuple[_Live, _Saved]], list[str], list[str]]:
    """Pairs of live and saved parameters, and the names that only one side has."""
    if not all("param_names" in g for g in (*groups, *saved_groups)):
        if len(groups) != len(saved_groups):
            raise ValueError(
                "loaded state dict has a different number of parameter groups "
                f"({len(saved_groups)} instead of {len(groups)}), and without names on both sides only positions can match"
            )
        for i, (ours, theirs) in enumerate(zip(groups, saved_groups, strict=True)):
            if len(ours["params"]) != len(theirs["params"]):
                raise ValueError(
                    "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                    f"param_groups[{i}] has {len(theirs['params'])} parameters instead of {len(ours['params'])}"
                )
        return list(zip(live, saved, strict=True)), [], []
    by_name = {s.name: s for s in saved}
    if len(by_name) != len(saved):
        duplicate = next(s.name for s in saved if by_name[s.name] is not s)
        raise ValueError(f"the checkpoint names parameter '{duplicate}' twice")
    pairs = [(ours, by_name[ours.name]) for ours in live if ours.name in by_name]
    known = {ours.name for ours in live}
    return pairs, [o.name for o in live if o.name not in by_name], [s.name for s in saved if s.name not in known]


def _entries(rule: Rule, buffers: tuple[str, ...], param: Tensor, saved: _Saved) -> tuple[str, dict[str, Any]]:
    """The values to copy into one parameter's state, or what keeps them from fitting."""
    if not saved.state:
        return "", {}
    given = {k: v for k, v in saved.state.items() if v is not None}
    inits = scalar_inits(rule)
    if "step" not in given and all(name in given for name in buffers):
        given["step"] = 1.0 if buffers else 0.0  # torch.optim.SGD counts no steps; a buffer says that one was taken
    absent = [name for name in (*inits, *buffers) if name not in given]
    if absent:
        return f"the checkpoint has no {', '.join(absent)} for it", {}
    foreign = [name for name in given if name not in inits and name not in buffers]
    if foreign:
        return f"the optimizer has no {', '.join(map(str, foreign))} for it", {}
    for name, value in given.items():
        if name in inits:
            if (isinstance(value, Tensor) and value.numel() != 1) or not isinstance(value, (Tensor, int, float)):
                return f"{name} is not a number", {}
        elif not isinstance(value, Tensor):
            return f"{name} is not a tensor", {}
        elif value.shape != param.shape:
            return f"{name} has shape {tuple(value.shape)} instead of {tuple(param.shape)}", {}
        elif value.is_complex() != param.is_complex():
            return f"{name} is {value.dtype} for a parameter of {param.dtype}", {}
    return "", given


def _group_values(
    rule: Rule,
    groups: Sequence[ParamGroup],
    pairs: list[tuple[_Live, _Saved]],
    saved_groups: list[Mapping[str, Any]],
    skipped: Collection[str],
) -> tuple[list[tuple[ParamGroup, str, Any]], list[str]]:
    """What each group takes from the saved groups its parameters were in, and where those disagree."""
    sources: dict[int, list[int]] = {}
    for ours, theirs in pairs:
        known = sources.setdefault(ours.group, [])
        if theirs.group not in known:
            known.append(theirs.group)
    values: list[tuple[ParamGroup, str, Any]] = []
    conflicts: list[str] = []
    for index, saved_indices in sources.items():
        group = groups[index]
        for key in dict.fromkeys(k for i in saved_indices for k in saved_groups[i]):
            if key in skipped:
                continue
            found = [saved_groups[i][key] for i in saved_indices if key in saved_groups[i]]
            if any(not _equal(v, found[0]) for v in found[1:]):
                conflicts.append(f"{group.label}: its parameters were in groups with different {key}: {found}")
                continue
            if any(h.name == key for h in rule.hypers):
                group.validated(key, found[0])
            values.append((group, key, found[0]))
    return values, conflicts


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.equal(torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64))
    return bool(a == b)


def _copy_into(rule: Rule, buffers: tuple[str, ...], state: ParamState, values: Mapping[str, Any], param: Tensor) -> None:
    """Copy ``values`` into the tensors of ``state``, which are made where they do not exist yet.

    A parameter that the checkpoint knows but has no state for never took a step: its state starts anew.
    """
    if values and complete(rule, buffers, param, state, new_buffer):
        state.report()
    for name, entry in state.items():
        value = values.get(name, scalar_inits(rule).get(name, 0.0))
        entry.copy_(value) if isinstance(value, Tensor) and value.shape == entry.shape else entry.fill_(value)
