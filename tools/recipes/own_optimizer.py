"""An optimizer of your own: two functions on single numbers, from which the kernels for CPU and GPU are generated.

It has what the package's own have: schedules, clipping, checkpoints by name, compiled and captured steps, low precision. The
rule here is Adam with the sign of a step where the moment and the gradient disagree left out.
"""

import torch
from sklearn.datasets import load_digits

import compiled_optim as co
from compiled_optim.rule import Number, buffer, ema, hyper, product, sqrt, static, where


class SoftSign(co.CompiledOptimizer):
    """SoftSign: a momentum over the root of its own square and the gradient's average square."""

    lr: Number = hyper(default=1e-3, ge=0)
    betas: tuple[Number, Number] = hyper(default=(0.9, 0.99), ge=0, lt=1, doc="decay rates of average and average square.")
    weight_decay: Number = hyper(default=0.0, ge=0)
    agree: bool = static(default=False, doc="leave elements alone whose average points against the gradient.")
    exp_avg = buffer(int8="signed")
    exp_avg_sq = buffer()

    @staticmethod
    def coefficients(lr, betas, weight_decay):
        return dict(lr=lr, decay=lr * weight_decay, **ema(betas))

    @staticmethod
    def update(param, grad, c, agree, exp_avg, exp_avg_sq):
        exp_avg = c.beta1 * exp_avg + c.weight1 * grad
        exp_avg_sq = c.beta2 * exp_avg_sq + c.weight2 * grad * grad
        step = exp_avg / (sqrt(exp_avg_sq + exp_avg * exp_avg) + 1e-12)
        if agree:
            step = where(exp_avg * grad > 0, step, 0.0)
        return dict(step=c.lr * step + product(c.decay, param), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


pixels, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
pixels = pixels.float() / 16
for agree in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
    opt = SoftSign(model.named_parameters(), lr=2e-3, agree=agree, max_grad_norm=1.0)
    for _ in range(100):
        loss = torch.nn.functional.cross_entropy(model(pixels), digits)
        loss.backward()
        opt.step()
        opt.zero_grad()
    report = co.compile_report(opt)
    print(f"agree={agree}: loss {loss:.3f}; {report.lowering}, {report.recompiles} recompiles")
try:
    SoftSign(model.parameters(), betas=(0.9, 1.0))
except ValueError as error:
    print("ValueError:", error)
