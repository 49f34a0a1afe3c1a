"""Further words, for formats of numbers: the bits of a number, and the largest of a group of elements.

Rules of optimizers have no need of them. Integers have 32 bits, and ``+ - * & | ^ << >>`` work on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_optim.rule.symbols import word_of_formats

__all__ = ["bits", "from_bits", "from_upper", "group_max", "integer", "number", "spread"]

GROUP = 64
"""How many elements, one after the other in memory, :func:`group_max` takes together."""


@word_of_formats
def bits(x: Tensor) -> Tensor:
    """The bits of a float32 as a 32-bit integer, on which ``+ - * & | ^ << >>`` work; ``>>`` keeps the sign."""
    return x.view(torch.int32)


@word_of_formats
def from_bits(x: Tensor) -> Tensor:
    """The float32 of these :func:`bits`."""
    return x.view(torch.float32)


@word_of_formats
def from_upper(x: Tensor) -> Tensor:
    """The float32 whose upper 16 :func:`bits` are these, and whose others are 0: a number that bfloat16 has."""
    return (x << 16).view(torch.float32)


@word_of_formats
def integer(x: Tensor) -> Tensor:
    """A whole number as a 32-bit integer."""
    return x.to(torch.int32)


@word_of_formats
def number(x: Tensor) -> Tensor:
    """A 32-bit integer as a float32."""
    return x.to(torch.float32)


@word_of_formats
def group_max(x: Tensor) -> Tensor:
    """The largest of the integers of each :data:`GROUP` elements, at least 0: one number for each of these groups."""
    return x.view(*x.shape[:-1], -1, GROUP).amax(-1)


@word_of_formats
def spread(x: Tensor) -> Tensor:
    """A number of each group, for each of its elements."""
    return x.unsqueeze(-1).expand(*x.shape, GROUP).flatten(-2)
