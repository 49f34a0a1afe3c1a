"""Compilations: how many, why, and what happens where nothing can be compiled."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from catalog import copies, give_gradients, parameters
from new_process import environment

import compiled_optim as co
from compiled_optim.memory import cache

COMPILED = ["multi_tensor", "inductor"]


def _step(optimizer: co.CompiledOptimizer, params: list[torch.nn.Parameter], seed: int = 0) -> None:
    give_gradients(params, params, seed)
    optimizer.step()


@pytest.mark.usefixtures("fresh_kernels")
@pytest.mark.parametrize("lowering", COMPILED)
def test_one_compile_per_signature_and_process(lowering: str) -> None:
    params = parameters(torch.float32)
    optimizer = co.AdamW(params, lowering=lowering)
    _step(optimizer, params)
    report = co.compile_report(optimizer)
    assert report.compiles == len(report.kernels) == 1
    assert report.lowering == lowering
    assert report.steps == 1
    again = co.AdamW([torch.nn.Parameter(torch.randn(n)) for n in (3, 70000)], lowering=lowering)
    _step(again, again.param_groups[0]["params"])
    assert co.compile_report(again).compiles == 0
    assert co.compile_report(again).kernels == report.kernels


@pytest.mark.usefixtures("fresh_kernels")
@pytest.mark.parametrize("lowering", COMPILED)
def test_forty_optimizers_are_all_compiled(lowering: str) -> None:
    for i in range(40):
        params = [torch.nn.Parameter(torch.randn(i + 1, 3))]
        optimizer = co.AdamW(params, lowering=lowering) if i % 2 else co.SGD(params, momentum=0.9, lowering=lowering)
        _step(optimizer, params)
        report = co.compile_report(optimizer)
        assert report.findings == ()
        assert len(report.kernels) == 1
        assert report.compiles == (1 if i < 2 else 0)


@pytest.mark.parametrize("lowering", COMPILED)
def test_nothing_recompiles(lowering: str) -> None:
    params = parameters(torch.float32)
    optimizer = co.AdamW(params[:-1], lowering=lowering)
    _step(optimizer, params)
    with co.no_recompiles():
        for absent in range(2, 7):
            give_gradients(params, params, absent, absent)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({"params": params[-1:], "lr": 0.5, "weight_decay": 0.3, "maximize": True})
        optimizer.param_groups[0]["maximize"] = True
        params[0].requires_grad_(False)
        _step(optimizer, params, 9)
    assert co.compile_report(optimizer).recompiles == 0


@pytest.mark.usefixtures("fresh_kernels")
@pytest.mark.parametrize("lowering", COMPILED)
@pytest.mark.parametrize("change", ["grad dtype", "static choice", "new dtype", "param dtype"])
def test_recompile_error_names_what_changed(change: str, lowering: str) -> None:
    weight = torch.nn.Parameter(torch.randn(4))
    optimizer = co.AdamW([("fc.weight", weight)], lowering=lowering)
    weight.grad = torch.randn(4)
    optimizer.step()
    if change == "grad dtype":
        weight.grad_dtype = None
        weight.grad = weight.grad.bfloat16()
        expected = "AdamW would recompile its step: parameter 'fc.weight': grad dtype float32 -> bfloat16"
    elif change == "static choice":
        optimizer.param_groups[0]["amsgrad"] = True
        expected = r"parameter 'fc.weight': .*amsgrad False -> True"
    elif change == "new dtype":
        new = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))
        new.grad = torch.randn(3, dtype=torch.float64)
        optimizer.add_param_group({"params": [("head", new)]})
        expected = "parameter 'head' is new to the optimizer"
    else:
        weight.grad = None
        weight.data = weight.data.double()
        weight.grad = torch.randn(4, dtype=torch.float64)
        expected = "parameter 'fc.weight': param dtype float32 -> float64, grad dtype float32 -> float64"
    before = weight.detach().clone()
    with co.no_recompiles(), pytest.raises(co.RecompileError, match=expected):
        optimizer.step()
    assert torch.equal(weight, before)
    assert optimizer.state[weight]["step"] == 1
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2
    report = co.compile_report(optimizer)
    assert report.recompiles == 1
    (finding,) = report.findings
    assert (finding.name, finding.evidence) == ("recompiled", report.compilations[-1].cause)
    assert finding.evidence in " ".join(str(report).split())


def test_no_recompiles_covers_the_users_own_compiled_functions() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    with pytest.raises(co.RecompileError, match="recompile"), co.no_recompiles():
        compiled(torch.ones(3))
    with pytest.raises(RuntimeError, match="unrelated"), co.no_recompiles():
        raise RuntimeError("unrelated")


@pytest.mark.usefixtures("fresh_kernels")
def test_a_block_of_another_thread_that_ends_first_ends_itself_alone() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = co.AdamW([("fc.weight", weight)])
    weight.grad = torch.ones(4)
    optimizer.step()
    other = co.no_recompiles(budget=3)
    other.__enter__()
    with co.no_recompiles():
        other.__exit__(None, None, None)
        optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(co.RecompileError, match="amsgrad False -> True"):
            optimizer.step()
    optimizer.step()


@pytest.mark.usefixtures("fresh_kernels")
def test_a_first_compile_is_no_recompile() -> None:
    weight = torch.nn.Parameter(torch.randn(4))
    weight.grad = torch.randn(4)
    optimizer = co.AdamW([weight])
    with co.no_recompiles():
        optimizer.step()
    assert co.compile_report(optimizer).compiles == 1


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    cache.compiler.cache_clear()
    yield
    cache.compiler.cache_clear()


@pytest.mark.usefixtures("fresh_kernels", "no_compiler")
@pytest.mark.parametrize("lowering", ["auto", "multi_tensor", "inductor"])
def test_without_a_compiler_it_runs_eager_and_says_so_once(lowering: str) -> None:
    ours = parameters(torch.float64)
    twins = copies(ours, torch.float64)
    with pytest.warns(RuntimeWarning, match=r"steps run eager.*install g\+\+ or clang\+\+"):
        optimizer = co.AdamW(ours, lowering=lowering)
    _step(optimizer, ours)  # a second warning would be an error
    reference = torch.optim.AdamW(twins)
    _step(reference, twins)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(optimizer, ours, 1)
    _step(reference, twins, 1)
    for param, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-13, atol=1e-13)
    assert "slower" in {finding.name for finding in co.compile_report(optimizer).findings}


def test_a_refusing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="error: expected"):
        cache.library("this is not C++")
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.full
def test_a_second_process_takes_the_kernel_from_disk(tmp_path) -> None:
    program = (
        "import torch, compiled_optim as co, compiled_optim.lowering.kernels.cpp as cpp;"
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3); o = co.AdamW([p]); o.step();"
        "print(co.compile_report(o).seconds)"
    )
    variables = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path))

    def run() -> dict[str, int]:
        subprocess.run([sys.executable, "-c", program], check=True, env=variables, capture_output=True)
        libraries = {p.name: p.stat().st_mtime_ns for p in tmp_path.rglob("*.so")}
        assert len(libraries) == 2  # the kernel, and what reads addresses
        return libraries

    assert run() == run()
