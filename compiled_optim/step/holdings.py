"""What an optimizer owns, and every step of it is made of: groups and state, and what outlives the steps."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from compiled_optim.checkpoint import state_dict as checkpoint
from compiled_optim.checkpoint.state_dict import PreparedLoad
from compiled_optim.groups.param_group import ParamGroup, is_own
from compiled_optim.groups.parameters import (
    check_params,
    first_repeat,
    named_parameters,
    names_and_tensors,
    parameter_name,
    without_aliases,
)
from compiled_optim.groups.per_parameter import ByName, check_choices, check_names, ignores_prefixes, kept, warn_of_unused
from compiled_optim.groups.watched import Changes, WatchedList
from compiled_optim.memory.layout import scalars_device
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.schedule import Schedule, Schedules
from compiled_optim.rule.declared import Declared, added_choices, no_hyperparameter, state_names
from compiled_optim.rule.fields import Choice, Hyper, Option, Scale, Static
from compiled_optim.rule.misspelled import warn_of_entry
from compiled_optim.rule.rule import TRAIN_MODE
from compiled_optim.state import OptimizerState, ParamState
from compiled_optim.step.accumulation import AccumulatedSteps
from compiled_optim.step.hand_captures import HandCaptures


class Holdings:
    """Groups, state, and the memory of the device that graphs may go on reading while steps come and go."""

    def __init__(self, kind: type[Declared], lowering: str, changes: Changes) -> None:
        self.kind = kind  # the optimizer's class
        self.lowering = lowering
        self.changes = changes  # where groups and state report writes
        self.groups = []
        self._scales: list[Any] = []  # dicts of numbers by name whose names were found to be there
        self._unused: set[str] = set()  # options without use, and patterns of `exclude`, that were looked at
        self._named: list[list[tuple[Tensor, str]]] = []  # by group, as it was when the step was made last
        self.aliases: dict[str, str] = {}  # further names of tied parameters -> the names that were kept
        self.state = self.new_state()
        self.hands_out_state = False  # whether somebody may hold state tensors, and so give them other memory
        self.schedules = Schedules()
        self.accumulated = AccumulatedSteps(kind)
        self.clipping = Clipping(torch.device("cpu"))
        self.log = CompilationLog()
        self.hand_captures = HandCaptures()

    def new_state(self) -> OptimizerState:
        """An empty state, which reports writes of what a step looks at."""
        return OptimizerState(changes=self.changes, names=state_names(self.kind))

    @property
    def groups(self) -> list[Any]:
        """``param_groups``. Somebody may put plain dicts there, which :meth:`adopt` replaces."""
        return self._groups

    @groups.setter
    def groups(self, groups: Iterable[Any]) -> None:
        self.changes.pending = True
        self._groups = WatchedList(self.changes, groups)
        self.changes.pending = True

    @property
    def own_groups(self) -> list[ParamGroup]:
        """``groups``, after :meth:`adopt`; one that is listed again, once."""
        return list({id(group): group for group in self.groups}.values())

    def add(self, param_group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Add a group, with ``defaults`` for missing entries; an error, and no change, where something does not fit."""
        index = len(self.groups)
        values = {**defaults, **param_group}
        _check_keys(self.kind, values, index)
        if "params" not in param_group:
            raise ValueError(f"param_groups[{index}] has no 'params'")
        given = names_and_tensors(param_group["params"], f"param_groups[{index}]['params']")
        names, params, aliases = without_aliases(*given)
        values["params"] = params
        if names:
            values["param_names"] = names
        elsewhere = {id(param): name for name, param in named_parameters(self.groups)}
        check_params(self.kind, values, index, elsewhere, (*self.groups, values)[0])
        check_values(self.kind, values, defaults, index)
        for key in param_group:
            warn_of_entry(key, ("params", *_group_keys(self.kind)), f"param_groups[{index}]")
        self._warn(*given, index)
        self.groups.append(self._group(values, index))
        every_name = {name for group in self.groups for name in group.get("param_names", ())}
        self.aliases = {alias: name for alias, name in (self.aliases | aliases).items() if alias not in every_name}
        self.changes.pending = True

    def _warn(self, names: Sequence[str], params: Sequence[Any], index: int) -> None:
        """Warn of what ``param_groups[index]``, which is about to be added, lists twice."""
        if (place := first_repeat(zip(map(id, params), names or itertools.repeat(None), strict=False))) is not None:
            name = parameter_name({"param_names": names}, index, place)
            warnings.warn(
                f"optimizer contains a parameter group with duplicate parameters: '{name}' is there before; it is updated "
                "once per step",
                stacklevel=2,
            )
        firsts, _, aliases = without_aliases(names, params)
        taken = [*self.aliases, *(name for group in self.groups for name in group.get("param_names", ()))]
        every = [*firsts, *aliases]
        if (place := first_repeat(every, taken)) is not None:
            warnings.warn(
                f"two parameters are named '{every[place]}', and checkpoints can tell them apart by their order alone; "
                "give the names of each model a prefix of its own",
                stacklevel=2,
            )

    def adopt(self, defaults: Mapping[str, Any], *, checked: bool, unshown: Iterable[Mapping[str, Any]] = ()) -> None:
        """Make groups of the plain dicts that somebody put there, and let all follow their parameters to other devices.

        A dict takes from ``defaults`` what it lacks; ``checked`` says that the dicts are copies of groups that were checked,
        whose :meth:`unshown` hyperparameters come along.
        """
        made: dict[int, ParamGroup] = {}  # of one dict that is listed twice, one group
        for index, group in enumerate(self.groups):
            if id(group) in made:
                self.groups[index] = made[id(group)]
            elif not isinstance(group, ParamGroup):
                if "params" not in group:
                    raise ValueError(f"param_groups[{index}] has no 'params'")
                values = {**defaults, **group}
                if not checked:
                    check_values(self.kind, values, defaults, index)
                self.groups[index] = made[id(group)] = self._group(values, index)
        for own, numbers in zip(self.own_groups, unshown, strict=False):
            own.take_over(numbers)
        elsewhere: dict[int, str] = {}
        for index, group in enumerate(self.own_groups):
            self._follow_names(group, index)
            check_params(self.kind, group, index, elsewhere, self.groups[0])
            elsewhere |= {id(param): parameter_name(group, index, j) for j, param in enumerate(group["params"])}
            if group["params"]:
                group.to(scalars_device(group["params"]))
        self._scales = self.check_scales(self.kind._fields_of(Scale), self.groups)
        self._unused = warn_of_unused(self.kind._declaration.options, self.groups, self._unused)
        self._note_names()
        self._let_go()

    def pickled(self) -> dict[str, Any]:
        """What :meth:`restore` and a new optimizer take, besides groups and state."""
        self.accumulated.check_ended("copied")
        functions = self.schedules.functions
        return {"lowering": self.lowering, "aliases": self.aliases, "schedules": functions, "unshown": self.unshown()}

    def restore(
        self,
        aliases: Mapping[str, str],
        schedules: Mapping[Any, Schedule],
        defaults: Mapping[str, Any],
        unshown: Iterable[Mapping[str, Any]],
    ) -> None:
        """Take what was :meth:`pickled`; groups and state are there already."""
        self.aliases = dict(aliases)
        self.schedules.functions = dict(schedules)
        self.adopt(defaults, checked=True, unshown=unshown)

    def unshown(self) -> list[dict[str, Any]]:
        """By group, the hyperparameters that are no entries of it."""
        return [group.unshown() if isinstance(group, ParamGroup) else {} for group in self.own_groups]

    def check_scales(
        self, scales: Sequence[Scale], groups: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]] = ()
    ) -> list[Any]:
        """Return what ``groups`` choose for ``scales``.

        ``ValueError`` where a dict that is new does not fit the names of parameters, of which ``others`` have some too.
        """
        names = [name for group in (*groups, *others) for name in group.get("param_names", ())]
        by_short_name = ignores_prefixes(scales, [*groups, *others])
        chosen = [(scale, kept(group.get(scale.name))) for scale in scales for group in groups]
        found = {id(given): (scale, given) for scale, given in chosen}
        for scale, given in found.values():
            if isinstance(given, ByName) and not any(given is known for known in self._scales):
                check_names(scale, given, names, self.aliases, by_short_name=by_short_name)
        return [given for _, given in found.values()]

    def _note_names(self) -> None:
        """Note whose the names are, for :meth:`_follow_names`. torch swaps no tensors that have weak references."""
        pairs = [(group["params"], group.get("param_names", ())) for group in self.groups]
        self._named = [list(zip(*pair, strict=False)) for pair in pairs]

    def _follow_names(self, group: ParamGroup, index: int) -> None:
        """Let names stay with parameters where only ``params`` was edited; one in the place of another takes its name."""
        params, names = group["params"], group.get("param_names")
        noted = self._named[index] if index < len(self._named) else []
        is_edited = [id(param) for param, _ in noted] != list(map(id, params))
        if names is None or (len(names) == len(params) and not (is_edited and list(names) == [name for _, name in noted])):
            return
        known = {id(param): name for named in self._named for param, name in named}
        taken = {known[id(param)] for param in params if id(param) in known}
        found = []
        for j, param in enumerate(params):
            is_free = j < len(names) and names[j] not in taken
            found.append(known.get(id(param), names[j] if is_free else parameter_name({}, index, j)))
        if found != list(names):
            group.set_quietly("param_names", found)

    def schedule(self, group: int | None, functions: Mapping[str, Schedule | None]) -> None:
        """Begin or end schedules of one group or of all; an error, and no change, where one does not fit."""
        hypers = {h.name: h for h in self.kind._fields_of(Hyper)}
        if unknown := functions.keys() - hypers.keys():
            raise ValueError(no_hyperparameter(self.kind, min(unknown)))
        groups = self.own_groups
        count = len(groups)
        schedules = self.schedules.copy()
        for index in range(count) if group is None else [position(group, count)]:
            for name, function in functions.items():
                if function is not None and name not in groups[index]:
                    raise ValueError(f"param_groups[{index}] has no {name}; it needs {hypers[name].when}=True")
                schedules.set(index, groups[index], hypers[name], function)
        self.schedules = schedules
        schedules.follow(groups)
        self.changes.pending = True

    def _let_go(self) -> None:
        """Drop the state of parameters that left the groups without ever having been stepped; torch makes none for them.

        State of another step count or with other numbers stays, whoever wrote them.
        """
        present = {param for group in self.groups for param in group["params"]}
        gone = [p for p, entries in self.state.items() if isinstance(entries, ParamState) and p not in present]
        for param in [p for p in gone if self.state[p].is_initial()]:
            del self.state[param]

    def check_numbers(self) -> None:
        """Raise ``ValueError`` where a number that was written to a group is out of range."""
        if self.changes.is_refused:
            for group in self.own_groups:
                for message in group.out_of_range.values():
                    raise ValueError(message)
                if not group.get(TRAIN_MODE, True):
                    raise RuntimeError(f"{group.label} has the parameters to evaluate; call the optimizer's train() first")
            self.changes.is_refused = False

    def shapes(self) -> list[tuple[Any, ...]]:
        """What of the groups may change unreported: identity, length, a write into a hyperparameter that was 0."""
        names = self.kind._declaration.structural_hypers
        return [
            (id(g), len(g.get("params", ())), *[isinstance(g, ParamGroup) and g.nonzero(n) for n in names])
            for g in self.groups
        ]

    def unreported(self) -> str:
        """The name of a hyperparameter that steps now do without, and that may cease to be 0 without a report, if any."""
        names = self.kind._declaration.structural_hypers
        return next((name for group in self.own_groups for name in names if group.is_unreported(name)), "")

    def save(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict, with the values of ``flags`` for run-time flags."""
        self.accumulated.check_ended("saved")
        self.hands_out_state = True
        return checkpoint.save(self.kind._declaration, self.own_groups, self.state, self.aliases, flags)

    def prepare_load(
        self, saved: Mapping[str, Any], strict: bool, hyperparameters: Literal["checkpoint", "keep"]
    ) -> PreparedLoad:
        """Check what copies a state dict into groups and state; an error where it does not fit."""
        groups, state, aliases = self.own_groups, self.state, self.aliases
        prepared = checkpoint.prepare_load(self.kind, groups, state, aliases, saved, strict, hyperparameters)

        def write_and_note() -> None:
            prepared.write()
            self.accumulated.forget()
            self._note_names()

        return prepared._replace(write=write_and_note)

    def _group(self, values: Mapping[str, Any], index: int) -> ParamGroup:
        params = values["params"] or [torch.empty(0)]  # on the default device
        others = [g for i, g in enumerate(self.groups) if i != index and isinstance(g, ParamGroup)]
        return ParamGroup(
            values,
            self.kind._declaration,
            scalars_device(params),
            f"param_groups[{index}]",
            functools.partial(_check_entries, self.kind, weakref.ref(self), index),
            self.changes,
            others,
        )


def _check_entries(
    kind: type[Declared],
    holdings: weakref.ref[Holdings],
    index: int,
    group: Mapping[str, Any],
    before: Mapping[str, Any],
) -> None:
    """:func:`check_values`, and that a new dict of numbers fits the names of all parameters in ``holdings``."""
    check_values(kind, group, before, index)
    assigned = [scale for scale in kind._fields_of(Scale) if group.get(scale.name) is not before.get(scale.name)]
    if assigned and (own := holdings()) is not None:  # which a group may outlive
        own.check_scales(assigned, [group], [other for other in own.groups if other is not before])


def _group_keys(kind: type[Declared]) -> list[str]:
    """What a group of ``kind`` may hold besides its parameters."""
    kinds = (Hyper, Static, Scale, Option)
    return [f.name for of_kind in kinds for f in kind._fields_of(of_kind)] + [*kind._group_flags, *kind._modes]


def _check_keys(kind: type[Declared], group: Mapping[str, Any], index: int) -> None:
    """Raise ``TypeError`` where ``param_groups[index]`` has what belongs to the whole optimizer."""
    known = _group_keys(kind)
    if foreign := [key for key in group if key in kind._all_fields and key not in known]:
        raise TypeError(f"{foreign[0]} is an option of the whole optimizer, not of param_groups[{index}]")


def position(group: int, count: int) -> int:
    """Which of ``count`` groups ``group`` is, counted from the start; an ``IndexError`` where there is none."""
    if group not in range(-count, count):
        raise IndexError(f"there is no param_groups[{group}]; the last is param_groups[{count - 1}]")
    return range(count)[group]


def group_entries(kind: type[Declared], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the constructor's ``options`` that groups hold: a choice that torch.optim lacks only where it was made."""
    added = added_choices(kind)
    found = {name: options[name] for name in _group_keys(kind) if name in options}
    scales = {scale.name for scale in kind._fields_of(Scale)}
    chosen = {name: value for name, value in found.items() if name not in added or value != added[name]}
    return {**kind._modes, **{name: kept(value) if name in scales else value for name, value in chosen.items()}}


def as_defaults(kind: type[Declared], options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """:func:`group_entries` with Python numbers for hyperparameters, and the names of those that came in tensors.

    Raises:
        TypeError, ValueError: a hyperparameter is no number, or out of range.
    """
    defaults, in_tensors = group_entries(kind, options), []
    for hyper in (h for h in kind._fields_of(Hyper) if h.name in defaults):
        elements = hyper.elements(options[hyper.name], "")
        if any(isinstance(e, Tensor) for e in elements):
            in_tensors.append(hyper.name)
        numbers = tuple(e.item() if isinstance(e, Tensor) else e for e in elements)
        for index, number in enumerate(numbers):
            hyper.check(number, index, "")
        defaults[hyper.name] = hyper.plain(numbers)
    kind.check({**options, **defaults}, options)
    return defaults, in_tensors


def check_read(kind: type[Declared], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` where the constructor was given a hyperparameter that none of ``groups`` has a use for."""
    for hyper in kind._fields_of(Hyper):
        if hyper.when is None or options[hyper.name] is None:
            continue
        if not any(group.get(hyper.when, options[hyper.when]) for group in groups):
            raise ValueError(f"nothing reads {hyper.name} without {hyper.when}=True, which no group has")


def check_values(kind: type[Declared], group: Mapping[str, Any], before: Mapping[str, Any], index: int) -> None:
    """Raise an error where an entry of ``param_groups[index]`` is out of range, or does not fit another.

    ``before`` are the entries whose place it takes.
    """
    where = f"param_groups[{index}]"
    given = group
    group = {**added_choices(kind), **group}
    for choice in kind._fields_of(Choice):
        choice.check(group.get(choice.name, choice.default), where)
    hypers = {h.name: group[h.name] for h in kind._fields_of(Hyper)}
    for hyper in kind._fields_of(Hyper):
        value = hypers[hyper.name]
        was_own = hyper.name in before and is_own(hyper, value, group)  # from a checkpoint
        if (value is not None or not hyper.like) and not was_own:
            is_written = isinstance(before, ParamGroup)  # which refuses a number out of range in the next step
            hyper.elements(value, where) if is_written else hyper.checked(value, where)
    kind.check(hypers, group)
    for check in dict.fromkeys(t.check for t in kind._transforms if t.check):
        check(group)
    check_choices(kind._fields_of(Scale), kind._fields_of(Option), group, before, index)
    _check_keys(kind, given, index)
    for mode in kind._modes:
        if isinstance(before, ParamGroup) and group[mode] is not before[mode]:
            raise ValueError(f"{mode} of {where} follows the parameters; call the optimizer's eval() or train()")
