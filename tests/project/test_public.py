"""What users meet on an optimizer: torch.optim's names, and as few others as there are reasons for."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import subprocess
import sys
import typing
from typing import Any

import pytest
import torch
from catalog import COMBINED, registry, required
from torch import nn

import compiled_optim as co

READ = "what users read and write between steps, as README.md says"
SET = "what torch's GradScaler sets and deletes"
DECLARED = "what the body of a class declares, for whoever writes an optimizer"

BEYOND_TORCH = {
    "changes": READ,
    "found_inf": SET,
    "grad_norm": READ,
    "grad_scale": SET,
    "hyperparameter": READ,
    "hyperparameters": READ,
    "max_grad_norm": READ,
    "optimizer_accumulation": READ,
    "schedule": READ,
    "skip_nonfinite": READ,
    "skipped_steps": READ,
    "check": DECLARED,
    "coefficients": DECLARED,
    "update": DECLARED,
    "track_changes": READ,
    "watch_health": READ,
}
"""The public attributes that torch.optim's optimizers lack, and why they are there."""


def _public(optimizer: torch.optim.Optimizer) -> set[str]:
    return {name for name in dir(optimizer) if not name.startswith("_")}


def _made(kind: type[co.CompiledOptimizer]) -> co.CompiledOptimizer:
    return kind([nn.Parameter(torch.ones(2, 2))], **required(kind))


def test_every_optimizer_is_exported() -> None:
    """One whose file is there and that is not imported, or not in ``__all__``, would be in no test and no table."""
    modules = [m.name for m in pkgutil.walk_packages(co.optimizers.__path__, "compiled_optim.optimizers.")]
    defined = {
        kind.__name__
        for name in modules
        if name != "compiled_optim.optimizers.mup"  # whose optimizers are exported as co.mup's
        for kind in vars(importlib.import_module(name)).values()
        if isinstance(kind, type) and issubclass(kind, co.CompiledOptimizer) and kind.__module__ == name
    }
    assert defined
    assert defined == {kind.__name__ for kind in (*registry(), *COMBINED)}
    imported = {n for n, v in vars(co).items() if isinstance(v, type) and issubclass(v, co.CompiledOptimizer)}
    assert imported <= {*co.__all__}


def test_optimizers_and_reports_are_imported_when_they_are_asked_for() -> None:
    """Each optimizer is made in milliseconds, of which importing the package would take one for every optimizer."""
    code = (
        "import sys, compiled_optim as co\n"
        "def made(): return {n.split('.')[2] for n in sys.modules if n.startswith('compiled_optim.optimizers.')}\n"
        "assert made() == set(), made()\n"
        "assert not [name for name in sys.modules if name.startswith('compiled_optim.reports')]\n"
        "assert {*co.__all__} <= {*dir(co)} and not hasattr(co, 'lbfg')\n"
        "co.LBFGS, co.AdamWScheduleFree, co.health\n"
        "assert made() == {'lbfgs', 'adamw_schedule_free'}, made()\n"
        "names = {}; exec('from compiled_optim import *', names)\n"
        "assert {*co.__all__} <= {*names}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_module_has_a_public_name() -> None:
    """Its import would put the module in the name's stead."""
    assert {module.name for module in pkgutil.iter_modules(co.__path__)} & {*co.__all__} == set()


def test_nothing_without_a_reason() -> None:
    ours = _public(_made(co.AdamW))
    theirs = _public(torch.optim.AdamW([nn.Parameter(torch.ones(2, 2))]))
    assert theirs <= ours
    assert ours - theirs == set(BEYOND_TORCH)


@pytest.mark.parametrize("kind", registry(), ids=lambda c: c.__name__)
def test_no_optimizer_has_more(kind: type[co.CompiledOptimizer]) -> None:
    more = {"reduce", "adapt", "axes"}  # which a rule may have
    more |= {"eval", "train"} if kind._views else set()
    more |= {*dir(getattr(torch.optim, kind.__name__, object))}  # such as Adagrad's share_memory()
    assert _public(_made(kind)) <= {*_public(_made(co.AdamW)), *more}


def test_nothing_appears_with_use() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = co.AdamW([param], max_grad_norm=1.0)
    before = _public(optimizer)
    param.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    co.compile_report(optimizer)
    assert _public(optimizer) == before


@pytest.mark.parametrize("optimizer", [*registry(), *COMBINED], ids=lambda c: c.__name__)
def test_constructors_tell_names_and_types(optimizer: type[co.CompiledOptimizer]) -> None:
    """To whoever inspects them, such as command lines that are made from signatures."""
    of_class, of_constructor = inspect.signature(optimizer), inspect.signature(optimizer.__init__)
    assert [*of_constructor.parameters] == ["self", *of_class.parameters]
    assert typing.get_type_hints(optimizer.__init__).keys() == {*of_class.parameters, "return"}
    assert all(p.annotation is not p.empty for p in of_class.parameters.values())
    assert of_class.parameters["lr"].annotation == float | torch.Tensor
    assert of_class.parameters["max_grad_norm"].annotation == float | torch.Tensor | None


def test_a_constructor_of_ones_own() -> None:
    class Mine(co.AdamW):
        def __init__(self, params: Any, decay: float) -> None:
            super().__init__(params, weight_decay=decay)

    assert Mine([torch.ones(2)], 0.5).param_groups[0]["weight_decay"] == 0.5
    assert [*inspect.signature(Mine.__init__).parameters] == ["self", "params", "decay"]


def test_the_version_is_that_of_the_installation() -> None:
    assert co.__version__ == importlib.metadata.version("compiled_optim")
