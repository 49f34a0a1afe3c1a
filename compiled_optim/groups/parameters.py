"""The forms in which users pass parameters, and which tensors an optimizer can update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.groups.names import advising, named_parameters, parameter_name
from compiled_optim.memory.sharding import is_sharded
from compiled_optim.rule.declared import Declared


def as_groups(params: Any) -> list[dict[str, Any]]:
    """The constructor's ``params`` as a list of new group dicts; an error if they are a tensor, or none."""
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
    """The names, if any, and the tensors in one group's ``params``; an error for a set, and where only some have names."""
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


def hand_over(key: str, value: Any, groups: list[dict[str, Any]]) -> None:
    """Give a hyperparameter that the constructor got as a tensor to all groups without a value for it, to adopt."""
    for group in groups:
        group.setdefault(key, value)


@advising()
def check_params(
    optimizer: type[Declared], group: Mapping[str, Any], index: int, others: Sequence[Mapping[str, Any]]
) -> None:
    """Raise an error unless ``optimizer`` takes ``group``, which comes at ``index``, after all ``others``.

    It takes tensors of certain kinds, none of them in two groups; all groups have names, or none.
    """
    elsewhere = {id(param): name for name, param in named_parameters(others)}
    here: dict[int, str] = {}
    for j, param in enumerate(group["params"]):
        name = parameter_name(group, index, j)
        _check_kind(optimizer, param, name, differentiable=group.get("differentiable", False))
        if (other := elsewhere.get(id(param))) is not None:
            raise ValueError(f"some parameters appear in more than one parameter group: '{name}' is also '{other}'")
        if (other := here.get(id(param))) is not None:
            raise ValueError(f"the optimizer got a parameter group with duplicate parameters: '{name}' is also '{other}'")
        here[id(param)] = name
    if any(("param_names" in group) != ("param_names" in other_group) for other_group in others):
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
    is_elementwise = optimizer.gradients == "dense" and optimizer.granularity == "element"
    if not is_elementwise and param.is_complex():
        raise ValueError(f"{optimizer.__name__} does not support complex parameters; '{name}' is one")
    if optimizer.gradients == "sparse" and is_sharded(param):
        raise ValueError(
            f"{optimizer.__name__} does not support DTensors; '{name}' is one; use an optimizer that takes dense gradients"
        )
    if optimizer.granularity == "matrix" and param.dim() != 2:
        raise ValueError(
            f"{optimizer.__name__} only supports 2D parameters whereas we found a parameter with size: "
            f"{param.shape} ('{name}'); give the others to an elementwise optimizer"
        )
    if differentiable and is_sharded(param):
        raise ValueError(f"differentiable=True does not work with DTensors; '{name}' is one")
    if not differentiable and not (param.is_leaf or param.retains_grad):
        raise ValueError(f"can't optimize a non-leaf Tensor: '{name}'")
