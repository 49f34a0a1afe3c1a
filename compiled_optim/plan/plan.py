"""Plans: the parameters that are updated together, with the gradients of a step.

The parameters of a plan share a device and every choice that shapes code. Hyperparameters, step counts and scalars
are data, so groups with different learning rates share one plan.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.groups.parameters import advising, canonical_name, parameter_name, parameter_names, parameters_of
from compiled_optim.groups.per_parameter import ignores_prefixes, lr_scale_of
from compiled_optim.memory import layout, torch_internals
from compiled_optim.memory.addresses import Addresses, gradient
from compiled_optim.plan.output_memory import NO_OUTPUTS, OutputMemory
from compiled_optim.rule.declared import rule_name
from compiled_optim.rule.fields import LR_SCALE
from compiled_optim.rule.formats import GROUP
from compiled_optim.rule.rule import NUMBERS, NUMEL, Declaration, Rule
from compiled_optim.state import OptimizerState, ParamState, StateForm, has_declared_entries, initial_values

_SEEDS = 0x9E3779  # the distance between the seeds of a DTensor's shards


@dataclass(eq=False)
class Member:
    """One parameter of a plan.

    Another thread may replace an entry of the state while a step runs; the next plan has the new one.
    """

    owner: Tensor  # the parameter in its group
    groups: Sequence[ParamGroup]  # all param_groups
    group: int  # the index of its group there
    index: int  # its index in that group
    state: ParamState
    names: Sequence[str]  # the entries of the state that a step uses
    numbers: Mapping[str, float]  # its numbers, by the name of the group's choice
    param: Tensor = field(init=False)  # the tensor that a step updates: the parameter, or a DTensor's local shard
    entries: dict[str, Tensor] = field(init=False)  # at the creation of the member, or their local shards

    def __post_init__(self) -> None:
        self.param = layout.local(self.owner)
        is_full = self.param is self.owner
        self.entries = {name: self.state[name] if is_full else layout.local(self.state[name]) for name in self.names}

    @property
    def name(self) -> str:
        """Its name in messages. A load may change it."""
        return parameter_name(self.groups[self.group], self.group, self.index)

    def put(self, name: str, entry: Tensor) -> None:
        """Replace an entry of the state, or the local shard of one. The write is not reported as a change."""
        old, self.entries[name] = self.state[name], entry
        is_full = self.param is self.owner or layout.local(old) is old
        self.state.set_quietly(name, entry if is_full else layout.as_part_of(entry, old))


class GradientLayoutError(TypeError, RuntimeError):
    """Raised for a sparse gradient where only dense ones are allowed, or vice versa; torch.optim: ``RuntimeError``."""


@dataclass(eq=False)
class Plan:
    """The parameters on one device with the same static options. DTensors in a plan share mesh and placements too.

    ``device`` is the device of step counts and coefficients: for meta parameters the CPU.
    """

    rule: Rule
    statics: dict[str, Any]
    members: Sequence[Member]
    grad_of: InitVar[Callable[[Tensor], Tensor | None]]  # returns a parameter's gradient; later gradients have its dtype
    shares_memory: bool = False  # whether it comes after others that its parameters share memory with
    is_first: bool = False  # whether it is the optimizer's first plan, which records norm and skips of the step
    outputs: OutputMemory = NO_OUTPUTS  # of the end of an update, besides the new tensors

    def __post_init__(self, grad_of: Callable[[Tensor], Tensor | None]) -> None:
        self.hypers = self.rule.present_hypers(self.statics)
        self.buffers = self.rule.present_buffers(self.statics)
        self.grouped_buffers = self.rule.grouped_buffers(self.statics)
        self.params = [m.owner for m in self.members]
        self.device = layout.scalars_device(self.params)
        self.sharded = layout.is_sharded(self.params[0])  # whether the parameters are DTensors
        self.is_meta = self.params[0].is_meta
        # Whether the parameters have no memory: those of a subclass that wraps other tensors, and meta tensors.
        self.wrapped = self.is_meta or _only_wraps(self.members[0].param)
        self._held_grads: list[Tensor | None] | None = None  # gradients of a step, see _readable
        overrides_grad = any(type(p).grad is not Tensor.grad for p in self.params)
        self._copies_own = not self.wrapped and overrides_grad  # gradients of the parameters, which kernels cannot read
        self._copies_others = self._copies_own or (not self.wrapped and self.sharded)  # gradients that a step is given
        expected = [(p.grad_dtype if p.is_leaf else None) or p.dtype for p in self.params]  # before the first gradient
        grads = map(grad_of, self.params)
        self.grad_dtypes = [d if g is None else g.dtype for g, d in zip(grads, expected, strict=True)]
        used = sorted({m.group for m in self.members})
        self.groups = [self.members[0].groups[i] for i in used]
        self.group_index = [used.index(m.group) for m in self.members]
        self.maximizes = [bool(m.groups[m.group].get("maximize")) for m in self.members]
        # The scalars with the autograd graph that a user gave them, for a differentiable step; else None.
        self.recorded_scalars: Tensor | None = None
        entries = self._scalars_of(self.members)
        if any(g.get("differentiable", False) for g in self.groups) and any(entry.requires_grad for entry in entries):
            with torch.enable_grad():
                self.recorded_scalars = torch.stack(entries).view(-1, len(self.members))
        # Float64 matrices of shape (1 + scalars, tensors): step counts in the first row, then the rule's scalars. Together
        # they have a column for each member, whose state holds 0-dim views of it.
        self.scalar_blocks = self._gather_scalars()

    @functools.cached_property
    def addresses(self) -> Addresses:
        """The addresses of parameters, gradients and state, or of their local shards, since the last :meth:`reread`."""
        params = [] if self.wrapped else [m.param for m in self.members]
        owners = self.params[: len(params)] if self.sharded else []
        return Addresses(params, self.grad_dtypes[: len(params)], list(filter(layout.has_memory, self._entries())), owners)

    def reread(self, grads: list[Tensor | None] | None) -> None:
        """Read all addresses anew, after the lowering moved state; ``grads`` are as in :meth:`read`.

        Schedules may run before the launch, so the gradients are kept alive.
        """
        vars(self).pop("addresses", None)
        self.addresses.read(self._readable(grads), keep_alive=True)

    def _entries(self) -> list[Tensor]:
        return [entry for m in self.members for entry in m.entries.values()]

    def memory_order(self, member: Member) -> layout.MemoryOrder:
        """Return the order of memory in which ``member`` is updated, after its state is brought into this order."""
        order = layout.MemoryOrder(member.param)
        for name in self.buffers:
            member.put(name, order.arranged_state(member.entries[name], grouped=name in self.grouped_buffers))
        return order

    def memory(self) -> list[object]:
        """Return the storages of state and hyperparameters. They keep the memory alive if other code moves such a tensor."""
        hypers = [t for group in self.groups for h in self.hypers for t in group.read_only(h.name)]
        return [t.untyped_storage() for t in (*self._entries(), *hypers) if layout.has_memory(t)]

    def moved_state(self) -> str:
        """Return which state has other memory than when the plan was made; empty if none has. Only other code moves it."""
        return self._moved() if self.addresses.others_moved() else ""

    def read(self, grads: list[Tensor | None] | None, *, state: bool, keep_alive: bool) -> str:
        """Read parameters and ``grads``, or their own gradients for None. Return why the plan does not describe them, or "".

        With ``state`` it reads the state too, in case other code moved its memory. ``keep_alive`` is as in
        :meth:`Addresses.read`.

        Raises:
            GradientLayoutError: a gradient is sparse and the rule takes dense ones, or vice versa.
            ValueError: a gradient has another shape than its parameter, or no memory.
        """
        current, copies = self.addresses, self._copies_own if grads is None else self._copies_others
        current.read(self._readable(grads) if copies else grads, others=state, keep_alive=keep_alive)
        if current.moved or (self.wrapped and self._other_shard()):
            return self._moved()
        if not (current.unlike or self.wrapped or self.rule.gradients == "sparse"):
            return ""
        return self._check_gradients([p.grad for p in self.params] if grads is None else grads)

    def _moved(self) -> str:
        """Return in words which parameter or state has another address, form or local shard than when the plan was made."""
        if name := self._other_shard():
            return f"'{name}' has another local shard"
        params = [] if self.wrapped else [f"'{m.name}'" for m in self.members]
        entries = [(f"state '{n}' of '{m.name}'", e) for m in self.members for n, e in m.entries.items()]
        names = [*params, *[what for what, entry in entries if layout.has_memory(entry)]]
        index = self.addresses.first_moved()
        return f"{'a parameter or its state' if index is None or index >= len(names) else names[index]} moved"

    def _other_shard(self) -> str:
        """Return the name of a DTensor with another local shard than when the plan was made; empty if there is none."""
        return next((m.name for m in self.members if layout.local(m.owner) is not m.param), "")

    def finish(self) -> None:
        """Release the gradients, and tell autograd that the parameters with gradients were written."""
        self.addresses.finish()
        self._held_grads = None

    def gradients(self, grads: list[Tensor | None] | None) -> list[Tensor | None]:
        """Return ``grads`` or the parameters' own gradients; for DTensors their local shards."""
        full = [p.grad for p in self.params] if grads is None else grads
        if not self.sharded:
            return full
        return [None if g is None else layout.local_gradient(g, p) for g, p in zip(full, self.params, strict=True)]

    def _readable(self, grads: list[Tensor | None] | None) -> list[Tensor | None] | None:
        """Return ``grads``, with copies of those that kernels cannot read. The copies are kept until :meth:`finish`."""
        if not (self._copies_own if grads is None else self._copies_others):
            return grads
        self._held_grads = self.gradients(grads)
        return self._held_grads

    def _check_gradients(self, grads: Sequence[Tensor | None]) -> str:
        """Return which gradient has another dtype than expected, or "". Raise an error where one cannot be used at all."""
        rule, takes_sparse = self.rule, self.rule.gradients == "sparse"
        present = [(m, p, g) for m, p, g in zip(self.members, self.params, grads, strict=True) if g is not None]
        if wrong := [m for m, _, g in present if g.is_sparse != takes_sparse]:
            advice = f", please consider {rule.advice} instead" if rule.advice else ""
            kind = "dense" if takes_sparse else "sparse"
            with advising():
                raise GradientLayoutError(
                    f"{rule.name} does not support {kind} gradients{advice}; '{wrong[0].name}' has one"
                )
        for member, param, grad in present:
            # Of a DTensor's gradient, a compiled step hands over this process's part.
            shapes = tuple(grad.shape), tuple((param if layout.is_sharded(grad) else member.param).shape)
            if shapes[0] != shapes[1]:
                raise ValueError(f"the gradient of '{member.name}' has shape {shapes[0]}, the parameter {shapes[1]}")
            strided = (grad._indices(), grad._values()) if grad.is_sparse else (layout.local(grad),)
            if any(map(layout.is_lost, strided)):
                raise ValueError(f"the gradient of '{member.name}' has no memory: its storage was freed")
            if torch_internals.is_fake(grad) and not torch_internals.is_fake(param):
                raise ValueError(f"the gradient of '{member.name}' has no memory: it is a FakeTensor")
        pairs = zip(self.members, grads, self.grad_dtypes, strict=True)
        other = [f"the gradient of '{m.name}' is {g.dtype}, not {d}" for m, g, d in pairs if g is not None and g.dtype != d]
        return other[0] if other else ""

    @functools.cached_property
    def counts(self) -> list[int]:
        """The number of real elements of each parameter, at least 1; a DTensor counts in full."""
        return [max(layout.real_numel(param), 1) for param in self.params]

    @functools.cached_property
    def numbers(self) -> dict[str, list[float]]:
        """By name, the :meth:`Rule.inputs` of the members; 1 by default."""
        chosen = {name: [m.numbers.get(name, 1.0) for m in self.members] for name in NUMBERS}
        if self.sharded and self.rule.is_elementwise and self.rule.reads_index(self.statics):  # an index is local to a shard
            shift = _SEEDS * layout.part_number(self.params[0])
            chosen["seed"] = [(seed + shift) % (1 << 24) for seed in chosen["seed"]]
        chosen |= {"resolution": [torch.finfo(m.param.dtype).eps for m in self.members]}
        return chosen | ({NUMEL: [float(n) for n in self.counts]} if NUMEL in self.rule.inputs(self.statics) else {})

    @functools.cached_property
    def scalars(self) -> Tensor:
        """Step counts and the rule's scalars in one float64 tensor of shape (1 + scalars, members)."""
        block = self._block_of(self.members)
        self.scalar_blocks = [self._gathered(self.members) if block is None else block]
        return self.scalar_blocks[0]

    def _gather_scalars(self) -> list[Tensor]:
        """Return the scalars in as few blocks as possible. Blocks of an earlier plan stay: a graph may read them."""
        by_storage: dict[int | None, list[Member]] = {}
        for member in self.members:
            storage, is_block = member.entries["step"].untyped_storage(), _base_of(member) is not None
            by_storage.setdefault(storage._cdata if is_block else None, []).append(member)
        blocks, others = [], []
        for members in by_storage.values():
            members.sort(key=lambda m: m.entries["step"].storage_offset())
            if (block := self._block_of(members)) is None:
                others += members
            else:
                blocks.append(block)
        return [*blocks, *([self._gathered(others)] if others else [])]

    def _scalars_of(self, members: Sequence[Member]) -> list[Tensor]:
        return [m.entries[name] for name in self.rule.scalar_names for m in members]

    def holds_scalars(self) -> bool:
        """Return whether the scalars of state are still in the blocks."""
        blocks = {block.untyped_storage()._cdata for block in self.scalar_blocks}
        return all([scalar.untyped_storage()._cdata in blocks for scalar in self._scalars_of(self.members)])

    def _block_of(self, members: Sequence[Member]) -> Tensor | None:
        """Return the block with exactly the scalars of ``members``, in this order; None if there is none."""
        if (block := _base_of(members[0])) is None:
            return None
        storage = block.untyped_storage()._cdata
        locations = [(e.untyped_storage()._cdata, e.storage_offset()) for e in self._scalars_of(members)]
        fills = locations == [(storage, offset) for offset in range(block.numel())]
        return block.view(-1, len(members)) if fills else None

    def _gathered(self, members: Sequence[Member]) -> Tensor:
        """Return the scalars of ``members``, copied into new memory. The state gets views of it."""
        names = self.rule.scalar_names
        scalars = torch.stack(self._scalars_of(members)).view(len(names), -1)
        for row, name in enumerate(names):
            for column, member in enumerate(members):
                member.put(name, scalars[row, column])
        return scalars


def _base_of(member: Member) -> Tensor | None:
    """Return the block with the step count, as a tensor. A count that another process shares arrives without its block."""
    step = member.entries["step"]
    if step._base is None and step.device.type == "cpu" and step.is_shared():  # type: ignore[no-untyped-call]
        return step.new_empty(0).set_(step.untyped_storage())
    return step._base


def partition(
    rules: Sequence[Rule],
    groups: Sequence[ParamGroup],
    state: OptimizerState,
    grad_of: Callable[[Tensor], Tensor | None] = gradient,
) -> list[Plan]:
    """Build plans, and missing state, of parameters that require or have a gradient, or have state; each group has a rule.

    A parameter that cannot be updated, or whose memory or state's memory was freed, is left out until it gets a gradient.
    Raise ``ValueError`` for a parameter or state that cannot be updated, or state that does not fit its parameter.
    """
    entries: list[tuple[Member, Rule, dict[str, Any]]] = []
    for i, (rule, group) in enumerate(zip(rules, groups, strict=True)):
        by_short_name, scalars = ignores_prefixes(groups), rule.scalar_names
        initial = initial_values(rule, {**group.for_compiled_code, "differentiable": group.get("differentiable", False)})
        rounding_seed, is_scaled = group.get("rounding_seed", 0), rule.scales_lr and group.get(LR_SCALE) is not None
        initial_copy = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in initial.items()}
        names = parameter_names(group, i)
        forms = StateForm.of_group(rule, groups, i)
        rule_of_group = rule_name(group.kind)
        for param, j in parameters_of(group).items():
            is_needed = grad_of(param) is not None
            if not (param.requires_grad or is_needed or has_declared_entries(rule, state.get(param, {}))):
                continue
            name = names[j]
            if reason := layout.obstacle(param):
                if is_needed:
                    raise ValueError(f"can't optimize '{name}': {reason}")
                continue
            param_state, form = state[param], forms(j)
            choices = form.choices
            _check_order(rule, param, name, choices)
            param_state.serve(rule_of_group)
            if param_state:
                form.convert(param_state, name)
                form.check(param_state, name)
            if not _has_memory(rule, param, param_state, name, needed=is_needed):
                continue
            if not param_state and not hasattr(group.kind, "share_memory"):  # else state exists from construction on
                param_state.initial = initial_copy
            param_state.update_quietly(form.missing(form.buffers, param_state, initial))
            numbers = {LR_SCALE: lr_scale_of(group, i, j, by_short_name=by_short_name)} if is_scaled else {}
            digest = hashlib.blake2b(f"{rounding_seed} {canonical_name(name)}".encode(), digest_size=3).digest()
            numbers["seed"] = float(int.from_bytes(digest, "big"))  # by name, so equal on replicas and after a resume
            entries.append((Member(param, groups, i, j, param_state, (*scalars, *form.buffers), numbers), rule, choices))
    written = [[m.param, *[m.entries[name] for name in m.names[len(r.scalar_names) :]]] for m, r, _ in entries]
    by_plan: dict[Any, tuple[Rule, list[Member]]] = {}
    for (member, rule, choices), wave in zip(entries, _waves(written), strict=True):
        param = member.owner
        kind = (layout.scalars_device([param]), layout.placement(param), layout.has_memory(member.param), param.is_meta)
        by_plan.setdefault((wave, id(rule), tuple(choices.items()), kind), (rule, []))[1].append(member)
    return [
        Plan(rule, dict(choices), members, grad_of, shares_memory=wave > 0, is_first=index == 0)
        for index, ((wave, _, choices, _), (rule, members)) in enumerate(by_plan.items())
    ]


def _only_wraps(param: Tensor) -> bool:
    """Return whether ``param`` is of a subclass that wraps other tensors, and has no memory itself."""
    return torch_internals.wraps_others(param) and not layout.has_memory(param)


def _check_order(rule: Rule, param: Tensor, name: str, choices: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where ``rule`` depends on the order of memory, and this process's shard of ``param`` has none."""
    shape, grouped = tuple(param.shape), rule.grouped_buffers(choices)
    is_in_rows = param.is_contiguous() and param.dim() > 0 and shape[-1] % GROUP == 0
    reason = "8-bit state"
    if grouped and not layout.has_whole_groups(param, GROUP):
        _, spread = layout.placement(param) or (None, None)
        reason += f": processes would share groups of {GROUP} elements of shape {shape} with {spread}"
    elif grouped and not (rule.is_elementwise or is_in_rows):
        reason += f": rows of matrices must be contiguous, and of a multiple of {GROUP} elements, but its shape is {shape}"
    elif (grouped or rule.reads_index(choices)) and _only_wraps(layout.local(param)):
        reason += " or stochastic rounding, which go by the order of elements in memory: "
        reason += f"a {type(param).__name__} has no memory of its own"
    else:
        return
    raise ValueError(f"can't optimize '{name}' with {reason}; name it in exclude=")


def _has_memory(rule: Declaration, param: Tensor, state: ParamState, name: str, *, needed: bool) -> bool:
    """Return whether parameter and state have memory. Raise an error where it is ``needed`` and missing."""
    values = layout.local(param)
    shares = not values.is_contiguous() and any(n > 1 and s == 0 for n, s in zip(values.shape, values.stride(), strict=True))
    if values._is_zerotensor() or shares:
        raise ValueError(f"can't optimize '{name}': several of its elements share memory (it is expanded); pass its clone()")
    present = [b.name for b in rule.buffers if state.get(b.name) is not None] if state else []
    buffers = [(f"state '{name}' of ", layout.local(state[name])) for name in present]
    for what, tensor in [("", values), *buffers]:
        if layout.is_lost(tensor):
            if needed:
                raise ValueError(f"{what}'{name}' cannot be updated: it has no memory, since its storage was freed")
            return False
    return True


def _waves(written: Sequence[Sequence[Tensor]]) -> list[int]:
    """Return the number of each parameter's wave, such that parameters of one wave write into no common memory.

    A parameter's wave is 0 where none of the tensors that are ``written`` for it shares memory with an earlier parameter's,
    else one more than the last wave of those parameters.
    """
    tensors = [(t, i) for i, tensors in enumerate(written) for t in tensors if t.numel() and layout.has_memory(t)]
    earlier = defaultdict[int, set[int]](set)
    open_spans: list[tuple[int, int]] = []  # the end of each, and the index of its tensor
    for start, end, k in sorted([(*layout.span(tensor), k) for k, (tensor, _) in enumerate(tensors)]):
        open_spans = [other for other in open_spans if other[0] > start]
        for _, other in open_spans:
            if tensors[k][0].device == tensors[other][0].device:
                first, last = sorted((tensors[k][1], tensors[other][1]))
                earlier[last].add(first)
        open_spans.append((end, k))
    waves: list[int] = []
    for i in range(len(written)):
        waves.append(max([waves[other] + 1 for other in earlier[i] - {i}], default=0))
    return waves
