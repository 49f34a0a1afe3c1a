"""The parameter groups of an optimizer: checked when they are added or replaced, with names that stay."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from compiled_optim.groups.changes import Changes, WatchedList
from compiled_optim.groups.param_group import ParamGroup, built_in_entries, check_values, group_keys, inherited
from compiled_optim.groups.parameters import (
    check_params,
    first_repeat,
    named_parameters,
    names_and_tensors,
    parameter_name,
    parameter_names,
    without_aliases,
)
from compiled_optim.groups.per_parameter import ByName, check_kept, check_names, ignores_prefixes, kept, warn_of_unused
from compiled_optim.memory.layout import scalars_device
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.did_you_mean import warn_of_entry
from compiled_optim.rule.fields import LR_SCALE
from compiled_optim.rule.rule import RULE, TRAIN_MODE


class GroupList:
    """The parameter groups of an optimizer of one ``kind``, and what they have in common.

    Attributes:
        listed: the optimizer's ``param_groups``. A user may put plain dicts there, which :meth:`adopt` replaces.
        kinds: the optimizer's class, and other classes whose rules groups follow.
        defaults: for entries that a group lacks.
        tensor_defaults: by name, a number of the ``defaults`` and the tensors that were passed for it.
        aliases: further names of tied parameters, each with the first name.
        state_names: entries of a parameter's state that any rule so far reads.
    """

    def __init__(self, kind: type[Declared], changes: Changes) -> None:
        self.kind, self._changes = kind, changes
        self.kinds = [kind]
        self.defaults: dict[str, Any] = {}
        self.tensor_defaults: dict[str, tuple[Any, Any]] = {}
        self.aliases: dict[str, str] = {}
        self.state_names: set[str] = {*kind._state_names()}
        self._checked_scales: list[Any] = []  # `lr_scale` dicts whose names are parameters'
        self._unused: set[str] = set()  # checked options without use and patterns of `exclude`
        self._named: list[list[tuple[Tensor, str]]] = []  # by group, at the last :meth:`note_names`
        self.replace([])

    def replace(self, groups: Iterable[Any]) -> None:
        """Set :attr:`listed`."""
        with self._changes.reported("param_groups was replaced"):
            self.listed: list[Any] = WatchedList(self._changes, groups)

    @property
    def distinct(self) -> list[ParamGroup]:
        """The groups, after :meth:`adopt`; one that is listed twice appears once."""
        return list({id(group): group for group in self.listed}.values())

    @contextmanager
    def adding(self, param_group: Mapping[str, Any]) -> Iterator[None]:
        """Append a group for a ``with`` block, and for good unless the block raises ``TypeError`` or ``ValueError``.

        Those are also the errors of a group that does not fit.
        """
        before = self.aliases
        self._append(param_group)
        try:
            yield
        except (TypeError, ValueError):
            self.listed.pop()
            self.aliases = before
            raise

    def _append(self, param_group: Mapping[str, Any]) -> None:
        """Append a group, with defaults for missing entries; an error, and no change, if something does not fit."""
        index = len(self.listed)
        label = f"param_groups[{index}]"
        kind, defaults = inherited(param_group, self.kind, self.defaults, label)
        if kind is self.kind:
            defaults |= {k: tensor for k, (number, tensor) in self.tensor_defaults.items() if self.defaults.get(k) == number}
        values = {**defaults, **built_in_entries(kind, param_group)}
        names, params = names_and_tensors(param_group["params"], f"{label}['params']")
        firsts, values["params"], aliases = without_aliases(names, params)
        if firsts:
            values["param_names"] = firsts
        elsewhere = {id(param): name for name, param in named_parameters(self.listed)}
        check_params(kind, values, index, elsewhere, (*self.listed, values)[0])
        check_values(kind, values, defaults, index)
        for key in param_group:
            warn_of_entry(key, ("params", *group_keys(kind)), label)
        self._warn_of_unread(kind, param_group.keys(), index)
        if (repeat := first_repeat(zip(map(id, params), names or itertools.repeat(None), strict=False))) is not None:
            name = parameter_name({"param_names": names}, index, repeat)
            warnings.warn(
                f"optimizer contains a parameter group with duplicate parameters: '{name}' is listed before; it is updated "
                "once per step",
                stacklevel=2,
            )
        taken = [*self.aliases, *(name for group in self.listed for name in group.get("param_names", ()))]
        every = [*firsts, *aliases]
        if (repeat := first_repeat(every, taken)) is not None:
            warnings.warn(
                f"two parameters are named '{every[repeat]}', and checkpoints can tell them apart by their order alone; "
                "give the names of each model a prefix, such as 'encoder.'",
                stacklevel=2,
            )
        self._changes.outdate(f"{label} was added")
        self.listed.append(self._group(kind, values, index))
        every_name = {name for group in self.listed for name in group.get("param_names", ())}
        self.aliases = {alias: name for alias, name in (self.aliases | aliases).items() if alias not in every_name}

    def _group(self, kind: type[Declared], values: Mapping[str, Any], index: int) -> ParamGroup:
        reference = weakref.ref(self)  # the group may outlive the list
        self.state_names.update(kind._state_names())

        def check(group: Mapping[str, Any], before: Mapping[str, Any]) -> None:
            check_values(kind, group, before, index)
            if (every := reference()) is not None:
                every._warn_of_unread(kind, group.keys() - before.keys(), index)
            if every is not None and group.get(LR_SCALE) is not before.get(LR_SCALE):
                every._check_scales([group, *(other for other in every.listed if other is not before)])

        device = scalars_device(values["params"] or [torch.empty(0)])  # for no parameters, the default device
        return ParamGroup(values, kind, device, f"param_groups[{index}]", check, self._changes)

    def _warn_of_unread(self, kind: type[Declared], entries: Set[str], index: int) -> None:
        """Warn of ``entries`` of a group that other rules read and ``kind`` does not: OneCycleLR writes ``momentum``."""
        others = {hyper.name for each in self.kinds for hyper in each._declaration.hypers}
        for key in sorted(entries & others - {*group_keys(kind)}):
            message = f"nothing reads {key} of param_groups[{index}]: {kind.__name__}, its {RULE}, has no such number"
            warnings.warn(message, UserWarning, stacklevel=2)

    def adopt(self, *, checked: bool, unshown: Iterable[Mapping[str, Any]] = ()) -> None:
        """Replace plain dicts in ``groups`` by parameter groups, and move all to the devices of their parameters.

        A dict takes missing entries from the defaults. ``checked`` means that the dicts are copies of checked groups, whose
        :meth:`~ParamGroup.unshown` hyperparameters are ``unshown``.
        """
        adopted: dict[int, ParamGroup] = {}  # by id of the dict: a dict that is listed twice is one group
        for index, group in enumerate(self.listed):
            if id(group) in adopted:
                self.listed[index] = adopted[id(group)]
            elif not isinstance(group, ParamGroup):
                kind, defaults = inherited(group, self.kind, self.defaults, f"param_groups[{index}]")
                values = {**defaults, **group}
                if not checked:
                    check_values(kind, values, defaults, index)
                self.listed[index] = adopted[id(group)] = self._group(kind, values, index)
        groups = self.distinct
        self.kinds = list(dict.fromkeys([self.kind, *[group.kind for group in groups]]))
        for group, numbers in zip(groups, unshown, strict=False):
            group.take_over(numbers)
        elsewhere: dict[int, str] = {}
        for index, group in enumerate(groups):
            self._follow_names(group, index)
            check_params(group.kind, group, index, elsewhere, self.listed[0])
            elsewhere |= zip(map(id, group["params"]), parameter_names(group, index), strict=True)
            if group["params"]:
                group.to(scalars_device(group["params"]))
        self._checked_scales = self._check_scales(self.listed)
        options = dict.fromkeys(option for kind in self.kinds for option in kind._declaration.options)
        self._unused = warn_of_unused([*options], self.listed, self._unused)
        self.note_names()

    def _check_scales(self, groups: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the scales that ``groups`` choose; ``ValueError`` if a new dict does not fit their parameters' names."""
        if not any(kind._declaration.scales_lr for kind in self.kinds):
            return []
        names = [name for group in groups for name in group.get("param_names", ())]
        by_short_name = ignores_prefixes(groups)
        distinct = {id(value): value for value in [kept(group.get(LR_SCALE)) for group in groups]}
        for value in distinct.values():
            if isinstance(value, ByName) and not any(value is known for known in self._checked_scales):
                check_names(value, names, self.aliases, by_short_name=by_short_name)
        return [*distinct.values()]

    def note_names(self) -> None:
        """Record the parameters and their names, for :meth:`_follow_names`. Weak references would stop torch's swaps."""
        pairs = [(group["params"], group.get("param_names", ())) for group in self.listed]
        self._named = [list(zip(*pair, strict=False)) for pair in pairs]

    def _follow_names(self, group: ParamGroup, index: int) -> None:
        """Let parameters keep their names where only ``params`` was edited; a new one takes the name at its index.

        It does if it has the shape of the old one, or if the group has as many parameters as before.
        """
        params, names = group["params"], group.get("param_names")
        noted = self._named[index] if index < len(self._named) else []
        is_edited = [id(param) for param, _ in noted] != list(map(id, params))
        if names is None or (len(names) == len(params) and not (is_edited and list(names) == [name for _, name in noted])):
            return
        known = {id(param): name for named in self._named for param, name in named}
        taken = {known[id(param)] for param in params if id(param) in known}
        new_names = []
        for j, param in enumerate(params):
            fits = len(params) == len(names) or (j < len(noted) and noted[j][0].shape == param.shape)
            is_free = fits and j < len(names) and names[j] not in taken
            new_names.append(known.get(id(param), names[j] if is_free else parameter_name({}, index, j)))
        if {*new_names} - {*names, *known.values()}:
            others = {known.get(id(param)) for each in self.listed for param in each["params"]}
            gone = {*names} - {*new_names} - others
            if any(before in gone and now not in names for before, now in zip(names, new_names, strict=False)):
                check_kept(group.kind._declaration.options, group, gone, new_names)
        if new_names != list(names):
            group.set_quietly("param_names", new_names)

    def index_of(self, group: int) -> int:
        """Return the index >= 0 of ``group``, which may be negative; ``IndexError`` if no group has it."""
        count = len(self.distinct)
        if group not in range(-count, count):
            raise IndexError(f"there is no param_groups[{group}]; the last is param_groups[{count - 1}]")
        return range(count)[group]

    def check_numbers(self) -> None:
        """Raise ``ValueError`` if a number that was written to a group is out of range; warn once of a negative rate."""
        if self._changes.is_refused:
            for group in self.distinct:
                for message, is_replaced in sorted(group.problems(), key=itemgetter(1)):
                    if not is_replaced:
                        raise ValueError(message)
                    self._changes.warn_of_rate(message)
                if not group.get(TRAIN_MODE, True):
                    raise RuntimeError(f"the parameters of {group.label} are in evaluation mode; call train() first")
            self._changes.is_refused = False
