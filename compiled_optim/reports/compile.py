"""Report the compiled code of an optimizer: kernels, captures, and how its steps run."""

from __future__ import annotations

import functools
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from torch import Tensor

from compiled_optim.groups.parameters import first_few
from compiled_optim.memory.cache import cache_directory
from compiled_optim.memory.layout import has_memory
from compiled_optim.optimizer import CompiledOptimizer, checked_engine
from compiled_optim.plan.compilations import Compilation, CompilationLog
from compiled_optim.reports.finding import Finding
from compiled_optim.step.rule_step import RuleStep

_LOCATE = "to find the line of your code that causes it, run the loop under `with co.no_recompiles():`"


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
        rebuilds: each reason why the host made the step anew, its tables and perhaps kernels, and how often.
        captures: the cause of each capture of a CUDA graph by ``co.CUDAGraphRunner`` or torch.compile; "" for a first one.
        replays: how often these graphs were replayed.
        table_refreshes: how often a kernel's table of addresses was written again. That compiles nothing.
        compiled_step: how a function under ``torch.compile`` holds its steps: as ``its own operations`` (inlined), or as an
            operator and why; empty if no function was traced.
        cache: the directory of compiled C++. Other processes use it too, unless no directory was safe to share.
        construction: the seconds of compiling or loading in the constructor, which only the first one of a process does.
        moved_steps: the number of steps with gradients at new addresses, mostly since ``zero_grad`` had freed them.
        findings: named as follows. ``"too small"``: the first step was too small for some 16-bit parameters. ``"not
            judged"``: an error kept it from finding out. ``"idle"``: steps were taken, and none changed a parameter.
            ``"slower"``: something takes longer than it could, such as a part that runs uncompiled. ``"recompiled"`` and
            ``"captured again"``: a cause of compilations after the first step, or of captures that replaced a stale graph.
    """

    optimizer: str
    lowering: str
    steps: int
    kernels: tuple[str, ...]
    compilations: tuple[Compilation, ...]
    rebuilds: tuple[tuple[str, int], ...]
    captures: tuple[str, ...]
    replays: int
    table_refreshes: int
    compiled_step: str
    cache: str
    construction: float
    moved_steps: int
    findings: tuple[Finding, ...]

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
        names = {finding.name for finding in self.findings}
        verdicts = {
            "The first step is too small for some weights: see below.": "too small" in names,
            "Nothing was updated: see below.": "idle" in names,
            "Slower than it could be: see below.": "slower" in names,
            "Compiled again after the first step: see below.": "recompiled" in names,
            "Captured again: see below.": "captured again" in names,
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
            **self._lines("too small"),
            **self._lines("not judged"),
            **self._lines("idle"),
            f"  {self.construction:.2f} s of compiling at construction": self.construction >= 0.1,
            f"  kernels: {kernels} in {self.seconds - self.construction:.2f} s": bool(kernels),
            **{f"  {self._origin(kernel)}: {kernel}": True for kernel in self.kernels},
            **self._lines("recompiled"),
            f"  {self._rebuilt()}": bool(self.rebuilds),
            f"  {len(self.captures)} captures, {self.recaptures} re-captures, {self.replays} replays": bool(self.captures),
            **self._lines("captured again"),
            f"    {_LOCATE}": bool(self.recompiles or self.recaptures),
            **self._lines("slower"),
            f"  {moved}: one small copy of addresses each; nothing to do": self.moved_steps > 1,
            f"  compiled code holds {self.compiled_step}": bool(self.compiled_step),
            f"  compiled C++ is kept{until} in {self.cache}": bool(self.kernels),
        }
        fill = functools.partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
        return "\n".join(fill(line, subsequent_indent=" " * 6) for line, holds in lines.items() if holds)

    def _rebuilt(self) -> str:
        reasons = [reason + f" ({count} times)" * (count > 1) for reason, count in self.rebuilds]
        return f"rebuilt on the host, which compiles nothing by itself: {first_few(reasons)}"

    def _lines(self, name: str) -> dict[str, bool]:
        """Return a line for each finding of this name, without the advice that repetitions share."""
        named = (finding for finding in self.findings if finding.name == name)
        whose = {each: f"{first_few(each.params)}: " if each.params else "" for each in named}
        return {f"  {name}: {of}{f.evidence if f.advice == _LOCATE else f.said}": True for f, of in whose.items()}

    def _origin(self, kernel: str) -> str:
        compilations = [c for c in self.compilations if c.kernel == kernel]
        how = "loaded" if all(c.loaded for c in compilations) else "compiled"
        return f"{how} in {sum(c.seconds for c in compilations):.2f} s" if compilations else "the process had already"


def findings_of(log: CompilationLog, *, is_idle: bool) -> Iterator[Finding]:
    """Yield the findings of a :class:`CompileReport`, from the history of the optimizer's compiled code."""
    if is_idle:
        evidence = "no parameter ever had a gradient, or all steps were skipped"
        yield Finding("idle", (), evidence, "call loss.backward() before step()")
    for reason, advice in log.fallbacks.items():
        yield Finding("slower", (), reason, advice)
    for name, causes in {"recompiled": [c.cause for c in log.compilations], "captured again": log.captures}.items():
        for cause, count in Counter(filter(None, causes)).items():
            yield Finding(name, (), cause + f" ({count} times)" * (count > 1), _LOCATE)


def compile_report(optimizer: CompiledOptimizer) -> CompileReport:
    """Report the kernels that were compiled for ``optimizer``, and how its steps run.

    Raises:
        TypeError: ``optimizer`` is not one of this package.
    """
    engine = checked_engine(optimizer, "compile_report")
    log, states = engine.log, (engine.state.get(param, {}) for param in engine.params)
    is_idle = engine.steps > 0 and isinstance(engine.step, RuleStep) and not any(map(_has_stepped, states))
    return CompileReport(
        type(optimizer).__name__,
        "eager" if engine.step is None else engine.step.name,
        engine.steps,
        tuple(dict.fromkeys(str(s) for s in log.keys.values())),
        tuple(log.compilations),
        tuple(log.rebuilds.items()),
        tuple(log.captures),
        log.replays,
        log.table_refreshes,
        log.compiled_step,
        str(cache_directory()),
        log.construction,
        log.moved_steps,
        (*starmap(Finding, engine.trial.findings), *findings_of(log, is_idle=is_idle)),
    )


def _has_stepped(entries: Any) -> bool:
    """Return whether the state of a parameter has a step count that is not 0; True if it cannot be read."""
    step = entries.get("step")
    return isinstance(step, Tensor) and (not has_memory(step) or bool(step != 0))
