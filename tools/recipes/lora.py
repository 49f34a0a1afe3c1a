"""Fine-tune with peft's LoRA: only the adapters are trained, so only they have state, and the frozen model stays as it was.

With LoRA+ the second matrices learn faster. ``lr_scale`` says so by name, in one group.
"""

import torch
from peft import LoraConfig, get_peft_model

import compiled_optim as co


class Net(torch.nn.Module):
    """A regression, whose two layers get adapters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.first(x)))


def train(model, y, lr, **options):
    """Fit ``y`` and return the optimizer."""
    opt = co.AdamW([(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=lr, **options)
    for _ in range(100):
        loss = (model(x) - y).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    print(f"{len(opt.state)} tensors with state, {co.memory_report(opt).elements} elements: loss {loss:.3f}")
    return opt


torch.manual_seed(0)
x = torch.randn(512, 8)
base = Net()
train(base, x.sin().sum(1, keepdim=True), 1e-2)
weights = {name: p.clone() for name, p in base.named_parameters()}

task = x.sin().sum(1, keepdim=True) + x[:, :1] * x[:, 1:2]  # a bit more than the base has learned
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["first", "second"]))
opt = train(model, task, 1e-3, lr_scale=lambda name, _: 16.0 if "lora_B" in name else 1.0)
frozen = {name.replace("base_layer.", ""): p for name, p in base.named_parameters() if "lora" not in name}
print("frozen weights unchanged:", all(torch.equal(weights[name], p) for name, p in frozen.items()))
print("trained:", *(name.removeprefix("base_model.model.") for name in opt.param_groups[0]["param_names"]))

# Prints, in 18 s:
# 4 tensors with state, 641 elements: loss 0.322
# 4 tensors with state, 548 elements: loss 0.174
# frozen weights unchanged: True
# trained: first.lora_A.default.weight first.lora_B.default.weight second.lora_A.default.weight second.lora_B.default.weight
