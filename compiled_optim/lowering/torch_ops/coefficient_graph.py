"""The scalar stage of a step as one small compiled graph, for accelerators, where each operation is a launch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops.coefficients import found, note_outcome
from compiled_optim.memory.layout import scalar, scalar_dtype
from compiled_optim.plan.clipping import NAMES, Clipping
from compiled_optim.plan.compilations import CompilationLog
from compiled_optim.plan.kernel_key import KernelKey, coefficient_key
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import NUMBERS, Rule
from compiled_optim.torch_compiler import CompiledGraph, compile_graph, without_memory
from compiled_optim.torch_internals import let_compilers_trace

Graph: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]

_TENSORS, _GROUPS = 7, 3  # of the example
_graphs: dict[KernelKey, Graph | str] = {}  # or why there is none
_serial = itertools.count()


class CoefficientGraph:
    """A :class:`CoefficientStage` whose code is shared by all plans of a rule, however many tensors and groups they have.

    So it leaves nothing out: clipping and what users choose for a parameter are numbers that may be neutral.
    """

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog) -> None:
        self._plan = plan
        self._clipping = clipping
        self._log = log
        self._square_sums: Tensor | None = None
        # Whether a hyperparameter is 0 is no choice of this code.
        statics = tuple((k, v) for k, v in plan.statics.items() if k not in plan.rule.structural_hypers)
        self._key = dataclasses.replace(coefficient_key(plan), statics=statics, device=str(plan.device))
        self._graph: Graph | None = None
        signs = [-1.0 if maximizes else 1.0 for maximizes in plan.maximizes]
        rows = [signs, *(plan.numbers[name] for name in _number_names(plan.rule))]
        self._constants = torch.tensor(rows, dtype=plan.scalars.dtype, device="cpu").to(plan.device)
        self._group_index = torch.tensor(plan.group_index, device="cpu").to(plan.device)
        self._all = torch.ones(len(plan.members), dtype=torch.bool, device=plan.device)
        self._nothing = scalar(0.0, plan.device)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return self._graph is not None

    def compile(self) -> None:
        """Obtain the graph."""
        if self._graph is None:
            names = [member.name for member in self._plan.members]
            self._graph = self._log.obtain_or_fall_back(_graphs, self._key, names, _make, _function)

    def connect(self, square_sums: Tensor) -> None:
        """As :meth:`Stage.connect`."""
        self._square_sums = square_sums

    def advance(self, present: Tensor | None) -> Tensor:
        """As :meth:`Stage.advance`."""
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
        given = [plan.scalars, table, self._constants, self._group_index, marks, total, *numbers]
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
