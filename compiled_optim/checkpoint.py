"""Checkpoints: state that belongs to names.

A state dict has torch.optim's layout: ``state`` by parameter index, ``param_groups`` with Python numbers and, where the
parameters have names, ``param_names``. Loading reads it, matches parameters by name whatever their order and grouping, and
checks everything. Only then does it write, into the live tensors, so that whatever holds one of them keeps working.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from compiled_optim.formats import FORMAT_VERSION, canonical_name, from_optimi, group_names, is_optimi, read
from compiled_optim.hyperparameters import ROUNDING, ParamGroup
from compiled_optim.lowering.layout import span
from compiled_optim.plan import parameter_name, structure
from compiled_optim.rule.rule import Declaration
from compiled_optim.saved_values import Unloadable, as_buffer, as_number, check_memory, described, naming
from compiled_optim.sharding import local, placement, spread_like
from compiled_optim.state import OptimizerState, fill, initial_values, missing_entries, scalar_names
from compiled_optim.torch_internals import outside_inference_mode


class LoadReport(NamedTuple):
    """What a load left out: names in the optimizer only, in the checkpoint only, and in both but unlike each other.

    State that belongs to no parameter of the checkpoint is ``unexpected`` too.
    """

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
class _Known:
    """One parameter of either side: its name and aliases, and its group."""

    names: tuple[str, ...]
    group: int

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]


@dataclass
class _Saved(_Known):
    """One parameter of a checkpoint, with its state, empty where it never had any."""

    state: Mapping[str, Any]


@dataclass
class _Live(_Known):
    """One parameter of the optimizer."""

    param: Tensor


P = TypeVar("P", bound=_Known)

Entries: TypeAlias = dict[int, dict[str, Any]]
"""Entries of groups, by the index of the group."""

Copies: TypeAlias = list[tuple[Tensor, float | Tensor]]
"""Live tensors, and what to copy into them or fill them with."""


class _Changes(NamedTuple):
    """What a load is going to write: checked, and made where it did not exist."""

    hyperparameters: Entries
    values: Entries
    """Other entries of groups."""
    state: list[tuple[Tensor, dict[str, Tensor]]]
    """New state tensors, by parameter."""
    copies: Copies
    """What goes into state tensors, live or new."""

    def write(self, groups: Sequence[ParamGroup], state: OptimizerState) -> None:
        """Make the changes. Nothing here fails; a DTensor is spread over the processes as it is copied, one at a time."""
        for index, numbers in self.hyperparameters.items():
            for key, number in numbers.items():
                groups[index].fill(key, number)
        for index, values in self.values.items():
            for key, value in values.items():
                groups[index].set_quietly(key, value)
        for param, entries in self.state:
            state[param].update(entries)
        for target, source in self.copies:
            target.copy_(spread_like(source, target)) if isinstance(source, Tensor) else fill(target, source)


@torch.no_grad()
def load(
    declaration: Declaration,
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    state_dict: Mapping[str, Any],
    *,
    aliases: Mapping[str, str],
    implied: Mapping[str, float],
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
        implied: state that a checkpoint may leave out, and what it is where there is other state.
        keep: group entries that are the optimizer's own whatever the checkpoint says.
        strict: raise where names, shapes or entries do not match; otherwise load what does.
        hyperparameters: whether the groups take the checkpoint's values.

    Raises:
        ValueError, TypeError: the checkpoint is malformed or, with ``strict``, does not match. Nothing is changed then.
    """
    with naming("the state dict", passing=(ValueError, TypeError)):
        saved_groups, saved, orphans = _read(state_dict, implied)
        pairs, missing, unexpected = _match(groups, _live(groups, aliases), saved_groups, saved)
        taking = pairs if hyperparameters == "checkpoint" else []
        skipped = {*keep, "params", "param_names"}
        numbers, values, conflicts = _check_groups(declaration, groups, taking, saved_groups, skipped)
        entries, copies, problems = _check_state(declaration, groups, state, pairs, numbers)
        filled = [t for index, own in numbers.items() for key in own for t in groups[index].tensors(key)]
        changes = _Changes(numbers, values, entries, _set_apart(copies, filled))
    report = LoadReport(missing, unexpected + orphans, problems + conflicts)
    if strict and any(report):
        parts = [f"{kind}: {', '.join(names)}" for kind, names in zip(report._fields, report, strict=True) if names]
        raise ValueError(f"the checkpoint does not match the optimizer ({declaration.name}); {'; '.join(parts)}")
    changes.write(groups, state)
    return report


def _read(
    state_dict: Mapping[str, Any], implied: Mapping[str, float]
) -> tuple[list[dict[str, Any]], list[_Saved], list[str]]:
    """The groups and the parameters of a state dict of any form, and the state that belongs to none of them."""
    plain = read(state_dict)
    listed = {p for group in plain["param_groups"] for p in group["params"]}
    orphans = [f"the state of {described(key)}" for key in plain["state"] if key not in listed]
    plain = from_optimi(plain) if is_optimi(plain) else plain
    return plain["param_groups"], _saved(plain, implied), orphans


def _saved(state_dict: Mapping[str, Any], implied: Mapping[str, float]) -> list[_Saved]:
    """The parameters of a state dict."""
    places = [(g, i, j, p) for i, g in enumerate(state_dict["param_groups"]) for j, p in enumerate(g["params"])]
    names = [own[j] if (own := group_names(g)) else parameter_name(g, i, j) for g, i, j, _ in places]
    states = [_present(state_dict["state"].get(p, {}), implied) for *_, p in places]
    known = _with_aliases(names, state_dict.get("aliases", {}))
    return [_Saved(own, i, state) for own, (_, i, _, _), state in zip(known, places, states, strict=True)]


def _present(entries: Mapping[str, Any], implied: Mapping[str, float]) -> dict[str, Any]:
    """The state of one parameter without the entries that stand for nothing, and with what the others imply."""
    # A flattened checkpoint of torch.distributed.checkpoint has an empty dict for an entry that was not saved.
    given = {k: v for k, v in entries.items() if v is not None and not (type(v) is dict and not v)}
    return {**implied, **given} if given else {}


def _live(groups: Sequence[ParamGroup], aliases: Mapping[str, str]) -> list[_Live]:
    """The parameters of the optimizer."""
    places = [(i, parameter_name(g, i, j), p) for i, g in enumerate(groups) for j, p in enumerate(g["params"])]
    known = _with_aliases([name for _, name, _ in places], aliases)
    return [_Live(own, i, p) for own, (i, _, p) in zip(known, places, strict=True)]


def _with_aliases(names: Sequence[str], aliases: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """For each of ``names``, itself and its aliases."""
    return ((name, *(a for a, n in aliases.items() if n == name)) for name in names)


def _match(
    groups: Sequence[ParamGroup], live: list[_Live], saved_groups: Sequence[Mapping[str, Any]], saved: list[_Saved]
) -> tuple[list[tuple[_Live, _Saved]], list[str], list[str]]:
    """Pairs of live and saved parameters, by name where both sides have names, and the names that only one side has."""
    named = {group_names(g) is not None for g in saved_groups if g["params"]}
    if named == {False} or not all("param_names" in g for g in groups):
        return _match_positions(groups, live, saved_groups, saved), [], []
    if False in named:
        raise ValueError("the checkpoint has names for the parameters of some groups only")
    return _match_names(live, saved)


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


def _match_names(live: list[_Live], saved: list[_Saved]) -> tuple[list[tuple[_Live, _Saved]], list[str], list[str]]:
    """Pairs of live and saved parameters of equal name, and the names that only one side has.

    A name as it is counts before one without the prefixes of module wrappers, and a parameter's own before an alias.
    """
    forms: tuple[Callable[[str], str], ...] = (str, canonical_name)
    found: dict[str, _Saved] = {}
    left = {theirs.name: theirs for theirs in saved}
    for form, count in itertools.product(forms, (1, None)):
        ours_by_name, theirs_by_name = _by_name(live, form, count), _by_name(saved, form, count)
        for name, ours in ours_by_name.items():
            theirs = theirs_by_name.get(name)
            if ours.name not in found and theirs is not None and theirs.name in left:
                found[ours.name] = left.pop(theirs.name)
    pairs = [(ours, found[ours.name]) for ours in live if ours.name in found]
    return pairs, [ours.name for ours in live if ours.name not in found], list(left)


def _by_name(params: Sequence[P], form: Callable[[str], str], count: int | None) -> dict[str, P]:
    """Parameters by the ``form`` of their first ``count`` names, where it stands for one of them alone."""
    every = {(form(name), param.name): param for param in params for name in param.names[:count]}
    holders = Counter(name for name, _ in every)
    return {name: param for (name, _), param in every.items() if holders[name] == 1}


def _check_groups(
    declaration: Declaration,
    groups: Sequence[ParamGroup],
    pairs: Sequence[tuple[_Live, _Saved]],
    saved_groups: Sequence[Mapping[str, Any]],
    skipped: Collection[str],
) -> tuple[Entries, Entries, list[str]]:
    """What each group takes from the saved groups its parameters were in, and where those disagree.

    Returns hyperparameters as Python numbers, copies of other entries, and conflicts.
    """
    sources: dict[int, dict[int, None]] = {}
    for ours, theirs in pairs:
        sources.setdefault(ours.group, {})[theirs.group] = None
    hypers = {h.name for h in declaration.hypers}
    numbers: Entries = {index: {} for index in sources}
    values: Entries = {index: {} for index in sources}
    conflicts: list[str] = []
    for index, saved_indices in sources.items():
        group, theirs_of_it = groups[index], [saved_groups[i] for i in saved_indices]
        conflicts += [f"{group.label}: {problem}" for problem in _unlike(declaration, group, theirs_of_it)]
        for key in dict.fromkeys(k for g in theirs_of_it for k in g if k not in skipped):
            take, taken = (_numbers, numbers) if key in hypers else (_copied, values)
            found = [take(group, key, g[key]) for g in theirs_of_it if key in g]
            if all(_equal(value, found[0]) for value in found[1:]):
                taken[index][key] = found[0]
            else:
                shown = ", ".join(map(described, found))
                conflicts.append(f"{group.label}: its parameters were in groups with different {key}: [{shown}]")
    return numbers, values, conflicts


def _unlike(declaration: Declaration, group: ParamGroup, saved_groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What says that the groups were those of another optimizer."""
    absent = [h.name for h in declaration.hypers if any(h.name not in g for g in saved_groups)]
    if absent:
        yield f"the checkpoint has no {', '.join(absent)} for it"
    for key in (s.name for s in declaration.statics if not s.init):
        found = (_copied(group, key, g[key]) for g in saved_groups if key in g)
        other = next((value for value in found if not _equal(value, group[key])), None)
        if other is not None:
            yield f"{key} is {described(other)} in the checkpoint"


def _numbers(group: ParamGroup, key: str, value: Any) -> Any:
    """The hyperparameter ``value`` as Python numbers, as far out of range at most as a scheduler's rounding takes it."""
    what = f"{key} of {group.label}"
    with naming(what):
        elements = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    plain = tuple(None if e is None else as_number(e, what, finite=False) for e in elements)
    numbers = plain if isinstance(value, (tuple, list)) else plain[0]
    for tensor, number in zip(group.tensors(key), group.validated(key, numbers, ROUNDING), strict=True):
        check_writable(tensor, what, (), number)
    return numbers


def _copied(group: ParamGroup, key: str, value: Any) -> Any:
    what = f"{key} of {group.label}"
    with naming(what, "cannot be copied"):
        if isinstance(value, Tensor):
            check_memory(value, what)
        return copy.deepcopy(value)


def _equal(a: Any, b: Any) -> bool:
    try:
        return torch.equal(a, b.to(a.device)) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
    except Exception:  # what cannot be compared: tensors without data, arrays of many, whatever an object raises
        return False


def _check_state(
    declaration: Declaration,
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    pairs: Sequence[tuple[_Live, _Saved]],
    numbers: Entries,
) -> tuple[list[tuple[Tensor, dict[str, Tensor]]], Copies, list[str]]:
    """What becomes of the state of every parameter once the groups hold ``numbers``, and what does not fit.

    Returns new entries, what to copy into which entry, and problems.
    """
    after = [{**g, **g.floats(), **numbers.get(i, {})} for i, g in enumerate(groups)]
    entries: list[tuple[Tensor, dict[str, Tensor]]] = []
    copies: Copies = []
    problems: list[str] = []
    for ours, theirs in pairs:
        choices = structure(declaration, groups[ours.group], ours.param)
        loaded = numbers.get(ours.group, {})
        choices |= {name: loaded[name] != 0 for name in declaration.structural_hypers if name in loaded}
        needed = declaration.present_buffers(choices)
        try:
            values = _state_values(declaration, needed, ours.param, theirs)
            if values or (ours.param in state and ours.param.requires_grad):
                live: Mapping[str, Any] = state.get(ours.param, {})
                initial = initial_values(declaration, after[ours.group])
                new, own_copies = _places(declaration, needed, ours.param, live, values, initial)
                entries += [(ours.param, new)] if new else []
                copies += own_copies
        except Unloadable as problem:
            problems.append(f"{ours.name}: {problem}")
    return entries, copies, problems


def _state_values(
    declaration: Declaration, needed: tuple[str, ...], param: Tensor, saved: _Saved
) -> dict[str, float | Tensor]:
    """What to copy into one parameter's state: everything it needs, or nothing if the checkpoint has no state for it.

    A buffer that a hyperparameter makes necessary may be there without need, left from when that was not 0.

    Raises:
        Unloadable: an entry is absent, has no place, or is not what it must be.
    """
    given = saved.state
    if not given:
        return {}
    scalars = scalar_names(declaration)
    shapes = {
        b.name: b.shape_for(param)
        for b in declaration.buffers
        if b.name in needed or (b.when in declaration.structural_hypers and b.name in given)
    }
    absent = [name for name in (*scalars, *needed) if name not in given]
    if absent:
        raise Unloadable(f"the checkpoint has no {', '.join(absent)} for it")
    foreign = [name if isinstance(name, str) else described(name) for name in given if name not in {*scalars, *shapes}]
    if foreign:
        raise Unloadable(f"the optimizer has no {', '.join(foreign)} for it")
    values: dict[str, float | Tensor] = {name: as_number(given[name], name) for name in scalars}
    if values["step"] < 0:
        raise Unloadable(f"step is {values['step']}")
    return values | {name: as_buffer(given[name], name, shape, param.dtype) for name, shape in shapes.items()}


def _places(
    declaration: Declaration,
    needed: tuple[str, ...],
    param: Tensor,
    live: Mapping[str, Any],
    values: Mapping[str, float | Tensor],
    initial: Mapping[str, float | Tensor],
) -> tuple[dict[str, Tensor], Copies]:
    """The entries that ``live``, one parameter's state, must get for ``values``, and what to copy into which entry.

    A parameter that the checkpoint knows but has no state for never took a step: its state starts anew. An entry that a
    differentiable step recorded is replaced, as such a step does.
    """
    buffers = {b.name: b.shape_for(param) for b in declaration.buffers if b.name in {*needed, *values, *live}}
    new: dict[str, Tensor] = {}
    if values:
        with naming("the optimizer's own state"), outside_inference_mode():
            new = missing_entries(declaration, tuple(n for n in buffers if n in needed or n in values), param, live, initial)
    copies: Copies = []
    for name in (*scalar_names(declaration), *buffers):
        entry = new.get(name, live.get(name))
        if entry is None:
            continue
        source = values.get(name, initial[name])
        check_writable(entry, f"the optimizer's own {name}", buffers.get(name), source)
        if entry.requires_grad:
            with outside_inference_mode():
                entry = new[name] = torch.empty_like(entry)
        copies.append((entry, source))
    return new, copies


def check_writable(entry: Tensor, what: str, shape: tuple[int, ...] | None, source: float | Tensor) -> None:
    """Raise :class:`Unloadable` if writing ``source`` into ``entry`` would fail."""
    with naming(what, "cannot be written"):
        check_memory(entry, what)
        if shape is not None and tuple(entry.shape) != shape:
            raise Unloadable(f"{what} has shape {tuple(entry.shape)} instead of {shape}")
        if any(size > 1 and stride == 0 for size, stride in zip(entry.shape, entry.stride(), strict=True)):
            raise Unloadable(f"{what} has elements that share memory")
        if entry.is_inference() and not torch.is_inference_mode_enabled():
            raise Unloadable(f"{what} was made in inference mode")
        if not isinstance(source, Tensor):
            # Two elements: a single one takes a number that is too large for its dtype, as infinity.
            fill(torch.empty(2, dtype=entry.dtype), source)


def _set_apart(copies: Copies, filled: Sequence[Tensor]) -> Copies:
    """``copies`` in such a form that their order does not matter, as of a state dict whose tensors are the live ones.

    A tensor that is its own source is left alone. A source is cloned if it lies in memory that is written: by another copy,
    or because it is one of ``filled``.
    """
    copies = [(target, source) for target, source in copies if not _is_same(target, source)]
    written = sorted(span(local(t)) for t in (*filled, *(target for target, _ in copies)))
    starts = [start for start, _ in written]
    ends = list(itertools.accumulate((end for _, end in written), max))

    def is_written(source: Tensor) -> bool:
        start, end = span(local(source))
        before = bisect.bisect_left(starts, end)
        return before > 0 and ends[before - 1] > start

    return [(t, s.clone() if isinstance(s, Tensor) and is_written(s) else s) for t, s in copies]


def _is_same(a: Tensor, b: float | Tensor) -> bool:
    """Whether two tensors of one shape are the same numbers in the same memory, on every process that holds a part."""
    if not isinstance(b, Tensor):
        return False
    here, there = local(a), local(b)
    in_place = (here.data_ptr(), here.stride()) == (there.data_ptr(), there.stride())
    return in_place and (a.dtype, placement(a)) == (b.dtype, placement(b))
