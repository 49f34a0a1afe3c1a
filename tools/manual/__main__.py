"""Write the pages, let Sphinx build them, and check the links to other sites."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

from readme import ROOT
from sphinx.cmd.build import main as sphinx

from manual import pages


def main(out: Path, *, offline: bool = False) -> int:
    """Build into a folder. Return a status that is not 0 if a link is broken, or Sphinx warns.

    Links to other sites are not checked ``offline``.
    """
    for name in ("pages", "html", "links"):
        shutil.rmtree(out / name, ignore_errors=True)
    texts = pages.pages()
    for page, text in texts.items():
        (out / "pages" / page).parent.mkdir(parents=True, exist_ok=True)
        (out / "pages" / page).write_text(text)
    for path in pages.files():
        (out / "pages" / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, out / "pages" / path.relative_to(ROOT))
    options = ["-c", str(Path(__file__).parent), "-d", str(out / "doctrees"), str(out / "pages")]
    if status := sphinx(["-b", "html", "-W", "--keep-going", "-q", *options, str(out / "html")]):
        return status
    print(f"{len(texts)} pages in {out / 'html' / 'index.html'}; every link between them works")
    if offline:
        return 0
    sphinx(["-b", "linkcheck", "-Q", *options, str(out / "links")])
    links = [json.loads(line) for line in (out / "links" / "output.json").read_text().splitlines()]
    broken = [link["uri"] for link in links if link["status"] == "broken" and "Client Error" in link["info"]]
    counts = Counter(link["status"] for link in links if link["uri"] not in broken and link["status"] != "local")
    reached = counts["working"] + counts["redirected"]
    print(
        f"External links: {reached} reached, {counts.total() - reached} could not be reached, {len(broken)} wrong {broken}"
    )
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), offline="--offline" in sys.argv[2:]))
