"""The documentation has a page for everything public, made of declarations and docstrings."""

from __future__ import annotations

import inspect
import re
import subprocess
from os.path import normpath
from pathlib import Path

import pytest
from manual import pages
from readme import ROOT, is_optimizer

import compiled_optim as co

MADE = pages.pages()


def test_every_public_name_has_a_page() -> None:
    text = "\n".join(MADE.values())
    documented = {*re.findall(r"^\.\. auto\w+:: compiled_optim\.([\w.]+)$", text, re.MULTILINE)}
    documented |= {*re.findall(r"^\.\. py:class:: ([\w.]+)\(", text, re.MULTILINE)}
    wanted = {name for name in co.__all__ if name != "mup"}
    wanted |= {
        f"mup.{n}" for n, m in vars(co.mup).items() if n[0] != "_" and getattr(m, "__module__", "") == co.mup.__name__
    }
    assert documented == wanted


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = {Path("index")}
    for place, text in MADE.items():
        for toctree in re.findall(r"\{?toctree(?:\}\n|::\n)(.*?)(?:```|\Z)", text, re.DOTALL):
            listed |= {place.parent / name for name in re.findall(r"^ *([\w./]+)$", toctree, re.MULTILINE)}
    assert {place.with_suffix("") for place in MADE} == listed


def test_links_between_pages_lead_somewhere() -> None:
    """Sphinx says the same when it builds the pages, which takes a minute."""
    targets = {*MADE, *(path.relative_to(ROOT) for path in pages.files())}
    links = [(page, link) for page, text in MADE.items() for link in re.findall(r"\]\(([^)#\s:]+)\)", text)]
    assert len(links) > 50
    assert [(page, link) for page, link in links if Path(normpath(page.parent / link)) not in targets] == []


@pytest.mark.parametrize("name", co.list_optimizers())
def test_the_page_of_an_optimizer_tells_what_it_declares(name: str) -> None:
    info = co.optimizer_info(name)
    page = MADE[Path("compiled_optim", "optimizers", f"{name}.rst")]
    assert [a.name for a in info.arguments if f"``{a.name}``" not in page] == []
    assert ("def update(" in page) == hasattr(info.cls, "update")
    assert info.summary in page
    assert all(source in page for source in info.sources)
    assert [size for size in info.bytes_per_parameter.values() if f"- {size:g}\n" not in page] == []
    assert all(f"``{each}``" in page for each in info.counterparts)


def test_recipes_have_their_text_and_their_output() -> None:
    page = pages._recipe("schedules", '"""Summary.\n\nWords.\n"""\n\nprint(1)\n\n# Prints, in 4 s:\n# 1\n')
    assert page.startswith("schedules\n=========\n\nSummary.\n\nWords.\n")
    assert "\nIt prints, in 4 s:\n" in page
    assert [line for line in page.split("\n") if line.startswith("   ")] == ["   print(1)", "   1"]


@pytest.mark.full
def test_the_documentation_is_built(tmp_path: Path) -> None:
    """Sphinx takes every warning for an error, and each link between pages leads somewhere; other sites are not asked."""
    done = subprocess.run(["tools/docs", "--offline", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("every link between them works\n")
    names = [name for name in co.__all__ if name != "mup" and not is_optimizer(getattr(co, name))]
    assert [name for name in names if not (tmp_path / "html" / "reference" / f"{name}.html").is_file()] == []
    assert inspect.getdoc(co.AdamW).partition("(")[0] in (tmp_path / "html/compiled_optim/optimizers/adamw.html").read_text()
