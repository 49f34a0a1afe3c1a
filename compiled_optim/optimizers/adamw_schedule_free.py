"""Schedule-Free AdamW."""

from compiled_optim.optimizer import ViewedOptimizer
from compiled_optim.rule import Number, bias_correction, buffer, hyper, maximum, minimum, product, scalar, sqrt, where


class AdamWScheduleFree(ViewedOptimizer):
    """Schedule-Free AdamW: an average of all steps instead of a schedule that ends (arXiv:2405.15682, Algorithm 1).

    The state ``z`` takes the steps. Gradients are taken at weights between ``z`` and the average of all ``z``; the average
    is for evaluation. Call :meth:`eval` before validation and before you save the model for use, and :meth:`train` before
    the next step. Batch normalization needs the statistics of the average: run some batches after :meth:`eval`.

    As in the paper, a step's rate is ``lr`` times the bias correction ``sqrt(1 - betas[1]**step)``. Weight decay takes this
    rate, the step's weight in the average is its square, and ``eps`` is added to the root of the uncorrected squares.
    Differs from the authors' package: it corrects the squares alone, and a weight is the largest rate so far, squared.

    With 16-bit parameters, pass ``state_dtype={"z": torch.float32}`` and ``weights``.
    """

    lr: Number = hyper(default=2.5e-3, ge=0, doc="learning rate, from the end of the warmup on.")
    betas: tuple[Number, Number] = hyper(
        default=(0.9, 0.999), gt=0, lt=1, doc="share of the average in the weights; decay rate of squares."
    )
    eps: Number = hyper(default=1e-8, ge=0)
    weight_decay: Number = hyper(default=0.0, ge=0, doc="a step subtracts ``lr * weight_decay * param`` from ``z``.")
    warmup_steps: Number = hyper(default=0, ge=0, doc="how many steps ``lr`` takes to grow from 0.")
    z, exp_avg_sq = buffer(init="param"), buffer(int8="unsigned")
    weight_sum = scalar()

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay, warmup_steps, weight_sum):
        beta1, beta2 = betas
        rate = lr * minimum(step / maximum(warmup_steps, 1.0), 1.0) * sqrt(bias_correction(beta2, step))
        weight_sum = weight_sum + rate * rate
        share = where(weight_sum > 0, rate * rate / where(weight_sum > 0, weight_sum, 1.0), 0.0)
        return dict(
            weight_sum=weight_sum,
            rate=rate,
            decay=rate * weight_decay,
            eps=eps,
            beta1=beta1,
            beta2=beta2,
            weight2=1 - beta2,
            share=share,
            reach=1 - beta1 * (1 - share),
        )

    @staticmethod
    def update(param, grad, c, z, exp_avg_sq):
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        move = c.rate * grad / (sqrt(exp_avg_sq) + c.eps) + product(c.decay, param)
        return dict(step=c.share * (param - z) + c.reach * move, z=z - move, exp_avg_sq=exp_avg_sq)

    views = dict(
        eval=lambda param, c, z: z + (param - z) / c.beta1,
        train=lambda param, c, z: z + (param - z) * c.beta1,
    )
