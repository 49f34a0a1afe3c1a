"""Weights that steps changed: comparisons before and after steps, and the elements that users receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.groups.parameters import named_parameters
from compiled_optim.memory.layout import has_memory, is_dense, is_lost, is_sharded, local
from compiled_optim.memory.torch_internals import wraps_others
from compiled_optim.plan.output_memory import OutputMemory, ParamOutputs
from compiled_optim.plan.plan import Plan

_INTEGERS = {2: torch.int16, 4: torch.int32}
_INT32_ELEMENTS = 2**31


class ChangedWeights(NamedTuple):
    """Elements of a parameter that steps changed.

    Attributes:
        name: the parameter's name.
        indices: flat indices of these elements in a contiguous tensor of ``full_shape``, ascending: int32, or int64 if that
            has 2**31 elements or more. None if ``values`` are all elements, since indices would take more memory.
        values: the elements as they are now, a tensor of the shape of ``indices`` or of ``full_shape``.
        full_shape: the shape of the parameter; of a DTensor, of all shards together.
    """

    name: str
    indices: Tensor | None
    values: Tensor
    full_shape: torch.Size


def check_served(groups: Sequence[Mapping[str, Any]], outputs: OutputMemory) -> None:
    """Raise ``ValueError`` for a parameter whose changed bits cannot be found."""
    for name, param in named_parameters(groups):
        values = local(param)
        try:
            outputs.choice.check(values.dtype)
            if wraps_others(values) and not (is_lazy(values) or has_memory(values)):
                raise ValueError(f"a {type(values).__name__} has no memory of its own")
        except ValueError as problem:
            raise ValueError(f"changes of '{name}' cannot be tracked: {problem}") from None


class Comparison:
    """Sets the changed bits of a plan whose updates do not: it compares the parameters before and after a step."""

    def __init__(self, plan: Plan, outputs: OutputMemory) -> None:
        assert outputs.choice.served is not None
        self._served = outputs.choice.served
        self._params = [member.param.detach() for member in plan.members]
        self._words = [outputs.words(member.owner) for member in plan.members]

    def copies(self) -> list[Tensor]:
        """Return copies of the parameters' bits as they are served."""
        return [_bits(param, self._served).clone() for param in self._params]

    def compare(self, copies: Sequence[Tensor]) -> None:
        """Set the bits of the elements that differ from ``copies``."""
        for param, before, words in zip(self._params, copies, self._words, strict=True):
            words.bitwise_or_(_packed(_bits(param, self._served) != before, param))


def changed_weights(groups: Sequence[Mapping[str, Any]], outputs: OutputMemory) -> list[ChangedWeights]:
    """Return the elements of the parameters in ``groups`` whose bits are set or that others wrote.

    Waits once for the device. ``ValueError`` for a parameter whose storage was freed.
    """
    outputs.see_writes()
    outputs.see_addresses()
    named = [(name, param) for name, param in named_parameters(groups) if not (is_lazy(param) or param.is_meta)]
    if freed := [name for name, param in named if is_lost(local(param))]:
        raise ValueError(f"changes of '{freed[0]}' cannot be read: it has no memory, since its storage was freed")
    known = {id(param): (name, outputs.of(param)) for name, param in named}
    names, tracked = [name for name, _ in known.values()], [of for _, of in known.values()]
    served = outputs.choice.served
    assert served is not None
    changed = [(name, of, n) for name, of, n in zip(names, tracked, _counts(tracked), strict=True) if n]
    return [_record(name, of, count, served) for name, of, count in changed if _is_owner(of.param)]


def _counts(tracked: Sequence[ParamOutputs]) -> list[int]:
    """Return how many elements of each parameter were changed."""
    marked = [index for index, of in enumerate(tracked) if of.words is not None and not of.is_written]
    sums = [_flags(tracked[index]).sum() for index in marked]
    numbers = torch.stack([s.to(sums[0].device, non_blocking=True) for s in sums]).tolist() if sums else []
    counts = [local(of.param).numel() if of.is_written else 0 for of in tracked]
    for index, number in zip(marked, numbers, strict=True):
        counts[index] = number
    return counts


def _record(name: str, of: ParamOutputs, count: int, served: torch.dtype) -> ChangedWeights:
    param, values, numel = of.param, local(of.param.detach()), of.param.numel()
    kind = torch.int32 if numel < _INT32_ELEMENTS else torch.int64
    if values.numel() == numel and count * (kind.itemsize + served.itemsize) > numel * served.itemsize:
        full = values.to(served, copy=True, memory_format=torch.contiguous_format)
        return ChangedWeights(name, None, full, param.shape)
    if count == values.numel():
        indices = torch.arange(count, device=values.device)
    else:
        indices = torch.nonzero_static(_flags(of).reshape(-1), size=count)[:, 0]
    elements = values.reshape(-1).index_select(0, indices).to(served)
    return ChangedWeights(name, _global(indices, param).to(kind), elements, param.shape)


def _bits(values: Tensor, served: torch.dtype) -> Tensor:
    """Return the bits of ``values`` as they are served, as integers; 16-bit values are served as they are."""
    seen = values if values.itemsize == 2 else values.to(served)
    return seen.view(_INTEGERS[seen.itemsize])


def _memory_stride(values: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose elements are in the order of memory of ``values``."""
    return values.stride() if is_dense(values) else torch.empty_like(values, device="meta").stride()


def _packed(flags: Tensor, values: Tensor) -> Tensor:
    """Return words with a bit for each of ``flags``, in the order of memory of ``values``."""
    ordered = torch.empty_strided(flags.shape, _memory_stride(values), dtype=torch.uint8, device=flags.device).copy_(flags)
    flat = ordered.as_strided((flags.numel(),), (1,))
    bits = torch.nn.functional.pad(flat, (0, -flags.numel() % 32)).view(-1, 8)
    return (bits << _shifts(flags.device)).sum(1, dtype=torch.uint8).view(torch.int32)


def _flags(of: ParamOutputs) -> Tensor:
    """Return for each element of a parameter, of the local shard's shape, whether its changed bit is set."""
    assert of.words is not None
    values = local(of.param.detach())
    bits = (of.words.view(torch.uint8)[:, None] >> _shifts(values.device)) & 1
    return bits.view(torch.bool).as_strided(values.shape, _memory_stride(values))


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _is_owner(param: Any) -> bool:
    """Return whether this process hands over its shard; of equal replicas, the first one's process does."""
    if not is_sharded(param):
        return True
    dims = enumerate(param.placements)
    return all(param.device_mesh.get_local_rank(dim) == 0 for dim, kind in dims if kind.is_replicate())


def _global(indices: Tensor, param: Any) -> Tensor:
    """Return flat indices in the full tensor of elements at ``indices`` of this process's shard."""
    if not is_sharded(param):
        return indices
    ranges, result, stride = _shard_ranges(param), torch.zeros_like(indices), 1
    for within, size in zip(reversed(ranges), reversed(param.shape), strict=True):
        result += (indices % len(within) + within.start) * stride
        indices, stride = indices // len(within), stride * size
    return result


def _shard_ranges(param: Any) -> list[range]:
    """Return the range of each dimension of the full tensor that this process's shard covers."""
    ranges = [range(size) for size in param.shape]
    shards = [(dim, kind) for dim, kind in enumerate(param.placements) if not kind.is_replicate()]
    # A strided shard splits the parts that plain shards of its dimension leave, though its mesh dimension is before theirs.
    for dim, kind in sorted(shards, key=lambda shard: hasattr(shard[1], "split_factor")):
        part = ranges[kind.dim]
        most = -(-len(part) // param.device_mesh.size(dim))
        first = param.device_mesh.get_local_rank(dim) * most
        ranges[kind.dim] = part[first : first + most]
    assert tuple(map(len, ranges)) == tuple(local(param).shape), "shards are consecutive parts"
    return ranges
