"""Where generated code is kept on disk."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where kernels are kept: beside Inductor's cache if that is placed, else in the user's cache directory."""
    placed = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    root = Path(placed) if placed else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "compiled_optim"
