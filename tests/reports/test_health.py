"""``health``: what does not train is reported by name, and what trains is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, registry, required
from simulated_graph import install
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import engine_of


class Experts(nn.Module):
    """Two experts, one of which no input ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 24)
        self.experts = nn.ModuleList([nn.Linear(24, 24, bias=False) for _ in range(2)])
        self.outer = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.experts[0](torch.tanh(self.inner(x)))))


def train(model: nn.Module, optimizer: Any, steps: int, change: Callable[[int], None] = lambda step: None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        (model(x) - x[:, :5]).square().mean().backward()
        change(step)
        optimizer.step()


def made(kind: Any = co.AdamW, *, dtype: torch.dtype = torch.float32, watch: bool = True, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Experts().to(dtype)
    optimizer = kind(list(model.named_parameters()), **{**required(kind), **options})
    if watch:
        optimizer.watch_health()
    return model, optimizer


def kinds(optimizer: Any, *, least_steps: int = 2) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in co.health(optimizer, least_steps).findings:
        (param,) = finding.params
        found.setdefault(param, []).append(finding.name)
    return found


DEAD = {"experts.1.weight": ["no gradient"]}


@pytest.mark.parametrize(
    "kind",
    [k for k in registry() if k._granularity != "matrix" and k not in (co.LBFGS, co.SparseAdam)],
    ids=lambda k: k.__name__,
)
def test_what_trains_is_not_reported(kind: Any) -> None:
    """Only the expert that gets nothing is, after two steps as after forty."""
    model, optimizer = made(kind, lr=1.0 if kind is co.Prodigy else 0.01)
    train(model, optimizer, 2)
    assert kinds(optimizer) == DEAD
    train(model, optimizer, 38)
    assert kinds(optimizer) == DEAD
    report = co.health(optimizer)
    assert report.watched
    assert len(report.checked) == 6
    assert "1 of 6 parameters may not train" in str(report)
    assert "(no gradient): experts.1.weight: it never had a gradient" in str(report)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"cautious": True}])
def test_watching_changes_no_bit(options: dict[str, Any], lowering: str) -> None:
    model, optimizer = made(lowering=lowering, **options)
    twin, other = made(lowering=lowering, watch=False, **options)
    train(model, optimizer, 5)
    train(twin, other, 5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [co.Prodigy, co.AdamWScheduleFree, co.Ranger])
@pytest.mark.parametrize("steps", [2, 8])
def test_a_parameter_that_began_at_zero(kind: Any, steps: int) -> None:
    """A buffer that begins as the parameter is 0 then, and that is no average that was lost."""
    model, optimizer = made(kind)
    nn.init.zeros_(model.outer.bias)
    train(model, optimizer, steps)
    assert "outer.bias" not in kinds(optimizer)


@pytest.mark.parametrize("kind", [co.AdamW, co.SGD, co.Lion])
def test_an_adapter_that_begins_at_zero_and_warms_up(kind: Any) -> None:
    """LoRA's first matrix has no gradient until the second one has moved, which a learning rate of 0 delays."""
    torch.manual_seed(0)
    down, up = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.zeros(32, 4))
    optimizer = kind({"down": down, "up": up}, lr=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 5, 1.0))
    optimizer.watch_health()
    for _ in range(8):
        optimizer.zero_grad()
        x = torch.randn(8, 32)
        (x @ down.T @ up.T - x).square().mean().backward()
        optimizer.step()
        warmup.step()
        assert kinds(optimizer) == {}


def test_updates_of_few_elements_may_pass_through_zero() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = co.SGD({"param": param}, lr=0.01)
    optimizer.watch_health()
    for step in range(30):
        param.grad = torch.full((2,), 1.0 if step < 29 else 1e-3)
        optimizer.step()
    assert kinds(optimizer) == {}


def zeroed(model: nn.Module, name: str) -> Callable[[int], None]:
    def change(step: int) -> None:
        model.get_parameter(name).grad.zero_()

    return change


def test_gradients_of_zeros() -> None:
    model, optimizer = made()
    train(model, optimizer, 2, zeroed(model, "outer.bias"))
    assert kinds(optimizer) == {**DEAD, "outer.bias": ["zero gradient"]}
    assert kinds(optimizer, least_steps=3) == {}
    train(model, optimizer, 2)
    assert kinds(optimizer) == DEAD


def test_an_element_that_is_not_sampled_counts_too() -> None:
    """The present gradient is looked at whole, so that rare rows of an embedding are not reported."""
    model, optimizer = made()

    def only_the_first(step: int) -> None:
        grad = model.inner.weight.grad
        first = grad[0, 0].clone()
        grad.zero_()
        grad[0, 0] = first

    train(model, optimizer, 3, only_the_first)
    assert kinds(optimizer) == DEAD


def test_a_parameter_that_does_not_move() -> None:
    torch.manual_seed(0)
    model = Experts()
    named = dict(model.named_parameters())
    still = {"outer.weight": named.pop("outer.weight")}
    optimizer = co.AdamW([{"params": named}, {"params": still, "lr": 0.0}])
    optimizer.watch_health()
    train(model, optimizer, 3)
    assert kinds(optimizer) == {**DEAD, "outer.weight": ["not moved"]}


def test_equal_and_opposite_updates_are_updates() -> None:
    """As of the biases of two classes."""
    param = nn.Parameter(torch.tensor([1.5, 1.5]))
    optimizer = co.SGD({"param": param}, lr=1.0)
    optimizer.watch_health()
    for _ in range(3):
        param.grad = torch.tensor([0.0625, -0.0625])
        optimizer.step()
    assert kinds(optimizer) == {}


@pytest.mark.parametrize("weights", [None, "stochastic", "kahan", "split8", "split16", "master"])
def test_updates_below_half_a_unit(weights: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are lost where nothing keeps them; with a copy of 32 bits, with remainders or at random they are not."""
    monkeypatch.setattr("compiled_optim.rule.storage.MINIMUM", 1)
    model, optimizer = made(dtype=torch.bfloat16, lr=1e-6, weights=weights)
    train(model, optimizer, 3)
    found = kinds(optimizer)
    assert found.pop("experts.1.weight") == ["no gradient"]
    if weights is None:
        assert {"inner.weight", "experts.0.weight", "outer.weight"} <= found.keys()
        assert all(reasons in (["too small"], ["not moved"]) for reasons in found.values())
        assert "in bfloat16" in str(co.health(optimizer)) or "not moved" in str(found)
    else:
        assert found == {}


@pytest.mark.parametrize(("lr", "found"), [(1e-9, []), (1e-18, ["too small"])])
def test_updates_of_double_precision(lr: float, found: list[str]) -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(20, 20, dtype=torch.float64))
    optimizer = co.AdamW({"param": param, "other": nn.Parameter(torch.ones(3))}, lr=lr, weight_decay=0)
    optimizer.watch_health()
    for _ in range(5):
        param.grad = torch.randn_like(param)
        optimizer.step()
    assert kinds(optimizer).get("param", []) == found


def test_moments_that_a_load_lost() -> None:
    model, optimizer = made()
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    lost = saved["param_groups"][0]["params"][saved["param_groups"][0]["param_names"].index("inner.weight")]
    saved["state"][lost]["exp_avg"].zero_()
    optimizer.load_state_dict(saved)
    assert kinds(optimizer) == {**DEAD, "inner.weight": ["zero moments"]}
    train(model, optimizer, 3)
    assert kinds(optimizer) == {**DEAD, "inner.weight": ["zero moments"]}
    assert "exp_avg at 0, though it has taken steps" in str(co.health(optimizer))
    unwatched = made(watch=False)[1]
    unwatched.load_state_dict(saved)
    assert kinds(unwatched) == {**DEAD, "inner.weight": ["zero moments"]}


def test_moments_of_a_parameter_that_had_none_before_the_load() -> None:
    first, later = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = co.AdamW({"first": first, "later": later}, lowering="eager")
    optimizer.watch_health()
    for _ in range(3):
        first.grad = torch.ones(3)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1] = {"step": 5.0, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    optimizer.load_state_dict(saved)
    later.requires_grad_()
    for _ in range(2):
        first.grad, later.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
    assert kinds(optimizer)["later"] == ["zero moments"]


def test_an_update_of_an_unusual_size() -> None:
    model, optimizer = made(co.SGD, lr=0.01)
    train(model, optimizer, 30)
    assert kinds(optimizer) == DEAD

    def spike(step: int) -> None:
        model.outer.weight.grad.mul_(1000)

    train(model, optimizer, 1, spike)
    assert kinds(optimizer)["outer.weight"] == ["unusual"]
    assert "of the weight, where" in str(co.health(optimizer))


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
@pytest.mark.parametrize("kind", [co.AdamW, co.SGD])
def test_a_schedule_is_no_unusual_update(kind: Any, lowering: str) -> None:
    """A tenth of the learning rate, or a restart at ten times of it, assigned or scheduled; nor is 0 at the end."""
    model, optimizer = made(kind, lr=0.01, lowering=lowering)
    for lr in (0.01, 0.001, 0.0001, 0.01):
        optimizer.param_groups[0]["lr"] = lr
        train(model, optimizer, 20)
        assert kinds(optimizer) == DEAD
        optimizer.param_groups[0]["lr"] = lr / 10
        train(model, optimizer, 1)
        assert kinds(optimizer) == DEAD
    optimizer.schedule(lr=lambda step: torch.where(step % 20 < 10, 0.01, 0.001))
    train(model, optimizer, 31)
    assert kinds(optimizer) == DEAD
    optimizer.schedule(lr=lambda step: 0.0)
    train(model, optimizer, 60)
    assert kinds(optimizer) == DEAD


def test_skipped_steps_say_nothing() -> None:
    model, optimizer = made(skip_nonfinite=True)
    train(model, optimizer, 3, lambda step: model.outer.bias.grad.fill_(torch.inf))
    assert optimizer.skipped_steps == 3
    assert kinds(optimizer, least_steps=1).keys() <= {"experts.1.weight"} | {name for name, _ in model.named_parameters()}
    train(model, optimizer, 20)
    assert kinds(optimizer) == DEAD


def test_without_watching_state_alone_tells() -> None:
    model, optimizer = made(watch=False)
    train(model, optimizer, 2, zeroed(model, "outer.bias"))
    assert kinds(optimizer) == DEAD
    report = co.health(optimizer)
    assert not report.watched
    assert "watch_health" in str(report)
    optimizer.watch_health()
    train(model, optimizer, 2, zeroed(model, "outer.bias"))
    assert kinds(optimizer) == {**DEAD, "outer.bias": ["zero gradient"]}
    optimizer.watch_health(False)
    assert not co.health(optimizer).watched


def test_watching_that_is_on_is_not_begun_again() -> None:
    _, optimizer = made()
    step = engine_of(optimizer).current()
    optimizer.watch_health()
    assert engine_of(optimizer).current() is step


def test_a_copy_is_watched_as_well() -> None:
    _, optimizer = made()
    assert co.health(copy.deepcopy(optimizer)).watched
    assert not co.health(copy.deepcopy(made(watch=False)[1])).watched


def test_history_outlives_a_new_group() -> None:
    model, optimizer = made()
    train(model, optimizer, 2, zeroed(model, "outer.bias"))
    optimizer.add_param_group({"params": {"late": nn.Parameter(torch.ones(3))}})
    assert kinds(optimizer) == {**DEAD, "outer.bias": ["zero gradient"], "late": ["no gradient"]}


@pytest.mark.parametrize("captured", [False, True])
def test_a_report_changes_nothing(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step counts of a later group lie elsewhere, and kernels go on to write to both places."""
    install(monkeypatch)
    pairs = []
    for reports in (True, False):
        torch.manual_seed(0)
        params = {name: nn.Parameter(torch.randn(6, 7)) for name in ("a", "b", "late")}
        optimizer = co.AdamW({name: params[name] for name in ("a", "b")}, lr=0.01, lowering="multi_tensor")
        step = co.CUDAGraphRunner(optimizer).step if captured else optimizer.step
        for count in range(1, 13):
            if count == 3:
                optimizer.add_param_group({"params": {"late": params["late"]}})
            for param in params.values():
                param.grad = torch.randn(6, 7)
            step()
            if reports and count in (4, 8):
                co.health(optimizer)
        optimizer.add_param_group({"params": {"last": nn.Parameter(torch.zeros(2))}})
        step()
        assert [optimizer.state[p]["step"].item() for p in params.values()] == [13, 13, 11]
        pairs.append([*params.values()])
    for p, q in zip(*pairs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.full
@pytest.mark.parametrize("kind", [co.AdamW, co.Muon])
def test_captured(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    torch.manual_seed(0)
    params = {f"{name}": nn.Parameter(torch.randn(6, 7)) for name in ("a", "b", "c")}
    optimizer = kind(params, lr=0.01)
    optimizer.watch_health()
    runner = co.CUDAGraphRunner(optimizer)
    for _ in range(8):
        for name in ("a", "b"):
            params[name].grad = torch.randn(6, 7) if name == "a" else torch.zeros(6, 7)
        runner.step()
    assert kinds(optimizer) == {"b": ["zero gradient"], "c": ["no gradient"]}
    for _ in range(4):
        params["b"].grad = torch.randn(6, 7)
        params["a"].grad = torch.zeros(6, 7)
        runner.step()
    assert kinds(optimizer) == {"a": ["zero gradient"], "c": ["no gradient"]}
    assert co.compile_report(optimizer).replays >= 8


@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor"])
def test_compiled(lowering: str) -> None:
    model, optimizer = made(lowering=lowering)
    compiled = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().mean().backward()
        model.outer.bias.grad.zero_()
        compiled()
    assert kinds(optimizer) == {**DEAD, "outer.bias": ["zero gradient"]}


def test_a_frozen_parameter_needs_no_gradient() -> None:
    """Whether it was frozen before or after the first step."""
    model, optimizer = made()
    train(model, optimizer, 1)
    model.experts[1].weight.requires_grad_(False)
    train(model, optimizer, 2)
    assert kinds(optimizer) == {}
    model.experts[1].weight.requires_grad_(True)
    assert kinds(optimizer) == DEAD


def test_shapes_and_dtypes() -> None:
    torch.manual_seed(0)
    params = {
        "scalar": nn.Parameter(torch.randn(())),
        "empty": nn.Parameter(torch.randn(0, 3)),
        "complex": nn.Parameter(torch.randn(4, 5, dtype=torch.complex64)),
        "transposed": nn.Parameter(torch.randn(40, 30).T),
        "double": nn.Parameter(torch.randn(7, dtype=torch.float64)),
        "channels": nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)),
    }
    optimizer = co.Adam(params, lr=0.01)
    optimizer.watch_health()
    for _ in range(20):
        for p in params.values():
            p.grad = torch.randn_like(p)
        params["channels"].grad = params["channels"].grad.contiguous()
        optimizer.step()
    assert kinds(optimizer) == {}
    for _ in range(2):
        for p in params.values():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert {*kinds(optimizer)} == {*params} - {"empty"}


@pytest.mark.parametrize("weights", [None, "master"])
def test_a_parameter_with_gaps_in_its_memory(weights: str | None) -> None:
    """Its gradient from autograd has none, and the same elements of both are compared."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(10, 40, dtype=torch.bfloat16)[:, ::2])
    optimizer = co.SGD({"param": param}, lr=0.1, weights=weights)
    optimizer.watch_health()
    for _ in range(3):
        optimizer.zero_grad()
        param.float().square().sum().backward()
        assert param.grad is not None
        assert param.grad.is_contiguous() > param.is_contiguous()
        optimizer.step()
    assert kinds(optimizer) == {}


def test_sparse_rows() -> None:
    torch.manual_seed(0)
    tables = {name: nn.Embedding(50, 4, sparse=True) for name in ("a", "b")}
    optimizer = co.SparseAdam({name: table.weight for name, table in tables.items()})
    optimizer.watch_health()
    for step in range(3):
        optimizer.zero_grad()
        tables["a"](torch.tensor([step])).sum().backward()
        optimizer.step()
    assert kinds(optimizer) == {"b": ["no gradient"]}


def test_needs_steps_that_have_a_rule() -> None:
    optimizer = co.LBFGS(nn.Linear(2, 2).parameters())
    for call in (optimizer.watch_health, lambda: co.health(optimizer)):
        with pytest.raises(NotImplementedError, match="LBFGS cannot be watched: its steps need a closure"):
            call()
