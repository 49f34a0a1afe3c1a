"""Tensors that change hands between two training steps: compiled code trains those that are the optimizer's now.

The reference is a loop that is not compiled, with torch.optim in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simulated_graph
import torch
from catalog import COMBINED, LOWERINGS, required, ruled, stacked
from new_process import printed_by
from torch import nn
from torch._dynamo.utils import counters

import compiled_optim as co

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler.*", "ignore:.*CUDAGraphRunner.*", "ignore:.*recompile.*")

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.7, 0.8), "eps": 1e-4, "weight_decay": 0.2}


@pytest.fixture(autouse=True)
def traced_backward() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Three layers, of which the first two have parameters of the same shapes; a fourth one can be put in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.d: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(self.a(x.to(self.a.weight.dtype)).tanh()).tanh()))


def _fresh(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-0.7, 0.9, torch.Size(shape).numel(), dtype=torch.float64).view(shape))


def _replace(model: Model) -> None:
    model.b.weight = _fresh(4, 4)


def _replace_by_another_shape(model: Model) -> None:
    model.c.weight, model.c.bias = _fresh(3, 4), _fresh(3)


def _swap(model: Model) -> None:
    model.a.weight, model.b.weight = model.b.weight, model.a.weight


def _tie(model: Model) -> None:
    model.b.weight = model.a.weight


def _untie(model: Model) -> None:
    model.b.bias = nn.Parameter(model.b.bias.detach() + 1)  # `_tied` made it the first layer's


def _remove(model: Model) -> None:
    model.b = nn.Identity()  # type: ignore[assignment]


def _assign_data(model: Model) -> None:
    model.b.weight.data = _fresh(4, 4).data


def _swap_tensors(model: Model) -> None:
    other = _fresh(4, 4)
    other.grad = None
    torch.utils.swap_tensors(model.b.weight, other)


def _load_by_assignment(model: Model) -> None:
    values = {name: value + 0.25 for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def _freeze(model: Model) -> None:
    model.b.weight.requires_grad_(False)


def _add(model: Model) -> None:
    layer = nn.Linear(2, 2).to(torch.float64)
    layer.weight, layer.bias = _fresh(2, 2), _fresh(2)
    model.d = layer


CHANGES: dict[str, Callable[[Model], None]] = {
    "nothing": lambda model: None,
    "replace": _replace,
    "replace by another shape": _replace_by_another_shape,
    "swap": _swap,
    "tie": _tie,
    "untie": _untie,
    "remove": _remove,
    "assign data": _assign_data,
    "swap tensors": _swap_tensors,
    "load by assignment": _load_by_assignment,
    "freeze": _freeze,
    "add": _add,
}


def _tell(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's first group have what the model has now, in the model's order."""
    optimizer.param_groups[0]["params"] = list(model.parameters())


def _tell_by_group(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Take away what the model no longer has, and put what is new into a group of its own."""
    own = list(model.parameters())
    kept = [p for p in optimizer.param_groups[0]["params"] if any(p is q for q in own)]
    optimizer.param_groups[0]["params"][:] = kept
    if new := [p for p in own if not any(p is q for q in kept)]:
        names = {id(p): name for name, p in model.named_parameters()}
        optimizer.add_param_group({"params": [(f"new.{names[id(p)]}", p) for p in new]})


def _take_out(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Take a parameter out of the group that the model may still have."""
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [p for p in params if p is not model.a.bias]


TOLD: dict[str, Callable[[Model, torch.optim.Optimizer], None]] = {
    "not told": lambda model, optimizer: None,
    "told": _tell,
    "told by another group": _tell_by_group,
    "told less": _take_out,
}


class Training:
    """A model in training: parameters, gradients and state by name, after each call."""

    def __init__(
        self,
        make: Callable[[Model], torch.optim.Optimizer],
        wrap: Callable[..., Any],
        *,
        is_tied: bool = False,
        clears_first: bool = False,
    ) -> None:
        self.model = Model().to(torch.float64)
        if is_tied:
            self.model.b.bias = self.model.a.bias
        self.optimizer = make(self.model)
        self._first = list(self.model.parameters())  # which may leave the model

        def train(x: torch.Tensor) -> torch.Tensor:
            if clears_first:
                self.optimizer.zero_grad()
            loss: torch.Tensor = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            if not clears_first:
                self.optimizer.zero_grad()
            return loss.detach()

        self._train = wrap(train, self)

    def step(self) -> float:
        return float(self._train(X))

    def seen(self) -> list[Any]:
        """Values, gradients and state of all parameters, of those that left the model too."""
        params = [*self._first, *self.model.parameters()]
        state = self.optimizer.state
        entries = [{k: v.clone() for k, v in state[p].items()} if p in state else {} for p in params]
        moved = [{k: v for k, v in e.items() if k != "step"} if e.get("step", 0) else {} for e in entries]
        grads = [None if p.grad is None else p.grad.clone() for p in params]
        return [[p.detach().clone() for p in params], grads, moved, [float(e.get("step", 0)) for e in entries]]


def _eager(train: Callable[..., Any], training: Training) -> Callable[..., Any]:
    return train


def _whole(train: Callable[..., Any], training: Training) -> Callable[..., Any]:
    return torch.compile(train, backend="eager", fullgraph=True)


def _in_parts(train: Callable[..., Any], training: Training) -> Callable[..., Any]:
    """Only the step and ``zero_grad`` are compiled."""

    def train_in_parts(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = training.model(x).square().mean()
        loss.backward()
        step()
        return loss.detach()

    @torch.compile(backend="eager", fullgraph=True)
    def step() -> None:
        training.optimizer.step()
        training.optimizer.zero_grad()

    return train_in_parts


def _run(train: Callable[..., Any], training: Training) -> Callable[..., Any]:
    return co.CUDAGraphRunner(train, optimizers=training.optimizer, modules=training.model)


WAYS: dict[str, tuple[str, Callable[..., Any]]] = {
    "called": ("auto", _eager),
    "called, eager": ("eager", _eager),
    "whole": ("auto", _whole),
    "whole, eager": ("eager", _whole),
    "whole, inlined": ("inductor", _whole),
    "whole, cleared first": ("auto", _whole),
    "whole, inlined, cleared first": ("inductor", _whole),
    "step": ("auto", _in_parts),
    "step, inlined": ("inductor", _in_parts),
    "runner": ("auto", _run),
}


def _traces() -> int:
    return counters["stats"]["unique_graphs"]


def _near(one: Any, two: Any) -> None:
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def _pair(way: str, *, is_tied: bool = False) -> tuple[Callable[..., Any], Training, Training]:
    """What wraps the function that trains, and two trainings: one by this package, one by torch.optim."""
    (lowering, wrap), how = WAYS[way], {"is_tied": is_tied, "clears_first": way.endswith("cleared first")}
    ours = Training(lambda m: co.AdamW(m.named_parameters(), lowering=lowering, **OPTIONS), wrap, **how)
    reference = Training(lambda m: torch.optim.AdamW(m.named_parameters(), **OPTIONS), _eager, **how)
    return wrap, ours, reference


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_what_is_whose(change: str, told: str, way: str) -> None:
    wrap, ours, reference = _pair(way, is_tied=change == "untie")
    for _ in range(2):
        _near(ours.step(), reference.step())
    assert _traces() == (wrap in (_whole, _in_parts))
    for trained in (ours, reference):
        CHANGES[change](trained.model)
        TOLD[told](trained.model, trained.optimizer)
    for _ in range(3):
        _near(ours.step(), reference.step())
        _near(ours.seen(), reference.seen())
    has_gradients = any(p.grad is not None for p in ours.model.parameters())  # also of what the optimizer does not have
    assert _traces() <= 2 + has_gradients


REFUSED = {"replace", "replace by another shape", "untie", "load by assignment"}


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_follows_what_its_optimizer_was_told(change: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is captured again, once. It refuses a parameter by name that the module lost and the optimizer has."""
    simulated_graph.install(monkeypatch)
    _, ours, reference = _pair("runner", is_tied=change == "untie")
    for _ in range(5):
        _near(ours.step(), reference.step())
    before = co.compile_report(ours.optimizer).captures
    assert len(before) == 1
    for trained in (ours, reference):
        CHANGES[change](trained.model)
        TOLD[told](trained.model, trained.optimizer)
    if change in REFUSED and (told == "not told" or (told == "told less" and change != "untie")):
        kept = [p.detach().clone() for p in ours.optimizer.param_groups[0]["params"]]
        with pytest.raises(
            RuntimeError, match=r"parameter '[abc]\.(weight|bias)' of the module is no longer .*group's params"
        ):
            ours.step()
        assert all(map(torch.equal, kept, ours.optimizer.param_groups[0]["params"]))
        _tell(ours.model, ours.optimizer)
        _tell(reference.model, reference.optimizer)
    for _ in range(5):
        _near(ours.step(), reference.step())
        _near(ours.seen(), reference.seen())
    assert len(co.compile_report(ours.optimizer).captures) <= 2


def _assign(entries: Any, name: str, value: torch.Tensor) -> None:
    entries[name] = value


def _assign_data_of(entries: Any, name: str, value: torch.Tensor) -> None:
    entries[name].data = value


STATE: dict[str, Callable[[Any, str, torch.Tensor], None]] = {
    "assign": _assign,
    "assign data": _assign_data_of,
    "fill": lambda entries, name, value: entries[name].copy_(value),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", ["step", "exp_avg"])
@pytest.mark.parametrize("change", STATE)
@pytest.mark.parametrize("way", WAYS)
def test_state_that_gets_other_values_or_memory(way: str, change: str, name: str) -> None:
    _, ours, reference = _pair(way)
    for value in (7.0, 3.0):
        for _ in range(2):
            _near(ours.step(), reference.step())
        for trained in (ours, reference):
            entries = trained.optimizer.state[trained.model.b.weight]
            STATE[change](entries, name, torch.full_like(entries[name], value))
        for _ in range(2):
            _near(ours.step(), reference.step())
            _near(ours.seen(), reference.seen())
    assert _traces() <= 3


@pytest.mark.quick
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_another_dtype(way: str, steps: int) -> None:
    """Without state, torch.optim goes on."""
    lowering, wrap = WAYS[way]
    how = {"clears_first": way.endswith("cleared first")}
    ours = Training(lambda m: co.SGD(m.named_parameters(), lr=0.1, lowering=lowering), wrap, **how)
    reference = Training(lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1), _eager, **how)
    for trained in (ours, reference):
        for _ in range(steps):
            trained.step()
        trained.model.to(torch.float32)
    for _ in range(3):
        torch.testing.assert_close(ours.step(), reference.step(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.seen()[:2], reference.seen()[:2], rtol=1e-6, atol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("told", ["not told", "told"])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_is_replaced_and_put_back(way: str, told: str) -> None:
    _, ours, reference = _pair(way)
    pairs = [(trained, trained.model.b.weight) for trained in (ours, reference)]
    for weight in (None, _fresh(4, 4), None):
        for trained, first in pairs:
            trained.model.b.weight = first if weight is None else nn.Parameter(weight.detach().clone())
            TOLD[told](trained.model, trained.optimizer)
        for _ in range(3):
            _near(ours.step(), reference.step())
            _near(ours.seen(), reference.seen())


@pytest.mark.parametrize("told", ["not told", "told"])
@pytest.mark.parametrize("way", ["whole", "whole, inlined", "step", "step, inlined", "runner"])
@pytest.mark.parametrize("optimizer", [*ruled("dense"), *stacked(), *COMBINED])
def test_every_optimizer_trains_what_it_has(optimizer: type[co.CompiledOptimizer], way: str, told: str) -> None:
    """The reference is the optimizer itself, where nothing is compiled."""
    lowering, wrap = WAYS[way]

    def make(lowering: Any) -> Callable[[Model], torch.optim.Optimizer]:
        def make(model: Model) -> torch.optim.Optimizer:
            for layer in (model.a, model.b, model.c):
                layer.bias = None  # type: ignore[assignment]
            params: Any = model if optimizer in COMBINED else model.named_parameters()
            return optimizer(params, lowering=lowering, **required(optimizer))

        return make

    ours, reference = Training(make(lowering), wrap), Training(make("eager"), _eager)
    for change in (lambda model: None, _replace, _swap):
        for trained in (ours, reference):
            change(trained.model)
            TOLD[told](trained.model, trained.optimizer)
        for _ in range(2):
            torch.testing.assert_close(ours.step(), reference.step(), rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(ours.seen()[:2], reference.seen()[:2], rtol=1e-6, atol=1e-8)


@pytest.mark.quick
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("clears_first", [True, False])
def test_a_plain_tensor_beside_a_model_that_is_not_trained(clears_first: bool, lowering: Any) -> None:
    model = Model().to(torch.float64).requires_grad_(requires_grad=False)
    shift, unused = (torch.zeros(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    theirs = shift.detach().clone().requires_grad_()
    ours, reference = co.SGD([shift, unused], lr=0.1, lowering=lowering), torch.optim.SGD([theirs], lr=0.1)

    def train(optimizer: torch.optim.Optimizer, added: torch.Tensor) -> None:
        if clears_first:
            optimizer.zero_grad()
        model(X + added).square().mean().backward()
        optimizer.step()
        if not clears_first:
            optimizer.zero_grad()

    compiled = torch.compile(train, backend="eager", fullgraph=True)
    for _ in range(3):
        compiled(ours, shift)
        train(reference, theirs)
        _near(shift, theirs)
    assert _traces() == 1


@pytest.mark.quick
def test_gradients_of_a_traced_backward_are_their_own() -> None:
    """With ``zero_grad`` first and a graph break behind the backward, which torch 2.13 takes for one buffer."""
    assert json.loads(printed_by("traced_gradients")) == [[[1, 10, 100]] * 3] * 3
