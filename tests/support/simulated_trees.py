"""Inductor's CUDA graphs on the CPU: a function runs once in the memory of its graphs, is then recorded, and then replayed.

As in torch, a recording is valid for the addresses that inputs which stay have in it; other inputs are copied into it; and
memory of the graphs that is still there when the function ends, and is none of its outputs, is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simulated_graph
import torch
from kept_memory import Made
from simulated_graph import SimulatedGraph
from torch import Tensor

from compiled_optim.step import engine


class SimulatedTrees:
    """A backend of Dynamo.

    Attributes:
        compiled: how many functions came from Dynamo.
        warm_ups, recordings, replays: of all of them.
        left: how many graphs hold an operator that none may hold, and so are run as they are.
        copied: by function, the shapes of the inputs that each replay copies.
    """

    def __init__(self, patch: Any) -> None:
        self.compiled = self.warm_ups = self.recordings = self.replays = self.left = 0
        self.copied: list[list[tuple[int, ...]]] = []
        simulated_graph.install(patch)
        patch.setattr(engine, "inductor_captures", lambda device: True)

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiled += 1
        unsafe = torch.Tag.cudagraph_unsafe
        if any(unsafe in getattr(getattr(n.target, "default", n.target), "tags", ()) for n in module.graph.nodes):
            self.left += 1
            return module.forward
        places = [n for n in module.graph.nodes if n.op == "placeholder"]
        stays = [n.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None for n in places]
        self.copied.append([tuple(x.shape) for x, own in zip(inputs, stays, strict=True) if not own])
        return _Function(self, module, stays)


class _Function:
    """One compiled function and its recordings."""

    def __init__(self, trees: SimulatedTrees, module: torch.fx.GraphModule, stays: list[bool]) -> None:
        self._trees, self._module, self._stays = trees, module, stays
        self._is_warm = False
        self._recordings: dict[tuple[int, ...], tuple[SimulatedGraph, list[Any], Any]] = {}

    def __call__(self, *inputs: Any) -> Any:
        if not self._is_warm:
            self._is_warm = True
            self._trees.warm_ups += 1
            return self._watched(Made(), inputs)
        addresses = tuple(x.data_ptr() for x, stays in zip(inputs, self._stays, strict=True) if stays)
        if addresses not in self._recordings:
            self._trees.recordings += 1
            own = [x if stays else self._copy(x) for x, stays in zip(inputs, self._stays, strict=True)]
            graph = SimulatedGraph(torch.device("cpu"))
            made = Made()
            with graph.capturing():
                outputs = self._watched(made, own)
            self._recordings[addresses] = graph, own, outputs
        self._trees.replays += 1
        graph, own, outputs = self._recordings[addresses]
        for place, given in zip(own, inputs, strict=True):
            if place is not given:
                place.detach().copy_(given)
        graph.replay()
        return [x.clone() if isinstance(x, Tensor) else x for x in outputs]

    def _watched(self, made: Made, inputs: Any) -> Any:
        with made:
            outputs = self._module(*inputs)
        if SimulatedGraph.recording is None:
            assert made.kept(outputs) == 0, "something stays in memory that the graphs will use anew"
        return outputs

    def _copy(self, x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad)
