"""Weights that steps changed: comparisons before and after steps, and the elements that users receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_optim.groups.parameters import named_parameters
from compiled_optim.memory.layout import has_memory, is_dense, is_sharded, local
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


def check_served(plans: Sequence[Plan], outputs: OutputMemory) -> None:
    """Raise ``ValueError`` for a parameter whose changed bits cannot be found."""
    for member in (member for plan in plans for member in plan.members):
        try:
            outputs.choice.check(member.param.dtype)
            if wraps_others(member.param) and not has_memory(member.param):
                raise ValueError(f"a {type(member.param).__name__} has no memory of its own")
        except ValueError as problem:
            raise ValueError(f"changes of '{member.name}' cannot be tracked: {problem}") from None


class Comparison:
    """Sets the changed bits of a plan whose updates do not: it compares the parameters before and after a step."""

    def __init__(self, plan: Plan, outputs: OutputMemory) -> None:
        assert outputs.choice.served is not None
        self._served = outputs.choice.served
        self._params = [member.param.detach() for member in plan.members]
        self._words = [outputs.words(member.owner) for member in plan.members]
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """Copy the parameters as they are served."""
        self._before = [_bits(param, self._served).clone() for param in self._params]

    def end(self) -> None:
        """Set the bits of the elements that differ from the copies."""
        for param, before, words in zip(self._params, self._before, self._words, strict=True):
            words.bitwise_or_(_packed(_bits(param, self._served) != before, param))
        self._before = []


def changed_weights(groups: Sequence[Mapping[str, Any]], outputs: OutputMemory) -> list[ChangedWeights]:
    """Return the elements of the parameters in ``groups`` whose bits are set or that others wrote.

    Waits once for the device.
    """
    outputs.see_writes()
    tracked = {name: of for name, param in named_parameters(groups) if (of := outputs.of(param)) is not None}
    counts, served = _counts(tracked), outputs.choice.served
    assert served is not None
    return [_record(name, tracked[name], n, served) for name, n in counts.items() if n and _is_owner(tracked[name].param)]


def _counts(tracked: Mapping[str, ParamOutputs]) -> dict[str, int]:
    """Return how many elements of each parameter were changed."""
    sums = {name: _flags(of).sum() for name, of in tracked.items() if not of.is_written}
    device = next(iter(sums.values())).device if sums else None
    numbers = torch.stack([s.to(device, non_blocking=True) for s in sums.values()]).tolist() if sums else []
    counts = {name: local(of.param).numel() for name, of in tracked.items()}
    return counts | dict(zip(sums, numbers, strict=True))


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
