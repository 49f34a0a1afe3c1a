"""Shards of equal tensors: each tensor is gathered by one process, which updates it, and is scattered again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory.layout import is_sharded, local
from compiled_optim.memory.torch_internals import in_range


class Owners:
    """An assignment of equal, sharded tensors to processes, so that each tensor is updated by one process.

    Every process must make and use an equal one. A collective sends the bytes of all kinds of tensors together.

    Args:
        likes: for each kind of tensor an example: a DTensor, whose mesh and placements all of that kind have, or a tensor
            that is replicated.
        mesh_dim: the dimension of the mesh over which they are split.
        dims: for each kind the dimension that is split; None for replicated ones.
        count: the number of tensors of each kind.
        first: the process that has the first tensor.
    """

    def __init__(self, likes: Sequence[Any], mesh_dim: int, dims: Sequence[int | None], count: int, first: int) -> None:
        mesh = likes[0].device_mesh
        self._group, self.rank, size = mesh.get_group(mesh_dim), mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
        self._dims = dims
        self.parts = [_part_sizes(like.shape, dim, size) for like, dim in zip(likes, dims, strict=True)]
        self._indices_of = [range((owner - first) % size, count, size) for owner in range(size)]
        self.owned = list(self._indices_of[self.rank])
        order = [index for of in self._indices_of for index in of]  # owner by owner
        self._inverse = sorted(range(count), key=order.__getitem__)  # the positions of all tensors in this order

    def collect(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Gather the :attr:`owned` tensors from stacked shards, one stack for each kind."""
        split = {kind: dim for kind, dim in enumerate(self._dims) if dim is not None}
        sent = [[parts[kind][list(of)] for of in self._indices_of] for kind in split]
        shapes = [[(len(self.owned), *part) for part in self.parts[kind]] for kind in split]
        pairs = zip(split.items(), in_range("gather", self._exchange, sent, shapes), strict=True)
        full = {kind: torch.cat(shards, 1 + dim) for (kind, dim), shards in pairs}
        return [full[kind] if kind in full else stack[self.owned] for kind, stack in enumerate(parts)]

    def spread(self, full: Sequence[Tensor], kinds: Sequence[int]) -> list[Tensor]:
        """Scatter the :attr:`owned` tensors, ``full`` of these ``kinds``. Return the stacked shards of all tensors."""
        sent: list[Sequence[Tensor]] = []
        for stack, kind in zip(full, kinds, strict=True):
            dim, parts = self._dims[kind], self.parts[kind]
            sent.append([stack] * len(parts) if dim is None else torch.split(stack, [part[dim] for part in parts], 1 + dim))
        shapes = [[(len(of), *self.parts[kind][self.rank]) for of in self._indices_of] for kind in kinds]
        return [torch.cat(shards)[self._inverse] for shards in in_range("scatter", self._exchange, sent, shapes)]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[tuple[Tensor, ...]]:
        """For each kind, send a tensor to each process, and return those from each process, of these ``shapes``."""
        blocks = [torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in to]) for to in zip(*sent, strict=True)]
        dtypes = [tensors[0].dtype for tensors in sent]
        expected = [[*zip(of_process, dtypes, strict=True)] for of_process in zip(*shapes, strict=True)]
        sizes = [[math.prod(shape) * dtype.itemsize for shape, dtype in pairs] for pairs in expected]  # by process
        got = blocks[0].new_empty(sum(map(sum, sizes)))
        counts = [*map(sum, sizes)], [*map(len, blocks)]
        torch.distributed.all_to_all_single(got, torch.cat(blocks), *counts, group=self._group)
        pieces = iter(torch.split(got, [size for of_process in sizes for size in of_process]))
        # Copies, since a view as another dtype must begin at a multiple of its size.
        tensors = [[next(pieces).clone().view(dtype).view(shape) for shape, dtype in pairs] for pairs in expected]
        return [*zip(*tensors, strict=True)]


def owners(likes: Sequence[Any], count: int, first: int) -> Owners | None:
    """Return the :class:`Owners` of tensors sharded as ``likes``; None unless a single mesh dimension splits them.

    The first of ``likes`` is a parameter. Others may be replicated tensors.
    """
    dims: list[int | None] = []
    meshes = set()
    for like in likes:
        split = [(i, kind) for i, kind in enumerate(like.placements) if not kind.is_replicate()] if is_sharded(like) else []
        if is_sharded(like) and [type(kind).__name__ for _, kind in split] != ["Shard"]:
            return None
        meshes |= {(like.device_mesh, i) for i, _ in split}
        dims.append(next((kind.dim % like.dim() for _, kind in split), None))
    if dims[0] is None or len(meshes) != 1:
        return None
    result = Owners(likes, meshes.pop()[1], dims, count, first)
    return result if [parts[result.rank] for parts in result.parts] == [tuple(local(like).shape) for like in likes] else None


def _part_sizes(shape: Sequence[int], dim: int | None, count: int) -> list[tuple[int, ...]]:
    """Return the shapes of ``count`` parts of a tensor that is split along ``dim``; the last ones may be empty."""
    if dim is None:
        return [tuple(shape)] * count
    most = -(-shape[dim] // count)
    sizes = [max(0, min(most, shape[dim] - part * most)) for part in range(count)]
    return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
