"""A driver of Triton that compiles for a simulated GPU, and launches nothing; this file works alone."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def driver(arch: int, launched: Callable[..., object] | None = None) -> types.SimpleNamespace:
    """Return a driver of Triton for compute capability ``arch``: it loads nothing, and a launch only calls ``launched``.

    ``launched`` takes Triton's description of the compiled source, its metadata, and the arguments of Triton's launcher.
    """
    from triton.backends.compiler import GPUTarget

    def launcher(source: Any, metadata: Any) -> Callable[..., object]:
        if launched is None:
            return lambda *args: None
        return lambda *args: launched(source, metadata, *args)

    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: arch,  # Triton keeps compiled kernels per device
        get_current_stream=lambda device: 0,
        launcher_cls=launcher,
        utils=types.SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: (None, 1, 0, 0, 1024),  # no module that Triton would unload
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
        ),
    )


def answer(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``value``, and ignore the other arguments."""
    return value
