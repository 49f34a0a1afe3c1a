"""What the constructor and groups may choose: the entries of a group, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from compiled_optim.groups.param_group import ParamGroup, is_own
from compiled_optim.groups.per_parameter import check_choices, kept
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.fields import Choice, Hyper, Option, Scale, Static


def group_keys(kind: type[Declared]) -> list[str]:
    """What a group of ``kind`` may hold besides its parameters."""
    kinds = (Hyper, Static, Scale, Option)
    return [f.name for of_kind in kinds for f in kind._fields_of(of_kind)] + [*kind._group_flags, *kind._modes]


def check_keys(kind: type[Declared], group: Mapping[str, Any], index: int) -> None:
    """Raise ``TypeError`` where ``param_groups[index]`` has what belongs to the whole optimizer."""
    known = group_keys(kind)
    if foreign := [key for key in group if key in kind._all_fields and key not in known]:
        raise TypeError(f"{foreign[0]} is an option of the whole optimizer, not of param_groups[{index}]")


def position(group: int, count: int) -> int:
    """Which of ``count`` groups ``group`` is, counted from the start; an ``IndexError`` where there is none."""
    if group not in range(-count, count):
        raise IndexError(f"there is no param_groups[{group}]; the last is param_groups[{count - 1}]")
    return range(count)[group]


def group_entries(kind: type[Declared], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the constructor's ``options`` that groups hold: a choice that torch.optim lacks only where it was made."""
    added = kind._added_choices()
    found = {name: options[name] for name in group_keys(kind) if name in options}
    scales = {scale.name for scale in kind._fields_of(Scale)}
    chosen = {name: value for name, value in found.items() if name not in added or value != added[name]}
    return {**kind._modes, **{name: kept(value) if name in scales else value for name, value in chosen.items()}}


def as_defaults(kind: type[Declared], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """:func:`group_entries` with Python numbers for hyperparameters, and those that came in tensors with what they came as.

    Raises:
        TypeError, ValueError: a hyperparameter is no number, or out of range.
    """
    defaults, given = group_entries(kind, options), {}
    for hyper in (h for h in kind._fields_of(Hyper) if h.name in defaults):
        elements = hyper.elements(options[hyper.name], "")
        numbers = tuple(e.item() if isinstance(e, Tensor) else e for e in elements)
        for index, number in enumerate(numbers):
            hyper.check(number, index, "")
        defaults[hyper.name] = hyper.plain(numbers)
        if any(isinstance(e, Tensor) for e in elements):
            given[hyper.name] = defaults[hyper.name], options[hyper.name]
    kind.check({**options, **defaults}, options)
    return defaults, given


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
    group = {**kind._added_choices(), **group}
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
    check_keys(kind, given, index)
    for mode in kind._modes:
        if isinstance(before, ParamGroup) and group[mode] is not before[mode]:
            raise ValueError(f"{mode} of {where} follows the parameters; call the optimizer's eval() or train()")
