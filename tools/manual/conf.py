"""Sphinx's configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes

import compiled_optim as co

project = "compiled_optim"
author, project_copyright = "The compiled_optim developers", "2026, The compiled_optim developers"
release = version = co.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_default_options = {"members": True, "member-order": "bysource", "exclude-members": "profile_hook_step"}
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_use_ivar = True
nitpicky = True
# Inventories of other projects would make a build depend on their sites.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|typing|os|Tensor|Any|nn|StepModule)\b.*"),
    ("py:.*", r"compiled_optim\.\w+\..*"),
]
html_theme = "furo"
html_title = f"compiled_optim {release}"
html_copy_source = html_show_sphinx = False
linkcheck_timeout, linkcheck_retries = 5, 1

_SOURCE = re.compile(r"arXiv:(?P<arxiv>\d+\.\d+)|doi:(?P<doi>10\.[^\s;,)]+[^\s;,).])|(?P<site>\w+\.github\.io/[\w/-]+)")
_SITES = {"arxiv": "https://arxiv.org/abs/", "doi": "https://doi.org/", "site": "https://"}


def _parts(text: str) -> Iterator[nodes.Node]:
    """Text with links where it names papers."""
    end = 0
    for found in _SOURCE.finditer(text):
        yield nodes.Text(text[end : found.start()])
        yield nodes.reference(text=found[0], refuri=_SITES[found.lastgroup or ""] + found[found.lastgroup or 0])
        end = found.end()
    yield nodes.Text(text[end:])


def link_papers(app: Any, document: nodes.document) -> None:
    """Make links of the papers that a page names."""
    for text in [*document.findall(nodes.Text)]:
        if _SOURCE.search(text) and not isinstance(text.parent, (nodes.literal, nodes.literal_block, nodes.reference)):
            text.parent.replace(text, [*_parts(str(text))])


def by_public_name(app: Any, env: Any, node: Any, text: Any) -> Any:
    """Resolve a name of the package wherever it is defined, since pages know public names only."""
    name, python = node["reftarget"].rpartition(".")[2], env.domains.python_domain
    if node.get("refdomain") == "py":
        places = [f"compiled_optim.{name}", f"compiled_optim.mup.{name}"]
        known = next((place for place in places if place in python.objects), name)
        return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], known, node, text)
    return None


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("doctree-read", link_papers)
    app.connect("missing-reference", by_public_name)
