from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import default_device
import pytest
import selection
import torch

_CHOICES = ("full", "named", "seconds", "everything")

SECONDS = {False: 300.0, True: 3600.0}
"""Seconds that a test may take, with the fixtures that it is the first to need: in a run of a few cases, and of all.

An idle machine needs an eighth of them.
"""

_STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every case of every function")
    parser.addoption("--quick", action="store_true", help="run a few cases of each function of the files that are named")
    parser.addoption("--seconds", type=float, help="what a test may take: 300, or 3600 where all cases run")
    parser.addoption("--time-left", action="store_true", help="a line of progress in place of dots")
    parser.addoption("--cuda-on-cpu", action="store_true", help="run the tests marked cuda, and only them, without a GPU")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # before pytest captures what tests write there
    if hasattr(config, "workerinput"):
        for name, value in config.workerinput["selection"].items():
            setattr(config.option, name, value)
    else:
        if config.option.full and config.option.quick:
            raise pytest.UsageError("--full runs all cases, --quick a few: give one of them")
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        config.option.everything = config.option.full
        config.option.named = not is_whole or bool(config.option.keyword or config.option.markexpr)
        config.option.full |= config.option.named and not config.option.quick
        config.option.seconds = config.option.seconds or SECONDS[config.option.full]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "kernels"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # who compiles starts no processes that import torch
    import left_out

    config.pluginmanager.register(left_out)
    reports = config.option.verbose <= 0 and hasattr(config, "cache") and not hasattr(config, "workerinput")
    if config.getoption("--time-left") and reports:
        import progress
        import time_left

        config.pluginmanager.register(time_left.TimeLeft(config, progress.Line()))
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]  # how quick a machine is makes no difference, and every run tries the same examples
        settings.register_profile("same", derandomize=True, database=None, deadline=None, suppress_health_check=slow)
        settings.load_profile("same")
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
        kept = [item for item in items if item.get_closest_marker("cuda")]
    else:
        kept = items if config.option.full else selection.quick(items, with_long=config.option.named)
    if config.option.named and not config.option.everything:
        few = {*selection.quick([item for item in kept if _has_default_device(item)], with_long=True)}
        kept = [item for item in kept if item in few or not _has_default_device(item)]
    taken = {*kept}
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = kept if config.option.named else sorted(kept, key=_order)


def _has_default_device(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "callspec", None), "params", {}).get(default_device.NAME))


def _order(item: pytest.Item) -> int:
    """Return a number that puts files in a fixed order, in which those that take long are spread over the run.

    Of 400 orders tried, this one let the time left be told best: within a fifth after a quarter of either run.
    """
    return zlib.crc32(f"378{item.nodeid.partition('::')[0]}".encode())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the process, and say where its threads are, if a test takes too long: it may hang in C."""
    config = item.config
    faulthandler.dump_traceback_later(config.option.seconds, exit=True, file=config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if config.option.full else "a few cases of each test function that is quick; --full takes all of every one"


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


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fail a test that leaves its process group, with which a later one could not begin its own."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("it leaves a process group")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    default_device.generate(metafunc)


@pytest.fixture(autouse=True, name=default_device.NAME)
def _default_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make CUDA, or what stands in for it, the default device in a second case of a test."""
    with default_device.default_device(monkeypatch) if getattr(request, "param", False) else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def short_lists() -> Iterator[None]:
    """Let Inductor compile for two tensors at a time, half as many as for users, in 0.6 of the time."""
    from compiled_optim.lowering import lists

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "COUNT_UNFUSED", 2)
        yield


@pytest.fixture
def fresh_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with no kernel in memory, so that compilations are counted from zero."""
    from compiled_optim.lowering import coefficients, lists, stack_code, stack_loops

    for module in (coefficients, lists, stack_code, stack_loops):
        monkeypatch.setattr(module, "_kernels", {})


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """Be the only process of a process group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    gc.collect()  # a DistributedDataParallel that outlives the group may wait for its threads for ever
    torch.distributed.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread: with tensors this small, waking others takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
