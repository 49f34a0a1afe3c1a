"""u-muP with unit-scaling's layers: the learning rate that is best for a narrow model is best for a wide one too.

``co.mup.AdamW`` reads the scale of each parameter from its layer. All parameters of a model are one group and one kernel,
even with different scales. With torch's layers and plain AdamW, the best rate falls as the model grows.
"""

import torch
import unit_scaling as uu
from sklearn.datasets import load_digits

import compiled_optim as co

pixels, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
pixels = (pixels.float() - pixels.float().mean()) / pixels.float().std()  # unit scale


def loss_of(layers, readout, optimizer, width, lr):
    """Train a classifier of some width for a while."""
    torch.manual_seed(0)
    first, hidden, last = layers.Linear(64, width), layers.Linear(width, width), readout(width, 10)
    model = torch.nn.Sequential(first, layers.GELU(), hidden, layers.GELU(), last)
    opt = optimizer(model.named_parameters(), lr=lr)
    for _ in range(20):
        loss = layers.functional.cross_entropy(model(pixels), digits)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item()


def compare(name, powers, *how):
    """Print the best of some learning rates for a narrow and a wide model."""
    for width in (32, 512):
        losses = {2.0**power: loss_of(*how, width, 2.0**power) for power in powers}
        best = min(losses, key=losses.get)
        print(f"{name}, width {width}: best lr {best:g}; losses", *(f"{loss:.2f}" for loss in losses.values()))


compare("u-muP", range(-2, 3), uu, uu.LinearReadout, co.mup.AdamW)
compare("AdamW", range(-10, -3), torch.nn, torch.nn.Linear, co.AdamW)

# Prints, in 20 s:
# u-muP, width 32: best lr 1; losses 0.24 0.10 0.05 0.10 0.67
# u-muP, width 512: best lr 1; losses 0.11 0.04 0.02 0.04 0.12
# AdamW, width 32: best lr 0.03125; losses 2.17 1.88 0.99 0.30 0.12 0.09 0.10
# AdamW, width 512: best lr 0.00390625; losses 0.15 0.07 0.03 0.04 0.04 0.11 0.59
