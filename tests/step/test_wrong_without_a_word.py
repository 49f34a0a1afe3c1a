"""Training that was wrong while the loss fell, in this package's terms: each is refused, or reported by name in two steps.

The cases are public threads: DeepSpeed 8438, 8443 and 8600, 8463, MaxText 4798, LLaMA-Factory 8041, sparsify 62, Muon 65,
Megatron-LM 5707, FlashOptim 3.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import engine_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A small language model with experts in one parameter, and an expert that no token reaches."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.experts = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)])
        self.head = nn.Linear(width, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.experts[0](x))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def train(net: nn.Module, optimizer: co.CompiledOptimizer, steps: int = 2) -> list[float]:
    losses = []
    tokens = torch.arange(24).reshape(2, 12) % 13
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_placeholders_in_place_of_matrices() -> None:
    """Parameters were placeholders without elements when they were sorted by shape, so no matrix got Muon."""
    net = model()
    for param in net.parameters():
        param.ds_shape, param.data = param.shape, torch.empty(0)
    with pytest.raises(ValueError, match=r"'blocks.0.up.weight' of shape \(0,\) stands for a parameter elsewhere"):
        co.MuonAdamW(net, adamw="embed*|*norm*|*bias*")


def test_a_step_for_each_micro_batch() -> None:
    """Muon took a step with the gradient of each micro-batch, which is no step with the sum: it is not linear."""
    net = model()
    optimizer = co.MuonAdamW(net)
    with pytest.raises(ValueError, match="has no optimizer accumulation: its step needs whole gradients"):
        optimizer.optimizer_accumulation = True


def test_flattened_matrices() -> None:
    """Offloading flattened the parameters, and what was no matrix any more was normalised as one vector."""
    net = model()
    net.blocks[1].down.weight.data = net.blocks[1].down.weight.data.flatten()
    with pytest.raises(ValueError, match=r"'blocks.1.down.weight' is the weight of a linear map, .*it was flattened"):
        co.MuonAdamW(net)
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters whereas .*'blocks.1.down.weight'"):
        co.Muon([("blocks.1.down.weight", net.blocks[1].down.weight)])


def test_an_expert_axis_that_is_taken_for_rows() -> None:
    """Experts that lie in one parameter were orthogonalised together."""
    experts = nn.Parameter(torch.randn(4, 16, 16))
    with pytest.raises(ValueError, match="'experts'"):
        co.Muon([("experts", experts)])
    optimizer = co.MuonAdamW([("experts", experts), ("up.weight", nn.Parameter(torch.randn(4, 4)))])
    assert optimizer.param_groups[1]["why"]["experts"].startswith("has 3 dimensions")


def test_no_parameter_for_muon() -> None:
    """A pattern matched everything, and a run that was to show Muon showed AdamW."""
    with pytest.raises(ValueError, match="no parameter is left for Muon"):
        co.MuonAdamW(model(), adamw="*embed*|*head*|*blocks*|*experts*")


def test_a_schedule_of_one_half() -> None:
    """The scheduler had Muon's groups, and AdamW's half of the model kept its first learning rate."""
    net = model()
    optimizer = co.MuonAdamW(net, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(net, optimizer)
    scheduler.step()
    assert [optimizer.hyperparameter("lr", i).item() for i in range(2)] == [0.005, 0.005]
    assert {group.kind.__name__ for group in engine_of(optimizer).groups.distinct} == {"MuonAdamW", "AdamW"}


def test_experts_that_never_get_a_gradient() -> None:
    """They were equal bit for bit to their initialisation in every run that had been shown."""
    net = model()
    optimizer = co.MuonAdamW(net, lr=0.01)
    first = train(net, optimizer)
    assert first[1] < first[0]
    assert [(f.name, f.params) for f in co.health(optimizer).findings] == [("no gradient", ("experts.1.weight",))]


def test_updates_that_never_reach_the_forward() -> None:
    """The optimizer had other tensors than the model."""
    net = model()
    optimizer = co.MuonAdamW(copy.deepcopy(net), lr=0.01)
    train(net, optimizer)
    found = {(f.name, f.params) for f in co.health(optimizer).findings}
    assert found == {("no gradient", (name,)) for name, _ in net.named_parameters()}


def test_moments_that_a_checkpoint_lost() -> None:
    """The loss went from 2.4 to 1785 after a checkpoint was loaded, whose second moments were zeros."""
    net = model()
    optimizer = co.MuonAdamW(net, lr=0.01)
    train(net, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    number = saved["param_groups"][1]["params"][saved["param_groups"][1]["param_names"].index("embed.weight")]
    saved["state"][number]["exp_avg_sq"].zero_()
    optimizer.load_state_dict(saved)
    assert ("zero moments", ("embed.weight",)) in {(f.name, f.params) for f in co.health(optimizer).findings}
    del saved["state"][number]
    with pytest.raises(ValueError, match=r"embed\.weight"):
        optimizer.load_state_dict({**saved, "state": {**saved["state"], number: {"step": torch.tensor(2.0)}}})
