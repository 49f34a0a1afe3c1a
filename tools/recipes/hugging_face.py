"""Hugging Face's Trainer with any optimizer of this package by name: ``--optim adamw``, or ``Arguments(optim="lion")``.

``optim_args`` has more in JSON. A Trainer without this takes one: ``optimizer_cls_and_kwargs=(co.AdamW, {"lr": 1e-3})``.
"""

import dataclasses
import json
import tempfile

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import compiled_optim as co


@dataclasses.dataclass
class Arguments(TrainingArguments):
    """Transformers' arguments, with this package's optimizers."""

    optim: str = "adamw"

    def __post_init__(self):
        name, self.optim = self.optim, "adamw_torch"  # a name that transformers knows
        super().__post_init__()
        self.optim = co.optimizer_info(name).name


class ByName(Trainer):
    """A Trainer that makes the optimizer which ``args.optim`` names."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        adam = {("betas", (args.adam_beta1, args.adam_beta2)), ("eps", args.adam_epsilon)}
        extra = dict(adam - {("betas", (0.9, 0.999)), ("eps", 1e-8)})  # else the class's defaults
        return co.optimizer_info(args.optim).cls, {"lr": args.learning_rate, **extra, **json.loads(args.optim_args or "{}")}


def train(line, resume=None):
    """Train a small model with options as on a command line."""
    line += " --max_steps 20 --save_steps 10 --logging_steps 5 --learning_rate 3e-3 --lr_scheduler_type cosine"
    line += " --warmup_steps 5 --use_cpu true --report_to none --disable_tqdm true"
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(line.split())
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    data = [{"input_ids": row, "labels": row} for row in torch.arange(272).remainder(16).unfold(0, 16, 1)]
    trainer = ByName(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    print(f"{trainer.optimizer.optimizer.__class__}: loss {trainer.state.log_history[-2]['loss']:.3f}")


with tempfile.TemporaryDirectory() as folder:
    train(f"--output_dir {folder}/1 --optim adamw")
    train(f"--output_dir {folder}/2 --optim adamw", resume=f"{folder}/1/checkpoint-10")
    train(f'--output_dir {folder}/3 --optim lion --adam_beta2 0.95 --optim_args {{"max_grad_norm":0.5}}')

# Prints, in 19 s:
# <class 'compiled_optim.optimizers.adamw.AdamW'>: loss 1.707
# <class 'compiled_optim.optimizers.adamw.AdamW'>: loss 1.707
# <class 'compiled_optim.optimizers.lion.Lion'>: loss 1.659
