"""What one compiled kernel is for: tensors of equal signature share it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from compiled_optim.lowering.layout import real_dtype
from compiled_optim.plan import Member, Plan
from compiled_optim.rule.rule import Rule

MULTI_TENSOR = "multi-tensor"
"""The layout of tensors that a kernel finds by their addresses."""


@dataclass(frozen=True)
class Signature:
    """What one compiled kernel is specialised on; two tensors with equal signatures share the kernel.

    ``device`` is one device, ``cuda:1``, or a type of devices, ``cuda``, where all of them share the kernel.
    """

    rule: Rule = field(repr=False)
    statics: tuple[tuple[str, Any], ...]
    device: str
    layout: str
    param_dtype: str
    grad_dtype: str
    buffer_dtypes: tuple[str, ...]

    def __str__(self) -> str:
        choices = "".join(f", {name}={value}" for name, value in self.statics)
        buffers = ", ".join(sorted(set(self.buffer_dtypes))) or "none"
        dtypes = f"param {self.param_dtype}, grad {self.grad_dtype}, state {buffers}"
        return f"{self.rule.name}[{self.layout}] {dtypes} on {self.device}{choices}"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of parameter, gradient and buffers."""
        return tuple(getattr(torch, d) for d in (self.param_dtype, self.grad_dtype, *self.buffer_dtypes))

    def grown(self) -> Signature:
        """The signature after every hyperparameter that is 0, and so spares a buffer, has become another number."""
        statics = dict(self.statics) | dict.fromkeys(self.rule.structural_hypers, True)
        dtypes = dict(zip(self.rule.present_buffers(dict(self.statics)), self.buffer_dtypes, strict=True))
        buffers = tuple(dtypes.get(name, self.param_dtype) for name in self.rule.present_buffers(statics))
        return dataclasses.replace(self, statics=tuple(statics.items()), buffer_dtypes=buffers)

    def changes_from(self, old: Signature) -> list[str]:
        """The differences from ``old`` in words, ``grad dtype float32 -> bfloat16``."""
        words = {"layout": "layout", "param_dtype": "param dtype", "grad_dtype": "grad dtype", "device": "device"}
        changes = [
            f"{label} {getattr(old, name)} -> {getattr(self, name)}"
            for name, label in words.items()
            if getattr(old, name) != getattr(self, name)
        ]
        if old.buffer_dtypes != self.buffer_dtypes:
            changes.append(f"state dtypes {old.buffer_dtypes} -> {self.buffer_dtypes}")
        before = dict(old.statics)
        return changes + [f"{k} {before[k]} -> {v}" for k, v in self.statics if before.get(k) != v]


def kernel_signature(plan: Plan, member: Member, grad_dtype: torch.dtype, layout: str) -> Signature:
    """The signature of the kernel that updates ``member`` with a gradient of ``grad_dtype``."""
    dtypes = [member.param.dtype, grad_dtype, *(member.entries[name].dtype for name in plan.buffers)]
    param, grad, *buffers = (str(real_dtype(d)).removeprefix("torch.") for d in dtypes)
    # Triton runs a multi-tensor kernel on the current device; Inductor writes the device's number into its code.
    device = plan.device.type if layout == MULTI_TENSOR else str(plan.device)
    return Signature(plan.rule, tuple(plan.statics.items()), device, layout, param, grad, tuple(buffers))
