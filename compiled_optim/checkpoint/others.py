"""What somebody else keeps in an optimizer's state, such as a hook or a wrapper: it is loaded as torch.optim loads it.

In a parameter's state, that is what has no name of an entry that an optimizer declares, or that an optimizer has whose
checkpoints are read. Beside the parameters' states it is whatever does not look like one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from compiled_optim.checkpoint import optimi
from compiled_optim.checkpoint.saved_values import Unloadable, check_memory, described, naming
from compiled_optim.rule.declared import every_state_name
from compiled_optim.state import ParamState
from compiled_optim.torch_internals import outside_inference_mode


def known_names() -> frozenset[str]:
    """The entries of a parameter's state that belong to an optimizer."""
    return every_state_name() | set(optimi.STATE)


def is_lost_state(key: Any, value: Any, known: frozenset[str]) -> bool:
    """Whether what a checkpoint holds under the key of no parameter looks as if it were the state of one."""
    return isinstance(key, Tensor) or (isinstance(value, Mapping) and {*value} <= known and len(value) > 0)


def copied(value: Any, what: str) -> Any:
    """A deep copy of ``value``, called ``what``; :class:`Unloadable` if there is none."""
    with naming(what, "cannot be copied"):
        if isinstance(value, Tensor):
            check_memory(value, what)
        return copy.deepcopy(value)


class Entries(NamedTuple):
    """What changes in a parameter's state besides the optimizer's own entries.

    Attributes:
        new: what is put there, by name.
        gone: the names of what is removed.
    """

    new: dict[Any, Any]
    gone: list[Any]

    def write(self, state: ParamState) -> None:
        """Write into a parameter's state, which is no change to steps."""
        for name in self.gone:
            state.drop_quietly(name)
        for name, value in self.new.items():
            state.set_quietly(name, value)

    @classmethod
    def of(
        cls, saved: Mapping[Any, Any], live: Mapping[Any, Any], known: Collection[str], param: Tensor
    ) -> tuple[Entries, list[str]]:
        """What gives ``live``, the state of ``param``, others' entries in ``saved`` for its own; and which do not load."""
        new, problems = {}, []
        for name, value in saved.items():
            what = name if isinstance(name, str) else described(name)
            try:
                with naming(what, "cannot be copied"), outside_inference_mode():
                    new[name] = _on(param, value, what)
            except Unloadable as problem:
                problems.append(str(problem))
        return cls(new, [name for name in live if name not in known and name not in saved]), problems


def _on(param: Tensor, value: Any, what: str) -> Any:
    """A copy of ``value`` with its tensors on the device of ``param``, and in its dtype if both are floating point."""
    if isinstance(value, Tensor):
        check_memory(value, what)
        cast = value.is_floating_point() and param.is_floating_point()
        return value.detach().to(param.device, param.dtype if cast else value.dtype, copy=True)
    if type(value) is dict:
        return {key: _on(param, element, what) for key, element in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_on(param, element, what) for element in value])
    return copy.deepcopy(value)
