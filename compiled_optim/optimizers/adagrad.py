"""Adagrad."""

from torch import Tensor

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule import Number, buffer, hyper, product, sqrt


class Adagrad(CompiledOptimizer, advice="SparseAdam", decays="gradient"):
    """Adagrad: steps over the root of the sum of squared gradients (Duchi et al., JMLR 12, 2011, Figure 1).

    Differs from torch.optim.Adagrad: gradients must be dense, and a group may set ``initial_accumulator_value``.
    """

    lr: Number = hyper(default=1e-2, ge=0, doc="learning rate: the step is this number times the direction.")
    lr_decay: Number = hyper(default=0.0, ge=0, doc="``lr`` is divided by 1 plus this number times the steps so far.")
    weight_decay: Number = hyper(default=0.0, ge=0)
    initial_accumulator_value: Number = hyper(default=0.0, ge=0, doc="the first value of the sum of squares.")
    eps: Number = hyper(default=1e-10, ge=0)
    sum = buffer(init="initial_accumulator_value")

    def share_memory(self) -> None:
        """Move sums and step counts into memory that processes share; torch.optim's moves its sums."""
        self._engine.current()  # gathers the step counts in one block
        for entries in self.state.values():
            for entry in entries.values():
                if isinstance(entry, Tensor):
                    entry.share_memory_()

    @staticmethod
    def coefficients(step, lr, lr_decay, weight_decay, eps):
        return dict(weight_decay=weight_decay, step_size=lr / (1 + (step - 1) * lr_decay), eps=eps)

    @staticmethod
    def update(param, grad, c, sum):
        grad = grad + product(c.weight_decay, param)
        sum = sum + grad * grad
        return dict(step=c.step_size * (grad / (sqrt(sum) + c.eps)), sum=sum)
