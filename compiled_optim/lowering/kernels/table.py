"""The tables that kernels read and write, in the memory of their device.

``evaluate`` works on one :class:`CoefficientTable` for all parameters of a plan, of any dtypes. ``measure`` and
``update`` work on a :class:`TensorTable` for each kernel. A tensor there names its column of coefficients.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compiled_optim.memory import torch_internals
from compiled_optim.memory.addresses import EMPTY, Addresses, Longs
from compiled_optim.memory.layout import MemoryOrder, has_memory, is_lost, is_plain, real_numel
from compiled_optim.memory.torch_internals import is_capturing
from compiled_optim.plan.clipping import NAMES, Clipping
from compiled_optim.plan.compilations import CompilationLog, KernelKey
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import NUMBERS

Launch: TypeAlias = Callable[[], object]
Ints: TypeAlias = tuple[int, ...]
Arguments: TypeAlias = tuple[Ints, int, Sequence[Tensor], Ints]
"""Of a launch: programs in each dimension, elements for all of them, tensors, counts."""
Launches: TypeAlias = dict[tuple[str, int, int], tuple[Launch, Sequence[Tensor]]]
"""Prepared launches that work on one table, each with the tensors whose addresses it holds.

A key is a function's name, the stage of the rule (or the id of the sums of squares), and the id of the tensor with the
gradients' addresses: the other tensors of a table do not change. A table works with one :class:`CoefficientTable` only.
"""


class HyperPointers:
    """The addresses of a step's clipping and of the hyperparameters of a plan's groups. A ``log`` counts refreshes.

    Attributes:
        pointers: int64; see :class:`~compiled_optim.lowering.kernels.table.CoefficientTable`.
        is_behind: True if a group may have replaced a tensor since the last read.
    """

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        self._clipping = clipping
        self._hypers = [(group, hyper) for group in plan.groups for hyper in plan.hypers]
        self._log = log
        self._device = plan.device
        self.is_behind = True
        self._settled_for: object = None  # the arguments of clipping for which no other code can change a number unseen
        self._tensors = self._read()  # referenced, so that no other tensor gets their addresses
        self._check(self._tensors)
        self.pointers = upload([0] * len(self._tensors), self._device)
        self._addresses: list[int] = []
        self._written: list[int] = []
        self._slots = torch.empty(len(self._tensors), dtype=torch.float64, device=self._device).unbind()
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._captured: list[tuple[Tensor, Tensor]] = []  # read by every replay
        for group in plan.groups:
            group.numbers.followers.add(self)

    def prepare(self, capturing: bool) -> None:
        """Write the addresses of hyperparameters that were assigned, and copy those that are not float64.

        Raises:
            RuntimeError: an address would be written by the graph that is being captured, and again by every replay.
        """
        if self._settled_for is self._clipping.arguments and not self.is_behind:
            return
        self.refresh(capturing)
        on_device = [(copy, t) for copy, t in self._copies if t.device.type == self._device.type]
        for copy, tensor in on_device:
            copy.copy_(tensor)
        if capturing:
            self._captured += on_device
        passed = [value for value in self._clipping.arguments if isinstance(value, Tensor)]
        self._settled_for = None if passed or self._copies or self._is_exposed else self._clipping.arguments

    def follow(self) -> None:
        """Update the table at once after a group replaced a tensor: a captured graph may run before another step."""
        self.is_behind = True
        self.refresh()

    def refresh(self, capturing: bool | None = None) -> None:
        """Do :meth:`prepare` but for copies on the device, which a graph holds. With None, ask if one is being captured."""

        def records() -> bool:
            return is_capturing(self._device) if capturing is None else capturing

        self._settled_for = None  # until `prepare` ends, also if an exception interrupts it
        tensors = self._read()
        if not self._clipping.idle and any(map(torch_internals.is_fake, tensors[: len(NAMES)])):
            self._check(tensors)
        addresses = [t.data_ptr() or -id(t) for t in tensors]
        if addresses != self._addresses:
            self._check(tensors)
            wanted = self._device, torch.float64
            pairs = zip(tensors, self._slots, strict=True)
            read = [t if (t.device, t.dtype) == wanted and is_plain(t) else slot for t, slot in pairs]
            pointers = [t.data_ptr() for t in read]
            if pointers != self._written:
                if records():
                    raise RuntimeError(
                        "a hyperparameter was assigned between the last step and the capture of a CUDA graph, or in it; "
                        "take one step before capturing, or write into the hyperparameter with fill_"
                    )
                self._addresses = self._written = []  # assigned below, so that an exception leaves them unknown
                self._log.table_refreshes += 1
                if self._device.type == "cpu":
                    self.pointers.numpy()[:] = pointers
                else:
                    _copy(torch.tensor(pointers, dtype=torch.int64, device="cpu"), self.pointers)
            self._copies = [(slot, t.detach()) for slot, t in zip(read, tensors, strict=True) if slot is not t]
            self._tensors = tensors
            self._written = pointers
            self._addresses = addresses
        for copy, tensor in self._copies:
            if tensor.device.type != self._device.type and not records():  # a graph cannot read the host
                copy.fill_(tensor.item())

    def copied(self) -> list[int]:
        """Return the addresses of the tensors that :meth:`prepare` copies."""
        return [tensor.data_ptr() for _, tensor in self._copies]

    def _read(self) -> list[Tensor]:
        if self.is_behind:
            self._in_groups = [t for g, h in self._hypers for t in g.read_only(h.name)]
            self._is_exposed = any(g.numbers.exposed or g.numbers.passed for g, _ in self._hypers)
            self.is_behind = False
        return self._clipping.tensors(self._device) + self._in_groups

    def _check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ``ValueError`` if one of ``tensors``, as of :meth:`_read`, has no memory."""
        for index, tensor in enumerate(tensors):
            if not has_memory(tensor) and (torch_internals.is_fake(tensor) or tensor.is_meta or is_lost(tensor)):
                name = [*NAMES, *(f"{g.label}[{h.name!r}]" for g, h in self._hypers for _ in range(h.length))][index]
                raise ValueError(f"{name} is a tensor without memory, or its storage was freed; it has no value")


class GradientPointers:
    """The addresses of the gradients of ``count`` parameters, or marks that these exist; 0 where there is none.

    Attributes:
        pointers: (count,) int64, read by kernels, on the device; another tensor in a graph that is being captured.
    """

    def __init__(self, count: int, device: torch.device, log: CompilationLog) -> None:
        self._log = log
        self._device = device
        host = torch.zeros(count, dtype=torch.int64, device="cpu")
        self._host = host.numpy()
        self._main = upload(host, device)  # on a CPU, the same memory as `host`
        self._is_known = True  # True if the device has the same addresses as the host
        self.pointers = self._main
        self._spares: list[tuple[Tensor, Tensor]] = []  # for a captured step: memory on the device and on the host
        self.reserve(1)
        self._captured: list[tuple[Tensor, Tensor]] = []  # read by every replay
        self._later: list[tuple[Tensor, Tensor]] | None = None  # captured ones that are uploaded after the capture
        self._version: int | None = None  # of the plan's addresses that were published last; None if others were

    def follow(self, addresses: Addresses, capturing: bool) -> None:
        """Make the gradients' ``addresses`` of a plan known to the kernels."""
        self._publish(addresses.gradients if self._version != addresses.version else None, capturing)
        self._version = addresses.version

    def are_absent(self, columns: Sequence[int]) -> bool:
        """Return True if none of the parameters in ``columns`` has a gradient."""
        return not self._host[columns].any()

    def publish(self, grads: Sequence[Tensor | None], capturing: bool) -> None:
        """Make the addresses of ``grads`` known to the kernels."""
        self._publish([0 if g is None else g.data_ptr() or EMPTY for g in grads], capturing)

    def mark(self, grads: Sequence[Tensor | None], capturing: bool) -> None:
        """Tell kernels that do not read the gradients' addresses from this table which of ``grads`` exist."""
        marks = [grad is not None for grad in grads]
        self._publish(None if (self._host == marks).all() else marks, capturing)

    def _publish(self, addresses: npt.ArrayLike | None, capturing: bool) -> None:
        """Upload ``addresses``. None stands for unchanged ones, which only a graph needs again."""
        if addresses is not None:
            self._is_known, self._version = False, None  # until the end, also if an exception interrupts it
            self._host[:] = addresses
        if capturing:
            self._capture()
        elif not self._is_known:
            self._log.table_refreshes += 1
            self._log.has_moved = True
            self.pointers = self._main
            if self._device.type != "cpu":
                _copy(torch.from_numpy(self._host), self.pointers)
            self.reserve(1)
            self._is_known = True

    @contextlib.contextmanager
    def uploading_later(self, steps: int) -> Iterator[None]:
        """Upload the addresses of captures inside the ``with`` block once, at its end, and not in every replay.

        Args:
            steps: the most steps that are captured; no memory for them can be allocated during the capture.
        """
        self.reserve(steps)
        self._later = []
        try:
            yield
            for pointers, host in self._later:
                pointers.copy_(host, non_blocking=True)
        finally:
            self._later = None

    @property
    def reserved(self) -> int:
        """The number of steps that can be captured, each with its own memory, which is allocated outside of captures."""
        return len(self._spares)

    def reserve(self, steps: int) -> None:
        """Allocate memory until :attr:`reserved` is at least ``steps``."""
        while len(self._spares) < steps:
            host = torch.empty(self._main.shape, dtype=torch.int64, device="cpu")
            self._spares.append((torch.empty_like(self._main), host.pin_memory() if self._main.is_cuda else host))

    def _capture(self) -> None:
        """Give the step that is being captured its own memory for addresses.

        A replay then reads the addresses of its own gradients, not those of steps outside of the graph. A capture outside of
        :meth:`uploading_later` must upload in the graph.
        """
        assert self._spares, "a second step is being captured without memory for it"
        self._is_known = False  # to steps outside of the graph
        self.pointers, host = self._spares.pop()
        host.numpy()[:] = self._host  # by the host, now, not in a replay
        if self._later is None:
            self.pointers.copy_(host, non_blocking=True)
        else:
            self._later.append((self.pointers, host))
        self._captured.append((self.pointers, host))


def _copy(host: Tensor, out: Tensor) -> None:
    """Copy ``host`` to ``out`` on an accelerator, without waiting for that."""
    out.copy_(host.pin_memory(), non_blocking=True)


def upload(values: Any, device: torch.device) -> Tensor:
    """Return ``values`` as int64 on ``device``, without waiting for it."""
    host = torch.as_tensor(values, dtype=torch.int64, device="cpu")
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


GROUP_INDEX, MAXIMIZE, FIRST_NUMBER = range(3)
SCALARS = FIRST_NUMBER + len(NUMBERS)
"""Rows of a :class:`CoefficientTable`: the index of the group, 1 to maximize, the parameter's :data:`NUMBERS` (bits of
a float64), the addresses of the step count and of the rule's scalars, and the rule's further inputs (bits again)."""

PARAM, NUMEL, COLUMN, BUFFERS = range(4)
"""Rows of a :class:`TensorTable`: address, number of real elements, column of coefficients, and addresses of buffers."""

TENSORS = 32  # parameters whose coefficients one program evaluates


class CoefficientTable:
    """The table that ``evaluate`` reads and writes; a column is a parameter of the plan.

    Attributes:
        inputs: (rows, parameters) int64; see :data:`GROUP_INDEX` and the rows beside it.
        scalars: those of its rows that are addresses.
        hypers: (clipping + groups * hyperparameters,) int64, addresses of float64 numbers: first the step's clipping, as in
            :data:`compiled_optim.plan.clipping.NAMES`, then those of each group.
        gradients: not 0 for the parameters that take part in the step.
        coefficients: (1 + coefficients, parameters) float64, written: the factor of the gradient, the rule's own, then
            its means. A column is undefined where the parameter takes no part, and in a skipped step.
        all_square_sums: float64, the partial sums of the squares of all gradients; empty if no norm is needed.
        outcome: (3,) float64, written: the norm, 1 if the step was skipped, and the number of skipped steps.
        leads: True if a skipped step is counted here.
        launches: see :data:`Launches`.
    """

    def __init__(self, plan: Plan, clipping: Clipping, hypers: HyperPointers, log: CompilationLog) -> None:
        members = plan.members
        numbers = [np.array(row).view(np.int64).tolist() for row in plan.numbers.values()]
        addresses = [[m.entries[name].data_ptr() for m in members] for name in plan.rule.scalar_names]
        before, after = numbers[: len(NUMBERS)], numbers[len(NUMBERS) :]
        self.inputs = upload([plan.group_index, plan.maximizes, *before, *addresses, *after], plan.device)
        self.scalars = self.inputs[SCALARS:][: len(addresses)]
        self.hypers = hypers.pointers
        self.gradients = GradientPointers(len(members), plan.device, log)
        height = 1 + len(plan.rule.number_names(plan.statics)[-1])
        self.coefficients = torch.empty(height, len(members), dtype=torch.float64, device=plan.device)
        self.all_square_sums = self.coefficients.new_empty(0)
        self.outcome = clipping.outcome(plan.device)
        self.leads = plan.is_first
        self.launches = Launches()

    @property
    def grads(self) -> Tensor:
        """The same as in :class:`TensorTable`, or marks that gradients exist."""
        return self.gradients.pointers

    def connect(self, all_square_sums: Tensor) -> None:
        """Set :attr:`all_square_sums`, and drop the launches that read others."""
        self.all_square_sums = all_square_sums
        self.launches.clear()


class TensorTable(Protocol):
    """The tensors that one kernel updates, each of them in blocks."""

    kernel: Kernel
    launches: Launches
    tensors: Tensor  # (rows, tensors) int64; see PARAM and the rows beside it
    blocks: Tensor  # (blocks, 2) int64, the tensor and the index of the block in it
    output_sums: Sequence[Tensor]  # (sums, blocks) float64, written by an update with sums; empty for others
    elements: int  # real numbers in all tensors that have blocks

    @property
    def grads(self) -> Tensor:
        """The addresses of the gradients, (tensors,) int64; 0 leaves a tensor unchanged."""


def tensor_rows(plan: Plan, positions: Iterable[int]) -> tuple[Tensor, dict[int, MemoryOrder]]:
    """Return the rows of a :class:`TensorTable` of the parameters at ``positions`` of ``plan``, and their memory orders.

    Columns of other parameters are 0.
    """
    orders = {i: plan.memory_order(plan.members[i]) for i in positions}
    marks = plan.outputs.choice.served is not None
    columns = [[0] * (BUFFERS + len(plan.buffers) + marks) for _ in plan.members]
    for i, order in orders.items():
        member = plan.members[i]
        buffers = [member.entries[name].data_ptr() for name in plan.buffers]
        words = [plan.outputs.words(member.owner).data_ptr()] if marks else []
        columns[i] = [order.target.data_ptr(), real_numel(member.param), i, *buffers, *words]
    return upload(list(zip(*columns, strict=True)), plan.device), orders


class KernelTensors:
    """A :class:`TensorTable` of the tensors at ``positions`` of a plan, which one kernel updates, measures and reduces.

    ``tensors`` are the rows for all of the plan. ``expressions`` is the largest number of sums of a reduction. ``totals``
    is the memory of the sums that the end of an update adds up, None if it has none.

    Attributes:
        reduce_blocks: (blocks, 2) int64, like ``blocks``, for adding up squares and the rule's sums.
        square_sums: float64, written: the partial sums of the squares of the gradients.
        ranges: (tensors, 4) int64: a tensor, its first block, the one after its last, and its number of real elements: at
            least 1, and of a DTensor in all shards.
        sums: (expressions, blocks) float64, written: the sums over blocks.
        output_sums: with (sums, blocks) float64, written: those that an update adds up, over its blocks; else empty.
        output_ranges: as ``ranges``, of ``blocks``; the numbers are 1.
        totals: (sums, parameters) float64, written: the sums of ``output_sums``, if there are any.
    """

    def __init__(
        self,
        kernel: Kernel,
        plan: Plan,
        tensors: Tensor,
        gradients: GradientPointers,
        positions: Sequence[int],
        expressions: int,
        totals: Tensor | None = None,
    ) -> None:
        self.kernel = kernel
        self.tensors = tensors
        self._gradients = gradients
        device, numels = tensors.device, [real_numel(plan.members[i].param) for i in positions]
        self.elements = sum(numels)
        blocks, ranges = blocks_of(positions, numels, kernel.block)
        self.blocks = upload(blocks, device)
        self.output_sums: Sequence[Tensor] = ()
        if totals is not None:
            self.totals = totals
            self.output_sums = (torch.empty(len(totals), len(blocks), dtype=torch.float64, device=device),)
            self.output_ranges = upload(np.column_stack([positions, ranges, np.ones_like(positions)]), device)
        blocks, ranges = blocks_of(positions, numels, kernel.reduce_block)
        self.reduce_blocks = upload(blocks, device)
        self.ranges = upload(np.column_stack([positions, ranges, [plan.counts[i] for i in positions]]), device)
        self.sums = torch.empty(expressions, len(self.reduce_blocks), dtype=torch.float64, device=device)
        self.square_sum_count = min(len(self.reduce_blocks), kernel.most_sums)
        self.square_sums = torch.empty(0, dtype=torch.float64, device=device)
        self.launches = Launches()

    @property
    def grads(self) -> Tensor:
        return self._gradients.pointers

    def connect(self, square_sums: Tensor) -> None:
        """Set :attr:`square_sums`, and drop the launches that write others."""
        self.square_sums = square_sums
        self.launches.clear()


class Kernel(abc.ABC):
    """The compiled functions of a rule, the same in every language.

    A rule that is not elementwise has those that evaluate and measure.

    Attributes:
        block: elements that :meth:`update` processes at a time.
        reduce_block: elements that :meth:`measure` processes at a time.
        most_sums: the most partial sums that :meth:`measure` writes; each covers a block or more.
        drawback: the reason if launches are slower than they could be; else empty.
    """

    block: int
    reduce_block: int
    most_sums: int
    drawback = ""

    def __init__(self, key: KernelKey) -> None:
        self._stages = key.rule.stages(dict(key.statics))

    @abc.abstractmethod
    def _prepared(self, name: str, programs: Ints, elements: int, tensors: Sequence[Tensor], counts: Ints) -> Launch:
        """Return a launch of the function ``name`` with these :data:`Arguments`. It does not keep ``tensors`` alive."""

    def _launch(
        self, name: str, table: TensorTable | CoefficientTable, arguments: Callable[[], Arguments], stage: int = 0
    ) -> None:
        """Run the function ``name``, which works on ``table``. ``arguments`` is called when the launch is prepared.

        A launch is prepared for each ``stage`` of a rule.
        """
        key = name, stage, id(table.grads)
        if (known := table.launches.get(key)) is None:
            programs, elements, tensors, counts = arguments()
            launch = self._prepared(name, programs, elements, tensors, counts)
            known = table.launches[key] = launch, (table.grads, *tensors)
        known[0]()

    def measure(self, table: KernelTensors) -> None:
        """Write the partial sums of the squares of the gradients."""

        def arguments() -> Arguments:
            tables = table.tensors, table.grads, table.reduce_blocks, table.square_sums
            return (len(table.square_sums),), table.elements, tables, (len(table.grads), len(table.reduce_blocks))

        self._launch("square_sums", table, arguments)

    def evaluate(self, coefficients: CoefficientTable) -> None:
        """Count a step, and write the coefficients of all parameters that take part, and the step's outcome."""
        self._launch("evaluate", coefficients, lambda: self._evaluated(coefficients))

    def average(self, stage: int, table: KernelTensors, coefficients: CoefficientTable) -> None:
        """Write the means of one stage of the rule, behind the coefficients of the tensors that have a gradient.

        For a DTensor it is the local shard's share of the mean.
        """
        self._launch(f"sums{stage}", table, lambda: self._updated(table, table.reduce_blocks, coefficients, table.sums))

        def arguments() -> Arguments:
            sums = self._stages[stage].sums
            tensors = table.sums, table.ranges, table.grads, coefficients.outcome, coefficients.coefficients
            counts = len(table.reduce_blocks), coefficients.inputs.shape[1], 1 + sums.start
            return (len(table.ranges), sums.stop - sums.start), 0, tensors, counts

        self._launch("average", table, arguments, stage)

    def update(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        """Update the tensors that have a gradient, with the coefficients in their columns."""
        self._launch("update", table, lambda: self._updated(table, table.blocks, coefficients, *table.output_sums))

    def total(self, table: KernelTensors, coefficients: CoefficientTable) -> None:
        """Write the sums that :meth:`update` added up over blocks, for each tensor that it updated."""

        def arguments() -> Arguments:
            tensors = *table.output_sums, table.output_ranges, table.grads, coefficients.outcome, table.totals
            counts = len(table.blocks), table.totals.shape[1], 0
            return (len(table.output_ranges), len(table.totals)), 0, tensors, counts

        self._launch("average", table, arguments, -1)  # of no stage of the rule

    def step(self, table: TensorTable, coefficients: CoefficientTable) -> None:
        """Evaluate, then update; in one call where that is faster."""
        self.evaluate(coefficients)
        self.update(table, coefficients)

    @staticmethod
    def _evaluated(table: CoefficientTable) -> Arguments:
        tables = table.inputs, table.grads, table.hypers, table.all_square_sums, table.outcome, table.coefficients
        count = table.inputs.shape[1]
        return (-(-count // TENSORS),), 0, tables, (count, table.all_square_sums.numel(), int(table.leads))

    @staticmethod
    def _updated(table: TensorTable, blocks: Tensor, coefficients: CoefficientTable, *sums: Tensor) -> Arguments:
        tables = table.tensors, table.grads, blocks, coefficients.outcome, coefficients.coefficients, *sums
        return (len(blocks),), table.elements, tables, (table.grads.numel(), coefficients.inputs.shape[1])


def blocks_of(tensors: Sequence[int], numels: Sequence[int], size: int) -> tuple[Longs, Longs]:
    """Cut tensors of ``numels`` elements, whose indices are ``tensors``, into blocks of at most ``size`` elements.

    Returns:
        Two int64 tables: (blocks, 2), the tensor and the index of the block in it; (tensors, 2), the tensor's first block
        and the one after its last.
    """
    counts = -(-np.array(numels, dtype=np.int64) // size)
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    ids = np.asarray(tensors, dtype=np.int64)[owner]
    return np.stack([ids, np.arange(len(owner)) - (ends - counts)[owner]], 1), np.stack([ends - counts, ends], 1)
