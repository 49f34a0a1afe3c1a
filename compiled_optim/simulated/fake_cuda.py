"""A simulated CUDA device: tensors without memory, for which Inductor and Triton compile, launching nothing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_optim.memory import torch_internals
from compiled_optim.simulated.driver import answer, driver

_DATA_PTR = Tensor.data_ptr
_ROOM = 1 << 36  # bytes between the addresses of two storages
_NUMBERS: dict[int, int] = {}  # of storages, counted from 1, by torch's identity of each

_MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
_DEVICE_TYPES = 22  # entries of c10's registry of device guards
_CUDA, _MPS, _META = 1, 13, 14  # indices in it


def triton_target(arch: int) -> contextlib.AbstractContextManager[object]:
    """Let Triton compile for compute capability ``arch`` (90 for sm_90); a launch does nothing."""
    from triton import runtime

    return mock.patch.object(runtime.driver, "_active", driver(arch))


@contextlib.contextmanager
def fake_cuda(arch: int) -> Iterator[None]:
    """Make ``device="cuda"`` a GPU of compute capability ``arch`` whose tensors are fake.

    ``data_ptr`` of such a tensor is a unique number, a multiple of 16 for a tensor at the beginning of its storage.
    ``torch.cuda.is_available`` still returns False, since FakeTensorMode would initialise an available device.

    As CUDA it refuses to pin anything but dense tensors of the host, to mix devices, and to return a value to the host. It
    cannot refuse wrong entries in tables of kernels, such as an address of the host, and has neither streams nor captures.
    """
    from torch._dynamo import device_interface
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties

    device_interface.get_interface_for_device("cpu")  # fills the registry, and overwrites earlier entries
    TorchInGraphFunctionVariable._get_handlers()  # a table of torch's functions, which are replaced below

    limits = {"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "regs_per_multiprocessor": 65536}
    limits |= {"warp_size": 32, "shared_memory_per_block_optin": 227 << 10, "total_memory": 80 << 30}
    limits |= {"multi_processor_count": _MULTIPROCESSORS[arch], "major": arch // 10, "minor": arch % 10}
    properties = types.SimpleNamespace(name=f"sm_{arch}", gcnArchName="", **limits)
    answers: dict[str, Any] = dict.fromkeys(("is_available", "is_triton_capable", "is_bf16_supported"), True)
    answers |= {"get_device_properties": properties, "get_compute_capability": arch, "current_device": 0}
    answers |= {"raise_if_triton_unavailable": None}
    fixed = {name: staticmethod(functools.partial(answer, value)) for name, value in answers.items()}
    worker = type("Worker", (device_interface.CudaInterface.Worker,), fixed)
    interface = type("FakeCuda", (device_interface.CudaInterface,), {**fixed, "Worker": worker})
    current = [0]

    def exchange(index: int) -> int:
        """Make ``index`` the current device, and return the one before."""
        before, current[0] = current[0], index
        return before

    with (
        contextlib.ExitStack() as stack,
        triton_target(arch),
        _device_guard(),
        mock.patch.dict(device_interface.device_interfaces, dict.fromkeys(("cuda", "cuda:0", "cuda:1"), interface)),
        mock.patch.multiple(
            torch.cuda,
            get_device_properties=functools.partial(answer, properties),
            current_device=lambda: current[0],
            _exchange_device=exchange,
            _maybe_exchange_device=exchange,
            is_current_stream_capturing=functools.partial(answer, False),
        ),
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        mock.patch.multiple(Tensor, data_ptr=_address, pin_memory=_pinned, is_pinned=_is_pinned),
        mock.patch.object(torch_internals, "is_fake", _is_not_fake),
        # It would compute constants on the device, and cache graphs of a simulated device.
        config.patch(joint_graph_constant_folding=False, fx_graph_cache=False, compile_threads=1),
        FakeTensorMode(allow_non_fake_inputs=True),
        _RealHost(),  # type: ignore[no-untyped-call]
    ):
        for function in (*vars(torch.utils._triton).values(), DeviceProperties.create):
            if hasattr(function, "cache_clear"):  # it caches the device
                function.cache_clear()
                stack.callback(function.cache_clear)
        yield


class _RealHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps tensors on the CPU real under FakeTensorMode: the host computes the tables that it uploads."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # Dynamo may trace under it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # such a tensor wraps others, which are dispatched here
        kwargs = kwargs or {}
        elsewhere = torch.device(kwargs.get("device") or "cpu").type != "cpu"
        fake = any(isinstance(leaf, FakeTensor) for leaf in torch.utils._pytree.tree_leaves((args, kwargs)))
        tracing = torch._guards.TracingContext.try_get() is not None
        if elsewhere or fake:
            _check_devices(func.name(), args, kwargs, on_device=elsewhere)
        with contextlib.nullcontext() if elsewhere or fake or tracing else unset_fake_temporarily():
            return func(*args, **kwargs)


@contextlib.contextmanager
def _device_guard(device: int = _CUDA) -> Iterator[None]:
    """Let a CPU build of torch enter a CUDA device, by using the guard of the meta device, which does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[device]
    guards[device] = guards[_META]
    try:
        yield
    finally:
        guards[device] = before


def _check_devices(name: str, args: Any, kwargs: dict[str, Any], *, on_device: bool) -> None:
    """Raise torch's errors for operations that fake tensors allow and CUDA does not."""
    if on_device and kwargs.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    on_device = on_device or (bool(args) and isinstance(args[0], Tensor) and args[0].is_cuda)
    if on_device and (generator := kwargs.get("generator")) is not None and generator.device.type != "cuda":
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
    if "_foreach_" in name and "_copy_" not in name:
        for pieces in zip(*(arg for arg in args if isinstance(arg, (list, tuple))), strict=False):
            if len({t.device for t in pieces if isinstance(t, Tensor) and (t.dim() or not t.is_cpu)}) > 1:
                raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")


def _pinned(tensor: Tensor, device: object = None) -> Tensor:
    """Return a pinned tensor, as ``Tensor.pin_memory``."""
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    if not _is_pinned(tensor):
        tensor = tensor.clone()
        tensor.untyped_storage().is_page_locked = True  # type: ignore[attr-defined]
    return tensor


def _is_pinned(tensor: Tensor, device: object = None) -> bool:
    return tensor.layout == torch.strided and hasattr(tensor.untyped_storage(), "is_page_locked")


_is_not_fake = functools.partial(answer, False)  # a mock would keep all its arguments alive


def _address(tensor: Tensor) -> int:
    if not isinstance(tensor, FakeTensor):
        return _DATA_PTR(tensor)
    number = _NUMBERS.setdefault(int(tensor.untyped_storage()._cdata), len(_NUMBERS) + 1)
    return 0 if tensor.numel() == 0 else number * _ROOM + int(tensor.storage_offset()) * tensor.element_size()
