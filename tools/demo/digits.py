"""The handwritten digits that scikit-learn ships, grey images of 8x8 pixels, and a small vision transformer for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import compiled_optim as co

BATCH_SIZE = 64
CLASSES = 10
TOKENS = 16

Images = tuple[Tensor, Tensor]
"""Pixels of shape ``(n, 1, 8, 8)`` from 0 to 1, and digits."""


def load() -> tuple[Images, Images]:
    """Load the training and the test images, always the same ones, with equal shares of every digit."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    train, test = train_test_split(range(len(digits)), test_size=0.2, stratify=digits, random_state=0)
    return (pixels[train], torch.tensor(digits[train])), (pixels[test], torch.tensor(digits[test]))


def batches_per_epoch(images: Images) -> int:
    """Return the number of full batches in an epoch. Each leaves out fewer images than a batch, at random."""
    return len(images[0]) // BATCH_SIZE


def batches(images: Images, epochs: int, generator: torch.Generator) -> Iterator[Images]:
    """Yield every batch of every epoch, of shuffled images, each rotated, sheared, scaled and shifted at random."""
    pixels, digits = images
    for _ in range(epochs):
        order = torch.randperm(len(digits), generator=generator)[: batches_per_epoch(images) * BATCH_SIZE]
        maps = torch.eye(2, 3) + 0.1 * (2 * torch.rand(len(order), 2, 3, generator=generator) - 1)
        grid = functional.affine_grid(maps, [len(order), *pixels.shape[1:]], align_corners=False)
        distorted = functional.grid_sample(pixels[order], grid, align_corners=False)
        yield from zip(distorted.split(BATCH_SIZE), digits[order].split(BATCH_SIZE), strict=True)


class VisionTransformer(nn.Module):
    """A vision transformer (arXiv:2010.11929) that begins with convolutions (arXiv:2106.14881), for 8x8 pixels.

    The convolutions make 16 tokens of an image; after the layers, the tokens' mean represents it.
    """

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(1, width // 2), *_convolution(width // 2, width), nn.MaxPool2d(2), nn.Flatten(start_dim=2)
        )
        self.position_embedding = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(width, heads, 2 * width, **options) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits ``(images, classes)`` of ``pixels`` ``(images, 1, 8, 8)``."""
        tokens = self.stem(pixels).transpose(1, 2) + self.position_embedding
        return self.classifier(self.norm(self.layers(tokens)).mean(dim=1))


def _convolution(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(1, channels_out), nn.GELU()]


def parameter_groups(model: nn.Module, *, backwards: bool = False) -> list[dict[str, Any]]:
    """Return two groups of named parameters, reversed if ``backwards``. Biases, norms and the embedding do not decay."""
    named = list(model.named_parameters())
    undecayed = "*bias|*norm*|stem.1.*|stem.4.*|position_embedding"
    return co.param_groups(named[::-1] if backwards else named, {undecayed: {"weight_decay": 0.0}})
