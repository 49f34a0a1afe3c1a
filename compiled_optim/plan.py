"""Which tensors are updated together, and which of them take part in a step.

A plan holds the parameters that share a device and every choice that shapes code; their hyperparameters, step counts and
scalars are data, so groups with different learning rates share one plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from compiled_optim.addresses import Addresses, gradient
from compiled_optim.fields import Declaration, Rule
from compiled_optim.hyperparameters import ParamGroup
from compiled_optim.sharding import is_sharded, local, local_gradient, placement
from compiled_optim.state import LocalState, OptimizerState, ParamState, check_shapes, complete, initial_values, scalar_names


@dataclass(eq=False)
class Member:
    """One parameter of a plan, with its name, its group's index in ``param_groups`` and its state.

    ``param`` and what ``state`` reads are what is updated: of a DTensor, ``owner``, the local shards.
    """

    owner: Tensor
    name: str
    group: int
    state: ParamState | LocalState
    param: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.param = local(self.owner)


def parameter_name(group: Mapping[str, Any], group_index: int, index: int) -> str:
    """The name of a parameter in messages: its own, or its position where it has none."""
    names = group.get("param_names")
    return names[index] if names else f"param_groups[{group_index}]['params'][{index}]"


class Plan:
    """The parameters of one device and one set of static choices; DTensors also share their mesh and placements.

    The optimizer's first plan leads: it writes down what became of the whole step.
    ``scalars`` is a (1 + scalars, tensors) float64 matrix: step counts first, then the rule's scalars; each parameter's
    state holds 0-dim views of its column.
    """

    def __init__(
        self,
        rule: Rule,
        statics: Mapping[str, Any],
        device: torch.device,
        members: Sequence[Member],
        groups: Sequence[ParamGroup],
        *,
        leads: bool,
    ) -> None:
        self.rule = rule
        self.statics = dict(statics)
        self.buffers = rule.present_buffers(statics)
        self.device = device
        self.members = list(members)
        self.params = [m.owner for m in self.members]
        self.sharded = is_sharded(self.params[0])
        self.leads = leads
        self.grad_dtypes = [p.dtype if (g := gradient(p)) is None else g.dtype for p in self.params]
        self.addresses = Addresses(self.params, self.grad_dtypes)
        used = sorted({m.group for m in self.members})
        self.groups = [groups[i] for i in used]
        self.group_index = [used.index(m.group) for m in self.members]
        self.scalars = self._gather_scalars()
        self._sample: list[tuple[Tensor, int]] | None = None

    def settle(self) -> None:
        """Note where state lies, once the lowering has put it there."""
        if self._sample is None:
            state = self.members[0].state
            entries = () if self.sharded else (*scalar_names(self.rule), *self.buffers)
            self._sample = [(state[name], state[name].data_ptr()) for name in entries]

    @property
    def state_moved(self) -> bool:
        """Whether somebody gave state tensors other memory, with ``.data =``, as to offload them.

        One parameter's are looked at: who moves any moves all, and to look at all would take longer than the rest of the
        host's work.
        """
        return any(tensor.data_ptr() != address for tensor, address in self._sample or ())

    def read(self, grads: list[Tensor | None] | None) -> bool:
        """Look at parameters and gradients, their own or ``grads``, and say whether the plan still describes them.

        Raises:
            TypeError: a gradient is sparse and the rule takes dense ones, or the other way round.
            ValueError: a gradient has another shape than its parameter.
        """
        self.addresses.read(grads)
        if self.addresses.moved or self.state_moved:
            return False
        if not (self.addresses.unlike or self.rule.gradients == "sparse"):
            return True
        return self._check_gradients([p.grad for p in self.params] if grads is None else grads)

    def gradients(self, grads: list[Tensor | None] | None) -> list[Tensor | None]:
        """``grads`` or the parameters' own, of DTensors the local shards."""
        found = [p.grad for p in self.params] if grads is None else grads
        if not self.sharded:
            return found
        return [None if g is None else local_gradient(g, p) for g, p in zip(found, self.params, strict=True)]

    def _check_gradients(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether all gradients have the dtypes that the plan expects."""
        if not {g.is_sparse for g in grads if g is not None} <= {self.rule.gradients == "sparse"}:
            self._refuse(grads)
        for member, param, grad in zip(self.members, self.params, grads, strict=True):
            if grad is not None and grad.shape != param.shape:
                shapes = tuple(grad.shape), tuple(param.shape)
                raise ValueError(f"the gradient of '{member.name}' has shape {shapes[0]}, the parameter {shapes[1]}")
        return all(g is None or g.dtype == d for g, d in zip(grads, self.grad_dtypes, strict=True))

    def _refuse(self, grads: Sequence[Tensor | None]) -> NoReturn:
        rule = self.rule
        refused = "dense" if rule.gradients == "sparse" else "sparse"
        names = (
            m.name for m, g in zip(self.members, grads, strict=True) if g is not None and g.is_sparse != (refused == "dense")
        )
        advice = f", please consider {rule.advice} instead" if rule.advice else ""
        raise TypeError(f"{rule.name} does not support {refused} gradients{advice}; '{next(names)}' has one")

    def _gather_scalars(self) -> Tensor:
        names = scalar_names(self.rule)
        columns = [m.state[name] for name in names for m in self.members]
        scalars = torch.stack(columns).view(len(names), -1)
        for row, name in enumerate(names):
            for column, member in enumerate(self.members):
                member.state.set_quietly(name, scalars[row, column])
        return scalars


def structure(rule: Declaration, group: ParamGroup, param: Tensor) -> dict[str, Any]:
    """What shapes the code for ``param``: static fields, facts, and whether a structural hyperparameter is other than 0."""
    choices = {s.name: group[s.name] for s in rule.statics} | {f.name: f.of(param.shape) for f in rule.facts}
    return choices | {name: group.nonzero(name) for name in rule.structural_hypers}


def partition(rule: Rule, groups: Sequence[ParamGroup], state: OptimizerState) -> list[Plan]:
    """The plans for all parameters that have state or are to get it now; missing state is made.

    Raises:
        ValueError: a tensor of the state does not fit its parameter.
    """
    members: dict[tuple[Any, ...], list[Member]] = {}
    for i, group in enumerate(groups):
        for j, param in enumerate(group["params"]):
            if not (param.requires_grad or gradient(param) is not None or state.get(param)):
                continue
            choices = structure(rule, group, param)
            name = parameter_name(group, i, j)
            check_shapes(rule, param, state[param], name)
            complete(rule, rule.present_buffers(choices), param, state[param], initial_values(rule, group))
            own = LocalState(state[param]) if is_sharded(param) else state[param]
            member = Member(param, name, i, own)
            members.setdefault((param.device, placement(param), *choices.items()), []).append(member)
    return [
        Plan(rule, dict(choices), device, together, groups, leads=index == 0)
        for index, ((device, _, *choices), together) in enumerate(members.items())
    ]
