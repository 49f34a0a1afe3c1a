"""Optimizers that go to other processes: by a fork beside a step, and by torch.multiprocessing."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Iterator
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


KINDS = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]


OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}}


def _doubles() -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n).view(n // 2, 2)) for n in (4, 6)]
    for param in params:
        param.share_memory_()
    return params


def _made(sharing: str, steps: int) -> Iterator[tuple[str, Any, list[torch.nn.Parameter]]]:
    """Of each kind torch.optim's first, then ours in two lowerings."""
    for kind in [*KINDS, "SGD"]:
        if sharing == "share_memory" and not hasattr(getattr(torch.optim, kind), sharing):
            continue
        for library, options in ((torch.optim, {}), (co, {"lowering": "eager"}), (co, {"lowering": "multi_tensor"})):
            params = _doubles()
            optimizer = getattr(library, kind)(params, **options, **OPTIONS.get(kind, {}))
            _steps(optimizer, params, steps, 0.5)
            if sharing == "share_memory":
                optimizer.share_memory()
            elif sharing == "by hand":
                for entry in (e for entries in optimizer.state.values() for e in entries.values()):
                    if isinstance(entry, torch.Tensor):
                        entry.share_memory_()
            yield f"{kind} {options} {sharing}", optimizer, params


def _steps(optimizer: Any, params: Any, count: int, grad: float) -> None:
    for _ in range(count):
        for param in params:
            param.grad = grad * torch.ones_like(param)
        optimizer.step()


def _two_steps_and_tell(made: Any, results: Any) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    signal.alarm(LIMIT)
    for each in made:
        _steps(*each, 2, -0.25)
    results.send([_numbers(*each) for each in made])


def _numbers(optimizer: Any, params: Any) -> list[dict[str, Any]]:
    """Parameters and state by name, as Python's numbers."""
    return [{k: torch.as_tensor(e).tolist() for k, e in {**optimizer.state[p], "param": p}.items()} for p in params]


@pytest.fixture
def double() -> Iterator[None]:
    """Let torch.optim too keep its scalars in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("steps", [0, 2])
def test_a_spawned_process_has_and_shares_what_torchs_does(steps: int) -> None:
    """Steps here, two there, two here: parameters, state and counts are torch's in both processes."""
    sharing = ["as they are", "share_memory", *(["by hand"] if steps else [])]  # by hand, where torch has state too
    made = [each for how in sharing for each in _made(how, steps)]
    handed = [each[1:] for each in made]
    context = torch.multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_two_steps_and_tell, args=(handed, writer), daemon=True)
    child.start()
    there = reader.recv() if reader.poll(LIMIT) else None
    child.kill()
    child.join()
    assert there is not None
    for each in handed:
        _steps(*each, 2, 1.0)
    here = [_numbers(*each) for each in handed]
    for found in (there, here):
        for i, (name, _, _) in enumerate(made):
            for wanted, got in zip(found[i - i % 3], found[i], strict=True):
                for entry in wanted.keys() & got.keys() if "SGD" in name else wanted:
                    said = f"{name}: {entry} is {got[entry]} for {wanted[entry]}"
                    torch.testing.assert_close(got[entry], wanted[entry], rtol=1e-12, atol=1e-12, msg=said)


def test_what_a_user_keeps_in_the_state_travels_before_and_after_a_step() -> None:
    params = _parameters()
    optimizer = co.AdamW(params, lowering="eager")
    optimizer.state[params[0]]["own"] = torch.full((2,), 3.0)
    optimizer.state["all"] = "kept"
    for moments in ([], ["exp_avg", "exp_avg_sq", "step"]):
        state, (first, second) = copy.deepcopy((optimizer.state, params))
        assert state["all"] == "kept"
        assert [sorted(state[first]), sorted(state[second])] == [sorted([*moments, "own"]), moments]
        assert state[first]["own"].tolist() == [3.0, 3.0]
        optimizer.step()
