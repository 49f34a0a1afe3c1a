"""Models, and the layouts in which processes share one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

EXPERTS = 8


@dataclass(frozen=True)
class Size:
    """A model and its training."""

    width: int
    layers: int
    steps: int


SIZES = {"large": Size(512, 12, 16), "small": Size(10, 2, 8)}
"""Ten columns are spread unevenly over four processes."""


class Layer(nn.Module):
    """A perceptron with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, topics: Tensor) -> Tensor:
        """Return ``x`` plus the perceptron's output."""
        return x + self.down(functional.gelu(self.up(x)))


class Experts(nn.Module):
    """A matrix for each topic, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.local = nn.ModuleDict({str(topic): nn.Linear(width, width, bias=False) for topic in range(EXPERTS)})
        self.mesh: Any = None  # of the processes that share them

    def keep(self, mesh: Any) -> None:
        """Keep only this process's share of the experts."""
        self.mesh = mesh
        for topic in range(EXPERTS):
            if topic * mesh.size() // EXPERTS != mesh.get_local_rank():
                del self.local[str(topic)]

    def forward(self, x: Tensor, topics: Tensor) -> Tensor:
        """Return ``x`` plus the outputs of its rows' experts. An expert without rows has no gradient."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        inputs = x
        if self.mesh is not None:  # the gradient of ``x`` is the sum over processes
            inputs = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        output = 0 * inputs  # so that a process without rows takes part in that sum
        for topic, expert in self.local.items():
            rows = (topics == int(topic)).nonzero().squeeze(1)
            if len(rows):
                output = output.index_add(0, rows, functional.gelu(expert(inputs[rows])))
        if self.mesh is not None:
            output = DTensor.from_local(output, self.mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()
        return x + output


class Network(nn.Module):
    """Layers between two linear maps."""

    def __init__(self, kind: Callable[[int], nn.Module], size: Size) -> None:
        super().__init__()
        self.first = nn.Linear(size.width, size.width)
        self.layers = nn.ModuleList(kind(size.width) for _ in range(size.layers))
        self.last = nn.Linear(size.width, 1)

    def forward(self, x: Tensor, topics: Tensor) -> Tensor:
        """Return a number for each row."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, topics)
        return self.last(x)


def _shard(model: Network, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)


def _split(model: Network, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ends = {"first": ColwiseParallel(output_layouts=Replicate()), "last": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh, ends | {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})


def _share_experts(model: Network, mesh: Any) -> None:
    for layer in model.layers:
        layer.keep(mesh)


@dataclass(frozen=True)
class Layout:
    """How a model is spread over processes.

    Attributes:
        spread: spreads a model over a mesh.
        replicas: the number of copies of each shard, in a separate dimension of the mesh.
        kind: the class of the model's layers.
        shares: whether each process trains on a share of each batch. Otherwise all train on all of it.
        clips: whether the norm of all gradients is known. Experts differ between processes, and are no DTensors.
    """

    spread: Callable[[Network, Any], None]
    replicas: int = 1
    kind: Callable[[int], nn.Module] = Layer
    shares: bool = False
    clips: bool = True

    def mesh(self, device: torch.device) -> Any:
        """Return a mesh of all processes."""
        shape = {"replicas": self.replicas, "shards": dist.get_world_size() // self.replicas}
        if self.replicas == 1:
            del shape["replicas"]
        return dist.init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


LAYOUTS = {
    "FSDP2": Layout(_shard, shares=True),
    "HSDP": Layout(_shard, replicas=2, shares=True),
    "TP": Layout(_split),
    "experts": Layout(_share_experts, kind=Experts, clips=False),
}
