"""The step computes with the groups' values exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from catalog import copies, give_gradients, parameters, relative_error
from hyperparameter_sides import (
    HYPERS,
    STOCK,
    assert_equal_params,
    assign,
    classes,
    lowerings,
    numbers,
    pairs,
    params_of,
    step,
    step_both,
    tensors,
    twins,
)
from torch.nn import Parameter
from torch.optim import Optimizer

import compiled_optim as co
from compiled_optim.rule.vocabulary import bias_correction

pytestmark = pytest.mark.usefixtures("one_thread")


class TestZeroRate:
    @lowerings
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-310, 1.0, 1e30], ids=lambda s: f"grad-{s:g}")
    @pytest.mark.parametrize(
        ("cls", "kwargs"),
        [
            (co.AdamW, {"weight_decay": 0.1}),
            (co.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
            (co.SGD, {"weight_decay": 0.1}),
            (co.SGD, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
        ],
        ids=["AdamW", "AdamW-amsgrad", "SGD", "SGD-nesterov"],
    )
    def test_changes_no_bit(
        self, cls: type[Optimizer], kwargs: dict[str, Any], scale: float, dtype: torch.dtype, lowering: str
    ) -> None:
        param = Parameter(torch.cat([torch.randn(20), torch.tensor([0.0, 1e-40, -1e-40, 1e30])]).to(dtype))
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[param.element_size()]
        before = param.detach().clone().view(integer)
        optimizer = cls([param], lr=0.0, lowering=lowering, **kwargs)
        for t in range(4):
            param.grad = (torch.randn(24, dtype=torch.float64) * scale).to(dtype)
            param.grad[t] = 0
            optimizer.step()
            assert torch.equal(param.detach().view(integer), before)
            assert all(value.isfinite().all() or scale == 1e30 for value in optimizer.state[param].values())


def exact_correction(beta: float, step: int) -> Decimal:
    with localcontext() as context:
        context.prec = 80
        return 1 - Decimal(beta) ** step


def ulps(value: float, exact: Decimal, dtype: torch.dtype) -> float:
    """The distance from the exact value, in units in the last place of ``dtype`` there."""
    exponent = math.frexp(float(exact))[1]
    unit = Decimal(2) ** (exponent + round(math.log2(torch.finfo(dtype).eps)) - 1)
    return float(abs(Decimal(value) - exact) / unit)


BIAS_BETAS = [0.0, 0.5, 0.9, 0.999, 0.99999, 1 - 2**-40]
BIAS_STEPS = [1, 2, 3, 7, 10, 99, 1000, 6931, 10**4, 10**5, 10**6]


class TestBiasCorrection:
    @pytest.mark.parametrize("beta", BIAS_BETAS)
    def test_is_within_2_ulp_of_exact(self, beta: float) -> None:
        steps = [*BIAS_STEPS, *range(11, 2000, 13), 2**24 + 1, 2**30 + 1]
        results = bias_correction(torch.tensor(beta, dtype=torch.float64), torch.tensor(steps, dtype=torch.float64))
        worst = max(
            (ulps(value, exact_correction(beta, t), torch.float64), t)
            for t, value in zip(steps, results.tolist(), strict=True)
        )
        assert worst[0] <= 2, f"at step {worst[1]}"

    @lowerings
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("beta", BIAS_BETAS)
    @pytest.mark.parametrize("which", ["first", "second"])
    def test_is_within_2_ulp_in_a_step(self, which: str, beta: float, dtype: torch.dtype, lowering: str) -> None:
        """With one beta 0, eps 0 and lr 1 a parameter at 0 moves by its moment over the correction, or by its root."""
        params = [Parameter(torch.zeros(1, dtype=dtype)) for _ in BIAS_STEPS]
        betas = (beta, 0.0) if which == "first" else (0.0, beta)
        optimizer = co.AdamW(params, lr=1.0, betas=betas, eps=0.0, weight_decay=0.0, lowering=lowering)
        for param, t in zip(params, BIAS_STEPS, strict=True):
            optimizer.state[param]["step"].fill_(t - 1)
            param.grad = torch.ones_like(param)
        optimizer.step()
        for param, t in zip(params, BIAS_STEPS, strict=True):
            assert optimizer.state[param]["step"].item() == t
            correction = exact_correction(beta, t)
            with localcontext() as context:
                context.prec = 80
                if which == "first":
                    moment = Decimal(optimizer.state[param]["exp_avg"].item())
                    exact = moment / correction
                else:
                    moment = Decimal(optimizer.state[param]["exp_avg_sq"].item())
                    exact = (correction / moment).sqrt()
            # 2 for the correction, and a half for each operation around it
            assert ulps(-param.item(), exact, dtype) <= 4, f"at step {t}"

    @lowerings
    @pytest.mark.parametrize("way", ["fill", "assign-tensor", "assign-number", "load"])
    def test_the_step_count_can_be_set(self, way: str, lowering: str) -> None:
        ours, theirs = twins(co.AdamW, lowering=lowering)
        step_both(ours, theirs, 0)
        for param, twin in zip(params_of(ours), params_of(theirs), strict=True):
            theirs.state[twin]["step"].fill_(1000)
            if way == "fill":
                ours.state[param]["step"].fill_(1000)
            elif way == "assign-tensor":
                ours.state[param]["step"] = torch.tensor(1000.0)
            elif way == "assign-number":
                ours.state[param]["step"] = 1000
        if way == "load":
            ours.load_state_dict(theirs.state_dict())
        with co.no_recompiles():
            step_both(ours, theirs, 1, 2)
        assert_equal_params(ours, theirs)
        assert {ours.state[p]["step"].item() for p in params_of(ours)} == {1002}


class TestPrecision:
    @lowerings
    @pytest.mark.parametrize("given", [float, torch.tensor], ids=["float", "tensor"])
    @pytest.mark.parametrize("betas", [(0.999, 0.99), (0.9, 0.999), (0.99, 0.9999)], ids=str)
    def test_betas_are_not_rounded_to_bfloat16(
        self, betas: tuple[float, float], given: Callable[[float], Any], lowering: str
    ) -> None:
        param = Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = co.AdamW([param], lr=0.1, betas=tuple(map(given, betas)), lowering=lowering)
        exact = [float(given(beta)) for beta in betas]
        moments = [torch.zeros(3, dtype=torch.float64) for _ in betas]
        grad = torch.tensor([1.0, -0.5, 0.25])
        for _ in range(50):
            param.grad = grad.bfloat16()
            optimizer.step()
            for moment, beta, value in zip(moments, exact, (grad, grad * grad), strict=True):
                moment.copy_((beta * moment + (1 - beta) * value.double()).bfloat16())
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            torch.testing.assert_close(optimizer.state[param][name].double(), moment, rtol=2**-7, atol=0)
        assert (param != 1).all()

    @lowerings
    def test_a_float32_moment_of_a_bfloat16_parameter_is_exact(self, lowering: str) -> None:
        param = Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = co.AdamW([param], lr=1e-3, betas=(0.999, 0.9999), lowering=lowering)
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[param][name] = torch.zeros(3)
        for _ in range(200):
            param.grad = torch.ones(3, dtype=torch.bfloat16)
            optimizer.step()
        for name, beta in (("exp_avg", 0.999), ("exp_avg_sq", 0.9999)):
            exact = torch.full((3,), 1 - beta**200, dtype=torch.float64)
            torch.testing.assert_close(optimizer.state[param][name].double(), exact, rtol=2e-5, atol=0)

    @lowerings
    @classes
    @pytest.mark.parametrize("start", [2**24 - 1, 2**24, 2**30, 2**40])
    def test_the_step_count_does_not_saturate(self, start: int, cls: type[Optimizer], lowering: str) -> None:
        params = [Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
        optimizer = cls(params, lowering=lowering)
        for param in params:
            optimizer.state[param]["step"].fill_(start)
        for k in range(1, 4):
            step(optimizer, k)
            assert [optimizer.state[p]["step"].item() for p in params] == [start + k] * 2
        saved = optimizer.state_dict()
        assert {float(state["step"]) for state in saved["state"].values()} == {start + 3}
        other = cls([Parameter(p.detach().clone()) for p in params], lowering=lowering)
        other.load_state_dict(saved)
        step(other, 4)
        assert {other.state[p]["step"].item() for p in params_of(other)} == {start + 4}

    @lowerings
    @classes
    def test_the_default_dtype_does_not_matter(self, cls: type[Optimizer], lowering: str) -> None:
        torch.set_default_dtype(torch.bfloat16)
        try:
            param = Parameter(torch.ones(3, dtype=torch.float64))
            twin = Parameter(param.detach().clone())
            ours = cls([param], **HYPERS[cls], lowering=lowering)
            assert {t.dtype for t in tensors(ours)} == {torch.float64}
            assert numbers(ours.param_groups[0], cls) == HYPERS[cls]
            for t in range(300):
                if t == 100:
                    ours.param_groups[0]["lr"] = 0.01
                step(ours, t)
        finally:
            torch.set_default_dtype(torch.float32)
        theirs = STOCK[cls]([twin], **HYPERS[cls])
        for t in range(300):
            if t == 100:
                theirs.param_groups[0]["lr"] = 0.01
            step(theirs, t)
        assert ours.state[param]["step"].item() == 300
        assert relative_error([param], [twin]) < 1e-12


def moving(cls: type[Optimizer], t: int) -> dict[str, Any]:
    """Values for step ``t``, all unlike those of the step before."""
    wave = 1 + 0.5 * math.sin(0.7 * t)
    if cls is co.AdamW:
        return {
            "lr": 0.01 * wave,
            "betas": (0.8 * wave / 1.5, 0.99 - 0.1 * wave),
            "eps": 1e-4 * wave,
            "weight_decay": 0.1 * wave,
        }
    return {"lr": 0.01 * wave, "momentum": 0.6 * wave, "dampening": 0.3 * wave, "weight_decay": 0.1 * wave}


def fill(tensors: Any, value: Any) -> None:
    for tensor, number in zip(pairs(tensors), pairs(value), strict=True):
        tensor.fill_(number)


@pytest.mark.usefixtures("fresh_kernels")
@lowerings
@classes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_three_hundred_steps_in_which_everything_changes(dtype: torch.dtype, cls: type[Optimizer], lowering: str) -> None:
    """A hundred with a scheduler for lr and momentum or beta1, a hundred with assignments, a hundred with ``fill_``."""
    mine = parameters(dtype)
    theirs = copies(mine, torch.float64)
    ours = cls([{"params": mine[:3]}, {"params": mine[3:], "lr": 0.02}], **HYPERS[cls], lowering=lowering)
    stock = STOCK[cls]([{"params": theirs[:3]}, {"params": theirs[3:], "lr": 0.02}], **HYPERS[cls])
    schedulers = []
    for optimizer in (ours, stock):
        cycle = {"total_steps": 101, "base_momentum": 0.5, "max_momentum": 0.9}
        schedulers.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.01], **cycle))

    def take(t: int) -> None:
        give_gradients(mine, theirs, t)
        ours.step()
        stock.step()
        if t < 100:
            for scheduler in schedulers:
                scheduler.step()
        for index in range(2):
            for key, value in moving(cls, t + 50 * index).items():
                if t >= 100 or key not in ("lr", "momentum", "betas"):
                    stock.param_groups[index][key] = value
                    if t >= 200:
                        fill(ours.hyperparameter(key, index), value)
                    else:
                        assign(ours.param_groups[index], key, value)
                elif key == "betas":
                    for optimizer in (ours, stock):
                        group = optimizer.param_groups[index]
                        group["betas"] = (group["betas"][0], value[1])

    take(0)
    first = co.compile_report(ours)
    assert first.compiles <= len(first.kernels)
    seen = []
    with co.no_recompiles():
        for t in range(1, 300):
            take(t)
            seen.append([numbers(group, cls) for group in ours.param_groups])
            assert seen[-1] == [numbers(group, cls) for group in stock.param_groups]
    for index in range(2):
        for key in HYPERS[cls]:
            assert all(a[index][key] != b[index][key] for a, b in itertools.pairwise(seen)), key
    report = co.compile_report(ours)
    assert report.recompiles == 0
    assert report.compiles == first.compiles == (0 if lowering == "eager" else len(report.kernels))
    assert report.kernels == first.kernels
    assert report.findings == ()
    assert report.steps == 300
    whole = [torch.cat([p.detach().double().flatten() for p in params]) for params in (mine, theirs)]
    assert relative_error(whole[:1], whole[1:]) < (1e-6 if dtype == torch.float32 else 1e-12)
    # a tensor of few elements has fewer rounding errors to average: torch's own float32 reaches 1e-6 in it
    assert relative_error(mine, theirs) < (3e-6 if dtype == torch.float32 else 1e-12)
