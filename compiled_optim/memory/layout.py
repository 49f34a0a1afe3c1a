"""How tensors lie in memory: whether they have any, in which order, with which numbers; and DTensors over processes."""

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
"""The classes of tensors with memory of their own, that raise nothing when they are asked what they are."""


class MemoryOrder:
    """The memory order in which one parameter, its gradient and its state are updated.

    A dense parameter sets its own order, and is ``target``, what a kernel updates. Where the memory of a parameter has gaps
    or overlaps, ``target`` is ``stand_in``, a dense tensor that takes the parameter's values by :meth:`load` before an
    update and gives them back by :meth:`store` after it.
    """

    def __init__(self, param: Tensor) -> None:
        self._param = param.detach()
        self.stand_in = None if is_dense(self._param) else torch.empty_like(self._param)
        self.target = self._param if self.stand_in is None else self.stand_in

    def arranged(self, tensor: Tensor) -> Tensor:
        """``tensor`` in this order: itself where it has it and lies apart from the parameter, else a copy."""
        stride = self.target.stride()
        if tensor.stride() == stride and is_plain(tensor) and not overlap_shifted(tensor, self.target):
            return tensor
        copied = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        copied.copy_(tensor)
        return copied

    def arranged_state(self, entry: Tensor, *, grouped: bool) -> Tensor:
        """:meth:`arranged` of a state tensor; one with numbers for groups of elements, rows or columns is in their order."""
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
    """The elements of ``tensor``, of any class, in new contiguous memory."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copied.copy_(tensor)
    return copied


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` are what lies in its memory."""
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()) and has_memory(tensor)


def has_memory(tensor: Tensor) -> bool:
    """Whether all elements of a strided tensor lie in memory of its own.

    They do not in a subclass that only wraps other tensors, nor where the storage was freed or shortened.
    """
    if tensor.numel() == 0:
        return True
    if type(tensor) not in TORCH_TYPES and torch_internals.is_fake(tensor):
        return False
    try:
        if tensor.data_ptr() == 0:
            return False
    except RuntimeError:  # what torch says of tensors without a data pointer varies with the version
        return False
    reach = tensor.numel() if tensor.is_contiguous() else _reach(tensor)
    return (tensor.storage_offset() + reach) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def is_lost(tensor: Tensor) -> bool:
    """Whether the storage of ``tensor`` was freed: its elements must lie in memory of its own, and do not."""
    if tensor.layout is not torch.strided or has_memory(tensor):
        return False
    return not (tensor.is_meta or tensor._is_zerotensor() or torch_internals.wraps_others(tensor))


def span(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the address behind its last one."""
    start, reach = tensor.data_ptr(), tensor.numel() if tensor.is_contiguous() or not tensor.numel() else _reach(tensor)
    return start, start + reach * tensor.element_size()


def overlap_shifted(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors share memory but begin at different addresses."""
    (start, end), (other, other_end) = span(first), span(second)
    return start != other and start < other_end and other < end


def _reach(tensor: Tensor) -> int:
    """The distance in memory from the first of some elements to behind the last one, in elements."""
    return 1 + sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)])


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` fill its memory without gaps or overlaps, in any order of dimensions."""
    if not is_plain(tensor):
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """A 1-D view of all real numbers of a dense tensor, in memory order."""
    return as_real(tensor.detach().as_strided((tensor.numel(),), (1,))).view(-1)


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def obstacle(param: Tensor) -> str:
    """Why no step can update ``param`` as it is; empty if one can. Such a parameter has no state."""
    if is_lazy(param):
        return "it is not initialized yet, which the first call of its module does"
    return "" if param.dtype in DTYPES else f"its dtype is {param.dtype}"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real dtype in which a tensor of ``dtype`` is updated: float64 for 64-bit numbers, float32 for all lower."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def real_numel(tensor: Tensor) -> int:
    """How many real numbers a tensor holds."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype of hyperparameters, step counts and coefficients: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def scalars_device(params: Iterable[Tensor]) -> torch.device:
    """Where the hyperparameters, step counts and coefficients of ``params`` lie.

    It is the device of the first that is not a meta tensor, and the CPU if all are: the meta device would lose the numbers.
    """
    return next((param.device for param in params if not param.is_meta), torch.device("cpu"))


def scalar(number: float, device: torch.device) -> Tensor:
    """A new 0-dim tensor on ``device``, filled there: to copy a number there would wait for the device."""
    return torch.full((), number, dtype=scalar_dtype(device), device=device)


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor. ``torch.distributed.tensor`` is slow to import, and is not imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds, sharing its memory; any other tensor itself."""
    if type(tensor) in TORCH_TYPES or not is_sharded(tensor):
        return tensor
    shard = cast(Any, tensor)._local_tensor  # to_local makes a new one in every call
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


def as_part_of(tensor: Tensor, like: Any, *more: int) -> Tensor:
    """A DTensor spread like ``like``, of its shape and ``more`` dimensions, whose part on this process is ``tensor``.

    Where ``like`` is no DTensor, it is ``tensor`` itself.
    """
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*like.shape, *more))
    stride = torch.empty(shape, device="meta").stride() if more else like.stride()
    # The wrapper would take over an offset into memory that it does not have, and torch could neither copy nor save it.
    first = tensor.as_strided(tensor.shape, tensor.stride(), 0) if tensor.storage_offset() else tensor
    made = DTensor.from_local(first, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
    if first is not tensor:
        made._local_tensor = tensor
    return made


def zeros_spread_like(like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of ``shape``, on the device of ``like``; a DTensor with its placements where it is one."""
    if not is_sharded(like):
        return torch.zeros(shape, dtype=dtype, device=like.device)
    from torch.distributed import tensor

    return tensor.zeros(shape, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)


def has_whole_groups(tensor: Any, size: int) -> bool:
    """Whether no group of ``size`` successive elements is split between processes; True for a tensor that is no DTensor.

    A tensor with one number per group, of its shape with fewer columns, or a vector, can then have its placements.
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
    """The full tensors of stacked local shards, ``parts``, stacked too. All are sharded like ``like``.

    All processes that hold parts must call this together. Where ``like`` is no DTensor, ``parts`` are whole.
    """
    if not is_sharded(like):
        return parts
    last = parts.movedim(0, -1)  # so that the placements count the same dimensions
    return full_tensor(as_part_of(last, like, len(parts))).movedim(-1, 0).contiguous()


def parts_of_stack(stack: Tensor, like: Any) -> Tensor:
    """The local shards of the full tensors in ``stack``, sharded like ``like``: the inverse of :func:`whole_stack`."""
    return local(spread_like(stack.movedim(0, -1), like)).movedim(-1, 0) if is_sharded(like) else stack


def spread_like(tensor: Any, target: Any) -> Tensor:
    """``tensor`` in a form that can be copied into ``target``: a DTensor on its mesh, or a tensor that is whole.

    A ``tensor`` that is no DTensor must be the same on every process. All processes must call this together where ``tensor``
    is a DTensor and ``target`` is none or on another mesh.
    """
    if type(tensor) in TORCH_TYPES and type(target) in TORCH_TYPES:
        return cast(Tensor, tensor)
    if is_sharded(tensor) and not (is_sharded(target) and tensor.device_mesh == target.device_mesh):
        tensor = full_tensor(tensor)
    if is_sharded(target) and not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(tensor.detach(), target.device_mesh, target.placements, src_data_rank=None)
    return tensor  # type: ignore[no-any-return]


def full_tensor(tensor: Any) -> Tensor:
    """All of a DTensor, for which all processes that hold parts must call this together; any other tensor itself."""
    if not is_sharded(tensor):
        return cast(Tensor, tensor)
    if tensor.dtype == torch.int16:  # which neither gloo nor NCCL sends
        return full_tensor(tensor.int()).short()
    return cast(Tensor, torch_internals.in_range("gather", tensor.full_tensor))


def placement(tensor: Any) -> tuple[Any, ...] | None:
    """The mesh and the placements of a DTensor; None for any other tensor."""
    return None if type(tensor) in TORCH_TYPES or not is_sharded(tensor) else (tensor.device_mesh, tensor.placements)


def add_over_shards(sums: Tensor, sharded: Any) -> None:
    """Replace each of ``sums``, of this process's shard of a tensor spread like ``sharded``, by the sum over all shards.

    All processes that hold parts must call this together.
    """
    for dim, kind in enumerate(sharded.placements):
        if not kind.is_replicate():
            group = sharded.device_mesh.get_group(dim)
            torch_internals.in_range("all_reduce", torch.distributed.all_reduce, sums, torch.distributed.ReduceOp.SUM, group)
