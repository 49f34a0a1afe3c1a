"""Send the weights that steps change to a process that serves the model: 100 steps later its weights have the same bits.

`opt.changes()` has each changed element of a parameter, with its index; bfloat16 weights change seldom at small rates. Where
most elements changed, it has the whole parameter.
"""

import io
import subprocess
import sys

import torch

import compiled_optim as co


def build():
    """Return the model that both processes begin with."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32)
    return torch.nn.Sequential(*layers).bfloat16()


def follow(model, changes):
    """Copy changed elements into the weights of a model."""
    weights = dict(model.named_parameters())
    for name, indices, values, _ in changes:
        if indices is None:
            weights[name].data.copy_(values)
        else:
            weights[name].data.view(-1)[indices] = values


model = build()
if len(sys.argv) > 1:  # the process that serves: it reads the changes of one step after the other, then the weights
    *steps, weights = torch.load(io.BytesIO(sys.stdin.buffer.read()))
    for changes in steps:
        follow(model, changes)
    equal = all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    print(f"{len(steps)} steps later all bits are equal: {equal}")
else:
    opt = co.AdamW(model.named_parameters(), lr=1e-5, weights="auto")
    opt.track_changes(torch.bfloat16)
    sent, x = [], torch.randn(64, 32).bfloat16()
    for _ in range(100):
        (model(x) - x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        sent.append([tuple(change) for change in opt.changes()])
    tensors = [t for changes in sent for change in changes for t in change[1:3] if t is not None]
    everything = 100 * sum(p.nbytes for p in model.parameters())
    print(f"a third of the weights' bytes is enough: {3 * sum(t.nbytes for t in tensors) < everything}")
    torch.save([*sent, [*model.parameters()]], buffer := io.BytesIO())
    sys.stdout.flush()
    subprocess.run([sys.executable, __file__, "serve"], input=buffer.getvalue(), check=True)

# Prints, in 7 s:
# a third of the weights' bytes is enough: True
# 100 steps later all bits are equal: True
