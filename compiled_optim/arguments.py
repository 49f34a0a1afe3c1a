"""The forms in which torch.optim takes parameters: tensors, named ones, groups of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def as_groups(params: Any) -> list[dict[str, Any]]:
    """The constructor's ``params`` as a list of new group dicts."""
    if isinstance(params, Tensor):
        raise TypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, but got "
            + torch.typename(params)
        )
    if isinstance(params, Mapping):
        return [{"params": params}]
    entries = list(params) if not isinstance(params, set) else [{"params": params}]
    if not entries:
        raise ValueError("optimizer got an empty parameter list")
    return [dict(e) for e in entries] if isinstance(entries[0], Mapping) else [{"params": entries}]


def names_and_tensors(params: Any) -> tuple[list[str], list[Any]]:
    """Names, where there are any, and tensors of one group's ``params``."""
    if isinstance(params, Tensor):
        return [], [params]
    if isinstance(params, set):
        raise TypeError(
            "optimizer parameters need to be organized in ordered collections, but the ordering of tensors in sets will "
            "change between runs. Please use a list instead."
        )
    entries = list(params.items() if isinstance(params, Mapping) else params)
    pairs = [e for e in entries if isinstance(e, tuple)]
    if pairs and len(pairs) != len(entries):
        raise ValueError("all optimizer params should be with/without names. Some param names are missing")
    return [name for name, _ in pairs], [tensor for _, tensor in pairs] if pairs else entries


def without_aliases(names: Sequence[str], params: Sequence[Any]) -> tuple[list[str], list[Any], dict[str, str]]:
    """Names and tensors with one entry per tensor, and the further names -> the kept ones."""
    if not names:
        return [], list(params), {}
    own: dict[int, str] = {}
    kept: list[tuple[str, Any]] = []
    aliases: dict[str, str] = {}
    for name, param in zip(names, params, strict=True):
        first = own.setdefault(id(param), name)
        if first == name:
            kept.append((name, param))
        else:
            aliases[name] = first
    return [name for name, _ in kept], [param for _, param in kept], aliases


def hand_over(key: str, value: Any, groups: list[dict[str, Any]]) -> None:
    """Give a tensor from the constructor to the one group without a value of its own, which will adopt it.

    Several such groups get a copy each, unless the tensor requires grad.
    """
    heirs = [group for group in groups if key not in group]
    elements = value if isinstance(value, tuple) else (value,)
    if len(heirs) == 1 or any(isinstance(e, Tensor) and e.requires_grad for e in elements):
        for group in heirs:
            group[key] = value
