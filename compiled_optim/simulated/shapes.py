"""Shapes of the parameters of known models, in order, without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Shapes: TypeAlias = list[tuple[int, ...]]


def gpt2() -> Shapes:
    """Return the shapes of GPT-2 small with tied output embedding: 148 tensors."""
    width = 768
    norm: Shapes = [(width,), (width,)]
    attention: Shapes = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp: Shapes = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *(norm + attention + norm + mlp) * 12, *norm]


def vit_tiny() -> Shapes:
    """Return the shapes of ViT-Ti/16 at 224 pixels with 1000 classes: 152 tensors."""
    width = 192
    norm: Shapes = [(width,), (width,)]
    attention: Shapes = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp: Shapes = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    stem: Shapes = [(1, 1, width), (1, 197, width), (width, 3, 16, 16), (width,)]
    return [*stem, *(norm + attention + norm + mlp) * 12, *norm, (1000, width), (1000,)]


MODELS: dict[str, Callable[[], Shapes]] = {"gpt2": gpt2, "vit-tiny": vit_tiny}
"""The shapes of models by name."""
