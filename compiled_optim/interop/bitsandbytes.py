"""bitsandbytes: its optimizers and their state dicts, whose codes of 8 bits become float32.

A parameter has ``state1`` and ``state2``. A code is an index of a table ``qmap``, and each 256 elements have an ``absmax``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from compiled_optim.catalogue import named
from compiled_optim.checkpoint.read import Checkpoint
from compiled_optim.groups.parameters import parameter_name
from compiled_optim.interop.forms import by_parameter, count, group_for, in_float32, indexed, scaled_blocks
from compiled_optim.interop.replace_files import Keep, in_memory
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule.storage import INT8, MINIMUM

WRAPPER = "__bnb_optimizer_quant_state__"
"""The key under which bitsandbytes hides a parameter's tensors from FSDP."""


class _Counterpart(NamedTuple):
    """A kernel of bitsandbytes: the optimizer here, its names of ``state1`` and ``state2``, and its options of a group."""

    optimizer: str
    averages: tuple[str, ...]
    options: Callable[[Mapping[str, Any]], dict[str, Any]]


_RULES = {
    "adam": _Counterpart(
        "adamw",
        ("exp_avg", "exp_avg_sq"),
        lambda group: {"betas": tuple(group["betas"])[:2], "eps": group["eps"], "decoupled_weight_decay": True},
    ),
    "lion": _Counterpart("lion", ("exp_avg",), lambda group: {"betas": tuple(group["betas"])}),
    "momentum": _Counterpart(
        "sgd",
        ("momentum_buffer",),
        lambda group: {"momentum": group["betas"][0], "dampening": 0.0, "nesterov": False},
    ),
    "rmsprop": _Counterpart("rmsprop", ("square_avg",), lambda group: {"alpha": group["betas"][0], "eps": group["eps"]}),
    "adagrad": _Counterpart("adagrad", ("sum",), lambda group: {"eps": group["eps"]}),
}
"""The rules by bitsandbytes's name of the kernel.

The kernel of Adam and AdamW has decoupled weight decay. No kernel reads ``dampening``, ``nesterov``, or a ``momentum``
beside ``alpha``: such arguments of its classes have no effect.
"""

_NUMBERS = {"adam": ("betas", "eps"), "lion": ("betas",), "momentum": ("momentum",)}
"""The numbers of a group here, beside ``lr`` and ``weight_decay``, by the rules that a group there tells."""

_EXTRA = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}  # of groups of optimizers with two averages
_BLOCK = 256  # elements with one scale


def matches(state_dict: Mapping[str, Any]) -> bool:
    """Return whether an optimizer of bitsandbytes saved ``state_dict``."""
    return any(isinstance(v, Mapping) and (WRAPPER in v or "state1" in v) for v in state_dict["state"].values())


def decode(state_dict: Mapping[str, Any], keep: Keep, *, lossy: bool) -> dict[str, Any]:
    """Convert the state dict of Adam, AdamW, Lion or SGD. The files of other optimizers do not tell which one saved them."""
    return _decoded(state_dict, keep, _rule)


def from_optimizer(
    optimizer: Any, source: type[Optimizer], packed: dict[str, Any]
) -> tuple[type[CompiledOptimizer], dict[str, Any]]:
    """Return the class that continues ``optimizer``, and its state dict ``packed``, translated.

    Raises:
        ValueError: a rule or an option has no counterpart here.
    """
    if (name := optimizer.optimizer_name) not in _RULES:
        raise ValueError(f"optimizer_name={name!r} has no counterpart; {', '.join(_RULES)} have one")
    for field, plain in {"max_unorm": 0.0, "skip_zeros": False, "percentile_clipping": 100}.items():
        if (value := getattr(optimizer.args, field, plain)) != plain:
            raise ValueError(f"{field}={value!r} has no counterpart")
    rule, manager = _RULES[name], optimizer.mng
    kind = named(rule.optimizer)[1]
    buffers = {buffer.name: buffer for buffer in kind._declaration.buffers}
    result = _decoded(packed, in_memory, lambda group, where: rule)
    for index, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            override = {**manager.index2config.get((index, i), {}), **manager.pid2config.get(id(param), {})}
            if chosen := [field for field in override if field not in ("optim_bits", "min_8bit_size")]:
                where = f"'{parameter_name(group, index, i)}'"
                raise ValueError(f"{chosen[0]}={override[chosen[0]]!r} for {where} alone has no counterpart")
        states = [state["state1"] for param in group["params"] if (state := optimizer.state.get(param))]
        are_coded = {state.dtype == torch.uint8 for state in states if state.numel() >= MINIMUM}
        if are_coded == {True} and all(buffers[name].int8 for name in rule.averages):
            result["param_groups"][index]["state_dtype"] = INT8
    return kind, result


def _rule(group: Mapping[str, Any], where: str) -> _Counterpart:
    """Return the rule that a saved group is of."""
    betas, eps = group.get("betas"), group.get("eps")
    if isinstance(betas, (list, tuple)) and len(betas) == 2:
        if group.keys() >= _EXTRA.keys():
            return _RULES["adam"]
        if not eps and (betas[0] or betas[1]):
            return _RULES["lion" if betas[1] else "momentum"]
    raise ValueError(f"{where} has betas={betas} and eps={eps}, unlike bitsandbytes' Adam, AdamW, Lion and SGD")


def _decoded(
    state_dict: Mapping[str, Any], keep: Keep, rule_of: Callable[[Mapping[str, Any], str], _Counterpart]
) -> dict[str, Any]:
    def options(group: Mapping[str, Any], where: str) -> dict[str, Any]:
        others = {key: value for key, value in group.items() if key not in ("betas", "eps", *_EXTRA)}
        return others | rule_of(group, where).options(group)

    def entries(saved: Mapping[str, Any], group: Mapping[str, Any], where: str) -> dict[str, Any]:
        return _decoded_entries(keep, rule_of(group, where), saved, where)

    return by_parameter(state_dict, options, entries)


def _decoded_entries(keep: Keep, rule: _Counterpart, entries: Mapping[str, Any], where: str) -> dict[str, Any]:
    saved = {**entries, **entries.get(WRAPPER, {})}
    result = {"step": saved.get("step")}
    known = {"step", WRAPPER}
    for i, name in enumerate(rule.averages, 1):
        codes, table, scales = (saved.get(f"{kind}{i}") for kind in ("state", "qmap", "absmax"))
        known |= {f"state{i}", f"qmap{i}", f"absmax{i}"}
        if not isinstance(codes, Tensor):
            raise ValueError(f"{where} has no state{i}")
        if codes.dtype == torch.uint8:
            if not isinstance(table, Tensor) or not isinstance(scales, Tensor) or table.shape != (256,):
                raise ValueError(f"{where} has codes of 8 bits without a qmap{i} of 256 numbers and an absmax{i}")
            if not codes.is_contiguous():
                raise ValueError(f"{where} has a state{i} that is not in contiguous blocks with a scale each")
            values = torch.index_select(table.float(), 0, codes.flatten().int())
            codes = keep(scaled_blocks(values, scales, _BLOCK, f"absmax{i} in {where}").view(codes.shape))
        result[name] = codes
    if others := sorted(str(key) for key in saved if key not in known):
        raise ValueError(f"{where} has {', '.join(others)}, which no optimizer here has")
    return result


def encode(state_dict: Mapping[str, Any], keep: Keep) -> dict[str, Any]:
    """Convert a state dict of Adam, AdamW, Lion or SGD to bitsandbytes', indexed, in 32 bits."""
    Checkpoint.of(state_dict).refuse_foreign("bitsandbytes")
    content = indexed(state_dict)
    states = [content["state"].get(param, {}) for group in content["param_groups"] for param in group["params"]]
    averages = max((tuple(sorted({*entries} - {"step"})) for entries in states), default=())
    name = next((name for name in _NUMBERS if _RULES[name].averages == averages), None)
    if name is None:
        raise ValueError(f"bitsandbytes has no optimizer with the state {', '.join(map(str, averages)) or 'of none'}")
    result = by_parameter(content, partial(_encoded_options, name), partial(_encoded_entries, keep, averages))
    return {"state": result["state"], "param_groups": result["param_groups"]}


def _encoded_options(name: str, group: Mapping[str, Any], where: str) -> dict[str, Any]:
    ignored = ("decoupled_weight_decay",) if name == "adam" else ()
    options = group_for(group, ("lr", "weight_decay", *_NUMBERS[name]), where, "bitsandbytes", *ignored)
    if name == "adam" and group["weight_decay"] and not group.get("decoupled_weight_decay"):
        decoupling = f"decoupled_weight_decay={group.get('decoupled_weight_decay', 'unknown')}"
        raise ValueError(f"{where} has weight_decay and {decoupling}, but bitsandbytes' Adam always decouples it")
    if name == "adam":
        return {**options, **_EXTRA}
    return {**options, "betas": (options.pop("momentum"), 0.0) if name == "momentum" else options["betas"], "eps": 0.0}


def _encoded_entries(
    keep: Keep, averages: tuple[str, ...], entries: Mapping[str, Any], group: Mapping[str, Any], where: str
) -> dict[str, Any]:
    if {*entries} - {"step"} != {*averages}:
        raise ValueError(f"{where} has {', '.join(sorted(map(str, entries)))} instead of {', '.join(averages)}")
    form = "bitsandbytes"
    states = {f"state{i}": in_float32(entries[n], f"{n} in {where}", form, keep) for i, n in enumerate(averages, 1)}
    return {"step": int(count(entries.get("step", 1), f"the step in {where}", 2**31)), WRAPPER: states}
