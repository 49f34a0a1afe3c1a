from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import selection
import torch

_CHOICES = ("full", "named", "selection", "slow", "whole")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all cases of a function but where they take long")
    parser.addoption("--selection", type=int, help="the seed of the selection (today's date); of files that are named too")
    parser.addoption("--slow", type=float, default=selection.SECONDS, help="seconds for the selection's slow functions")
    parser.addoption("--time-left", action="store_true", help="a line of progress in place of dots")
    parser.addoption("--cuda-on-cpu", action="store_true", help="run the tests marked cuda, and only them, without a GPU")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        for name, value in config.workerinput["selection"].items():
            setattr(config.option, name, value)
    else:
        config.option.named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or bool(config.option.keyword)
        config.option.whole = config.option.named and config.option.selection is None
        config.option.full |= config.option.whole
        config.option.selection = selection.today() if config.option.selection is None else config.option.selection
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "kernels"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # who compiles starts no processes that import torch
    import left_out

    config.pluginmanager.register(left_out)
    reports = config.option.verbose <= 0 and hasattr(config, "cache") and not hasattr(config, "workerinput")
    if config.getoption("--time-left") and reports:
        import progress
        import time_left

        config.pluginmanager.register(time_left.TimeLeft(config, progress.Line()))
    if os.environ.get("TRITON_INTERPRET") == "1":
        import quick_interpreter

        quick_interpreter.install()
    if config.getoption("--cuda-on-cpu"):
        import cuda_on_cpu

        cuda_on_cpu.install()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let a worker take the tests that this process takes."""
    node.workerinput["selection"] = {n: getattr(node.config.option, n) for n in _CHOICES}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--cuda-on-cpu"):
        kept = [item for item in items if item.get_closest_marker("cuda") and not item.get_closest_marker("timing")]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    elif not config.option.whole:
        left_out, seed = () if config.option.named else selection.FULL_ONLY, config.option.selection
        full = config.option.full
        kept = selection.full(items, seed) if full else selection.selected(items, seed, config.option.slow, left_out)
        config.hook.pytest_deselected(items=[item for item in items if item not in {*kept}])
        items[:] = kept
    if hasattr(config, "workerinput"):
        items[:] = selection.longest_first(items)


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.whole:
        return None
    seed, more = config.option.selection, "" if config.option.full else "; --full takes more"
    return f"a selection of the tests, again with --selection={seed}{more}"


def pytest_collection_finish() -> None:
    """Modules and collected tests are there until the end: the garbage collector need not walk them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor what a file's tests left: imported modules, compiled kernels. It took an eighth of the time."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:  # which gives up on a function that was compiled for many optimizers in one process
        torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def short_lists() -> Iterator[None]:
    """Let Inductor compile for two tensors at a time, half as many as for users, in 0.6 of the time."""
    from compiled_optim.lowering.torch_ops import inductor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "COUNT_UNFUSED", 2)
        yield


@pytest.fixture
def fresh_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with no kernel in memory, so that compilations are counted from zero."""
    from compiled_optim.lowering import looped, multi_tensor, stacked
    from compiled_optim.lowering.torch_ops import inductor

    for module in (inductor, looped, multi_tensor, stacked):
        monkeypatch.setattr(module, "_kernels", {})


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """Be the only process of a process group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread: with tensors this small, waking others takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
