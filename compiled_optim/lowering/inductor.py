"""The lowering through torch.compile and Inductor: C++ on a CPU, Triton on a GPU.

One kernel per :class:`Signature` serves every tensor and every optimizer of the process. Its first dimension may have any
size, so neither the number of tensors nor their shapes compile anything. Small tensors are packed: their state lives in
rows of a few shared buffers, parameters and gradients are copied through two more, and one call updates them all. Large
tensors are updated where they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from compiled_optim.controls import Controls
from compiled_optim.events import EventLog
from compiled_optim.lowering.layout import Layout, compute_dtype, flat, real_numel
from compiled_optim.lowering.recent import Recent
from compiled_optim.lowering.rule_step import rule_step
from compiled_optim.lowering.staged import StagedLowering
from compiled_optim.plan import Plan
from compiled_optim.signature import Signature, kernel_signature
from compiled_optim.torch_internals import compile_graph, without_memory

Kernel: TypeAlias = Callable[[int, list[Tensor]], None]

ROW = 128  # elements in a row of packed tensors: one tensor's coefficients hold for a whole row
PACKED_LIMIT = 16384  # elements below which copying a tensor costs less than a call of its own

_INDICES = (1 << 31) - (1 << 16)
"""How many elements code for an accelerator tells apart that was made for few: the last block's indices have 32 bits too."""

OPTIONS = {"cpp.dynamic_threads": True}  # follow torch.set_num_threads
_kernels: dict[Signature, Kernel | str] = {}  # or why there is none
_serial = itertools.count()


def obtain_kernel(log: EventLog, signature: Signature, names: Sequence[str]) -> Kernel:
    """The process's kernel of ``signature``, for the parameters ``names`` of the optimizer that keeps ``log``."""
    return log.obtain_or_fall_back(_kernels, signature, names, _make, _uncompiled)


def fits_indices(device: torch.device, elements: int) -> bool:
    """Whether Inductor's code for ``device`` can count so many elements."""
    return device.type == "cpu" or elements <= _INDICES


def say_too_large(log: EventLog, name: str) -> None:
    """Record that the parameter ``name`` runs uncompiled because of its size."""
    log.fall_back(
        f"'{name}' is updated with plain torch operations: it has {_INDICES} elements or more",
        "a step takes longer, and more memory; split the parameter",
    )


class InductorLowering(StagedLowering):
    """Runs the step of one plan.

    Args:
        plan: the tensors.
        controls: what holds for the whole step.
        log: where compilations and fallbacks are recorded.
    """

    name = "inductor"

    def __init__(self, plan: Plan, controls: Controls, log: EventLog) -> None:
        super().__init__(plan, controls)
        self._log = log
        positions: dict[tuple[Signature, bool], list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            if member.param.numel() > 0:
                small = member.param.numel() < PACKED_LIMIT
                signature = kernel_signature(plan, member, grad_dtype, "packed" if small else "in place")
                fits = fits_indices(plan.device, real_numel(member.param))
                positions.setdefault((signature, fits), []).append(i)
        self._parts = {_LAYOUTS[s.layout](plan, where, s): fits for (s, fits), where in positions.items()}

    def compile(self) -> None:
        """Make the kernels that do not exist yet."""
        for part, fits in self._parts.items():
            if part.kernel is None:
                names = [self.plan.members[i].name for i in part.positions]
                if fits:
                    part.kernel = obtain_kernel(self._log, part.signature, names)
                else:
                    say_too_large(self._log, names[0])
                    part.kernel = _uncompiled(part.signature)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return all(part.kernel is not None for part in self._parts)

    def launch(self) -> None:
        """Update every parameter of the plan that has a prepared gradient."""
        coefficients, _ = self._advance()
        for part in self._parts:
            part.step(self._grads, coefficients)


class Packed:
    """Tensors copied through (rows, ROW) buffers, in which each owns whole rows and keeps its state.

    One spare row at the end keeps the number of rows above one, where Inductor's code for any size begins.
    """

    def __init__(self, plan: Plan, positions: Sequence[int], signature: Signature) -> None:
        self.positions = tuple(positions)
        self.signature = signature
        self.kernel: Kernel | None = None
        members = [plan.members[i] for i in positions]
        self._params = [m.param.detach() for m in members]
        self._rows = [-(-real_numel(p) // ROW) for p in self._params]
        count = sum(self._rows) + 1
        owners = torch.tensor([*positions, positions[-1]], device="cpu")
        repeats = torch.tensor([*self._rows, 1], device="cpu")
        self._owner = owners.repeat_interleave(repeats, output_size=count).to(plan.device)
        self._param, self._grad = (
            torch.zeros(count, ROW, dtype=getattr(torch, d), device=plan.device)
            for d in (signature.param_dtype, signature.grad_dtype)
        )
        self._buffers = [
            torch.zeros(count, ROW, dtype=getattr(torch, d), device=plan.device) for d in signature.buffer_dtypes
        ]
        self._param_views = self._views(self._param)
        self._grad_views = self._views(self._grad)
        for name, packed in zip(plan.buffers, self._buffers, strict=True):
            views = self._views(packed)
            for member, view in zip(members, views, strict=True):
                member.put(name, view.copy_(member.entries[name]))
        self._dtype = compute_dtype(self._param.dtype)
        self._subsets: Recent[tuple[int, ...], Tensor] = Recent(256)

    def step(self, grads: Sequence[Tensor | None], coefficients: Tensor) -> None:
        """Update the tensors whose entry in ``grads``, over the whole plan, is not None."""
        assert self.kernel is not None
        here = tuple(k for k, i in enumerate(self.positions) if grads[i] is not None)
        if not here:
            return
        new = [grad for grad in (grads[i] for i in self.positions) if grad is not None]
        whole = len(here) == len(self.positions)
        params, param_views, grad_views = (
            items if whole else [items[k] for k in here] for items in (self._params, self._param_views, self._grad_views)
        )
        torch._foreach_copy_(param_views, params)
        torch._foreach_copy_(grad_views, new)
        tensors = [self._param, self._grad, *self._buffers]
        owner = self._owner
        if not whole:
            rows = self._subsets.get(here, self._rows_of)
            tensors = [t.index_select(0, rows) for t in tensors]
            owner = owner[rows]
        columns = coefficients.to(self._dtype).index_select(1, owner).unsqueeze(2).unbind()
        self.kernel(len(owner), [*tensors, *columns])
        if not whole:
            for full, part in zip((self._param, *self._buffers), (tensors[0], *tensors[2:]), strict=True):
                full.index_copy_(0, rows, part)
        torch._foreach_copy_(params, param_views)

    @staticmethod
    def example(signature: Signature) -> tuple[list[Tensor], list[bool]]:
        """Tensors to compile with, and which of them have a first dimension of any size."""
        tensors = [torch.zeros(64, ROW, dtype=dtype, device=signature.device) for dtype in signature.dtypes]
        dtype = compute_dtype(tensors[0].dtype)
        count = len(signature.rule.coefficient_names) + 2
        tensors += [torch.ones(64, 1, dtype=dtype, device=signature.device) for _ in range(count)]
        return tensors, [True] * len(tensors)

    def _rows_of(self, here: tuple[int, ...]) -> Tensor:
        starts = [0, *itertools.accumulate(self._rows)]
        rows = [r for k in here for r in range(starts[k], starts[k + 1])]
        return torch.tensor([*rows, starts[-1]], device=self._owner.device)

    def _views(self, packed: Tensor) -> list[Tensor]:
        pieces = torch.split(packed.view(-1)[: sum(self._rows) * ROW], [r * ROW for r in self._rows])
        return [
            torch.view_as_complex(piece[: 2 * p.numel()].view(*p.shape, 2))
            if p.is_complex()
            else piece[: p.numel()].view(p.shape)
            for p, piece in zip(self._params, pieces, strict=True)
        ]


class InPlace:
    """Tensors updated one by one where they are, as 1-D views in memory order."""

    def __init__(self, plan: Plan, positions: Sequence[int], signature: Signature) -> None:
        self.positions = tuple(positions)
        self.signature = signature
        self.kernel: Kernel | None = None
        members = [plan.members[i] for i in positions]
        self._index = torch.tensor(positions, device=plan.device)
        self._layouts = [Layout(m.param) for m in members]
        for member, layout in zip(members, self._layouts, strict=True):
            for name in plan.buffers:
                member.put(name, layout.arranged(member.entries[name]))
        self._flat = [
            [flat(t) for t in (layout.target, *(m.entries[name] for name in plan.buffers))]
            for m, layout in zip(members, self._layouts, strict=True)
        ]
        self._dtype = compute_dtype(getattr(torch, signature.param_dtype))
        count = len(signature.rule.coefficient_names) + 2
        self._coefficients = torch.empty(count, len(positions), dtype=self._dtype, device=plan.device)
        self._columns = [list(column.unbind()) for column in self._coefficients.unbind(1)]

    def step(self, grads: Sequence[Tensor | None], coefficients: Tensor) -> None:
        """Update the tensors whose entry in ``grads``, over the whole plan, is not None."""
        assert self.kernel is not None
        torch.index_select(coefficients.to(self._dtype), 1, self._index, out=self._coefficients)
        for position, layout, (target, *buffers), column in zip(
            self.positions, self._layouts, self._flat, self._columns, strict=True
        ):
            grad = grads[position]
            if grad is not None:
                layout.load()
                self.kernel(target.numel(), [target, flat(layout.arranged(grad)), *buffers, *column])
                layout.store()

    @staticmethod
    def example(signature: Signature) -> tuple[list[Tensor], list[bool]]:
        """Tensors to compile with, and which of them have a first dimension of any size."""
        tensors = [torch.zeros(64 * ROW, dtype=dtype, device=signature.device) for dtype in signature.dtypes]
        dtype = compute_dtype(tensors[0].dtype)
        count = len(signature.rule.coefficient_names) + 2
        scalars = [torch.ones((), dtype=dtype, device=signature.device) for _ in range(count)]
        return tensors + scalars, [True] * len(tensors) + [False] * count


_LAYOUTS: dict[str, type[Packed | InPlace]] = {"packed": Packed, "in place": InPlace}


def _make(signature: Signature) -> Kernel | str:
    with without_memory():
        tensors, dynamic = _LAYOUTS[signature.layout].example(signature)
        graph = compile_graph(_kernel_function(signature), tensors, [[0] if d else [] for d in dynamic], OPTIONS)
    example = len(tensors[0])
    if isinstance(graph, str):
        return graph

    def kernel(size: int, tensors: list[Tensor]) -> None:
        graph({example: size}, tensors)

    return kernel


def _uncompiled(signature: Signature) -> Kernel:
    function = _kernel_function(signature)
    return lambda size, tensors: function(*tensors)


def _kernel_function(signature: Signature) -> Callable[..., None]:
    """The function to compile, with a code object and a name of its own.

    Dynamo's recompile limit counts per code object, and it remembers the shapes it saw per name.
    """
    update = rule_step(signature.rule, dict(signature.statics))
    count = len(signature.buffer_dtypes)

    def kernel(param: Tensor, grad: Tensor, *rest: Tensor) -> None:
        buffers = rest[:count]
        new_param, new_buffers = update(param, grad, buffers, rest[count:])
        param.copy_(new_param)
        for old, new in zip(buffers, new_buffers, strict=True):
            old.copy_(new)

    kernel.__code__ = kernel.__code__.replace(co_name=f"{signature.rule.name}_{next(_serial)}")
    return kernel
