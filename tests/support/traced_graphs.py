"""A backend of torch.compile that runs what Dynamo traced by AOTAutograd, and keeps the graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd


class Graphs:
    """A backend of Dynamo.

    Attributes:
        modules: the graphs that AOTAutograd made, in order.
        compiled: how many graphs came from Dynamo.
    """

    def __init__(self) -> None:
        self.modules: list[torch.fx.GraphModule] = []
        self.compiled = 0
        self._backend = aot_autograd(fw_compiler=self._note)

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiled += 1
        return self._backend(module, inputs)

    def _note(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        self.modules.append(module)
        return make_boxed_func(module.forward)

    @property
    def operators(self) -> set[str]:
        """The operators of all graphs, by their qualified names without overload."""
        targets = (n.target for module in self.modules for n in module.graph.nodes if n.op == "call_function")
        return {t._schema.name for t in targets if isinstance(t, torch._ops.OpOverload)}

    @property
    def namespaces(self) -> set[str]:
        """Where those are from."""
        return {name.partition("::")[0] for name in self.operators}
