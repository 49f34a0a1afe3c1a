"""Cautious steps, and the means over tensors that they are made of; the catalogue has a cautious case of every rule."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from catalog import copies, give_gradients, parameters, relative_error, ruled
from test_reference import LOWERINGS
from torch import nn

import compiled_optim as co
from compiled_optim.rule import Number, absolute, buffer, hyper, mean, sign, sqrt
from compiled_optim.rule.transforms import cautious

SIZES = (1, 7, 4096, 8193, 41003, 70001)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_adamw_number_by_number(lowering: str) -> None:
    """The authors' C-AdamW, with numbers in place of tensors; decay is that of the decoupled rule."""
    lr, (beta1, beta2), eps, decay = 0.07, (0.6, 0.8), 0.03, 0.4
    param = nn.Parameter(torch.linspace(-1, 1, 11, dtype=torch.float64))
    optimizer = co.AdamW([param], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, cautious=True, lowering=lowering)
    x, m, v = param.tolist(), [0.0] * 11, [0.0] * 11
    for t in range(1, 7):
        param.grad = torch.randn(11, dtype=torch.float64)
        optimizer.step()
        g = param.grad.tolist()
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        mask = [1.0 if a * b > 0 else 0.0 for a, b in zip(m, g, strict=True)]
        mean = max(sum(mask) / 11, 1e-3)
        assert 0 < mean < 1 or t == 1
        for i in range(11):
            step = lr / (1 - beta1**t) * m[i] / (math.sqrt(v[i] / (1 - beta2**t)) + eps)
            x[i] = x[i] * (1 - lr * decay) - step * mask[i] / mean
    assert relative_error([param], [torch.tensor(x, dtype=torch.float64)]) < 1e-14
    assert relative_error([optimizer.state[param]["exp_avg"]], [torch.tensor(m, dtype=torch.float64)]) < 1e-14


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_groups_side_by_side_and_an_assignment(lowering: str) -> None:
    """A step with the choice and one without, of the same rule: each as if it were alone."""

    def made(**options: Any) -> tuple[list[nn.Parameter], co.Lion]:
        params = parameters(torch.float32)
        groups = [{"params": params[:3], "cautious": True}, {"params": params[3:]}]
        return params, co.Lion(groups if not options else params, lr=0.1, betas=(0.9, 0.2), lowering=lowering, **options)

    (mixed, optimizer), (on, always), (off, never) = made(), made(cautious=True), made(cautious=False)
    for step in range(3):
        for params, each in ((mixed, optimizer), (on, always), (off, never)):
            give_gradients(params, params, step)
            each.step()
    assert all(torch.equal(p, q) for p, q in zip(mixed, [*on[:3], *off[3:]], strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(on, off, strict=True) if p.numel() > 10)
    optimizer.param_groups[0]["cautious"] = False
    optimizer.param_groups[1]["cautious"] = True
    with torch.no_grad():
        for param, p, q in zip(mixed, on, off, strict=True):
            p.copy_(param)
            q.copy_(param)
            for each, twin in ((always, p), (never, q)):
                each.state[twin]["exp_avg"].copy_(optimizer.state[param]["exp_avg"])
    for params, each in ((mixed, optimizer), (on, always), (off, never)):
        give_gradients(params, params, 7)
        each.step()
    assert all(torch.equal(p, q) for p, q in zip(mixed, [*off[:3], *on[3:]], strict=True))


def test_the_choice_is_a_bool() -> None:
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="cautious must be a bool, got 1"):
        co.AdamW([param], cautious=1)
    optimizer = co.AdamW([param])
    with pytest.raises(TypeError, match=r"cautious of param_groups\[0\] must be a bool, got 'yes'"):
        optimizer.param_groups[0]["cautious"] = "yes"
    assert "cautious" not in optimizer.param_groups[0]  # which has torch.optim's keys where nobody asks for more


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "SparseAdam", "LBFGS", "AdamWScheduleFree"])
def test_who_does_not_have_it(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'cautious'"):
        getattr(co, name)([nn.Parameter(torch.ones(2, 2))], cautious=True)


@pytest.mark.parametrize("optimizer", [c for c in ruled("dense") if "cautious" in c._all_fields], ids=lambda c: c.__name__)
def test_checkpoints_of_torch_and_for_torch(optimizer: type[co.CompiledOptimizer]) -> None:
    """The checkpoint's choice counts where it has one; what the optimizer saved loads everywhere."""
    params = parameters(torch.float32)[:3]
    options = {"lr": 0.1}
    ours, plain = optimizer(params, cautious=True, **options), optimizer(params, **options)
    give_gradients(params, params, 0)
    ours.step()
    saved = ours.state_dict()
    assert saved["param_groups"][0]["cautious"] is True
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["cautious"] is True
    theirs = getattr(torch.optim, optimizer.__name__, None)
    if theirs is not None:
        reference = theirs(params, **options)
        reference.load_state_dict(saved)
        reference.step()
        ours.load_state_dict(reference.state_dict())
        without = theirs(params, **options)
        without.step()
        ours.load_state_dict(without.state_dict())
    assert ours.param_groups[0]["cautious"] is True


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_least_share(lowering: str) -> None:
    """Of 5000 elements one has a gradient: its step grows a thousandfold, as in the authors' code, and not 5000-fold."""
    param = nn.Parameter(torch.zeros(5000, dtype=torch.float64))
    optimizer = co.SGD([param], lr=0.5, cautious=True, lowering=lowering)
    param.grad = torch.zeros_like(param)
    param.grad[4321] = 2.0
    optimizer.step()
    assert param[4321].item() == -1000.0
    assert param.count_nonzero() == 1
    param.grad.zero_()
    before = param.detach().clone()
    optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_tiny_and_bad_numbers(lowering: str) -> None:
    """Signs do not underflow; a step that is NaN stays NaN, so that nobody trains on without noticing."""
    param = nn.Parameter(torch.zeros(4))
    optimizer = co.SGD([param], lr=1e-30, cautious=True, lowering=lowering)
    param.grad = torch.tensor([1e-15, -1e-15, 0.0, torch.nan])
    optimizer.step()
    assert param[0] == -param[1] == -2e-45 or param[:2].abs().max() < 1e-44
    assert param[2] == 0
    assert param[3].isnan()


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_are_equal_bit_for_bit(dtype: torch.dtype, lowering: str) -> None:
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            params = [nn.Parameter(torch.sin(torch.arange(size)).to(dtype)) for size in SIZES]
            optimizer = co.AdamW(params, lr=0.07, betas=(0.6, 0.8), cautious=True, lowering=lowering)
            for step in range(3):
                give_gradients(params, params, step, absent=4)
                optimizer.step()
            results.append(params)
    finally:
        torch.set_num_threads(threads)
    for others in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(results[0], others, strict=True))


class Normed(co.CompiledOptimizer):
    """A toy with means of its own, the second of which needs the first: steps over their own root mean square."""

    lr: Number = hyper(ge=0)
    momentum: Number = hyper(default=0.9, ge=0, lt=1)
    average = buffer()

    @staticmethod
    def coefficients(lr, momentum):
        return dict(lr=lr, momentum=momentum)

    @staticmethod
    def reduce(param, grad, c, average):
        average = c.momentum * average + grad
        return dict(square=mean(average * average), size=mean(absolute(param)))

    @staticmethod
    def update(grad, c, average):
        average = c.momentum * average + grad
        return dict(step=c.lr * (average / sqrt(c.square) + c.size * sign(grad)), average=average)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_means_of_a_rule_and_a_transform_of_it(dtype: torch.dtype, lowering: str) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    ours = [nn.Parameter(torch.randn(size, dtype=dtype)) for size in SIZES]
    theirs = copies(ours, wide)
    optimizer = Normed(ours, lr=0.03, momentum=0.5, cautious=True, lowering=lowering)
    averages = [torch.zeros_like(_real(p)) for p in theirs]
    for step in range(4):
        give_gradients(ours, theirs, step, absent=3)
        optimizer.step()
        for param, average in zip(theirs, averages, strict=True):
            if param.grad is None:
                continue
            value, grad = _real(param.detach()), _real(param.grad)
            average.mul_(0.5).add_(grad)
            root = math.sqrt((average**2).sum().item() / average.numel())
            change = 0.03 * (average / root + value.abs().sum() / average.numel() * grad.sign())
            goes_down = change * grad > 0
            value -= goes_down * change * (average.numel() / max(goes_down.sum().item(), 1e-3 * average.numel()))
    assert relative_error(ours, theirs) < {torch.float64: 1e-13, torch.bfloat16: 5e-2}.get(dtype, 2e-6)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def test_a_transform_of_a_rule_is_a_rule() -> None:
    """Beside the choice nothing is added, and without it nothing changes: the code is the same, statement by statement."""
    from compiled_optim.rule.symbols import PLAIN

    for optimizer in (co.AdamW, co.ASGD, co.Lion):
        plain = type("Plain", (optimizer,), {"_transforms": ()})._rule
        again = cautious(plain)
        assert [s.name for s in again.statics] == [*(s.name for s in plain.statics), "cautious"]
        assert (again.hypers, again.buffers, again.scalars) == (plain.hypers, plain.buffers, plain.scalars)
        statics = {s.name: s.default for s in plain.statics}
        written, off = plain.written(statics, PLAIN), again.written({**statics, "cautious": False}, PLAIN)
        assert written[-1] == off[-1]
        assert all(not stage.results for stage in off[:-1])


def mistakes() -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """Class keywords and bodies, and what is said of each."""

    def taken(grad):
        return dict(lr=mean(grad))

    def unknown(grad, momentum):
        return dict(size=mean(grad))

    def method(grad):
        return dict(size=mean(grad.abs()))

    def early(grad, c):
        return dict(size=mean(c.size * grad))

    def bare(grad):
        return dict(size=grad)

    def adapt(lr):
        return dict(rate=lr)

    said = "is for an elementwise update with dense gradients"
    plain = {"reduce": lambda grad: {"size": mean(grad)}}
    return {
        "taken": ({}, {"reduce": taken}, r"Mine\.reduce returns \['lr'\], which c has already"),
        "unknown": ({}, {"reduce": unknown}, r"Mine\.reduce takes \['momentum'\], which the class does not declare"),
        "method": ({}, {"reduce": method}, r"Mine\.reduce uses \.abs of a value; the vocabulary has absolute"),
        "early": ({}, {"reduce": early}, r"Mine\.reduce reads c\.size, which coefficients does not return"),
        "bare": ({}, {"reduce": bare}, r"Mine\.reduce returns no mean or total for size"),
        "adapt": ({}, {**plain, "adapt": adapt}, r"Mine\.adapt is for totals, and reduce returns none"),
        "stacks": ({"granularity": "tensor"}, plain, rf"Mine\.reduce {said}"),
        "sparse": ({"gradients": "sparse"}, plain, rf"Mine\.reduce {said}"),
    }


@pytest.mark.parametrize("mistake", mistakes())
def test_a_mistake_in_reductions(mistake: str) -> None:
    keywords, body, said = mistakes()[mistake]
    functions = {"coefficients": lambda lr: {"lr": lr}, "update": lambda grad, c: {"step": c.lr * grad}, **body}
    with pytest.raises(TypeError, match=said):
        type("Mine", (co.CompiledOptimizer,), {"lr": hyper(default=0.1), **_static(functions)}, **keywords)


def _static(functions: dict[str, Any]) -> dict[str, Any]:
    return {name: staticmethod(function) for name, function in functions.items()}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_step_that_is_left_out(lowering: str) -> None:
    params = parameters(torch.float32)
    optimizer = co.AdamW(params, lr=0.1, cautious=True, skip_nonfinite=True, lowering=lowering)
    give_gradients(params, params, 0)
    optimizer.step()
    before = [[p.detach().clone(), *(v.clone() for v in optimizer.state[p].values())] for p in params]
    params[0].grad[0, 0] = torch.inf
    optimizer.step()
    now = [[p.detach(), *optimizer.state[p].values()] for p in params]
    assert all(map(torch.equal, itertools.chain(*before), itertools.chain(*now)))
    assert optimizer.skipped_steps == 1
