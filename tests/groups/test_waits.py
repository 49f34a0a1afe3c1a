"""Setting a hyperparameter never waits for the device: nothing is copied there from the host, and nothing back.

On a CUDA device that is not there; ``test_cuda`` asks CUDA itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

import compiled_optim as co
from compiled_optim.memory import torch_internals
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import Record, recording

pytest.importorskip("triton")


@pytest.fixture
def recorder() -> Iterator[Record]:
    with fake_cuda(90), recording("cuda") as recorder:
        yield recorder


def on_device(value: float) -> torch.Tensor:
    return torch.full((), value, device="cuda")


def one_cycle(optimizer: CompiledOptimizer) -> None:
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=True)
    optimizer.step()
    scheduler.step()


def cyclic(optimizer: CompiledOptimizer) -> None:
    scheduler = CyclicLR(optimizer, 0.1, 0.3, step_size_up=3, cycle_momentum=True)
    optimizer.step()
    scheduler.step()


WRITES: dict[str, Callable[[CompiledOptimizer], object]] = {
    "number": lambda o: o.param_groups[0].update(lr=0.3),
    "tuple": lambda o: o.param_groups[0].update(betas=(0.5, 0.7)),
    "host tensor": lambda o: o.param_groups[0].update(lr=torch.tensor(0.3, device="cpu")),
    "host tensor of one element": lambda o: o.param_groups[0].update(lr=torch.tensor([0.3], device="cpu")),
    "mixed tuple": lambda o: o.param_groups[0].update(betas=(torch.tensor(0.5, device="cpu"), on_device(0.7))),
    "device tensor": lambda o: o.param_groups[0].update(lr=on_device(0.3)),
    "in place": lambda o: o.hyperparameter("lr").fill_(0.3),
    "clipping": lambda o: (setattr(o, "max_grad_norm", 0.3), o.step()),
    "health": lambda o: (o.watch_health(), o.step(), o.step()),
    "a new group": lambda o: o.add_param_group(
        {"params": [torch.zeros(2, device="cuda")], "lr": torch.tensor(0.3, device="cpu")}
    ),
    "a rate of the constructor": lambda o: co.SGD([torch.zeros(2, device="cuda")], lr=torch.tensor(0.3, device="cpu")),
    "OneCycleLR": one_cycle,
    "CyclicLR": cyclic,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_nothing_that_is_written_waits(write: Callable[[CompiledOptimizer], object], recorder: Record) -> None:
    param = torch.zeros(3, device="cuda", requires_grad=True)
    param.grad = torch.zeros_like(param)
    optimizer = co.AdamW([param], lr=0.5)
    optimizer.step()
    recorder.take()
    write(optimizer)
    optimizer.step()
    operators = recorder.take().operators
    assert operators
    assert not [o for o in operators if o.waits]


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}], ids=["plain", "skipping"])
@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
def test_a_watched_step_does_as_much_for_many_parameters_as_for_one(
    lowering: str, options: dict[str, Any], recorder: Record
) -> None:
    """Two launches more, and nothing that the host does for each of them, where kernels read tables."""
    found = []
    for count in (1, 40):
        optimizer = many(count, lowering=lowering, **options)
        work = []
        for watched in (False, True):
            optimizer.watch_health(watched)
            for _ in range(2):
                optimizer.step()
                record = recorder.take()
            work.append([*(launch.name for launch in record.launches), *(operator.name for operator in record.operators)])
        more = Counter(work[1]) - Counter(work[0])
        found.append({name: times for name, times in more.items() if name not in ("as_strided", "detach")})
    if lowering == "multi_tensor":
        assert found == [{"look": 1, "note": 1}] * 2
    else:
        assert found[0] == found[1]
        assert found[0]["_foreach_copy_"] == 3
        assert sum(found[0].values()) <= 10


SCHEDULERS: dict[str, Callable[[CompiledOptimizer], Any]] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.1, total_steps=9),
}


@pytest.mark.parametrize("groups", [1, 24])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_asks_nothing_of_the_device_until_the_step_which_copies_once(
    make: Callable[[CompiledOptimizer], Any], groups: int, recorder: Record
) -> None:
    optimizer = many(groups)
    scheduler = make(optimizer)
    optimizer.step()
    recorder.take()
    optimizer.step()
    before = [o.name for o in recorder.take().operators]
    for _ in range(2):
        scheduler.step()
        optimizer.param_groups[-1]["weight_decay"] = 0.3
        scheduler.get_last_lr(), dict(optimizer.param_groups[0]), optimizer.hyperparameters()
        assert recorder.take().operators == []
        optimizer.step()
        operators = recorder.take().operators
        assert [o.crosses for o in operators].count(True) == 1
        assert [o.name for o in operators] == ["_to_copy", "_foreach_copy_", *before]


@pytest.mark.full
@pytest.mark.parametrize(
    "read",
    [
        lambda o: o.hyperparameter("lr"),
        lambda o: engine_of(o).inline([0]),  # as a compiled step does
        lambda o: torch.compile(lambda: o.hyperparameter("lr") * 2, backend="eager", fullgraph=True)(),
        lambda o: engine_of(o).let_read(),  # as the capture of a graph by hand does
    ],
    ids=["handed out", "compiled step", "compiled function", "captured by hand"],
)
def test_a_number_does_not_wait_where_somebody_may_read_it_earlier(
    read: Callable[[CompiledOptimizer], object], recorder: Record
) -> None:
    optimizer = many(1, lowering="inductor")
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    read(optimizer)
    assert not optimizer._engine.changes.unsent
    recorder.take()
    optimizer.param_groups[0]["lr"] = 0.3
    assert [o.name for o in recorder.take().operators] == ["fill_"]


def many(groups: int, **options: Any) -> co.AdamW:
    params = [torch.zeros(3, device="cuda", requires_grad=True) for _ in range(groups)]
    for param in params:
        param.grad = torch.zeros_like(param)
    return co.AdamW([{"params": [param]} for param in params], lr=0.5, **options)


def test_a_write_that_waits_would_be_seen(recorder: Record) -> None:
    torch.tensor(0.3, device="cuda")
    torch.tensor(0.3).to("cuda:0")
    torch.zeros(3).to("cuda:0", non_blocking=True)
    assert [o.waits for o in recorder.take().operators] == [True, True, False]


def test_a_replayed_function_copies_no_scale_that_its_graph_copies(recorder: Record) -> None:
    param = torch.zeros(3, device="cuda", requires_grad=True)
    param.grad = torch.zeros_like(param)
    optimizer = co.SGD([param])
    scaler = torch.full((), 8.0, device="cuda"), torch.zeros((), device="cuda")
    optimizer.grad_scale, optimizer.found_inf = scaler  # type: ignore[attr-defined]
    optimizer.step()
    recorder.take()
    optimizer.step()
    assert [o.name for o in recorder.take().operators] == ["copy_", "copy_"]
    assert engine_of(optimizer).step.follow((None, *scaler, False)) == ""
    assert recorder.take().operators == []


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()


def trained(make: Callable[..., Any], use: Callable[[nn.Module, Any], object]) -> list[torch.Tensor]:
    """The parameters after two steps, and two of what ``use`` does after a learning rate was assigned."""
    model = model_of()
    optimizer = make(model.named_parameters(), lr=0.01)
    for rate in (None, None, 0.05, 0.002):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.3)
        if rate is None:
            optimizer.step(lambda: 1.0)
        else:
            optimizer.param_groups[0]["lr"] = rate
            use(model, optimizer)
    return [p.detach() for p in model.parameters()]


def released(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    co.prepare_for_gradient_release(model, optimizer)
    model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    co.remove_gradient_release(model)


def accumulated(model: nn.Module, optimizer: Any) -> None:
    for on in (True, False):
        optimizer.optimizer_accumulation = on
        optimizer.step()


def a_new_parameter(model: nn.Module, optimizer: Any) -> None:
    """Whose state starts from a hyperparameter."""
    late = nn.Parameter(torch.ones(2, dtype=torch.float64))
    late.grad = torch.ones_like(late)
    optimizer.param_groups[0]["params"].append(late)
    optimizer.param_groups[0]["param_names"].append(f"late{id(late)}")
    if isinstance(optimizer, co.Adagrad):
        optimizer.param_groups[0]["initial_accumulator_value"] = 0.5
        optimizer.state_dict()  # makes state without a step
    optimizer.step()
    model[0].weight.data[0, 0] += late.detach().sum()


USES: dict[str, tuple[Callable[..., Any], Callable[[nn.Module, Any], object]]] = {
    "a step with a closure": (co.LBFGS, lambda model, optimizer: optimizer.step(lambda: 1.0)),
    "gradient release": (co.AdamW, released),
    "accumulation": (co.AdamW, accumulated),
    "state that starts from it": (co.Rprop, a_new_parameter),
    "state that is made before the step": (co.Adagrad, a_new_parameter),
    "clipping": (functools.partial(co.SGD, max_grad_norm=0.1), lambda model, optimizer: optimizer.step()),
}


@pytest.mark.full
@pytest.mark.parametrize("use", USES)
def test_a_number_that_waits_is_there_when_it_is_used(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(*USES[use])
    monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)  # numbers wait where graphs can be captured
    assert all(map(torch.equal, trained(*USES[use]), expected))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_number_waits_on_where_sending_it_failed(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    optimizer = co.SGD([weight], lr=1.0)
    optimizer.param_groups[0]["lr"] = 0.125
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", mock.Mock(side_effect=error))
        with pytest.raises(error):
            optimizer.step()
    optimizer.step()
    assert weight.tolist() == [0.875, 0.875]
    assert optimizer.hyperparameter("lr") == optimizer.param_groups[0]["lr"] == 0.125


def test_a_schedule_begins_with_a_number_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    optimizer = co.SGD([weight], lr=1.0, lowering="eager")
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.schedule(lr=lambda step: 0.5 * step)
    assert optimizer.param_groups[0]["lr"] == 0.125
    optimizer.schedule(lr=None)
    assert optimizer.param_groups[0]["lr"] == 0.125
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.schedule(lr=lambda step: 0.5 * step)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("waited"))
        optimizer.step()
    assert weight.tolist() == [0.5, 0.5]


def test_a_read_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which buffers there are is decided by what was written, not by whether somebody looked."""
    monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    found = []
    for reads in (False, True):
        weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        weight.grad = torch.ones_like(weight)
        optimizer = co.SGD([weight], lr=0.1)
        optimizer.step()
        optimizer.hyperparameter("momentum").fill_(0.0)
        assert not reads or optimizer.param_groups[0]["momentum"] == 0
        optimizer.step()
        found.append(sorted(optimizer.state[weight]))
    assert found[0] == found[1]


def test_numerics_are_checked_with_a_number_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals.CAPTURING, "cpu", lambda: None)
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = co.SGD([("weight", weight)], lr=0.25)
    optimizer.step()
    assert co.check_numerics(optimizer).findings == ()
    optimizer.param_groups[0]["lr"] = 1e-6
    (found,) = co.check_numerics(optimizer).findings
    assert found.figures["available"] == pytest.approx(1e-6)


def test_tracked_steps_wait_for_nothing_and_changes_wait_once(recorder: Record) -> None:
    params = [torch.zeros(40, 40, device="cuda", requires_grad=True) for _ in range(5)]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = co.AdamW(params)
    optimizer.step()
    recorder.take()
    optimizer.step()
    plain = recorder.take()
    optimizer.track_changes()
    optimizer.step()
    recorder.take()
    optimizer.step()
    tracked = recorder.take()
    assert [o.name for o in tracked.operators] == [o.name for o in plain.operators]
    assert [launch.name for launch in tracked.launches] == [launch.name for launch in plain.launches]
    with mock.patch.object(FakeTensor, "tolist", return_value=[3, 0, 1600, 1, 0]) as read:  # the counts
        changes = optimizer.changes()
    assert read.call_count == 1
    assert [None if c.indices is None else len(c.indices) for c in changes] == [3, None, 1]
    assert not [operator for operator in recorder.take().operators if operator.waits]
