"""Saving a state dict, in torch.optim's layout.

It has ``state`` by parameter index, and ``param_groups`` with Python numbers and, where the parameters have names,
``param_names``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from compiled_optim.checkpoint.read import FORMAT_VERSION
from compiled_optim.groups.param_group import ParamGroup
from compiled_optim.rule.fields import LR_SCALE, is_per_parameter
from compiled_optim.rule.rule import RULE, WHY
from compiled_optim.state import OptimizerState


def save(groups: Sequence[ParamGroup], state: OptimizerState, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the state dict: hyperparameters as floats, step counts and scalars as copies on the CPU, buffers themselves.

    ``"optimizer"`` is the class's name. A group lacks options at their defaults that torch.optim does not have.

    Run-time flags, but for ``maximize``, have their defaults in it, not the optimizer's values.
    """
    packed_groups, packed_state = [], {}
    indices = itertools.count()
    for group in groups:
        declaration = group.kind._declaration
        numbers = dict(zip(group["params"], indices, strict=False))  # the last index of each, as in torch.optim
        floats = group.floats()
        flags = {name: flag.default for name, flag in group.kind._flags().items() if name != "maximize"}
        packed = {k: flags.get(k, v) for k, v in group.items() if k not in floats and k not in ("params", WHY)}
        packed |= {LR_SCALE: 1.0} if declaration.scales_lr and is_per_parameter(packed.get(LR_SCALE)) else {}
        packed |= {RULE: group.kind.__name__} if RULE in packed else {}
        packed_groups.append({**floats, **packed, "params": [numbers[param] for param in group["params"]]})
        for param, number in numbers.items():
            # torch.distributed.checkpoint loads into the tensors of a state dict, and then drops the state of frozen
            # parameters (pytorch#192202). Their loaded state reaches the optimizer only if the tensors are live ones.
            copied = declaration.scalar_names if param.requires_grad else ()
            if entries := state.get(param):
                packed_state[number] = {
                    k: v.detach().to("cpu", copy=True) if k in copied and isinstance(v, Tensor) else v
                    for k, v in entries.items()
                }
    packed_state |= {key: value for key, value in state.foreign.items() if key not in packed_state}
    result = {"state": packed_state, "param_groups": packed_groups, "format_version": FORMAT_VERSION}
    result |= {"optimizer": groups[0].kind.__name__} if groups else {}
    return result | ({"aliases": dict(aliases)} if aliases else {})
