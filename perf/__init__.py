"""Benchmarks of compiled_optim against torch.optim: ``python -m perf --help``."""

import time

STARTED = time.monotonic()
"""When a command began, by ``time.monotonic``: before torch is imported, which takes seconds."""
