"""Which tensors and names an optimizer takes into a parameter group."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.plan import parameter_name
from compiled_optim.rule.rule import Declared
from compiled_optim.sharding import is_sharded


def check_params(
    optimizer: type[Declared], group: Mapping[str, Any], index: int, others: Sequence[Mapping[str, Any]]
) -> None:
    """Raise an error unless ``optimizer`` takes the tensors in ``group``.

    Args:
        optimizer: the class.
        group: with ``params`` and, where they have names, ``param_names``.
        index: which group it is going to be.
        others: the groups before it.

    Raises:
        TypeError: something is no tensor.
        ValueError: a tensor is of a kind that the optimizer does not take, or is there already; or some groups have names
            and others have not.
    """
    seen = {id(p): parameter_name(g, i, j) for i, g in enumerate(others) for j, p in enumerate(g["params"])}
    own: dict[int, str] = {}
    for j, param in enumerate(group["params"]):
        name = parameter_name(group, index, j)
        _check_kind(optimizer, param, name, differentiable=group.get("differentiable", False))
        if id(param) in seen:
            raise ValueError(
                f"some parameters appear in more than one parameter group: '{name}' is also '{seen[id(param)]}'"
            )
        if id(param) in own:
            raise ValueError(
                f"the optimizer got a parameter group with duplicate parameters: '{name}' is also '{own[id(param)]}'"
            )
        own[id(param)] = name
    for other in others:
        if ("param_names" in group) != ("param_names" in other):
            with_or_without = "with" if "param_names" in group else "without"
            raise ValueError(
                "all optimizer param groups should be with/without names. "
                f"cannot add param group {with_or_without} names to the optimizer"
            )


def _check_kind(optimizer: type[Declared], param: Any, name: str, *, differentiable: bool) -> None:
    if not isinstance(param, Tensor):
        raise TypeError(f"optimizer can only optimize Tensors, but one of the params is {torch.typename(param)} ('{name}')")
    if not (param.is_floating_point() or param.is_complex()):
        raise ValueError(f"can't optimize '{name}': its dtype is {param.dtype}, not floating point or complex")
    if param.layout is not torch.strided:
        raise ValueError(f"{optimizer.__name__} requires dense parameter tensors; '{name}' is {param.layout}")
    whole = optimizer.gradients == "sparse" or optimizer.granularity != "element"
    if whole and (param.is_complex() or is_sharded(param)):
        kind = "complex parameters" if param.is_complex() else "DTensors"
        raise ValueError(f"{optimizer.__name__} does not support {kind}; '{name}' is one")
    if optimizer.granularity == "matrix" and param.dim() != 2:
        raise ValueError(
            f"{optimizer.__name__} only supports 2D parameters whereas we found a parameter with size: "
            f"{param.shape} ('{name}'); give the others to an elementwise optimizer"
        )
    if differentiable and is_sharded(param):
        raise ValueError(f"differentiable=True does not work with DTensors; '{name}' is one")
    if not differentiable and not (param.is_leaf or param.retains_grad):
        raise ValueError(f"can't optimize a non-leaf Tensor: '{name}'")


def check_names(names: Sequence[Any], groups: Sequence[Mapping[str, Any]], aliases: Collection[str]) -> None:
    """Raise an error unless ``names`` are strings that neither ``groups`` nor ``aliases`` nor one another hold.

    Raises:
        TypeError: a name is no string.
        ValueError: a name stands for two parameters.
    """
    taken = {name for group in groups for name in group.get("param_names", ())} | set(aliases)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"the name of a parameter must be a string, got {name!r}")
        if name in taken:
            raise ValueError(f"two parameters are named '{name}'; give the names of each model a prefix of its own")
        taken.add(name)
