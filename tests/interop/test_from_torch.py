"""A live optimizer of torch.optim becomes ours in one line, and training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import functools
import gc
import json
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import Case, configurations, copies, registry, relative_error, wide_scalars
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import compiled_optim as co

IN_TORCH = [kind for kind in registry() if hasattr(torch.optim, kind.__name__)]
CASES = [
    case
    for kind in IN_TORCH
    if kind is not co.LBFGS
    for case in configurations(kind)
    if not {"cautious", "max_lr"} & {*case.kwargs}
    and case.kwargs.get("ns_coefficients") != "polar_express"
    and not isinstance(case.kwargs.get("ns_coefficients", (0.0,))[0], tuple)
]
SHAPES = {"Muon": [(6, 4), (3, 8), (5, 5)]}


def test_all_of_torch_is_there() -> None:
    theirs = {
        n for n, v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, Optimizer) and v is not Optimizer
    }
    assert theirs == {kind.__name__ for kind in IN_TORCH}


def _parameters(case: Case) -> list[nn.Parameter]:
    if case.optimizer is not co.Muon:
        made = case.parameters(torch.float64, large=(20, 5))
        return [param for param in made if param.numel() or case.optimizer is not co.Adafactor]  # torch's divides by 0
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, dtype=torch.float64, generator=generator)) for s in SHAPES["Muon"]]


def _groups(params: list[nn.Parameter], lr: float) -> list[dict[str, Any]]:
    named = [(f"layer.{i}", param) for i, param in enumerate(params)]
    return [{"params": named[::2], "of": {"user": [1]}}, {"params": named[1::2], "lr": 0.5 * lr}]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_goes_on(case: Case) -> None:
    params = _parameters(case)
    twins = copies(params, torch.float64)
    kind = getattr(torch.optim, case.optimizer.__name__)
    lr = case.kwargs.get("lr", 0.01)
    with wide_scalars():
        theirs, old = (kind(_groups(ps, lr), **{"lr": lr, **case.kwargs}) for ps in (params, twins))
        for seed in range(5):
            case.give_gradients(params, twins, seed, absent=4)
            theirs.step()
            old.step()
        assert relative_error(params, twins) == 0
        before = copy.deepcopy(old.state_dict())
        new = co.from_torch(old)
        assert type(new) is case.optimizer
        assert [group["param_names"] for group in new.param_groups] == [g["param_names"] for g in old.param_groups]
        assert new.param_groups[0]["of"] == {"user": [1]}
        for seed in range(5, 10):
            case.give_gradients(params, twins, seed, absent=4)
            theirs.step()
            new.step()
        assert relative_error(twins, params) < (2e-2 if kind is torch.optim.Muon else 1e-12)
    after = old.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for key, entries in before["state"].items():
        for name, entry in entries.items():
            now = after["state"][key][name]
            assert torch.equal(entry, now) if isinstance(entry, torch.Tensor) else entry == now


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_goes_on(line_search: str | None) -> None:
    def closure_of(optimizer: Optimizer, model: nn.Module) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        return closure

    torch.manual_seed(0)
    x = torch.randn(20, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"lr": 0.3, "max_iter": 3, "history_size": 4, "line_search_fn": line_search}
    theirs = torch.optim.LBFGS(model.parameters(), **options)
    old = torch.optim.LBFGS(twin.parameters(), **options)
    for _ in range(5):
        theirs.step(closure_of(theirs, model))
        old.step(closure_of(old, twin))
    new = co.from_torch(old)
    for _ in range(5):
        first, second = theirs.step(closure_of(theirs, model)), new.step(closure_of(new, twin))
    assert second.item() == pytest.approx(first.item(), rel=1e-6)
    assert relative_error([*twin.parameters()], [*model.parameters()]) < 1e-6


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1 / (1 + e)]),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.4, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=7), lr_scheduler.ExponentialLR(o, 0.8)], milestones=[7]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=6), lr_scheduler.MultiStepLR(o, [2, 8])], o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=8),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("steps", [0, 5])
def test_schedulers_go_on(name: str, steps: int) -> None:
    """Also one that has not taken a step, which looks whether its optimizer has."""

    def made() -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
        groups: Any = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]
        return params, torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def train(params: list[nn.Parameter], optimizer: Any, scheduler: Any, count: int) -> list[Any]:
        told = []
        for step in range(count):
            for param in params:
                param.grad = param.detach() + step
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            told.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        return told

    (params, theirs), (twins, old) = made(), made()
    their_scheduler, scheduler = SCHEDULERS[name](theirs), SCHEDULERS[name](old)
    assert train(params, theirs, their_scheduler, steps) == train(twins, old, scheduler, steps)
    if steps == 0:
        for param in (*params, *twins):
            param.grad = torch.ones_like(param)
        theirs.step()
        old.step()
    rates = [group["lr"] for group in old.param_groups]
    new = co.from_torch(old, schedulers=[scheduler])
    assert scheduler.optimizer is new
    for each in (their_scheduler, scheduler) if steps == 0 else ():  # which warns where its optimizer took no step
        each.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert train(params, theirs, their_scheduler, 9) == train(twins, new, scheduler, 9)
    assert relative_error(twins, params) < 1e-12
    assert [group["lr"] for group in old.param_groups] == rates
    assert scheduler.state_dict().keys() == their_scheduler.state_dict().keys()


def _adamw(**options: Any) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], **options)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    return optimizer


def test_a_scheduler_that_is_not_passed_is_named() -> None:
    old = _adamw()
    first = lr_scheduler.StepLR(old, 3)
    second = lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(old)], old)
    rates, step = old.param_groups[0]["lr"], old.step
    with pytest.raises(
        ValueError, match=r"torch.optim.AdamW: it is driven by (StepLR and Chained\w+|Chained\w+ and StepLR): list"
    ):
        co.from_torch(old)
    with pytest.raises(ValueError, match="AdamW: it is driven by ChainedScheduler: list"):
        co.from_torch(old, schedulers=[first])
    assert first.optimizer is old
    new = co.from_torch(old, schedulers=[first, second])
    assert first.optimizer is second.optimizer is second._schedulers[0].optimizer is new  # type: ignore[comparison-overlap]
    assert co.from_torch(old) is not new
    third = lr_scheduler.StepLR(old, 3)
    assert co.from_torch(old, schedulers=()).param_groups[0]["lr"] == rates
    assert third.optimizer is old
    third.itself = third  # type: ignore[attr-defined]
    del third  # which goes when garbage is collected
    co.from_torch(old)
    assert (old.step, old.param_groups[0]["lr"]) == (step, rates)


def test_one_scheduler_needs_no_list() -> None:
    old = _adamw()
    scheduler = lr_scheduler.StepLR(old, 3)
    new: Any = co.from_torch(old, schedulers=scheduler)
    assert scheduler.optimizer is new
    with pytest.raises(ValueError, match="schedulers: the int does not drive it"):
        co.from_torch(_adamw(), schedulers=3)


def test_state_of_more_bits_than_there_will_be_is_named() -> None:
    model = nn.Linear(3, 2).double()
    old = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(3, dtype=torch.float64)).sum().backward()
    old.step()
    co.from_torch(old)
    model.float()  # which does not convert the optimizer's state
    with pytest.warns(
        UserWarning, match=r"AdamW has was rounded: exp_avg of 'weight', exp_avg_sq of 'weight', .*and 1 more"
    ):
        new = co.from_torch(old)
    assert new.state[model.weight]["exp_avg"].dtype == torch.float32
    co.from_torch(old, state_dtype=torch.float32)


def test_schedulers_of_others_are_refused() -> None:
    old, other = _adamw(), _adamw()
    for scheduler in (lr_scheduler.StepLR(other, 3), 3):
        with pytest.raises(ValueError, match=r"schedulers: the (StepLR|int) does not drive it"):
            co.from_torch(old, schedulers=[scheduler])


def test_a_scheduler_that_is_not_torchs_goes_on_where_it_is_listed() -> None:
    class Own:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer, self.optimizers, self.last = optimizer, "all", 0.0

    old = _adamw()
    scheduler = Own(old)
    assert co.from_torch(old) is not scheduler.optimizer
    new = co.from_torch(old, schedulers=[scheduler])
    assert scheduler.optimizer is new
    assert (scheduler.optimizers, scheduler.last) == ("all", 0.0)


def test_hooks_come_along() -> None:
    old, told = _adamw(), []

    def tell(name: str, result: Any = None) -> Callable[..., Any]:
        return lambda *arguments: told.append((name, type(arguments[0]).__module__.partition(".")[0])) or result

    old.register_step_pre_hook(tell("before step"))
    handle = old.register_step_post_hook(tell("after step"))
    old.register_state_dict_pre_hook(tell("before save"))
    old.register_state_dict_post_hook(tell("after save"))
    old.register_load_state_dict_pre_hook(tell("before load"))
    old.register_load_state_dict_post_hook(tell("after load"))
    new = co.from_torch(old)
    assert told == []
    new.step()
    new.load_state_dict(new.state_dict())
    wanted = ["before step", "after step", "before save", "after save", "before load", "after load"]
    assert told == [(name, "compiled_optim") for name in wanted]
    handle.remove()
    told.clear()
    old.step()
    assert told == [("before step", "torch")]


def test_groups_are_as_they_were() -> None:
    rate = torch.tensor(0.25)
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups: Any = [{"params": [("a", first)], "lr": rate, "tag": "x"}, {"params": [("b", second)], "weight_decay": 0.5}]
    old = torch.optim.AdamW(groups, lr=0.125, betas=(0.5, 0.75), amsgrad=True, maximize=True, capturable=True)
    lr_scheduler.StepLR(old, 1)
    gc.collect()
    new = co.from_torch(old)
    for ours, theirs in zip(new.param_groups, old.param_groups, strict=True):
        assert {key: ours[key] for key in theirs} == {**theirs}
    assert new.param_groups[0]["lr"] is rate
    assert new.param_groups[0]["initial_lr"] is not old.param_groups[0]["initial_lr"]
    assert new.defaults["betas"] == (0.5, 0.75)
    third = nn.Parameter(torch.ones(2))
    new.add_param_group({"params": [("c", third)]})
    assert (new.param_groups[2]["lr"], new.param_groups[2]["amsgrad"]) == (0.125, True)
    rate.fill_(0.5)
    assert new.hyperparameters()[0]["lr"] == 0.5
    json.dumps(new.hyperparameters())


def test_state_is_copied() -> None:
    old = _adamw()
    (param,) = old.param_groups[0]["params"]
    old.state[param]["note"], old.state["everybody"] = [1], {"x": 2}
    new = co.from_torch(old)
    assert new.state[param]["step"] == 1
    assert new.state["everybody"] == {"x": 2}
    assert new.state[param]["note"] == [1]
    assert new.state[param]["note"] is not old.state[param]["note"]
    assert new.state[param]["exp_avg"].data_ptr() != old.state[param]["exp_avg"].data_ptr()
    assert torch.equal(new.state[param]["exp_avg"], old.state[param]["exp_avg"])
    assert [p for group in new.param_groups for p in group["params"]] == [param]


def test_options_of_the_new_optimizer() -> None:
    param = nn.Parameter(torch.randn(64, 64).bfloat16())
    old = torch.optim.Adam([param], lr=1e-4)
    param.grad = torch.randn_like(param)
    old.step()
    new = co.from_torch(old, weights="split8", state_dtype="int8", max_grad_norm=1.0, lowering="eager")
    assert {"remainder", "exp_avg_int8"} <= {*new.state[param]}
    assert new.max_grad_norm == 1.0
    new.step()
    plain = co.from_torch(old)
    assert plain.state[param]["exp_avg"].dtype == torch.bfloat16
    for option in ("lr", "amsgrad", "maximize"):
        with pytest.raises(ValueError, match=f"torch.optim.Adam: {option} comes from its groups"):
            co.from_torch(old, **{option: 0})
    with pytest.raises(TypeError, match=r"Adam: Adam.* unexpected keyword argument 'wieghts'.*did you mean weights"):
        co.from_torch(old, wieghts="kahan")
    with pytest.raises(ValueError, match="did you mean split8"):
        co.from_torch(old, weights="split9")


class _Own(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.25)

    def __repr__(self) -> str:
        return "own"


class _OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _OwnState(torch.optim.SGD):
    def _init_group(self, *arguments: Any) -> Any:
        return super()._init_group(*arguments)


class _Foreign(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class _Wrapper(_Foreign):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__([nn.Parameter(torch.ones(2))])
        self.optimizer = inner


def test_a_subclass_with_a_constructor_of_its_own_is_taken() -> None:
    assert type(co.from_torch(_Own([nn.Parameter(torch.ones(2))]))) is co.AdamW


def _patched() -> Optimizer:
    old = _adamw()
    old.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    return old


def _wrapped() -> Optimizer:
    old = _adamw()
    old.scheduler = lr_scheduler.StepLR(old, 3)  # type: ignore[attr-defined]
    old.step = functools.wraps(old.step)(lambda closure=None: None)  # type: ignore[method-assign]
    return old


def _with_own_zero_grad() -> Optimizer:
    old = _adamw()
    old.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    return old


def _patched_and_scheduled() -> Optimizer:
    old = _adamw()
    old.step = types.MethodType(_OwnStep.step, old)  # type: ignore[method-assign]
    old.scheduler = lr_scheduler.StepLR(old, 3)  # type: ignore[attr-defined]
    return old


def _with_group(**entries: Any) -> Optimizer:
    old = _adamw()
    old.param_groups[0].update(entries)
    return old


def _with_default() -> Optimizer:
    old = _adamw()
    old.defaults["newest"] = 3
    return old


def _with_stale_state() -> Optimizer:
    old = _adamw()
    old.param_groups[0]["params"] = [nn.Parameter(torch.ones(2))]
    return old


@pytest.mark.parametrize(
    ("made", "error", "said"),
    [
        (_with_stale_state, ValueError, r"torch.optim.AdamW: its state has a tensor of shape \(3,\) that no group lists"),
        (
            lambda: _OwnStep([nn.Parameter(torch.ones(2))]),
            ValueError,
            r"torch.optim.AdamW: .*_OwnStep has a step of its own",
        ),
        (
            lambda: _OwnState([nn.Parameter(torch.ones(2))]),
            ValueError,
            r"torch.optim.SGD: .*_OwnState has a _init_group of its",
        ),
        (lambda: _Foreign([nn.Parameter(torch.ones(2))]), ValueError, r"_Foreign: torch.optim, optimi, bits.* are known$"),
        (lambda: _Wrapper(_adamw()), ValueError, r"_Wrapper: .*known; pass its .optimizer, a torch.optim.adamw.AdamW"),
        (_patched, ValueError, "torch.optim.AdamW: it has a step of its own, and the new one would not have it"),
        (_patched_and_scheduled, ValueError, "torch.optim.AdamW: it has a step of its own"),
        (_wrapped, ValueError, "torch.optim.AdamW: it has a step of its own"),
        (_with_own_zero_grad, ValueError, "torch.optim.AdamW: it has a zero_grad of its own"),
        (lambda: _with_group(lr=-1.0), ValueError, "torch.optim.AdamW: Invalid learning rate: -1.0"),
        (lambda: _with_group(amsgrad="yes"), TypeError, "torch.optim.AdamW: amsgrad of param_groups"),
        (lambda: _with_group(decoupled_weight_decay=False), ValueError, "torch.optim.AdamW: .*decoupled_weight_decay"),
        (_with_default, ValueError, "torch.optim.AdamW: newest=3 has no counterpart in AdamW"),
        (lambda: co.AdamW([nn.Parameter(torch.ones(2))]), TypeError, "another library, got compiled_optim"),
        (lambda: nn.Linear(2, 2), TypeError, "another library, got torch.nn"),
    ],
)
def test_what_it_cannot_take(made: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        co.from_torch(made())
