"""Thousands of steps while everything around them goes wrong, each compared with a reference in float64.

Before each step something may be changed, moved, replaced, dropped, saved, copied or interrupted; then the step's result is
compared, for every parameter and state tensor, with what the reference makes of the values before it.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from interruptions import Interruption
from reference import naive_module
from soak_options import OPTIMIZERS, parse
from torch import Tensor, nn
from walks import walks

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer

TOLERANCE = {"Muon": 0.1}  # of the distance moved, since its iteration is in bfloat16


class Soak:
    """An optimizer under test.

    Args:
        name: of its class.
        seed: decides about everything that happens.
        lowering: the optimizer's.
    """

    def __init__(self, name: str, seed: int, lowering: str = "auto") -> None:
        self.name = name
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.lowering = lowering
        self.reference = naive_module(getattr(co, name))
        self.shapes = (
            [(6, 4), (5, 4), (6, 4), (40, 60)] if name in ("Muon", "SparseAdam") else [(6, 4), (7,), (40, 60), (3,), (4, 3)]
        )
        self.params = [self._parameter(shape) for shape in self.shapes]
        self.optimizer: CompiledOptimizer = getattr(co, name)(
            [(f"p{i}", p) for i, p in enumerate(self.params)], **OPTIMIZERS[name], lowering=lowering
        )
        self.kept: list[Any] = []
        self.happened: list[str] = []

    def _parameter(self, shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=self.generator, dtype=torch.float64))

    def step(self) -> None:
        """Some events, and a step."""
        for _ in range(self.random.choice((0, 0, 1, 1, 2))):
            event = self.random.choice(EVENTS)
            if event(self) is not False:
                self.happened.append(event.__name__)
        self._give()
        if self.random.random() < 0.03:
            self._interrupted()
            self._give()
        self.happened.append("step")
        before = [self._values(p) for p in self.params]
        grads = [None if p.grad is None else p.grad for p in self.params]
        clip, skip = self.optimizer.max_grad_norm, self.optimizer.skip_nonfinite
        self.optimizer.step()
        self._compare(before, grads, clip, skip)

    def _give(self) -> None:
        """Gradients of many forms, or none."""
        kinds = ["plain"] * 4 + ["absent", "same", "strided", "transposed", "expanded", "negated", "nan"]
        for param in self.params:
            kind = self.random.choice(kinds)
            grad = torch.randn(param.shape, generator=self.generator, dtype=param.dtype)
            if self.name == "SparseAdam":
                self._give_sparse(param, grad, kind)
                continue
            if kind == "absent" or not param.requires_grad:
                param.grad = None
            elif kind == "same" and param.grad is not None and param.grad.is_contiguous():
                param.grad.copy_(grad)
            elif kind == "strided":
                param.grad = torch.stack([grad, grad], -1)[..., 0]
            elif kind == "transposed":
                param.grad = grad.t().contiguous().t() if grad.dim() == 2 else grad
            elif kind == "expanded":
                param.grad = grad.reshape(-1)[:1].reshape([1] * grad.dim()).expand(grad.shape)
            elif kind == "negated":
                param.grad = torch._neg_view(grad)
            elif kind == "nan" and self.optimizer.skip_nonfinite:
                param.grad = grad.fill_(math.nan)
            else:
                param.grad = grad
            self.kept.append(param.grad)
        del self.kept[:-20]

    def _give_sparse(self, param: nn.Parameter, grad: Tensor, kind: str) -> None:
        if kind == "absent" or not param.requires_grad:
            param.grad = None
            return
        count = self.random.randrange(0, 2 * len(grad))
        rows = [self.random.randrange(len(grad)) for _ in range(count)]
        values = torch.randn(count, *grad.shape[1:], generator=self.generator, dtype=grad.dtype)
        made = torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values, grad.shape, check_invariants=True)
        param.grad = made.coalesce() if kind in ("strided", "transposed") else made

    def _interrupted(self) -> None:
        """A step that ends somewhere in the middle."""
        if Interruption(self.random.randrange(2000)).run(self.optimizer.step):
            self.happened.append("interruption")
        for param in self.params:  # what half a step left may be anything
            for value in self.optimizer.state[param].values():
                value.nan_to_num_(0.1, 0.1, 0.1)

    def _values(self, param: nn.Parameter) -> tuple[Tensor, dict[str, Tensor]]:
        state = self.optimizer.state.get(param, {})
        return param.detach().clone(), {k: v.detach().clone() for k, v in state.items()}

    def _compare(self, before: list[Any], grads: list[Any], clip: Any, skip: bool) -> None:
        norm = math.sqrt(sum(_square_sum(g) for g in grads if g is not None))
        skipped = skip and not math.isfinite(norm)
        factor = min(1.0, float(clip) / (norm + 1e-6)) if clip is not None else 1.0
        options = {h.name: None for h in self.optimizer._declaration.hypers}
        for group, numbers in zip(self.optimizer.param_groups, self.optimizer.hyperparameters(), strict=True):
            h = SimpleNamespace(
                **{**options, **numbers, "maximize": group.get("maximize", False)},
                **{s.name: group.get(s.name, s.default) for s in self.optimizer._declaration.statics},
            )
            for param in group["params"]:
                index = next(i for i, p in enumerate(self.params) if p is param)
                (value, state), grad = before[index], grads[index]
                old = value.clone()
                step = int(state.get("step", torch.zeros(())).item())
                if grad is not None and not skipped:
                    fresh = self.reference.start(value, h)
                    own = {name: state.get(name, start) for name, start in fresh.items()}
                    step += 1
                    self.reference.step(value, factor * grad, own, step, h)
                    state.update(own)
                self._assert_close(f"p{index}", param.detach(), value, old)
                now = self.optimizer.state.get(param, {})
                assert int(now["step"].item() if "step" in now else 0) == step, (index, now, step)
                for name, expected in state.items():
                    if name != "step" and name in now:
                        self._assert_close(f"{name} of p{index}", now[name], expected, expected)

    def _assert_close(self, what: str, found: Tensor, expected: Tensor, old: Tensor) -> None:
        distance = (expected - old).norm().item()
        error = (found - expected).norm().item()
        allowed = TOLERANCE.get(self.name, 0.0) * distance + 1e-9 * (1 + expected.norm().item())
        assert error <= allowed, f"{what} is {error:.3g} off (moved {distance:.3g}) after {self.happened[-8:]}"


def _square_sum(grad: Tensor) -> float:
    values = grad.coalesce()._values() if grad.is_sparse else grad
    return float((values.double() ** 2).sum())


def _optimizer_param(soak: Soak) -> nn.Parameter:
    return soak.random.choice(soak.params)


def move_parameter(soak: Soak) -> None:
    param = _optimizer_param(soak)
    soak.kept.append(param.data)
    param.data = param.data.clone()


def move_some_state(soak: Soak) -> None:
    for value in soak.optimizer.state[_optimizer_param(soak)].values():
        if soak.random.random() < 0.5:
            value.data = value.data.clone()


def move_all_state(soak: Soak) -> None:
    for state in soak.optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def replace_state(soak: Soak) -> None:
    state = soak.optimizer.state[_optimizer_param(soak)]
    for name in list(state):
        state[name] = state[name].clone()


def drop_state(soak: Soak) -> None:
    soak.optimizer.state.pop(_optimizer_param(soak), None)


def assign_rate(soak: Soak) -> None:
    rate = soak.random.uniform(0.001, 0.02)
    index = soak.random.randrange(len(soak.optimizer.param_groups))
    group = soak.optimizer.param_groups[index]
    way = soak.random.randrange(4)
    if way == 0:
        group["lr"] = rate
    elif way == 1:
        group["lr"] = torch.tensor(rate, dtype=torch.float64)
    elif way == 2:
        soak.optimizer.hyperparameter("lr", index).fill_(rate)
    else:
        group.update(lr=rate)


def schedule(soak: Soak) -> None:
    torch.optim.lr_scheduler.ExponentialLR(soak.optimizer, 0.99)


def clip(soak: Soak) -> None:
    soak.optimizer.max_grad_norm = soak.random.choice((None, 0.5, 3.0, torch.tensor(1.5, dtype=torch.float64)))


def skip(soak: Soak) -> None:
    soak.optimizer.skip_nonfinite = not soak.optimizer.skip_nonfinite


def freeze(soak: Soak) -> None:
    param = _optimizer_param(soak)
    param.requires_grad_(not param.requires_grad)


def maximize(soak: Soak) -> None:
    group = soak.random.choice(soak.optimizer.param_groups)
    group["maximize"] = not group.get("maximize")


def save_and_load(soak: Soak) -> None:
    saved = soak.optimizer.state_dict()
    if soak.random.random() < 0.5:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    if soak.random.random() < 0.3:
        for state in soak.optimizer.state.values():
            for value in state.values():
                value.copy_(torch.rand(value.shape, generator=soak.generator) if value.dim() else torch.tensor(2.0))
        saved = copy.deepcopy(saved)
    soak.optimizer.load_state_dict(saved)


def make_anew(soak: Soak) -> None:
    """Another optimizer over the same parameters, in another order, goes on where this one was."""
    old = soak.optimizer
    saved = copy.deepcopy(old.state_dict())
    groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in old.param_groups]
    for group, was in zip(groups, old.param_groups, strict=True):
        named = list(zip(was["param_names"], was["params"], strict=True))
        soak.random.shuffle(named)
        group["params"] = named
    known = (
        {s.name for s in old._declaration.statics if s.init}
        | {h.name for h in old._declaration.hypers}
        | {"params", "maximize"}
    )
    groups = [{k: v for k, v in group.items() if k in known} for group in groups]
    soak.optimizer = type(old)(
        groups,
        **OPTIMIZERS[soak.name],
        lowering=soak.lowering,
        max_grad_norm=old.max_grad_norm,
        skip_nonfinite=old.skip_nonfinite,
    )
    soak.optimizer.load_state_dict(saved)


def copy_optimizer(soak: Soak) -> None:
    """A deep copy, or a pickle, of parameters and optimizer goes on."""
    both = (soak.params, soak.optimizer)
    if soak.random.random() < 0.5:
        soak.params, soak.optimizer = copy.deepcopy(both)
    else:
        soak.params, soak.optimizer = pickle.loads(pickle.dumps(both))


def add_group(soak: Soak) -> bool:
    if len(soak.params) > 8:
        return False
    param = soak._parameter(soak.shapes[0])
    soak.params.append(param)
    soak.optimizer.add_param_group({"params": [(f"p{len(soak.params) - 1}", param)], "lr": soak.random.uniform(0.001, 0.02)})
    return True


def change_threads(soak: Soak) -> None:
    torch.set_num_threads(soak.random.choice((1, 2)))


def step_in_a_thread(soak: Soak) -> None:
    for param in soak.params:
        param.grad = None
    thread = threading.Thread(target=soak.optimizer.step)
    thread.start()
    thread.join()


def refuse(soak: Soak) -> bool:
    """A step that is refused changes nothing."""
    if soak.name == "SparseAdam":
        return False
    before = [soak._values(p) for p in soak.params]
    for param in soak.params:
        param.grad = torch.ones_like(param)
    param = _optimizer_param(soak)
    param.grad.untyped_storage().resize_(0)
    try:
        soak.optimizer.step()
    except ValueError:
        param.grad = None
        for own, (value, state) in zip(soak.params, before, strict=True):
            assert torch.equal(own, value)
            now = soak.optimizer.state.get(own, {})
            assert all(torch.equal(now[name], v) for name, v in state.items())
        return True
    raise AssertionError("a gradient without memory was used")


EVENTS: list[Callable[[Soak], bool | None]] = [
    move_parameter,
    move_some_state,
    move_all_state,
    replace_state,
    drop_state,
    assign_rate,
    assign_rate,
    clip,
    skip,
    freeze,
    maximize,
    save_and_load,
    make_anew,
    copy_optimizer,
    add_group,
    change_threads,
    step_in_a_thread,
    refuse,
]


def soak(name: str, steps: int, seed: int = 0, lowering: str = "auto") -> Counter[str]:
    """Run ``steps`` steps; what happened how often."""
    threads = torch.get_num_threads()
    run = Soak(name, seed, lowering)
    try:
        for index in range(steps):
            try:
                run.step()
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}, step {index}: {error}") from error
    finally:
        torch.set_num_threads(threads)
    return Counter(run.happened)


def main() -> int:
    """Run the optimizers asked for."""
    args = parse(sys.argv[1:])
    if args.walks:
        return min(walks(args.walks, args.seed), 1)
    for name in args.optimizer:
        happened = soak(name, args.steps, args.seed, args.lowering)
        print(
            f"{name}: {happened.pop('step')} steps are right, among {happened.total()} events: {dict(happened)}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
