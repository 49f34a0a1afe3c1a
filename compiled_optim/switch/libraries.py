"""The optimizers of other libraries in this package's terms: the class with their rule, their numbers and their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from compiled_optim.checkpoint.optimi import from_optimi
from compiled_optim.groups.parameters import parameter_name
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule.storage import INT8, MINIMUM
from compiled_optim.switch.catalogue import named

Kind: TypeAlias = type[CompiledOptimizer]
Packed: TypeAlias = dict[str, Any]
"""An indexed state dict of an optimizer. A last group without parameters has the constructor's values."""


def _of_optimi(optimizer: Any, source: type[Optimizer], packed: Packed) -> tuple[Kind, Packed]:
    if optimizer.defaults["gradient_release"]:
        raise ValueError("gradient_release=True: hooks in the backward would go on calling the old optimizer")
    if optimizer.optimizer_accumulation:
        raise ValueError("optimizer_accumulation=True: a step of several micro-batches has not ended")
    kind = named(source.__name__)[1]
    translated = from_optimi(packed, kind._declaration)
    for group, old in zip(translated["param_groups"], packed["param_groups"], strict=True):
        group["kahan_sum"] = old["kahan_sum"]
    return kind, translated


def _of_fused_adam(optimizer: Any, source: type[Optimizer], packed: Packed) -> tuple[Kind, Packed]:
    """Translate the layout of apex: steps are counted per group, and bias corrections are an option."""
    if (decays_weights := getattr(optimizer, "adam_w_mode", None)) is None:
        raise ValueError("it has no adam_w_mode, as apex's has, which says what weight_decay means")
    state = dict(packed["state"])
    for index, group in enumerate(packed["param_groups"]):
        if not group.pop("bias_correction", True):
            raise ValueError(f"param_groups[{index}] has bias_correction=False, which has no counterpart")
        step = group.pop("step", 0)
        state |= {key: {"step": step, **state[key]} for key in group["params"] if state.get(key)}
    has_masters = any(getattr(optimizer, name, False) for name in ("master_weights", "use_master"))
    if has_masters and not any("master_param" in entries for entries in state.values()):
        raise ValueError("its master weights are not in its state as master_param")
    return named("adamw" if decays_weights else "adam")[1], {**packed, "state": state}


_BITSANDBYTES: dict[str, tuple[str, tuple[str, ...], Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "adam": ("adamw", ("exp_avg", "exp_avg_sq"), lambda group: {"betas": tuple(group["betas"])[:2], "eps": group["eps"]}),
    "lion": ("lion", ("exp_avg",), lambda group: {"betas": tuple(group["betas"])}),
    "momentum": ("sgd", ("momentum_buffer",), lambda group: {"momentum": group["betas"][0]}),
    "rmsprop": ("rmsprop", ("square_avg",), lambda group: {"alpha": group["betas"][0], "eps": group["eps"]}),
    "adagrad": ("adagrad", ("sum",), lambda group: {"eps": group["eps"]}),
}
"""By bitsandbytes's name of a kernel: the optimizer with this rule, the names of ``state1`` and ``state2``, and its numbers.

The kernel of its two optimizers with ``betas`` and ``eps`` has decoupled weight decay. No kernel reads
``dampening``, ``nesterov``, or a ``momentum`` beside ``alpha``: such arguments of its classes have no effect.
"""
_BLOCK = 256  # elements with one scale


def _of_bitsandbytes(optimizer: Any, source: type[Optimizer], packed: Packed) -> tuple[Kind, Packed]:
    if (rule := optimizer.optimizer_name) not in _BITSANDBYTES:
        raise ValueError(f"optimizer_name={rule!r} has no counterpart; {', '.join(_BITSANDBYTES)} have one")
    name, entries, numbers = _BITSANDBYTES[rule]
    for field, plain in {"max_unorm": 0.0, "skip_zeros": False, "percentile_clipping": 100}.items():
        if (value := getattr(optimizer.args, field, plain)) != plain:
            raise ValueError(f"{field}={value!r} has no counterpart")
    kind, foreign, groups, state = named(name)[1], {*optimizer.defaults}, [], dict(packed["state"])
    fields = {buffer.name: buffer for buffer in kind._declaration.buffers}
    for index, group in enumerate(packed["param_groups"]):
        shared = {key: value for key, value in group.items() if key not in foreign or key in ("lr", "weight_decay")}
        groups.append({**shared, **numbers(group)})
        sizes = []
        for i, key in enumerate(group["params"]):
            where = f"'{parameter_name(group, index, i)}'"
            param, overrides = optimizer.param_groups[index]["params"][i], optimizer.mng
            override = {**overrides.index2config.get((index, i), {}), **overrides.pid2config.get(id(param), {})}
            if chosen := [field for field in override if field not in ("optim_bits", "min_8bit_size")]:
                raise ValueError(f"{chosen[0]}={override[chosen[0]]!r} for {where} alone has no counterpart")
            if old := state.get(key):
                state[key] = {"step": old["step"]} | {
                    entry: _decoded(old, number, where) for number, entry in enumerate(entries, 1)
                }
                sizes.append((old["state1"].numel(), old["state1"].dtype == torch.uint8))
        are_coded = {is_coded for size, is_coded in sizes if size >= MINIMUM}
        if are_coded == {True} and all(fields[entry].int8 for entry in entries):
            groups[-1]["state_dtype"] = INT8
    return kind, {"state": state, "param_groups": groups}


def _decoded(entries: Mapping[str, Any], number: int, where: str) -> Tensor:
    """Return ``state1`` or ``state2`` of a parameter, which is called ``where``, in floating point."""
    stored: Tensor = entries[f"state{number}"]
    if stored.dtype != torch.uint8:
        return stored
    if f"absmax{number}" not in entries or not stored.is_contiguous():
        raise ValueError(f"state{number} of {where} is not in contiguous blocks with a scale each, an absmax{number}")
    table, scales = entries[f"qmap{number}"], entries[f"absmax{number}"]
    scales = scales.repeat_interleave(_BLOCK)[: stored.numel()]
    decoded: Tensor = table[stored.reshape(-1).int()] * scales
    return decoded.view_as(stored)


LIBRARIES: dict[str, Callable[[Any, type[Optimizer], Packed], tuple[Kind, Packed]]] = {
    "torch.optim": lambda optimizer, source, packed: (named(source.__name__)[1], packed),
    "optimi": _of_optimi,
    "bitsandbytes.optim": _of_bitsandbytes,
    "FusedAdam": _of_fused_adam,
}
"""The functions that translate an optimizer, by the package of its class or by the name of the class."""
