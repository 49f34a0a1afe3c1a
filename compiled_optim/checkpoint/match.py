"""Which parameter of a checkpoint is which parameter of the optimizer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from compiled_optim.checkpoint.read import group_names, refuse_repeated
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.parameters import canonical_name, numbered, parameter_name


@dataclass
class ListedParam:
    """One parameter as the groups of one side list it: at an index of a group, under a name and aliases."""

    name: str
    aliases: list[str]
    group: int
    index: int
    key: Any  # what the group lists: the parameter itself, or a number or name of it in a checkpoint


class SavedParam(NamedTuple):
    """A parameter of a checkpoint, which one of the optimizer it is, and what a load changes in that one's state."""

    own: ListedParam
    saved: ListedParam
    entries: dict[str, Any]  # its state in the checkpoint, with what is implied; empty where it never had any
    new: dict[Any, Any]  # tensors that the optimizer's parameter lacks, and foreign entries
    gone: list[Any]  # names of entries that go


def match(
    groups: Sequence[ParamGroup],
    aliases: Mapping[str, str],
    saved: Mapping[str, Any],
    known: Collection[str],
) -> tuple[list[SavedParam], list[str], list[str]]:
    """The parameters that the optimizer and a checkpoint both have, the names that only one has, and only the other.

    They are matched by name where both sides have names, equal ones by their order, else by position. ``aliases`` are the
    optimizer's further names of tied parameters -> the name in the group; ``saved`` was read, and may leave out state that
    a group's optimizer implies where there is other state; ``known`` are the names that an optimizer gives.

    Raises:
        ValueError: only some of the checkpoint's groups have names; or without names the numbers of parameters differ; or
            only the checkpoint has several parameters of one name, or one parameter in several places.
    """
    saved_groups = saved["param_groups"]
    ours, theirs = _listed(groups, aliases), _listed(saved_groups, saved.get("aliases", {}))
    our_names = Counter([param.name for param in ours])
    refuse_repeated([param.name for param in theirs if our_names[param.name] < 2], "names")
    have_names = {group_names(group) is not None for group in saved_groups if group["params"]}
    if have_names == {False} or not all(["param_names" in group for group in groups]):
        _check_sizes(groups, saved_groups)
        found = dict(enumerate(theirs))
    elif False in have_names:
        raise ValueError("the checkpoint has names for the parameters of some groups only")
    else:
        _check_repeats(ours, saved_groups)
        found = _match_names(ours, theirs)
    matched = []
    for i in sorted(found):
        state = saved["state"].get(found[i].key, {})
        # A flattened checkpoint of torch.distributed.checkpoint has an empty dict for an entry that was not saved.
        blank = {k for k, v in state.items() if v is None or (type(v) is dict and not v)}
        implied = groups[ours[i].group].kind._implied_state
        entries = {**implied, **{k: v for k, v in state.items() if k not in blank or k not in known}}
        matched.append(SavedParam(ours[i], found[i], entries if state.keys() - blank else {}, {}, []))
    keys = {param.saved.key for param in matched}
    missing = [own.name for i, own in enumerate(ours) if i not in found]
    return matched, missing, [other.name for other in theirs if other.key not in keys]


def names_to_take(groups: Sequence[ParamGroup], saved_groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The parameter names of every saved group, for ``groups`` without names; empty where none are to be taken over.

    They are taken over, as in torch.optim, from an optimizer that had names itself: its groups have ``param_names``.
    """
    if any(["param_names" in group for group in groups]) or any([g.get("param_names") is None for g in saved_groups]):
        return []
    return [names for group in saved_groups if (names := group_names(group)) is not None]


def _listed(groups: Sequence[Mapping[str, Any]], aliases: Mapping[str, str]) -> list[ListedParam]:
    further: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        further.setdefault(name, []).append(alias)
    listed: list[ListedParam] = []
    for i, group in enumerate(groups):
        params = group["params"]
        names = group_names(group) or [parameter_name(group, i, j) for j in range(len(params))]
        by_key: dict[Any, ListedParam] = {}
        for j, (name, key) in enumerate(zip(names, params, strict=True)):
            if (known := by_key.get(key)) is None:
                by_key[key] = ListedParam(name, [*further.get(name, ())], i, j, key)
            elif name not in (known.name, *known.aliases):
                known.aliases.append(name)
        listed += by_key.values()
    return listed


def _check_sizes(groups: Sequence[ParamGroup], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` unless both sides have equally many groups, equally long and with repeats in equal places."""
    if len(groups) != len(saved_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups "
            f"({len(saved_groups)} instead of {len(groups)}), and without names on both sides only positions can match"
        )
    for i, (ours, theirs) in enumerate(zip([g["params"] for g in groups], [g["params"] for g in saved_groups], strict=True)):
        if len(ours) != len(theirs):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"param_groups[{i}] has {len(theirs)} parameters instead of {len(ours)}"
            )
        if (repeats := _firsts(ours)) != _firsts(theirs):
            refuse_repeated(theirs[j] for j in dict.fromkeys(repeats))
            raise ValueError(f"param_groups[{i}] has a parameter twice where the checkpoint has two parameters")


def _firsts(params: Sequence[Any]) -> list[int]:
    """For each of ``params`` its first index among them."""
    first: dict[Any, int] = {}
    return [first.setdefault(param, index) for index, param in enumerate(params)]


def _check_repeats(ours: Sequence[ListedParam], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` where the checkpoint has one parameter for several of ``ours``, by their names."""
    owners = {name: param.name for param in ours for name in (param.name, *param.aliases)}
    for group in saved_groups:
        names = group_names(group) or []
        if names == group["params"]:
            refuse_repeated(names)
        known = {(param, owners[name]) for param, name in zip(group["params"], names, strict=True) if name in owners}
        refuse_repeated([param for param, _ in known])


def _match_names(ours: list[ListedParam], theirs: list[ListedParam]) -> dict[int, ListedParam]:
    """The one of ``theirs`` that has the name of one of ``ours``, by the index of that. Equal names are numbered first.

    A name as it is comes before a name without the prefixes of module wrappers, and a parameter's name before its aliases.
    """
    for side in (ours, theirs):
        for param, name in zip(side, numbered([param.name for param in side]), strict=True):
            param.name = name
    found: dict[int, ListedParam] = {}
    left = set(range(len(theirs)))
    spellings: tuple[Callable[[str], str], ...] = (str, canonical_name)
    for spelling, with_aliases in itertools.product(spellings, (False, True)):
        if not left:
            break
        by_name = _by_name(theirs, spelling, with_aliases=with_aliases)
        for name, i in _by_name(ours, spelling, with_aliases=with_aliases).items():
            if i not in found and (j := by_name.get(name)) in left:
                left.remove(j)
                found[i] = theirs[j]
    return found


def _by_name(params: Sequence[ListedParam], spelling: Callable[[str], str], *, with_aliases: bool) -> dict[str, int]:
    """The indices of ``params`` by the ``spelling`` of their names. A spelling that several of them share is left out."""
    found: dict[str, int] = {}
    shared: set[str] = set()
    for index, param in enumerate(params):
        for name in (param.name, *param.aliases) if with_aliases else (param.name,):
            if found.setdefault(short := spelling(name), index) != index:
                shared.add(short)
    return {name: index for name, index in found.items() if name not in shared}
