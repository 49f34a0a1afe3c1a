"""Try the installed compiled_optim: ``python -I smoke.py CHECKOUT``, from any folder.

It prints a line for each check that passed. The first one that fails ends the run with its error; warnings are errors.
"""

from __future__ import annotations

import importlib.metadata
import io
import sys
import warnings
from pathlib import Path

import torch

import compiled_optim as co

INPUTS = torch.linspace(-1, 1, 64).reshape(8, 8)
TARGETS = INPUTS.sum(1, keepdim=True)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))


def _optimizer(model: torch.nn.Module) -> co.CompiledOptimizer:
    return co.AdamW(model.named_parameters(), lr=0.01)


def _train(model: torch.nn.Module, optimizer: co.CompiledOptimizer, steps: int) -> float:
    for _ in range(steps):
        loss = (model(INPUTS) - TARGETS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def installed() -> str:
    """Check that the package is imported from an installation and has its version."""
    folder, version = Path(co.__file__).resolve().parent, importlib.metadata.version("compiled-optim")
    assert not folder.is_relative_to(Path(sys.argv[1]).resolve()), f"{folder} is the checkout"
    assert version == co.__version__, f"{version} is installed, {co.__version__} imported"
    return f"version {version} with torch {torch.__version__}"


def called() -> str:
    """Check that steps that are called run in compiled code, and train."""
    model = _model()
    optimizer = _optimizer(model)
    before, after = _train(model, optimizer, 1), _train(model, optimizer, 50)
    assert after < before / 2, f"the loss went from {before} to {after}"
    report = str(co.compile_report(optimizer))
    assert all(part in report for part in ("multi_tensor", "51 steps")), report
    return report.splitlines()[0]


def whole_step() -> str:
    """Check that a whole training step compiles, and does not recompile when a hyperparameter changes."""
    model, twin = _model(), _model()
    optimizer, other = _optimizer(model), _optimizer(twin)
    torch._dynamo.config.trace_autograd_ops = True

    @torch.compile(fullgraph=True)
    def train_step() -> None:
        (model(INPUTS) - TARGETS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train_step()
    _train(twin, other, 1)
    with co.no_recompiles():
        optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.02
        train_step()
    _train(twin, other, 1)
    for param, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-4, atol=1e-6)
    return "equal to steps that are called"


def checkpoint() -> str:
    """Check that an optimizer with another order of parameters continues a checkpoint by name."""
    model = _model()
    optimizer = _optimizer(model)
    _train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": co.named_state_dict(optimizer)}, file)
    file.seek(0)
    saved, resumed = torch.load(file, weights_only=True), _model()
    resumed.load_state_dict(saved["model"])
    continued = co.AdamW(dict(reversed([*resumed.named_parameters()])))
    co.load_named_state_dict(continued, saved["optimizer"])
    assert _train(model, optimizer, 3) == _train(resumed, continued, 3)
    return f"{len(saved['optimizer']['state'])} parameters by name, bit-equal steps"


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    warnings.simplefilter("error", RuntimeWarning)
    for check in (installed, called, whole_step, checkpoint):
        print(f"{check.__name__.replace('_', ' ')}: {check()}", flush=True)
