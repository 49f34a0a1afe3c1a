"""Numbers of whole tensors in elementwise rules: of their elements, sums over them, and state that begins as a function."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.rule import Number, buffer, fact, hyper, mean, product, sqrt, static, total

WAYS = ["eager", "inductor", "multi_tensor", "inlined"]
SHAPES = [(3, 5), (), (1,), (70, 130), (0, 3), (64, 64)]


class Normed(co.CompiledOptimizer):
    """Steps of gradients over their sums of squares, with everything that rules find about a tensor."""

    lr: Number = hyper(ge=0)
    weight_decay: Number = hyper(default=0.0)
    of_params: bool = static(default=False)
    numels: Any = buffer()
    sums: Any = buffer()

    @staticmethod
    def coefficients(lr: Any, numel: Any, weight_decay: Any) -> dict[str, Any]:
        return dict(lr=lr, numel=numel, root=sqrt(numel), weight_decay=weight_decay)

    @staticmethod
    def reduce(param: Any, grad: Any, c: Any, of_params: Any) -> dict[str, Any]:
        sums = dict(squares=total(grad * grad, over="tensor"), average=mean(param))
        return dict(**sums, params=total(param + 0.1 * c.root, over="tensor")) if of_params else sums

    @staticmethod
    def update(param: Any, grad: Any, c: Any, numels: Any, sums: Any, of_params: Any) -> dict[str, Any]:
        step = c.lr * grad / c.squares + c.average * c.weight_decay
        return dict(step=step, numels=c.numel + 0 * param, sums=(c.params if of_params else c.squares) + 0 * param)


def _stepper(made: co.CompiledOptimizer, way: str) -> Callable[[], Any]:
    return torch.compile(made.step, fullgraph=True) if way == "inlined" else made.step


def _lowering(way: str) -> str:
    return "inductor" if way == "inlined" else way


def _params(dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> tuple[list[nn.Parameter], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]
    return [nn.Parameter(value.clone()) for value in values], [torch.randn(v.shape, dtype=dtype) + 1 for v in values]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of_params", [False, True])
def test_sums_over_a_tensor_and_the_number_of_its_elements(way: str, of_params: bool) -> None:
    params, grads = _params(torch.float64, SHAPES)
    values = [p.detach().clone() for p in params]
    made = Normed(params, lr=0.3, weight_decay=0.2, of_params=of_params, lowering=_lowering(way))
    step = _stepper(made, way)
    for _ in range(2):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        step()
        for i, (value, grad) in enumerate(zip(values, grads, strict=True)):
            if not value.numel():
                continue
            state, squares = made.state[params[i]], (grad**2).sum()
            expected = (value + 0.1 * value.numel() ** 0.5).sum() if of_params else squares
            torch.testing.assert_close(state["sums"], expected.expand_as(value), rtol=1e-13, atol=1e-13)
            assert state["numels"].unique().tolist() == [value.numel()]
            value -= 0.3 * grad / squares + value.mean() * 0.2
            torch.testing.assert_close(params[i].detach(), value, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("way", WAYS[:3])
def test_tensors_of_one_element_alone(way: str) -> None:
    """Their number of elements is a number like others."""
    params, grads = _params(torch.float32, [(1,), ()])
    made = Normed(params, lr=0.3, lowering=way)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    made.step()
    assert [made.state[p]["numels"].item() for p in params] == [1.0, 1.0]


def test_complex_numbers_are_two_elements() -> None:
    param = nn.Parameter(torch.tensor([3 + 4j, 1 - 2j]))
    made = Normed([param], lr=0.0)
    param.grad = torch.tensor([1 + 2j, 2 - 4j])
    made.step()
    assert made.state[param]["numels"].real.tolist() == [4.0, 4.0]
    assert made.state[param]["sums"].real.tolist() == [25.0, 25.0]


def test_one_kernel_is_for_tensors_of_all_sizes() -> None:
    made = Normed([nn.Parameter(torch.ones(n)) for n in (1, 2, 3, 5, 8, 13)], lr=0.1)
    for group in made.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    made.step()
    with co.no_recompiles():
        other = Normed([nn.Parameter(torch.ones(n)) for n in (21, 34)], lr=0.1)
        for param in other.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        other.step()
    assert [other.state[p]["numels"].unique().tolist() for p in other.param_groups[0]["params"]] == [[21.0], [34.0]]


class Starting(co.CompiledOptimizer, decays="gradient"):
    """Steps by state that begins as a function of parameter and gradient."""

    lr: Number = hyper(ge=0)
    weight_decay: Number = hyper(default=0.0)
    squared: bool = static(default=True)
    average: Any = buffer(
        init=lambda param, grad, c, squared: c.share * (grad * grad if squared else grad) + product(0.3, param)
    )
    one: Any = buffer(init=lambda: 1.0)

    @staticmethod
    def coefficients(lr: Any, weight_decay: Any) -> dict[str, Any]:
        return dict(lr=lr, share=lr * 3, weight_decay=weight_decay)

    @staticmethod
    def update(param: Any, grad: Any, c: Any, average: Any, one: Any) -> dict[str, Any]:
        average = 0.9 * average + 0.1 * grad
        return dict(step=c.lr * average, average=average, one=one * 2)


def _naive(value: Tensor, average: Tensor | None, grad: Tensor, squared: bool) -> tuple[Tensor, Tensor]:
    if average is None:
        average = 0.2 * 3 * (grad**2 if squared else grad) + 0.3 * value
    average = 0.9 * average + 0.1 * grad
    return value - 0.2 * average, average


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("squared", [False, True])
def test_state_begins_as_a_function(way: str, squared: bool) -> None:
    """Of each parameter's own first step: one has its first gradient later."""
    params, _ = _params(torch.float64, [(3, 5), (7,)])
    values, averages = [p.detach().clone() for p in params], [None, None]
    made = Starting(params, lr=0.2, squared=squared, lowering=_lowering(way))
    step = _stepper(made, way)
    for turn in range(3):
        for i, param in enumerate(params):
            param.grad = torch.randn_like(param) if i == 0 or turn else None
            if param.grad is not None:
                values[i], averages[i] = _naive(values[i], averages[i], param.grad, squared)  # type: ignore[call-overload]
        step()
        for i, param in enumerate(params):
            torch.testing.assert_close(param.detach(), values[i], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(made.state[params[1]]["average"], averages[1], rtol=1e-13, atol=1e-13)
    assert made.state[params[1]]["one"].unique().tolist() == [4.0]


@pytest.mark.parametrize("way", WAYS[:3])
def test_a_skipped_step_does_not_begin_it(way: str) -> None:
    param = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    made = Starting([param], lr=0.2, lowering=way, skip_nonfinite=True)
    param.grad = torch.tensor([torch.inf, 1.0], dtype=torch.float64)
    made.step()
    expected, _ = _naive(param.detach().clone(), None, grad := torch.tensor([0.5, -1.5], dtype=torch.float64), True)
    param.grad = grad
    made.step()
    torch.testing.assert_close(param.detach(), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_checkpoint_goes_on_bit_for_bit(steps: int) -> None:
    """Also one that was saved before the first step."""
    params = [nn.Parameter(torch.randn(3, 5)) for _ in "ab"]
    made = Starting([("a", params[0]), ("b", params[1])], lr=0.2)

    def run(optimizer: co.CompiledOptimizer, own: list[nn.Parameter], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in own:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()

    for seed in range(steps):
        run(made, params, seed)
    saved, copies = copy.deepcopy(made.state_dict()), [nn.Parameter(p.detach().clone()) for p in params]
    other = Starting([("a", copies[0]), ("b", copies[1])], lr=0.2)
    run(other, [nn.Parameter(p.detach().clone()) for p in params], 9)  # without gradients
    other.load_state_dict(saved)
    for seed in range(5, 8):
        run(made, params, seed)
        run(other, copies, seed)
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("weights", ["master", "split16"])
def test_a_function_gets_all_bits_of_a_weight(weights: str, way: str) -> None:
    """After steps of another rule, a weight has bits that its parameter lacks."""
    narrow = nn.Parameter(torch.randn(64, 80).bfloat16())
    before = co.SGD([("w", narrow)], lr=0.1, weights=weights, lowering=way)
    narrow.grad = torch.randn(64, 80).bfloat16()
    before.step()
    wide = nn.Parameter(co.full_precision_state_dict(_module(narrow), before)["w"].clone())
    stored = Starting([("w", narrow)], lr=0.2, weights=weights, state_dtype=torch.float32, lowering=way)
    plain = Starting([("w", wide)], lr=0.2, lowering=way)
    part = {"master": "master_param", "split16": "remainder"}[weights]
    stored.state[narrow][part] = before.state[narrow][part]
    for _ in range(3):
        narrow.grad = torch.randn(64, 80).bfloat16()
        wide.grad = narrow.grad.float()
        stored.step()
        plain.step()
    full = co.full_precision_state_dict(_module(narrow), stored)["w"]
    torch.testing.assert_close(full, wide.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(stored.state[narrow]["average"], plain.state[wide]["average"], rtol=1e-6, atol=1e-7)


def _module(weight: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.w = weight
    return module


def test_a_function_needs_an_elementwise_update() -> None:
    with pytest.raises(TypeError, match=r"Stacked\.average: a function as init is for an elementwise update"):

        class Stacked(co.CompiledOptimizer, granularity="matrix"):  # type: ignore[call-arg]
            lr: float = hyper(default=0.1)
            average = buffer(init=lambda grad: grad)

            @staticmethod
            def coefficients(lr: Any) -> dict[str, Any]:
                return dict(lr=lr)

            @staticmethod
            def update(param: Any, grad: Any, c: Any, average: Any) -> dict[str, Any]:
                return dict(step=c.lr * average, average=average + grad)


def test_a_number_by_shape_is_refused_where_only_some_shapes_give_one() -> None:
    """At the construction, if no shape that the class statement tries does."""

    class Odd(co.CompiledOptimizer):
        lr: float = hyper(default=0.1)
        odd = fact(of=lambda shape: 7 if tuple(shape) == (7, 7) else True)

        @staticmethod
        def coefficients(lr: Any) -> dict[str, Any]:
            return dict(lr=lr)

        @staticmethod
        def update(param: Any, grad: Any, c: Any) -> dict[str, Any]:
            return dict(step=c.lr * grad)

    with pytest.raises(TypeError, match=r"Odd\.odd is a condition, but its function returns 7 for the shape \(7, 7\)"):
        Odd([nn.Parameter(torch.ones(7, 7))])
