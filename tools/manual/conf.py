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
    """Yield a text's nodes, with links for the papers that it names."""
    end = 0
    for match in _SOURCE.finditer(text):
        yield nodes.Text(text[end : match.start()])
        yield nodes.reference(text=match[0], refuri=_SITES[match.lastgroup or ""] + match[match.lastgroup or 0])
        end = match.end()
    yield nodes.Text(text[end:])


def link_papers(app: Any, document: nodes.document) -> None:
    """Turn the papers that a page names into links."""
    for text in [*document.findall(nodes.Text)]:
        if _SOURCE.search(text) and not isinstance(text.parent, (nodes.literal, nodes.literal_block, nodes.reference)):
            text.parent.replace(text, [*_parts(str(text))])


def by_public_name(app: Any, env: Any, node: Any, text: Any) -> Any:
    """Resolve the private path of a name to its public name, since only public names have pages."""
    name, python = node["reftarget"].rpartition(".")[2], env.domains.python_domain
    if node.get("refdomain") == "py":
        candidates = [f"compiled_optim.{name}", f"compiled_optim.mup.{name}"]
        known = next((candidate for candidate in candidates if candidate in python.objects), name)
        return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], known, node, text)
    return None


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("doctree-read", link_papers)
    app.connect("missing-reference", by_public_name)
