"""Compile a training step once and keep it in a file: later processes load it, and trace and compile nothing.

`co.as_module(opt)` is the step for `aot_compile`. Compiled code finds the state, step counts and learning rate by name in
the module that it is called with. Load only files that you trust.
"""

import subprocess
import sys
import tempfile

import torch

import compiled_optim as co

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x.sin().sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
opt = co.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=1.0, lowering="inductor")
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=20)
step = co.as_module(opt)


def train_step(model, step, x, y):
    """Take one training step."""
    loss, params = (model(x) - y).square().mean(), [*model.parameters()]
    step(params, list(torch.autograd.grad(loss, params)))
    return loss.detach()


if len(sys.argv) == 1:
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    torch._dynamo.config.trace_autograd_ops = torch._dynamo.config.enable_aot_compile = True
    with tempfile.TemporaryDirectory() as folder:
        compiled = torch.compile(train_step, fullgraph=True, options=options)
        compiled.aot_compile(((model, step, x, y), {})).save_compiled_function(f"{folder}/step")
        subprocess.run([sys.executable, __file__, f"{folder}/step"], check=True)
else:
    with open(sys.argv[1], "rb") as file:
        train = torch.compiler.load_compiled_function(file)
    for _ in range(20):
        step.check()  # raises if the optimizer no longer fits this code
        loss = train(model, step, x, y)
        sched.step()
    print(f"loss {loss:.4f} at step {opt.state[model[0].weight]['step']:.0f}")

# Prints, in 12 s:
# loss 0.5877 at step 20
