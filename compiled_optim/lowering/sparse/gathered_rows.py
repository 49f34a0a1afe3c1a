"""The lowering for sparse gradients that copies rows: where there are no multi-tensor kernels, and for debugging."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compiled_optim.lowering.gradient import square_sum
from compiled_optim.lowering.sparse.entries import Entries, entries_of, has_distinct_rows
from compiled_optim.lowering.torch_ops.inductor import LISTS, UPDATE, ListKernel, obtain_kernel, uncompiled
from compiled_optim.lowering.torch_ops.torch_lowering import TorchLowering
from compiled_optim.memory.layout import as_real, compute_dtype
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.kernel_key import kernel_key
from compiled_optim.plan.plan import Plan
from compiled_optim.torch_internals import is_fake


def _is_readable(grad: Tensor) -> bool:
    """Whether the host can look at the indices of a sparse gradient without waiting."""
    return grad.device.type == "cpu" and not is_fake(grad)


class GatheredRowsLowering(TorchLowering):
    """Copies the rows out, updates the copies, and copies them back. Entries of one row write the same values.

    Inductor's kernels update the copies where it is ``compiled``, else plain torch operations.
    """

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog, *, compiled: bool) -> None:
        super().__init__(plan, clipping)
        self.name = "inductor" if compiled else "eager"
        self._log = log
        self._keys = [kernel_key(plan, m, compute_dtype(m.param.dtype), LISTS) for m in plan.members]
        self._kernels = [] if compiled else [ListKernel(key, uncompiled(key)) for key in self._keys]
        self._entries: dict[int, Entries] = {}

    @property
    def is_compiled(self) -> bool:
        return bool(self._kernels)

    def compile(self) -> None:
        if not self._kernels:
            keys = zip(self._keys, self.plan.members, strict=True)
            self._kernels = [ListKernel(key, obtain_kernel(self._log, key, [member.name])) for key, member in keys]

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        super().prepare(grads)
        self._entries = {}
        given = zip(self.plan.members, self._grads, strict=True)
        self._distinct = [g is not None and _is_readable(g) and has_distinct_rows(g, m.name) for m, g in given]

    def measure(self) -> None:
        """Write the sum of the squares of the prepared gradients, after the entries of each row have been added up."""
        self._add_up()
        self._square_sum.fill_(square_sum([entries.sums for entries in self._entries.values()], self.plan.device))

    def launch(self) -> None:
        """Update the rows that the gradients name, and count a step of every parameter that has a gradient."""
        self._add_up()
        coefficients, _ = self._advance()
        for position, entries in self._entries.items():
            if entries.sums.numel():
                member = self.plan.members[position]
                tensors = [member.param.detach(), *(member.entries[name] for name in self.plan.buffers)]
                if entries.sums.dim() == member.param.dim() + 1:  # without sparse dimensions there is one row
                    tensors = [t.unsqueeze(0) for t in tensors]
                self._update_rows(position, tensors, entries, coefficients[:, position])

    def finish(self) -> None:
        super().finish()
        self._entries = {}

    def _add_up(self) -> None:
        for i, (member, grad) in enumerate(zip(self.plan.members, self._grads, strict=True)):
            if grad is not None and i not in self._entries:
                self._entries[i] = entries_of(grad, compute_dtype(member.param.dtype), distinct=self._distinct[i])

    def _update_rows(self, position: int, tensors: Sequence[Tensor], entries: Entries, coefficients: Tensor) -> None:
        param, *buffers = (t[entries.index].contiguous() for t in tensors)
        rows = [param, entries.sums[entries.elected], *buffers]
        flat = [as_real(t).reshape(-1) for t in rows]
        kernel = self._kernels[position]
        kernel.run(UPDATE, [flat], coefficients.repeat(kernel.count, 1))
        for tensor, new in zip(tensors, (param, *buffers), strict=True):
            tensor.index_put_(entries.index, new)
