"""Shapes of the parameters of known models, in order, without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Shapes: TypeAlias = list[tuple[int, ...]]


def _layer(width: int) -> Shapes:
    """Return the shapes of a transformer's layer: norm, attention, norm, MLP."""
    norm: Shapes = [(width,), (width,)]
    attention: Shapes = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp: Shapes = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return norm + attention + norm + mlp


def gpt2() -> Shapes:
    """Return the shapes of GPT-2 small with tied output embedding: 148 tensors."""
    return [(50257, 768), (1024, 768), *_layer(768) * 12, (768,), (768,)]


def vit_tiny() -> Shapes:
    """Return the shapes of ViT-Ti/16 at 224 pixels with 1000 classes: 152 tensors."""
    stem: Shapes = [(1, 1, 192), (1, 197, 192), (192, 3, 16, 16), (192,)]
    return [*stem, *_layer(192) * 12, (192,), (192,), (1000, 192), (1000,)]


MODELS: dict[str, Callable[[], Shapes]] = {"gpt2": gpt2, "vit-tiny": vit_tiny}
"""The shapes of models by name."""
