"""Live optimizers of optimi and bitsandbytes, whose packages are here and run on CPUs, and of apex, which needs CUDA.

apex's is a class of this file with the layout of ``apex/optimizers/fused_adam.py``: the step in the group, float32 averages.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import optimi
import pytest
import torch
from catalog import relative_error
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import compiled_optim as co

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    bnb = pytest.importorskip("bitsandbytes")


def _pair(dtype: torch.dtype, large: tuple[int, int] = (64, 100)) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in (large, (50,), (3, 4))]
    first, second = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    return first, second


def _groups(params: list[nn.Parameter], lr: float) -> list[dict[str, Any]]:
    named = [(f"layer.{i}", param) for i, param in enumerate(params)]
    return [{"params": named[:2]}, {"params": named[2:], "lr": 0.5 * lr, "weight_decay": 0.3}]


def _train(steps: range, *sides: tuple[list[nn.Parameter], Optimizer]) -> None:
    for seed in steps:
        for params, optimizer in sides:
            generator = torch.Generator().manual_seed(seed)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            optimizer.step()


_BETAS = {"betas": (0.7, 0.8), "eps": 0.03}
OPTIMI: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.7}),
    ("SGD", {"momentum": 0.7, "dampening": True, "decouple_wd": True}),
    ("Adam", _BETAS),
    ("Adam", {**_BETAS, "decouple_wd": True, "decouple_lr": True, "max_lr": 0.2}),
    ("AdamW", _BETAS),
    ("RAdam", {"betas": (0.7, 0.8), "eps": 1e-12}),
    ("Lion", {"betas": (0.7, 0.8)}),
    ("Adan", {"betas": (0.7, 0.8, 0.6), "eps": 0.03}),
    ("StableAdamW", _BETAS),
    ("Ranger", {"betas": (0.7, 0.8), "eps": 1e-12, "k": 3, "alpha": 0.4}),
]


@pytest.mark.parametrize(("name", "options"), OPTIMI, ids=str)
@pytest.mark.filterwarnings("ignore:You are using weight_decay", "ignore:decouple_lr")
def test_optimi_goes_on(name: str, options: dict[str, Any]) -> None:
    params, twins = _pair(torch.float64)
    options = {"lr": 0.07, "weight_decay": 0.2, "foreach": False, "triton": False, **options}
    theirs, old = (getattr(optimi, name)(_groups(ps, 0.07), **options) for ps in (params, twins))
    _train(range(5), (params, theirs), (twins, old))
    schedulers = [lr_scheduler.ExponentialLR(each, 0.9) for each in (theirs, old)]
    new = co.from_torch(old, schedulers=[schedulers[1]])
    assert type(new).__name__ == name
    for step in range(5, 10):
        _train(range(step, step + 1), (params, theirs), (twins, new))
        for scheduler in schedulers:
            scheduler.step()
    assert relative_error(twins, params) < 1e-6  # optimi counts steps in its group in 32 bits
    assert [group["lr"] for group in new.param_groups] == [group["lr"] for group in theirs.param_groups]


@pytest.mark.parametrize("weights", ["as it was", "split16"])
def test_optimi_keeps_its_bits(weights: str) -> None:
    params, twins = _pair(torch.bfloat16)
    theirs, old = (optimi.AdamW(ps, lr=1e-4, foreach=False, triton=False) for ps in (params, twins))
    _train(range(20), (params, theirs), (twins, old))
    new = co.from_torch(old, **({} if weights == "as it was" else {"weights": weights}))
    assert ("kahan_comp" if weights == "as it was" else "remainder") in new.state[twins[0]]
    _train(range(20, 40), (params, theirs), (twins, new))
    full = co.from_torch(theirs, weights="split16")
    held = [co.full_precision_state_dict(nn.ParameterList(ps), o) for ps, o in ((twins, new), (params, full))]
    assert relative_error([*held[0].values()], [*held[1].values()]) < 1e-3


def test_what_it_cannot_take_of_optimi() -> None:
    param = nn.Parameter(torch.ones(2))
    old = optimi.AdamW([param], lr=1.0, gradient_release=True, foreach=False, triton=False)
    with pytest.raises(ValueError, match=r"optimi.AdamW: gradient_release=True"):
        co.from_torch(old)
    old = optimi.AdamW([param], lr=1.0, foreach=False, triton=False)
    old.optimizer_accumulation = True
    with pytest.raises(ValueError, match=r"optimi.AdamW: optimizer_accumulation=True"):
        co.from_torch(old)


BITSANDBYTES: list[tuple[str, str, dict[str, Any]]] = [
    ("Adam", "AdamW", _BETAS),
    ("AdamW", "AdamW", _BETAS),
    ("PagedAdamW", "AdamW", _BETAS),
    ("AdamW", "AdamW", {"betas": (0.7, 0.8, 0.9), "eps": 0.03}),  # its kernel reads two
    ("Lion", "Lion", {"betas": (0.7, 0.8)}),
    ("SGD", "SGD", {"momentum": 0.7, "dampening": 0.5}),
    ("RMSprop", "RMSprop", {"alpha": 0.7, "eps": 0.03, "momentum": 0.5}),
    ("Adagrad", "Adagrad", {"eps": 0.03}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "ours", "options"), BITSANDBYTES, ids=str)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_bitsandbytes_goes_on(name: str, ours: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    params, twins = _pair(dtype)
    kind = getattr(bnb.optim, name)
    theirs, old = (kind(_groups(ps, 0.02), lr=0.02, weight_decay=0.2, **options) for ps in (params, twins))
    _train(range(5), (params, theirs), (twins, old))
    new = co.from_torch(old)
    assert type(new).__name__ == ours
    assert new.state[twins[0]]["step"] == 5
    _train(range(5, 10), (params, theirs), (twins, new))
    assert relative_error(twins, params) < (1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit", "SGD8bit", "RMSprop8bit", "Adagrad8bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_bitsandbytes_in_8_bits_goes_on(name: str) -> None:
    """With state in float32, its next step is bitsandbytes's, which decodes, steps and only then codes anew."""
    options = {"momentum": 0.7} if name == "SGD8bit" else {}
    params, twins = _pair(torch.float32, (65, 100))  # 25.4 blocks
    kind = getattr(bnb.optim, name)
    theirs, old = (kind(_groups(ps, 0.02), lr=0.02, weight_decay=0.2, **options) for ps in (params, twins))
    _train(range(5), (params, theirs), (twins, old))
    assert old.state[twins[0]]["state1"].dtype == torch.uint8
    exact = co.from_torch(old, state_dtype=torch.float32)
    names = [entry for entry in exact.state[twins[0]] if entry != "step"]
    for number, entry in enumerate(names, 1):
        stored = old.state[twins[0]]
        table, scales = stored[f"qmap{number}"], stored[f"absmax{number}"]
        wanted = bnb.functional.dequantize_blockwise(stored[f"state{number}"], absmax=scales, code=table, blocksize=256)
        assert torch.equal(exact.state[twins[0]][entry], wanted)
    coded = co.from_torch(old)
    is_coded = any(entry.endswith("_int8") for entry in coded.state[twins[0]])
    assert is_coded == (name != "Adagrad8bit")  # whose sum would lose what is added
    assert not any(entry.endswith("_int8") for entry in coded.state[twins[1]])
    _train(range(5, 6), (params, theirs), (twins, exact))
    assert relative_error(twins, params) < 1e-6


@contextlib.contextmanager
def _override(param: nn.Parameter, **config: Any) -> Iterator[None]:
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.override_config(param, key_value_dict=config)
    try:
        yield
    finally:
        manager.initialize()


def test_what_bitsandbytes_keeps_in_32_bits_stays() -> None:
    params, twins = _pair(torch.bfloat16)
    with _override(twins[0], optim_bits=32):
        old = bnb.optim.AdamW8bit(twins, lr=0.01)
        _train(range(3), (twins, old))
        new = co.from_torch(old)
        assert new.state[twins[0]]["exp_avg"].dtype == torch.float32
    with _override(params[0], lr=0.5):
        old = bnb.optim.AdamW(params, lr=0.01)
        with pytest.raises(ValueError, match=r"bitsandbytes.optim.AdamW: lr=0.5 for .*params.*0.* alone has no counterpart"):
            co.from_torch(old)


def test_what_it_cannot_take_of_bitsandbytes() -> None:
    for name, said in {"LAMB": "lamb", "AdEMAMix": "ademamix", "AdEMAMix8bit": "ademamix"}.items():
        with pytest.raises(ValueError, match=f"bitsandbytes.optim.{name}: optimizer_name='{said}' has no counterpart"):
            co.from_torch(getattr(bnb.optim, name)([nn.Parameter(torch.ones(2))]))
    old = bnb.optim.AdamW([nn.Parameter(torch.ones(2))])
    old.args.max_unorm = 0.5
    with pytest.raises(ValueError, match=r"AdamW: max_unorm=0.5 has no counterpart"):
        co.from_torch(old)
    twins = _pair(torch.float32)[1]
    old = bnb.optim.AdamW8bit(twins)
    _train(range(2), (twins, old))
    del old.state[twins[0]]["absmax2"]
    with pytest.raises(ValueError, match=r"AdamW8bit: the state of 0 has codes of 8 bits without .*absmax2"):
        co.from_torch(old)


class FusedAdam(Optimizer):
    """apex's layout and arithmetic, in plain operations; ``masters`` is where TransformerEngine has float32 weights."""

    def __init__(
        self, params: Any, lr: float = 1e-3, adam_w_mode: bool = True, masters: bool = False, **options: Any
    ) -> None:
        defaults = {"lr": lr, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **options}
        super().__init__(params, defaults)
        self.adam_w_mode, self.set_grad_none, self.capturable = int(adam_w_mode), True, False
        self.master_weights = masters

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param).float()
                    state["exp_avg_sq"] = torch.zeros_like(param).float()
                    if self.master_weights:
                        state["master_param"] = param.detach().clone().float()
                weight, grad = state.get("master_param", param).float(), param.grad.float()
                decay = group["weight_decay"] * weight
                grad = grad if self.adam_w_mode else grad + decay
                first = state["exp_avg"].lerp_(grad, 1 - beta1) / (1 - beta1 ** group["step"])
                second = state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * grad * grad) / (1 - beta2 ** group["step"])
                update = first / (second.sqrt() + group["eps"]) + (decay if self.adam_w_mode else 0)
                weight = weight - group["lr"] * update
                param.copy_(weight)
                if self.master_weights:
                    state["master_param"].copy_(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_apex_goes_on(adam_w_mode: bool, dtype: torch.dtype) -> None:
    params, twins = _pair(dtype)
    options = {"lr": 0.02, "weight_decay": 0.2, "betas": (0.7, 0.8), "eps": 0.03, "adam_w_mode": adam_w_mode}
    theirs, old = (FusedAdam(_groups(ps, 0.02), **options) for ps in (params, twins))
    _train(range(5), (params, theirs), (twins, old))
    new = co.from_torch(old)
    assert type(new) is (co.AdamW if adam_w_mode else co.Adam)
    assert old.param_groups[0]["step"] == 5
    assert "step" not in new.param_groups[0]
    assert new.state[twins[0]]["exp_avg"].dtype == torch.float32
    _train(range(5, 10), (params, theirs), (twins, new))
    assert relative_error(twins, params) < (1e-6 if dtype == torch.float32 else 2e-3)


def test_master_weights_go_on() -> None:
    params, twins = _pair(torch.bfloat16)
    theirs, old = (FusedAdam(ps, lr=1e-4, masters=True) for ps in (params, twins))
    _train(range(20), (params, theirs), (twins, old))
    new = co.from_torch(old)
    assert torch.equal(new.state[twins[0]]["master_param"], old.state[twins[0]]["master_param"])
    _train(range(20, 40), (params, theirs), (twins, new))
    masters = [[each.state[p]["master_param"] for p in ps] for each, ps in ((new, twins), (theirs, params))]
    assert relative_error(*masters) < 1e-6
    split = co.from_torch(theirs, weights="split8")
    assert "remainder" in split.state[params[0]]


def test_lower_halves_of_master_weights_go_on() -> None:
    """TransformerEngine's ``store_param_remainders``: the parameter is the master weight's upper half, rounded."""
    params, twins = _pair(torch.bfloat16)
    theirs, old = (FusedAdam(ps, lr=1e-4, masters=True) for ps in (params, twins))
    _train(range(20), (params, theirs), (twins, old))
    with torch.no_grad():
        for p in twins:
            bits = old.state[p]["master_param"].view(torch.int32)
            old.state[p]["master_param"] = bits.to(torch.int16)
            p.copy_((((bits + 0x8000) >> 16) << 16).view(torch.float32))  # halves are rounded up
    new = co.from_torch(old)
    assert {group["weights"] for group in new.param_groups} == {"split16"}
    model = nn.ParameterList(twins)
    masters = [theirs.state[p]["master_param"] for p in params]
    assert all(map(torch.equal, co.full_precision_state_dict(model, new).values(), masters))
    _train(range(20, 40), (params, theirs), (twins, new))
    assert relative_error([*co.full_precision_state_dict(model, new).values()], masters) < 1e-6


def test_what_it_cannot_take_of_apex() -> None:
    def made(**options: Any) -> FusedAdam:
        return FusedAdam([nn.Parameter(torch.ones(2).bfloat16())], **options)

    with pytest.raises(ValueError, match=r"FusedAdam: param_groups\[0\] has bias_correction=False"):
        co.from_torch(made(bias_correction=False))
    old = made()
    del old.adam_w_mode
    with pytest.raises(ValueError, match="FusedAdam: it has no adam_w_mode"):
        co.from_torch(old)
    with pytest.raises(ValueError, match="FusedAdam: its master weights are not in its state"):
        co.from_torch(made(masters=True))
    old = made(masters=True)
    param = old.param_groups[0]["params"][0]
    _train(range(1), ([param], old))
    old.state[param]["master_param"] = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"FusedAdam: .*master_param is torch.int32"):
        co.from_torch(old)
    assert math.isfinite(param[0].item())
