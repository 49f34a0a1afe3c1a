"""What an optimizer holds is freed with it, and a process that used one ends as it wants to."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from catalog import LOWERINGS, registry, required
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer


@pytest.fixture(scope="module")
def no_collector() -> Iterator[None]:
    """Let nothing be freed but what nobody refers to; torch's first optimizer in a process is kept by an import."""
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def used(cls: type[CompiledOptimizer], lowering: str, **kwargs: object) -> tuple[CompiledOptimizer, list[object]]:
    """An optimizer after some steps, and all that ought to go with it."""
    weights = [nn.Parameter(torch.ones(10, 3)) for _ in range(2)]
    options = {"fixed_iterations": True} if cls is co.LBFGS else {"lowering": lowering, **kwargs}
    optimizer = cls(weights, **{**required(cls), **options})

    def closure() -> Tensor:
        loss: Tensor = sum(((w - 2) ** 2).sum() for w in weights)
        optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    for step in range(3):
        closure()
        for weight in weights:
            if cls is co.SparseAdam:
                weight.grad = weight.grad.to_sparse(1)
        if step:
            weights[1].grad = None
        optimizer.step(closure) if cls is co.LBFGS else optimizer.step()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return optimizer, [optimizer, *weights, *state]


@pytest.mark.usefixtures("no_collector")
class TestFreed:
    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("cls", registry(), ids=lambda c: c.__name__)
    def test_at_once(self, cls: type[CompiledOptimizer], lowering: str) -> None:
        optimizer, held = used(cls, lowering)
        references = [weakref.ref(x) for x in held]
        del optimizer, held
        assert not [r for r in references if r() is not None]

    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_with_everything_switched_on(self, lowering: str) -> None:
        optimizer, held = used(co.AdamW, lowering, max_grad_norm=1.0, skip_nonfinite=True, amsgrad=True)
        optimizer.schedule(lr=lambda step: 0.1 / step)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.warns(UserWarning, match="ends that schedule"):
            optimizer.param_groups[0]["lr"] = 0.3
        optimizer.step()
        references = [weakref.ref(x) for x in held]
        del optimizer, held
        assert not [r for r in references if r() is not None]

    def test_with_its_runner(self) -> None:
        optimizer, held = used(co.AdamW, "multi_tensor")
        with pytest.warns(RuntimeWarning, match="uncaptured"):
            runner = co.CUDAGraphRunner(optimizer)
        held[1].grad = torch.ones(10, 3)
        runner.step()
        references = [weakref.ref(x) for x in (runner, *held)]
        del optimizer, held, runner
        assert not [r for r in references if r() is not None]

    # Adagrad's counts from construction on, as in torch.optim.
    @pytest.mark.parametrize(
        "cls", [c for c in registry() if hasattr(c, "_rule") and c is not co.Adagrad], ids=lambda c: c.__name__
    )
    def test_state_that_was_never_stepped_goes_with_its_parameter(self, cls: type[CompiledOptimizer]) -> None:
        left, kept, new = (nn.Parameter(torch.ones(4, 3)) for _ in range(3))
        optimizer = cls([left, kept], lowering="eager", **required(cls))
        references = [weakref.ref(left), *map(weakref.ref, optimizer.state[left].values())]
        for param in (kept, new):
            param.grad = torch.ones(4, 3).to_sparse(1) if cls is co.SparseAdam else torch.ones(4, 3)
        optimizer.load_state_dict(optimizer.state_dict())  # nothing new, as some trainers do
        optimizer.param_groups[0]["params"] = [kept, new]
        del left
        optimizer.step()
        assert set(optimizer.state) == {kept, new}
        assert not [r for r in references if r() is not None]
        optimizer.param_groups[0]["params"] = [new]
        optimizer.step()
        assert set(optimizer.state) == {kept, new}  # which was stepped

    def test_sixty_in_a_row(self) -> None:
        made: list[weakref.ref[object]] = []
        for _ in range(60):
            optimizer, held = used(co.Adam, "multi_tensor")
            made.append(weakref.ref(held[-1]))
            del held
            assert sum(r() is not None for r in made) <= 1
            del optimizer


def _load(optimizer: co.Adam, param: Tensor) -> None:
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = 3
    optimizer.load_state_dict(saved)


def _write(optimizer: co.Adam, param: Tensor) -> None:
    optimizer.state[param]["exp_avg"].fill_(2.0)


def _add(optimizer: co.Adam, param: Tensor) -> None:
    optimizer.state[param]["slow"] = torch.ones(3)


def _assign(optimizer: co.Adam, param: Tensor) -> None:
    optimizer.state[param] = dict(optimizer.state[param])


@pytest.mark.parametrize("use", [_load, _write, _add, _assign])
def test_state_that_was_loaded_or_written_stays_when_its_parameter_leaves(use: Callable[[co.Adam, Tensor], None]) -> None:
    param, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = co.Adam([param])
    use(optimizer, param)
    other.grad = torch.ones(3)
    before = dict(optimizer.state[param])
    optimizer.param_groups[0]["params"] = [other]
    optimizer.step()
    assert set(optimizer.state) == {param, other}
    assert optimizer.state[param].keys() == before.keys()


@pytest.mark.full
def test_making_optimizers_starts_no_thread() -> None:
    for cls in registry():
        used(cls, "inductor" if cls in (co.AdamW, co.Muon) else "multi_tensor")
    ours = [t.name for t in threading.enumerate() if "compiled_optim" in t.name]
    assert not ours


@pytest.mark.full
def test_a_process_that_ends_early_ends_with_its_own_status() -> None:
    program = (
        "import sys, torch, compiled_optim as co\n"
        "for name in ('AdamW', 'Adafactor', 'Muon'):\n"
        "    getattr(co, name)([torch.nn.Parameter(torch.ones(2, 2))], lowering='inductor')\n"
        "sys.exit(7)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) for _ in range(2)]
    for process in running:
        _, errors = process.communicate()
        assert (process.returncode, errors) == (7, b"")
