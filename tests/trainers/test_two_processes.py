"""Two processes with gloo: what shards, replicates and offloads models trains them as with torch.optim."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_processes
from small_training import OPTIONS, assert_trained_alike, batches, loss_of, needs, network, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import compiled_optim as co

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

OTHERS = {"lr": 0.7, "betas": (0.1, 0.2), "eps": 1e-5, "weight_decay": 0.5}


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in weights(model).items()}


def _own_batches() -> list[torch.Tensor]:
    return batches(12)[dist.get_rank() :: 2]


def _train(model: nn.Module, optimizer: Any, max_norm: float | None = 0.5, scheduled: bool = True) -> list[Any]:
    """Losses, rates and norms of a training, with torch's clipping, and with one of its schedules or with assignments."""
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20) if scheduled else None
    seen = []
    for x in _own_batches():
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        norm = 0.0 if max_norm is None else nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        for group in optimizer.param_groups if schedule is None else ():
            group["lr"] *= 0.9
        if schedule is not None:
            schedule.step()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        seen.append((loss.item(), [float(g["lr"]) for g in optimizer.param_groups], float(norm)))
    return seen


def a_redundant_state_is_shared_out(directory: Path) -> None:
    """ZeroRedundancyOptimizer: each process updates some parameters; its whole state loads into either package."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    def train(optim: Any, in_buckets: bool) -> Any:
        model = DistributedDataParallel(network(), gradient_as_bucket_view=in_buckets)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, parameters_as_bucket_view=in_buckets, **OPTIONS)
        seen = _train(model, optimizer, scheduled=False)
        optimizer.param_groups[0]["weight_decay"] = 0.4
        optimizer.consolidate_state_dict(to=0)
        states = [optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(states, 0)
        resumed = []
        for other in (co, torch.optim):
            twin = copy.deepcopy(model)
            whole = other.AdamW(twin.parameters(), **OTHERS)
            whole.load_state_dict(copy.deepcopy(states[0]))
            shared = ZeroRedundancyOptimizer(twin.parameters(), other.AdamW, **OTHERS)
            shared.load_state_dict(copy.deepcopy(states[0]))
            for each in (whole, shared):
                resumed.append((_train(twin, each, scheduled=False), weights(twin)))
        return seen, weights(model), resumed

    for in_buckets in (False, True):
        assert_trained_alike(lambda optim, b=in_buckets: train(optim, b))


def layers_are_split_between_processes(directory: Path) -> None:
    """Tensor parallelism, with parameters that are split and others that are not."""

    def train(optim: Any) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6), nn.Linear(6, 1)).double()
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = optim.AdamW(model.named_parameters(), **OPTIONS)
        losses = []
        for x in batches():
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, _whole(model)

    assert_trained_alike(train)


def models_are_sharded_in_every_way(directory: Path) -> None:
    """FSDP2 with clipping, another dtype for the arithmetic, offloading, replicas of shards, and some layers alone."""

    def train(optim: Any, parts: slice, **options: Any) -> Any:
        model = network(torch.float32 if "mp_policy" in options else torch.float64)
        sharded = model[parts] if parts != slice(None) else model
        for layer in sharded:
            fully_shard(layer, **options)
        if sharded is model:
            fully_shard(model, **options)
        optimizer = optim.AdamW(model.named_parameters(), **OPTIONS)
        only_shards = parts == slice(None) and "offload_policy" not in options
        return _train(model, optimizer, 0.5 if only_shards else None), _whole(model)

    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    everything, first = slice(None), slice(0, 1)
    assert_trained_alike(lambda optim: train(optim, everything))
    assert_trained_alike(lambda optim: train(optim, first))
    assert_trained_alike(lambda optim: train(optim, everything, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    assert_trained_alike(lambda optim: train(optim, everything, mesh=replicas))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    assert_trained_alike(lambda optim: train(optim, everything, mp_policy=policy), rtol=2e-2, atol=2e-2)


def steps_are_taken_in_the_backward_pass(directory: Path) -> None:
    """An optimizer for each parameter, which steps as soon as the gradient is there."""

    def train(optim: Any) -> Any:
        model = fully_shard(network())
        optimizers = {p: optim.AdamW([p], **OPTIONS) for p in model.parameters()}

        def update(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        for x in _own_batches():
            loss_of(model, x).backward()
        return _whole(model)

    assert_trained_alike(train)


def _accelerated(optim: Any, sharded: bool) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    if sharded:  # which Accelerate offers on accelerators alone; nothing in its code needs one
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    model = network()
    optimizer = optim.AdamW(model.parameters(), **OPTIONS)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def _train_accelerated(accelerator: Any, model: nn.Module, optimizer: Any, schedule: Any) -> Any:
    seen = []
    for x in _own_batches():
        loss = loss_of(model, x)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append((loss.item(), [float(g["lr"]) for g in optimizer.param_groups], float(norm)))
    return seen, _whole(model)


def accelerate_replicates(directory: Path) -> None:
    assert_trained_alike(lambda optim: _train_accelerated(*_accelerated(optim, sharded=False)))


def accelerate_shards(directory: Path) -> None:
    assert_trained_alike(lambda optim: _train_accelerated(*_accelerated(optim, sharded=True)))


def accelerate_keeps_no_unsharded_copy(directory: Path) -> None:
    """It puts shards in the place of the optimizer's parameters: the whole ones and their state are let go."""
    accelerator, model, optimizer, schedule = _accelerated(co, sharded=True)
    _train_accelerated(accelerator, model, optimizer, schedule)
    assert set(optimizer.state) == set(model.parameters())


def schedules_move_what_is_shared_out(directory: Path) -> None:
    """ZeroRedundancyOptimizer has groups of its own, which it copies to and from those of the optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    def train(optim: Any) -> Any:
        model = DistributedDataParallel(network())
        return _train(model, ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, **OPTIONS)), weights(model)

    assert_trained_alike(train)


CHECKS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        a_redundant_state_is_shared_out,
        layers_are_split_between_processes,
        models_are_sharded_in_every_way,
        steps_are_taken_in_the_backward_pass,
        accelerate_replicates,
        accelerate_shards,
        accelerate_keeps_no_unsharded_copy,
        schedules_move_what_is_shared_out,
    )
}
OF_ACCELERATE = [name for name in CHECKS if name.startswith("accelerate")]


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both processes wrote what failed."""
    directory = tmp_path_factory.mktemp("two_processes")
    has_accelerate = not needs("accelerate").args[0]
    checks = {n: f for n, f in CHECKS.items() if has_accelerate or n not in OF_ACCELERATE}
    two_processes.run(checks, request, directory)
    return directory


@pytest.mark.parametrize(
    "check", [pytest.param(name, marks=needs("accelerate")) if name in OF_ACCELERATE else name for name in CHECKS]
)
def test_on_two_processes(check: str, directory: Path) -> None:
    two_processes.passed(check, directory)
