"""Checkpoints: state that belongs to names.

A state dict has torch.optim's layout: ``state`` by parameter index, ``param_groups`` with Python numbers and, where the
parameters have names, ``param_names``. Loading matches parameters by name whatever their order and grouping, checks
everything first, and then copies into the live tensors, so that whatever holds one of them keeps working.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compiled_optim.fields import Declaration
from compiled_optim.formats import FORMAT_VERSION, canonical_names, check, from_optimi, group_names, is_optimi
from compiled_optim.hyperparameters import ROUNDING, ParamGroup
from compiled_optim.plan import parameter_name, structure
from compiled_optim.sharding import spread_like
from compiled_optim.state import OptimizerState, ParamState, complete, fill, initial_values, scalar_names


class LoadReport(NamedTuple):
    """What a load left out: names in the optimizer only, in the checkpoint only, and in both but unlike each other."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]


def save(
    declaration: Declaration,
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    aliases: Mapping[str, str],
    neutral: Mapping[str, Any],
) -> dict[str, Any]:
    """The state dict: hyperparameters as floats, step counts and scalars as copies on the CPU, buffers as they are.

    ``neutral`` gives the value to store for each run-time flag, which is never the optimizer's own.
    """
    hypers = {h.name for h in declaration.hypers}
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
                packed_state[index] = {k: _snapshot(k, v, declaration, param) for k, v in entries.items()}
        first += len(params)
    result = {"state": packed_state, "param_groups": packed_groups, "format_version": FORMAT_VERSION}
    return result | ({"aliases": dict(aliases)} if aliases else {})


def _snapshot(key: str, value: Any, declaration: Declaration, param: Tensor) -> Any:
    # torch.distributed.checkpoint loads into the tensors of a state dict and then drops the state of frozen parameters
    # (pytorch#192202): what it loads for those must arrive all the same.
    if key not in scalar_names(declaration) or not isinstance(value, Tensor) or not param.requires_grad:
        return value
    return value.detach().to("cpu", copy=True)


@dataclass
class _Saved:
    """One parameter of a checkpoint: its name and aliases, its group and its state, None where it never had any."""

    names: tuple[str, ...]
    group: int
    state: Mapping[str, Any] | None


@dataclass
class _Live:
    """One parameter of the optimizer: its name and aliases, and its group."""

    names: tuple[str, ...]
    group: int
    param: Tensor

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]


def load(
    declaration: Declaration,
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    state_dict: Mapping[str, Any],
    *,
    aliases: Mapping[str, str],
    keep: Collection[str],
    strict: bool,
    hyperparameters: Literal["checkpoint", "keep"],
) -> LoadReport:
    """Copy ``state_dict`` into ``groups`` and ``state``.

    A frozen parameter without state in the checkpoint keeps the state it has; any other starts anew.

    Args:
        declaration: what the optimizer declares.
        groups: its live groups.
        state: its live state.
        state_dict: what to load, in any of the forms of :mod:`compiled_optim.formats`; not modified.
        aliases: the optimizer's further names of tied parameters.
        keep: group entries that are the optimizer's own whatever the checkpoint says.
        strict: raise where names, shapes or entries do not match; otherwise load what does.
        hyperparameters: whether the groups take the checkpoint's values.

    Raises:
        ValueError, TypeError: the checkpoint is malformed or, with ``strict``, does not match. Nothing is changed then.
    """

    def buffers(ours: _Live) -> tuple[str, ...]:
        return declaration.present_buffers(structure(declaration, groups[ours.group], ours.param))

    def required(ours: _Live, theirs: _Saved) -> tuple[str, ...]:
        """The buffers with the hyperparameters that are going to hold."""
        choices = structure(declaration, groups[ours.group], ours.param)
        if hyperparameters == "checkpoint":
            values = saved_groups[theirs.group]
            choices |= {name: not _is_zero(values[name]) for name in declaration.structural_hypers if name in values}
        return declaration.present_buffers(choices)

    check(state_dict)
    if is_optimi(state_dict):
        state_dict = from_optimi(state_dict)
    saved_groups, saved = state_dict["param_groups"], _saved(state_dict)
    live = _live(groups, aliases)
    if all(group_names(g) is not None for g in saved_groups) and all("param_names" in g for g in groups):
        pairs, missing, unexpected = _match(live, saved)
    else:
        pairs, missing, unexpected = _match_positions(groups, live, saved_groups, saved), [], []
    entries: list[tuple[_Live, dict[str, Any]]] = []
    mismatched: list[str] = []
    for ours, theirs in pairs:
        problem, values = _entries(declaration, required(ours, theirs), ours.param, theirs)
        mismatched += [f"{ours.name}: {problem}"] if problem else []
        entries += [] if problem else [(ours, values)]
    report = LoadReport(missing, unexpected, mismatched)
    numbers: list[tuple[ParamGroup, str, Any]] = []
    if hyperparameters == "checkpoint":
        numbers, conflicts = _group_values(declaration, groups, pairs, saved_groups, {*keep, "params", "param_names"})
        mismatched += conflicts
    if strict and any(report):
        parts = [f"{kind}: {', '.join(names)}" for kind, names in zip(report._fields, report, strict=True) if names]
        raise ValueError(f"the checkpoint does not match the optimizer ({declaration.name}); {'; '.join(parts)}")
    for group, key, value in numbers:
        group.fill(key, value) if any(h.name == key for h in declaration.hypers) else group.set_quietly(
            key, copy.deepcopy(value)
        )
    for ours, values in entries:
        if values or (ours.param in state and ours.param.requires_grad):
            initial = initial_values(declaration, groups[ours.group])
            present = tuple(b.name for b in declaration.buffers if b.name in values or b.name in buffers(ours))
            _copy_into(declaration, present, state[ours.param], values, initial, ours.param)
    return report


def _saved(state_dict: Mapping[str, Any]) -> list[_Saved]:
    """The parameters of a state dict."""
    places = [(g, i, j, p) for i, g in enumerate(state_dict["param_groups"]) for j, p in enumerate(g["params"])]
    names = [own[j] if (own := group_names(g)) else parameter_name(g, i, j) for g, i, j, _ in places]
    states = [state_dict["state"].get(p) for *_, p in places]
    known = _with_aliases(names, state_dict.get("aliases", {}))
    return [_Saved(own, i, state) for own, (_, i, _, _), state in zip(known, places, states, strict=True)]


def _live(groups: Sequence[ParamGroup], aliases: Mapping[str, str]) -> list[_Live]:
    """The parameters of the optimizer."""
    places = [(i, parameter_name(g, i, j), p) for i, g in enumerate(groups) for j, p in enumerate(g["params"])]
    known = _with_aliases([name for _, name, _ in places], aliases)
    return [_Live(own, i, p) for own, (i, _, p) in zip(known, places, strict=True)]


def _with_aliases(names: Sequence[str], aliases: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """For each of ``names``, itself and its aliases, all canonical."""
    canonical = dict(zip([*names, *aliases], canonical_names([*names, *aliases]), strict=True))
    return ((canonical[name], *(canonical[a] for a, n in aliases.items() if n == name)) for name in names)


def _match_positions(
    groups: Sequence[ParamGroup], live: list[_Live], saved_groups: Sequence[Mapping[str, Any]], saved: list[_Saved]
) -> list[tuple[_Live, _Saved]]:
    """Pairs of live and saved parameters of equal position."""
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
    return list(zip(live, saved, strict=True))


def _match(live: list[_Live], saved: list[_Saved]) -> tuple[list[tuple[_Live, _Saved]], list[str], list[str]]:
    """Pairs of live and saved parameters of equal name, and the names that only one side has.

    An alias serves only where neither side uses its own name for another parameter.
    """
    by_name = {s.names[0]: s for s in saved}
    if len(by_name) != len(saved):
        duplicate = next(s.names[0] for s in saved if by_name[s.names[0]] is not s)
        raise ValueError(f"the checkpoint names parameter '{duplicate}' twice")
    found = {ours.name: by_name.pop(ours.name) for ours in live if ours.name in by_name}
    by_alias = {name: s for s in by_name.values() for name in s.names}
    for ours in live:
        theirs = next((by_alias[n] for n in ours.names if n in by_alias), None)
        if ours.name not in found and theirs is not None and theirs.names[0] in by_name:
            found[ours.name] = by_name.pop(theirs.names[0])
    pairs = [(ours, found[ours.name]) for ours in live if ours.name in found]
    return pairs, [ours.name for ours in live if ours.name not in found], list(by_name)


def _is_zero(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_meta and value.item() == 0
    return isinstance(value, (int, float)) and value == 0


def _entries(
    declaration: Declaration, required: tuple[str, ...], param: Tensor, saved: _Saved
) -> tuple[str, dict[str, Any]]:
    """The values to copy into one parameter's state, or what keeps them from fitting.

    A buffer that a hyperparameter makes necessary may be there without need, left from when that was not 0.
    """
    # A flattened checkpoint of torch.distributed.checkpoint has an empty dict for an entry that was not saved.
    given = {k: v for k, v in (saved.state or {}).items() if v is not None and not (isinstance(v, Mapping) and not v)}
    if not given:
        return "", {}
    scalars = scalar_names(declaration)
    left = [b.name for b in declaration.buffers if b.when in declaration.structural_hypers and b.name in given]
    buffers = {*required, *left}
    if "step" not in given and all(name in given for name in required):
        given["step"] = 1.0 if buffers else 0.0  # torch.optim.SGD counts no steps; a buffer says that one was taken
    absent = [name for name in (*scalars, *required) if name not in given]
    if absent:
        return f"the checkpoint has no {', '.join(absent)} for it", {}
    foreign = [name for name in given if name not in scalars and name not in buffers]
    if foreign:
        return f"the optimizer has no {', '.join(map(str, foreign))} for it", {}
    shapes = {b.name: b.shape_for(param) for b in declaration.buffers if b.name in buffers}
    for name, value in given.items():
        problem = _number_problem(value) if name in scalars else _buffer_problem(value, param, shapes[name])
        if problem:
            return f"{name} {problem}", {}
    step = float(given["step"])
    return ("", given) if math.isfinite(step) and step >= 0 else (f"step is {step}", {})


def _number_problem(value: Any) -> str:
    single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and not value.is_meta
    return "" if single or isinstance(value, float) or (isinstance(value, int) and value < 2**63) else "is not a number"


def _buffer_problem(value: Any, param: Tensor, shape: tuple[int, ...]) -> str:
    if not isinstance(value, Tensor):
        return "is not a tensor"
    if tuple(value.shape) != shape:
        return f"has shape {tuple(value.shape)} instead of {shape}"
    if value.is_complex() != param.is_complex() or not (value.is_complex() or value.is_floating_point()):
        return f"is {value.dtype} for a parameter of {param.dtype}"
    if value.is_meta or value.layout is not torch.strided:
        return f"is a {'meta' if value.is_meta else value.layout} tensor"
    return ""


def _group_values(
    declaration: Declaration,
    groups: Sequence[ParamGroup],
    pairs: list[tuple[_Live, _Saved]],
    saved_groups: Sequence[Mapping[str, Any]],
    skipped: Collection[str],
) -> tuple[list[tuple[ParamGroup, str, Any]], list[str]]:
    """What each group takes from the saved groups its parameters were in, and where those disagree."""
    sources: dict[int, dict[int, None]] = {}
    for ours, theirs in pairs:
        sources.setdefault(ours.group, {})[theirs.group] = None
    hypers = [h.name for h in declaration.hypers]
    made = [s.name for s in declaration.statics if not s.init]
    values: list[tuple[ParamGroup, str, Any]] = []
    problems: list[str] = []
    for index, saved_indices in sources.items():
        group, theirs_of_it = groups[index], [saved_groups[i] for i in saved_indices]
        absent = [key for key in hypers if any(key not in g for g in theirs_of_it)]
        problems += [f"{group.label}: the checkpoint has no {', '.join(absent)} for it"] if absent else []
        for key in made:
            other = next((g[key] for g in theirs_of_it if key in g and not _equal(g[key], group[key])), None)
            problems += [f"{group.label}: {key} is {other} in the checkpoint"] if other is not None else []
        for key in dict.fromkeys(k for g in theirs_of_it for k in g if k not in skipped):
            found = [g[key] for g in theirs_of_it if key in g]
            comparable = [_floats(group, key, v) if key in hypers else v for v in found]
            if any(not _equal(v, comparable[0]) for v in comparable[1:]):
                problems.append(f"{group.label}: its parameters were in groups with different {key}: {found}")
            else:
                values.append((group, key, found[0]))
    return values, problems


def _floats(group: ParamGroup, key: str, value: Any) -> tuple[float, ...]:
    try:
        return tuple(float(e) for e in group.validated(key, value, ROUNDING))
    except (RuntimeError, OverflowError) as error:  # a meta tensor, an integer beyond every float
        raise ValueError(f"{key} of {group.label} cannot be {value!r}") from error


def _equal(a: Any, b: Any) -> bool:
    try:
        return torch.equal(a, b.to(a.device)) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
    except RuntimeError:  # a tensor without data, or a number compared with a tensor of many
        return False


def _copy_into(
    declaration: Declaration,
    buffers: tuple[str, ...],
    state: ParamState,
    values: Mapping[str, Any],
    initial: Mapping[str, float | Tensor],
    param: Tensor,
) -> None:
    """Copy ``values`` into the tensors of ``state``, which are made where they do not exist yet.

    A parameter that the checkpoint knows but has no state for never took a step: its state starts anew.
    """
    if values and complete(declaration, buffers, param, state, initial):
        state.report()
    for name, entry in state.items():
        value = values.get(name, initial.get(name, 0.0))
        if name in buffers and name in values:
            entry.copy_(spread_like(value, entry))
        else:
            fill(entry, torch.as_tensor(value).reshape(()))
