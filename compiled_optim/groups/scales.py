"""The numbers that groups choose for their parameters, one for each; see :class:`~compiled_optim.rule.fields.Scale`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.nn.parameter import is_lazy

from compiled_optim.groups.by_name import ByName, kept
from compiled_optim.groups.names import advising, canonical_name, parameter_name
from compiled_optim.rule.fields import Scale
from compiled_optim.rule.misspelled import hint, mistyped


def ignores_prefixes(scales: Iterable[Scale], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether dicts are looked up without regard to the prefixes of module wrappers, as all names differ without them."""
    if not any(isinstance(group.get(scale.name), Mapping) for scale in scales for group in groups):
        return False  # nobody looks anything up
    names = [name for group in groups for name in group.get("param_names", ())]
    return len(set(map(canonical_name, names))) == len(set(names))


@advising()
def number_of(scale: Scale, group: Mapping[str, Any], group_index: int, index: int, *, by_short_name: bool = True) -> float:
    """The number of one parameter of a group; an error where there is none. See :meth:`Scale.number`.

    ``by_short_name`` is what :func:`ignores_prefixes` returns.
    """
    names = group.get("param_names")
    name = names[index] if names else None
    chosen = group.get(scale.name)
    where = f"'{parameter_name(group, group_index, index)}'"
    if isinstance(chosen, ByName) and name is not None and by_short_name:
        name = chosen.key_of(name)
    return scale.number(chosen, name, group["params"][index], where)


def check_numbers(scales: Iterable[Scale], group: Mapping[str, Any], index: int) -> None:
    """Raise what :func:`number_of` raises for a parameter of ``param_groups[index]`` whose shape is known."""
    params, names = group["params"], group.get("param_names")
    if not isinstance(params, Sequence) or (names and len(names) != len(params)):
        return  # `params` is being assigned
    for scale in scales:
        group = {**group, scale.name: kept(group.get(scale.name))}
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


def check_names(
    scale: Scale, chosen: ByName, names: Sequence[str], aliases: Mapping[str, str], *, by_short_name: bool
) -> None:
    """Raise ``ValueError`` where ``chosen`` is for none of ``names``, those of all parameters, or misspells one of them.

    What else it is for may be in another optimizer, or come later. A further name of a tied parameter, which ``aliases``
    leads to the one that was kept, may have the same number as that.
    """
    every = [*dict.fromkeys([*names, *aliases])]
    own = set(names)
    known = {canonical_name(name): name for name in reversed(every)} if by_short_name else {}
    known |= {name: name for name in every}
    unknown = []
    for key, number in chosen.items():
        name = known.get(key, known.get(canonical_name(key))) if isinstance(key, str) else None
        if name is None:
            unknown.append(key)
        elif name not in own and number != chosen.get(chosen.key_of(aliases[name])):
            raise ValueError(f"{scale.name} has a number of its own for '{key}', which is '{aliases[name]}': name that")
    if not unknown or not names:
        return
    said = f"{scale.name} has a number for {{!r}}, which no parameter is called"
    if len(unknown) == len(chosen):
        raise ValueError(said.format(unknown[0]) + hint(str(unknown[0]), every))
    shown = {canonical_name(str(key)): key for key in unknown}
    silent = {canonical_name(name): name for name in names if chosen.key_of(name) not in chosen}
    for key, wanted in mistyped(shown, silent):
        raise ValueError(f"{said.format(shown[key])}; did you mean {silent[wanted]}?")
