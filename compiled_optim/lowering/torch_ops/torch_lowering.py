"""What lowerings whose kernels take gradients and coefficients as tensors share: how they step and how they see tensors."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops.coefficients import CoefficientStage
from compiled_optim.memory.layout import compute_dtype, flat, real_numel
from compiled_optim.memory.sharding import add_over_shards
from compiled_optim.plan.clipping import Clipping, square_sum
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.rule import INDEX, Rule, number_type
from compiled_optim.state import filled

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The ``size`` values that were asked for last, by key.

    ``functools.lru_cache`` around a method keeps the method's object alive, and the object the cache.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of ``key``, made if it is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
        else:
            self._values[key] = make(key)
            if len(self._values) > self._size:
                self._values.popitem(last=False)
        return self._values[key]


Step = Callable[..., tuple[Tensor, list[Tensor]]]
Reduced = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def rule_step(rule: Rule, statics: Mapping[str, Any]) -> Step:
    """The function ``(param, grad, buffers, coefficients, index) -> (new param, new buffers)`` for one set of choices.

    Arithmetic is in float32 for float32 and lower, in float64 for float64; results are rounded to each tensor's dtype.
    ``coefficients``, of the dtype of the arithmetic, broadcast against the parameter: the factor of the gradient, a mark
    that is not 0 where everything stays as it is, the rule's own, and what it reduces. ``index``, int32 of the
    parameter's shape, counts elements in the order of memory, for a rule that reads it. With buffers that are grouped, the
    last dimension holds elements in that order, whole groups of them.
    """
    present = rule.present_buffers(statics)
    values_of = _values_of(rule, statics, -1)

    def step(
        param: Tensor,
        grad: Tensor,
        buffers: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        index: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        new = rule.updated(values_of(param, grad, buffers, coefficients) | ({} if index is None else {INDEX: index}))
        live = coefficients[1] == 0

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(live, new.to(old.dtype), old)

        return chosen(new["param"], param), [chosen(new[name], old) for name, old in zip(present, buffers, strict=True)]

    return step


def rule_reductions(rule: Rule, statics: Mapping[str, Any], stage: int) -> Reduced:
    """The function ``(param, grad, buffers, coefficients) -> [expression, ...]`` of one of the rule's ``reductions``.

    Each expression has the parameter's shape. ``coefficients`` are as for :func:`rule_step`, without what is reduced in this
    stage and in later ones.
    """
    values_of = _values_of(rule, statics, stage)

    def expressions(param: Tensor, grad: Tensor, buffers: Sequence[Tensor], coefficients: Sequence[Tensor]) -> list[Tensor]:
        found = rule.reduced(stage, values_of(param, grad, buffers, coefficients))
        dtype, device = compute_dtype(param.dtype), param.device
        return [torch.as_tensor(r.expression, dtype=dtype, device=device).expand_as(param) for r in found.values()]

    return expressions


def _values_of(rule: Rule, statics: Mapping[str, Any], stage: int) -> Callable[..., dict[str, Any]]:
    """What makes the values that a rule's functions take of tensors."""
    present = rule.present_buffers(statics)
    whole = rule.whole_buffers(statics)
    given = {**dict.fromkeys(b.name for b in rule.buffers), **statics}
    numbers_of = number_type(rule.number_names(statics)[stage])

    def values_of(param: Tensor, grad: Tensor, buffers: Sequence[Tensor], coefficients: Sequence[Tensor]) -> dict[str, Any]:
        dtype = compute_dtype(param.dtype)
        factor, _, *numbers = coefficients
        values = {**given, "param": param.to(dtype), "grad": factor * grad.to(dtype), "c": numbers_of(*numbers)}
        dtypes = {name: torch.int32 if name in whole else dtype for name in present}
        return values | {name: buffer.to(dtypes[name]) for name, buffer in zip(present, buffers, strict=True)}

    return values_of


class Vectors:
    """A member's parameter, gradient and buffers as vectors of real numbers, in the order of the parameter's memory.

    They are the memory itself, but for a parameter whose memory has gaps, and where the rule has numbers for groups of
    elements and the last group is not whole: then they are copies, with zeros up to the end of the group.
    """

    def __init__(self, plan: Plan, member: Member) -> None:
        self._order = plan.memory_order(member)
        entries = [flat(member.entries[name]) for name in plan.buffers]
        self._memory = [flat(self._order.target), *entries]
        whole_groups = plan.grouped_buffers
        self._fills = [bool(whole_groups) and name not in whole_groups for name in ("param", *plan.buffers)]
        self.device = member.param.device

    def read(self, grad: Tensor) -> list[Tensor]:
        """Parameter, ``grad`` and buffers."""
        self._order.load()
        param, *buffers = (filled(t) if fills else t for t, fills in zip(self._memory, self._fills, strict=True))
        vector = flat(self._order.arranged(grad))
        return [param, filled(vector) if self._fills[0] else vector, *buffers]

    def store(self, new: Sequence[Tensor]) -> None:
        """Write the new parameter and buffers to where they were read from."""
        for memory, vector in zip(self._memory, new, strict=True):
            if vector is not memory:
                memory.copy_(vector[: len(memory)])
        self._order.store()


class TorchLowering:
    """Runs the step of one plan: the coefficients first, in torch operations, then what a subclass makes of them."""

    square_sum_count = 1

    def __init__(self, plan: Plan, clipping: Clipping) -> None:
        self.plan = plan
        self._stage = CoefficientStage(plan, clipping)
        self._grads: Sequence[Tensor | None] = ()
        self._stages = plan.rule.stages(plan.statics)
        self._masks: Recent[tuple[bool, ...], Tensor] = Recent(256)  # a new one waits for the device

    def connect(self, square_sums: Tensor, all_square_sums: Tensor) -> None:
        self._square_sum = square_sums
        self._stage.connect(all_square_sums)

    def prepare(self, grads: list[Tensor | None] | None) -> None:
        self._grads = self.plan.gradients(grads)

    def measure(self) -> None:
        self._square_sum.fill_(square_sum(self._grads, self.plan.device))

    def finish(self) -> None:
        self.plan.finish()
        self._grads = ()

    def launch(self) -> None:
        for _ in self.launch_in_stages():
            raise AssertionError("totals are over all plans")

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        raise NotImplementedError

    def _advance(self) -> tuple[Tensor, Tensor | None]:
        """Count a step of every parameter with a gradient.

        Returns the coefficients, see :meth:`CoefficientStage.advance`, and which parameters have a gradient (None if all).
        """
        present = tuple(grad is not None for grad in self._grads)
        mask = None
        if not all(present):
            mask = self._masks.get(present, lambda marks: torch.tensor(marks, device=self.plan.device))
        return self._stage.advance(mask), mask

    def _advance_and_reduce(self) -> Generator[Tensor, Tensor, Tensor]:
        """As :meth:`launch_in_stages`, up to the update. Returns the coefficients and the rule's reductions behind them."""
        coefficients, mask = self._advance()
        for stage, (sums_of, totals, _) in self._stages.items():
            sums = coefficients.new_zeros(sums_of.stop - sums_of.start, len(self.plan.members))
            self._sum_expressions(stage, coefficients, sums)
            if self.plan.sharded:
                assert not sums.requires_grad, "autograd does not see what other processes add"
                add_over_shards(sums, self.plan.params[0])
            means = sums[: totals.start - sums_of.start] / self._counts
            coefficients = torch.cat([coefficients, means])
            if totals.start < totals.stop:
                own = sums[totals.start - sums_of.start :]
                given = yield (own if mask is None else torch.where(mask, own, 0.0)).sum(1)
                coefficients = torch.cat([coefficients, given.unsqueeze(1).expand(-1, sums.shape[1])])
        return coefficients

    def _sum_expressions(self, stage: int, coefficients: Tensor, sums: Tensor) -> None:
        """Write to ``sums``, (expressions, tensors), what a stage of the rule's reductions is over each prepared tensor."""
        raise NotImplementedError(f"the reductions of {self.plan.rule.name}")

    @functools.cached_property
    def _counts(self) -> Tensor:
        """The numbers of elements: of DTensors the whole ones, and at least 1."""
        counts = [max(real_numel(param), 1) for param in self.plan.params]
        return torch.tensor(counts, dtype=self.plan.scalars.dtype, device=self.plan.device)
