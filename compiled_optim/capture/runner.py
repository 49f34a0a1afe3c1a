"""Optimizer steps and whole training steps as CUDA graphs that follow the training.

A graph repeats what was recorded with the addresses it had then. Kernels of this package read the addresses of gradients
and hyperparameters from tables, which are brought up to date before a replay; whatever a table cannot follow makes the
runner capture again, or refuse. It never replays what is stale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from compiled_optim.capture.graph import StepRun
from compiled_optim.capture.guards import modules_of
from compiled_optim.capture.run_function import FunctionRun
from compiled_optim.optimizer import CompiledOptimizer


class CUDAGraphRunner:
    """Runs an optimizer's step, or a whole training step, as a CUDA graph.

    ``CUDAGraphRunner(opt)`` runs the step alone: :meth:`step` is ``opt.step`` with its launches replayed. Gradients may be
    new tensors, absent or at other addresses in every step. ``CUDAGraphRunner(train_step, optimizers=opt)`` runs a function
    with forward, backward, step and ``zero_grad``: ``runner(*inputs)`` copies the inputs in and replays.

    N calls are N updates: the first ``warmup`` calls run as usual, then one is captured and replayed. Hyperparameters may be
    assigned or written in place between calls, schedulers called, checkpoints loaded and steps taken outside of the runner.
    What a graph cannot follow, such as a parameter that moved, a group that was added, clipping switched on or another
    number of entries in a sparse gradient, takes one call that runs as usual, and is captured again in the next.

    In a captured function everything but tensors is as it was in the capture: its Python runs no more. Gradients that it
    drops first, with ``zero_grad(set_to_none=True)`` of one of the optimizers, are None in the capture from the start; those
    that it leaves are memory of the graph, which the next call writes. Schedulers belong outside; inputs are tensors of the
    first call's shapes, and a number among them that changes is captured again. Other modules and buffers, ``train()``,
    ``eval()``, ``requires_grad`` and autocast are noticed in the modules the function refers to: by closure, default, global
    or attribute of the object it is bound to.

    The step alone of an optimizer that works on whole tensors or sparse gradients copies the gradients to memory of the
    graph first. L-BFGS calls its closure in a step, so that only a function can be captured, with ``fixed_iterations``.

    Where there are no CUDA graphs, everything runs uncaptured, which is said once, with equal checks and results.

    Args:
        target: an optimizer, or a function that steps ``optimizers`` exactly as often in every call.
        optimizers: every optimizer that the function steps.
        warmup: how many calls run as usual before the first capture; at least 1.
        recaptures: how many stale graphs may be replaced before it is an error.
        modules: the modules that the function reads, where it does not refer to them itself.
        clone_outputs: return copies of the function's tensors. Otherwise they are the graph's own memory, which the next
            call overwrites. Either way they are detached.

    Raises:
        TypeError: an argument is not what its description says.
        ValueError: ``warmup`` or ``recaptures`` is out of range, or an optimizer is given twice, or the optimizers'
            parameters are on several devices, or elsewhere than ``stream``, or not updated with
            ``lowering="multi_tensor"``, or L-BFGS would decide on the host when to stop.
    """

    def __init__(
        self,
        target: CompiledOptimizer | Callable[..., Any],
        optimizers: CompiledOptimizer | Sequence[CompiledOptimizer] | None = None,
        warmup: int = 3,
        *,
        recaptures: int = 8,
        modules: nn.Module | Iterable[nn.Module] | None = None,
        clone_outputs: bool = True,
        stream: torch.Stream | None = None,
    ) -> None:
        _check_count("warmup", warmup, 1)
        _check_count("recaptures", recaptures, 0)
        self._run: StepRun | FunctionRun
        if isinstance(target, CompiledOptimizer):
            if optimizers is not None or modules is not None:
                raise TypeError("a runner of one optimizer's step takes neither optimizers nor modules")
            self._run = StepRun([target], warmup, recaptures, stream)
        else:
            if not callable(target):
                raise TypeError(f"target must be an optimizer of compiled_optim or a function, got {_origin(target)}")
            given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers or ())
            if strange := [_origin(o) for o in given if not isinstance(o, CompiledOptimizer)] or ["none"] * (not given):
                wanted = "optimizers must be the optimizers of compiled_optim that the function steps, at least one"
                raise TypeError(f"{wanted}; got {', '.join(strange)}")
            if len(set(map(id, given))) < len(given):
                raise ValueError("optimizers holds the same optimizer twice")
            roots = modules_of(target) if modules is None else [modules] if isinstance(modules, nn.Module) else modules
            self._run = FunctionRun(target, given, list(roots), warmup, recaptures, stream, clone_outputs)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step, as the optimizer's own ``step`` does, hooks included.

        ``torch.amp.GradScaler.step`` takes the runner in the optimizer's place.

        Args:
            closure: re-evaluates the model, with gradients enabled, and returns the loss; it is not captured.

        Raises:
            TypeError: the runner holds a whole training step.
            RuntimeError: it was released, or its graph is stale more often than ``recaptures`` allows, naming what changed.
            RecompileError: the graph is stale inside ``no_recompiles``. The step was not taken.
        """
        run = self._alive()
        if not isinstance(run, StepRun):
            raise TypeError("this runner holds a whole training step; call it with the step's inputs")
        scaler: dict[str, Any] = {name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)}
        return run.step(closure, scaler)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step on these inputs and return what the function returns.

        Raises:
            TypeError: the runner holds an optimizer's step alone, or an input or what the function returns is neither a
                tensor nor a constant.
            ValueError: an input's structure, shape, dtype or device is another than in the first call, naming it.
            RuntimeError: as :meth:`step`; or the function does in Python what a replay could not repeat.
            RecompileError: as :meth:`step`.
        """
        run = self._alive()
        if not isinstance(run, FunctionRun):
            raise TypeError("this runner holds an optimizer's step; call its step()")
        return run(args, kwargs)

    def release(self) -> None:
        """Free the graph and its memory; also done at exit and with the last reference. The runner is of no use then.

        Gradients and outputs that somebody holds stay valid.
        """
        self._run.release()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer whose step the runner holds."""
        if not isinstance(self._run, StepRun):
            raise AttributeError("param_groups")
        return self._run.optimizer.param_groups

    _step_supports_amp_scaling = True

    def _alive(self) -> StepRun | FunctionRun:
        if self._run.released:
            raise RuntimeError("this CUDAGraphRunner was released; make a new one")
        return self._run

    def __enter__(self) -> CUDAGraphRunner:
        return self

    def __exit__(self, error: object, *details: object) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(RuntimeError):  # which would hide it
            self.release()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a CUDAGraphRunner holds device memory and cannot be copied or pickled; make a new one")


def _origin(value: Any) -> str:
    """The class of a value, with the package that it comes from."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
