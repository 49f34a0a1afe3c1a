"""Names of torch that no release promises: where the package uses them, and that this torch has them."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import compiled_optim as co
from compiled_optim.memory import torch_compiler, torch_internals

PACKAGE = Path(co.__file__).parent
IN_ONE_PLACE = [Path(module.__file__) for module in (torch_compiler, torch_internals)]

ELSEWHERE = {
    ("torch.utils._pytree", "capture/run_function.py"),
    ("torch.nn.modules.conv._ConvNd", "model.py"),
}
"""Names that other modules use: a module without a public name, and what all classes of convolutions derive from."""

ATTRIBUTES: dict[str, Any] = {
    "_cdata": torch.Tensor,
    "_indices": torch.Tensor,
    "_is_zerotensor": torch.Tensor,
    "_nnz": torch.Tensor,
    "_post_accumulate_grad_hooks": torch.Tensor,
    "_local_tensor": DTensor,
    "_spec": DTensor,
    "_apply": nn.Module,
    "_parameters": nn.Linear(1, 1),
    "_optimizer_load_state_dict_post_hooks": torch.optim.SGD(nn.Linear(1, 1).parameters()),
    "_optimizer_load_state_dict_pre_hooks": torch.optim.SGD(nn.Linear(1, 1).parameters()),
    "_optimizer_state_dict_post_hooks": torch.optim.SGD(nn.Linear(1, 1).parameters()),
    "_optimizer_state_dict_pre_hooks": torch.optim.SGD(nn.Linear(1, 1).parameters()),
}
"""Attributes of torch's objects that modules elsewhere read."""

NOT_THERE_IN_ALL_BUILDS = ("torch._C._cuda_",)
"""Asked for only where there is a GPU."""


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    """All modules, but for the devices that stand for others: these imitate torch's insides, with the torch of the tests."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "simulated"]
    return {path: ast.parse(path.read_text()) for path in paths}


def _private_names(tree: ast.Module) -> Iterator[str]:
    """The names below ``torch`` that have a part with an underscore, but for operations on lists, which torch documents."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"(torch|nn)\.[\w.]+", written := ast.unparse(node)):
            found.add(re.sub("^nn", "torch.nn", written))
    for name in sorted(found):
        parts = name.split(".")
        if any(part.startswith("_") and not part.startswith(("__", "_foreach_")) for part in parts):
            yield name


def _used_in_one_place() -> list[str]:
    return [
        name
        for path in IN_ONE_PLACE
        for name in _private_names(_trees()[path])
        if not name.startswith(NOT_THERE_IN_ALL_BUILDS)
    ]


def test_private_names_of_torch_are_used_in_one_place() -> None:
    used = {
        (name, str(path.relative_to(PACKAGE)))
        for path, tree in _trees().items()
        if path not in IN_ONE_PLACE
        for name in _private_names(tree)
    }
    assert used == ELSEWHERE


@pytest.mark.parametrize("name", [*sorted({name for name, _ in ELSEWHERE}), *_used_in_one_place()])
def test_this_torch_has_a_private_name(name: str) -> None:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):  # a module in a package need not be imported with it
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives to what it defines, also attributes that it writes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in ATTRIBUTES:
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def test_private_attributes_of_torch_are_known() -> None:
    own = {name for tree in _trees().values() for name in _defined(tree)}
    used = {
        node.attr
        for path, tree in _trees().items()
        if path not in IN_ONE_PLACE
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith(("__", "_foreach_"))
    }
    assert used - own - {"_ConvNd", "_Unpickler", "_asdict", "_fields", "_replace"} == ATTRIBUTES.keys()


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_this_torchs_objects_have_a_private_attribute(name: str) -> None:
    assert hasattr(ATTRIBUTES[name], name) or name in ATTRIBUTES[name].__annotations__ or name in ATTRIBUTES[name].__slots__
