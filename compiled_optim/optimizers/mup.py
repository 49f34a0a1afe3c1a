"""Optimizers for u-muP: learning rates that follow the shape, the kind and the depth of each parameter (arXiv:2407.17465).

They read ``mup_type`` and ``mup_scaling_depth``, which unit_scaling's layers set on their parameters. The classes have the
names and arguments of unit_scaling.optim's classes, and the scales are the same numbers. :func:`lr_scale_for_adam` is
unit_scaling's ``lr_scale_func_adam(param)``, and :func:`lr_scale_for_sgd` is its
``lr_scale_func_sgd(readout_constraint)(param)``. Either can be the ``lr_scale`` of any other optimizer.

FSDP2 and tensor parallelism make new parameters, without the two attributes. Compute a dict ``lr_scale`` before sharding.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.optimizers import adam, adamw, sgd
from compiled_optim.rule.fields import Number, hyper, option

_TYPES = ("weight", "bias", "norm", "output")


def lr_scale_for_adam(name: str | None, param: Tensor, *, allow_non_unit_scaling_params: bool = False) -> float:
    """Return the factor of ``param``'s learning rate in u-muP, for steps that do not grow with the gradients.

    It is ``fan_in**-0.5`` for weights and 1 for all others, times ``mup_scaling_depth**-0.5``. The fan-in of an embedding is
    its width. Of a DTensor the full shape counts. Raise ``ValueError`` if no scale is defined for the shape or depth of
    ``param``, called ``name`` in messages, or if it lacks ``mup_type`` and ``mup_scaling_depth``; without these attributes
    the scale is 1 with ``allow_non_unit_scaling_params``.
    """
    return _scale(name, param, allow_non_unit_scaling_params, grows=False)


def lr_scale_for_sgd(
    name: str | None, param: Tensor, *, readout_constraint: str | None = None, allow_non_unit_scaling_params: bool = False
) -> float:
    """Return the factor of ``param``'s learning rate in u-muP, for steps in proportion to the gradients.

    With ``readout_constraint="to_output_scale"``, as unit_scaling's ``LinearReadout`` has it, it is ``fan_in**0.5`` for
    weights, the size of biases and norms, and 1 for outputs, times ``mup_scaling_depth**-0.5``. Otherwise it equals
    :func:`lr_scale_for_adam`. Both raise the same errors.
    """
    if readout_constraint not in (None, "to_output_scale"):
        raise ValueError(f"readout_constraint must be None or 'to_output_scale', got {readout_constraint!r}")
    return _scale(name, param, allow_non_unit_scaling_params, grows=readout_constraint is not None)


def _scale(name: str | None, param: Tensor, allow_untagged: bool, *, grows: bool) -> float:
    """Return the factor of the learning rate of ``param``. It ``grows`` or shrinks with the parameter's size."""
    shape, kind, depth = param.shape, getattr(param, "mup_type", None), getattr(param, "mup_scaling_depth", 0.0)
    label = f"a parameter of shape {tuple(shape)}" if name is None else f"'{name}', of shape {tuple(shape)},"
    if kind not in _TYPES or not (depth is None or isinstance(depth, int)):
        if allow_untagged:
            return 1.0
        raise ValueError(
            f"{label} has no mup_type and mup_scaling_depth, as the parameters of unit_scaling's layers have "
            "them before they are sharded; pass lr_scale, or allow_non_unit_scaling_params=True for scale 1"
        )
    if depth is not None and depth < 1:
        raise ValueError(f"mup_scaling_depth of {label} must be >= 1, got {depth}")
    size: float = shape[:1].numel() if grows and kind != "output" else 1
    if kind == "weight":
        if len(shape) not in (1, 2, 3):
            raise ValueError(f"u-muP has no fan-in for {len(shape)} dimensions; {label} has them")
        fan_in = shape[1:] if len(shape) > 1 else shape  # of (outputs, inputs) or (outputs, inputs, width)
        size = max(fan_in.numel(), 1) ** (0.5 if grows else -0.5)
    return (1 if depth is None else float(depth**-0.5)) * size


class _Scaled(CompiledOptimizer):
    """A base class that translates the arguments of unit_scaling's optimizers into those of this package."""

    lr: Number = hyper(default=1e-3, ge=0, doc="learning rate, as in the optimizer of this name, before scaling.")
    weight_decay: Number = hyper(default=0.0, ge=0, doc="as in the optimizer of this name; see the next argument.")
    independent_weight_decay: bool = option(default=True, kw_only=True, doc="divide decay by ``max_lr`` times the scale.")
    allow_non_unit_scaling_params: bool = option(
        default=False, kw_only=True, doc="take parameters without ``mup_type``, with scale 1, instead of refusing them."
    )

    _scale: ClassVar[Callable[..., float]] = staticmethod(lr_scale_for_adam)
    _scale_arguments: ClassVar[tuple[str, ...]] = ("allow_non_unit_scaling_params",)

    @classmethod
    def _arguments(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super()._arguments(args, kwargs)
        if refused := [name for name in ("decouple_lr", "decouple_wd") if name in kwargs]:
            raise TypeError(f"co.mup.{cls.__name__} sets {refused[0]} itself; pass it to co.{cls.__name__} instead")
        if arguments["lr_scale"] is None:
            arguments["lr_scale"] = functools.partial(cls._scale, **{name: arguments[name] for name in cls._scale_arguments})
        if arguments["independent_weight_decay"]:
            adds_decay = "decouple_wd" in arguments and not arguments.get("decoupled_weight_decay")
            arguments |= {"decouple_lr": True, **({"decouple_wd": False} if adds_decay else {})}
        return arguments

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "decouple_wd=False with decouple_lr=True")  # as u-muP decays
            super().add_param_group(param_group)


class Adam(_Scaled, adam.Adam):
    """Adam with u-muP's learning rates (arXiv:2407.17465), as unit_scaling.optim's.

    ``lr_scale`` is :func:`lr_scale_for_adam` by default. A group may hold parameters of different scales; its ``lr`` and
    ``weight_decay`` are not scaled. ``max_lr`` is the group's first ``lr`` by default: pass it if a schedule begins with 0.
    ``decouple_lr`` and ``decouple_wd`` are set by other arguments, and passing them is an error.
    """


class AdamW(_Scaled, adamw.AdamW):
    """AdamW with u-muP's learning rates (arXiv:2407.17465), as unit_scaling.optim's.

    Like :class:`Adam`, with AdamW's update. Weights do not decay by default. With ``independent_weight_decay``, a step at
    ``max_lr`` shrinks a parameter by the share ``weight_decay``, independently of ``max_lr`` and the scale.
    """


class SGD(_Scaled, sgd.SGD):
    """SGD with u-muP's learning rates (arXiv:2407.17465), as unit_scaling.optim's.

    Like :class:`Adam`, with SGD's update. ``lr_scale`` is :func:`lr_scale_for_sgd` by default.
    """

    readout_constraint: str | None = option(default=None, kw_only=True, doc="the ``constraint`` of the ``LinearReadout``.")

    _scale = staticmethod(lr_scale_for_sgd)
    _scale_arguments = ("allow_non_unit_scaling_params", "readout_constraint")
