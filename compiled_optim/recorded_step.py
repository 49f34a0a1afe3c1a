"""A whole training step in a graph: what its capture found and left in Python, and what every replay does besides."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule.fields import Hyper
from compiled_optim.staleness import CapturedGradients, Surroundings


class RecordedStep:
    """What the capture of a training step found and left outside of the graph.

    Args:
        optimizers: those that the training step uses.
        modules: those that it reads.
        dropped: ids of the parameters whose gradients the step drops, as far as is known.
    """

    def __init__(
        self, optimizers: Sequence[CompiledOptimizer], modules: Sequence[nn.Module], dropped: Collection[int]
    ) -> None:
        self._optimizers = optimizers
        self._surroundings = Surroundings(optimizers, modules)
        params = self._surroundings.all_params
        self._params = params
        self._gradients = CapturedGradients(params, self._surroundings.names, len(self._surroundings.params), dropped)
        self._before = [o.events.steps for o in optimizers]
        self._param_versions = [p._version for p in params]
        self._settled: object = None
        self._steps: list[int] = []
        self._hypers = [_hypers_of(o) for o in optimizers]
        self._versions = [{name: t._version for name, t in named.items()} for named in self._hypers]
        self._keys: list[tuple[object, ...] | None] = []
        self._scalers: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def capturing(self, steps: Sequence[int]) -> Iterator[None]:
        """Watch a capture of so many steps of each optimizer."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(watching_zero_grad(self._optimizers, self._gradients.dropped.report))
            for optimizer, count in zip(self._optimizers, steps, strict=True):
                stack.enter_context(optimizer.captured_by_runner(count))
            yield
        self._gradients.leave()
        versions = zip(self._params, self._param_versions, strict=True)
        self._surroundings.mark({id(p) for p, version in versions if p._version != version})
        self._steps = [o.events.steps - before for o, before in zip(self._optimizers, self._before, strict=True)]
        self._scalers = [o.taken_scaler for o in self._optimizers]
        self._keys = self._refreshed()
        self._forget_steps()

    def check(self) -> None:
        """Refuse a function whose Python changed what a replay could not change again.

        Raises:
            RuntimeError: naming it.
        """
        for optimizer, named, versions, steps in zip(
            self._optimizers, self._hypers, self._versions, self._steps, strict=True
        ):
            if not steps:
                raise RuntimeError(f"the function did not step {type(optimizer).__name__}, which is one of the optimizers")
            for name, tensor in _hypers_of(optimizer).items():
                if tensor is not named.get(name) or tensor._version != versions[name]:
                    raise RuntimeError(
                        f"the function writes {name}, which every replay would repeat; call schedulers and set "
                        "hyperparameters outside of it"
                    )
        if None in self._keys:
            raise RuntimeError("the function changes groups or state of its optimizers; do that outside of it")
        change = self._surroundings.change()
        if change:
            raise RuntimeError(f"the function itself changes what every replay would find as it was: {change}")
        self._gradients.accept()

    def undo(self) -> None:
        """Restore gradients, what modules hold, and step counts after a capture that failed."""
        self._gradients.put_back()
        self._surroundings.put_back()
        self._forget_steps()

    def _forget_steps(self) -> None:
        """A captured step was not taken yet."""
        for optimizer, steps in zip(self._optimizers, self._before, strict=True):
            optimizer.events.steps = steps

    def change(self) -> str:
        """What the graph cannot follow, with old and new value; empty if there is nothing."""
        change = self._surroundings.change()
        if change or (self._gradients.repeats and self._surroundings.gradients == self._settled):
            return change
        self._settled = None
        return self._gradients.change()

    def refresh(self) -> bool:
        """Hand over what was assigned since the last call; False if a graph of another step is needed."""
        return self._refreshed() == self._keys

    def replayed(self) -> None:
        """Do what the function's Python would have done besides."""
        if self._settled is None:
            self._gradients.restore()
            self._surroundings.look()
            self._settled = self._surroundings.gradients
        self._surroundings.count_versions()
        for optimizer, steps in zip(self._optimizers, self._steps, strict=True):
            optimizer.events.steps += steps
            optimizer.events.replays += 1

    def _refreshed(self) -> list[tuple[object, ...] | None]:
        return [o.refresh(*scaler) for o, scaler in zip(self._optimizers, self._scalers, strict=True)]


@contextlib.contextmanager
def watching_zero_grad(optimizers: Sequence[CompiledOptimizer], drop: Callable[[Iterable[Tensor]], None]) -> Iterator[None]:
    """Report gradients that ``zero_grad`` of an optimizer is about to set to None before a step used them."""
    before = [o.events.steps for o in optimizers]

    def watched(optimizer: CompiledOptimizer) -> Callable[..., None]:
        original = optimizer.zero_grad

        @functools.wraps(original)
        def zero_grad(set_to_none: bool = True) -> None:
            if set_to_none:
                stepped = [o for o, steps in zip(optimizers, before, strict=True) if o.events.steps > steps]
                used = {id(p) for o in stepped for p in o.traceable_params()}
                drop(p for p in optimizer.traceable_params() if id(p) not in used)
            original(set_to_none)

        return zero_grad

    own = [vars(o).get("zero_grad") for o in optimizers]
    for optimizer in optimizers:
        vars(optimizer)["zero_grad"] = watched(optimizer)
    try:
        yield
    finally:
        for optimizer, assigned in zip(optimizers, own, strict=True):
            del vars(optimizer)["zero_grad"]
            if assigned is not None:
                vars(optimizer)["zero_grad"] = assigned


def _hypers_of(optimizer: CompiledOptimizer) -> dict[str, Tensor]:
    """The live hyperparameter tensors by name, but those that the step itself sets on a schedule."""
    scheduled = optimizer.scheduled()
    names = [h.name for h in optimizer.fields_of(Hyper)]
    return {
        f"param_groups[{i}][{name!r}]" + (f"[{k}]" if len(tensors) > 1 else ""): tensor
        for i, group in enumerate(optimizer.param_groups)
        for name in names
        if (i, name) not in scheduled
        for tensors in (group.tensors(name),)  # type: ignore[attr-defined]
        for k, tensor in enumerate(tensors)
    }
