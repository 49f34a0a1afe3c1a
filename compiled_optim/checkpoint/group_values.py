"""Values that a group takes from a checkpoint: hyperparameters, options and entries of users; and conflicts."""

from __future__ import annotations

import copy
import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.checkpoint.read import (
    Unloadable,
    as_number,
    check_memory,
    described,
    foreign_options,
    is_set,
    naming,
    plain,
)
from compiled_optim.groups.param_group import ParamGroup, is_stored_as_is
from compiled_optim.memory.layout import is_lost
from compiled_optim.rule.fields import BUILT_IN, LR_SCALE, Hyper, built_in
from compiled_optim.rule.rule import RULE, Declaration
from compiled_optim.rule.transforms import DECOUPLED, is_decoupled
from compiled_optim.state import StateForm

_BY_LR = "decouple_lr"


class GroupChange(NamedTuple):
    """The values that a load writes into one group."""

    values: dict[str, Any]  # by key; hyperparameters are Python numbers, which may be out of range, as a scheduler's may
    targets: list[tuple[Tensor, str, float]]  # live tensors that change, the names of hyperparameters, and the new numbers
    problems: list[str]  # conflicts; the group keeps its value
    changed: list[str]  # options that were not as in the checkpoint, and which value holds now


def group_change(
    groups: Sequence[ParamGroup], index: int, saved: Sequence[Mapping[str, Any]], *, keep: bool, native: bool
) -> GroupChange:
    """Return what ``groups[index]`` takes from the entries of the ``saved`` groups that its parameters were in.

    Run-time flags and choices that only the constructor makes are not taken. Nor is ``weight_decay`` if it would have
    another meaning. With ``keep``, only modes are taken, and nothing else is checked. ``native`` says that this package
    saved the groups, which then lack options at their defaults.

    Raises:
        ValueError, TypeError: a value cannot be read, or is invalid for its hyperparameter.
    """
    group, change = groups[index], GroupChange({}, [], [], [])
    (values, _, problems, changed), kind, declaration = change, group.kind, group.kind._declaration
    for name in kind._modes:
        modes = [g.get(name, True) for g in saved]
        if foreign := [mode for mode in modes if not isinstance(mode, bool)]:
            raise Unloadable(f"{name} of {group.label} is {described(foreign[0])} instead of a bool")
        values[name] = modes[0]
        if len(set(modes)) > 1:
            problems.append(f"its parameters were in groups with different {name}")
    if keep:
        return change
    hypers = {h.name: h for h in declaration.hypers}
    shared = set(saved[0]).intersection(*saved[1:])
    if absent := [h.name for h in declaration.hypers if not h.when and h.name not in shared]:
        problems.append(f"the checkpoint has no {', '.join(absent)} for it")
    if others := [g[RULE] for g in saved if g.get(RULE, kind.__name__) != kind.__name__]:
        problems.append(f"{RULE} is {described(others[0])} in the checkpoint, and {kind.__name__} here")
    for key in [s.name for s in declaration.statics if not s.init and s.name not in DECOUPLED]:
        copies = (copied(g[key], f"{key} of {group.label}") for g in saved if key in g)
        if (other := next((value for value in copies if not _equal(value, group[key])), None)) is not None:
            problems.append(f"{key} is {described(other)} in the checkpoint")
    values |= (options := _options(change, groups, index, saved, native=native))
    after = ChainMap(options, group) if options else group
    for option in declaration.options:
        if option.name in shared and option.name not in (*declaration.loaded_options, LR_SCALE):
            loaded, current = built_in(saved[0][option.name]), group.get(option.name, option.default)
            if not _equal(loaded, current):
                stays = f"{option.name} is {described(loaded)} in the checkpoint, stays {described(current)}"
                changed.append(f"{group.label}: {stays}")
    unknown = foreign_options(saved, kind._all_fields)
    for name, value in unknown.items():
        problems.append(f"the checkpoint's {name}={described(value)} has no counterpart")
    chosen = (*declaration.statics, *declaration.options)
    skipped = {*kind._group_flags, *kind._modes, *[c.name for c in chosen], RULE, *unknown}
    skipped |= {n for n, h in hypers.items() if h.fixed and any([h.choice(g.get(n)) is not None for g in (group, *saved)])}
    taken: dict[str, list[Any]] = {}
    for g in saved:
        for key in [key for key in g if key not in skipped]:
            value = _value(change, group, key, hypers.get(key), g[key], after)
            taken.setdefault(key, []).append(value)
    kept = [key for key, each in taken.items() if len(each) > 1 and not all([_equal(value, each[0]) for value in each])]
    problems += [f"its parameters were in groups with different {key}: {_listed(taken[key])}" for key in kept]
    if decays := dict.fromkeys([problem for g in saved for problem in _decay_conflicts(declaration, group, after, g)]):
        problems += decays
        kept += ["weight_decay", "max_lr"]
    values |= {key: each[0] for key, each in taken.items() if key not in kept}
    return change


def _options(
    change: GroupChange, groups: Sequence[ParamGroup], index: int, saved: Sequence[Mapping[str, Any]], *, native: bool
) -> dict[str, Any]:
    """Return the values in ``saved`` groups of options that differ in a group; report those that it refuses.

    An option that decides which buffers exist must be the same.
    """
    group, problems, taken = groups[index], change.problems, dict[str, Any]()
    declaration, defaults = group.kind._declaration, group.kind._declaration.loaded_options
    others = {
        name: default
        for name, default in defaults.items()
        for g in saved
        if (native or name in g)
        and (type(value := g.get(name, default)) not in BUILT_IN or value != dict.get(group, name, default))
    }
    if not others:
        return taken
    fixed = {h.name: h for h in declaration.hypers if h.fixed}
    for name, default in others.items():
        explicit, current = [{name: default, **g} for g in saved if native or name in g], group.get(name, default)
        if isinstance(default, bool):
            values: list[Any] = [is_set(g, name, group.label) for g in explicit]
        else:
            values = [built_in(copied(g[name], f"{name} of {group.label}")) for g in explicit]
        if name in fixed and len({fixed[name].choice(value) for value in (current, *values)}) == 1:
            continue  # equal, or numbers, which are no option
        if not all([_equal(value, values[0]) for value in values]):
            problems.append(f"its parameters were in groups with different {name}: {_listed(values)}")
        elif not _equal(values[0], current):
            taken[name] = values[0]
    if not taken:
        return taken
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the constructor has given the advice
            group.check({**{h.name: saved[0][h.name] for h in declaration.hypers if h.name in saved[0]}, **taken})
    except (TypeError, ValueError) as error:
        problems.append(f"the checkpoint's {', '.join(taken)} cannot be taken: {error}")
        return {}
    form_of = StateForm.of_group(declaration, groups, index)
    for name, value in [*taken.items()]:
        new_form_of = StateForm.of_group(declaration, groups, index, {name: value})
        if any([form_of(j).buffers != new_form_of(j).buffers for j in range(len(group["params"]))]):
            problems.append(f"{name}, which decides which buffers exist, is {described(taken.pop(name))} in the checkpoint")
    for name, value in taken.items():
        was = f"was {described(group.get(name, defaults[name]))}"
        change.changed.append(f"{group.label}: {name} is {described(value)} as in the checkpoint, {was}")
    return taken


def _listed(values: Sequence[Any]) -> str:
    return f"[{', '.join(map(described, values))}]"


def _decay_conflicts(
    declaration: Declaration, group: ParamGroup, after: Mapping[str, Any], saved: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why ``weight_decay`` of ``saved`` has another meaning in ``group`` with its entries ``after`` the load.

    If neither side decays weights, yield nothing.
    """
    defaults = {s.name: s.default for s in declaration.statics}
    decay = as_number(saved.get("weight_decay", 0.0), f"weight_decay of {group.label}", finite=False)
    if _BY_LR not in defaults or not (decay or group.floats().get("weight_decay")):
        return
    noted = {name: is_set(saved, name, group.label) for name in (_BY_LR, *DECOUPLED) if saved.get(name) is not None}
    choices = {**defaults, _BY_LR: False, **noted}
    torchs_name, name = DECOUPLED
    name = name if name in defaults else torchs_name
    is_known = torchs_name not in defaults or saved.keys() & {*DECOUPLED}  # torch.optim did not always save it
    meanings = [(_BY_LR, choices[_BY_LR], bool(after.get(_BY_LR)))]
    meanings += [(name, is_decoupled(choices), is_decoupled(after))] if name in defaults and is_known else []
    for choice, loaded, current in meanings:
        if loaded != current:
            meaning = 'whose weight_decay has another meaning; hyperparameters="keep" keeps the optimizer\'s'
            yield f"{choice} is {loaded} in the checkpoint, {meaning}"


def _value(
    change: GroupChange, group: ParamGroup, key: str, hyper: Hyper | None, value: Any, after: Mapping[str, Any]
) -> Any:
    """Return the value that ``group`` takes for ``key``: a copy of ``value``, or Python numbers for a ``hyper``.

    ``after`` are its entries with the options that it takes.
    """
    what = f"{key} of {group.label}"
    if hyper is None or is_stored_as_is(hyper, value, after):
        return copied(value, what)
    parsed = value if type(value) is float else plain(value, what)
    parsed = plain(built_in(parsed), what) if hyper.is_tuple and type(parsed) is not list else parsed
    elements = parsed if isinstance(parsed, list) else [parsed]
    numbers = tuple([e if e is None or type(e) is float else as_number(e, what, finite=False) for e in elements])
    result = numbers if isinstance(parsed, list) else numbers[0]
    if not group.holds(key, result):
        pairs = zip(group.read_only(key), hyper.elements(result, group.label), strict=True)
        change.targets.extend([(tensor, what, float(number)) for tensor, number in pairs])
    return result


def copied(value: Any, what: str) -> Any:
    """Return a deep copy of ``value``, called ``what``; raise :class:`Unloadable` if it cannot be copied."""
    if type(value) in BUILT_IN:
        return value
    with naming(what, "cannot be copied"):
        if isinstance(value, Tensor):
            check_memory(value, what)
        else:
            _check_tensors(value, what)
        return copy.deepcopy(value)


def _check_tensors(value: Any, what: str) -> None:
    """Raise :class:`Unloadable` if a container in ``value`` holds a tensor whose memory was freed: torch would read it."""
    todo, known = [value], set[int]()
    for each in todo:
        if isinstance(each, Tensor):
            if not each.is_nested and is_lost(each):
                raise Unloadable(f"{what} has no memory: its storage is empty or too small")
        elif isinstance(each, (dict, list, tuple)) and id(each) not in known:
            known.add(id(each))
            todo.extend(each.values() if isinstance(each, dict) else each)


def _equal(a: Any, b: Any) -> bool:
    try:
        return torch.equal(a, b.to(a.device)) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
    except Exception:  # not comparable: tensors without data, arrays of many elements, or objects that raise
        return False
