"""Saving and loading state dicts, whose state belongs to names.

A state dict has torch.optim's layout: ``state`` by parameter index, ``param_groups`` with Python numbers and, where the
parameters have names, ``param_names``. Loading reads it, matches parameters by name whatever their order and grouping, and
checks everything. Only then does it write, into the live tensors, so that whatever holds one of them keeps working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compiled_optim.checkpoint.check import check_groups, check_modes, check_state, decay_conflicts
from compiled_optim.checkpoint.match import match, names_to_take
from compiled_optim.checkpoint.optimi import from_optimi, is_optimi
from compiled_optim.checkpoint.read import FORMAT_VERSION, beside_parameters, described, naming, read
from compiled_optim.checkpoint.write import Writes, copied, is_lost_state, known_names
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.parameters import advising
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.fields import Scale
from compiled_optim.rule.rule import Declaration
from compiled_optim.state import OptimizerState, scalar_names


class LoadReport(NamedTuple):
    """What a load left out: names in the optimizer only, in the checkpoint only, and in both but unlike each other.

    State that belongs to no parameter of the checkpoint is ``unexpected`` too. A parameter that is ``missing``, or
    ``mismatched`` in one entry of its state, keeps all the state that it has: in a new optimizer it starts anew, at step 0.
    A hyperparameter that is ``mismatched`` keeps the optimizer's value. What hooks and wrappers keep in the state, under
    names that no optimizer gives, is loaded and not reported.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]


class PreparedLoad(NamedTuple):
    """A load that was checked, of which nothing is written yet.

    Attributes:
        report: what it leaves out.
        targets: the tensors that it writes into.
        set_apart: lets other tensors be written before it, such as the targets of other loads that it may read from.
        write: writes the rest, which cannot fail.
    """

    report: LoadReport
    targets: list[Tensor]
    set_apart: Callable[[Iterable[Tensor]], None]
    write: Callable[[], None]


def save(
    declaration: Declaration,
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    aliases: Mapping[str, str],
    neutral: Mapping[str, Any],
) -> dict[str, Any]:
    """The state dict: hyperparameters as floats, step counts and scalars as copies on the CPU, buffers as they are.

    ``neutral`` gives the value to store for each run-time flag, in place of the optimizer's own.
    """
    read = {s.name for s in declaration.scales}
    packed_groups = []
    packed_state = {}
    first = 0
    for group in groups:
        params = group["params"]
        numbers = {param: number for number, param in enumerate(params, first)}  # the last place of each, as in torch.optim
        floats = group.floats()
        packed = {k: neutral.get(k, v) for k, v in group.items() if k not in floats and k != "params"}
        packed |= {k: 1.0 for k in read & packed.keys() if Scale.is_read(packed[k])}
        packed_groups.append({**floats, **packed, "params": [numbers[param] for param in params]})
        for param, number in numbers.items():
            if entries := state.get(param):
                packed_state[number] = {k: _snapshot(k, v, declaration, param) for k, v in entries.items()}
        first += len(params)
    packed_state |= {key: value for key, value in state.foreign.items() if key not in packed_state}
    result = {"state": packed_state, "param_groups": packed_groups, "format_version": FORMAT_VERSION}
    return result | ({"aliases": dict(aliases)} if aliases else {})


def _snapshot(key: str, value: Any, declaration: Declaration, param: Tensor) -> Any:
    # torch.distributed.checkpoint loads into the tensors of a state dict, and then drops the state of frozen parameters
    # (pytorch#192202). What it loads for those reaches the optimizer only if the tensors are the live ones.
    if key not in scalar_names(declaration) or not isinstance(value, Tensor) or not param.requires_grad:
        return value
    return value.detach().to("cpu", copy=True)


@torch.no_grad()
@advising()
def prepare_load(
    kind: type[Declared],
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    aliases: dict[str, str],
    state_dict: Mapping[str, Any],
    strict: bool,
    hyperparameters: Literal["checkpoint", "keep"],
) -> PreparedLoad:
    """Check what copies ``state_dict``, of any form, into ``groups`` and ``state`` of an optimizer of ``kind``.

    A frozen parameter without state in the checkpoint keeps the state it has; any other starts anew. With names that groups
    take over come the ``aliases``. ``strict`` and ``hyperparameters`` are as in :meth:`CompiledOptimizer.load_state_dict`.

    Raises:
        ValueError, TypeError: the checkpoint is malformed or, with ``strict``, does not match.
    """
    declaration = kind._declaration
    with naming("the state dict", passing=(ValueError, TypeError)):
        known = known_names()
        given = read(state_dict)
        others, orphans = _beside(given, known, state.foreign)
        saved = from_optimi(given, declaration) if is_optimi(given) else given
        pairs, missing, unexpected = match(groups, aliases, saved, kind._implied_state, known)
        sources = pairs if hyperparameters == "checkpoint" else []
        own = (*declaration.statics, *declaration.scales, *declaration.options)
        skipped = {*kind._group_flags, *(choice.name for choice in own), *kind._modes, "params", "param_names"}
        group_values, conflicts = check_groups(declaration, groups, sources, saved["param_groups"], skipped)
        for index, found in decay_conflicts(declaration, groups, sources, saved["param_groups"]).items():
            conflicts += found
            group_values[index] = {k: v for k, v in group_values[index].items() if k not in ("weight_decay", "max_lr")}
        conflicts += check_modes(kind._modes, groups, pairs, saved["param_groups"], group_values)
        made, copies, entries, problems = check_state(declaration, groups, state, pairs, group_values, known)
        names = names_to_take(groups, saved["param_groups"])
        writes = Writes(group_values, made, copies, names, entries, others)
        targets = writes.targets(groups)
        writes = writes.set_apart(targets)
    report = LoadReport(missing, unexpected + orphans, problems + conflicts)
    if strict:
        refuse(report, declaration.name)

    @torch.no_grad()
    def set_apart(written: Iterable[Tensor]) -> None:
        nonlocal writes
        writes = writes.set_apart(written)

    @torch.no_grad()
    def write() -> None:
        writes.write(groups, state)
        aliases.update(saved.get("aliases", {}) if names else {})

    return PreparedLoad(report, targets, set_apart, write)


def refuse(report: LoadReport, name: str) -> None:
    """Raise ``ValueError`` where ``report`` of a load into the optimizer of this name is not empty."""
    if any(report):
        parts = [f"{kind}: {', '.join(names)}" for kind, names in zip(report._fields, report, strict=True) if names]
        demand = f"the checkpoint does not match the optimizer, as strict=True demands ({name})"
        raise ValueError(f"{demand}; {'; '.join(parts)}")


def _beside(saved: Mapping[str, Any], known: frozenset[str], live: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    """What others kept beside the state of parameters, and the state that has no parameter.

    What others keep in the optimizer itself, which is ``live``, is theirs whatever it looks like.
    """
    others, orphans = {}, []
    for key, value in beside_parameters(saved).items():
        what = f"the state of {described(key)}"
        if key not in live and is_lost_state(key, value, known):
            orphans.append(what)
        else:
            others[key] = copied(value, what)
    return others, orphans
