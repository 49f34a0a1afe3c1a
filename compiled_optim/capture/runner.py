"""Optimizer steps and whole training steps as CUDA graphs that follow the training.

A graph replays kernels with the addresses of its capture. Kernels of this package read the addresses of gradients and
hyperparameters from tables, which are updated before a replay. After a change that no table can express, the runner captures
again or raises. It never replays a stale graph.
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

    N calls are N updates: the first ``warmup`` calls run without a graph, the next one is captured and replayed. Between
    calls you may assign hyperparameters or write them in place, call schedulers, load checkpoints and take steps outside of
    the runner. After a change that a graph cannot follow, such as a moved parameter, a new group, clipping switched on or
    another number of entries in a sparse gradient, the next call runs without a graph, and the call after it captures again.

    Replays do not run the function's Python: only tensors change. Gradients that remain after a call are memory of the
    graph, which the next call overwrites. Gradients that the function drops at its start, with
    ``zero_grad(set_to_none=True)`` of one of the optimizers, are None when the capture begins. Call schedulers outside of
    the function. Input tensors keep the first call's shapes; a changed number among the inputs is captured again. So are
    replaced modules and buffers, ``train()``, ``eval()``, ``requires_grad`` and autocast, in modules that the function
    refers to by closure, default, global or attribute of ``self``.

    ``CUDAGraphRunner(opt)`` first copies the gradients into the graph's memory for Adafactor, Muon and SparseAdam. L-BFGS
    calls its closure in a step: give the runner a function, and ``fixed_iterations`` to the optimizer.

    Without CUDA, everything runs uncaptured, with the same checks and results; one warning says so.

    Args:
        target: an optimizer, or a function that steps ``optimizers`` exactly as often in every call.
        optimizers: every optimizer that the function steps.
        warmup: how many calls run as usual before the first capture; at least 1.
        recaptures: how many times a stale graph is replaced. One more is a ``RuntimeError``.
        modules: modules that the function uses without referring to them as above.
        clone_outputs: return copies of the function's output tensors. False returns memory of the graph, which the next call
            overwrites. Outputs are detached in both cases.

    Raises:
        TypeError: an argument has another type than described here.
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
        self._run: StepRun | FunctionRun | None  # None once it is released
        if isinstance(target, CompiledOptimizer):
            if optimizers is not None or modules is not None:
                raise TypeError("a runner of one optimizer's step takes neither optimizers nor modules")
            self._run = StepRun([target], warmup, recaptures, stream)
        else:
            if not callable(target):
                raise TypeError(f"target must be an optimizer of compiled_optim or a function, got {_origin(target)}")
            passed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers or ())
            if strange := [_origin(o) for o in passed if not isinstance(o, CompiledOptimizer)] or ["none"] * (not passed):
                wanted = "optimizers must be the optimizers of compiled_optim that the function steps, at least one"
                raise TypeError(f"{wanted}; got {', '.join(strange)}")
            if len(set(map(id, passed))) < len(passed):
                raise ValueError("optimizers holds the same optimizer twice")
            roots = modules_of(target) if modules is None else [modules] if isinstance(modules, nn.Module) else modules
            self._run = FunctionRun(target, passed, list(roots), warmup, recaptures, stream, clone_outputs)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step, as the optimizer's own ``step`` does, hooks included.

        ``torch.amp.GradScaler.step`` takes the runner instead of the optimizer.

        Args:
            closure: re-evaluates the model, with gradients enabled, and returns the loss; it is not captured.

        Raises:
            TypeError: the runner holds a whole training step.
            RuntimeError: the runner was released, or needs more captures than ``recaptures`` allows; naming the change.
            RecompileError: the graph is stale inside ``no_recompiles``. The step was not taken.
        """
        run = self._alive()
        if not isinstance(run, StepRun):
            raise TypeError("this runner holds a whole training step; call it with the step's inputs")
        attributes = vars(self)
        scaler: dict[str, Any] = {name: attributes[name] for name in ("grad_scale", "found_inf") if name in attributes}
        return run.step(closure, scaler)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step on these inputs and return the function's result.

        Raises:
            TypeError: the runner holds an optimizer's step alone, or an input or a result of the function is neither a
                tensor nor a constant.
            ValueError: an input's structure, shape, dtype or device is another than in the first call, naming it.
            RuntimeError: as :meth:`step`; or the function does something in Python that a replay could not repeat.
            RecompileError: as :meth:`step`.
        """
        run = self._alive()
        if not isinstance(run, FunctionRun):
            raise TypeError("this runner holds an optimizer's step; call its step()")
        return run(args, kwargs)

    def release(self) -> None:
        """Free the graph and its memory, and end the runner. The end of a ``with`` block and deletion do so too.

        Gradients and outputs that you hold stay valid.
        """
        if self._run is not None:
            self._run.release()
            self._run = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer whose step the runner holds."""
        if not isinstance(self._run, StepRun):
            raise AttributeError("param_groups")
        return self._run.optimizers[0].param_groups

    _step_supports_amp_scaling = True

    def _alive(self) -> StepRun | FunctionRun:
        if self._run is None:
            raise RuntimeError("this CUDAGraphRunner was released; make a new one")
        return self._run

    def __enter__(self) -> CUDAGraphRunner:
        return self

    def __exit__(self, error: object, *details: object) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(RuntimeError):  # not to hide the error
            self.release()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a CUDAGraphRunner holds device memory and cannot be copied or pickled; make a new one")


def _origin(value: Any) -> str:
    """Return the class of a value, with its package."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
