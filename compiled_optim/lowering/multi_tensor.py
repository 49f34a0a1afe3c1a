"""The multi-tensor lowering: one kernel per dtype key reads the addresses of all tensors from a table.

A step is one call for each dtype key, for any number of tensors and groups. The tables hold the addresses of
parameters, gradients, state and hyperparameters. They are updated when one of these changes, without a recompile. An
absent gradient has the address 0; its parameter is not updated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence

import torch
from torch import Tensor

from compiled_optim.lowering.kernels import cpp, triton
from compiled_optim.lowering.kernels.table import (
    CoefficientTable,
    HyperPointers,
    Kernel,
    KernelTensors,
    TensorTable,
    tensor_rows,
    upload,
)
from compiled_optim.lowering.kernels.triton import current_device as current_device
from compiled_optim.lowering.torch_ops.eager import Lowering
from compiled_optim.memory import addresses
from compiled_optim.memory.layout import add_over_shards
from compiled_optim.memory.torch_internals import Captures, is_capturing
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import MULTI_TENSOR, CompilationLog, KernelKey, kernel_key
from compiled_optim.plan.plan import Member, Plan

BACKENDS: dict[str, Callable[[KernelKey], Kernel]] = {"cpu": cpp.CppKernel, "cuda": triton.TritonKernel}
"""The constructors of kernels, by device type."""

_kernels: dict[KernelKey, Kernel] = {}


class Capturable(Lowering):
    """A lowering whose launch a CUDA graph can hold: its kernels read tables that are updated outside of the graph.

    Attributes:
        table: the coefficients of all parameters of the plan; :meth:`compile` assigns it.
    """

    table: CoefficientTable

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        super().__init__(plan, clipping, log)
        self.hypers = HyperPointers(plan, clipping, log)
        self._on_device = current_device(plan.device)

    def connect(self, square_sums: Tensor, all_square_sums: Tensor) -> None:
        super().connect(square_sums, all_square_sums)
        self.table.connect(all_square_sums)

    def launch_key(self) -> tuple[object, ...]:
        """Return the key on which a graph that holds a launch depends. This object stands for the memory of its tables."""
        return (self,)

    def preallocate(self) -> None:
        """Allocate, after :meth:`compile`, all memory that a captured launch keeps using."""
        self.hypers.refresh()
        self.table.gradients.reserve(1)

    def copy_gradients_for_graph(self) -> None:
        """Copy the prepared gradients to the memory that a captured launch reads, unless a table has their addresses."""

    def _obtain_kernel(self, key: KernelKey, positions: Iterable[int]) -> Kernel:
        """Return the process's kernel of ``key``, for the parameters at ``positions``."""
        kernel = self._log.obtain(_kernels, key, [self.plan.members[i].name for i in positions], BACKENDS[key.device])
        if kernel.drawback:
            self._log.fall_back(f"{self.plan.rule.name} launches kernels slowly: {kernel.drawback}", "a step takes longer")
        return kernel

    def _step(self, tables: Sequence[TensorTable]) -> None:
        """Evaluate the coefficients once, and update the tensors of all ``tables``."""
        with self._on_device:
            tables[0].kernel.step(tables[0], self.table)
            for table in tables[1:]:
                table.kernel.update(table, self.table)


class MultiTensorLowering(Capturable):
    """The step of one plan with one kernel per dtype key."""

    name = "multi_tensor"

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        super().__init__(plan, clipping, log)
        self._stages = plan.rule.stages(plan.statics)

    def compile(self) -> None:
        positions: dict[KernelKey, list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(self.plan.members, self.plan.grad_dtypes, strict=True)):
            positions.setdefault(self._table_key(member, grad_dtype), []).append(i)
        kernels = [self._obtain_kernel(key, where) for key, where in positions.items()]
        if isinstance(refusal := addresses.reader(), str):
            self._log.fall_back(f"{self.plan.rule.name} looks at its tensors one by one: {refusal}", "a step takes longer")
        tensors, self._orders = tensor_rows(self.plan)
        self._stand_ins = [(i, order) for i, order in enumerate(self._orders) if order.stand_in is not None]
        self.table = CoefficientTable(self.plan, self._clipping, self.hypers, self._log)
        if self._stages:  # kernels divide by these
            self._counts = upload(self.plan.counts, self.plan.device).double()
        expressions = max((p.sums.stop - p.sums.start for p in self._stages.values()), default=0)
        self.tables = [
            KernelTensors(kernel, self.plan, tensors, self.table.gradients, where, expressions)
            for kernel, where in zip(kernels, positions.values(), strict=True)
        ]
        self.square_sum_count = sum(table.square_sum_count for table in self.tables)

    def _table_key(self, member: Member, grad_dtype: torch.dtype) -> KernelKey:
        """Return the key of the kernel that works on a table with ``member``."""
        return kernel_key(self.plan, member, grad_dtype, MULTI_TENSOR)

    def connect(self, square_sums: Tensor, all_square_sums: Tensor) -> None:
        super().connect(square_sums, all_square_sums)
        counts = [table.square_sum_count for table in self.tables]
        for table, sums in zip(self.tables, torch.split(square_sums[: sum(counts)], counts), strict=True):
            table.connect(sums)

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        capturing = self.plan.device in captures
        self.hypers.prepare(capturing)
        if not (self.plan.addresses.unlike or self._stand_ins):
            self.table.gradients.follow(self.plan.addresses, capturing)
            return
        pairs = zip(self.plan.gradients(grads), self._orders, strict=True)
        self._grads = [None if grad is None else order.arranged(grad) for grad, order in pairs]
        self.table.gradients.publish(self._grads, capturing)

    def resumes(self, grads: list[Tensor | None] | None, *, state: bool, keep_alive: bool) -> bool:
        """Do :meth:`Plan.read` and :meth:`prepare` if nothing but addresses of gradients changed. Return True if so."""
        if self._stand_ins or self.plan.looks_closely:
            return False
        current = self.plan.addresses
        current.read(grads, others=state, keep_alive=keep_alive)
        if current.moved or current.unlike:
            return False
        if not self.hypers.is_settled:
            self.hypers.prepare(capturing=False)
        self.table.gradients.follow(current, capturing=False)
        return True

    def measure(self) -> None:
        with self._on_device:
            for table in self.tables:
                table.kernel.measure(table)

    def launch(self) -> None:
        if self._stages:
            super().launch()
        else:
            self._load_stand_ins()
            self._step(self.tables)
            self._store_stand_ins()

    def _load_stand_ins(self) -> None:
        """Load before each launch: a parameter of another plan may share the memory, and may just have been updated."""
        for _, order in self._stand_ins:
            order.load()

    def _store_stand_ins(self) -> None:
        for i, order in self._stand_ins:
            if self._grads[i] is not None or is_capturing(self.plan.device):  # in a replay, others may have gradients
                order.store()

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        numbers = self.table.coefficients[1:]
        self._load_stand_ins()
        with self._on_device:
            self.tables[0].kernel.evaluate(self.table)
        for stage, slices in self._stages.items():
            with self._on_device:
                for table in self.tables:
                    table.kernel.average(stage, table, self.table)
            if self.plan.sharded:
                add_over_shards(numbers[slices.sums], self.plan.params[0])
            if slices.totals.start < slices.totals.stop:
                sums = torch.where(self.table.gradients.pointers != 0, numbers[slices.totals] * self._counts, 0.0).sum(1)
                numbers[slices.received] = (yield sums).unsqueeze(1)
        self._load_stand_ins()  # again, since sums are over all plans
        with self._on_device:
            for table in self.tables:
                table.kernel.update(table, self.table)
        self._store_stand_ins()
