"""A step that is made anew says why: to whoever captures it, and in the report."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import simulated_graph
import torch
from torch import nn

import compiled_optim as co
from compiled_optim.optimizer import engine_of


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    params = {"first": nn.Parameter(torch.ones(4)), "frozen": nn.Parameter(torch.ones(3), requires_grad=False)}
    params["first"].grad = torch.ones(4)
    optimizer = co.SGD(params.items(), **{"lr": 0.1, "momentum": 0.5} | options)
    optimizer.step()
    return optimizer


def first(optimizer: Any) -> nn.Parameter:
    param: nn.Parameter = optimizer.param_groups[0]["params"][0]
    return param


def thaw(optimizer: Any) -> None:
    frozen = optimizer.param_groups[0]["params"][1]
    frozen.grad = torch.ones(3)


def gradient_of_another_dtype(optimizer: Any) -> None:
    param = first(optimizer)
    param.grad_dtype = None
    param.grad = torch.ones(4, dtype=torch.bfloat16)


CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "an option is assigned": ("param_groups[0]['nesterov'] was written", lambda o: o.param_groups[0].update(nesterov=True)),
    "an option is deleted": ("param_groups[0]['maximize'] was written", lambda o: o.param_groups[0].pop("maximize")),
    "momentum becomes 0": (
        "param_groups[0]['momentum'] another number than 0 -> 0",
        lambda o: o.param_groups[0].update(momentum=0.0),
    ),
    "a group is added": ("param_groups[1] was added", lambda o: o.add_param_group({"params": [("new", torch.ones(2))]})),
    "a list is edited": ("a list of groups or parameters was written", lambda o: o.param_groups[0]["params"].pop()),
    "groups are replaced": ("param_groups was replaced", lambda o: setattr(o, "param_groups", [*o.param_groups])),
    "a parameter gets its first gradient": ("'frozen' got its first gradient", thaw),
    "a parameter moves": ("'first' moved", lambda o: setattr(first(o), "data", first(o).data.clone())),
    "state moves": (
        "state 'momentum_buffer' of 'first' moved",
        lambda o: setattr(o.state[first(o)]["momentum_buffer"], "data", torch.zeros(4)),
    ),
    "state is assigned": (
        "state 'momentum_buffer' of a parameter was written",
        lambda o: o.state[first(o)].update(momentum_buffer=torch.zeros(4)),
    ),
    "the state of a parameter is replaced": (
        "the state of a parameter was replaced",
        lambda o: o.state.update({first(o): {"step": torch.tensor(1.0), "momentum_buffer": torch.zeros(4)}}),
    ),
    "a gradient has another dtype": (
        "the gradient of 'first' is torch.bfloat16, not torch.float32",
        gradient_of_another_dtype,
    ),
    "a schedule begins": ("schedule() was called for lr", lambda o: o.schedule(lr=lambda step: 0.1 / step)),
    "health is watched": ("watch_health(True) was called", lambda o: o.watch_health()),
    "accumulation begins": (
        "optimizer accumulation was switched on",
        lambda o: (setattr(o, "optimizer_accumulation", True), setattr(o, "optimizer_accumulation", False)),
    ),
    "clipping ends": ("max_grad_norm or skip_nonfinite on -> off", lambda o: setattr(o, "max_grad_norm", None)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_report_says_why_a_step_was_made_anew(change: str) -> None:
    reason, make = CHANGES[change]
    optimizer = made(**({"max_grad_norm": 1.0} if change == "clipping ends" else {}))
    assert co.compile_report(optimizer).rebuilds == ()
    make(optimizer)
    optimizer.step()
    assert co.compile_report(optimizer).rebuilds == ((reason, 1),)
    printed = re.sub(r"\s+", " ", str(co.compile_report(optimizer)))
    assert f"rebuilt on the host, which compiles nothing by itself: {reason} " in printed
    optimizer.step()
    assert co.compile_report(optimizer).rebuilds == ((reason, 1),)


@pytest.mark.parametrize("change", [name for name in CHANGES if name not in ("accumulation begins",)])
def test_the_reason_is_known_before_the_step(change: str) -> None:
    """A capture that asks gets the same words; when it was built, nothing is stale."""
    reason, make = CHANGES[change]
    optimizer = made(**({"max_grad_norm": 1.0} if change == "clipping ends" else {}))
    step = engine_of(optimizer).step
    assert step.stale_for(None) == ""
    make(optimizer)
    engine_of(optimizer).clipping.take(engine_of(optimizer).clip_args)
    assert engine_of(optimizer).step is not step or step.stale_for(None) == reason


@pytest.mark.parametrize("whole", [False, True])
def test_a_capture_names_the_last_change_and_no_earlier_one(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_graph.install(monkeypatch)
    optimizer = made()
    runner: Any = co.CUDAGraphRunner(*([optimizer.step, optimizer] if whole else [optimizer]), warmup=1)
    run = runner if whole else runner.step
    for _ in range(3):
        run()
    optimizer.param_groups[0]["nesterov"] = True
    for _ in range(3):
        run()
    optimizer.param_groups[0]["lr_scale"] = {"first": 2.0, "frozen": 1.0}
    for _ in range(3):
        run()
    _, first_cause, second = co.compile_report(optimizer).captures
    assert "nesterov" in first_cause
    assert second == "param_groups[0]['lr_scale'] was written"


def test_entries_of_users_share_one_reason() -> None:
    optimizer = made()
    for i in range(3):
        optimizer.param_groups[0][f"mine{i}"] = i
        del optimizer.param_groups[0][f"mine{i}"]
        optimizer.step()
    assert co.compile_report(optimizer).rebuilds == (("param_groups[0] was written", 3),)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (list.reverse, "the groups were reordered"),
        (list.pop, "a group was removed"),
        (
            lambda groups: list.append(groups, dict(groups[0], params=[nn.Parameter(torch.ones(2))])),
            "param_groups[2] was replaced",
        ),
    ],
    ids=["reversed", "popped", "appended"],
)
def test_a_list_of_groups_that_was_edited_without_a_report_is_noticed(change: Callable[[Any], object], reason: str) -> None:
    optimizer = co.SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)], lr=0.1)
    change(optimizer.param_groups)
    assert engine_of(optimizer).step.stale().startswith(reason)
