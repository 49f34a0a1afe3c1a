"""Loggers and files take a group's numbers and a scheduler's, and hold what they hold with torch.optim."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from group_idioms import without_params
from small_training import batches, loss_of, needs, network
from torch.optim import Optimizer, lr_scheduler
from torch_schedulers import advance, step, typed

import compiled_optim as co

pytestmark = pytest.mark.full

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=9),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3),
}


def _trained(optim: Any, scheduler: str = "one cycle", steps: int = 4) -> Iterator[tuple[Optimizer, Any]]:
    """An optimizer of two groups and its scheduler, after each step of both."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.02)]
    optimizer = optim.AdamW(groups, betas=(0.8, 0.95), weight_decay=0.25)
    schedule = SCHEDULERS[scheduler](optimizer)
    for t in range(steps):
        step(optimizer, t)
        advance(schedule, t)
        yield optimizer, schedule


def _rows(optim: Any, scheduler: str = "one cycle") -> list[dict[str, Any]]:
    """What scripts log in each step."""
    return [
        {"step": t, "lr": o.param_groups[0]["lr"], "beta1": o.param_groups[0]["betas"][0], "last_lr": s.get_last_lr()[1]}
        for t, (o, s) in enumerate(_trained(optim, scheduler))
    ]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of wandb stay on this machine and in this test, and the process that it starts ends with them."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    import wandb

    yield
    wandb.finish()
    wandb.teardown()


@needs("wandb")
@pytest.mark.usefixtures("offline")
def test_wandb(tmp_path: Path) -> None:
    import wandb

    def logged(optim: Any) -> Any:
        seen = []
        with wandb.init(project="groups", dir=tmp_path) as run:
            for optimizer, schedule in _trained(optim):
                group = optimizer.param_groups[0]
                run.log({"lr": group["lr"], "betas": group["betas"], "last": schedule.get_last_lr()})
                run.log({f"group {i}/lr": g["lr"] for i, g in enumerate(optimizer.param_groups)})
                run.summary["final lr"] = group["lr"]
                run.summary.update({"decay": group["weight_decay"], "momentum": group["betas"][0]})
                seen.append({key: value for key, value in dict(run.summary).items() if not key.startswith("_")})
            run.config.update(without_params(group))
            run.config["rates"] = schedule.get_last_lr()
            config = dict(run.config)
        return seen, config

    (ours, config), (theirs, expected) = logged(co), logged(torch.optim)
    assert [{k: typed(v) for k, v in row.items()} for row in ours] == [{k: typed(v) for k, v in r.items()} for r in theirs]
    assert len({row["final lr"] for row in ours}) == 4
    assert {k: typed(v) for k, v in config.items()} == {k: typed(v) for k, v in expected.items()}


@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2
    from torch.utils.tensorboard import SummaryWriter

    def logged(optim: Any) -> Any:
        directory = tmp_path / optim.__name__
        with SummaryWriter(directory) as writer:
            for t, (optimizer, schedule) in enumerate(_trained(optim)):
                group = optimizer.param_groups[0]
                writer.add_scalar("lr", group["lr"], t)
                writer.add_scalar("last", schedule.get_last_lr()[1], t)
                writer.add_scalars("betas", dict(zip("ab", group["betas"], strict=True)), t)
            numbers = {"lr": group["lr"], "decay": group["weight_decay"], "beta": group["betas"][0], "max": group["max_lr"]}
            writer.add_hparams(numbers, {"final": group["lr"]}, run_name="options")
        whole, options = (EventAccumulator(str(path)).Reload() for path in (directory, directory / "options"))
        begun = options.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        chosen = plugin_data_pb2.HParamsPluginData.FromString(begun).session_start_info.hparams
        scalars = [[(e.step, e.value) for e in whole.Scalars(tag)] for tag in ("lr", "last")]
        return scalars, {name: value.number_value for name, value in chosen.items()}, options.Scalars("final")[0].value

    ours = logged(co)
    assert ours == logged(torch.optim)
    assert len({value for _, value in ours[0][0]}) == 4
    assert ours[1].keys() == {"lr", "decay", "beta", "max"}


def _as_csv(optim: Any) -> str:
    file = io.StringIO()
    rows = _rows(optim)
    writer = csv.DictWriter(file, rows[0], quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _as_table(optim: Any) -> str:
    from rich.console import Console
    from rich.pretty import pretty_repr
    from rich.table import Table

    table, shown = Table("step", "lr"), io.StringIO()
    console = Console(file=shown, width=100, color_system=None)
    for row in _rows(optim):
        table.add_row(str(row["step"]), f"{row['lr']:.3e}")
        console.print(row["lr"], row)
    console.print(table)
    return shown.getvalue() + pretty_repr(_rows(optim))


def _as_frame(optim: Any) -> Any:
    import pandas as pd

    frame = pd.DataFrame(_rows(optim))
    series = pd.Series([row["lr"] for row in _rows(optim)])
    return frame.dtypes.astype(str).to_dict(), frame.describe().to_csv(), frame.to_json(), series.rolling(2).mean().to_csv()


@pytest.mark.parametrize("written", [_as_csv, _as_table, _as_frame], ids=["csv", "rich", "pandas"])
def test_tables(written: Callable[[Any], Any]) -> None:
    assert written(co) == written(torch.optim)


@pytest.mark.parametrize(
    ("dump", "load"), [(json.dumps, json.loads), (yaml.safe_dump, yaml.safe_load)], ids=["json", "yaml"]
)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_files(scheduler: str, dump: Callable[[Any], str], load: Callable[[str], Any]) -> None:
    """A group, the rates of a scheduler, and its state: written, read, and loaded into another one."""
    sides = []
    for optim in (co, torch.optim):
        *_, (optimizer, schedule) = _trained(optim, scheduler)
        written = {
            "groups": dump([without_params(group) for group in optimizer.param_groups]),
            "rates": dump(schedule.get_last_lr()),
            "scheduler": dump(schedule.state_dict()),
            "rows": dump(_rows(optim, scheduler)),
        }
        read = {what: load(text) for what, text in written.items()}
        fresh, loaded = next(_trained(optim, scheduler))
        for group, values in zip(fresh.param_groups, read["groups"], strict=True):
            group.update({**values, "betas": tuple(values["betas"])})
        loaded.load_state_dict(read["scheduler"])
        for each, its in ((optimizer, schedule), (fresh, loaded)):
            step(each, 5)
            advance(its, 5)
        rates = [[typed(group["lr"]) for group in each.param_groups] for each in (optimizer, fresh)]
        assert rates[0] == rates[1]
        sides.append((json.dumps(read, sort_keys=True), rates))
    assert sides[0] == sides[1]


def _lightning_wandb(directory: Path) -> tuple[Any, Callable[[], Any]]:
    """A logger, and what reads back what it wrote, once at the end."""
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(project="groups", save_dir=directory, offline=True)

    def read() -> dict[str, Any]:
        logged = dict(logger.experiment.summary)
        logger.experiment.finish()
        return {name: typed(value) for name, value in logged.items() if name.startswith("lr-")}

    return logger, read


def _lightning_csv(directory: Path) -> tuple[Any, Callable[[], Any]]:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(directory)
    return logger, lambda: Path(logger.experiment.metrics_file_path).read_text()


def _lightning_tensorboard(directory: Path) -> tuple[Any, Callable[[], Any]]:
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(directory)

    def read() -> dict[str, Any]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(logger.log_dir).Reload()
        return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"] if tag.startswith("lr-")}

    return logger, read


@needs("lightning", "tensorboard", "wandb")
@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "of", [_lightning_wandb, _lightning_csv, _lightning_tensorboard], ids=["wandb", "csv", "tensorboard"]
)
def test_learning_rate_monitor(of: Callable[[Path], tuple[Any, Callable[[], Any]]], tmp_path: Path) -> None:
    import lightning as L
    from lightning.pytorch.callbacks import LearningRateMonitor

    class Module(L.LightningModule):
        def __init__(self, optim: Any) -> None:
            super().__init__()
            self.net, self.optim = network(), optim

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            return loss_of(self.net, x)

        def configure_optimizers(self) -> Any:
            optimizer = self.optim.AdamW(self.net.parameters(), lr=0.1, weight_decay=0.25)
            schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def logged(optim: Any) -> Any:
        logger, read = of(tmp_path / optim.__name__)
        monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        quiet = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=2, logger=logger, log_every_n_steps=1, callbacks=[monitor], **quiet
        )
        trainer.fit(Module(optim), torch.utils.data.DataLoader(batches(4), batch_size=None))
        return read()

    (tmp_path / "compiled_optim").mkdir()
    (tmp_path / "torch.optim").mkdir()
    ours = logged(co)
    assert ours
    assert ours == logged(torch.optim)
