"""What a terminal shows, for expected texts in test files, which hold ASCII alone."""

from __future__ import annotations

import re

_LINES = str.maketrans("─│┌┐└┘┤┬█…", "-|++++|+#~")


def in_ascii(text: str) -> str:
    """``text`` with other characters for lines, bars and the dots of curves."""
    return re.sub("[\u2801-\u28ff]", "*", text.translate(_LINES)).replace("\u2800", " ")
