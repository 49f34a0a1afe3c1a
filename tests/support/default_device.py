"""Lets tests of CUDA, and of devices that stand in for it, also run where CUDA is the default device, as users may make it.

Those are a second case of each test: all of them with ``--full``, a few of each function that is named.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import cuda_device
import pytest
import torch
from torch.utils._device import DeviceContext, _device_constructors

NAME = "default_device"
MEANT = {"_group"}
"""Functions of the package that ask which device is the default one."""

_WHERE_IT_IS = getattr(pytest, "HIDDEN_PARAM", "usual")  # of pytest 8.4 and later: names of other cases stay
WITHOUT = pytest.mark.parametrize(NAME, [False], ids=[_WHERE_IT_IS], indirect=True)
"""Marks a test that only runs without a default device."""

_USERS = re.compile(r"(?!compiled_optim\b)|compiled_optim\.simulated\b")


def generate(metafunc: pytest.Metafunc) -> None:
    """Give a test both cases if it runs on CUDA or on a device that stands in for it, and does not choose itself."""
    if any(NAME in mark.args for mark in metafunc.definition.iter_markers("parametrize")):
        return
    functions = [metafunc.function, *(d.func for defs in metafunc._arg2fixturedefs.values() for d in defs)]
    seen: set[Any] = {inspect.unwrap(default_device)}  # which all tests have
    if metafunc.definition.get_closest_marker("cuda") or any(_reaches(function, seen) for function in functions):
        also = pytest.param(True, marks=pytest.mark.full, id=NAME)
        metafunc.parametrize(NAME, [pytest.param(False, id=_WHERE_IT_IS), also], indirect=True)


def _reaches(function: Any, seen: set[Any]) -> bool:
    """Whether ``function``, or another one of the tests that it calls, enters ``fake_cuda``, as far as names tell."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function in seen or _USERS.match(function.__module__) is None:
        return False
    seen.add(function)
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    found = [function.__globals__.get(name) for name in names]
    found += [vars(module).get(name) for module in found if isinstance(module, ModuleType) for name in names]
    return "fake_cuda" in names or any(_reaches(value, seen) for value in found)


@contextlib.contextmanager
def default_device(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make CUDA the default device, or what stands in for it; of ``fake_cuda`` while it lasts."""
    from compiled_optim.simulated import fake_cuda  # here, as tests of the core run without it

    real_host = fake_cuda._RealHost

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        with real_host(), torch.device("cuda"):  # type: ignore[no-untyped-call]
            yield

    patch.setattr(fake_cuda, "_RealHost", inside)
    if cuda_device.DEVICE == "cuda" and not torch.cuda.is_available():
        yield
        return
    context = DeviceContext(torch.device(cuda_device.DEVICE))  # type: ignore[no-untyped-call]
    if cuda_device.DEVICE == "cpu":
        usual = DeviceContext.__torch_function__

        def strict(entered: Any, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if entered is context and function in _device_constructors() and (kwargs or {}).get("device") is None:
                _check(kwargs or {}, sys._getframe(1))
            return usual(entered, function, types, args, kwargs)

        patch.setattr(DeviceContext, "__torch_function__", strict)
    with context:
        yield


def _check(given: dict[str, Any], caller: FrameType) -> None:
    """Refuse, for a device on the CPU, a tensor whose maker could not make it, or use it, on another default device."""
    if given.get("generator") is not None:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if caller.f_globals.get("__name__", "").startswith("compiled_optim.") and caller.f_code.co_name not in MEANT:
        raise AssertionError(f"{caller.f_code.co_name} makes a tensor on whatever device is the default one")
