"""Optimizers that train other parameters than those to evaluate."""

from __future__ import annotations

import torch

from compiled_optim.groups.live import Live
from compiled_optim.lowering.torch_ops.eager import EagerLowering
from compiled_optim.memory.torch_internals import is_capturing, outside_dynamo, outside_inference_mode
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.plan.clipping import Clipping
from compiled_optim.plan.plan import Plan
from compiled_optim.rule.rule import TRAIN_MODE
from compiled_optim.step.rule_step import RuleStep


class ViewedOptimizer(CompiledOptimizer):
    """An optimizer whose parameters stand for others, which are to be evaluated; a subclass has ``views``.

    The entry ``train_mode`` of each group says which of them the parameters are. It is saved, and a load takes it from the
    checkpoint: the model's parameters are to be loaded from the same one.
    """

    _modes = {TRAIN_MODE: True}

    def eval(self) -> None:
        """Let parameters be those to evaluate and to save for use; a step is an error until :meth:`train`.

        Parameters that never took a step stay as they are. What was rounded to 16 bits is rounded again, there and back.

        Raises:
            RuntimeError: a CUDA graph is being captured, or a step of several micro-batches has not ended.
        """
        self._show(train=False)

    def train(self) -> None:
        """Let parameters be those to train, as they are at first; raises what :meth:`eval` does."""
        self._show(train=True)

    @outside_dynamo
    @outside_inference_mode()
    @torch.no_grad()
    def _show(self, *, train: bool) -> None:
        engine = engine_of(self)
        with engine.lock:
            step, groups = engine.current(), engine.distinct_groups
            assert isinstance(step, RuleStep)
            if any(map(is_capturing, step.devices)):
                raise RuntimeError(
                    "a CUDA graph is being captured, which holds steps alone; call eval() and train() outside"
                )
            engine.accumulated.check_ended("evaluated")
            Live.send(engine.changes)
            changed = [i for i, group in enumerate(groups) if group[TRAIN_MODE] is not train]
            rule = self._view_rules["train" if train else "eval"]
            for plan in [lowering.plan for lowering in step.lowerings] if changed else ():
                members = plan.members
                view = Plan(rule, plan.statics, members, lambda _: None)
                before = view.scalars.clone()
                begun = zip(members, before[0].tolist(), strict=True)
                taking = [m.owner if m.group in changed and steps else None for m, steps in begun]
                lowering = EagerLowering(view, Clipping(plan.device))
                lowering.prepare(list(taking))
                try:
                    lowering.launch()
                finally:
                    view.scalars.copy_(before)
                lowering.finish()
            for index in changed:
                groups[index].set_quietly(TRAIN_MODE, train)
