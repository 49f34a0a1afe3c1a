"""Universal checkpoints of DeepSpeed, a folder for each parameter; read only, since they hold the model too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from compiled_optim.interop import torch_files
from compiled_optim.interop.forms import UNORDERED

_GROUPS, _MODEL = "optimizer_state.pt", "mp_rank_00_model_states.pt"
_WEIGHTS = "fp32"  # here ``master_param``, the float32 copies of parameters in fewer bits


def matches(path: Path) -> bool:
    """Return whether ``path`` is a universal checkpoint, or the folder of its parameters."""
    return (path / "zero" / _GROUPS).is_file() or (path / _GROUPS).is_file()


def read(path: Path, key: str | None = None, scratch: Path | None = None) -> dict[str, Any]:
    """Return the state dict in a universal checkpoint. The file of the model beside it tells the order of the parameters,
    and the parameters of each of several groups.

    Raises:
        OSError: a file cannot be read.
        ValueError: one is damaged, or the checkpoint is not complete.
    """
    if key is not None:
        raise ValueError(f"{path} has no entry {key!r}")
    folder = path / "zero" if (path / "zero").is_dir() else path
    names = sorted(each.name for each in folder.iterdir() if each.is_dir())
    groups = _list(torch_files.read(folder / _GROUPS), "param_groups", folder / _GROUPS)
    state: dict[str, dict[str, Any]] = {name: {} for name in names}
    for file in sorted(folder.glob("*/*.pt")):
        value = torch_files.read(file, scratch=scratch)
        is_step = file.stem == "step"
        entry = "master_param" if file.stem == _WEIGHTS else file.stem
        state[file.parent.name][entry] = value if is_step else _tensor(value, file)
    model = folder.parent / _MODEL
    if len(groups) == 1 and not model.exists():
        return {"state": state, "param_groups": [{**groups[0], "params": names}], UNORDERED: True}
    listed = [[*shapes] for shapes in _list(torch_files.read(model, scratch=scratch), "param_shapes", model)]
    if len(listed) != len(groups) or sorted(name for group in listed for name in group) != names:
        raise ValueError(f"{model} has other parameters or groups than {folder}")
    return {"state": state, "param_groups": [{**g, "params": params} for g, params in zip(groups, listed, strict=True)]}


def _list(content: Any, key: str, path: Path) -> list[Any]:
    entry = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entry, list):
        raise ValueError(f"{path} has no list {key!r}")
    return entry


def _tensor(content: Any, path: Path) -> Tensor:
    tensor = content.get("param") if isinstance(content, dict) else None
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path} has no tensor 'param'")
    return tensor
