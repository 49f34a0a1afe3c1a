"""Which parameter of a checkpoint is which parameter of the optimizer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

from torch import Tensor

from compiled_optim.checkpoint.read import group_names, refuse_repeated
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.parameters import canonical_name, numbered, parameter_name

T = TypeVar("T")


@dataclass
class Listed(Generic[T]):
    """One parameter as the groups of one side list it."""

    name: str
    group: int  # the index of its group
    index: int  # its own in that group
    content: T  # in the optimizer the parameter itself; in a checkpoint its state, empty where it never had any
    aliases: tuple[str, ...] = ()  # its further names


Live: TypeAlias = Listed[Tensor]
Saved: TypeAlias = Listed[Mapping[str, Any]]
Pairs: TypeAlias = list[tuple[Live, Saved]]


def match(
    groups: Sequence[ParamGroup],
    aliases: Mapping[str, str],
    saved: Mapping[str, Any],
    implied: Mapping[str, float],
    known: Collection[str],
) -> tuple[Pairs, list[str], list[str]]:
    """Match parameters of ``saved``, a checkpoint that was read, by name where both sides have names, else by position.

    ``aliases`` are the optimizer's further names of tied parameters -> the name in the group; ``implied`` is state that a
    checkpoint may leave out, and its value where there is other state; ``known`` are the names that an optimizer gives.

    Parameters of equal names are matched by their order, if both sides have equally many of them.

    Returns pairs of a live and a saved parameter, the names that only the optimizer has, and those that only the checkpoint
    has. It is an error if only some of its groups have names, if without names the numbers of parameters differ, or if only
    the checkpoint has several parameters of one name, or one parameter in several places.
    """
    saved_groups = saved["param_groups"]
    ours: list[Live] = _listed(groups, aliases, lambda param: param)
    theirs: list[Saved] = _listed(
        saved_groups, saved.get("aliases", {}), lambda param: _without_blanks(saved["state"].get(param, {}), implied, known)
    )
    our_names = Counter([param.name for param in ours])
    refuse_repeated([param.name for param in theirs if our_names[param.name] < 2], "names")
    have_names = {group_names(group) is not None for group in saved_groups if group["params"]}
    if have_names == {False} or not all("param_names" in group for group in groups):
        _check_sizes(groups, saved_groups)
        return list(zip(ours, theirs, strict=True)), [], []
    if False in have_names:
        raise ValueError("the checkpoint has names for the parameters of some groups only")
    _check_repeats(ours, saved_groups)
    return _match_names(_told_apart(ours), _told_apart(theirs))


def _told_apart(listed: Sequence[Listed[T]]) -> list[Listed[T]]:
    """``listed`` with different names."""
    names = numbered([param.name for param in listed])
    return [replace(param, name=name) for param, name in zip(listed, names, strict=True)]


def names_to_take(groups: Sequence[ParamGroup], saved_groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The parameter names of every saved group, for ``groups`` without names; empty where none are to be taken over.

    They are taken over, as in torch.optim, from an optimizer that had names itself: its groups have ``param_names``.
    """
    have_none = not any("param_names" in group for group in groups)
    of_theirs = [group_names(group) for group in saved_groups if have_none and group.get("param_names") is not None]
    return [names for names in of_theirs if names is not None] if len(of_theirs) == len(saved_groups) else []


def _listed(
    groups: Sequence[Mapping[str, Any]], aliases: Mapping[str, str], content_of: Callable[[Any], T]
) -> list[Listed[T]]:
    further: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        further.setdefault(name, []).append(alias)
    listed: list[Listed[T]] = []
    for i, group in enumerate(groups):
        names = group_names(group) or [parameter_name(group, i, j) for j in range(len(group["params"]))]
        of_group: dict[Any, Listed[T]] = {}
        for j, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            if (known := of_group.get(param)) is None:
                of_group[param] = Listed(name, i, j, content_of(param), tuple(further.get(name, ())))
            elif name not in (known.name, *known.aliases):
                known.aliases += (name,)
        listed += of_group.values()
    return listed


def _without_blanks(state: Mapping[str, Any], implied: Mapping[str, float], known: Collection[str]) -> dict[str, Any]:
    """The saved state of one parameter without ``known`` entries that stand for nothing, and with what the others imply."""
    # A flattened checkpoint of torch.distributed.checkpoint has an empty dict for an entry that was not saved.
    blank = {k for k, v in state.items() if v is None or (type(v) is dict and not v)}
    return {**implied, **{k: v for k, v in state.items() if not (k in blank and k in known)}} if state.keys() - blank else {}


def _check_sizes(groups: Sequence[ParamGroup], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` unless both sides have equally many groups, equally long and with repeats in equal places."""
    if len(groups) != len(saved_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups "
            f"({len(saved_groups)} instead of {len(groups)}), and without names on both sides only positions can match"
        )
    for i, (ours, theirs) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(ours["params"]) != len(theirs["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"param_groups[{i}] has {len(theirs['params'])} parameters instead of {len(ours['params'])}"
            )
        if (repeats := _firsts(ours["params"])) != _firsts(theirs["params"]):
            refuse_repeated(theirs["params"][j] for j in dict.fromkeys(repeats))
            raise ValueError(f"param_groups[{i}] has a parameter twice where the checkpoint has two parameters")


def _firsts(params: Sequence[Any]) -> list[int]:
    """For each of ``params`` its first place among them."""
    places: dict[Any, int] = {}
    return [places.setdefault(param, place) for place, param in enumerate(params)]


def _check_repeats(live: Sequence[Live], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` where the checkpoint has one parameter for several of ``live``, by their names."""
    owners = {name: param.name for param in live for name in (param.name, *param.aliases)}
    for group in saved_groups:
        names = group_names(group) or []
        if names == group["params"]:
            refuse_repeated(names)
        known = {(param, owners[name]) for param, name in zip(group["params"], names, strict=True) if name in owners}
        refuse_repeated(param for param, _ in known)


def _match_names(live: list[Live], saved: list[Saved]) -> tuple[Pairs, list[str], list[str]]:
    """Pairs of parameters of equal name, and the names that only one side has.

    A name as it is comes before a name without the prefixes of module wrappers, and a parameter's name before its aliases.
    """
    spellings: tuple[Callable[[str], str], ...] = (str, canonical_name)
    found: dict[str, Saved] = {}
    left = {theirs.name: theirs for theirs in saved}
    for spelling, with_aliases in itertools.product(spellings, (False, True)):
        if not left or len(found) == len(live):
            break
        ours_by_name, theirs_by_name = (_by_name(side, spelling, with_aliases=with_aliases) for side in (live, saved))
        for name, ours in ours_by_name.items():
            theirs = theirs_by_name.get(name)
            if ours.name not in found and theirs is not None and theirs.name in left:
                found[ours.name] = left.pop(theirs.name)
    pairs = [(ours, found[ours.name]) for ours in live if ours.name in found]
    return pairs, [ours.name for ours in live if ours.name not in found], list(left)


def _by_name(params: Sequence[Listed[Any]], spelling: Callable[[str], str], *, with_aliases: bool) -> dict[str, Listed[Any]]:
    """Parameters by the ``spelling`` of their names. A spelling that several of them share is left out."""
    found: dict[str, Listed[Any]] = {}
    shared: set[str] = set()
    for param in params:
        for name in (param.name, *param.aliases) if with_aliases else (param.name,):
            if found.setdefault(short := spelling(name), param) is not param:
                shared.add(short)
    for name in shared:
        del found[name]
    return found
