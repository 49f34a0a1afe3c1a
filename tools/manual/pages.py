"""The pages of the documentation as text: guides, optimizers, reference, recipes. Sphinx is not needed to make them."""

from __future__ import annotations

import inspect
import json
import operator
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from readme import FLOORS, INSIDE, READMES, ROOT, condition, is_optimizer

import compiled_optim as co
from compiled_optim.rule.fields import Buffer

_OPTIMIZERS, _RECIPES = Path("compiled_optim", "optimizers"), Path("tools", "recipes")
_RULE = ("axes", "coefficients", "reduce", "adapt", "update")
_LINK = re.compile(r"(\]\()([^)#\s]+)")
_COMMON = " ".join((co.CompiledOptimizer.__doc__ or "").split())
_GUIDES = {path: path.relative_to(ROOT).with_name("index.md") for path in READMES}
_GUIDES |= {ROOT / "perf" / "GPU.md": Path("perf", "GPU.md"), ROOT / "compiled_optim" / "CHANGELOG.md": Path("changelog.md")}


def pages() -> dict[Path, str]:
    """Return the text of each page by its path."""
    texts = {page: _LINK.sub(_to_page, path.read_text()) for path, page in _GUIDES.items()}
    infos = [co.optimizer_info(name) for name in co.list_optimizers()]
    recipes = {
        path.stem: _recipe(path.stem.replace("_", " "), path.read_text()) for path in sorted((ROOT / _RECIPES).glob("*.py"))
    }
    texts |= {_OPTIMIZERS / f"{info.name}.rst": "\n".join(_optimizer(info)) for info in infos}
    texts |= {_RECIPES / f"{name}.rst": text for name, text in recipes.items()}
    texts |= {Path("reference", f"{name}.rst"): text for name, text in _reference().items()}
    table, first = _OPTIMIZERS / "index.md", Path("index.md")
    texts[first] = texts[first].replace("\n## Differences from", "\n(differences)=\n## Differences from")
    for info in infos:
        texts[table] = texts[table].replace(f"\n| `{info.cls.__name__}`:", f"\n| [`{info.cls.__name__}`]({info.name}.rst):")
    texts[table] += _toctree([info.name for info in infos])
    texts[Path("perf/index.md")] += _toctree(["GPU"])
    texts[first] += _toctree([f"compiled_optim/{name}/index" for name in FLOORS], "Guides")
    texts[first] += _toctree(["reference/index"], "Reference")
    texts[first] += _toctree([str(Path("compiled_optim", name, "index")) for name in INSIDE], "Inside")
    texts[first] += _toctree([f"{_RECIPES}/{name}" for name in recipes], "Recipes") if recipes else ""
    others = [str(page.with_suffix("")) for page in _GUIDES.values() if page.parts[0] != "compiled_optim"]
    texts[first] += _toctree(sorted({*others} - {"index", "perf/GPU"}), "Project")
    return texts


def files() -> Iterator[Path]:
    """Yield the files that guides link to besides pages: pictures and tables."""
    for guide in _GUIDES:
        linked = ((guide.parent / match[2]).resolve() for match in _LINK.finditer(guide.read_text()))
        yield from (path for path in linked if path.is_file() and path.suffix not in (".md", ".py"))


def _to_page(link: re.Match[str]) -> str:
    """Return a link between files of the repository as one between pages. Files of optimizers, and recipes, have pages."""
    target = re.sub(
        r"README\.md$", "index.md", re.sub(r"^((?:.*/)?(?:optimizers|recipes)/|)(\w+)\.py$", r"\1\2.rst", link[2])
    )
    return link[1] + re.sub(r"(compiled_optim/)?CHANGELOG\.md$", "changelog.md", target)


def _toctree(listed: Iterable[str], caption: str = "") -> str:
    return "\n".join(["\n```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *listed, "```\n"])


def _title(title: str, line: str = "=") -> list[str]:
    return [title, line * len(title), ""]


def _indented(text: str) -> list[str]:
    return [f"   {line}".rstrip() for line in text.strip("\n").split("\n")] + [""]


def _table(head: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    lines = [
        f"{'     -' if column else '   * -'} {cell}".rstrip() for row in (head, *rows) for column, cell in enumerate(row)
    ]
    return [".. list-table::", "   :header-rows: 1", "", *lines, ""]


def _literal(value: object) -> str:
    return f"``{json.dumps(value) if isinstance(value, str) else repr(value)}``"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"``{name}``" for name in names)


def _optimizer(info: co.OptimizerInfo) -> Iterator[str]:
    """Yield the lines of an optimizer's page, from its declarations."""
    specific, empty = [argument for argument in info.arguments if argument.help not in _COMMON], inspect.Parameter.empty
    public = f"mup.{info.cls.__name__}" if info.name.startswith("mup.") else info.cls.__name__
    description, _, differs = (inspect.getdoc(info.cls) or "").partition("\nArgs:")[0].partition("Differs from")
    differs, _, more = differs.partition("\n\n")
    shown = [a.name if a.default is empty else f"{a.name}={a.default!r}" for a in specific]
    yield from _title(public)
    yield from [f".. py:class:: {public}(params, {', '.join(shown)}, **common)", "   :module: compiled_optim", ""]
    yield from _indented(f"{description}\n\n{more}\n\nThe same by name: ``co.create({json.dumps(info.name)}, model)``.")
    for name in sorted({*dir(info.cls)} - {*dir(co.CompiledOptimizer), *_RULE}):
        yield from _indented(f".. automethod:: compiled_optim.{public}.{name}") if name[0] != "_" else ()
    rows = ([f"``{a.name}``", "required" if a.default is empty else _literal(a.default), a.help] for a in specific)
    yield from [*_title("Arguments", "-"), *_table(["argument", "default", "meaning"], rows)]
    common = _listed(argument.name for argument in info.arguments if argument not in specific)
    yield from [
        f":class:`~compiled_optim.CompiledOptimizer` explains the arguments that several optimizers have: {common}.",
        "",
    ]
    functions = [function for name in _RULE if (function := getattr(info.cls, name, None))]
    if functions:
        yield from [
            *_title("Rule", "-"),
            "All kernels are generated from these functions.",
            "",
            ".. code-block:: python",
            "",
        ]
        yield from _indented(
            "\n".join(inspect.cleandoc("\n" + inspect.getsource(function)) + "\n" for function in functions)
        )
    yield from [
        *_title("State", "-"),
        *(_state(info) if functions else ["One for all parameters: ", _listed(info.states), ""]),
    ]
    yield from [*_title("Differences from torch.optim", "-"), *([f"Differs from{differs}", ""] if differs else [])]
    yield from [_difference(info), "See also :ref:`what differs for all optimizers <differences>`.", ""]


def _state(info: co.OptimizerInfo) -> Iterator[str]:
    declared = info.cls._declared
    scalars = _listed(["step", *(field.name for field in info.cls._declaration.scalars if field.name in declared)])
    buffers = (field for field in declared.values() if isinstance(field, Buffer))
    entries = ", ".join(f"``{b.name}``{condition(info.cls, b).replace('`', '``')}" for b in buffers)
    yield from [f"Numbers: {scalars}. Tensors: {entries or 'none'}.", ""]
    yield from ["Bytes for each element of a large matrix, for weight, gradient and state together:", ""]
    sizes: dict[str, list[str]] = {}
    for precision, size in info.bytes_per_parameter.items():
        weights = re.sub(r"(, state_dtype=int8)|weights=(\w+)", lambda m: "" if m[1] else f'``weights="{m[2]}"``', precision)
        sizes.setdefault(weights, []).append(f"{size:g}")
    head = ["weights", "state as the weights", '``state_dtype="int8"``'][: 1 + max(map(len, sizes.values()))]
    yield from _table(head, ([name, *cells, *[""] * (len(head) - 1 - len(cells))] for name, cells in sizes.items()))


def _difference(info: co.OptimizerInfo) -> str:
    """Describe the differences from torch.optim's constructor, if it has one, and name the state dicts that are loaded."""
    loads = (
        f"It loads state dicts of {' and '.join(f'``{name}``' for name in info.counterparts)}." if info.counterparts else ""
    )
    counterpart = getattr(torch.optim, info.cls.__name__, None)
    if counterpart is None or not info.counterparts:
        return f"torch.optim has no such optimizer. {loads}"
    arguments, here = inspect.signature(counterpart).parameters, {a.name: a.default for a in info.arguments}
    others = [f"``{n}`` ({_literal(p.default)} there)" for n, p in arguments.items() if here.get(n, p.default) != p.default]
    more = _listed(a.name for a in info.arguments if a.name not in arguments and a.help not in _COMMON)
    more = f"Arguments that ``torch.optim.{counterpart.__name__}`` lacks, beside the common ones: {more}." if more else ""
    return f"{loads} {'Other defaults: ' + ', '.join(others) if others else 'Defaults are the same'}. {more}"


def _reference() -> dict[str, str]:
    """Return a page for every public name that is no optimizer, and one that lists them."""
    of_mup = [f"mup.{n}" for n, f in vars(co.mup).items() if inspect.isfunction(f) and f.__module__ == co.mup.__name__]
    names = [name for name in co.__all__ if name != "mup" and not is_optimizer(getattr(co, name))]
    texts, rows = {}, []
    for name in sorted([*names, *(name for name in of_mup if "._" not in name)], key=str.lower):
        member = operator.attrgetter(name)(co)
        kind = "function" if inspect.isfunction(member) else "exception" if issubclass(member, Exception) else "class"
        inherited = ["   :inherited-members: Optimizer"] if name == co.CompiledOptimizer.__name__ else []
        texts[name] = "\n".join([*_title(name), f".. auto{kind}:: compiled_optim.{name}", *inherited])
        rows.append([f":doc:`{name}`", (inspect.getdoc(member) or "").partition("\n\n")[0].replace("\n", " ")])
    head = [*_title("Reference"), ".. py:currentmodule:: compiled_optim", ""]
    head += ["Each optimizer has :doc:`a page of its own <../compiled_optim/optimizers/index>`.", ""]
    toctree = [".. toctree::", "   :hidden:", "", *(f"   {name}" for name in texts)]
    return {**texts, "index": "\n".join([*head, *_table(["``co.``", "description"], rows), *toctree])}


def _recipe(title: str, text: str) -> str:
    """Return a page with a program's docstring, its code, and its output, which the comment at its end has."""
    docstring, code = re.fullmatch(r'"""(.*?)"""\n(.*)', text, re.DOTALL).groups()
    code, *output = re.split(r"\n# Prints(.*:\n)", code)
    lines = [*_title(title), inspect.cleandoc(docstring), "", ".. code-block:: python", "", *_indented(code)]
    if output:
        lines += [f"It prints{output[0]}", ".. code-block:: text", ""]
        lines += _indented(re.sub(r"^# ?", "", output[1], flags=re.MULTILINE))
    return "\n".join(lines)
