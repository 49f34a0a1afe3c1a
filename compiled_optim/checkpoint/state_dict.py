"""Loading a state dict into live groups and state, by parameter name.

A load reads a checkpoint, matches parameters by name in any order and grouping, and makes a record of every change:
:class:`PreparedLoad`. Everything that could make writing fail is checked on the way. Only then does :func:`write` write,
into the live tensors, so that references to them keep working. Entries of hooks and wrappers in an optimizer's state are
called foreign, and are loaded as torch.optim does.
"""

from __future__ import annotations

import bisect
import itertools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from compiled_optim.checkpoint.group_values import copied, group_change
from compiled_optim.checkpoint.read import (
    FLOATING,
    Checkpoint,
    SavedParam,
    Unloadable,
    as_buffer,
    as_number,
    as_tensor,
    check_memory,
    described,
    match,
    naming,
    translated,
)
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.parameters import advising
from compiled_optim.memory.layout import TORCH_TYPES, local, obstacle, placement, span, spread_like
from compiled_optim.memory.torch_internals import outside_inference_mode
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.fields import Buffer
from compiled_optim.rule.rule import RULE
from compiled_optim.rule.storage import CODE_DTYPES, PARTS, code_name, scale_name
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

TensorCopies: TypeAlias = list[tuple[Tensor, float | Tensor]]
"""Tensors, each with the tensor that is copied into it, or the number that fills it."""

EntryValues: TypeAlias = dict[str, float | Tensor]
"""Entries of a parameter's state by name: tensors, and numbers for scalars and for buffers that are filled."""

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
    foreign: dict[Any, Any]  # the foreign state
    params: list[SavedParam]
    group_values: dict[int, dict[str, Any]]  # by index of the group; numbers are Python's
    copies: TensorCopies = field(default_factory=list)  # into state tensors, live or new
    afterwards: list[Callable[[], object]] = field(default_factory=list)  # called when everything is written


def _check_state(load: PreparedLoad, saved: Checkpoint, saved_by: Any, every: frozenset[str]) -> None:
    """Prepare the copies into the parameters' state for the groups' new values; report misfits by parameter name.

    ``every`` has the names of all optimizers' entries. In a group that was ``saved_by`` a class of the same name, only that
    class's names count, and other entries are a user's.
    """
    forms = {}
    for index, values in load.group_values.items():
        group, declaration = load.groups[index], load.groups[index].kind._declaration
        form_of = StateForm.of_group(declaration, load.groups, index, values)
        forms[index] = form_of, initial_values(declaration, ChainMap(values, group)), _takes_options(group, values)
    for param in load.params:
        kind, options = load.groups[param.current.group].kind, saved.groups[param.saved.group].entries
        known = frozenset(kind._state_names()) if options.get(RULE, saved_by) == kind.__name__ else every
        _check_param(load, param, options, known, *forms[param.current.group])


def _check_param(
    load: PreparedLoad,
    param: SavedParam,
    options: Mapping[str, Any],
    known: frozenset[str],
    form_of: Callable[[int], StateForm],
    initial: Mapping[str, float | Tensor],
    takes_options: bool,
) -> None:
    """Prepare the copies into the state of one parameter, saved by an optimizer with these ``options`` of its group.

    It takes nothing if one of its entries cannot be loaded. An entry that only another optimizer has is reported, and the
    others are taken.
    """
    tensor, name, problems = param.current.key, param.current.name, load.report.mismatched
    if tensor.is_meta and not any([isinstance(v, Tensor) and v.dim() and not v.is_meta for v in param.entries.values()]):
        return  # nothing to copy, and no memory to copy it to
    live: Mapping[str, Any] = load.state.get(tensor, {})
    entries, foreign = param.entries, dict[Any, Any]()
    if not entries.keys() <= known:
        foreign = {key: value for key, value in entries.items() if key not in known}
        entries = {key: value for key, value in entries.items() if key in known}
    values: EntryValues = {}
    try:
        if not (reason := obstacle(tensor)):
            form = form_of(param.current.index)
            reshaped = _reshaped(form, live) if takes_options else []
            live = {key: value for key, value in live.items() if key not in reshaped} if reshaped else live
            entries = _as_chosen(form, entries)
            if entries or (foreign and tensor.requires_grad):
                values = _values(form, entries, options)
            if values or (live and tensor.requires_grad):
                load.copies += _copies(form, live, param.new, values, initial)
        elif entries:
            raise Unloadable(reason)
    except Unloadable as problem:
        param.new.clear()
        problems.append(f"{name}: {problem}")
        return
    if absent := [key for key in entries if key not in values]:
        problems.append(f"{name}: the optimizer has no {', '.join(absent)} for it")
    for key, value in foreign.items():
        what = key if isinstance(key, str) else described(key)
        try:
            with naming(what, "cannot be copied"), outside_inference_mode():
                param.new[key] = _on(tensor, value, what)
        except Unloadable as problem:
            problems.append(f"{name}: {problem}")
    if param.entries or tensor.requires_grad:
        param.removed.extend([key for key in live if key not in known and key not in foreign])


def _takes_options(group: ParamGroup, values: Mapping[str, Any]) -> bool:
    """Return True if a group takes options with the ``values`` of a load. These may give its buffers other shapes."""
    return bool(values.keys() & group.kind._declaration.loaded_options.keys())


def _reset_reshaped(load: PreparedLoad) -> None:
    """Reset parameters whose state has another shape under the options that their group takes."""
    new_entries = {each.current.key: each.new for each in load.params}
    for index, group, values in [(index, load.groups[index], values) for index, values in load.group_values.items()]:
        if not _takes_options(group, values):
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
    return copied(value, what)


def _values(form: StateForm, saved: Mapping[str, Any], saved_group: Mapping[str, Any]) -> EntryValues:
    """Return the values of ``saved`` to copy into the state of a parameter: all that it needs.

    Unneeded buffers are accepted if a hyperparameter that was not 0, or an option that is off in ``saved_group``, left them.
    The extra bits of a weight may be absent. Any other absent or invalid entry is :class:`Unloadable`.
    """
    declaration, scalars, needed = form.declaration, form.declaration.scalar_names, form.buffers
    if absent := [name for name in (*scalars, *needed) if name not in saved and name not in PARTS]:
        raise Unloadable(f"the checkpoint has no {', '.join(absent)} for it")
    values: EntryValues = {name: as_number(saved[name], name) for name in scalars}
    if "step" in values and values["step"] < 0:
        raise Unloadable(f"step is {values['step']}")
    for b in [buffer for buffer in declaration.buffers if buffer.name in saved]:
        is_left = isinstance(b.when, str) and (b.when in declaration.structural_hypers or saved_group.get(b.when) is False)
        if is_left or b.name in needed:
            values[b.name] = as_buffer(saved[b.name], b.name, form.shape_of(b), form.dtype_of(b))
    return values


def _copies(
    form: StateForm, live: Mapping[str, Any], new: dict[Any, Any], values: EntryValues, initial: Mapping[str, float | Tensor]
) -> TensorCopies:
    """Return the copies of ``values`` into ``live``, the state of a parameter, and ``new``, which gets the tensors it lacks.

    Without ``values``, the parameter had taken no step when the checkpoint was saved, and its state is reset; also if the
    state dict holds the live buffers, which later steps have changed. A tensor that autograd recorded in a differentiable
    step is replaced. Extra bits of a weight (:data:`PARTS`) are kept if ``values`` have none: a step checks that they fit
    the parameter.
    """
    if values:
        missing = outside_inference_mode()(form.missing) if torch.is_inference_mode_enabled() else form.missing
        with naming("the optimizer's own state"):
            new |= missing({*form.buffers, *values}, live, initial)
    copies: TensorCopies = []
    was_stepped = "step" in values and values["step"] == 0 and "step" in live and live["step"].item() != 0
    fields = {buffer.name: buffer for buffer in form.declaration.buffers}
    for name in [name for name in initial if (name in new or name in live) and (name in values or name not in PARTS)]:
        target: Tensor = new[name] if name in new else live[name]
        source = values[name] if name in values else float(initial[name])
        if was_stepped and is_same(target, source):
            source = float(initial[name])
        check_writable(
            target, f"the optimizer's own {name}", form.shape_of(fields[name]) if name in fields else None, source
        )
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
    if not (form.choices.get("weights") or form.choices.get("state_dtype")):
        current = {*form.declaration.scalar_names, *form.buffers}
        dtypes = [v.dtype if type(v) in TORCH_TYPES else getattr(v, "dtype", None) for v in saved.values()]
        stored_names = [name for name in saved if name not in current and (name in PARTS or name.endswith(_CODED))]
        if not stored_names and not CODES.keys() & dtypes:
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
    is_number = type(source) is float
    if type(target) not in TORCH_TYPES or (is_number and target.dtype != torch.float64):
        with naming(what, "cannot be written"):
            check_memory(target, what)
            if is_number:  # two elements: a single one takes a number that is too large for its dtype, as infinity
                fill(torch.empty(2, dtype=target.dtype, device="cpu"), source)
    has_all = check_memory(target, what)
    if shape is not None and target.shape != shape:
        raise Unloadable(f"{what} has shape {tuple(target.shape)} instead of {shape}")
    if not has_all and any([n > 1 and s == 0 for n, s in zip(target.shape, target.stride(), strict=True)]):
        raise Unloadable(f"{what} has elements that share memory")
    if target.is_inference() and not torch.is_inference_mode_enabled():
        raise Unloadable(f"{what} was made in inference mode")
    is_rounded = target.dtype.is_floating_point or target.dtype.is_complex
    if not (is_number or is_rounded or target.dtype == source.dtype):  # type: ignore[union-attr]
        raise Unloadable(f"{what} is {target.dtype} instead of {source.dtype}")  # type: ignore[union-attr]


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
    return frozenset(_ENTRIES.split()).union(*[kind._state_names() for kind in kinds])


def is_orphan(key: Any, value: Any, known: frozenset[str]) -> bool:
    """Return True if ``value``, saved under the ``key`` of no parameter, looks like the state of one."""
    return isinstance(key, Tensor) or (isinstance(value, Mapping) and {*value} <= known and len(value) > 0)


STRICTLY = "the checkpoint does not match the optimizer, as strict=True demands ({})"


def refuse_mismatches(report: LoadReport, demand: str) -> None:
    """Raise ``ValueError``, which begins with the ``demand``, if ``report`` lists mismatches."""
    left_out = zip(report._fields, report[:3], strict=False)  # `changed` lists no mismatches
    if parts := [f"{kind}: {', '.join(names)}" for kind, names in left_out if names]:
        raise ValueError("; ".join([demand, *parts]))


def copy_all(copies: TensorCopies) -> None:
    """Copy each source into its target, as if all at once. DTensors are sharded one at a time.

    A source that shares memory with a target, as live tensors of a state dict may, is cloned before anything is written.
    """
    spans = [(_span(target), _span(source)) for target, source in copies]
    pairs = zip(copies, spans, strict=True)
    moving = [(*copy, of, into) for copy, (into, of) in pairs if into[0] != of[0] or not is_same(*copy)]
    targets = sorted([into for *_, into in moving])
    starts, ends = [start for start, _ in targets], [*itertools.accumulate([end for _, end in targets], max)]
    disjoint: TensorCopies = []
    for target, source, (start, end), _ in moving:
        count = bisect.bisect_left(starts, end)  # of targets that begin before the source ends
        is_shared = type(source) is not float and count and ends[count - 1] > start
        disjoint.append((target, source.clone() if is_shared else source))  # type: ignore[union-attr]
    for target, source in disjoint:
        fill(target, source) if type(source) is float else target.copy_(spread_like(source, target))


def _span(source: Any) -> tuple[int, int]:
    if type(source) is float:
        return -1, -1
    if type(source) in TORCH_TYPES and source.is_contiguous():
        return (start := source.data_ptr()), start + source.nbytes
    return span(local(source))


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
    declaration = kinds[0]._declaration
    with naming("the state dict", passing=(ValueError, TypeError)):
        source, every, live = Checkpoint.of(state_dict).single(), known_names(*kinds), state.foreign
        # A live key is foreign, even if its value resembles a parameter's.
        orphans = {k: v for k, v in source.foreign.items() if k not in live and is_orphan(k, v, every)}
        others = {k: v for k, v in source.foreign.items() if k not in orphans}
        foreign = {k: copied(v, f"the state of {described(k)}") for k, v in others.items()}
        saved = translated(source, declaration)
        params, missing, unexpected = match(groups, aliases, saved, every)
        report = LoadReport(missing, [*unexpected, *[f"the state of {described(key)}" for key in orphans]], [], [])
        is_native, keep = "format_version" in source.others, hyperparameters == "keep"
        sources: dict[int, dict[int, Mapping[str, Any]]] = {}
        for each in params:
            sources.setdefault(each.current.group, {})[each.saved.group] = saved.groups[each.saved.group].entries
        changes = {
            index: group_change(groups, index, [*by_index.values()], keep=keep, native=is_native)
            for index, by_index in sources.items()
        }
        for tensor, what, number in [target for change in changes.values() for target in change.targets]:
            check_writable(tensor, what, (), number)
        load = PreparedLoad(report, groups, state, foreign, params, {i: change.values for i, change in changes.items()})
        _check_state(load, saved, source.others.get("optimizer"), every)
        _reset_reshaped(load)
        for index, change in changes.items():
            report.mismatched.extend([f"{groups[index].label}: {problem}" for problem in change.problems])
            report.changed.extend(change.changed)
        have_names = all([group.names is not None and not group.is_named for group in saved.groups])
        if have_names and not any(["param_names" in group for group in groups]):
            taken = zip(groups, saved.groups, strict=False)
            load.afterwards += [
                partial(group.set_quietly, "param_names", [*(theirs.names or ())]) for group, theirs in taken
            ]
            load.afterwards.append(partial(aliases.update, saved.aliases))
    if strict:
        refuse_mismatches(load.report, STRICTLY.format(declaration.name))
    return load
