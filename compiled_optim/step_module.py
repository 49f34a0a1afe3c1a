"""The step of an optimizer as a module, for training steps that are compiled into a file.

All tensors that the step reads and writes besides parameters and gradients are buffers, under descriptive names. So code
that another process compiled finds the tensors of this process's optimizer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compiled_optim.groups.parameters import first_few, named_parameters, numbered
from compiled_optim.lowering.inlined import InlinedStep
from compiled_optim.memory.layout import is_sharded
from compiled_optim.memory.torch_internals import called_while_tracing
from compiled_optim.optimizer import CompiledOptimizer, checked_engine
from compiled_optim.plan.clipping import NAMES
from compiled_optim.step.engine import Engine
from compiled_optim.step.traced import let_trace, run_inlined

_PARTS = re.compile(r", (?![^()]*\))|(?: with )?[{}] ?")  # separators in a description


class StepModule(nn.Module):
    """The step of an optimizer, as operations; :func:`as_module` returns it.

    Attributes:
        params: the optimizer's parameters.
        names: the names of the parameters, in the same order.
        description: by name, all facts on which code with the step depends.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._inlined: InlinedStep | None = None
        self._inlined = self.present()
        self.params = engine.params
        self.names = [name for name, _ in named_parameters(engine.groups.distinct)]
        live = self._live(self._inlined)
        self._rows = [[name for name, _ in row] for row in live]
        for name, tensor in itertools.chain(*live):
            self.register_buffer(name, tensor, persistent=False)
        self.description = self._described(self._inlined)

    def forward(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Update ``params``, which stand for :attr:`params`, by ``grads``; those without a gradient stay as they are."""
        digest = self._digest()
        if not len(params) == len(grads) == len(self.names):
            raise ValueError(f"it takes {len(self.names)} parameters and gradients, got {len(params)} and {len(grads)}")
        if torch.compiler.is_dynamo_compiling():
            let_trace()
        positions = [i for i, grad in enumerate(grads) if grad is not None]
        present = [grad for grad in grads if grad is not None]
        tensors, clipping, *hypers = [[getattr(self, name) for name in row] for row in self._rows]
        with torch.no_grad():
            run_inlined([*params], present, positions, tensors, hypers, clipping, self._name, digest)

    def check(self) -> None:
        """Replace the buffers by the tensors of the optimizer's next step, and check that its numbers are in range.

        Call it before code that was compiled with the module. Code of ``torch.compiler.precompile`` does so by itself.

        Raises:
            RuntimeError: groups, state or clipping changed, and this code is of another step. The message says how.
            ValueError: a number that was assigned is out of range.
        """
        self._buffers.update(itertools.chain(*self._live(self.present())))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield as :meth:`torch.nn.Module.named_buffers`, after :meth:`check`."""
        self.check()
        yield from super().named_buffers(*args, **kwargs)

    @called_while_tracing
    def _digest(self) -> str:
        return self.present().digest()

    def present(self) -> InlinedStep:
        """Return the operations of the optimizer's next step; ``RuntimeError`` if it has none, or not the module's."""
        engine = self._engine
        positions = [i for i, param in enumerate(engine.current().params) if param.requires_grad]
        reason = engine.inline(positions)
        reason = "its parameters are DTensors" if any(map(is_sharded, engine.params)) else reason
        kind, self._name, inlined = engine.kind.__name__, engine.name, engine.inlined
        if reason or inlined is None:
            can_choose = "lowered" in reason and engine.lowering != "inductor" and not engine.takes_sparse
            advice = "; make it with lowering='inductor'" if can_choose else ""
            raise RuntimeError(f"a step of {kind} cannot be a module: {reason}{advice}")
        if self._inlined is not None and self._inlined is not inlined:
            changed = differences(self.description, self._described(inlined))
            difference = changed or "groups or state were replaced by others of the same form"
            raise RuntimeError(f"{kind} changed after as_module(), which must be called again: {difference}")
        return inlined

    def _live(self, inlined: InlinedStep) -> list[list[tuple[str, Tensor]]]:
        """Return the tensors of a step with their names: state and constants, then clipping, and each group's numbers."""
        step = self._engine.step
        assert step is not None
        names = numbered([name.replace(".", "-") for name in inlined.names])
        rows = [list(zip(names, inlined.tensors, strict=True))]
        rows.append([(f"clipping/{n}", t) for n, t in zip(NAMES, inlined.clipping, strict=True)] if inlined.clips else [])
        for group in inlined.groups:
            rows.append([(f"numbers/{group}/{i}", vector) for i, vector in enumerate(step.numbers[group])])
        return rows

    def _described(self, inlined: InlinedStep) -> dict[str, str]:
        engine = self._engine
        buffers = {name: form(tensor) for name, tensor in itertools.chain(*self._live(inlined))}
        params = {f"parameter {name}": form(param) for name, param in named_parameters(engine.groups.distinct)}
        order = {"order": ", ".join(params)}
        return {"optimizer": engine.kind.__name__, **params, **inlined.choices(), **buffers, **order}


def as_module(optimizer: CompiledOptimizer) -> StepModule:
    """Return the step as a module, for training steps that torch compiles to a file; see ``tools/recipes/kept_step.py``.

    Its buffers are the optimizer's live tensors: state, step counts, hyperparameters and constants. They are named by
    parameter or group, such as ``exp_avg/0-weight`` and ``numbers/0/0``. ``forward(params, grads)`` is the step, for code
    that compilers make; both are lists in the order of the module's ``names``.

    Raises:
        TypeError: ``optimizer`` is not one of this package.
        RuntimeError: steps cannot be inlined, or ``lowering`` is not ``"inductor"``.
    """
    return StepModule(checked_engine(optimizer, "as_module"))


def form(tensor: Tensor) -> str:
    """Return, in words, the facts about ``tensor`` on which code that takes it depends."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return, in words, the first difference of ``now`` from ``before``, and how many more there are; or ""."""
    # Buffers, which follow from the others, are last, and in each half, additions and removals are first.
    names = sorted({**before, **now}, key=lambda name: ("/" in name, name in before and name in now))
    if not (changed := [name for name in names if before.get(name) != now.get(name)]):
        return ""
    texts = [side.get(changed[0], "absent") for side in (before, now)]
    parts = [pair for pair in itertools.zip_longest(*map(_PARTS.split, texts), fillvalue="") if pair[0] != pair[1]]
    old, new = (first_few([*filter(None, (pair[i] for pair in parts))]) or texts[i] for i in (0, 1))
    more = f", and {len(changed) - 1} more changed" if len(changed) > 1 else ""
    return f"{changed[0]} was {old} and is {new}{more}"
