"""A training step as a file: loss, gradients, clipping and the optimizer's step, as machine code that any process can load.

The code has no Python in it and knows no optimizer: all tensors are arguments. So it is written beside the code what it was
made for, and compared with what it is called with.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compiled_optim.groups.parameters import first_three
from compiled_optim.memory.torch_internals import compile_to_file, load_compiled_file
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.step.module import StepModule, differences, form

_DESCRIPTION = "compiled_optim.json"
_REASONS = {
    "no argument|convert all Tensors": "a tensor that is no parameter, buffer or input: hand it over as one, or write "
    "torch.full in place of torch.tensor",
    "hooks of saved tensors|use_reentrant": "activation checkpointing, or other hooks of saved tensors: turn them off",
    r"data-dependent|\.numpy\(\)": "the value of a tensor, to branch or compute in Python: write torch.where or torch.cond",
}
"""By what torch says where it cannot trace, what is used there."""


def save_step(
    path: str | os.PathLike[str],
    loss_of: Callable[..., Tensor],
    model: nn.Module,
    optimizer: CompiledOptimizer,
    *inputs: Any,
) -> TrainingStep:
    """Compile a training step of ``model`` and ``optimizer`` into a file, for :func:`load_step`. An experiment.

    Nothing is updated. The step computes ``loss_of(model, *inputs)``, its gradients, and the step of ``optimizer``, which
    needs ``lowering="inductor"``. It does not use ``.grad``, and runs no hooks of the optimizer or of modules.

    Args:
        path: of the file. It holds machine code, for this version of torch and this processor.
        loss_of: returns the loss. Its Python, and the model's, run now and never again.
        model: its buffers may be changed in place.
        optimizer: of some or all of the model's parameters. It has no ``opt.schedule``, whose functions cannot be compared;
            use torch's schedulers, or assign numbers.
        *inputs: examples of what the step takes: tensors, or dicts, lists and tuples of them. Later ones have their shapes.

    Returns:
        The step, as :func:`load_step` does.

    Raises:
        RuntimeError: steps of ``optimizer`` cannot be inlined, or ``loss_of`` cannot be traced: it reads a tensor that is
            not handed to it, or a value, recomputes activations, or calls ``backward``. Or the code cannot be run.
        TypeError, ValueError: an input or the loss is no tensor, a parameter of ``optimizer`` is none of ``model`` or has
            hooks, or the optimizer is none of this package.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    model, step = _modules(model, optimizer)
    evaluated, tensors, buffers = _Loss(loss_of, model), _tensors(model), dict(step.named_buffers())
    leaves, spec = pytree.tree_flatten(inputs)
    description = _description(model, step, inputs)
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    if strange := [name for name, param in zip(step.names, step.params, strict=True) if id(param) not in places]:
        raise ValueError(f"the optimizer has parameters that are none of the model: {first_three(strange)}")
    own = [places[id(param)] for param in step.params]
    moving = [place for place in own if tensors[place].requires_grad]

    def train(*flat: Tensor) -> list[Tensor]:
        rest = iter(flat)
        given, state = ([*itertools.islice(rest, len(part))] for part in (tensors, buffers))
        seen = [t.detach().requires_grad_(i in moving) for i, t in enumerate(given)]
        named = {name: seen[places[id(tensor)]] for name, tensor in _named(evaluated)}
        loss = torch.func.functional_call(evaluated, named, tuple(pytree.tree_unflatten([*rest], spec)))
        if any(tensor.grad is not None for tensor in seen):
            raise RuntimeError("loss_of calls backward(), which the step does: return the loss alone")
        if not isinstance(loss, Tensor) or loss.is_complex() or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError("loss_of must return one real number, as a tensor that depends on a parameter")
        found = torch.autograd.grad(loss, [seen[i] for i in moving], allow_unused=True)
        with torch.no_grad():
            for name, tensor in _named(evaluated):  # where forward put another tensor in place of a buffer
                if (last := named[name]) is not (first := seen[places[id(tensor)]]):
                    first.copy_(last)
        grads = dict(zip(moving, found, strict=True))
        update = [given[i] for i in own], [grads.get(i) for i in own]
        torch.func.functional_call(step, dict(zip(buffers, state, strict=True)), update)
        return [loss.detach()]

    flat = [*tensors, *buffers.values(), *leaves]
    try:
        with torch.enable_grad(), torch.autograd.graph.disable_saved_tensors_hooks("hooks of saved tensors"):
            graph = make_fx(train, {torch.ops.aten._foreach_norm.Scalar: _norms}, tracing_mode="fake")(*flat)
        if len(graph.graph.find_nodes(op="get_attr")):
            raise AssertionError("a tensor that is no argument")
    except (AssertionError, RuntimeError) as error:
        if not (used := [what for said, what in _REASONS.items() if re.search(said, str(error))]):
            raise
        raise RuntimeError(f"loss_of or the model uses {used[0]}") from error
    compile_to_file(path, graph, flat, {_DESCRIPTION: json.dumps(description, indent=1)})
    return load_step(path, model, optimizer)


def load_step(path: str | os.PathLike[str], model: nn.Module, optimizer: CompiledOptimizer) -> TrainingStep:
    """Load what :func:`save_step` wrote, for a model and an optimizer of the same kind. Nothing is traced or compiled.

    Load only files that you trust: they hold machine code.

    Returns:
        A function of the inputs, which returns the loss. It reads and writes the tensors of ``model`` and ``optimizer`` as
        they are when it is called: load checkpoints, write numbers to groups, use schedulers at any time.

    Raises:
        ValueError: the file is of another model, optimizer, version of torch or processor, or none of :func:`save_step`.
            The message names what differs. The function raises it too, where something changed since.
        RuntimeError: steps of ``optimizer`` cannot be inlined.
    """
    try:
        with zipfile.ZipFile(path) as file:
            saved = json.loads(file.read(next(name for name in file.namelist() if name.endswith(_DESCRIPTION))))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ValueError(f"{os.fspath(path)} is no file of save_step") from error
    step = TrainingStep(saved, model, optimizer)
    step._code = load_compiled_file(path)
    return step


class TrainingStep:
    """A training step that was loaded from a file; see :func:`load_step`."""

    _code: Callable[[list[Tensor]], list[Tensor]]
    _seen: Any = None  # what was compared last

    def __init__(self, saved: Mapping[str, str], model: nn.Module, optimizer: CompiledOptimizer) -> None:
        self._saved, self._optimizer = saved, optimizer
        self._model, self._step = _modules(model, optimizer)
        self._compare(None)

    def __call__(self, *inputs: Any) -> Tensor:
        """Take a step; returns the loss."""
        engine, (leaves, spec) = engine_of(self._optimizer), pytree.tree_flatten(inputs)
        with engine.lock, torch.no_grad():
            try:
                self._step.check()
            except RuntimeError:
                self._step, self._seen = self._optimizer.as_module(), None  # others of the same form will do
            own = _tensors(self._model)
            flat = [*own, *self._step.buffers(), *leaves]
            kinds = [(t.dtype, t.shape, t.stride(), t.device) if isinstance(t, Tensor) else t for t in flat]
            marks = [(id(tensor), tensor.requires_grad, _has_hooks(tensor)) for tensor in own]
            modules = [(type(m), m.training, m.extra_repr()) for m in self._model.modules()]
            seen = kinds, spec, marks, modules
            if seen != self._seen:
                self._compare(inputs)
                self._seen = seen
            loss = self._code(flat)[0]
            torch.autograd.graph.increment_version([*own, *self._step.written()])
            engine.runs += 1
            engine.steps += 1
        return loss

    def _compare(self, inputs: Sequence[Any] | None) -> None:
        now = _description(self._model, self._step, inputs)
        left = {name: text for name, text in self._saved.items() if inputs is not None or not name.startswith("input")}
        if found := differences(left, now):
            raise ValueError(f"the file holds another step: {found}; undo that, or call save_step again")


def _modules(model: Any, optimizer: Any) -> tuple[nn.Module, StepModule]:
    """The model that was perhaps compiled, and the step of the optimizer; ``TypeError`` where they are something else."""
    if not (isinstance(model, nn.Module) and isinstance(optimizer, CompiledOptimizer)):
        got = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise TypeError(f"a step takes a torch.nn.Module and an optimizer of this package, got {got}")
    return getattr(model, "_orig_mod", model), optimizer.as_module()


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def _norms(tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """What machine code would otherwise call by way of Python's table of operators."""
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


class _Loss(nn.Module):
    """A loss as a module, whose tensors can be replaced in a call."""

    def __init__(self, loss_of: Callable[..., Tensor], model: nn.Module) -> None:
        super().__init__()
        self.model, self._loss_of = model, loss_of

    def forward(self, *inputs: Any) -> Tensor:
        return self._loss_of(self.model, *inputs)


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _tensors(model: nn.Module) -> list[Tensor]:
    return list({id(tensor): tensor for _, tensor in _named(model)}.values())


def _description(model: nn.Module, step: StepModule, inputs: Sequence[Any] | None) -> dict[str, str]:
    """By name, all that the code depends on."""
    processors = {str(t.device): torch.cuda.get_device_name(t.device) for t in _tensors(model) if t.is_cuda}
    able = " ".join(sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True))
    found = {"torch": torch.__version__, "processor": f"{platform.machine()} {able}", **processors, **step.description}
    for name, module in model.named_modules():
        text = f"{type(module).__qualname__}({module.extra_repr()}), training={module.training}"
        found[f"module '{name}'"] = re.sub(r" at 0x\w+", "", text)
    firsts: dict[int, str] = {}
    order = {id(param): place for place, param in enumerate(step.params)}
    if found["schedules"] != "[]":
        raise ValueError(f"a file cannot hold the functions of opt.schedule, here of {found['schedules']}: use a scheduler")
    for name, tensor in _named(model):
        if _has_hooks(tensor):
            raise ValueError(f"'{name}' has hooks for its gradient, which a file cannot hold: remove them")
        is_tied = f", tied to {first}" if (first := firsts.setdefault(id(tensor), name)) != name else ""
        owner = f"parameter {order[id(tensor)]}" if id(tensor) in order else "none"
        text = f"{form(tensor)}, requires_grad={tensor.requires_grad}, {owner} of the optimizer{is_tied}"
        found[f"tensor '{name}'"] = text
    for place, given in enumerate(inputs or ()):
        leaves, spec = pytree.tree_flatten(given)
        if strange := [leaf for leaf in leaves if not isinstance(leaf, Tensor)]:
            raise TypeError(f"input {place} of a step must hold tensors, got {type(strange[0]).__name__}")
        found[f"input {place}"] = " ".join(f"{'; '.join(map(form, leaves))} in {spec}".split())
    return found
