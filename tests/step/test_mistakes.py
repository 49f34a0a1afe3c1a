"""Mistakes of users: messages that say what was meant, what is there, and what to do."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_optim as co
from compiled_optim.rule.did_you_mean import meant, misspelled

NAMES = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "params", "d", "t0")


def _linear(**kwargs: Any) -> tuple[nn.Module, co.AdamW]:
    model = nn.Linear(2, 2)
    return model, co.AdamW(model.parameters(), **kwargs)


def _step_with_the_loss() -> None:
    model, optimizer = _linear()
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step(loss)  # type: ignore[call-overload]


def _step_with_sparse_gradients() -> None:
    model, optimizer = _linear()
    model.bias.grad = torch.ones(2).to_sparse()
    optimizer.step()


def _sparse_gradient_for_sgd() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = co.SGD([("table", table.weight)])
    table(torch.tensor([1])).sum().backward()
    optimizer.step()


def _capture_of_batches(first: int, second: int) -> None:
    model, optimizer = _linear()

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    runner = co.CUDAGraphRunner(train_step, optimizers=optimizer)
    for count in (first, second):
        runner(torch.ones(count, 2))


def _torch_adamw() -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(torch.ones(2))])


LAST_BATCH = "; for a smaller last batch, give the DataLoader drop_last=True or call the function without the runner"
NAMED = "; pass model.named_parameters() to get names"

MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "another word for lr": (
        lambda: _linear(learning_rate=0.1),
        TypeError,
        "AdamW() got an unexpected keyword argument 'learning_rate'; did you mean lr?",
    ),
    "a misspelled option": (
        lambda: _linear(max_grad_nrom=1.0),
        TypeError,
        "AdamW() got an unexpected keyword argument 'max_grad_nrom'; did you mean max_grad_norm?",
    ),
    "a keyword like no other": (
        lambda: _linear(colour=1),
        TypeError,
        "AdamW() got an unexpected keyword argument 'colour'",
    ),
    "an argument out of range": (
        lambda: _linear(betas=(0.9, 1.0)),
        ValueError,
        "Invalid beta parameter at index 1: 1.0 (the argument betas[1] must be >= 0 and < 1)",
    ),
    "no such hyperparameter": (
        lambda: _linear()[1].hyperparameter("momentum"),
        KeyError,
        "\"AdamW has no hyperparameter 'momentum'; it has lr, betas, eps, weight_decay\"",
    ),
    "no such hyperparameter to schedule": (
        lambda: _linear()[1].schedule(learning_rate=lambda step: 1 / step),
        ValueError,
        "AdamW has no hyperparameter 'learning_rate'; it has lr, betas, eps, weight_decay; did you mean lr?",
    ),
    "no such group": (
        lambda: _linear()[1].hyperparameter("lr", 3),
        IndexError,
        "there is no param_groups[3]; the last is param_groups[0]",
    ),
    "no such group to schedule": (
        lambda: _linear()[1].schedule(group=-2, lr=lambda step: 1 / step),
        IndexError,
        "there is no param_groups[-2]; the last is param_groups[0]",
    ),
    "step(loss)": (
        _step_with_the_loss,
        TypeError,
        "step() takes nothing, or a function that evaluates the loss, got a Tensor; call loss.backward() and then step()",
    ),
    "LBFGS without a closure": (
        lambda: co.LBFGS([nn.Parameter(torch.ones(2))]).step(),
        TypeError,
        "LBFGS.step needs a closure: a function that clears the gradients, evaluates the loss, calls backward and returns "
        "the loss; got NoneType",
    ),
    "a path as a state dict": (
        lambda: _linear()[1].load_state_dict("model.pt"),  # type: ignore[arg-type]
        TypeError,
        "state_dict must be a dict, such as torch.load(path) returns, got 'model.pt'",
    ),
    "a checkpoint that lacks something": (
        lambda: co.AdamW([("w", nn.Parameter(torch.ones(2)))], amsgrad=True).load_state_dict(
            co.AdamW([("w", nn.Parameter(torch.ones(2)))]).state_dict()
        ),
        ValueError,
        "the checkpoint does not match the optimizer, as strict=True demands (AdamW); mismatched: w: the checkpoint has no "
        "max_exp_avg_sq for it, param_groups[0]: amsgrad, which decides which buffers exist, is False in the checkpoint",
    ),
    "a parameter without a name": (
        lambda: co.AdamW([nn.Parameter(torch.ones(2)) * 2]),
        ValueError,
        "can't optimize a non-leaf Tensor: 'param_groups[0]['params'][0]' was computed from another, as .to() does; pass "
        "the other one, or .detach().requires_grad_() of it" + NAMED,
    ),
    "a sparse gradient of one": (
        _step_with_sparse_gradients,
        TypeError,
        "AdamW does not support sparse gradients, please consider SparseAdam instead; 'param_groups[0]['params'][1]' has one"
        + NAMED,
    ),
    "a sparse gradient for SGD": (
        _sparse_gradient_for_sgd,
        TypeError,
        "SGD does not support sparse gradients, please consider SparseAdam instead; 'table' has one",
    ),
    "lr without a value": (
        lambda: _linear(lr=torch.tensor(0.1, device="meta")),
        ValueError,
        "the argument lr must have a value, got a tensor on the meta device",
    ),
    "a beta of a group without a value": (
        lambda: co.AdamW([{"params": [nn.Parameter(torch.ones(2))], "betas": (0.9, torch.tensor(0.9, device="meta"))}]),
        ValueError,
        "betas[1] of param_groups[0] must have a value, got a tensor on the meta device",
    ),
    "both fused and foreach": (
        lambda: _linear(fused=True, foreach=True),
        RuntimeError,
        "`fused` and `foreach` cannot be `True` together.",
    ),
    "modules in place of parameters": (
        lambda: co.AdamW(nn.Linear(2, 2).named_modules()),  # type: ignore[arg-type]
        TypeError,
        "optimizer can only optimize Tensors, but one of the params is torch.nn.modules.linear.Linear (''); did you mean "
        "its parameters()?",
    ),
    "a runner of torch's optimizer": (
        lambda: co.CUDAGraphRunner(_torch_adamw()),  # type: ignore[arg-type]
        TypeError,
        "target must be an optimizer of compiled_optim or a function, got torch.optim.adamw.AdamW",
    ),
    "a runner with torch's optimizer": (
        lambda: co.CUDAGraphRunner(_step_with_the_loss, [_linear()[1], _torch_adamw()]),  # type: ignore[list-item]
        TypeError,
        "optimizers must be the optimizers of compiled_optim that the function steps, at least one; got "
        "torch.optim.adamw.AdamW",
    ),
    "a smaller last batch": (
        lambda: _capture_of_batches(4, 3),
        ValueError,
        "x must be a float32 tensor of shape (4, 2) on cpu as in the first call, got a float32 tensor of shape (3, 2) on cpu"
        + LAST_BATCH,
    ),
    "a larger batch": (
        lambda: _capture_of_batches(3, 4),
        ValueError,
        "x must be a float32 tensor of shape (3, 2) on cpu as in the first call, "
        "got a float32 tensor of shape (4, 2) on cpu",
    ),
}


def test_both_flags_are_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True, foreach=True)
    assert str(caught.value) == MISTAKES["both fused and foreach"][2]


@pytest.mark.filterwarnings("ignore:.*uncaptured.*:RuntimeWarning")
@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says(name: str) -> None:
    mistake, kind, message = MISTAKES[name]
    with pytest.raises(kind) as caught:
        mistake()
    assert str(caught.value) == message


def test_a_path_object_is_told_as_one() -> None:
    with pytest.raises(TypeError, match=r"such as torch.load\(path\) returns, got a \w*Path"):
        _linear()[1].load_state_dict(Path("model.pt"))  # type: ignore[arg-type]


def _assigned(target: Any, key: str) -> None:
    target[key] = 0.1


WARNINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "at construction": (
        lambda: co.AdamW([{"params": [nn.Parameter(torch.ones(2))], "learning_rate": 0.1}]),
        "nothing reads param_groups[0]['learning_rate']; did you mean 'lr'?",
    ),
    "in a group that is added": (
        lambda: _linear()[1].add_param_group({"params": [nn.Parameter(torch.ones(2))], "weight_decy": 0.1}),
        "nothing reads param_groups[1]['weight_decy']; did you mean 'weight_decay'?",
    ),
    "assigned": (
        lambda: _assigned(_linear()[1].param_groups[0], "LR"),
        "nothing reads param_groups[0]['LR']; did you mean 'lr'?",
    ),
    "updated": (
        lambda: _linear()[1].param_groups[0].update(beta=(0.9, 0.99)),
        "nothing reads param_groups[0]['beta']; did you mean 'betas'?",
    ),
    "a hyperparameter as an attribute": (
        lambda: setattr(_linear()[1], "lr", 0.1),
        "nothing reads AdamW.lr; assign param_groups[i]['lr']",
    ),
    "an option as an attribute": (
        lambda: setattr(_linear()[1], "lowering", "eager"),
        "nothing reads AdamW.lowering; pass it to the constructor",
    ),
    "a misspelled attribute": (
        lambda: setattr(_linear()[1], "max_grad_nrom", 1.0),
        "nothing reads AdamW.max_grad_nrom; did you mean max_grad_norm?",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_what_nothing_reads_is_said(name: str) -> None:
    mistake, message = WARNINGS[name]
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$") as caught:
        mistake()
    assert len(caught) == 1


OTHERS = """initial_lr max_lr min_lr swa_lr base_lr lr_scale lr_mult layer_id name group_name param_names max_momentum
    base_momentum weight_decay_mult decay_mult decoupled_weight_decay rank scale use_muon momentum epoch train_mode
    weight_sum lr_max k r d0 t wd"""
"""Entries that schedulers, trainers and other optimizers keep in groups."""


def test_what_others_keep_in_groups_is_their_own() -> None:
    assert not [key for key in OTHERS.split() if misspelled(key, NAMES)]


def test_what_others_keep_in_groups_is_no_mistake() -> None:
    """What schedulers and trainers put there; a warning would be an error here."""
    _, optimizer = _linear()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    optimizer.param_groups[0].update(lr_scale=0.5, name="all", layer_id=3)
    pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("Learning_Rate", "lr"),
        ("epsilon", "eps"),
        ("beta1", "betas"),
        ("weight-decay", "weight_decay"),
        ("foreech", "foreach"),
    ],
)
def test_what_was_meant(word: str, name: str) -> None:
    assert meant(word, NAMES) == misspelled(word, NAMES) == name


def test_attributes_of_others_are_theirs() -> None:
    """Of gradient scalers, trainers and classes with a constructor of their own."""

    class Mine(co.AdamW):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr)
            self.lr = lr

    assert Mine([nn.Parameter(torch.ones(2))], 0.5).lr == 0.5
    _, optimizer = _linear()
    for name in ("grad_scale", "found_inf", "max_grad_norm", "skip_nonfinite", "_lr", "loss_scale", "step"):
        setattr(optimizer, name, None)


def test_a_schedule_that_counts_its_calls_is_said() -> None:
    calls = []

    def counting(step: torch.Tensor) -> float:
        calls.append(step)
        return 0.1 * len(calls)

    with pytest.warns(
        UserWarning, match=r"the schedule of lr in param_groups\[0\] gives .* for the same step count; let it"
    ):
        _linear()[1].schedule(lr=counting)
