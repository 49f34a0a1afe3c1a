"""The handwritten digits that scikit-learn ships: 1,797 grey images of 8x8 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional

BATCH_SIZE = 64


class Images(NamedTuple):
    """Images of shape ``(n, 1, 8, 8)``, their pixels from 0 to 1, and their digits."""

    pixels: Tensor
    digits: Tensor


def load() -> tuple[Images, Images]:
    """The training and the test images, always the same, with equal shares of every digit."""
    pixels, digits = load_digits(return_X_y=True)
    train_pixels, test_pixels, train_digits, test_digits = train_test_split(
        pixels, digits, test_size=0.2, stratify=digits, random_state=0
    )
    return _images(train_pixels, train_digits), _images(test_pixels, test_digits)


def _images(pixels: np.ndarray, digits: np.ndarray) -> Images:
    return Images(torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(digits))


def batches_per_epoch(images: Images) -> int:
    """How many full batches one epoch has; the images that are left over wait for the next epoch."""
    return len(images.digits) // BATCH_SIZE


def batches(images: Images, epochs: int, generator: torch.Generator) -> Iterator[Images]:
    """Every batch of every epoch, shuffled and distorted anew in each."""
    for _ in range(epochs):
        order = torch.randperm(len(images.digits), generator=generator)
        pixels = distorted(images.pixels[order], generator)
        used = batches_per_epoch(images) * BATCH_SIZE
        yield from map(Images, pixels[:used].split(BATCH_SIZE), images.digits[order][:used].split(BATCH_SIZE))


def distorted(pixels: Tensor, generator: torch.Generator, strength: float = 0.1) -> Tensor:
    """The images rotated, sheared, scaled and shifted a little, each at random."""
    maps = torch.eye(2, 3) + strength * (2 * torch.rand(len(pixels), 2, 3, generator=generator) - 1)
    grid = functional.affine_grid(maps, list(pixels.shape), align_corners=False)
    return functional.grid_sample(pixels, grid, align_corners=False)
