"""Runs the cases of ``overflows`` with Triton kernels, and prints where eager disagrees; with TRITON_INTERPRET=1."""

from __future__ import annotations

import json
import sys

import overflows
from interpreted_storage import interpret


def main() -> None:
    interpret()
    found = {case[0]: overflows.disagreements(*case, "multi_tensor", "eager") for case in overflows.COMPILED}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
