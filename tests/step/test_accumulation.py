"""Steps of several gradients, whose moments take them one by one: against naive loops, with gradient release and without."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, registry, required
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer

MICRO = [1, 3, 1, 2, 4]  # micro-batches of each step
ADAM = {"lr": 0.07, "betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 0.4}
CASES: list[tuple[type[CompiledOptimizer], dict[str, Any]]] = [
    (co.AdamW, ADAM),
    (co.AdamW, {**ADAM, "amsgrad": True}),
    (co.Adam, {**ADAM, "betas": (0.0, 0.8), "maximize": True}),
    (co.Adam, {**ADAM, "decouple_wd": True}),
    (co.RAdam, {**ADAM, "betas": (0.6, 0.5)}),
    (co.SGD, {"lr": 0.07, "momentum": 0.8, "weight_decay": 0.4, "dampening": 0.3}),
    (co.SGD, {"lr": 0.07, "momentum": 0.8, "weight_decay": 0.4, "decouple_lr": True, "max_lr": 0.5}),
]


class Naive:
    """One parameter and its moments, in float64."""

    def __init__(self, kind: type[CompiledOptimizer], options: dict[str, Any], param: Tensor) -> None:
        self.kind, self.options, self.param = kind, options, param.detach().clone()
        self.m, self.v, self.largest = (torch.zeros_like(param) for _ in range(3))
        self.t = 0

    def step(self, grads: Sequence[Tensor]) -> None:
        lr, decay = self.options["lr"], self.options["weight_decay"]
        self.t += 1
        grads = [-g for g in grads] if self.options.get("maximize") else list(grads)
        decoupled = self.kind is co.AdamW or self.options.get("decouple_wd") or self.options.get("decouple_lr")
        if not decoupled:
            grads[-1] = grads[-1] + decay * self.param
        else:
            self.param = self.param * (1 - lr * decay / self.options.get("max_lr", 1.0))
        if self.kind is co.SGD:
            weight = 1 if self.t == 1 else 1 - self.options.get("dampening", 0.0)
            self.m = self.options["momentum"] * self.m + weight * sum(grads)
            self.param = self.param - lr * self.m
            return
        (beta1, beta2), eps = self.options["betas"], self.options["eps"]
        self.m = beta1 * self.m + (1 - beta1) * sum(grads)
        self.v = beta2 * self.v + (1 - beta2) * sum(g * g for g in grads)
        self.largest = torch.maximum(self.largest, self.v)
        corrected, correction2 = self.m / (1 - beta1**self.t), 1 - beta2**self.t
        if self.kind is co.RAdam:
            longest = 2 / (1 - beta2) - 1
            assert longest <= 5  # never rectified
            self.param = self.param - lr * corrected
            return
        square = self.largest if self.options.get("amsgrad") else self.v
        self.param = self.param - lr * corrected / ((square / correction2).sqrt() + eps)


class Weights(nn.Module):
    """Parameters whose gradients are what is asked for."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.params = nn.ParameterList(nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((3, 5), (7,), ()))

    def gradients(self, seed: int) -> list[Tensor | None]:
        """One for each parameter; None for one of them in every third micro-batch."""
        generator = torch.Generator().manual_seed(seed)
        found: list[Tensor | None] = [torch.randn(p.shape, generator=generator).to(p) for p in self.params]
        if seed % 3 == 2:
            found[seed % 2] = None
        return found

    def backward(self, grads: Sequence[Tensor | None]) -> None:
        sum((p * g).sum() for p, g in zip(self.params, grads, strict=True) if g is not None).backward()


def train(model: Weights, optimizer: CompiledOptimizer) -> list[list[list[Tensor | None]]]:
    """Steps of :data:`MICRO` micro-batches; returns the gradients of each."""
    seed, given = 0, []
    for count in MICRO:
        given.append([model.gradients(seed + i) for i in range(count)])
        before = [p.detach().clone() for p in model.params]
        for i, grads in enumerate(given[-1]):
            assert all(map(torch.equal, model.params, before))
            optimizer.optimizer_accumulation = i < count - 1
            model.backward(grads)
            optimizer.step()
            optimizer.zero_grad()
        seed += count
    return given


@pytest.mark.parametrize("released", [False, True], ids=["", "released"])
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda x: x.__name__ if isinstance(x, type) else "")
def test_as_a_naive_loop(kind: type[CompiledOptimizer], options: dict[str, Any], lowering: str, released: bool) -> None:
    model = Weights()
    naive = [Naive(kind, options, p) for p in model.params]
    optimizer = kind(model.named_parameters(), lowering=lowering, **options)
    if released:
        co.prepare_for_gradient_release(model, optimizer, bucket_cap_mb=0)
    given = train(model, optimizer)
    for micro in given:
        for reference, *grads in zip(naive, *micro, strict=True):
            if own := [g for g in grads if g is not None]:
                reference.step(own)
    for p, reference in zip(model.params, naive, strict=True):
        torch.testing.assert_close(p.detach(), reference.param, rtol=1e-9, atol=1e-11)
        assert optimizer.state[p]["step"] == reference.t
        assert "exp_avg" not in optimizer.state[p] or torch.allclose(optimizer.state[p]["exp_avg"], reference.m)
    assert co.compile_report(optimizer).steps == len(MICRO)


@pytest.mark.parametrize("released", [False, True], ids=["", "released"])
def test_schedules_see_the_number_of_the_step(released: bool) -> None:
    """The same whole number in each of its micro-batches."""
    model = Weights()
    optimizer = co.AdamW(model.parameters(), lr=1.0)
    optimizer.schedule(lr=lambda step: 0.5 * step)
    if released:
        co.prepare_for_gradient_release(model, optimizer, bucket_cap_mb=0)
    for i in range(9):
        optimizer.optimizer_accumulation = i % 3 != 2
        model.backward(model.gradients(3))
        optimizer.step()
        optimizer.zero_grad()
        assert float(optimizer.param_groups[0]["lr"]) == 0.5 * (i // 3 + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_of_one_gradient_is_as_always(dtype: torch.dtype) -> None:
    models = [Weights(dtype), Weights(dtype)]
    ours, plain = (co.AdamW(m.parameters(), **ADAM) for m in models)
    for seed in range(6):
        for model, optimizer in zip(models, (ours, plain), strict=True):
            if optimizer is ours:
                optimizer.optimizer_accumulation = True
                optimizer.optimizer_accumulation = False
            model.backward(model.gradients(seed))
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(a, b)
        for name, entry in plain.state[b].items():
            assert torch.equal(ours.state[a][name], entry)


@pytest.mark.parametrize("weights", [None, "kahan", "split8", "stochastic", "master"])
def test_parameters_in_fewer_bytes_keep_their_value(weights: str | None) -> None:
    param = nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer = co.AdamW([param], lr=1e-2, weights=weights)
    for i in range(18):
        entries = optimizer.state[param]
        before = [t.clone() for t in (param.detach(), *(entries[n] for n in ("kahan_comp", "remainder") if n in entries))]
        param.grad = torch.randn_like(param)
        optimizer.optimizer_accumulation = i % 3 != 2
        optimizer.step()
        after = [param.detach(), *(entries[n] for n in ("kahan_comp", "remainder") if n in entries)]
        if weights == "kahan":
            before, after = ([sum(t.float() for t in parts)] for parts in (before, after))
        assert all(map(torch.equal, before, after)) == (i % 3 != 2)


def test_momentum_does_what_it_does_with_summed_gradients() -> None:
    models = [Weights(), Weights()]
    ours = co.SGD(models[0].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    theirs = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for micro in train(models[0], ours):
        for grads in micro:
            models[1].backward(grads)
        theirs.step()
        theirs.zero_grad()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [k for k in registry() if getattr(k, "_accumulation", None)], ids=lambda k: k.__name__)
def test_the_order_of_gradients_does_not_matter(kind: type[CompiledOptimizer]) -> None:
    """In any rule that says that it reads them through averages alone."""
    results = []
    for order in ([1, 2], [2, 1]):
        model = Weights()
        moments = {"momentum": 0.9} if "momentum" in kind._all_fields else {}
        optimizer = kind(model.parameters(), **{**required(kind), **moments})
        for seed in (3, 4):
            model.backward(model.gradients(seed))
            optimizer.step()
            optimizer.zero_grad()
        for seed in order:
            optimizer.optimizer_accumulation = seed == order[0]
            model.backward([g if g is not None else torch.zeros(7) for g in Weights().gradients(3 * seed)])
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.params])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("released", [False, True], ids=["", "released"])
def test_micro_batches_without_gradients(released: bool) -> None:
    """Change nothing, first or later; nor does a step of none but such ones."""
    model = Weights()
    naive = [Naive(co.AdamW, ADAM, p) for p in model.params]
    optimizer = co.AdamW(model.parameters(), **ADAM)
    if released:
        co.prepare_for_gradient_release(model, optimizer)
    grads = [torch.ones_like(p) for p in model.params]
    for on, given in ((True, False), (True, True), (True, False), (False, True), (True, False), (False, False)):
        optimizer.optimizer_accumulation = on
        if given:
            model.backward(grads)
        optimizer.step()
        optimizer.zero_grad()
    for p, reference, grad in zip(model.params, naive, grads, strict=True):
        reference.step([grad, grad])
        torch.testing.assert_close(p.detach(), reference.param, rtol=1e-9, atol=1e-11)
        assert optimizer.state[p]["step"] == 1


REFUSED: list[tuple[type[CompiledOptimizer], dict[str, Any], str]] = [
    *((k, {}, "needs whole gradients") for k in registry() if not getattr(k, "_accumulation", None)),
    (co.SGD, {}, r"param_groups\[0\]\['momentum'\]=0: without state, the gradients"),
    (co.SGD, {"momentum": 0.9, "nesterov": True}, r"\['nesterov'\]=True: a step needs whole gradients"),
    (co.AdamW, {"cautious": True}, r"\['cautious'\]=True"),
    (co.AdamW, {"differentiable": True}, r"\['differentiable'\]=True"),
    (co.AdamW, {"max_grad_norm": 1.0}, "max_grad_norm does not go with optimizer accumulation"),
    (co.AdamW, {"skip_nonfinite": True}, "skip_nonfinite does not go with optimizer accumulation"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED, ids=lambda x: x.__name__ if isinstance(x, type) else "")
def test_what_no_state_can_hold_is_refused(kind: type[CompiledOptimizer], options: dict[str, Any], message: str) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2, 2))], **{**required(kind), **options})
    with pytest.raises(ValueError, match=message):
        optimizer.optimizer_accumulation = True
    assert optimizer.optimizer_accumulation is False
    optimizer.optimizer_accumulation = False
    with pytest.raises(TypeError, match="must be a bool, got 1"):
        optimizer.optimizer_accumulation = 1


def test_what_is_refused_later() -> None:
    model = Weights()
    optimizer = co.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.optimizer_accumulation = True
    with pytest.raises(ValueError, match="max_grad_norm does not go with optimizer accumulation"):
        optimizer.max_grad_norm = 1.0
    with pytest.raises(ValueError, match=r"param_groups\[1\]\['momentum'\]=0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "momentum": 0.0})
    model.backward(model.gradients(0))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="a gradient scaler"):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="a CUDA graph repeats one micro-batch"), pytest.warns(RuntimeWarning):
        co.CUDAGraphRunner(optimizer).step()


def test_where_it_is_off_again_nothing_is_refused() -> None:
    """But within a step, and where it is switched on again."""
    models = [Weights(), Weights()]
    ours, plain = (co.AdamW(m.params[:1], **ADAM) for m in models)
    for on in (True, False):
        ours.optimizer_accumulation = on
        with pytest.raises(ValueError, match=r"param_groups\[1\]\['cautious'\]=True"):
            ours.add_param_group({"params": models[0].params[1:], "cautious": True})
        models[0].params[0].grad = torch.zeros(3, 5, dtype=torch.float64)
        ours.step()
        ours.zero_grad()
    models[1].params[0].grad = torch.zeros(3, 5, dtype=torch.float64)
    plain.step()
    plain.zero_grad()
    for model, optimizer in zip(models, (ours, plain), strict=True):
        optimizer.add_param_group({"params": model.params[1:], "cautious": True})
        for seed in range(4):
            model.backward(model.gradients(seed))
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, models[0].params, models[1].params))
    with pytest.raises(ValueError, match=r"param_groups\[1\]\['cautious'\]=True"):
        ours.optimizer_accumulation = True
    assert not ours.optimizer_accumulation


def test_state_is_saved_and_copied_between_steps_only() -> None:
    model = Weights()
    optimizer = co.AdamW(model.parameters())
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.optimizer_accumulation = True
    model.backward(model.gradients(0))
    optimizer.step()
    for attempt in (optimizer.state_dict, lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer)):
        with pytest.raises(RuntimeError, match="between the micro-batches of a step"):
            attempt()
    optimizer.load_state_dict(saved)  # begins anew
    assert all(math.isclose(float(e["step"]), 0) for e in optimizer.state_dict()["state"].values())
    optimizer.step()
    optimizer.optimizer_accumulation = False
    optimizer.zero_grad()
    optimizer.step()  # moves what took gradients
    optimizer.state_dict()
    assert not copy.deepcopy(optimizer).optimizer_accumulation
    assert all(float(e["step"]) == 1 for e in optimizer.state_dict()["state"].values())


def test_a_parameter_that_leaves_within_a_step() -> None:
    """Takes no part in the rest of it. The step ends with the others, and one in its place begins anew."""
    params = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3)]
    optimizer = co.AdamW([{"params": [p]} for p in params], **ADAM)
    optimizer.optimizer_accumulation = True
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    new = nn.Parameter(torch.ones(3, dtype=torch.float64))
    naive = Naive(co.AdamW, ADAM, new)
    del optimizer.param_groups[2], params[2]
    optimizer.param_groups[1]["params"] = [new]
    new.grad = torch.ones_like(new)
    optimizer.optimizer_accumulation = False
    optimizer.step()
    naive.step([new.grad])
    torch.testing.assert_close(new.detach(), naive.param, rtol=1e-12, atol=0)
    assert optimizer.state_dict()["state"].keys() == {0, 1}
    assert optimizer.state[params[0]]["step"] == 1
    copy.deepcopy(optimizer)


def test_a_step_that_fails_is_none() -> None:
    model = Weights()
    optimizer = co.AdamW(model.parameters())
    optimizer.optimizer_accumulation = True
    model.backward(model.gradients(0))
    optimizer.step()
    before = [copy.deepcopy(dict(optimizer.state[p])) for p in model.params]
    model.params[0].grad = torch.ones(3, 5, dtype=torch.float64).to_sparse()
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        optimizer.step()
    for p, entries in zip(model.params, before, strict=True):
        for name, entry in entries.items():
            assert torch.equal(optimizer.state[p][name], entry)


@pytest.mark.parametrize("backend", ["eager"])
def test_in_compiled_code(backend: str) -> None:
    """The switch is read when the code runs."""
    models = [Weights(), Weights()]
    optimizers = [co.AdamW(m.parameters(), **ADAM) for m in models]
    steps: list[Callable[[], None]] = [torch.compile(optimizers[0].step, backend=backend), optimizers[1].step]
    for seed in range(6):
        for model, optimizer, step in zip(models, optimizers, steps, strict=True):
            optimizer.optimizer_accumulation = seed % 3 != 2
            model.backward([torch.ones_like(p) * (seed + 1) for p in model.params])
            step()
            optimizer.zero_grad()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(a, b)
