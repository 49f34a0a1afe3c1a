"""Changed weights of shards: all processes together hand over each changed element once, with its index in the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_processes
from changed_bits import Expected
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

SHAPES = {"uneven": (7, 6), "empty": (1, 8), "columns": (4, 5), "whole": (3, 3)}
PLACEMENTS = {"uneven": Shard(0), "empty": Shard(0), "columns": Shard(1), "whole": Replicate()}


def _check(optimizer: CompiledOptimizer, expected: Expected) -> None:
    """Compare what all processes hand over, together."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, optimizer.changes())
    for name, param in expected.params.items():
        full, changed = param.detach().full_tensor().bfloat16().flatten(), expected.changed[name].flatten()
        own = [change for changes in gathered for change in changes if change.name == name]
        assert all(change.full_shape == param.shape for change in own)
        if own and own[0].indices is None:  # a process that has all of it
            assert len(own) == 1
            assert torch.equal(own[0].values.flatten(), full)
            continue
        found = [i for change in own for i in change.indices.tolist()]
        assert sorted(found) == changed.nonzero()[:, 0].tolist(), name
        for change in own:
            assert torch.equal(change.values, full[change.indices]), name
            assert change.indices.tolist() == sorted(change.indices.tolist())
    assert optimizer.changes() == []


def tensors(_: Path, kind: type[CompiledOptimizer], shape: tuple[int, ...]) -> None:
    """Uneven and empty shards, and a replicated tensor; of a mesh of two dimensions, the first has replicas."""
    mesh, generator = init_device_mesh("cpu", shape), torch.Generator().manual_seed(0)
    values = {name: torch.randn(size, generator=generator) for name, size in SHAPES.items()}
    placements = {name: [*[Replicate()] * (len(shape) - 1), own] for name, own in PLACEMENTS.items()}
    params = {n: nn.Parameter(distribute_tensor(v, mesh, placements[n])) for n, v in values.items()}
    optimizer = kind(params, lr=0.3 if kind is co.Prodigy else 1e-3)
    optimizer.track_changes()
    expected = Expected(params)
    for round in range(2):
        for _ in range(2):
            for name, param in params.items():
                grad = torch.randn(param.shape, generator=generator)
                param.grad = distribute_tensor(grad, mesh, placements[name]) if (name, round) != ("uneven", 1) else None
            expected.around(optimizer.step)
        _check(optimizer, expected)
        expected = Expected(params)


def model(_: Path) -> None:
    """FSDP2 over tensor parallelism, which splits rows twice, those of one kind in another order than the mesh's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6))
    net = parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    optimizer = co.AdamW(net.named_parameters(), lr=1e-3)
    optimizer.track_changes()
    expected = Expected(dict(net.named_parameters()))

    def step() -> None:
        net(torch.randn(3, 6, generator=torch.Generator().manual_seed(4))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        expected.around(step)
    _check(optimizer, expected)


KINDS = (co.AdamW, co.Muon, co.Adafactor, co.Prodigy)
IN_TWO: dict[str, Callable[[Path], None]] = {
    kind.__name__: functools.partial(tensors, kind=kind, shape=(2,)) for kind in KINDS
}
IN_FOUR = {f"{kind.__name__} in four": functools.partial(tensors, kind=kind, shape=(2, 2)) for kind in KINDS}
IN_FOUR["a model"] = model


@pytest.fixture(scope="module")
def of_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    two_processes.run(IN_TWO, request, directory)
    return directory


@pytest.fixture(scope="module")
def of_four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("four")
    two_processes.run(IN_FOUR, request, directory, 4)
    return directory


@pytest.mark.parametrize("check", IN_TWO)
def test_in_two_processes(check: str, of_two: Path) -> None:
    two_processes.passed(check, of_two)


@pytest.mark.full
@pytest.mark.parametrize("check", IN_FOUR)
def test_in_four_processes(check: str, of_four: Path) -> None:
    two_processes.passed(check, of_four, 4)
