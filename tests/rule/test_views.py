"""Parameters that stand for others, which are to be evaluated: Schedule-Free's, and those of rules with views in general."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from round_trips import pickled
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import ViewedOptimizer
from compiled_optim.rule import Accumulation, Number, buffer, hyper

LOWERINGS = ["eager", "multi_tensor", "inductor"]
FAR: dict[str, Any] = {"lr": 0.2, "betas": (0.6, 0.8), "weight_decay": 0.4, "eps": 0.03, "warmup_steps": 3}


def _params(dtype: torch.dtype = torch.float64, count: int = 3) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3 + i, generator=generator, dtype=torch.float64).to(dtype)) for i in range(count)]


def _give(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)


class _Paper:
    """Algorithm 1 of arXiv:2405.15682 for one tensor, with x and z alone from step to step."""

    def __init__(self, start: Tensor) -> None:
        self.x, self.z, self.v = start.double().clone(), start.double().clone(), torch.zeros_like(start).double()
        self.t, self.weights = 0, 0.0

    def y(self, beta1: float) -> Tensor:
        return (1 - beta1) * self.z + beta1 * self.x

    def step(
        self, grad: Tensor, lr: float, betas: tuple[float, float], weight_decay: float, eps: float, warmup: float
    ) -> None:
        self.t += 1
        y, grad = self.y(betas[0]), grad.double()
        self.v = betas[1] * self.v + (1 - betas[1]) * grad**2
        rate = lr * math.sqrt(1 - betas[1] ** self.t) * min(1.0, self.t / warmup)
        self.z = self.z - rate * grad / (self.v.sqrt() + eps) - rate * weight_decay * y
        self.weights += rate**2
        self.x = (1 - rate**2 / self.weights) * self.x + rate**2 / self.weights * self.z


def _papers_step(papers: list[_Paper], params: list[nn.Parameter]) -> None:
    for paper, param in zip(papers, params, strict=True):
        assert param.grad is not None
        paper.step(param.grad, 0.2, (0.6, 0.8), 0.4, 0.03, 3)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_what_is_evaluated_is_the_papers_average(lowering: str) -> None:
    """There and back between steps, in parameters whose memory has gaps or another order too."""
    params = [*_params(), nn.Parameter(torch.randn(6, 4, dtype=torch.float64).t()[::2])]
    optimizer = co.AdamWScheduleFree(params, lowering=lowering, **FAR)
    papers = [_Paper(p.detach()) for p in params]
    for step in range(6):
        _give(params, step)
        optimizer.step()
        _papers_step(papers, params)
        for param, paper in zip(params, papers, strict=True):
            torch.testing.assert_close(param.detach(), paper.y(0.6), rtol=1e-13, atol=1e-13)
        optimizer.eval()
        counts = [optimizer.state[p]["step"].item() for p in params]
        assert counts == [step + 1] * len(params)
        for param, paper in zip(params, papers, strict=True):
            torch.testing.assert_close(param.detach(), paper.x, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(optimizer.state[param]["z"], paper.z, rtol=1e-13, atol=1e-13)
        optimizer.eval()  # again, which is nothing
        optimizer.train()


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("weights", ["split16", "master"])
def test_all_bits_of_a_weight_come_back(weights: str, lowering: str) -> None:
    """What bfloat16 lacks is viewed with the rest: the average is float32's, and there and back is no step."""
    options: dict[str, Any] = {"state_dtype": {"z": torch.float32, "exp_avg_sq": torch.float32}, "lowering": lowering, **FAR}
    full = [nn.Parameter(torch.randn(70, 80).bfloat16().float()) for _ in range(2)]
    halves = [nn.Parameter(p.detach().bfloat16()) for p in full]
    model = nn.ParameterList(halves)
    plain, stored = (
        co.AdamWScheduleFree(full, lowering=lowering, **FAR),
        co.AdamWScheduleFree(halves, weights=weights, **options),
    )
    for step in range(5):
        for a, b in zip(full, halves, strict=True):
            b.grad = torch.randn(a.shape).bfloat16()
            a.grad = b.grad.float()
        plain.step()
        stored.step()
        for optimizer in (plain, stored) if step % 2 else ():
            optimizer.eval()
        wide = co.full_precision_state_dict(model, stored)
        for a, name in zip(full, "01", strict=True):
            torch.testing.assert_close(wide[name], a.detach(), rtol=2e-6, atol=2e-6)
        for optimizer in (plain, stored):
            optimizer.train()


def test_parameters_that_took_no_step_stay() -> None:
    params = _params()
    optimizer = co.AdamWScheduleFree(params, **FAR)
    before = [p.detach().clone() for p in params]
    optimizer.eval()
    optimizer.train()
    _give(params, 0)
    params[1].grad = None
    optimizer.step()
    optimizer.eval()
    assert torch.equal(params[1], before[1])
    assert not torch.equal(params[0], before[0])


def _compiled(optimizer: co.AdamWScheduleFree) -> Any:
    @torch.compile(backend="aot_eager")
    def step() -> None:
        optimizer.step()

    return step


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("compiled", [False, True])
def test_no_step_of_what_is_evaluated(compiled: bool, lowering: str) -> None:
    """Called, as an operator in compiled code, and as its operations; going back is enough."""
    torch._dynamo.reset()
    params = _params(torch.float32)
    optimizer = co.AdamWScheduleFree(params, lowering=lowering, **FAR)
    step = _compiled(optimizer) if compiled else optimizer.step
    for index in range(2):
        _give(params, index)
        step()
        optimizer.eval()
        before = [p.detach().clone() for p in params]
        with pytest.raises(Exception, match=r"the parameters of param_groups\[0\] are in evaluation mode; call train\(\)"):
            step()
        with pytest.raises(RuntimeError, match="are in evaluation mode"):
            co.check_numerics(optimizer)
        assert all(map(torch.equal, params, before))
        optimizer.train()
    step()


def test_a_change_of_view_compiles_nothing_and_keeps_the_step() -> None:
    params = _params(torch.float32)
    optimizer = co.AdamWScheduleFree(params, lowering="multi_tensor", **FAR)
    _give(params, 0)
    optimizer.step()
    with co.no_recompiles():
        for _ in range(2):
            optimizer.eval()
            optimizer.train()
            optimizer.step()


@pytest.mark.parametrize("way", ["load", "keep", "copy", "pickle"])
def test_the_mode_is_saved(way: str) -> None:
    """With the model of the same moment: it goes on as if nobody had looked."""
    params, others = _params(), _params()
    optimizer, other = co.AdamWScheduleFree(params, **FAR), co.AdamWScheduleFree(others, **FAR)
    for step in range(2):
        _give(params, step)
        optimizer.step()
    optimizer.eval()
    saved = copy.deepcopy(optimizer.state_dict())
    if way in ("copy", "pickle"):
        both = params, optimizer
        others, other = copy.deepcopy(both) if way == "copy" else pickled(both)
    else:
        for param, theirs in zip(others, params, strict=True):
            param.data.copy_(theirs.data)
        other.load_state_dict(saved, hyperparameters="keep" if way == "keep" else "checkpoint")
    _give(others, 2)
    with pytest.raises(RuntimeError, match="are in evaluation mode"):
        other.step()
    for mine in (optimizer, other):
        mine.train()
    _give(params, 2)
    optimizer.step()
    other.step()
    assert all(map(torch.equal, params, others))


def test_a_checkpoint_of_training_ends_the_view() -> None:
    params = _params()
    optimizer = co.AdamWScheduleFree(params, **FAR)
    _give(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in params]
    optimizer.eval()
    for param, weight in zip(params, weights, strict=True):
        param.data.copy_(weight)
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_groups_that_join_are_in_training() -> None:
    first, second = _params(count=2)
    optimizer = co.AdamWScheduleFree([first], **FAR)
    _give([first, second], 0)
    optimizer.step()
    optimizer.eval()
    optimizer.add_param_group({"params": [second]})
    assert [group["train_mode"] for group in optimizer.param_groups] == [False, True]
    before = second.detach().clone()
    optimizer.train()
    assert torch.equal(second, before)
    optimizer.step()


def test_the_mode_cannot_be_assigned() -> None:
    optimizer = co.AdamWScheduleFree(_params(), **FAR)
    with pytest.raises(ValueError, match=r"train_mode of param_groups\[0\] cannot be assigned; call the optimizer's eval"):
        optimizer.param_groups[0]["train_mode"] = False
    optimizer.step()


class LooksAhead(ViewedOptimizer):
    """Momentum, evaluated one step further on."""

    lr: Number = hyper(default=0.1, ge=0)
    momentum_buffer = buffer()
    accumulation = Accumulation(kept=("momentum",))

    @staticmethod
    def coefficients(lr):
        return dict(lr=lr, momentum=0.9 + 0 * lr)

    @staticmethod
    def update(grad, c, momentum_buffer):
        momentum_buffer = c.momentum * momentum_buffer + grad
        return dict(step=c.lr * momentum_buffer, momentum_buffer=momentum_buffer)

    views = dict(
        eval=lambda param, c, momentum_buffer: param - c.lr * momentum_buffer,
        train=lambda param, c, momentum_buffer: param + c.lr * momentum_buffer,
    )


def test_refused_within_a_step_of_micro_batches() -> None:
    params = _params()
    optimizer = LooksAhead(params)
    optimizer.optimizer_accumulation = True
    _give(params, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="state cannot be evaluated between the micro-batches"):
        optimizer.eval()
    optimizer.optimizer_accumulation = False
    optimizer.step()
    before = [p.detach().clone() for p in params]
    optimizer.eval()
    for param, start in zip(params, before, strict=True):
        further = start - 0.1 * optimizer.state[param]["momentum_buffer"]
        torch.testing.assert_close(param.detach(), further, rtol=1e-14, atol=0)


def test_hyperparameters_are_those_of_the_moment() -> None:
    """As a scheduler left them after the last step."""
    params = _params(count=1)
    optimizer = LooksAhead(params)
    _give(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    before, moved = params[0].detach().clone(), optimizer.state[params[0]]["momentum_buffer"].clone()
    optimizer.eval()
    torch.testing.assert_close(params[0].detach(), before - 0.5 * moved, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ({"eval": lambda param: param}, "views must be eval and train"),
        ({"eval": lambda param: param, "train": lambda grad, param: param}, r"views\['train'\] takes \['grad'\]"),
        ({"eval": lambda param, exp: param, "train": lambda param: param}, r"views\['eval'\] takes \['exp'\]"),
        ({"eval": lambda param, c: c.lrs * param, "train": lambda param: param}, "reads c.lrs"),
    ],
)
def test_mistakes_at_the_class_statement(views: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        type("Mistaken", (LooksAhead,), {"views": views})


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_steps_go_on_after_an_evaluation_with_a_later_group(lowering: str) -> None:
    """The scalars of a later group lie elsewhere, and each parameter's go on from where they were."""
    params = _params()
    papers = [_Paper(p.detach()) for p in params]
    optimizer = co.AdamWScheduleFree({f"p{i}": p for i, p in enumerate(params[:2])}, lowering=lowering, **FAR)
    optimizer.add_param_group({"params": {"p2": params[2]}})
    for step in range(8):
        if step == 3:
            optimizer.eval()
            optimizer.train()
        if step == 6:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _give(params[:2] if step == 0 else params, step)
        optimizer.step()
        _papers_step(papers[:2] if step == 0 else papers, params[:2] if step == 0 else params)
        if step == 0:
            optimizer.add_param_group({"params": {"unused": nn.Parameter(torch.zeros(2))}})
    assert [optimizer.state[p]["step"].item() for p in params] == [8, 8, 7]
    for paper, param in zip(papers, params, strict=True):
        torch.testing.assert_close(param.detach(), paper.y(0.6), rtol=1e-9, atol=1e-9)
