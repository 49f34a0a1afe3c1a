"""State for the optimizers of optimi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiled_optim.checkpoint.optimi import has_counterpart, to_optimi
from compiled_optim.optimizer import CompiledOptimizer


def optimi_state_dict(optimizer: CompiledOptimizer) -> dict[str, Any]:
    """A state dict that optimi's optimizer of the same name loads, with which it goes on as ``optimizer`` does.

    For SGD, Adam, AdamW, RAdam, Lion, Adan, StableAdamW and Ranger of optimi 0.3. Its tensors are copies, which optimi can
    write into. optimi's plain loops then run, with the choices that are saved here and not those of its constructor. Loading
    goes the other way without a call: :meth:`CompiledOptimizer.load_state_dict` takes what optimi saves.

    What is not part of a group, such as ``max_grad_norm``, does not go along. RAdam's ``eps`` means something else in optimi
    for as long as its second bias correction is not 1: there it is added to the corrected root.

    Raises:
        ValueError: optimi has no such optimizer or option, or it cannot count as here: the parameters of a group took
            different numbers of steps where it counts them.
    """
    kind = type(optimizer)
    is_own = getattr(kind, "update", kind).__module__.startswith("compiled_optim.")
    if not is_own or not has_counterpart(optimizer.declaration):
        raise ValueError(f"optimi has no {kind.__name__}")
    for index, group in enumerate(optimizer.param_groups):
        if isinstance(scale := group.get("lr_scale"), Mapping) or callable(scale):  # of which a state dict has nothing
            raise ValueError(f"param_groups[{index}] has 'lr_scale', which has no counterpart in optimi")
    return to_optimi(optimizer.state_dict())
