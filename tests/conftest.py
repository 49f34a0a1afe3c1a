from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "tools")]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with no kernel in memory, so that compilations are counted from zero."""
    from compiled_optim.lowering import inductor, multi_tensor, stacked

    for module in (inductor, multi_tensor, stacked):
        monkeypatch.setattr(module, "_kernels", {})


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread: with tensors this small, waking others takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
