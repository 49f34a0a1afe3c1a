"""What users of torch.optim do with the numbers of groups, which are plain numbers: idioms of reading and of writing."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

Group = dict[str, Any]


def without_params(group: Group) -> Group:
    """What loggers get, and checkpoints that people write themselves."""
    return {key: value for key, value in group.items() if key != "params"}


ON_GROUP: dict[str, Callable[[Group], Any]] = {
    "get": lambda g: (g.get("lr"), g.get("momentum", 0.9), "lr" in g, "momentum" in g),
    "betas": lambda g: (g["betas"], g["betas"][0], g["betas"] == (0.9, 0.999)),
    "unpacked betas": lambda g: [1 - beta for beta in g["betas"]],
    "all values": without_params,
    "a plain dict": lambda g: without_params(dict(g)) == without_params({**g}) == without_params(g.copy()),
    "merged": lambda g: without_params(g | {"lr": 1.0}),
    "keys in order": list,
    "times and assign": lambda g: (g.__setitem__("lr", g["lr"] * 0.1), g["lr"]),
    "update": lambda g: (g.update({"eps": 1}, lr=0.5), g["lr"], g["eps"]),
    "or": lambda g: without_params(g.__ior__({"lr": 0.5, "betas": (0.5, 0.75)})),
    "setdefault": lambda g: (g.setdefault("lr", 7.0), g.setdefault("initial_lr", g["lr"]), g["initial_lr"]),
    "pop and assign": lambda g: (g.pop("lr"), g.update(lr=0.25), g["lr"]),
    "clear and update": lambda g: (saved := dict(g), g.clear(), g.update(saved)) and without_params(g),
    "floor": lambda g: (g.update(lr=max(g["lr"] * 1e-9, 1e-6)), g["lr"]),
    "an int": lambda g: (g.update(lr=1, weight_decay=0), g["lr"], g["weight_decay"]),
    "np.float64": lambda g: (g.update(lr=np.float64(0.3)), isinstance(g["lr"], float), float(g["lr"])),
    "np.float32": lambda g: (g.update(lr=np.float32(0.3)), float(g["lr"]), f"{g['lr']:.3f}"),
    "np.int64": lambda g: (g.update(lr=np.int64(1)), float(g["lr"]), str(g["lr"])),
    "a tensor of one element": lambda g: (g.update(lr=torch.tensor([0.3])), float(g["lr"]), f"{float(g['lr']):.3f}"),
    "new betas": lambda g: (g["betas"], g.update(betas=(0.5, *g["betas"][1:])), g["betas"]),
    "scaled betas": lambda g: (g.update(betas=tuple(b * 0.5 for b in g["betas"])), g["betas"]),
    "decay of a rate": lambda g: (g.update(weight_decay=g["lr"] * 0.1), g["weight_decay"]),
    "own entry": lambda g: (g.update(base_lr=g["lr"], note="own"), g.update(lr=0.5), g["base_lr"], g["note"]),
}


def _in_place(o: Optimizer) -> list[Any]:
    base = [group["lr"] for group in o.param_groups]
    o.param_groups[0]["lr"] *= 0.1
    o.param_groups[0]["lr"] += 1
    return [*base, o.param_groups[0]["lr"]]


def _warm_up(o: Optimizer) -> list[float]:
    seen, base = [], o.param_groups[0]["lr"]
    for t in range(4):
        o.param_groups[0]["lr"] = base * (t + 1) / 4
        o.step()
        seen.append(o.param_groups[0]["lr"])
    return seen


def _history(o: Optimizer) -> tuple[list[float], dict[str, Any]]:
    scheduler, seen = ExponentialLR(o, 0.5), []
    for _ in range(3):
        seen += [o.param_groups[0]["lr"], *scheduler.get_last_lr()]
        o.step()
        scheduler.step()
    return seen, {key: value for key, value in scheduler.state_dict().items() if key != "_step_count"}


def _one_cycle(o: Optimizer) -> Group:
    scheduler = OneCycleLR(o, 0.2, total_steps=7)
    for _ in range(4):
        o.step()
        scheduler.step()
    return without_params(o.param_groups[0])


def _ratio(o: Optimizer) -> list[float]:
    base, scheduler = o.param_groups[0]["lr"], LambdaLR(o, lambda t: 1 / (t + 1))
    o.step()
    scheduler.step()
    return [o.param_groups[0]["lr"] / base, base, scheduler.base_lrs[0]]


def _plateau(o: Optimizer) -> list[float]:
    scheduler, seen = ReduceLROnPlateau(o, patience=0, factor=0.1), []
    for _ in range(3):
        scheduler.step(1.0)
        seen.append(o.param_groups[0]["lr"])
    return seen


def _put_back(o: Optimizer) -> list[float]:
    best = copy.copy(o.param_groups[0]["lr"])
    for group in o.param_groups:
        group["lr"] = 0.0
    o.step()
    for group in o.param_groups:
        group["lr"] = best
    return [o.param_groups[0]["lr"], best]


def _added(o: Optimizer) -> list[float]:
    o.add_param_group({"params": [Parameter(torch.ones(2))], "lr": o.param_groups[0]["lr"] * 0.1})
    return [group["lr"] for group in o.param_groups]


def _another(o: Optimizer) -> list[float]:
    other = torch.optim.SGD([Parameter(torch.ones(2))], lr=o.param_groups[0]["lr"])
    other.param_groups[0]["lr"] *= 0.5
    return [o.param_groups[0]["lr"], other.param_groups[0]["lr"]]


def _resumed(o: Optimizer) -> Group:
    saved = o.state_dict()
    o.param_groups[0].update(lr=0.7, betas=(0.1, 0.2))
    o.load_state_dict(saved)
    return without_params(o.param_groups[0])


ON_OPTIMIZER: dict[str, Callable[[Optimizer], Any]] = {
    "*=": _in_place,
    "warm-up": _warm_up,
    "history": _history,
    "one cycle": _one_cycle,
    "ratio to the base": _ratio,
    "plateau": _plateau,
    "put back": _put_back,
    "group of a rate": _added,
    "another optimizer": _another,
    "resumed": _resumed,
    "state_dict": lambda o: without_params(o.state_dict()["param_groups"][0]),
    "defaults": lambda o: json.dumps(o.defaults, sort_keys=True),
    "deepcopy": lambda o: without_params(copy.deepcopy(o).param_groups[0]),
    "pickled": lambda o: without_params(pickle.loads(pickle.dumps(o)).param_groups[0]),
    "repr": repr,
    "class": lambda o: isinstance(o, torch.optim.AdamW),
    "entries before a step": lambda o: len(o.state),
}

IDIOMS: dict[str, Callable[[Optimizer], Any]] = {
    "read": lambda o: o.param_groups[0]["lr"],
    **{name: lambda o, f=f: f(o.param_groups[0]) for name, f in ON_GROUP.items()},
    **ON_OPTIMIZER,
}


def outcome(idiom: Callable[[Optimizer], Any], optimizer: Optimizer) -> Any:
    """What an idiom returns, with the types of everything in it, or the exception that it raises."""
    try:
        return _typed(idiom(optimizer))
    except Exception as error:
        return type(error)


def _typed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: _typed(v) for key, v in value.items()}
    return type(value), [_typed(v) for v in value] if isinstance(value, (tuple, list)) else value
