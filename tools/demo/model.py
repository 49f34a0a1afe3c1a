"""A vision transformer for 8x8 pixels, and its parameters in groups with and without weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
PATCH = 2
PATCHES = (8 // PATCH) ** 2


class Block(nn.Module):
    """Self-attention and a two-layer perceptron, each behind a layer norm and around it a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens in, tokens out: ``(images, tokens, width)``."""
        packed = self.queries_keys_values(self.attention_norm(tokens))
        queries, keys, values = packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(queries, keys, values)
        tokens = tokens + self.attended(heads.transpose(1, 2).flatten(-2))
        return tokens + self.perceptron(self.perceptron_norm(tokens))


class VisionTransformer(nn.Module):
    """A transformer over 2x2 patches (arXiv:2010.11929), with the mean of the tokens as the image's representation."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, width)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(PATCHES, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """The logits ``(images, classes)`` of ``pixels`` ``(images, 1, 8, 8)``."""
        patches = functional.unfold(pixels, PATCH, stride=PATCH).transpose(1, 2)
        tokens = self.blocks(self.patches(patches) + self.position_embedding)
        return self.classifier(self.norm(tokens).mean(dim=1))


def parameter_groups(model: nn.Module, weight_decay: float, *, backwards: bool = False) -> list[dict[str, Any]]:
    """Two groups of named parameters: the linear layers' weights decay; biases, norms and embeddings do not.

    Args:
        model: whose parameters.
        weight_decay: of the first group.
        backwards: list each group's parameters last to first.
    """
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    named = list(model.named_parameters())
    if backwards:
        named.reverse()
    return [
        {"params": [(name, p) for name, p in named if p in weights], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p not in weights], "weight_decay": 0.0},
    ]
