"""State in few bits that follows gradients which shrink beside others that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_optim as co


def _trained(steps: int, **options: Any) -> tuple[Tensor, co.AdamW]:
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = co.AdamW({"p": param}, lr=1e-4, weight_decay=0.0, **options)
    param.grad = torch.ones(4096)
    for step in range(steps):
        if step == 500:
            param.grad[::2] = 0
        optimizer.step()
    return param.detach()[::2], optimizer


@pytest.mark.parametrize("state_dtype", ["int8", torch.bfloat16], ids=str)
def test_weights_without_gradients_come_to_rest(state_dtype: Any) -> None:
    """Beside others that have gradients. A first moment that stayed would move them by about lr for ever."""
    wanted, _ = _trained(4000)
    found, _ = _trained(4000, state_dtype=state_dtype)
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=0)


@pytest.mark.parametrize("state_dtype", ["int8", torch.bfloat16, torch.float16], ids=str)
def test_second_moments_fall(state_dtype: Any) -> None:
    """Steps change them by a thousandth, which is less than what rounding to nearest would take back."""
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = co.AdamW({"p": param}, lr=0.0, state_dtype=state_dtype)
    generator = torch.Generator().manual_seed(0)
    exact, sizes = torch.zeros(4096), torch.ones(4096)
    for step in range(4000):
        sizes[::2] = 1 if step < 1000 else 0.1
        param.grad = torch.randn(4096, generator=generator) * sizes
        exact = 0.999 * exact + 0.001 * param.grad.square()
        optimizer.step()
    optimizer.param_groups[0]["state_dtype"] = torch.float32
    optimizer.zero_grad()
    optimizer.step()
    roots = (optimizer.state[param]["exp_avg_sq"] / exact).sqrt()
    assert roots[::2].median() == pytest.approx(1, abs=0.05)
    assert roots[1::2].median() == pytest.approx(1, abs=0.02)


def test_sums_keep_their_bits_unless_they_are_named() -> None:
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = co.Ranger({"p": param}, lr=0.1, state_dtype=torch.bfloat16)
    dtypes = {name: entry.dtype for name, entry in optimizer.state[param].items()}
    assert dtypes["exp_avg"] == torch.bfloat16
    assert dtypes["la_param"] == torch.float32
    with pytest.raises(ValueError, match="Adagrad has no state that so few bits hold well; choose it by name"):
        co.Adagrad({"p": param}, state_dtype=torch.bfloat16)
    optimizer = co.Adagrad({"p": param}, state_dtype={"sum": torch.bfloat16})
    assert optimizer.state[param]["sum"].dtype == torch.bfloat16


def test_excluded_parameters_have_full_state_without_a_choice_of_dtype() -> None:
    params = {name: torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16)) for name in ("kept", "other")}
    optimizer = co.AdamW(params, weights="kahan", exclude=["kept"])
    assert optimizer.state[params["kept"]]["exp_avg"].dtype == torch.float32
    assert optimizer.state[params["other"]]["exp_avg"].dtype == torch.bfloat16


def test_excluded_parameters_have_all_of_their_state_full() -> None:
    param = torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    optimizer = co.AdamW({"kept": param}, state_dtype={"exp_avg": "int8"}, exclude=["kept"])
    assert {optimizer.state[param][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}


def test_patterns_that_match_nothing_are_warnings() -> None:
    param = torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="exclude: the pattern 'lm_hed' matches no parameter"):
        optimizer = co.AdamW({"lm_head": param}, weights="kahan", exclude=["lm_hed|lm_head"])
    optimizer.param_groups[0]["weight_decay"] = 0.1  # and only once
    optimizer.step()


def test_a_centered_deviation_is_no_difference_of_codes() -> None:
    param = torch.nn.Parameter(torch.zeros(4096))
    with pytest.raises(ValueError, match="'int8' of square_avg does not go with centered=True"):
        co.RMSprop({"p": param}, centered=True, state_dtype="int8")
