"""Muon."""

import math
from collections.abc import Callable

import torch

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.optimizers import newton_schulz as ns
from compiled_optim.rule import Number, buffer, hyper, static

# The factor of a matrix's learning rate, by torch's name and by another name that is in use.
_RATIOS: dict[str, Callable[[int, int], float]] = {
    **dict.fromkeys(("original", "shape_scaling"), lambda rows, columns: math.sqrt(max(1, rows / columns))),
    **dict.fromkeys(("match_rms_adamw", "spectral"), lambda rows, columns: 0.2 * math.sqrt(max(rows, columns))),
    **dict.fromkeys(("spectral_unclamped", "unit_rms_norm"), lambda rows, columns: math.sqrt(rows / columns)),
}


def _ratio(shape: torch.Size, adjust_lr_fn: str | None) -> float:
    return _RATIOS[adjust_lr_fn or "original"](*shape[-2:])


class Muon(CompiledOptimizer, granularity="matrix"):
    """Muon: momentum, orthogonalized by a Newton-Schulz iteration (Jordan et al., kellerjordan.github.io/posts/muon).

    For the matrices of hidden layers; embeddings, biases and the last layer are for AdamW. ``adjust_lr_fn`` scales the
    learning rate with a matrix's shape: ``"original"`` (None, also ``"shape_scaling"``) by the root of rows over columns
    where that is above 1, ``"match_rms_adamw"`` (also ``"spectral"``; arXiv:2502.16982, section 2.2) to updates of AdamW's
    size, and ``"spectral_unclamped"`` (also ``"unit_rms_norm"``) by that root even if it is below 1.

    ``ns_coefficients`` may be a sequence of triples, one for each iteration, or ``"polar_express"`` (arXiv:2505.16932,
    Algorithm 1, from singular values of 0.001 on): the first ``ns_steps`` of its polynomials of degree 5. From the eighth on
    these are all the same. The polynomials have the paper's safety factor of 1.01. Differs from the paper: a matrix is
    first divided by its norm, not by 1.01 times its norm. A sequence is compiled in. Three numbers change at no cost.

    The iteration is in bfloat16, as in torch.optim.Muon. Differs from torch.optim.Muon: a matrix is divided by its norm
    before it is rounded, and an iteration adds its three terms before the last product. Each DTensor goes whole to one
    process for a step, and may have fewer rows than there are processes. Momentum stays sharded.
    """

    lr: Number = hyper(default=1e-3, ge=0, doc="learning rate: about the spectral norm of a step, before ``adjust_lr_fn``.")
    weight_decay: Number = hyper(default=0.1, ge=0)
    momentum: Number = hyper(default=0.95, ge=0, doc="how much of the buffer stays from one step to the next.")
    nesterov: bool = static(default=True, doc="orthogonalize a mix of gradient and buffer, not the buffer alone.")
    ns_coefficients: ns.Coefficients = hyper(
        default=(3.4445, -4.775, 2.0315),
        fixed=ns.sequence,
        doc="coefficients of the first, third and fifth power in an iteration, see above.",
    )
    eps: Number = hyper(default=1e-7, ge=0, doc="the least norm that a matrix is divided by.")
    ns_steps: int = static(default=ns.STEPS, doc="how many iterations a step makes; of a sequence, all.")
    adjust_lr_fn: str | None = static(default=None, doc='how ``lr`` follows the shape, see above; None is ``"original"``.')
    momentum_buffer = buffer(int8="signed")
    implied_state = {"step": 1.0}
    lr_ratio = staticmethod(_ratio)

    @staticmethod
    def coefficients(step, lr, weight_decay, momentum, ns_coefficients, eps):
        a, b, c = ns_coefficients
        return dict(lr=lr, decay=1 - lr * weight_decay, weight=1 - momentum, a=a, b=b, c=c, eps=eps)

    @staticmethod
    def update(param, grad, c, momentum_buffer, nesterov, ns_coefficients, ns_steps, adjust_lr_fn):
        momentum_buffer = torch.lerp(momentum_buffer, grad, c.weight)
        direction = torch.lerp(momentum_buffer, grad, c.weight) if nesterov else momentum_buffer
        ratio = _ratio(param.shape, adjust_lr_fn)
        direction = ns.orthogonalized(direction, ns.iterations((c.a, c.b, c.c), ns_coefficients, ns_steps), c.eps)
        return dict(param=c.decay * param, step=c.lr * ratio * direction, momentum_buffer=momentum_buffer)

    @staticmethod
    def check(hypers, statics):
        if statics["adjust_lr_fn"] not in (None, *_RATIOS):
            allowed = f"adjust_lr_fn must be None, {', '.join(map(repr, _RATIOS))}"
            raise ValueError(f"Adjust learning rate function {statics['adjust_lr_fn']} is not supported; {allowed}")
        ns.check_iterations(hypers, statics)
