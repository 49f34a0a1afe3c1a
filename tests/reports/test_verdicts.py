"""What the report of an optimizer's compiled code says: whether what it counts is good, and what to do if it is not."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import expecttest
import pytest
import torch
from catalog import give_gradients, parameters
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.memory import addresses
from compiled_optim.plan.compilations import Compilation, CompilationLog
from compiled_optim.reports.compile import findings_of

ADAMW = "AdamW[multi-tensor] float32 on cpu"
AMSGRAD = f"{ADAMW}, amsgrad=True"


def shown(*, fallbacks: dict[str, str] | None = None, is_idle: bool = False, **other: Any) -> str:
    """The report of a good run of 100 steps in which ``other`` attributes are so, with its findings."""
    good = co.CompileReport(
        optimizer="AdamW",
        lowering="multi_tensor",
        steps=100,
        kernels=(ADAMW,),
        compilations=(Compilation(ADAMW, 1.34),),
        rebuilds=(),
        captures=(),
        replays=0,
        table_refreshes=101,
        compiled_step="",
        cache="/home/user/.cache/compiled_optim",
        construction=0.56,
        moved_steps=100,
        findings=(),
    )
    report = dataclasses.replace(good, **other)
    log = CompilationLog(compilations=[*report.compilations], captures=[*report.captures], fallbacks=fallbacks or {})
    text = str(dataclasses.replace(report, findings=tuple(findings_of(log, is_idle=is_idle))))
    assert max(map(len, text.splitlines())) <= 120
    return text


def test_a_good_run() -> None:
    expecttest.assert_expected_inline(
        shown(),
        """\
AdamW: multi_tensor lowering, 100 steps. Good: all is compiled, and nothing was compiled again.
  0.56 s of compiling at construction
  kernels: 1 compiled in 1.34 s
  compiled in 1.34 s: AdamW[multi-tensor] float32 on cpu
  gradients moved in 100 of 100 steps (zero_grad frees them): one small copy of addresses each; nothing to do
  compiled C++ is kept in /home/user/.cache/compiled_optim""",
    )


def test_nothing_was_compiled_in_this_process() -> None:
    loaded = (Compilation(ADAMW, 0.004, loaded=True),)
    expecttest.assert_expected_inline(
        shown(compilations=loaded, construction=0.0, moved_steps=1),
        """\
AdamW: multi_tensor lowering, 100 steps. Good: all is compiled, and nothing was compiled again.
  kernels: 1 loaded from the cache in 0.00 s
  loaded in 0.00 s: AdamW[multi-tensor] float32 on cpu
  compiled C++ is kept in /home/user/.cache/compiled_optim""",
    )
    expecttest.assert_expected_inline(
        shown(compilations=(), construction=0.0, moved_steps=1),
        """\
AdamW: multi_tensor lowering, 100 steps. Good: all is compiled, and nothing was compiled again.
  the process had already: AdamW[multi-tensor] float32 on cpu
  compiled C++ is kept in /home/user/.cache/compiled_optim""",
    )


def test_recompilations_have_causes_and_advice() -> None:
    cause = "parameter 'fc.weight': grad dtype float32 -> bfloat16"
    made = (Compilation(ADAMW, 1.34), Compilation(AMSGRAD, 1.0, cause), Compilation(AMSGRAD, 0.01, cause, loaded=True))
    expecttest.assert_expected_inline(
        shown(compilations=made, kernels=(AMSGRAD,)),
        """\
AdamW: multi_tensor lowering, 100 steps. Compiled again after the first step: see below.
  0.56 s of compiling at construction
  kernels: 2 compiled, 1 loaded from the cache in 2.35 s
  compiled in 1.01 s: AdamW[multi-tensor] float32 on cpu, amsgrad=True
  recompiled: parameter 'fc.weight': grad dtype float32 -> bfloat16 (2 times)
    to find the line of your code that causes it, run the loop under `with co.no_recompiles():`
  gradients moved in 100 of 100 steps (zero_grad frees them): one small copy of addresses each; nothing to do
  compiled C++ is kept in /home/user/.cache/compiled_optim""",
    )


def test_a_cache_that_goes_with_the_process() -> None:
    assert shown(cache="/tmp/compiled_optim-x1").endswith(
        "compiled C++ is kept until the process ends in /tmp/compiled_optim-x1"
    )
    assert "until" not in shown()


def test_what_runs_slowly_has_advice() -> None:
    reason = (
        "AdamW runs eager: /usr/bin/c++ made no library (exit status 1): kernel.cpp:1:10: fatal error: no such file. " * 2
    )
    advice = "install g++ or clang++, or name one in the environment variable CXX"
    slow = shown(lowering="eager", kernels=(), compilations=(), fallbacks={reason: advice})
    expecttest.assert_expected_inline(
        slow,
        """\
AdamW: eager lowering, 100 steps. Slower than it could be: see below.
  0.56 s of compiling at construction
  slower: AdamW runs eager: /usr/bin/c++ made no library (exit status 1): kernel.cpp:1:10: fatal error: no such file.
      AdamW runs eager: /usr/bin/c++ made no library (exit status 1): kernel.cpp:1:10: fatal error: no such file. ;
      install g++ or clang++, or name one in the environment variable CXX
  gradients moved in 100 of 100 steps (zero_grad frees them): one small copy of addresses each; nothing to do""",
    )


def test_rebuilds() -> None:
    reasons = {
        "'gate' got its first gradient": 1,
        "param_groups[0]['maximize'] was written": 2,
        "'gate' moved": 1,
        "state": 1,
    }
    text = " ".join(shown(rebuilds=tuple(reasons.items()), moved_steps=0).split())
    said = "'gate' got its first gradient, param_groups[0]['maximize'] was written (2 times), 'gate' moved and 1 more"
    assert f"rebuilt on the host, which compiles nothing by itself: {said} compiled C++" in text
    assert "rebuilt" not in shown()


def test_captures() -> None:
    twice = shown(captures=("", "scale 1.0 -> 2.0", "scale 1.0 -> 2.0"), replays=97, moved_steps=0)
    expecttest.assert_expected_inline(
        twice,
        """\
AdamW: multi_tensor lowering, 100 steps. Captured again: see below.
  0.56 s of compiling at construction
  kernels: 1 compiled in 1.34 s
  compiled in 1.34 s: AdamW[multi-tensor] float32 on cpu
  3 captures, 2 re-captures, 97 replays
  captured again: scale 1.0 -> 2.0 (2 times)
    to find the line of your code that causes it, run the loop under `with co.no_recompiles():`
  compiled C++ is kept in /home/user/.cache/compiled_optim""",
    )


def test_nothing_yet_nothing_compiled_and_nothing_updated() -> None:
    new = {"kernels": (), "compilations": (), "moved_steps": 0, "construction": 0.0}
    assert shown(steps=0, **new) == "AdamW: multi_tensor lowering, 0 steps. The first step will compile."
    assert (
        shown(lowering="eager", **new)
        == "AdamW: eager lowering, 100 steps. Nothing is compiled: steps are plain torch operations."
    )
    idle = shown(is_idle=True, steps=1, **new)
    expecttest.assert_expected_inline(
        idle,
        """\
AdamW: multi_tensor lowering, 1 step. Nothing was updated: see below.
  idle: no parameter ever had a gradient, or all steps were skipped; call loss.backward() before step()""",
    )


def test_long_keys_are_broken() -> None:
    key = "MuonAdamW[loops over stacks like 3072 x 768] param bfloat16, grad bfloat16, state bfloat16, float32 on cuda:0"
    key += ", nesterov=True, ns_steps=5, adjust_lr_fn=match_rms_adamw"
    assert key in " ".join(shown(kernels=(key,)).split())


def moved(lists: list[list[Tensor]]) -> int:
    """The steps in which gradients moved, of those with each of ``lists`` in turn."""
    params = [nn.Parameter(torch.ones(3)) for _ in lists[0]]
    optimizer = co.SGD(params)
    for grads in lists:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    return co.compile_report(optimizer).moved_steps


def test_steps_whose_gradients_moved() -> None:
    grads = [[torch.ones(3), torch.ones(3)] for _ in range(5)]
    assert moved(grads) == 5
    assert moved(grads[:1] * 5) == 1


def findings(optimizer: co.CompiledOptimizer) -> list[str]:
    return [finding.name for finding in co.compile_report(optimizer).findings]


@pytest.mark.parametrize("options", [{}, {"lowering": "eager"}], ids=str)
def test_an_optimizer_that_updated_nothing(options: dict[str, Any]) -> None:
    params = parameters(torch.float32)
    optimizer = co.AdamW(params, skip_nonfinite=True, **options)
    assert findings(optimizer) == []
    optimizer.state["a hook's"] = [1]  # type: ignore[assignment]
    optimizer.step()
    assert findings(optimizer) == ["idle"]
    for param in params:
        param.grad = torch.full_like(param, torch.inf)
    optimizer.step()
    assert findings(optimizer) == ["idle"]
    give_gradients(params, params, 0)
    optimizer.step()
    assert findings(optimizer) == []


def test_frozen_parameters_are_never_updated() -> None:
    optimizer = co.AdamW([nn.Parameter(torch.ones(2), requires_grad=False)])
    optimizer.step()
    assert "no parameter ever had a gradient" in str(co.compile_report(optimizer))


def test_the_constructors_compiling_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = addresses.reader

    def slow() -> Any:
        time.sleep(0.02)
        return reader()

    monkeypatch.setattr(addresses, "reader", slow)
    report = co.compile_report(co.AdamW([nn.Parameter(torch.ones(2))]))
    assert 0.02 <= report.construction <= report.seconds


def test_choices_that_were_not_made_are_not_in_a_key() -> None:
    params = parameters(torch.float32)
    optimizer = co.AdamW(params, amsgrad=True)
    give_gradients(params, params, 0)
    optimizer.step()
    assert co.compile_report(optimizer).kernels == (AMSGRAD,)


def test_elsewhere_than_on_linux_steps_use_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert co.compile_report(co.AdamW([nn.Parameter(torch.ones(2))])).lowering == "inductor"
    with pytest.raises(ValueError, match="'multi_tensor' serves CUDA tensors, and CPU tensors on Linux"):
        co.AdamW([nn.Parameter(torch.ones(2))], lowering="multi_tensor")
