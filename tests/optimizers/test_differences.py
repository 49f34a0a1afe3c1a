"""Where a docstring names differences from other code: both codes, without these differences and with each.

Code that is not of torch or of an installed package is here as loops, whose differences can be switched one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from catalog import registry, relative_error
from torch import Tensor
from torch.nn import Parameter

import compiled_optim as co
from compiled_optim.optimizers import newton_schulz

STEPS = 12
TESTS: dict[str, list[Callable[..., Any]]] = {}
"""By class, the tests of the differences that its docstring names."""

WORDS = re.compile(r"[Dd]iffers from|authors' (package|code)")


def names_differences_of(*classes: type[co.CompiledOptimizer]) -> Callable[[Any], Any]:
    def note(test: Any) -> Any:
        for cls in classes:
            TESTS.setdefault(cls.__name__, []).append(test)
        return test

    return note


def test_every_named_difference_is_here() -> None:
    assert {cls.__name__ for cls in registry() if WORDS.search(" ".join((cls.__doc__ or "").split()))} == TESTS.keys()


SENTENCES = [
    (co.AdamWScheduleFree, "Weight decay takes this rate"),
    (co.AdamWScheduleFree, "the step's weight in the average is its square"),
    (co.AdamWScheduleFree, "``eps`` is added to the root of the uncorrected squares"),
    (co.AdamWScheduleFree, "it corrects the squares alone, and a weight is the largest rate so far, squared"),
    (co.Prodigy, "``eps`` is multiplied by the ``d`` of the step, and so is a gradient where ``betas[0]`` is 0"),
    (co.Prodigy, "which uses the next ``d`` for both"),
    (co.Muon, "a matrix is first divided by its norm, not by 1.01 times its norm"),
]


@pytest.mark.parametrize(("cls", "sentence"), SENTENCES)
def test_what_loops_differ_in_is_said(cls: type[co.CompiledOptimizer], sentence: str) -> None:
    assert sentence in " ".join((cls.__doc__ or "").split())


def _params(*shapes: tuple[int, ...]) -> list[Parameter]:
    torch.manual_seed(5)
    return [Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]


def _gradients(params: list[Parameter], t: int) -> list[Tensor]:
    own = torch.Generator().manual_seed(t)
    return [torch.randn(p.shape, dtype=p.dtype, generator=own) * (1 + t % 3) + 0.3 * p.detach() for p in params]


def _train(optimizer: torch.optim.Optimizer, params: list[Parameter], rates: Callable[[int], float]) -> list[Tensor]:
    for t in range(STEPS):
        optimizer.param_groups[0]["lr"] = rates(t)
        for param, grad in zip(params, _gradients(params, t), strict=True):
            param.grad = grad
        optimizer.step()
    return [p.detach() for p in params]


def _loop(step: Callable[..., None], params: list[Parameter], rates: Callable[[int], float], *more: Any) -> list[Tensor]:
    held: dict[str, Any] = {}
    for t in range(STEPS):
        with torch.no_grad():
            step(params, _gradients(params, t), held, t, rates(t), *more)
    return [p.detach() for p in params]


def _check(ours: Callable[[], list[Tensor]], theirs: Callable[[Collection[str]], list[Tensor]], named: set[str]) -> None:
    """Without the ``named`` differences the other code is ours; with any one of them, it is not."""
    mine = ours()
    assert relative_error(theirs(()), mine) < 1e-12
    for name in sorted(named):
        assert relative_error(theirs({name}), mine) > 1e-5, name


def _falling(t: int) -> float:
    return 0.1 * 0.8 ** (t // 2)


def _schedule_free(
    params: Any, grads: Any, held: Any, t: int, rate: float, h: dict[str, Any], theirs: Collection[str]
) -> None:
    beta1, beta2 = h["betas"]
    rate *= min((t + 1) / max(h["warmup_steps"], 1), 1.0)
    root = math.sqrt(1 - beta2 ** (t + 1))
    held["largest"] = max(rate, held.get("largest", 0.0))
    weight = (held["largest"] if "largest rate" in theirs else rate) ** 2 * (
        1 if "uncorrected weight" in theirs else root**2
    )
    held["sum"] = held.get("sum", 0.0) + weight
    share = weight / held["sum"]
    for i, (y, grad) in enumerate(zip(params, grads, strict=True)):
        z, squares = held.setdefault(i, (y.clone(), torch.zeros_like(y)))
        squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        move = root * grad / (squares.sqrt() + h["eps"] * (root if "corrected eps" in theirs else 1))
        move += h["weight_decay"] * (1 if "uncorrected decay" in theirs else root) * y
        y.copy_(y + share * (z - y) + rate * (beta1 * (1 - share) - 1) * move)
        z.sub_(move, alpha=rate)


def _adopt(params: Any, grads: Any, held: Any, t: int, rate: float, h: dict[str, Any], decouple: bool) -> None:
    """The authors' loop, whose steps count from 0."""
    (beta1, beta2), decay = h["betas"], h["weight_decay"]
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        average, squares = held.setdefault(i, (torch.zeros_like(param), torch.zeros_like(param)))
        grad = grad if decouple else grad.add(param, alpha=decay)
        if t == 0:
            squares.addcmul_(grad, grad)
            continue
        if decouple:
            param.add_(param, alpha=-rate * decay)
        normed = grad.div(squares.sqrt().clamp(h["eps"])).clamp(-(t**0.25), t**0.25)
        average.lerp_(normed, 1 - beta1)
        param.add_(average, alpha=-rate)
        squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)


@names_differences_of(co.ADOPT)
@pytest.mark.parametrize("decouple", [False, True])
def test_adopt(decouple: bool) -> None:
    options: dict[str, Any] = {"betas": (0.7, 0.6), "eps": 0.05, "weight_decay": 0.3}

    def ours() -> list[Tensor]:
        params = _params((4, 3), (5,))
        return _train(co.ADOPT(params, **options, decoupled_weight_decay=decouple), params, _falling)

    def theirs(named: Collection[str]) -> list[Tensor]:
        return _loop(_adopt, _params((4, 3), (5,)), _falling, options, decouple is not ("other decay" in named))

    _check(ours, theirs, {"other decay"})


def _mars(params: Any, grads: Any, held: Any, t: int, rate: float, h: dict[str, Any], theirs: Collection[str]) -> None:
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if t == 0:
            first = torch.zeros_like(grad) if "first correction" in theirs else grad
            held[i] = [first, torch.zeros_like(param), torch.zeros_like(param)]
        last, average, squares = held[i]
        beta1, beta2 = h["betas"]
        if param.dim() > 1 or "vectors" not in theirs:
            corrected = (grad - last).mul(h["gamma"] * (beta1 / (1 - beta1))).add(grad)
            norm = torch.norm(corrected)
            corrected = corrected / norm if norm > 1 else corrected
        else:
            corrected = grad
        average.mul_(beta1).add_(corrected, alpha=1 - beta1)
        squares.mul_(beta2).addcmul_(corrected, corrected, value=1 - beta2)
        corrections = [1 - beta ** (t + 1) for beta in h["betas"]]
        divisor = squares.sqrt().mul(1 / math.sqrt(corrections[1])).add(h["eps"]).mul(corrections[0])
        param.sub_(rate * param.mul(h["weight_decay"]).add(average.div(divisor)))
        held[i][0] = grad


@names_differences_of(co.MARS)
def test_mars() -> None:
    options: dict[str, Any] = {"betas": (0.7, 0.6), "eps": 0.05, "weight_decay": 0.3, "gamma": 0.4}
    shapes = [(4, 3), (5,), (1,), (1,), (1,)]  # gradients of one element are not all longer than 1

    def ours() -> list[Tensor]:
        params = _params(*shapes)
        return _train(co.MARS(params, **options), params, _falling)

    def theirs(named: Collection[str]) -> list[Tensor]:
        return _loop(_mars, _params(*shapes), _falling, options, named)

    _check(ours, theirs, {"first correction", "vectors"})


SCHEDULE_FREE = {"largest rate", "uncorrected weight", "corrected eps", "uncorrected decay"}


@names_differences_of(co.AdamWScheduleFree)
def test_schedule_free() -> None:
    options: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 0.05, "weight_decay": 0.3, "warmup_steps": 3}

    def ours() -> list[Tensor]:
        params = _params((4, 3), (5,))
        optimizer = co.AdamWScheduleFree(params, lr=0.1, **options)
        return _train(optimizer, params, _falling)

    def theirs(named: Collection[str]) -> list[Tensor]:
        return _loop(_schedule_free, _params((4, 3), (5,)), _falling, options, named)

    _check(ours, theirs, SCHEDULE_FREE)


@pytest.mark.full
def test_the_loop_of_schedule_free_is_the_package() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    options: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 0.05, "weight_decay": 0.3, "warmup_steps": 3}
    params, twins = _params((4, 3), (5,)), _params((4, 3), (5,))
    optimizer = schedulefree.AdamWScheduleFree(params, lr=0.1, foreach=False, **options)
    optimizer.train()
    found = _train(optimizer, params, _falling)
    assert relative_error(found, _loop(_schedule_free, twins, _falling, options, SCHEDULE_FREE)) < 1e-12


def _prodigy(params: Any, grads: Any, held: Any, t: int, rate: float, h: dict[str, Any], theirs: Collection[str]) -> None:
    """As prodigyopt has it, with ``decouple=True``."""
    beta1, beta2 = h["betas"]
    d, beta3 = held.setdefault("d", h["d0"]), math.sqrt(beta2)
    held["numerator"] = held.get("numerator", 0.0) * beta3
    size = 0.0
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        first, average, squares, s = held.setdefault(i, (param.clone(), *(torch.zeros_like(param) for _ in range(3))))
        held["numerator"] += d / h["d0"] * d * rate * (grad * (first - param)).sum().item()
        average.mul_(beta1).add_(grad, alpha=d * (1 - beta1))
        squares.mul_(beta2).addcmul_(grad, grad, value=d * d * (1 - beta2))
        s.mul_(beta3).add_(grad, alpha=d / h["d0"] * d * rate)
        size += s.abs().sum().item()
    held["d"] = max(d, h["d_coef"] * held["numerator"] / size)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        _, average, squares, _ = held[i]
        shown = (held["d"] if "next d" in theirs else d) * grad if beta1 == 0 else average
        divisor = squares.sqrt() + (held["d"] if "eps" in theirs else d) * h["eps"]
        param.copy_(param * (1 - h["weight_decay"] * d * rate) - d * rate * shown / divisor)


@names_differences_of(co.Prodigy)
@pytest.mark.parametrize("beta1", [0.0, 0.7])
def test_prodigy(beta1: float) -> None:
    options: dict[str, Any] = {"betas": (beta1, 0.8), "eps": 0.5, "weight_decay": 0.3, "d0": 0.02, "d_coef": 30.0}

    def ours() -> list[Tensor]:
        params = _params((4, 3), (5,))
        return _train(co.Prodigy(params, lr=0.1, **options), params, _falling)

    def theirs(named: Collection[str]) -> list[Tensor]:
        return _loop(_prodigy, _params((4, 3), (5,)), _falling, options, named)

    _check(ours, theirs, {"eps", "next d"} if beta1 == 0 else {"eps"})


def _orthogonal(matrix: Tensor, triples: Any, safety: float = 1.0) -> Tensor:
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (safety * x.norm())
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


@names_differences_of(co.Muon)
@pytest.mark.parametrize("shape", [(24, 16), (16, 40), (20, 20)], ids=str)
def test_polar_express(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's listing divides by 1.01 times the norm first."""
    monkeypatch.setattr(torch, "bfloat16", torch.float64)
    (matrix,) = _params(shape)
    triples = newton_schulz.iterations((0, 0, 0), "polar_express", 5)
    found = newton_schulz.orthogonalized(matrix.detach(), triples, 0.0)
    assert relative_error([found], [_orthogonal(matrix.detach(), triples)]) < 1e-12
    assert 1e-3 < relative_error([found], [_orthogonal(matrix.detach(), triples, 1.01)]) < 0.1


@names_differences_of(co.Muon)
@pytest.mark.parametrize("adjusted", ["original", "match_rms_adamw"])
def test_muon(adjusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which order the iteration of torch.optim.Muon rounds: in float64 both are one."""
    shapes = ((24, 16), (16, 40))
    options: dict[str, Any] = {"weight_decay": 0.3, "momentum": 0.8, "adjust_lr_fn": adjusted}

    def trained(cls: Any, **own: Any) -> list[Tensor]:
        params = _params(*shapes)
        return _train(cls(params, lr=0.1, **options, **own), params, _falling)

    rounded = relative_error(trained(co.Muon, lowering="eager"), trained(torch.optim.Muon))
    monkeypatch.setattr(torch, "bfloat16", torch.float64)
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.double)
    assert relative_error(trained(co.Muon, lowering="eager"), trained(torch.optim.Muon)) < 1e-12
    assert 1e-6 < rounded < 0.1


def _normuon(params: Any, grads: Any, held: Any, t: int, rate: float, h: dict[str, Any], theirs: Collection[str]) -> None:
    beta1, beta2 = h["betas"]
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        momentum, squares = held.setdefault(i, (torch.zeros_like(param), torch.zeros_like(param[:, :1])))
        momentum.lerp_(grad, 1 - beta1)
        is_nesterov = h["nesterov"] or "nesterov" in theirs
        found = _orthogonal(grad.lerp(momentum, beta1) if is_nesterov else momentum, [h["ns_coefficients"]] * 5)
        squares.lerp_(found.square().mean(1, keepdim=True), 1 - beta2)
        update = found / (squares.sqrt() + h["eps"])
        size = 0.2 * math.sqrt(param.numel())
        if "norm" in theirs:
            size = found.norm() * max(1.0, param.shape[0] / param.shape[1]) ** 0.5
        param.mul_(1 - rate * h["weight_decay"]).sub_(update * size / update.norm(), alpha=rate)


@names_differences_of(co.NorMuon)
@pytest.mark.parametrize("nesterov", [False, True])
def test_normuon(nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the authors' code, which is here as a loop."""
    monkeypatch.setattr(torch, "bfloat16", torch.float64)
    options = {
        "betas": (0.8, 0.7),
        "eps": 1e-8,
        "weight_decay": 0.3,
        "nesterov": nesterov,
        "ns_coefficients": (3.4, -4.7, 2.0),
    }

    def ours() -> list[Tensor]:
        params = _params((24, 16), (16, 40))
        return _train(co.NorMuon(params, lr=0.1, lowering="eager", **options), params, _falling)

    def theirs(named: Collection[str]) -> list[Tensor]:
        return _loop(_normuon, _params((24, 16), (16, 40)), _falling, options, named)

    _check(ours, theirs, {"norm"} if nesterov else {"norm", "nesterov"})


@names_differences_of(co.Adagrad, co.SGD)
@pytest.mark.parametrize("cls", [co.Adagrad, co.SGD])
def test_gradients_are_dense(cls: type[co.CompiledOptimizer]) -> None:
    for kind in (cls, getattr(torch.optim, cls.__name__)):
        param = Parameter(torch.ones(4, 2))
        param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2), check_invariants=True)
        if kind is cls:
            with pytest.raises((TypeError, ValueError, RuntimeError), match="sparse"):
                kind([param], lr=0.1).step()
        else:
            kind([param], lr=0.1).step()
        assert torch.equal(param[0], torch.ones(2))
        assert torch.equal(param[1], torch.ones(2)) == (kind is cls)


@names_differences_of(co.Adagrad)
def test_a_group_has_its_own_first_sum() -> None:
    sums = []
    for kind in (co.Adagrad, torch.optim.Adagrad):
        param = Parameter(torch.ones(2))
        optimizer = kind([{"params": [param], "initial_accumulator_value": 0.5}], initial_accumulator_value=0.25)
        sums.append(optimizer.state[param]["sum"][0].item())
    assert sums == [0.5, 0.25]


@names_differences_of(co.SparseAdam)
def test_the_rate_of_sparse_adam_may_be_0() -> None:
    param = Parameter(torch.ones(4, 2))
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2), check_invariants=True)
    co.SparseAdam([param], lr=0.0).step()
    assert torch.equal(param, torch.ones(4, 2))
    with pytest.raises(ValueError, match="Invalid learning rate"):
        torch.optim.SparseAdam([param], lr=0.0)


@names_differences_of(co.ASGD, co.NAdam)
@pytest.mark.parametrize(("cls", "names"), [(co.ASGD, ("eta", "mu")), (co.NAdam, ("mu_product",))], ids=["ASGD", "NAdam"])
def test_scalars_are_float64(cls: type[co.CompiledOptimizer], names: tuple[str, ...]) -> None:
    (param,), (twin,) = _params((3,)), _params((3,))
    ours, theirs = cls([param], lr=0.1), getattr(torch.optim, cls.__name__)([twin], lr=0.1)
    _train(ours, [param], _falling)
    _train(theirs, [twin], _falling)
    for name in names:
        assert ours.state[param][name].dtype == torch.float64
        assert theirs.state[twin][name].dtype == torch.float32
        torch.testing.assert_close(ours.state[param][name].float(), theirs.state[twin][name].float(), rtol=1e-6, atol=0)


MOMENTA: dict[str, tuple[type[co.CompiledOptimizer], list[float], str]] = {
    "SGD, at 0": (co.SGD, [0.5, 0.0, 0.5], "differs"),
    "SGD, raised": (co.SGD, [0.0, 0.5, 0.5], "differs"),
    "SGD, changed": (co.SGD, [0.5, 0.7, 0.2], "equals"),
    "RMSprop, at 0": (co.RMSprop, [0.5, 0.0, 0.5], "differs"),
    "RMSprop, changed": (co.RMSprop, [0.5, 0.7, 0.2], "equals"),
}


@names_differences_of(co.SGD, co.RMSprop)
@pytest.mark.parametrize("case", MOMENTA)
def test_momentum_that_is_0_for_a_while(case: str) -> None:
    cls, momenta, verdict = MOMENTA[case]
    found = []
    for kind in (cls, getattr(torch.optim, cls.__name__)):
        (param,) = _params((3,))
        options = {"dampening": 0.25} if cls is co.SGD else {}
        optimizer = kind([param], lr=0.1, momentum=momenta[0], **options)
        for t, momentum in enumerate(momenta):
            if kind is cls:
                optimizer.hyperparameter("momentum").fill_(momentum)
            else:
                optimizer.param_groups[0]["momentum"] = momentum
            (param.grad,) = _gradients([Parameter(torch.zeros(3, dtype=torch.float64))], t)
            optimizer.step()
        found.append(param.detach())
        assert ("step" in optimizer.state[param]) == (kind is cls or cls is not co.SGD)
    assert (relative_error(*[[each] for each in found]) < 1e-12) == (verdict == "equals")


@names_differences_of(co.RMSprop)
def test_a_variance_that_is_negative_by_rounding() -> None:
    ends = []
    for kind in (co.RMSprop, torch.optim.RMSprop):
        param = Parameter(torch.zeros(1))
        optimizer = kind([param], lr=0.1, centered=True, alpha=0.5)
        param.grad = torch.ones(1)
        optimizer.step()
        optimizer.state[param]["square_avg"].fill_(0.999)
        optimizer.state[param]["grad_avg"].fill_(1.0)
        optimizer.step()
        ends.append(param.item())
    assert math.isfinite(ends[0])
    assert math.isnan(ends[1])


@names_differences_of(co.Rprop)
@pytest.mark.parametrize("size", [1.0, 1e-30])
def test_the_sign_of_a_product_of_tiny_gradients(size: float) -> None:
    ends = []
    for kind in (co.Rprop, torch.optim.Rprop):
        param = Parameter(torch.zeros(1))
        optimizer = kind([param], lr=0.1)
        for _ in range(2):
            param.grad = torch.full((1,), size)
            optimizer.step()
        ends.append(param.item())
    assert ends == pytest.approx([-0.22, -0.22 if size == 1 else -0.2], rel=1e-6)


@names_differences_of(co.LBFGS)
def test_what_lbfgs_takes_and_torchs_does_not() -> None:
    """Strides; that a line search goes on beyond NaN is tested with the other searches."""
    param = Parameter(torch.randn(6, 4, dtype=torch.float64).mT)
    twin = Parameter(param.detach().clone(memory_format=torch.contiguous_format))
    ends = []
    for kind, each in ((co.LBFGS, param), (torch.optim.LBFGS, twin)):
        optimizer = kind([each], max_iter=4)

        def closure(each: Parameter = each, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (each - 1).square().sum() + each.pow(4).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        ends.append(each.detach())
    assert relative_error([ends[0]], [ends[1]]) < 1e-10
    for cls in (co.LBFGS, torch.optim.LBFGS):
        with pytest.raises(ValueError, match=r"group|per-parameter options"):
            cls([{"params": [param]}, {"params": [twin]}])
