"""A checkpoint of a training run, resumed by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from .training import Training


@dataclass(frozen=True)
class Resumption:
    """How a checkpoint was resumed.

    Attributes:
        step: after how many steps.
        names: the parameters whose state was found again, in the new optimizer's order.
        moved: how many of them have another position in the new optimizer than in the old.
    """

    step: int
    names: tuple[str, ...]
    moved: int


def save(training: Training, path: Path) -> None:
    """Write model, optimizer and schedule to ``path``."""
    saved = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
    }
    torch.save(saved, path)


def resume(path: Path, steps: int) -> tuple[Training, Resumption]:
    """A new training of ``steps`` steps that goes on from ``path``, its optimizer's parameters in the opposite order.

    Raises:
        RuntimeError: a value of the optimizer's state did not arrive at the parameter it was saved for.
    """
    saved = torch.load(path, weights_only=True)
    training = Training(steps, backwards=True)
    training.model.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    training.scheduler.load_state_dict(saved["scheduler"])
    before, after = _saved_state(saved["optimizer"]), _live_state(training.optimizer)
    _verify(before, after)
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    return training, Resumption(training.scheduler.last_epoch, tuple(after), moved)


def _saved_state(state_dict: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: state_dict["state"][index]
        for group in state_dict["param_groups"]
        for name, index in zip(group["param_names"], group["params"], strict=True)
    }


def _live_state(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    return {
        name: optimizer.state[parameter]
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }


def _verify(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> None:
    if before.keys() != after.keys():
        raise RuntimeError(f"saved and resumed parameters differ: {', '.join(sorted(before.keys() ^ after.keys()))}")
    for name, state in before.items():
        wrong = [key for key in state.keys() | after[name].keys() if not torch.equal(state[key], after[name][key])]
        if wrong:
            raise RuntimeError(f"'{name}' was resumed with another {', '.join(sorted(wrong))} than was saved for it")
