"""The state of L-BFGS in a state dict: torch.optim's entries, and one that makes loading it here exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_optim.checkpoint.read import Unloadable, as_buffer, as_number, group_names, naming, plain
from compiled_optim.groups.parameters import canonical_names, numbered

COUNTS = ("func_evals", "n_iter")
VECTORS = ("d", "prev_flat_grad")
NUMBERS = ("t", "prev_loss")
HISTORY = ("old_stps", "old_dirs")
MEMORY = (*COUNTS, *VECTORS, *NUMBERS, *HISTORY, "products", "H_diag", "pairs")  # what a step reads and writes
ENTRIES = (*MEMORY, "ro", "exact")  # with what only state dicts have


def _rows_by_age(count: int, size: int) -> list[int]:
    """The rows of the pairs that are there, the oldest first, after ``count`` were accepted."""
    return [n % size for n in range(max(count - size, 0), count)]


def packed(memory: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of torch.optim.LBFGS, and what :func:`unpack` needs to restore ``memory`` exactly. Waits for the device."""
    counts = {name: int(memory[name]) for name in COUNTS}
    if not counts["n_iter"]:
        return counts
    pairs = int(memory["pairs"])
    rows = _rows_by_age(pairs, len(memory["products"]))
    products = memory["products"][rows][:, rows]
    return {
        **counts,
        **{name: memory[name].clone() for name in (*VECTORS, "H_diag")},
        **{name: memory[name].item() for name in NUMBERS},
        **{name: list(memory[name][rows].unbind()) for name in HISTORY},
        "ro": list((1 / products.diagonal()).unbind()),
        "exact": {"n_iter": counts["n_iter"], "pairs": pairs, "products": products},
    }


def unpack(fresh: Mapping[str, Tensor], entries: Mapping[str, Any], order: Sequence[int], sizes: Sequence[int]) -> None:
    """Fill ``fresh`` from the state of torch.optim.LBFGS or of this package, with as many of the newest pairs as it holds.

    ``order`` is as :func:`order_of` says, and ``sizes`` says how many numbers each of our parameters has.
    """
    like, theirs = fresh["d"], [size for _, size in sorted(zip(order, sizes, strict=True))]

    def vector(value: Any, name: str) -> Tensor:
        found = as_buffer(value, f"{name} of the checkpoint", tuple(like.shape), like.dtype).to(like).split(theirs)
        return torch.cat([found[place] for place in order])

    def history(name: str) -> Tensor:  # vectors as the rows of a matrix, the oldest first
        if not isinstance(vectors := plain(entries[name], name), list):
            raise Unloadable(f"{name} of the checkpoint is not a list")
        return torch.stack([vector(v, name) for v in vectors]) if vectors else like.new_empty(0, len(like))

    _require(entries, COUNTS)
    counts = {name: _count(entries[name], name) for name in COUNTS}
    for name, count in counts.items():
        fresh[name].fill_(count)
    if not counts["n_iter"]:
        return
    _require(entries, (*VECTORS, *NUMBERS, *HISTORY, "H_diag"))
    for name in VECTORS:
        fresh[name].copy_(vector(entries[name], name))
    for name in (*NUMBERS, "H_diag"):  # infinite or NaN if the run had such a loss
        fresh[name].copy_(like.new_tensor(as_number(entries[name], f"{name} of the checkpoint", finite=False)))
    steps, changes = map(history, HISTORY)
    if len(steps) != len(changes):
        raise Unloadable("old_stps and old_dirs of the checkpoint must be equally long")
    exact = plain(entries.get("exact", {}), "exact")
    if "n_iter" in exact and _count(exact["n_iter"], "n_iter of exact") == counts["n_iter"]:
        _require(exact, ("products", "pairs"))
        products = as_buffer(exact["products"], "products", (len(steps), len(steps)), like.dtype).to(like)
        pairs = _count(exact["pairs"], "pairs")
    else:  # torch.optim carries our own entry along unchanged
        products, pairs = steps @ changes.t(), len(steps)
    size = len(fresh["products"])
    if len(_rows_by_age(pairs, size)) != len(steps):
        pairs = len(steps)
    rows = torch.tensor(_rows_by_age(pairs, size), dtype=torch.int64, device=like.device)
    first = len(steps) - len(rows)
    fresh["old_stps"][rows], fresh["old_dirs"][rows] = steps[first:], changes[first:]
    fresh["products"][rows[:, None], rows] = products[first:, first:]
    fresh["pairs"].fill_(pairs)


@naming("the state dict", passing=(ValueError, TypeError))
def order_of(ours: Sequence[str] | None, saved: Mapping[str, Any], count: int) -> list[int] | None:
    """Which parameter of the ``saved`` group each of our ``count`` is; None if they are not the same ones."""
    theirs = group_names(saved)
    places = {param: place for place, param in reversed([*enumerate(saved["params"])])}
    if ours is None or theirs is None:
        return list(range(count)) if len(places) == count else None
    theirs = [theirs[place] for place in sorted(places.values())]
    ours, theirs = numbered(canonical_names(ours)), numbered(canonical_names(theirs))
    return [theirs.index(name) for name in ours] if sorted(ours) == sorted(theirs) else None


def _require(entries: Mapping[str, Any], names: Sequence[str]) -> None:
    if absent := [name for name in names if entries.get(name) is None]:
        raise Unloadable(f"the checkpoint has no {', '.join(absent)}")


def _count(value: Any, name: str) -> int:
    number = as_number(value, f"{name} of the checkpoint")
    if not (number.is_integer() and 0 <= number < 2**63):
        raise Unloadable(f"{name} of the checkpoint is {number}, not a count")
    return int(number)
