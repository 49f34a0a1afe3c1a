"""What happened to an optimizer's compiled code: compilations, their causes, and fallbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from compiled_optim.fields import Rule, real_dtype
from compiled_optim.plan import Member, Plan

K = TypeVar("K")


class RecompileError(RuntimeError):
    """Something was about to be compiled again where :func:`compiled_optim.no_recompiles` forbids it."""


@dataclass(frozen=True)
class Signature:
    """What one compiled kernel is specialised on; two tensors with equal signatures share the kernel."""

    rule: Rule = field(repr=False)
    statics: tuple[tuple[str, Any], ...]
    device: str
    layout: str
    param_dtype: str
    grad_dtype: str
    buffer_dtypes: tuple[str, ...]

    def __str__(self) -> str:
        choices = "".join(f", {name}={value}" for name, value in self.statics)
        buffers = ", ".join(sorted(set(self.buffer_dtypes))) or "none"
        dtypes = f"param {self.param_dtype}, grad {self.grad_dtype}, state {buffers}"
        return f"{self.rule.name}[{self.layout}] {dtypes} on {self.device}{choices}"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of parameter, gradient and buffers."""
        return tuple(getattr(torch, d) for d in (self.param_dtype, self.grad_dtype, *self.buffer_dtypes))

    def grown(self) -> Signature:
        """The signature after every hyperparameter that is 0, and so spares a buffer, has become another number."""
        statics = dict(self.statics) | dict.fromkeys(self.rule.structural_hypers, True)
        dtypes = dict(zip(self.rule.present_buffers(dict(self.statics)), self.buffer_dtypes, strict=True))
        buffers = tuple(dtypes.get(name, self.param_dtype) for name in self.rule.present_buffers(statics))
        return dataclasses.replace(self, statics=tuple(statics.items()), buffer_dtypes=buffers)

    def changes_from(self, old: Signature) -> list[str]:
        """The differences from ``old`` in words, ``grad dtype float32 -> bfloat16``."""
        words = {"layout": "layout", "param_dtype": "param dtype", "grad_dtype": "grad dtype", "device": "device"}
        changes = [
            f"{label} {getattr(old, name)} -> {getattr(self, name)}"
            for name, label in words.items()
            if getattr(old, name) != getattr(self, name)
        ]
        if old.buffer_dtypes != self.buffer_dtypes:
            changes.append(f"state dtypes {old.buffer_dtypes} -> {self.buffer_dtypes}")
        before = dict(old.statics)
        return changes + [f"{k} {before[k]} -> {v}" for k, v in self.statics if before.get(k) != v]


def kernel_signature(plan: Plan, member: Member, grad_dtype: torch.dtype, layout: str) -> Signature:
    """The signature of the kernel that updates ``member`` with a gradient of ``grad_dtype``."""
    dtypes = [member.param.dtype, grad_dtype, *(member.state[name].dtype for name in plan.buffers)]
    param, grad, *buffers = (str(real_dtype(d)).removeprefix("torch.") for d in dtypes)
    return Signature(plan.rule, tuple(plan.statics.items()), plan.device.type, layout, param, grad, tuple(buffers))


@dataclass(frozen=True)
class Compilation:
    """One kernel compiled for one optimizer. ``cause`` is empty for a first compilation."""

    signature: str
    seconds: float
    cause: str = ""


_budgets: list[int] = []  # what the open forbidding_recompilation() blocks still allow


@contextlib.contextmanager
def forbidding_recompilation(budget: int = 0) -> Iterator[None]:
    """Make every recompilation and re-capture of an optimizer's step after the first ``budget`` raise RecompileError."""
    place = len(_budgets)
    _budgets.append(budget)
    try:
        yield
    finally:
        del _budgets[place:]


def spend(message: str) -> None:
    """Take one recompilation or re-capture from the budgets of all open blocks.

    Raises:
        RecompileError: with ``message``; one of them has nothing left.
    """
    if any(left <= 0 for left in _budgets):
        raise RecompileError(message)
    _budgets[:] = [left - 1 for left in _budgets]


@dataclass
class EventLog:
    """The history of one optimizer's compiled code."""

    steps: int = 0
    compilations: list[Compilation] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    captures: list[str] = field(default_factory=list)  # the cause of each, empty for a first one
    replays: int = 0
    table_refreshes: int = 0
    signatures: dict[tuple[str, Rule], Signature] = field(default_factory=dict)  # by parameter and what its kernel does

    def obtain(
        self, cache: dict[Signature, K], signature: Signature, names: Sequence[str], make: Callable[[Signature], K]
    ) -> K:
        """The kernel of ``signature`` for the parameters ``names``: from ``cache``, else made, kept and recorded.

        A kernel that does without a buffer is made together with the one that a hyperparameter's change may ask for.

        Raises:
            RecompileError: it would have to be made again inside ``no_recompiles``.
        """
        if signature not in cache:
            cause = next((c for c in (self._cause(name, signature) for name in names) if c), "")
            if cause:
                spend(f"{signature.rule.name} would recompile its step: {cause}")
            for wanted in dict.fromkeys((signature, signature.grown())):
                if wanted not in cache:
                    started = time.perf_counter()
                    cache[wanted] = make(wanted)
                    self.compilations.append(Compilation(str(wanted), time.perf_counter() - started, cause))
        self.signatures.update(dict.fromkeys(((name, signature.rule) for name in names), signature))
        return cache[signature]

    def _cause(self, name: str, new: Signature) -> str:
        """Why parameter ``name`` needs a kernel of signature ``new``, in words; empty before the first step."""
        if self.steps == 0:
            return ""
        old = self.signatures.get((name, new.rule))
        if old is None:
            return f"parameter '{name}' is new to the optimizer"
        return f"parameter '{name}': {', '.join(new.changes_from(old))}"

    def fall_back(self, reason: str, advice: str) -> None:
        """Record that something runs uncompiled, and warn about it once per reason."""
        if reason not in self.fallbacks:
            self.fallbacks[reason] = advice
            warnings.warn(f"compiled_optim: {reason}; {advice}", RuntimeWarning, stacklevel=2)
