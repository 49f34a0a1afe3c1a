"""L-BFGS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from compiled_optim.memory.torch_internals import mend_tracing, outside_dynamo
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.optimizers.lbfgs.step import ENTRIES, LBFGSStep, refuse
from compiled_optim.rule.fields import Number, hyper, static


class LBFGS(CompiledOptimizer, steps=LBFGSStep):
    """L-BFGS (Liu and Nocedal, Mathematical Programming 45, 1989, doi:10.1007/BF01589116; Nocedal & Wright, Algorithm 7.5).

    A step makes up to ``max_iter`` iterations; see torch.optim.LBFGS for when it stops earlier. With ``fixed_iterations``
    it makes exactly ``max_iter``, of the given ``lr`` and with ``max_iter`` calls of the closure, whatever the tolerances
    and ``max_eval``; such a step never waits for the device, so that a training step with it can be traced and captured.
    Several parameters count as one vector, a missing gradient as 0, a complex number as two real ones. A tolerance below 0
    ends no step. Without history the direction is the gradient's, scaled by the latest curvature. With ``maximize`` a step
    minimizes the negative of the closure's loss, as torch.optim.LBFGS does from 2.15 on, and returns the loss itself.

    Differs from torch.optim.LBFGS: the direction takes four products with the whole history in place of four per pair; the
    history is in float32 also for lower-precision parameters; a line search takes NaN for an infinite loss; parameters may
    lie in memory in any way. The step runs as plain torch operations. Several groups or devices are a ``ValueError``.
    """

    lr: Number = hyper(default=1.0, ge=0, doc="what part of each direction a step goes; the first guess of a line search.")
    max_iter: int = static(default=20, doc="iterations per step.")
    max_eval: int | None = static(default=None, doc="calls of the closure per step; None for 1.25 times ``max_iter``.")
    tolerance_grad: float = static(default=1e-7, doc="stop where no element of the gradient is larger.")
    tolerance_change: float = static(default=1e-9, doc="stop where the parameters, or the loss, change by no more.")
    history_size: int = static(default=100, doc="past steps that estimate the curvature; each costs two numbers an element.")
    line_search_fn: str | None = static(default=None, doc='None or ``"strong_wolfe"``.')
    fixed_iterations: bool = static(
        default=False, kw_only=True, doc="make ``max_iter`` iterations, whatever the tolerances; without a line search."
    )

    _step_supports_amp_scaling = False

    @classmethod
    def _state_names(cls) -> Iterable[str]:
        return ENTRIES

    def schedule(self, group: int | None = None, **functions: Any) -> None:
        """Refuse: a step has no coefficients to evaluate it with. torch's schedulers work."""
        raise ValueError(f"{type(self).__name__} does not support schedules inside the step; use one of torch's schedulers")

    @staticmethod
    def check(hypers: Mapping[str, Any], statics: Mapping[str, Any]) -> None:
        refuse(statics)
        for name in ("max_iter", "max_eval", "history_size"):
            value = statics[name]
            if not (isinstance(value, int) and value >= 0) and not (name == "max_eval" and value is None):
                raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
        for name in ("tolerance_grad", "tolerance_change"):
            if not (statics[name] >= 0 or statics[name] < 0):
                raise ValueError(f"{name} must be a number, got {statics[name]!r}")
        if statics["line_search_fn"] not in (None, "strong_wolfe"):
            raise ValueError(f"line_search_fn must be None or 'strong_wolfe', got {statics['line_search_fn']!r}")
        if statics["fixed_iterations"] and statics["line_search_fn"] is not None:
            raise ValueError("fixed_iterations=True needs line_search_fn=None: a search decides when to stop")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the one group there can be."""
        super().add_param_group(param_group)
        group = self.param_groups[0]
        if group["max_eval"] is None:
            group["max_eval"] = group["max_iter"] * 5 // 4

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step. With ``fixed_iterations`` it can be traced.

        Args:
            closure: clears the gradients, re-evaluates the model, calls backward and returns the loss, a scalar.

        Returns:
            The loss before the step.

        Raises:
            TypeError: there is no closure.
            ValueError: ``max_grad_norm`` or ``skip_nonfinite`` was assigned.
        """
        if not callable(closure):
            raise TypeError(
                f"{type(self).__name__}.step needs a closure: a function that clears the gradients, evaluates the loss, "
                f"calls backward and returns the loss; got {type(closure).__name__}"
            )
        refuse({"max_grad_norm": self.max_grad_norm, "skip_nonfinite": self.skip_nonfinite})
        engine = engine_of(self)
        if torch.compiler.is_compiling() and isinstance(engine.step, LBFGSStep) and engine.step.is_fixed:
            first = engine.step.launch(closure)
            mend_tracing()
            return first
        return self._step_outside_graphs(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @outside_dynamo
    def _step_outside_graphs(self, closure: Callable[[], Any]) -> Any:
        return engine_of(self).run(closure=closure)
