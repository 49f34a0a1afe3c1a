"""Ranger."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.optimizers.radam import RAdam
from compiled_optim.rule import Number, bias_correction, buffer, floor, hyper, product, sqrt, static, where


class Ranger(CompiledOptimizer):
    """Ranger: RAdam (arXiv:1908.03265, Algorithm 2) within Lookahead (arXiv:1907.08610, Algorithm 1).

    At every ``k``-th step of a parameter, its slow copy moves towards the parameter by ``alpha`` of the distance, and the
    parameter is set to the slow copy. The first step makes the slow copy. As in optimi, and unlike torch.optim.RAdam,
    ``eps`` is added after the bias correction, and ``decouple_wd`` is True by default.
    """

    lr: Number = hyper(ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.99), ge=0, lt=1)
    weight_decay: Number = hyper(default=0.0, ge=0)
    eps: Number = hyper(default=1e-6, ge=0)
    k: Number = hyper(default=6, ge=1, doc="steps between synchronizations with the slow copy; may be a fraction.")
    alpha: Number = hyper(default=0.5, ge=0, le=1, doc="how far the slow copy moves towards the parameter, from 0 to 1.")
    decouple_wd: bool = static(default=True, kw_only=True)
    exp_avg, exp_avg_sq, la_param = buffer(int8="signed"), buffer(int8="unsigned"), buffer(init="param")

    @staticmethod
    def coefficients(step, lr, betas, weight_decay, eps, k, alpha):
        eps = eps * sqrt(bias_correction(betas[1], step))
        return dict(
            **RAdam.coefficients(step, lr, betas, eps, weight_decay),
            syncs=floor(step / k) > floor((step - 1) / k),
            alpha=alpha,
            kept=1 - alpha,
        )

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq, la_param, decouple_wd):
        return dict(
            **RAdam.update(param, grad, c, exp_avg, exp_avg_sq, decouple_wd),
            after=lambda moved: where(c.syncs > 0, product(c.kept, la_param) + product(c.alpha, moved), moved),
            la_param=lambda new: where(c.syncs > 0, new, la_param),
        )
