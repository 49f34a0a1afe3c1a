"""A training step as a file, which another process goes on with."""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from new_process import printed_by
from other_process import Model, X, batch_of, go_on, loss_of, optimizer_of, saved, scheduler_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compiled_optim as co
from compiled_optim.memory import torch_internals
from compiled_optim.step.module import differences
from compiled_optim.step_file import TrainingStep

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, a checkpoint after 25 steps, and what there is after 50."""
    file = tmp_path_factory.mktemp("kept") / "step.file"
    model = Model(seed=3)
    optimizer = optimizer_of(model)
    before = copy.deepcopy(model.state_dict())
    train = co.save_step(file, loss_of, model, optimizer, batch_of(0))
    scheduler = scheduler_of(optimizer)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    go_on(train, optimizer, scheduler, range(25))
    torch.save(saved(model, optimizer, scheduler), f"{file}.checkpoint")
    optimizer.max_grad_norm = 0.5
    go_on(train, optimizer, scheduler, range(25, 50))
    torch.save({**saved(model, optimizer, scheduler), "skipped": optimizer.skipped_steps}, f"{file}.whole")
    assert co.compile_report(optimizer).steps == 50
    return file


def _load(kept: Path, model: nn.Module, optimizer: Any) -> TrainingStep:
    return co.load_step(kept, model, optimizer)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_another_process_goes_on(kept: Path, tmp_path: Path) -> None:
    """With the same bits, without a compiler, and with an empty cache of Inductor's."""
    printed_by("other_process", str(kept), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    end, whole = torch.load(f"{kept}.end"), torch.load(f"{kept}.whole")
    assert whole["skipped"] == 1
    for part in ("model", "optimizer", "scheduler", "random"):
        assert _equal(end[part], whole[part]), part
    assert (end["compilers"], end["started"]) == ([], 0)


def test_it_does_what_an_eager_step_does(kept: Path) -> None:
    models = [Model(), Model()]
    ours, theirs = optimizer_of(models[0]), optimizer_of(models[1], lowering="eager")
    train = _load(kept, models[0], ours)
    for i in range(4):
        loss = train(batch_of(i))
        twin = loss_of(models[1], batch_of(i))
        twin.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(loss, twin.detach(), rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if name != "first.bias":  # which BatchNorm takes away again: rounding alone moves it
            torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)
        assert p.grad is None
    torch.testing.assert_close(ours.grad_norm, theirs.grad_norm, rtol=1e-2, atol=0)
    assert models[0].norm.num_batches_tracked == 4
    assert ours.state[models[0].first.weight]["step"] == 4
    assert ours.state[models[0].unused]["step"] == 0


WRONG: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "a wider model": (lambda: _pair(Model(9)), r"parameter frozen was .*\(8,\).* and is .*\(9,\)"),
    "in evaluation": (lambda: _pair(Model().eval()), r"module '' was .*training=True and is .*training=False"),
    "another number": (
        lambda: _pair(_changed(lambda m: setattr(m.norm, "eps", 0.2))),
        "module 'norm' was .*eps=1e-05.*eps=0.2",
    ),
    "a parameter thaws": (lambda: _pair(_changed(lambda m: m.frozen.requires_grad_())), "frozen.* was absent and is "),
    "another optimizer": (lambda: _pair(Model(), kind=co.Lion), "optimizer was AdamW and is Lion"),
    "a choice": (lambda: _pair(Model(), amsgrad=True), r"rule of \w+ was 'amsgrad': False and is 'amsgrad': True"),
    "a sign": (lambda: _pair(Model(), maximize=True), "maximize=False.* and is .*maximize=True"),
    "without clipping": (
        lambda: _pair(Model(), max_grad_norm=None, skip_nonfinite=False),
        "clipping was on and is off",
    ),
}


def _changed(change: Callable[[Any], object]) -> nn.Module:
    model = Model()
    change(model)
    return model


def _pair(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    return model, optimizer_of(model, **options)


@pytest.mark.parametrize("case", WRONG)
def test_what_it_was_not_made_for_is_refused_by_name(kept: Path, case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        _load(kept, *make())


def test_other_surroundings_are_refused(kept: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(kept) as old, zipfile.ZipFile(tmp_path / "other", "w") as new:
        for name in old.namelist():
            text = old.read(name)
            if name.endswith("compiled_optim.json"):
                text = json.dumps({**json.loads(text), "torch": "2.0", "processor": "abacus"}).encode()
            new.writestr(name, text)
    model = Model()
    with pytest.raises(
        ValueError, match=r"step: torch was 2\.0 and is .*, and 1 more changed; undo that, or call save_step"
    ):
        _load(tmp_path / "other", model, optimizer_of(model))
    (tmp_path / "other").write_text("text")
    with pytest.raises(ValueError, match="is no file of save_step"):
        _load(tmp_path / "other", model, optimizer_of(model))


def test_changes_between_steps(kept: Path) -> None:
    """Of the same form they are followed; others are refused, and change nothing."""
    model = Model()
    optimizer = optimizer_of(model)
    train = _load(kept, model, optimizer)
    train(batch_of(0))
    state = optimizer.state[model.first.weight]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    model.first.bias.data = model.first.bias.data.clone()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0, dtype=torch.float64)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    before = model.first.weight.detach().clone(), model.last.weight.detach().clone()
    train(batch_of(1))
    assert torch.equal(model.first.weight, before[0])
    assert not torch.equal(model.last.weight, before[1])
    assert state["exp_avg"].any()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(batch_of(2))
    before = model.first.weight.detach().clone(), state["exp_avg"].clone()
    for change, message in (
        (lambda: optimizer.param_groups[0].update(amsgrad=True), "amsgrad"),
        (lambda: (optimizer.param_groups[0].update(amsgrad=False), model.eval()), "training=False"),
        (lambda: model.train().first.double(), "float64"),
    ):
        change()
        with pytest.raises(ValueError, match=message):
            train(batch_of(3))
        assert state["step"] == 3
        assert torch.equal(model.first.weight, before[0].to(model.first.weight.dtype))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": X[:5], "y": X[:5, :1]}, ValueError, r"input 0 was float32 \(6, 4\).* and is float32 \(5, 4\)"),
        ({"x": X, "z": X[:, :1]}, ValueError, "input 0 was .*'y'.* and is .*'z'"),
        ({"x": X, "y": 1.0}, TypeError, "input 0 of a step must hold tensors, got float"),
    ],
)
def test_other_inputs_are_refused(kept: Path, given: Any, error: type[Exception], message: str) -> None:
    model = Model()
    train = _load(kept, model, optimizer_of(model))
    train(batch_of(0))
    with pytest.raises(error, match=message):
        train(given)


def test_a_number_out_of_range_is_refused(kept: Path) -> None:
    model = Model()
    optimizer = optimizer_of(model)
    train = _load(kept, model, optimizer)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr"):
        train(batch_of(0))


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
        optimizer.as_module()


def test_a_module_is_a_step() -> None:
    """Of groups with different rules, by the names of parameters."""
    sides = []
    for lowering in ("inductor", "eager"):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
        groups = [{"params": [*model[i].named_parameters(f"layers.{i}")]} for i in range(2)]
        sides.append((model, co.SGD(groups, lr=0.1, momentum=0.9, lowering=lowering)))
    (ours, optimizer), (theirs, twin) = sides
    theirs.load_state_dict(ours.state_dict())
    step = optimizer.as_module()
    assert step.names == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    buffers = dict(step.named_buffers())
    assert {"momentum_buffer/layers-0-weight", "lr/0/0", "lr/1/0", "momentum/0/0", "scalars/0"} <= buffers.keys()
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
    step = optimizer.as_module()
    step.check()
    CHANGES[change][0](optimizer)
    for use in (step.check, lambda: [*step.named_buffers()], lambda: step([weight], [torch.ones(2)])):
        with pytest.raises(RuntimeError, match=CHANGES[change][1]):
            use()
    assert torch.equal(weight, torch.ones(2, dtype=torch.float64))


def test_what_cannot_be_in_a_file(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = co.AdamW(model.named_parameters(), lowering="inductor")
    for loss in (lambda model, x: (model(x) * X[0, 0]).sum(), lambda model, x: model(x).sum() * torch.tensor(2.0)):
        with pytest.raises(RuntimeError, match="uses a tensor that is no parameter, buffer or input"):
            co.save_step(tmp_path / "file", loss, model, optimizer, X)
    with pytest.raises(ValueError, match="parameters that are none of the model: weight, bias"):
        co.save_step(tmp_path / "file", loss_of, nn.Linear(4, 1), optimizer, X)
    assert [*tmp_path.iterdir()] == []


class _Recomputing(nn.Linear):
    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(super().forward(x))
        return checkpoint(lambda x: torch.dropout(x, 0.5, True), hidden, use_reentrant=self.is_reentrant)  # type: ignore[no-any-return]


class _Reentrant(_Recomputing):
    is_reentrant = True


def _backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    return loss


UNTRACED: dict[str, tuple[type[nn.Module], Callable[..., Any], type[Exception], str]] = {
    "recomputed": (_Recomputing, lambda m, x: m(x).sum(), RuntimeError, "uses activation checkpointing, .*: turn them off"),
    "reentrant": (_Reentrant, lambda m, x: m(x).sum(), RuntimeError, "uses activation checkpointing, .*: turn them off"),
    "a branch": (
        nn.Linear,
        lambda m, x: m(x).sum() if m(x).sum() > 0 else x.sum(),
        RuntimeError,
        r"the value.*torch\.where",
    ),
    "an index": (
        nn.Linear,
        lambda m, x: m(x)[int(x[0, 0])].sum(),
        RuntimeError,
        r"uses the value of a tensor.*torch\.where",
    ),
    "NumPy": (nn.Linear, lambda m, x: m(x).sum() * float(x.numpy()[0, 0]), RuntimeError, "uses the value of a tensor"),
    "backward": (nn.Linear, _backward, RuntimeError, r"loss_of calls backward\(\), which the step does: return the loss"),
    "nothing": (nn.Linear, lambda m, x: None, TypeError, "loss_of must return one real number"),
    "several": (nn.Linear, lambda m, x: m(x), TypeError, "loss_of must return one real number"),
    "detached": (nn.Linear, lambda m, x: m(x).sum().detach(), TypeError, "a tensor that depends on a parameter"),
    "complex": (nn.Linear, lambda m, x: m(x).sum() * 1j, TypeError, "loss_of must return one real number"),
}


@pytest.mark.parametrize("case", UNTRACED)
def test_a_loss_that_cannot_be_in_a_file_is_named(case: str, tmp_path: Path) -> None:
    kind, loss, error, message = UNTRACED[case]
    model: Any = kind(4, 2)  # type: ignore[call-arg]
    optimizer = _without_momentum(model)
    with pytest.raises(error, match=message) as raised:
        co.save_step(tmp_path / "file", loss, model, optimizer, X)
    assert len(str(raised.value)) < 160
    assert [*tmp_path.iterdir()] == []


def test_no_compilation_is_for_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 1)
    monkeypatch.setattr(torch._inductor, "aot_compile", None)
    with pytest.raises(FileNotFoundError, match="none"):
        co.save_step(tmp_path / "none" / "file", lambda m, x: m(x).sum(), model, _without_momentum(model), X)


def test_what_differs_between_its_parts_alone_is_shown_whole() -> None:
    assert differences({"a": "x, y"}, {"a": "x{y"}) == "a was x, y and is x{y"
    assert differences({"a": "x"}, {"a": "x, y"}) == "a was x and is y"


def test_messages_have_one_difference(kept: Path) -> None:
    """And of a long text only the part that differs."""
    for pair, found in (
        (_pair(Model(9)), r"parameter frozen was float32 \(8,\).* and is .*, and \d+ more changed"),
        (
            _pair(Model(), amsgrad=True),
            r"rule of \w+ was 'amsgrad': False and is 'amsgrad': True, and \d+ more changed",
        ),
        (_pair(Model().eval()), r"module '' was training=True and is training=False, and \d+ more changed"),
    ):
        with pytest.raises(ValueError, match=f"^the file holds another step: {found}; undo that, or call save_step again$"):
            _load(kept, *pair)


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
    step, inputs = optimizer.as_module(), (X, X.sum(1, keepdim=True))
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
    example = (params, optimizer.as_module(), X, X.sum(1, keepdim=True)), {}
    with torch._dynamo.config.patch(trace_autograd_ops=True, enable_aot_compile=True):
        compiled = torch.compile(_train_step, fullgraph=True, options=options)
        compiled.aot_compile(example).save_compiled_function(str(tmp_path / "code"))
    with (tmp_path / "code").open("rb") as file:
        _check_precompiled(torch.compiler.load_compiled_function(file))


@pytest.mark.skipif(not hasattr(torch.compiler, "precompile"), reason="precompile is in torch from 2.14 on")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_precompile_takes_the_module(tmp_path: Path, backend: str) -> None:
    params, optimizer = _side()
    step = optimizer.as_module()
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


class _Counting(nn.Module):
    """A model that puts another tensor in place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(4, 4), nn.Linear(4, 1), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.outer(self.drop(torch.relu(self.inner(x))))


def _without_momentum(model: nn.Module) -> co.SGD:
    return co.SGD(model.named_parameters(), lr=0.01, momentum=0.0, lowering="inductor")


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a step that takes a dict."""
    file, model = tmp_path_factory.mktemp("counting") / "step.file", _Counting()
    with torch.no_grad():
        co.save_step(file, _squares, model, _without_momentum(model), _BATCH)
    assert model.count == 0
    return file


_BATCH = {"x": torch.linspace(-1, 1, 32).view(8, 4), "y": torch.linspace(-2, 2, 8).view(8, 1)}


def _squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def _replaced(model: Any, _: Any) -> None:
    model.load_state_dict(_Counting().state_dict(), assign=True)


LATER: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "a parameter is frozen": (lambda m, o: m.inner.weight.requires_grad_(False), "requires_grad=True.*requires_grad=False"),
    "a module's number": (lambda m, o: setattr(m.drop, "p", 0.1), r"p=0\.5.*p=0\.1"),
    "a module": (lambda m, o: setattr(m, "drop", nn.Identity()), "module 'drop' was Dropout.* and is Identity"),
    "tensors of the model alone": (_replaced, "parameter 0 of the optimizer.* and is .*none of the optimizer"),
    "a hook": (lambda m, o: m.inner.weight.register_hook(lambda g: g * 0), r"'inner\.weight' has hooks"),
    "a schedule": (lambda m, o: o.schedule(lr=lambda step: 0.1 + 0 * step), r"opt\.schedule"),
}


@pytest.mark.parametrize("change", LATER)
def test_a_change_after_the_first_step_is_refused_by_name(counting: Path, change: str) -> None:
    model = _Counting()
    optimizer = _without_momentum(model)
    train = _load(counting, model, optimizer)
    for _ in range(2):  # with momentum=0 and counted buffers, too
        train(_BATCH)
    assert model.count == 2
    with pytest.raises(ValueError, match=r"input 0 was"):
        train(dict(reversed(_BATCH.items())))
    act, message = LATER[change]
    act(model, optimizer)
    with pytest.raises(ValueError, match=message):
        train(_BATCH)


def test_the_optimizer_must_be_of_the_model_in_its_order(counting: Path) -> None:
    model = _Counting()
    with pytest.raises(ValueError, match="none of the optimizer"):
        _load(counting, _Counting(), _without_momentum(model))
    theirs: Any = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match="an optimizer of this package, got _Counting and SGD"):
        co.save_step(counting, _squares, model, theirs, _BATCH)
    with pytest.raises(TypeError, match="an optimizer of this package, got _Counting and SGD"):
        co.load_step(counting, model, theirs)
    swapped: Any = _squares
    with pytest.raises(TypeError, match=r"a torch.nn.Module and .*, got function and SGD"):
        co.load_step(counting, swapped, _without_momentum(model))


def test_what_cannot_run_is_an_error_where_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's code of an LSTM cannot; no file is left that fails in another process, and an earlier one stays."""
    model, file = _Counting(), tmp_path / "step.file"
    file.write_text("earlier")

    def failing(tensors: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("there is no such operator")

    monkeypatch.setattr(torch_internals, "load_compiled_file", lambda path: failing)
    with pytest.raises(RuntimeError, match="no such operator"):
        co.save_step(file, _squares, model, _without_momentum(model), _BATCH)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text() == "earlier"
