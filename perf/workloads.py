"""Lists of parameter shapes that represent models, without weights."""

from __future__ import annotations

import math
from collections.abc import Callable

from compiled_optim.simulated.shapes import Shapes, gpt2, vit_tiny


def _gpt_matrices(width: int) -> Shapes:
    """Return the hidden matrices of a GPT with 12 layers: 48 tensors of 4 shapes."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * 12


TINY = "tiny-matrices"
"""The workload of rehearsals, for every optimizer."""

WORKLOADS: dict[str, Callable[[], Shapes]] = {
    "gpt2-124m": gpt2,
    "vit-tiny": vit_tiny,
    "gpt-matrices": lambda: _gpt_matrices(256),
    "gpt2-matrices": lambda: _gpt_matrices(768),
    "experts": lambda: [(8, 3072, 768), (8, 768, 3072)] * 4,
    "small-10": lambda: [(4096,)] * 10,
    "small-148": lambda: [(4096,)] * 148,
    "small-1000": lambda: [(4096,)] * 1000,
    "tiny-10": lambda: [(16,)] * 10,
    "matrices-148": lambda: [(16, 16)] * 148,
    TINY: lambda: [(4, 4)] * 10,
    "30-million": lambda: [(1000, 1000)] * 30,
    "half-billion": lambda: [(1000, 1000)] * 500,
    "scalars-20000": lambda: [(1,)] * 20000,
}


def shapes(name: str) -> Shapes:
    """Return the parameter shapes of the workload ``name``."""
    return WORKLOADS[name]()


def elements(name: str) -> int:
    """Return the number of elements of all parameters of the workload ``name``."""
    return sum(math.prod(shape) for shape in shapes(name))
