"""Clip gradients, skip steps that are not finite, and unscale float16's gradients inside the step.

Nothing waits for the device: the step decides there whether it is taken, and GradScaler is used as always.
"""

import torch

import compiled_optim as co

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x.sin().sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
opt = co.AdamW(model.named_parameters(), lr=3e-3, max_grad_norm=0.5, skip_nonfinite=True)
scaler = torch.amp.GradScaler("cpu")

for step in range(100):
    with torch.autocast("cpu", torch.float16):
        loss = (model(x) - y).square().mean()
    if step == 50:
        loss = loss * float("inf")  # a batch that goes wrong
    if step == 75:
        opt.max_grad_norm = 0.1  # this step uses it; nothing is compiled again
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if step in (0, 50, 99):
        print(f"step {step}: loss {loss:.2f}, norm before clipping {opt.grad_norm:.1f}, scale {scaler.get_scale():.0f}")
print(f"skipped {opt.skipped_steps:.0f}; steps taken {opt.state[model[0].weight]['step']:.0f}")

# Prints, in 4 s:
# step 0: loss 3.12, norm before clipping 2.8, scale 65536
# step 50: loss inf, norm before clipping nan, scale 32768
# step 99: loss 0.40, norm before clipping 0.1, scale 32768
# skipped 1; steps taken 99
