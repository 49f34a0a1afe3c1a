"""What Inductor writes for a GPU computes what eager steps do; there need be no GPU: Triton's interpreter runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
from gpu_code_cases import CASES, MINIMUM, GPUCase, in_lists_of_two
from in_triton import interpret
from interpreted_stacks import SHAPES, made
from torch import Tensor, nn

from compiled_optim.lowering import stack_code
from compiled_optim.memory.torch_compiler import ListFunction, compiled
from compiled_optim.memory.torch_internals import compiles_means_with_lists
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import storage
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import Record, recording

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*Profiler.*")]


def _on_gpu(case: GPUCase) -> tuple[list[nn.Parameter], Any]:
    params, optimizer = case.make("inductor", "cuda")
    for param in params:
        param.grad = torch.empty_like(param)
    return params, optimizer


def _inlined(case: GPUCase) -> str:
    """The module that Inductor writes for a function that holds the step's operations; empty where it holds an operator."""
    torch._dynamo.reset()
    with fake_cuda(90):
        params, optimizer = _on_gpu(case)
        engine = engine_of(optimizer)
        if engine.inline(range(len(params))):  # while Dynamo traces, the device that is none makes no tensors
            why = engine.step.inlined()
            assert "takes means, with which Inductor fails" in why or "takes sums over all parameters" in why
            return ""
        with recording("cuda") as recorder:
            torch.compile(optimizer.step, fullgraph=True)()
    (graph,) = recorder.take().graphs
    return graph.source


Sources: TypeAlias = list[list[str]]
"""The modules of each function that was compiled: one if it was called, else none."""


def _noting(functions: Sources, recorders: list[Record]) -> Callable[..., ListFunction]:
    """``compiled``, which notes what the only one of ``recorders`` saw of each function when it was called."""

    def noting(*args: Any, **kwargs: Any) -> ListFunction:
        code = compiled(*args, **kwargs)
        assert not isinstance(code, str), code
        sources: list[str] = []
        functions.append(sources)

        def call(tensors: list[Tensor]) -> Any:
            (recorder,) = recorders
            before = len(recorder.graphs)
            found = code(tensors)
            sources.extend(g.source for g in recorder.graphs[before:])
            return found

        return call

    return noting


def _called(case: GPUCase) -> list[str]:
    """The modules that Inductor writes for called steps, in the order in which they are compiled; empty for later steps."""
    torch._dynamo.reset()
    functions: Sources = []
    recorders: list[Record] = []
    with fake_cuda(90), in_lists_of_two(_noting(functions, recorders)):
        _, optimizer = _on_gpu(case)
        with recording("cuda") as recorder:
            recorders.append(recorder)
            optimizer.step()
    return ["".join(sources[:1]) for sources in functions]


GROUPS = sorted({name.split()[0] for name in CASES})


def _of(group: str) -> list[str]:
    return [name for name in CASES if name.split()[0] == group]


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What Inductor writes for each case of the groups that this run takes: inlined in a compiled function, and called."""
    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    groups = [given["group"] for given in params if "group" in given]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "MINIMUM", MINIMUM)
        names = [name for group in groups for name in _of(group)]
        return {name: {"inlined": _inlined(CASES[name]), "called": _called(CASES[name])} for name in names}


@pytest.fixture(scope="module")
def differences(written: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What one process finds that interprets all of it."""
    folder = tmp_path_factory.mktemp("written")
    for name, modules in written.items():
        (folder / f"{name}.json").write_text(json.dumps(modules))
    found: dict[str, list[str]] = interpret("interpreted_inlined", str(folder))
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_code_for_a_gpu_does_what_eager_steps_do(
    group: str, written: dict[str, dict[str, Any]], differences: dict[str, list[str]]
) -> None:
    """Of every rule under every choice, and of every way to store it."""
    names = _of(group)
    ways = {name: [way for way in ("inlined", "called") if written[name][way]] for name in names}
    totals = {name for name in names if CASES[name].optimizer._rule.has_totals()}
    assert all("inlined" in ways[name] or name in totals or not compiles_means_with_lists() for name in names)
    found = {key: value for key, value in differences.items() if key.rpartition(" ")[0] in names}
    assert found == {f"{name} {way}": [] for name in names for way in ways[name]}


@pytest.mark.parametrize("name", SHAPES)
def test_stacks_on_a_gpu_do_what_eager_steps_do(name: str, tmp_path: Path) -> None:
    """The rest of an iteration is rounded to bfloat16 once less than in eager steps."""
    functions: Sources = []
    recorders: list[Record] = []
    kernels = mock.patch.multiple(stack_code, compiled=_noting(functions, recorders), _kernels={})
    with kernels, fake_cuda(90), recording("cuda") as recorder:
        recorders.append(recorder)
        params, optimizer = made(name, "inductor", "cuda")
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
    assert functions
    file = tmp_path / "modules.json"
    file.write_text(json.dumps({name: [sources[0] for sources in functions]}))
    found = interpret("interpreted_stacks", str(file))
    exact = ("step", "momentum_buffer")
    assert {n: error for n, error in found[name].items() if error > (1e-6 if n.endswith(exact) else 0.02)} == {}
