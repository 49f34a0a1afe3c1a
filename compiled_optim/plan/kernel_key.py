"""What one compiled kernel is for: tensors of equal key share it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from compiled_optim.memory.layout import real_dtype
from compiled_optim.plan.plan import Member, Plan
from compiled_optim.rule.rule import Rule

MULTI_TENSOR = "multi-tensor"  # the arrangement of tensors that a kernel finds by their addresses
COEFFICIENTS = "coefficients"  # what stands for an arrangement where a kernel evaluates coefficients and updates nothing


@dataclass(frozen=True)
class KernelKey:
    """What one compiled kernel is specialised on; two tensors with equal keys share the kernel.

    ``device`` is one device, ``cuda:1``, or a type of devices, ``cuda``, where all of them share the kernel. ``arrangement``
    says how the kernel finds its tensors: by their addresses, in stacks of certain shapes, packed, or in place.
    """

    rule: Rule = field(repr=False)
    statics: tuple[tuple[str, Any], ...]
    device: str
    arrangement: str
    param_dtype: str
    grad_dtype: str
    buffer_dtypes: tuple[str, ...]

    def __str__(self) -> str:
        choices = "".join(f", {name}={value}" for name, value in self.statics)
        buffers = ", ".join(sorted(set(self.buffer_dtypes))) or "none"
        dtypes = f"param {self.param_dtype}, grad {self.grad_dtype}, state {buffers}"
        return f"{self.rule.name}[{self.arrangement}] {dtypes} on {self.device}{choices}"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of parameter, gradient and buffers."""
        return tuple(getattr(torch, d) for d in (self.param_dtype, self.grad_dtype, *self.buffer_dtypes))

    @property
    def updates(self) -> bool:
        """Whether the kernel updates tensors."""
        return self.arrangement != COEFFICIENTS

    def grown(self) -> KernelKey:
        """The key after every hyperparameter that is 0, and so spares a buffer, has become another number."""
        if not self.updates:
            return self
        statics = dict(self.statics) | dict.fromkeys(self.rule.structural_hypers, True)
        here = dict(zip(self.rule.present_buffers(dict(self.statics)), self.buffer_dtypes, strict=True))
        there = [b for b in self.rule.buffers if b.is_present(statics)]
        buffers = tuple(here.get(b.name) or _name(self.rule.dtype_of(b, self.dtypes[0], statics)) for b in there)
        return dataclasses.replace(self, statics=tuple(statics.items()), buffer_dtypes=buffers)

    def changes_from(self, old: KernelKey) -> list[str]:
        """The differences from ``old`` in words, ``grad dtype float32 -> bfloat16``."""
        words = {"arrangement": "arrangement", "param_dtype": "param dtype", "grad_dtype": "grad dtype", "device": "device"}
        changes = [
            f"{label} {getattr(old, name)} -> {getattr(self, name)}"
            for name, label in words.items()
            if getattr(old, name) != getattr(self, name)
        ]
        if old.buffer_dtypes != self.buffer_dtypes:
            changes.append(f"state dtypes {old.buffer_dtypes} -> {self.buffer_dtypes}")
        before, now = dict(old.statics), dict(self.statics)
        return changes + [f"{k} {before.get(k)} -> {now.get(k)}" for k in {**before, **now} if before.get(k) != now.get(k)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kernel_key(plan: Plan, member: Member, grad_dtype: torch.dtype, arrangement: str) -> KernelKey:
    """The key of the kernel that updates ``member`` with a gradient of ``grad_dtype``."""
    dtypes = [member.param.dtype, grad_dtype, *(member.entries[name].dtype for name in plan.buffers)]
    param, grad, *buffers = (_name(real_dtype(d)) for d in dtypes)
    # Triton runs a multi-tensor kernel on the current device; Inductor writes the device's number into its code.
    device = plan.device.type if arrangement == MULTI_TENSOR else str(plan.device)
    return KernelKey(plan.rule, tuple(plan.statics.items()), device, arrangement, param, grad, tuple(buffers))


def coefficient_key(plan: Plan) -> KernelKey:
    """The key of the kernel that evaluates the coefficients of all of ``plan``, whose tensors are updated in another way."""
    statics = tuple((s.name, plan.statics[s.name]) for s in plan.rule.statics)
    return KernelKey(plan.rule, statics, plan.device.type, COEFFICIENTS, "float64", "float64", ())
