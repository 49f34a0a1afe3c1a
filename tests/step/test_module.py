"""The step of an optimizer as a module, which torch's compilers of files take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.step_module import differences

pytestmark = pytest.mark.full

X = torch.linspace(-1, 1, 24).view(6, 4)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda w: co.AdamW([w]), "it is lowered to .*; make it with lowering='inductor'"),
        (lambda w: co.Muon([w], lowering="inductor"), "it is lowered to .*stacked"),
        (lambda w: co.MuonAdamW([("w", w)], lowering="inductor"), "it is lowered to .*stacked"),
        (lambda w: co.SparseAdam([w]), "it is lowered to multi_tensor$"),
        (lambda w: co.LBFGS([w]), "its steps are not made of a rule"),
        (lambda w: co.Prodigy([w], lowering="inductor"), "takes sums over all parameters"),
    ],
)
def test_other_steps_are_no_module(make: Callable[[Tensor], Any], reason: str) -> None:
    optimizer = make(nn.Parameter(torch.ones(4, 4)))
    with pytest.raises(RuntimeError, match=f"a step of .* cannot be a module: .*{reason}"):
        co.as_module(optimizer)


def test_a_module_is_a_step() -> None:
    """Of groups with different rules, by the names of parameters."""
    sides = []
    for lowering in ("inductor", "eager"):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
        groups = [{"params": [*model[i].named_parameters(f"layers.{i}")]} for i in range(2)]
        sides.append((model, co.SGD(groups, lr=0.1, momentum=0.9, lowering=lowering)))
    (ours, optimizer), (theirs, twin) = sides
    theirs.load_state_dict(ours.state_dict())
    step = co.as_module(optimizer)
    assert step.names == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    buffers = dict(step.named_buffers())
    assert {"momentum_buffer/layers-0-weight", "numbers/0/0", "numbers/1/0", "scalars/0"} <= buffers.keys()
    for i in range(3):
        grads = [torch.full_like(p, i + 1.0) for p in step.params]
        optimizer.param_groups[0]["lr"] = twin.param_groups[0]["lr"] = 0.1 / (1 + i)
        step(step.params, [*grads[:3], None])
        for p, grad in zip(theirs.parameters(), grads[:3], strict=False):
            p.grad = grad
        twin.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-14, atol=0)
    assert torch.equal(ours[1].bias, theirs[1].bias)
    assert not step.state_dict()
    with pytest.raises(ValueError, match="takes 4 parameters and gradients, got 4 and 3"):
        step(step.params, grads[:3])


@pytest.mark.filterwarnings("ignore:two parameters are named:UserWarning")
@pytest.mark.parametrize("names", [("w", "w"), ("a.b", "a-b")])
def test_parameters_of_like_names_have_buffers_of_their_own(names: tuple[str, str]) -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in names]
    step = co.as_module(co.SGD([*zip(names, params, strict=True)], lr=1.0, momentum=0.5, lowering="inductor"))
    for _ in range(2):
        step(step.params, [torch.full((2,), grad) for grad in (1.0, 8.0)])
    assert [param.tolist() for param in params] == [[-2.5, -2.5], [-20.0, -20.0]]


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "momentum begins": (
        lambda o: o.param_groups[0].update(momentum=0.9),
        "rule of weight was 'momentum': False and is 'momentum': True",
    ),
    "state is rebound": (
        lambda o: o.state[o.param_groups[0]["params"][0]].update(step=torch.tensor(3.0, dtype=torch.float64)),
        "groups or state were replaced by others of the same form",
    ),
    "a group comes": (lambda o: o.add_param_group({"params": [("b", nn.Parameter(torch.ones(2)))]}), "parameter b was"),
    "clipping begins": (lambda o: setattr(o, "max_grad_norm", 1.0), "clipping was off and is on"),
    "a schedule begins": (lambda o: o.schedule(lr=lambda step: 1 / step), r"schedules was \[\] and is \[\(0, 'lr'\)\]"),
    "it is watched": (lambda o: o.watch_health(), "its health is watched"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_of_an_optimizer_that_changed_refuses(change: str) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = co.SGD([("weight", weight)], lr=0.1, lowering="inductor")
    step = co.as_module(optimizer)
    step.check()
    CHANGES[change][0](optimizer)
    for use in (step.check, lambda: [*step.named_buffers()], lambda: step([weight], [torch.ones(2)])):
        with pytest.raises(RuntimeError, match=CHANGES[change][1]):
            use()
    assert torch.equal(weight, torch.ones(2, dtype=torch.float64))


def test_what_differs_between_its_parts_alone_is_shown_whole() -> None:
    assert differences({"a": "x, y"}, {"a": "x{y"}) == "a was x, y and is x{y"
    assert differences({"a": "x"}, {"a": "x, y"}) == "a was x and is y"


def _loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    hidden = nn.functional.gelu(nn.functional.linear(x, params["0.weight"], params["0.bias"]))
    return (nn.functional.linear(hidden, params["2.weight"], params["2.bias"]) - y).square().mean()


def _train_step(params: dict[str, Tensor], step: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss, own = _loss(params, x, y), [params[name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
    step(own, list(torch.autograd.grad(loss, own)))
    return loss.detach()


def _side(lowering: str = "inductor") -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    params = dict(model.named_parameters())
    return params, co.AdamW(params, lr=0.05, max_grad_norm=0.5, lowering=lowering)


def _check_precompiled(train: Callable[..., Tensor]) -> None:
    """That code which was made with another optimizer does what eager steps do, and refuses an optimizer that changed."""
    (ours, optimizer), (theirs, twin) = _side(), _side("eager")
    step, inputs = co.as_module(optimizer), (X, X.sum(1, keepdim=True))
    for i in range(4):
        optimizer.param_groups[0]["lr"] = twin.param_groups[0]["lr"] = 0.05 / (1 + i)
        step.check()
        train(ours, step, *inputs)
        grads = torch.autograd.grad(_loss(theirs, *inputs), [*theirs.values()])
        for p, grad in zip(theirs.values(), grads, strict=True):
            p.grad = grad
        twin.step()
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name], rtol=1e-4, atol=1e-6)
    assert all(state["step"] == 4 for state in optimizer.state.values())


def test_aot_compile_takes_the_module(tmp_path: Path) -> None:
    params, optimizer = _side()
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    example = (params, co.as_module(optimizer), X, X.sum(1, keepdim=True)), {}
    with torch._dynamo.config.patch(trace_autograd_ops=True, enable_aot_compile=True):
        compiled = torch.compile(_train_step, fullgraph=True, options=options)
        compiled.aot_compile(example).save_compiled_function(str(tmp_path / "code"))
    with (tmp_path / "code").open("rb") as file:
        _check_precompiled(torch.compiler.load_compiled_function(file))


@pytest.mark.skipif(not hasattr(torch.compiler, "precompile"), reason="precompile is in torch from 2.14 on")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_precompile_takes_the_module(tmp_path: Path, backend: str) -> None:
    params, optimizer = _side()
    step = co.as_module(optimizer)
    example = params, step, X, X.sum(1, keepdim=True)
    precompile: Any = torch.compiler.precompile
    if hasattr(precompile, "capture"):
        code, cache = str(tmp_path / "code.py"), str(tmp_path / "code.cache")
        with precompile.capture(_train_step, artifact_path=code, cache_path=cache, backend=backend) as capture:
            capture(*example)
        train = precompile.load(code, cache)
    else:
        train = precompile.load(*precompile(_train_step, *example, backend=backend))
    _check_precompiled(train)
    optimizer.max_grad_norm = None
    with pytest.raises(RuntimeError, match="clipping was on and is off"):
        train(*example)
