"""Conversion of checkpoint files between this package and others, without the model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from compiled_optim.groups.parameters import first_few
from compiled_optim.interop import (
    bitsandbytes,
    dcp,
    deepspeed,
    flashoptim,
    forms,
    fused_adam,
    optimi,
    safetensors_files,
    torch_files,
)
from compiled_optim.interop.forms import MOST_KEYS, check_alone, check_extent, check_lossless, checked
from compiled_optim.interop.replace_files import Keep, Writers, check_replaceable, keeper, put


class Container(NamedTuple):
    """A kind of file or folder: a test for it, its reader, and its writers if it is written."""

    matches: Callable[[Path], bool]
    read: Callable[[Path, str | None, Path | None], Any]
    writers: Callable[[Any, Path], Writers] | None


class Layout(NamedTuple):
    """Another package's layout of state dicts: a test for it, its conversion to this package's, and back."""

    matches: Callable[[Mapping[str, Any]], bool]
    decode: Callable[..., dict[str, Any]]
    encode: Callable[[Mapping[str, Any], Keep], Any] | None


class Converted(NamedTuple):
    """A summary of a conversion: the ``form`` of the source, and its numbers of ``parameters`` with state and ``groups``."""

    form: str
    parameters: int
    groups: int


CONTAINERS = {
    "dcp": Container(dcp.matches, dcp.read, dcp.writers),
    "deepspeed": Container(deepspeed.matches, deepspeed.read, None),
    "safetensors": Container(safetensors_files.matches, safetensors_files.read, safetensors_files.writers),
    "torch": Container(lambda path: not path.is_dir(), torch_files.read, torch_files.writers),
}
"""The kinds by name of their form. The first one that matches a path reads it."""

LAYOUTS = {
    "optimi": Layout(optimi.matches, optimi.decode, optimi.encode),
    "bitsandbytes": Layout(bitsandbytes.matches, bitsandbytes.decode, bitsandbytes.encode),
    "flashoptim": Layout(flashoptim.matches, flashoptim.decode, None),
    "fused": Layout(fused_adam.matches, fused_adam.decode, fused_adam.encode),
}

WRITTEN: dict[str, Callable[[dict[str, Any], Keep], Any]] = {
    "torch": forms.for_torch,
    "compiled_optim": forms.for_us,
    "named": forms.for_names,
    "safetensors": safetensors_files.content_of,
    "dcp": dcp.content_of,
    **{name: layout.encode for name, layout in LAYOUTS.items() if layout.encode},
}
"""The forms that are written, each with the function that converts a state dict to its content."""

_WHOLE = ("compiled_optim", "named")
"""The forms that keep entries beside the state and the groups."""

READ = ("torch", *LAYOUTS, *(name for name in CONTAINERS if name != "torch"))
"""The forms that are read. ``"torch"`` is also this package's form."""


def read(
    path: str | os.PathLike[str],
    key: str | None = None,
    *,
    form: str | None = None,
    lossy: bool = False,
    scratch: Path | None = None,
    usual: Collection[str] = (),
) -> dict[str, Any]:
    """Return the state dict in a file or folder, with this package's names and meaning, on the CPU.

    Args:
        path: a file of ``torch.save``, one of safetensors with the ``.json`` of its groups beside it, a folder of
            torch.distributed.checkpoint, or a universal checkpoint of DeepSpeed.
        key: the state dict's key in a file of several things; in a folder, the prefix of its keys.
        form: one of :data:`READ`. By default it is detected.
        lossy: leave out entries that cannot be read.
        scratch: a directory. With it tensors are not read into memory, but mapped from the file or from files there.
        usual: keys to try in a file of several things if ``key`` is None. The first one that exists is used.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, holds objects other than tensors and plain values, or holds no optimizer's state.
    """
    return _read(Path(path), key, form, lossy, scratch, usual)[1]


def _read(
    path: Path, key: str | None, form: str | None, lossy: bool, scratch: Path | None, usual: Collection[str] = ()
) -> tuple[str, dict[str, Any]]:
    if form is not None and form not in READ:
        raise ValueError(f"form must be one of {', '.join(READ)}, got {form!r}")
    container, state_dict = read_stored(path, key, scratch, usual)
    if form in CONTAINERS and form != container:
        raise ValueError(f"{path} is in the form {container}, not {form}")
    layout = layout_of(state_dict) if form is None else form if form in LAYOUTS else None
    try:
        state_dict = LAYOUTS[layout].decode(state_dict, keeper(scratch), lossy=lossy) if layout else state_dict
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return layout or container, state_dict


def read_stored(
    path: Path, key: str | None = None, scratch: Path | None = None, usual: Collection[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the name of the container at ``path``, and the state dict in it as it is stored."""
    kind = next((name for name, container in CONTAINERS.items() if container.matches(path)), None)
    if kind is None:
        raise ValueError(f"{path} is a folder, and neither a checkpoint of torch.distributed nor DeepSpeed's universal one")
    content, where = CONTAINERS[kind].read(path, key, scratch), str(path)
    is_one = not isinstance(content, Mapping) or {"state", "param_groups"} <= {*content}
    if not is_one and key is None and (inner := [each for each in usual if each in content]):
        content, where, is_one = content[inner[0]], f"{path}, under {inner[0]!r}", True
    try:
        check_extent(content, sum(each.stat().st_size for each in (path, *path.rglob("*")) if each.is_file()))
        return kind, checked(content, keeper(scratch))
    except ValueError as error:
        hint = "" if is_one else f"; it holds {first_few(map(repr, content), MOST_KEYS)}: choose by key (--key)"
        raise ValueError(f"{where}: {error}{hint}") from error


def layout_of(state_dict: Mapping[str, Any]) -> str | None:
    """Return the name of another package's layout that ``state_dict`` has, or None."""
    return next((name for name, layout in LAYOUTS.items() if layout.matches(state_dict)), None)


def write(state_dict: Mapping[str, Any], path: str | os.PathLike[str], form: str, *, scratch: Path | None = None) -> None:
    """Write ``state_dict``, of any form, to a file or folder; a failure leaves every file as it was.

    Args:
        state_dict: with this package's names, or in a layout that :func:`read` knows.
        path: the file, or for ``"dcp"`` the folder.
        form: one of :data:`WRITTEN`. ``"torch"``, ``"compiled_optim"``, ``"optimi"``, ``"bitsandbytes"`` and ``"fused"`` are
            for the ``load_state_dict`` of that package. ``"named"`` and ``"dcp"`` need parameter names, ``"safetensors"``
            does not.
        scratch: a directory for files of large tensors that the conversion makes.

    Raises:
        OSError: the file cannot be written.
        ValueError: ``form`` is unknown or cannot hold the state, or ``path`` exists and is not a file with an optimizer's
            state alone.
    """
    path = Path(path)
    if form not in WRITTEN:
        raise ValueError(f"form must be one of {', '.join(WRITTEN)}, got {form!r}")
    keep = keeper(scratch)
    state_dict = checked(state_dict, keep)
    check_lossless(state_dict)
    layout = layout_of(state_dict)
    decoded = LAYOUTS[layout].decode(state_dict, keep, lossy=False) if layout else state_dict
    content = forms.indexed(state_dict) if layout == form == "optimi" else WRITTEN[form](decoded, keep)
    files = (CONTAINERS[form if form in CONTAINERS else "torch"].writers or torch_files.writers)(content, path)
    check_alone(state_dict, kept=content if form in _WHOLE else ())
    for target in files:
        check_replaceable(target, partial(_check_kind, target != path, scratch))
    try:
        put(files)
    except OSError as error:
        raise OSError(f"{path} cannot be written, and is as it was ({error.strerror or error})") from error


def _check_kind(is_beside: bool, scratch: Path | None, path: Path) -> None:
    """Raise ``ValueError`` unless a file holds an optimizer's state alone, or if it ``is_beside``, groups alone."""
    check_alone(safetensors_files.read_groups(path) if is_beside else read_stored(path, scratch=scratch)[1])


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    form: str | None = None,
    key: str | None = None,
    lossy: bool = False,
) -> Converted:
    """Convert a file or folder of optimizer state to another form, with about one tensor at a time in memory.

    The target appears complete or not at all, and may be the source if that is a file. Nothing in a file is executed.

    Args:
        source: as for :func:`read`.
        target: as for :func:`write`.
        to: one of :data:`WRITTEN`.
        form: the form of ``source``, one of :data:`READ`. By default it is detected.
        key: as for :func:`read`.
        lossy: leave out entries that cannot be read, such as FlashOptim's ``error_bits``, instead of an error.

    Returns:
        The form of the source, and its numbers of parameters and groups.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: as :func:`read` and :func:`write`. The message names the parameter or option.
    """
    target = Path(target)
    if to not in WRITTEN:
        raise ValueError(f"to must be one of {', '.join(WRITTEN)}, got {to!r}")
    if Path(os.path.realpath(source)) in Path(os.path.realpath(target)).parents and Path(source).is_dir():
        raise ValueError(f"{target} is in the folder {source}, which is only read")
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".convert-", dir=target.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise OSError(f"{target} cannot be written ({error.strerror or error})") from error
    with scratch as directory:
        detected, state_dict = _read(Path(source), key, form, lossy, Path(directory))
        write(state_dict, target, to, scratch=Path(directory))
    return Converted(detected, len(state_dict["state"]), len(state_dict["param_groups"]))
