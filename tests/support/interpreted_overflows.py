"""Runs the cases of ``overflows`` with Triton kernels, and prints where eager disagrees; with TRITON_INTERPRET=1."""

from __future__ import annotations

import json
import sys
import warnings

import overflows
import quick_interpreter
from interpreted_storage import convert_bfloat16, leave_undefined

from compiled_optim.lowering import multi_tensor
from compiled_optim.lowering.kernels import triton


def main() -> None:
    quick_interpreter.install()
    convert_bfloat16()
    leave_undefined()
    multi_tensor.BACKENDS["cpu"] = triton.TritonKernel
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, of what is infinite
    found = {case[0]: overflows.disagreements(*case, "multi_tensor", "eager") for case in overflows.COMPILED}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
