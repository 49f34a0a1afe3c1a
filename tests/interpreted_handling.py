"""Runs the Triton kernels on the cases of ``handling``; a process of its own, with TRITON_INTERPRET=1."""

from __future__ import annotations

import json
import sys

import handling

from compiled_optim.lowering import multi_tensor, triton

if __name__ == "__main__":
    multi_tensor.BACKENDS["cpu"] = triton.build
    json.dump({"errors": handling.errors("multi_tensor"), "huge": handling.end_of_huge(2)}, sys.stdout)
