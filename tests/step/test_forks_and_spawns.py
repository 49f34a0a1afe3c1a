"""Optimizers that go to other processes: by a fork beside a step, and by torch.multiprocessing."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

import compiled_optim as co

LIMIT = 60
"""Seconds after which a process that was started here ends."""


def _parameters() -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in ((4, 4), (3, 2))]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


@pytest.mark.parametrize("call", ["step", "state_dict", "add_param_group"])
def test_a_fork_beside_a_thread_that_holds_the_lock(call: str) -> None:
    optimizer = co.AdamW(_parameters(), lowering="eager")
    optimizer.step()
    engine, held, done = optimizer._engine, threading.Event(), threading.Event()

    def hold() -> None:
        with engine.lock:
            held.set()
            done.wait(LIMIT)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(LIMIT)
    if (child := os.fork()) == 0:
        signal.alarm(10)
        code = 1
        try:
            arguments: list[Any] = [{"params": _parameters()}] if call == "add_param_group" else []
            getattr(optimizer, call)(*arguments)
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.set()
    thread.join()
    assert status == 0


def _three_steps(optimizer: Any, params: Any) -> None:
    torch.set_num_threads(1)
    signal.alarm(LIMIT)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()


KINDS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]


@pytest.mark.parametrize("lowering", ["eager", "multi_tensor"])
def test_state_and_step_counts_of_optimizers_that_stepped_are_shared(lowering: str) -> None:
    made = []
    for kind in KINDS:
        for library, options in ((torch.optim, {}), (co, {"lowering": lowering})):
            params = _parameters()
            optimizer = getattr(library, kind)(params, **options)
            optimizer.step()
            made.append((kind, optimizer, params))
    context = torch.multiprocessing.get_context("spawn")
    child = context.Process(target=_all_three_steps, args=([m[1:] for m in made],), daemon=True)
    child.start()
    child.join(LIMIT)
    child.kill()
    child.join()
    assert child.exitcode == 0
    for (kind, theirs, their_params), (_, ours, our_params) in zip(made[::2], made[1::2], strict=True):
        for there, here in zip(their_params, our_params, strict=True):
            assert ours.state[here]["step"] == theirs.state[there]["step"] == 4, kind
            torch.testing.assert_close(here, there)


def _all_three_steps(made: Any) -> None:
    for optimizer, params in made:
        _three_steps(optimizer, params)


@pytest.mark.parametrize("lowering", ["eager", "multi_tensor"])
@pytest.mark.parametrize("steps", [0, 2])
def test_adagrad_shares_its_memory(lowering: str, steps: int) -> None:
    params = _parameters()
    optimizer = co.Adagrad(params, lowering=lowering)
    for _ in range(steps):
        optimizer.step()
    optimizer.share_memory()
    context = torch.multiprocessing.get_context("spawn")
    child = context.Process(target=_three_steps, args=(optimizer, params), daemon=True)
    child.start()
    child.join(LIMIT)
    child.kill()
    child.join()
    assert child.exitcode == 0
    for param in params:
        assert optimizer.state[param]["step"] == steps + 3
        assert bool((optimizer.state[param]["sum"] == steps + 3).all())
    optimizer.step()
    for param in params:
        assert optimizer.state[param]["step"] == steps + 4
        assert bool((optimizer.state[param]["sum"] == steps + 4).all())
