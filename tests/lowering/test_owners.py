"""Rules on whole tensors over shards: each tensor is updated once in the world, bit for bit as by one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from two_processes import passed, run

import compiled_optim as co
from compiled_optim.optimizer import engine_of

SHAPES = [(8, 6), (8, 6), (8, 6), (5, 7), (5, 7), (3, 9), (1, 4), (9, 2)]
"""Of two processes or four: even and uneven parts, and processes without any part; several of a shape, and single ones."""


def whole() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [None if (i + step) % 5 == 0 else grad for i, grad in enumerate(grads)]


def train(kind: Any, params: list[Any], steps: int = 4, **options: Any) -> Any:
    optimizer = kind([(f"p{i}", p) for i, p in enumerate(params)], **options)
    for step in range(steps):
        for param, grad in zip(params, gradients(step), strict=True):
            spread = grad is not None and isinstance(param, DTensor)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if spread else grad
        optimizer.step()
    return optimizer


def sharded(dim: int) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(dim)])) for p in whole()]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (co.Muon, {"lr": 0.1, "momentum": 0.7, "adjust_lr_fn": "match_rms_adamw"}),
    "NorMuon": (co.NorMuon, {"lr": 0.1, "betas": (0.7, 0.8)}),
    "Adafactor": (co.Adafactor, {"lr": 0.1}),
}


def equal_to_one_process(directory: Path, *, kind: str, lowering: str, dim: int) -> None:
    cls, options = KINDS[kind]
    plain, parts = whole(), sharded(dim)
    alone = train(cls, plain, lowering=lowering, **options)
    together = train(cls, parts, lowering=lowering, **options)
    for p, q in zip(plain, parts, strict=True):
        assert torch.equal(p, full(q)), (p.shape, p, full(q))
        for name, entry in alone.state[p].items():
            held = together.state[q][name]
            assert torch.equal(entry, full(held)), name
            assert held.shape == entry.shape, name
            assert name not in ("momentum_buffer", "variance") or held.placements == q.placements, name


def each_is_updated_once_with_two_collectives(directory: Path) -> None:
    calls: list[str] = []
    exchanged = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("all_to_all")
        return exchanged(*args, **kwargs)

    parts = sharded(0)
    optimizer = co.Muon([(f"p{i}", p) for i, p in enumerate(parts)], lowering="eager")
    with (
        mock.patch("torch.distributed.all_to_all_single", counted),
        mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("gathered by every process")),
    ):
        for param in parts:
            param.grad = torch.ones_like(param)
        optimizer.step()
    (lowering,) = engine_of(optimizer).step.lowerings
    assert len(calls) == 2 * len(lowering.stacks) == 2 * len(set(SHAPES))
    own = torch.tensor(sum(len(stack.copies.owners.owned) for stack in lowering.stacks))
    most = own.clone()
    dist.all_reduce(own)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert own == len(SHAPES)
    assert most <= -(-len(SHAPES) // dist.get_world_size()) + 1


def stacks_and_splits(directory: Path) -> None:
    """Experts that are split along their own axis or along rows, and a projection whose parts lie across processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)
    tensors = {"experts": torch.randn(6, 4, 5, generator=generator), "qkv": torch.randn(12, 5, generator=generator)}
    for dim, lowering in itertools.product((0, 1), ("eager", "multi_tensor")):
        plain = {name: nn.Parameter(t.clone()) for name, t in tensors.items()}
        parts = {name: nn.Parameter(distribute_tensor(t.clone(), mesh, [Shard(dim)])) for name, t in tensors.items()}
        for params in (plain, parts):
            optimizer = co.Muon(params, lr=0.1, stacks=("experts",), split={"qkv": (6, 3, 3)}, lowering=lowering)
            for step in range(2):
                for name, p in params.items():
                    grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step + len(name)))
                    p.grad = distribute_tensor(grad, mesh, [Shard(dim)]) if isinstance(p, DTensor) else grad
                optimizer.step()
        for name, p in plain.items():
            assert torch.equal(p, full(parts[name])), (name, dim, lowering)


def fewer_bytes(directory: Path) -> None:
    """Codes, remainders and random bits of whole matrices, whoever updates them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [torch.randn(64, 128, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]
    for weights in ("split8", "stochastic"):
        plain = [nn.Parameter(t.clone()) for t in tensors]
        parts = [nn.Parameter(distribute_tensor(t.clone(), mesh, [Shard(0)])) for t in tensors]
        sides = []
        for params in (plain, parts):
            named = [(f"p{i}", p) for i, p in enumerate(params)]
            sides.append(co.Muon(named, lr=0.1, weights=weights, state_dtype="int8", lowering="eager"))
            for step in range(3):
                for i, p in enumerate(params):
                    grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(10 * step + i)).bfloat16()
                    p.grad = distribute_tensor(grad, mesh, [Shard(0)]) if isinstance(p, DTensor) else grad
                sides[-1].step()
        for p, q in zip(plain, parts, strict=True):
            assert torch.equal(p, full(q)), weights
            for name, entry in sides[0].state[p].items():
                assert torch.equal(entry, full(sides[1].state[q][name])), (weights, name)


def clipping_and_skipping_are_those_of_all(directory: Path) -> None:
    plain, parts = whole(), sharded(0)
    options = {"lr": 0.1, "max_grad_norm": 0.5, "skip_nonfinite": True, "lowering": "eager"}
    alone, together = train(co.Muon, plain, **options), train(co.Muon, parts, **options)
    torch.testing.assert_close(alone.grad_norm, together.grad_norm)
    for p, q in zip(plain, parts, strict=True):
        torch.testing.assert_close(p, full(q), rtol=1e-2, atol=2e-3)


def split_along_two_dimensions(directory: Path) -> None:
    """Every process updates these, and the report says so."""
    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("a", "b"))
    plain = whole()
    parts = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0), Shard(1)])) for p in whole()]
    train(co.Muon, plain, lr=0.1, lowering="eager")
    together = train(co.Muon, parts, lr=0.1, lowering="eager")
    assert any("every process updates all of 'p0'" in finding.evidence for finding in co.compile_report(together).findings)
    for p, q in zip(plain, parts, strict=True):
        assert torch.equal(p, full(q))


def replicas_of_shards(directory: Path) -> None:
    """Each replica updates each tensor once."""
    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicate", "shard"))
    plain = whole()
    parts = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), Shard(0)])) for p in whole()]
    train(co.Muon, plain, lr=0.1, lowering="eager")
    together = train(co.Muon, parts, lr=0.1, lowering="eager")
    assert all(stack.copies.owners is not None for stack in engine_of(together).step.lowerings[0].stacks)
    for p, q in zip(plain, parts, strict=True):
        assert torch.equal(p, full(q))


CHECKS: dict[str, Callable[[Path], None]] = {
    **{
        f"{kind}-{lowering}-{dim}": functools.partial(equal_to_one_process, kind=kind, lowering=lowering, dim=dim)
        for kind in KINDS
        for lowering in ("eager", "multi_tensor")
        for dim in (0, 1)
    },
    **{
        function.__name__: function
        for function in (
            each_is_updated_once_with_two_collectives,
            stacks_and_splits,
            fewer_bytes,
            clipping_and_skipping_are_those_of_all,
            split_along_two_dimensions,
            replicas_of_shards,
        )
    },
}


@pytest.fixture(scope="module", params=[2, 4])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    directory = tmp_path_factory.mktemp("owners")
    run(CHECKS, request, directory, request.param)
    return directory, request.param


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS)
def test_on_processes(check: str, ran: tuple[Path, int]) -> None:
    passed(check, *ran)
