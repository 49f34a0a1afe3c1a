"""Reading a state dict: each value becomes a number, a tensor to copy, or an error, and is matched with a parameter.

The *indexed* form is torch.optim's: ``state`` has integers as keys, and groups have integers as ``params`` and, where
parameters have names, ``param_names``. The *named* form has names instead of the integers. Both may hold ``aliases``
(further name -> name), for tied parameters, and ``format_version``. A state dict of several optimizers has their names under
``optimizers``, and in each group the index of its optimizer among them under ``optimizer``. Other keys of ``state`` hold
foreign state, which hooks and wrappers put there.

No memory is read before a check that it exists. All errors that a value raises become an :class:`Unloadable` that names it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import numbers
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.parameters import canonical_name, numbered, parameter_names
from compiled_optim.memory.layout import DTYPES, TORCH_TYPES, full_tensor, has_memory, is_lost, is_sharded, local, plain_copy
from compiled_optim.memory.torch_internals import shape_of_part
from compiled_optim.rule.rule import Declaration

FLOATING = {
    *DTYPES,
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
}


class Unloadable(ValueError):
    """The error that names the part of a checkpoint that cannot be loaded, and the reason."""


@contextlib.contextmanager
def naming(
    what: str, failed: str = "cannot be read", *, passing: tuple[type[Exception], ...] = (Unloadable,)
) -> Iterator[None]:
    """Turn any error of a value of a checkpoint inside a ``with`` block into an :class:`Unloadable` about ``what``.

    Errors of the types in ``passing`` are raised unchanged: they already name their subject.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        raise Unloadable(f"{what} {failed} ({type(error).__name__}: {error})") from error


def described(value: Any, depth: int = 2) -> str:
    """Return ``value`` as messages show it: its repr if plain, else its type. A tensor's repr would read its memory."""
    with contextlib.suppress(Exception):  # too many digits, or a user's class
        if isinstance(value, tuple) and depth:
            return f"({', '.join(described(element, depth - 1) for element in value)})"
        if value is None or isinstance(value, (int, float, str, bytes)):
            return repr(value)
    return f"a {type(value).__name__}"


def as_number(value: Any, what: str, *, finite: bool = True) -> float:
    """Return ``value``, called ``what``, as a float; :class:`Unloadable` if it is none, or must be ``finite`` and is not."""
    if type(value) is float and (math.isfinite(value) or not finite):
        return value
    is_simple = type(value) in TORCH_TYPES and value.dtype in (torch.float64, torch.float32)
    with contextlib.nullcontext() if is_simple else naming(what):
        if isinstance(value, Tensor):
            check_memory(value, what)
            if value.numel() != 1:
                raise Unloadable(f"{what} is not a number")
            value = full_tensor(value).detach().item()
        is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
        if is_complex or not hasattr(value, "__float__"):  # numpy's complex numbers have it, and lose their imaginary part
            raise Unloadable(f"{what} is not a number")
        try:
            number = float(value)
        except OverflowError:
            raise Unloadable(f"{what} is too large") from None
        if finite and not math.isfinite(number):
            raise Unloadable(f"{what} is {number}")
    return number


def is_set(group: Mapping[str, Any], option: str, where: str) -> bool:
    """Return True if a saved group, called ``where``, has ``option``, and it is neither None nor 0."""
    value = group.get(option)
    return value is not None and as_number(value, f"{option} of {where}") != 0


def as_tensor(value: Any, what: str, dtypes: Collection[torch.dtype] = FLOATING) -> Tensor:
    """Return ``value``, called ``what``, as a tensor of one of these dtypes that ``copy_`` can read.

    The result shares memory with a DTensor or a tensor of torch's own classes; a tensor of any other class is copied.
    :class:`Unloadable` is raised if it is something else, or torch cannot copy it.
    """
    if not isinstance(value, Tensor):
        raise Unloadable(f"{what} is not a tensor")
    is_simple = type(value) in TORCH_TYPES
    with contextlib.nullcontext() if is_simple else naming(what):
        check_memory(value, what)
        if value.dtype not in dtypes:
            raise Unloadable(f"{what} is {value.dtype}")
        is_lazy = value.is_conj() or value.is_neg() or value._is_zerotensor()  # its memory does not hold its numbers
        return value.detach() if (is_simple and not is_lazy) or is_sharded(value) else plain_copy(value)


def as_buffer(value: Any, what: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return :func:`as_tensor` of ``shape``; of ``dtype`` if that is of integers, else complex exactly if ``dtype`` is."""
    tensor = as_tensor(value, what, FLOATING if dtype in FLOATING else {dtype})
    if tuple(tensor.shape) != shape:
        raise Unloadable(f"{what} has shape {tuple(tensor.shape)} instead of {shape}")
    if tensor.is_complex() != dtype.is_complex:
        raise Unloadable(f"{what} is {tensor.dtype} instead of {dtype}")
    return tensor


def check_memory(tensor: Tensor, what: str) -> None:
    """Raise :class:`Unloadable` unless ``tensor``, called ``what``, is strided and its elements are in memory."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise Unloadable(f"{what} is a {'nested' if tensor.is_nested else tensor.layout} tensor")
    shard = tensor if type(tensor) in TORCH_TYPES else local(tensor)
    if shard.untyped_storage().device.type == "meta":  # torch's fake tensors have such storage too
        raise Unloadable(f"{what} is a meta tensor")
    if not has_memory(shard) and is_lost(shard):
        raise Unloadable(f"{what} has no memory: its storage is empty or too small")
    if shard is not tensor:
        shape, expected = tuple(shard.shape), shape_of_part(tensor)
        if shape != expected and (shard.numel() or 0 not in expected):  # FSDP gives an empty shard any empty shape
            raise Unloadable(f"{what} has a part of shape {shape} on this process instead of {expected}")


FORMAT_VERSION = 1

_FOREIGN_OPTIONS = {
    *("use_gram_newton_schulz", "gram_newton_schulz_config"),  # Muon of torch after 2.15
    *("caution", "corrected_weight_decay", "trust_clip", "always_adapt"),  # timm
    *("fixed_decay", "degenerated_to_sgd"),  # pytorch_optimizer
}
"""Options of newer versions of torch and of other packages that change steps, and that this package lacks."""


OPTIMIS_MARKS = frozenset({"setup", "gradient_release", "kahan_sum"})
"""The keys that tell a group of optimi's."""


def is_optimis(state_dict: Mapping[str, Any]) -> bool:
    """Return True if an optimizer of optimi saved ``state_dict``."""
    return any([set(group) >= OPTIMIS_MARKS for group in state_dict["param_groups"]])


def translated(state_dict: dict[str, Any], declaration: Declaration) -> dict[str, Any]:
    """Return a state dict in this package's names and meaning, for the optimizer of ``declaration``.

    :mod:`compiled_optim.interop`, which nothing here needs otherwise, is imported by name for one that needs translation.

    Raises:
        ValueError: another package saved it, and ``compiled_optim.interop`` is absent; or it has no counterpart here.
    """
    if not is_optimis(state_dict):
        return state_dict
    try:
        package = importlib.import_module("compiled_optim.interop.optimi")
    except ModuleNotFoundError as error:
        if error.name != "compiled_optim.interop":
            raise
        raise ValueError("optimi saved the state dict, and compiled_optim.interop, which reads it, is absent") from error
    translation: dict[str, Any] = package.from_optimi(state_dict, declaration)
    return translation


def group_names(group: Mapping[str, Any]) -> list[str] | None:
    """Return the parameter names of one group of a state dict of either form; None if it has none.

    In a named group the names are ``params``: torch.distributed.checkpoint sorts these but not ``param_names``.
    """
    params = list(group["params"])
    return params if all([isinstance(p, str) for p in params]) else group.get("param_names")


def plain(value: Any, what: str) -> Any:
    """Return a mapping or sequence, called ``what``, as a new dict or list; anything else unchanged.

    The copy cannot change: a mapping of a user's class may return another value at each access.
    """
    if type(value) in (dict, list):
        return value.copy()
    with naming(what):
        if isinstance(value, Mapping):
            return {key: value[key] for key in value}
        return list(value) if isinstance(value, (list, tuple)) else value


@naming("the state dict", passing=(ValueError, TypeError))
def read(state_dict: Any) -> dict[str, Any]:
    """Return ``state_dict`` in new dicts and lists that share its values, after :func:`check`, as of a single optimizer."""
    result: dict[str, Any] = plain(state_dict, "the state dict")
    if isinstance(result, dict):
        result |= {key: plain(result[key], f"'{key}'") for key in ("state", "param_groups", "aliases") if key in result}
        if isinstance(groups := result.get("param_groups"), list):
            result["param_groups"] = groups = [plain(group, f"param_groups[{i}]") for i, group in enumerate(groups)]
            for i, group in enumerate(groups):
                for key in {"params", "param_names"} & set(group) if isinstance(group, dict) else ():
                    group[key] = plain(group[key], f"param_groups[{i}]['{key}']")
    check(result)
    if result.pop("optimizers", None) is not None:
        for group in result["param_groups"]:
            group.pop("optimizer", None)
    foreign = foreign_state(result)
    states = {key: plain(v, f"the state of {described(key)}") for key, v in result["state"].items() if key not in foreign}
    return {**result, "state": states | foreign}


def foreign_options(groups: Iterable[Mapping[str, Any]], known: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of other packages that are on in ``groups`` and change steps, except for ``known`` ones."""
    options = {name: group[name] for group in groups for name in _FOREIGN_OPTIONS.difference(known) & group.keys()}
    return {name: value for name, value in options.items() if (isinstance(value, Tensor) and value.numel() > 1) or value}


def foreign_state(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the entries in the ``state`` of a state dict under keys that no group lists: those of hooks and wrappers."""
    listed = {param for group in state_dict["param_groups"] for param in group["params"]}
    return {key: value for key, value in state_dict["state"].items() if key not in listed}


def refuse_foreign(state_dict: Mapping[str, Any], form: str) -> None:
    """Raise ``ValueError`` if a state dict has :func:`foreign_state`, which ``form`` cannot hold."""
    if foreign := foreign_state(state_dict):
        key = described(min(foreign, key=str))
        raise ValueError(f"the state holds {key}, which is no parameter's and has no counterpart in {form}")


def with_foreign(states: dict[Any, Any], foreign: dict[Any, Any]) -> dict[Any, Any]:
    """Return the ``states`` of parameters and ``foreign`` state in one dict; ``ValueError`` if they share a key."""
    if taken := [key for key in foreign if key in states]:
        raise ValueError(f"the state holds {described(taken[0])}, which is no parameter's state but has the key of one")
    return states | foreign


def check(state_dict: Any) -> None:
    """Raise ``ValueError`` unless it is an indexed or named state dict of no later version, with no parameter in two groups.

    A group may list a parameter twice, and two parameters may have one name; the optimizer decides if that can be loaded.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("not an optimizer state dict: it must be a dict with 'state' and 'param_groups'")
    version = state_dict.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"the checkpoint has format_version {described(version)}; this release reads up to {FORMAT_VERSION}"
        )
    groups, states, aliases = state_dict["param_groups"], state_dict["state"], state_dict.get("aliases", {})
    if not isinstance(groups, (list, tuple)) or not isinstance(states, Mapping):
        raise ValueError("not an optimizer state dict: 'param_groups' must be a list and 'state' a dict")
    if {"state", "param_groups"} <= set(states):
        raise ValueError("not an optimizer state dict: its 'state' is a whole state dict")
    for i, group in enumerate(groups):
        where = f"param_groups[{i}]"
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"not an optimizer state dict: {where} must be a dict with a list 'params'")
        params, names = group["params"], group_names(group)
        if nameless := [described(key) for key in group if not isinstance(key, str)]:
            raise ValueError(f"the entries of {where} must have names, got {nameless[0]}")
        if not all([isinstance(p, (int, str)) for p in params]):
            raise ValueError(f"{where}['params'] must be integers or names, got {described(tuple(params))}")
        if names is not None and not (isinstance(names, (list, tuple)) and all([isinstance(n, str) for n in names])):
            raise ValueError(f"{where}['param_names'] must be a list of names, got {described(names)}")
        if names is not None and len(names) != len(params):
            raise ValueError(f"{where} has {len(params)} params but {len(names)} param_names")
    foreign = foreign_state(state_dict)
    for key, entries in states.items():
        if key not in foreign and not isinstance(entries, Mapping):
            raise ValueError(f"the state of {described(key)} must be a dict, got {described(entries)}")
    if not isinstance(aliases, Mapping) or not all(isinstance(n, str) for pair in aliases.items() for n in pair):
        raise ValueError(f"'aliases' must be a dict name -> name, got {described(aliases)}")
    refuse_repeated([*{name for group in groups for name in group_names(group) or ()}, *aliases], "names")
    refuse_repeated([param for group in groups for param in dict.fromkeys(group["params"])])


def refuse_repeated(values: Iterable[int | str], verb: str = "") -> None:
    """Raise ``ValueError`` if one of ``values``, which are numbers or names of parameters, is repeated."""
    for value, count in Counter(values).items():
        if count > 1:
            verb = verb or ("names" if isinstance(value, str) else "lists")
            raise ValueError(f"the checkpoint {verb} parameter {described(value)} twice")


def named(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the named form of ``state_dict`` without prefixes of module wrappers, with the same tensors, or raise."""
    check(state_dict)
    groups, aliases = state_dict["param_groups"], state_dict.get("aliases", {})
    if any(group_names(group) is None for group in groups):
        raise ValueError("the parameters have no names: the optimizer was not made from named_parameters() or a dict")
    names = [name for group in groups for name in group_names(group) or ()]
    refuse_repeated(names, "names")
    canonical = {name: canonical_name(name) for name in (*names, *aliases)}
    if len(set(canonical.values())) < len(canonical):
        canonical = {name: name for name in canonical}
    renamed = {p: canonical[n] for p, n in zip((p for group in groups for p in group["params"]), names, strict=True)}
    states = {renamed[key]: dict(entries) for key, entries in state_dict["state"].items() if key in renamed}
    result = {
        **state_dict,
        "state": with_foreign(states, foreign_state(state_dict)),
        "param_groups": [
            {"params": [renamed[p] for p in g["params"]]} | {k: g[k] for k in g if k not in ("params", "param_names")}
            for g in groups
        ],
    }
    return result | ({"aliases": {canonical[a]: canonical[n] for a, n in aliases.items()}} if aliases else {})


@dataclass
class ListedParam:
    """One parameter in the groups of an optimizer or checkpoint: its group, index there, name and aliases."""

    name: str
    aliases: list[str]
    group: int
    index: int
    key: Any  # the group's entry: the parameter itself, or its number or name in a checkpoint


class SavedParam(NamedTuple):
    """A parameter of a checkpoint, the optimizer's parameter, and the changes of its state in a load."""

    current: ListedParam
    saved: ListedParam
    entries: dict[str, Any]  # its state in the checkpoint, with implied entries; empty if it had none
    new: dict[Any, Any]  # tensors that the optimizer's parameter lacks, and foreign entries
    removed: list[Any]  # names of entries that are removed


def match(
    groups: Sequence[ParamGroup],
    aliases: Mapping[str, str],
    saved: Mapping[str, Any],
    known: Collection[str],
) -> tuple[list[SavedParam], list[str], list[str]]:
    """Match parameters to saved ones. Return the pairs, the missing names and the unexpected names.

    They are matched by name if both sides have names, equal ones by their order, else by position. ``aliases`` are the
    optimizer's further names of tied parameters -> the name in the group; ``saved`` was read, and may lack state that a
    group's optimizer implies for parameters with other state; ``known`` are the names of entries of optimizers.

    Raises:
        ValueError: only some of the checkpoint's groups have names; or without names the numbers of parameters differ; or
            only the checkpoint has several parameters of one name, or lists one parameter several times.
    """
    saved_groups = saved["param_groups"]
    current, saved_params = _listed(groups, aliases), _listed(saved_groups, saved.get("aliases", {}))
    current_names = Counter([param.name for param in current])
    refuse_repeated([param.name for param in saved_params if current_names[param.name] < 2], "names")
    have_names = {group_names(group) is not None for group in saved_groups if group["params"]}
    if have_names == {False} or not all(["param_names" in group for group in groups]):
        _check_sizes(groups, saved_groups)
        matches = dict(enumerate(saved_params))
    elif False in have_names:
        raise ValueError("the checkpoint has names for the parameters of some groups only")
    else:
        _check_repeats(current, saved_groups)
        matches = _match_names(current, saved_params)
    pairs = []
    for i in sorted(matches):
        state = saved["state"].get(matches[i].key, {})
        # A flattened checkpoint of torch.distributed.checkpoint has an empty dict for an entry that was not saved.
        blank = {k for k, v in state.items() if v is None or (type(v) is dict and not v)}
        implied = groups[current[i].group].kind._implied_state
        entries = {**implied, **{k: v for k, v in state.items() if k not in blank or k not in known}}
        pairs.append(SavedParam(current[i], matches[i], entries if state.keys() - blank else {}, {}, []))
    keys = {param.saved.key for param in pairs}
    missing = [param.name for i, param in enumerate(current) if i not in matches]
    return pairs, missing, [param.name for param in saved_params if param.key not in keys]


def _listed(groups: Sequence[Mapping[str, Any]], aliases: Mapping[str, str]) -> list[ListedParam]:
    further: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        further.setdefault(name, []).append(alias)
    listed: list[ListedParam] = []
    for i, group in enumerate(groups):
        names = group_names(group) or parameter_names(group, i)
        by_key: dict[Any, ListedParam] = {}
        for j, (name, key) in enumerate(zip(names, group["params"], strict=True)):
            if (known := by_key.get(key)) is None:
                by_key[key] = ListedParam(name, [*further.get(name, ())], i, j, key)
            elif name not in (known.name, *known.aliases):
                known.aliases.append(name)
        listed += by_key.values()
    return listed


def _check_sizes(groups: Sequence[ParamGroup], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` unless both sides have equally many groups, equally long and with repeats at equal indices."""
    if len(groups) != len(saved_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups "
            f"({len(saved_groups)} instead of {len(groups)}), and without names on both sides only positions can match"
        )
    for i, (here, saved) in enumerate(zip([g["params"] for g in groups], [g["params"] for g in saved_groups], strict=True)):
        if len(here) != len(saved):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"param_groups[{i}] has {len(saved)} parameters instead of {len(here)}"
            )
        if (repeats := _firsts(here)) != _firsts(saved):
            refuse_repeated(saved[j] for j in dict.fromkeys(repeats))
            raise ValueError(f"param_groups[{i}] has a parameter twice where the checkpoint has two parameters")


def _firsts(params: Sequence[Any]) -> list[int]:
    """Return for each of ``params`` its first index among them."""
    first: dict[Any, int] = {}
    return [first.setdefault(param, index) for index, param in enumerate(params)]


def _check_repeats(current: Sequence[ListedParam], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if the checkpoint has one parameter for several of ``current``, by their names."""
    owners = {name: param.name for param in current for name in (param.name, *param.aliases)}
    for group in saved_groups:
        names = group_names(group) or []
        if names == group["params"]:
            refuse_repeated(names)
        known = {(param, owners[name]) for param, name in zip(group["params"], names, strict=True) if name in owners}
        refuse_repeated([param for param, _ in known])


def _match_names(current: list[ListedParam], saved: list[ListedParam]) -> dict[int, ListedParam]:
    """Return the parameters of ``saved`` by the indices of those of ``current`` with their names. Equal ones get numbers.

    Exact names are tried before names without the prefixes of module wrappers, and a parameter's name before its aliases.
    """
    for side in (current, saved):
        for param, name in zip(side, numbered([param.name for param in side]), strict=True):
            param.name = name
    matches: dict[int, ListedParam] = {}
    left = set(range(len(saved)))
    spellings: tuple[Callable[[str], str], ...] = (str, canonical_name)
    for spelling, with_aliases in itertools.product(spellings, (False, True)):
        if not left:
            break
        by_name = _by_name(saved, spelling, with_aliases=with_aliases)
        for name, i in _by_name(current, spelling, with_aliases=with_aliases).items():
            if i not in matches and (j := by_name.get(name)) in left:
                left.remove(j)
                matches[i] = saved[j]
    return matches


def _by_name(params: Sequence[ListedParam], spelling: Callable[[str], str], *, with_aliases: bool) -> dict[str, int]:
    """Return the indices of ``params`` by the ``spelling`` of their names, without spellings that several of them share."""
    indices: dict[str, int] = {}
    shared: set[str] = set()
    for index, param in enumerate(params):
        for name in (param.name, *param.aliases) if with_aliases else (param.name,):
            if indices.setdefault(short := spelling(name), index) != index:
                shared.add(short)
    return {name: index for name, index in indices.items() if name not in shared}
