"""The command line: ``compiled-optim COMMAND`` or ``python -m compiled_optim COMMAND``.

Each command is a module of this folder. The first line of its docstring is its help, ``arguments`` declares its options, and
``run`` does the work. ``--help`` imports no more than ``import compiled_optim``: commands import other modules in functions.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence

import compiled_optim as co

COMMANDS = ("convert", "diff", "doctor", "explain", "inspect", "list", "lowering")

_EPILOG = "The exit status is 0 if all is well, 1 if the command found something, and 2 if it was used wrongly."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name, by default those of this process. Return its exit status.

    ``--help``, and mistakes in options, raise ``SystemExit``.
    """
    parser = argparse.ArgumentParser(
        "compiled-optim", description="Look into checkpoints, models and steps.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"compiled-optim {co.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in COMMANDS}
    for name, module in modules.items():
        text = (module.__doc__ or "").strip()
        subparser = subparsers.add_parser(name, help=text.partition("\n")[0], description=text, epilog=_EPILOG)
        module.arguments(subparser)
        subparser.add_argument("--json", action="store_true", help="print records as JSON, and nothing else")
        subparser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    options = parser.parse_args(arguments)
    if options.json:
        warnings.simplefilter("ignore")  # the records have their messages
    try:
        status: int = modules[options.command].run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader closed the pipe, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ArithmeticError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        if options.traceback:
            raise
        message = textwrap.shorten(str(error), 1000, placeholder=" ...") or type(error).__name__
        print(f"compiled-optim {options.command}: {message}", file=sys.stderr)
        return 2
