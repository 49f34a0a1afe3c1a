"""Rows of addresses in the memory of a device, brought up to date without waiting for it.

The memory of a row stays where it is for as long as the row lives, so that a captured kernel can go on reading it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compiled_optim import torch_internals
from compiled_optim.controls import NAMES, Controls
from compiled_optim.events import EventLog
from compiled_optim.lowering.layout import is_lost, is_plain
from compiled_optim.plan import Plan
from compiled_optim.state import scalar_names
from compiled_optim.torch_internals import is_capturing


class HyperRow:
    """The addresses of a step's controls and of the hyperparameters of a plan's groups.

    Args:
        plan: whose groups.
        controls: what holds for the whole step.
        log: where refreshes are counted.

    Attributes:
        row: (controls + groups * hyperparameters,) int64; see :class:`~compiled_optim.lowering.kernel_table.KernelTable`.
    """

    def __init__(self, plan: Plan, controls: Controls, log: EventLog) -> None:
        self._log = log
        self._controls = controls
        self._groups = plan.groups
        self._names = [h.name for h in plan.rule.hypers]
        self._device = plan.device
        self._tensors = self._read()  # held, so that no other tensor takes their addresses
        self._check(self._tensors)
        self.row = upload([0] * len(self._tensors), self._device)
        self._addresses: list[int] = []
        self._written: list[int] = []
        self._slots = torch.empty(len(self._tensors), dtype=torch.float64, device=self._device).unbind()
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._captured: list[tuple[Tensor, Tensor]] = []  # read by every replay

    def refresh(self) -> None:
        """Write the addresses of hyperparameters that were assigned, and copy those that are not float64.

        Raises:
            RuntimeError: an address would be written by the graph that is being captured, and again by every replay.
        """
        self.follow()
        on_device = [(own, t) for own, t in self._copies if t.device.type == self._device.type]
        for own, tensor in on_device:
            own.copy_(tensor)
        if is_capturing(self._device):
            self._captured += on_device

    def follow(self) -> None:
        """As :meth:`refresh`, for a graph that holds the copies from one place on the device to another."""
        tensors = self._read()
        if not self._controls.idle and any(map(torch_internals.is_fake, tensors[: len(NAMES)])):
            self._check(tensors)
        addresses = [t.data_ptr() or -id(t) for t in tensors]
        if addresses != self._addresses:
            self._check(tensors)
            read = [t if self._readable(t) else own for t, own in zip(tensors, self._slots, strict=True)]
            row = [t.data_ptr() for t in read]
            if row != self._written:
                if is_capturing(self._device):
                    raise RuntimeError(
                        "a hyperparameter was assigned between the last step and the capture of a CUDA graph, or in it; "
                        "take one step before capturing, or write into the hyperparameter with fill_"
                    )
                self._addresses = self._written = []  # known to the kernels at the end, whatever interrupts it
                self._write(row)
            self._copies = [(own, t.detach()) for own, t in zip(read, tensors, strict=True) if own is not t]
            self._tensors = tensors
            self._written = row
            self._addresses = addresses
        for own, tensor in self._copies:
            if tensor.device.type != self._device.type and not is_capturing(self._device):  # no graph could read the host
                own.fill_(tensor.item())

    def copied(self) -> list[int]:
        """The addresses of the tensors that :meth:`refresh` copies."""
        return [tensor.data_ptr() for _, tensor in self._copies]

    def _read(self) -> list[Tensor]:
        groups = [t for group in self._groups for name in self._names for t in group.tensors(name)]
        return self._controls.tensors(self._device) + groups

    def _check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ``ValueError`` where a tensor of :meth:`_read` has no number."""
        names = [*NAMES, *(f"{g.label}[{name!r}]" for g in self._groups for name in self._names for _ in g.tensors(name))]
        for name, tensor in zip(names, tensors, strict=True):
            if torch_internals.is_fake(tensor) or tensor.is_meta or is_lost(tensor):
                raise ValueError(f"{name} is a tensor without memory, or its storage was freed; it has no value")

    def _readable(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.float64 and tensor.device == self._device and is_plain(tensor)

    def _write(self, values: Sequence[int]) -> None:
        self._log.table_refreshes += 1
        if self._device.type == "cpu":
            self.row.numpy()[:] = values
        else:
            self.row.copy_(torch.tensor(values, dtype=torch.int64).pin_memory(), non_blocking=True)


class GradientRow:
    """The addresses of gradients, 0 where there is none.

    Args:
        count: of parameters.
        device: theirs.
        log: where refreshes are counted.

    Attributes:
        row: (count,) int64: what kernels read, on the device; another tensor in a graph that is being captured.
    """

    def __init__(self, count: int, device: torch.device, log: EventLog) -> None:
        self._log = log
        self._device = device
        host = torch.zeros(count, dtype=torch.int64, device="cpu")
        self._host = host.numpy()
        self._own = host if device.type == "cpu" else upload(host, device)
        self._is_known = True  # whether the memory of the device has what the host's has
        self.row = self._own
        self._spares: list[tuple[Tensor, Tensor]] = []  # a row for a captured step, and where the host writes it
        self._reserve(1)
        self._captured: list[tuple[Tensor, Tensor]] = []  # read by every replay
        self._later: list[tuple[Tensor, Tensor]] | None = None  # captured rows that are uploaded after the capture

    def publish(self, addresses: npt.ArrayLike | None) -> None:
        """Make ``addresses`` known to the kernels; None where they are those of the last time."""
        if addresses is not None:
            self._is_known = False  # until the end, whatever interrupts it
            self._host[:] = addresses
        if is_capturing(self._device):
            self._capture()
        elif not self._is_known:
            self._log.table_refreshes += 1
            self.row = self._own
            if self._device.type != "cpu":
                self.row.copy_(torch.from_numpy(self._host).pin_memory(), non_blocking=True)
            self._reserve(1)
            self._is_known = True

    @contextlib.contextmanager
    def uploading_later(self, steps: int) -> Iterator[None]:
        """Upload the rows of a capture inside the ``with`` block at its end, once, and not in every replay.

        Args:
            steps: how many steps are captured at most; memory for them cannot be made meanwhile.
        """
        self._reserve(steps)
        self._later = []
        try:
            yield
            for row, host in self._later:
                row.copy_(host, non_blocking=True)
        finally:
            self._later = None

    def _reserve(self, steps: int) -> None:
        while len(self._spares) < steps:
            self._spares.append((torch.empty_like(self._own), self._host_row()))

    def _capture(self) -> None:
        """Give the step that is being captured a row that no other step uses.

        So a replay finds its own gradients whatever steps were taken outside of the graph. Who captures by hand has no place
        for the upload but the graph.
        """
        if not self._spares:
            raise RuntimeError("a second step is being captured without a step in between; take one before capturing again")
        self._is_known = False  # to steps outside of the graph
        self.row, host = self._spares.pop()
        host.numpy()[:] = self._host  # the host's work, now and not in a replay
        if self._later is None:
            self.row.copy_(host, non_blocking=True)
        else:
            self._later.append((self.row, host))
        self._captured.append((self.row, host))

    def _host_row(self) -> Tensor:
        row = torch.empty_like(self._own, device="cpu")
        return row.pin_memory() if self._device.type == "cuda" else row


def tensor_rows(plan: Plan, positions: Sequence[int], data: Sequence[Sequence[int]], numels: Sequence[int]) -> Tensor:
    """The int64 table over the tensors at ``positions``; see :class:`~compiled_optim.lowering.kernel_table.TableRows`.

    Args:
        plan: the tensors' plan.
        positions: theirs in it.
        data: the addresses of parameters and buffers.
        numels: how many numbers a kernel updates in each.
    """
    members = [plan.members[i] for i in positions]
    scalars = [[m.entries[name].data_ptr() for m in members] for name in scalar_names(plan.rule)]
    groups = [plan.group_index[i] for i in positions]
    return upload([*data, *scalars, numels, groups, [plan.groups[g]["maximize"] for g in groups]], plan.device)


def pieces(numels: Sequence[int], size: int) -> Tensor:
    """The int64 table (pieces, 2) of all pieces of tensors with ``numels`` elements: the tensor, and which of its pieces.

    Args:
        numels: theirs.
        size: elements of a piece; the last one of a tensor may have fewer.
    """
    counts = -(-np.array(numels, dtype=np.int64) // size)
    tensors = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    return torch.from_numpy(np.stack([tensors, np.arange(len(tensors)) - firsts[tensors]], axis=1))


def upload(values: Sequence[object] | Tensor, device: torch.device) -> Tensor:
    """``values`` as int64 on ``device``, without waiting for it."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64, device="cpu")
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
