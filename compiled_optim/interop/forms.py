"""State dicts prepared for files: plain values only, step counts of one dtype, and the forms of files.

:mod:`compiled_optim.checkpoint.read` describes the forms. A value that cannot be converted raises ``ValueError``, which
names it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.catalogue import every_optimizer
from compiled_optim.checkpoint.read import Checkpoint, foreign_options
from compiled_optim.checkpoint.state_dict import is_orphan, known_names
from compiled_optim.groups.param_group import group_keys
from compiled_optim.groups.parameters import first_few
from compiled_optim.interop.replace_files import Keep, in_memory
from compiled_optim.rule.storage import INT8, PARTS, scale_name

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
_MAX_DEPTH = 8
MOST_KEYS = 8  # keys that a message lists
_SLACK = 1 << 17  # repeated entries that are still accepted

UNORDERED = "unordered"
"""The key that marks a state dict whose parameters may not be listed in the model's order."""

_TOP = {"state", "param_groups", "aliases", "format_version", "optimizers", UNORDERED}

_LISTED = ("params", "param_names")
_WITHOUT_EFFECT = {
    *(*_LISTED, "foreach", "fused", "capturable", "differentiable"),
    *("weights", "kahan_sum", "state_dtype", "exclude", "rounding_seed"),  # the entries of the state show them
}


def checked(content: Any, keep: Keep = in_memory) -> dict[str, Any]:
    """Return ``content`` as a state dict of plain values. Raise ``ValueError`` if it is none."""
    content = plain(content, "the state dict", _MAX_DEPTH, keep)
    Checkpoint.of(content)
    return dict(content)


def check_extent(content: Any, most: int) -> None:
    """Raise ``ValueError`` if repeated entries make ``content`` larger than a file of ``most`` bytes can be."""
    todo, entries = [content], 0
    while todo:
        value = todo.pop()
        if isinstance(value, (Mapping, list, tuple)):
            todo += value.values() if isinstance(value, Mapping) else value
            entries += len(value)
        if entries > most + _SLACK:
            raise ValueError("it repeats entries so often that they are more than the file can hold")


def plain(value: Any, where: str, depth: int, keep: Keep) -> Any:
    """Copy ``value`` for any reader: as dicts, lists, tuples, plain values and tensors outside of autograd's graph.

    torchao's tensors become float32 and go through ``keep``.

    Raises:
        ValueError: it holds other types, or is nested more than ``depth`` levels deep.
    """
    if isinstance(value, Tensor):
        return _plain_tensor(value, where, keep)
    if type(value) in _PLAIN:
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise ValueError(f"{where} is an integer of more than 64 bits")
        return value
    if depth == 0:
        raise ValueError(f"{where} is nested too deeply")
    if isinstance(value, Mapping):
        if foreign := [type(key).__name__ for key in value if type(key) not in (int, str)]:
            raise ValueError(f"{where} has a key that is neither an integer nor a string but a {foreign[0]}")
        return {key: plain(entry, f"{where}[{key!r}]", depth - 1, keep) for key, entry in value.items()}
    if type(value) in (list, tuple, torch.Size):
        entries = [plain(entry, f"{where}[{i}]", depth - 1, keep) for i, entry in enumerate(value)]
        return entries if type(value) is list else tuple(entries)
    raise ValueError(f"{where} is a {type(value).__name__}, which is neither a tensor nor a plain value")


def _plain_tensor(value: Tensor, where: str, keep: Keep) -> Tensor:
    if type(value).__module__.startswith("torchao.optim."):
        return keep(value.dequantize())
    if type(value) not in (Tensor, torch.nn.Parameter) or value.is_nested or value.layout != torch.strided or value.is_meta:
        raise ValueError(f"{where} is not a dense tensor with memory of its own")
    if value.dtype not in _DTYPES:
        raise ValueError(f"{where} is of {value.dtype}, which is not converted")
    if value.numel() * value.itemsize > value.untyped_storage().nbytes():
        raise ValueError(f"{where} has {value.numel()} elements, more than its memory holds")
    return value.detach()


def check_lossless(state_dict: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for state of no parameter, and options of other optimizers: both would be lost.

    Also if two parameters are called 1 and "1".
    """
    saved, known = Checkpoint.of(state_dict), known_names()
    if len({type(param) for group in saved.groups for param in group.params}) > 1:
        raise ValueError("the groups list some parameters by name and others by number")
    if orphans := [key for key, value in saved.foreign.items() if is_orphan(key, value, known)]:
        raise ValueError(f"the state of {min(orphans, key=str)!r} belongs to no parameter of a group")
    for index, group in enumerate(saved.groups):
        for key, value in foreign_options([group.entries]).items():
            raise ValueError(f"param_groups[{index}] has {key}={value!r}, which has no counterpart")


def check_alone(state_dict: Mapping[str, Any], kept: Collection[Any] = ()) -> None:
    """Raise ``ValueError`` if a state dict has entries, such as a model, that are neither the optimizer's nor ``kept``."""
    if others := [k for k, v in state_dict.items() if k not in {*_TOP, *kept} and (k, type(v)) != ("optimizer", str)]:
        raise ValueError(
            f"beside the optimizer's state it holds {first_few(map(repr, others), MOST_KEYS)}, which would be lost"
        )


def with_steps(state_dict: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return ``state_dict`` with step counts as 0-dim tensors of ``dtype``. Raise ``ValueError`` if it cannot hold one."""
    exact, saved = int(2 / torch.finfo(dtype).eps), Checkpoint.of(state_dict)

    def tensor(value: Any, param: object) -> Tensor:
        return torch.tensor(count(value, f"the step of {param!r}", below=exact), dtype=dtype, device="cpu")

    state = {
        param: {key: tensor(value, param) if key == "step" else value for key, value in entries.items()}
        for param, entries in saved.state.items()
    }
    return saved._replace(state=state).as_dict()


def _number(value: Any, where: str, below: float = math.inf) -> float:
    """Return ``value``, a number or a tensor of one element, as a float. Raise ``ValueError`` outside of [0, ``below``)."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(number, (int, float)) or not 0 <= number < below:
        raise ValueError(f"{where} must be a number in [0, {below}), got {value!r}")
    return float(number)


def count(value: Any, where: str, below: int) -> float:
    """Return ``value`` as a whole number in [0, ``below``), or raise ``ValueError``, which calls it ``where``."""
    number = _number(value, where, below)
    if not number.is_integer():
        raise ValueError(f"{where} must be a whole number, got {number}")
    return number


def indexed(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the indexed form of ``state_dict`` with the same tensors, and with ``param_names`` if it has names.

    Raises:
        ValueError: it is no state dict, or the order of its parameters, which indices depend on, is not known.
    """
    saved = Checkpoint.of(state_dict)
    if saved.others.get(UNORDERED):
        raise ValueError(
            "the order of the parameters is not in the checkpoint, only their names: convert it to 'named', 'safetensors' "
            "or 'dcp'; load_named_state_dict takes the named one, and the optimizer's state_dict() then has the order"
        )
    index: dict[Any, int] = {}
    for group in saved.groups:
        for param in group.params:
            index.setdefault(param, len(index))
    groups = [g._replace(params=tuple([index[param] for param in g.params]), is_named=False) for g in saved.groups]
    state: dict[Any, dict[Any, Any]] = {index[key]: entries for key, entries in saved.state.items()}
    return saved._replace(groups=tuple(groups), state=state).as_dict()


def for_names(state_dict: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    """Return the named form."""
    return Checkpoint.of(with_steps(state_dict, torch.float64)).named().as_dict()


def for_us(state_dict: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    """Return the indexed form."""
    return indexed(with_steps(state_dict, torch.float64))


def for_torch(state_dict: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    """Return the indexed form. Raise ``ValueError`` for entries that torch.optim would misread."""
    for i, group in enumerate(state_dict["param_groups"]):
        if others := [key for key in ("decouple_lr", "decouple_wd") if group.get(key)]:
            raise ValueError(f"param_groups[{i}] has {others[0]}={group[others[0]]}, which torch.optim lacks")
    content = indexed(with_steps(state_dict, torch.float32))
    for param, entries in Checkpoint.of(content).state.items():
        if others := [entry for entry in entries if entry in PARTS or is_coded(entry, entries)]:
            raise ValueError(
                f"the state of {param!r} has {others[0]!r} in a form that torch.optim lacks; load it into an optimizer "
                "of compiled_optim without weights and state_dtype, whose state torch.optim loads"
            )
    return {"state": content["state"], "param_groups": content["param_groups"]}


def is_coded(entry: Any, entries: Mapping[str, Any]) -> bool:
    """Return whether a state ``entry`` holds codes whose scale is among the ``entries``."""
    return scale_name(str(entry).removesuffix(f"_{INT8}")) in entries


def by_parameter(
    state_dict: Mapping[str, Any],
    options: Callable[[Mapping[str, Any], str], dict[str, Any]],
    entries: Callable[[Mapping[str, Any], Mapping[str, Any], str], dict[str, Any]],
) -> dict[str, Any]:
    """Return ``state_dict`` with groups mapped by ``options``, and states that are not empty by ``entries``.

    ``options`` gets a group and its name for messages; ``entries`` gets a state, its old group, and the state's name.
    """
    state, groups = dict(state_dict["state"]), []
    for i, (group, saved) in enumerate(zip(state_dict["param_groups"], Checkpoint.of(state_dict).groups, strict=True)):
        for param, name in zip(saved.params, saved.names or saved.params, strict=True):
            if state.get(param):
                state[param] = entries(state[param], group, f"the state of {name!r}")
        groups.append(options(group, f"param_groups[{i}]"))
    return {**state_dict, "state": state, "param_groups": groups}


def group_for(group: Mapping[str, Any], options: Collection[str], where: str, form: str, *ignored: str) -> dict[str, Any]:
    """Return the entries of a ``group`` that ``form`` saves: ``params``, ``options``, and those of schedulers and users.

    Raises:
        ValueError: one of the options is missing, or another one that changes steps is set and not ``ignored``.
    """
    if missing := [key for key in options if key not in group]:
        raise ValueError(f"{where} has no {', '.join(missing)}, which {form} needs")
    others = {key: value for key, value in group.items() if key in declared() and key not in _WITHOUT_EFFECT}
    for key in others.keys() - {*options, *ignored}:
        if isinstance(value := group[key], Tensor) or value:
            raise ValueError(f"{where} has {key}={value!r}, unsupported by {form}")
    dropped = (declared() | _WITHOUT_EFFECT | {*ignored}) - {*options, *_LISTED}
    return {key: value for key, value in group.items() if key not in dropped}


@functools.cache
def declared() -> frozenset[str]:
    """Return the keys of this package's groups. Others are of users and schedulers, such as OneCycleLR's ``max_lr``."""
    return frozenset(key for kind in every_optimizer() for key in group_keys(kind)) - {"max_lr"}


def in_float32(value: Any, where: str, form: str, keep: Keep) -> Tensor:
    """Return a state's ``value`` in float32. Raise ``ValueError`` if that would lose bits."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{where} is {kind}, which {form} does not hold")
    return value if value.dtype == torch.float32 else keep(value.float())


def scaled_blocks(values: Tensor, scales: Tensor, size: int, where: str) -> Tensor:
    """Multiply each ``size`` of the flat ``values`` in place by one of the ``scales``, and return them.

    Raises:
        ValueError: the number of scales is another.
    """
    full = len(values) // size
    if scales.shape != (-(-len(values) // size),):
        raise ValueError(f"{where} has {scales.numel()} scales for {len(values)} elements, not one for each {size}")
    values[: full * size].view(-1, size).mul_(scales[:full, None].float())
    values[full * size :].mul_(scales[full:].float())
    return values
