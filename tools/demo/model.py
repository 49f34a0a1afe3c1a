"""A small vision transformer, and its parameters in groups with and without weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
TOKENS = 16


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
    """A vision transformer (arXiv:2010.11929) that begins with convolutions (arXiv:2106.14881), for 8x8 pixels.

    The convolutions make 16 tokens of an image; after the blocks, the tokens' mean represents it.
    """

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *convolution(1, width // 2), *convolution(width // 2, width), nn.MaxPool2d(2), nn.Flatten(start_dim=2)
        )
        self.position_embedding = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """The logits ``(images, classes)`` of ``pixels`` ``(images, 1, 8, 8)``."""
        tokens = self.stem(pixels).transpose(1, 2) + self.position_embedding
        return self.classifier(self.norm(self.blocks(tokens)).mean(dim=1))


def convolution(channels_in: int, channels_out: int) -> list[nn.Module]:
    """The layers of one convolution, with its norm and activation."""
    return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(1, channels_out), nn.GELU()]


def parameter_groups(model: nn.Module, weight_decay: float, *, backwards: bool = False) -> list[dict[str, Any]]:
    """Two groups of named parameters: the layers' weights decay; biases, norms and embeddings do not.

    Args:
        model: whose parameters.
        weight_decay: of the first group.
        backwards: list each group's parameters last to first.
    """
    weights = {module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    named = list(model.named_parameters())
    if backwards:
        named.reverse()
    return [
        {"params": [(name, p) for name, p in named if p in weights], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p not in weights], "weight_decay": 0.0},
    ]
