"""The multi-tensor lowering: one kernel per dtype key reads the addresses of all tensors from a table.

A step is one call whatever the number of tensors and groups, and one more for each further key. The tables hold addresses of
parameters, gradients, state and hyperparameters. They are brought up to date when one of them changed, which compiles
nothing. A gradient that is absent has the address 0, and its parameter is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from compiled_optim.lowering.interface import Capturable
from compiled_optim.lowering.kernels import cpp, triton
from compiled_optim.lowering.kernels.table import (
    CoefficientTable,
    GradientPointers,
    HyperPointers,
    Kernel,
    pieces,
    spans,
    upload,
)
from compiled_optim.memory import addresses
from compiled_optim.memory.addresses import EMPTY
from compiled_optim.memory.layout import add_over_shards, has_memory, real_numel
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.compilations import MULTI_TENSOR, CompilationLog, KernelKey, kernel_key
from compiled_optim.plan.plan import Plan

BACKENDS: dict[str, Callable[[KernelKey], Kernel]] = {"cpu": cpp.CppKernel, "cuda": triton.TritonKernel}
"""By device type, what makes the kernel of a key."""

_kernels: dict[KernelKey, Kernel] = {}


def obtain_kernel(log: CompilationLog, key: KernelKey, names: Sequence[str]) -> Kernel:
    """The process's kernel of ``key``, for the parameters ``names`` of the optimizer that keeps ``log``."""
    return log.obtain(_kernels, key, names, BACKENDS[key.device])


def current_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes ``device`` the current one, on which Triton launches whatever the device of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class MultiTensorLowering(Capturable):
    """Runs the step of one plan with one kernel per dtype key."""

    name = "multi_tensor"

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        self.plan = plan
        self._clipping = clipping
        self._log = log
        self._hypers = HyperPointers(plan, clipping, log)
        self._stages = plan.rule.stages(plan.statics)
        self.parts: list[Part] = []
        self._on_device = current_device(plan.device)

    def compile(self) -> None:
        if self.parts:
            return
        positions: dict[KernelKey, list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(self.plan.members, self.plan.grad_dtypes, strict=True)):
            positions.setdefault(kernel_key(self.plan, member, grad_dtype, MULTI_TENSOR), []).append(i)
        kernels = [
            obtain_kernel(self._log, key, [self.plan.members[i].name for i in where]) for key, where in positions.items()
        ]
        if isinstance(refusal := addresses.reader(), str):
            self._log.fall_back(f"{self.plan.rule.name} looks at its tensors one by one: {refusal}", "a step takes longer")
        self._tensors = PlanTensors(self.plan)
        self._table = CoefficientTable(self.plan, self._clipping, self._hypers, self._log)
        if self._stages:  # by these, kernels divide
            self._counts = upload([max(n, 1) for n in self._tensors.whole_numels], self.plan.device).double()
        expressions = max((p.sums.stop - p.sums.start for p in self._stages.values()), default=0)
        self.parts = [
            Part(kernel, self._tensors, self._table.gradients, where, expressions)
            for kernel, where in zip(kernels, positions.values(), strict=True)
        ]

    @property
    def is_compiled(self) -> bool:
        return bool(self.parts)

    @property
    def square_sum_count(self) -> int:
        return sum(part.square_sum_count for part in self.parts)

    def connect(self, square_sums: Tensor, all_square_sums: Tensor) -> None:
        counts = [part.square_sum_count for part in self.parts]
        for part, sums in zip(self.parts, torch.split(square_sums, counts), strict=True):
            part.square_sums = sums
        self._table.all_square_sums = all_square_sums

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        self._hypers.prepare()
        apart = self.plan.addresses.unlike or self._tensors.stand_ins
        self._tensors.prepare(self.plan.gradients(grads) if apart else None, self._table.gradients)

    def measure(self) -> None:
        with self._on_device:
            for part in self.parts:
                part.kernel.measure(part)

    def launch(self) -> None:
        if self._stages:
            for _ in self.launch_in_stages():
                raise AssertionError("totals are over all plans")
            return
        first, *others = self.parts
        with self._on_device:
            first.kernel.step(first, self._table)
            for part in others:
                part.kernel.update(part, self._table)

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        numbers = self._table.coefficients[1:]
        with self._on_device:
            self.parts[0].kernel.evaluate(self._table)
        for stage, places in self._stages.items():
            with self._on_device:
                for part in self.parts:
                    part.kernel.average(stage, part, self._table)
            if self.plan.sharded:
                add_over_shards(numbers[places.sums], self.plan.params[0])
            if places.totals.start < places.totals.stop:
                sums = torch.where(self._table.gradients.pointers != 0, numbers[places.totals] * self._counts, 0.0).sum(1)
                numbers[places.given] = (yield sums).unsqueeze(1)
        with self._on_device:
            for part in self.parts:
                part.kernel.update(part, self._table)

    def finish(self) -> None:
        self._tensors.finish()
        self.plan.finish()


class Part:
    """The tensors of a plan that one kernel updates: a ``MeasuredTable`` of ``kernels.table``.

    They are those at ``positions`` of the plan's ``tensors``. ``expressions`` is the most that a reduction returns.
    """

    def __init__(
        self, kernel: Kernel, tensors: PlanTensors, gradients: GradientPointers, positions: Sequence[int], expressions: int
    ) -> None:
        self.kernel = kernel
        self.tensors = tensors.table
        self._gradients = gradients
        numels = [tensors.numels[i] for i in positions]
        self.chunks, self.stretches = (
            upload(pieces(numels, size, positions), tensors.table.device) for size in (kernel.chunk, kernel.stretch)
        )
        self.elements = sum(numels)
        self.spans = upload(spans(numels, kernel.chunk, positions, tensors.whole_numels), self.chunks.device)
        self.sums = torch.empty(expressions, len(self.chunks), dtype=torch.float64, device=self.chunks.device)
        self.square_sum_count = kernel.square_sum_count(len(self.stretches))
        self.square_sums = torch.empty(0, dtype=torch.float64, device=tensors.table.device)

    @property
    def grads(self) -> Tensor:
        return self._gradients.pointers


class PlanTensors:
    """All parameters of a plan and their buffers, in the order of memory in which kernels update them.

    ``table`` has the rows of a :class:`~compiled_optim.lowering.kernels.table.TensorTable`; each tensor is its own owner.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        members = plan.members
        self._orders = list(map(plan.memory_order, members))
        self.numels = [real_numel(m.param) for m in members]  # real numbers in each; of a DTensor in this process's part
        self.whole_numels = [real_numel(m.owner) for m in members]  # the same, of a DTensor in all parts
        self.table = upload(
            [
                [order.target.data_ptr() for order in self._orders],
                self.numels,
                list(range(len(members))),
                *([m.entries[name].data_ptr() for m in members] for name in plan.buffers),
            ],
            plan.device,
        )
        self._version = -1  # of the plan's addresses that the kernels know
        self.stand_ins = [i for i, order in enumerate(self._orders) if order.stand_in is not None]  # positions
        self._grads: Sequence[Tensor | None] = ()

    def prepare(self, grads: Sequence[Tensor | None] | None, pointers: GradientPointers) -> None:
        """Make the gradients known to the kernels, which read ``pointers``, for one step.

        ``grads`` are all of the plan's where some must be brought into their parameters' order; None where its addresses do.
        """
        found = self._plan.addresses
        if grads is None:
            pointers.publish(found.gradients if self._version != found.version else None)
            self._version = found.version
        else:
            self._version = -1
            self._grads = [None if g is None else o.arranged(g) for o, g in zip(self._orders, grads, strict=True)]
            pointers.publish([0 if g is None else _address(g) for g in self._grads])
        for i in self.stand_ins:
            self._orders[i].load()

    def finish(self) -> None:
        """Copy stand-ins back into their parameters after a step, and let go of the gradients."""
        for i in self.stand_ins:
            if self._grads[i] is not None:
                self._orders[i].store()
        self._grads = ()


def _address(grad: Tensor) -> int:
    assert has_memory(grad), "a gradient without memory must have been copied or refused"
    return grad.data_ptr() if grad.numel() else EMPTY
