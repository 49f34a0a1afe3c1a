"""When an optimizer uses gradients: all of them in a step, or each when it is there; and how it lets go of them."""

from __future__ import annotations

from typing import Any

import torch

from compiled_optim.plan.clipping import NAMES
from compiled_optim.step.traced import settle

_WHY = {
    "max_grad_norm": "the norm of all gradients is not known before the last of them, when the others are used and freed",
    "skip_nonfinite": "whether all gradients are finite is not known before the last of them, when the others are used",
    "grad_scale": "gradients are used before a gradient scaler can unscale them; train in bfloat16 without one",
    "found_inf": "gradients are used before a gradient scaler can look at them; train in bfloat16 without one",
}
assert set(_WHY) == set(NAMES)


def refuse_whole(name: str, value: object, where: str) -> None:
    """Raise ``ValueError`` where ``value``, assigned as an optimizer's ``name``, needs all gradients together.

    ``where`` says what does not have them.
    """
    if name in _WHY and value is not None and value is not False:
        raise ValueError(f"{name} does not go with {where}: {_WHY[name]}")


def check_closure(closure: Any) -> None:
    """Raise ``TypeError`` unless ``closure`` can be called."""
    if not callable(closure):
        raise TypeError(
            f"step() takes nothing, or a function that evaluates the loss, got a {type(closure).__name__}; call "
            "loss.backward() and then step()"
        )


_MEANINGS = {
    "max_grad_norm": "What the norm of all gradients is clipped to inside the step: None, a number or a 0-dim tensor.",
    "grad_scale": "What a gradient scaler that calls the step multiplied the gradients by; it sets and deletes this.",
    "found_inf": "Whether a gradient scaler that calls the step found an infinite gradient; it sets and deletes this.",
    "skip_nonfinite": "Whether steps whose norm is NaN or infinite are skipped.",
}


def _assigned(name: str) -> Any:
    """An attribute that the engine keeps."""

    def read(self: Any) -> Any:
        try:
            return self._engine.assigned[name]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'") from None

    def write(self: Any, value: Any) -> None:
        self._engine.assign(name, value)

    def delete(self: Any) -> None:
        del self._engine.assigned[name]
        self._engine.follow_clipping()

    return property(read, write, delete, _MEANINGS[name])


class UsesGradients:
    """The part of an optimizer that says when gradients are used, and refuses what then cannot be."""

    _engine: Any

    max_grad_norm, grad_scale, found_inf, skip_nonfinite = map(_assigned, NAMES)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters; can be traced.

        Args:
            set_to_none: set them to None instead of to zero.
        """
        if torch.compiler.is_compiling():
            settle(self._engine.key)
        else:
            self._engine.current()
            if self._engine.release is not None:
                self._engine.release.zero_grad()
        for param in self._engine.params:
            if set_to_none:
                param.grad = None  # unread, so that compiled code does not depend on whether there was one
            elif param.grad is not None:
                if param.grad.requires_grad and torch.compiler.is_compiling():
                    param.grad = param.grad.detach()
                elif param.grad.grad_fn is not None:
                    param.grad.detach_()
                else:
                    param.grad.requires_grad_(False)
                param.grad.zero_()

    @property
    def optimizer_accumulation(self) -> bool:
        """Whether steps take gradients into the state only, until one with False moves the parameters: as in AdamA.

        A step is then made of the gradients of several micro-batches, none of which need be kept (arXiv:2305.19982)::

            opt.optimizer_accumulation = index % 4 != 3
            (loss_of(model(x)) / 4).backward(); opt.step(); opt.zero_grad()

        Such a step counts once. Its first micro-batch lets the averages decay; each adds what its gradient ``g`` adds to
        them: with two micro-batches ``exp_avg`` becomes ``beta1 * exp_avg + (1 - beta1) * (g1 + g2)``, and ``exp_avg_sq``
        ``beta2 * exp_avg_sq + (1 - beta2) * (g1 * g1 + g2 * g2)``. The last one moves every parameter that had a gradient in
        any of them, and decays weights; decay that goes into the gradient goes into this one. A step of one micro-batch is
        as always. (The others may write a parameter with ``weights="kahan"`` as another sum, of the same value.)

        So divide the loss by the number of micro-batches, as for gradients that are summed. SGD with momentum then does what
        it does with those. Sums of squares are smaller than squares of sums where micro-batches agree, and steps larger: as
        in AdamA, whose authors find that it trains alike, since gradients of micro-batches are noise for the most part.

        optimi counts and decays in every micro-batch, and SGD without momentum loses all gradients but the last.

        It goes with gradient release and without, and not into CUDA graphs. State cannot be saved within a step.

        Raises:
            ValueError: assigned True where state cannot hold several gradients (optimizers whose step reads the gradient
                besides averages, SGD without momentum or with ``nesterov``, ``cautious``, ``differentiable``), or
                with clipping, ``skip_nonfinite`` or a gradient scaler, which are refused from then on.
            TypeError: assigned anything but a bool.
        """
        return bool(self._engine.holdings.accumulated.is_on)

    @optimizer_accumulation.setter
    def optimizer_accumulation(self, on: bool) -> None:
        if not isinstance(on, bool):
            raise TypeError(f"optimizer_accumulation must be a bool, got {on!r}")
        self._engine.accumulate(on)
