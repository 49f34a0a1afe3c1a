"""The multi-tensor lowering: one kernel per dtype key reads the addresses of all tensors from a table.

A step is one call for each dtype key, for any number of tensors and groups. The tables hold the addresses of
parameters, gradients, state and hyperparameters. They are updated when one of these changes, without a recompile. An
absent gradient has the address 0; its parameter is not updated.
"""

from __future__ import annotations

from torch import Tensor

from compiled_optim.lowering.coefficients import TableCoefficients
from compiled_optim.lowering.kernels.table import KernelTensors, tensor_rows
from compiled_optim.lowering.lowering import Lowering
from compiled_optim.memory.torch_internals import Captures, is_capturing
from compiled_optim.plan.compilations import MULTI_TENSOR, KernelKey, kernel_key


class MultiTensorLowering(Lowering):
    """The step of one plan with one kernel per dtype key."""

    name = "multi_tensor"
    coefficients: TableCoefficients

    def compile(self) -> None:
        positions: dict[KernelKey, list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(self.plan.members, self.plan.grad_dtypes, strict=True)):
            positions.setdefault(kernel_key(self.plan, member, grad_dtype, MULTI_TENSOR), []).append(i)
        kernels = [self.coefficients.obtain(key, where) for key, where in positions.items()]
        if drawback := self.plan.addresses.drawback:
            self._log.fall_back(f"{self.plan.rule.name} looks at its tensors one by one: {drawback}", "a step takes longer")
        tensors, self._orders = tensor_rows(self.plan, range(len(self.plan.members)))
        self._stand_ins = [(i, order) for i, order in self._orders.items() if order.stand_in is not None]
        self.reads_addresses = not self._stand_ins
        self.coefficients.compile(kernels[0])
        expressions = max((p.sums.stop - p.sums.start for p in self._stages.values()), default=0)
        outputs, gradients = self.plan.outputs, self.coefficients.table.gradients
        totals = outputs.sums(self.plan.params, self.plan.device) if outputs.choice.sums else None
        self.tables = [
            KernelTensors(kernel, self.plan, tensors, gradients, where, expressions, totals)
            for kernel, where in zip(kernels, positions.values(), strict=True)
        ]
        self.square_sum_count = sum(table.square_sum_count for table in self.tables)

    def prepare(self, grads: list[Tensor | None] | None, captures: Captures = ()) -> None:
        capturing, gradients = self.plan.device in captures, self.coefficients.table.gradients
        self.coefficients.prepare(capturing)
        if self.reads_addresses and not self.plan.addresses.unlike:
            gradients.follow(self.plan.addresses, capturing)
            return
        pairs = zip(self.plan.gradients(grads), self._orders.values(), strict=True)
        self._grads = [None if grad is None else order.arranged(grad) for grad, order in pairs]
        gradients.publish(self._grads, capturing)

    def measure(self) -> None:
        with self.coefficients.on_device:
            for table in self.tables:
                table.kernel.measure(table)

    def launch(self) -> None:
        if self._stages:
            super().launch()
        else:
            if self._stand_ins:
                self._load_stand_ins()
            self.coefficients.step(self.tables)
            if self.plan.outputs.choice.sums:
                self._total()
            if self._stand_ins:
                self._store_stand_ins()

    def _reduce(self, stage: int) -> None:
        self._load_stand_ins()
        with self.coefficients.on_device:
            for table in self.tables:
                table.kernel.average(stage, table, self.coefficients.table)

    def _update(self) -> None:
        self._load_stand_ins()  # again, since sums are over all plans
        with self.coefficients.on_device:
            for table in self.tables:
                table.kernel.update(table, self.coefficients.table)
        if self.plan.outputs.choice.sums:
            self._total()
        self._store_stand_ins()

    def _total(self) -> None:
        with self.coefficients.on_device:
            for table in self.tables:
                table.kernel.total(table, self.coefficients.table)

    def _load_stand_ins(self) -> None:
        """Load before each launch: a parameter of another plan may share the memory, and may just have been updated."""
        for _, order in self._stand_ins:
            order.load()

    def _store_stand_ins(self) -> None:
        for i, order in self._stand_ins:
            if self._grads[i] is not None or is_capturing(self.plan.device):  # in a replay, others may have gradients
                order.store()
