"""Add up micro-batches: in the gradients, as always, or in the optimizer's moments, which keeps no gradient between them.

While ``opt.optimizer_accumulation`` is True, a step only adds its gradients to the moments. The second moment then has the
squares of micro-batches instead of the square of their mean, so the steps are smaller and the losses differ a little.
"""

import torch

import compiled_optim as co

MICRO = 4
torch.manual_seed(0)
x = torch.randn(512, 8)
y = x.sin().sum(1, keepdim=True)


def train(in_moments):
    """Train 25 epochs of four batches, each of them four micro-batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    opt = co.AdamW(model.named_parameters(), lr=3e-3)
    kept = 0
    for _ in range(25):
        for number, rows in enumerate(torch.randperm(512).split(32)):
            last = number % MICRO == MICRO - 1
            loss = (model(x[rows]) - y[rows]).square().mean()
            (loss / MICRO).backward()
            if in_moments:
                opt.optimizer_accumulation = not last
            if in_moments or last:
                opt.step()
                opt.zero_grad()
            if not last:
                kept = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        loss = (model(x) - y).square().mean()
    steps = opt.state[model[0].weight]["step"]
    print(f"{steps:.0f} steps, loss {loss:.2f}, {kept} bytes of gradients between micro-batches")


train(in_moments=False)
train(in_moments=True)

# Prints, in 4 s:
# 100 steps, loss 0.46, 2564 bytes of gradients between micro-batches
# 100 steps, loss 0.44, 0 bytes of gradients between micro-batches
