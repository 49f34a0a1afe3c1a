"""The step in a compiled region: operations of the graph that is being traced. A compiler fuses them with those around.

None of it runs on the host when the compiled code runs: all tensors that the step reads and writes are arguments. Dynamo
reads these from the optimizer whenever compiled code is called, and passes them. Dynamo does not trace the step itself but
calls it on fake tensors, and so do compilers of the graph; so the step is written like any other.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.lowering import list_program
from compiled_optim.lowering.coefficients import TorchCoefficients, evaluated, note_outcome
from compiled_optim.lowering.list_program import Lists, in_lists, programs
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.memory.torch_internals import compiles_means_with_lists
from compiled_optim.plan.clipping import CHOSEN, Clipping, square_sum
from compiled_optim.plan.plan import Plan
from compiled_optim.plan.schedule import Schedules
from compiled_optim.rule.formats import GROUP

_CHUNK = 16
"""The tensors that read their coefficients from one buffer in C++: Inductor tries to fuse all loops that read the same."""


def obstacle(plans: Sequence[Plan], clipping: Clipping) -> str:
    """Return why the step of ``plans`` cannot be inlined; empty if it can."""
    reasons = [
        ("there are no parameters", not plans),
        ("parameters are on several devices", len({plan.device for plan in plans}) > 1),
        ("the norm of gradients is taken over several processes", clipping.measures_norm and any(p.sharded for p in plans)),
    ]
    for plan in plans:
        rule, name = plan.rule, plan.members[0].name
        ends_early = bool(plan.grouped_buffers) and any(m.param.numel() % GROUP for m in plan.members)
        reduces = bool(rule.stages(plan.statics))
        fails = reduces and list_program.fuses_lists(plan.device) and not compiles_means_with_lists()
        reasons += [
            (f"a parameter like '{name}' ends inside of a group of elements, and Inductor loses the last group", ends_early),
            (f"{rule.name} does not work element by element", not rule.is_elementwise),
            (f"'{name}' has no memory of its own", plan.wrapped),
            (f"'{name}' shares memory with another parameter", plan.shares_memory),
            (f"'{name}' has complex numbers, which Inductor does not compile", plan.members[0].param.is_complex()),
            (f"{rule.name} takes sums over all parameters", rule.has_totals(plan.statics)),
            (f"{rule.name} takes means over all parts of '{name}'", plan.sharded and reduces),
            (f"{rule.name} takes means, with which Inductor fails before torch 2.12", fails),
        ]
    return next((reason for reason, holds in reasons if holds), "")


class InlinedStep:
    """The step of all plans as a function of tensors, if :func:`obstacle` finds nothing.

    Attributes:
        tensors: those that it reads and writes besides parameters, gradients, hyperparameters and clipping.
        names: the names of ``tensors``: ``exp_avg/0.weight``, or ``scalars/0`` with the index of a plan, and so on.
        groups: the indices of the groups whose numbers it reads or writes.
        clipping: the numbers called :data:`~compiled_optim.plan.clipping.NAMES`, as vectors of one element; those of a
            gradient scaler are neutral, since it passes other tensors to each step that it calls.
        clips: True if users assigned one of them, so that steps without a scaler use them too.
    """

    def __init__(
        self,
        coefficients: Sequence[TorchCoefficients],
        groups: Sequence[ParamGroup],
        positions: Sequence[Sequence[int]],
        clipping: Clipping,
        schedules: Schedules,
    ) -> None:
        self._plans = plans = [of_plan.plan for of_plan in coefficients]
        self._neutral = [of_plan.neutral for of_plan in coefficients]
        self._positions, self._schedules = positions, schedules
        self.clips = clipping.measures_norm
        self._chosen = clipping.chosen
        self._hypers = [[(i, h.name) for i in sorted({m.group for m in p.members}) for h in p.hypers] for p in plans]
        used = dict.fromkeys([*itertools.chain(*self._hypers), *schedules.scheduled])
        self.groups = sorted({group for group, _ in used})
        self._indices = {(i, name): groups[i].indices(name) for i, name in used}
        self._inputs_of = {i: dict(groups[i].numbers.inputs_of) for i in self.groups}
        self.clipping = [t.view(1) for t in clipping.tensors(plans[0].device, CHOSEN)]
        named = [("outcome", clipping.outcome(plans[0].device))]
        for k, (plan, of_plan) in enumerate(zip(plans, coefficients, strict=True)):
            about = {"scalars": plan.scalars, "constants": of_plan.constants, "groups": of_plan.group_index}
            named += [(f"{kind}/{k}", tensor) for kind, tensor in about.items()]
            named += [(f"{name}/{member.name}", member.entries[name]) for name in plan.buffers for member in plan.members]
        self.names, self.tensors = [name for name, _ in named], [tensor for _, tensor in named]

    def follows(self, clipping: Clipping) -> bool:
        """Return True if ``clipping`` has the same assigned tensors as when this step was built."""
        return all(map(is_, clipping.chosen, self._chosen))

    def digest(self) -> str:
        """Return a text that differs for steps of other operations, as the functions of the rules are now.

        It is another one under another default dtype, and in each call with schedules, which are functions of users.
        """
        written = [plan.rule.written_in_full(plan.statics, list_program.TORCH) for plan in self._plans]
        plans = [(plan.rule.name, plan.statics, plan.group_index, plan.maximizes) for plan in self._plans]
        others = (torch.get_default_dtype(), secrets.token_hex() if self._schedules.scheduled else "")
        facts = (
            self.clips,
            self.names,
            self._positions,
            self._hypers,
            self._indices,
            self._inputs_of,
            plans,
            self._neutral,
            written,
            others,
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def choices(self) -> dict[str, str]:
        """Return the choices, by name, that determine the operations besides the tensors' shapes and dtypes."""
        chosen = {"clipping": "on" if self.clips else "off", "schedules": str(self._schedules.scheduled)}
        for plan, neutral in zip(self._plans, self._neutral, strict=True):
            for member, maximizes in zip(plan.members, plan.maximizes, strict=True):
                where = f"param_groups[{member.group}], maximize={maximizes}"
                rule = f"{plan.rule.name} with {plan.statics} in {where}, unscaled {neutral}"
                chosen[f"rule of {member.name}"] = rule
        return chosen

    def run(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        tensors: Sequence[Tensor],
        numbers: Sequence[Sequence[Tensor]],
        clipping: Sequence[Tensor],
    ) -> None:
        """Update the ``params`` that have a gradient.

        ``params`` and ``grads`` have an entry for each of the optimizer's parameters. The others replace the attributes of
        these names; ``numbers`` are :attr:`GroupNumbers.inputs` of each of the :attr:`groups`. ``clipping`` is empty if
        gradients are not clipped.
        """
        remaining, inputs = iter(tensors), dict(zip(self.groups, numbers, strict=True))
        values = {
            (group, name): [self._number(group, i, inputs[group]) for i in indices]
            for (group, name), indices in self._indices.items()
        }
        outcome = next(remaining)
        by_plan = [list(itertools.islice(remaining, 3 + len(p.buffers) * len(p.members))) for p in self._plans]
        self._schedules.write([scalars[0] for scalars, *_ in by_plan], values)
        total = square_sum(grads, outcome.device) if self.clips else None
        about = zip(self._plans, self._neutral, self._positions, self._hypers, by_plan, strict=True)
        for plan, neutral, positions, plan_hypers, plan_tensors in about:
            scalars, constants, group_index, *entries = plan_tensors
            hypers = [number for hyper in plan_hypers for number in values[hyper]]
            plan_grads = [grads[i] for i in positions]
            before = scalars.clone()  # a coefficient may be a view of them
            of_plan, marks = (plan.rule, plan.statics, before, constants, group_index), _marks(plan_grads, scalars.device)
            rows, new, measured = evaluated(*of_plan, hypers, clipping, total, marks, neutral)
            scalars.copy_(new)
            if measured is not None:
                note_outcome(outcome, measured, counts=plan.is_first)
            _update_in_graph(plan, [params[i] for i in positions], plan_grads, entries, rows, clips=bool(clipping))

    def _number(self, group: int, i: int, inputs: Sequence[Tensor]) -> Tensor:
        where = self._inputs_of[group].get(i)
        return inputs[0][i] if where is None else inputs[where].view(()).to(inputs[0].dtype)


def _update_in_graph(
    plan: Plan,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    entries: Sequence[Tensor],
    rows: Sequence[Tensor],
    *,
    clips: bool,
) -> None:
    """Update the ``params`` of a plan that have a gradient, by the rows of :func:`evaluated`.

    ``entries`` are the tensors of each buffer. Only a step that ``clips`` uses the first two rows.
    """
    present = {i: grad for i, grad in enumerate(grads) if grad is not None and grad.numel()}
    if not present:
        return
    fuses = list_program.fuses_lists(plan.device)
    columns = [[row[i] for i in present] for row in _columns(rows if clips else rows[2:], params, fuses)]
    signs = [-1.0 if plan.maximizes[i] else 1.0 for i in present]
    scales, skips = columns[:2] if clips else (signs if -1.0 in signs else None, None)
    targets = [[tensors[i] for i in present] for tensors in in_lists([*params, *entries], len(params))]
    update = Lists(programs(plan.rule, tuple(plan.statics.items()), fuses), targets, skips)
    update.update_by_means(update.values(list(present.values()), scales, columns[2:] if clips else columns))


def _columns(rows: Sequence[Tensor], params: Sequence[Tensor], fuses: bool) -> list[list[Tensor]]:
    """Return each of ``rows`` as 0-dim tensors, in the dtypes in which ``params`` are updated."""
    dtypes = [compute_dtype(p.dtype) for p in params]
    columns = {dtype: _unbound([row.to(dtype) for row in rows], fuses) for dtype in {*dtypes}}
    return [[columns[dtype][k][i] for i, dtype in enumerate(dtypes)] for k in range(len(rows))]


def _unbound(rows: list[Tensor], fuses: bool) -> list[list[Tensor]]:
    """Return the elements of ``rows``, which Inductor computes once, and not in every kernel that reads them."""
    if fuses and rows[0].dtype == torch.float32:
        # Inductor limits the tensors and numbers that a kernel of lists reads; two numbers packed in one count as one.
        bits = [row.view(torch.int32).to(torch.int64) for row in (*rows, *rows[-1:])]
        packed = [(low & 0xFFFFFFFF) | (high << 32) for low, high in zip(bits[:-1:2], bits[1::2], strict=True)]
        pairs = _realized(torch.stack(packed))
        halves = [half.to(torch.int32).view(torch.float32).unbind() for half in (pairs, pairs >> 32)]
        return [list(row.unbind()) for pair in zip(*halves, strict=True) for row in pair][: len(rows)]
    matrix = _realized(torch.stack(rows))
    is_small = fuses or len(rows[0]) <= _CHUNK
    parts = [matrix] if is_small else [_realized(part.clone()) for part in torch.split(matrix, _CHUNK, 1)]
    return [[number for part in parts for number in part[k].unbind()] for k in range(len(rows))]


def _realized(matrix: Tensor) -> Tensor:
    """Return ``matrix`` in memory, from which Inductor reads."""
    return matrix.as_strided(matrix.shape, matrix.stride())


def _marks(grads: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """Return a mask of the gradients that exist, made on the device; None if all do."""
    runs = [(exists, len(list(run))) for exists, run in itertools.groupby(grad is not None for grad in grads)]
    if runs == [(True, len(grads))]:
        return None
    return torch.cat([torch.full((count,), exists, device=device) for exists, count in runs])
