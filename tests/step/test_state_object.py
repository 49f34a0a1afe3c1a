"""``opt.state = s`` keeps what ``opt.state`` gave, and ``__setstate__`` takes any part, as torch.optim's does."""

from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_optim as co

PAIRS = [(co.AdamW, torch.optim.AdamW), (co.SGD, torch.optim.SGD), (co.Adagrad, torch.optim.Adagrad)]
BUFFERS = {"AdamW": "exp_avg", "SGD": "momentum_buffer", "Adagrad": "sum"}


def _made(kind: Any, lowering: str | None) -> tuple[Any, Tensor]:
    param = torch.linspace(-1, 1, 12, dtype=torch.float64).requires_grad_()
    options = {"momentum": 0.9} if kind.__name__ == "SGD" else {}
    return kind([param], lr=0.1, **options, **({"lowering": lowering} if lowering else {})), param


def _step(optimizer: Any, param: Tensor, number: int) -> None:
    param.grad = torch.arange(12, dtype=torch.float64).sin() * number
    optimizer.step()


def _itself(optimizer: Any) -> None:
    optimizer.state = optimizer.state


def _swapped(optimizer: Any) -> None:
    held = optimizer.state
    optimizer.state = {} if isinstance(optimizer, co.CompiledOptimizer) else type(held)(dict)
    assert not optimizer.state
    optimizer.state = held


def _stepped_without(optimizer: Any) -> None:
    held, param = optimizer.state, optimizer.param_groups[0]["params"][0]
    optimizer.state = type(optimizer.state)() if isinstance(optimizer, co.CompiledOptimizer) else type(held)(dict)
    if isinstance(optimizer, (torch.optim.Adagrad, co.Adagrad)):
        optimizer.state[param] = {name: entry.clone() for name, entry in held[param].items()}
    _step(optimizer, param, 7)
    optimizer.state = held


def _state_alone(optimizer: Any) -> None:
    optimizer.__setstate__({"state": optimizer.state})


def _groups_alone(optimizer: Any) -> None:
    optimizer.__setstate__({"param_groups": [{**group, "lr": 0.3} for group in optimizer.param_groups]})


def _nothing(optimizer: Any) -> None:
    optimizer.__setstate__({})


def _both(optimizer: Any) -> None:
    given = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    optimizer.__setstate__(given)
    assert given.keys() == {"state", "param_groups"}


@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor", "eager"])
@pytest.mark.parametrize("change", [_itself, _swapped, _stepped_without, _state_alone, _groups_alone, _nothing, _both])
@pytest.mark.parametrize("kinds", PAIRS, ids=lambda kinds: kinds[0].__name__)
def test_the_state_that_was_given_back_is_the_same_object_and_steps_use_it(kinds: Any, change: Any, lowering: str) -> None:
    runs = [_made(kinds[0], lowering), _made(kinds[1], None)]
    for optimizer, param in runs:
        for number in range(1, 3):
            _step(optimizer, param, number)
        held, entries = optimizer.state, optimizer.state[param]
        change(optimizer)
        assert optimizer.state is held
        assert optimizer.state[param] is entries
        for number in range(3, 5):
            _step(optimizer, param, number)
        optimizer.state[param][BUFFERS[kinds[0].__name__]] = torch.full_like(param, 0.5)  # still noticed
        _step(optimizer, param, 5)
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=1e-12, atol=1e-12)
    assert runs[0][0].param_groups[0]["lr"] == runs[1][0].param_groups[0]["lr"]
