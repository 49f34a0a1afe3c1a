"""What Inductor compiles for the package is called with tensors of any size, past Dynamo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_optim.memory.torch_compiler import Code, compiled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="C++ is compiled on Linux only")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _scaled(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x * y + x.shape[1],)


def _written(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x.copy_(x * y)
    return ()


def _convolved(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (torch.conv1d(x.unsqueeze(0), torch.ones(3, 7, 2)) + y.sum(), x + y)


def _compiled(function: Callable[..., Any], varying: Sequence[int] = (0, 1)) -> Code | str:
    examples = [torch.empty(7, 11, device="meta") for _ in range(2)]
    return compiled(lambda tensors: function(*tensors), examples, [varying] * 2, "cpu", {})


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (5, 3), (100, 33)])
def test_any_size(shape: tuple[int, int]) -> None:
    code = _compiled(_scaled)
    assert not isinstance(code, str), code
    x, y = torch.randn(shape), torch.randn(shape)
    (found,) = code([x, y])
    torch.testing.assert_close(found, _scaled(x, y)[0])


def test_arguments_that_are_written_to() -> None:
    code = _compiled(_written)
    assert not isinstance(code, str), code
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    expected = x * y
    assert code([x, y]) == []
    torch.testing.assert_close(x, expected)


def test_operations_that_inductor_calls_and_several_results() -> None:
    code = _compiled(_convolved, varying=())
    assert not isinstance(code, str), code
    x, y = torch.randn(7, 11), torch.randn(7, 11)
    for found, expected in zip(code([x, y]), _convolved(x, y), strict=True):
        torch.testing.assert_close(found, expected)


def _product(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x @ y.t() + torch.ones(()),)


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu"),
    "inference": torch.inference_mode,
    "autograd": torch.enable_grad,
    "fake tensors": FakeTensorMode,
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_of_the_user_gets_into_code(mode: str) -> None:
    with MODES[mode]():
        code = _compiled(_product)
    assert not isinstance(code, str), code
    x, y = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
    (found,) = code([x.detach(), y])
    torch.testing.assert_close(found, x.detach() @ y.t() + 1)
    (x * found.sum()).sum().backward()  # no tensor of inference


def test_where_compilation_is_switched_off() -> None:
    with torch._dynamo.config.patch(disable=True):  # as TORCH_COMPILE_DISABLE=1 does
        assert _compiled(_scaled) == "torch.compile is switched off"
