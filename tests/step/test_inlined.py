"""Compiled training steps that hold the step's own operations, with lowering='inductor'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from catalog import configurations, copies, relative_error, ruled, shifted, wide_scalars
from round_trips import copied
from simulated_trees import SimulatedTrees
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from traced_graphs import Graphs

import compiled_optim as co

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
Y = X.sum(1, keepdim=True)


@pytest.fixture(autouse=True)
def traced_backward() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    torch._dynamo.reset()


class Side:
    """A model of two groups and its training, compiled or not."""

    def __init__(self, optimizer: Callable[..., Any], backend: Any = None, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        first, second = ([*self.model[i].named_parameters(f"model.{i}")] for i in (0, 2))
        groups = [{"params": first}, {"params": second, "lr": 0.02}]
        lowering = "eager" if backend is None else "inductor"
        self.optimizer = optimizer(groups, **{"lr": 0.05, "lowering": lowering, **options})
        self.absent: tuple[int, ...] = ()
        self.train = self._train if backend is None else torch.compile(self._train, backend=backend, fullgraph=True)

    def _train(self, x: Tensor) -> Tensor:
        loss = (self.model(x) - Y).square().mean()
        loss.backward()
        for i in self.absent:
            self.model[i].weight.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def sides(optimizer: Callable[..., Any], backend: Any, **options: Any) -> tuple[Side, Side]:
    """The same training, compiled and eager."""
    return Side(optimizer, backend, **options), Side(optimizer, **options)


def equal(ours: Side, twin: Side) -> None:
    """Check that parameters and state are those of an eager step."""
    for p, q in zip(ours.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
        found, expected = ours.optimizer.state[p], twin.optimizer.state[q]
        assert found.keys() == expected.keys()
        for name, entry in found.items():
            torch.testing.assert_close(entry, expected[name], rtol=1e-12, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")


def is_inlined(side: Side) -> bool:
    return co.compile_report(side.optimizer).compiled_step == "its own operations"


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ruled("dense"), ids=lambda c: c.__name__)
def test_one_graph_of_own_operations_while_everything_moves(optimizer: type[co.CompiledOptimizer]) -> None:
    graphs = Graphs()
    momentum = dict.fromkeys(optimizer._rule.structural_hypers, 0.5)
    ours, twin = both = sides(optimizer, graphs, max_grad_norm=0.7, skip_nonfinite=True, **momentum)
    saved = [side.optimizer.state_dict() for side in both]
    schedulers: list[Any] = []
    for i in range(50):
        for place, side in enumerate(both):
            side.train(X * (1 + i % 5 if i != 7 else float("inf")))
            if i == 0:
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.97))
            else:
                schedulers[place].step()
            _move(side.optimizer, i)
            if i == 20:
                side.optimizer.load_state_dict(saved[place])
        torch.testing.assert_close(ours.optimizer.grad_norm, twin.optimizer.grad_norm, equal_nan=True)
    assert graphs.compiled == 1
    assert graphs.namespaces <= {"aten", "prims"}
    assert not graphs.operators & {"aten::_local_scalar_dense", "aten::item", "aten::nonzero"}
    assert ours.optimizer.skipped_steps == twin.optimizer.skipped_steps == 1
    assert all(state["step"] == 29 for state in ours.optimizer.state.values())
    equal(ours, twin)


def _move(optimizer: co.CompiledOptimizer, step: int) -> None:
    """Change every hyperparameter a little, within its range, by assignment on even steps and in place on odd ones."""
    optimizer.max_grad_norm = 0.3 + 0.1 * (step % 5)
    for group in optimizer.param_groups:
        for hyper in optimizer._declaration.hypers:
            moved = shifted(optimizer, hyper, 0.01 * (step % 7))
            if step % 2:
                group[hyper.name] = moved if hyper.is_tuple else moved[0]
            else:
                for tensor, value in zip(group.tensors(hyper.name), moved, strict=True):
                    tensor.fill_(value)


def _tensors(seed: int) -> list[Tensor]:
    """0-dim, empty, and in the order of other dimensions; float32 and float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 5), (), (0, 3), (4, 3, 2, 2))
    strided, scalar, empty, last = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [strided.float().t(), scalar.float(), empty, last.contiguous(memory_format=torch.channels_last)]


# A sum over all parameters has the rounding of those in float32, also for those in float64.
@pytest.mark.full
@pytest.mark.parametrize("optimizer", [c for c in ruled("dense") if not c._rule.has_totals()], ids=lambda c: c.__name__)
def test_every_configuration_equals_its_reference(optimizer: type[co.CompiledOptimizer]) -> None:
    """All of them in one graph, each with two groups and tensors of two dtypes."""
    cases = configurations(optimizer)
    ours, references = [], []
    for case in cases:
        params = [nn.Parameter(t) for t in _tensors(0)]
        twins = copies(params, torch.float64)
        for made, own, kind, options in (
            (ours, params, optimizer, {"lowering": "inductor"}),
            (references, twins, case.reference, {}),
        ):
            groups = [{"params": own[:3]}, {"params": own[3:], "lr": 0.03}]
            made.append((own, kind(groups, **case.kwargs, **options)))

    @torch.compile(backend="eager", fullgraph=True)
    def step() -> None:
        for _, each in ours:
            each.step()

    for i in range(4):
        for (params, _), (twins, _) in zip(ours, references, strict=True):
            for j, (p, twin, grad) in enumerate(zip(params, twins, _tensors(1 + i), strict=True)):
                p.grad, twin.grad = (None, None) if (i, j) == (2, 1) else (grad, grad.to(torch.float64, copy=True))
        step()
        with wide_scalars():
            for _, each in references:
                each.step()
    for case, (params, _), (twins, _) in zip(cases, ours, references, strict=True):
        assert relative_error(params[:2], twins[:2]) < 1e-6, case
        assert relative_error(params[3:], twins[3:]) < 1e-14, case


def adamw(groups: Any, **options: Any) -> co.AdamW:
    return co.AdamW(groups, weight_decay=0.3, betas=(0.6, 0.8), eps=0.03, **options)


def _scale(side: Side, scale: Tensor | None, found_inf: Tensor) -> None:
    side.optimizer.grad_scale, side.optimizer.found_inf = scale, found_inf


def sgd(groups: Any, **options: Any) -> co.SGD:
    return co.SGD(groups, weight_decay=0.3, **options)


def test_a_group_that_has_no_state_is_scheduled() -> None:
    ours, twin = sides(adamw, "eager")
    for side in (ours, twin):
        side.model[0].requires_grad_(False)
        side.optimizer.state.clear()
        side.optimizer.schedule(lr=lambda step: 0.1 / step)
    for i in range(3):
        for side in (ours, twin):
            side.train(X * (1 + i))
        equal(ours, twin)
        assert ours.optimizer.hyperparameters() == twin.optimizer.hyperparameters()
    assert is_inlined(ours)


def test_the_number_of_clipping_is_data() -> None:
    counter = CompileCounterWithBackend("eager")
    ours, twin = sides(adamw, counter, max_grad_norm=0.5)
    for i in range(6):
        for side in (ours, twin):
            side.optimizer.max_grad_norm = 0.5 / (1 + i)
            side.train(X * (1 + i))
        equal(ours, twin)
    assert counter.frame_count == 1
    for limit in (torch.tensor(0.3), None):
        for side in (ours, twin):
            side.optimizer.max_grad_norm = limit
            side.train(X)
            side.train(X * 2)
        equal(ours, twin)
    assert counter.frame_count == 3


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.01}, {"skip_nonfinite": True}], ids=str)
def test_steps_after_those_that_a_scaler_calls(options: dict[str, Any]) -> None:
    """The first of them overflows, as a first loss scale often is too large."""
    counter = CompileCounterWithBackend("eager")
    ours, twin = sides(adamw, counter, **options)
    for i in range(9):
        for side in (ours, twin):
            is_scaled = i // 3 != 1  # on, off, and on again
            if is_scaled:
                _scale(side, torch.tensor(4.0 * 2**i, dtype=torch.float64), torch.tensor(float(i == 0)))
            side.train(X * (float("inf") if i == 0 else 1 + i))
            if is_scaled:
                del side.optimizer.grad_scale, side.optimizer.found_inf
        equal(ours, twin)
    assert ours.optimizer.skipped_steps == 1
    assert counter.frame_count == 2


@pytest.mark.full
def test_a_compile_for_each_pattern_of_absent_gradients() -> None:
    """Also where every other training step is called: each pattern is called in one pass, and compiled in the other."""
    counter = CompileCounterWithBackend("eager")
    ours, twin = sides(adamw, counter, max_grad_norm=0.3)
    for i, absent in enumerate([(), (0,), (2,), (0, 2), (), (2,), (0,), (0, 2), ()] * 2):
        kept = [ours.model[j].weight for j in absent]
        before = [[p.detach().clone(), *(t.clone() for t in ours.optimizer.state[p].values())] for p in kept]
        for side in (ours, twin):
            side.absent = absent
            (side._train if i % 2 else side.train)(X * (1 + i))
        equal(ours, twin)
        for p, tensors in zip(kept, before, strict=True):
            assert all(map(torch.equal, tensors, [p, *ours.optimizer.state[p].values()]))
    assert counter.frame_count == 4


@copied
def test_a_copy_of_an_optimizer_that_was_compiled(copied: Callable[[Any], Any]) -> None:
    """One function has stepped the one, and then steps the other."""
    ours, twin = sides(adamw, "eager")
    run = torch.compile(lambda side, x: side._train(x), backend="eager", fullgraph=True)
    for i in range(4):
        if i == 2:
            kept = copied((ours.model, ours.optimizer))
            run(ours, X)
            ours.model, ours.optimizer = kept
        run(ours, X * (1 + i))
        twin._train(X * (1 + i))
        equal(ours, twin)
    assert is_inlined(ours)


def test_two_optimizers_and_two_steps_in_one_graph() -> None:
    graphs = Graphs()
    pairs = [sides(adamw, graphs), sides(sgd, graphs, momentum=0.9)]

    @torch.compile(backend=graphs, fullgraph=True)
    def run(x: Tensor) -> None:
        for _ in range(2):
            for ours, _ in pairs:
                ours._train(x)

    for i in range(3):
        run(X * (1 + i))
        for ours, twin in pairs:
            for _ in range(2):
                twin.train(X * (1 + i))
            equal(ours, twin)
    assert graphs.compiled == 1
    assert graphs.namespaces <= {"aten", "prims"}


@pytest.mark.full
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({}, "its own operations"),
        ({"max_grad_norm": 0.5}, "an operator: the norm of gradients is taken over several processes"),
        ({"cautious": True}, "an operator: AdamW takes means over all parts of 'weight'"),
    ],
    ids=["plain", "clipped", "cautious"],
)
def test_sharded_parameters(options: dict[str, Any], held: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    values, *grads = (torch.randn(4, 3, dtype=torch.float64) for _ in range(4))
    param, twin = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)])), nn.Parameter(values.clone())
    ours = adamw([("weight", param)], lowering="inductor", **options)
    theirs = adamw([("weight", twin)], lowering="eager", **options)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(ours.step, backend=counter, fullgraph=True)
    for grad in grads:
        param.grad, twin.grad = distribute_tensor(grad, mesh, [Shard(0)]), grad.clone()
        step()
        theirs.step()
        torch.testing.assert_close(param.full_tensor(), twin.detach(), rtol=1e-12, atol=0)
    assert counter.frame_count == 1
    assert co.compile_report(ours).compiled_step == held


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (lambda w: [w.to(torch.complex128)], "'param_groups[0]['params'][0]' has complex numbers"),
        (lambda w: [w, w[:2]], "shares memory with another parameter"),
    ],
    ids=["complex", "shared memory"],
)
@pytest.mark.filterwarnings("ignore:.*share memory with other parameters:RuntimeWarning")
def test_other_steps_are_an_operator(tensors: Callable[[Tensor], list[Tensor]], reason: str) -> None:
    results = []
    for lowering in ("inductor", "eager"):
        params = [nn.Parameter(t) for t in tensors(torch.linspace(-1, 1, 6, dtype=torch.float64))]
        optimizer = adamw(params, lowering=lowering)
        step = (
            torch.compile(optimizer.step, backend="aot_eager", fullgraph=True) if lowering == "inductor" else optimizer.step
        )
        for _ in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            step()
        results.append(params)
        if lowering == "inductor":
            report = co.compile_report(optimizer)
            assert report.compiled_step.startswith("an operator: ")
            assert reason in report.compiled_step
            assert f"compiled code holds {report.compiled_step}" in str(report)
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)


def test_graphs_of_a_compiler_copy_no_tensor_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = SimulatedTrees(monkeypatch)
    ours, twin = sides(adamw, trees, max_grad_norm=0.5)
    for i in range(8):
        for side in (ours, twin):
            side.optimizer.param_groups[0].update(lr=0.1 / (1 + i), betas=(0.5, 0.6 + 0.01 * i))
            side.optimizer.max_grad_norm = 0.5 + 0.1 * i
            side.train(X * (1 + i))
        equal(ours, twin)
    assert (trees.compiled, trees.recordings, trees.replays, trees.left) == (1, 1, 7, 0)
    assert trees.copied == [[(6, 4), (6, 1)]]  # x and Y
