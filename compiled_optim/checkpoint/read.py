"""Reading a state dict: it becomes records, each value a number, a tensor to copy, or an error; and matching parameters.

The *indexed* form is torch.optim's: ``state`` has integers as keys, and groups have integers as ``params`` and, where
parameters have names, ``param_names``. The *named* form has names instead of the integers. Both may hold ``aliases``
(further name -> name), for tied parameters, and ``format_version``. A state dict of several optimizers has their names under
``optimizers``, and in each group the index of its optimizer among them under ``optimizer``. Other keys of ``state`` hold
foreign state, which hooks and wrappers put there.

:meth:`Checkpoint.of` reads both forms, refuses all others, and returns Python's own containers and texts.
No memory is read before a check that it exists. All errors that a value raises become an :class:`Unloadable` that names it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import numbers
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

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


class naming:
    """Turn any error of a value of a checkpoint inside a ``with`` block into an :class:`Unloadable` about ``what``.

    Errors of the types in ``passing`` are raised unchanged: they already name their subject.
    """

    __slots__ = ("failed", "passing", "what")

    def __init__(
        self, what: str, failed: str = "cannot be read", *, passing: tuple[type[Exception], ...] = (Unloadable,)
    ) -> None:
        self.what, self.failed, self.passing = what, failed, passing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, Exception) and not isinstance(error, self.passing):
            raise _unloadable(self.what, error, self.failed) from error


def _unloadable(what: str, error: Exception, failed: str = "cannot be read") -> Unloadable:
    return Unloadable(f"{what} {failed} ({type(error).__name__}: {error})")


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
    if isinstance(value, Tensor):
        with naming(what):
            check_memory(value, what)
            value = full_tensor(value).item() if value.numel() == 1 else None
    if type(value) is not float:
        with naming(what):
            is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
            if is_complex or not hasattr(value, "__float__"):  # numpy's complex numbers have it, and lose a part
                raise Unloadable(f"{what} is not a number")
            try:
                value = float(value)
            except OverflowError:
                raise Unloadable(f"{what} is too large") from None
    if finite and not math.isfinite(value):
        raise Unloadable(f"{what} is {value}")
    return float(value)


def is_set(group: Mapping[str, Any], option: str, where: str) -> bool:
    """Return True if a saved group, called ``where``, has ``option``, and it is neither None nor 0."""
    value = group.get(option)
    return value is not None and (value if type(value) is bool else as_number(value, f"{option} of {where}") != 0)


def as_tensor(value: Any, what: str, dtypes: Collection[torch.dtype] = FLOATING) -> Tensor:
    """Return ``value``, called ``what``, as a tensor of one of these dtypes that ``copy_`` can read.

    The result shares memory with a DTensor or a tensor of torch's own classes; a tensor of any other class is copied.
    :class:`Unloadable` is raised if it is something else, or torch cannot copy it.
    """
    if not isinstance(value, Tensor):
        raise Unloadable(f"{what} is not a tensor")
    try:  # `naming` would take twice the calls of all the rest
        has_all = check_memory(value, what)
        if value.dtype not in dtypes:
            raise Unloadable(f"{what} is {value.dtype}")
        # The memory of such a tensor does not hold its numbers.
        is_lazy = (
            value.is_neg() or (value.dtype.is_complex and value.is_conj()) or not (has_all or not value._is_zerotensor())
        )
        return value.detach() if (type(value) in TORCH_TYPES and not is_lazy) or is_sharded(value) else plain_copy(value)
    except Unloadable:
        raise
    except Exception as error:
        raise _unloadable(what, error) from error


def as_buffer(value: Any, what: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return :func:`as_tensor` of ``shape``; of ``dtype`` if that is of integers, else complex exactly if ``dtype`` is."""
    tensor = as_tensor(value, what, FLOATING if dtype in FLOATING else {dtype})
    if tensor.shape != shape:
        raise Unloadable(f"{what} has shape {tuple(tensor.shape)} instead of {shape}")
    if tensor.dtype.is_complex != dtype.is_complex:
        raise Unloadable(f"{what} is {tensor.dtype} instead of {dtype}")
    return tensor


def check_memory(tensor: Tensor, what: str) -> bool:
    """Raise :class:`Unloadable` unless ``tensor``, called ``what``, is strided and its elements are in memory.

    Return True if they are known to follow each other there.
    """
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise Unloadable(f"{what} is a {'nested' if tensor.is_nested else tensor.layout} tensor")
    shard = tensor if type(tensor) in TORCH_TYPES else local(tensor)
    if tensor.is_meta or (storage := shard.untyped_storage()).device.type == "meta":  # as of fake tensors
        raise Unloadable(f"{what} is a meta tensor")
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes if shard is tensor and tensor.is_contiguous() else 0
    if 0 < end <= storage.nbytes():
        return True
    if not has_memory(shard) and is_lost(shard):
        raise Unloadable(f"{what} has no memory: its storage is empty or too small")
    if shard is not tensor:
        shape, expected = tuple(shard.shape), shape_of_part(tensor)
        if shape != expected and (shard.numel() or 0 not in expected):  # FSDP gives an empty shard any empty shape
            raise Unloadable(f"{what} has a part of shape {shape} on this process instead of {expected}")
    return False


FORMAT_VERSION = 1

_FOREIGN_OPTIONS = {
    *("use_gram_newton_schulz", "gram_newton_schulz_config"),  # Muon of torch after 2.15
    *("caution", "corrected_weight_decay", "trust_clip", "always_adapt"),  # timm
    *("fixed_decay", "degenerated_to_sgd"),  # pytorch_optimizer
}
"""Options of newer versions of torch and of other packages that change steps, and that this package lacks."""


def foreign_options(groups: Iterable[Mapping[str, Any]], known: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of other packages that are on in ``groups`` and change steps, except for ``known`` ones."""
    options = {name: group[name] for group in groups for name in _FOREIGN_OPTIONS.difference(known) & group.keys()}
    return {name: value for name, value in options.items() if (isinstance(value, Tensor) and value.numel() > 1) or value}


def plain(value: Any, what: str) -> Any:
    """Return a mapping or sequence, called ``what``, as a new dict or list; anything else unchanged.

    The copy cannot change: a mapping of a user's class may return another value at each access.
    """
    if type(value) in (dict, list):
        return value.copy()
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    with naming(what):
        return {key: value[key] for key in value} if isinstance(value, Mapping) else list(value)


SavedKey: TypeAlias = "int | str"


class SavedGroup(NamedTuple):
    """One group of a checkpoint. In the named form, its parameters' keys are their names."""

    params: tuple[SavedKey, ...]
    names: tuple[str, ...] | None  # of its parameters
    entries: dict[str, Any]  # all others
    is_named: bool = False

    @classmethod
    def of(cls, group: Any, where: str) -> SavedGroup:
        """Return a record of ``group``, called ``where``; ``ValueError`` if it has none of the two forms."""
        entries = plain(group, where)
        params: Any = plain(entries.pop("params", None), f"{where}['params']") if type(entries) is dict else None
        if type(params) is not list:
            raise ValueError(f"not an optimizer state dict: {where} must be a dict with a list 'params'")
        names: Any = plain(entries.pop("param_names", None), f"{where}['param_names']")
        if nameless := [key for key in entries if type(key) is not str and not isinstance(key, str)]:
            raise ValueError(f"the entries of {where} must have names, got {described(nameless[0])}")
        if [param for param in params if type(param) not in (int, str) and not isinstance(param, (int, str))]:
            raise ValueError(f"{where}['params'] must be integers or names, got {described(tuple(params))}")
        is_named = bool(params) and not [param for param in params if type(param) is int or not isinstance(param, str)]
        names = names if params and not is_named else params  # torch.distributed.checkpoint sorts these, not param_names
        if names is not None and not (type(names) is list and not [n for n in names if not isinstance(n, str)]):
            raise ValueError(f"{where}['param_names'] must be a list of names, got {described(names)}")
        if names is not None and len(names) != len(params):
            raise ValueError(f"{where} has {len(params)} params but {len(names)} param_names")
        keys = tuple(map(str.__str__, params)) if is_named else tuple(params)  # Python's own, if they were of another class
        return cls(keys, names if names is None else tuple(map(str.__str__, names)), entries, is_named)


class Checkpoint(NamedTuple):
    """A state dict of one optimizer or of several, in the indexed or the named form."""

    groups: tuple[SavedGroup, ...]
    state: dict[SavedKey, dict[Any, Any]]  # of the parameters in groups; those that had no state may lack
    foreign: dict[Any, Any]  # the entries under other keys
    aliases: dict[str, str]
    others: dict[Any, Any]  # further entries, such as "format_version"

    @classmethod
    def of(cls, state_dict: Any) -> Checkpoint:
        """Return a record of ``state_dict``, with its values.

        Raises:
            ValueError: it has none of the two forms, or a later version, or a parameter in two groups. A group may list a
                parameter twice, and two parameters may have one name; the optimizer decides if that can be loaded.
        """
        others = plain(state_dict, "the state dict")
        if type(others) is not dict or not {"state", "param_groups"} <= others.keys():
            raise ValueError("not an optimizer state dict: it must be a dict with 'state' and 'param_groups'")
        version = others.get("format_version", FORMAT_VERSION)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            what = f"format_version {described(version)}"
            raise ValueError(f"the checkpoint has {what}; this release reads up to {FORMAT_VERSION}")
        keys = ("param_groups", "state", "aliases")
        groups, states, aliases = [plain(others.pop(key, {}), f"'{key}'") for key in keys]
        if type(groups) is not list or type(states) is not dict:
            raise ValueError("not an optimizer state dict: 'param_groups' must be a list and 'state' a dict")
        if {"state", "param_groups"} <= states.keys():
            raise ValueError("not an optimizer state dict: its 'state' is a whole state dict")
        saved = tuple([SavedGroup.of(group, f"param_groups[{i}]") for i, group in enumerate(groups)])
        listed = {param for group in saved for param in group.params}
        state = {key: _entries(key, states.pop(key)) for key in [key for key in states if key in listed]}
        if type(aliases) is not dict or not all([isinstance(n, str) for pair in aliases.items() for n in pair]):
            raise ValueError(f"'aliases' must be a dict name -> name, got {described(aliases)}")
        aliases = {str.__str__(alias): str.__str__(name) for alias, name in aliases.items()}
        refuse_repeated([*{name for group in saved for name in group.names or ()}, *aliases], "names")
        refuse_repeated([param for group in saved for param in dict.fromkeys(group.params)])
        return cls(saved, state, states, aliases, others)

    def single(self) -> Checkpoint:
        """Return the checkpoint as of one optimizer, also if several saved it."""
        if self.others.get("optimizers") is None:
            return self
        groups = [g._replace(entries={k: v for k, v in g.entries.items() if k != "optimizer"}) for g in self.groups]
        return self._replace(groups=tuple(groups), others={k: v for k, v in self.others.items() if k != "optimizers"})

    def as_dict(self) -> dict[str, Any]:
        """Return a state dict in new dicts and lists; ``ValueError`` if a parameter and foreign state share a key."""
        if taken := self.state.keys() & self.foreign.keys():
            key = described(min(taken, key=str))
            raise ValueError(f"the state holds {key}, which is no parameter's state but has the key of one")
        groups = [
            {"params": [*params], **entries, **({"param_names": [*names]} if names and not is_named else {})}
            for params, names, entries, is_named in self.groups
        ]
        state = {key: {**entries} for key, entries in self.state.items()} | self.foreign
        aliases = {"aliases": self.aliases} if self.aliases else {}
        return {"state": state, "param_groups": groups, **self.others, **aliases}

    def named(self) -> Checkpoint:
        """Return the named form without prefixes of module wrappers; ``ValueError`` if names lack or are repeated."""
        if any([group.names is None for group in self.groups]):
            raise ValueError("the parameters have no names: the optimizer was not made from named_parameters() or a dict")
        names = [name for group in self.groups for name in group.names or ()]
        refuse_repeated(names, "names")
        canonical = {name: canonical_name(name) for name in (*names, *self.aliases)}
        if len(set(canonical.values())) < len(canonical):
            canonical = {name: name for name in canonical}
        keys = [param for group in self.groups for param in group.params]
        renamed = {key: canonical[name] for key, name in zip(keys, names, strict=True)}
        params = [tuple([renamed[param] for param in group.params]) for group in self.groups]
        groups = tuple([SavedGroup(p, p, group.entries, True) for p, group in zip(params, self.groups, strict=True)])
        aliases = {canonical[alias]: canonical[name] for alias, name in self.aliases.items()}
        state: dict[SavedKey, dict[Any, Any]] = {renamed[key]: entries for key, entries in self.state.items()}
        return self._replace(groups=groups, state=state, aliases=aliases)

    def refuse_foreign(self, form: str) -> None:
        """Raise ``ValueError`` if there is foreign state, which ``form`` cannot hold."""
        if self.foreign:
            key = described(min(self.foreign, key=str))
            raise ValueError(f"the state holds {key}, which is no parameter's and has no counterpart in {form}")


def _entries(key: SavedKey, entries: Any) -> dict[Any, Any]:
    """Return the state of the parameter ``key``."""
    if type(entries) is dict:
        return entries
    if not isinstance(entries, Mapping):
        raise ValueError(f"the state of {described(key)} must be a dict, got {described(entries)}")
    return dict(plain(entries, f"the state of {described(key)}"))


def read(state_dict: Any) -> dict[str, Any]:
    """Return ``state_dict`` in new dicts and lists that share its values, as of a single optimizer, or raise an error."""
    return Checkpoint.of(state_dict).single().as_dict()


def refuse_repeated(values: Sequence[SavedKey], verb: str = "") -> None:
    """Raise ``ValueError`` if one of ``values``, which are numbers or names of parameters, is repeated."""
    if len({*values}) < len(values):
        value = next(value for value, count in Counter(values).items() if count > 1)
        verb = verb or ("names" if isinstance(value, str) else "lists")
        raise ValueError(f"the checkpoint {verb} parameter {described(value)} twice")


OPTIMIS_MARKS = frozenset({"setup", "gradient_release", "kahan_sum"})
"""The keys that tell a group of optimi's."""


def is_optimis(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if an optimizer of optimi saved one of ``groups``."""
    return any([group.keys() >= OPTIMIS_MARKS for group in groups])


def translated(saved: Checkpoint, declaration: Declaration) -> Checkpoint:
    """Return a checkpoint in this package's names and meaning, for the optimizer of ``declaration``.

    :mod:`compiled_optim.interop`, which nothing here needs otherwise, is imported by name for one that needs translation.

    Raises:
        ValueError: another package saved it, and ``compiled_optim.interop`` is absent; or it has no counterpart here.
    """
    if not is_optimis([group.entries for group in saved.groups]):
        return saved
    try:
        package = importlib.import_module("compiled_optim.interop.optimi")
    except ModuleNotFoundError as error:
        if error.name != "compiled_optim.interop":
            raise
        raise ValueError("optimi saved the state dict, and compiled_optim.interop, which reads it, is absent") from error
    return Checkpoint.of(package.from_optimi(saved.as_dict(), declaration))


class ListedParam(NamedTuple):
    """One parameter in the groups of an optimizer or checkpoint: its group, index there, name and aliases."""

    name: str
    aliases: list[str]
    group: int
    index: int  # type: ignore[assignment]  # hides the method of tuples
    key: Any  # the group's entry: the parameter itself, or its number or name in a checkpoint


class SavedParam(NamedTuple):
    """A parameter of a checkpoint, the optimizer's parameter, and the changes of its state in a load."""

    current: ListedParam
    saved: ListedParam
    entries: dict[str, Any]  # its state in the checkpoint, with implied entries; empty if it had none
    new: dict[Any, Any]  # tensors that the optimizer's parameter lacks, and foreign entries
    removed: list[Any]  # names of entries that are removed


def match(
    groups: Sequence[ParamGroup], aliases: Mapping[str, str], saved: Checkpoint, known: Collection[str]
) -> tuple[list[SavedParam], list[str], list[str]]:
    """Match parameters to saved ones. Return the pairs, the missing names and the unexpected names.

    They are matched by name if both sides have names, equal ones by their order, else by position. ``aliases`` are the
    optimizer's further names of tied parameters -> the name in the group; ``saved`` may lack state that a group's optimizer
    implies for parameters with other state; ``known`` are the names of entries of optimizers.

    Raises:
        ValueError: only some of the checkpoint's groups have names; or without names the numbers of parameters differ; or
            only the checkpoint has several parameters of one name, or lists one parameter several times.
    """
    current = _listed([(parameter_names(group, i), group["params"]) for i, group in enumerate(groups)], aliases)
    names = [g.names or parameter_names({"params": g.params}, i) for i, g in enumerate(saved.groups)]
    theirs = _listed(zip(names, [group.params for group in saved.groups], strict=True), saved.aliases)
    if len({param.name for param in theirs}) < len(theirs):
        counts = Counter([param.name for param in current])
        refuse_repeated([param.name for param in theirs if counts[param.name] < 2], "names")
    have_names = {group.names is not None for group in saved.groups if group.params}
    if have_names == {False} or not all(["param_names" in group for group in groups]):
        _check_sizes(groups, saved.groups)
        matches = dict(enumerate(range(len(theirs))))
    elif False in have_names:
        raise ValueError("the checkpoint has names for the parameters of some groups only")
    else:
        _check_repeats(current, saved.groups)
        current, theirs = _numbered(current), _numbered(theirs)
        matches = _match_names(current, theirs)
    pairs = []
    for i in sorted(matches):
        state = saved.state.get(theirs[matches[i]].key) or {}
        # A flattened checkpoint of torch.distributed.checkpoint has an empty dict for an entry that was not saved.
        blank = [k for k, v in state.items() if v is None or (type(v) is dict and not v)]
        kept = {k: v for k, v in state.items() if k not in blank or k not in known} if blank else state
        implied = groups[current[i].group].kind._implied_state
        entries = {**implied, **kept} if len(blank) < len(state) else {}
        pairs.append(SavedParam(current[i], theirs[matches[i]], entries, {}, []))
    matched = {pair.saved.key for pair in pairs}
    missing = [param.name for i, param in enumerate(current) if i not in matches]
    return pairs, missing, [param.name for param in theirs if param.key not in matched]


def _listed(groups: Iterable[tuple[Iterable[str], Iterable[Any]]], aliases: Mapping[str, str]) -> list[ListedParam]:
    """Return a record of each parameter, from the names and keys in ``groups``. Repeated ones give it further names."""
    further: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        further.setdefault(name, []).append(alias)
    listed: list[ListedParam] = []
    for i, (names, keys) in enumerate(groups):
        by_key: dict[Any, ListedParam] = {}
        for j, (name, key) in enumerate(zip(names, keys, strict=True)):
            param = by_key.setdefault(key, ListedParam(name, [*further.get(name, ())], i, j, key))
            if name not in (param.name, *param.aliases):
                param.aliases.append(name)
        listed += by_key.values()
    return listed


def _numbered(params: list[ListedParam]) -> list[ListedParam]:
    """Return ``params``, those of equal names with a number in it."""
    names = [param.name for param in params]
    if len({*names}) == len(names):
        return params
    return [param._replace(name=name) for param, name in zip(params, numbered(names), strict=True)]


def _check_sizes(groups: Sequence[ParamGroup], saved_groups: Sequence[SavedGroup]) -> None:
    """Raise ``ValueError`` unless both sides have equally many groups, equally long and with repeats at equal indices."""
    if len(groups) != len(saved_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups "
            f"({len(saved_groups)} instead of {len(groups)}), and without names on both sides only positions can match"
        )
    for i, (here, saved) in enumerate(zip([g["params"] for g in groups], [g.params for g in saved_groups], strict=True)):
        if len(here) != len(saved):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"param_groups[{i}] has {len(saved)} parameters instead of {len(here)}"
            )
        if (repeats := _firsts(here)) != _firsts(saved):
            refuse_repeated([saved[j] for j in dict.fromkeys(repeats)])
            raise ValueError(f"param_groups[{i}] has a parameter twice where the checkpoint has two parameters")


def _firsts(params: Sequence[Any]) -> list[int]:
    """Return for each of ``params`` its first index among them."""
    first: dict[Any, int] = {}
    return [first.setdefault(param, index) for index, param in enumerate(params)]


def _check_repeats(current: Sequence[ListedParam], saved_groups: Sequence[SavedGroup]) -> None:
    """Raise ``ValueError`` if the checkpoint has one parameter for several of ``current``, by their names."""
    owners = {name: param.name for param in current for name in (param.name, *param.aliases)}
    for group in saved_groups:
        if len({*group.params}) < len(group.params):
            if group.is_named:
                refuse_repeated(group.params)
            pairs = zip(group.params, group.names or (), strict=True)
            refuse_repeated([p for p, _ in dict.fromkeys([(p, owners[name]) for p, name in pairs if name in owners])])


def _match_names(current: Sequence[ListedParam], saved: Sequence[ListedParam]) -> dict[int, int]:
    """Return the indices of parameters of ``saved`` by the indices of those of ``current`` with their names.

    Exact names are tried before names without the prefixes of module wrappers, and a parameter's name before its aliases.
    """
    matches: dict[int, int] = {}
    left = set(range(len(saved)))
    spellings: tuple[Callable[[str], str], ...] = (str, canonical_name)
    for spelling, with_aliases in itertools.product(spellings, (False, True)):
        if not left:
            break
        by_name = _by_name(saved, spelling, with_aliases=with_aliases)
        for name, i in _by_name(current, spelling, with_aliases=with_aliases).items():
            if i not in matches and (j := by_name.get(name)) in left:
                left.remove(j)
                matches[i] = j
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
