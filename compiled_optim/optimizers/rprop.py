"""Rprop."""

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, hyper, maximum, minimum, sign, where


class Rprop(CompiledOptimizer):
    """Rprop: step sizes that grow while the gradient keeps its sign (Riedmiller and Braun, doi:10.1109/ICNN.1993.298623).

    An element whose gradient changes its sign does not move in that step. Differs from torch.optim.Rprop: the product of two
    tiny gradients of equal sign does not underflow to "no sign".
    """

    lr: Number = hyper(default=1e-2, ge=0, doc="the step of every element at first, in the parameter's units.")
    etas: tuple[Number, Number] = hyper(default=(0.5, 1.2), gt=0, doc="step factors if the sign changed, < 1; if not, > 1.")
    step_sizes: tuple[Number, Number] = hyper(default=(1e-6, 50.0), lt=None, doc="the smallest and the largest step.")
    prev, step_size = buffer(), buffer(init="lr")

    @staticmethod
    def check(hypers, statics):
        """Raise ``ValueError`` unless the first eta shrinks and the second grows."""
        smaller, larger = hypers["etas"]
        if not 0 < smaller < 1 < larger:
            raise ValueError(f"Invalid eta values: {smaller}, {larger}")

    @staticmethod
    def coefficients(step, lr, etas, step_sizes):
        smaller, larger = etas
        smallest, largest = step_sizes
        first = step == 1  # takes the current learning rate, not the one at the state's creation
        return dict(first=first, lr=lr, smaller=smaller, larger=larger, smallest=smallest, largest=largest)

    @staticmethod
    def update(param, grad, c, prev, step_size):
        agreement = sign(grad) * sign(prev)
        factor = where(agreement > 0, c.larger, where(agreement < 0, c.smaller, 1.0))
        step_size = where(c.first > 0, c.lr, step_size) * factor
        step_size = minimum(maximum(step_size, c.smallest), c.largest)
        grad = where(agreement < 0, 0.0, grad)
        return dict(step=sign(grad) * step_size, prev=grad, step_size=step_size)
