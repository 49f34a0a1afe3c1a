"""The numbers that groups choose for their parameters, one for each; see :class:`~compiled_optim.rule.fields.Scale`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.nn.parameter import is_lazy

from compiled_optim.groups.names import advising, parameter_name
from compiled_optim.rule.fields import Scale
from compiled_optim.rule.misspelled import hint


@advising()
def number_of(scale: Scale, group: Mapping[str, Any], group_index: int, index: int) -> float:
    """The number of one parameter of a group; an error where there is none. See :meth:`Scale.number`."""
    names = group.get("param_names")
    name = names[index] if names else None
    return scale.number(
        group.get(scale.name), name, group["params"][index], f"'{parameter_name(group, group_index, index)}'"
    )


def check_numbers(scales: Iterable[Scale], group: Mapping[str, Any], index: int) -> None:
    """Raise what :func:`number_of` raises for a parameter of ``param_groups[index]`` whose shape is known."""
    params, names = group["params"], group.get("param_names")
    if not isinstance(params, Sequence) or (names and len(names) != len(params)):
        return  # `params` is being assigned
    for scale in scales:
        for j, param in enumerate(params):
            if not is_lazy(param):
                number_of(scale, group, index, j)


def check_own(scale: Scale, chosen: Any, before: Any, index: int) -> None:
    """Raise ``ValueError`` where a number that no step reads would take the place of ``before``, which steps read."""
    if scale.is_read(before) and chosen is not None and not scale.is_read(chosen):
        raise ValueError(
            f"{scale.name} of param_groups[{index}] is {chosen!r}, which no step reads, in place of numbers that are read; "
            "give the group a dict or a function, or None for 1"
        )


def check_names(scale: Scale, chosen: Mapping[str, Any], names: Iterable[str], aliases: Mapping[str, str]) -> None:
    """Raise ``ValueError`` where ``chosen`` has a number for what is none of ``names``, those of all parameters.

    A further name of a tied parameter, which ``aliases`` leads to the one that was kept, may have the same number as that.
    """
    known = list(names)
    for name, number in chosen.items():
        if name in aliases and number != chosen.get(aliases[name]):
            raise ValueError(f"{scale.name} has a number of its own for '{name}', which is '{aliases[name]}': name that")
        if name not in known and name not in aliases:
            raise ValueError(f"{scale.name} has a number for {name!r}, which no parameter is called{hint(str(name), known)}")
