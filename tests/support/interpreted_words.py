"""Runs rules of every word as Triton's kernels on CPU tensors; a process of its own, with TRITON_INTERPRET=1."""

from __future__ import annotations

import json

import quick_interpreter
import word_rules

from compiled_optim.lowering import coefficients
from compiled_optim.lowering.kernels import triton

if __name__ == "__main__":
    quick_interpreter.install()
    coefficients.BACKENDS["cpu"] = triton.TritonKernel
    print(json.dumps(word_rules.run("multi_tensor")))
