"""Every optimizer against torch.optim in 64 bits."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from catalog import (
    LOWERINGS,
    Case,
    cases,
    configurations,
    copies,
    give_gradients,
    high_precision,
    parameters,
    reference_of,
    relative_error,
    ruled,
    wide_scalars,
)

import compiled_optim as co
from compiled_optim.lowering import lists

# Ten steps; the reference runs in 64 bits from the same values. Largest errors observed over the catalogue: float64 5e-15
# (RAdam just above its threshold, where torch's 1 - beta2**step cancels; 1e-15 for all others), float32 7e-7, complex64
# 4e-7, float16 4e-3, and bfloat16, which has 8 significant bits and rounds parameters and moments once per step, 5e-2.
# torch.optim keeps NAdam's mu_product and ASGD's eta and mu in the default dtype; the reference has float64 there.
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


def _second(optimizer: type[co.CompiledOptimizer]) -> Case:
    return next(case for case in cases() if case.optimizer is optimizer and case.arguments)


def _lowerings(case: Case) -> list[str]:
    """Return all for one case of each optimizer, and all but Inductor for the others."""
    return [low for low in LOWERINGS if low != "inductor" or case == _second(case.optimizer)]


IN_FLOAT32 = [case for optimizer in ruled() for case in (_second(optimizer), *configurations(optimizer)[1::2])]
"""What Inductor compiles in float32 too: every other case of each optimizer, and the first that is far from defaults."""


def _marks(dtype: torch.dtype, case: Case, lowering: str) -> list[pytest.MarkDecorator]:
    """Return none for each case in plain torch operations, one of each optimizer in C++, and AdamW's in Inductor."""
    is_first = case == _second(case.optimizer) and dtype == torch.float32
    quick = {"eager": dtype == torch.float64, "multi_tensor": is_first, "inductor": is_first and case.optimizer is co.AdamW}
    return [] if quick[lowering] else [pytest.mark.full]


CHECKED = [
    pytest.param(dtype, case, lowering, marks=_marks(dtype, case, lowering))
    for dtype in (torch.float32, torch.float64)
    for case in cases()
    for lowering in LOWERINGS
    if lowering != "inductor" or dtype == torch.float64 or case in IN_FLOAT32
]


LONG = lists.COUNT_UNFUSED
_long_kernels: dict[Any, Any] = {}


@pytest.fixture
def long_lists(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Inductor compile one case of each optimizer for as many tensors at a time as for users."""
    if case == _second(case.optimizer):
        monkeypatch.setattr(lists, "COUNT_UNFUSED", LONG)
        monkeypatch.setattr(lists, "_kernels", _long_kernels)


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "case", "lowering"), CHECKED, ids=str)
def test_equals_torch(case: Case, dtype: torch.dtype, lowering: str, long_lists: None) -> None:
    """Every case in every dtype and every lowering, but for half of Inductor's in float32: each takes seconds, for the text
    that it has in float64 too."""
    _compare(case, dtype, lowering, absent=0)


@pytest.mark.parametrize(("case", "lowering"), [(c, low) for c in cases() for low in _lowerings(c)], ids=str)
def test_absent_gradients_equal_torch(case: Case, lowering: str, long_lists: None) -> None:
    """Of Inductor one case of each optimizer: which gradients are absent is decided before its code runs."""
    _compare(case, torch.float64, lowering, absent=3)


@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
def test_other_dtypes_equal_torch(case: Case, dtype: torch.dtype) -> None:
    if dtype.is_complex and not case.takes_complex:
        with pytest.raises(ValueError, match=f"{case.optimizer.__name__} does not support complex parameters"):
            case.optimizer(parameters(dtype), **case.kwargs)
        return
    if case.optimizer is co.Prodigy and dtype.itemsize == 2:
        pytest.skip("how far a parameter of 16 bits has come is mostly rounding")
    _compare(case, dtype, "multi_tensor", absent=3)


@pytest.mark.parametrize("optimizer", ruled(), ids=lambda c: c.__name__)
def test_float16_equals_torch(optimizer: type[co.CompiledOptimizer]) -> None:
    """What a case chooses meets bfloat16 above; with both formats kernels compute in float32, by the same text."""
    test_other_dtypes_equal_torch(_second(optimizer), torch.float16)


@pytest.mark.parametrize("lowering", ["inductor", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
def test_other_dtypes_in_other_lowerings(dtype: torch.dtype, lowering: str) -> None:
    _compare(Case(co.AdamW, (("lr", 0.07), ("eps", 0.03), ("amsgrad", True))), dtype, lowering, absent=3)


def _compare(case: Case, dtype: torch.dtype, lowering: str, absent: int) -> None:
    ours = case.parameters(dtype)
    theirs = copies(ours, high_precision(dtype))
    optimizer = case.optimizer(ours, lowering=lowering, **case.kwargs)
    with wide_scalars():
        reference = case.reference(theirs, **case.kwargs)
    for step in range(10):
        case.give_gradients(ours, theirs, step, absent)
        optimizer.step()
        with wide_scalars():
            reference.step()
    assert relative_error(ours, theirs) < TOLERANCE[dtype]
    for param, twin in zip(ours, theirs, strict=True):
        for name, value in reference.state[twin].items():
            if name != "step" and value is not None and param.numel():
                assert relative_error([optimizer.state[param][name]], [value]) < TOLERANCE[dtype], name
            elif name == "step":
                assert optimizer.state[param]["step"].item() == float(value)


@pytest.mark.full
@pytest.mark.parametrize("case", cases(), ids=str)
def test_lowerings_agree(case: Case) -> None:
    results = []
    for lowering in _lowerings(case):
        params = case.parameters(torch.float32)
        optimizer = case.optimizer(params, lowering=lowering, **case.kwargs)
        for step in range(5):
            case.give_gradients(params, params, step, absent=4)
            optimizer.step()
        results.append(params)
    assert all(relative_error(results[0], other) < 3e-7 for other in results[1:])


@pytest.mark.parametrize("optimizer", ruled(), ids=lambda c: c.__name__)
def test_the_catalogue_moves_every_field(optimizer: type[co.CompiledOptimizer]) -> None:
    for field in (*optimizer._declaration.hypers, *(s for s in optimizer._declaration.statics if s.init)):
        values = [case.kwargs.get(field.name, field.default) for case in cases() if case.optimizer is optimizer]
        pairs = [v if isinstance(v, tuple) else (v,) for v in (field.default, *values)]
        for default, *others in zip(*pairs, strict=True):
            assert any(other != default for other in others), field.name


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("optimizer", ruled(), ids=lambda c: c.__name__)
def test_every_hyperparameter_changes_every_step(optimizer: type[co.CompiledOptimizer], lowering: str) -> None:
    case = _second(optimizer)
    ours, theirs = case.parameters(torch.float64), case.parameters(torch.float64)
    made, reference = optimizer(ours, lowering=lowering, **case.kwargs), case.reference(theirs, **case.kwargs)
    start = made.hyperparameters()[0]
    for step in range(8):
        factor = 1 - 0.02 * step
        values = {k: tuple(factor * e for e in v) if isinstance(v, tuple) else factor * v for k, v in start.items()}
        if "etas" in values:
            values["etas"] = (values["etas"][0], 3 - factor)
        case.give_gradients(ours, theirs, step, absent=3)
        made.param_groups[0].update(values)
        reference.param_groups[0].update(values)
        with co.no_recompiles() if step else contextlib.nullcontext():
            made.step()
        with wide_scalars():
            reference.step()
    assert relative_error(ours, theirs) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    ("optimizer", "changed"), [(co.Rprop, {"lr": 0.3}), (co.ASGD, {"lr": 0.3}), (co.NAdam, {"lr": 0.3})]
)
def test_hyperparameters_set_before_the_first_step(
    optimizer: type[co.CompiledOptimizer], changed: dict[str, float], lowering: str
) -> None:
    """torch.optim makes its state in the first step, from the values of that moment."""
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    made, reference = optimizer(ours, lowering=lowering), Case(optimizer, ()).reference(theirs)
    for step in range(3):
        give_gradients(ours, theirs, step)
        made.param_groups[0].update(changed)
        reference.param_groups[0].update(changed)
        made.step()
        with wide_scalars():
            reference.step()
    assert relative_error(ours, theirs) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_centered_rmsprop_stays_finite(lowering: str) -> None:
    """Under a constant gradient the variance is 0 but for rounding, and below 0 for half of torch.optim's parameters."""
    param = torch.nn.Parameter(torch.zeros(1000))
    optimizer = co.RMSprop([param], lr=1e-3, alpha=0.9, centered=True, lowering=lowering)
    param.grad = torch.randn(1000)
    for _ in range(300):
        optimizer.step()
    assert param.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_state_starts_from_its_groups_values(dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
    values = [1.0 + 1.0j, 0.5 + 0.5j] if dtype.is_complex else [1.0, 0.5]

    def made(optimizer: type[co.CompiledOptimizer], name: str) -> co.CompiledOptimizer:
        return optimizer([{"params": params[:1]}, {"params": params[1:], name: 0.5}], **{name: 1.0})

    adagrad, rprop, asgd = made(co.Adagrad, "initial_accumulator_value"), made(co.Rprop, "lr"), made(co.ASGD, "lr")
    for param, value in zip(params, values, strict=True):
        assert torch.equal(adagrad.state[param]["sum"], torch.full((3,), value, dtype=dtype))
        assert torch.equal(rprop.state[param]["step_size"], torch.full((3,), value, dtype=dtype))
        assert asgd.state[param]["eta"] == value.real
    asgd.hyperparameter("lr").fill_(7.0)
    assert asgd.state[params[0]]["eta"] == 1.0


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_absent_parameters_are_untouched_bit_for_bit(lowering: str) -> None:
    params = parameters(torch.float32)
    optimizer = co.AdamW(params, lr=0.1, amsgrad=True, lowering=lowering)
    give_gradients(params, params, 0)
    optimizer.step()
    before = [(p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in params]
    for i, param in enumerate(params):
        param.grad = None if i % 2 else torch.randn_like(param)
    optimizer.step()
    for i, (param, (value, state)) in enumerate(zip(params, before, strict=True)):
        same = torch.equal(param, value) and all(torch.equal(optimizer.state[param][k], v) for k, v in state.items())
        assert same == (i % 2 == 1 or (param.numel() == 0 and optimizer.state[param]["step"] == 1))


@pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed:UserWarning")  # Inductor's remark on its own choices
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parameter_and_gradient_dtypes_are_independent(
    param_dtype: torch.dtype, grad_dtype: torch.dtype, lowering: str
) -> None:
    param = torch.nn.Parameter(torch.linspace(-1, 1, 40).to(param_dtype))
    param.grad_dtype = None
    param.grad = torch.linspace(1, 2, 40).to(grad_dtype)
    twin = torch.nn.Parameter(param.detach().double())
    twin.grad = param.grad.double()
    co.SGD([param], lr=0.25, lowering=lowering).step()
    torch.optim.SGD([twin], lr=0.25).step()
    assert torch.equal(param, twin.to(param_dtype))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_state_dtype_is_independent_of_the_parameters(lowering: str) -> None:
    param = torch.nn.Parameter(torch.randn(50, dtype=torch.bfloat16))
    twin = torch.nn.Parameter(param.detach().double())
    optimizer = co.AdamW([param], lr=0.01, lowering=lowering)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[param][name] = torch.zeros(50)
    reference = torch.optim.AdamW([twin], lr=0.01)
    for step in range(5):
        give_gradients([param], [twin], step)
        optimizer.step()
        reference.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[param][name].dtype == torch.float32
        assert relative_error([optimizer.state[param][name]], [reference.state[twin][name]]) < 1e-6


MEMORY = {
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[:, ::2],
    "offset": lambda t: t.view(-1)[3:].view(-1),
    "conjugate-free complex": lambda t: torch.view_as_complex(t.view(-1, 2).clone()),
}


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("size", [6, 300])
@pytest.mark.parametrize("form", MEMORY)
@pytest.mark.parametrize("grad_order", ["same", "reversed"])
def test_memory_layouts(form: str, size: int, lowering: str, grad_order: str) -> None:
    base = torch.randn(size, size)
    param = MEMORY[form](base).detach().requires_grad_()
    twin = param.detach().clone(memory_format=torch.contiguous_format).to(high_precision(param.dtype)).requires_grad_()
    optimizer = co.AdamW([param], lr=0.03, lowering=lowering)
    reference = torch.optim.AdamW([twin], lr=0.03)
    for _ in range(3):
        grad = torch.randn(param.shape, dtype=param.dtype)
        twin.grad = grad.to(twin.dtype)
        param.grad = grad if grad_order == "same" or grad.dim() < 2 else grad.t().contiguous().t()
        optimizer.step()
        reference.step()
    assert relative_error([param], [twin]) < 1e-6


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_strided_parameter_leaves_its_neighbours_alone(lowering: str) -> None:
    base = torch.ones(40, 40)
    param = base[:, ::2].detach().requires_grad_()
    param.grad = torch.ones_like(param)
    co.SGD([param], lr=0.5, lowering=lowering).step()
    assert torch.equal(base[:, 1::2], torch.ones(40, 20))
    assert torch.equal(base[:, ::2], torch.full((40, 20), 0.5))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_groups_with_unlike_choices(lowering: str) -> None:
    ours = parameters(torch.float64)
    theirs = copies(ours, torch.float64)

    def groups(params: list[torch.nn.Parameter]) -> list[dict[str, object]]:
        return [
            {"params": params[:2], "lr": 0.1, "amsgrad": True},
            {"params": params[2:5], "weight_decay": 0.5, "maximize": True},
            {"params": params[5:], "betas": (0.5, 0.6), "eps": 0.1},
        ]

    optimizer = co.AdamW(groups(ours), lr=0.02, lowering=lowering)
    reference = torch.optim.AdamW(groups(theirs), lr=0.02)
    for step in range(6):
        give_gradients(ours, theirs, step, absent=4)
        optimizer.step()
        reference.step()
    assert relative_error(ours, theirs) < 1e-14


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_thousands_of_tiny_tensors(lowering: str) -> None:
    count = 3000
    values = torch.randn(count)
    params = [torch.nn.Parameter(v.clone()) for v in values]
    whole = torch.nn.Parameter(values.double())
    optimizer = co.AdamW(params, lr=0.1, lowering=lowering)
    reference = torch.optim.AdamW([whole], lr=0.1)
    for _ in range(2):
        grad = torch.randn(count)
        whole.grad = grad.double()
        for param, g in zip(params, grad, strict=True):
            param.grad = g.clone()
        optimizer.step()
        reference.step()
    assert relative_error([torch.stack([p.detach() for p in params])], [whole]) < 1e-6


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("optimizer", ruled("dense"), ids=lambda c: c.__name__)
def test_infinite_parameters_that_do_not_decay(optimizer: type[co.CompiledOptimizer], lowering: str) -> None:
    """As in torch, which leaves the penalty out where ``weight_decay`` is 0: a mask of -inf stays one."""
    values = torch.tensor([1.0, -torch.inf, torch.inf, 2.0], dtype=torch.float64)
    ours, theirs = [torch.nn.Parameter(values.clone())], [torch.nn.Parameter(values.clone())]
    decay = {"weight_decay": 0.0} if "weight_decay" in optimizer._all_fields else {}
    made = optimizer(ours, lr=0.1, lowering=lowering, **decay)
    with wide_scalars():
        reference = reference_of(optimizer)(theirs, lr=0.1, **decay)
    for _ in range(3):
        ours[0].grad = torch.tensor([1.0, 0.0, 0.0, -0.5], dtype=torch.float64)
        theirs[0].grad = ours[0].grad.clone()
        made.step()
        with wide_scalars():
            reference.step()
    torch.testing.assert_close(ours[0].detach(), theirs[0].detach(), rtol=1e-14, atol=0, equal_nan=True)
    for name, value in reference.state[theirs[0]].items():
        if isinstance(value, torch.Tensor) and value.dim():
            torch.testing.assert_close(made.state[ours[0]][name], value, rtol=1e-14, atol=0, equal_nan=True)


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
@pytest.mark.parametrize("momentum", [0.95, 0.3, 0.0])
def test_the_momentum_of_muon_is_as_exact_as_torchs(momentum: float, lowering: str) -> None:
    """Gradients that become much smaller show what cancels where little of the average stays."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    ours = co.Muon(params[:1], momentum=momentum, lowering=lowering)
    theirs = torch.optim.Muon(params[1:], momentum=momentum)
    average = torch.zeros(64, 64, dtype=torch.float64)
    for size in [1.0] * 10 + [1e-6] * 5:
        params[0].grad = params[1].grad = size * torch.randn(64, 64)
        average.lerp_(params[0].grad.double(), 1 - momentum)
        ours.step()
        theirs.step()
        buffers = (o.state[p]["momentum_buffer"] for o, p in zip((ours, theirs), params, strict=True))
        error, allowed = ((buffer - average).norm() for buffer in buffers)
        assert error <= 1.5 * allowed  # a compiler may round in another order
