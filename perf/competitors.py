"""Named ways to make an optimizer: this package's lowerings, torch.optim's implementations, and other packages'."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer

import compiled_optim
from compiled_optim.lowering import stack_loops
from compiled_optim.lowering.kernels import symmetric
from compiled_optim.optimizer import engine_of

OURS = "compiled_optim"
TORCH_PRODUCTS = f"{OURS}[torch products]"
WATCHED = f"{OURS}[watched]"
CAPTURED = f"{OURS}[captured]"
SHARDED = f"{OURS}[DTensor]"
SPLIT = f"{OURS}[split]"
STORED = f"{OURS}[split8, int8]"
FUSED = "torch fused"
COMPILED = "torch compiled"

HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "weight_decay": 1e-2},
    "sgd": {"lr": 1e-3, "momentum": 0.9},
}
"""Arguments for all that take them, where defaults differ, or would benchmark an unusual optimizer."""

SLOW_TO_COMPILE = 148
"""Tensors beyond which torch.optim's step is compiled only if it is named: torch.compile unrolls it, which takes minutes."""


@dataclass(frozen=True)
class Peer:
    """A way to make optimizers from a package's classes."""

    module: str  # the module of the classes
    options: Mapping[str, Any] = field(default_factory=dict)
    named: str = "{}"  # its name of a class that is called {} here; case does not count
    others: Mapping[str, str] = field(default_factory=dict)  # names that follow no pattern, by this package's
    compiled: bool = False  # whether the user compiles its step with torch.compile
    finish: Callable[[Any], object] = lambda optimizer: None  # a user's further call; may return another object with a step
    tensors: float = math.inf  # the most tensors of a step, unless it is named
    dtype: torch.dtype = torch.float32
    spoils_gradients: bool = False  # whether it writes to gradients
    arguments: Callable[[Sequence[Tensor]], dict[str, Any]] = lambda params: {"params": params}  # and further ones
    wrap: Callable[[Tensor], Tensor] = lambda tensor: tensor  # applied to parameters and gradients
    only_named: bool = False  # whether it is left out unless it is named
    note: str = ""  # why its times are hard to compare

    def find(self, optimizer: str) -> type[Optimizer]:
        """Return its class for an optimizer's lower-case name.

        Raises:
            ImportError: its package is not installed, or cannot be imported here.
            LookupError: it defines no such class.
        """
        wanted = self.others.get(optimizer, self.named.format(optimizer)).lower()
        module = importlib.import_module(self.module)
        is_torch = self.module.startswith("torch.")  # others export torch.optim's classes, too
        for name in (name for name in dir(module) if name.lower() == wanted):
            value = getattr(module, name)
            if isinstance(value, type) and value.__module__.startswith("torch.") == is_torch:
                return value
        raise LookupError(f"{self.module} has no {wanted}")


def _compile_foreach(optimizer: Any) -> None:
    """Do what ``pytorch_optimizer.create_optimizer(compile=True)`` does with classes that have compiled steps."""
    optimizer._compile_foreach()


def _multiply_in_torch(optimizer: Any) -> None:
    """Let the kernels of matrices be compiled with torch's products alone, without symmetric products."""

    def compiling(compile_all: Callable[[], None]) -> None:
        with mock.patch.dict(symmetric.TILINGS, clear=True), mock.patch.object(stack_loops, "_kernels", {}):
            compile_all()

    for lowering in engine_of(optimizer).step.lowerings:
        lowering.compile = functools.partial(compiling, lowering.compile)  # type: ignore[method-assign]


def named(params: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Give parameters a transformer's names: matrices with one side a multiple of the other are hidden layers."""

    def name(index: int, param: Tensor) -> str:
        if param.dim() < 2:
            return f"norm.{index}.weight"
        return f"{'embed' if max(param.shape) % min(param.shape) else 'hidden'}.{index}.weight"

    return [(name(index, param), param) for index, param in enumerate(params)]


def _split(params: Sequence[Tensor]) -> dict[str, Any]:
    """Split matrices of queries, keys and values in three; if no parameter is one, split all in two."""
    both = [(f"{'packed' if p.shape[0] == 3 * p.shape[-1] else 'other'}.{i}", p) for i, p in enumerate(params)]
    packed = any(name.startswith("packed") for name, _ in both)
    return {"params": both, "split": {"packed*": 3} if packed else {"*": 2}}


@functools.cache
def _mesh(kind: str) -> Any:
    """Return a mesh of this process alone."""
    from torch import distributed

    backend = "nccl" if kind == "cuda" else "gloo"
    if not distributed.is_initialized():
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    return distributed.init_device_mesh(kind, (1,))


def end_mesh() -> None:
    """End the process group that this process made for DTensors, if it did."""
    if _mesh.cache_info().currsize:
        _mesh.cache_clear()
        _spec.cache_clear()
        torch.distributed.destroy_process_group()


@functools.cache
def _spec(kind: str, shape: torch.Size, dtype: torch.dtype) -> Any:
    """Return how tensors are spread over a mesh of this process alone."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(torch.empty(shape, dtype=dtype, device=kind), _mesh(kind), [Shard(0)], run_check=False)._spec


def _sharded(tensor: Tensor) -> Tensor:
    """Return a DTensor on this process's memory, sharded over a mesh of one. Equal ones share a spec, as FSDP2's do."""
    from torch.distributed.tensor import DTensor

    spec = _spec(tensor.device.type, tensor.shape, tensor.dtype)
    return DTensor(tensor.detach(), spec, requires_grad=tensor.requires_grad)


_COMPILED = {"compiled": True, "tensors": SLOW_TO_COMPILE}
_SPOILED = "writes to its gradients: gets copies, which are not timed"
_EIGHT_BITS = "8-bit state for tensors of at least 4096 elements: moves fewer bytes"

PEERS: dict[str, Peer] = {
    OURS: Peer("compiled_optim"),
    f"{OURS}[inductor]": Peer("compiled_optim", {"lowering": "inductor"}),
    TORCH_PRODUCTS: Peer(
        "compiled_optim", named="", others={"muon": "Muon", "normuon": "NorMuon"}, finish=_multiply_in_torch
    ),
    WATCHED: Peer("compiled_optim", finish=lambda optimizer: optimizer.watch_health()),
    CAPTURED: Peer("compiled_optim", finish=compiled_optim.CUDAGraphRunner, only_named=True),
    SHARDED: Peer("compiled_optim", wrap=_sharded, only_named=True),
    SPLIT: Peer("compiled_optim", named="", others={"muon": "Muon", "normuon": "NorMuon"}, arguments=_split),
    STORED: Peer(
        "compiled_optim",
        {"weights": "split8", "state_dtype": "int8"},
        dtype=torch.bfloat16,
        only_named=True,
        note="parameters and gradients in bfloat16, state in codes: moves fewer bytes",
    ),
    FUSED: Peer("torch.optim", {"fused": True}),
    f"{FUSED}[DTensor]": Peer("torch.optim", {"fused": True}, wrap=_sharded, only_named=True),
    "torch Muon and fused AdamW": Peer("perf.pairs", note="two optimizers"),
    "torch foreach": Peer("torch.optim", {"foreach": True}),
    "torch foreach capturable": Peer("torch.optim", {"foreach": True, "capturable": True}),
    "torch for-loop": Peer("torch.optim", {"foreach": False}),
    "torch": Peer("torch.optim"),
    "torch fused compiled": Peer("torch.optim", {"fused": True}, **_COMPILED),
    "torch foreach compiled": Peer("torch.optim", {"foreach": True}, **_COMPILED),
    "torch foreach capturable compiled": Peer("torch.optim", {"foreach": True, "capturable": True}, **_COMPILED),
    "torch for-loop compiled": Peer("torch.optim", {"foreach": False}, **_COMPILED),
    COMPILED: Peer("torch.optim", **_COMPILED),
    "optimi": Peer("optimi", note="its own choice: triton on a GPU"),
    "optimi foreach": Peer("optimi", {"foreach": True}, spoils_gradients=True, note=_SPOILED),
    "optimi triton": Peer("optimi", {"triton": True}),
    "heavyball": Peer("heavyball", others={"adamwschedulefree": "SFAdamW"}, spoils_gradients=True, note=_SPOILED),
    "heavyball compile_step": Peer(
        "heavyball",
        {"compile_step": True},
        others={"adamwschedulefree": "SFAdamW"},
        spoils_gradients=True,
        note=_SPOILED,
    ),
    "pytorch_optimizer": Peer("pytorch_optimizer", others={"adamwschedulefree": "ScheduleFreeAdamW"}),
    "pytorch_optimizer compiled": Peer(
        "pytorch_optimizer",
        {"foreach": True},
        others={"adamwschedulefree": "ScheduleFreeAdamW"},
        finish=_compile_foreach,
    ),
    "schedulefree": Peer("schedulefree", finish=lambda optimizer: optimizer.train(), spoils_gradients=True, note=_SPOILED),
    "bitsandbytes": Peer("bitsandbytes.optim"),
    "bitsandbytes 8-bit": Peer("bitsandbytes.optim", named="{}8bit", note=_EIGHT_BITS),
    "flashoptim": Peer("flashoptim", named="Flash{}", note="8-bit state: moves fewer bytes"),
    "flashoptim float32 state": Peer("flashoptim", {"quantize": False, "master_weight_bits": None}, named="Flash{}"),
    # Last, since it compiles for each shape.
    "torchao": Peer("torchao.optim", named="_{}"),
    "torchao 8-bit": Peer("torchao.optim", named="{}8bit", note=_EIGHT_BITS),
    "torchao bfloat16, stochastic": Peer(
        "torchao.optim",
        {"bf16_stochastic_round": True},
        named="_{}",
        dtype=torch.bfloat16,
        note="parameters, gradients and state in bfloat16: moves half the bytes",
    ),
}
"""The peers by name, this package's first."""


@dataclass(frozen=True)
class Competitor:
    """A named way to make an optimizer for parameters of a ``dtype``."""

    name: str
    make: Callable[[Sequence[Tensor]], Any]
    dtype: torch.dtype = torch.float32
    spoils_gradients: bool = False
    wrap: Callable[[Tensor], Tensor] = lambda tensor: tensor  # applied to parameters and gradients


def exported() -> dict[str, type[compiled_optim.CompiledOptimizer]]:
    """Return the package's optimizers by lower-case name, except MuonAdamW, which combines two and needs names."""
    public = [getattr(compiled_optim, name) for name in compiled_optim.__all__]
    classes = [c for c in public if isinstance(c, type) and issubclass(c, compiled_optim.CompiledOptimizer)]
    left_out = (compiled_optim.CompiledOptimizer, compiled_optim.MuonAdamW)
    return {c.__name__.lower(): c for c in classes if c not in left_out}


def optimizers() -> dict[str, tuple[type[Optimizer], type[Optimizer] | None]]:
    """Return each optimizer of this package, and torch.optim's or None, by lower-case name.

    Those of sparse gradients and of closures are left out: they do not step from a dense gradient per parameter.
    """
    return {
        name: (ours, getattr(torch.optim, ours.__name__, None))
        for name, ours in exported().items()
        if hasattr(ours, "_rule") and ours._gradients == "dense"
    }


def arguments(optimizer: type[Optimizer], name: str = "") -> dict[str, Any]:
    """Return the hyperparameters for a class as the optimizer ``name``, by default its own name."""
    parameters = list(inspect.signature(optimizer).parameters.values())[1:]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    common = HYPERPARAMETERS.get(name or optimizer.__name__.lower(), {})
    return {**dict.fromkeys(required, 1e-3), **{k: v for k, v in common.items() if k in {p.name for p in parameters}}}


def competitor(optimizer: str, name: str, *, traced: bool = False) -> Competitor:
    """Return the competitor ``name`` for ``optimizer``. It may not work on every device.

    Args:
        optimizer: lower-case name.
        name: of :data:`PEERS`.
        traced: do not compile the step for the user, since it is called in a compiled function.

    Raises:
        ImportError: its package is not installed, or cannot be imported here.
        LookupError: it has no such optimizer.
    """
    peer = PEERS[name]
    cls = peer.find(optimizer)
    options = {**arguments(cls, optimizer), **peer.options}

    def make(params: Sequence[Tensor]) -> Any:
        further = peer.arguments(params)
        if issubclass(cls, compiled_optim.MuonAdamW):
            further["params"] = named(params)
        elif "stacks" in inspect.signature(cls).parameters and any(param.dim() > 2 for param in params):
            further |= {"params": [(f"experts.{index}", param) for index, param in enumerate(params)], "stacks": ["*"]}
        instance = cls(further.pop("params"), **further, **options)
        instance = peer.finish(instance) or instance
        if peer.compiled and not traced:
            step = with_own_code(instance.step.__func__)  # type: ignore[attr-defined]
            instance.step = torch.compile(types.MethodType(step, instance))  # type: ignore[assignment, method-assign]
        return instance

    return Competitor(name, make, peer.dtype, peer.spoils_gradients, peer.wrap)


def entered(
    optimizer: str, names: Sequence[str] = (), tensors: int = 0, *, traced: bool = False
) -> tuple[list[Competitor], dict[str, str]]:
    """Return this package's default and the competitors ``names``, and the reasons why others cannot run.

    Without ``names`` all that have the optimizer enter; torch.optim's default only if it takes no other.

    Args:
        optimizer: lower-case name.
        names: of :data:`PEERS`, in the order of their timing.
        tensors: the number of tensors to step.
        traced: see :func:`competitor`.
    """
    competitors, reasons = [], {}
    for name in dict.fromkeys([OURS, *names]) if names else [name for name, peer in PEERS.items() if not peer.only_named]:
        peer = PEERS[name]
        try:
            cls = peer.find(optimizer)
        except ImportError as error:
            reasons[name] = reason(error)
            continue
        except LookupError as error:
            if names:
                reasons[name] = reason(error)
            continue
        if not names and name in ("torch", COMPILED) and "foreach" in inspect.signature(cls).parameters:
            continue  # it is one of the others
        if not names and tensors > peer.tensors:
            reasons[name] = f"compiling more than {peer.tensors} tensors takes long; ask with --competitors"
        else:
            competitors.append(competitor(optimizer, name, traced=traced))
    return competitors, reasons


def reason(error: Exception) -> str:
    """Return why a competitor does not run: the first line of its error."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    line = next(iter(str(error).strip().splitlines()), "")
    return line if isinstance(error, LookupError) and line else f"{type(error).__name__}: {line[:100]}".rstrip(": ")


def with_own_code(function: Any) -> Any:
    """Copy a function, its code, and the functions that it wraps.

    A call of a compiled function checks the guards of all others with the same code.
    """
    cells = tuple(
        types.CellType(with_own_code(cell.cell_contents)) if isinstance(cell.cell_contents, types.FunctionType) else cell
        for cell in function.__closure__ or ()
    )
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, cells or None
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
