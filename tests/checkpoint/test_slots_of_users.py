"""What a user keeps in ``opt.state[p]`` under a name that some other optimizer gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catalog import registry, required

import compiled_optim as co
from compiled_optim.checkpoint.state_dict import _OPTIONS, known_names
from compiled_optim.rule.fields import Hyper, Static

WRAPPERS = {"k", "d", "max_lr", "lr", "t0", "decouple_lr", "decouple_wd", "decoupled_weight_decay", "cautious"}
"""Options that tell no class apart, or that wrappers and schedulers write."""


def _stepped(kind: Any) -> Any:
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = kind([("p", param)], **required(kind))
    param.grad = torch.ones_like(param).to_sparse(1) if kind._gradients == "sparse" else torch.ones_like(param)
    optimizer.step(lambda: torch.ones(()))
    return optimizer, param


@pytest.mark.quick
@pytest.mark.parametrize("kind", registry(), ids=lambda k: k.__name__)
def test_slots_with_the_names_of_other_classes_are_loaded(kind: type[co.CompiledOptimizer]) -> None:
    optimizer, param = _stepped(kind)
    names = sorted(known_names() - {*kind._state_names()})
    for i, name in enumerate(names):
        optimizer.state[param][name] = torch.full((3,), float(i))
    optimizer.param_groups[0] |= {"k": 3, "own_key": 2.0, "initial_lr": 0.5}  # as wrappers and schedulers write
    other, mine = _stepped(kind)
    report = other.load_state_dict(optimizer.state_dict())
    assert not any(report)
    for i, name in enumerate(names):
        assert other.state[mine][name].tolist() == [i] * 3, name


def test_the_options_that_tell_classes_apart_are_those_of_all() -> None:
    options = {f.name for kind in registry() for of_kind in (Hyper, Static) for f in kind._fields_of(of_kind)}
    lbfgs = {f.name for f in co.LBFGS._fields_of(Static)} - {"history_size"}  # one of them suffices
    assert options - WRAPPERS - lbfgs == {*_OPTIONS.split()}
