"""The parts of README.md that are generated: the table of optimizers, from the registry.

``python tools/readme.py`` rewrites them; a test fails while they are stale.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import compiled_optim as co
from compiled_optim.fields import Hyper, Static

README = Path(__file__).resolve().parent.parent / "README.md"
_BLOCK = re.compile(r"(<!-- generated: optimizers -->\n).*?(<!-- end -->)", re.DOTALL)


def optimizers_table() -> str:
    """One Markdown row per exported optimizer: what it is, its fields and its state."""
    classes = [c for name in sorted(co.__all__) if _is_optimizer(c := getattr(co, name))]
    rows = ["| optimizer | fields and defaults | state per parameter |", "|---|---|---|"]
    for cls in classes:
        summary = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        choices = [s for s in cls.fields_of(Static) if s.init]
        fields = ", ".join(f"`{f.name}={f.default}`" for f in (*cls.fields_of(Hyper), *choices))
        buffers = ", ".join(f"`{b.name}`" + (f" (with `{b.when}`)" if b.when else "") for b in cls.rule.buffers)
        scalars = ", ".join(f"`{s.name}`" for s in cls.rule.scalars)
        state = ", ".join(filter(None, [buffers, scalars]))
        rows.append(f"| `{cls.__name__}`: {summary.partition(': ')[2] or summary} | {fields} | {state} |")
    return "\n".join(rows)


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, co.CompiledOptimizer) and value is not co.CompiledOptimizer


def generated(text: str) -> str:
    """``text`` with its generated parts brought up to date."""
    return _BLOCK.sub(lambda match: f"{match[1]}{optimizers_table()}\n{match[2]}", text)


if __name__ == "__main__":
    README.write_text(generated(README.read_text()))
