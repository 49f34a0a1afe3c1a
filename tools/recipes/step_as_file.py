"""A training step as a file: loss, gradients, clipping and the optimizer's step as machine code, which other processes load.

The script starts itself again, and the second process loads what the first one compiled. It needs no compiler, traces
nothing, and trains to the same loss, with a scheduler as always. This is an experiment.
"""

import subprocess
import sys
import tempfile

import torch

import compiled_optim as co


def loss_of(model, x, y):
    """The loss of a batch; its Python runs once, in the process that saves."""
    return (model(x) - y).square().mean()


def train(make_step):
    """Train with a step that is compiled or loaded."""
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = x.sin().sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    opt = co.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=1.0, lowering="inductor")
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=20)
    step = make_step(model, opt, x, y)
    for _ in range(20):
        loss = step(x, y)
        sched.step()
    used = [name for name in ("torch._dynamo", "torch._inductor.compile_fx") if name in sys.modules]
    print(f"loss {loss:.4f}; imported of the compiler: {used or 'nothing'}", flush=True)


if len(sys.argv) == 1:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step.pt2"
        train(lambda model, opt, x, y: co.save_step(path, loss_of, model, opt, x, y))
        subprocess.run([sys.executable, __file__, path], check=True)
else:
    train(lambda model, opt, x, y: co.load_step(sys.argv[1], model, opt))

# Prints, in 25 s:
# loss 0.5877; imported of the compiler: ['torch._dynamo', 'torch._inductor.compile_fx']
# loss 0.5877; imported of the compiler: nothing
