"""What every gradient goes through before a rule sees it: unscaling, clipping, and the decision to skip the step."""

from __future__ import annotations

from typing import Any

from compiled_optim.rule.vocabulary import sqrt, where


def scaled(
    square_sum: Any, max_grad_norm: Any, grad_scale: Any, found_inf: Any, skip_nonfinite: Any
) -> tuple[Any, Any, Any]:
    """The factor of every gradient, the norm before clipping, and 1 where the step is to be skipped, else 0.

    Written like a rule, so that each lowering evaluates it in its own language. The clip is that of
    ``torch.nn.utils.clip_grad_norm_``, after the unscaling by ``grad_scale``.

    Args:
        square_sum: the sum of the squares of all gradients as they came; 0 where nobody needs it.
        max_grad_norm: the largest norm allowed, or infinity.
        grad_scale: what the loss was multiplied with.
        found_inf: other than 0 if a gradient scaler saw an infinite or NaN gradient.
        skip_nonfinite: other than 0 to skip when the norm is infinite or NaN.
    """
    norm = sqrt(square_sum) / grad_scale
    bound = norm + 1e-6
    clip = where(bound <= max_grad_norm, 1.0, max_grad_norm / bound)
    skip = where((found_inf != 0) | ((skip_nonfinite != 0) & (norm - norm != 0)), 1.0, 0.0)
    return clip / grad_scale, norm, skip
