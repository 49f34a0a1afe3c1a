"""Triton's interpreter in less time.

It replaces the language's operations before a kernel and puts them back behind it. At every call of another function it
replaces them once more: those of ``triton.language`` are replaced already, those of modules within stay so since the first
call. Looking for them takes a third of the whole.
"""

from __future__ import annotations

import inspect
from typing import Any

from triton import language
from triton.runtime import interpreter


def install() -> None:
    """For this process, which has to run with TRITON_INTERPRET=1."""
    replaced: set[str] = set()

    def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        modules = [value for value in self.fn.__globals__.values() if inspect.ismodule(value)]
        names = {module.__name__ for module in modules if module in (language, language.core)}
        if not names <= replaced:
            interpreter._patch_lang(self.fn)
            replaced.update(names)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
