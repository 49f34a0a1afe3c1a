"""What users of torch.optim do with a group's numbers: 106 idioms of reading and of writing."""

from __future__ import annotations

import bisect
import copy
import csv
import decimal
import fractions
import functools
import io
import itertools
import json
import math
import numbers
import pickle
import pprint
import statistics
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

Group = dict[str, Any]

X = np.array([1.0, 2.0])
T = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


def without_params(group: Group) -> Group:
    """What loggers get, and checkpoints that people write themselves."""
    return {key: value for key, value in group.items() if key != "params"}


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _in_csv(value: Any) -> str:
    file = io.StringIO()
    csv.writer(file).writerow([value, value])
    return file.getvalue()


def _kind(value: Any) -> str:
    match value:
        case float():
            return "float"
        case _:
            return "other"


ON_NUMBER: dict[str, Callable[[Any], Any]] = {
    "type": type,
    "isinstance": lambda x: (isinstance(x, float), isinstance(x, (int, float)), isinstance(x, Tensor)),
    "numbers.Number": lambda x: (isinstance(x, numbers.Number), isinstance(x, numbers.Real)),
    "is_tensor": torch.is_tensor,
    "match": _kind,
    "item if there is one": lambda x: x.item() if hasattr(x, "item") else x,
    "str": str,
    "repr": repr,
    "f-string": lambda x: f"{x} {x:.2e} {x:8.5f} {x!r} {x:g}",
    "percent": lambda x: "%s %.6f %g %r" % (x, x, x, x),  # noqa: UP031
    "format": lambda x: format(x, ".1%"),
    "join": lambda x: (",".join(map(str, [x, x])), pprint.pformat({"lr": [x]})),
    "csv": _in_csv,
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "round": lambda x: (round(x, 3), round(x)),
    "of one number": lambda x: (abs(x), -x, +x, math.floor(x), math.ceil(x), math.trunc(x)),
    "plus and minus": lambda x: (x + 1, 1.5 + x, x - 2, 2 - x),
    "times and over": lambda x: (x * 0.3, 3 * x, x / 3, 3 / x),
    "remainder": lambda x: (x // 0.01, x % 0.007, divmod(x, 0.007), 1 % x),
    "power": lambda x: (x**2, 2**x, pow(x, 0.5)),
    "with itself": lambda x: (x + x, x * x, x / x, x - x, x**x),
    "a local *=": lambda x: functools.reduce(lambda a, b: a * b, [x, 0.5, 0.5]),
    "order": lambda x: (x < 1, x <= 0.05, x > 1, x >= 1, 0 < x < 1),
    "equal": lambda x: (x == 0.05, x != 0.05, x == decimal.Decimal("0.5"), x == "x", x is None),
    "in a list": lambda x: (x in [1, 0.05], [1, 0.05].index(x)),
    "max and min": lambda x: (max(x * 0.5, 1e-6), min(x, 1.0), max([x, 0.01])),
    "sorted": lambda x: sorted([x, 0.01, 1]),
    "bisect": lambda x: bisect.bisect([0.01, 0.05, 1.0], x),
    "sum": lambda x: (sum([x, x]), math.fsum([x, x]), list(itertools.accumulate([x, x]))),
    "hash": hash,
    "key": lambda x: ({0.05: "hit"}.get(x), {x: "hit"}.get(0.05), len({x, x, 0.05})),
    "cached": lambda x: functools.lru_cache(lambda y: y)(x),
    "log10": lambda x: (math.log10(x), math.sqrt(x)),
    "isclose": lambda x: (math.isclose(x, 0.05), math.isnan(x), math.isfinite(x), math.copysign(x, -1)),
    "methods of float": lambda x: (x.is_integer(), x.as_integer_ratio(), x.hex()),
    "Fraction": lambda x: (fractions.Fraction(x), x * fractions.Fraction(1, 3)),
    "Decimal": decimal.Decimal,
    "mean": lambda x: statistics.mean([x, x * 3]),
    "median": lambda x: (statistics.median([x, 1.0, 2.0]), statistics.fmean([x, x * 3]), statistics.stdev([x, 1.0])),
    "struct": lambda x: struct.pack("d", x),
    "json": lambda x: (json.dumps(x), json.dumps({"rates": [x, x]})),
    "yaml": yaml.safe_dump,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: _saved({"lr": x})["lr"],
    "copy": lambda x: (copy.copy(x), copy.deepcopy(x)),
    "np.array": lambda x: (np.array([x, x]).tolist(), str(np.array([x, x]).dtype), np.asarray(x).shape),
    "numpy scalars": lambda x: (np.float64(x), np.float64(2) * x, x * np.float64(2)),
    "numpy operators": lambda x: ((X * x).tolist(), (x * X).tolist(), (x - X).tolist()),
    "numpy functions": lambda x: (float(np.log(x)), float(np.mean([x, x])), bool(np.isclose(x, 0.05))),
    "np.interp": lambda x: (float(np.interp(x, [0, 1], [0, 10])), np.linspace(x, 1, 3).tolist()),
    "series": lambda x: (str(pd.Series([x, x]).dtype), pd.Series([x, x]).mean()),
    "describe": lambda x: pd.DataFrame({"lr": [x, x * 2]}).describe().to_csv(),
    "frame": lambda x: pd.DataFrame([{"step": 1, "lr": x}]).to_json(),
    "torch.tensor": lambda x: [(t.dtype, t.item()) for t in (torch.tensor(x), torch.tensor([x]), torch.as_tensor(x))],
    "torch.full": lambda x: torch.full((2,), x).tolist(),
    "tensor operators": lambda x: ((T * x).tolist(), (x * T).tolist(), (x - T).tolist()),
    "keeps a dtype": lambda x: (torch.ones(2) * x).dtype,
    "alpha": lambda x: (torch.add(T, T, alpha=x).tolist(), torch.addcmul(T, T, T, value=x).tolist()),
    "where": lambda x: (torch.where(T > 0, x, T).tolist(), T.clamp(max=x).tolist()),
    "foreach": lambda x: torch._foreach_mul([T, T], x)[0].tolist(),
}

ON_GROUP: dict[str, Callable[[Group], Any]] = {
    "get": lambda g: (g.get("lr"), g.get("momentum", 0.9), "lr" in g, "momentum" in g),
    "betas": lambda g: (g["betas"], g["betas"][0], g["betas"] == (0.9, 0.999)),
    "unpacked betas": lambda g: [1 - beta for beta in g["betas"]],
    "all values": without_params,
    "types": lambda g: {key: type(value) for key, value in without_params(g).items()},
    "a plain dict": lambda g: without_params(dict(g)) == without_params({**g}) == without_params(g.copy()),
    "numbers of a group": lambda g: sorted(k for k, v in g.items() if isinstance(v, (int, float))),
    "json of a group": lambda g: json.dumps(without_params(g), sort_keys=True),
    "yaml of a group": lambda g: yaml.safe_dump(without_params(g)),
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
    **{name: lambda o, f=f: f(o.param_groups[0]["lr"]) for name, f in ON_NUMBER.items()},
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
