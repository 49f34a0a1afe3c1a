"""Addresses in the memory of a device, brought up to date without waiting for it.

Their memory stays where it is for as long as their object lives, so that a captured kernel can go on reading it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy.typing as npt
import torch
from torch import Tensor

from compiled_optim import torch_internals
from compiled_optim.memory.layout import has_memory, is_lost, is_plain
from compiled_optim.plan.clipping import NAMES, Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.plan import Plan
from compiled_optim.torch_internals import is_capturing


class HyperPointers:
    """The addresses of a step's clipping and of the hyperparameters of a plan's groups.

    Args:
        plan: whose groups.
        clipping: what holds for the whole step.
        log: where refreshes are counted.

    Attributes:
        pointers: int64; see :class:`~compiled_optim.lowering.kernels.table.CoefficientTable`.
        is_behind: whether a group may have replaced a tensor since.
    """

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        self._log = log
        self._clipping = clipping
        self._groups = plan.groups
        self._names = [h.name for h in plan.hypers]
        self._device = plan.device
        self.is_behind = False
        self._in_groups = self._look()
        self._tensors = self._read()  # held, so that no other tensor takes their addresses
        self._check(self._tensors)
        self.pointers = upload([0] * len(self._tensors), self._device)
        self._addresses: list[int] = []
        self._written: list[int] = []
        self._slots = torch.empty(len(self._tensors), dtype=torch.float64, device=self._device).unbind()
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._captured: list[tuple[Tensor, Tensor]] = []  # read by every replay
        for group in plan.groups:
            group.followers.add(self)

    def prepare(self) -> None:
        """Write the addresses of hyperparameters that were assigned, and copy those that are not float64.

        Raises:
            RuntimeError: an address would be written by the graph that is being captured, and again by every replay.
        """
        self.refresh()
        on_device = [(own, t) for own, t in self._copies if t.device.type == self._device.type]
        for own, tensor in on_device:
            own.copy_(tensor)
        if is_capturing(self._device):
            self._captured += on_device

    def follow(self) -> None:
        """Let kernels know that a group replaced a tensor, at once: a captured graph may run before another step."""
        self.is_behind = True
        self.refresh()

    def refresh(self) -> None:
        """Do what :meth:`prepare` does but for copies on the device, which a graph holds."""
        if self.is_behind:
            self._in_groups = self._look()
            self.is_behind = False
        tensors = self._read()
        if not self._clipping.idle and any(map(torch_internals.is_fake, tensors[: len(NAMES)])):
            self._check(tensors)
        addresses = [t.data_ptr() or -id(t) for t in tensors]
        if addresses != self._addresses:
            self._check(tensors)
            read = [t if self._readable(t) else own for t, own in zip(tensors, self._slots, strict=True)]
            pointers = [t.data_ptr() for t in read]
            if pointers != self._written:
                if is_capturing(self._device):
                    raise RuntimeError(
                        "a hyperparameter was assigned between the last step and the capture of a CUDA graph, or in it; "
                        "take one step before capturing, or write into the hyperparameter with fill_"
                    )
                self._addresses = self._written = []  # known to the kernels at the end, whatever interrupts it
                self._write(pointers)
            self._copies = [(own, t.detach()) for own, t in zip(read, tensors, strict=True) if own is not t]
            self._tensors = tensors
            self._written = pointers
            self._addresses = addresses
        for own, tensor in self._copies:
            if tensor.device.type != self._device.type and not is_capturing(self._device):  # no graph could read the host
                own.fill_(tensor.item())

    def copied(self) -> list[int]:
        """The addresses of the tensors that :meth:`prepare` copies."""
        return [tensor.data_ptr() for _, tensor in self._copies]

    def _read(self) -> list[Tensor]:
        return self._clipping.tensors(self._device) + self._in_groups

    def _look(self) -> list[Tensor]:
        return [t for group in self._groups for name in self._names for t in group.read_only(name)]

    def _check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ``ValueError`` where a tensor of :meth:`_read` has no number."""
        for index, tensor in enumerate(tensors):
            if not has_memory(tensor) and (torch_internals.is_fake(tensor) or tensor.is_meta or is_lost(tensor)):
                owners = [(g.label, name) for g in self._groups for name in self._names for _ in g.read_only(name)]
                name = [*NAMES, *(f"{label}[{name!r}]" for label, name in owners)][index]
                raise ValueError(f"{name} is a tensor without memory, or its storage was freed; it has no value")

    def _readable(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.float64 and tensor.device == self._device and is_plain(tensor)

    def _write(self, values: Sequence[int]) -> None:
        self._log.table_refreshes += 1
        if self._device.type == "cpu":
            self.pointers.numpy()[:] = values
        else:
            self.pointers.copy_(torch.tensor(values, dtype=torch.int64).pin_memory(), non_blocking=True)


class GradientPointers:
    """The addresses of the gradients of a plan's parameters, or marks that they are there; 0 where there is none.

    Args:
        count: of parameters.
        device: theirs.
        log: where refreshes are counted.

    Attributes:
        pointers: (count,) int64: what kernels read, on the device; another tensor in a graph that is being captured.
    """

    def __init__(self, count: int, device: torch.device, log: CompilationLog) -> None:
        self._log = log
        self._device = device
        host = torch.zeros(count, dtype=torch.int64, device="cpu")
        self._host = host.numpy()
        self._own = host if device.type == "cpu" else upload(host, device)
        self._is_known = True  # whether the memory of the device has what the host's has
        self.pointers = self._own
        self._spares: list[tuple[Tensor, Tensor]] = []  # memory for a captured step, and where the host writes
        self.reserve(1)
        self._captured: list[tuple[Tensor, Tensor]] = []  # read by every replay
        self._later: list[tuple[Tensor, Tensor]] | None = None  # captured ones that are uploaded after the capture

    def publish(self, addresses: npt.ArrayLike | None) -> None:
        """Make ``addresses`` known to the kernels; None where they are those of the last time."""
        if addresses is not None:
            self._is_known = False  # until the end, whatever interrupts it
            self._host[:] = addresses
        if is_capturing(self._device):
            self._capture()
        elif not self._is_known:
            self._log.table_refreshes += 1
            self.pointers = self._own
            if self._device.type != "cpu":
                self.pointers.copy_(torch.from_numpy(self._host).pin_memory(), non_blocking=True)
            self.reserve(1)
            self._is_known = True

    def publish_marks(self, marks: Sequence[bool]) -> None:
        """Make ``marks`` known to the kernels, in place of addresses that none of them reads."""
        self.publish(None if (self._host == marks).all() else marks)

    @contextlib.contextmanager
    def uploading_later(self, steps: int) -> Iterator[None]:
        """Upload the addresses of a capture inside the ``with`` block at its end, once, and not in every replay.

        Args:
            steps: how many steps are captured at most; memory for them cannot be made meanwhile.
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
        """How many steps can be captured, each with memory of its own, which is made outside of captures."""
        return len(self._spares)

    def reserve(self, steps: int) -> None:
        """Let :attr:`reserved` be at least ``steps``."""
        while len(self._spares) < steps:
            self._spares.append((torch.empty_like(self._own), self._host_memory()))

    def _capture(self) -> None:
        """Give the step that is being captured memory that no other step uses.

        A replay then finds its own gradients, whatever steps were taken outside of the graph. In a capture by hand the graph
        is the only place for the upload.
        """
        if not self._spares:
            raise RuntimeError("a second step is being captured without a step in between; take one before capturing again")
        self._is_known = False  # to steps outside of the graph
        self.pointers, host = self._spares.pop()
        host.numpy()[:] = self._host  # the host's work, now and not in a replay
        if self._later is None:
            self.pointers.copy_(host, non_blocking=True)
        else:
            self._later.append((self.pointers, host))
        self._captured.append((self.pointers, host))

    def _host_memory(self) -> Tensor:
        memory = torch.empty_like(self._own, device="cpu")
        return memory.pin_memory() if self._device.type == "cuda" else memory


def upload(values: Sequence[object] | Tensor, device: torch.device) -> Tensor:
    """``values`` as int64 on ``device``, without waiting for it."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64, device="cpu")
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
