"""Update each parameter inside of backward as soon as its gradient is there, and free the gradient at once.

The loop stays as it is, and so does the training. The gradients of a whole model are never in memory together.
"""

import torch

import compiled_optim as co

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x.sin().sum(1, keepdim=True)


def train(released):
    """Train a deep narrow network; print the bytes of gradients that are there when backward has ended."""
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), *layers, torch.nn.Linear(64, 1))
    opt = co.AdamW(model.named_parameters(), lr=1e-3)
    if released:
        co.prepare_for_gradient_release(model, opt)
    for _ in range(60):
        loss = (model(x) - y).square().mean()
        loss.backward()
        gradients = co.memory_report(opt).gradients
        opt.step()  # ends the step; with release the parameters have moved before
        opt.zero_grad()
    if released:
        co.remove_gradient_release(model)
    print(f"{'released' if released else 'as usual'}: loss {loss:.4f}, {gradients} bytes of gradients after backward")
    return model


usual, released = train(False), train(True)
pairs = zip(usual.parameters(), released.parameters(), strict=True)
print("equal weights:", all(torch.equal(a, b) for a, b in pairs))

# Prints, in 4 s:
# as usual: loss 0.5380, 85764 bytes of gradients after backward
# released: loss 0.5380, 0 bytes of gradients after backward
# equal weights: True
