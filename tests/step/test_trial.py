"""The warning of 16-bit parameters for which steps are too small: later steps bear it out, and it costs them nothing."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from catalog import registry, required
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.step.next_step import taken
from compiled_optim.step.trial import Trial

SIDE, STEPS = 32, 200
WEIGHTS = {"small": (0.02, 0.0), "ones": (0.0, 1.0), "wide": (1.0, 0.0)}  # deviation and mean
STUCK = {"lr": 1e-6}  # at which weights of 1 do not move


@contextlib.contextmanager
def hearing() -> Iterator[list[str]]:
    """Yield a list, which gets the warnings of 16-bit parameters from the ``with`` block at its end."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in given if "too small" in str(w.message)]


def ones(count: int = 1, dtype: torch.dtype = torch.bfloat16, size: int = 64) -> dict[str, Parameter]:
    params = {f"w{i}": Parameter(torch.ones(size, size, dtype=dtype)) for i in range(count)}
    for param in params.values():
        param.grad = torch.full_like(param, 0.25)
    return params


def said(optimizer: CompiledOptimizer, steps: int = 1) -> list[str]:
    with hearing() as texts:
        for _ in range(steps):
            optimizer.step()
    return texts


def naive_updates(kind: str, lr: float, grads: list[Tensor], weight: Tensor) -> Iterator[Tensor]:
    """Yield the weights after each step, in the dtype of ``weight``; all else is in float64."""
    exp_avg, exp_avg_sq = torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    for t, grad in enumerate(grads, 1):
        value = weight.double()
        if kind == "AdamW":
            exp_avg, exp_avg_sq = 0.9 * exp_avg + 0.1 * grad, 0.999 * exp_avg_sq + 0.001 * grad * grad
            step = exp_avg / (1 - 0.9**t) / ((exp_avg_sq / (1 - 0.999**t)).sqrt() + 1e-8) + 0.01 * value
        elif kind == "Lion":
            step, exp_avg = (0.9 * exp_avg + 0.1 * grad).sign(), 0.99 * exp_avg + 0.01 * grad
        else:
            step = grad
        weight = (value - lr * step).to(weight.dtype)
        yield weight


@pytest.mark.quick
@pytest.mark.parametrize("rises", [False, True], ids=["constant", "warm-up"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["AdamW", "Lion", "SGD"])
def test_it_says_what_200_steps_do(kind: str, dtype: torch.dtype, rises: bool) -> None:
    """Where gradients stay, and where they change. Of SGD a larger one may come, which moves what the first one does not."""
    compared, changing = [], (False,) if kind == "SGD" else (False, True)
    for lr, name, changes in [(r, n, c) for r in (1e-6, 1e-5, 1e-4, 1e-3) for n in WEIGHTS for c in changing]:
        generator, (deviation, mean) = torch.Generator().manual_seed(1), WEIGHTS[name]
        drawn = torch.randn(STEPS if changes else 1, SIDE, SIDE, generator=generator).to(dtype)
        grads = [*drawn] if changes else [drawn[0]] * STEPS
        weight = (torch.randn(SIDE, SIDE, generator=generator) * deviation + mean).to(dtype)
        steps = [weight, *naive_updates(kind, lr, [grad.double() for grad in grads], weight)]
        moved = torch.stack([new != weight for new in steps]).any(0).double().mean()
        param = Parameter(weight.clone())
        optimizer = getattr(co, kind)([param], lr=lr)
        scheduler = LambdaLR(optimizer, lambda step: min(step / 50, 1) if rises else 1.0)
        with hearing() as texts:
            for grad in grads[:5]:
                param.grad = grad.clone()
                optimizer.step()
                scheduler.step()
        assert len(texts) <= 1
        compared.append((bool(texts), bool(moved < 0.5), lr, name, changes))
    assert not [each for each in compared if each[0] != each[1]]
    assert {each[0] for each in compared} == {True, False}


def test_norms_of_1_stay_at_a_rate_at_which_matrices_move() -> None:
    generator = torch.Generator().manual_seed(0)
    params = {"norm": Parameter(torch.ones(64).bfloat16())}
    params["matrix"] = Parameter((torch.randn(300, 64, generator=generator) * 0.02).bfloat16())  # 19 times the sample
    optimizer, before = co.AdamW(params, lr=1e-3), {n: p.detach().clone() for n, p in params.items()}
    with hearing() as texts:
        for _ in range(STEPS):
            for param in params.values():
                param.grad = torch.randn(param.shape, generator=generator).bfloat16()
            optimizer.step()
    assert {n: (p != before[n]).double().mean().item() > 0.9 for n, p in params.items()} == {"norm": False, "matrix": True}
    assert torch.equal(params["norm"], before["norm"])
    assert texts == [
        "compiled_optim: the step is too small for 1 of 2 16-bit parameters (norm): at lr 0.001, 100% of their "
        "elements are rounded back to what they were by this step; use weights='auto', 'split8' or 'stochastic'"
    ]


@pytest.mark.parametrize(
    ("kind", "lr", "name"), [(co.SGD, 1e-3, "ones"), (co.SGD, 1e-5, "small"), (co.ADOPT, 1e-4, "small")]
)
def test_averages_that_grow_move_what_a_first_step_does_not(kind: Any, lr: float, name: str) -> None:
    generator, (deviation, mean) = torch.Generator().manual_seed(2), WEIGHTS[name]
    before = (torch.randn(SIDE, SIDE, generator=generator) * deviation + mean).bfloat16()
    param, grad = Parameter(before.clone()), torch.randn(SIDE, SIDE, generator=generator).bfloat16()
    optimizer, shares = kind([param], lr=lr, **({"momentum": 0.9} if kind is co.SGD else {})), []
    with hearing() as texts:
        for _ in range(STEPS):
            param.grad = grad.clone()
            optimizer.step()
            shares.append((param != before).double().mean().item())
    assert texts == []
    assert shares[0] < 0.5 < shares[-1]


def test_it_is_said_once_to_whoever_called_the_step_and_in_reports() -> None:
    params = ones(5)
    optimizer = co.AdamW(params, **STUCK)
    assert not co.compile_report(optimizer).findings
    with pytest.warns(UserWarning, match=r"5 of 5 16-bit parameters \(w0, w1, w2 and 2 more\): at lr 1e-06, 100%") as caught:
        optimizer.step()
    assert [w.filename for w in caught] == [__file__]
    assert said(optimizer, 3) == []
    report = co.compile_report(optimizer)
    (found,) = report.findings
    assert (found.name, found.params) == ("too small", tuple(params))
    first, second, *_ = str(report).splitlines()
    assert first == "AdamW: multi_tensor lowering, 4 steps. The first step is too small for some weights: see below."
    assert second.startswith("  too small: w0, w1, w2 and 2 more: at lr 1e-06, 100% of their elements are rounded back")
    assert co.explain(params, optimizer).findings == (found,)


def test_groups_have_their_own_rates() -> None:
    a, b, c = ones(3).values()
    optimizer = co.SGD([{"params": {"a": a}, "lr": 1e-6}, {"params": {"b": b}, "lr": 1e-5}, {"params": {"c": c}, "lr": 0.5}])
    (text,) = said(optimizer)
    assert "too small for 2 of 3 16-bit parameters (a, b): at lr 1e-06 to 1e-05" in text


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {}),
        (torch.bfloat16, {"lr": 0.1}),
        (torch.complex64, {}),
        *((torch.bfloat16, {"weights": mode}) for mode in ("auto", "kahan", "stochastic", "split8", "split16", "master")),
    ],
    ids=str,
)
def test_nothing_is_said_or_computed_where_weights_move(dtype: torch.dtype, options: dict[str, Any]) -> None:
    optimizer = co.AdamW(ones(dtype=dtype), **STUCK | options)
    with mock.patch("compiled_optim.step.trial.taken", wraps=taken) as computed:
        assert said(optimizer) == []
    assert computed.called == ("lr" in options)
    assert not engine_of(optimizer).trial.is_open


@pytest.mark.parametrize("kind", ["number", "tensor", "given", "one cycle", "in the step"])
def test_a_rate_that_rises_later(kind: str) -> None:
    """It decides nothing that it begins low, nor that it begins at 0. A schedule in the step needs its peak as an entry."""
    for peak, expected in ((0.1, 0), (1e-6, 1)):
        lr = torch.tensor(peak) if kind == "tensor" else peak
        optimizer = co.AdamW(
            ones(), lr=lr, **({"decouple_lr": True, "max_lr": peak, "weight_decay": 1e-9} if kind == "given" else {})
        )
        if kind in ("number", "tensor"):
            scheduler: Any = LambdaLR(optimizer, lambda step: step / 1e4)
        elif kind == "one cycle":
            scheduler = OneCycleLR(optimizer, peak, total_steps=10_000, div_factor=1e4)
        else:
            scheduler = mock.Mock()
            if kind == "given":
                optimizer.param_groups[0]["lr"] = peak / 1e4
            else:
                optimizer.param_groups[0]["initial_lr"] = peak
                optimizer.schedule(lr=lambda step: peak * torch.minimum((step - 1) / 1e4, torch.ones_like(step)))  # noqa: B023
        with hearing() as texts:
            for _ in range(3):
                optimizer.step()
                scheduler.step()
        assert len(texts) == expected


def test_a_schedule_in_the_step_is_not_asked_for_other_steps() -> None:
    """Only its first values are known, so that nothing is said."""
    for trial in (Trial(), Trial(is_open=False)):
        counts: list[float] = []
        optimizer = co.AdamW(ones(), **STUCK)
        engine_of(optimizer).trial = trial
        optimizer.schedule(lr=lambda step: (counts if step.is_meta else counts.append(float(step)), step * 1e-9)[1])  # noqa: B023
        assert said(optimizer, 3) == []
        assert (trial.is_open, trial.findings) == (False, ())
        assert counts == [1, 1, 1, 2, 3]


@pytest.mark.parametrize("entry", ["0.1", None, [0.1], torch.ones(3), torch.ones(1, dtype=torch.complex64), float("nan")])
def test_entries_that_are_no_rates_are_ignored(entry: Any) -> None:
    optimizer = co.AdamW(ones(), **STUCK)
    dict.__setitem__(optimizer.param_groups[0], "initial_lr", entry)  # as other code may
    assert len(said(optimizer)) == 1
    optimizer.param_groups[0]["initial_lr"] = torch.tensor([0.1])
    engine_of(optimizer).trial = Trial()
    assert said(optimizer) == []


def skipped_by_nan(optimizer: CompiledOptimizer, *, on: bool) -> None:
    optimizer.skip_nonfinite = True  # type: ignore[attr-defined]
    for param in optimizer.param_groups[0]["params"]:
        param.grad.fill_(torch.nan if on else 0.25)


def skipped_by_scaler(optimizer: CompiledOptimizer, *, on: bool) -> None:
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(on))  # type: ignore[attr-defined]


def skipped_for_lack(optimizer: CompiledOptimizer, *, on: bool) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = None if on else torch.ones_like(param)


def skipped_by_rate(optimizer: CompiledOptimizer, *, on: bool) -> None:
    optimizer.param_groups[0]["lr"] = 0.0 if on else 1e-6


SKIPS = [skipped_by_nan, skipped_by_scaler, skipped_for_lack, skipped_by_rate]


@pytest.mark.parametrize("skip", SKIPS)
def test_a_step_that_is_skipped_decides_nothing(skip: Callable[..., None]) -> None:
    optimizer = co.AdamW(ones(), **STUCK)
    skip(optimizer, on=True)
    assert said(optimizer, 2) == []
    assert engine_of(optimizer).trial.is_open
    skip(optimizer, on=False)
    assert len(said(optimizer, 2)) == 1


@pytest.mark.parametrize(("limit", "scale", "expected"), [(None, None, 0), (1e-3, None, 1), (None, 1e4, 1), (1.0, 1e4, 1)])
def test_gradients_count_as_they_are_used(limit: float | None, scale: float | None, expected: int) -> None:
    """Their norm is 16, so that a step of SGD is 0.025 at first, and 1e-6 or so unscaled or clipped."""
    optimizer = co.SGD(ones(), lr=0.1, max_grad_norm=limit)
    if scale is not None:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)  # type: ignore[attr-defined]
    assert len(said(optimizer)) == expected


def test_elements_without_a_gradient_do_not_count() -> None:
    """As the rows of an embedding that are in no batch: weight decay is too small to move them."""
    table = {"table": Parameter(torch.full((512, 16), 0.02).bfloat16())}
    table["table"].grad = torch.zeros_like(table["table"])
    table["table"].grad[::16] = 1
    assert said(co.AdamW(table, lr=1e-3)) == []
    table["table"].grad.zero_()
    optimizer = co.AdamW(table, lr=1e-3)
    assert said(optimizer) == []
    assert not engine_of(optimizer).trial.is_open


def test_later_steps_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one step that waits is the first one of 16-bit parameters: it reads how many elements of samples move."""
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, name=name, read=original: (reads.append(name), read(t))[1])
    counts = []
    for dtype in (torch.float32, torch.bfloat16):
        optimizer = co.AdamW(ones(3, dtype), **STUCK)
        for _ in range(3):
            reads.clear()
            said(optimizer)
            counts.append(len(reads))
    assert counts == [counts[0], 0, 0, counts[0] + 2, 0, 0]  # of one step, and of ten


def compiled(optimizer: CompiledOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compile(lambda: optimizer.step(), backend="eager")()


def captured(optimizer: CompiledOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("compiled_optim.step.trial.is_capturing", lambda device: True)
        optimizer.step()


def launched(optimizer: CompiledOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine_of(optimizer), "launcher", lambda step, closure: step.launch(closure))
        optimizer.step()


@pytest.mark.parametrize("hold", [compiled, captured, launched])
def test_captured_and_compiled_steps_leave_it_to_the_next_one(hold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = co.SGD(ones(), **STUCK)
    with hearing() as texts:
        hold(optimizer, monkeypatch)
    assert texts == []
    assert engine_of(optimizer).steps == 1
    assert len(said(optimizer, 2)) == 1


def test_tensors_without_numbers_are_left_out() -> None:
    meta = Parameter(torch.ones(4, 4, dtype=torch.bfloat16, device="meta"))
    meta.grad = torch.ones_like(meta)
    assert said(co.AdamW([meta], **STUCK)) == []
    with FakeTensorMode():
        assert said(co.AdamW(ones(), **STUCK)) == []


@pytest.mark.usefixtures("one_process")
def test_shards_are_judged_under_their_full_names() -> None:
    mesh = init_device_mesh("cpu", (1,))
    params = {"layer.weight": Parameter(distribute_tensor(torch.ones(64, 64).bfloat16(), mesh, [Shard(0)]))}
    for placement in (Shard(0), Replicate()):  # of the gradient; the second would be sent
        params["layer.weight"].grad = distribute_tensor(torch.ones(64, 64).bfloat16(), mesh, [placement])
        optimizer = co.AdamW(params, **STUCK)
        texts = said(optimizer)
        assert not engine_of(optimizer).trial.is_open
        assert [re.findall(r"\((.*?)\)", text) for text in texts] == ([["layer.weight"]] if placement == Shard(0) else [])


@pytest.mark.parametrize("cap", [0, 1000])
def test_gradient_release_says_it_in_the_step(cap: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    for param in model.parameters():
        torch.nn.init.ones_(param)
    optimizer = co.AdamW(model.named_parameters(), **STUCK)
    co.prepare_for_gradient_release(model, optimizer, bucket_cap_mb=cap)
    for expected in (1, 0):
        with hearing() as texts:
            model(torch.ones(1, 64).bfloat16()).sum().backward()
        assert texts == []
        texts = said(optimizer)
        assert len(texts) == expected
        assert all("3 of 3" in text for text in texts)


def test_micro_batches_say_it_at_the_end_of_the_step() -> None:
    optimizer = co.AdamW(ones(), **STUCK)
    for on, expected in ((True, 0), (True, 0), (False, 1), (True, 0), (False, 0)):
        optimizer.optimizer_accumulation = on
        assert len(said(optimizer)) == expected


@pytest.mark.parametrize(
    ("kind", "options", "advice"),
    [
        (co.AdamW, {"state_dtype": "int8"}, "use weights="),
        (co.AdamW, {"differentiable": True}, "keep it in float32"),
        (co.AdamW, {"maximize": True}, "use weights="),
        (co.AdamW, {"cautious": True}, None),  # scales by a mean over the tensor
        (co.AdamWScheduleFree, {}, "use weights="),
        (co.Rprop, {"step_sizes": (1e-9, 1e-9)}, "use weights="),
        *((kind, {}, None) for kind in (co.Muon, co.LAMB, co.Adafactor, co.SparseAdam, co.Prodigy)),  # not by element
    ],
)
def test_every_kind_of_rule(kind: Any, options: dict[str, Any], advice: str | None) -> None:
    params = {"w0": Parameter(torch.ones(128, 128, dtype=torch.bfloat16).t(), requires_grad=False)}
    grad = torch.rand(128, 128).bfloat16()
    params["w0"].grad = grad.to_sparse(1) if kind is co.SparseAdam else grad
    texts = said(kind(params, **STUCK | options), 2)
    assert [text.partition("; ")[2][: len(advice or "")] for text in texts] == ([advice] if advice else [])


@pytest.mark.parametrize("kind", registry(), ids=lambda kind: kind.__name__)
def test_training_goes_on_bit_for_bit(kind: type[CompiledOptimizer]) -> None:
    """As without the judgement, whose steps are on copies."""
    if kind is co.LBFGS:
        return
    found: list[Mapping[str, Any]] = []
    for judged in (True, False):
        generator = torch.Generator().manual_seed(3)
        param = Parameter(torch.randn(64, 80, generator=generator).bfloat16())
        optimizer = kind({"w": param}, **required(kind) | STUCK)
        engine_of(optimizer).trial.is_open = judged
        for _ in range(3):
            grad = torch.randn(64, 80, generator=generator).bfloat16()
            param.grad = grad.to_sparse(1) if kind is co.SparseAdam else grad
            said(optimizer)
        assert not engine_of(optimizer).trial.is_open
        found.append({"w": param.detach(), **optimizer.state[param]})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def called(optimizer: CompiledOptimizer, model: torch.nn.Module) -> None:
    model(torch.ones(1, 64).bfloat16()).sum().backward()


def released(optimizer: CompiledOptimizer, model: torch.nn.Module) -> None:
    co.prepare_for_gradient_release(model, optimizer)
    called(optimizer, model)


def accumulated(optimizer: CompiledOptimizer, model: torch.nn.Module) -> None:
    optimizer.optimizer_accumulation = True
    called(optimizer, model)
    optimizer.step()
    optimizer.optimizer_accumulation = False


@pytest.mark.parametrize("fault", ["the warning is an error", "it fails"])
@pytest.mark.parametrize("begin", [called, released, accumulated])
def test_no_fault_of_it_breaks_a_step(begin: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is as after a complete step, and steps on; of a failure, reports tell the reason."""
    found = []
    for is_open in (False, True):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2)))
        with torch.no_grad():
            for number, param in enumerate(model.parameters(), 1):
                param.copy_(torch.linspace(-1, number, param.numel()).view(param.shape))
        optimizer = co.AdamW(model.named_parameters(), **STUCK)
        engine_of(optimizer).trial.is_open = is_open
        with monkeypatch.context() as patch:
            fails = mock.Mock(side_effect=ZeroDivisionError("no reason"))
            if fault == "it fails":
                patch.setattr("compiled_optim.step.trial.taken", fails)
            begin(optimizer, model)
            with warnings.catch_warnings(action="error"):
                if is_open and fault != "it fails":
                    with pytest.raises(UserWarning, match="too small"):
                        optimizer.step()
                else:
                    optimizer.step()
                optimizer.zero_grad()
                called(optimizer, model)
                optimizer.step()
            assert fails.call_count == (is_open and fault == "it fails")
        entries = [each for of_param in optimizer.state.values() for each in of_param.values()]
        found.append([*model.parameters(), *entries, torch.tensor([engine_of(optimizer).steps])])
        report = co.compile_report(optimizer)
        said_so = "the first step could not be judged: ZeroDivisionError: no reason"
        assert [f.evidence for f in report.findings if f.name == "not judged"] == [said_so] * fails.call_count
        assert (said_so in str(report)) == bool(fails.call_count)
    assert all(map(torch.equal, *found))


def test_parameters_that_take_the_same_step_are_judged_by_one() -> None:
    optimizer = co.AdamW([{"params": ones(20)}, {"params": {f"x{n}": p for n, p in ones(3).items()}, "lr": 1e-5}], **STUCK)
    with mock.patch("compiled_optim.step.trial.taken", wraps=taken) as computed:
        (text,) = said(optimizer)
    assert "23 of 23" in text
    assert computed.call_count == 2
