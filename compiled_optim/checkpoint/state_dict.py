"""Saving and loading state dicts, whose state belongs to names.

A state dict has torch.optim's layout: ``state`` by parameter index, ``param_groups`` with Python numbers and, where the
parameters have names, ``param_names``. Loading reads it, matches parameters by name whatever their order and grouping, and
checks everything. Only then does it write, into the live tensors, so that whatever holds one of them keeps working.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compiled_optim.checkpoint.check import (
    Copies,
    GroupValues,
    StateWrites,
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
from compiled_optim.memory.layout import TORCH_TYPES, local, span, spread_like
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.fields import Scale
from compiled_optim.rule.rule import Declaration
from compiled_optim.state import OptimizerState, fill, scalar_names

STRICTLY = "the checkpoint does not match the optimizer, as strict=True demands ({})"


class LoadReport(NamedTuple):
    """The names that a load left out: ``missing`` in the checkpoint, ``unexpected`` in it, or ``mismatched``.

    State that belongs to no parameter of the checkpoint is ``unexpected`` too. A parameter that is ``missing``, or has one
    ``mismatched`` entry, keeps its whole state: in a new optimizer it starts at step 0. A ``mismatched`` hyperparameter
    keeps the optimizer's value. Entries of hooks and wrappers, whose names no optimizer uses, are loaded and not reported.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]


def refuse_mismatches(report: LoadReport, demand: str) -> None:
    """Raise ``ValueError``, which begins with the ``demand``, where ``report`` is not empty."""
    if any(report):
        parts = [f"{kind}: {', '.join(names)}" for kind, names in zip(report._fields, report, strict=True) if names]
        raise ValueError("; ".join([demand, *parts]))


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
    read, scalars = {s.name for s in declaration.scales}, scalar_names(declaration)
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
            # torch.distributed.checkpoint loads into the tensors of a state dict, and then drops the state of frozen
            # parameters (pytorch#192202). What it loads for those reaches the optimizer only if the tensors are live ones.
            copied = scalars if param.requires_grad else ()
            if entries := state.get(param):
                packed_state[number] = {
                    k: v.detach().to("cpu", copy=True) if k in copied and isinstance(v, Tensor) else v
                    for k, v in entries.items()
                }
        first += len(params)
    packed_state |= {key: value for key, value in state.foreign.items() if key not in packed_state}
    result = {"state": packed_state, "param_groups": packed_groups, "format_version": FORMAT_VERSION}
    return result | ({"aliases": dict(aliases)} if aliases else {})


@dataclass
class PreparedLoad:
    """A load. Everything is checked and made, so that writing cannot fail; nothing is written yet."""

    report: LoadReport  # what it leaves out
    groups: Sequence[ParamGroup]
    group_values: GroupValues
    names: list[list[str]]  # of the parameters of each group, where they are new
    state: OptimizerState
    state_writes: StateWrites
    foreign: dict[Any, Any]  # the foreign state
    copies: Copies  # into state tensors, live or new
    afterwards: list[Callable[[], object]] = field(default_factory=list)  # called when everything is written

    @property
    def targets(self) -> list[Tensor]:
        """The tensors that are written into: of hyperparameters and of state."""
        numbers = [
            tensor
            for index, values in self.group_values.items()
            for key in values.keys() & self.groups[index].for_compiled_code[0].keys()
            for tensor in self.groups[index].read_only(key)
        ]
        return numbers + [target for target, _ in self.copies]

    @torch.no_grad()
    def write(self) -> None:
        """Write. DTensors are spread over the processes as they are copied, one at a time."""
        for index, values in self.group_values.items():
            for key, value in values.items():
                self.groups[index].load(key, value)
        for group, names in zip(self.groups, self.names, strict=False):
            group.set_quietly("param_names", names)
        for param, new, gone in self.state_writes:
            if new or gone:
                self.state[param].update(new)
                for name in gone:
                    del self.state[param][name]
        self.state.replace_foreign(self.foreign)
        for target, source in self.copies:
            target.copy_(spread_like(source, target)) if isinstance(source, Tensor) else fill(target, source)
        for function in self.afterwards:
            function()


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
    declaration, keep = kind._declaration, hyperparameters == "keep"
    with naming("the state dict", passing=(ValueError, TypeError)):
        given, known = read(state_dict), known_names(kind)
        foreign, orphans = check_foreign(given, known, state.foreign)
        saved = from_optimi(given, declaration) if is_optimi(given) else given
        params, missing, unexpected = match(groups, aliases, saved, kind._implied_state, known)
        values, conflicts = check_groups(kind, groups, params, saved["param_groups"], keep=keep)
        writes, copies, problems = check_state(declaration, groups, state, params, values, known)
        names = names_to_take(groups, saved["param_groups"])
        report = LoadReport(missing, unexpected + orphans, problems + conflicts)
        load = PreparedLoad(report, groups, values, names, state, writes, foreign, copies)
        load.copies = set_apart(copies, load.targets)
    if strict:
        refuse_mismatches(report, STRICTLY.format(declaration.name))
    if names:
        load.afterwards.append(lambda: aliases.update(saved.get("aliases", {})))
    return load
