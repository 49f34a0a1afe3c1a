"""Muon for the matrices of hidden layers and AdamW for the rest, as one optimizer: one schedule, one clip, one checkpoint.

``co.explain`` tells which rule each parameter has and why, before you train. ``co.health(opt)`` lists afterwards those that
may not have trained.
"""

import torch

import compiled_optim as co


class Model(torch.nn.Module):
    """Predicts the next letter from the last four; one of its layers is not used in ``forward``."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(27, 32)
        self.hidden = torch.nn.Linear(4 * 32, 128)
        self.unused = torch.nn.Linear(128, 128)
        self.head = torch.nn.Linear(128, 27)

    def forward(self, letters):
        return self.head(self.hidden(self.embed(letters).flatten(1)).relu())


text = "one two three four five six seven eight nine ten eleven twelve " * 8
codes = torch.tensor([max(ord(letter) - 96, 0) for letter in text])
inputs, targets = codes.unfold(0, 4, 1)[:-1], codes[4:]

torch.manual_seed(0)
model = Model()
opt = co.MuonAdamW(model, lr=3e-3, max_grad_norm=1.0)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=60)
for row in co.explain(model, opt).records:  # print(co.explain(model, opt)) has a table with more columns
    print(f"{row['name']}: {row['rule']}, lr {row['lr']:.5f}, {row['why']}")
opt.watch_health()
for step in range(60):
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    opt.step()
    opt.zero_grad()
    sched.step()
    if step in (0, 59):
        print(f"step {step}: loss {loss:.2f}")
print(co.health(opt))

# Prints, in 4 s:
# embed.weight: AdamW, lr 0.00300, matches '*embed*'
# hidden.weight: Muon, lr 0.00679, a matrix that no pattern matches
# hidden.bias: AdamW, lr 0.00300, matches '*bias*'
# unused.weight: Muon, lr 0.00679, a matrix that no pattern matches
# unused.bias: AdamW, lr 0.00300, matches '*bias*'
# head.weight: AdamW, lr 0.00300, matches 'head.*'
# head.bias: AdamW, lr 0.00300, matches 'head.*'
# step 0: loss 3.33
# step 59: loss 0.86
# MuonAdamW: 2 of 7 parameters may not train
#   warning (no gradient): unused.weight: it never had a gradient
#   warning (no gradient): unused.bias: it never had a gradient
