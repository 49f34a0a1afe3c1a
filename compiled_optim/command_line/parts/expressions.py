"""What users write as arguments: values, calls with values, and optimizers. Nothing is evaluated but literals."""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Iterable
from typing import Any

import compiled_optim as co


def call(node: ast.AST, source: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The dotted name, positional and named arguments of a call whose arguments are literals; a bare name has none.

    Raises:
        ValueError: it is something else; the message quotes ``source``.
    """
    made = node if isinstance(node, ast.Call) else None
    named = name = node if made is None else made.func
    arguments, keywords = ([], []) if made is None else (made.args, made.keywords)
    while isinstance(named, ast.Attribute):
        named = named.value
    if not isinstance(named, ast.Name) or any(keyword.arg is None for keyword in keywords):
        raise ValueError(f"{source!r} is no name with arguments, such as StepLR(step_size=30)")
    values = [_literal(argument) for argument in arguments]
    return ast.unparse(name), values, {str(keyword.arg): _literal(keyword.value) for keyword in keywords}


def parsed(source: str) -> ast.expr:
    """The syntax of an expression; ``ValueError`` where it is none."""
    try:
        return ast.parse(source.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{source!r} cannot be read: {error.msg}, at character {error.offset}") from error


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"{ast.unparse(node)!r} is no plain value: a number, text in quotes, True, None, a list") from error


def settings(pairs: Iterable[str]) -> dict[str, Any]:
    """The arguments that ``--set name=value`` gave; a value that is no literal is text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--set takes name=value, got {pair!r}")
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[name] = value
    return found


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
    """The optimizer called ``name`` with what ``--set`` gave; an ``lr`` that it requires and nobody gave is 1e-3."""
    given = settings(pairs)
    required = [a.name for a in co.optimizer_info(name).arguments if a.default is inspect.Parameter.empty]
    return co.create(name, params, **(dict.fromkeys(required, 1e-3) | options | given))
