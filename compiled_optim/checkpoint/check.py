"""What a load will write into groups and state, with everything checked that could make writing fail."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.match import Pairs
from compiled_optim.checkpoint.read import FLOATING, Unloadable, as_buffer, as_number, as_tensor, described, is_set, naming
from compiled_optim.checkpoint.write import Copies, Entries, GroupValues, check_writable, copied, is_same
from compiled_optim.groups.param_group import ParamGroup, is_own
from compiled_optim.memory.layout import obstacle
from compiled_optim.memory.sharding import local
from compiled_optim.memory.torch_internals import outside_inference_mode
from compiled_optim.rule.fields import Buffer, Hyper
from compiled_optim.rule.rule import Declaration
from compiled_optim.rule.storage import CODE_DTYPES, PARTS, code_name, scale_name
from compiled_optim.rule.transforms import DECOUPLED, is_decoupled
from compiled_optim.state import (
    CODES,
    SPLITS,
    OptimizerState,
    adds_nothing,
    check_codes,
    converted,
    held_name,
    initial_values,
    missing_entries,
    part_of,
    scalar_names,
    stored_part,
    structure,
)

_BY_LR = "decouple_lr"
_STORED = code_name(""), scale_name("")  # how the names of codes and their scales end


def decay_conflicts(
    declaration: Declaration, groups: Sequence[ParamGroup], pairs: Pairs, saved_groups: Sequence[Mapping[str, Any]]
) -> dict[int, list[str]]:
    """Where ``groups`` decay weights in another way than the saved groups that they are loaded from, by index.

    These choices stay the optimizer's own, and the ``weight_decay`` that is loaded would mean something else. Without any
    decay on both sides nothing differs.
    """
    defaults = {s.name: s.default for s in declaration.statics}
    found: dict[int, list[str]] = {}
    for index, saved_index in dict.fromkeys([(ours.group, theirs.group) for ours, theirs in pairs]):
        group, saved = groups[index], saved_groups[saved_index]
        if _decays(saved, group.label) or group.floats().get("weight_decay"):
            for choice, value in _differing(group, saved, defaults):
                found.setdefault(index, []).append(
                    f"{group.label}: {choice} is {value} in the checkpoint, whose weight_decay has another meaning; "
                    'hyperparameters="keep" keeps the optimizer\'s'
                )
    return {index: list(dict.fromkeys(problems)) for index, problems in found.items()}


def _decays(saved: Mapping[str, Any], label: str) -> bool:
    return "weight_decay" in saved and as_number(saved["weight_decay"], f"weight_decay of {label}", finite=False) != 0


def _differing(group: ParamGroup, saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """The choices of decay that ``saved`` made in another way than ``group``, and what it chose."""
    if _BY_LR not in defaults:
        return
    choices: dict[str, Any] = {_BY_LR: is_set(saved, _BY_LR, group.label)}
    for name in DECOUPLED:
        choices[name] = defaults.get(name) if saved.get(name) is None else is_set(saved, name, group.label)
    if choices[_BY_LR] != bool(group.get(_BY_LR)):
        yield _BY_LR, choices[_BY_LR]
    torchs, wd = DECOUPLED
    is_unknown = torchs in defaults and not saved.keys() & {*DECOUPLED}  # torch.optim did not always note it
    if wd in defaults and not is_unknown and is_decoupled(choices) != is_decoupled(group):
        yield wd, is_decoupled(choices)


def as_chosen(
    declaration: Declaration, param: Tensor, saved: Mapping[str, Any], choices: Mapping[str, Any]
) -> dict[str, Any]:
    """``saved``, the entries of ``param`` in a checkpoint, stored as ``choices`` say; the same tensors where they are so.

    Where the choices keep no part of a weight, one that is there stays, for the load to report; or goes, if ``param`` holds
    by itself what it adds. What is converted is in memory until the load is written.

    Raises:
        Unloadable: an entry that must be converted is not what it must be, such as a negative scale.
    """
    if not (choices.get("weights") or choices.get("state_dtype") or any(map(_is_stored_part, saved.items()))):
        return dict(saved)
    try:
        name = stored_part({part: value for part, value in saved.items() if value is not None})
        stored = {} if name is None else {name: _part(name, param, saved[name])}
        for field in declaration.buffers:
            if field.int8 and (held := held_name(field, saved)):
                stored |= _buffer(declaration, field, held, param, saved, choices)
        changes = converted(declaration, param, stored, choices)
        if name is not None and part_of(choices) is None and not adds_nothing(param, name, stored[name]):
            del changes[name]
    except Unloadable:
        raise
    except ValueError as error:
        raise Unloadable(str(error)) from error
    gone = {entry for entry, value in changes.items() if value is None}
    return {entry: value for entry, value in {**saved, **changes}.items() if entry not in gone}


def _is_stored_part(item: tuple[str, Any]) -> bool:
    """Whether an entry may be what a weight's own dtype cannot hold, or codes, or their scales."""
    name, value = item
    return name in PARTS or name.endswith(_STORED) or getattr(value, "dtype", None) in CODES


def _part(name: str, param: Tensor, value: Any) -> Tensor:
    dtype = getattr(value, "dtype", param.dtype)
    return as_buffer(value, name, tuple(param.shape), dtype if name == "remainder" and dtype in SPLITS else param.dtype)


def _buffer(
    declaration: Declaration, field: Buffer, name: str, param: Tensor, saved: Mapping[str, Any], choices: Mapping[str, Any]
) -> dict[str, Tensor]:
    """What of ``saved`` stores the buffer ``field`` under ``name``, if that is in codes or must become codes."""
    coded, scale, shape = code_name(field.name), scale_name(field.name), tuple(param.shape)
    if name != coded and coded in saved:
        raise Unloadable(f"it has both {name} and {coded}")
    dtype = getattr(saved[name], "dtype", None)
    if name == coded or dtype in CODES:
        if scale not in saved:
            raise Unloadable(f"{name} has codes of 8 bits, and the checkpoint has no {scale} for them")
        kind = dtype if dtype in CODES else CODE_DTYPES[field.int8 or ""]
        codes, scales = as_buffer(saved[name], name, shape, kind), as_tensor(saved[scale], scale)
        check_codes(field, codes, scales)
        _check_numbers(codes, name, scales, scale)
        return {name: codes, scale: scales}
    if dtype in FLOATING and scale in saved:
        raise Unloadable(f"{scale} belongs to codes of 8 bits, and {name} is {dtype}")
    is_coded = declaration.dtype_of(field, param.dtype, choices) in CODES
    return {name: as_buffer(saved[name], name, shape, param.dtype)} if is_coded else {}


def _check_numbers(codes: Tensor, name: str, scales: Tensor, scale: str) -> None:
    """Raise :class:`Unloadable` where codes or scales are none that a step makes; an overflow makes infinite scales."""
    given = local(scales).double()
    stored = given.float()
    if not bool(((stored >= 0) & (stored.isinf() == given.isinf())).all()):
        raise Unloadable(f"{scale} has numbers that are no scales: negative, NaN, or beyond float32's range")
    if codes.dtype == torch.int8 and bool((local(codes) == -128).any()):
        raise Unloadable(f"{name} has -128, which is no code")


def check_groups(
    declaration: Declaration,
    groups: Sequence[ParamGroup],
    pairs: Pairs,
    saved_groups: Sequence[Mapping[str, Any]],
    skipped: Collection[str],
) -> tuple[GroupValues, list[str]]:
    """What each group takes from the saved groups that its parameters were in, except the keys in ``skipped``.

    A hyperparameter that goes with a choice is not taken where only the saved groups made that.

    Returns hyperparameters as Python numbers and copies of other values, and where the saved groups of one group disagree. A
    value that cannot be read, or is out of range, is an error.
    """
    sources: dict[int, dict[int, None]] = {}
    for ours, theirs in pairs:
        sources.setdefault(ours.group, {})[theirs.group] = None
    values: GroupValues = {index: {} for index in sources}
    hypers = {h.name: h for h in declaration.hypers}
    conflicts: list[str] = []
    for index, saved_indices in sources.items():
        group, theirs_of_it = groups[index], [saved_groups[i] for i in saved_indices]
        conflicts += [f"{group.label}: {problem}" for problem in _of_another_optimizer(declaration, group, theirs_of_it)]
        unread = {h.name for h in declaration.hypers for g in theirs_of_it if h.when and _is_read_there_only(h, group, g)}
        for key in dict.fromkeys([k for g in theirs_of_it for k in g if k not in skipped and k not in unread]):
            hyper = hypers.get(key)
            values_of_it = [g[key] for g in theirs_of_it if key in g]
            found = [(_numbers if hyper and not is_own(hyper, v, group) else _copied)(group, key, v) for v in values_of_it]
            if all([_equal(value, found[0]) for value in found[1:]]):
                values[index][key] = found[0]
            else:
                shown = ", ".join(map(described, found))
                conflicts.append(f"{group.label}: its parameters were in groups with different {key}: [{shown}]")
    return values, conflicts


def check_modes(
    modes: Collection[str],
    groups: Sequence[ParamGroup],
    pairs: Pairs,
    saved_groups: Sequence[Mapping[str, Any]],
    values: GroupValues,
) -> list[str]:
    """Add the ``modes`` of the saved groups to ``values``, as parameters come in them; returns where these disagree."""
    conflicts: list[str] = []
    for name in modes:
        for ours, theirs in pairs:
            mode = saved_groups[theirs.group].get(name, True)
            if not isinstance(mode, bool):
                raise Unloadable(f"{name} of {groups[ours.group].label} is {described(mode)} instead of a bool")
            if values.setdefault(ours.group, {}).setdefault(name, mode) is not mode:
                conflicts.append(f"{groups[ours.group].label}: its parameters were in groups with different {name}")
    return list(dict.fromkeys(conflicts))


def _is_read_there_only(hyper: Hyper, group: ParamGroup, saved: Mapping[str, Any]) -> bool:
    """Whether only the saved group made the choice with which ``hyper`` goes."""
    assert hyper.when is not None
    return not group.get(hyper.when) and is_set(saved, hyper.when, group.label)


def _of_another_optimizer(
    declaration: Declaration, group: ParamGroup, saved_groups: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """The signs that another kind of optimizer saved the groups."""
    shared = set(saved_groups[0]).intersection(*saved_groups[1:])
    if absent := [h.name for h in declaration.hypers if not h.when and h.name not in shared]:
        yield f"the checkpoint has no {', '.join(absent)} for it"
    for key in (s.name for s in declaration.statics if not s.init):
        found = (_copied(group, key, g[key]) for g in saved_groups if key in g)
        if (other := next((value for value in found if not _equal(value, group[key])), None)) is not None:
            yield f"{key} is {described(other)} in the checkpoint"


def _numbers(group: ParamGroup, key: str, value: Any) -> Any:
    """The hyperparameter ``value`` as Python numbers, in their range or not: a scheduler may have written the last ones."""
    what = f"{key} of {group.label}"
    with naming(what):
        elements = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    plain = tuple([None if e is None else as_number(e, what, finite=False) for e in elements])
    numbers = plain if isinstance(value, (tuple, list)) else plain[0]
    for tensor, number in zip(group.read_only(key), group.validated(key, numbers), strict=True):
        check_writable(tensor, what, (), number)
    return numbers


def _copied(group: ParamGroup, key: str, value: Any) -> Any:
    return copied(value, f"{key} of {group.label}")


def _equal(a: Any, b: Any) -> bool:
    try:
        return torch.equal(a, b.to(a.device)) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
    except Exception:  # what cannot be compared: tensors without data, arrays of many, whatever an object raises
        return False


def check_state(
    declaration: Declaration,
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    pairs: Pairs,
    group_values: GroupValues,
    known: Collection[str],
) -> tuple[list[tuple[Tensor, dict[str, Tensor]]], Copies, list[tuple[Tensor, Entries]], list[str]]:
    """The state of every parameter once the groups hold ``group_values``; ``known`` are the names that an optimizer gives.

    Returns new state tensors by parameter, what is copied into state tensors, what changes of others' entries by parameter,
    and what does not fit, by parameter name. An entry that only another optimizer has does not fit; what fits is taken.
    """
    hypers = {h.name for h in declaration.hypers}
    loaded = [group_values.get(i, {}) for i in range(len(groups))]
    numbers = [own if hypers <= own.keys() else {**g.floats(), **own} for own, g in zip(loaded, groups, strict=True)]
    after = [{**own, "differentiable": g.get("differentiable", False)} for own, g in zip(numbers, groups, strict=True)]
    made: list[tuple[Tensor, dict[str, Tensor]]] = []
    copies: Copies = []
    entries: list[tuple[Tensor, Entries]] = []
    problems: list[str] = []
    for ours, theirs in pairs:
        param, live = ours.content, state.get(ours.content, {})
        if param.is_meta and not any(isinstance(v, Tensor) and v.dim() and not v.is_meta for v in theirs.content.values()):
            continue  # there is nothing to copy, and nowhere to put it
        own = {name: value for name, value in theirs.content.items() if name in known}
        others = {name: value for name, value in theirs.content.items() if name not in known}
        values: dict[str, Any] = {}
        try:
            if reason := obstacle(param):
                if own:
                    raise Unloadable(reason)
            else:
                choices = structure(declaration, groups, ours.group, ours.index, group_values.get(ours.group, {}))
                needed = declaration.present_buffers(choices)
                own = as_chosen(declaration, param, own, choices)
                values = _values(declaration, needed, param, own, choices) if own or (others and param.requires_grad) else {}
                if values or (live and param.requires_grad):
                    initial = initial_values(declaration, after[ours.group])
                    new, targets = _targets(declaration, needed, param, live, values, initial, choices)
                    made += [(param, new)] if new else []
                    copies += targets
        except Unloadable as problem:
            problems.append(f"{ours.name}: {problem}")
            continue
        if foreign := [name for name in own if name not in values]:
            problems.append(f"{ours.name}: the optimizer has no {', '.join(foreign)} for it")
        if theirs.content or param.requires_grad:
            changed, faults = Entries.of(others, live, known, param)
            entries += [(param, changed)] if any(changed) else []
            problems += [f"{ours.name}: {fault}" for fault in faults]
    return made, copies, entries, problems


def _values(
    declaration: Declaration,
    needed: tuple[str, ...],
    param: Tensor,
    saved: Mapping[str, Any],
    choices: Mapping[str, Any],
) -> dict[str, float | Tensor]:
    """What of ``saved`` to copy into one parameter's state: everything that it needs.

    A buffer that a hyperparameter other than 0 makes necessary may be there without need, from when that was not 0. The part
    of a weight may be absent. Another entry that is absent, or one that is not what it must be, is :class:`Unloadable`.
    """
    scalars = scalar_names(declaration)
    fields = [
        b for b in declaration.buffers if b.name in needed or (b.when in declaration.structural_hypers and b.name in saved)
    ]
    if absent := [name for name in (*scalars, *needed) if name not in saved and name not in PARTS]:
        raise Unloadable(f"the checkpoint has no {', '.join(absent)} for it")
    values: dict[str, float | Tensor] = {name: as_number(saved[name], name) for name in scalars}
    if values.get("step", 0) < 0:
        raise Unloadable(f"step is {values['step']}")
    for b in [b for b in fields if b.name in saved]:
        shape, dtype = declaration.shape_of(b, param.shape, choices), declaration.dtype_of(b, param.dtype, choices)
        values[b.name] = as_buffer(saved[b.name], b.name, shape, dtype)
    return values


def _targets(
    declaration: Declaration,
    needed: tuple[str, ...],
    param: Tensor,
    live: Mapping[str, Any],
    values: Mapping[str, float | Tensor],
    initial: Mapping[str, float | Tensor],
    choices: Mapping[str, Any],
) -> tuple[dict[str, Tensor], Copies]:
    """The tensors that ``live``, one parameter's state, must get for ``values``, and what to copy into which tensor.

    Without ``values``, the parameter never took a step when the checkpoint was saved, and its state starts anew. So it does
    where the state dict was not copied then, and its buffers are the live ones, which steps have changed. A tensor that a
    differentiable step recorded is replaced, as such a step does. The part of a weight of which ``values`` say nothing
    stays: a step knows whether it fits ``param``.
    """
    present = {*needed, *values, *live}
    buffers = {b.name: declaration.shape_of(b, param.shape, choices) for b in declaration.buffers if b.name in present}
    new: dict[str, Tensor] = {}
    if values:
        with naming("the optimizer's own state"), outside_inference_mode():
            names = tuple([n for n in buffers if n in needed or n in values])
            new = missing_entries(declaration, names, param, live, initial, choices)
    copies: Copies = []
    was_stepped = values.get("step") == 0 and "step" in live and live["step"].item() != 0
    for name in (*scalar_names(declaration), *buffers):
        if (target := new.get(name, live.get(name))) is None:
            continue
        if name in PARTS and name not in values:
            continue
        source = values.get(name, initial[name])
        if was_stepped and is_same(target, source):
            source = initial[name]
        check_writable(target, f"the optimizer's own {name}", buffers.get(name), source)
        if target.requires_grad:
            with outside_inference_mode():
                target = new[name] = torch.empty_like(target)
        if not is_same(target, source):
            copies.append((target, source))
    return new, copies
