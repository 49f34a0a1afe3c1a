"""Options of a group that differ by parameter: ``lr_scale``, and options with patterns of names.

See :class:`~compiled_optim.rule.fields.Option`.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.groups.parameters import advising, alternatives, canonical_name, matches, parameter_name
from compiled_optim.rule.did_you_mean import hint, mistyped
from compiled_optim.rule.fields import LR_SCALE, Option, built_in, is_per_parameter
from compiled_optim.rule.transforms import lr_factor

T = TypeVar("T")


def first_matches(
    keys: Sequence[Any],
    things: Mapping[str, T],
    is_match: Callable[[Any, T], bool],
    what: str,
    conflict: Callable[[Any, Any], bool] = lambda first, second: True,
) -> dict[str, Any]:
    """Map the name of each of ``things``, each a ``what`` in messages, to the key that it matches, if any.

    The last key may be ``"*"``, for things that no other matches. Raise ``ValueError`` where a key matches nothing, or two
    keys in ``conflict`` match the same.
    """
    matched_by: dict[str, Any] = {}
    for index, key in enumerate(keys):
        matched = [name for name, thing in things.items() if is_match(key, thing)]
        if not matched:
            listed = f"; there are {', '.join([*things][:5])}{', ...' if len(things) > 5 else ''}" if things else ""
            raise ValueError(f"{_described(key)} matches no {what}{listed}")
        for name in matched:
            other, is_default = matched_by.setdefault(name, key), key == "*" and index == len(keys) - 1
            if other != key and conflict(other, key) and not is_default:
                raise ValueError(f"{what} '{name}' matches both {_described(other)} and {_described(key)}")
    return matched_by


def _described(key: Any) -> str:
    return f"the pattern {key!r}" if isinstance(key, str) else f"the type {getattr(key, '__name__', key)}"


class ByName(dict[str, float]):
    """A read-only copy of a dict of numbers, without its tensors; ``copy`` and ``|`` make plain dicts."""

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        values = {k: n.item() if isinstance(n, Tensor) and n.numel() == 1 else built_in(n) for k, n in numbers.items()}
        super().__init__(values)

    def key_of(self, name: str) -> str:
        """Return the key for ``name``: itself, or one that differs in wrappers' prefixes, if all such have one number."""
        if name in self or not (keys := self._by_short_name.get(canonical_name(name))):
            return name
        if len({self[key] for key in keys}) > 1:
            raise ValueError(f"there are different numbers for '{name}', under {' and '.join(map(repr, keys))}")
        return keys[0]

    @functools.cached_property
    def _by_short_name(self) -> dict[str, list[str]]:
        keys: dict[str, list[str]] = {}
        for key in (key for key in self if isinstance(key, str)):
            keys.setdefault(canonical_name(key), []).append(key)
        return keys

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a group's dict of numbers by name cannot be edited in place; assign another dict to the group")

    __setitem__ = __delitem__ = __ior__ = setdefault = update = pop = popitem = clear = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ByName, (dict(self),)


def kept(chosen: Any) -> Any:
    """Return ``chosen``; a dict becomes a :class:`ByName`."""
    return ByName(chosen) if isinstance(chosen, Mapping) and not isinstance(chosen, ByName) else chosen


def ignores_prefixes(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether lookups of names ignore prefixes of module wrappers: if all names differ without them."""
    if not any([isinstance(group.get(LR_SCALE), Mapping) for group in groups]):
        return False  # no lookups
    names = {name for group in groups for name in group.get("param_names", ())}
    return len(set(map(canonical_name, names))) == len(names)


@advising()
def lr_scale_of(group: Mapping[str, Any], group_index: int, index: int, *, by_short_name: bool = True) -> float:
    """Return :func:`lr_factor` of one parameter of a group; ``by_short_name`` is from :func:`ignores_prefixes`."""
    chosen, name = group.get(LR_SCALE), next(iter(_names(group, index)), None)
    where = f"'{parameter_name(group, group_index, index)}'"
    if isinstance(chosen, ByName) and name is not None and by_short_name:
        name = chosen.key_of(name)
    return lr_factor(chosen, name, group["params"][index], where)


@advising()
def choices_of(options: Sequence[Option], group: Mapping[str, Any], group_index: int, index: int) -> dict[str, Any]:
    """Return the choice of each of ``options`` for one parameter. Raise ``ValueError`` where a choice does not fit it."""
    names = _names(group, index)
    where = f"'{parameter_name(group, group_index, index)}'"

    def is_matched(patterns: Sequence[str]) -> bool:
        if patterns and not names:
            raise ValueError(f"{where} has no name for the pattern {patterns[0]!r}")
        return any(matches(pattern, names) for pattern in patterns)

    choices = {o.name: o.of(group, is_matched, group["params"][index], where) for o in options if o.of}
    return {name: choice for name, choice in choices.items() if choice is not None}


def _names(group: Mapping[str, Any], index: int) -> Sequence[str]:
    """Return the name of one parameter of a group, if it has one, in a sequence."""
    return (group.get("param_names") or ())[index : index + 1]


def patterns_of(options: Sequence[Option], group: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the patterns of names in a group's options, each after the name of its option."""
    return [(option.name, pattern) for option in options if option.patterns for pattern in group.get(option.name) or ()]


def check_choices(options: Sequence[Option], group: Mapping[str, Any], before: Mapping[str, Any], index: int) -> None:
    """Run :func:`lr_scale_of` and :func:`choices_of` for the parameters of ``param_groups[index]`` that are not lazy.

    Raise their errors, and ``ValueError`` where a number that no step reads replaces numbers that steps read ``before``.
    """
    scale = group.get(LR_SCALE) if any(option.name == LR_SCALE for option in options) else None
    is_read = is_per_parameter(scale)
    if scale is not None and not is_read and is_per_parameter(before.get(LR_SCALE)):
        allowed = "must be a dict, a function or None, which stands for 1"
        raise ValueError(f"{LR_SCALE} of param_groups[{index}] {allowed}, got {scale!r}; steps do not read a number")
    if not isinstance(group["params"], Sequence):
        return  # params are being assigned
    shaped = [j for j, param in enumerate(group["params"]) if not is_lazy(param)]
    if is_read and len(group.get("param_names") or ()) in (0, len(group["params"])):
        entries = {**group, LR_SCALE: kept(scale)}
        for j in shaped:
            lr_scale_of(entries, index, j)
    if any([group.get(o.name, o.default) != o.default for o in options]):
        for j in shaped:
            choices_of(options, group, index, j)


def check_names(chosen: ByName, names: Sequence[str], aliases: Mapping[str, str], *, by_short_name: bool) -> None:
    """Raise ``ValueError`` where ``chosen`` has none of ``names``, those of all parameters, or misspells one of them.

    A further name of a tied parameter, which ``aliases`` maps to its first name, must have the same number. Other keys may
    be for another optimizer, or for parameters that are added later.
    """
    first_names, every = set(names), [*dict.fromkeys([*names, *aliases])]
    keys = {name: chosen.key_of(name) if by_short_name else name for name in every}
    for name, key in keys.items():
        if name not in first_names and key in chosen and chosen[key] != chosen.get(keys.get(aliases[name], aliases[name])):
            raise ValueError(f"{LR_SCALE} has another number for '{key}' than for '{aliases[name]}', which it is tied to")
    known = {*keys.values(), *(map(canonical_name, every) if by_short_name else ())}
    unknown = [key for key in chosen if not (key in known or (isinstance(key, str) and canonical_name(key) in known))]
    if not unknown or not names:
        return
    message = f"{LR_SCALE} has a number for {{!r}}, which no parameter is called"
    if len(unknown) == len(chosen):
        raise ValueError(message.format(unknown[0]) + hint(str(unknown[0]), every))
    short = {canonical_name(str(key)): key for key in unknown}
    unset = {canonical_name(name): name for name in names if keys[name] not in chosen}
    for key, wanted in mistyped(short, unset):
        raise ValueError(f"{message.format(short[key])}; did you mean {unset[wanted]}?")


def check_kept(options: Iterable[Option], group: Mapping[str, Any], gone: set[str], left: Collection[str]) -> None:
    """Raise ``ValueError`` where a group's option names only parameters that are ``gone``, and none that are ``left``."""
    for option in options:
        keys = group.get(option.name) or ()
        is_by_name = option.patterns or (option.name == LR_SCALE and isinstance(keys, Mapping))
        for key in itertools.chain(*map(alternatives, map(str, keys))) if is_by_name else ():
            matched = {name for name in (*gone, *left) if matches(key, [name])}
            if matched and matched <= gone:
                message = f"{option.name} has {key!r} for '{min(matched)}', which a tensor without a name replaced"
                raise ValueError(f"{message}: assign param_names, or another {option.name}, to the group")


def warn_of_unused(options: Sequence[Option], groups: Sequence[Mapping[str, Any]], known: Collection[str]) -> set[str]:
    """Warn of options and patterns that apply to no parameter, unless ``known``. Return all of them."""
    named = [pair for group in groups for pair in patterns_of(options, group)]
    patterns = {f"{name}: the pattern {each!r}": each for name, pattern in named for each in alternatives(pattern)}
    for text in sorted(patterns.keys() - {*known}):
        if not any(matches(patterns[text], [name]) for group in groups for name in group.get("param_names") or ()):
            warnings.warn(f"{text} matches no parameter", UserWarning, stacklevel=2)
    reported = {*known} & {option.name for option in options}
    for option in [o for o in options if o.name not in reported]:
        chosen = [group for group in groups if group.get(option.name, option.default) != option.default and group["params"]]
        if chosen and not any(_may_apply(option, group, j) for group in chosen for j in range(len(group["params"]))):
            text = f"{option.name}={chosen[0][option.name]!r} applies to no parameter"
            warnings.warn(f"{text}: all are small (fewer than 4096 elements), or of other dtypes", UserWarning, stacklevel=2)
            reported.add(option.name)
    return {*patterns} | reported


def _may_apply(option: Option, group: Mapping[str, Any], index: int) -> bool:
    """Return whether an option may be of use for a parameter, or the user excluded it by name."""
    param = group["params"][index]
    if is_lazy(param) or option.suits is None or option.suits(group[option.name], param):
        return True
    return any(matches(pattern, _names(group, index)) for pattern in group.get("exclude") or ())
