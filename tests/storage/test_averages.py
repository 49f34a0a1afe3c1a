"""State in few bits that follows gradients which shrink beside others that do not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from catalog import LOWERINGS
from torch import Tensor

import compiled_optim as co
from compiled_optim.rule import formats, storage

PERIODS = (8, 21, 55, 233)  # Fibonacci numbers, at which multiples of the golden ratio come near to whole numbers


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
def test_second_moments_fall(state_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps change them by a thousandth, which is less than what rounding to nearest would take back."""
    monkeypatch.setattr(storage, "MINIMUM", 256)  # of many tensors, since all elements of one are rounded alike
    params = [torch.nn.Parameter(torch.zeros(256)) for _ in range(16)]
    optimizer = co.AdamW([(f"layers.{i}", param) for i, param in enumerate(params)], lr=0.0, state_dtype=state_dtype)
    generator = torch.Generator().manual_seed(0)
    exact, sizes = torch.zeros(16, 256), torch.ones(16, 256)
    for step in range(4000):
        sizes[:, ::2] = 1 if step < 1000 else 0.1
        grads = torch.randn(16, 256, generator=generator) * sizes
        for param, grad in zip(params, grads.unbind(), strict=True):
            param.grad = grad
        exact = 0.999 * exact + 0.001 * grads.square()
        optimizer.step()
    optimizer.param_groups[0]["state_dtype"] = torch.float32
    optimizer.zero_grad()
    optimizer.step()
    roots = (torch.stack([optimizer.state[param]["exp_avg_sq"] for param in params]) / exact).sqrt()
    assert roots[:, ::2].median() == pytest.approx(1, abs=0.05)
    assert roots[:, 1::2].median() == pytest.approx(1, abs=0.02)


@pytest.mark.full
def test_no_period_of_the_gradients_resonates_with_rounding() -> None:
    """Gradients are 10 times larger in every so many steps, or normal: errors of averages, against those in float64.

    Beside tensors that are rounded as in the package there are as many whose thresholds are independent random numbers.
    """
    tensors, steps = 32, 20000
    generator = torch.Generator().manual_seed(0)
    periods = torch.tensor([*PERIODS, *PERIODS, 1])[:, None]
    beta = torch.tensor([0.999] * len(PERIODS) + [0.9999] * len(PERIODS) + [0.999], dtype=torch.float64)[:, None]
    seeds, counts = torch.arange(tensors) * 523.0, torch.arange(1.0, 1 + steps, dtype=torch.float64)[:, None]
    ours = formats.threshold_of(counts, seeds.double())
    thresholds = torch.cat([ours, torch.rand(ours.shape, generator=generator, dtype=torch.float64)], 1).float()
    exact = ((periods + 99.0) / periods).double().repeat(1, 2 * tensors)
    exact[-1] = 1
    average, errors = exact.float(), []
    for step in range(steps):
        squares = torch.where((step + 1) % periods == 0, 100.0, 1.0).double().repeat(1, 2 * tensors)
        squares[-1] = torch.randn(tensors, generator=generator).square().repeat(2)
        exact, average = (beta * values + (1 - beta) * squares for values in (exact, average))
        average = formats.randomly_rounded(average.float(), formats.parts_in(thresholds[step], 24), "bfloat16")
        errors.append(average / exact - 1)
    found, independent = torch.stack(errors).split(tensors, dim=2)
    assert found.mean((0, 2)).abs().max() < 0.007
    assert found.mean(2).abs().max() < 0.03  # common to all tensors
    assert (found.square().mean((0, 2)) <= independent.square().mean((0, 2))).all()


def test_tensors_do_not_resonate_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MINIMUM", 1)
    params = {f"layers.{i}": torch.nn.Parameter(torch.zeros(8)) for i in range(32)}
    optimizer = co.Adam(params, lr=0.0, betas=(0.9, 0.9999), state_dtype=torch.bfloat16)
    exact, errors = 0.0, []
    for step in range(1, 12001):
        size = 10.0 if step % 55 == 0 else 1.0
        exact = 0.9999 * exact + 0.0001 * size**2
        for param in params.values():
            param.grad = torch.full_like(param, size) if step < 3 or size > 1 or step % 55 == 1 else param.grad
        optimizer.step()
        if step > 4000 and step % 20 == 0:
            errors.append(torch.stack([optimizer.state[p]["exp_avg_sq"][0] for p in params.values()]).double() / exact - 1)
    common = torch.stack(errors).mean(1)
    assert common.abs().max() < 0.03
    assert common.mean().abs() < 0.01


def test_seeds_give_other_numbers() -> None:
    """How many elements are rounded up is drawn anew."""
    counts = {}
    for seed in range(3):
        param = torch.nn.Parameter(torch.full((65536,), 1.25).bfloat16())
        param.grad_dtype = torch.float32
        optimizer = co.SGD([("w", param)], lr=1.0, weights="stochastic", rounding_seed=seed)
        param.grad = torch.full((65536,), -0.3 * 2**-7)
        for step in range(5):
            param.data.fill_(1.25)
            optimizer.step()
            counts[seed, step] = (param > 1.25).sum().item()
    assert len({*counts.values()}) > 10
    spread = torch.tensor([*counts.values()]).double()
    assert 60 < spread.std() < 230  # 117 of independent draws
    assert spread.mean() == pytest.approx(0.3 * 65536, abs=6 * 117 / 15**0.5)


def test_sums_keep_their_bits_unless_they_are_named() -> None:
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = co.Ranger({"p": param}, lr=0.1, state_dtype=torch.bfloat16)
    dtypes = {name: entry.dtype for name, entry in optimizer.state[param].items()}
    assert dtypes["exp_avg"] == torch.bfloat16
    assert dtypes["la_param"] == torch.float32
    with pytest.raises(ValueError, match="Adagrad has no moving averages; choose dtypes by state name"):
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
    optimizer = co.AdamW({"kept": param}, state_dtype={"exp_avg_sq": "int8"}, exclude=["kept"])
    assert {optimizer.state[param][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}


def test_patterns_that_match_nothing_are_warnings() -> None:
    param = torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="exclude: the pattern 'lm_hed' matches no parameter"):
        optimizer = co.AdamW({"lm_head": param}, weights="kahan", exclude=["lm_hed|lm_head"])
    optimizer.param_groups[0]["weight_decay"] = 0.1  # and only once
    optimizer.step()


@pytest.mark.parametrize(
    ("optimizer", "state_dtype", "warns"),
    [
        (co.AdamW, {"exp_avg": "int8", "exp_avg_sq": torch.float32}, True),
        (co.StableAdamW, {"exp_avg": "int8"}, True),
        (co.Adamax, {"exp_avg": "int8", "exp_inf": torch.bfloat16}, True),
        (co.AdamW, {"exp_avg": "int8", "exp_avg_sq": "int8"}, False),
        (co.AdamW, {"exp_avg_sq": "int8"}, False),
        (co.Lion, {"exp_avg": "int8"}, False),
    ],
)
def test_codes_over_wider_denominators_are_warned_of(
    optimizer: type[co.CompiledOptimizer], state_dtype: dict[str, Any], warns: bool
) -> None:
    param = torch.nn.Parameter(torch.zeros(4096))
    match = r"state_dtype: with 'int8' for 'exp_avg' and more bits for 'exp_\w+', by which .* many lr"
    with pytest.warns(UserWarning, match=match) if warns else nullcontext():
        optimizer({"p": param}, lr=0.1, state_dtype=state_dtype)


@pytest.mark.parametrize(
    ("options", "dtype", "size", "warned"),
    [
        ({"weights": "split8"}, torch.float32, 64, "weights='split8'"),
        ({"weights": "split8"}, torch.bfloat16, 64, "weights='split8'"),
        ({"state_dtype": "int8"}, torch.float32, 4095, "state_dtype='int8'"),
        ({"weights": "master", "state_dtype": torch.float32}, torch.bfloat16, 64, None),
        ({"weights": "split8", "state_dtype": "int8", "exclude": ["p"]}, torch.float32, 64, None),
        ({"weights": "split8", "state_dtype": "int8"}, torch.bfloat16, 4096, None),
    ],
)
def test_options_that_apply_to_no_parameter_are_warnings(
    options: dict[str, Any], dtype: torch.dtype, size: int, warned: str | None
) -> None:
    params = {"p": torch.nn.Parameter(torch.zeros(size, dtype=dtype)), "q": torch.nn.Parameter(torch.zeros(1, dtype=dtype))}
    with pytest.warns(UserWarning, match=f"{warned} applies to no parameter") if warned else nullcontext():
        optimizer = co.AdamW(params, **options)
    optimizer.param_groups[0]["weight_decay"] = 0.1  # and only once
    optimizer.step()


def test_a_centered_deviation_is_no_difference_of_codes() -> None:
    param = torch.nn.Parameter(torch.zeros(4096))
    with pytest.raises(ValueError, match="'int8' of square_avg does not go with centered=True"):
        co.RMSprop({"p": param}, centered=True, state_dtype="int8")


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_averages_of_fewer_bits_than_half_of_the_parameter(dtype: torch.dtype, lowering: str) -> None:
    """They are rounded as those of a parameter in float32."""
    averages = []
    for wide in (torch.float32, torch.float64):
        param = torch.nn.Parameter(torch.zeros(4096, dtype=wide))
        optimizer = co.AdamW([param], lr=0.1, state_dtype=dtype, lowering=lowering)
        for step in range(3):
            grad = torch.randn(4096, generator=torch.Generator().manual_seed(step))
            param.grad = grad.to(wide)
            optimizer.step()
        assert optimizer.state[param]["exp_avg"].dtype == dtype
        averages.append(optimizer.state[param]["exp_avg"].double())
    assert averages[0].allclose(averages[1], rtol=2.0**-6, atol=1e-6)
    assert (averages[0] == averages[1]).double().mean() > 0.99
