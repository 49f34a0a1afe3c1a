"""What the tests of loading share: optimizers, all that a load may change, and values that no checkpoint should hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from catalog import required
from torch import Tensor, nn

import compiled_optim as co

SHAPE, VECTOR = (2, 3), (3,)


def model(names: str, frozen: str = "") -> dict[str, nn.Parameter]:
    """A parameter by each letter; ``v`` is a vector."""
    shapes = {name: VECTOR if name == "v" else SHAPE for name in names}
    return {name: nn.Parameter(torch.randn(shape), requires_grad=name not in frozen) for name, shape in shapes.items()}


def train(optimizer: co.CompiledOptimizer, steps: int = 1) -> None:
    """Steps with random gradients, another one for each parameter and step."""

    def closure() -> Tensor:
        for param in params:
            grad = torch.randn_like(param)
            param.grad = grad.to_sparse(1) if optimizer._gradients == "sparse" else grad
        return torch.randn(())

    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for _ in range(steps):
        optimizer.step(closure)


def trained(
    kind: type[co.CompiledOptimizer],
    names: str = "ab",
    steps: int = 2,
    frozen: str = "",
    grouped: bool = False,
    **options: Any,
) -> co.CompiledOptimizer:
    """An optimizer of one parameter by each name, in a group each if ``grouped``, after some steps."""
    params = model(names, frozen)
    groups = [{"params": {name: param}} for name, param in params.items()]
    optimizer = kind(groups if grouped else params, **{"lowering": "eager", **required(kind), **options})
    train(optimizer, steps)
    return optimizer


def by_name(optimizer: co.CompiledOptimizer) -> dict[str, dict[str, Tensor]]:
    """The live state of every parameter, by name or else by position."""
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    names = [name for group in groups for name in group.get("param_names", ())] or map(str, range(len(params)))
    return {name: dict(optimizer.state.get(p, {})) for name, p in zip(names, params, strict=True)}


def live_tensors(optimizer: co.CompiledOptimizer) -> Iterator[tuple[str, Tensor]]:
    for name, entries in by_name(optimizer).items():
        yield from ((f"{name}.{key}", value) for key, value in entries.items() if isinstance(value, Tensor))
    for index, group in enumerate(optimizer.param_groups):
        for key in optimizer.hyperparameters()[index]:
            yield from ((f"{index}.{key}[{i}]", t) for i, t in enumerate(group.tensors(key)))


def addresses(optimizer: co.CompiledOptimizer) -> dict[str, tuple[int, int]]:
    return {name: (id(t), t.data_ptr()) for name, t in live_tensors(optimizer)}


def _identity(entry: Any) -> Any:
    """Which object a group's entry is; a reading is made anew whenever it is read, and is told by its number."""
    return repr(entry) if isinstance(entry, (Tensor, tuple)) else id(entry)


def content(optimizer: co.CompiledOptimizer) -> Any:
    """Everything that a load may change, bit for bit."""
    tensors = {
        name: (id(t), t.data_ptr(), t._version, t.requires_grad, t.detach().contiguous().view(-1).view(torch.uint8).tolist())
        for name, t in live_tensors(optimizer)
    }
    groups = [
        (id(g), {key: _identity(value) for key, value in g.items()}, list(g["params"])) for g in optimizer.param_groups
    ]
    state = [
        (id(key), {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value))
        for key, value in optimizer.state.items()
    ]
    return tensors, groups, state


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as those of torch.distributed are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[a.inner if isinstance(a, Wrapper) else a for a in args], **(kwargs or {}))


class Opaque(torch.Tensor):
    """A tensor that torch cannot copy."""

    __new__ = Wrapper.__new__
    __init__ = Wrapper.__init__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Named(torch.Tensor):
    """A subclass that is a tensor like any other."""


class Liar(Mapping[Any, Any]):
    """A mapping that names an entry and does not have it."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.values_ = values

    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError("there is nothing here")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_) + 1


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise OSError("not comparable")

    __hash__ = None  # type: ignore[assignment]


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError("not copyable")


def refuses(optimizer: co.CompiledOptimizer, saved: Any, message: str, **options: Any) -> None:
    """A load is an error with this message, and nothing is changed."""
    before = content(optimizer)
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.load_state_dict(saved, **options)
    assert content(optimizer) == before


def freed(*shape: int, size: int = 0, view: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
    """A view of a tensor whose memory was given back but for ``size`` bytes."""
    tensor = torch.ones(shape)
    result = view(tensor)
    tensor.untyped_storage().resize_(size)
    return result


def fake(*shape: int) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.ones(shape)


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch._nested_tensor_from_tensor_list([torch.ones(2), torch.ones(3)])


def quantized(*shape: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)
