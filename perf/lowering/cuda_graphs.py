"""What Inductor decides about CUDA graphs when it compiles for a GPU, which need not be there."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Recorded:
    """A part of a compiled function that one CUDA graph is to hold.

    Attributes:
        inputs: how many there are.
        stays: the positions of those that are read and written where they are.
        written: the positions of those that it writes.
        source: what Inductor wrote for the whole function.
    """

    inputs: int
    stays: tuple[int, ...]
    written: tuple[int, ...]
    source: str

    @property
    def copied(self) -> tuple[int, ...]:
        """The positions of inputs that are copied into the graph's own memory before each replay."""
        return tuple(i for i in range(self.inputs) if i not in self.stays)


@dataclass
class Decisions:
    """What was decided, in order."""

    recorded: list[Recorded] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # what Inductor wrote, function by function
    skipped: list[str] = field(default_factory=list)  # why functions are to run without

    @property
    def functions(self) -> int:
        """How many were compiled."""
        return len(self.sources)


@contextlib.contextmanager
def deciding() -> Iterator[Decisions]:
    """Note the decisions under ``fake_cuda``, for functions compiled with ``mode="reduce-overhead"``. None of them runs."""
    from torch._inductor import compile_fx, config, output_code
    from torch._inductor.graph import GraphLowering

    decisions = Decisions()

    def load(graph: GraphLowering, code: Any) -> types.SimpleNamespace:
        decisions.sources.append(code.value)

        def apply(functions: Sequence[Any]) -> None:
            for function in functions:
                function(call)

        def call(inputs: list[Any]) -> list[Any]:
            raise NotImplementedError("a function compiled for a GPU that is not there")

        runner = types.SimpleNamespace(partitions=[call], recursively_apply_fns=apply)
        return types.SimpleNamespace(call=call, runner=runner, __file__=__file__, __name__=__name__)

    def cudagraphify(model: Any, static_input_idxs: Sequence[int] = (), **kwargs: Any) -> Any:
        inputs, written = len(kwargs["placeholders"]), tuple(kwargs["mutated_input_idxs"])
        decisions.recorded.append(Recorded(inputs, tuple(static_input_idxs), written, decisions.sources[-1]))
        return model

    with (
        config.patch(shape_padding=False),  # which is decided by timings
        mock.patch.object(GraphLowering, "_compile_to_module_lines", load),
        mock.patch.object(compile_fx, "cudagraphify", cudagraphify),
        mock.patch.object(output_code, "log_cudagraph_skip_and_bump_counter", decisions.skipped.append),
    ):
        yield decisions
