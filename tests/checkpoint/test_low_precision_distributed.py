"""Low-precision state of FSDP2 on two processes: resumed, converted, and with all bits of the weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_processes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import compiled_optim as co

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

LOW = {"weights": "split8", "state_dtype": "int8"}


def _build(sharded: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False)).bfloat16()
    return fully_shard(model) if sharded else model


def _adamw(model: nn.Module, **options: Any) -> co.AdamW:
    return co.AdamW(model.named_parameters(), lr=1e-2, betas=(0.8, 0.9), lowering="eager", **options)


def _train(model: nn.Module, optimizer: co.AdamW, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            grad: Any = torch.randn(param.shape, generator=generator).to(param.dtype)
            if isinstance(param, DTensor):
                grad = torch.distributed.tensor.distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = grad
        optimizer.step()


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(entry) for key, entry in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def _same(first: Any, second: Any) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, dict):
            _same(value, second[key])
        else:
            torch.testing.assert_close(value, second[key], rtol=0, atol=0)


def _state(optimizer: co.AdamW) -> Any:
    return copy.deepcopy(_whole(co.named_state_dict(optimizer)["state"]))


def shards_from_whole_tensors(directory: Path) -> None:
    """And from those of full precision, which each process converts for itself."""
    saved = torch.load(directory / "low.pt")
    model = _build()
    model.load_state_dict({n: _spread(v, model.get_parameter(n)) for n, v in saved["model"].items()})
    optimizer = _adamw(model, **LOW)
    optimizer.load_state_dict(saved["state"])
    _same(_state(optimizer), _by_name(saved))
    for form in ("split16", "float32"):
        _train(model, optimizer, range(5, 6))
        other = _adamw(model, **({"weights": "split16"} if form == "split16" else {"weights": "master"}))
        other.load_state_dict(saved["state"])
        found = {name: entries["exp_avg"] for name, entries in co.named_state_dict(other)["state"].items()}
        _same(_whole(found), torch.load(directory / "decoded.pt"))
        again = _adamw(model, **LOW)
        again.load_state_dict(other.state_dict())
        assert _dtypes(_state(again)) == _dtypes(_by_name(saved))


def full_precision(directory: Path) -> None:
    saved = torch.load(directory / "low.pt")
    model = _build()
    optimizer = _adamw(model, **LOW)
    before = {name: value.shape for name, value in model.state_dict().items()}
    whole = saved["full"]
    for full in (whole, {n: _spread(v, model.get_parameter(n)) for n, v in whole.items()}):
        co.load_full_precision_state_dict(model, optimizer, full)
        found = co.full_precision_state_dict(model, optimizer)
        assert all(isinstance(value, DTensor) and value.shape == before[name] for name, value in found.items())
        _same(_whole(found), whole)
    optimizer.load_state_dict(saved["state"])
    _train(model, optimizer, range(3, 5))
    for name, value in _whole(co.full_precision_state_dict(model, optimizer)).items():  # parts round by other numbers
        torch.testing.assert_close(value, saved["later"][name], rtol=0, atol=1e-5)


def _dtypes(state: Any) -> Any:
    return {(name, entry): value.dtype for name, entries in state.items() for entry, value in entries.items()}


def _spread(value: torch.Tensor, like: Any) -> DTensor:
    return torch.distributed.tensor.distribute_tensor(value, like.device_mesh, like.placements)


def _by_name(saved: Any) -> Any:
    return {name: saved["state"]["state"][i] for i, name in enumerate(saved["state"]["param_groups"][0]["param_names"])}


CHECKS = {function.__name__: function for function in (shards_from_whole_tensors, full_precision)}


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("low")
    model = _build(sharded=False)
    optimizer = _adamw(model, **LOW)
    _train(model, optimizer, range(3))
    full = co.full_precision_state_dict(model, optimizer)
    saved = copy.deepcopy({"model": model.state_dict(), "state": optimizer.state_dict(), "full": full})
    plain = _adamw(model, weights="split16")
    plain.load_state_dict(saved["state"])
    torch.save({n: plain.state[p]["exp_avg"] for n, p in model.named_parameters()}, directory / "decoded.pt")
    _train(model, optimizer, range(3, 5))
    torch.save({**saved, "later": co.full_precision_state_dict(model, optimizer)}, directory / "low.pt")
    two_processes.run(CHECKS, request, directory)
    return directory


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS)
def test_on_two_processes(check: str, directory: Path) -> None:
    two_processes.passed(check, directory)
