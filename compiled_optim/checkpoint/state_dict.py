"""Saving and loading state dicts, whose state belongs to names.

A state dict has torch.optim's layout: ``state`` by parameter index, ``param_groups`` with Python numbers and, where the
parameters have names, ``param_names``. Loading reads it, matches parameters by name whatever their order and grouping, and
checks everything. Only then does it write, into the live tensors, so that whatever holds one of them keeps working.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from compiled_optim.checkpoint.check import (
    Copies,
    LoadReport,
    PreparedLoad,
    check_foreign,
    check_groups,
    check_state,
    known_names,
)
from compiled_optim.checkpoint.match import match, names_to_take
from compiled_optim.checkpoint.optimi import from_optimi, is_optimi
from compiled_optim.checkpoint.read import FORMAT_VERSION, naming, read
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.parameters import advising
from compiled_optim.memory.layout import TORCH_TYPES, local, span
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.fields import Scale
from compiled_optim.rule.rule import RULE, WHY
from compiled_optim.state import OptimizerState, scalar_names

STRICTLY = "the checkpoint does not match the optimizer, as strict=True demands ({})"


def refuse_mismatches(report: LoadReport, demand: str) -> None:
    """Raise ``ValueError``, which begins with the ``demand``, where ``report`` is not empty."""
    if any(report):
        parts = [f"{kind}: {', '.join(names)}" for kind, names in zip(report._fields, report, strict=True) if names]
        raise ValueError("; ".join([demand, *parts]))


def save(
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    aliases: Mapping[str, str],
    neutral: Mapping[str, Any],
) -> dict[str, Any]:
    """The state dict: hyperparameters as floats, step counts and scalars as copies on the CPU, buffers as they are.

    ``neutral`` gives the value to store for each run-time flag, in place of the optimizer's own.
    """
    packed_groups, packed_state = [], {}
    places = itertools.count()
    for group in groups:
        declaration = group.kind._declaration
        read, scalars = {s.name for s in declaration.scales}, scalar_names(declaration)
        numbers = dict(zip(group["params"], places, strict=False))  # the last place of each, as in torch.optim
        floats = group.floats()
        packed = {k: neutral.get(k, v) for k, v in group.items() if k not in floats and k not in ("params", WHY)}
        packed |= {k: 1.0 for k in read & packed.keys() if Scale.is_read(packed[k])}
        packed |= {RULE: group.kind.__name__} if RULE in packed else {}
        packed_groups.append({**floats, **packed, "params": [numbers[param] for param in group["params"]]})
        for param, number in numbers.items():
            # torch.distributed.checkpoint loads into the tensors of a state dict, and then drops the state of frozen
            # parameters (pytorch#192202). What it loads for those reaches the optimizer only if the tensors are live ones.
            copied = scalars if param.requires_grad else ()
            if entries := state.get(param):
                packed_state[number] = {
                    k: v.detach().to("cpu", copy=True) if k in copied and isinstance(v, Tensor) else v
                    for k, v in entries.items()
                }
    packed_state |= {key: value for key, value in state.foreign.items() if key not in packed_state}
    result = {"state": packed_state, "param_groups": packed_groups, "format_version": FORMAT_VERSION}
    return result | ({"aliases": dict(aliases)} if aliases else {})


@torch.no_grad()
def set_apart(copies: Copies, written: Iterable[Tensor]) -> Copies:
    """``copies`` with clones of those sources that lie in the memory of ``written``, as live tensors of a state dict may."""
    spans = sorted([span(t if type(t) in TORCH_TYPES else local(t)) for t in written])
    starts = [start for start, _ in spans]
    ends = list(itertools.accumulate([end for _, end in spans], max))

    def is_written(source: Tensor) -> bool:
        start, end = span(source if type(source) in TORCH_TYPES else local(source))
        before = bisect.bisect_left(starts, end)
        return before > 0 and ends[before - 1] > start

    return [(t, s.clone() if isinstance(s, Tensor) and is_written(s) else s) for t, s in copies]


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
    """Check what copies ``state_dict``, of any form, into ``groups`` and ``state`` of an optimizer of ``kinds``.

    A frozen parameter without state in the checkpoint keeps the state it has; any other starts anew. With names that groups
    take over come the ``aliases``. ``strict`` and ``hyperparameters`` are as in :meth:`CompiledOptimizer.load_state_dict`.

    Raises:
        ValueError, TypeError: the checkpoint is malformed or, with ``strict``, does not match.
    """
    declaration, keep = kinds[0]._declaration, hyperparameters == "keep"
    with naming("the state dict", passing=(ValueError, TypeError)):
        given, known = read(state_dict), known_names(*kinds)
        foreign, orphans = check_foreign(given, known, state.foreign)
        saved = from_optimi(given, declaration) if is_optimi(given) else given
        params, missing, unexpected = match(groups, aliases, saved, known)
        load = PreparedLoad(LoadReport(missing, unexpected + orphans, []), groups, state, params, foreign)
        conflicts = check_groups(load, saved["param_groups"], keep=keep)
        check_state(load, known)
        load.report.mismatched.extend(conflicts)
        load.copies = set_apart(load.copies, load.targets)
        if names := names_to_take(groups, saved["param_groups"]):
            load.afterwards += [partial(g.set_quietly, "param_names", n) for g, n in zip(groups, names, strict=False)]
            load.afterwards.append(partial(aliases.update, saved.get("aliases", {})))
    if strict:
        refuse_mismatches(load.report, STRICTLY.format(declaration.name))
    return load
