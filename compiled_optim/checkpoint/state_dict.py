"""Saving and loading state dicts, with state by parameter name.

A state dict has torch.optim's layout: ``state`` by parameter index, ``param_groups`` with Python numbers and, where the
parameters have names, ``param_names``. Loading reads it, matches parameters by name in any order and grouping, and checks
everything that could make writing fail. Only then does it write, into the live tensors, so that references to them keep
working. Entries of hooks and wrappers in an optimizer's state are called foreign, and are loaded as torch.optim does.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import itertools
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from compiled_optim.checkpoint.read import (
    FLOATING,
    FORMAT_VERSION,
    SavedParam,
    Unloadable,
    as_buffer,
    as_number,
    as_tensor,
    check_memory,
    described,
    foreign_options,
    foreign_state,
    group_names,
    is_set,
    match,
    naming,
    plain,
    read,
    translated,
)
from compiled_optim.groups.param_group import ParamGroup, is_stored_as_is
from compiled_optim.groups.parameters import advising
from compiled_optim.memory.layout import TORCH_TYPES, local, obstacle, placement, span, spread_like
from compiled_optim.memory.torch_internals import outside_inference_mode
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.fields import BUILT_IN, Buffer, Flag, Hyper, Scale, built_in
from compiled_optim.rule.rule import RULE, WHY, Declaration
from compiled_optim.rule.storage import CODE_DTYPES, PARTS, code_name, scale_name
from compiled_optim.rule.transforms import DECOUPLED, is_decoupled
from compiled_optim.state import (
    CODES,
    SPLITS,
    OptimizerState,
    StateForm,
    adds_nothing,
    check_codes,
    fill,
    held_name,
    initial_values,
    stored_part,
)

Copies: TypeAlias = list[tuple[Tensor, float | Tensor]]
"""Tensors, each with the tensor that is copied into it, or the number that fills it."""

Values: TypeAlias = dict[str, float | Tensor]
"""Entries of a parameter's state by name: tensors, and numbers for scalars and for buffers that are filled."""

_BY_LR = "decouple_lr"
_CODED = code_name(""), scale_name("")  # the suffixes of the names of codes and of their scales


class LoadReport(NamedTuple):
    """The names that a load left out: ``missing`` in the checkpoint, ``unexpected`` in it, or ``mismatched``.

    State that belongs to no parameter of the checkpoint is ``unexpected`` too. A parameter that is ``missing``, or has one
    ``mismatched`` entry, keeps its whole state: in a new optimizer it starts at step 0. A ``mismatched`` hyperparameter or
    option keeps the optimizer's value. Entries of hooks and wrappers, whose names no optimizer uses, are loaded and not
    reported.

    ``changed`` names the options of groups that were not as in the checkpoint, and which value holds now. It is no error.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    changed: list[str]


@dataclass
class PreparedLoad:
    """A load. Everything is checked and allocated, so that writing cannot fail; nothing is written yet."""

    report: LoadReport  # the names that it leaves out, and changed options
    groups: Sequence[ParamGroup]
    state: OptimizerState
    params: list[SavedParam]
    foreign: dict[Any, Any]  # the foreign state
    group_values: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index of the group; numbers are Python's
    copies: Copies = field(default_factory=list)  # into state tensors, live or new
    afterwards: list[Callable[[], object]] = field(default_factory=list)  # called when everything is written


def check_groups(load: PreparedLoad, saved_groups: Sequence[Mapping[str, Any]], *, keep: bool, native: bool) -> list[str]:
    """Take each group's values from the saved groups that its parameters were in. Return the conflicts.

    With ``keep``, only modes are taken, and nothing else is checked. ``native`` says that this package saved the groups,
    which then lack options at their defaults.

    Raises:
        ValueError, TypeError: a value cannot be read, or is invalid for its hyperparameter.
    """
    sources: dict[int, dict[int, Mapping[str, Any]]] = {}
    for each in load.params:
        sources.setdefault(each.current.group, {})[each.saved.group] = saved_groups[each.saved.group]
    conflicts: list[str] = []
    for index, by_index in sources.items():
        group, saved = load.groups[index], list(by_index.values())
        values, problems = ({}, []) if keep else _group_values(load, index, saved, native=native)
        for name in group.kind._modes:
            modes = [g.get(name, True) for g in saved]
            if foreign := [mode for mode in modes if not isinstance(mode, bool)]:
                raise Unloadable(f"{name} of {group.label} is {described(foreign[0])} instead of a bool")
            values[name] = modes[0]
            if len(set(modes)) > 1:
                problems.append(f"its parameters were in groups with different {name}")
        load.group_values[index] = values
        conflicts += [f"{group.label}: {problem}" for problem in problems]
    return conflicts


def _group_values(
    load: PreparedLoad, index: int, saved: Sequence[Mapping[str, Any]], *, native: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that a group takes from ``saved`` groups, hyperparameters as Python numbers, and the problems.

    Run-time flags and choices that only the constructor makes are not taken. Nor is ``weight_decay`` if it would have
    another meaning.
    """
    group = load.groups[index]
    kind, declaration = group.kind, group.kind._declaration
    hypers = {h.name: h for h in declaration.hypers}
    problems: list[str] = []
    shared = set(saved[0]).intersection(*saved[1:])
    if absent := [h.name for h in declaration.hypers if not h.when and h.name not in shared]:
        problems.append(f"the checkpoint has no {', '.join(absent)} for it")
    if others := [g[RULE] for g in saved if g.get(RULE, kind.__name__) != kind.__name__]:
        problems.append(f"{RULE} is {described(others[0])} in the checkpoint, and {kind.__name__} here")
    for key in [s.name for s in declaration.statics if not s.init and s.name not in DECOUPLED]:
        copies = (copied(g[key], f"{key} of {group.label}") for g in saved if key in g)
        if (other := next((value for value in copies if not _equal(value, group[key])), None)) is not None:
            problems.append(f"{key} is {described(other)} in the checkpoint")
    options = _options(load, index, saved, problems, native=native)
    after = ChainMap(options, group)
    for option in declaration.options:
        if option.name in shared and option.name not in declaration.loaded_options:
            loaded, current = built_in(saved[0][option.name]), group.get(option.name, option.default)
            if not _equal(loaded, current):
                change = f"{option.name} is {described(loaded)} in the checkpoint, stays {described(current)}"
                load.report.changed.append(f"{group.label}: {change}")
    foreign = foreign_options(saved, kind._all_fields)
    for name, value in foreign.items():
        problems.append(f"the checkpoint's {name}={described(value)} has no counterpart")
    chosen = (*declaration.statics, *declaration.scales, *declaration.options)
    skipped = {*kind._group_flags, *kind._modes, *[c.name for c in chosen], "params", "param_names", RULE, *foreign}
    for h in declaration.hypers:
        if h.fixed and any([h.choice(g.get(h.name)) is not None for g in (group, *saved)]):
            skipped.add(h.name)
    taken: dict[str, list[Any]] = {}
    for g in saved:
        for key in g:
            if key not in skipped:
                taken.setdefault(key, []).append(_value(group, key, hypers.get(key), g[key], after))
    differing = [key for key, values in taken.items() if len(values) > 1 and not all([_equal(v, values[0]) for v in values])]
    for key in differing:
        problems.append(f"its parameters were in groups with different {key}: [{', '.join(map(described, taken[key]))}]")
    if decays := dict.fromkeys([problem for g in saved for problem in _decay_conflicts(declaration, group, after, g)]):
        problems += decays
        differing += ["weight_decay", "max_lr"]
    return options | {key: values[0] for key, values in taken.items() if key not in differing}, problems


def _options(
    load: PreparedLoad, index: int, saved: Sequence[Mapping[str, Any]], problems: list[str], *, native: bool
) -> dict[str, Any]:
    """Return the values in ``saved`` groups of options that differ in a group; add those that it refuses to ``problems``.

    An option that decides which buffers exist must be the same.
    """
    group, taken = load.groups[index], dict[str, Any]()
    declaration = group.kind._declaration
    defaults = declaration.loaded_options
    others = {
        name: default
        for name, default in defaults.items()
        for g in saved
        if (native or name in g)
        and (type(value := g.get(name, default)) not in BUILT_IN or value != dict.get(group, name, default))
    }
    fixed = {h.name: h for h in declaration.hypers if h.fixed} if others else {}
    for name, default in others.items():
        explicit, current = [{name: default, **g} for g in saved if native or name in g], group.get(name, default)
        if isinstance(default, bool):
            values: list[Any] = [is_set(g, name, group.label) for g in explicit]
        else:
            values = [built_in(copied(g[name], f"{name} of {group.label}")) for g in explicit]
        if name in fixed and len({fixed[name].choice(value) for value in (current, *values)}) == 1:
            continue  # equal, or numbers, which are no option
        if not all([_equal(value, values[0]) for value in values]):
            problems.append(f"its parameters were in groups with different {name}: [{', '.join(map(described, values))}]")
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
    form_of = StateForm.of_group(declaration, load.groups, index)
    for name, value in [*taken.items()]:
        new_form_of = StateForm.of_group(declaration, load.groups, index, {name: value})
        if any([form_of(j).buffers != new_form_of(j).buffers for j in range(len(group["params"]))]):
            problems.append(f"{name}, which decides which buffers exist, is {described(taken.pop(name))} in the checkpoint")
    for name, value in taken.items():
        current = group.get(name, defaults[name])
        change = f"{name} is {described(value)} as in the checkpoint, was {described(current)}"
        load.report.changed.append(f"{group.label}: {change}")
    return taken


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


def _value(group: ParamGroup, key: str, hyper: Hyper | None, value: Any, after: Mapping[str, Any]) -> Any:
    """Return the value that ``group`` takes for ``key``: a copy of ``value``, or Python numbers for a ``hyper``.

    ``after`` are its entries with the options that it takes. The numbers may be out of range, since a scheduler may have
    written them.
    """
    what = f"{key} of {group.label}"
    if hyper is None or is_stored_as_is(hyper, value, after):
        return copied(value, what)
    parsed = value if type(value) is float else plain(value, what)
    parsed = plain(built_in(parsed), what) if hyper.is_tuple and type(parsed) is not list else parsed
    elements = parsed if isinstance(parsed, list) else [parsed]
    numbers = tuple([e if e is None or type(e) is float else as_number(e, what, finite=False) for e in elements])
    result = numbers if isinstance(parsed, list) else numbers[0]
    for tensor, number in zip(group.read_only(key), hyper.elements(result, group.label), strict=True):
        check_writable(tensor, what, (), number)
    return result


def copied(value: Any, what: str) -> Any:
    """Return a deep copy of ``value``, called ``what``; raise :class:`Unloadable` if it cannot be copied."""
    with naming(what, "cannot be copied"):
        if isinstance(value, Tensor):
            check_memory(value, what)
        return copy.deepcopy(value)


def _equal(a: Any, b: Any) -> bool:
    try:
        return torch.equal(a, b.to(a.device)) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
    except Exception:  # not comparable: tensors without data, arrays of many elements, or objects that raise
        return False


def check_state(
    load: PreparedLoad, saved_groups: Sequence[Mapping[str, Any]], saved_by: Any, every: Collection[str]
) -> None:
    """Prepare the copies into the parameters' state for the groups' new values; report misfits by parameter name.

    A parameter takes nothing if one of its entries cannot be loaded. An entry that only another optimizer has is reported,
    and the others are taken. ``every`` has the names of all optimizers' entries. In a group that was ``saved_by`` a class of
    the same name, only that class's names count, and other entries are a user's.
    """

    @functools.cache
    def of_group(index: int, saved: int) -> tuple[Values, Callable[[int], StateForm], Collection[str], bool]:
        group, loaded = load.groups[index], load.group_values.get(index, {})
        kind, declaration = group.kind, group.kind._declaration
        is_same_class = saved_groups[saved].get(RULE, saved_by) == kind.__name__
        known = {*kind._state_names()} if is_same_class else every
        initial = initial_values(declaration, ChainMap(loaded, group))
        has_options = bool(loaded.keys() & declaration.loaded_options.keys())  # which may give buffers other shapes
        return initial, StateForm.of_group(declaration, load.groups, index, loaded), known, has_options

    problems = load.report.mismatched
    for each in load.params:
        param, live = each.current.key, load.state.get(each.current.key, {})
        if param.is_meta and not any(isinstance(v, Tensor) and v.dim() and not v.is_meta for v in each.entries.values()):
            continue  # nothing to copy, and no memory to copy it to
        initial, forms, known, has_options = of_group(each.current.group, each.saved.group)
        entries = {key: value for key, value in each.entries.items() if key in known}
        foreign = {key: value for key, value in each.entries.items() if key not in known}
        values: Values = {}
        try:
            if not (reason := obstacle(param)):
                form = forms(each.current.index)
                reshaped = _reshaped(form, live) if has_options else []
                live = {key: value for key, value in live.items() if key not in reshaped} if reshaped else live
                entries = _as_chosen(form, entries)
                if entries or (foreign and param.requires_grad):
                    values = _values(form, entries, saved_groups[each.saved.group])
                if values or (live and param.requires_grad):
                    load.copies += _copies(form, live, each.new, values, initial)
            elif entries:
                raise Unloadable(reason)
        except Unloadable as problem:
            each.new.clear()
            problems.append(f"{each.current.name}: {problem}")
            continue
        if absent := [key for key in entries if key not in values]:
            problems.append(f"{each.current.name}: the optimizer has no {', '.join(absent)} for it")
        for key, value in foreign.items():
            what = key if isinstance(key, str) else described(key)
            try:
                with naming(what, "cannot be copied"), outside_inference_mode():
                    each.new[key] = _on(param, value, what)
            except Unloadable as problem:
                problems.append(f"{each.current.name}: {problem}")
        if each.entries or param.requires_grad:
            each.removed.extend([key for key in live if key not in known and key not in foreign])


def drop_reshaped(load: PreparedLoad) -> None:
    """Reset parameters whose state has another shape under the options that their group takes."""
    new_entries = {each.current.key: each.new for each in load.params}
    for index, values in load.group_values.items():
        group = load.groups[index]
        if not values.keys() & group.kind._declaration.loaded_options.keys():
            continue
        forms = StateForm.of_group(group.kind._declaration, load.groups, index, values)
        for j, param in enumerate(group["params"]):
            live = load.state.get(param, {})
            if any([name not in new_entries.get(param, {}) for name in _reshaped(forms(j), live)]):
                names = [name for name in group.kind._state_names() if name in live]
                load.afterwards += [partial(live.pop, name) for name in names]


def _reshaped(form: StateForm, live: Mapping[str, Any]) -> list[str]:
    """Return the names of buffers in ``live`` that have another shape in this ``form``."""
    buffers = [buffer for buffer in form.declaration.buffers if buffer.name in live]
    return [b.name for b in buffers if tuple(live[b.name].shape) != form.shape_of(b)]


def _on(param: Tensor, value: Any, what: str) -> Any:
    """Return a copy of ``value`` with tensors on the device of ``param``, in its dtype if both are floating point."""
    if isinstance(value, Tensor):
        check_memory(value, what)
        cast = value.is_floating_point() and param.is_floating_point()
        return value.detach().to(param.device, param.dtype if cast else value.dtype, copy=True)
    if type(value) is dict:
        return {key: _on(param, element, what) for key, element in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_on(param, element, what) for element in value])
    return copy.deepcopy(value)


def _values(form: StateForm, saved: Mapping[str, Any], saved_group: Mapping[str, Any]) -> Values:
    """Return the values of ``saved`` to copy into the state of a parameter: all that it needs.

    Unneeded buffers are accepted if a hyperparameter that was not 0, or an option that is off in ``saved_group``, left them.
    The extra bits of a weight may be absent. Any other absent or invalid entry is :class:`Unloadable`.
    """
    declaration, scalars, needed = form.declaration, form.declaration.scalar_names, form.buffers
    if absent := [name for name in (*scalars, *needed) if name not in saved and name not in PARTS]:
        raise Unloadable(f"the checkpoint has no {', '.join(absent)} for it")
    values: Values = {name: as_number(saved[name], name) for name in scalars}
    if values.get("step", 0) < 0:
        raise Unloadable(f"step is {values['step']}")
    for b in declaration.buffers:
        is_left = isinstance(b.when, str) and (b.when in declaration.structural_hypers or saved_group.get(b.when) is False)
        if b.name in saved and (b.name in needed or is_left):
            values[b.name] = as_buffer(saved[b.name], b.name, form.shape_of(b), form.dtype_of(b))
    return values


def _copies(form: StateForm, live: Mapping[str, Any], new: dict[Any, Any], values: Values, initial: Values) -> Copies:
    """Return the copies of ``values`` into ``live``, the state of a parameter, and ``new``, which gets the tensors it lacks.

    Without ``values``, the parameter had taken no step when the checkpoint was saved, and its state is reset; also if the
    state dict holds the live buffers, which later steps have changed. A tensor that autograd recorded in a differentiable
    step is replaced. Extra bits of a weight (:data:`PARTS`) are kept if ``values`` have none: a step checks that they fit
    the parameter.
    """
    fields = {b.name: b for b in form.declaration.buffers}
    if values:
        is_inference = torch.is_inference_mode_enabled()
        with naming("the optimizer's own state"), outside_inference_mode() if is_inference else contextlib.nullcontext():
            new |= form.missing({*form.buffers, *values}, live, initial)
    copies: Copies = []
    was_stepped = values.get("step") == 0 and "step" in live and live["step"].item() != 0
    for name, start in initial.items():
        target, source = new.get(name, live.get(name)), values.get(name)
        if target is None or (name in PARTS and name not in values):
            continue
        if source is None or (was_stepped and is_same(target, source)):
            source = float(start)
        shape = form.shape_of(fields[name]) if name in fields else None
        check_writable(target, f"the optimizer's own {name}", shape, source)
        if target.requires_grad:
            with outside_inference_mode():
                target = new[name] = torch.empty_like(target)
        copies.append((target, source))
    return copies


def _as_chosen(form: StateForm, saved: dict[str, Any]) -> dict[str, Any]:
    """Return ``saved``, a parameter's entries in a checkpoint, converted to this form; unchanged tensors are shared.

    If this form stores no extra bits of a weight, saved ones are kept, so that the load reports them; they are dropped if
    the parameter's dtype holds them. Converted tensors are in memory until the load is written.

    Raises:
        ValueError: an entry that must be converted is invalid, such as a negative scale.
    """
    is_plain = not any([n in PARTS or n.endswith(_CODED) or getattr(v, "dtype", None) in CODES for n, v in saved.items()])
    if is_plain and not (form.choices.get("weights") or form.choices.get("state_dtype")):
        return saved
    param = form.param
    stored: dict[str, Tensor] = {}
    if (name := stored_part({name: value for name, value in saved.items() if value is not None})) is not None:
        dtype = getattr(saved[name], "dtype", param.dtype)
        is_split = name == "remainder" and dtype in SPLITS
        stored[name] = as_buffer(saved[name], name, tuple(param.shape), dtype if is_split else param.dtype)
    for buffer in form.declaration.buffers:
        if buffer.int8 and (stored_name := held_name(buffer, saved)):
            stored |= _coded(form, buffer, stored_name, saved)
    new = form.converted(stored)
    if name is not None and form.split is None and not adds_nothing(param, name, stored[name]):
        new[name] = saved[name]
    return {name: value for name, value in saved.items() if name not in stored} | new


def _coded(form: StateForm, field: Buffer, name: str, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the entries of ``saved`` that store the buffer ``field`` as ``name``, if they are codes or must become codes.

    Codes and scales that no step writes are :class:`Unloadable`. Infinite scales are valid: an overflow writes them.
    """
    coded, scale, shape = code_name(field.name), scale_name(field.name), tuple(form.param.shape)
    if name != coded and coded in saved:
        raise Unloadable(f"it has both {name} and {coded}")
    dtype = getattr(saved[name], "dtype", None)
    if name != coded and dtype not in CODES:
        if dtype in FLOATING and scale in saved:
            raise Unloadable(f"{scale} belongs to codes of 8 bits, and {name} is {dtype}")
        becomes_codes = form.dtype_of(field) in CODES
        return {name: as_buffer(saved[name], name, shape, form.param.dtype)} if becomes_codes else {}
    if scale not in saved:
        raise Unloadable(f"{name} has codes of 8 bits, and the checkpoint has no {scale} for them")
    kind = dtype if dtype in CODES else CODE_DTYPES[field.int8 or ""]
    codes, scales = as_buffer(saved[name], name, shape, kind), as_tensor(saved[scale], scale)
    check_codes(field, codes, scales)
    wide = local(scales).double()
    if not bool(((wide.float() >= 0) & (wide.float().isinf() == wide.isinf())).all()):
        raise Unloadable(f"{scale} has numbers that are no scales: negative, NaN, or beyond float32's range")
    if codes.dtype == torch.int8 and bool((local(codes) == -128).any()):
        raise Unloadable(f"{name} has -128, which is no code")
    return {name: codes, scale: scales}


def check_writable(target: Tensor, what: str, shape: tuple[int, ...] | None, source: float | Tensor) -> None:
    """Raise :class:`Unloadable` if writing ``source`` into ``target``, called ``what``, would fail.

    Without a ``shape`` any is accepted.
    """
    is_simple = type(target) in TORCH_TYPES and (isinstance(source, Tensor) or target.dtype == torch.float64)
    with contextlib.nullcontext() if is_simple else naming(what, "cannot be written"):
        check_memory(target, what)
        if shape is not None and tuple(target.shape) != shape:
            raise Unloadable(f"{what} has shape {tuple(target.shape)} instead of {shape}")
        if not target.is_contiguous() and any(n > 1 and s == 0 for n, s in zip(target.shape, target.stride(), strict=True)):
            raise Unloadable(f"{what} has elements that share memory")
        if target.is_inference() and not torch.is_inference_mode_enabled():
            raise Unloadable(f"{what} was made in inference mode")
        if isinstance(source, Tensor):
            if target.dtype != source.dtype and not (target.is_floating_point() or target.is_complex()):
                raise Unloadable(f"{what} is {target.dtype} instead of {source.dtype}")
        elif not is_simple:
            # Two elements: a single one takes a number that is too large for its dtype, as infinity.
            fill(torch.empty(2, dtype=target.dtype, device="cpu"), source)


def is_same(a: Tensor, b: float | Tensor) -> bool:
    """Return True if two tensors of one shape have the same address, strides, dtype and placements of shards."""
    if not isinstance(b, Tensor):
        return False
    local_a, local_b = local(a), local(b)
    in_place = (local_a.data_ptr(), local_a.stride(), a.dtype) == (local_b.data_ptr(), local_b.stride(), b.dtype)
    return in_place and placement(a) == placement(b)


_ENTRIES = """
H_diag acc_delta acc_delta_int8 acc_delta_scale ax col_var d d_numerator eta exact exp_avg exp_avg_diff exp_avg_diff_int8
exp_avg_diff_scale exp_avg_int8 exp_avg_scale exp_avg_slow exp_avg_slow_int8 exp_avg_slow_scale exp_avg_sq exp_avg_sq_int8
exp_avg_sq_scale exp_inf exp_inf_int8 exp_inf_scale func_evals grad_avg kahan_comp la_param master_param max_exp_avg_sq
max_exp_avg_sq_int8 max_exp_avg_sq_scale momentum_buffer momentum_buffer_int8 momentum_buffer_scale mu mu_product n_iter
old_dirs old_stps p0 pairs prev prev_flat_grad prev_grad prev_grad_int8 prev_grad_scale prev_loss products remainder ro
row_var s square_avg square_avg_int8 square_avg_scale step step_size sum t variance weight_sum z
"""  # of this package's, torch.optim's and optimi's optimizers in a parameter's state


def known_names(*kinds: type[Declared]) -> frozenset[str]:
    """Return the names of optimizers' entries of a parameter: of this package, torch.optim, optimi, and ``kinds``."""
    return frozenset(_ENTRIES.split()).union(*(kind._state_names() for kind in kinds))


def is_orphan(key: Any, value: Any, known: frozenset[str]) -> bool:
    """Return True if ``value``, saved under the ``key`` of no parameter, looks like the state of one."""
    return isinstance(key, Tensor) or (isinstance(value, Mapping) and {*value} <= known and len(value) > 0)


STRICTLY = "the checkpoint does not match the optimizer, as strict=True demands ({})"


def refuse_mismatches(report: LoadReport, demand: str) -> None:
    """Raise ``ValueError``, which begins with the ``demand``, if ``report`` lists mismatches."""
    left_out = zip(report._fields, report[:3], strict=False)  # `changed` lists no mismatches
    if parts := [f"{kind}: {', '.join(names)}" for kind, names in left_out if names]:
        raise ValueError("; ".join([demand, *parts]))


def save(groups: Sequence[ParamGroup], state: OptimizerState, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the state dict: hyperparameters as floats, step counts and scalars as copies on the CPU, buffers themselves.

    ``"optimizer"`` is the class's name. A group lacks options at their defaults that torch.optim does not have.

    Run-time flags, but for ``maximize``, have their defaults in it, not the optimizer's values.
    """
    packed_groups, packed_state = [], {}
    indices = itertools.count()
    for group in groups:
        declaration = group.kind._declaration
        read, scalars = {s.name for s in declaration.scales}, declaration.scalar_names
        numbers = dict(zip(group["params"], indices, strict=False))  # the last index of each, as in torch.optim
        floats = group.floats()
        flags = {flag.name: flag.default for flag in group.kind._fields_of(Flag) if flag.name != "maximize"}
        packed = {k: flags.get(k, v) for k, v in group.items() if k not in floats and k not in ("params", WHY)}
        packed |= {k: 1.0 for k in read & packed.keys() if Scale.is_read(packed[k])}
        packed |= {RULE: group.kind.__name__} if RULE in packed else {}
        packed_groups.append({**floats, **packed, "params": [numbers[param] for param in group["params"]]})
        for param, number in numbers.items():
            # torch.distributed.checkpoint loads into the tensors of a state dict, and then drops the state of frozen
            # parameters (pytorch#192202). Their loaded state reaches the optimizer only if the tensors are live ones.
            copied = scalars if param.requires_grad else ()
            if entries := state.get(param):
                packed_state[number] = {
                    k: v.detach().to("cpu", copy=True) if k in copied and isinstance(v, Tensor) else v
                    for k, v in entries.items()
                }
    packed_state |= {key: value for key, value in state.foreign.items() if key not in packed_state}
    result = {"state": packed_state, "param_groups": packed_groups, "format_version": FORMAT_VERSION}
    result |= {"optimizer": groups[0].kind.__name__} if groups else {}
    return result | ({"aliases": dict(aliases)} if aliases else {})


def copy_all(copies: Copies) -> None:
    """Copy each source into its target, as if all at once. DTensors are sharded one at a time.

    A source that shares memory with a target, as live tensors of a state dict may, is cloned before anything is written.
    """
    moving = [(target, source) for target, source in copies if not is_same(target, source)]
    spans = sorted([span(t if type(t) in TORCH_TYPES else local(t)) for t, _ in moving])
    starts, ends = [start for start, _ in spans], list(itertools.accumulate([end for _, end in spans], max))
    sources = [span(s if type(s) in TORCH_TYPES else local(s)) if isinstance(s, Tensor) else (0, 0) for _, s in moving]
    before = [bisect.bisect_left(starts, end) for _, end in sources]  # the number of targets that begin before the end
    pairs = zip(moving, sources, before, strict=True)
    disjoint = [
        s.clone() if isinstance(s, Tensor) and count and ends[count - 1] > start else s
        for (_, s), (start, _), count in pairs
    ]
    for (target, _), source in zip(moving, disjoint, strict=True):
        target.copy_(spread_like(source, target)) if isinstance(source, Tensor) else fill(target, source)


@torch.no_grad()
def write(*loads: PreparedLoad) -> None:
    """Write ``loads`` that were all prepared: first the tensors, which may share memory with sources of other loads."""
    for load in loads:
        for index, values in load.group_values.items():
            load.groups[index].refuse_capture(values)
    copy_all([pair for load in loads for pair in load.copies])
    for load in loads:
        for index, values in load.group_values.items():
            for key, value in values.items():
                load.groups[index].load(key, value)
        for each in load.params:
            if each.new or each.removed:
                load.state[each.current.key].update(each.new)
                for name in each.removed:
                    del load.state[each.current.key][name]
        load.state.replace_foreign(load.foreign)
        for function in load.afterwards:
            function()


@torch.no_grad()
@advising()
def prepare_load(
    kinds: Sequence[type[Declared]],
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    aliases: dict[str, str],
    state_dict: Mapping[str, Any],
    strict: bool,
    hyperparameters: Literal["checkpoint", "keep"],
) -> PreparedLoad:
    """Prepare a load of ``state_dict``, of any form, into ``groups`` and ``state`` of an optimizer of ``kinds``.

    A frozen parameter without state in the checkpoint keeps its state; any other is reset. If groups take over names, they
    take over the ``aliases``, too. ``strict`` and ``hyperparameters`` are as in :meth:`CompiledOptimizer.load_state_dict`.

    Raises:
        ValueError, TypeError: the checkpoint is malformed or, with ``strict``, does not match.
    """
    declaration, keep = kinds[0]._declaration, hyperparameters == "keep"
    with naming("the state dict", passing=(ValueError, TypeError)):
        source, known = read(state_dict), known_names(*kinds)
        unlisted, live = foreign_state(source), state.foreign
        orphans = {  # a live key is foreign, even if its value resembles a parameter's
            key: f"the state of {described(key)}"
            for key, value in unlisted.items()
            if key not in live and is_orphan(key, value, known)
        }
        foreign = {k: copied(v, f"the state of {described(k)}") for k, v in unlisted.items() if k not in orphans}
        saved = translated(source, declaration)
        params, missing, unexpected = match(groups, aliases, saved, known)
        load = PreparedLoad(LoadReport(missing, [*unexpected, *orphans.values()], [], []), groups, state, params, foreign)
        conflicts = check_groups(load, saved["param_groups"], keep=keep, native="format_version" in source)
        check_state(load, saved["param_groups"], source.get("optimizer"), known)
        drop_reshaped(load)
        load.report.mismatched.extend(conflicts)
        saved_groups = saved["param_groups"]
        if not any(["param_names" in g for g in groups]) and all([g.get("param_names") is not None for g in saved_groups]):
            pairs = zip(groups, map(group_names, saved_groups), strict=False)
            load.afterwards += [partial(group.set_quietly, "param_names", names) for group, names in pairs]
            load.afterwards.append(partial(aliases.update, saved.get("aliases", {})))
    if strict:
        refuse_mismatches(load.report, STRICTLY.format(declaration.name))
    return load
