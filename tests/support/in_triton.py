"""What a function finds where steps on a CPU are the package's Triton kernels, interpreted, in a process of its own."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from new_process import printed_by


def interpret(module: str, *arguments: str, **variables: str) -> Any:
    """Return what the function ``interpreted`` of a module of this folder finds there, which JSON can hold.

    Args:
        module: its name.
        arguments: the function's.
        variables: of the process's environment.
    """
    return json.loads(printed_by("in_triton", module, *arguments, TRITON_INTERPRET="1", **variables))


def main() -> None:
    """Print what the function finds that the arguments name."""
    import quick_interpreter

    from compiled_optim.lowering import coefficients, stack_loops
    from compiled_optim.lowering.kernels import triton

    quick_interpreter.install()
    coefficients.BACKENDS["cpu"] = triton.TritonKernel
    stack_loops.LOOPS["cpu"] = stack_loops.LOOPS["cuda"]
    module, *arguments = sys.argv[1:]
    json.dump(importlib.import_module(module).interpreted(*arguments), sys.stdout)


if __name__ == "__main__":
    main()
