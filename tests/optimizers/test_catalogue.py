"""Optimizers by name: what is listed, described and made follows from the classes."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import optimi
import pytest
import torch
from catalog import COMBINED, registry, required
from torch import nn

import compiled_optim as co

KINDS = [*registry(), *COMBINED]


def _spelled(kind: type) -> str:
    return re.sub(r"[_.]", "", kind.__name__.lower())


def test_every_optimizer_is_listed() -> None:
    names = co.list_optimizers()
    assert names == sorted(names)
    listed = {name.replace("_", "") for name in names}
    assert listed == {*map(_spelled, KINDS), "mup.adam", "mup.adamw", "mup.sgd"}


def test_patterns_list_some() -> None:
    assert co.list_optimizers("*ADAM") == ["adam", "mup.adam", "nadam", "radam", "sparse_adam"]
    assert co.list_optimizers("lion") == ["lion"]
    assert co.list_optimizers("AdamWSchedule*") == co.list_optimizers("adamw_schedule*") == ["adamw_schedule_free"]
    assert co.list_optimizers("MuonAdamW") == ["muon_adamw"]
    assert co.list_optimizers("nothing") == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__name__)
def test_info_is_what_the_class_declares(kind: type[co.CompiledOptimizer]) -> None:
    info = co.optimizer_info(kind.__name__)
    assert info.cls is kind
    assert info.name in co.list_optimizers()
    assert info.summary == inspect.getdoc(kind).splitlines()[0]  # type: ignore[union-attr]
    signature = inspect.signature(kind).parameters
    assert [(a.name, a.default) for a in info.arguments] == [(n, p.default) for n, p in signature.items() if n != "params"]
    assert [a.name for a in info.arguments if not a.help or "\n" in a.help or a.help.endswith(":")] == []
    torchs = {f"torch.optim.{kind.__name__}"} if hasattr(torch.optim, kind.__name__) else set()
    optimis = {f"optimi.{kind.__name__}"} if hasattr(optimi, kind.__name__) else set()
    assert {*info.counterparts} == torchs | optimis


def test_info_tells_papers_and_kinds() -> None:
    assert co.optimizer_info("ranger").sources == ("arXiv:1908.03265", "arXiv:1907.08610")
    assert co.optimizer_info("asgd").sources == ("doi:10.1137/0330046",)
    kinds = {name: co.optimizer_info(name).kind for name in ("lion", "adafactor", "muon", "sparse_adam", "lbfgs")}
    assert kinds == {"lion": "element", "adafactor": "tensor", "muon": "matrix", "sparse_adam": "sparse", "lbfgs": "closure"}
    assert co.optimizer_info("mup.sgd").counterparts == ()


def _options(precision: str) -> tuple[torch.dtype, dict[str, str]]:
    dtype, *options = precision.split(", ")
    return getattr(torch, dtype), dict(option.split("=") for option in options)


@pytest.mark.parametrize("kind", KINDS, ids=lambda c: c.__name__)
def test_bytes_are_those_that_an_optimizer_takes(kind: type[co.CompiledOptimizer]) -> None:
    told = co.optimizer_info(kind.__name__).bytes_per_parameter
    assert bool(told) == (kind is not co.LBFGS)
    for precision in [*told][:2] + [*told][-1:]:
        dtype, options = _options(precision)
        param = nn.Parameter(torch.zeros(1024, 1024, dtype=dtype))
        optimizer = kind({"weight": param}, lowering="eager", **options, **required(kind))
        report = co.memory_report(optimizer)
        held = report.weights * 2 + sum(report.state.values())
        assert told[precision] == pytest.approx(held / param.numel(), abs=1e-4), precision
    assert {name for name in told if "int8" in name} == set() or told["bfloat16, weights=split8, state_dtype=int8"] < 16


@pytest.mark.parametrize("name", ["AdamW", "adamw", "ADAMW", "adam_w", "adam-w"])
def test_names_in_any_spelling(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    optimizer = co.create(name, model, lr=0.25, weight_decay=0.5)
    assert type(optimizer) is co.AdamW
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.bias"]
    assert optimizer.state_dict()["aliases"] == {"1.weight": "0.weight"}


@pytest.mark.parametrize("name", ["mup.adam", "mup.Adam", "MUP.ADAM"])
def test_names_with_a_dot(name: str) -> None:
    made = co.create(name, [nn.Parameter(torch.ones(2))], allow_non_unit_scaling_params=True)
    assert type(made) is co.mup.Adam


def test_what_the_class_takes_is_taken() -> None:
    param = nn.Parameter(torch.ones(2))
    for params in ([param], [("w", param)], {"w": param}, [{"params": [param], "lr": 1.0}]):
        assert co.create("sgd", params, momentum=0.5).param_groups[0]["momentum"] == 0.5
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    groups = co.create("muon_adamw", model).param_groups
    assert [group["param_names"] for group in groups] == [["1.weight"], ["0.weight", "1.bias"]]


def test_a_pattern_is_a_string() -> None:
    with pytest.raises(TypeError, match="pattern of names of optimizers must be a string, got None"):
        co.list_optimizers(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("adamv", ValueError, "'adamv'; did you mean .*adamw"),
        ("torch.optim.AdamV", ValueError, "'torch.optim.AdamV'; did you mean .*adamw"),
        ("mup.sdg", ValueError, "did you mean mup.sgd"),
        ("schedulefree", ValueError, "did you mean adamw_schedule_free"),
        ("mup", ValueError, "did you mean mup.adam or mup.adamw or mup.sgd"),
        ("*adam*", ValueError, r"no optimizer is called '\*adam\*'"),
        ("newton_schulz", ValueError, "co.list_optimizers"),
        ("Xyzzy", ValueError, "co.list_optimizers"),
        (co.AdamW, TypeError, "must be a string"),
    ],
)
def test_other_names(name: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        co.create(name, [nn.Parameter(torch.ones(2))])
    with pytest.raises(error, match=said):
        co.optimizer_info(name)


def test_options_are_checked_by_the_class() -> None:
    with pytest.raises(TypeError, match=r"learning_rate.*did you mean lr"):
        co.create("adamw", [nn.Parameter(torch.ones(2))], learning_rate=1)


def test_a_name_imports_one_file() -> None:
    code = (
        "import sys, torch, compiled_optim as co\n"
        "co.create('lion', [torch.nn.Parameter(torch.ones(2))], lr=1)\n"
        "assert [n for n in sys.modules if n.startswith('compiled_optim.optimizers.')] == ['compiled_optim.optimizers.lion']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
