"""The lowering through Inductor, the compiler of torch.compile: C++ on a CPU and Triton on a GPU.

A step that is called updates each list of tensors with one launch. A list has a fixed number of tensors of any sizes, which
are updated in place. So one kernel per :class:`KernelKey` serves every list of the process: neither the number of tensors,
nor their shapes, nor the set of gradients cause a recompile.

A step in a compiled region is operations of the graph that is being traced, which a compiler fuses with those around them.
None of it runs on the host when the compiled code runs: all tensors that the step reads and writes are arguments. Dynamo
reads these from the optimizer whenever compiled code is called, and passes them. Dynamo does not trace the step itself but
calls it on fake tensors, and so do compilers of the graph; so the step is written like any other.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.lowering.torch_ops import lists
from compiled_optim.lowering.torch_ops.eager import TorchLowering, evaluated, note_outcome
from compiled_optim.lowering.torch_ops.lists import Lists, programs, sum_of
from compiled_optim.memory.layout import compute_dtype, flat, real_numel, scalar, scalar_dtype
from compiled_optim.memory.torch_compiler import Code, compiled
from compiled_optim.memory.torch_internals import compiles_means_with_lists
from compiled_optim.plan.clipping import CHOSEN, NAMES, Clipping, square_sum
from compiled_optim.plan.compilations import LISTS, LISTS_OF_ROWS, CompilationLog, KernelKey, coefficient_key, kernel_key
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.plan.schedule import Schedules
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.rule import NUMBERS
from compiled_optim.state import filled

Kernel: TypeAlias = Mapping[int, Code]
"""The code of one key: for each stage of the rule's reductions, and for the update."""

UPDATE = -1  # the stage of a kernel that updates, or evaluates coefficients

COUNT, COUNT_UNFUSED = 16, 4
"""The tensors in a list if Inductor makes one kernel of a list, and if it makes a loop for each of its tensors."""

_ALIGNED = 16  # the row length of ungrouped tensors: fixed, so that Inductor can vectorize
_TENSORS, _GROUPS = 7, 3  # sizes to compile coefficients with

_CHUNK = 16
"""The tensors that read their coefficients from one buffer in C++: Inductor tries to fuse all loops that read the same."""

_INDICES = (1 << 31) - (1 << 16)
"""The most elements for the 32-bit indices of Inductor's code for accelerators; those of the last block must fit, too."""

OPTIONS = {"cpp.dynamic_threads": True}  # follow torch.set_num_threads
_LIST_OPTIONS = {"combo_kernel_max_num_args": 1 << 20}  # a list is one kernel, however much it reads
_kernels: dict[KernelKey, Kernel | str] = {}  # or the reason if none compiles


def fits_indices(device: torch.device, elements: int) -> bool:
    """Return True if Inductor's code for ``device`` can index so many elements."""
    return device.type == "cpu" or elements <= _INDICES


def say_too_large(log: CompilationLog, name: str) -> None:
    """Record that the parameter ``name`` runs uncompiled because of its size."""
    log.fall_back(
        f"'{name}' is updated with plain torch operations: it has {_INDICES} elements or more",
        "a step takes longer, and more memory; split the parameter",
    )


class Vectors:
    """A member's parameter, gradient and buffers as vectors of real numbers, in the order of the parameter's memory.

    They share the tensors' memory, with two exceptions. A parameter whose memory has gaps is copied. If the rule has numbers
    for groups of elements and the last group is incomplete, they are copies, padded to the end of the group.
    """

    def __init__(self, plan: Plan, member: Member) -> None:
        self._order = plan.memory_order(member)
        entries = [flat(member.entries[name]) for name in plan.buffers]
        self._memory = [flat(self._order.target), *entries]
        grouped = plan.grouped_buffers
        self._fills = [bool(grouped) and name not in grouped for name in ("param", *plan.buffers)]

    def read(self, grad: Any) -> list[Tensor]:
        """Return the vectors of parameter, ``grad`` and buffers."""
        self._order.load()
        param, *buffers = (filled(t) if fills else t for t, fills in zip(self._memory, self._fills, strict=True))
        vector = flat(self._order.arranged(grad))
        return [param, filled(vector) if self._fills[0] else vector, *buffers]

    def store(self, new: Sequence[Tensor]) -> None:
        """Write the new parameter and buffers to the tensors that were read."""
        for memory, vector in zip(self._memory, new, strict=True):
            if vector is not memory:
                memory.copy_(vector[: len(memory)])
        self._order.store()


class InductorLowering(TorchLowering):
    """The step of one plan with Inductor's kernels, or uncompiled where these cannot index a tensor's elements.

    On accelerators, where each operation is a launch, a kernel evaluates the coefficients of all tensors. If the lowering is
    not ``compiled``, it runs the operations that kernels are compiled from.
    """

    name = "inductor"
    _vectors = Vectors

    def __init__(self, plan: Plan, clipping: Clipping, log: CompilationLog, *, compiled: bool = True) -> None:
        super().__init__(plan, clipping, log)
        self.name = "inductor" if compiled else "eager"
        positions: dict[tuple[KernelKey, bool], list[int]] = {}
        for i, (member, grad_dtype) in enumerate(zip(plan.members, plan.grad_dtypes, strict=True)):
            if member.param.numel() > 0:
                positions.setdefault(self._kind(member, grad_dtype), []).append(i)
        self._parts = []
        for (key, fits), where in positions.items():
            part = Part(plan, where, key, self._vectors)
            if compiled and not fits:
                say_too_large(log, plan.members[part.positions[0]].name)
            part.kernel = None if compiled and fits else uncompiled(key)
            self._parts.append(part)
        self._compiles_coefficients = compiled and lists.fuses_lists(plan.device)
        self._coefficients: Kernel | None = None
        self._all = torch.ones(len(plan.members), dtype=torch.bool, device=plan.device)  # have gradients
        self._zero = scalar(0.0, plan.device)  # the sum of squares if no norm is needed

    def _kind(self, member: Member, grad_dtype: torch.dtype) -> tuple[KernelKey, bool]:
        """Return the key of the kernel that updates ``member``, and True if that can index its elements."""
        plan, numel = self.plan, real_numel(member.param)
        in_rows = plan.grouped_buffers or (lists.fuses_lists(plan.device) and numel % _ALIGNED == 0)
        key = kernel_key(plan, member, grad_dtype, LISTS_OF_ROWS if in_rows else LISTS)
        return key, fits_indices(plan.device, numel)

    def compile(self) -> None:
        if self._compiles_coefficients and self._coefficients is None:
            self._coefficients = self._obtain(_evaluation_key(self.plan), range(len(self.plan.members)))
        for part in self._parts:
            if part.kernel is None:
                part.kernel = self._obtain(part.key, part.positions)

    def _obtain(self, key: KernelKey, positions: Sequence[int]) -> Kernel:
        names = [self.plan.members[i].name for i in positions]
        return self._log.obtain_or_fall_back(_kernels, key, names, _make, uncompiled)

    def _evaluated(self, hypers: list[Tensor], total: Tensor | None, present: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self._coefficients is None:
            return super()._evaluated(hypers, total, present)
        plan = self.plan
        table = torch.stack(hypers).view(len(plan.groups), -1)
        present, total = self._all if present is None else present, self._zero if total is None else total
        numbers = [t.to(plan.device, plan.scalars.dtype) for t in self._clipping.tensors(plan.device)]
        arguments = [plan.scalars, table, self.constants, self.group_index, present, total, *numbers]
        coefficients, outcome = self._coefficients[UPDATE](arguments)
        return coefficients, outcome

    def _reduce(self, stage: int, coefficients: Tensor, sums: Tensor) -> None:
        for part in self._parts:
            part.reduce(stage, self._grads, coefficients, sums)

    def _update(self, coefficients: Tensor) -> None:
        for part in self._parts:
            part.update(self._grads, coefficients)


class Part:
    """Tensors of a plan, at ``positions``, that share a kernel, which updates the ``vectors`` of each."""

    def __init__(self, plan: Plan, positions: Sequence[int], key: KernelKey, vectors: type[Vectors]) -> None:
        # Tensors of similar sizes share a list, in any order.
        self.positions = tuple(sorted(positions, key=lambda i: -plan.members[i].param.numel()))
        self.key = key
        self.kernel: Kernel | None = None
        self._count = _count(key)
        self._numels = [real_numel(plan.members[i].param) for i in self.positions]
        self._vectors = [vectors(plan, plan.members[i]) for i in self.positions]
        columns_of = functools.partial(_columns_of, self.positions, self._count, key.device)
        self._columns_of = functools.lru_cache(256)(columns_of)
        # Padding of the last list.
        self._stand_ins = [torch.zeros(1, *row, dtype=dtype, device=key.device) for row, dtype in _kinds(key)]

    def update(self, grads: Sequence[Any], coefficients: Tensor) -> None:
        """Update the tensors whose entry in ``grads``, over the whole plan, is not None."""
        for here, tensors, _ in self._run(UPDATE, grads, coefficients):
            for k, (param, _, *buffers) in zip(here, tensors, strict=True):
                self._vectors[k].store([param, *buffers])

    def reduce(self, stage: int, grads: Sequence[Any], coefficients: Tensor, sums: Tensor) -> None:
        """Write a stage's sums over each tensor to ``sums``, (expressions, tensors of the plan)."""
        for here, _, results in self._run(stage, grads, coefficients):
            for j, k in enumerate(here):  # in torch, which sums in parallel at any count
                of_tensor = [sum_of(e, self._numels[k], sums.dtype) for e in results[j :: self._count]]
                sums[:, self.positions[k]] = torch.stack(of_tensor)

    def _run(
        self, stage: int, grads: Sequence[Any], coefficients: Tensor
    ) -> Iterator[tuple[Sequence[int], list[list[Tensor]], Sequence[Tensor]]]:
        """Run a stage on each list. Yield the indices of its tensors, the kernel's arguments for each, and its results."""
        assert self.kernel is not None
        present = tuple(k for k, i in enumerate(self.positions) if grads[i] is not None and grads[i].numel())
        if not present:
            return
        rows = coefficients.t().index_select(0, self._columns_of(present))
        for start in range(0, len(present), self._count):
            here = present[start : start + self._count]
            tensors = [self._vectors[k].read(grads[self.positions[k]]) for k in here]
            shaped = [[t.view(-1, *s.shape[1:]) for t, s in zip(each, self._stand_ins, strict=True)] for each in tensors]
            shaped += [self._stand_ins] * (self._count - len(here))
            arguments = [*itertools.chain(*zip(*shaped, strict=True)), rows[start : start + self._count]]
            yield here, tensors, self.kernel[stage](arguments)


def _columns_of(positions: Sequence[int], count: int, device: str, present: Sequence[int]) -> Tensor:
    """Return the ``positions`` of gradients (``present``), padded with one of them to a multiple of ``count``."""
    columns = [positions[k] for k in present]
    return torch.tensor(columns + columns[:1] * (-len(columns) % count), device=device)


def _evaluation_key(plan: Plan) -> KernelKey:
    """Return the key of the kernel that evaluates coefficients, for any number of tensors and groups."""
    # This code is the same for hyperparameters that are 0.
    statics = tuple((k, v) for k, v in plan.statics.items() if k not in plan.rule.structural_hypers)
    return dataclasses.replace(coefficient_key(plan), statics=statics, device=str(plan.device))


def _count(key: KernelKey) -> int:
    return COUNT if lists.fuses_lists(torch.device(key.device)) else COUNT_UNFUSED


@functools.cache
def _kinds(key: KernelKey) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape of a row and the dtype of the parameter, the gradient and each buffer."""
    statics = dict(key.statics)
    grouped = key.rule.grouped_buffers(statics)
    columns = 0 if key.arrangement == LISTS else GROUP if grouped else _ALIGNED
    row: tuple[int, ...] = (columns,) if columns else ()
    rows = [row, row, *((columns // GROUP,) if b in grouped else row for b in key.rule.present_buffers(statics))]
    return list(zip(rows, key.dtypes, strict=True))


def _make(key: KernelKey) -> Kernel | str:
    codes: dict[int, Code] = {}
    options = _LIST_OPTIONS if lists.fuses_lists(torch.device(key.device)) else OPTIONS
    sizes = [1024 + 16 * i for i in range(_count(key))] if key.updates else [_TENSORS, _GROUPS]
    for stage, function in uncompiled(key).items():
        code = compiled(function, *_examples(key, stage, sizes), key.device, options)
        if isinstance(code, str):
            return code
        codes[stage] = code
    return codes


def _examples(key: KernelKey, stage: int, sizes: Sequence[int]) -> tuple[list[Tensor], list[list[int]]]:
    """Return meta tensors to compile a stage with, and the dimensions of each that vary."""
    statics, wide = dict(key.statics), scalar_dtype(torch.device(key.device))
    if key.updates:
        kinds = [((size, *row), dtype) for row, dtype in _kinds(key) for size in sizes]
        numbers = 2 + len(key.rule.number_names(statics)[stage])
        return _on_meta([*kinds, ((len(sizes), numbers), wide)]), [[0]] * len(kinds) + [[]]
    hypers = sum(h.length for h in key.rule.present_hypers(statics))
    rows = ((1 + len(key.rule.scalars), _TENSORS), (_GROUPS, hypers), (1 + len(NUMBERS), _TENSORS))
    kinds = [*((shape, wide) for shape in rows), ((_TENSORS,), torch.int64), ((_TENSORS,), torch.bool)]
    kinds += [((), wide) for _ in ("total", *NAMES)]
    return _on_meta(kinds), [[1], [0], [1], [0], [0]] + [[]] * (1 + len(NAMES))


def _on_meta(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]


def uncompiled(key: KernelKey) -> Kernel:
    """Return the functions of tensors by stage, uncompiled."""
    if not key.updates:
        return {UPDATE: functools.partial(_evaluate, key)}
    return {stage: functools.partial(_run_lists, key, stage) for stage in (UPDATE, *key.rule.stages(dict(key.statics)))}


def _run_lists(key: KernelKey, stage: int, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Update the tensors, or return the elements of each expression of a stage of reductions."""
    params, grads, *buffers, (columns,) = _split(tensors, _count(key))
    dtype = compute_dtype(params[0].dtype)
    scales, skips, *numbers = [list(c.to(dtype).unbind()) for c in columns.unbind(1)]
    update = Lists(programs(key.rule, key.statics, lists.fuses_lists(torch.device(key.device))), [params, *buffers], skips)
    values = update.values(grads, scales, numbers)
    if stage == UPDATE:
        update.update(values)
        return ()
    return tuple(e for es in update.expressions(stage, values) for e in torch._foreach_mul(es, 1.0))


def _evaluate(key: KernelKey, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Update the scalars. Return the coefficients and the outcome."""
    scalars, table, constants, group_index, present, total, *clipping = tensors
    statics, hypers = dict(key.statics), table[group_index].unbind(1)
    rows, new, outcome = evaluated(key.rule, statics, scalars, constants, group_index, hypers, clipping, total, present)
    coefficients = torch.stack(rows)
    scalars.copy_(new)
    assert outcome is not None
    return coefficients, outcome


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
        fails = reduces and lists.fuses_lists(plan.device) and not compiles_means_with_lists()
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
        hypers: the hyperparameters that it reads or writes: the indices of their groups, and their names.
        clipping: the numbers called :data:`~compiled_optim.plan.clipping.NAMES`, as vectors of one element; those of a
            gradient scaler are neutral, since it passes other tensors to each step that it calls.
        clips: True if users assigned one of them, so that steps without a scaler use them too.
    """

    def __init__(
        self,
        lowerings: Sequence[TorchLowering],
        positions: Sequence[Sequence[int]],
        clipping: Clipping,
        schedules: Schedules,
    ) -> None:
        self._plans = plans = [lowering.plan for lowering in lowerings]
        self._neutral = [lowering.neutral for lowering in lowerings]
        self._positions, self._schedules = positions, schedules
        self.clips = clipping.measures_norm
        self._chosen = clipping.chosen
        self._hypers = [[(i, h.name) for i in sorted({m.group for m in p.members}) for h in p.hypers] for p in plans]
        self.hypers = list(dict.fromkeys([*itertools.chain(*self._hypers), *schedules.scheduled]))
        self.clipping = [t.view(1) for t in clipping.tensors(plans[0].device, CHOSEN)]
        named = [("outcome", clipping.outcome(plans[0].device))]
        for k, (plan, lowering) in enumerate(zip(plans, lowerings, strict=True)):
            about = {"scalars": plan.scalars, "constants": lowering.constants, "groups": lowering.group_index}
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
        written = [plan.rule.written_in_full(plan.statics, lists.TORCH) for plan in self._plans]
        plans = [(plan.rule.name, plan.statics, plan.group_index, plan.maximizes) for plan in self._plans]
        others = (torch.get_default_dtype(), secrets.token_hex() if self._schedules.scheduled else "")
        facts = (self.clips, self.names, self._positions, self._hypers, plans, self._neutral, written, others)
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
        hypers: Sequence[Sequence[Tensor]],
        clipping: Sequence[Tensor],
    ) -> None:
        """Update the ``params`` that have a gradient.

        ``params`` and ``grads`` have an entry for each of the optimizer's parameters. The others replace the attributes of
        these names; a hyperparameter has one or more numbers. ``clipping`` is empty if gradients are not clipped.
        """
        remaining, values = iter(tensors), dict(zip(self.hypers, hypers, strict=True))
        outcome = next(remaining)
        by_plan = [list(itertools.islice(remaining, 3 + len(p.buffers) * len(p.members))) for p in self._plans]
        self._schedules.write([scalars[0] for scalars, *_ in by_plan], values)
        total = square_sum(grads, outcome.device) if self.clips else None
        about = zip(self._plans, self._neutral, self._positions, self._hypers, by_plan, strict=True)
        for plan, neutral, positions, plan_hypers, plan_tensors in about:
            scalars, constants, group_index, *entries = plan_tensors
            numbers = [number for hyper in plan_hypers for number in values[hyper]]
            plan_grads = [grads[i] for i in positions]
            before = scalars.clone()  # a coefficient may be a view of them
            of_plan, marks = (plan.rule, plan.statics, before, constants, group_index), _marks(plan_grads, scalars.device)
            rows, new, measured = evaluated(*of_plan, numbers, clipping, total, marks, neutral)
            scalars.copy_(new)
            if measured is not None:
                note_outcome(outcome, measured, counts=plan.is_first)
            _update_in_graph(plan, [params[i] for i in positions], plan_grads, entries, rows, clips=bool(clipping))


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
    fuses = lists.fuses_lists(plan.device)
    columns = [[row[i] for i in present] for row in _columns(rows if clips else rows[2:], params, fuses)]
    signs = [-1.0 if plan.maximizes[i] else 1.0 for i in present]
    scales, skips = columns[:2] if clips else (signs if -1.0 in signs else None, None)
    targets = [[tensors[i] for i in present] for tensors in _split([*params, *entries], len(params))]
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


def _split(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Return ``tensors`` in lists of ``count``."""
    return [list(tensors[i : i + count]) for i in range(0, len(tensors), count)]
