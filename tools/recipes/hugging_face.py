"""Hugging Face's Trainer with any optimizer of this package by name: ``optim="co.adamw"``, in code or on a command line.

TrainingArguments takes only names that transformers has, so two short subclasses take all of ``co.list_optimizers()`` too.
Numbers other than the learning rate come from ``optim_args``, in JSON; the groups and their weight decay are the Trainer's.
Without subclasses, ``Trainer(..., optimizer_cls_and_kwargs=(co.AdamW, {"lr": 1e-3}))`` takes one class.
"""

import dataclasses
import json
import tempfile

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import compiled_optim as co


@dataclasses.dataclass
class Arguments(TrainingArguments):
    """Transformers' arguments, where ``optim`` may begin with ``co.``."""

    def __post_init__(self):
        name = self.optim
        if is_ours := str(name).startswith("co."):
            co.optimizer_info(name.removeprefix("co."))  # a name that is unknown is an error here
            self.optim = "adamw_torch"
        super().__post_init__()
        self.optim = name if is_ours else self.optim


class ByName(Trainer):
    """A Trainer that makes the optimizer which ``args.optim`` names."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        if not args.optim.startswith("co."):
            return Trainer.get_optimizer_cls_and_kwargs(args, model)
        info = co.optimizer_info(args.optim.removeprefix("co."))
        return info.cls, {"lr": args.learning_rate, **json.loads(args.optim_args or "{}")}


def train(options, resume=None):
    """Train a small model, with options as on a command line; return the last loss that was logged."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(f"{COMMON} {options}".split())
    torch.manual_seed(0)
    trainer = ByName(LlamaForCausalLM(LlamaConfig(**SIZES)), args, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.optimizer.optimizer, trainer.state.log_history[-2]["loss"]


COMMON = "--max_steps 20 --save_steps 10 --logging_steps 5 --learning_rate 3e-3 --warmup_steps 5 --lr_scheduler_type cosine"
COMMON += " --use_cpu true --report_to none --disable_tqdm true --output_dir"
SIZES = dict(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
data = [{"input_ids": row, "labels": row} for row in torch.arange(272).remainder(16).unfold(0, 16, 1)]
with tempfile.TemporaryDirectory() as folder:
    for name in ("co.adamw", "co.lion", "co.stable_adamw"):
        opt, loss = train(f"{folder}/{name} --optim {name}")
        print(f"{name}: {type(opt).__module__}, loss {loss:.2f}")
    _, loss = train(f"{folder}/co.adamw --optim co.adamw", f"{folder}/co.adamw/checkpoint-10")
    print(f"co.adamw, resumed: loss {loss:.2f}")
    opt, loss = train(f'{folder}/clipped --optim co.adamw --optim_args {{"betas":[0.9,0.95],"max_grad_norm":0.5}}')
    print(f"co.adamw, betas {opt.param_groups[0]['betas']}: loss {loss:.2f}")
try:
    train("out --optim co.adamv")
except ValueError as error:
    print("ValueError:", error)
