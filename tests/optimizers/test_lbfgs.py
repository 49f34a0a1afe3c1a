"""L-BFGS against torch.optim.LBFGS and naive loops, and its fixed form without waiting for the device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forbidden import Forbidden
from round_trips import through_a_file
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.common_optimizers import optim_db

import compiled_optim as co
from compiled_optim.optimizers.lbfgs.history import direction, new_state, record
from compiled_optim.optimizers.lbfgs.line_search import CURVATURE, SUFFICIENT_DECREASE, Point, strong_wolfe

STOPPING = {"max_eval", "tolerance_grad", "tolerance_change"}
NEVER_STOP = {"max_eval": 10**6, "tolerance_grad": 0.0, "tolerance_change": 0.0}

# Over a few iterations. Over many the iteration magnifies any difference; see test_equals_torch_step_by_step.
TOLERANCE = 1e-10

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"lr": 1e-3, "max_iter": 7, "history_size": 3},
    {"lr": 0.3, "max_iter": 4},
    {"max_iter": 30, "max_eval": 9, "tolerance_change": 1e-3},
    {"line_search_fn": "strong_wolfe"},
    {"line_search_fn": "strong_wolfe", "history_size": 2, "max_iter": 5, "lr": 0.1},
    {"line_search_fn": "strong_wolfe", "max_iter": 12, "max_eval": 7},
    {"line_search_fn": "strong_wolfe", "lr": 30.0, "tolerance_grad": 1e-2},
    {"tolerance_grad": -1.0, "tolerance_change": -1.0, "max_iter": 8},
    {"line_search_fn": "strong_wolfe", "tolerance_grad": -1.0, "tolerance_change": -1.0, "max_iter": 5},
    {"max_iter": 0},
    {"max_eval": 0},
]


def _rosenbrock(x: torch.Tensor) -> torch.Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


class _Valley(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([-1.2, 1.0, 0.7, 2.0], dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return _rosenbrock(self.x)


class _Regression(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.last = nn.Linear(4, 6, dtype=dtype), nn.Linear(6, 1, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        for param in (*self.first.parameters(), *self.last.parameters()):
            param.data = torch.randn(param.shape, generator=generator).to(dtype) / 2
        self.inputs = torch.randn(32, 4, generator=generator).to(dtype)
        self.targets = self.inputs.sin().sum(1, keepdim=True)

    def forward(self) -> torch.Tensor:
        return (self.last(self.first(self.inputs).tanh()) * self.scale - self.targets).square().mean()


PROBLEMS = {"rosenbrock": _Valley, "regression": _Regression}


def _closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        return loss

    return closure


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _pair(problem: str, **kwargs: Any) -> tuple[nn.Module, co.LBFGS, nn.Module, torch.optim.LBFGS]:
    ours, theirs = PROBLEMS[problem](), PROBLEMS[problem]()
    return ours, co.LBFGS(ours.parameters(), **kwargs), theirs, torch.optim.LBFGS(theirs.parameters(), **kwargs)


def _state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_equals_torch_step_by_step(problem: str, configuration: dict[str, Any]) -> None:
    """As near to torch.optim as that is to itself from starting points one rounding error away.

    Products with the whole history round otherwise than one pair after the other. Largest difference observed: 25 times that
    of torch.optim to itself, 7e-10 to 3e-11 after 100 iterations; less than 2e-12 wherever torch's own is less than 1e-12.
    """
    ours, optimizer, theirs, reference = _pair(problem, **configuration)
    own_difference = 1e-13
    nudged = []
    for nudge in (-(2**-52), 2**-52, 2**-51):
        model = PROBLEMS[problem]()
        for param in model.parameters():
            param.data.mul_(1 + nudge)
        nudged.append((model, torch.optim.LBFGS(model.parameters(), **configuration)))
    for _ in range(5):
        for model, each in ((ours, optimizer), (theirs, reference), *nudged):
            each.step(_closure(model, each))
        expected = _flat(theirs)
        own_difference = max(own_difference, *((_flat(model) - expected).abs().max().item() for model, _ in nudged))
        assert (_flat(ours) - expected).abs().max().item() < 100 * own_difference
        for name in ("func_evals", "n_iter"):
            if all(_state(each)[name] == _state(reference)[name] for _, each in nudged):
                assert _state(optimizer)[name] == _state(reference)[name], name
    assert own_difference < 1e-7


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_equals_torch_iteration_by_iteration(search: str | None) -> None:
    """One iteration per step shows every direction and step length; a short history is overwritten several times."""
    ours, optimizer, theirs, reference = _pair("rosenbrock", max_iter=1, history_size=3, lr=0.5, line_search_fn=search)
    for _ in range(25):
        optimizer.step(_closure(ours, optimizer))
        reference.step(_closure(theirs, reference))
        torch.testing.assert_close(_state(optimizer)["d"], _state(reference)["d"], rtol=1e-8, atol=TOLERANCE)
        assert _state(optimizer)["t"].item() == pytest.approx(float(_state(reference)["t"]), rel=1e-8)
    torch.testing.assert_close(_flat(ours), _flat(theirs), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("history_size", [2, 100])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_fixed_iterations_equal_torch_that_never_stops(problem: str, history_size: int) -> None:
    ours, theirs = PROBLEMS[problem](), PROBLEMS[problem]()
    common = {"lr": 0.3, "max_iter": 4, "history_size": history_size}
    optimizer = co.LBFGS(ours.parameters(), fixed_iterations=True, **common)
    reference = torch.optim.LBFGS(theirs.parameters(), **common, **NEVER_STOP)
    for step in range(6):
        for group in (optimizer.param_groups[0], reference.param_groups[0]):
            group["lr"] = 0.3 / (step + 1)
        loss = optimizer.step(_closure(ours, optimizer))
        torch.testing.assert_close(loss, reference.step(_closure(theirs, reference)), rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(_flat(ours), _flat(theirs), rtol=TOLERANCE, atol=TOLERANCE)
        assert _state(optimizer)["n_iter"] == _state(reference)["n_iter"] == 4 * (step + 1)
        assert _state(optimizer)["func_evals"] == _state(reference)["func_evals"]


@pytest.mark.parametrize("configuration", [*CONFIGURATIONS, {"fixed_iterations": True, "max_iter": 5}], ids=str)
def test_maximizing_is_minimizing_the_negative(configuration: dict[str, Any]) -> None:
    """Bit for bit; a step returns the loss as the closure has it, and the state is that of the negative."""
    up, down = _Regression(), _Regression()
    rising = co.LBFGS(up.parameters(), maximize=True, **configuration)
    falling = co.LBFGS(down.parameters(), **configuration)

    def negative() -> torch.Tensor:
        rising.zero_grad()
        loss = -up()
        loss.backward()
        return loss

    for _ in range(4):
        assert rising.step(negative) == -falling.step(_closure(down, falling))
        assert torch.equal(_flat(up), _flat(down))
    assert all(torch.equal(value, _state(falling)[name]) for name, value in _state(rising).items())
    rising.param_groups[0]["maximize"] = False
    assert rising.step(_closure(up, rising)) == falling.step(_closure(down, falling))
    assert torch.equal(_flat(up), _flat(down))


def test_fixed_iterations_go_on_where_torch_would_stop() -> None:
    model = _Valley()
    optimizer = co.LBFGS(model.parameters(), max_iter=9, max_eval=2, tolerance_grad=1e9, fixed_iterations=True)
    optimizer.step(_closure(model, optimizer))
    assert _state(optimizer)["n_iter"] == _state(optimizer)["func_evals"] == 9


@pytest.mark.parametrize("fixed", [False, True])
def test_pairs_without_curvature_are_skipped(fixed: bool) -> None:
    """A function that is straight at first and concave after gives pairs that the history must not take."""

    class Bent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.tensor([3.0, 2.0, -2.5], dtype=torch.float64))

        def forward(self) -> torch.Tensor:
            return torch.where(self.x > 1.5, self.x, -(self.x.cos())).sum() + 0.1 * self.x[0] * self.x[1].sin()

    ours, theirs = Bent(), Bent()
    common = {"lr": 0.6, "max_iter": 5, "history_size": 3}
    optimizer = co.LBFGS(ours.parameters(), fixed_iterations=fixed, **common, **({} if fixed else NEVER_STOP))
    reference = torch.optim.LBFGS(theirs.parameters(), **common, **NEVER_STOP)
    sizes = []
    for _ in range(6):
        optimizer.step(_closure(ours, optimizer))
        reference.step(_closure(theirs, reference))
        torch.testing.assert_close(_flat(ours), _flat(theirs), rtol=1e-8, atol=1e-8)
        sizes.append(int(_state(optimizer)["pairs"]))
    assert 3 < sizes[-1] < _state(optimizer)["n_iter"] - 1  # some were taken, more than fit, and some were not


def test_direction_equals_the_two_loop_recursion() -> None:
    generator = torch.Generator().manual_seed(1)

    def vector() -> torch.Tensor:
        return torch.randn(30, dtype=torch.float64, generator=generator)

    basis = torch.randn(30, 30, dtype=torch.float64, generator=generator)
    hessian = basis @ basis.t() + torch.eye(30, dtype=torch.float64)
    pairs = new_state(5, 30, torch.float64, torch.device("cpu"))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(14):
        step = vector()
        change = hessian @ step * (-1 if number in (2, 9) else 1)  # negative curvature
        allowed = number != 6
        record(pairs, step, change, torch.tensor(allowed))
        if allowed and number not in (2, 9):
            kept = [*kept, (step, change)][-5:]
        gradient = vector()
        result, factors = gradient.clone(), []
        for s, y in reversed(kept):
            factors.append(s.dot(result) / y.dot(s))
            result -= factors[-1] * y
        result *= kept[-1][1].dot(kept[-1][0]) / kept[-1][1].dot(kept[-1][1])
        for (s, y), factor in zip(kept, reversed(factors), strict=True):
            result += s * (factor - y.dot(result) / y.dot(s))
        for rows in {min(number + 1, 5), 5}:
            torch.testing.assert_close(direction(pairs, gradient, rows), -result, rtol=1e-10, atol=1e-10)


def test_fixed_iterations_never_wait_for_the_device() -> None:
    model = _Regression()
    optimizer = co.LBFGS(model.parameters(), max_iter=3, history_size=4, lr=0.1, fixed_iterations=True)
    traces = []
    for step in range(4):  # the very first step too
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        closure = _closure(model, optimizer)
        with Forbidden() as mode:
            optimizer.step(closure)
        traces.append(mode.seen)
    assert traces.count(traces[0]) == 4  # nothing depends on how many steps there were
    assert "lift_fresh" not in traces[0]  # torch.tensor of a Python value: a copy from the host


def test_what_decides_on_the_host_is_seen_to_wait() -> None:
    model = _Regression()
    optimizer = co.LBFGS(model.parameters())
    with pytest.raises(AssertionError, match="waits for the device"), Forbidden():
        optimizer.step(_closure(model, optimizer))


def test_work_of_a_direction_does_not_grow_with_the_history() -> None:
    counts = []
    for size in (3, 100):
        model = _Valley()
        optimizer = co.LBFGS(model.parameters(), max_iter=2, history_size=size, lr=0.01, fixed_iterations=True)
        closure = _closure(model, optimizer)
        with Forbidden() as mode:
            optimizer.step(closure)
        counts.append(len(mode.seen))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("fixed", [False, True])
def test_schedules_compile_nothing_and_keep_tensors(fixed: bool) -> None:
    model = _Regression()
    optimizer = co.LBFGS(model.parameters(), max_iter=2, lr=0.1, fixed_iterations=fixed)
    addresses = {name: value.data_ptr() for name, value in _state(optimizer).items()}
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with co.no_recompiles():
        for _ in range(3):
            optimizer.step(_closure(model, optimizer))
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    assert {name: value.data_ptr() for name, value in _state(optimizer).items()} == addresses
    assert co.compile_report(optimizer).steps == 3
    assert str(co.compile_report(optimizer)).startswith("LBFGS: eager lowering, 3 steps")


def test_kinds_of_parameters_and_gradients() -> None:
    """Complex, 0-dim, transposed and sparse ones, and one that never gets a gradient, as one vector."""

    def make() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(2)
        return [
            nn.Parameter(torch.randn(3, dtype=torch.complex128, generator=generator)),
            nn.Parameter(torch.randn((), dtype=torch.float64, generator=generator)),
            nn.Parameter(torch.randn(6, 2, dtype=torch.float64, generator=generator)),
            nn.Parameter(torch.randn(4, dtype=torch.float64, generator=generator)),
        ]

    def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[torch.Tensor]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            rows = torch.nn.functional.embedding(torch.tensor([1, 3, 1]), params[2], sparse=True)
            loss = (params[0] * (1 + 2j) - params[1]).abs().square().sum() + (rows - 0.3).square().sum() + params[1] ** 2
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        assert params[2].grad.is_sparse
        assert params[3].grad is None
        return params

    ours, theirs = make(), make()
    start = ours[3].detach().clone()
    run(co.LBFGS(ours, max_iter=3, lr=0.3), ours)
    run(torch.optim.LBFGS(theirs, max_iter=3, lr=0.3), theirs)
    for param, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, twin, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(ours[3], start)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_memory_layout_does_not_matter(search: str | None) -> None:
    values = torch.randn(6, 4, dtype=torch.float64)
    results = []
    for make in (lambda v: v.clone(), lambda v: v.t().contiguous().t(), lambda v: v.repeat_interleave(2, 1)[:, ::2]):
        param = nn.Parameter(make(values))
        optimizer = co.LBFGS([param], max_iter=6, lr=0.2, line_search_fn=search)

        def closure(param: nn.Parameter = param, optimizer: co.LBFGS = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (param.cos() + 0.1 * param**2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        results.append(param.detach())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision(dtype: torch.dtype) -> None:
    model, expected = _Regression(dtype), _Regression()
    optimizer = co.LBFGS(model.parameters(), max_iter=10, lr=0.3, fixed_iterations=True)
    reference = torch.optim.LBFGS(expected.parameters(), max_iter=10, lr=0.3, **NEVER_STOP)
    optimizer.step(_closure(model, optimizer))
    reference.step(_closure(expected, reference))
    assert _state(optimizer)["old_stps"].dtype == torch.float32
    tolerance = 1e-4 if dtype == torch.float32 else 0.15  # observed: 3e-6 and 0.05
    torch.testing.assert_close(_flat(model).double(), _flat(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("history_size", [3, 100])
@pytest.mark.parametrize("configuration", [{}, {"line_search_fn": "strong_wolfe"}, {"fixed_iterations": True}], ids=str)
def test_five_more_steps_after_loading_are_bit_equal(configuration: dict[str, Any], history_size: int) -> None:
    model = _Regression()
    kwargs = {"max_iter": 2, "lr": 0.3, "history_size": history_size, **configuration}
    optimizer = co.LBFGS(model.named_parameters(), **kwargs)
    for _ in range(4):
        optimizer.step(_closure(model, optimizer))
    saved = through_a_file(optimizer.state_dict())
    twin = copy.deepcopy(model)
    resumed = co.LBFGS(twin.named_parameters(), **{**kwargs, "lr": 0.9})
    addresses = {name: value.data_ptr() for name, value in _state(resumed).items()}
    assert resumed.load_state_dict(saved) == co.LoadReport([], [], [], [])
    assert {name: value.data_ptr() for name, value in _state(resumed).items()} == addresses
    copied = copy.deepcopy((model, optimizer))
    for _ in range(5):
        for m, o in ((model, optimizer), (twin, resumed), copied):
            o.step(_closure(m, o))
    assert torch.equal(_flat(model), _flat(twin))
    assert torch.equal(_flat(model), _flat(copied[0]))
    assert _state(optimizer)["func_evals"] == _state(resumed)["func_evals"]


@pytest.mark.parametrize("history_size", [3, 100])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_interchange_with_torch(search: str | None, steps: int, history_size: int) -> None:
    kwargs = {"max_iter": 2, "lr": 0.3, "history_size": history_size, "line_search_fn": search}
    ours, optimizer, theirs, reference = _pair("regression", **kwargs)
    for _ in range(steps):
        optimizer.step(_closure(ours, optimizer))
        reference.step(_closure(theirs, reference))
    to_torch, to_ours = copy.deepcopy(ours), copy.deepcopy(theirs)
    in_torch = torch.optim.LBFGS(to_torch.parameters())
    in_torch.load_state_dict(through_a_file(optimizer.state_dict()))
    in_ours = co.LBFGS(to_ours.parameters(), **{**kwargs, "lr": 1.0})
    in_ours.load_state_dict(through_a_file(reference.state_dict()))
    for _ in range(5):
        for model, each in ((ours, optimizer), (theirs, reference), (to_torch, in_torch), (to_ours, in_ours)):
            each.step(_closure(model, each))
    for model in (ours, to_torch, to_ours):
        torch.testing.assert_close(_flat(model), _flat(theirs), rtol=TOLERANCE, atol=TOLERANCE)
    # What torch.optim carries along of our own entry is out of date now and must not be believed.
    again = co.LBFGS(copy.deepcopy(to_torch).parameters(), **kwargs)
    again.load_state_dict(through_a_file(in_torch.state_dict()))
    history = in_torch.state[next(iter(to_torch.parameters()))]["old_stps"]
    count = int(_state(again)["pairs"])
    assert count == len(history)
    torch.testing.assert_close(_state(again)["old_stps"][:count], torch.stack(history))
    kept = _state(again)["old_stps"][:count] @ _state(again)["old_dirs"][:count].t()
    torch.testing.assert_close(_state(again)["products"][:count, :count].triu(), kept.triu())


def test_names_in_another_order() -> None:
    model = _Regression()
    optimizer = co.LBFGS(model.named_parameters(), max_iter=3, lr=0.3)
    for _ in range(3):
        optimizer.step(_closure(model, optimizer))
    twin = copy.deepcopy(model)
    resumed = co.LBFGS([(f"module.{n}", p) for n, p in reversed(list(twin.named_parameters()))], max_iter=3)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for _ in range(3):
        for m, o in ((model, optimizer), (twin, resumed)):
            o.step(_closure(m, o))
    torch.testing.assert_close(_flat(model), _flat(twin), rtol=TOLERANCE, atol=TOLERANCE)
    named = co.named_state_dict(optimizer)
    assert co.load_named_state_dict(resumed, named) == co.LoadReport([], [], [], [])
    for m, o in ((model, optimizer), (twin, resumed)):
        m.load_state_dict(model.state_dict())
        o.step(_closure(m, o))


def test_another_history_size_keeps_the_newest_pairs() -> None:
    model = _Regression()
    optimizer = co.LBFGS(model.parameters(), max_iter=3, lr=0.3, history_size=6)
    for _ in range(5):
        optimizer.step(_closure(model, optimizer))
    saved = through_a_file(optimizer.state_dict())
    newest = torch.stack(saved["state"][0]["old_dirs"][-2:])
    twin = copy.deepcopy(model)
    small = co.LBFGS(twin.parameters(), max_iter=3, lr=0.3, history_size=2)
    small.load_state_dict(saved, hyperparameters="keep")
    optimizer.param_groups[0]["history_size"] = 2
    for _ in range(3):
        for each in (small, optimizer):
            assert torch.equal(torch.stack(each.state_dict()["state"][0]["old_dirs"]), newest)
        for m, each in ((twin, small), (model, optimizer)):
            each.step(_closure(m, each))
        newest = torch.stack(small.state_dict()["state"][0]["old_dirs"])
    assert torch.equal(_flat(model), _flat(twin))
    optimizer.param_groups[0]["history_size"] = 20
    assert torch.equal(torch.stack(optimizer.state_dict()["state"][0]["old_dirs"]), newest)
    optimizer.step(_closure(model, optimizer))
    assert len(optimizer.state_dict()["state"][0]["old_dirs"]) > 2
    assert _flat(model).isfinite().all()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s["state"][0].pop("d"), "the checkpoint has no d"),
        (
            lambda s: s["state"][0].update(d=torch.zeros(3)),
            r"d of the checkpoint has shape \(3,\) instead of \(\d+,\)",
        ),
        (lambda s: s["state"][0]["old_stps"].pop(), "old_stps and old_dirs of the checkpoint must be equally long"),
        (
            lambda s: s["param_groups"].append({**s["param_groups"][0], "params": []}),
            "LBFGS has one parameter group, the checkpoint 2",
        ),
        (lambda s: s["param_groups"][0]["params"].pop(), "4 parameters instead of 6|5 parameters instead of 6"),
    ],
)
def test_a_refused_checkpoint_changes_nothing(spoil: Callable[[dict[str, Any]], Any], message: str) -> None:
    model = _Regression()
    optimizer = co.LBFGS(model.parameters(), max_iter=2, lr=0.3)
    for _ in range(3):
        optimizer.step(_closure(model, optimizer))
    saved = through_a_file(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    spoil(saved)
    before = {name: value.clone() for name, value in _state(optimizer).items()}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(value, before[name]) for name, value in _state(optimizer).items())
    assert optimizer.hyperparameters() == [{"lr": 0.3}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"max_iter": -1}, "max_iter must be an integer >= 0, got -1"),
        ({"max_eval": 2.5}, "max_eval must be an integer >= 0, got 2.5"),
        ({"history_size": -1}, "history_size must be an integer >= 0, got -1"),
        ({"tolerance_grad": math.nan}, "tolerance_grad must be a number, got nan"),
        ({"tolerance_change": math.nan}, "tolerance_change must be a number, got nan"),
        ({"line_search_fn": "armijo"}, "line_search_fn must be None or 'strong_wolfe', got 'armijo'"),
        ({"fixed_iterations": True, "line_search_fn": "strong_wolfe"}, "fixed_iterations=True needs line_search_fn=None"),
        ({"differentiable": True}, "LBFGS does not support differentiable=True"),
        ({"max_grad_norm": 1.0}, "LBFGS does not support max_grad_norm=1.0"),
        ({"skip_nonfinite": True}, "LBFGS does not support skip_nonfinite=True"),
        ({"lowering": "inductor"}, "LBFGS has no lowering 'inductor'"),
    ],
    ids=str,
)
def test_refused_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        co.LBFGS([torch.zeros(3)], **arguments)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("name", "value"), [("max_grad_norm", 0.0), ("skip_nonfinite", True)])
def test_an_assigned_control_is_refused(name: str, value: Any, fixed: bool) -> None:
    model = _Regression()
    optimizer = co.LBFGS(model.parameters(), fixed_iterations=fixed)
    before = _flat(model)
    setattr(optimizer, name, value)
    with pytest.raises(ValueError, match=f"LBFGS does not support {name}={value}"):
        optimizer.step(_closure(model, optimizer))
    assert torch.equal(_flat(model), before)
    with pytest.raises(ValueError, match="LBFGS does not support differentiable=True"):
        optimizer.param_groups[0]["differentiable"] = True


def test_one_group_on_one_device() -> None:
    a, b = torch.zeros(3), torch.zeros(2)
    message = r"LBFGS doesn't support per-parameter options \(parameter groups\)"
    with pytest.raises(ValueError, match=message):
        co.LBFGS([{"params": [a]}, {"params": [b]}])
    optimizer = co.LBFGS([a])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [b]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="LBFGS needs parameters on one device, got cpu, meta"):
        co.LBFGS([a, torch.zeros(2, device="meta")])
    with pytest.raises(ValueError, match="LBFGS needs parameters with at least one element"):
        co.LBFGS([torch.zeros(0)])
    with pytest.raises(TypeError, match="closure"):
        optimizer.step()


def test_inputs_that_torch_lists() -> None:
    info = next(i for i in optim_db if i.optim_cls is torch.optim.LBFGS)
    for given in info.optim_inputs_func(device="cpu"):
        kwargs = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in given.kwargs.items()}
        ours, optimizer, theirs, reference = _pair("regression", **kwargs)
        for _ in range(3):
            optimizer.step(_closure(ours, optimizer))
            reference.step(_closure(theirs, reference))
        torch.testing.assert_close(_flat(ours), _flat(theirs), rtol=TOLERANCE, atol=TOLERANCE, msg=given.desc)


class TestLineSearch:
    @staticmethod
    def _search(
        function: Callable[[torch.Tensor], torch.Tensor], first: float, limit: int = 25
    ) -> tuple[Point, Point, int, int]:
        calls = 0

        def evaluate(length: float) -> Point:
            nonlocal calls
            calls += 1
            t = torch.tensor(length, dtype=torch.float64, requires_grad=True)
            value = function(t)
            (slope,) = torch.autograd.grad(value, t)
            loss = value.item()
            return Point(length, math.inf if math.isnan(loss) else loss, slope, slope.item())

        start = evaluate(0.0)
        calls = 0
        found, count = strong_wolfe(evaluate, start, first, reach=1.0, tolerance=1e-9, limit=limit)
        return start, found, count, calls

    @pytest.mark.parametrize("first", [1e-4, 0.03, 1.0, 40.0])
    @pytest.mark.parametrize(
        "function",
        [
            lambda t: (t - 3) ** 2,
            lambda t: -t / (t**2 + 2),  # Moré and Thuente, ACM TOMS 20, 1994, test 1
            lambda t: (t + 0.004) ** 5 - 2 * (t + 0.004) ** 4,  # their test 2
            lambda t: (t - 1) ** 4 + 0.3 * (5 * t).cos() - 3 * t,
            lambda t: -t + 1e-3 * (t * 8).exp(),
        ],
    )
    def test_satisfies_the_conditions(self, function: Callable[[torch.Tensor], torch.Tensor], first: float) -> None:
        start, found, count, calls = self._search(function, first)
        assert start.slope < 0
        assert found.value <= start.value + SUFFICIENT_DECREASE * found.length * start.slope
        assert abs(found.slope) <= -CURVATURE * start.slope
        assert count == calls

    def test_gives_the_better_end_when_trials_run_out(self) -> None:
        start, found, count, calls = self._search(lambda t: -t, 1.0, limit=2)  # has no point of small slope
        assert found.value < start.value
        assert count == calls == 3

    def test_stays_where_the_function_is_defined(self) -> None:
        start, found, _, _ = self._search(lambda t: -(1 - t).log() - 5 * t, 4.0)  # NaN beyond 1
        assert found.length < 1
        assert found.value < start.value


def test_a_loss_of_nan_beyond_a_border_does_not_end_the_run() -> None:
    param = nn.Parameter(torch.tensor([0.5, 0.2], dtype=torch.float64))
    optimizer = co.LBFGS([param], lr=50.0, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = -(1 - param).log().sum() - 5 * param.sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    torch.testing.assert_close(param.detach(), torch.full((2,), 0.8, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_python_floats_as_loss() -> None:
    model = _Valley()
    for fixed in (False, True):
        optimizer = co.LBFGS(model.parameters(), max_iter=2, lr=1e-3, fixed_iterations=fixed)
        closure = _closure(model, optimizer)
        assert isinstance(optimizer.step(lambda closure=closure: closure().item()), float)
        assert _state(optimizer)["n_iter"] == (
            2 if fixed else 1
        )  # by default two evaluations are the limit of two iterations


@pytest.mark.filterwarnings("ignore:.*Profiler.*", "ignore:The .grad attribute of a Tensor that is not a leaf")
def test_inside_torch_compile() -> None:
    """The closure decides and runs backward: a compiled function breaks its graph there, and fullgraph says why."""
    torch._dynamo.reset()
    ours, optimizer, theirs, reference = _pair("regression", max_iter=3, lr=0.3)
    closure = _closure(ours, optimizer)
    torch.compile(lambda: optimizer.step(closure), backend="eager")()
    reference.step(_closure(theirs, reference))
    torch.testing.assert_close(_flat(ours), _flat(theirs), rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"LBFGS\._step_outside_graphs.* should not be traced"):
        torch.compile(lambda: optimizer.step(closure), backend="eager", fullgraph=True)()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*Profiler.*")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fixed_iterations_in_one_graph(dtype: torch.dtype) -> None:
    """Forward, backward and all iterations of a step, while the learning rate moves."""
    torch._dynamo.reset()
    x, y = torch.randn(20, 6, dtype=dtype), torch.randn(20, 1, dtype=dtype)
    sides = []
    for _ in range(2):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(dtype)
        optimizer = co.LBFGS(model.named_parameters(), lr=0.5, max_iter=4, history_size=5, fixed_iterations=True)

        def closure(model: torch.nn.Module = model, optimizer: co.LBFGS = optimizer) -> torch.Tensor:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            return loss.detach()

        sides.append((model, optimizer, closure))
    (model, optimizer, closure), (twin, reference, twin_closure) = sides
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda: optimizer.step(closure), backend=counter, fullgraph=True)
    counts = []
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for step in range(6):
            for o in (optimizer, reference):
                o.param_groups[0]["lr"] = 0.5 - 0.05 * step
            assert torch.equal(compiled(), reference.step(twin_closure))
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
            counts.append(counter.frame_count)
    assert len(set(counts)) == 1  # not by the gradients that the first step leaves, either
    assert optimizer.state_dict()["state"][0]["n_iter"] == 24


@pytest.mark.filterwarnings("ignore:.*Profiler.*")
def test_the_bound_step_in_one_graph_while_the_rate_is_written_in_place() -> None:
    torch._dynamo.reset()
    x, y = torch.randn(20, 6), torch.randn(20, 1)
    model = torch.nn.Linear(6, 1)
    twin = copy.deepcopy(model)
    sides = [(m, co.LBFGS(m.parameters(), lr=0.3, max_iter=3, fixed_iterations=True)) for m in (model, twin)]

    def closure_of(model: torch.nn.Module, optimizer: co.LBFGS) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss.detach()

        return closure

    closures = [closure_of(*side) for side in sides]
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(sides[0][1].step, backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for i in range(5):
            for _, optimizer in sides:
                optimizer.hyperparameter("lr").fill_(0.3 / (i + 1))
            assert torch.equal(step(closures[0]), sides[1][1].step(closures[1]))
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert counter.frame_count == 1


@pytest.mark.parametrize("start", [(1.0, 2.3), (0.4, -3.1), (-2.0, 0.7)], ids=str)
@pytest.mark.parametrize("loss", [lambda p: p.abs().sum(), lambda p: torch.maximum(p[0] - 2 * p[1], p[1]).abs()])
def test_straight_lines_are_searched_as_by_torch(loss: Callable[[torch.Tensor], torch.Tensor], start: Any) -> None:
    """Where a cubic has no minimum but at infinity, the trial is at a bound."""
    results = []
    for cls in (co.LBFGS, torch.optim.LBFGS):
        param = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        optimizer = cls([param], line_search_fn="strong_wolfe", max_iter=4, lr=0.3)
        trials: list[torch.Tensor] = []

        def closure(param: nn.Parameter = param, optimizer: Any = optimizer, trials: Any = trials) -> torch.Tensor:
            optimizer.zero_grad()
            trials.append(param.detach().clone())
            value = loss(param)
            value.backward()
            return value

        optimizer.step(closure)
        results.append(torch.stack([*trials, param.detach().clone()]))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
