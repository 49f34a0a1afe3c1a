"""Files of optimizer state: torch's, and safetensors for the state with JSON for the groups.

Nothing that a file holds is ever executed. A file takes the place of another only when it is complete, and only if the other
held an optimizer's state too. ``python tools/checkpoint_files.py`` is ``tools/convert`` in the environment at hand.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_forms import check_lossless, indexed, plain, with_steps
from convert_options import FORMS, parse
from torch import Tensor

import compiled_optim as co
from compiled_optim.checkpoint.optimi import from_optimi, is_optimi, to_optimi
from compiled_optim.checkpoint.read import check, foreign_state, group_names, named, refuse_foreign
from compiled_optim.rule.storage import INT8, PARTS, scale_name


def read(path: Path, key: str | None = None) -> dict[str, Any]:
    """The state dict in a file, on the CPU and in memory: the file may be replaced afterwards.

    Args:
        path: a file of ``torch.save``, or of safetensors with the ``.json`` of its groups beside it.
        key: where the file holds a dict of several things, the state dict's key.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, holds objects other than tensors and plain values, or holds no optimizer's state.
    """
    content = _read_safetensors(path) if _is_safetensors(path) else _read_torch(path)
    if key is not None:
        if not isinstance(content, Mapping) or key not in content:
            raise ValueError(f"{path} has no entry {key!r}")
        content = content[key]
    try:
        return _state_dict(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write(state_dict: Mapping[str, Any], path: Path, form: str) -> None:
    """Write ``state_dict``, of any form, to a file; a failure leaves every file as it was.

    ``"torch"``, ``"compiled_optim"`` and ``"optimi"`` are indexed, for the ``load_state_dict`` of that package; ``"named"``
    and ``"safetensors"`` have parameter names, the latter also without.

    Raises:
        OSError: the file cannot be written.
        ValueError: ``form`` is unknown, the state has no counterpart in it, or a file is in the way that holds no
            optimizer's state.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    state_dict = _state_dict(state_dict)
    check_lossless(state_dict)
    if is_optimi(state_dict) and form != "optimi":
        state_dict = from_optimi(state_dict)
    if form == "safetensors":
        files = _safetensors_files(state_dict, path)
    else:
        files = {path: partial(_save_torch, _torch_content(state_dict, form))}
    for target in files:
        _check_replaceable(target, read if target == path else _read_groups)
    try:
        _put(files)
    except OSError as error:
        raise OSError(f"{path} cannot be written, and is as it was ({error.strerror or error})") from error


def _state_dict(content: Any) -> dict[str, Any]:
    content = plain(content)
    check(content)
    return dict(content)


def _is_safetensors(path: Path) -> bool:
    """Whether the file begins like one of safetensors: the length of its header, in eight bytes, and a JSON object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _read_torch(path: Path) -> Any:
    try:
        if zipfile.is_zipfile(path):  # torch.load does not compare the checksums
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise ValueError(f"the checksum of {damaged} is wrong")
        with path.open("rb") as file:  # for a path, torch.load goes by its suffix
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a parser meets in arbitrary bytes
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a damaged archive points outside of itself
            raise
        raise ValueError(
            f"{path} is damaged, or holds something else than tensors and plain values, which is not loaded "
            f"({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    """The line of a message that says what is wrong. torch.load begins with advice to load the file unsafely."""
    text = str(error).strip()
    return (text.partition("WeightsUnpickler error: ")[2] or text).partition("\n")[0] or type(error).__name__


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    sidecar = path.with_suffix(".json")
    content = _read_groups(sidecar)
    try:
        with safe_open(path, framework="pt") as file:  # maps the file: a clone stays when that is replaced
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except OSError:
        raise
    except Exception as error:  # whatever a parser meets in arbitrary bytes
        raise ValueError(f"{path} is damaged ({_reason(error)})") from error
    params = {str(p): p for group in content["param_groups"] for p in group["params"]}
    state: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        param, _, entry = name.rpartition(".")
        if param not in params:
            raise ValueError(f"{path} holds {name!r}, but {sidecar} has no parameter {param!r}")
        state.setdefault(params[param], {})[entry] = tensor
    return {**content, "state": state}


def _read_groups(path: Path) -> dict[str, Any]:
    """A state dict without its state, from the JSON beside a file of safetensors."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _state_dict({**content, "state": {}} if isinstance(content, dict) else content)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or not the groups of an optimizer ({error})") from error


def _optimizers() -> list[type[co.CompiledOptimizer]]:
    exported = (getattr(co, name) for name in co.__all__)
    return [kind for kind in exported if isinstance(kind, type) and issubclass(kind, co.CompiledOptimizer)]


def _torch_content(state_dict: Mapping[str, Any], form: str) -> dict[str, Any]:
    """What a file of ``torch.save`` holds."""
    if form == "optimi":
        return indexed(state_dict) if is_optimi(state_dict) else to_optimi(indexed(state_dict), *_optimizers())
    if form == "named":
        return named(with_steps(state_dict, torch.float64))
    if form == "compiled_optim":
        return indexed(with_steps(state_dict, torch.float64))
    for i, group in enumerate(state_dict["param_groups"]):
        if others := [key for key in ("decouple_lr", "decouple_wd") if group.get(key)]:
            raise ValueError(f"param_groups[{i}] has {others[0]}={group[others[0]]}, which torch.optim has not")
    content = indexed(with_steps(state_dict, torch.float32))
    apart = foreign_state(content)
    for param, entries in ((key, value) for key, value in content["state"].items() if key not in apart):
        if others := [
            name for name in entries if name in PARTS or scale_name(str(name).removesuffix(f"_{INT8}")) in entries
        ]:
            raise ValueError(
                f"the state of {param!r} has {others[0]!r} in a form that torch.optim has not; load it into an optimizer "
                "of compiled_optim without weights and state_dtype, whose state torch.optim loads"
            )
    return {"state": content["state"], "param_groups": content["param_groups"]}


def _save_torch(content: Any, path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's writer hides what the system said
            raise OSError("it could not be written completely") from error


def _safetensors_files(state_dict: Mapping[str, Any], path: Path) -> dict[Path, Callable[[Path], object]]:
    """How to write the groups, and the state."""
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors, since the groups go to the .json beside it")
    refuse_foreign(state_dict, "safetensors")
    has_names = all(group_names(group) is not None for group in state_dict["param_groups"])
    state_dict = with_steps(named(state_dict) if has_names else state_dict, torch.float64)
    tensors = {
        _tensor_name(param, entry): _tensor(value, f"the state {entry!r} of {param!r}")
        for param, entries in state_dict["state"].items()
        for entry, value in entries.items()
        if value is not None
    }
    numbers = {key: value for key, value in state_dict.items() if key != "state"}
    text = json.dumps(numbers, indent=1, default=_json_value) + "\n"
    return {
        path.with_suffix(".json"): partial(Path.write_text, data=text, encoding="utf-8"),
        path: partial(_save_safetensors, tensors),
    }


def _tensor_name(param: int | str, entry: int | str) -> str:
    if "." in str(entry):
        raise ValueError(f"the state {entry!r} of {param!r} has a dot in its name, by which safetensors would take it apart")
    return f"{param}.{entry}"


def _tensor(value: Any, where: str) -> Tensor:
    """``value`` as safetensors can hold it: contiguous, and sharing its memory with no other."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    if not isinstance(value, Tensor) or value.dtype == torch.complex128:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{where} is a {kind}, which safetensors cannot hold")
    return value.clone(memory_format=torch.contiguous_format)


def _save_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _json_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, torch.dtype):  # of state_dtype, which no load takes over
        return str(value)
    raise ValueError(f"a parameter group holds a {type(value).__name__}, which JSON cannot hold: {value!r}")


def _check_replaceable(path: Path, reader: Callable[[Path], object]) -> None:
    """Raise ``ValueError`` unless ``path`` is free, or a file that ``reader`` can read and its owner may write."""
    if not path.exists():
        return
    try:
        if not path.is_file():
            raise ValueError("it is no regular file")
        if not path.stat().st_mode & stat.S_IWUSR:
            raise ValueError("it is write-protected")
        reader(path.resolve())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is in the way, and not of a kind to be replaced ({error}); remove or rename it") from error


def _put(files: Mapping[Path, Callable[[Path], object]]) -> None:
    """Write new files, each by its function, and replace the old ones: by all of them, complete, or by none.

    They share a directory. All but the last are small: copies of the old ones are put back if the last cannot follow.
    """
    *others, last = files
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=last.parent) as directory:
        new = {path: Path(directory, path.name) for path in files}
        old = {path: Path(directory, f"{path.name}.old") for path in others if os.path.lexists(path)}
        for path, write_to in files.items():
            _write_durably(new[path], write_to, like=path)
        for path, copy in old.items():
            shutil.copy2(path, copy, follow_symlinks=False)
        try:
            for path in files:
                os.replace(new[path], path)
        except BaseException:
            for path in others:
                path.unlink(missing_ok=True)
            for path, copy in old.items():
                os.replace(copy, path)
            raise


def _write_durably(path: Path, write_to: Callable[[Path], object], like: Path) -> None:
    """Write a file that is on the disk when this returns, with the permissions of ``like`` if that exists."""
    path.touch()
    mode = stat.S_IMODE((like if like.exists() else path).stat().st_mode)
    write_to(path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    path.chmod(mode)


def main() -> int:
    """Convert one file; the exit status, 1 where it cannot be converted."""
    options = parse(sys.argv[1:])
    try:
        write(read(options.source, options.key), options.target, options.to)
    except (OSError, ValueError) as error:
        print(f"tools/convert: {textwrap.shorten(str(error), 1000, placeholder=' ...')}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
