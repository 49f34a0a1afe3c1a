"""The history of L-BFGS: pairs of steps and changes of the gradient, and the direction that they imply.

The two-loop recursion (Nocedal & Wright, Numerical Optimization, Algorithm 7.4) makes two products of vectors per pair, one
after the other. Written with the matrix of all products of steps and changes (Byrd, Nocedal and Schnabel, Mathematical
Programming 63, 1994, Theorem 2.2), the same direction takes four products of the history with a vector, whatever its length.
It does not wait for the device, where the count of accepted pairs is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.read import Unloadable, as_buffer, as_number, plain

_COUNTS = ("func_evals", "n_iter")
_VECTORS = ("d", "prev_flat_grad")
_NUMBERS = ("t", "prev_loss")
_HISTORY = ("old_stps", "old_dirs")
MEMORY = (*_COUNTS, *_VECTORS, *_NUMBERS, *_HISTORY, "products", "H_diag", "pairs")  # entries that a step reads and writes
ENTRIES = (*MEMORY, "ro", "exact")  # with those of state dicts only: torch.optim's, and one for exact loads here

_LEAST_CURVATURE = 1e-10  # torch.optim's limit: a pair with a smaller product would make the matrix indefinite


def new_state(size: int, numel: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return the initial state, with an empty history of up to ``size`` pairs; pair ``n`` is in row ``n % size``.

    ``old_stps`` are steps and ``old_dirs`` changes of the gradient: torch.optim's names. ``products`` are of every step with
    every change that is not older, ``H_diag`` is the scale of the initial inverse Hessian, and ``pairs`` the number of pairs
    accepted so far. Empty rows are 0.
    """
    shapes = {**dict.fromkeys(_VECTORS, (numel,)), **dict.fromkeys(_HISTORY, (size, numel)), "products": (size, size)}
    dtypes = dict.fromkeys((*_COUNTS, "pairs"), torch.int64)
    state = {n: torch.zeros(shapes.get(n, ()), dtype=dtypes.get(n, dtype), device=device) for n in MEMORY}
    state["H_diag"].fill_(1)
    return state


def record(pairs: Mapping[str, Tensor], step: Tensor, change: Tensor, allowed: Tensor) -> None:
    """Add the pair of a step and of the gradient's change over it; in a full history it replaces the oldest pair.

    Nothing changes unless ``allowed``, a 0-dim bool, is true and the pair's curvature is positive.
    """
    curvature = change.dot(step)
    accepted = (curvature > _LEAST_CURVATURE) & allowed
    if size := len(pairs["products"]):
        row = (pairs["pairs"] % size).view(1)
        for name, new in (("old_stps", step), ("old_dirs", change)):
            ring = pairs[name]
            ring.index_copy_(0, row, torch.where(accepted, new, ring.index_select(0, row)))
        column = pairs["old_stps"] @ pairs["old_dirs"].index_select(0, row).view(-1)
        pairs["products"].index_copy_(1, row, column.view(-1, 1))
    pairs["H_diag"].copy_(torch.where(accepted, curvature / change.dot(change), pairs["H_diag"]))
    pairs["pairs"].add_(accepted)


def direction(pairs: Mapping[str, Tensor], gradient: Tensor, rows: int) -> Tensor:
    """Return minus the inverse Hessian that ``pairs``, in up to ``rows`` rows, imply times ``gradient``, (numel,)."""
    scale, count = pairs["H_diag"], pairs["pairs"]
    if rows == 0:
        return -scale * gradient
    steps, changes = pairs["old_stps"][:rows], pairs["old_dirs"][:rows]
    number = torch.arange(rows, device=gradient.device)
    by_age, back = (count + number) % rows, (number - count) % rows  # empty rows first, then from the oldest pair on
    products = pairs["products"].index_select(0, by_age).index_select(1, by_age)
    empty = (number < rows - count).to(products.dtype)
    triangle = products.triu() + torch.diag(empty)
    alpha = torch.linalg.solve_triangular(triangle, -(steps @ gradient)[by_age, None], upper=True)
    result = -scale * (gradient + changes.t() @ alpha[back, 0])
    right = products.diagonal()[:, None] * alpha - (changes @ result)[by_age, None]
    gamma = torch.linalg.solve_triangular(triangle.t(), right, upper=False)
    return torch.addmv(result, steps.t(), gamma[back, 0])


def _rows_by_age(count: int, size: int) -> list[int]:
    """Return the rows of the stored pairs, the oldest first, after ``count`` were accepted."""
    return [n % size for n in range(max(count - size, 0), count)]


def packed(memory: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return torch.optim.LBFGS's state, and an entry for an exact :func:`unpack` of ``memory``. Waits for the device."""
    counts = {name: int(memory[name]) for name in _COUNTS}
    if not counts["n_iter"]:
        return counts
    pairs = int(memory["pairs"])
    rows = _rows_by_age(pairs, len(memory["products"]))
    products = memory["products"][rows][:, rows]
    return {
        **counts,
        **{name: memory[name].clone() for name in (*_VECTORS, "H_diag")},
        **{name: memory[name].item() for name in _NUMBERS},
        **{name: list(memory[name][rows].unbind()) for name in _HISTORY},
        "ro": list((1 / products.diagonal()).unbind()),
        "exact": {"n_iter": counts["n_iter"], "pairs": pairs, "products": products},
    }


def unpack(fresh: Mapping[str, Tensor], entries: Mapping[str, Any], order: Sequence[int], sizes: Sequence[int]) -> None:
    """Fill ``fresh`` from the state of torch.optim.LBFGS or of this package, with the newest pairs that fit.

    For each parameter, ``order`` has its index in the checkpoint, and ``sizes`` its number of real numbers.
    """
    like, saved_sizes = fresh["d"], [size for _, size in sorted(zip(order, sizes, strict=True))]

    def vector(value: Any, name: str) -> Tensor:
        parts = as_buffer(value, f"{name} of the checkpoint", tuple(like.shape), like.dtype).to(like).split(saved_sizes)
        return torch.cat([parts[index] for index in order])

    def history(name: str) -> Tensor:  # vectors as the rows of a matrix, the oldest first
        if not isinstance(vectors := plain(entries[name], name), list):
            raise Unloadable(f"{name} of the checkpoint is not a list")
        return torch.stack([vector(v, name) for v in vectors]) if vectors else like.new_empty(0, len(like))

    _require(entries, _COUNTS)
    counts = {name: _count(entries[name], name) for name in _COUNTS}
    for name, count in counts.items():
        fresh[name].fill_(count)
    if not counts["n_iter"]:
        return
    _require(entries, (*_VECTORS, *_NUMBERS, *_HISTORY, "H_diag"))
    for name in _VECTORS:
        fresh[name].copy_(vector(entries[name], name))
    for name in (*_NUMBERS, "H_diag"):  # infinite or NaN if the run had such a loss
        fresh[name].copy_(like.new_tensor(as_number(entries[name], f"{name} of the checkpoint", finite=False)))
    steps, changes = map(history, _HISTORY)
    if len(steps) != len(changes):
        raise Unloadable("old_stps and old_dirs of the checkpoint must be equally long")
    exact = plain(entries.get("exact", {}), "exact")
    if "n_iter" in exact and _count(exact["n_iter"], "n_iter of exact") == counts["n_iter"]:
        _require(exact, ("products", "pairs"))
        products = as_buffer(exact["products"], "products", (len(steps), len(steps)), like.dtype).to(like)
        pairs = _count(exact["pairs"], "pairs")
    else:  # torch.optim passes this package's entry on unchanged
        products, pairs = steps @ changes.t(), len(steps)
    size = len(fresh["products"])
    if len(_rows_by_age(pairs, size)) != len(steps):
        pairs = len(steps)
    rows = torch.tensor(_rows_by_age(pairs, size), dtype=torch.int64, device=like.device)
    first = len(steps) - len(rows)
    fresh["old_stps"][rows], fresh["old_dirs"][rows] = steps[first:], changes[first:]
    fresh["products"][rows[:, None], rows] = products[first:, first:]
    fresh["pairs"].fill_(pairs)


def _require(entries: Mapping[str, Any], names: Sequence[str]) -> None:
    if absent := [name for name in names if entries.get(name) is None]:
        raise Unloadable(f"the checkpoint has no {', '.join(absent)}")


def _count(value: Any, name: str) -> int:
    number = as_number(value, f"{name} of the checkpoint")
    if not (number.is_integer() and 0 <= number < 2**63):
        raise Unloadable(f"{name} of the checkpoint is {number}, not a count")
    return int(number)
