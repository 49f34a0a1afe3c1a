"""Which parameters a step is too small to move: what is said is what the next steps do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from catalog import registry, required
from torch import Tensor
from torch.nn import Parameter

import compiled_optim as co

DEVIATIONS = {"small": 1e-4, "wide": 0.02, "large": 1.0, "zero": 0.0}


def trained(
    optimizer: type[co.CompiledOptimizer], lr: float, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[co.CompiledOptimizer, dict[str, Parameter]]:
    """After three steps, with gradients for the next one."""
    generator = torch.Generator().manual_seed(0)
    params = {n: Parameter((torch.randn(64, 128, generator=generator) * d).to(dtype)) for n, d in DEVIATIONS.items()}
    made = optimizer(params, lr=lr, **options)
    for _ in range(4):
        made.step()
        for param in params.values():
            param.grad = torch.randn(64, 128, generator=generator).to(dtype)
    return made, params


def figures(report: co.NumericsReport, name: str) -> dict[str, Mapping[str, float]]:
    """Of the findings of this name, by parameter."""
    return {finding.params[0]: finding.figures for finding in report.findings if finding.name == name}


def stuck(made: co.CompiledOptimizer) -> set[str]:
    return {*figures(co.check_numerics(made), "too small")}


@pytest.mark.parametrize("optimizer", [co.AdamW, co.SGD, co.Lion, co.StableAdamW], ids=lambda c: c.__name__)
@pytest.mark.parametrize("lr", [1e-2, 1e-4, 1e-6])
def test_the_next_step_moves_what_is_not_named(optimizer: type[co.CompiledOptimizer], lr: float) -> None:
    made, params = trained(optimizer, lr)
    found = co.check_numerics(made)
    before = {name: param.detach().clone() for name, param in params.items()}
    made.step()
    stays = {name: (param == before[name]).double().mean().item() for name, param in params.items()}
    shares = {name: each["share"] for name, each in figures(found, "too small").items()}
    assert shares == pytest.approx({name: share for name, share in stays.items() if share > 0.5}, abs=0.02)
    assert found.checked == tuple(params)


@pytest.mark.parametrize("mode", ["kahan", "stochastic", "split8", "split16", "master"])
def test_the_remedy_is_one(mode: str) -> None:
    assert stuck(trained(co.AdamW, 1e-6)[0]) == {"wide", "large"}
    assert stuck(trained(co.AdamW, 1e-6, weights=mode, state_dtype="int8")[0]) == set()


def test_float32_has_limits_too() -> None:
    made, _ = trained(co.AdamW, 1e-10, torch.float32)
    assert stuck(made) == {"wide", "large"}
    assert "larger lr" in str(co.check_numerics(made))
    assert stuck(trained(co.AdamW, 1e-10, weights="split16")[0]) == {"wide", "large"}


@pytest.mark.parametrize("optimizer", [co.AdamW, co.Lion], ids=lambda c: c.__name__)
def test_groups_whose_elements_differ_too_much_for_8_bits(optimizer: type[co.CompiledOptimizer]) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {name: torch.ones(64, 128) for name in ("even", "columns", "spread", "transposed")}
    sizes["columns"][:16, 5] = 300  # one element of every second group in a quarter of the rows
    sizes["spread"] = (2 * torch.randn(64, 128, generator=generator)).exp()
    sizes["transposed"][:, 5] = 300  # all of one group: in memory the rows are columns
    params = {n: Parameter(torch.randn(64, 128, generator=generator).bfloat16()) for n in sizes}
    params["transposed"] = Parameter(params["transposed"].detach().t().contiguous().t())
    found = {}
    for state_dtype in ("int8", torch.bfloat16):
        made = optimizer(params, lr=1e-2, weights="split8", state_dtype=state_dtype)
        for _ in range(4):
            for name, param in params.items():
                param.grad = (torch.randn(64, 128, generator=generator) * sizes[name]).bfloat16()
            made.step()
        found[state_dtype] = co.check_numerics(made)
    uneven = {name: each["share"] for name, each in figures(found["int8"], "uneven").items()}
    assert uneven.pop("spread") > 0.99
    assert uneven == {"columns": pytest.approx(0.125, abs=0.01)}
    assert "'columns': in 12% of the groups of 64, half of the gradients" in str(found["int8"])
    assert not figures(found[torch.bfloat16], "uneven")


def test_what_it_says() -> None:
    made, _ = trained(co.SGD, 1e-5, torch.float16)
    (finding,) = co.check_numerics(made).findings
    assert (finding.name, finding.params, finding.figures["lr"]) == ("too small", ("large",), 1e-5)
    assert finding.figures["share"] == pytest.approx(0.98, abs=0.005)
    assert 0.5 < finding.figures["weight"] < 1
    assert finding.figures["needed"] == 2.0**-12  # half of the distance between numbers from 0.5 to 1
    assert finding.figures["available"] == pytest.approx(0.67e-5, rel=0.1)
    assert finding.advice == "use weights='split8', 'kahan' or 'stochastic'"
    head, line = str(co.check_numerics(made)).splitlines()
    assert head == "SGD: the next step is too small for 1 of 4 parameters"
    assert line.startswith("  'large': at lr 1e-05, 98% of it does not move: a weight of 0.6")
    assert line.endswith("use weights='split8', 'kahan' or 'stochastic'")


def test_the_lr_counts_as_it_is_now() -> None:
    made, _ = trained(co.AdamW, 1e-6)
    made.param_groups[0]["lr"] = 0.1
    assert stuck(made) == set()


def test_without_gradients_momentum_makes_a_step() -> None:
    made, _ = trained(co.AdamW, 1e-6)
    made.zero_grad()
    assert stuck(made) == {"wide", "large"}
    plain, _ = trained(co.SGD, 1e-6)
    plain.zero_grad()
    assert co.check_numerics(plain) == co.NumericsReport("SGD", (), ())  # nothing would move


@pytest.mark.parametrize("options", [{}, {"weights": "split8", "state_dtype": "int8"}, {"weights": "master"}], ids=str)
@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
def test_it_changes_nothing(lowering: str, options: dict[str, Any]) -> None:
    """Not even of channels-last parameters, whose codes are in the order of memory."""
    image = Parameter(torch.randn(64, 8, 4, 4).to(memory_format=torch.channels_last).bfloat16())
    made = co.AdamW([image], lr=1e-3, lowering=lowering, **options)
    twin = Parameter(image.detach().clone())
    other = co.AdamW([twin], lr=1e-3, lowering=lowering, **options)
    for _ in range(3):
        image.grad = torch.randn_like(image)
        twin.grad = image.grad.clone()
        co.check_numerics(made)
        made.step()
        other.step()
    tensors: list[list[Tensor]] = [[p, *o.state[p].values()] for o, p in ((made, image), (other, twin))]
    assert all(map(torch.equal, *tensors))


@pytest.mark.parametrize("optimizer", registry(), ids=lambda c: c.__name__)
def test_of_every_optimizer(optimizer: type[co.CompiledOptimizer]) -> None:
    param = Parameter(torch.ones(8, 4))
    made = optimizer([param], **required(optimizer) | {"lr": 1e-12})
    dense = torch.full((8, 4), 0.1)
    param.grad = dense.to_sparse(1) if optimizer._gradients == "sparse" else dense
    if optimizer is co.LBFGS:
        with pytest.raises(NotImplementedError, match="LBFGS cannot check its numerics"):
            co.check_numerics(made)
        return
    assert stuck(made) in (set(), {"param_groups[0]['params'][0]"})
    # Others' first steps are larger than lr, or far smaller, or none.
    if optimizer not in (co.Rprop, co.Adafactor, co.Prodigy, co.ADOPT):
        assert stuck(made)


@pytest.mark.parametrize("optimizer", [co.SparseAdam, co.AdamW], ids=lambda c: c.__name__)
def test_gradients_that_a_step_refuses(optimizer: type[co.CompiledOptimizer]) -> None:
    """The error is that of a step."""
    param = Parameter(torch.ones(8, 4))
    made = optimizer([("table", param)])
    param.grad = torch.ones(8, 4) if optimizer is co.SparseAdam else torch.ones(8, 4).to_sparse(1)
    for call in (made.step, lambda: co.check_numerics(made)):
        with pytest.raises(TypeError, match=r"does not support (dense|sparse) gradients.*'table' has one"):
            call()


def test_numbers_that_were_assigned_since_the_last_step() -> None:
    made, _ = trained(co.AdamW, 1e-6)
    made.param_groups[0]["lr"] = 0.1
    assert stuck(made) == set()
    made.param_groups[0]["lr"] = 1e-6
    assert stuck(made) == {"wide", "large"}


def test_what_a_step_refuses_is_refused() -> None:
    made, _ = trained(co.AdamWScheduleFree, 1e-2)
    made.eval()
    for call in (made.step, lambda: co.check_numerics(made)):
        with pytest.raises(RuntimeError, match=r"call train\(\) first"):
            call()


def test_in_inference_mode_it_is_the_same() -> None:
    made, _ = trained(co.SGD, 1e-5)
    with torch.inference_mode():
        report = co.check_numerics(made)
    assert report == co.check_numerics(made)
    assert report.findings
