"""What every gradient goes through before a rule sees it: its norm, unscaling, clipping, skipping the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.memory.layout import as_real, scalar_dtype
from compiled_optim.rule.vocabulary import sqrt, where


def scaled(
    square_sum: Any, max_grad_norm: Any, grad_scale: Any, found_inf: Any, skip_nonfinite: Any
) -> tuple[Any, Any, Any]:
    """The factor of every gradient, the norm before clipping, and 1 where the step is to be skipped, else 0.

    It is written like a rule, so that each lowering evaluates it in its own language. Gradients are first unscaled by
    ``grad_scale``, then clipped as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        square_sum: the sum of the squares of all gradients before unscaling; 0 where nobody needs it.
        max_grad_norm: the largest norm allowed, or infinity.
        grad_scale: the factor of the loss.
        found_inf: other than 0 if a gradient scaler saw an infinite or NaN gradient.
        skip_nonfinite: to skip when the norm is above it, infinite or NaN; 0 for no such limit.
    """
    norm = sqrt(square_sum) / grad_scale
    bound = norm + 1e-6
    clip = where(bound <= max_grad_norm, 1.0, max_grad_norm / bound)
    is_over = (norm > skip_nonfinite) | (norm - norm != 0)
    skip = where((found_inf != 0) | ((skip_nonfinite != 0) & is_over), 1.0, 0.0)
    return clip / grad_scale, norm, skip


def square_sum(grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The sum of the squares of ``grads``, all on ``device``, in torch operations over lists.

    In float64 no square of a float32 number overflows or underflows. A device without it, MPS, has norms from 1e-22 to 1e19.
    """
    dtype = scalar_dtype(device)
    reals = [as_real(grad) for grad in grads if grad is not None and grad.numel()]
    if not reals:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch._foreach_norm(reals, 2, dtype=dtype)
    return torch.stack(torch._foreach_mul(norms, norms)).sum()  # of a list: Inductor copies what is stacked one by one
