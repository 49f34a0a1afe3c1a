"""The multi-tensor lowering: one kernel per dtype signature reads the addresses of all tensors from a table.

A step is one call whatever the number of tensors and groups. The table holds addresses of parameters, gradients, state
and hyperparameters; it is refreshed when one of them changed, which compiles nothing. A tensor without a gradient has
address 0 there and is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compiled_optim.events import Compilation, EventLog, Signature, kernel_signature
from compiled_optim.fields import real_numel
from compiled_optim.lowering import cpp
from compiled_optim.plan import Plan
from compiled_optim.state import scalar_inits

_kernels: dict[Signature, Callable[..., None]] = {}


class MultiTensorLowering:
    """Runs the step of one plan on a CPU.

    Args:
        plan: the tensors.
        grad_dtypes: the dtype of each parameter's gradient.
        log: where compilations are recorded.
    """

    name = "multi_tensor"

    def __init__(self, plan: Plan, grad_dtypes: Sequence[torch.dtype], log: EventLog) -> None:
        self.plan = plan
        self._log = log
        positions: dict[Signature, list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, grad_dtypes, strict=True)):
            positions.setdefault(kernel_signature(plan, member, grad_dtype, "multi-tensor"), []).append(i)
        self._tables = [Table(plan, where, signature) for signature, where in positions.items()]

    def compile(self) -> None:
        """Make the kernels that do not exist yet."""
        for table in self._tables:
            if table.kernel is None:
                table.kernel = _kernels.get(table.signature) or self._compile(table)
                self._log.signatures |= {self.plan.members[i].name: table.signature for i in table.positions}

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Update every parameter of the plan whose entry in ``grads`` is not None."""
        for table in self._tables:
            table.step(grads if len(self._tables) == 1 else [grads[i] for i in table.positions])

    def _compile(self, table: Table) -> Callable[..., None]:
        signature = table.signature
        causes = (self._log.cause(self.plan.members[i].name, signature) for i in table.positions)
        cause = next((c for c in causes if c), "")
        self._log.before_compilation(cause, signature)
        started = time.perf_counter()
        kernel = cpp.build(cpp.source(self.plan.rule, self.plan.statics, signature))
        self._log.compilations.append(Compilation(str(signature), time.perf_counter() - started, cause))
        _kernels[signature] = kernel
        return kernel


class Table:
    """Addresses, sizes and chunks of the tensors that share one kernel.

    ``tensors`` is int64, a row for each of: parameter, gradient, buffers, scalars, number of elements, group, maximize.
    """

    def __init__(self, plan: Plan, positions: Sequence[int], signature: Signature) -> None:
        self.positions = tuple(positions)
        self.signature = signature
        self.kernel: Callable[..., None] | None = None
        self._groups = plan.groups
        self._hyper_names = [h.name for h in plan.rule.hypers]
        members = [plan.members[i] for i in positions]
        self._params = [m.param.detach() for m in members]
        self._layouts = [Layout(p) for p in self._params]
        for member, layout in zip(members, self._layouts, strict=True):
            for name in plan.buffers:
                member.state.set_quietly(name, layout.arranged(member.state[name]))
        numels = [real_numel(p) for p in self._params]
        rows = [
            [layout.address(p) for layout, p in zip(self._layouts, self._params, strict=True)],
            [0] * len(members),
            *([m.state[name].data_ptr() for m in members] for name in (*plan.buffers, *scalar_inits(plan.rule))),
            numels,
            [plan.group_index[i] for i in positions],
            [int(plan.groups[plan.group_index[i]]["maximize"]) for i in positions],
        ]
        self.tensors = torch.tensor(rows, dtype=torch.int64)
        self.chunks = torch.tensor(
            [(t, start) for t, numel in enumerate(numels) for start in range(0, numel, cpp.CHUNK)], dtype=torch.int64
        ).view(-1, 2)
        self._all_contiguous = all(layout.is_contiguous for layout in self._layouts)
        self._staged = [layout for layout in self._layouts if layout.stage is not None]
        self._coefficients = torch.empty(len(members), len(plan.rule.coefficient_names) + 1, dtype=torch.float64)
        self._hypers = torch.empty(len(plan.groups), max(1, sum(h.length for h in plan.rule.hypers)), dtype=torch.int64)
        self._hyper_addresses: list[int] = []
        self._hyper_copies: list[tuple[Tensor, Tensor]] = []
        self._grad_addresses: list[int] = []

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Refresh the table and run the kernel."""
        kept = self._refresh_gradients(grads)
        self._refresh_hypers()
        for layout in self._staged:
            layout.load()
        assert self.kernel is not None
        self.kernel(
            self.tensors.data_ptr(),
            self._hypers.data_ptr(),
            self.chunks.data_ptr(),
            self._coefficients.data_ptr(),
            self.tensors.shape[1],
            len(self.chunks),
            torch.get_num_threads(),
        )
        del kept
        for layout, grad in zip(self._layouts, grads, strict=True) if self._staged else ():
            if layout.stage is not None and grad is not None:
                layout.store()

    def _refresh_gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Write the gradients' addresses; returns the rearranged copies, which must outlive the kernel."""
        copies: list[Tensor] = []
        if None.__class__ in set(map(type, grads)) or not self._all_contiguous or not all(map(Tensor.is_contiguous, grads)):  # type: ignore[arg-type]
            arranged = [None if g is None else layout.arranged(g) for layout, g in zip(self._layouts, grads, strict=True)]
            copies = [a for a in arranged if a is not None]
            addresses = [0 if a is None else a.data_ptr() for a in arranged]
        else:
            addresses = list(map(Tensor.data_ptr, grads))  # type: ignore[arg-type]
        if addresses != self._grad_addresses:
            self.tensors[1] = torch.tensor(addresses)
            self._grad_addresses = addresses
        return copies

    def _refresh_hypers(self) -> None:
        """Write the hyperparameters' addresses if an assignment changed one, and copy those that are not float64."""
        tensors = [t for group in self._groups for name in self._hyper_names for t in group.tensors(name)]
        addresses = list(map(Tensor.data_ptr, tensors))
        if addresses != self._hyper_addresses:
            owned = [t if t.dtype == torch.float64 and t.device.type == "cpu" else t.new_empty((), dtype=torch.float64, device="cpu") for t in tensors]
            self._hyper_copies = [(own, t) for own, t in zip(owned, tensors, strict=True) if own is not t]
            self._hypers = torch.tensor([t.data_ptr() for t in owned]).view(len(self._groups), -1)
            self._hyper_addresses = addresses
        for own, tensor in self._hyper_copies:
            own.copy_(tensor)


class Layout:
    """How a parameter lies in memory, and a dense stand-in for one whose memory has gaps or overlaps."""

    def __init__(self, param: Tensor) -> None:
        self._param = param
        self.stage = None if is_dense(param) else torch.empty_like(param)
        self._strides = (param if self.stage is None else self.stage).stride()
        self.is_contiguous = self.stage is None and param.is_contiguous()

    def address(self, param: Tensor) -> int:
        """The address the kernel works on."""
        return (param if self.stage is None else self.stage).data_ptr()

    def arranged(self, tensor: Tensor) -> Tensor:
        """``tensor`` with this layout: itself where it has it, else a copy."""
        if tensor.stride() == self._strides and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        return torch.empty_strided(self._param.shape, self._strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def load(self) -> None:
        """Copy the parameter into its stand-in."""
        assert self.stage is not None
        self.stage.copy_(self._param)

    def store(self) -> None:
        """Copy the stand-in back into the parameter."""
        assert self.stage is not None
        self._param.copy_(self.stage)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` fill its memory without gaps or overlaps, in any order of dimensions."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
