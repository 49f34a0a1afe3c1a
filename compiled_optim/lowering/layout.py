"""How a parameter lies in memory, and how other tensors are brought into the same order."""

from __future__ import annotations

import torch
from torch import Tensor


class Layout:
    """The memory order in which one parameter, its gradient and its state are updated.

    It is the parameter's own where that is dense. A parameter whose memory has gaps or overlaps is updated in ``stage``, a
    dense stand-in, between :meth:`load` and :meth:`store`.
    """

    def __init__(self, param: Tensor) -> None:
        self._param = param.detach()
        self.stage = None if is_dense(self._param) else torch.empty_like(self._param)
        self.target = self._param if self.stage is None else self.stage

    def arranged(self, tensor: Tensor) -> Tensor:
        """``tensor`` in this order: itself where it has it, else a copy."""
        if tensor.stride() == self.target.stride() and is_plain(tensor):
            return tensor
        return torch.empty_strided(self.target.shape, self.target.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )

    def load(self) -> None:
        """Copy the parameter into its stand-in, if it has one."""
        if self.stage is not None:
            self.stage.copy_(self._param)

    def store(self) -> None:
        """Copy the stand-in back into the parameter, if it has one."""
        if self.stage is not None:
            self._param.copy_(self.stage)


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` are what lies in its memory."""
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())


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
