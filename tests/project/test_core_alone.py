"""The core without the wings, as WINGS names them: a copy of the package from which their folders are deleted."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from test_layout import ROOT, WINGS

import compiled_optim as co

TESTS = ROOT / "tests"
OTHERS = WINGS | {"project", "scenarios", "trainers"}
"""Folders of tests that are not about the core."""
CORE = sorted({path.parent.name for path in TESTS.glob("*/test_*.py")} - OTHERS)

SIMULATED = "compiles or launches on a GPU that is not there"
OTHER = "continues from an optimizer of torch"
MODEL = "trains a model of perf, whose workloads have the shapes of the simulated GPU's"
NEED_A_WING = {
    "checkpoint/test_options.py::test_an_option_of_others_that_changes_steps_is_refused": OTHER,
    "groups/test_rules.py::test_compiled_step_of_a_gpt_is_one_graph_over_a_schedule": MODEL,
    "groups/test_waits.py": SIMULATED,
    "lowering/test_blocks.py::test_tables_of_billions_of_elements_are_made_at_once": SIMULATED,
    "lowering/test_code_for_gpus.py": SIMULATED,
    "lowering/test_cuda_graphs.py": SIMULATED,
    "lowering/test_handling.py": SIMULATED,
    "lowering/test_kernel_stacks.py": SIMULATED,
    "lowering/test_launches.py": SIMULATED,
    "lowering/test_lists.py": SIMULATED,
    "lowering/test_lowering_report.py": SIMULATED,
    "lowering/test_reading_speed.py": SIMULATED,
    "lowering/test_sparse_adam.py::test_accelerators_sort_the_entries_of_a_row": SIMULATED,
    "lowering/test_stacks_on_gpu.py": SIMULATED,
    "lowering/test_stored_in_triton.py": SIMULATED,
    "lowering/test_sums_in_triton.py": SIMULATED,
    "lowering/test_symmetric.py::test_it_compiles_for_tensor_cores_without_spills": SIMULATED,
    "lowering/test_symmetric.py::test_loops_take_it_for_large_matrices_with_aligned_rows": SIMULATED,
    "memory/test_addresses.py::test_the_offsets_are_those_of_real_tensors_in_every_mode": SIMULATED,
    "optimizers/test_contribution.py": SIMULATED,
    "reports/test_explain.py::test_it_does_not_wait_for_a_device": SIMULATED,
    "step/test_inlined_code.py": SIMULATED,
    "lowering/test_outputs.py::test_a_word_of_changed_bits_is_loaded_and_stored_once": SIMULATED,
    "step/test_looks.py": SIMULATED,
    "step/test_resumed.py::test_a_step_asks_once_whether_a_graph_is_captured": SIMULATED,
}
"""Files and functions in the core's folders of tests that need a wing, and why; the copy's tests are without them."""

RUN_A_FILE = {ROOT / "perf" / "no_device.py"}
"""Modules that run a file of a wing, which they do not import."""

SAMPLE = ("step/test_step.py", "groups/test_groups.py", "checkpoint/test_several.py")
"""Files of a few seconds."""
IMPORTS = """
import importlib, pkgutil, sys
import compiled_optim
assert compiled_optim.__file__.startswith(sys.argv[1]), compiled_optim.__file__
names = [m.name for m in pkgutil.walk_packages(compiled_optim.__path__, "compiled_optim.") if m.name[-9:] != ".__main__"]
for name in names:
    importlib.import_module(name)
assert len(names) > 90
for name in sys.argv[2:]:
    try:
        importlib.import_module(f"compiled_optim.{name}")
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
"""
REFUSAL = """
import torch, compiled_optim as co
group = {"params": [0], "lr": 0.1, "setup": True, "gradient_release": False, "kahan_sum": False}
optimizer = co.SGD([torch.nn.Parameter(torch.ones(2))])
for strict in (True, False):
    try:
        optimizer.load_state_dict({"state": {}, "param_groups": [group]}, strict=strict)
    except ValueError as error:
        assert "optimi saved the state dict, and compiled_optim.interop, which reads it, is absent" in str(error), error
        continue
    raise AssertionError("it was loaded")
"""
FORGET = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in getattr(each, "__module__", "")]
"""
"""Makes a process find no module where an installation for development keeps the complete package."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout without the wings and their tests."""
    copied = tmp_path_factory.mktemp("core")
    for folder in ("compiled_optim", "perf", "tests", "tools"):
        shutil.copytree(ROOT / folder, copied / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", copied)
    (copied / "sitecustomize.py").write_text(FORGET)
    for path in [*(f"compiled_optim/{wing}" for wing in WINGS), *(f"tests/{folder}" for folder in OTHERS)]:
        shutil.rmtree(copied / path, ignore_errors=True)
    return copied


def _run(checkout: Path, *arguments: str, seconds: float) -> str:
    """Run Python, which must succeed, in a copy. Return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def _run_tests(checkout: Path, *arguments: str, seconds: float) -> None:
    """Run the core's tests, or those that are named."""
    without = [f"--{'deselect' if '::' in name else 'ignore'}=tests/{name}" for name in NEED_A_WING]
    _run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", *without, *arguments, seconds=seconds)


def test_the_core_is_imported_without_the_wings(checkout: Path) -> None:
    _run(checkout, "-c", IMPORTS, str(checkout), *WINGS, seconds=240)


def test_without_the_wing_a_state_dict_of_another_package_is_refused_by_name(checkout: Path) -> None:
    _run(checkout, "-c", REFUSAL, seconds=240)


def test_the_core_works_without_the_wings(checkout: Path) -> None:
    _run_tests(checkout, "--quick", *(f"tests/{name}" for name in SAMPLE), seconds=240)


@pytest.mark.full
@pytest.mark.parametrize("folder", CORE)
def test_the_core_passes_its_tests_without_the_wings(folder: str, checkout: Path) -> None:
    """Those that a run of all tests takes without ``--full``."""
    _run_tests(checkout, "-o", f"testpaths=tests/{folder}", seconds=600)


def test_no_other_test_of_the_core_needs_a_wing() -> None:
    needing = set()
    for path in [path for folder in CORE for path in (TESTS / folder).glob("test_*.py")]:
        name, (top, functions) = str(path.relative_to(TESTS)), _statements(path)
        needing |= {name} if _needs_a_wing(top, path, {path}) else set()
        needing |= {f"{name}::{each.name}" for each in functions if _needs_a_wing([each], path, {path})}
    assert needing == {*NEED_A_WING}


@functools.cache
def _statements(path: Path) -> tuple[list[ast.stmt], list[ast.FunctionDef | ast.ClassDef]]:
    """The statements of a module that run when it is imported, and its functions and classes."""
    body = ast.parse(path.read_text()).body
    functions = [each for each in body if isinstance(each, (ast.FunctionDef, ast.ClassDef))]
    return [each for each in body if each not in functions], functions


OF_WINGS = {name for name, module in co._LAZY.items() if module.split(".")[1] in WINGS}
"""The public names that are imported from a wing when they are used."""


def _needs_a_wing(statements: Iterable[ast.stmt], path: Path, seen: set[Path]) -> bool:
    """Whether statements of a file use a name of a wing, or import a wing or a file of the checkout that does."""
    nodes = [node for each in statements for node in ast.walk(each)]
    if any(isinstance(n, ast.Attribute) and n.attr in OF_WINGS and ast.unparse(n.value) == "co" for n in nodes):
        return True
    for name in _imported(statements):
        parts = name.split(".")
        if parts[0] == "compiled_optim":
            if parts[1:] and parts[1] in WINGS:
                return True
            continue
        for file in {*_files(parts, path.parent)} - seen:
            seen.add(file)
            if file in RUN_A_FILE or _needs_a_wing(_statements(file)[0], file, seen):
                return True
    return False


def _imported(statements: Iterable[ast.stmt]) -> Iterator[str]:
    for node in (node for each in statements for node in ast.walk(each)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(parts: list[str], beside: Path) -> Iterator[Path]:
    """The file of a module that tests find by its name."""
    for folder in (beside, ROOT, TESTS, TESTS / "support", ROOT / "tools"):
        module = folder.joinpath(*parts)
        yield from filter(Path.is_file, (module.with_suffix(".py"), module / "__init__.py"))
