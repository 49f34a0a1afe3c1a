"""Shards of equal tensors: each tensor goes whole to one process, which updates it, and its shards come back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory.layout import is_sharded, local


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
        self._group = likes[0].device_mesh.get_group(mesh_dim)
        self._size, rank = likes[0].device_mesh.size(mesh_dim), likes[0].device_mesh.get_local_rank(mesh_dim)
        self._dims = dims
        self._parts = [_part_sizes(like.shape, dim, self._size) for like, dim in zip(likes, dims, strict=True)]
        self._count, self._rank = count, rank
        self._of = [range((owner - first) % self._size, count, self._size) for owner in range(self._size)]
        self.own = list(self._of[rank])

    def collect(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Of stacked shards, one stack for each kind, the :attr:`own` tensors whole."""
        split = {kind: dim for kind, dim in enumerate(self._dims) if dim is not None}
        sent = [[parts[kind][list(indices)] for kind in split] for indices in self._of]
        shapes = [[(len(self.own), *self._parts[kind][source]) for kind in split] for source in range(self._size)]
        received = self._exchange(sent, shapes, [parts[kind].dtype for kind in split])
        pairs = zip(split.items(), zip(*received, strict=True), strict=True)
        wholes = {kind: torch.cat(found, 1 + dim) for (kind, dim), found in pairs}
        return [wholes[kind] if kind in wholes else stack[self.own] for kind, stack in enumerate(parts)]

    def spread(self, wholes: Sequence[Tensor], kinds: Sequence[int]) -> list[Tensor]:
        """The stacked shards of all tensors; ``wholes`` are the :attr:`own` ones of these ``kinds``."""
        cut: list[Sequence[Tensor]] = []
        for whole, kind in zip(wholes, kinds, strict=True):
            dim = self._dims[kind]
            cut.append(
                [whole] * self._size if dim is None else torch.split(whole, [p[dim] for p in self._parts[kind]], 1 + dim)
            )
        shapes = [[(len(of), *self._parts[kind][self._rank]) for kind in kinds] for of in self._of]
        received = self._exchange(list(zip(*cut, strict=True)), shapes, [whole.dtype for whole in wholes])
        stacks = []
        for kind, whole, found in zip(kinds, wholes, zip(*received, strict=True), strict=True):
            stack = whole.new_empty((self._count, *self._parts[kind][self._rank]))
            for indices, part in zip(self._of, found, strict=True):
                stack[list(indices)] = part
            stacks.append(stack)
        return stacks

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], dtypes: Sequence[torch.dtype]
    ) -> list[list[Tensor]]:
        """Send a list of tensors to each process, and return those of each, which have these ``shapes`` and ``dtypes``."""
        blocks = [torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in to]) for to in sent]
        bytes_of = [[math.prod(s) * d.itemsize for s, d in zip(own, dtypes, strict=True)] for own in shapes]
        got = torch.empty(sum(map(sum, bytes_of)), dtype=torch.uint8, device=blocks[0].device)
        torch.distributed.all_to_all_single(
            got, torch.cat(blocks), list(map(sum, bytes_of)), [len(block) for block in blocks], group=self._group
        )
        pieces = iter(torch.split(got, [size for sizes in bytes_of for size in sizes]))
        # Copies, since a view as another dtype must begin at a multiple of its size.
        return [[next(pieces).clone().view(d).view(s) for s, d in zip(own, dtypes, strict=True)] for own in shapes]


def owners(likes: Sequence[Any], count: int, first: int) -> Owners | None:
    """The :class:`Owners` of tensors that are spread as ``likes``; None where one is in no or in more than one dimension.

    The first of ``likes`` is a parameter's. Others may be tensors that every process has.
    """
    found: list[tuple[Any, int, int] | None] = []
    for like in likes:
        if not is_sharded(like):
            found.append(None)
            continue
        sharded = [(i, kind) for i, kind in enumerate(like.placements) if not kind.is_replicate()]
        if len(sharded) != 1 or type(sharded[0][1]).__name__ != "Shard":
            return None
        ((mesh_dim, kind),) = sharded
        dim, mesh = kind.dim % like.dim(), like.device_mesh
        if _part_sizes(like.shape, dim, mesh.size(mesh_dim))[mesh.get_local_rank(mesh_dim)] != tuple(local(like).shape):
            return None
        found.append((mesh, mesh_dim, dim))
    if found[0] is None or len({each[:2] for each in found if each is not None}) != 1:
        return None
    return Owners(likes, found[0][1], [None if each is None else each[2] for each in found], count, first)


def _part_sizes(shape: Sequence[int], dim: int | None, count: int) -> list[tuple[int, ...]]:
    """The shape of each of ``count`` parts of a tensor that is split along ``dim``; the last ones may be empty."""
    if dim is None:
        return [tuple(shape)] * count
    most = -(-shape[dim] // count)
    sizes = [max(0, min(most, shape[dim] - part * most)) for part in range(count)]
    return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
