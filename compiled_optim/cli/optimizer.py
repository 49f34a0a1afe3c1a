"""The optimizers that commands make, by name and with arguments that are literals."""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Iterable
from typing import Any

import compiled_optim as co


def optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--set`` and ``--dtype``."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of the optimizer, such as lr=1e-3"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the parameters; by default the model's, or float32"
    )


def created(name: str, params: Any, pairs: Iterable[str]) -> co.CompiledOptimizer:
    """Create the optimizer called ``name`` with the arguments of ``--set``. Required ones (``lr``) are 1e-3 by default."""
    required = [a.name for a in co.optimizer_info(name).arguments if a.default is inspect.Parameter.empty]
    return co.create(name, params, **(dict.fromkeys(required, 1e-3) | _settings(pairs)))


def _settings(pairs: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of ``--set name=value``. A value that is no literal is text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--set takes name=value, got {pair!r}")
        try:
            values[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            values[name] = value
    return values
