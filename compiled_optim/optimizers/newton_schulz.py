"""The Newton-Schulz iteration, which makes the singular values of matrices equal, and its coefficients."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compiled_optim.rule import Number, gram, maximum, quadratic
from compiled_optim.rule.fields import built_in

Coefficients: TypeAlias = tuple[Number, Number, Number] | Sequence[Sequence[float]] | str
STEPS = 5  # the default of ``ns_steps``
_LIMIT = (1.875, -1.25, 0.375)
_SAFETY = 1.01
_MINIMAX = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
"""The odd polynomials nearest to 1, in turn, for singular values from 0.001 to 1 (arXiv:2505.16932, Algorithm 1).

These take ``x / 1.01``, with the paper's safety factor. Later iterations use the limit of the sequence, and take ``x``.
"""
_NAMED = {"polar_express": tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _MINIMAX)}


def sequence(value: Any) -> Any:
    """Return ``value`` as a compiled-in choice where it is a name or several triples; None where it is one triple."""
    if isinstance(value, str):
        return value
    value = [built_in(each) for each in value] if isinstance(value := built_in(value), (tuple, list)) else value
    is_sequence = isinstance(value, (tuple, list)) and any(isinstance(triple, (tuple, list)) for triple in value)
    return tuple(tuple(triple) if isinstance(triple, list) else triple for triple in value) if is_sequence else None


def iterations(triple: Sequence[Any], chosen: Any, steps: int) -> list[Sequence[Any]]:
    """Return the coefficients of each iteration: ``triple`` in all ``steps`` unless a :func:`sequence` is ``chosen``."""
    if chosen in _NAMED:
        return list(itertools.islice(itertools.chain(_NAMED[chosen], itertools.repeat(_LIMIT)), steps))
    return [triple] * steps if chosen is None else list(chosen)


def orthogonalized(stack: Tensor, triples: Sequence[Sequence[Any]], eps: Tensor | float) -> Tensor:
    """Return the matrices of ``stack``, (..., rows, columns), with singular values near 1: an iteration per triple."""
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack
    x = (x / maximum(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True), eps)).to(torch.bfloat16)
    for a, b, c in triples:
        x = quadratic(gram(x), a, b, c, stack.dtype) @ x
    return (x.mT if tall else x).to(stack.dtype)


def check_iterations(hypers: Mapping[str, Any], statics: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where ``ns_coefficients`` or ``ns_steps`` is invalid, or they contradict each other."""
    chosen, steps = sequence(hypers["ns_coefficients"]), statics["ns_steps"]
    if not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps must be an integer >= 0 and < 100, got {steps!r}")
    if isinstance(chosen, str):
        if chosen not in _NAMED:
            names = ", ".join(map(repr, _NAMED))
            raise ValueError(f"ns_coefficients must be {names}, three numbers or a sequence of such triples, got {chosen!r}")
    elif chosen is not None:
        for index, triple in enumerate(chosen):
            is_triple = isinstance(triple, tuple) and len(triple) == 3
            if not is_triple or not all(isinstance(number, (int, float)) and math.isfinite(number) for number in triple):
                raise ValueError(f"ns_coefficients[{index}] must be three finite numbers, got {triple!r}")
        if steps not in (STEPS, len(chosen)):
            raise ValueError(f"ns_steps must be {len(chosen)}, as many as triples, or the default {STEPS}, got {steps}")
