"""Tensors in memory: whether they have any, in which order, with which numbers; and shards of DTensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.memory import torch_internals

DTYPES = {
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
}
"""The dtypes of parameters and of their state."""

TORCH_TYPES = {Tensor, torch.nn.Parameter}
"""The classes of tensors that have memory themselves, and whose properties can be read without an error."""


class MemoryOrder:
    """The memory order in which one parameter, its gradient and its state are updated.

    A dense parameter sets its own order, and is the ``target`` of a kernel. Where the memory of a parameter has gaps or
    overlaps, ``target`` is ``stand_in``, a dense tensor that takes the parameter's values by :meth:`load` before an
    update and gives them back by :meth:`store` after it.
    """

    def __init__(self, param: Tensor) -> None:
        self._param = param.detach()
        self.stand_in = None if is_dense(self._param) else torch.empty_like(self._param)
        self.target = self._param if self.stand_in is None else self.stand_in

    def arranged(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in this order: itself if it has it, and does not overlap the parameter shifted; else a copy."""
        stride = self.target.stride()
        if tensor.stride() == stride and is_plain(tensor) and not overlap_shifted(tensor, self.target):
            return tensor
        copied = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        copied.copy_(tensor)
        return copied

    def arranged_state(self, entry: Tensor, *, grouped: bool) -> Tensor:
        """Return a state tensor :meth:`arranged`; one of numbers for groups, rows or columns is made contiguous."""
        if not grouped and entry.shape == self._param.shape:
            return self.arranged(entry)
        return entry if entry.is_contiguous() and is_plain(entry) else plain_copy(entry)

    def load(self) -> None:
        """Copy the parameter into its stand-in, if it has one."""
        if self.stand_in is not None:
            self.stand_in.copy_(self._param)

    def store(self) -> None:
        """Copy the stand-in back into the parameter, if it has one."""
        if self.stand_in is not None:
            self._param.copy_(self.stand_in)


def plain_copy(tensor: Tensor) -> Tensor:
    """Copy the elements of ``tensor``, of any class, into new contiguous memory."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copied.copy_(tensor)
    return copied


def is_plain(tensor: Tensor) -> bool:
    """Return whether the elements of ``tensor`` are the numbers in its memory."""
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()) and has_memory(tensor)


def has_memory(tensor: Tensor) -> bool:
    """Return whether all elements of a strided tensor are in its own memory.

    They are not if its class only wraps other tensors, or if its storage was freed or shortened.
    """
    if not (count := tensor.numel()):
        return True
    if type(tensor) not in TORCH_TYPES and torch_internals.is_fake(tensor):
        return False
    try:
        if tensor.data_ptr() == 0:
            return False
    except RuntimeError:  # torch's error for tensors without a data pointer varies with the version
        return False
    reach = count if tensor.is_contiguous() else _reach(tensor)
    return (tensor.storage_offset() + reach) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def is_lost(tensor: Tensor) -> bool:
    """Return whether the storage of ``tensor`` was freed: its elements should be in its own memory, and are not."""
    if tensor.layout is not torch.strided or has_memory(tensor):
        return False
    return not (tensor.is_meta or tensor._is_zerotensor() or torch_internals.wraps_others(tensor))


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the address behind its last one."""
    count = tensor.numel()
    start, reach = tensor.data_ptr(), _reach(tensor) if count and not tensor.is_contiguous() else count
    return start, start + reach * tensor.itemsize


def overlap_shifted(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors share memory but begin at different addresses."""
    (start, end), (other, other_end) = span(first), span(second)
    return start != other and start < other_end and other < end


def _reach(tensor: Tensor) -> int:
    """Return the distance in memory from a tensor's first element to behind the last one, in elements."""
    return 1 + sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)])


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of ``tensor`` fill its memory without gaps or overlaps, in any order of dimensions."""
    if not is_plain(tensor):
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """Return a 1-D view of all real numbers of a dense tensor, in memory order."""
    return as_real(tensor.detach().as_strided((tensor.numel(),), (1,))).view(-1)


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, any other unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def obstacle(param: Tensor) -> str:
    """Return why no step can update ``param``, or ''. Such a parameter has no state."""
    if is_lazy(param):
        return "it is not initialized yet, which the first call of its module does"
    return "" if param.dtype in DTYPES else f"its dtype is {param.dtype}"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the real dtype in which a tensor of ``dtype`` is updated: float64 for 64-bit numbers, float32 for all lower."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def real_numel(tensor: Tensor) -> int:
    """Return the number of real numbers in a tensor."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of hyperparameters, step counts and coefficients: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def scalars_device(params: Iterable[Tensor]) -> torch.device:
    """Return the device of the hyperparameters, step counts and coefficients of ``params``.

    It is the device of the first that is not a meta tensor, and the CPU if all are: the meta device would lose the numbers.
    """
    for param in params:
        if not param.is_meta:
            return param.device
    return torch.device("cpu")


def scalar(number: float, device: torch.device) -> Tensor:
    """Create a 0-dim tensor on ``device``, filled there: a copy from the host would wait for the device."""
    return torch.full((), number, dtype=scalar_dtype(device), device=device)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, without importing ``torch.distributed.tensor``, which is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor, sharing its memory; any other tensor itself."""
    if type(tensor) in TORCH_TYPES or not is_sharded(tensor):
        return tensor
    shard = cast(Any, tensor)._local_tensor  # to_local returns a new tensor in every call
    return cast(Tensor, shard.wait() if hasattr(shard, "wait") else shard)  # a collective may still be running


def local_gradient(grad: Any, param: Any) -> Tensor:
    """Return the shard of ``grad`` for this process's shard of ``param``."""
    return local(_redistributed(grad, param))


def part_placed_like(grad: Tensor | None, param: Tensor) -> Tensor | None:
    """Return this process's shard of ``grad``; None if that is None or placed otherwise than ``param``."""
    return None if grad is None or placement(grad) != placement(param) else local(grad)


def traced_part(tensor: Any, param: Any) -> Tensor:
    """Return this process's shard of ``tensor``, with the placements of ``param``, in operations that compilers trace.

    It shares memory with a DTensor that has these placements; a tensor that is no DTensor is returned itself.
    """
    return cast(Tensor, _redistributed(tensor, param).to_local() if is_sharded(tensor) else tensor)


def _redistributed(tensor: Any, param: Any) -> Any:
    if placement(tensor) in (None, placement(param)):
        return tensor
    return tensor.redistribute(param.device_mesh, param.placements)


def as_part_of(tensor: Tensor, like: Any, *more: int) -> Tensor:
    """Wrap ``tensor``, this process's shard, in a DTensor with placements, shape (and ``more`` dimensions) of ``like``.

    Return ``tensor`` itself where ``like`` is no DTensor.
    """
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*like.shape, *more))
    stride = torch.empty(shape, device="meta").stride() if more else like.stride()
    # The wrapper would take over an offset into memory that it does not have, and torch could neither copy nor save it.
    first = tensor.as_strided(tensor.shape, tensor.stride(), 0) if tensor.storage_offset() else tensor
    wrapper = DTensor.from_local(first, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
    if first is not tensor:
        wrapper._local_tensor = tensor
    return wrapper


def zeros_spread_like(like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros of ``shape`` on the device of ``like``; if that is a DTensor, one with its placements."""
    if not is_sharded(like):
        return torch.zeros(shape, dtype=dtype, device=like.device)
    from torch.distributed import tensor

    return tensor.zeros(shape, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)


def has_whole_groups(tensor: Any, size: int) -> bool:
    """Return whether no group of ``size`` successive elements is split between processes; True if it is no DTensor.

    A tensor of one number per group (its shape with fewer columns, or a vector) can then have its placements.
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
    """Return a number of this process's shard of a DTensor, equal for all its replicas; 0 for any other tensor."""
    number = 0
    if is_sharded(tensor):
        for dim, kind in enumerate(tensor.placements):
            if not kind.is_replicate():
                number = number * tensor.device_mesh.size(dim) + tensor.device_mesh.get_local_rank(dim)
    return number


def whole_stack(parts: Tensor, like: Any) -> Tensor:
    """Stack the full tensors of ``parts``, a stack of local shards. All are sharded like ``like``.

    All processes with shards must call this together. Where ``like`` is no DTensor, ``parts`` are full already.
    """
    if not is_sharded(like):
        return parts
    last = parts.movedim(0, -1)  # so that the placements count the same dimensions
    return full_tensor(as_part_of(last, like, len(parts))).movedim(-1, 0).contiguous()


def parts_of_stack(stack: Tensor, like: Any) -> Tensor:
    """Stack the local shards of the full tensors in ``stack``, sharded like ``like``: the inverse of :func:`whole_stack`."""
    return local(spread_like(stack.movedim(0, -1), like)).movedim(-1, 0) if is_sharded(like) else stack


def spread_like(tensor: Any, target: Any) -> Tensor:
    """Convert ``tensor`` so that it can be copied into ``target``: to a DTensor on its mesh, or to a full tensor.

    A ``tensor`` that is no DTensor must be the same on every process. All processes must call this together where ``tensor``
    is a DTensor and ``target`` is none or on another mesh.
    """
    if type(tensor) in TORCH_TYPES and type(target) in TORCH_TYPES:
        return tensor  # type: ignore[no-any-return]
    if is_sharded(tensor) and not (is_sharded(target) and tensor.device_mesh == target.device_mesh):
        tensor = full_tensor(tensor)
    if is_sharded(target) and not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(tensor.detach(), target.device_mesh, target.placements, src_data_rank=None)
    return tensor  # type: ignore[no-any-return]


def full_tensor(tensor: Any) -> Tensor:
    """Gather a DTensor, for which all processes with shards must call this together. Return other tensors unchanged."""
    if type(tensor) in TORCH_TYPES or not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    if tensor.dtype == torch.int16:  # neither gloo nor NCCL sends it
        return full_tensor(tensor.int()).short()
    return cast(Tensor, torch_internals.in_range("gather", tensor.full_tensor))


def placement(tensor: Any) -> tuple[Any, ...] | None:
    """Return the mesh and the placements of a DTensor; None for any other tensor."""
    return None if type(tensor) in TORCH_TYPES or not is_sharded(tensor) else (tensor.device_mesh, tensor.placements)


def add_over_shards(sums: Tensor, sharded: Any) -> None:
    """Replace ``sums``, each over this process's shard of a tensor placed like ``sharded``, by the sums over all shards.

    All processes with shards must call this together.
    """
    for dim, kind in enumerate(sharded.placements):
        if not kind.is_replicate():
            group = sharded.device_mesh.get_group(dim)
            torch_internals.in_range("all_reduce", torch.distributed.all_reduce, sums, torch.distributed.ReduceOp.SUM, group)
