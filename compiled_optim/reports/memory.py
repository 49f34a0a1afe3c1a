"""Report the bytes that training with an optimizer takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory.addresses import gradient
from compiled_optim.memory.layout import local
from compiled_optim.optimizer import CompiledOptimizer, checked_engine
from compiled_optim.reports.finding import Finding
from compiled_optim.rule.storage import MINIMUM, PARTS


@dataclass(frozen=True)
class MemoryReport:
    """The bytes that training with an optimizer takes on this process, without the tensors that autograd saves.

    Attributes:
        optimizer: the class name.
        elements: how many elements the parameters have. Of a DTensor the local shard counts.
        weights: bytes of the parameters.
        gradients: bytes of the present gradients.
        state: bytes of the state by entry, such as ``exp_avg``. Bits that a parameter's dtype lacks are under
            ``kahan_comp``, ``remainder`` or ``master_param``.
        tables: bytes of everything else that steps read and write: addresses, coefficients, hyperparameters.
        findings: empty, since no number of bytes is a mistake; the other reports of an optimizer fill it.
    """

    optimizer: str
    elements: int
    weights: int
    gradients: int
    state: Mapping[str, int]
    tables: int
    findings: tuple[Finding, ...] = ()

    @property
    def remainders(self) -> int:
        """Bytes of the bits that the parameters' own dtypes lack."""
        return sum(self.state.get(name, 0) for name in PARTS)

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.weights + self.gradients + sum(self.state.values()) + self.tables

    @property
    def per_parameter(self) -> float:
        """Bytes of everything for each element of the parameters; 0 if they have no elements."""
        return self.total / self.elements if self.elements else 0.0

    def __str__(self) -> str:
        rows = {"weights": self.weights, **self.state, "gradients": self.gradients, "tables": self.tables}
        rows["total"] = self.total
        width = max(map(len, rows))
        if is_small := self.elements < MINIMUM:  # bytes for each element would be many, unlike those of larger models
            lines = [f"{self.optimizer}: small model, {self.total:,} bytes in all for {self.elements:,} parameters"]
        else:
            lines = [f"{self.optimizer}: {self.per_parameter:.2f} bytes for each of {self.elements:,} parameters"]
        each = {name: "" if is_small else f"{size / self.elements:8.3f} " for name, size in rows.items()}
        lines += [f"  {name:<{width}} {each[name]}{size:16,} bytes" for name, size in rows.items()]
        return "\n".join(lines)


def memory_report(optimizer: CompiledOptimizer) -> MemoryReport:
    """Report the bytes that ``optimizer`` takes now. Gradients that ``zero_grad`` set to None take nothing.

    Raises:
        TypeError: ``optimizer`` is not one of this package.
    """
    engine = checked_engine(optimizer, "memory_report")
    step = engine.current()
    params = [p for p in step.params if not torch.nn.parameter.is_lazy(p)]
    grads = [grad for p in params if (grad := gradient(p)) is not None]
    named = (item for p in step.params for item in engine.state.get(p, {}).items())
    entries = [(name, entry) for name, entry in named if isinstance(entry, Tensor)]
    state = Counter[str]()
    for name, entry in entries:
        state[name] += bytes_of(entry)
    listed = _storages(part for tensor in (*params, *grads, *(e for _, e in entries)) for part in _parts(tensor))
    tables = sum(size for storage, size in _storages(_tensors_in(step)).items() if storage not in listed)
    elements = sum(local(p).numel() for p in params)
    weights, gradients = sum(map(bytes_of, params)), sum(map(bytes_of, grads))
    return MemoryReport(type(optimizer).__name__, elements, weights, gradients, dict(state), tables)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that this process has of ``tensor``."""
    tensor = local(tensor.detach())
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes that this process has of ``tensor``."""
    return sum(part.numel() * part.element_size() for part in _parts(tensor))


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of dense tensors, by the identity of each storage."""
    return {int(storage._cdata): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}


def _tensors_in(root: object) -> Iterator[Tensor]:
    """Yield the dense tensors with memory in containers and in objects of this package that ``root`` refers to."""
    visited: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        value = stack.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            if value.layout is torch.strided and value.device.type != "meta" and type(value) in (Tensor, torch.nn.Parameter):
                yield value
        elif isinstance(value, (Mapping, list, tuple)):
            stack += value.values() if isinstance(value, Mapping) else value
        elif type(value).__module__.startswith("compiled_optim."):
            stack += getattr(value, "__dict__", {}).values()
