"""u-muP with unit-scaling's layers: the learning rate that is best for a narrow model is best for a wide one too.

``co.mup.AdamW`` reads the scale of each parameter from its layer. All parameters of a model are one group and one kernel,
whatever their scales are.
"""

import torch
import unit_scaling as uu
from sklearn.datasets import load_digits

import compiled_optim as co

pixels, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
pixels = (pixels.float() - pixels.float().mean()) / pixels.float().std()  # unit scale


def loss_of(width, lr):
    """Train a classifier of some width for a while."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        uu.Linear(64, width), uu.GELU(), uu.Linear(width, width), uu.GELU(), uu.LinearReadout(width, 10)
    )
    opt = co.mup.AdamW(model.named_parameters(), lr=lr)
    for _ in range(20):
        loss = uu.functional.cross_entropy(model(pixels), digits)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item()


rates = [2.0**power for power in range(-5, 4)]
for width in (32, 128, 256):
    losses = {lr: loss_of(width, lr) for lr in rates}
    print(f"width {width}: best lr {min(losses, key=losses.get)}, losses", *(f"{loss:.2f}" for loss in losses.values()))
