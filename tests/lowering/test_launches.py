"""Launches of compiled Triton kernels, with Triton's own objects and a driver that does nothing but note them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import compiled_optim as co
from compiled_optim.lowering import coefficients
from compiled_optim.lowering.kernels import triton as lowering
from compiled_optim.optimizer import engine_of

pytest.importorskip("triton")

from triton import JITFunction, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver as triton_driver
from triton.tools import tensor_descriptor as tensor_descriptor  # once: Triton keeps the class that it finds first

from perf import no_device


class Launched(NamedTuple):
    """What Triton's launcher was given."""

    source: Any  # what was compiled, with the types of its arguments and what it takes for granted of them
    metadata: Any
    grid: tuple[int, int, int]
    stream: int
    function: Any
    packed: Any
    launch_metadata: Any
    hooks: tuple[Any, Any]
    arguments: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.source.fn.__name__)


@contextlib.contextmanager
def _noting(stream: list[int]) -> Iterator[list[Launched]]:
    """Let CPU tensors be on a GPU whose current stream is the last of ``stream``."""
    launches: list[Launched] = []

    def launched(source: Any, metadata: Any, x: int, y: int, z: int, on: int, function: Any, *rest: Any) -> None:
        packed, launch_metadata, enter, leave, *arguments = rest
        found = Launched(source, metadata, (x, y, z), on, function, packed, launch_metadata, (enter, leave), (*arguments,))
        launches.append(found)

    driver = no_device.driver(90, launched)
    driver.get_current_stream = lambda device: stream[-1]
    with (
        mock.patch.object(triton_driver, "_active", driver),
        mock.patch.dict(coefficients.BACKENDS, {"cpu": lowering.TritonKernel}),
        mock.patch.object(coefficients, "_kernels", {}),
        mock.patch.dict(sys.modules),
    ):
        for name in [name for name in sys.modules if name.startswith("compiled_optim_kernel_")]:
            del sys.modules[name]  # whose kernels have the launchers of another driver
        yield launches


@pytest.fixture
def launches() -> Iterator[list[Launched]]:
    with _noting([7]) as found:
        yield found


def _params(*dtypes: torch.dtype) -> list[Tensor]:
    params = [torch.zeros(5, 3, dtype=dtype, requires_grad=True) for dtype in dtypes or [torch.float32] * 3]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def _check(launch: Launched) -> None:
    """Raise ``AssertionError`` where a kernel was launched with what it was not compiled for."""
    types = [*launch.source.signature.values()]
    assert len(launch.arguments) == len(types)
    assert all(type(argument) is int for argument in launch.arguments)
    for place, (argument, kind) in enumerate(zip(launch.arguments, types, strict=True)):
        assumed = dict(launch.source.attrs.get((place,), ()))
        assert argument % assumed.get("tt.divisibility", 1) == 0
        assert kind.startswith("*") or (kind == "i32" and argument < 2**31)
    assert launch.metadata.enable_fp_fusion is True  # the bits of a step depend on it
    assert launch.metadata.num_warps == (1 if launch.name == "evaluate" else lowering.WARPS)
    assert launch.function is not None
    assert launch.packed is not None


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {}), ("AdamW", {"max_grad_norm": 1.0}), ("StableAdamW", {"skip_nonfinite": True}), ("LAMB", {})],
)
def test_kernels_are_launched_with_what_they_were_compiled_for(
    launches: list[Launched], name: str, options: dict[str, Any]
) -> None:
    """Sums of the second dtype begin at any number of sums of the first: not at a multiple of 16 bytes."""
    optimizer = getattr(co, name)(_params(torch.float32, torch.bfloat16, torch.float32, torch.float64), lr=0.1, **options)
    optimizer.step()
    first = launches[:]
    launches.clear()
    with mock.patch.object(JITFunction, "run", side_effect=AssertionError("Triton looks at arguments again")):
        optimizer.step()
    assert [launch.name for launch in launches] == [launch.name for launch in first]
    assert [launch.arguments for launch in launches] == [launch.arguments for launch in first]
    for launch in [*first, *launches]:
        _check(launch)
    if "max_grad_norm" in options:
        sums = [launch.arguments[3] % 16 for launch in launches if launch.name == "square_sums"]
        assert len(set(sums)) == 2


def test_arguments_are_the_tables(launches: list[Launched]) -> None:
    optimizer = co.AdamW(_params())
    optimizer.step()
    (made,) = engine_of(optimizer).step.lowerings
    (table,), coefficients = made.tables, made.coefficients.table
    evaluate, update = launches
    tensors = [table.tensors, table.grads, table.blocks, coefficients.outcome, coefficients.coefficients]
    assert update.arguments == (*[t.data_ptr() for t in tensors], 3, 3)
    assert (update.grid, evaluate.grid) == ((3, 1, 1), (1, 1, 1))
    assert evaluate.arguments[-3:] == (3, 0, 1)
    assert table.grads.tolist() == [p.grad.data_ptr() for p in engine_of(optimizer).params]


def test_a_prepared_launch_follows_clipping(launches: list[Launched]) -> None:
    """Which gives the kernels other memory for sums."""
    optimizer = co.AdamW(_params())
    optimizer.step()
    optimizer.max_grad_norm = 1.0
    launches.clear()
    optimizer.step()
    assert [launch.name for launch in launches] == ["square_sums", "evaluate", "update"]
    assert launches[0].arguments[3] == launches[1].arguments[3]
    assert launches[1].arguments[-2] == 3  # sums, one for each tensor


def test_launches_are_on_the_current_stream() -> None:
    streams = [7]
    with _noting(streams) as launches:
        optimizer = co.AdamW(_params())
        for stream in (7, 9, 7):
            streams.append(stream)
            optimizer.step()
        assert [launch.stream for launch in launches] == [7, 7, 9, 9, 7, 7]


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_served_while_there_are_any(launches: list[Launched], which: str) -> None:
    optimizer = co.AdamW(_params())
    optimizer.step()
    assert {launch.hooks for launch in launches} == {(None, None)}
    place = ["launch_enter_hook", "launch_exit_hook"].index(which)

    def hook(metadata: Any) -> None:
        pass

    for hooks in (getattr(knobs.runtime, which), None):
        launches.clear()
        with contextlib.ExitStack() as stack:
            if hooks is None:  # somebody puts a function in the place of the chain
                stack.enter_context(mock.patch.object(knobs.runtime, which, hook))
            else:
                hooks.add(hook)
                stack.callback(hooks.remove, hook)
            optimizer.step()
        assert [launch.hooks[place] for launch in launches] == [hooks or hook] * 2
        assert [launch.launch_metadata.get()["name"] for launch in launches] == ["evaluate", "update"]
    launches.clear()
    optimizer.step()
    assert {launch.hooks for launch in launches} == {(None, None)}


@pytest.fixture
def judged_anew() -> Iterator[None]:
    lowering.obstacle.cache_clear()
    yield
    lowering.obstacle.cache_clear()


def _swapped(kernel: Any, grid: Any) -> Any:
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return lambda *args, stream: kernel.run(*grid, stream, kernel.packed_metadata, kernel.function, None, *hooks, *args)


def _together(kernel: Any, grid: Any) -> Any:
    return lambda *args, stream: kernel.run(grid, *args)


OTHER_WAYS = [_swapped, _together, lambda kernel, grid: None, lambda kernel: None]


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_a_triton_that_launches_in_another_way_is_used_as_always(
    launches: list[Launched], judged_anew: None, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledKernel, "__getitem__", way)
    optimizer = co.AdamW(_params())
    with pytest.warns(RuntimeWarning, match="AdamW launches kernels slowly: Triton .* in a way of its own"):
        optimizer.step()
    with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
        optimizer.step()
    assert run.call_count == 2
    assert len(launches) == 4
    assert "in a way of its own" in str(co.compile_report(optimizer))


def test_the_way_to_launch_is_known(judged_anew: None) -> None:
    assert lowering.obstacle() == ""
