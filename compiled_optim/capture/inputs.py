"""The inputs of a captured function: copied to where a graph reads them, after they were checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import KeyEntry, MappingKey, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""What may stand beside tensors among inputs and outputs."""


class StaticInputs:
    """Copies of the tensors among the arguments of ``function``, made in its first call and written by every later one.

    Arguments are nested lists, tuples and dicts of tensors, all on ``device`` unless that is None, and of constants.

    Raises:
        TypeError: an argument is neither a tensor nor a number, string, dtype, device or None.
        ValueError: a tensor requires grad, or is elsewhere than on ``device``.
    """

    def __init__(
        self, function: Callable[..., Any], device: torch.device | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._function = function
        leaves, self._structure = tree_flatten_with_path((args, _ordered(kwargs)))
        self._names = [_name(function, path) for path, _ in leaves]
        for name, (_, leaf) in zip(self._names, leaves, strict=True):
            _check_kind(name, leaf)
            if isinstance(leaf, Tensor) and device is not None and leaf.device != device:
                raise ValueError(f"{name} must be on {device}, where the parameters are, but is on {leaf.device}")
        self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for _, leaf in leaves]

    def checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The tensors and constants of a call, for the other methods; an error if they are unlike those of the first call.

        The arguments' structure must be the same, and the shape, dtype and device of each tensor.
        """
        leaves, structure = tree_flatten((args, _ordered(kwargs)))
        if structure != self._structure:
            raise ValueError(f"the arguments must be structured as in the first call: {self._structure}, got {structure}")
        for name, own, leaf in zip(self._names, self._leaves, leaves, strict=True):
            _check_kind(name, leaf)
            if _form(own) != _form(leaf):
                difference = f"{name} must be {_form_in_words(own)} as in the first call, got {_form_in_words(leaf)}"
                raise ValueError(difference + _remedy(own, leaf))
        return leaves

    def change(self, leaves: list[Any]) -> str:
        """Which constant of ``leaves`` is another than what was loaded last, with old and new value; empty if none is."""
        for name, own, leaf in zip(self._names, self._leaves, leaves, strict=True):
            if not isinstance(own, Tensor) and (type(own) is not type(leaf) or not (own is leaf or own == leaf)):
                return f"{name} {own!r} -> {leaf!r}"
        return ""

    def load(self, leaves: list[Any]) -> None:
        """Copy the tensors of ``leaves`` in and take over the constants."""
        for i, (own, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if not isinstance(own, Tensor):
                self._leaves[i] = leaf
            elif own is not leaf:
                own.copy_(leaf, non_blocking=True)

    def call(self) -> Any:
        """Call the function with the copies and the constants."""
        args, kwargs = tree_unflatten(self._leaves, self._structure)
        return self._function(*args, **kwargs)


def _check_kind(name: str, leaf: Any) -> None:
    if isinstance(leaf, Tensor):
        if leaf.requires_grad:
            raise ValueError(f"{name} requires grad, and a copy of it would get the gradient; pass its detach()")
    elif not isinstance(leaf, CONSTANTS):
        raise TypeError(f"{name} must be a tensor, a number, a string or None, got {type(leaf).__name__}")


def _name(function: Callable[..., Any], path: tuple[KeyEntry, ...]) -> str:
    """The name of an argument or of an entry in one: ``x``, ``batch['ids']`` or ``args[2]``."""
    _, first, *entries = path
    if isinstance(first, MappingKey):
        return f"{first.key}{keystr(tuple(entries))}"
    try:
        positional = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        positional = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in positional if p.kind in kinds]
    index: int = first.idx  # type: ignore[attr-defined]
    return (names[index] if index < len(names) else f"args[{index}]") + keystr(tuple(entries))


def _ordered(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``kwargs`` in an order that no caller decides."""
    return dict(sorted(kwargs.items()))


def _form(leaf: Any) -> object:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None


def _form_in_words(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    return f"a {str(leaf.dtype).removeprefix('torch.')} tensor of shape {tuple(leaf.shape)} on {leaf.device}"


def _remedy(own: Any, leaf: Any) -> str:
    """What to do about a tensor that is only shorter than the first one, as in a last batch."""
    both = isinstance(own, Tensor) and isinstance(leaf, Tensor)
    if not both or own.shape[1:] != leaf.shape[1:] or own.shape[:1] <= leaf.shape[:1]:
        return ""
    return "; for a smaller last batch, give the DataLoader drop_last=True or call the function without the runner"
