"""SparseAdam."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, bias_correction, buffer, ema, hyper, sqrt


class SparseAdam(CompiledOptimizer, gradients="sparse", advice="Adam"):
    """Adam (arXiv:1412.6980, Algorithm 1) on the rows that sparse gradients name, for ``nn.Embedding(sparse=True)``.

    The moments of other rows do not decay. ``eps`` is outside the bias correction (the paper's section 2, end). Differs from
    torch.optim.SparseAdam: ``lr`` may be 0, and no step waits for the device.
    """

    lr: Number = hyper(default=1e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.999), ge=0, lt=1)
    eps: Number = hyper(default=1e-8, gt=0)
    exp_avg, exp_avg_sq = buffer(), buffer()

    @staticmethod
    def coefficients(step, lr, betas, eps):
        beta1, beta2 = betas
        step_size = lr * sqrt(bias_correction(beta2, step)) / bias_correction(beta1, step)
        return dict(step_size=step_size, **ema(betas), eps=eps)

    @staticmethod
    def update(param, grad, c, exp_avg, exp_avg_sq):
        exp_avg = c.beta1 * exp_avg + c.weight1 * grad
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        return dict(step=c.step_size * (exp_avg / (sqrt(exp_avg_sq) + c.eps)), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
