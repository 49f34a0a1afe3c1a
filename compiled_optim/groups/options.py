"""What follows from a group's options for each of its parameters; see :class:`~compiled_optim.rule.fields.Option`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.nn.parameter import is_lazy

from compiled_optim.groups.names import advising, canonical_name, parameter_name
from compiled_optim.rule.fields import Option


def choices_of(options: Iterable[Option], group: Mapping[str, Any], group_index: int, index: int) -> dict[str, Any]:
    """What the options of a group choose for one of its parameters, by name; ``ValueError`` where one does not fit it."""
    own = [option for option in options if option.name in group]
    return _chosen(own, group, group_index, index) if own else {}


@advising()
def _chosen(options: Sequence[Option], group: Mapping[str, Any], group_index: int, index: int) -> dict[str, Any]:
    names = group.get("param_names") or ()
    spellings = {names[index], canonical_name(names[index])} if index < len(names) else ()
    where = f"'{parameter_name(group, group_index, index)}'"
    found = {o.name: o.of(group, spellings, group["params"][index], where) for o in options}
    return {name: choice for name, choice in found.items() if choice is not None}


def check_options(options: Sequence[Option], group: Mapping[str, Any], index: int) -> None:
    """Raise what :func:`choices_of` raises for a parameter of ``param_groups[index]``."""
    if not isinstance(group["params"], Sequence) or all(group.get(o.name, o.default) == o.default for o in options):
        return
    for j, param in enumerate(group["params"]):
        if not is_lazy(param):
            choices_of(options, group, index, j)
