"""What a load writes. Everything is checked and made beforehand, so that the writing itself cannot fail.

What somebody else keeps in an optimizer's state, such as a hook or a wrapper, is loaded as torch.optim loads it.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from compiled_optim.checkpoint import optimi
from compiled_optim.checkpoint.read import Unloadable, check_memory, described, naming
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.memory.layout import span
from compiled_optim.memory.sharding import local, placement, spread_like
from compiled_optim.memory.torch_internals import outside_inference_mode
from compiled_optim.rule.declared import Declared
from compiled_optim.state import OptimizerState, ParamState, fill


def known_names() -> frozenset[str]:
    """The entries of a parameter's state that belong to an optimizer."""
    return frozenset((*Declared._every_state_name, *optimi.STATE))


def is_lost_state(key: Any, value: Any, known: frozenset[str]) -> bool:
    """Whether what a checkpoint holds under the key of no parameter looks as if it were the state of one."""
    return isinstance(key, Tensor) or (isinstance(value, Mapping) and {*value} <= known and len(value) > 0)


def copied(value: Any, what: str) -> Any:
    """A deep copy of ``value``, called ``what``; :class:`Unloadable` if there is none."""
    with naming(what, "cannot be copied"):
        if isinstance(value, Tensor):
            check_memory(value, what)
        return copy.deepcopy(value)


class Entries(NamedTuple):
    """What changes in a parameter's state besides the optimizer's own entries.

    Attributes:
        new: what is put there, by name.
        gone: the names of what is removed.
    """

    new: dict[Any, Any]
    gone: list[Any]

    def write(self, state: ParamState) -> None:
        """Write into a parameter's state, which is no change to steps."""
        for name in self.gone:
            state.drop_quietly(name)
        for name, value in self.new.items():
            state.set_quietly(name, value)

    @classmethod
    def of(
        cls, saved: Mapping[Any, Any], live: Mapping[Any, Any], known: Collection[str], param: Tensor
    ) -> tuple[Entries, list[str]]:
        """What gives ``live``, the state of ``param``, others' entries in ``saved`` for its own; and which do not load."""
        new, problems = {}, []
        for name, value in saved.items():
            what = name if isinstance(name, str) else described(name)
            try:
                with naming(what, "cannot be copied"), outside_inference_mode():
                    new[name] = _on(param, value, what)
            except Unloadable as problem:
                problems.append(str(problem))
        return cls(new, [name for name in live if name not in known and name not in saved]), problems


def _on(param: Tensor, value: Any, what: str) -> Any:
    """A copy of ``value`` with its tensors on the device of ``param``, and in its dtype if both are floating point."""
    if isinstance(value, Tensor):
        check_memory(value, what)
        cast = value.is_floating_point() and param.is_floating_point()
        return value.detach().to(param.device, param.dtype if cast else value.dtype, copy=True)
    if type(value) is dict:
        return {key: _on(param, element, what) for key, element in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_on(param, element, what) for element in value])
    return copy.deepcopy(value)


GroupValues: TypeAlias = dict[int, dict[str, Any]]
"""Values for some keys of groups, by the index of the group; hyperparameters are Python numbers."""

Copies: TypeAlias = list[tuple[Tensor, float | Tensor]]
"""State tensors, each with what is copied into it; a number fills it."""


class Writes(NamedTuple):
    """Everything that a load writes.

    Attributes:
        group_values: what goes into groups.
        made: new state tensors, by parameter.
        copies: what goes into state tensors, live or new.
        names: the parameter names of each group, where they are new.
        entries: what else changes in the state of a parameter.
        others: what is kept in the state under keys that are no parameters.
    """

    group_values: GroupValues
    made: list[tuple[Tensor, dict[str, Tensor]]]
    copies: Copies
    names: list[list[str]]
    entries: list[tuple[Tensor, Entries]]
    others: dict[Any, Any]

    def targets(self, groups: Sequence[ParamGroup]) -> list[Tensor]:
        """The tensors that are written into: of hyperparameters and of state, but for those that are their own source."""
        filled = [
            tensor
            for index, values in self.group_values.items()
            for key in values.keys() & groups[index].for_compiled_code[0].keys()
            for tensor in groups[index].read_only(key)
        ]
        return filled + [target for target, _ in self.copies]

    def set_apart(self, written: Iterable[Tensor]) -> Writes:
        """The same writes, before or after others into ``written``: see :func:`set_apart`."""
        return self._replace(copies=set_apart(self.copies, written))

    def write(self, groups: Sequence[ParamGroup], state: OptimizerState) -> None:
        """Write. DTensors are spread over the processes as they are copied, one at a time."""
        for index, values in self.group_values.items():
            group = groups[index]
            for key, value in values.items():
                group.load(key, value)
        for group, names in zip(groups, self.names, strict=False):
            group.set_quietly("param_names", names)
        for param, tensors in self.made:
            state[param].update(tensors)
        for param, entries in self.entries:
            entries.write(state[param])
        state.replace_foreign(self.others)
        for target, source in self.copies:
            target.copy_(spread_like(source, target)) if isinstance(source, Tensor) else fill(target, source)


def set_apart(copies: Copies, written: Iterable[Tensor]) -> Copies:
    """``copies``, targets with their sources, before or after writes into ``written``, as of live tensors of a state dict.

    A source is cloned if it lies in the memory of ``written``.
    """
    spans = sorted([span(local(tensor)) for tensor in written])
    starts = [start for start, _ in spans]
    ends = list(itertools.accumulate([end for _, end in spans], max))

    def is_written(source: Tensor) -> bool:
        start, end = span(local(source))
        before = bisect.bisect_left(starts, end)
        return before > 0 and ends[before - 1] > start

    return [(t, s.clone() if isinstance(s, Tensor) and is_written(s) else s) for t, s in copies]


def check_writable(target: Tensor, what: str, shape: tuple[int, ...] | None, source: float | Tensor) -> None:
    """Raise :class:`Unloadable` if writing ``source`` into ``target``, called ``what``, would fail.

    Without a ``shape`` the target may have any.
    """
    is_simple = type(target) is type(source) is Tensor  # which raises nothing that would have to be named
    with contextlib.nullcontext() if is_simple else naming(what, "cannot be written"):
        check_memory(target, what)
        if shape is not None and tuple(target.shape) != shape:
            raise Unloadable(f"{what} has shape {tuple(target.shape)} instead of {shape}")
        if not target.is_contiguous() and any(n > 1 and s == 0 for n, s in zip(target.shape, target.stride(), strict=True)):
            raise Unloadable(f"{what} has elements that share memory")
        if target.is_inference() and not torch.is_inference_mode_enabled():
            raise Unloadable(f"{what} was made in inference mode")
        if isinstance(source, Tensor):
            is_rounded = target.dtype.is_floating_point or target.dtype.is_complex
            if target.dtype != source.dtype and not is_rounded:
                raise Unloadable(f"{what} is {target.dtype} instead of {source.dtype}")
        else:
            # Two elements: a single one takes a number that is too large for its dtype, as infinity.
            fill(torch.empty(2, dtype=target.dtype), source)


def is_same(a: Tensor, b: float | Tensor) -> bool:
    """Whether two tensors of one shape are the same numbers in the same memory, on every process that holds a part."""
    if not isinstance(b, Tensor):
        return False
    here, there = local(a), local(b)
    in_place = (here.data_ptr(), here.stride(), a.dtype) == (there.data_ptr(), there.stride(), b.dtype)
    return in_place and placement(a) == placement(b)
