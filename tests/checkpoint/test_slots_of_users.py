"""What a user keeps in ``opt.state[p]`` under a name that some other optimizer gives."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from catalog import registry, required

import compiled_optim as co
from compiled_optim.checkpoint.state_dict import known_names


def _made(kind: Any) -> tuple[Any, torch.nn.Parameter]:
    param = torch.nn.Parameter(torch.linspace(-1, 1, 4).view(2, 2))
    return kind([("p", param)], **required(kind)), param


def _step(optimizer: Any, param: torch.nn.Parameter) -> None:
    grad = param.detach().cos()
    param.grad = grad.to_sparse(1) if optimizer._gradients == "sparse" else grad
    optimizer.step(lambda: torch.ones(()))


@pytest.mark.quick
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", registry(), ids=lambda k: k.__name__)
def test_slots_with_the_names_of_other_classes_are_loaded(kind: type[co.CompiledOptimizer], strict: bool) -> None:
    optimizer, param = _made(kind)
    _step(optimizer, param)
    names = sorted(known_names() - {*kind._state_names()})
    assert {"z", "d", "s", "exp_avg", "momentum_buffer"} & {*names}
    for i, name in enumerate(names):
        optimizer.state[param][name] = torch.full((3,), float(i))
    optimizer.param_groups[0] |= {"own_key": 2.0, "initial_lr": 0.5}
    resumed, copied = _made(kind)
    copied.data.copy_(param.detach())
    resumed.state[copied]["z_of_before"] = 1
    assert not any(resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()), strict=strict))
    for _ in range(2):
        for i, name in enumerate(names):
            assert resumed.state[copied][name].tolist() == [i] * 3, name
        assert "z_of_before" not in resumed.state[copied]
        assert str({**resumed.state[copied]}) == str({**optimizer.state[param]})
        _step(optimizer, param)
        _step(resumed, copied)
        assert torch.equal(copied, param)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (co.AdamW, co.SGD),
        (co.Rprop, co.SGD),
        (co.SGD, co.AdamW),
        (co.Muon, co.Adam),
        (co.Lion, co.AdamW),
        (co.AdamW, co.Lion),
    ],
)
def test_another_classes_checkpoint_is_refused_by_name(source: Any, target: Any, strict: bool) -> None:
    saving, param = _made(source)
    _step(saving, param)
    optimizer, other = _made(target)
    if strict:
        with pytest.raises(ValueError, match=r"the (checkpoint|optimizer) has no "):
            optimizer.load_state_dict(saving.state_dict())
    else:
        assert optimizer.load_state_dict(saving.state_dict(), strict=False).mismatched
        assert not optimizer.state[other].keys() - {*target._state_names()}


@pytest.mark.parametrize("kind", [co.SGD, co.AdamW, co.Lion, co.RMSprop], ids=lambda k: k.__name__)
def test_a_schedule_free_wrapper_is_resumed(kind: Any) -> None:
    """It keeps ``z`` in the state of the optimizer that it wraps, and numbers in its groups."""
    schedulefree = pytest.importorskip("schedulefree")

    def wrapped(optimizer: type[torch.optim.Optimizer]) -> tuple[torch.nn.Linear, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4, dtype=torch.float64)
        return model, schedulefree.ScheduleFreeWrapper(optimizer(model.parameters(), lr=0.05), momentum=0.9)

    def train(model: torch.nn.Linear, optimizer: Any) -> None:
        optimizer.train()
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 6, dtype=torch.float64)).square().mean().backward()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "nothing reads")  # the wrapper's own keys of a group
                optimizer.step()
        optimizer.eval()

    model, optimizer = wrapped(kind)
    train(model, optimizer)
    resumed, its_optimizer = wrapped(kind)
    resumed.load_state_dict(model.state_dict())
    assert not any(its_optimizer.base.load_state_dict(copy.deepcopy(optimizer.state_dict()), strict=True))
    for each in ((model, optimizer), (resumed, its_optimizer)):
        torch.manual_seed(1)
        train(*each)
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    if kind is co.SGD:
        reference = wrapped(torch.optim.SGD)
        train(*reference)
        torch.manual_seed(1)
        train(*reference)
        torch.testing.assert_close([*resumed.parameters()], [*reference[0].parameters()], rtol=1e-12, atol=0)
