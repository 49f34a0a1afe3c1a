"""Changed weights by naive comparisons of all bits around each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compiled_optim.plan.changed_weights import ChangedWeights

INTEGERS = {2: torch.int16, 4: torch.int32}


def served(param: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of a parameter as others read it, of its full shape."""
    values = param.detach()
    values = values.full_tensor() if isinstance(values, DTensor) else values
    seen = values if values.itemsize == 2 else values.to(dtype)
    return seen.contiguous().view(INTEGERS[seen.itemsize]).clone()


class Expected:
    """What was changed, by comparisons around each step."""

    def __init__(self, params: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        self.params, self.dtype = params, dtype
        self.changed = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in params.items()}

    def around(self, step: Callable[[], object]) -> None:
        """Take a step."""
        before = {name: served(p, self.dtype) for name, p in self.params.items()}
        step()
        for name, param in self.params.items():
            self.changed[name] |= served(param, self.dtype) != before[name]

    def check(self, changes: list[ChangedWeights]) -> None:
        """Compare, and begin anew."""
        assert {c.name for c in changes} == {name for name, changed in self.changed.items() if changed.any()}
        for change in changes:
            param, changed = self.params[change.name].detach(), self.changed[change.name]
            count = int(changed.sum())
            assert change.full_shape == param.shape
            assert change.values.dtype == self.dtype
            assert change.values.is_contiguous()
            if change.indices is None:
                assert count * (4 + self.dtype.itemsize) > changed.numel() * self.dtype.itemsize
                assert torch.equal(change.values, param.to(self.dtype))
                assert change.values.data_ptr() != param.data_ptr()  # which the next step writes
            else:
                assert count * (4 + self.dtype.itemsize) <= changed.numel() * self.dtype.itemsize
                assert change.indices.dtype == torch.int32
                assert change.indices.is_contiguous()
                assert change.indices.tolist() == changed.flatten().nonzero()[:, 0].tolist()
                assert torch.equal(change.values, param.flatten()[change.indices].to(self.dtype))
        self.changed = {name: torch.zeros_like(changed) for name, changed in self.changed.items()}
