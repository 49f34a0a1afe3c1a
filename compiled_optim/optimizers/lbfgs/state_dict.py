"""The state dict of L-BFGS: torch.optim's, and what makes loading it here exact."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from compiled_optim.checkpoint.forms import group_names, plain, read
from compiled_optim.checkpoint.saved_values import Unloadable, as_buffer, as_number, naming
from compiled_optim.checkpoint.state_dict import PreparedLoad
from compiled_optim.checkpoint.writing import check_writable
from compiled_optim.groups.names import canonical_names, numbered
from compiled_optim.optimizers.lbfgs.curvature import restore, rows_by_age
from compiled_optim.step.holdings import Holdings

VECTORS = ("d", "prev_flat_grad")
NUMBERS = ("t", "prev_loss")
HISTORY = ("old_stps", "old_dirs")
COUNTS = ("func_evals", "n_iter")
MEMORY = (*COUNTS, *VECTORS, *NUMBERS, *HISTORY, "products", "H_diag", "pairs")  # what a step reads and writes
ENTRIES = (*MEMORY, "ro", "exact")  # with what only state dicts have


def save(holdings: Holdings, memory: Mapping[str, Tensor], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict, with the values of ``flags`` for run-time flags. Waits for the device."""
    result = holdings.save(flags)
    counts = {name: int(memory[name]) for name in COUNTS}
    first = result["param_groups"][0]["params"][0]
    others = {name: value for name, value in result["state"].pop(first, {}).items() if name not in ENTRIES}
    if counts["func_evals"] or others:
        result["state"][first] = (counts if counts["func_evals"] else {}) | others
    if counts["n_iter"]:
        count = int(memory["pairs"])
        rows = rows_by_age(count, len(memory["products"]))
        products = memory["products"][rows][:, rows]
        result["state"][first] |= {
            **{name: memory[name].clone() for name in (*VECTORS, "H_diag")},
            **{name: memory[name].item() for name in NUMBERS},
            **{name: list(memory[name][rows].unbind()) for name in HISTORY},
            "ro": list((1 / products.diagonal()).unbind()),
            "exact": {"n_iter": counts["n_iter"], "pairs": count, "products": products},
        }
    return result


@torch.no_grad()
def prepare_load(
    holdings: Holdings,
    memory: Mapping[str, Tensor],
    fresh: Mapping[str, Tensor],
    sizes: Sequence[int],
    state_dict: Mapping[str, Any],
    strict: bool,
    hyperparameters: Literal["checkpoint", "keep"],
) -> PreparedLoad:
    """Check what copies a state dict of torch.optim.LBFGS or of this package; an error where it does not fit.

    ``memory`` is what the step reads and writes, ``fresh`` the like of it at the beginning, to be filled, and ``sizes`` says
    how many numbers each parameter has. The rest is as in ``load_state_dict``.
    """
    state_dict = read(state_dict)
    if len(state_dict["param_groups"]) != 1:
        raise ValueError(f"LBFGS has one parameter group, the checkpoint {len(state_dict['param_groups'])}")
    saved = state_dict["param_groups"][0]
    entries = state_dict["state"].pop(saved["params"][0], {}) if saved["params"] else {}
    own = {name: value for name, value in entries.items() if name in ENTRIES}
    if others := {name: value for name, value in entries.items() if name not in ENTRIES}:
        state_dict["state"][saved["params"][0]] = others
    order = _order(holdings.groups[0].get("param_names"), saved, len(sizes))
    if order is not None and own:
        with naming("the state of the checkpoint"):
            _unpack(fresh, own, _places(order, sizes))
    for name, value in fresh.items():
        check_writable(memory[name], f"the optimizer's own {name}", tuple(value.shape), value)
    prepared = holdings.prepare_load(state_dict, strict, hyperparameters)

    @torch.no_grad()
    def write_with_memory() -> None:
        prepared.write()
        if order is not None:
            for name, value in fresh.items():
                memory[name].copy_(value)

    return prepared._replace(targets=[*prepared.targets, *memory.values()], write=write_with_memory)


@naming("the state dict", passing=(ValueError, TypeError))
def _order(ours: Sequence[str] | None, saved: Mapping[str, Any], count: int) -> list[int] | None:
    """Which of the checkpoint's parameters each of our ``count`` is; None if they are not the same ones."""
    theirs = group_names(saved)
    places = {param: place for place, param in reversed([*enumerate(saved["params"])])}
    if ours is None or theirs is None:
        return list(range(count)) if len(places) == count else None
    theirs = [theirs[place] for place in sorted(places.values())]
    ours, theirs = numbered(canonical_names(ours)), numbered(canonical_names(theirs))
    return [theirs.index(name) for name in ours] if sorted(ours) == sorted(theirs) else None


def _places(order: Sequence[int], sizes: Sequence[int]) -> list[slice]:
    """Where in the checkpoint's vectors the numbers of each of our parameters are."""
    theirs = [0] * len(order)
    for position, size in zip(order, sizes, strict=True):
        theirs[position] = size
    ends = list(itertools.accumulate(theirs))
    return [slice(ends[position] - theirs[position], ends[position]) for position in order]


def _unpack(fresh: Mapping[str, Tensor], entries: Mapping[str, Any], places: Sequence[slice]) -> None:
    """Fill ``fresh`` from the state of torch.optim.LBFGS or of this package; ``places`` are as :func:`_places` says."""
    _require(entries, COUNTS)
    counts = {name: _count(entries[name], name) for name in COUNTS}
    for name, count in counts.items():
        fresh[name].fill_(count)
    if not counts["n_iter"]:
        return
    _require(entries, (*VECTORS, *NUMBERS, *HISTORY, "H_diag"))
    like = fresh["d"]
    for name in VECTORS:
        fresh[name].copy_(_vector_of(entries[name], name, like, places))
    for name in NUMBERS:
        fresh[name].copy_(_number(entries[name], name, like))
    steps, changes = (_history_of(entries[name], name, like, places) for name in HISTORY)
    if len(steps) != len(changes):
        raise Unloadable("old_stps and old_dirs of the checkpoint must be equally long")
    scale = _number(entries["H_diag"], "H_diag", like)
    exact = plain(entries.get("exact", {}), "exact")
    if "n_iter" not in exact or _count(exact["n_iter"], "n_iter of exact") != counts["n_iter"]:
        restore(fresh, steps, changes, steps @ changes.t(), scale)  # torch.optim carries our own entry along unchanged
        return
    _require(exact, ("products", "pairs"))
    products = as_buffer(exact["products"], "products", (len(steps), len(steps)), like.dtype).to(like)
    restore(fresh, steps, changes, products, scale, _count(exact["pairs"], "pairs"))


def _vector_of(value: Any, name: str, like: Tensor, places: Sequence[slice]) -> Tensor:
    """A vector of the checkpoint, with its pieces in the order of our parameters."""
    vector = as_buffer(value, f"{name} of the checkpoint", tuple(like.shape), like.dtype).to(like)
    return torch.cat([vector[place] for place in places])


def _history_of(value: Any, name: str, like: Tensor, places: Sequence[slice]) -> Tensor:
    """Vectors of the checkpoint, the oldest first, as the rows of a matrix."""
    vectors = plain(value, name)
    if not isinstance(vectors, list):
        raise Unloadable(f"{name} of the checkpoint is not a list")
    rows = [_vector_of(v, name, like, places) for v in vectors]
    return torch.stack(rows) if rows else like.new_empty(0, len(like))


def _require(entries: Mapping[str, Any], names: Sequence[str]) -> None:
    if absent := [name for name in names if entries.get(name) is None]:
        raise Unloadable(f"the checkpoint has no {', '.join(absent)}")


def _count(value: Any, name: str) -> int:
    number = as_number(value, f"{name} of the checkpoint")
    if not (number.is_integer() and 0 <= number < 2**63):
        raise Unloadable(f"{name} of the checkpoint is {number}, not a count")
    return int(number)


def _number(value: Any, name: str, like: Tensor) -> Tensor:
    """A number of the checkpoint; infinite or NaN if the run had such a loss."""
    return like.new_tensor(as_number(value, f"{name} of the checkpoint", finite=False))
