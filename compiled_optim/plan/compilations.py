"""The key of a compiled kernel; the log of an optimizer's compiled code: compilations, causes, fallbacks; their budget."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from compiled_optim.memory.cache import uses
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.outputs import NONE, Outputs
from compiled_optim.rule.rule import Rule

MULTI_TENSOR = "multi-tensor"  # the arrangement of tensors that a kernel reads by address
LISTS, LISTS_OF_ROWS = "lists", "lists of rows"  # those of tensors that Inductor's code takes one by one
COEFFICIENTS = "coefficients"  # the arrangement of a kernel that evaluates coefficients and updates nothing


@dataclass(frozen=True)
class KernelKey:
    """The properties on which one compiled kernel is specialised; tensors with equal keys share the kernel.

    ``device`` is one device, ``cuda:1``, or a type of devices, ``cuda``, where all of them share the kernel. ``arrangement``
    says how the kernel gets its tensors: by their addresses, in stacks of certain shapes, packed, or one by one.
    """

    rule: Rule = field(repr=False)
    statics: tuple[tuple[str, Any], ...]
    device: str
    arrangement: str
    dtypes: tuple[torch.dtype, ...]  # of the real numbers of parameter, gradient and buffers
    outputs: Outputs = NONE  # of the end of the update

    def __str__(self) -> str:
        others = {static.name for static in self.rule.statics if not static.init}
        choices = "".join(f", {n}={value}" for n, value in self.statics if n not in others and value not in (False, None))
        param, grad, *buffers = map(_name, self.dtypes)
        state = ", ".join(sorted(set(buffers))) or "none"
        dtypes = grad if not self.updates or {grad, *buffers} == {param} else f"param {param}, grad {grad}, state {state}"
        outputs = f", {self.outputs}" if self.outputs else ""
        return f"{self.rule.name}[{self.arrangement}] {dtypes} on {self.device}{choices}{outputs}"

    @property
    def updates(self) -> bool:
        """Whether the kernel updates tensors."""
        return self.arrangement != COEFFICIENTS

    def with_all_buffers(self) -> KernelKey:
        """Return the key with the buffers of hyperparameters that are 0 now, as if all were nonzero."""
        if not self.updates:
            return self
        statics = dict(self.statics) | dict.fromkeys(self.rule.structural_hypers, True)
        dtypes = dict(zip(self.rule.present_buffers(dict(self.statics)), self.dtypes[2:], strict=True))
        present = [b for b in self.rule.buffers if b.is_present(statics)]
        buffers = [dtypes.get(b.name) or self.rule.dtype_of(b, self.dtypes[0], statics) for b in present]
        in_rows = self.arrangement == LISTS and self.rule.grouped_buffers(statics)
        key = dataclasses.replace(self, arrangement=LISTS_OF_ROWS) if in_rows else self
        return dataclasses.replace(key, statics=tuple(statics.items()), dtypes=(*self.dtypes[:2], *buffers))

    def changes_from(self, old: KernelKey) -> list[str]:
        """Return the differences from ``old`` in words, ``grad dtype float32 -> bfloat16``."""
        before, now = old._in_words(), self._in_words()
        return [f"{k} {before.get(k)} -> {now.get(k)}" for k in {**before, **now} if before.get(k) != now.get(k)]

    def _in_words(self) -> dict[str, Any]:
        param, grad, *buffers = map(_name, self.dtypes)
        dtypes = {"param dtype": param, "grad dtype": grad, "device": self.device, "state dtypes": tuple(buffers)}
        dtypes |= {"outputs": str(self.outputs)} if self.outputs else {}
        return {"arrangement": self.arrangement, **dtypes, **dict(self.statics)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kernel_key(plan: Plan, member: Member, grad_dtype: torch.dtype, arrangement: str) -> KernelKey:
    """Return the key of the kernel that updates ``member`` with a gradient of ``grad_dtype``."""
    dtypes = [member.param.dtype, grad_dtype, *(member.entries[name].dtype for name in plan.buffers)]
    # Triton runs a multi-tensor kernel on the current device; Inductor writes the device's number into its code.
    device = plan.device.type if arrangement == MULTI_TENSOR else str(plan.device)
    real = tuple(d.to_real() for d in dtypes)
    outputs = plan.outputs.choice if arrangement == MULTI_TENSOR else NONE
    return KernelKey(plan.rule, tuple(plan.statics.items()), device, arrangement, real, outputs)


def coefficient_key(plan: Plan, grad_dtype: torch.dtype = torch.float64) -> KernelKey:
    """Return the key of the kernel that evaluates all coefficients of ``plan``, and measures gradients of ``grad_dtype``."""
    chosen = {choice.name for choice in (*plan.rule.statics, *plan.rule.options)}
    statics = tuple((name, value) for name, value in plan.statics.items() if name in chosen)
    return KernelKey(plan.rule, statics, plan.device.type, COEFFICIENTS, (torch.float64, grad_dtype.to_real()))


K = TypeVar("K")


class RecompileError(RuntimeError):
    """Raised before a repeated compilation or capture where :func:`no_recompiles` forbids it."""


@dataclass(frozen=True)
class Compilation:
    """One kernel compiled for one optimizer, or loaded where another process had compiled it.

    Attributes:
        kernel: its key.
        seconds: its duration, with the imports that it needed.
        cause: why it was needed after the first step; empty for a first compilation.
        loaded: whether all of its code came from the cache.
    """

    kernel: str
    seconds: float
    cause: str = ""
    loaded: bool = False


_budgets: dict[object, int] = {}  # the recompilations that each open no_recompiles() block, of any thread, still allows


@contextlib.contextmanager
def no_recompiles(budget: int = 0) -> Iterator[None]:
    """Forbid recompilation and re-capture inside a ``with`` block.

    It covers optimizer steps, the graphs of ``co.CUDAGraphRunner`` and, without a budget, every other function under
    ``torch.compile``. First compilations and first captures are allowed.

    Args:
        budget: how many recompilations and re-captures are allowed, counted over all optimizers.

    Raises:
        RecompileError: the message names the change, with old and new value. The optimizer has not taken the step.
        ValueError: ``budget`` is negative.
    """
    if budget < 0:
        raise ValueError(f"budget must be >= 0, got {budget}")
    block = object()
    _budgets[block] = budget
    try:
        with torch.compiler.set_stance("fail_on_recompile" if budget == 0 else "default"):
            yield
    except RuntimeError as error:
        if isinstance(error, RecompileError) or "Detected recompile" not in str(error):
            raise
        raise RecompileError(str(error)) from error
    finally:
        del _budgets[block]


def spend(message: str) -> None:
    """Take one recompilation or re-capture from the budgets of all open blocks, or raise ``RecompileError(message)``."""
    if any(left <= 0 for left in _budgets.values()):
        raise RecompileError(message)
    _budgets.update({block: left - 1 for block, left in _budgets.items()})


@dataclass
class CompilationLog:
    """The history of one optimizer's compiled code."""

    has_stepped: bool = False  # later compilations have a cause
    compilations: list[Compilation] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    rebuilds: Counter[str] = field(default_factory=Counter)  # why the step was rebuilt, and how often
    rebuilt: str = ""  # the last of these reasons
    captures: list[str] = field(default_factory=list)  # the cause of each, empty for a first one; a compiler's too
    replays: int = 0
    table_refreshes: int = 0
    has_moved: bool = False  # whether gradients have other addresses than in the last step
    moved_steps: int = 0  # the number of steps that began so
    construction: float = 0.0  # seconds of compiling or loading in the constructor
    compiled_step: str = ""  # a description of the traced code
    keys: dict[tuple[str, bool], KernelKey] = field(default_factory=dict)  # by parameter, and whether the kernel updates it

    def obtain(self, cache: dict[KernelKey, K], key: KernelKey, names: Sequence[str], make: Callable[[KernelKey], K]) -> K:
        """Return the kernel of ``key`` for the parameters ``names``: from ``cache``, or new, then cached and recorded.

        A kernel without a buffer that a hyperparameter may switch on is compiled together with the kernel that has this
        buffer. Inside ``no_recompiles``, a recompilation raises ``RecompileError``.
        """
        if key not in cache:
            if cause := next((c for c in (self._cause(name, key) for name in names) if c), ""):
                spend(f"{key.rule.name} would recompile its step: {cause}")
            for wanted in dict.fromkeys((key, key.with_all_buffers())):
                if wanted not in cache:
                    started, before = time.perf_counter(), uses.copy()
                    cache[wanted] = make(wanted)
                    loaded = uses["made"] == before["made"] and uses["taken"] > before["taken"]
                    self.compilations.append(Compilation(str(wanted), time.perf_counter() - started, cause, loaded))
        self.keys.update(dict.fromkeys(((name, key.updates) for name in names), key))
        return cache[key]

    def obtain_or_fall_back(
        self,
        cache: dict[KernelKey, K | str],
        key: KernelKey,
        names: Sequence[str],
        make: Callable[[KernelKey], K | str],
        uncompiled: Callable[[KernelKey], K],
    ) -> K:
        """Do as :meth:`obtain`; if ``make`` returns a reason instead, record it and return ``uncompiled(key)``."""
        kernel = self.obtain(cache, key, names, make)
        if not isinstance(kernel, str):
            return kernel
        self.fall_back(f"{key.rule.name} runs eager: {kernel}", "a step takes longer")
        return uncompiled(key)

    def _cause(self, name: str, new: KernelKey) -> str:
        """Return why parameter ``name`` needs a kernel of key ``new``; empty before the first step."""
        if not self.has_stepped:
            return ""
        if (old := self.keys.get((name, new.updates))) is None:
            return f"parameter '{name}' is new to the optimizer"
        return f"parameter '{name}': {', '.join(new.changes_from(old))}"

    def fall_back(self, reason: str, advice: str) -> None:
        """Record that something runs uncompiled, and warn about it once per reason."""
        if reason not in self.fallbacks:
            self.fallbacks[reason] = advice
            warnings.warn(f"compiled_optim: {reason}; {advice}", RuntimeWarning, stacklevel=users_level())


def users_level() -> int:
    """Return the ``stacklevel``, for a warning of the caller's, of the line that called this package, past wrappers."""
    frame, level = inspect.currentframe(), 0
    assert frame is not None
    skipped = ("compiled_optim", "torch", "contextlib", "concurrent", "threading")
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in skipped:
        frame, level = frame.f_back, level + 1
    return level
