"""The multi-tensor lowering: one kernel per dtype signature reads the addresses of all tensors from a table.

A step is one call whatever the number of tensors and groups. The table holds addresses of parameters, gradients, state
and hyperparameters; it is refreshed when one of them changed, which compiles nothing. A tensor without a gradient has
address 0 there and is left alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from compiled_optim import addresses
from compiled_optim.addresses import EMPTY
from compiled_optim.controls import Controls
from compiled_optim.events import EventLog
from compiled_optim.lowering import cpp, triton
from compiled_optim.lowering.address_rows import GradientRow, HyperRow, pieces, tensor_rows, upload
from compiled_optim.lowering.interface import Capturable
from compiled_optim.lowering.kernel_table import Kernel
from compiled_optim.lowering.layout import Layout, has_memory, real_numel
from compiled_optim.plan import Plan
from compiled_optim.signature import MULTI_TENSOR, Signature, kernel_signature

BACKENDS: dict[str, Callable[[Signature], Kernel]] = {"cpu": cpp.build, "cuda": triton.build}
"""By device type, what makes the kernel of a signature."""

_kernels: dict[Signature, Kernel] = {}


def obtain_kernel(log: EventLog, signature: Signature, names: Sequence[str]) -> Kernel:
    """The process's kernel of ``signature``, for the parameters ``names`` of the optimizer that keeps ``log``."""
    return log.obtain(_kernels, signature, names, BACKENDS[signature.device])


def current_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes ``device`` the current one, on which Triton launches whatever the device of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class MultiTensorLowering(Capturable):
    """Runs the step of one plan.

    Args:
        plan: the tensors.
        controls: what holds for the whole step.
        log: where compilations are recorded.
    """

    name = "multi_tensor"

    def __init__(self, plan: Plan, controls: Controls, log: EventLog) -> None:
        self.plan = plan
        self._controls = controls
        self._log = log
        self._hypers = HyperRow(plan, controls, log)
        self.tables: list[tuple[Kernel, Table]] = []
        self._on_device = current_device(plan.device)

    def compile(self) -> None:
        """Make the kernels that do not exist yet, and the tables they read."""
        if self.tables:
            return
        positions: dict[Signature, list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(self.plan.members, self.plan.grad_dtypes, strict=True)):
            positions.setdefault(kernel_signature(self.plan, member, grad_dtype, MULTI_TENSOR), []).append(i)
        kernels = [
            obtain_kernel(self._log, signature, [self.plan.members[i].name for i in where])
            for signature, where in positions.items()
        ]
        if isinstance(refusal := addresses.reader(), str):
            self._log.fall_back(f"{self.plan.rule.name} looks at its tensors one by one: {refusal}", "a step takes longer")
        self.tables = [
            (kernel, self._table(where, kernel, leads=self.plan.leads and index == 0))
            for index, (kernel, where) in enumerate(zip(kernels, positions.values(), strict=True))
        ]

    def _table(self, positions: Sequence[int], kernel: Kernel, *, leads: bool) -> Table:
        return Table(self.plan, self._controls, positions, kernel, self._hypers, self._log, leads=leads)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return bool(self.tables)

    @property
    def square_sum_count(self) -> int:
        """How many partial sums :meth:`measure` writes."""
        return sum(kernel.square_sum_count(len(table.stretches)) for kernel, table in self.tables)

    def connect(self, own: Tensor, whole: Tensor) -> None:
        """Let :meth:`measure` write to ``own``, and the kernels read ``whole``."""
        counts = [kernel.square_sum_count(len(table.stretches)) for kernel, table in self.tables]
        for (_, table), piece in zip(self.tables, torch.split(own, counts), strict=True):
            table.square_sums, table.all_square_sums = piece, whole

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Bring the tables up to date with ``grads``, or the parameters' own gradients, and the hyperparameters."""
        apart = self.plan.addresses.unlike or any(table.is_staged for _, table in self.tables)
        arranged = self.plan.gradients(grads) if apart else None
        self._hypers.refresh()
        for _, table in self.tables:
            table.prepare(arranged)

    def measure(self) -> None:
        """Write the partial sums of the squares of the prepared gradients."""
        with self._on_device:
            for kernel, table in self.tables:
                kernel.measure(table)

    def launch(self) -> None:
        """Update every parameter of the plan that has a prepared gradient."""
        with self._on_device:
            for kernel, table in self.tables:
                kernel(table)

    @contextlib.contextmanager
    def uploading_later(self, steps: int) -> Iterator[None]:
        """Leave uploads of a capture of ``steps`` steps to the end of the ``with`` block."""
        with contextlib.ExitStack() as stack:
            for _, table in self.tables:
                stack.enter_context(table.gradients.uploading_later(steps))
            yield

    def finish(self) -> None:
        """Let go of the gradients, and let autograd know that the parameters have changed."""
        for _, table in self.tables:
            table.finish()
        self.plan.finish()


def _address(grad: Tensor) -> int:
    assert has_memory(grad), "a gradient without memory must have been copied or refused"
    return grad.data_ptr() if grad.numel() else EMPTY


class Table:
    """Addresses, sizes and pieces of the tensors that share one kernel; see :class:`KernelTable` for what it holds."""

    def __init__(
        self,
        plan: Plan,
        controls: Controls,
        positions: Sequence[int],
        kernel: Kernel,
        hypers: HyperRow,
        log: EventLog,
        *,
        leads: bool,
    ) -> None:
        self.positions = tuple(positions)
        self._plan = plan
        members = [plan.members[i] for i in positions]
        self._layouts = [Layout(m.param) for m in members]
        for member, layout in zip(members, self._layouts, strict=True):
            for name in plan.buffers:
                member.put(name, layout.arranged(member.entries[name]))
        numels = [real_numel(m.param) for m in members]
        data = [
            [layout.target.data_ptr() for layout in self._layouts],
            *([m.entries[name].data_ptr() for m in members] for name in plan.buffers),
        ]
        self.tensors = tensor_rows(plan, positions, data, numels)
        self.chunks = upload(pieces(numels, kernel.chunk), plan.device)
        self.stretches = upload(pieces(numels, kernel.stretch), plan.device)
        scratch = functools.partial(torch.empty, dtype=torch.float64, device=plan.device)
        self.coefficients = scratch(1 + len(plan.rule.coefficient_names), len(members))
        self.outcome = controls.outcome(plan.device)
        self.square_sums = self.all_square_sums = scratch(0)
        self.leads = leads
        self.elements = sum(numels)
        self.hypers = hypers.row
        self.gradients = GradientRow(len(members), plan.device, log)
        self._version = -1  # of the plan's addresses that the kernel knows
        self._index = slice(None) if len(positions) == len(plan.members) else list(positions)
        self._staged = [i for i, layout in enumerate(self._layouts) if layout.stage is not None]
        self._held: Sequence[Tensor | None] = ()

    @property
    def grads(self) -> Tensor:
        """The addresses of the gradients."""
        return self.gradients.row

    @property
    def is_staged(self) -> bool:
        """Whether stand-ins are updated in place of some parameters."""
        return bool(self._staged)

    def prepare(self, grads: Sequence[Tensor | None] | None) -> None:
        """Bring the table up to date with the gradients, for one run of its kernel.

        Args:
            grads: all gradients of the plan, where some have to be brought into their parameters' order; None where the
                plan's addresses say it all.
        """
        found = self._plan.addresses
        if grads is None:
            self.gradients.publish(found.gradients[self._index] if self._version != found.version else None)
            self._version = found.version
        else:
            self._version = -1
            own = zip(self._layouts, [grads[i] for i in self.positions], strict=True)
            self._held = [None if g is None else layout.arranged(g) for layout, g in own]
            self.gradients.publish([0 if g is None else _address(g) for g in self._held])
        for i in self._staged:
            self._layouts[i].load()

    def finish(self) -> None:
        """Copy stand-ins back into their parameters after the kernel ran, and let go of the gradients."""
        for i in self._staged:
            if self._held[i] is not None:
                self._layouts[i].store()
        self._held = ()
