"""The multi-tensor lowering: one kernel per dtype signature reads the addresses of all tensors from a table.

A step is one call whatever the number of tensors and groups. The table holds addresses of parameters, gradients, state
and hyperparameters; it is refreshed when one of them changed, which compiles nothing. A tensor without a gradient has
address 0 there and is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compiled_optim.addresses import EMPTY
from compiled_optim.controls import Controls
from compiled_optim.events import EventLog, Signature, kernel_signature
from compiled_optim.fields import real_numel
from compiled_optim.lowering import cpp, triton
from compiled_optim.lowering.layout import Layout
from compiled_optim.lowering.rows import Kernel
from compiled_optim.plan import Plan
from compiled_optim.state import scalar_names
from compiled_optim.torch_internals import is_capturing

BACKENDS: dict[str, Callable[[Signature], Kernel]] = {"cpu": cpp.build, "cuda": triton.build}
"""By device type, what makes the kernel of a signature."""

_kernels: dict[Signature, Kernel] = {}


def obtain_kernel(log: EventLog, signature: Signature, names: Sequence[str]) -> Kernel:
    """The process's kernel of ``signature``, for the parameters ``names`` of the optimizer that keeps ``log``."""
    return log.obtain(_kernels, signature, names, BACKENDS[signature.device])


def current_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes ``device`` the current one, on which Triton launches whatever the device of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class MultiTensorLowering:
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
        self.tables: list[tuple[Kernel, Table]] = []
        self._on_device = current_device(plan.device)

    def compile(self) -> None:
        """Make the kernels that do not exist yet, and the tables they read."""
        if self.tables:
            return
        if refusal := self.plan.addresses.refusal:
            self._log.fall_back(f"{self.plan.rule.name} looks at its tensors one by one: {refusal}", "a step takes longer")
        positions: dict[Signature, list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(self.plan.members, self.plan.grad_dtypes, strict=True)):
            positions.setdefault(kernel_signature(self.plan, member, grad_dtype, "multi-tensor"), []).append(i)
        kernels = [
            obtain_kernel(self._log, signature, [self.plan.members[i].name for i in where])
            for signature, where in positions.items()
        ]
        self.tables = [
            (kernel, Table(self.plan, self._controls, where, kernel, self._log, leads=self.plan.leads and index == 0))
            for index, (kernel, where) in enumerate(zip(kernels, positions.values(), strict=True))
        ]

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return bool(self.tables)

    def launch_key(self) -> tuple[object, ...]:
        """What a graph that holds :meth:`launch` depends on besides the memory of the tables; it stands for this object."""
        return (self, *(table.aligned for _, table in self.tables))

    def refresh(self) -> None:
        """Hand hyperparameters that were assigned over to kernels that run without :meth:`prepare`."""
        for _, table in self.tables:
            table.refresh()

    def copied(self) -> list[int]:
        """The addresses of the hyperparameters and controls that :meth:`prepare` copies, since kernels cannot read them."""
        return [address for _, table in self.tables for address in table.copied()]

    @property
    def square_sum_count(self) -> int:
        """How many partial sums :meth:`measure` writes."""
        return sum(kernel.square_sum_count(len(table.chunks)) for kernel, table in self.tables)

    def connect(self, own: Tensor, whole: Tensor) -> None:
        """Let :meth:`measure` write to ``own``, and the kernels read ``whole``."""
        counts = [kernel.square_sum_count(len(table.chunks)) for kernel, table in self.tables]
        for (_, table), piece in zip(self.tables, torch.split(own, counts), strict=True):
            table.square_sums, table.all_square_sums = piece, whole

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        """Bring the tables up to date with ``grads``, or the parameters' own gradients, and the hyperparameters."""
        apart = self.plan.addresses.unlike or any(table.is_staged for _, table in self.tables)
        arranged = self.plan.gradients(grads) if apart else None
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

    def finish(self) -> None:
        """Let go of the gradients."""
        for _, table in self.tables:
            table.finish()


class Table:
    """Addresses, sizes and chunks of the tensors that share one kernel; see :class:`KernelTable` for what it holds.

    Its memory stays where it is for as long as the table lives, so that a captured kernel can go on reading it.
    """

    def __init__(
        self, plan: Plan, controls: Controls, positions: Sequence[int], kernel: Kernel, log: EventLog, *, leads: bool
    ) -> None:
        self.positions = tuple(positions)
        self._plan = plan
        self._log = log
        self._controls = controls
        self._groups = plan.groups
        self._hyper_names = [h.name for h in plan.rule.hypers]
        self._device = plan.device
        members = [plan.members[i] for i in positions]
        self._layouts = [Layout(m.param) for m in members]
        for member, layout in zip(members, self._layouts, strict=True):
            for name in plan.buffers:
                member.state.set_quietly(name, layout.arranged(member.state[name]))
        numels = [real_numel(m.param) for m in members]
        vectors = [
            [layout.target.data_ptr() for layout in self._layouts],
            *([m.state[name].data_ptr() for m in members] for name in plan.buffers),
        ]
        scalars = [[m.state[name].data_ptr() for m in members] for name in scalar_names(plan.rule)]
        groups = [plan.group_index[i] for i in positions]
        facts = [numels, groups, [plan.groups[g]["maximize"] for g in groups]]
        self.tensors = self._upload([*vectors, *scalars, *facts])
        chunks = [(t, c) for t, n in enumerate(numels) for c in range(-(-n // kernel.chunk))]
        self.chunks = self._upload(chunks).view(-1, 2)
        self.coefficients = self._scratch(len(members) * (len(plan.rule.coefficient_names) + 1))
        self.outcome = controls.outcome(plan.device)
        self.square_sums = self.all_square_sums = self._scratch(0)
        self.leads = leads
        self.elements = sum(numels)
        self._host_grads = torch.zeros(len(members), dtype=torch.int64)
        self._row = self._host_grads.numpy()
        self._version = -1  # of the plan's addresses in this row
        self._own_grads = self._host_grads if plan.device.type == "cpu" else self._upload(self._row)
        self.grads = self._own_grads
        self._index = slice(None) if len(positions) == len(plan.members) else list(positions)
        self._hyper_tensors = self._read_hypers()  # held, so that no other tensor takes their addresses
        self.hypers = self._upload([0] * len(self._hyper_tensors))
        self._hyper_addresses: list[int] = []
        self._hyper_row: list[int] = []
        self._hyper_slots = self._scratch(len(self._hyper_tensors)).unbind()
        self._hyper_copies: list[tuple[Tensor, Tensor]] = []
        self._state_aligned = _aligned(np.array(vectors, dtype=np.int64))
        self.aligned = self._state_aligned
        self._staged = [i for i, layout in enumerate(self._layouts) if layout.stage is not None]
        self._held: Sequence[Tensor | None] = ()
        self._spare: Tensor | None = self._host_row()
        self._captured: list[Tensor] = []
        self._captured_last = False

    @property
    def is_staged(self) -> bool:
        """Whether stand-ins are updated in place of some parameters."""
        return bool(self._staged)

    def prepare(self, grads: Sequence[Tensor | None] | None) -> None:
        """Bring the table up to date with the gradients and the hyperparameters, for one run of its kernel.

        Args:
            grads: all gradients of the plan, where some have to be brought into their parameters' order; None where the
                plan's addresses say it all.
        """
        if grads is None:
            addresses = self._plan.addresses
            if changed := self._version != addresses.version:
                self._row[:] = addresses.gradients[self._index]
                self._version = addresses.version
        else:
            own = zip(self._layouts, [grads[i] for i in self.positions], strict=True)
            self._held = [None if g is None else layout.arranged(g) for layout, g in own]
            row = [0 if g is None else g.data_ptr() or EMPTY for g in self._held]
            if changed := row != self._row.tolist():
                self._row[:] = row
            self._version = -1
        self.refresh()
        if is_capturing(self._device):
            self._capture_gradients()
        elif changed or self._captured_last:
            self._write_gradients()
        for i in self._staged:
            self._layouts[i].load()

    def finish(self) -> None:
        """Copy stand-ins back into their parameters after the kernel ran, and let go of the gradients."""
        for i in self._staged:
            if self._held[i] is not None:
                self._layouts[i].store()
        self._held = ()

    def _write_gradients(self) -> None:
        self._log.table_refreshes += 1
        self.grads, self._captured_last = self._own_grads, False
        if self._device.type != "cpu":
            self.grads.copy_(self._host_grads.pin_memory(), non_blocking=True)
            self.aligned = self._state_aligned and _aligned(self._row)
        if self._spare is None:
            self._spare = self._host_row()

    def _capture_gradients(self) -> None:
        """Make writing the addresses a part of the graph that is being captured, in memory that no other step uses.

        So a replay finds its own gradients whatever steps were taken outside of the graph.
        """
        if self._spare is None:
            raise RuntimeError("a second step is being captured without a step in between; take one before capturing again")
        self._spare.numpy()[:] = self._row  # the host's work, now and not in a replay
        self.grads = torch.empty_like(self._own_grads).copy_(self._spare, non_blocking=True)
        self._captured += [
            self._spare,
            self.grads,
            *(t for copy in self._hyper_copies for t in copy),
        ]  # read by every replay
        self._spare, self._captured_last = None, True
        self.aligned = self._state_aligned and _aligned(self._row)

    def refresh(self) -> None:
        """Write the addresses of hyperparameters that were assigned, and copy those that are not float64.

        Raises:
            RuntimeError: an address would be written by the graph that is being captured, and again by every replay.
        """
        tensors = self._read_hypers()
        addresses = [t.data_ptr() for t in tensors]
        if addresses != self._hyper_addresses:
            read = [t if self._readable(t) else own for t, own in zip(tensors, self._hyper_slots, strict=True)]
            row = [t.data_ptr() for t in read]
            if row != self._hyper_row:
                if is_capturing(self._device):
                    raise RuntimeError(
                        "a hyperparameter was assigned between the last step and the capture of a CUDA graph, or in it; "
                        "take one step before capturing, or write into the hyperparameter with fill_"
                    )
                self._write(self.hypers, row)
            self._hyper_copies = [(own, t.detach()) for own, t in zip(read, tensors, strict=True) if own is not t]
            self._hyper_tensors, self._hyper_addresses, self._hyper_row = tensors, addresses, row
        for own, tensor in self._hyper_copies:
            own.copy_(tensor)

    def copied(self) -> list[int]:
        """The addresses of the tensors that :meth:`refresh` copies."""
        return [tensor.data_ptr() for _, tensor in self._hyper_copies]

    def _read_hypers(self) -> list[Tensor]:
        groups = [t for group in self._groups for name in self._hyper_names for t in group.tensors(name)]
        return self._controls.tensors(self._device) + groups

    def _readable(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.float64 and tensor.device == self._device

    def _scratch(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float64, device=self._device)

    def _host_row(self) -> Tensor:
        row = torch.empty_like(self._own_grads, device="cpu")
        return row.pin_memory() if self._device.type == "cuda" else row

    def _write(self, row: Tensor, values: Sequence[int]) -> None:
        """Write ``values`` into ``row``, which stays where it is, without waiting for the device."""
        self._log.table_refreshes += 1
        if self._device.type == "cpu":
            row.numpy()[:] = values
        else:
            row.copy_(torch.tensor(values, dtype=torch.int64).pin_memory(), non_blocking=True)

    def _upload(self, values: Sequence[object] | npt.NDArray[np.int64]) -> Tensor:
        """``values`` as int64 on the device, without waiting for it."""
        host = torch.tensor(values, dtype=torch.int64)
        return host if self._device.type == "cpu" else host.pin_memory().to(self._device, non_blocking=True)


def _aligned(addresses: npt.NDArray[np.int64]) -> bool:
    return not (addresses & 15).any()
