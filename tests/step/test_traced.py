"""Steps inside the user's own torch.compile."""

from __future__ import annotations

import copy
import gc
import json
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, ruled, shifted, stacked
from new_process import printed_by
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import compiled_optim as co
from compiled_optim.optimizer import engine_of

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler.*")

X = torch.linspace(-1, 1, 24).view(6, 4)
Y = X.sum(1, keepdim=True)


@pytest.fixture(autouse=True)
def traced_backward() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def _model(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8, bias), nn.Tanh(), nn.Linear(8, 1, bias))


def _loss(model: nn.Module) -> torch.Tensor:
    return (model(X) - Y).square().mean()


def _move_hyperparameters(optimizer: co.CompiledOptimizer, step: int) -> None:
    """Change every hyperparameter a little, within its range, by assignment on even steps and in place on odd ones."""
    group = optimizer.param_groups[0]
    for hyper in optimizer._declaration.hypers:
        moved = shifted(optimizer, hyper, 0.01 * (step % 7))
        if step % 2:
            group[hyper.name] = moved if hyper.is_tuple else moved[0]
        else:
            for tensor, value in zip(group.tensors(hyper.name), moved, strict=True):
                tensor.fill_(value)


def _train(optimizer_class: type[co.CompiledOptimizer], wrap: Callable[..., Any], part: str) -> tuple[nn.Module, Any]:
    model = _model(bias=optimizer_class._granularity != "matrix")
    optimizer = optimizer_class(model.named_parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    step = wrap(optimizer.step) if part == "step" else optimizer.step

    def train_step() -> torch.Tensor:
        loss = _loss(model)
        loss.backward()
        step()
        optimizer.zero_grad()
        return loss.detach()

    run = wrap(train_step) if part == "whole" else train_step
    for i in range(50):
        run()
        scheduler.step()
        _move_hyperparameters(optimizer, i)
    assert all(s["step"] == 50 for s in optimizer.state.values())
    return model, optimizer


@pytest.mark.parametrize("part", ["step", "whole"])
@pytest.mark.parametrize("optimizer", [*ruled("dense"), *stacked()], ids=lambda c: c.__name__)
def test_one_graph_while_every_hyperparameter_moves(optimizer: type[co.CompiledOptimizer], part: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled, _ = _train(optimizer, lambda f: torch.compile(f, backend=counter, fullgraph=True), part)
    eager, _ = _train(optimizer, lambda f: f, part)
    assert counter.frame_count == 1
    for ours, expected in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lowering", ["auto", "inductor"])
def test_whole_step_through_inductor_equals_torch(lowering: str) -> None:
    model, reference = _model(), _model()
    optimizer = co.AdamW(model.named_parameters(), lr=0.03, weight_decay=0.2, lowering=lowering)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.03, weight_decay=0.2)

    @torch.compile(fullgraph=True)
    def train_step() -> torch.Tensor:
        loss = _loss(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(10):
        train_step()
        _loss(reference).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        expected.step()
        expected.zero_grad()
    for param, twin in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


def test_gradient_accumulation_and_reading_parameters_after_the_step() -> None:
    model, reference = _model(), _model()
    optimizer = co.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        for _ in range(2):
            (_loss(model) / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return model[0].weight.detach().sum()  # the new value, not the one the forward saw

    compiled = torch.compile(lambda: train_step(model, optimizer), backend="aot_eager", fullgraph=True)
    for _ in range(4):
        torch.testing.assert_close(compiled(), train_step(reference, expected))


def test_closure_and_compiled_model() -> None:
    model = torch.compile(_model(), backend="aot_eager")
    reference = _model()
    optimizer, expected = co.AdamW(model.named_parameters(), lr=0.1), torch.optim.AdamW(reference.parameters(), lr=0.1)

    def closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        return loss

    for _ in range(4):
        ours = optimizer.step(lambda: closure(model, optimizer))
        torch.testing.assert_close(ours, expected.step(lambda: closure(reference, expected)))


def test_gradients_cleared_first_in_one_graph_that_leaves_no_trace() -> None:
    """torch 2.13 lets a graph that clears gradients and reads them break every graph that is traced after it."""
    counter = CompileCounterWithBackend("aot_eager")
    sides = []
    for wrap in (lambda f: torch.compile(f, backend=counter, fullgraph=True), lambda f: f):
        model_of_this_side = _model()
        optimizer_of_this_side = co.AdamW(model_of_this_side.named_parameters(), lr=0.03)

        def train_step(model: nn.Module = model_of_this_side, optimizer: co.AdamW = optimizer_of_this_side) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrap(train_step)
        for _ in range(5):
            run()
        sides.append(model_of_this_side)
    assert all(map(torch.equal, *(side.parameters() for side in sides)))
    assert counter.frame_count == 1

    other = _model()
    stepped = co.ASGD(other.parameters())
    _loss(other).backward()
    torch.compile(stepped.step, backend="aot_eager", fullgraph=True)()
    assert stepped.state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("name", ["step", "step_in_graph"])
def test_operator_is_well_formed(name: str) -> None:
    model = _model()
    optimizer = co.AdamW(model.named_parameters(), lr=0.1)
    params = [p.detach() for p in model.parameters()]
    grads = [torch.ones_like(p) for p in params]
    arguments = (params, grads, list(range(len(params))), engine_of(optimizer).name)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(getattr(torch.ops.compiled_optim, name).default, arguments, test_utils=checks)


def test_copies_of_parameters_get_the_new_values() -> None:
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = co.SGD([weight, other], lr=0.5)
    kept = other.grad = torch.ones(2)
    stand_in = weight.detach().clone()
    torch.ops.compiled_optim.step([stand_in], [torch.ones(3)], [0], engine_of(optimizer).name)
    assert torch.equal(stand_in, torch.full((3,), 0.5))
    assert torch.equal(weight, stand_in)
    assert torch.equal(other, torch.ones(2))
    assert other.grad is kept
    assert weight.grad is None


def test_operator_counts_a_version_of_every_parameter_once() -> None:
    """Autograd finds out by it that a tensor it saved was overwritten."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = co.SGD(params, lr=0.5)
    versions = [p._version for p in params]
    with torch.no_grad():
        torch.ops.compiled_optim.step([params[1]], [torch.ones(3)], [1], engine_of(optimizer).name)
    assert [p._version for p in params] == [versions[0], versions[1] + 1]
    assert all(p.grad is None for p in params)


def _step_by_hand(name: str, params: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch.ops.compiled_optim.step(params, [torch.ones_like(p) for p in params], [*range(len(params))], name)


def _twins() -> tuple[list[list[nn.Parameter]], list[co.CompiledOptimizer]]:
    params = [[nn.Parameter(torch.full((3,), i)), nn.Parameter(torch.full((2,), i))] for i in (1.0, 2.0)]
    return params, [co.SGD(each, lr=0.5) for each in params]


@pytest.mark.parametrize("copied", [False, True], ids=["own parameters", "copies of some"])
@pytest.mark.parametrize("called", [0, 1])
@pytest.mark.parametrize("given", [0, 1])
def test_of_equal_optimizers_the_parameters_choose(given: int, called: int, copied: bool) -> None:
    params, optimizers = _twins()
    names = [engine_of(optimizer).name for optimizer in optimizers]
    assert names[0] != names[1]
    handed = [params[given][0].detach().clone() if copied else params[given][0], params[given][1]]
    _step_by_hand(names[called], handed)
    for i, side in enumerate(params):
        expected = 1.0 + i - 0.5 * (i == given)
        assert all((p == expected).all() for p in side)
    assert all((tensor == 0.5 + given).all() for tensor in handed)


@pytest.mark.parametrize("called", [0, 1])
def test_of_equal_optimizers_the_name_chooses_where_all_parameters_are_copies(called: int) -> None:
    params, optimizers = _twins()
    names = [engine_of(optimizer).name for optimizer in optimizers]
    copies = [p.detach().clone() for p in params[called]]
    _step_by_hand(names[called], copies)
    assert [side[0][0].item() for side in params] == [1.0 - 0.5 * (called == 0), 2.0 - 0.5 * (called == 1)]
    del optimizers[called]
    with pytest.raises(RuntimeError, match=re.escape(f"compiled for the optimizer [{names[called]}], but it is not in")):
        _step_by_hand(names[called], copies)
    assert [side[0][0].item() for side in params] == [1.0 - 0.5 * (called == 0), 2.0 - 0.5 * (called == 1)]


def test_parameters_of_another_optimizer_are_refused() -> None:
    (mine, others), (optimizer, _) = _twins()
    others[1].data = torch.ones(7)
    name = engine_of(optimizer).name
    late = nn.Parameter(torch.ones(3))
    other = co.Lion([("late", late), *((f"{i}", p) for i, p in enumerate(mine[1:]))], lr=0.5)
    with pytest.raises(RuntimeError, match=r"the parameters are another optimizer's; there are: .*Lion of late") as raised:
        _step_by_hand(name, [late, mine[1]])
    assert all(engine_of(each).name in str(raised.value) for each in (optimizer, other))
    assert all((p == 1).all() for p in (late, *mine))


def test_a_name_says_what_the_optimizer_is() -> None:
    def named(optimizer: co.CompiledOptimizer) -> str:
        engine_of(optimizer).current()
        return engine_of(optimizer).name

    def model(*, bias: bool = True) -> nn.Module:  # of a width no other test has, as optimizers that live are counted
        return nn.Sequential(nn.Linear(4, 11, bias), nn.Tanh(), nn.Linear(11, 1, bias))

    first = co.AdamW(model().named_parameters(), lr=0.1)
    before = named(first)
    assert before.startswith("AdamW of 0.weight (11, 4), 4 in all, ")
    others = [
        co.SGD(model().named_parameters()),
        co.AdamW(model().double().named_parameters()),
        co.AdamW(model().parameters()),
        co.AdamW(model(bias=False).named_parameters()),
    ]
    again = copy.deepcopy(first)
    assert len({named(each) for each in (first, again, *others)}) == 6
    assert all(named(each).endswith(" #0") for each in others)
    assert named(again) == before.replace(" #0", " #1")
    reference = weakref.ref(engine_of(first))
    gc.disable()
    try:
        del first
        assert reference() is None
    finally:
        gc.enable()
    again.param_groups[0].update(lr=0.3, betas=(0.1, 0.2))
    again.load_state_dict(again.state_dict())
    again.max_grad_norm = 0.5
    again.step()
    assert named(again) == before.replace(" #0", " #1")
    assert named(co.AdamW(model().named_parameters(), lr=0.2)) == before
    again.add_param_group({"params": [("late", nn.Parameter(torch.ones(2)))]})
    assert named(again).startswith("AdamW of 0.weight (11, 4), 5 in all, ")


def test_names_that_change_cost_a_compile_and_step_the_right_one() -> None:
    counter = CompileCounterWithBackend("aot_eager")  # which hands over copies
    optimizers = [co.AdamW(_model().named_parameters(), lr=0.1) for _ in range(2)]
    twins = copy.deepcopy(optimizers)

    def step(optimizer: co.CompiledOptimizer) -> None:
        optimizer.step()

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for i in range(4):
        for ours, twin in zip(optimizers, twins, strict=True):
            if i == 2:
                for each in (ours, twin):
                    each.add_param_group({"params": [("late", nn.Parameter(torch.ones(2)))]})
            owned = [[p for group in each.param_groups for p in group["params"]] for each in (ours, twin)]
            for j, pair in enumerate(zip(*owned, strict=True)):
                for p in pair:
                    p.grad = torch.full_like(p, 1.0 + i * j)
            compiled(ours)
            twin.step()
            for p, q in zip(*owned, strict=True):
                torch.testing.assert_close(p, q)
    assert counter.frame_count == 4


@pytest.mark.full
def test_a_kept_step_in_a_process_with_other_optimizers(tmp_path: Path) -> None:
    place = str(tmp_path / "step")
    printed_by("kept_step", KEPT_STEP=place)
    found = json.loads(printed_by("kept_step", KEPT_STEP=place))
    assert found["trained"]
    assert found["stay"] == [True, True, True]
    assert re.match(r"this code was compiled for the optimizer \[AdamW of .* but the parameters are another", found["error"])


def _reads(optimizer: co.CompiledOptimizer) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    def read(x: torch.Tensor) -> torch.Tensor:
        return x * optimizer.param_groups[0]["lr"]

    def loop(x: torch.Tensor) -> torch.Tensor:
        for group in optimizer.param_groups:
            x = x + group["lr"]
        return x

    def assign(x: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = x
        return x * optimizer.param_groups[0]["lr"]

    return {"read": read, "loop": loop, "assign": assign}


@pytest.mark.parametrize("way", ["read", "loop", "assign"])
def test_compiled_code_that_reads_param_groups_runs(way: str) -> None:
    ours, twin = (co.AdamW(_model().named_parameters(), lr=0.25) for _ in range(2))
    compiled = torch.compile(_reads(ours)[way], backend="aot_eager")
    for i in range(4):
        x = torch.tensor(0.5 + i, dtype=torch.float64)
        assert compiled(x) == _reads(twin)[way](x)
        assert ours.param_groups[0]["lr"] == twin.param_groups[0]["lr"]
        for optimizer in (ours, twin):
            optimizer.param_groups[0]["lr"] = 0.125 * (i + 1)
    torch._dynamo.reset()
    whole = torch.compile(_reads(ours)[way], backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"hyperparameter with opt.hyperparameter\(name, group\)"):
        whole(torch.tensor(1.0))


def test_hyperparameters_in_one_graph() -> None:
    first, second = _model().parameters(), _model().parameters()
    optimizer = co.AdamW([{"params": first}, {"params": second, "lr": 0.5}], lr=0.25)

    def read(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * optimizer.hyperparameter("lr", 1), x * optimizer.hyperparameter("betas")[1]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(read, backend=counter, fullgraph=True)
    compiles = 0
    for i in range(6):
        lr, beta = 0.1 * i, 0.5 + 0.05 * i
        optimizer.param_groups[1]["lr"] = lr
        optimizer.param_groups[0].update(betas=(0.3, beta))
        assert compiled(torch.tensor(2.0, dtype=torch.float64)) == (2 * lr, 2 * beta)
        compiles = compiles or counter.frame_count
    assert counter.frame_count == compiles > 0
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.75})
    assert optimizer.hyperparameter("lr", 2) == optimizer.param_groups[2]["lr"] == 0.75


def test_no_compiler_puts_an_operator_whose_host_half_must_run_into_a_cuda_graph() -> None:
    """Inductor ends its graphs before the operator and begins new ones after it."""
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    graph = torch.fx.Graph()
    assert is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.compiled_optim.step.default))
    assert not is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.compiled_optim.step_in_graph.default))
    assert not is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.aten.mul.Tensor))


@pytest.mark.full
def test_hooks_that_come_after_compiling_are_called() -> None:
    """And those of all optimizers, each until it is removed."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    model, called = _model(), []
    optimizer = co.AdamW(model.named_parameters())

    @torch.compile
    def train() -> None:
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    for register in (optimizer.register_step_post_hook, register_optimizer_step_pre_hook):
        hook = register(lambda *_: called.append(len(called)))
        train()
        hook.remove()
        train()
    assert called == [0, 1]


@pytest.mark.quick
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("clears_first", [True, False])
def test_a_plain_tensor_beside_a_model_that_is_not_trained(clears_first: bool, lowering: Any) -> None:
    model = _model().requires_grad_(requires_grad=False)
    shift, unused = (torch.zeros(6, 4, requires_grad=True) for _ in range(2))
    theirs = shift.detach().clone().requires_grad_()
    ours, reference = co.SGD([shift, unused], lr=0.1, lowering=lowering), torch.optim.SGD([theirs], lr=0.1)

    def train(optimizer: torch.optim.Optimizer, added: torch.Tensor) -> None:
        if clears_first:
            optimizer.zero_grad()
        model(X + added).square().mean().backward()
        optimizer.step()
        if not clears_first:
            optimizer.zero_grad()

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(train, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(ours, shift)
        train(reference, theirs)
        torch.testing.assert_close(shift, theirs)
    assert counter.frame_count == 1


@pytest.mark.quick
def test_gradients_of_a_traced_backward_are_their_own() -> None:
    """With ``zero_grad`` first and a graph break behind the backward, which torch 2.13 takes for one buffer."""
    assert json.loads(printed_by("traced_gradients")) == [[[1, 10, 100]] * 3] * 3
