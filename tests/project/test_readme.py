"""The READMEs are true: their code runs, their commands work, their links lead somewhere, their tables are fresh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from readme import INSIDE, READMES, ROOT, generated

import compiled_optim as co
from compiled_optim import rule

FIRST, *OTHERS = READMES
CHANGELOG = ROOT / "compiled_optim" / "CHANGELOG.md"
PAGES = [*READMES, ROOT / "perf" / "GPU.md", CHANGELOG]
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
UNCLEAR = re.compile(r"\b(of which|(?:that|those) of|where that|what is what|as such)\b", re.IGNORECASE)
"""Phrases that hang a fact on a sentence that has one. The second fact wants a sentence, or a noun."""


def _name(readme: Path) -> str:
    return readme.relative_to(ROOT).as_posix()


def _blocks() -> list[Any]:
    return [
        pytest.param(block, id=f"{_name(readme)}-{number}")
        for readme in READMES
        for number, block in enumerate(CODE.findall(readme.read_text()), 1)
    ]


def test_every_readme_is_known() -> None:
    listed = subprocess.run(["git", "ls-files", "*README.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {*listed.split()} == {_name(readme) for readme in READMES}


@pytest.mark.parametrize("readme", READMES, ids=_name)
def test_a_readme_is_short(readme: Path) -> None:
    assert len(readme.read_text().splitlines()) <= (200 if readme == FIRST else 100)


@pytest.mark.parametrize("readme", READMES, ids=_name)
def test_generated_parts_are_fresh(readme: Path) -> None:
    text = readme.read_text()
    assert generated(text) == text, "run python tools/readme.py"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_pages_speak_plainly(page: Path) -> None:
    assert UNCLEAR.findall(" ".join(page.read_text().split())) == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        file, _, heading = link.partition("#")
        if file.startswith("https://"):
            continue  # which tools/docs follows
        target = (page.parent / file).resolve() if file else page
        assert target.is_file(), link
        assert not heading or heading in _headings(target), link


def _headings(readme: Path) -> set[str]:
    """As links name them."""
    found = re.findall(r"^#+ (.*)$", readme.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in found}


def test_the_first_page_says_the_first_things_first() -> None:
    """On one screen: tables with their conditions, two commands, ten lines of use. Capture has its own page."""
    text = FIRST.read_text()
    screen = text.splitlines()[:50]
    assert [line for line in screen if line.startswith("    ") and line.strip()][:2] == [
        "    pip install .",
        "    tools/run",
    ]
    assert len(CODE.findall("\n".join(screen))[0].split("\n\n", 1)[1].splitlines()) <= 10
    assert re.search(r"GPU: NVIDIA \w+ .*revision \w+.* CPU: .*revision \w+", " ".join("\n".join(screen).split()))
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles.index("Differences from torch.optim") < 4


def test_all_that_a_rule_is_written_with_is_explained() -> None:
    page = (ROOT / "compiled_optim" / "rule" / "README.md").read_text()
    code = " ".join(re.findall(r"`([^`\n]+)`", page.replace("```", "")))
    assert {*rule.__all__} - {*re.findall(r"\w+", code)} == {"Number"}  # a type, which the example has


def test_the_first_page_links_all_but_those_that_the_package_links() -> None:
    package = ROOT / "compiled_optim" / "README.md"
    inside = {package.parent / name / "README.md" for name in INSIDE if name}
    assert {*re.findall(r"\]\(([^)#]+)", FIRST.read_text())} == {_name(p) for p in {*OTHERS, CHANGELOG} - inside}
    assert {package.parent / link for link in re.findall(r"\]\(([^)#]+)", package.read_text())} >= inside


@pytest.mark.filterwarnings("ignore:.*Profiler.*", "ignore:.*uncaptured.*:RuntimeWarning")
@pytest.mark.parametrize("block", _blocks())
def test_code_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone, so that it makes what it uses; a schedule moves the learning rate of the optimizer that steps."""
    namespace: dict[str, Any] = {}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=False):  # put back what the block sets
        exec(block, namespace)
    opt, sched = namespace.get("opt"), namespace.get("sched")
    assert ("sched.step()" in block) == (sched is not None)
    if sched is not None:
        (rate,) = sched.get_last_lr()
        assert sched.optimizer is opt
        assert opt.param_groups[0]["lr"] == opt.hyperparameter("lr").item() == rate != opt.defaults["lr"]
    if opt is not None:
        assert max(state["step"] for state in opt.state.values()) > 0
    if "compile_report" in block:
        assert "100 steps" in capsys.readouterr().out


TOOLS = sorted(path.name for path in (ROOT / "tools").iterdir() if path.is_file() and os.access(path, os.X_OK))


@pytest.fixture(scope="module")
def new_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout to where no environment was made, and commands may write."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    checkout = tmp_path_factory.mktemp("new") / "checkout"
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    return checkout


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_explains_itself(tool: str, new_checkout: Path) -> None:
    """Before it installs or runs anything."""
    command = [sys.executable, f"tools/{tool}", "--help"]
    done = subprocess.run(command, cwd=new_checkout, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"tools/{tool}" in done.stdout
    assert "installing" not in done.stdout + done.stderr


@pytest.mark.full
def test_the_sanitizers_start() -> None:
    """Start pytest under them, in the environment that tests have."""
    done = subprocess.run([sys.executable, "tools/sanitize", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pytest" in done.stdout + done.stderr


# How a test runs each command of the READMEs, without installing anything.
COMMANDS = {
    "tools/run --help": ["tools/run", "--help"],
    "tools/test": ["tools/test", "--help"],  # CI runs it, and test_versions.py says with which commands
    "tools/test --full": ["tools/test", "--help"],
    "tools/test --torch 2.11.0": ["tools/test", "--help"],
    "tools/versions": [sys.executable, "tools/versions", "--help"],
    "tools/lowering": [sys.executable, "-m", "perf.lowering", "--lowering", "multi_tensor"],
    "tools/lowering --help": [sys.executable, "tools/lowering", "--help"],
    "python -m perf gates": [sys.executable, "-m", "perf", "gates", "--help"],
    "python -m perf step": [sys.executable, "-m", "perf", "step", "--help"],
    "python -m perf training-step": [sys.executable, "-m", "perf", "training-step", "--help"],
    "python -m perf overhead --against CHECKOUT": [sys.executable, "-m", "perf", "overhead", "--help"],
    "python -m perf report": [sys.executable, "-m", "perf", "report", "--help"],
    "python -m perf --help": [sys.executable, "-m", "perf", "--help"],
    "tools/convert": [sys.executable, "tools/convert", "--help"],
    "tools/convert --help": [sys.executable, "tools/convert", "--help"],
    "tools/soak": [sys.executable, "tools/soak", "--help"],
    "tools/soak --walks 500": [sys.executable, "tools/soak", "--help"],
    "tools/bits": [sys.executable, "tools/bits", "--help"],
    "tools/mutants": [sys.executable, "tools/mutants", "--help"],
    "tools/mutants plan step": [sys.executable, "tools/mutants", "--help"],
    "tools/docs": [sys.executable, "tools/docs", "--help"],
    "tools/package": [sys.executable, "tools/package", "--help"],
    "tools/package --into FOLDER": [sys.executable, "tools/package", "--help"],  # as test_distribution.py runs it
    "tools/sanitize": [sys.executable, "tools/sanitize", "--help"],  # test_the_sanitizers_start starts it
    "python -m compiled_optim": [sys.executable, "-m", "compiled_optim", "--help"],
    "python tools/readme.py": [sys.executable, "tools/readme.py"],
}
ELSEWHERE = {
    "pip install .": "what an environment of tools/ does with -e: test_environment.py",
    "pip install -e .": "likewise",
    'pip install "compiled-optim[cli]"': "likewise",
    "pip install 'compiled-optim[convert]'": "likewise",
    "pip install -e .[perf]": "likewise",
    "pip install 'compiled-optim[trainers]'": "likewise",
    "pip install -e '.[trainers]'": "likewise",
    "python tools/recipes/NAME.py": "test_recipes.py",
    "python tools/recipes/schedules.py": "likewise",
    "tools/run": "test_demo.py",
    "python tests/data/make.py NAME": "test_stored_versions.py",
    "python -m perf.movement": "test_perf.py",
    "perf/gpu tests": "test_on_gpu.py",
    "perf/gpu timings": "test_on_gpu.py",
    "perf/gpu compiled": "test_on_gpu.py",
    "perf/gpu first": "test_on_gpu.py",
    "perf/gpu others": "test_on_gpu.py",
    "perf/gpu wheels": "test_on_gpu.py",
    "perf/gpu train": "test_train.py",
    "perf/gpu distributed": "test_distributed_training.py",
}
"""Commands that other files test."""


def test_every_command_is_known() -> None:
    prose = "\n".join(re.sub(r"```.*?```", "", readme.read_text(), flags=re.DOTALL) for readme in READMES)
    named = {
        *re.findall(r"^    (\S.*)$", prose, re.MULTILINE),
        *re.findall(r"`((?:tools/|perf/gpu|python |pip )[^`]+)`", prose),
    }
    of_the_program = {command for command in named if command.startswith("compiled-optim ")}  # test_command_line.py
    assert named - of_the_program == {*COMMANDS, *ELSEWHERE}


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_command_works(command: str, new_checkout: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(new_checkout)}
    done = subprocess.run(COMMANDS[command], cwd=new_checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not [*new_checkout.glob(".venv*")]


def test_a_figure_that_was_not_measured_is_not_fresh() -> None:
    """What stands between the marks is made anew, whatever it was."""
    text = FIRST.read_text()
    ratio = re.search(r" ms \| (0\.\d\d) \|", text)
    assert ratio is not None
    wrong = text.replace(ratio[1], "0.01", 1)
    assert generated(wrong) == text != wrong


def test_the_advice_which_optimizer_to_take_names_those_that_there_are() -> None:
    text = (ROOT / "compiled_optim/optimizers/README.md").read_text()
    advice = text.partition("Take the optimizer")[2].partition("\n\n")[0]
    names = re.findall(r"`(\w+)`", advice)
    assert names[0] == "AdamW"
    assert {"MuonAdamW", "SGD", "AdamWScheduleFree"} <= {*names} <= {*co.__all__}
