"""Two processes with gloo: parameters that processes share out, in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import two_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import compiled_optim as co
from compiled_optim.memory.layout import has_whole_groups, spread_like

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

SPLIT8 = {"weights": "split8", "state_dtype": "int8"}
MODES: list[dict[str, Any]] = [
    {"weights": "kahan"},
    SPLIT8,
    {"weights": "split16", "state_dtype": torch.float32},
    {"weights": "master", "state_dtype": "int8"},
]


def _build(sharded: bool = True) -> nn.Module:
    """Weights with rows of whole groups, an odd number of them, and with groups that end with every second row; biases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 97), nn.Linear(96, 128)).bfloat16()
    return fully_shard(model) if sharded else model


def _adamw(model: nn.Module, mode: dict[str, Any], **options: Any) -> co.AdamW:
    return co.AdamW(model.named_parameters(), **{"lr": 0.01, "weight_decay": 0.1, **mode, **options})


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator).bfloat16()
            is_spread = isinstance(param, DTensor)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_spread else grad
        optimizer.step()


def _full(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.int().full_tensor().to(tensor.dtype) if tensor.dtype == torch.int16 else tensor.full_tensor()


def _stored(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: _full(param.detach()).clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": _full(entry.detach()).clone() for key, entry in optimizer.state[param].items()}
    return found


def _assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def shards_step_as_whole_parameters(directory: Path) -> None:
    for mode in MODES:
        for lowering in ("auto", "eager"):
            sharded, whole = _build(), _build(sharded=False)
            ours, theirs = _adamw(sharded, mode, lowering=lowering), _adamw(whole, mode, lowering=lowering)
            _train(sharded, ours, range(4))
            _train(whole, theirs, range(4))
            _assert_same(_stored(sharded, ours), _stored(whole, theirs))
            for param in sharded.parameters():
                entries = {name: e for name, e in ours.state[param].items() if name != "step"}
                assert all(entry.placements == param.placements for entry in entries.values())


def parts_have_random_numbers_of_their_own(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    found: dict[Placement, list[Any]] = {}
    for placement in (Shard(0), Replicate()):
        param = nn.Parameter(distribute_tensor(torch.ones(128, 64, dtype=torch.bfloat16), mesh, [placement]))
        optimizer = co.SGD([("w", param)], lr=1e-3, weights="stochastic")
        param.grad = torch.ones_like(param)
        optimizer.step()
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, param.to_local().detach())
        assert 0.2 < (parts[0] < 1).float().mean() < 0.3  # a quarter of the distance to the next number
        found[placement] = parts
    assert not torch.equal(*found[Shard(0)])
    assert torch.equal(*found[Replicate()])


def groups_that_processes_share_are_refused(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    cases: list[tuple[tuple[int, ...], Placement, bool]] = [
        ((97, 64), Shard(0), True),
        ((128, 96), Shard(0), True),
        ((64, 128), Shard(1), True),
        ((64, 192), Shard(1), False),  # 96 columns each
        ((64, 96), Shard(1), False),
        ((97, 96), Shard(0), False),
        ((8192,), Shard(0), True),
        ((4160,), Shard(0), False),  # 65 groups
        ((97, 96), Replicate(), True),
    ]
    for shape, placement, fits in cases:
        param = nn.Parameter(distribute_tensor(torch.ones(shape, dtype=torch.bfloat16), mesh, [placement]))
        assert has_whole_groups(param, 64) == fits, (shape, placement)
        if fits:
            optimizer = co.Lion([("w", param)], lr=0.01, **SPLIT8)
        else:
            with pytest.raises(ValueError, match=r"can't optimize 'w' with 8-bit state: .*; name it in exclude="):
                co.Lion([("w", param)], lr=0.01, **SPLIT8)
            optimizer = co.Lion([("w", param)], lr=0.01, **SPLIT8, exclude=("w",))
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert (_full(param.detach()) < 1).all()


def checkpoints_go_on(directory: Path) -> None:
    """In torch's forms, of parts and of whole tensors, and loaded whole into parts."""
    for mode in (SPLIT8, {"weights": "kahan"}, {"weights": "stochastic", "state_dtype": "int8"}):
        for options in (
            StateDictOptions(),
            StateDictOptions(flatten_optimizer_state_dict=True),
            StateDictOptions(full_state_dict=True),
        ):
            model = _build()
            optimizer = _adamw(model, mode)
            _train(model, optimizer, range(2))
            saved = get_optimizer_state_dict(model, optimizer, options=options)
            fresh = _build()
            fresh.load_state_dict(model.state_dict())
            resumed = _adamw(fresh, mode)
            set_optimizer_state_dict(fresh, resumed, saved, options=options)
            _assert_same(_stored(fresh, resumed), _stored(model, optimizer))
            _train(model, optimizer, range(2, 4))
            _train(fresh, resumed, range(2, 4))
            _assert_same(_stored(fresh, resumed), _stored(model, optimizer))


def parts_load_into_whole_parameters(directory: Path) -> None:
    """Remainders of 16 bits too, which no backend sends as they are."""
    mode = MODES[2]
    sharded, whole = _build(), _build(sharded=False)
    ours, theirs = _adamw(sharded, mode), _adamw(whole, mode)
    _train(sharded, ours, range(2))
    co.load_named_state_dict(theirs, co.named_state_dict(ours))
    with torch.no_grad():
        for param, part in zip(whole.parameters(), sharded.parameters(), strict=True):
            param.copy_(_full(part))
    _assert_same(_stored(whole, theirs), _stored(sharded, ours))


def saved_on_two_processes_for_one(directory: Path) -> None:
    model = _build()
    optimizer = _adamw(model, SPLIT8)
    _train(model, optimizer, range(3))
    dcp.save({"model": model.state_dict(), "optimizer": co.named_state_dict(optimizer)}, checkpoint_id=directory / "two")
    expected = _stored(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, directory / "two-expected.pt")


CHECKS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        shards_step_as_whole_parameters,
        parts_have_random_numbers_of_their_own,
        groups_that_processes_share_are_refused,
        parts_load_into_whole_parameters,
        checkpoints_go_on,
        saved_on_two_processes_for_one,
    )
}


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both processes have run the checks."""
    directory = tmp_path_factory.mktemp("shards")
    two_processes.run(CHECKS, request, directory)
    return directory


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS)
def test_on_two_processes(check: str, directory: Path) -> None:
    two_processes.passed(check, directory)


@pytest.mark.full
@pytest.mark.parametrize("check", ["saved_on_two_processes_for_one"])
def test_saved_on_two_processes_and_loaded_on_one(check: str, directory: Path) -> None:
    model = _build(sharded=False)
    optimizer = _adamw(model, SPLIT8)
    state = {"model": model.state_dict(), "optimizer": co.named_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=directory / "two", no_dist=True)
    model.load_state_dict(state["model"])
    co.load_named_state_dict(optimizer, state["optimizer"])
    _assert_same(_stored(model, optimizer), torch.load(directory / "two-expected.pt"))


def test_a_whole_tensor_is_spread_like_shards(one_process: None) -> None:
    target = distribute_tensor(torch.zeros(6, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    found: Any = spread_like(torch.arange(24.0).view(6, 4), target)
    assert (found.device_mesh, found.placements) == (target.device_mesh, target.placements)
    assert torch.equal(_full(found), torch.arange(24.0).view(6, 4))
