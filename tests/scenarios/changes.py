"""Every change that a user can make between two training steps, one function each; by name in ``CHANGES``."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer

OPTIONS = {"lr": 0.03, "betas": (0.7, 0.8), "eps": 1e-4, "weight_decay": 0.2}


class Model(nn.Module):
    """Three layers in float64; a test can exchange, tie, take away and add layers and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.d: nn.Module = nn.Identity()
        self.to(torch.float64)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(values(*param.shape))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).tanh()
        return self.d(self.c(self.b(hidden.to(self.b.weight.dtype)).to(x.dtype).tanh()))


@dataclass
class Training:
    """A model and its optimizer.

    Attributes:
        rate: the tensor that the learning rate was given as, where it was.
        kept: what a change made before the first step, such as a scheduler.
    """

    model: Model
    optimizer: CompiledOptimizer
    rate: Tensor
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    @property
    def weight(self) -> nn.Parameter:
        return self.model.b.weight

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.weight]


Do = Callable[[Training], object]


@dataclass(frozen=True)
class Change:
    """A change, ``do``, in a training that began with an optimizer of a ``kind`` and, once, with ``begin``."""

    do: Do
    kind: type[CompiledOptimizer] = co.AdamW
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    begin: Do = lambda t: None
    has_tensor_rate: bool = False


def values(*shape: int) -> Tensor:
    """Numbers that differ from element to element."""
    return torch.linspace(-0.7, 0.9, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def _set(**entries: Any) -> Do:
    return lambda t: t.group.update(entries)


def _assign(name: str, value: Any) -> Do:
    return lambda t: setattr(t.optimizer, name, value)


def _tell(t: Training) -> None:
    """Give the first group the parameters that the model has now."""
    t.group["params"] = list(t.model.parameters())


def _replace(t: Training) -> None:
    t.model.b.weight = nn.Parameter(values(4, 4))


def _replace_by_another_shape(t: Training) -> None:
    t.model.c.weight, t.model.c.bias = nn.Parameter(values(3, 4)), nn.Parameter(values(3))


def _swap(t: Training) -> None:
    t.model.a.weight, t.model.b.weight = t.model.b.weight, t.model.a.weight


def _tie(t: Training) -> None:
    t.model.b.weight = t.model.a.weight


def _remove(t: Training) -> None:
    t.model.b = nn.Identity()  # type: ignore[assignment]
    t.model.b.weight = t.model.a.weight


def _swap_tensors(t: Training) -> None:
    other = nn.Parameter(values(4, 4))
    torch.utils.swap_tensors(t.weight, other)


def _load_by_assignment(t: Training) -> None:
    t.model.load_state_dict({name: value + 0.25 for name, value in t.model.state_dict().items()}, assign=True)


def _assign_data(t: Training) -> None:
    t.weight.data = values(4, 4)


def _write(t: Training) -> None:
    with torch.no_grad():
        t.weight.mul_(0.5)


def _told(change: Do) -> Do:
    def do(t: Training) -> None:
        change(t)
        _tell(t)

    return do


def _add_a_group(t: Training) -> None:
    layer = nn.Linear(2, 2).to(torch.float64)
    with torch.no_grad():
        layer.weight.copy_(values(2, 2))
        layer.bias.copy_(values(2))
    t.model.d = layer
    t.optimizer.add_param_group({"params": [(f"d.{name}", p) for name, p in layer.named_parameters()], "lr": 0.1})


def _split_the_group(t: Training) -> None:
    pairs = list(t.model.named_parameters())
    t.group["params"] = [p for _, p in pairs[:2]]
    t.optimizer.add_param_group({"params": pairs[2:], "lr": 0.1})


def _take_out(t: Training) -> None:
    t.group["params"] = [p for p in t.group["params"] if p is not t.model.a.bias]


def _reverse(t: Training) -> None:
    t.group["params"] = t.group["params"][::-1]


def _replace_the_group(t: Training) -> None:
    t.optimizer.param_groups = [{**t.group, "lr": 0.02}]


def _state_entry(name: str, how: str) -> Do:
    def do(t: Training) -> None:
        new = torch.full_like(t.state[name], 3.0)
        if how == "assign":
            t.state[name] = new
        elif how == "data":
            t.state[name].data = new
        else:
            t.state[name].copy_(new)

    return do


def _delete_state(t: Training) -> None:
    del t.optimizer.state[t.weight]


def _clear_state(t: Training) -> None:
    t.optimizer.state.clear()


def _assign_state(t: Training) -> None:
    t.optimizer.state = {p: {k: v.clone() for k, v in entries.items()} for p, entries in t.optimizer.state.items()}


def _own_slot(t: Training) -> None:
    t.state["mine"] = torch.ones(3)


def _saved(t: Training, **entries: Any) -> Any:
    saved = copy.deepcopy(t.optimizer.state_dict())
    saved["param_groups"][0].update(entries)
    return saved


def _load(**entries: Any) -> Do:
    return lambda t: t.optimizer.load_state_dict(_saved(t, **entries))


def _load_through_a_file(t: Training) -> None:
    file = io.BytesIO()
    torch.save(t.optimizer.state_dict(), file)
    t.optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))


def _gradient(make: Callable[[Tensor], Tensor | None]) -> Do:
    """Let every gradient be made by ``make`` from the one that backward left, before each step from now on."""

    def do(t: Training) -> None:
        for param in t.model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", make(p.grad)))

    return do


def _strided(grad: Tensor) -> Tensor:
    return torch.empty(*grad.shape, 2, dtype=grad.dtype)[..., 0].copy_(grad)


def _leave_gradients(t: Training) -> None:
    t.kept["keeps"] = True


def _freeze(t: Training) -> None:
    t.weight.requires_grad_(False)


def _schedule(t: Training) -> None:
    t.optimizer.schedule(lr=lambda step: 0.1 / step)


def _begin_a_scheduler(t: Training) -> None:
    t.kept["scheduler"] = lr_scheduler.ExponentialLR(t.optimizer, 0.9)


def _begin_a_cycle(t: Training) -> None:
    t.kept["scheduler"] = lr_scheduler.OneCycleLR(t.optimizer, 0.3, total_steps=9)


def _step_the_scheduler(t: Training) -> None:
    t.kept["scheduler"].step()


def _hand_out(t: Training) -> None:
    t.kept["live"] = t.optimizer.hyperparameter("lr")


def _fill(name: str, value: float) -> Do:
    return lambda t: t.optimizer.hyperparameter(name).fill_(value)


def _hold(t: Training) -> None:
    """Read what a user may look at between two steps."""
    str(co.compile_report(t.optimizer)), co.memory_report(t.optimizer), t.optimizer.hyperparameters(), repr(t.optimizer)


_MOMENTUM = {"lr": 0.03, "momentum": 0.9}

CHANGES: dict[str, Change] = {
    "nothing": Change(lambda t: None),
    "reports and representations are read": Change(_hold),
    # Numbers.
    "lr is assigned": Change(_set(lr=0.01)),
    "lr is assigned as it was": Change(_set(lr=0.03)),
    "lr is 0": Change(_set(lr=0.0)),
    "lr is multiplied": Change(lambda t: t.group.__setitem__("lr", t.group["lr"] * 0.5)),
    "lr is negative": Change(_set(lr=-0.1)),
    "lr is a tensor": Change(lambda t: t.group.update(lr=torch.tensor(0.01, dtype=torch.float64))),
    "lr is filled": Change(_fill("lr", 0.01)),
    "lr is filled after it was handed out": Change(lambda t: t.kept["live"].fill_(0.01), begin=_hand_out),
    "the tensor that lr was given as is written": Change(lambda t: t.rate.fill_(0.01), has_tensor_rate=True),
    "lr that was given as a tensor is assigned": Change(_set(lr=0.01), has_tensor_rate=True),
    "betas are assigned": Change(_set(betas=(0.5, 0.6))),
    "weight_decay becomes 0": Change(_set(weight_decay=0.0)),
    "weight_decay is no longer 0": Change(_set(weight_decay=0.3), options={**OPTIONS, "weight_decay": 0.0}),
    "momentum becomes 0": Change(_set(momentum=0.0), co.SGD, _MOMENTUM),
    "momentum is no longer 0": Change(_set(momentum=0.9), co.SGD, {**_MOMENTUM, "momentum": 0.0}),
    "momentum is filled": Change(_fill("momentum", 0.4), co.SGD, _MOMENTUM),
    "a scheduler steps": Change(_step_the_scheduler, begin=_begin_a_scheduler),
    "OneCycleLR steps": Change(_step_the_scheduler, begin=_begin_a_cycle),
    "a schedule in the step begins": Change(_schedule),
    "lr is assigned under a schedule in the step": Change(_set(lr=0.01), begin=_schedule),
    "a default is assigned": Change(lambda t: t.optimizer.defaults.update(lr=0.5)),
    # Options.
    "maximize is switched on": Change(_set(maximize=True)),
    "amsgrad is switched on": Change(_set(amsgrad=True)),
    "amsgrad is switched off": Change(_set(amsgrad=False), options={**OPTIONS, "amsgrad": True}),
    "cautious is switched on": Change(_set(cautious=True)),
    "nesterov is switched on": Change(_set(nesterov=True), co.SGD, _MOMENTUM),
    "capturable is written": Change(_set(capturable=True)),
    "a key of the user's is written": Change(_set(mine=3)),
    "max_grad_norm is switched on": Change(_assign("max_grad_norm", 0.1)),
    "max_grad_norm is assigned": Change(_assign("max_grad_norm", 0.1), options={**OPTIONS, "max_grad_norm": 1.0}),
    "max_grad_norm is switched off": Change(_assign("max_grad_norm", None), options={**OPTIONS, "max_grad_norm": 0.1}),
    "skip_nonfinite is switched on": Change(_assign("skip_nonfinite", True)),
    # Parameters.
    "a parameter is replaced": Change(_replace),
    "a parameter is replaced, told": Change(_told(_replace)),
    "parameters are replaced by other shapes, told": Change(_told(_replace_by_another_shape)),
    "parameters are swapped": Change(_swap),
    "parameters are swapped, told": Change(_told(_swap)),
    "parameters are tied": Change(_tie),
    "parameters are tied, told": Change(_told(_tie)),
    "a layer is removed, told": Change(_told(_remove)),
    "tensors are swapped": Change(_swap_tensors),
    "a model is loaded": Change(lambda t: t.model.load_state_dict({k: v + 0.25 for k, v in t.model.state_dict().items()})),
    "a model is loaded by assignment, told": Change(_told(_load_by_assignment)),
    "data is assigned": Change(_assign_data),
    "a parameter is written": Change(_write),
    "a parameter is frozen": Change(_freeze),
    "a parameter is converted": Change(lambda t: t.model.b.to(torch.float32)),
    "a group is added": Change(_add_a_group),
    "a group is split": Change(_split_the_group),
    "a parameter is taken out": Change(_take_out),
    "parameters are reordered": Change(_reverse),
    "groups are replaced": Change(_replace_the_group),
    # Gradients.
    "gradients are filled with 0": Change(_leave_gradients),
    "gradients are copies": Change(_gradient(lambda grad: grad.clone())),
    "gradients are strided": Change(_gradient(_strided)),
    "gradients are absent": Change(_gradient(lambda grad: None)),
    # State.
    "a moment is filled": Change(_state_entry("exp_avg", "fill")),
    "a moment is assigned": Change(_state_entry("exp_avg", "assign")),
    "a moment's data is assigned": Change(_state_entry("exp_avg", "data")),
    "a step count is filled": Change(_state_entry("step", "fill")),
    "a step count is assigned": Change(_state_entry("step", "assign")),
    "a step count's data is assigned": Change(_state_entry("step", "data")),
    "a parameter's state is deleted": Change(_delete_state),
    "state is cleared": Change(_clear_state),
    "state is assigned": Change(_assign_state),
    "a user's slot is written": Change(_own_slot),
    # Checkpoints and copies.
    "a state dict is taken": Change(lambda t: t.optimizer.state_dict()),
    "a state dict is loaded": Change(_load()),
    "a state dict is loaded through a file": Change(_load_through_a_file),
    "a state dict with another lr is loaded": Change(_load(lr=0.01)),
    "a state dict with maximize is loaded": Change(_load(maximize=True)),
    "a copy is made": Change(lambda t: copy.deepcopy(t.optimizer)),
    "it is pickled": Change(lambda t: pickle.loads(pickle.dumps(t.optimizer))),
}
