"""What Inductor compiles for the package is called with tensors of any size, past Dynamo."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from compiled_optim.memory.torch_compiler import ListFunction, compiled

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


def _compiled(function: Callable[..., Any], varying: Sequence[int] = (0, 1)) -> ListFunction | str:
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


class Negating(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return -result if isinstance(result, Tensor) else result


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu"),
    "inference": torch.inference_mode,
    "autograd": torch.enable_grad,
    "fake tensors": FakeTensorMode,
    "default device": lambda: torch.device("meta"),
    "functions": Negating,
    "compiled": lambda: torch.compiler.set_stance("fail_on_recompile"),
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


@pytest.mark.parametrize(
    "function", [lambda x, y: (x * int(y.shape[1]),), lambda x, y: (x if y.shape[0] > 3 else y,)], ids=["number", "branch"]
)
def test_operations_that_depend_on_sizes(function: Callable[..., Any]) -> None:
    assert _compiled(function) == "its operations depend on the sizes of tensors"


def test_any_error_of_inductor_is_a_reason() -> None:
    def fail(graph: torch.fx.Graph) -> None:
        raise RuntimeError("a pass of the user")

    with config.patch(joint_custom_pre_pass=fail):
        assert _compiled(_scaled) == "Inductor failed: a pass of the user"
    with config.patch({"cpp.cxx": ("/bin/false",)}), fresh_cache():
        assert str(_compiled(_scaled)).startswith("Inductor failed: ")


def test_threads_that_compile_at_once() -> None:
    factors = range(2, 6)
    begin = threading.Barrier(len(factors))

    def compile_with(factor: int) -> ListFunction | str:
        begin.wait()
        return _compiled(lambda x, y: (x * factor + y,))

    with fresh_cache(), ThreadPoolExecutor(len(factors)) as pool:
        codes = list(pool.map(compile_with, factors))
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    for factor, code in zip(factors, codes, strict=True):
        assert not isinstance(code, str), code
        torch.testing.assert_close(code([x, y])[0], x * factor + y)


def test_compiled_functions_of_another_thread_go_on() -> None:
    called = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
    called(torch.ones(2))

    def call() -> int:
        count = 0
        while not done.is_set():
            assert called(torch.ones(2)).tolist() == [2, 2]
            count += 1
        return count

    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(call)
        with fresh_cache():
            assert not isinstance(_compiled(_convolved, varying=()), str)
        done.set()
        assert calls.result() > 0


def test_where_compilation_is_switched_off() -> None:
    with torch._dynamo.config.patch(disable=True):  # as TORCH_COMPILE_DISABLE=1 does
        assert _compiled(_scaled) == "torch.compile is switched off"
