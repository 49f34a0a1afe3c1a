"""A rule as Triton: kernels that update every tensor of a plan in two launches, three where the norm is needed.

Each stage of a rule's reductions takes two more.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from collections.abc import Mapping
from types import ModuleType

from torch import Tensor

from compiled_optim.lowering.kernels.table import CoefficientTable, MeasuredTable, TensorTable
from compiled_optim.lowering.kernels.triton_source import BLOCK, PART, source, stretch_of
from compiled_optim.plan.kernel_key import KernelKey
from compiled_optim.rule.rule import Places

TENSORS = 32  # tensors whose coefficients one program evaluates
WARPS = 4
REDUCING_PROGRAMS = 4096  # programs that reduce the gradients: enough to keep the memory of a large GPU busy


class TritonKernel:
    """The kernels of one key."""

    chunk = BLOCK

    def __init__(self, module: ModuleType, stretch: int, stages: Mapping[int, Places]) -> None:
        self._module = module
        self._stages = stages
        self.stretch = stretch

    def square_sum_count(self, stretches: int) -> int:
        """One partial sum per program that reduces."""
        return min(stretches, REDUCING_PROGRAMS)

    def measure(self, table: MeasuredTable) -> None:
        if len(table.square_sums):
            self._module.square_sums[(len(table.square_sums),)](
                table.tensors,
                table.grads,
                table.stretches,
                table.square_sums,
                len(table.grads),
                len(table.stretches),
                BLOCK,
                num_warps=WARPS,
                enable_fp_fusion=True,
            )

    def evaluate(self, coefficients: CoefficientTable) -> None:
        count = coefficients.owners.shape[1]
        self._module.evaluate[(-(-count // TENSORS),)](
            coefficients.owners,
            coefficients.gradients.pointers,
            coefficients.hypers,
            coefficients.all_square_sums,
            coefficients.outcome,
            coefficients.coefficients,
            count,
            len(coefficients.all_square_sums),
            int(coefficients.leads),
            TENSORS,
            BLOCK,
            enable_fp_fusion=True,
        )

    def average(self, stage: int, table: MeasuredTable, coefficients: CoefficientTable) -> None:
        self._each_chunk(f"sums{stage}", table, coefficients, table.sums)
        places = self._stages[stage].sums
        self._module.average[(len(table.spans), places.stop - places.start)](
            table.sums,
            table.spans,
            table.grads,
            coefficients.outcome,
            coefficients.coefficients,
            len(table.chunks),
            coefficients.owners.shape[1],
            1 + places.start,
            BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )

    def update(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        self._each_chunk("update", table, coefficients)

    def _each_chunk(self, name: str, table: TensorTable, coefficients: CoefficientTable, *sums: Tensor) -> None:
        if len(table.chunks):
            getattr(self._module, name)[(len(table.chunks),)](
                table.tensors,
                table.grads,
                table.chunks,
                coefficients.outcome,
                coefficients.coefficients,
                *sums,
                len(table.grads),
                coefficients.owners.shape[1],
                BLOCK,
                PART,
                num_warps=WARPS,
                enable_fp_fusion=True,
            )

    def step(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        self.evaluate(coefficients)
        self.update(table, coefficients)


def build(key: KernelKey) -> TritonKernel:
    """The kernels for one key; Triton compiles them when they first run."""
    return TritonKernel(load(source(key)), stretch_of(key.grad_dtype), key.rule.stages(dict(key.statics)))


def load(text: str) -> ModuleType:
    """The module of ``text``. No file holds it: Triton reads the source of its functions where tracebacks do."""
    name = f"compiled_optim_kernel_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    if name not in sys.modules:
        place = f"<{name}>"
        linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
        module = ModuleType(name)
        sys.modules[name] = module
        exec(compile(text, place, "exec"), vars(module))
    return sys.modules[name]
