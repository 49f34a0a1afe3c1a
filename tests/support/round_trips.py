"""What a value is after it was written and read, or copied: for optimizers, and for what they give to checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import compiled_optim as co


def through_a_file(value: Any, *_: Any, weights_only: bool = True) -> Any:
    """Return what ``torch.save`` and ``torch.load`` make of it, by default as users should load checkpoints."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def through_a_folder(saved: Any, target: Any, path: Any) -> Any:
    """Return what torch.distributed.checkpoint reads for the optimizers ``target`` of what it wrote below ``path``."""
    dcp.save(saved, checkpoint_id=path, no_dist=True)
    loaded = co.named_state_dict(target)
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    return loaded


def pickled(value: Any) -> Any:
    """Return a copy by :mod:`pickle`."""
    return pickle.loads(pickle.dumps(value))


COPIES = {"deepcopy": copy.deepcopy, "pickle": pickled}
copied = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
"""Runs a test with each way to copy."""
