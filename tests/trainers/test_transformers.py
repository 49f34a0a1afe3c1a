"""The Trainer of transformers, and peft's adapters: losses, logged rates and checkpoints are those of torch.optim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import OPTIONS, PAIR_IDS, PAIRS, assert_trained_alike, needs, weights
from torch.optim import lr_scheduler

PLATEAU = {"patience": 0, "factor": 0.5, "threshold": 0.9}

pytestmark = [pytest.mark.full, needs("transformers", "accelerate")]


def _llama(layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=16, use_cache=False)).double()


def _sentences() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in tokens]


def _trainer(
    directory: Path,
    model: Any,
    optimizers: Any = (None, None),
    of_class: Any = None,
    of_trainer: Any = None,
    **options: Any,
) -> Any:
    from transformers import Trainer, TrainingArguments

    defaults = dict(max_steps=6, per_device_train_batch_size=4, logging_steps=1, logging_nan_inf_filter=False)
    quiet = dict(report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no", output_dir=directory)
    arguments = TrainingArguments(**{**defaults, **quiet, **options})
    data = dict(train_dataset=_sentences(), eval_dataset=_sentences()[:4])
    return (of_trainer or Trainer)(model, arguments, **data, optimizers=optimizers, optimizer_cls_and_kwargs=of_class)


def _logged(trainer: Any) -> list[tuple[float, float, float]]:
    """Loss, rate and norm of every step, as they are written into the trainer's state file."""
    rows = [row for row in json.loads(json.dumps(trainer.state.log_history)) if "loss" in row]
    return [(row["loss"], row["learning_rate"], row["grad_norm"]) for row in rows]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.001}, "warmup_steps": 2},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}, "warmup_steps": 2},
        {"activation_checkpointing": True, "max_grad_norm": 0.0},
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": PLATEAU,
            "eval_strategy": "steps",
            "eval_steps": 1,
        },
    ],
    ids=["linear", "accumulated", "cosine", "warmup-stable-decay", "checkpointing", "plateau"],
)
def test_optimizer_of_a_class(options: dict[str, Any], tmp_path: Path) -> None:
    def train(optim: Any) -> Any:
        trainer = _trainer(tmp_path, _llama(), of_class=(optim.AdamW, OPTIONS), **options)
        trainer.train()
        rates = [rate for _, rate, _ in _logged(trainer)]
        assert len(set(rates)) > 1
        return _logged(trainer), weights(trainer.model)

    assert_trained_alike(train, rtol=1e-9)


@pytest.mark.parametrize("own_schedule", [True, False])
def test_optimizer_that_is_handed_over(own_schedule: bool, tmp_path: Path) -> None:
    def train(optim: Any) -> Any:
        model = _llama()
        optimizer = optim.AdamW(model.named_parameters(), **OPTIONS)
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8) if own_schedule else None
        trainer = _trainer(tmp_path, model, (optimizer, schedule))
        trainer.train()
        assert trainer.optimizer.optimizer is optimizer
        return _logged(trainer), weights(model)

    assert_trained_alike(train, rtol=1e-9)


def test_mixed_precision(tmp_path: Path) -> None:
    def train(optim: Any) -> Any:
        trainer = _trainer(tmp_path, _llama().float(), of_class=(optim.AdamW, OPTIONS), bf16=True)
        trainer.train()
        return [row[:2] for row in _logged(trainer)]

    assert_trained_alike(train, rtol=2e-2)


def test_compiled_model(tmp_path: Path) -> None:
    def train(optim: Any) -> Any:
        options = dict(torch_compile=True, torch_compile_backend="eager", max_steps=3)
        trainer = _trainer(tmp_path, _llama(1), of_class=(optim.AdamW, OPTIONS), **options)
        trainer.train()
        return _logged(trainer), weights(trainer.model)

    assert_trained_alike(train, rtol=1e-9)


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=PAIR_IDS)
def test_a_checkpoint_resumes(first: Any, second: Any, tmp_path: Path) -> None:
    """Within a package bit by bit, and across to torch.optim and back."""
    schedule = dict(lr_scheduler_type="cosine", warmup_steps=2)
    saving = dict(save_strategy="steps", save_steps=3, **schedule)
    _trainer(tmp_path, _llama(), of_class=(first.AdamW, OPTIONS), **saving).train()
    whole = _trainer(tmp_path / "whole", _llama(), of_class=(second.AdamW, OPTIONS), **schedule)
    whole.train()
    resumed = _trainer(tmp_path / "resumed", _llama(), of_class=(second.AdamW, OPTIONS), **schedule)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    exact = {"rtol": 0, "atol": 0} if first is second else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(_logged(resumed), _logged(whole), **exact)
    torch.testing.assert_close(weights(resumed.model), weights(whole.model), **exact)


@pytest.mark.parametrize("scheduler", ["cosine", "reduce_lr_on_plateau"])
def test_rates_that_users_log_are_in_the_checkpoints(scheduler: str, tmp_path: Path) -> None:
    """The trainer writes its log into each checkpoint, and goes on with it: of a group, of the scheduler, and its own."""
    from transformers import Trainer

    class Logging(Trainer):
        def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            group = self.optimizer.param_groups[0]
            logs |= {"rate": group["lr"], "betas": group["betas"], "last": self.lr_scheduler.get_last_lr()}
            super().log(logs, *args, **kwargs)

    plateau = {"lr_scheduler_kwargs": PLATEAU, "eval_strategy": "steps", "eval_steps": 1} if scheduler != "cosine" else {}
    options = dict(lr_scheduler_type=scheduler, save_strategy="steps", save_steps=3, **plateau)
    of_time = ("runtime", "per_second")

    def train(optim: Any) -> Any:
        directory = tmp_path / optim.__name__
        histories = []
        for resumed in (None, str(directory / "checkpoint-3")):
            trainer = _trainer(directory, _llama(), of_class=(optim.AdamW, OPTIONS), of_trainer=Logging, **options)
            trainer.train(resume_from_checkpoint=resumed)
            saved = json.loads((directory / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
            assert {type(row["rate"]) for row in saved} == {float}
            histories.append([{k: v for k, v in row.items() if not k.endswith(of_time)} for row in saved])
        assert histories[0] == histories[1]
        return [[row["rate"], *row["betas"], *row["last"]] for row in histories[0]]

    assert len({rate for rate, *_ in assert_trained_alike(train, rtol=1e-9)}) > 2


@needs("peft")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("adapter", ["LoRA", "DoRA"])
def test_adapters(adapter: str, tmp_path: Path) -> None:
    """Frozen weights have no state; the adapter's file loads into another model."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def train(optim: Any) -> Any:
        config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], use_dora=adapter == "DoRA")
        model = get_peft_model(_llama(), config).double()
        trainer = _trainer(tmp_path, model, of_class=(optim.AdamW, OPTIONS), save_strategy="steps", save_steps=6)
        trainer.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert 0 < len(trained) < len(list(model.parameters()))
        assert set(trainer.optimizer.state) == set(trained)
        loaded = PeftModel.from_pretrained(_llama(), tmp_path / "checkpoint-6").double()
        return _logged(trainer), weights(model), weights(loaded)

    assert_trained_alike(train, rtol=1e-9)


@needs("peft")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_with_two_rates() -> None:
    """LoRA+ makes an optimizer from a class, with rates of its own for the second matrices."""
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    def train(optim: Any) -> Any:
        model = get_peft_model(_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).double()
        optimizer = create_loraplus_optimizer(model, optim.AdamW, loraplus_lr_ratio=4, **OPTIONS)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.8)
        losses = []
        for row in _sentences()[:6]:
            loss = model(**{name: tokens[None] for name, tokens in row.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append((loss.item(), [float(g["lr"]) for g in optimizer.param_groups]))
        return losses, weights(model)

    assert_trained_alike(train, rtol=1e-9)
