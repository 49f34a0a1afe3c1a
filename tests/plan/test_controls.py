"""Clipping, loss scaling and skipping inside the step, against torch's own functions around a step in float64."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, Case, cases, copies, give_gradients, high_precision, parameters, relative_error, wide_scalars
from round_trips import pickled
from torch.nn.utils import clip_grad_norm_

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer, engine_of

FAR = [case for case in cases() if case.arguments and case.optimizer._gradients == "dense"]
FIRST = list({case.optimizer: case for case in reversed(FAR)}.values())
IN_LOWERINGS = [(case, "multi_tensor") for case in FAR] + [(case, other) for case in FIRST for other in LOWERINGS[1:]]
"""A lowering does with every rule's numbers what it does with one's; the kernels that are made are tried with all."""


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v.clone() for s in optimizer.state.values() for v in s.values()]


def _snapshot(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in params] + _state(optimizer)


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", FAR, ids=str)
def test_clip_equals_clip_grad_norm_before_the_step(case: Case) -> None:
    with wide_scalars():
        params = parameters(torch.float64)
        twins = copies(params, torch.float64)
        optimizer = case.optimizer(params, max_grad_norm=1.0, **case.kwargs)
        reference = case.reference(twins, **case.kwargs)
        for step, limit in enumerate((0.3, 2.0, 1e6, 0.3)):  # some steps clip, one does not
            optimizer.max_grad_norm = limit
            give_gradients(params, twins, step, absent=3 if step % 2 else 0)
            norm = clip_grad_norm_(twins, limit)
            reference.step()
            optimizer.step()
            assert optimizer.grad_norm is not None
            assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)
    assert relative_error(params, twins) < 1e-12


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_clip_in_every_dtype_and_lowering(dtype: torch.dtype, lowering: str) -> None:
    params = parameters(dtype)
    twins = copies(params, high_precision(dtype))
    optimizer = co.SGD(params, lr=0.5, momentum=0.9, max_grad_norm=0.7, lowering=lowering)
    reference = torch.optim.SGD(twins, lr=0.5, momentum=0.9)
    for step in range(3):
        give_gradients(params, twins, step)
        norm = clip_grad_norm_(twins, 0.7)
        reference.step()
        optimizer.step()
        assert optimizer.grad_norm is not None
        assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    # 16-bit parameters are rounded at every step
    assert relative_error(params, twins) < {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_clip_a_conjugate(lowering: str) -> None:
    """Autograd makes such views, whose memory does not hold their numbers, of parameters that are read conjugated."""
    param = torch.nn.Parameter(torch.tensor([3 + 4j, 0j]))
    (param.conj() * torch.tensor([3 + 4j, 0j])).real.sum().backward()
    assert param.grad is not None
    assert param.grad.is_conj()
    optimizer = co.SGD([param], lr=1.0, max_grad_norm=2.5, lowering=lowering)
    optimizer.watch_health()
    optimizer.step()
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm.item() == pytest.approx(5.0)
    assert param.detach().allclose(torch.tensor([1.5 + 2j, 0j]))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_one_norm_over_plans_groups_and_dtypes(lowering: str) -> None:
    params = [*parameters(torch.float32), *parameters(torch.float64, seed=1)]
    groups = [{"params": params[:5], "amsgrad": True}, {"params": params[5:9], "lr": 0.3}, {"params": params[9:]}]
    optimizer = co.AdamW(groups, lr=0.1, max_grad_norm=0.5, lowering=lowering)
    assert len(engine_of(optimizer).step.lowerings) == 2
    give_gradients(params, params, 0)
    expected = math.sqrt(sum(p.grad.double().square().sum().item() for p in params))
    optimizer.step()
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm.item() == pytest.approx(expected, rel=1e-6)
    assert optimizer.state[params[0]]["exp_avg"].double().norm().item() == pytest.approx(
        0.1 * 0.5 / expected * params[0].grad.double().norm().item(), rel=1e-5
    )


@pytest.mark.usefixtures("one_thread")  # which puts the number back
def test_the_norm_does_not_depend_on_the_number_of_threads() -> None:
    norms = []
    for count in (1, 2):
        torch.set_num_threads(count)
        param = torch.nn.Parameter(torch.zeros(300_001))
        param.grad = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
        optimizer = co.SGD([param], lr=0.1, max_grad_norm=1.0)
        optimizer.step()
        norms.append(optimizer.grad_norm.clone())
    assert torch.equal(*norms)


@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor"])
def test_controls_change_without_a_compilation(lowering: str) -> None:
    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer = co.AdamW(params, lr=0.1, lowering=lowering)
    reference = torch.optim.AdamW(twins, lr=0.1)
    give_gradients(params, twins, 0)
    optimizer.step()
    reference.step()
    limit = torch.tensor(3.0)
    with co.no_recompiles():
        for step, value in enumerate([0.3, None, limit, limit, math.inf, None, 0.1], start=1):
            optimizer.max_grad_norm = value
            optimizer.skip_nonfinite = step % 3 == 0
            limit.fill_(1.0 / step)
            give_gradients(params, twins, step)
            if value is not None:
                clip_grad_norm_(twins, float(value))
            reference.step()
            optimizer.step()
            assert (optimizer.grad_norm is None) == (value is None and step % 3 != 0)
    assert co.compile_report(optimizer).recompiles == 0
    assert relative_error(params, twins) < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("case", "lowering"), IN_LOWERINGS, ids=str)
def test_a_nonfinite_step_changes_nothing(case: Case, bad: float, lowering: str) -> None:
    params = parameters(torch.float32)
    optimizer = case.optimizer(params, skip_nonfinite=True, lowering=lowering, **case.kwargs)
    plain_params = parameters(torch.float32)
    plain = case.optimizer(plain_params, lowering=lowering, **case.kwargs)
    for step in range(4):
        give_gradients(params, plain_params, step)
        before = _snapshot(params, optimizer)
        if step in (0, 2):
            params[5].grad[140, 7] = bad
            optimizer.step()
            assert _equal(before, _snapshot(params, optimizer))
        else:
            optimizer.step()
            plain.step()
    assert optimizer.skipped_steps.item() == 2
    assert _equal(_snapshot(params, optimizer), _snapshot(plain_params, plain))


def test_without_skipping_a_nan_spreads_as_with_torch() -> None:
    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer, reference = co.SGD(params, lr=0.1, max_grad_norm=1.0), torch.optim.SGD(twins, lr=0.1)
    give_gradients(params, twins, 0)
    params[0].grad[0, 0] = twins[0].grad[0, 0] = math.nan
    clip_grad_norm_(twins, 1.0)
    reference.step()
    optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param.isnan(), twin.isnan())


@pytest.mark.parametrize(("case", "lowering"), IN_LOWERINGS, ids=str)
def test_grad_scaler(case: Case, lowering: str) -> None:
    """Scaled gradients with an overflow now and then, as torch's scaler hands them over, against torch's own optimizer."""
    with wide_scalars():
        params = parameters(torch.float64)
        twins = copies(params, torch.float64)
        optimizer = case.optimizer(params, lowering=lowering, **case.kwargs)
        reference = case.reference(twins, **case.kwargs)
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
        for step in range(6):
            scales = [s.scale(torch.ones((), dtype=torch.float64)).item() for s in scalers]
            assert scales[0] == scales[1]
            give_gradients(params, twins, step)
            for p in (*params, *twins):
                p.grad.mul_(scales[0])
            if step in (0, 3):
                params[0].grad[0, 0] = twins[0].grad[0, 0] = math.inf
            if step == 4:  # the documented way to clip by hand
                for scaler, o, ps in zip(scalers, (optimizer, reference), (params, twins), strict=True):
                    scaler.unscale_(o)
                    clip_grad_norm_(ps, 0.5)
            for scaler, o in zip(scalers, (optimizer, reference), strict=True):
                scaler.step(o)
                scaler.update()
        assert optimizer.skipped_steps.item() == 2
        assert not hasattr(optimizer, "grad_scale")
    assert relative_error(params, twins) < 1e-12


def test_the_clip_comes_after_the_unscaling() -> None:
    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer = co.SGD(params, lr=0.5, max_grad_norm=0.7)
    reference = torch.optim.SGD(twins, lr=0.5)
    give_gradients(params, twins, 0)
    norm = clip_grad_norm_(twins, 0.7)
    reference.step()
    for p in params:
        p.grad.mul_(4096.0)
    optimizer.grad_scale = torch.tensor(4096.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert relative_error(params, twins) < 1e-6


def test_traced_steps_clip_too() -> None:
    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer, twin = (co.AdamW(ps, lr=0.1, max_grad_norm=0.2) for ps in (params, twins))
    compiled = torch.compile(twin.step, fullgraph=True)
    for step in range(3):
        give_gradients(params, twins, step)
        optimizer.step()
        compiled()
    assert _equal(_snapshot(params, optimizer), _snapshot(twins, twin))


def test_copies_keep_the_controls() -> None:
    params = parameters(torch.float32)
    optimizer = co.AdamW(params, lr=0.1, max_grad_norm=0.2, skip_nonfinite=True)
    for clone in (copy.deepcopy(optimizer), pickled(optimizer)):
        assert (clone.max_grad_norm, clone.skip_nonfinite) == (0.2, True)
        own = [p for g in clone.param_groups for p in g["params"]]
        give_gradients(params, own, 0)
        clone.step()
        assert clone.grad_norm.item() > 0
    assert "max_grad_norm" not in optimizer.state_dict()["param_groups"][0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm must be >= 0, got -1.0"),
        ({"max_grad_norm": math.nan}, ValueError, "max_grad_norm must be >= 0, got nan"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm must be a number, a 1-element tensor or None, got '1'"),
        ({"max_grad_norm": torch.ones(2)}, ValueError, r"max_grad_norm must be .* got shape \(2,\)"),
        ({"skip_nonfinite": 1}, TypeError, "skip_nonfinite must be a bool, got 1"),
        ({"max_grad_norm": 1.0, "differentiable": True}, ValueError, "does not work with max_grad_norm"),
    ],
)
def test_bad_controls(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        co.AdamW(parameters(torch.float32), **options)


def test_a_bad_norm_later_changes_nothing() -> None:
    params = parameters(torch.float32)
    optimizer = co.AdamW(params, max_grad_norm=1.0)
    give_gradients(params, params, 0)
    optimizer.step()
    before = _snapshot(params, optimizer)
    for bad, error in itertools.product([-2.0, "x"], [(TypeError, ValueError)]):
        optimizer.max_grad_norm = bad
        with pytest.raises(error, match="max_grad_norm"):
            optimizer.step()
        assert _equal(before, _snapshot(params, optimizer))


def test_a_group_that_does_not_fit_is_not_added() -> None:
    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer, twin = (co.SGD(ps[:3], lr=0.1, max_grad_norm=0.3) for ps in (params, twins))
    with pytest.raises(ValueError, match="differentiable=True does not work with max_grad_norm"):
        optimizer.add_param_group({"params": params[3:], "differentiable": True})
    assert len(optimizer.param_groups) == 1
    for step in range(2):
        give_gradients(params[:3], twins[:3], step)
        optimizer.step()
        twin.step()
    assert _equal(_snapshot(params, optimizer), _snapshot(twins, twin))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_sparse_gradients_are_clipped_scaled_and_skipped(lowering: str) -> None:
    """The same rows as a dense gradient: on the rows that all gradients name, SparseAdam is Adam."""
    params = [torch.nn.Parameter(torch.randn(6, 5)) for _ in range(2)]
    twins = copies(params, torch.float64)
    optimizer = co.SparseAdam(params, lr=0.1, max_grad_norm=0.4, skip_nonfinite=True, lowering=lowering)
    reference = torch.optim.Adam(twins, lr=0.1)
    for step in range(4):
        for param, twin in zip(params, twins, strict=True):
            index = torch.cat([torch.randperm(6), torch.randint(6, (3,))])
            param.grad = torch.sparse_coo_tensor(index[None], 8.0 * torch.randn(9, 5), (6, 5), check_invariants=True)
            twin.grad = param.grad.to_dense().double() / 8
        optimizer.grad_scale = torch.tensor(8.0)
        before = _snapshot(params, optimizer)
        if step == 2:
            params[1].grad = torch.sparse_coo_tensor([[1]], torch.full((1, 5), math.nan), (6, 5), check_invariants=True)
        optimizer.step()
        if step == 2:
            assert _equal(before, _snapshot(params, optimizer))
        else:
            norm = clip_grad_norm_(twins, 0.4)
            reference.step()
            assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert optimizer.skipped_steps.item() == 1
    assert relative_error(params, twins) < 1e-5


def test_lbfgs_refuses_controls() -> None:
    for options in ({"max_grad_norm": 1.0}, {"skip_nonfinite": True}):
        with pytest.raises(ValueError, match="LBFGS does not support"):
            co.LBFGS(parameters(torch.float32), **options)
    with pytest.raises(ValueError, match="use one of torch's schedulers"):
        co.LBFGS(parameters(torch.float32)).schedule(lr=lambda step: 1 / step)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("optimizer", [co.SGD, co.Adafactor, co.SparseAdam], ids=lambda c: c.__name__)
def test_the_norm_of_no_gradients_is_zero(optimizer: type[CompiledOptimizer], lowering: str) -> None:
    param = torch.nn.Parameter(torch.ones(4, 2))
    made = optimizer([param], max_grad_norm=1.0, lowering=lowering)
    param.grad = torch.full((4, 2), 2.0)
    if optimizer is co.SparseAdam:
        param.grad = param.grad.to_sparse(1)
    made.step()
    assert made.grad_norm == pytest.approx(32**0.5)
    param.grad = None
    made.step()
    assert made.grad_norm == 0
