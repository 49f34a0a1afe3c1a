"""The parameter group: a dict whose hyperparameters are stored on the device; how to read and assign them.

A step reads the vector of :class:`~compiled_optim.groups.numbers.GroupNumbers`, whose address does not change. Users read
what they assigned: a Python number, or a tensor. An assignment writes into the vector.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from compiled_optim.groups.changes import Changes, WatchedDict, WatchedList
from compiled_optim.groups.numbers import GroupNumbers, QuickWrite, as_fake_as, warn_of_driven, without_wait
from compiled_optim.groups.per_parameter import check_choices, kept
from compiled_optim.memory.layout import is_lost
from compiled_optim.memory.torch_internals import (
    compiler_at_work,
    fakes_are_made,
    is_capturing,
    is_fake,
    outside_dynamo,
    outside_inference_mode,
)
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.did_you_mean import warn_of_entry
from compiled_optim.rule.fields import BUILT_IN, LR_SCALE, Hyper, Option, Static, built_in, is_ignored
from compiled_optim.rule.rule import RULE, TRAIN_MODE
from compiled_optim.rule.transforms import check_decay

_STALE = object()  # no value of an entry
ROUNDING = 1e-12  # the distance that a scheduler's rounding may put a number out of range


class ParamGroup(WatchedDict[str, Any]):
    """One entry of ``optimizer.param_groups``.

    A number that a schedule in the step drives is read as a 0-dim copy. A tensor that is assigned over a number is copied
    into the live tensor, which users read from then on. A floating tensor on ``device`` among ``values`` stays the user's:
    all groups that got it see later in-place writes by its owner, until a group is assigned another value. A write with
    ``dict.__setitem__(group, key, value)`` bypasses this class, and is noticed when the key is read.

    A write to a *structural* key is reported, since it changes which parameters are updated or with which code. Some
    hyperparameters decide, by being 0 or not, whether a buffer exists: each step calls :meth:`nonzero`. A hyperparameter
    that only an option reads, as ``max_lr`` with ``decouple_lr``, always has a tensor. While the option is off, the dict has
    no such entry until a user assigns it, and a checkpoint's entry of this name may be anything.

    Args:
        values: the group's entries, with every hyperparameter that takes no default from another one (``like``).
        kind: the optimizer whose rule the group follows.
        device: of the hyperparameter tensors.
        label: the group's name in error messages.
        check: raises if a write to a structural or a new key is invalid. It takes all entries after the write, and before.
        changes: takes the reports of writes to structural keys.
    """

    __slots__ = ("_entries", "_quick")  # which every access reads: twice as fast as from the __dict__

    @outside_inference_mode()
    def __init__(
        self,
        values: Mapping[str, Any],
        kind: type[Declared],
        device: torch.device,
        label: str,
        check: Callable[[Mapping[str, Any], Mapping[str, Any]], None],
        changes: Changes,
    ) -> None:
        super().__init__(changes=changes)
        self.label, self.kind, declaration = label, kind, kind._declaration
        self.for_compiled_code: dict[str, Any] = {}  # tensors by hyperparameter, 0-dim or tuples of them, to be read only
        # By key, the error of a number that was written, and whether it is a rate for which steps use 0.
        self.out_of_range: dict[str, tuple[str, bool]] = {}
        self._loaded: set[str] = set()  # the keys that a checkpoint wrote last
        self._check = check
        self._hypers = {h.name: h for h in declaration.hypers}
        self._declaration, self._device = declaration, device
        self._entries: dict[str, Any] = {}  # by hyperparameter: the value that the dict has for the present numbers
        self._stale: dict[str, Any] = {}  # the same for those that other code may write, which are _STALE in _entries
        self._quick: dict[str, QuickWrite] = {}  # for numbers whose writes change nothing else
        self._indices: dict[str, range] = {}  # of each hyperparameter's numbers
        devices = {device} | ({torch.device("meta")} if {p.is_meta for p in values["params"]} == {True} else set())
        elements, entries, copied = dict[str, Sequence[float | Tensor]](), set[str](), list[tuple[str, str]]()
        for key, value in values.items():
            hyper = self._hypers.get(key)
            if hyper is None or (value is not None and is_stored_as_is(hyper, value, values)):
                self.set_quietly(key, value)
            elif value is not None or not hyper.like:
                elements[key] = hyper.elements(value, label)
                entries.add(key)
                dict.__setitem__(self, key, value)  # in the order of ``values``
        numbers: list[float | Tensor] = []
        for key, hyper in self._hypers.items():
            if key not in elements:
                elements[key] = (0.0,) if hyper.like else hyper.elements(hyper.default, label)
                entries |= {key} if hyper.like and hyper.is_read(values) else set()
                copied += [(key, hyper.like)] if hyper.like else []
            self._indices[key] = range(len(numbers), len(numbers) + hyper.length)
            numbers += elements[key]
        self._structural = {i for key in declaration.structural_hypers for i in self._indices[key]}
        self._store(numbers, devices)
        for key, other in copied:
            self.numbers.write(self._indices[key][0], self.numbers.value(self._indices[other][0]))
        for key in self._hypers:
            self._publish(key, new=key in entries)

    def _store(self, numbers: Sequence[float | Tensor], devices: Collection[torch.device] = ()) -> None:
        """Store ``numbers`` on the group's device. Steps read those that are tensors on ``devices`` from these."""
        self.numbers = GroupNumbers(numbers, self._structural, self._device, devices, self._changes)

    def set_quietly(self, key: str, value: Any) -> None:
        """Write without reporting; ``params`` becomes a list that reports, a dict of numbers a read-only copy."""
        if key == "params":
            value = WatchedList(self._changes, value)
        elif key == TRAIN_MODE and not value:
            self._changes.refuse()
        elif key in self._hypers and (chosen := self._hypers[key].choice(value)) is not None:
            value = chosen  # immutable
            self._quick.pop(key, None)
        dict.__setitem__(self, key, kept(value) if key == LR_SCALE and self._declaration.scales_lr else value)

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        return value if self._entries.get(key, value) is value else self._read(key)

    # Reads that bypass __getitem__ would be stale; dict(group) bypasses it unless the class has an __iter__.
    get, items, values, __eq__ = Mapping.get, Mapping.items, Mapping.values, Mapping.__eq__  # type: ignore[assignment]
    __ne__ = object.__ne__

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __repr__(self) -> str:
        return repr(dict(self))

    @outside_dynamo
    def _read(self, key: str) -> Any:
        if not self._is_entry(key):
            return dict.__getitem__(self, key)
        numbers = enumerate(self.indices(key))
        value = self._hypers[key].plain([self.numbers.read(i, self._element(key, index)) for index, i in numbers])
        self._show(key)
        return value

    def indices(self, key: str) -> range:
        """Return the indices of a hyperparameter's :attr:`numbers`.

        A ``dict.__setitem__``, which bypasses this class, is taken over before.
        """
        known = self._stale[key] if key in self._stale else self._entries.get(key)
        if dict.get(self, key) is not known and self._is_entry(key):
            self.update({key: dict.__getitem__(self, key)})
        return self._indices[key]

    def tensors(self, key: str) -> tuple[Tensor, ...]:
        """Return a hyperparameter's tensors, one for each of its numbers. The caller may write to them."""
        self.refuse_fixed(key)
        for i in self.indices(key):
            self.numbers.expose(i)
        self._show(key)
        return self.read_only(key)

    def refuse_fixed(self, key: str) -> None:
        """Raise ``ValueError`` where a hyperparameter is a compiled-in choice, so that nothing reads its tensors."""
        if key in self and self._hypers[key].choice(dict.__getitem__(self, key)) is not None:
            chosen = f"{key} of {self.label} is {dict.__getitem__(self, key)!r}, which is compiled in"
            raise ValueError(f"{chosen}: assign {self._hypers[key].length} numbers first")

    def read_only(self, key: str) -> tuple[Tensor, ...]:
        """Return :meth:`tensors` for a caller that reports its writes or makes none."""
        return tuple([self.numbers.tensors[i] for i in self.indices(key)])

    def _publish(self, key: str, *, new: bool = False) -> None:
        """Let compiled code and users find the tensors of a hyperparameter."""
        tensors = tuple([self.numbers.tensors[i] for i in self._indices[key]])
        self.for_compiled_code[key] = tensors if self._hypers[key].is_tuple else tensors[0]
        self._show(key, new=new)

    def _show(self, key: str, *, new: bool = False) -> None:
        """Put a hyperparameter's current numbers into the dict, if it has the entry or gets it as a ``new`` one."""
        numbers, hyper, indices = self.numbers, self._hypers[key], self._indices[key]
        certain = [numbers.certain(i) if numbers.is_private(i) else None for i in indices]
        is_open, is_entry = None in certain, new or self._is_entry(key)
        self._quick.pop(key, None)
        self.out_of_range.pop(key, None)
        problem, is_replaced = "", False
        if is_entry:
            tensors = [numbers.tensors[i] if number is None else number for i, number in zip(indices, certain, strict=True)]
            entry = hyper.plain(tensors)
            dict.__setitem__(self, key, entry)  # first: after an interrupt, it is taken for a write of the same numbers
            self._stale[key], self._entries[key] = entry, _STALE if is_open else entry
            if not is_open:
                del self._stale[key]
            if problem := self._problem(hyper):
                is_replaced = key == "lr" and key not in self._loaded and numbers.replace_negative(indices[0])
                self.out_of_range[key] = problem, is_replaced
                if is_replaced and self._changes.is_guarded:  # compiled code does not check
                    self._changes.warn_of_rate(problem)
                else:
                    self._changes.refuse()
        if not (is_open or problem or hyper.name in self._declaration.structural_hypers or (hyper.fixed and not is_entry)):
            self._quick[key] = numbers.quick_write(indices.start, hyper)

    def problems(self) -> list[tuple[str, bool]]:
        """Return the errors of numbers out of range that were written, and whether steps use 0 for them.

        Numbers that other code wrote since are not checked.
        """
        for key in [key for key in self.out_of_range if self.is_exposed(key)]:
            self._show(key)
        return [*self.out_of_range.values()]

    def _problem(self, hyper: Hyper) -> str:
        """Return the error of a hyperparameter's first number out of range, or ""."""
        least, most = hyper.span
        for index, i in enumerate(self._indices[hyper.name]):
            value = self.numbers.written[i]
            if value is not None and not least <= value <= most and self.numbers.is_as_written(i):
                try:
                    hyper.check(value, index, self.label, ROUNDING)
                except ValueError as error:
                    return str(error)
        return ""

    def _is_entry(self, key: str) -> bool:
        return key in self and not is_stored_as_is(self._hypers[key], dict.__getitem__(self, key), self)

    def _is_shown(self, key: str) -> bool:
        return not (self._hypers[key].when or self._hypers[key].fixed) or self._is_entry(key)

    def unshown(self) -> dict[str, Any]:
        """Return hyperparameters that the dict omits, since their option is off; :meth:`take_over` copies them."""
        hidden = [key for key in self._hypers if not self._is_shown(key)]
        return {key: self.numbers.value(self._indices[key][0]) for key in hidden}

    def take_over(self, unshown: Mapping[str, float | Tensor]) -> None:
        """Write the :meth:`unshown` hyperparameters of the group that this one is a copy of."""
        for key, value in unshown.items():
            self.numbers.write(self._indices[key][0], value)
            self._show(key)

    def nonzero(self, key: str) -> bool:
        """Return :meth:`GroupNumbers.nonzero` of a hyperparameter of one number."""
        return self.numbers.nonzero(self.indices(key)[0])

    def is_exposed(self, key: str) -> bool:
        """Return whether other code has a tensor of a hyperparameter, and may write to it or move it unreported."""
        return not all(map(self.numbers.is_private, self.indices(key)))

    def drive(self, key: str, *, begin: bool) -> None:
        """Note that the device begins or ceases to write a hyperparameter by itself. It writes to no user's tensor."""
        for i in self.indices(key):
            self.numbers.drive(i, begin=begin)
        self._publish(key)

    def driven(self, key: str) -> tuple[Tensor, ...]:
        """Return :meth:`read_only` for the device to write; warn if a user wrote to the copy that was read.

        These writes do not change the version of the vector, which tells whether other code wrote.
        """
        for index, i in enumerate(self._indices[key]):
            self.numbers.warn_of_lost_write(i, self._element(key, index))
        return tuple([tensor.data for tensor in self.read_only(key)])

    def _element(self, key: str, index: int) -> str:
        return f"{self._hypers[key].element(index)} of {self.label}"

    @outside_inference_mode()
    def to(self, device: torch.device) -> None:
        """Move the hyperparameters to ``device``, after their parameters moved there."""
        if device == self._device:
            return
        self._device = device
        before = self.numbers
        certain = [before.certain(i) for key in self._hypers for i in self.indices(key)]
        pairs = zip(before.tensors, certain, strict=True)
        self._store([tensor if number is None else number for tensor, number in pairs])
        self.numbers.take_over(before)
        for key in self._hypers:
            self._publish(key)

    def floats(self, *, wait: bool = True) -> dict[str, Any]:
        """Return the hyperparameters as floats or tuples; without ``wait``, as tensors where only the device knows them."""
        read = self.numbers.as_float if wait else self.numbers.value
        shown = filter(self._is_shown, self._hypers)
        return {key: self._hypers[key].plain([read(i) for i in self.indices(key)]) for key in shown}

    def load(self, key: str, value: Any) -> None:
        """Write a value of a checkpoint; into a tensor that a user passed if that can hold it and is not shared."""
        if self.holds(key, value):
            self._loaded.add(key)
            return
        hyper = self._hypers.get(key)
        value = value if type(value) in BUILT_IN else built_in_entries(self.kind, {key: value})[key]
        taken = None if hyper is None or is_stored_as_is(hyper, value, self) else self._taken(key, value)
        if key in self._declaration.loaded_options:
            self._enter(key, value, taken, is_loaded=True)
        elif taken is None:
            self.set_quietly(key, value)
        else:
            self._assign(key, taken, is_loaded=True)

    def holds(self, key: str, value: Any) -> bool:
        """Return whether the numbers of ``key`` are exactly the floats in ``value``, and no other code may write to them."""
        known = self._entries.get(key, _STALE)
        if known is not dict.get(self, key) or key in self.out_of_range or self.numbers.exposed:
            return False
        elements, others = (known, value) if type(known) is type(value) is tuple else ((known,), (value,))
        are_floats = {*map(type, elements), *map(type, others)} == {float}
        indices = self._indices[key]
        written = self.numbers.written[indices.start : indices.stop]  # others after a write that was interrupted
        return are_floats and [*elements] == written and str([*others]) == str(written)  # which tell -0.0 from 0.0

    def __setitem__(self, key: str, value: Any) -> None:
        quick = self._quick.get(key)
        if quick is None or is_dynamo_compiling() or compiler_at_work() is not None:
            self.update({key: value})
            return
        least, most, memory, written, i, exposed, write = quick
        if type(value) is float and least <= value <= most and memory is not None and not exposed:
            memory.value = written[i] = value  # here, since a call of a function costs a scheduler as much as the rest
        elif not write(value):
            self.update({key: value})
            return
        dict.__setitem__(self, key, value)
        self._entries[key] = value

    def _written(self, *key: Any) -> str:
        declared = key and (key[0] in self._hypers or key[0] in self._declaration.structural_entries)
        return f"{self.label}{[*key] if declared else ''} was written"

    @outside_dynamo
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update as ``dict.update``, but write nothing if one of the values is invalid."""
        values = built_in_entries(self.kind, dict(*args, **kwargs))
        taken = {key: self._taken(key, values[key]) for key in self.check(values)}
        structural = self._declaration.structural_entries
        for key, value in values.items():
            if not (key in taken or key in self or key in structural):
                warn_of_entry(key, (*self._hypers, *structural), self.label)
            self._enter(key, value, taken.get(key))

    def _enter(
        self, key: str, value: Any, taken: list[tuple[float | Tensor, float | Tensor]] | None, *, is_loaded: bool = False
    ) -> None:
        """Write an entry, whose numbers are ``taken``, and report it if it changes the code."""
        replaces_numbers = taken is not None and self._is_entry(key)  # numbers replace numbers
        is_option = key in self._declaration.structural_entries and not replaces_numbers
        with self._changes.reported(self._written(key)) if is_option else contextlib.nullcontext():
            self.set_quietly(key, value) if taken is None else self._assign(key, taken, is_loaded=is_loaded)
        for name in (h.name for h in self._hypers.values() if key in h.readers and value):
            self._show(name, new=True)

    def check(self, values: Mapping[str, Any]) -> list[str]:
        """Return the keys of ``values`` that are numbers. Raise an error where choices or new entries are invalid."""
        numeric = [key for key in values if key in self._hypers and self._hypers[key].choice(values[key]) is None]
        others = values.keys() - numeric
        if driven := [key for key in others & self._hypers.keys() if not self.numbers.driven.isdisjoint(self._indices[key])]:
            raise ValueError(f"opt.schedule sets {driven[0]} of {self.label}: end that with opt.schedule({driven[0]}=None)")
        if self._declaration.structural_entries & others or others - self.keys():
            self._check({**self, **values}, self)
        return numeric

    def _taken(self, key: str, value: Any) -> list[tuple[float | Tensor, float | Tensor]]:
        """Pair each element of ``value``, in any range, with its current number. Raise an error where one is no number."""
        elements = self._hypers[key].elements(value, self.label)
        for index, e in enumerate(elements):
            if isinstance(e, Tensor) and (e.is_meta or is_fake(e) or is_lost(e)) and not fakes_are_made():
                raise ValueError(f"{self._element(key, index)} must be a number, got a tensor without memory")
        return [(e, without_wait(e)) for e in elements]

    def refuse_capture(self, keys: Iterable[str]) -> None:
        """Raise ``RuntimeError`` if a CUDA graph is being captured, and one of ``keys`` has numbers."""
        if (assigned := [*filter(self._hypers.__contains__, keys)]) and is_capturing(self._device):
            where = f"{self.label}[{assigned[0]!r}] is assigned while a CUDA graph is being captured"
            raise RuntimeError(f"{where}, and no replay would repeat that; assign hyperparameters outside")

    def _assign(self, key: str, taken: Iterable[tuple[float | Tensor, float | Tensor]], *, is_loaded: bool = False) -> None:
        self.refuse_capture([key])
        (self._loaded.add if is_loaded else self._loaded.discard)(key)
        self._stale[key], self._entries[key] = dict.get(self, key), _STALE  # until it is shown, in case of an interrupt
        numbers = self.numbers
        for index, (i, (element, value)) in enumerate(zip(self._indices[key], taken, strict=True)):
            tensor = numbers.tensors[i]
            if element is not tensor:
                if i in numbers.driven and not is_loaded:
                    warn_of_driven(self._element(key, index))
                leaves = i in numbers.passed or (isinstance(value, Tensor) and value.requires_grad)
                if is_loaded and i in numbers.passed and not isinstance(value, Tensor):
                    stored = torch.tensor(value, dtype=tensor.dtype, device="cpu").item()
                    leaves = numbers.is_shared(i) or not (stored == value or math.isnan(value))
                if leaves:
                    with outside_inference_mode(), as_fake_as(tensor):
                        numbers.put(i, value)
                    self._publish(key)
                else:
                    numbers.write(i, value)
            numbers.show_as(i, element)
        self._show(key, new=True)

    def __delitem__(self, key: str) -> None:
        """Delete as ``dict.__delitem__``. Raise ``ValueError`` where steps would go on reading the entry."""
        if key == RULE:
            raise ValueError(f"{RULE} of {self.label} cannot be removed")
        readers = self._hypers[key].readers if key in self and key in self._hypers else ()
        if choice := next((name for name in readers if self.get(name)), None):
            raise ValueError(f"{key} of {self.label} cannot be removed: {choice}=True reads it; set {choice} to False first")
        super().__delitem__(key)


def is_stored_as_is(hyper: Hyper, value: Any, group: Mapping[str, Any]) -> bool:
    """Return whether ``value`` is not stored as numbers: a choice, or a user's entry while ``hyper``'s option is off."""
    if not hyper.when or hyper.is_read(group):
        return hyper.choice(value) is not None
    if isinstance(value, Tensor):
        return value.numel() != 1
    return isinstance(value, (str, bytes)) or not hasattr(value, "__float__")


def group_keys(kind: type[Declared]) -> list[str]:
    """Return the keys that a group of ``kind`` may have besides its parameters."""
    return [*[f.name for f in kind._declaration.group_fields], *kind._group_flags, *kind._modes, RULE]


def built_in_entries(kind: type[Declared], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with declared choices and tuples converted by :func:`built_in`."""
    choices, tuples = kind._containers()

    def converted(key: str, value: Any) -> Any:
        return built_in(value) if key in tuples or (key in choices and not isinstance(value, Tensor)) else value

    return {key: value if type(value) in BUILT_IN else converted(key, value) for key, value in values.items()}


def group_entries(kind: type[Declared], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of groups of ``kind`` among ``options``, without defaults of options that torch.optim lacks."""
    added = kind._added_choices()
    entries = {name: options[name] for name in group_keys(kind) if name in options}
    chosen = {name: value for name, value in entries.items() if name not in added or value != added[name]}
    return {**kind._modes, **{name: kept(value) if name == LR_SCALE else value for name, value in chosen.items()}}


def rule_of(group: Mapping[str, Any], default: type[Declared], where: str) -> type[Declared]:
    """Return the optimizer whose rule ``group`` follows: the one that it names, or the ``default``.

    Raise ``TypeError`` or ``ValueError`` where it names no optimizer, or one that cannot be combined with others.
    """
    kind: Any = group.get(RULE, default)
    if not (isinstance(kind, type) and issubclass(kind, Declared)):
        raise TypeError(f"{RULE} of {where} must be the class of an optimizer of this package, got {kind!r}")
    for each in () if kind is default else (default, kind):
        if not hasattr(each, "_rule"):
            raise ValueError(f"{RULE} of {where} is {kind.__name__}: {each.__name__} shares no step with another optimizer")
    if kind._modes and kind is not default:
        advice = f"construct {kind.__name__}, and give the groups of other optimizers their {RULE}"
        raise ValueError(f"{RULE} of {where} is {kind.__name__}, which has eval() and train(): {advice}")
    return kind


def inherited(
    group: Mapping[str, Any], owner: type[Declared], defaults: Mapping[str, Any], where: str
) -> tuple[type[Declared], dict[str, Any]]:
    """Return a group's :func:`rule_of` and its initial entries in an optimizer of class ``owner`` with ``defaults``.

    They are the defaults of the rule, and choices of the constructor that mean the same for all, such as ``weights``.
    Raise ``ValueError`` where the rule lacks such a choice, or the group has no parameters.
    """
    kind = rule_of(group, owner, where)
    if "params" not in group:
        raise ValueError(f"{where} has no 'params'")
    if kind is owner:
        return kind, dict(defaults)
    fields = {name: vars(field).get("default", Parameter.empty) for name, field in kind._all_fields.items()}
    options = {name: default for name, default in fields.items() if default is not Parameter.empty}
    known, entries = group_keys(kind), group_entries(kind, options)
    for name, value in defaults.items():
        field = owner._all_fields.get(name)
        if isinstance(field, Hyper) or (isinstance(field, Static) and name in owner._declared) or name in owner._modes:
            continue
        names_others = isinstance(field, Option) and field.patterns  # parameters of other groups
        if name in known:
            entries[name] = value
        elif not names_others and name not in owner._group_flags and value != getattr(field, "default", value):
            raise ValueError(f"{name}={value!r} does not go with {kind.__name__}, the {RULE} of {where}: give it to groups")
    return kind, entries


def check_values(kind: type[Declared], group: Mapping[str, Any], before: Mapping[str, Any], index: int) -> None:
    """Raise an error where an entry of ``param_groups[index]`` is out of range, conflicts with another, or is no group's.

    ``before`` are the entries that ``group`` replaces. Unknown keys pass; options of the whole optimizer do not.
    """
    where, entries, is_new = f"param_groups[{index}]", group, not isinstance(before, ParamGroup)
    group = {**kind._added_choices(), **group}
    for choice in kind._options():
        value = group.get(choice.name, choice.default)
        if not is_ignored(choice.name, value):
            choice.check(value, where)
    if absent := [h.name for h in kind._declaration.hypers if h.name not in group]:
        raise ValueError(f"{where} has no {absent[0]}, for which {kind.__name__} has no default")
    hypers = {h.name: group[h.name] for h in kind._declaration.hypers}
    for hyper, value in zip(kind._declaration.hypers, hypers.values(), strict=True):
        was_stored_as_is = hyper.name in before and is_stored_as_is(hyper, value, group)  # from a checkpoint
        if (value is not None or not hyper.like) and not was_stored_as_is and hyper.choice(value) is None:
            # An existing group refuses a number out of range in the next step.
            hyper.checked(value, where) if is_new else hyper.elements(value, where)
    if not is_new and group.get(RULE) is not before.get(RULE):
        raise ValueError(f"{RULE} of {where} cannot be assigned; make a new optimizer, and load the state by name")
    kind.check(hypers, group)
    check_decay(group)
    check_choices(kind._declaration.options, group, before, index)
    for mode in kind._modes:
        if not is_new and group[mode] is not before[mode]:
            raise ValueError(f"{mode} of {where} cannot be assigned; call the optimizer's eval() or train()")
    known = group_keys(kind)
    if foreign := [key for key in entries if key in kind._all_fields and not (key in known or is_ignored(key, None))]:
        raise TypeError(f"{foreign[0]} is an option of the whole optimizer, not of {where}")
