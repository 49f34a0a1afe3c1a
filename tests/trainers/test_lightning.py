"""Lightning: its trainer, manual optimization, Fabric, callbacks and command line, with torch.optim's results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_training import OPTIONS, PAIR_IDS, PAIRS, assert_trained_alike, batches, loss_of, needs, network, weights
from torch.optim import lr_scheduler

import compiled_optim as co

if TYPE_CHECKING:
    import lightning as L

pytestmark = [
    pytest.mark.full,
    needs("lightning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]

QUIET = dict(
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)

SCHEDULERS = {
    "one_cycle": lambda o: {
        "scheduler": lr_scheduler.OneCycleLR(o, 0.05, total_steps=20),
        "interval": "step",
    },
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "plateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3, threshold=0.99),
        "monitor": "loss",
    },
}


def _automatic(optim: Any, scheduler: str = "one_cycle", dtype: torch.dtype = torch.float64) -> L.LightningModule:
    """Trained by Lightning itself; ``losses`` and ``rates`` are those of every batch."""
    import lightning as L

    class Automatic(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(dtype)
            self.losses: list[float] = []
            self.rates: list[float] = []

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            loss = loss_of(self.net, x.to(self.net[0].weight.dtype))
            self.log("loss", loss, on_epoch=True, on_step=False)
            self.losses.append(loss.item())
            self.rates.append(float(self.optimizers().param_groups[0]["lr"]))
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = optim.AdamW(self.net.named_parameters(), **OPTIONS)
            return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[scheduler](optimizer)}

    return Automatic()


def _loader(count: int = 6) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(batches(count), batch_size=None)


def _fit(module: L.LightningModule, checkpoint: Path | None = None, **options: Any) -> L.Trainer:
    import lightning as L

    trainer = L.Trainer(**{**QUIET, **options})
    trainer.fit(module, _loader(), ckpt_path=checkpoint, weights_only=None if checkpoint is None else True)
    return trainer


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "norm", "value"],
)
def test_automatic_optimization(scheduler: str, options: dict[str, Any]) -> None:
    def train(optim: Any) -> Any:
        module = _automatic(optim, scheduler)
        _fit(module, max_epochs=3, **options)
        assert len(set(module.rates)) > 1
        return module.losses, module.rates, weights(module)

    assert_trained_alike(train)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision: str) -> None:
    def train(optim: Any) -> Any:
        module = _automatic(optim, dtype=torch.float32)
        _fit(module, max_epochs=1, precision=precision)
        return module.losses, weights(module)

    tolerance = {"32-true": 1e-5, "64-true": 1e-10}.get(precision, 2e-2)
    assert_trained_alike(train, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=PAIR_IDS)
def test_a_checkpoint_resumes(first: Any, second: Any, tmp_path: Path) -> None:
    """Within a package bit by bit, and across to torch.optim and back."""
    whole, begun, resumed = _automatic(second), _automatic(first), _automatic(second)
    _fit(whole, max_epochs=3)
    _fit(begun, max_epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    _fit(resumed, max_epochs=3, checkpoint=tmp_path / "half.ckpt")
    exact = {"rtol": 0, "atol": 0} if first is second else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(resumed.losses, whole.losses[6:], **exact)
    assert resumed.rates == whole.rates[6:]
    torch.testing.assert_close(weights(resumed), weights(whole), **exact)


def _manual(optim: Any) -> L.LightningModule:
    """Two optimizers take turns, as in adversarial training, with everything that manual optimization offers."""
    import lightning as L

    class Manual(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net, self.head = network(), torch.nn.Linear(1, 1, dtype=torch.float64)
            self.seen: list[Any] = []

        def training_step(self, x: torch.Tensor, index: int) -> None:
            optimizers, schedulers = self.optimizers(), self.lr_schedulers()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                self.toggle_optimizer(optimizer)
                frozen = [not p.requires_grad for p in self.parameters()]
                loss = loss_of(lambda x: self.head(self.net(x)), x)
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                scheduler.step()
                optimizer.param_groups[0]["weight_decay"] = 0.01 * index
                rates = [float(g["lr"]) for g in optimizer.param_groups]
                self.seen.append((loss.item(), frozen, rates, len(optimizer.state)))

        def configure_optimizers(self) -> Any:
            own = [optim.AdamW(self.net.parameters(), **OPTIONS), optim.SGD(self.head.parameters(), lr=0.3, momentum=0.7)]
            return own, [lr_scheduler.ExponentialLR(o, 0.8) for o in own]

    return Manual()


def test_manual_optimization() -> None:
    def train(optim: Any) -> Any:
        module = _manual(optim)
        trainer = _fit(module, max_epochs=2)
        wrapped, own = module.optimizers()[0], trainer.optimizers[0]
        assert isinstance(wrapped, optim.AdamW)
        assert wrapped.optimizer is own
        assert wrapped.param_groups is own.param_groups
        assert "AdamW" in repr(wrapped)
        return module.seen, weights(module)

    assert_trained_alike(train)


def _with_fabric(optim: Any) -> Any:
    import lightning as L

    fabric = L.Fabric(accelerator="cpu")
    net, late = network(), torch.nn.Linear(1, 1, dtype=torch.float64)
    model, optimizer = fabric.setup(torch.nn.Sequential(net, late), optim.AdamW(net.parameters(), **OPTIONS))
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
    seen = []
    for i, x in enumerate(batches()):
        if i == 2:
            optimizer.add_param_group({"params": late.parameters(), "lr": 0.01})
            scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 7)
        optimizer.zero_grad()
        loss = loss_of(model, x)
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        scheduler.step()
        rates = [float(g["lr"]) for g in optimizer.param_groups]
        seen.append((loss.item(), norm.item(), rates, len(optimizer.state)))
    return fabric, model, optimizer, seen


def test_fabric() -> None:
    def train(optim: Any) -> Any:
        _, model, optimizer, seen = _with_fabric(optim)
        assert isinstance(optimizer, optim.AdamW)
        assert optimizer.param_groups is optimizer.optimizer.param_groups
        assert "AdamW" in repr(optimizer)
        return seen, weights(model)

    assert_trained_alike(train)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=PAIR_IDS)
def test_fabric_checkpoints(first: Any, second: Any, tmp_path: Path) -> None:
    fabric, model, optimizer, _ = _with_fabric(first)
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    _, other_model, other, _ = _with_fabric(second)
    other.param_groups[0]["lr"] = 0.7
    for p in other_model.parameters():
        p.data.zero_()
    fabric.load(tmp_path / "saved", {"model": other_model, "optimizer": other}, weights_only=True)
    assert [float(g["lr"]) for g in other.param_groups] == [float(g["lr"]) for g in optimizer.param_groups]
    for each, stepped in ((model, optimizer), (other_model, other)):
        stepped.zero_grad()
        loss_of(each, batches()[0]).backward()
        stepped.step()
    torch.testing.assert_close(weights(other_model), weights(model), rtol=1e-10, atol=1e-12)


def test_learning_rate_monitor() -> None:
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import Logger

    class Recorder(Logger):
        name, version, experiment = "recorder", 0, None

        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            self.rows.append(dict(metrics))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    def train(optim: Any) -> Any:
        module, recorder = _automatic(optim), Recorder()
        monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        _fit(module, max_epochs=2, logger=recorder, log_every_n_steps=1, callbacks=[monitor])
        rates = [row for row in recorder.rows if "lr-AdamW" in row]
        assert {"lr-AdamW", "lr-AdamW-momentum", "lr-AdamW-weight_decay"} <= rates[0].keys()
        return [{name: float(value) for name, value in row.items()} for row in rates]

    assert_trained_alike(train)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist within another group:UserWarning")
def test_backbone_finetuning(capsys: pytest.CaptureFixture[str]) -> None:
    """It adds a group, moves its rate, and prints rates with ``round``."""
    import lightning as L
    from lightning.pytorch.callbacks import BackboneFinetuning

    class Finetuned(L.LightningModule):
        def __init__(self, optim: Any) -> None:
            super().__init__()
            self.optim = optim
            self.backbone, self.head = network(), torch.nn.Linear(1, 1, dtype=torch.float64)
            self.seen: list[Any] = []

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            loss = loss_of(lambda x: self.head(self.backbone(x)), x)
            self.seen.append((loss.item(), [float(g["lr"]) for g in self.optimizers().param_groups]))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = self.optim.AdamW([p for p in self.parameters() if p.requires_grad], **OPTIONS)
            return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def train(optim: Any) -> Any:
        module = Finetuned(optim)
        unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_ratio_lr=0.3, verbose=True)
        _fit(module, max_epochs=4, callbacks=[unfreeze])
        assert len(module.seen[-1][1]) == 2
        return module.seen, weights(module), capsys.readouterr().out.count("Current lr: ")

    assert_trained_alike(train)


@pytest.mark.filterwarnings("ignore:Swapping scheduler:UserWarning")
def test_weight_averaging() -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    def train(optim: Any) -> Any:
        module = _automatic(optim, "cosine")
        _fit(module, max_epochs=5, callbacks=[StochasticWeightAveraging(0.005, swa_epoch_start=2, annealing_epochs=2)])
        return module.losses, module.rates, weights(module)

    assert_trained_alike(train)


def test_learning_rate_finder(tmp_path: Path) -> None:
    import lightning as L
    from lightning.pytorch.tuner import Tuner

    def train(optim: Any) -> Any:
        module = _automatic(optim)
        module.lr = 0.0
        trainer = L.Trainer(**{**QUIET, "enable_checkpointing": True}, default_root_dir=tmp_path, max_epochs=1)
        found = Tuner(trainer).lr_find(module, _loader(), num_training=12, update_attr=False)
        return found.results

    assert_trained_alike(train)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.pytorch.cli")
def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are found in the constructor's signature, types and defaults included."""
    import lightning as L
    from lightning.pytorch.cli import LightningCLI

    class Module(L.LightningModule):
        def __init__(self, width: int = 1) -> None:
            super().__init__()
            self.net = network()
            self.losses: list[float] = []

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            loss = loss_of(self.net, x)
            self.losses.append(loss.item())
            return loss

        def train_dataloader(self) -> Any:
            return _loader()

    def train(optim: Any) -> Any:
        package = "compiled_optim" if optim is co else "torch.optim"
        options = [
            "--optimizer.lr=0.5",
            "--optimizer.betas=[0.7,0.8]",
            "--optimizer.weight_decay=0.2",
            "--optimizer.eps=1e-3",
        ]
        schedule = ["--lr_scheduler=torch.optim.lr_scheduler.StepLR", "--lr_scheduler.step_size=1"]
        command = ["fit", f"--optimizer={package}.AdamW", *options, *schedule]
        monkeypatch.setattr(sys, "argv", ["train", *command])
        cli = LightningCLI(
            Module,
            trainer_defaults={**QUIET, "max_epochs": 2},
            save_config_callback=None,
            seed_everything_default=False,
        )
        (optimizer,) = cli.trainer.optimizers
        assert type(optimizer) is optim.AdamW
        return cli.model.losses, float(optimizer.param_groups[0]["lr"]), weights(cli.model)

    losses, rate, _ = assert_trained_alike(train)
    assert len(losses) == 12
    assert rate == 0.5 * 0.1 * 0.1
