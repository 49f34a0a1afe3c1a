"""State dicts made fit for files: of plain values only, with step counts of one dtype, in the forms that only files need.

:mod:`compiled_optim.checkpoint.forms` describes the forms. What cannot be converted is a ``ValueError`` that says where it
stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.forms import beside_parameters, check, group_names, with_others
from compiled_optim.checkpoint.others import is_lost_state, known_names

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
_MAX_DEPTH = 8

_OPTIMI_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("decouple_wd", "decouple_lr", "kahan_sum", "foreach", "triton", "gradient_release"), False),
    "max_lr": None,
}


def plain(value: Any, where: str = "the state dict", depth: int = _MAX_DEPTH) -> Any:
    """A copy of ``value`` that any reader takes: of dicts, lists, tuples, plain values and tensors outside of any graph.

    Raises:
        ValueError: it holds something else, or is nested more than ``depth`` levels deep.
    """
    if isinstance(value, Tensor):
        return _plain_tensor(value, where)
    if type(value) in _PLAIN:
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise ValueError(f"{where} is an integer of more than 64 bits")
        return value
    if depth == 0:
        raise ValueError(f"{where} is nested too deeply")
    if isinstance(value, Mapping):
        if foreign := next((key for key in value if type(key) not in (int, str)), None):
            raise ValueError(f"{where} has a key that is neither an integer nor a string but a {type(foreign).__name__}")
        return {key: plain(entry, f"{where}[{key!r}]", depth - 1) for key, entry in value.items()}
    if type(value) in (list, tuple, torch.Size):
        entries = [plain(entry, f"{where}[{i}]", depth - 1) for i, entry in enumerate(value)]
        return entries if type(value) is list else tuple(entries)
    raise ValueError(f"{where} is a {type(value).__name__}, which is neither a tensor nor a plain value")


def _plain_tensor(value: Tensor, where: str) -> Tensor:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.is_nested or value.layout != torch.strided or value.is_meta:
        raise ValueError(f"{where} is not a dense tensor with memory of its own")
    if value.dtype not in _DTYPES:
        raise ValueError(f"{where} is of {value.dtype}, which is not converted")
    if value.numel() * value.itemsize > value.untyped_storage().nbytes():
        raise ValueError(f"{where} has {value.numel()} elements, more than its memory holds")
    return value.detach()


def check_lossless(state_dict: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where state would be lost: it belongs to no parameter, or two parameters are called 1 and "1"."""
    params = {param for group in state_dict["param_groups"] for param in group["params"]}
    if len({type(param) for param in params}) > 1:
        raise ValueError("the groups list some parameters by name and others by number")
    known, apart = known_names(), beside_parameters(state_dict)
    if orphans := [key for key, value in apart.items() if is_lost_state(key, value, known)]:
        raise ValueError(f"the state of {min(orphans, key=str)!r} belongs to no parameter of a group")


def check_has_no_others(state_dict: Mapping[str, Any], form: str) -> None:
    """Raise ``ValueError`` where the state holds anything under the key of no parameter, for which ``form`` has no place."""
    if apart := beside_parameters(state_dict):
        raise ValueError(f"the state holds {min(apart, key=str)!r}, which is no parameter's and has no place in {form}")


def with_steps(state_dict: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``state_dict`` with every step count as a 0-dim tensor of ``dtype``; an error for a count that it cannot hold."""
    exact, apart = int(2 / torch.finfo(dtype).eps), beside_parameters(state_dict)
    state = {
        param: {
            key: torch.tensor(_count(value, f"the step of {param!r}", below=exact), dtype=dtype) if key == "step" else value
            for key, value in entries.items()
        }
        for param, entries in state_dict["state"].items()
        if param not in apart
    }
    return {**state_dict, "state": with_others(state, apart)}


def _number(value: Any, where: str, below: float = math.inf) -> float:
    """``value``, a number or a tensor with a single one, as a float that is at least 0 and less than ``below``."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(number, (int, float)) or not 0 <= number < below:
        raise ValueError(f"{where} must be a number in [0, {below}), got {value!r}")
    return float(number)


def _count(value: Any, where: str, below: int) -> float:
    number = _number(value, where, below)
    if not number.is_integer():
        raise ValueError(f"{where} must be a whole number, got {number}")
    return number


def indexed(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The indexed form of ``state_dict``, with ``param_names`` where there are names; shares its tensors.

    Raises:
        ValueError: it is no state dict.
    """
    check(state_dict)
    index: dict[Any, int] = {}
    for group in state_dict["param_groups"]:
        for param in group["params"]:
            index.setdefault(param, len(index))
    groups = []
    for group in state_dict["param_groups"]:
        names = group_names(group)
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        numbers = {"params": [index[p] for p in group["params"]]}
        groups.append(options | numbers | ({"param_names": list(names)} if names else {}))
    state = {index[key]: dict(entries) for key, entries in state_dict["state"].items() if key in index}
    return {**state_dict, "state": with_others(state, beside_parameters(state_dict)), "param_groups": groups}


def to_optimi(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``from_optimi``: an indexed state dict that optimi's optimizer of the same name loads.

    Raises:
        ValueError: an option or a state entry has no counterpart there.
    """
    state_dict = indexed(state_dict)
    check_has_no_others(state_dict, "optimi")
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for i, group in enumerate(state_dict["param_groups"]):
        where = f"param_groups[{i}]"
        entries = {p: state_dict["state"][p] for p in group["params"] if p in state_dict["state"]}
        _check_counterpart(group, entries.values(), where)
        step = _common_step(group, entries.values(), where)
        options, scales = _adam_options(group, step, where) if "betas" in group else (_sgd_options(group, where), {})
        shared = {k: group[k] for k in ("params", "lr", "weight_decay", "eps", "param_names") if k in group}
        count = {"setup": step > 0, "step": torch.tensor(int(step), dtype=torch.int32)}
        groups.append({**count, **_OPTIMI_DEFAULTS, **shared, **options})
        if step > 0:
            state |= {param: _optimi_entries(own, scales, f"the state of {param}") for param, own in entries.items()}
    return {"state": state, "param_groups": groups}


def _check_counterpart(group: Mapping[str, Any], entries: Iterable[Mapping[str, Any]], where: str) -> None:
    """Raise ``ValueError`` for an option that optimi does not know, and for one that it needs and the group lacks."""
    foreign = {k for own in entries for k in own} - {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    foreign |= {k for k in ("nesterov", "maximize", "amsgrad") if isinstance(group.get(k), Tensor) or group.get(k)}
    if foreign:
        listed = ", ".join(sorted(map(repr, foreign)))
        raise ValueError(f"{where} has {listed}, which has no counterpart in optimi")
    needed = ("lr", "weight_decay", *(("eps",) if "betas" in group else ("momentum", "dampening")))
    if missing := [k for k in needed if k not in group]:
        raise ValueError(f"{where} has no {', '.join(missing)}, which optimi needs")


def _common_step(group: Mapping[str, Any], entries: Iterable[Mapping[str, Any]], where: str) -> float:
    """The step count of a group. torch.optim.SGD counts no steps and optimi's SGD reads none: 1 says that there is state."""
    counted = [own.get("step") for own in entries if "step" in own or "betas" in group]
    steps = {_count(step, f"a step in {where}", below=2**31) for step in counted}
    if len(steps) > 1:
        raise ValueError(f"the parameters of {where} took different numbers of steps, {steps}; optimi counts per group")
    return steps.pop() if steps else float(any(entries))


def _adam_options(group: Mapping[str, Any], step: float, where: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The options of optimi's Adam, and the bias corrections by which it divides its averages."""
    betas = group["betas"]
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        raise ValueError(f"{where}['betas'] must be a pair of numbers, got {betas!r}")
    beta1, beta2 = (_number(beta, f"a beta of {where}", below=1) for beta in betas)
    options = {"beta1": beta1, "beta2": beta2, "decouple_wd": group.get("decoupled_weight_decay", False)}
    return options, {"exp_avg": 1 - beta1**step, "exp_avg_sq": 1 - beta2**step}


def _sgd_options(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    momentum, dampening = (_number(group[k], f"{where}[{k!r}]") for k in ("momentum", "dampening"))
    if dampening not in (0.0, momentum):
        raise ValueError(f"{where} has dampening {dampening}; optimi knows 0 and the momentum")
    return {"momentum": momentum, "dampening": dampening != 0, "torch_init": False}


def _optimi_entries(entries: Mapping[str, Any], scales: Mapping[str, float], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {"exp_avg": None, "kahan_comp": None}
    for key, value in entries.items():
        if key != "step":
            if not isinstance(value, Tensor) and value is not None:
                raise ValueError(f"{where} has a {key} that is no tensor, got {value!r}")
            scaled = value if value is None else value / scales.get(key, 1)
            result["exp_avg" if key == "momentum_buffer" else key] = scaled
    return result
