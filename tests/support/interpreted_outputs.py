"""Compares the outputs of Triton's updates that are no arrays; a process of its own, with TRITON_INTERPRET=1.

Prints the cases that were compared. The interpreter truncates where a cast to bfloat16 rounds to nearest, so no float32 is
served in bfloat16 here.
"""

from __future__ import annotations

import argparse
import json
import sys

import quick_interpreter
import torch
from output_cases import compare, output_cases

from compiled_optim.lowering import coefficients
from compiled_optim.lowering.kernels import triton


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+")
    wanted = parser.parse_args().cases
    quick_interpreter.install()
    coefficients.BACKENDS["cpu"] = triton.TritonKernel
    chosen = [case for case in output_cases() if str(case) in wanted]
    for case in chosen:
        assert case.dtype.itemsize == 2 or case.served != torch.bfloat16
        compare(case)
    json.dump([str(case) for case in chosen], sys.stdout)


if __name__ == "__main__":
    main()
