"""The multi-tensor lowering: one kernel per dtype signature reads the addresses of all tensors from a table.

A step is one call whatever the number of tensors and groups. The table holds addresses of parameters, gradients, state
and hyperparameters; it is refreshed when one of them changed, which compiles nothing. A tensor without a gradient has
address 0 there and is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from compiled_optim.events import EventLog, Signature, kernel_signature
from compiled_optim.fields import real_numel
from compiled_optim.lowering import cpp, triton
from compiled_optim.lowering.layout import Layout
from compiled_optim.lowering.rows import Kernel
from compiled_optim.plan import Plan
from compiled_optim.state import scalar_names

BACKENDS: dict[str, Callable[[Signature], Kernel]] = {"cpu": cpp.build, "cuda": triton.build}
"""By device type, what makes the kernel of a signature."""

_IS_CONTIGUOUS: Callable[..., bool] = Tensor.is_contiguous
_ADDRESS = Tensor.data_ptr

_kernels: dict[Signature, Kernel] = {}


def obtain_kernel(log: EventLog, signature: Signature, names: Sequence[str]) -> Kernel:
    """The process's kernel of ``signature``, for the parameters ``names`` of the optimizer that keeps ``log``."""
    return log.obtain(_kernels, signature, names, BACKENDS[signature.device])


class MultiTensorLowering:
    """Runs the step of one plan.

    Args:
        plan: the tensors.
        log: where compilations are recorded.
    """

    name = "multi_tensor"

    def __init__(self, plan: Plan, log: EventLog) -> None:
        self.plan = plan
        self._log = log
        self._tables: list[tuple[Kernel, Table]] = []

    def compile(self) -> None:
        """Make the kernels that do not exist yet, and the tables they read."""
        if self._tables:
            return
        positions: dict[Signature, list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(self.plan.members, self.plan.grad_dtypes, strict=True)):
            positions.setdefault(kernel_signature(self.plan, member, grad_dtype, "multi-tensor"), []).append(i)
        kernels = [
            obtain_kernel(self._log, signature, [self.plan.members[i].name for i in where])
            for signature, where in positions.items()
        ]
        self._tables = [(k, Table(self.plan, where, k.chunk)) for k, where in zip(kernels, positions.values(), strict=True)]

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Update every parameter of the plan whose entry in ``grads`` is not None."""
        for kernel, table in self._tables:
            held = table.refresh(grads if len(self._tables) == 1 else [grads[i] for i in table.positions])
            kernel(table)
            table.finish(held)


class Table:
    """Addresses, sizes and chunks of the tensors that share one kernel; see :class:`KernelTable` for what it holds."""

    def __init__(self, plan: Plan, positions: Sequence[int], chunk: int) -> None:
        self.positions = tuple(positions)
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
            [0] * len(members),
            *([m.state[name].data_ptr() for m in members] for name in plan.buffers),
        ]
        scalars = [[m.state[name].data_ptr() for m in members] for name in scalar_names(plan.rule)]
        groups = [plan.group_index[i] for i in positions]
        facts = [numels, groups, [plan.groups[g]["maximize"] for g in groups]]
        self.tensors = self._upload([*vectors, *scalars, *facts])
        self.chunks = self._upload([(t, c) for t, n in enumerate(numels) for c in range(-(-n // chunk))]).view(-1, 2)
        self.coefficients = torch.empty(
            len(members) * (len(plan.rule.coefficient_names) + 1), dtype=torch.float64, device=plan.device
        )
        self._grad_row = self.tensors[1].numpy() if plan.device.type == "cpu" else None
        self.elements = sum(numels)
        self.hypers = self._upload([])
        self._state_aligned = _aligned(address for row in vectors for address in row)
        self.aligned = self._state_aligned
        self._contiguous = all(layout.is_contiguous for layout in self._layouts)
        self._staged = [i for i, layout in enumerate(self._layouts) if layout.stage is not None]
        self._hyper_tensors: list[Tensor] = []  # held, so that no other tensor takes their addresses
        self._hyper_addresses: list[int] = []
        self._hyper_copies: list[tuple[Tensor, Tensor]] = []
        self._grad_addresses: list[int] = []

    def refresh(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Bring the table up to date with ``grads`` and the hyperparameters, for one run of its kernel.

        Returns the gradients that the kernel reads, in their parameters' memory order; :meth:`finish` takes them back.
        """
        whole = type(None) not in set(map(type, grads))
        if not (whole and self._contiguous and all(map(_IS_CONTIGUOUS, grads))):
            grads = [None if g is None else layout.arranged(g) for layout, g in zip(self._layouts, grads, strict=True)]
        # An empty gradient has no address, and 0 would say that there is no gradient.
        addresses = [0 if g is None else _ADDRESS(g) or 16 for g in grads]
        if addresses != self._grad_addresses:
            self._write_gradients(addresses)
        self.refresh_hypers()
        for i in self._staged:
            self._layouts[i].load()
        return grads

    def finish(self, grads: Sequence[Tensor | None]) -> None:
        """Copy stand-ins back into their parameters after the kernel ran."""
        for i in self._staged:
            if grads[i] is not None:
                self._layouts[i].store()

    def _write_gradients(self, addresses: list[int]) -> None:
        self._grad_addresses = addresses
        if self._grad_row is not None:
            self._grad_row[:] = addresses
        else:
            self.tensors[1].copy_(self._upload(addresses))
            self.aligned = self._state_aligned and _aligned(addresses)

    def refresh_hypers(self) -> None:
        """Write the addresses of hyperparameters that were assigned, and copy those that are not float64."""
        tensors = [t for group in self._groups for name in self._hyper_names for t in group.tensors(name)]
        addresses = list(map(Tensor.data_ptr, tensors))
        if addresses != self._hyper_addresses:
            read = [t if self._readable(t) else torch.empty((), dtype=torch.float64, device=self._device) for t in tensors]
            self._hyper_copies = [(own, t.detach()) for own, t in zip(read, tensors, strict=True) if own is not t]
            self.hypers = self._upload([t.data_ptr() for t in read])
            self._hyper_tensors, self._hyper_addresses = tensors, addresses
        for own, tensor in self._hyper_copies:
            own.copy_(tensor)

    def _readable(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.float64 and tensor.device == self._device

    def _upload(self, values: Sequence[object]) -> Tensor:
        """``values`` as int64 on the device, without waiting for it."""
        host = torch.tensor(values, dtype=torch.int64)
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


def _aligned(addresses: Iterable[int]) -> bool:
    return not any(address & 15 for address in addresses)
