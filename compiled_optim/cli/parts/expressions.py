"""Arguments of commands: values, calls with values, and optimizers. Only literals are evaluated."""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Iterable
from typing import Any

import compiled_optim as co


def call(node: ast.AST, source: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the dotted name, and positional and named arguments, of a call with literals. A bare name has no arguments.

    Raises:
        ValueError: ``node`` is something else. The message quotes ``source``.
    """
    called = node if isinstance(node, ast.Call) else None
    named = name = node if called is None else called.func
    arguments, keywords = ([], []) if called is None else (called.args, called.keywords)
    while isinstance(named, ast.Attribute):
        named = named.value
    if not isinstance(named, ast.Name) or any(keyword.arg is None for keyword in keywords):
        raise ValueError(f"{source!r} is not a name with arguments, such as StepLR(step_size=30)")
    values = [_literal(argument) for argument in arguments]
    return ast.unparse(name), values, {str(keyword.arg): _literal(keyword.value) for keyword in keywords}


def parsed(source: str) -> ast.expr:
    """Parse an expression. Raise ``ValueError`` if it is none."""
    try:
        return ast.parse(source.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{source!r} cannot be read: {error.msg}, at character {error.offset}") from error


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"{ast.unparse(node)!r} is not a plain value: a number, quoted text, True, None, a list") from error


def settings(pairs: Iterable[str]) -> dict[str, Any]:
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


def optimizer_arguments(parser: argparse.ArgumentParser, default: str = "adamw") -> None:
    """Declare ``--optimizer`` and ``--set``."""
    parser.add_argument("--optimizer", default=default, metavar="NAME", help=f"see the command list; {default} by default")
    set_argument(parser)


def set_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--set``."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of the optimizer, such as lr=1e-3"
    )


def created(name: str, params: Any, pairs: Iterable[str], **options: Any) -> co.CompiledOptimizer:
    """Create the optimizer called ``name`` with the arguments of ``--set``. Required ones (``lr``) are 1e-3 by default."""
    passed = settings(pairs)
    required = [a.name for a in co.optimizer_info(name).arguments if a.default is inspect.Parameter.empty]
    return co.create(name, params, **(dict.fromkeys(required, 1e-3) | options | passed))
