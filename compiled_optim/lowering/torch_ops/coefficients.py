"""The scalar stage of a step: step counts, schedules' values and hyperparameters in, the kernels' few numbers out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from compiled_optim.memory.layout import scalar, scalar_dtype
from compiled_optim.memory.torch_compiler import CompiledGraph, compile_graph, without_memory
from compiled_optim.memory.torch_internals import let_compilers_trace
from compiled_optim.plan.clipping import NAMES, Clipping, scaled
from compiled_optim.plan.compilations import CompilationLog, KernelKey, coefficient_key
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import NUMBERS, Rule

Graph: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]

_TENSORS, _GROUPS = 7, 3  # of the example
_graphs: dict[KernelKey, Graph | str] = {}  # or why there is none
_serial = itertools.count()


class Given(NamedTuple):
    """What the coefficients of a plan are made of.

    Attributes:
        scalars: as :attr:`~compiled_optim.plan.plan.Plan.scalars`, before the step.
        hypers: the hyperparameters of each of the plan's groups, one group after the other.
        clipping: the numbers called :data:`~compiled_optim.plan.clipping.NAMES`; none where gradients are used as they are.
        constants: :attr:`CoefficientStage.constants`.
        group_index: which of the plan's groups each tensor is in.
    """

    scalars: Tensor
    hypers: Sequence[Tensor]
    clipping: Sequence[Tensor]
    constants: Tensor
    group_index: Tensor


class Found(NamedTuple):
    """What a step makes of them.

    Attributes:
        rows: the coefficients, with one entry per tensor: the factor of the gradient, 1 where the step is skipped, else 0,
            and what the rule's update takes. Entries of absent tensors have no meaning.
        scalars: those after the step.
        outcome: the norm of all gradients, and 1 where the step is skipped; None without clipping.
    """

    rows: list[Tensor]
    scalars: Tensor
    outcome: Tensor | None


class CoefficientStage:
    """Evaluates a rule's ``coefficients`` for all tensors of a plan at once, in float64 where the device has it."""

    def __init__(self, plan: Plan, clipping: Clipping) -> None:
        self._plan = plan
        self._clipping = clipping
        self._square_sums: Tensor | None = None
        self._names = plan.rule.coefficient_names(plan.statics)
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

        Returns a (2 + coefficients, tensors) matrix, see :attr:`Found.rows`.
        """
        plan, clipping = self._plan, self._clipping
        hypers = [t for group in plan.groups for h in plan.hypers for t in group.read_only(h.name)]
        numbers = () if clipping.idle else clipping.tensors(plan.device)
        given = Given(self._scalars(), hypers, numbers, self.constants, self.group_index)
        result = self.evaluate(given, None if self._square_sums is None else self._square_sums.sum(), present)
        coefficients = torch.stack(result.rows)
        if result.outcome is not None:
            note_outcome(clipping.outcome(plan.device), result.outcome.detach(), counts=plan.leads)
        plan.scalars.copy_(result.scalars.detach())
        self._recorded = (plan.scalars._version, result.scalars) if result.scalars.requires_grad else None
        return coefficients

    def evaluate(self, given: Given, square_sum: Tensor | None, present: Tensor | None) -> Found:
        """Count a step as :meth:`advance`, of what is ``given``, and write nothing.

        ``square_sum`` is that of all gradients; None where nobody needs it.
        """
        plan = self._plan
        signs, *rows = given.constants.unbind()
        numbers = self._neutral | dict(zip(self._rows, rows, strict=True))
        clipping = [t.to(plan.device, given.scalars.dtype) for t in given.clipping]
        hypers, rule = self._hypers(given), plan.rule
        return found(rule, self._names, plan.statics, given.scalars, hypers, numbers, signs, clipping, square_sum, present)

    def _hypers(self, given: Given) -> dict[str, Tensor | tuple[Tensor, ...]]:
        """The hyperparameters by name, as vectors over the tensors (0-dim where one group holds them all)."""
        plan = self._plan
        same = [t.to(plan.device, plan.scalars.dtype) for t in given.hypers]
        if len(plan.groups) == 1:
            columns = iter(same)
        else:
            table = torch.stack(same).view(len(plan.groups), -1).t()
            columns = iter(table[:, given.group_index].unbind())
        return {h.name: tuple(next(columns) for _ in range(h.length)) if h.is_tuple else next(columns) for h in plan.hypers}

    def _scalars(self) -> Tensor:
        """The scalars as the last step left them: with its graph if it was recorded and nobody wrote to them since."""
        if self._recorded is not None and self._recorded[0] == self._plan.scalars._version:
            return self._recorded[1]
        return self._plan.scalars.clone() if torch.is_grad_enabled() else self._plan.scalars


def found(
    rule: Rule,
    names: Sequence[str],
    statics: Mapping[str, Any],
    scalars: Tensor,
    hypers: Mapping[str, Tensor | tuple[Tensor, ...]],
    numbers: Mapping[str, Tensor | None],
    signs: Tensor,
    clipping: Sequence[Tensor],
    square_sum: Tensor | None,
    present: Tensor | None,
) -> Found:
    """What a step makes of ``scalars``; vectors have an entry for each tensor.

    ``names`` are the rule's :meth:`~Rule.coefficient_names`. ``hypers`` and ``numbers`` are what its ``coefficients`` read,
    by name, ``signs`` factors of the gradients. ``clipping``, ``square_sum`` and ``present`` are as for
    :meth:`CoefficientStage.evaluate`.
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
    own = [s.name for s in rule.scalars]
    values: dict[str, Any] = {"step": step, **numbers, **statics, **hypers}
    values |= dict(zip(own, scalars[1:].unbind(), strict=True))
    rows = {
        name: torch.as_tensor(value, dtype=step.dtype, device=step.device).expand_as(step)
        for name, value in rule.evaluated(values).items()
    }
    new = torch.stack([step, *(rows[name] for name in own)])
    new = new if present is None else torch.where(present, new, scalars)
    return Found([factor, skip, *(rows[name] for name in names)], new, outcome)


def note_outcome(outcome: Tensor, found: Tensor, *, counts: bool) -> None:
    """Write :attr:`Found.outcome` to what :meth:`Clipping.outcome` returned; ``counts`` where this plan counts the skips."""
    skipped = outcome[2:] + found[1:] if counts else outcome[2:]
    outcome.copy_(torch.cat([found, skipped]))


class CoefficientGraph(CoefficientStage):
    """A :class:`CoefficientStage` whose code is shared by all plans of a rule, however many tensors and groups they have.

    So it leaves nothing out: clipping and what users choose for a parameter are numbers that may be neutral.
    """

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        super().__init__(plan, clipping)
        self._log = log
        # Whether a hyperparameter is 0 is no choice of this code.
        statics = tuple((k, v) for k, v in plan.statics.items() if k not in plan.rule.structural_hypers)
        self._key = dataclasses.replace(coefficient_key(plan), statics=statics, device=str(plan.device))
        self._graph: Graph | None = None
        self._all = torch.ones(len(plan.members), dtype=torch.bool, device=plan.device)
        self._nothing = scalar(0.0, plan.device)

    @staticmethod
    def _rows_of(plan: Plan) -> list[str]:
        return _number_names(plan.rule)

    @property
    def is_compiled(self) -> bool:
        return self._graph is not None

    def compile(self) -> None:
        if self._graph is None:
            names = [member.name for member in self._plan.members]
            self._graph = self._log.obtain_or_fall_back(_graphs, self._key, names, _make, _function)

    def advance(self, present: Tensor | None) -> Tensor:
        plan, clipping = self._plan, self._clipping
        assert self._graph is not None
        hypers = [
            t.to(plan.device, plan.scalars.dtype)
            for group in plan.groups
            for h in plan.hypers
            for t in group.read_only(h.name)
        ]
        table = torch.stack(hypers).view(len(plan.groups), -1)
        total = self._nothing if clipping.idle or self._square_sums is None else self._square_sums.sum()
        numbers = [t.to(plan.device, plan.scalars.dtype) for t in clipping.tensors(plan.device)]
        marks = self._all if present is None else present
        given = [plan.scalars, table, self.constants, self.group_index, marks, total, *numbers]
        coefficients, outcome = self._graph(given)
        if not clipping.idle:
            note_outcome(clipping.outcome(plan.device), outcome, counts=plan.leads)
        return coefficients


def _number_names(rule: Rule) -> list[str]:
    return [*NUMBERS, *(scale.name for scale in rule.scales)]


def _make(key: KernelKey) -> Graph | str:
    device, rule = torch.device(key.device), key.rule
    run, numbers = _function(key), sum(h.length for h in rule.present_hypers(dict(key.statics)))

    def traced(tensors: list[Tensor]) -> Sequence[Tensor]:
        return run(tensors)

    def coefficients(*tensors: Tensor) -> Sequence[Tensor]:
        return traced(list(tensors))

    let_compilers_trace(traced)
    name = f"{rule.name}_coefficients_{next(_serial)}"
    coefficients.__code__ = coefficients.__code__.replace(co_name=name)
    with without_memory():
        rows = ((1 + len(rule.scalars), _TENSORS), (_GROUPS, numbers), (1 + len(_number_names(rule)), _TENSORS))
        tensors = [torch.ones(shape, dtype=scalar_dtype(device), device=device) for shape in rows]
        tensors += [torch.ones(_TENSORS, dtype=dtype, device=device) for dtype in (torch.int64, torch.bool)]
        tensors += [torch.ones((), dtype=scalar_dtype(device), device=device) for _ in ("total", *NAMES)]
        dynamic = [[1], [0], [1], [0], [0]] + [[]] * (1 + len(NAMES))
        graph = compile_graph(coefficients, tensors, dynamic, {}, from_one=True)
    return graph if isinstance(graph, str) else functools.partial(_run, graph)


def _run(graph: CompiledGraph, tensors: list[Tensor]) -> list[Tensor]:
    return graph.run({_TENSORS: tensors[0].shape[1], _GROUPS: len(tensors[1])}, tensors)


def _function(key: KernelKey) -> Graph:
    """The function of tensors, uncompiled."""
    rule, statics = key.rule, dict(key.statics)
    names, hypers = rule.coefficient_names(statics), rule.present_hypers(statics)

    def run(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        scalars, table, constants, group_index, present, total, *clipping = tensors
        columns = iter(table[group_index].unbind(1))
        values = {h.name: tuple(next(columns) for _ in range(h.length)) if h.is_tuple else next(columns) for h in hypers}
        signs, *rows = constants.unbind()
        numbers = dict(zip(_number_names(rule), rows, strict=True))
        result = found(rule, names, statics, scalars, values, numbers, signs, clipping, total, present)
        coefficients = torch.stack(result.rows)  # before the scalars change, of which a coefficient may be a view
        scalars.copy_(result.scalars)
        assert result.outcome is not None
        return coefficients, result.outcome

    return run
