"""Reports of compiled kernels and of stored bytes."""

from __future__ import annotations

import functools
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory.addresses import gradient
from compiled_optim.memory.cache import cache_directory
from compiled_optim.memory.layout import has_memory, local
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.plan.compilations import Compilation
from compiled_optim.rule.storage import MINIMUM, PARTS
from compiled_optim.step.engine import Engine
from compiled_optim.step.rule_step import RuleStep


@dataclass(frozen=True)
class CompileReport:
    """The kernels that were compiled for an optimizer, and how its steps run.

    Attributes:
        optimizer: the class name.
        lowering: how its steps run: ``multi_tensor``, ``inductor``, ``stacked``, ``eager``, or several of them.
        steps: how many steps it has taken. Steps that are inlined in compiled code are not counted.
        kernels: the keys of the kernels its step calls.
        compilations: the kernels that were compiled or loaded for it, in order, with their seconds. Kernels that the process
            already had are not listed.
        fallbacks: the reasons why parts run uncompiled, or are compiled by Inductor.
        captures: the cause of each capture of a CUDA graph by ``co.CUDAGraphRunner`` or torch.compile; "" for a first one.
        replays: how often these graphs were replayed.
        table_refreshes: how often a kernel's table of addresses was written again. That compiles nothing.
        compiled_step: how a function under ``torch.compile`` holds its steps: as ``its own operations`` (inlined), or as an
            operator and why; empty if no function was traced.
        cache: the directory of compiled C++. Other processes use it too, unless no directory was safe to share.
        construction: the seconds of compiling or loading in the constructor, which only the first one of a process does.
        advice: the remedy or the cost of each of ``fallbacks``.
        moved_steps: the number of steps with gradients at new addresses, mostly since ``zero_grad`` had freed them.
        is_idle: True if steps were taken, and none changed a parameter.
    """

    optimizer: str
    lowering: str
    steps: int
    kernels: tuple[str, ...]
    compilations: tuple[Compilation, ...]
    fallbacks: tuple[str, ...]
    captures: tuple[str, ...]
    replays: int
    table_refreshes: int
    compiled_step: str
    cache: str
    construction: float
    advice: tuple[str, ...]
    moved_steps: int
    is_idle: bool

    @property
    def recaptures(self) -> int:
        """The number of graphs that were captured to replace a stale one."""
        return sum(map(bool, self.captures))

    @property
    def compiles(self) -> int:
        """The number of kernels that were compiled for the optimizer, or loaded, at any time."""
        return len(self.compilations)

    @property
    def loaded(self) -> int:
        """The number of these kernels that came from the cache, compiled by another process."""
        return sum(c.loaded for c in self.compilations)

    @property
    def recompiles(self) -> int:
        """The number of these kernels that were compiled after the first step."""
        return sum(bool(c.cause) for c in self.compilations)

    @property
    def seconds(self) -> float:
        """The time spent compiling and loading, with the imports needed for that, and at construction."""
        return sum((c.seconds for c in self.compilations), self.construction)

    def __str__(self) -> str:
        verdicts = {
            "Nothing was updated: see below.": self.is_idle,
            "Slower than it could be: see below.": bool(self.fallbacks),
            "Compiled again after the first step: see below.": bool(self.recompiles),
            "Captured again: see below.": bool(self.recaptures),
            "Nothing is compiled: steps are plain torch operations.": self.lowering == "eager",
            "Not all is compiled: some steps are plain torch operations.": "eager" in self.lowering,
            "The first step will compile.": not (self.steps or self.kernels or self.compiled_step),
            "Good: all is compiled, and nothing was compiled again.": True,
        }
        verdict = next(text for text, holds in verdicts.items() if holds)
        counts = {"compiled": self.compiles - self.loaded, "loaded from the cache": self.loaded}
        kernels = ", ".join(f"{count} {how}" for how, count in counts.items() if count)
        moved = f"gradients moved in {self.moved_steps} of {self.steps} steps (zero_grad frees them)"
        until = " until the process ends" * (Path(self.cache).name != "compiled_optim")  # a temporary directory
        lines = {
            f"{self.optimizer}: {self.lowering} lowering, {self.steps} step{'s' * (self.steps != 1)}. {verdict}": True,
            "  no parameter ever had a gradient (call loss.backward() first), or all steps were skipped": self.is_idle,
            f"  {self.construction:.2f} s of compiling at construction": self.construction >= 0.1,
            f"  kernels: {kernels} in {self.seconds - self.construction:.2f} s": bool(kernels),
            **{f"  {self._origin(kernel)}: {kernel}": True for kernel in self.kernels},
            **_causes("recompiled", (c.cause for c in self.compilations)),
            f"  {len(self.captures)} captures, {self.recaptures} re-captures, {self.replays} replays": bool(self.captures),
            **_causes("captured again", self.captures),
            "    to find the line of your code that causes it, run the loop under `with co.no_recompiles():`": bool(
                self.recompiles or self.recaptures
            ),
            **{f"  slower: {reason}; {advice}": True for reason, advice in zip(self.fallbacks, self.advice, strict=True)},
            f"  {moved}: one small copy of addresses each; nothing to do": self.moved_steps > 1,
            f"  compiled code holds {self.compiled_step}": bool(self.compiled_step),
            f"  compiled C++ is kept{until} in {self.cache}": bool(self.kernels),
        }
        fill = functools.partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
        return "\n".join(fill(line, subsequent_indent=" " * 6) for line, holds in lines.items() if holds)

    def _origin(self, kernel: str) -> str:
        compilations = [c for c in self.compilations if c.kernel == kernel]
        how = "loaded" if all(c.loaded for c in compilations) else "compiled"
        return f"{how} in {sum(c.seconds for c in compilations):.2f} s" if compilations else "the process had already"


def _causes(what: str, causes: Iterable[str]) -> dict[str, bool]:
    counts = Counter(filter(None, causes)).items()
    return {f"  {what}: {cause}" + f" ({count} times)" * (count > 1): True for cause, count in counts}


def compile_report(optimizer: CompiledOptimizer) -> CompileReport:
    """Report the kernels that were compiled for ``optimizer``, and how its steps run.

    Raises:
        TypeError: ``optimizer`` is not one of this package.
    """
    engine = checked_engine(optimizer, "compile_report")
    log, states = engine.log, (engine.state.get(param, {}) for param in engine.params)
    return CompileReport(
        type(optimizer).__name__,
        "eager" if engine.step is None else engine.step.name,
        engine.steps,
        tuple(dict.fromkeys(str(s) for s in log.keys.values())),
        tuple(log.compilations),
        tuple(log.fallbacks),
        tuple(log.captures),
        log.replays,
        log.table_refreshes,
        log.compiled_step,
        str(cache_directory()),
        log.construction,
        tuple(log.fallbacks.values()),
        log.moved_steps,
        engine.steps > 0 and isinstance(engine.step, RuleStep) and not any(map(_has_stepped, states)),
    )


def _has_stepped(entries: Any) -> bool:
    """Return whether the state of a parameter has a step count that is not 0; True if it cannot be read."""
    step = entries.get("step")
    return isinstance(step, Tensor) and (not has_memory(step) or bool(step != 0))


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
    """

    optimizer: str
    elements: int
    weights: int
    gradients: int
    state: Mapping[str, int]
    tables: int

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


def checked_engine(optimizer: Any, function: str) -> Engine:
    """Return the engine of ``optimizer``; ``TypeError`` that names ``function`` if it is not one of this package."""
    if not isinstance(optimizer, CompiledOptimizer):
        raise TypeError(f"{function} takes an optimizer of compiled_optim, got {type(optimizer).__name__}")
    return engine_of(optimizer)


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
