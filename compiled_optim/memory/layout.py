"""How tensors lie in memory: whether they have any, in which order, with which numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.memory import torch_internals

DTYPES = {
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
}
"""The dtypes of parameters and of their state."""

_OWNERS = {Tensor, torch.nn.Parameter}  # classes whose tensors have memory of their own, and are no fakes


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
        """:meth:`arranged` of a state tensor; one with a number for each group of elements is in the groups' order."""
        if not grouped:
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
    if type(tensor) not in _OWNERS and torch_internals.is_fake(tensor):
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
        if size != 1:
            if stride != expected:
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


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor's numbers: a complex number is a pair of real ones."""
    return dtype.to_real() if dtype.is_complex else dtype


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
    for param in params:
        if not param.is_meta:
            return param.device
    return torch.device("cpu")


def scalar(number: float, device: torch.device) -> Tensor:
    """A new 0-dim tensor on ``device``, filled there: to copy a number there would wait for the device."""
    return torch.full((), number, dtype=scalar_dtype(device), device=device)
