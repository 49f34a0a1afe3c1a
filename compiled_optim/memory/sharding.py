"""DTensors: the part of a tensor that this process holds, and how other tensors are spread over processes like it."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor

from compiled_optim.memory.torch_internals import local_tensor

_PLAIN = {Tensor, torch.nn.Parameter}


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor. ``torch.distributed.tensor`` is slow to import, and is not imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds, sharing its memory; any other tensor itself."""
    if type(tensor) in _PLAIN or not is_sharded(tensor):
        return tensor
    shard: Any = local_tensor(tensor)
    return cast(Tensor, shard.wait() if hasattr(shard, "wait") else shard)  # a collective may still be under way


def local_gradient(grad: Any, param: Any) -> Tensor:
    """The part of ``grad`` that belongs to this process's part of ``param``."""
    return local(_placed_like(grad, param))


def traced_part(tensor: Any, param: Any) -> Tensor:
    """This process's part of ``tensor``, spread like ``param``, in operations that compilers trace.

    It shares memory with a DTensor that is spread like ``param``; a tensor that is no DTensor is returned itself.
    """
    return cast(Tensor, _placed_like(tensor, param).to_local() if is_sharded(tensor) else tensor)


def _placed_like(tensor: Any, param: Any) -> Any:
    if placement(tensor) in (None, placement(param)):
        return tensor
    return tensor.redistribute(param.device_mesh, param.placements)


def as_part_of(tensor: Tensor, like: Any) -> Tensor:
    """A DTensor like ``like`` whose part on this process is ``tensor``; that itself where ``like`` is no DTensor."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def zeros_spread_like(like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of ``shape``, on the device of ``like``; a DTensor with its placements where it is one."""
    if not is_sharded(like):
        return torch.zeros(shape, dtype=dtype, device=like.device)
    from torch.distributed import tensor

    return tensor.zeros(shape, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)


def has_whole_groups(tensor: Any, size: int) -> bool:
    """Whether every process holds whole groups of ``size`` elements that lie one after the other; so of no DTensor.

    Then numbers of the groups, in the shape of the tensor with fewer columns or else in a vector, have its placements too.
    """
    if not is_sharded(tensor):
        return True
    parts: dict[int, int] = {}
    for count, kind in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if (dim := getattr(kind, "dim", None)) is not None and count > 1:
            parts[dim] = parts.get(dim, 1) * count
    if not (tensor.is_contiguous() and parts):
        return not parts
    shape = tensor.shape
    if shape[-1] % size == 0:
        return bool(shape[-1] // size % parts.get(len(shape) - 1, 1) == 0)
    first = parts.get(0, 1)
    return parts.keys() == {0} and shape[0] % first == 0 and tensor.numel() // first % size == 0


def part_number(tensor: Any) -> int:
    """A number of the part of a DTensor that this process holds, the same for all copies of it; 0 for any other tensor."""
    number = 0
    if is_sharded(tensor):
        for dim, kind in enumerate(tensor.placements):
            if not kind.is_replicate():
                number = number * tensor.device_mesh.size(dim) + tensor.device_mesh.get_local_rank(dim)
    return number


def whole_stack(parts: Tensor, like: Any) -> Tensor:
    """Whole tensors, stacked, of what this process holds of them, stacked too: ``parts``. All are spread like ``like``.

    All processes that hold parts must call this together. Where ``like`` is no DTensor, ``parts`` are whole.
    """
    if not is_sharded(like):
        return parts
    last = parts.movedim(0, -1)  # so that the placements count the same dimensions
    shape = torch.Size((*like.shape, len(parts)))
    stride = torch.empty(shape, device="meta").stride()
    from torch.distributed.tensor import DTensor

    spread = DTensor.from_local(last, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
    return spread.full_tensor().movedim(-1, 0).contiguous()


def parts_of_stack(stack: Tensor, like: Any) -> Tensor:
    """What this process holds of the whole tensors in ``stack``, spread like ``like``: :func:`whole_stack` undone."""
    if not is_sharded(like):
        return stack
    from torch.distributed.tensor import distribute_tensor

    spread = distribute_tensor(stack.movedim(0, -1), like.device_mesh, like.placements, src_data_rank=None)
    return spread.to_local().movedim(-1, 0)


def spread_like(tensor: Any, target: Any) -> Tensor:
    """``tensor`` in a form that can be copied into ``target``: a DTensor on its mesh, or a tensor that is whole.

    A ``tensor`` that is no DTensor must be the same on every process. All processes must call this together where ``tensor``
    is a DTensor and ``target`` is none or on another mesh.
    """
    if type(tensor) in _PLAIN and type(target) in _PLAIN:
        return cast(Tensor, tensor)
    if is_sharded(tensor) and not (is_sharded(target) and tensor.device_mesh == target.device_mesh):
        tensor = whole(tensor)
    if is_sharded(target) and not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(tensor.detach(), target.device_mesh, target.placements, src_data_rank=None)
    return tensor  # type: ignore[no-any-return]


def whole(tensor: Any) -> Tensor:
    """All of a DTensor, for which all processes that hold parts must call this together; any other tensor itself."""
    if not is_sharded(tensor):
        return cast(Tensor, tensor)
    if tensor.dtype == torch.int16:  # which neither gloo nor NCCL sends
        return cast(Tensor, tensor.int().full_tensor().short())
    return cast(Tensor, tensor.full_tensor())


def placement(tensor: Any) -> tuple[Any, ...] | None:
    """The mesh and the placements of a DTensor; None for any other tensor."""
    return None if type(tensor) in _PLAIN or not is_sharded(tensor) else (tensor.device_mesh, tensor.placements)


def add_over_shards(sums: Tensor, sharded: Any) -> None:
    """Replace each of ``sums``, of this process's shard of a tensor spread like ``sharded``, by the sum over all shards.

    All processes that hold parts must call this together.
    """
    for dim, kind in enumerate(sharded.placements):
        if not kind.is_replicate():
            torch.distributed.all_reduce(sums, group=sharded.device_mesh.get_group(dim))
