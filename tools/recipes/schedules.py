"""Three ways to schedule the learning rate: torch's schedulers, numbers that you assign, a function inside the step.

All three give the same rates and the same training, and none compiles anything again. The function runs on the device: the
host has nothing to do, and compiled steps and CUDA graphs follow it.
"""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import compiled_optim as co

STEPS, WARMUP, PEAK = 200, 20, 3e-3
torch.manual_seed(0)
x = torch.randn(512, 8)
y = x.sin().sum(1, keepdim=True)


def rate(step):
    """Warm up, then follow half a cosine, in torch's operations: the step count is a tensor on the device."""
    cosine = (1 + torch.cos(torch.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2
    return PEAK * torch.where(step <= WARMUP, step / WARMUP, cosine)


def train(way):
    """Print rates and the last loss of a training that is scheduled in one of the ways."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    opt = co.AdamW(model.named_parameters(), lr=PEAK)
    if way == "scheduler":
        rise, fall = LinearLR(opt, 1 / WARMUP, 1, WARMUP - 1), CosineAnnealingLR(opt, STEPS - WARMUP)
        sched = SequentialLR(opt, [rise, fall], [WARMUP - 1])
    elif way == "in the step":
        opt.schedule(lr=rate)
    rates = {}
    with co.no_recompiles():
        for step in range(1, STEPS + 1):
            if way == "assigned":
                opt.param_groups[0]["lr"] = rate(torch.tensor(step)).item()
            loss = (model(x) - y).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            rates[step] = opt.hyperparameter("lr").item()  # the number that this step used
            if way == "scheduler":
                sched.step()
    print(f"{way}: lr {rates[1]:.5f}, {rates[20]:.5f}, {rates[110]:.5f}, loss {loss:.3f}")


for way in ("scheduler", "assigned", "in the step"):
    train(way)

# Prints, in 10 s:
# scheduler: lr 0.00015, 0.00300, 0.00150, loss 0.451
# assigned: lr 0.00015, 0.00300, 0.00150, loss 0.451
# in the step: lr 0.00015, 0.00300, 0.00150, loss 0.451
