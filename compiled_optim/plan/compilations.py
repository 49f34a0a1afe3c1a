"""What happened to an optimizer's compiled code: compilations, their causes, and fallbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from compiled_optim.memory.cache import uses
from compiled_optim.plan.kernel_key import KernelKey

K = TypeVar("K")


class RecompileError(RuntimeError):
    """Something was about to be compiled again where :func:`compiled_optim.no_recompiles` forbids it."""


@dataclass(frozen=True)
class Compilation:
    """One kernel compiled for one optimizer, or loaded where another process had compiled it.

    Attributes:
        kernel: its key.
        seconds: how long that took, with whatever had to be imported for it.
        cause: why it was needed after the first step; empty for a first compilation.
        loaded: whether all of its code came from the cache.
    """

    kernel: str
    seconds: float
    cause: str = ""
    loaded: bool = False


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
    """Take one recompilation or re-capture from the budgets of all open blocks, or raise ``RecompileError(message)``."""
    if any(left <= 0 for left in _budgets):
        raise RecompileError(message)
    _budgets[:] = [left - 1 for left in _budgets]


@dataclass
class CompilationLog:
    """The history of one optimizer's compiled code."""

    has_stepped: bool = False  # what is compiled from then on has a cause
    compilations: list[Compilation] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    captures: list[str] = field(default_factory=list)  # the cause of each, empty for a first one; a compiler's too
    replays: int = 0
    table_refreshes: int = 0
    compiled_step: str = ""  # what traced code holds
    keys: dict[tuple[str, bool], KernelKey] = field(default_factory=dict)  # by parameter, and whether the kernel updates it

    def obtain(self, cache: dict[KernelKey, K], key: KernelKey, names: Sequence[str], make: Callable[[KernelKey], K]) -> K:
        """The kernel of ``key`` for the parameters ``names``: from ``cache``, else made, kept and recorded.

        A kernel that does without a buffer is made together with the one that a hyperparameter's change may ask for. Inside
        ``no_recompiles``, ``RecompileError`` is raised in place of making one again.
        """
        if key not in cache:
            if cause := next((c for c in (self._cause(name, key) for name in names) if c), ""):
                spend(f"{key.rule.name} would recompile its step: {cause}")
            for wanted in dict.fromkeys((key, key.grown())):
                if wanted not in cache:
                    started, before = time.perf_counter(), dataclasses.replace(uses)
                    cache[wanted] = make(wanted)
                    loaded = uses.made == before.made and uses.taken > before.taken
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
        """As :meth:`obtain`; where ``make`` says why nothing can be compiled, what ``uncompiled`` returns, recorded."""
        made = self.obtain(cache, key, names, make)
        if not isinstance(made, str):
            return made
        self.fall_back(f"{key.rule.name} runs eager: {made}", "a step takes longer")
        return uncompiled(key)

    def _cause(self, name: str, new: KernelKey) -> str:
        """Why parameter ``name`` needs a kernel of key ``new``, in words; empty before the first step."""
        if not self.has_stepped:
            return ""
        if (old := self.keys.get((name, new.updates))) is None:
            return f"parameter '{name}' is new to the optimizer"
        return f"parameter '{name}': {', '.join(new.changes_from(old))}"

    def fall_back(self, reason: str, advice: str) -> None:
        """Record that something runs uncompiled, and warn about it once per reason."""
        if reason not in self.fallbacks:
            self.fallbacks[reason] = advice
            warnings.warn(f"compiled_optim: {reason}; {advice}", RuntimeWarning, stacklevel=2)
