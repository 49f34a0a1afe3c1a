from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import torch

import compiled_optim as co
from perf import bits

ROOT = Path(__file__).resolve().parents[2]


def test_a_digest_is_repeatable_and_depends_on_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "STEPS", 3)
    arguments = bits.far(co.AdamW)
    assert arguments.keys() == {"lr", "betas", "eps", "weight_decay", "amsgrad"}

    def run(options: dict[str, object]) -> str:
        return bits.digest(co.AdamW, options, "eager", torch.float32)

    assert run(arguments) == run(arguments)
    others = {
        name: not value if value is True else (0.5, 0.6) if name == "betas" else 2 * value
        for name, value in arguments.items()
    }
    digests = {run(arguments), *(run({**arguments, name: value}) for name, value in others.items())}
    assert len(digests) == 1 + len(arguments)


def test_every_optimizer_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "STEPS", 1)
    monkeypatch.setattr(bits, "LOWERINGS", ("eager",))
    monkeypatch.setattr(bits, "DTYPES", (torch.float32,))
    classes = [getattr(co, name) for name in co.__all__]
    optimizers = {c.__name__ for c in classes if isinstance(c, type) and issubclass(c, co.CompiledOptimizer)}
    assert {name.partition(" ")[0] for name, _ in bits.digests()} == optimizers - {"CompiledOptimizer"}


def test_a_digest_depends_on_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a learning rate of zero the parameters stay as they are."""
    monkeypatch.setattr(bits, "STEPS", 3)
    first, second = (bits.digest(co.Adam, {"lr": 0.0, "betas": (0.8, b)}, "eager", torch.float32) for b in (0.9, 0.95))
    assert first != second


@pytest.fixture
def tool() -> ModuleType:
    loader = SourceFileLoader("bits_tool", str(ROOT / "tools" / "bits"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("before", "now", "code", "said"),
    [
        ({"a": "1", "b": "2"}, {"a": "1", "b": "2"}, 0, "2 runs compared, 0 differ\n"),
        ({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, 1, "b\n2 runs compared, 1 differ\n"),
        ({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, 0, "1 runs compared, 0 differ\n"),
        ({"b": "2"}, {"c": "3"}, 1, "0 runs compared, 0 differ\n"),
    ],
)
def test_a_difference_is_an_error(
    before: dict[str, str],
    now: dict[str, str],
    code: int,
    said: str,
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tool, "digests_of_revision", lambda *_: before)
    monkeypatch.setattr(tool, "digests", lambda *_: now)
    monkeypatch.setattr("sys.argv", ["bits", "HEAD"])
    assert tool.main() == code
    assert capsys.readouterr().out == said
