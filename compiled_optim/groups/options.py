"""What follows from a group's options for each of its parameters; see :class:`~compiled_optim.rule.fields.Option`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.nn.parameter import is_lazy

from compiled_optim.groups.names import advising, parameter_name
from compiled_optim.groups.patterns import alternatives, matches
from compiled_optim.rule.fields import Option


def choices_of(options: Sequence[Option], group: Mapping[str, Any], group_index: int, index: int) -> dict[str, Any]:
    """What the options of a group choose for one of its parameters, by name; ``ValueError`` where one does not fit it."""
    return _chosen(options, group, group_index, index) if any(o.name in group for o in options) else {}


@advising()
def _chosen(options: Sequence[Option], group: Mapping[str, Any], group_index: int, index: int) -> dict[str, Any]:
    names = (group.get("param_names") or ())[index : index + 1]
    where = f"'{parameter_name(group, group_index, index)}'"

    def is_matched(patterns: Sequence[str]) -> bool:
        if patterns and not names:
            raise ValueError(f"{where} has no name for the pattern {patterns[0]!r}")
        return any(matches(pattern, names) for pattern in patterns)

    found = {o.name: o.of(group, is_matched, group["params"][index], where) for o in options}
    return {name: choice for name, choice in found.items() if choice is not None}


def check_options(options: Sequence[Option], group: Mapping[str, Any], index: int) -> None:
    """Raise what :func:`choices_of` raises for a parameter of ``param_groups[index]``."""
    if not isinstance(group["params"], Sequence) or all(group.get(o.name, o.default) == o.default for o in options):
        return
    for j, param in enumerate(group["params"]):
        if not is_lazy(param):
            choices_of(options, group, index, j)


def warn_of_unused(options: Sequence[Option], groups: Sequence[Mapping[str, Any]], known: Collection[str]) -> set[str]:
    """Warn of options of ``groups`` and patterns in ``exclude`` that apply to no parameter, but for those ``known``.

    Returns all that is known then.
    """
    return _warn_of_patterns(groups, known) | _warn_of_options(options, groups, known)


def _warn_of_options(options: Sequence[Option], groups: Sequence[Mapping[str, Any]], known: Collection[str]) -> set[str]:
    told = {*known} & {option.name for option in options}
    for option in options:
        chosen = [group for group in groups if group.get(option.name, option.default) != option.default]
        params = [(group, j, param) for group in chosen for j, param in enumerate(group["params"])]
        if option.name in told or not params or any(_may_apply(option, *place) for place in params):
            continue
        value = chosen[0][option.name]
        warnings.warn(
            f"{option.name}={value!r} applies to no parameter: all are small (fewer than 4096 elements), or of other dtypes",
            UserWarning,
            stacklevel=2,
        )
        told.add(option.name)
    return told


def _may_apply(option: Option, group: Mapping[str, Any], index: int, param: Any) -> bool:
    """Whether an option may be of use for a parameter, or the user excluded it by name."""
    if is_lazy(param) or option.suits(group[option.name], param):
        return True
    names = (group.get("param_names") or ())[index : index + 1]
    return any(matches(pattern, names) for pattern in group.get("exclude") or ())


def _warn_of_patterns(groups: Sequence[Mapping[str, Any]], known: Collection[str]) -> set[str]:
    patterns = {part for group in groups for pattern in group.get("exclude") or () for part in alternatives(pattern)}
    if new := sorted(patterns - {*known}):
        names = [name for group in groups for name in group.get("param_names") or ()]
        for pattern in new:
            if not any(matches(pattern, [name]) for name in names):
                warnings.warn(f"exclude: the pattern {pattern!r} matches no parameter", UserWarning, stacklevel=2)
    return patterns
