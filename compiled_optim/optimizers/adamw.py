"""AdamW."""

from compiled_optim.optimizers.adam import Adam
from compiled_optim.rule import Number, hyper, static


class AdamW(Adam):
    """AdamW: Adam with decoupled weight decay (arXiv:1711.05101, Algorithm 2).

    ``amsgrad`` keeps the maximum of the second moment (arXiv:1904.09237). Differs from torch.optim.AdamW: moments are
    averaged in float32 also for lower-precision parameters.
    """

    weight_decay: Number = hyper(default=1e-2, ge=0)
    decoupled_weight_decay: bool = static(default=True, init=False)

    @staticmethod
    def coefficients(step, lr, betas, eps, weight_decay):
        numbers = Adam.coefficients(step, lr, betas, eps, weight_decay)
        del numbers["weight_decay"]  # the gradient's, which has none here
        return numbers
