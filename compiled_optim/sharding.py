"""DTensors: the part of one that this process holds, and tensors spread over processes as another one is."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor

from compiled_optim.torch_internals import local_tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor. ``torch.distributed.tensor``, slow to import, is not imported for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds, sharing its memory; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    shard: Any = local_tensor(tensor)
    return cast(Tensor, shard.wait() if hasattr(shard, "wait") else shard)  # a collective may still be under way


def local_gradient(grad: Any, param: Any) -> Tensor:
    """The part of ``grad`` that belongs to this process's part of ``param``."""
    if is_sharded(grad) and (grad.device_mesh, grad.placements) != (param.device_mesh, param.placements):
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)


def as_part_of(tensor: Tensor, whole: Any) -> Tensor:
    """A DTensor of the shape and placements of ``whole`` whose part on this process is ``tensor``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def spread_like(tensor: Any, target: Any) -> Tensor:
    """``tensor``, the same on every process or a DTensor, in the form in which it can be copied into ``target``.

    All processes must call it together where ``tensor`` is a DTensor on another mesh than ``target`` or ``target`` is none.
    """
    if is_sharded(tensor) and not (is_sharded(target) and tensor.device_mesh == target.device_mesh):
        tensor = tensor.full_tensor()
    if is_sharded(target) and not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(tensor.detach(), target.device_mesh, target.placements, src_data_rank=None)
    return tensor  # type: ignore[no-any-return]


def placement(tensor: Any) -> tuple[Any, ...] | None:
    """Where a DTensor's parts lie, its mesh and placements; None for any other tensor."""
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None


def sum_over_shards(sums: Tensor, whole: Any) -> None:
    """Replace ``sums``, computed from this process's part of ``whole``, by numbers with the total over all parts.

    All processes that hold parts must call it together.
    """
    total = sums.sum()
    for dim, kind in enumerate(whole.placements):
        if not kind.is_replicate():
            torch.distributed.all_reduce(total, group=whole.device_mesh.get_group(dim))
    sums.zero_()
    sums[0] = total
