"""Shards of equal tensors: each tensor goes whole to one process, which updates it, and its shards come back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory.layout import is_sharded, local
from compiled_optim.memory.torch_internals import in_range


class Owners:
    """Which process updates which of several equal tensors, so that each is updated once by the processes that share it.

    Every process must make and use an equal one. A collective sends bytes of all kinds of tensors together.

    Args:
        likes: for each kind of tensor an example: a DTensor, whose mesh and placements all others of that kind have, or a
            tensor that every process has whole.
        mesh_dim: the dimension of the mesh over which they are split.
        dims: for each kind the dimension that is split; None where every process has all.
        count: how many tensors of each kind there are.
        first: the process that has the first tensor.
    """

    def __init__(self, likes: Sequence[Any], mesh_dim: int, dims: Sequence[int | None], count: int, first: int) -> None:
        mesh = likes[0].device_mesh
        self._group, self.rank, size = mesh.get_group(mesh_dim), mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
        self._dims = dims
        self.parts = [_part_sizes(like.shape, dim, size) for like, dim in zip(likes, dims, strict=True)]
        self._of = [range((owner - first) % size, count, size) for owner in range(size)]
        self.own = list(self._of[self.rank])
        order = [index for of in self._of for index in of]
        self._places = sorted(range(count), key=order.__getitem__)  # of all tensors, where they come owner by owner

    def collect(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Of stacked shards, one stack for each kind, the :attr:`own` tensors whole."""
        split = {kind: dim for kind, dim in enumerate(self._dims) if dim is not None}
        sent = [[parts[kind][list(of)] for of in self._of] for kind in split]
        shapes = [[(len(self.own), *part) for part in self.parts[kind]] for kind in split]
        pairs = zip(split.items(), in_range("gather", self._exchange, sent, shapes), strict=True)
        wholes = {kind: torch.cat(found, 1 + dim) for (kind, dim), found in pairs}
        return [wholes[kind] if kind in wholes else stack[self.own] for kind, stack in enumerate(parts)]

    def spread(self, wholes: Sequence[Tensor], kinds: Sequence[int]) -> list[Tensor]:
        """The stacked shards of all tensors; ``wholes`` are the :attr:`own` ones of these ``kinds``."""
        sent: list[Sequence[Tensor]] = []
        for whole, kind in zip(wholes, kinds, strict=True):
            dim, parts = self._dims[kind], self.parts[kind]
            sent.append([whole] * len(parts) if dim is None else torch.split(whole, [part[dim] for part in parts], 1 + dim))
        shapes = [[(len(of), *self.parts[kind][self.rank]) for of in self._of] for kind in kinds]
        return [torch.cat(found)[self._places] for found in in_range("scatter", self._exchange, sent, shapes)]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[tuple[Tensor, ...]]:
        """For each kind, send a tensor to each process, and return those from each process, which have these ``shapes``."""
        blocks = [torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in to]) for to in zip(*sent, strict=True)]
        dtypes = [tensors[0].dtype for tensors in sent]
        expected = [[*zip(own, dtypes, strict=True)] for own in zip(*shapes, strict=True)]  # by process
        sizes = [[math.prod(shape) * dtype.itemsize for shape, dtype in own] for own in expected]
        got = blocks[0].new_empty(sum(map(sum, sizes)))
        counts = [*map(sum, sizes)], [*map(len, blocks)]
        torch.distributed.all_to_all_single(got, torch.cat(blocks), *counts, group=self._group)
        pieces = iter(torch.split(got, [size for own in sizes for size in own]))
        # Copies, since a view as another dtype must begin at a multiple of its size.
        found = [[next(pieces).clone().view(dtype).view(shape) for shape, dtype in own] for own in expected]
        return [*zip(*found, strict=True)]


def owners(likes: Sequence[Any], count: int, first: int) -> Owners | None:
    """The :class:`Owners` of tensors that are spread as ``likes``; None where one is in no or in more than one dimension.

    The first of ``likes`` is a parameter's. Others may be tensors that every process has.
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
    made = Owners(likes, meshes.pop()[1], dims, count, first)
    return made if [parts[made.rank] for parts in made.parts] == [tuple(local(like).shape) for like in likes] else None


def _part_sizes(shape: Sequence[int], dim: int | None, count: int) -> list[tuple[int, ...]]:
    """The shape of each of ``count`` parts of a tensor that is split along ``dim``; the last ones may be empty."""
    if dim is None:
        return [tuple(shape)] * count
    most = -(-shape[dim] // count)
    sizes = [max(0, min(most, shape[dim] - part * most)) for part in range(count)]
    return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
