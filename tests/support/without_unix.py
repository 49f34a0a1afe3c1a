"""Imports each of the named modules where Python lacks the modules that are Unix's own, and prints how many."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

import torch._dynamo
import torch._inductor.config
import torch.distributed  # which have ways of their own for other systems  # noqa: F401

OF_UNIX = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")


class Absent(ImportError):
    """No ``ModuleNotFoundError``, of which that of an extra package is another one."""


class _Refusing:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in OF_UNIX:
            raise Absent(f"{name} is not on this system")


def main(names: list[str]) -> None:
    for name in OF_UNIX:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Refusing())  # type: ignore[arg-type]
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):  # packages of an extra
            importlib.import_module(name)
    print(len(names))


if __name__ == "__main__":
    main(sys.argv[1:])
