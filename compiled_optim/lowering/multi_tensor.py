"""The multi-tensor lowering: one kernel per dtype signature reads the addresses of all tensors from a table.

A step is one call whatever the number of tensors and groups. The table holds addresses of parameters, gradients, state
and hyperparameters; it is refreshed when one of them changed, which compiles nothing. A tensor without a gradient has
address 0 there and is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from compiled_optim.events import EventLog, Signature, kernel_signature
from compiled_optim.fields import real_numel
from compiled_optim.lowering import cpp
from compiled_optim.lowering.layout import Layout
from compiled_optim.plan import Plan
from compiled_optim.state import scalar_inits

Kernel: TypeAlias = Callable[..., None]

_kernels: dict[Signature, Kernel] = {}


class MultiTensorLowering:
    """Runs the step of one plan on a CPU.

    Args:
        plan: the tensors.
        log: where compilations are recorded.
    """

    name = "multi_tensor"

    def __init__(self, plan: Plan, log: EventLog) -> None:
        self.plan = plan
        self._log = log
        positions: dict[Signature, list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            positions.setdefault(kernel_signature(plan, member, grad_dtype, "multi-tensor"), []).append(i)
        self._tables = [Table(plan, where, signature) for signature, where in positions.items()]

    def compile(self) -> None:
        """Make the kernels that do not exist yet."""
        for table in self._tables:
            if table.kernel is None:
                names = [self.plan.members[i].name for i in table.positions]
                table.kernel = self._log.obtain(_kernels, table.signature, names, self._build)

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Update every parameter of the plan whose entry in ``grads`` is not None."""
        for table in self._tables:
            table.step(grads if len(self._tables) == 1 else [grads[i] for i in table.positions])

    def _build(self, signature: Signature) -> Kernel:
        return cpp.build(cpp.source(self.plan.rule, self.plan.statics, signature))


class Table:
    """Addresses, sizes and chunks of the tensors that share one kernel.

    ``_tensors`` is int64, a row for each of: parameter, gradient, buffers, scalars, number of elements, group, maximize.
    """

    def __init__(self, plan: Plan, positions: Sequence[int], signature: Signature) -> None:
        self.positions = tuple(positions)
        self.signature = signature
        self.kernel: Kernel | None = None
        self._groups = plan.groups
        self._hyper_names = [h.name for h in plan.rule.hypers]
        members = [plan.members[i] for i in positions]
        self._layouts = [Layout(m.param) for m in members]
        for member, layout in zip(members, self._layouts, strict=True):
            for name in plan.buffers:
                member.state.set_quietly(name, layout.arranged(member.state[name]))
        numels = [real_numel(m.param) for m in members]
        rows = [
            [layout.target.data_ptr() for layout in self._layouts],
            [0] * len(members),
            *([m.state[name].data_ptr() for m in members] for name in (*plan.buffers, *scalar_inits(plan.rule))),
            numels,
            [plan.group_index[i] for i in positions],
            [plan.groups[plan.group_index[i]]["maximize"] for i in positions],
        ]
        self._tensors = torch.tensor(rows, dtype=torch.int64)
        chunks = [(t, start) for t, numel in enumerate(numels) for start in range(0, numel, cpp.CHUNK)]
        self._chunks = torch.tensor(chunks, dtype=torch.int64).view(-1, 2)
        self._contiguous = all(layout.is_contiguous for layout in self._layouts)
        self._staged = [i for i, layout in enumerate(self._layouts) if layout.stage is not None]
        self._coefficients = torch.empty(len(members), len(plan.rule.coefficient_names) + 1, dtype=torch.float64)
        self._hypers = torch.empty(0, dtype=torch.int64)
        self._hyper_addresses: list[int] = []
        self._hyper_copies: list[tuple[Tensor, Tensor]] = []
        self._grad_addresses: list[int] = []

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Bring the table up to date and run the kernel."""
        assert self.kernel is not None
        arranged = self._arranged(grads)
        self._refresh_gradients(arranged)
        self._refresh_hypers()
        for i in self._staged:
            self._layouts[i].load()
        self.kernel(
            self._tensors.data_ptr(),
            self._hypers.data_ptr(),
            self._chunks.data_ptr(),
            self._coefficients.data_ptr(),
            len(arranged),
            len(self._chunks),
            torch.get_num_threads(),
        )
        for i in self._staged:
            if arranged[i] is not None:
                self._layouts[i].store()

    def _arranged(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients in their parameters' memory order, copied where they have another."""
        if self._contiguous and all(g is None or g.is_contiguous() for g in grads):
            return grads
        return [None if g is None else layout.arranged(g) for layout, g in zip(self._layouts, grads, strict=True)]

    def _refresh_gradients(self, grads: Sequence[Tensor | None]) -> None:
        addresses = [0 if g is None else g.data_ptr() or 1 for g in grads]  # an empty gradient has no address
        if addresses != self._grad_addresses:
            self._tensors[1] = torch.tensor(addresses)
            self._grad_addresses = addresses

    def _refresh_hypers(self) -> None:
        """Write the addresses of hyperparameters that were assigned, and copy those that are not float64."""
        tensors = [t for group in self._groups for name in self._hyper_names for t in group.tensors(name)]
        addresses = [t.data_ptr() for t in tensors]
        if addresses != self._hyper_addresses:
            read = [t if t.dtype == torch.float64 else torch.empty((), dtype=torch.float64) for t in tensors]
            self._hyper_copies = [(own, t) for own, t in zip(read, tensors, strict=True) if own is not t]
            self._hypers = torch.tensor([t.data_ptr() for t in read]).view(len(self._groups), -1)
            self._hyper_addresses = addresses
        for own, tensor in self._hyper_copies:
            own.copy_(tensor)
