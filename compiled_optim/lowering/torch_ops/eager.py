"""The lowering to plain torch operations, and what lowerings share whose kernels take gradients and coefficients as tensors.

A step evaluates the coefficients for all tensors of a plan, then the rule's reductions, then the update.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops.lists import Lists, Values, programs
from compiled_optim.memory.layout import add_over_shards, as_real, compute_dtype, real_numel
from compiled_optim.plan.clipping import Clipping, scaled, square_sum
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import Rule

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


class Evaluated(NamedTuple):
    """What the scalar stage of a step makes.

    Attributes:
        rows: the coefficients, with one entry per tensor: the factor of the gradient, 1 where the step is skipped, else 0,
            and what the rule's update takes. Entries of absent tensors have no meaning.
        scalars: those after the step.
        outcome: the norm of all gradients, and 1 where the step is skipped; None without clipping.
    """

    rows: list[Tensor]
    scalars: Tensor
    outcome: Tensor | None


def evaluated(
    rule: Rule,
    statics: Mapping[str, Any],
    scalars: Tensor,
    hypers: Sequence[Tensor],
    numbers: Mapping[str, Tensor | None],
    signs: Tensor,
    clipping: Sequence[Tensor],
    square_sum: Tensor | None,
    present: Tensor | None,
) -> Evaluated:
    """Count a step for the tensors where ``present`` is true (all if None), and write nothing.

    Vectors have an entry for each tensor. ``scalars`` are :attr:`Plan.scalars` before the step, ``hypers`` the present
    hyperparameters one element after the other, ``numbers`` what was chosen for each tensor (None for 1), ``signs`` factors
    of the gradients. ``clipping`` are the numbers called :data:`~compiled_optim.plan.clipping.NAMES`, none where gradients
    are used as they are. ``square_sum`` is of all gradients, None where nobody needs it.
    """
    factor, outcome, skip = signs, None, torch.zeros_like(signs)
    if clipping:
        total = torch.zeros_like(clipping[0]) if square_sum is None else square_sum
        clip, norm, skipped = scaled(total, *clipping)
        skipped = torch.as_tensor(skipped, dtype=scalars.dtype, device=scalars.device)
        outcome = torch.stack([norm, skipped])
        live = (skipped == 0).expand_as(factor)
        present = live if present is None else present & live
        factor, skip = factor * clip, skipped.expand_as(factor)
    step = scalars[0] + 1
    elements = iter(hypers)
    values: dict[str, Any] = {"step": step, **numbers, **statics}
    for h in rule.present_hypers(statics):
        values[h.name] = tuple(next(elements) for _ in range(h.length)) if h.is_tuple else next(elements)
    values |= {s.name: scalar for s, scalar in zip(rule.scalars, scalars[1:].unbind(), strict=True)}
    rows = {
        name: torch.as_tensor(value, dtype=step.dtype, device=step.device).expand_as(step)
        for name, value in rule.evaluated(values).items()
    }
    new = torch.stack([step, *(rows[s.name] for s in rule.scalars)])
    new = new if present is None else torch.where(present, new, scalars)
    return Evaluated([factor, skip, *(rows[name] for name in rule.coefficient_names(statics))], new, outcome)


def note_outcome(outcome: Tensor, found: Tensor, *, counts: bool) -> None:
    """Write :attr:`Evaluated.outcome` to what :meth:`Clipping.outcome` returned; ``counts`` where this plan counts skips."""
    skipped = outcome[2:] + found[1:] if counts else outcome[2:]
    outcome.copy_(torch.cat([found, skipped]))


class CoefficientStage:
    """Evaluates a rule's ``coefficients`` for all tensors of a plan at once, in float64 where the device has it.

    Attributes:
        constants: the signs of the gradients, and those numbers that groups chose for tensors which are not all 1.
        group_index: which of the plan's groups each tensor is in.
    """

    def __init__(self, plan: Plan, clipping: Clipping) -> None:
        self.plan = plan
        self.clipping = clipping
        self._square_sums: Tensor | None = None
        self._rows = self._rows_of(plan)
        self._neutral = dict.fromkeys(plan.numbers.keys() - self._rows)
        signs = [-1.0 if maximizes else 1.0 for maximizes in plan.maximizes]
        rows = [signs, *(plan.numbers[name] for name in self._rows)]
        self.constants = torch.tensor(rows, dtype=plan.scalars.dtype, device="cpu").to(plan.device)
        self.group_index = torch.tensor(plan.group_index, device="cpu").to(plan.device)
        given = plan.recorded_scalars
        self._recorded: tuple[int, Tensor] | None = None if given is None else (plan.scalars._version, given)

    @staticmethod
    def _rows_of(plan: Plan) -> list[str]:
        """Those numbers of the tensors that are not all 1: nothing is multiplied by the others."""
        return [name for name, row in plan.numbers.items() if {*row} != {1.0}]

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return True

    def compile(self) -> None:
        """Compile what is not compiled yet."""

    def connect(self, square_sums: Tensor) -> None:
        """Take the vector whose sum is the sum of the squares of all gradients."""
        self._square_sums = square_sums

    def advance(self, present: Tensor | None) -> Tensor:
        """Count a step for the tensors where ``present`` is true (all if None) and return their coefficients.

        Returns a (2 + coefficients, tensors) matrix, see :attr:`Evaluated.rows`.
        """
        plan, clipping = self.plan, self.clipping
        live = [t for group in plan.groups for h in plan.hypers for t in group.read_only(h.name)]
        hypers = [t.to(plan.device, plan.scalars.dtype) for t in live]
        total = None if clipping.idle or self._square_sums is None else self._square_sums.sum()
        coefficients, outcome = self._step(hypers, total, present)
        if outcome is not None and not clipping.idle:
            note_outcome(clipping.outcome(plan.device), outcome.detach(), counts=plan.is_first)
        return coefficients

    def _step(self, hypers: list[Tensor], square_sum: Tensor | None, present: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Update the plan's scalars. Returns the coefficients and the outcome."""
        plan, clipping = self.plan, self.clipping
        numbers = () if clipping.idle else clipping.tensors(plan.device)
        found = self.evaluate(self._scalars(), self.constants, self.group_index, hypers, numbers, square_sum, present)
        coefficients = torch.stack(found.rows)
        plan.scalars.copy_(found.scalars.detach())
        self._recorded = (plan.scalars._version, found.scalars) if found.scalars.requires_grad else None
        return coefficients, found.outcome

    def evaluate(
        self,
        scalars: Tensor,
        constants: Tensor,
        group_index: Tensor,
        hypers: Sequence[Tensor],
        clipping: Sequence[Tensor],
        square_sum: Tensor | None,
        present: Tensor | None,
    ) -> Evaluated:
        """:func:`evaluated` of what stands for the plan's scalars, the attributes, and its groups' hyperparameters."""
        plan = self.plan
        signs, *rows = constants.unbind()
        numbers = self._neutral | dict(zip(self._rows, rows, strict=True))
        clipping = [t.to(plan.device, scalars.dtype) for t in clipping]
        if len(plan.groups) > 1:
            table = torch.stack(list(hypers)).view(len(plan.groups), -1).t()
            hypers = table[:, group_index].unbind()
        return evaluated(plan.rule, plan.statics, scalars, hypers, numbers, signs, clipping, square_sum, present)

    def _scalars(self) -> Tensor:
        """The scalars as the last step left them: with its graph if it was recorded and nobody wrote to them since."""
        if self._recorded is not None and self._recorded[0] == self.plan.scalars._version:
            return self._recorded[1]
        return self.plan.scalars.clone() if torch.is_grad_enabled() else self.plan.scalars


class TorchLowering:
    """Runs the step of one plan: the coefficients first, in torch operations, then what a subclass makes of them."""

    square_sum_count = 1

    def __init__(self, plan: Plan, clipping: Clipping, stage: CoefficientStage | None = None) -> None:
        self.plan = plan
        self._stage = CoefficientStage(plan, clipping) if stage is None else stage
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
        coefficients, mask = self._advance()
        for stage, (sums_of, totals, _) in self._stages.items():
            sums = coefficients.new_zeros(sums_of.stop - sums_of.start, len(self.plan.members))
            self._reduce(stage, coefficients, sums)
            if self.plan.sharded:
                assert not sums.requires_grad, "autograd does not see what other processes add"
                add_over_shards(sums, self.plan.params[0])
            means = sums[: totals.start - sums_of.start] / self._counts
            coefficients = torch.cat([coefficients, means])
            if totals.start < totals.stop:
                own = sums[totals.start - sums_of.start :]
                given = yield (own if mask is None else torch.where(mask, own, 0.0)).sum(1)
                coefficients = torch.cat([coefficients, given.unsqueeze(1).expand(-1, sums.shape[1])])
        self._update(coefficients)

    def _advance(self) -> tuple[Tensor, Tensor | None]:
        """Count a step of every parameter with a gradient.

        Returns the coefficients, see :meth:`CoefficientStage.advance`, and which parameters have a gradient (None if all).
        """
        present = tuple(grad is not None for grad in self._grads)
        mask = None
        if not all(present):
            mask = self._masks.get(present, lambda marks: torch.tensor(marks, device=self.plan.device))
        return self._stage.advance(mask), mask

    def _reduce(self, stage: int, coefficients: Tensor, sums: Tensor) -> None:
        """Write to ``sums``, (expressions, tensors), what a stage of the rule's reductions is over each prepared tensor."""
        raise NotImplementedError(f"the reductions of {self.plan.rule.name}")

    def _update(self, coefficients: Tensor) -> None:
        """Update every prepared tensor by ``coefficients``, behind which are the results of the reductions."""
        raise NotImplementedError(f"the update of {self.plan.rule.name}")

    @functools.cached_property
    def _counts(self) -> Tensor:
        """The numbers of elements: of DTensors the whole ones, and at least 1."""
        counts = [max(real_numel(param), 1) for param in self.plan.params]
        return torch.tensor(counts, dtype=self.plan.scalars.dtype, device=self.plan.device)


class EagerLowering(TorchLowering):
    """Runs the step of one plan tensor by tensor, without compiling anything: for debugging, and for gradients through it.

    With ``differentiable`` the step is recorded by autograd: the new parameter, which replaces the old one in place, and the
    new state depend on the old ones, on the gradient and on every hyperparameter tensor that requires grad. The state
    tensors are replaced, so that the recorded ones stay as they were.
    """

    name = "eager"
    is_compiled = True

    def __init__(self, plan: Plan, clipping: Clipping, *, differentiable: bool = False) -> None:
        super().__init__(plan, clipping)
        self._programs = programs(plan.rule, tuple(plan.statics.items()), False)
        self._differentiable = differentiable

    def compile(self) -> None:
        """There is nothing to compile."""

    def launch_in_stages(self) -> Generator[Tensor, Tensor, None]:
        with torch.set_grad_enabled(self._differentiable):
            yield from super().launch_in_stages()

    def _reduce(self, stage: int, coefficients: Tensor, sums: Tensor) -> None:
        if not self.plan.is_meta:  # else there is nothing to sum
            for i, lists, values in self._lists(coefficients):
                sums[:, i] = torch.stack([total for (total,) in lists.sums(stage, values)])

    def _update(self, coefficients: Tensor) -> None:
        for i, lists, values in self._lists(coefficients):
            member = self.plan.members[i]
            for name, (new,) in lists.updated(values).items():
                old = member.param if name == "param" else member.entries[name]
                new = torch.view_as_complex(new) if old.is_complex() else new
                member.put(name, new) if self._differentiable and old is not member.param else old.copy_(new)

    def _lists(self, coefficients: Tensor) -> Iterator[tuple[int, Lists, Values]]:
        """The parameters that have a prepared gradient, each by its position, in lists of one tensor."""
        for i, (grad, column) in enumerate(zip(self._grads, coefficients.unbind(1), strict=True)):
            if grad is None:
                continue
            member = self.plan.members[i]
            old = member.param.clone() if self._differentiable else member.param
            if self.plan.wrapped:
                old = old * 1  # a plain tensor where the class lacks operations that the step takes
            scale, skip, *numbers = column.to(compute_dtype(old.dtype)).unbind()
            targets = [old, *(member.entries[name] for name in self.plan.buffers)]
            lists = Lists(self._programs, [[as_real(t)] for t in targets], [skip])
            yield i, lists, lists.values([as_real(grad.resolve_conj())], [scale], [[n] for n in numbers])
