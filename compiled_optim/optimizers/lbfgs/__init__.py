"""L-BFGS: the optimizer, and its step: iterations, each with a direction, a length and an evaluation of the closure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.checkpoint.read import naming, read
from compiled_optim.checkpoint.state_dict import PreparedLoad, check_writable
from compiled_optim.groups.numbers import send
from compiled_optim.groups.parameters import parameter_name
from compiled_optim.memory.layout import as_real, compute_dtype, is_sharded, obstacle, real_numel, scalar_dtype
from compiled_optim.memory.torch_internals import in_range, is_capturing, mend_tracing, outside_dynamo
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.optimizers.lbfgs.history import ENTRIES, MEMORY, direction, new_state, packed, record, unpack
from compiled_optim.optimizers.lbfgs.line_search import Point, strong_wolfe
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.fields import Number, hyper, is_per_parameter, static
from compiled_optim.step.engine import Engine
from compiled_optim.step.step import Step


class LBFGSStep(Step):
    """All parameters of one group as one vector, and the history of its steps: the state of the first parameter."""

    only_whole = "a step of LBFGS calls its closure: let the CUDA graph hold a function that calls step(closure)"
    name = "eager"

    def __init__(self, engine: Engine, grad_of: Callable[[Tensor], Tensor | None]) -> None:
        if len(engine.groups.distinct) > 1:
            raise ValueError("LBFGS doesn't support per-parameter options (parameter groups)")
        super().__init__(engine.kind, engine.groups.listed, engine.changes)
        (self._group,), self._state = engine.groups.distinct, engine.state
        devices = sorted({str(p.device) for p in self.params})
        if len(devices) > 1:
            raise ValueError(f"LBFGS needs parameters on one device, got {', '.join(devices)}")
        for j in (j for j, param in enumerate(self.params) if is_sharded(param)):
            refused = f"LBFGS does not support DTensors; '{parameter_name(self._group, 0, j)}' is one"
            advice = "use an optimizer that does, such as AdamW, or replicate the model with DistributedDataParallel"
            raise ValueError(f"{refused}; {advice}")
        self.devices = (self.params[0].device,)
        choices = {**engine.kind._added_choices(), **self._group}
        self.is_fixed, self._maximizes = choices["fixed_iterations"], choices["maximize"]
        self._iterations = choices["max_iter"]  # traced code cannot read groups
        self._captured_lr = self.live[0]["lr"].detach().clone()  # a runner's graph reads it
        self._lay_out()

    def _lay_out(self) -> None:
        """Assign the numbers of the vector to parameters, and create or convert the state for these."""
        self._waits = any(map(is_lazy, self.params))  # until the closure's first call, which initializes parameters
        self._updated = [p for p in self.params if not obstacle(p)]
        self._sizes = [0 if obstacle(p) else real_numel(p) for p in self.params]
        if not sum(self._sizes) and not self._waits:
            raise ValueError("LBFGS needs parameters with at least one element")
        dtypes = (compute_dtype(p.dtype) for p in self._updated)
        self._dtype = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        state, fresh = self._memory, self._new_state(self._group["history_size"])
        if "d" not in state or state["d"].shape != fresh["d"].shape:
            state.update(fresh)
        elif any(state[name].shape != value.shape or state[name].dtype != value.dtype for name, value in fresh.items()):
            unpack(fresh, packed(state), range(len(self._sizes)), self._sizes)  # keeps the newest pairs that fit
            state.update(fresh)
        for name in MEMORY:
            state.set_quietly(name, state[name].to(self.devices[0]))
        # A dict that can be traced, of vectors: torch 2.13 loses writes to 0-dim float64 tensors in compiled CPU code.
        self._tensors = {name: state[name].view(1) if state[name].dim() == 0 else state[name] for name in MEMORY}

    @classmethod
    def check_options(cls, optimizer: type[Declared], options: Mapping[str, Any]) -> None:
        if options["lowering"] not in ("auto", "eager"):
            raise ValueError(f"{optimizer.__name__} has no lowering {options['lowering']!r}; it runs plain torch operations")

    @property
    def _memory(self) -> Any:
        return self._state[self.params[0]]

    def _new_state(self, size: int) -> dict[str, Tensor]:
        return new_state(size, sum(self._sizes), self._dtype, self.devices[0])

    @property
    def memory(self) -> object:
        return self._tensors, self._captured_lr

    @property
    def refusal(self) -> str:
        return "" if self.is_fixed else "LBFGS decides on the host when to stop; a CUDA graph needs fixed_iterations=True"

    def launch(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, iterate, and return its first loss. With fixed iterations it can be traced."""
        assert closure is not None
        with torch.enable_grad():
            first = closure()
        if self._waits:
            self._lay_out()
        lr = self._captured_lr if self.is_recorded and is_capturing(self.devices[0]) else self.live[0]["lr"]
        with torch.no_grad():
            iterate = self._iterate_fixed if self.is_fixed else self._iterate
            if torch.compiler.is_dynamo_compiling():
                iterate(closure, self._minimized(first), lr)
            else:
                in_range("update", iterate, closure, self._minimized(first), lr)
        return first

    def follow(self, clip_args: tuple[Any, ...]) -> str:
        """Hand an assigned learning rate over."""
        if reason := self.stale():
            return reason
        send(self.changes)
        self._captured_lr.copy_(self.live[0]["lr"])
        return ""

    def _iterate_fixed(self, closure: Callable[[], Any], loss: Any, lr: Tensor) -> None:
        memory = self._tensors
        gradient = self._gradient()
        for left in reversed(range(self._iterations)):
            self._turn(gradient, loss, lr, len(memory["products"]))
            self._move(memory["t"] * memory["d"])
            memory["func_evals"].add_(1)
            if left:
                loss, gradient = self._evaluate(closure)

    def _iterate(self, closure: Callable[[], Any], first: Any, lr: Tensor) -> None:
        group, memory, tolerance = self._group, self._memory, self._group["tolerance_change"]
        limit = group["max_iter"] * 5 // 4 if group["max_eval"] is None else group["max_eval"]  # None if a checkpoint had it
        loss, gradient = float(first), self._gradient()
        memory["func_evals"].add_(1)
        evaluations, pairs = 1, int(memory["pairs"])
        if gradient.abs().amax().item() <= group["tolerance_grad"]:
            return
        for iteration in range(1, group["max_iter"] + 1):
            before = loss
            self._turn(gradient, loss, lr, min(pairs + 1, group["history_size"]))
            numbers = [gradient.dot(memory["d"]), memory["t"], memory["d"].abs().amax(), memory["pairs"]]
            slope, length, reach, count = torch.stack([n.to(scalar_dtype(n.device)) for n in numbers]).tolist()
            pairs = int(count)
            if slope > -tolerance:
                break
            calls = 0
            if group["line_search_fn"] is not None:
                start = Point(0.0, loss, gradient, slope)
                (length, loss, gradient, _), calls = self._line(closure, start, length, reach, limit - evaluations)
                memory["t"].fill_(length)
                self._move(length * memory["d"])
            else:
                self._move(memory["t"] * memory["d"])
                if iteration < group["max_iter"]:
                    value, gradient = self._evaluate(closure)
                    loss, calls = float(value), 1
            evaluations += calls
            memory["func_evals"].add_(calls)
            if evaluations >= limit or iteration == group["max_iter"]:
                break
            if gradient.abs().amax().item() <= group["tolerance_grad"]:
                break
            if abs(length) * reach <= tolerance or abs(loss - before) < tolerance:
                break

    def _turn(self, gradient: Tensor, loss: Any, lr: Tensor, rows: int) -> None:
        """Record the gradient at the current point; set the next direction ``d`` and step length ``t``."""
        memory = self._tensors
        is_first = memory["n_iter"] == 0
        record(memory, memory["t"] * memory["d"], gradient - memory["prev_flat_grad"], ~is_first)
        memory["d"].copy_(direction(memory, gradient, rows))
        memory["prev_flat_grad"].copy_(gradient)
        memory["prev_loss"].copy_(loss) if isinstance(loss, Tensor) else memory["prev_loss"].fill_(loss)
        shortened = (1 / torch.linalg.vector_norm(gradient, 1)).clamp(max=1)
        memory["t"].copy_(lr.to(self._dtype) * torch.where(is_first, shortened, 1))
        memory["n_iter"].add_(1)

    def _line(self, closure: Callable[[], Any], start: Point, length: float, reach: float, limit: int) -> tuple[Point, int]:
        """Return the result of :func:`strong_wolfe` along ``d``; the parameters are as before."""
        towards = self._memory["d"]
        origin = [p.clone(memory_format=torch.preserve_format) for p in self._updated]

        def evaluate(length: float) -> Point:
            self._move(length * towards)
            loss, gradient = self._evaluate(closure)
            value, slope = float(loss), gradient.dot(towards).item()
            torch._foreach_copy_(self._updated, origin)
            return Point(length, math.inf if math.isnan(value) else value, gradient, slope)

        return strong_wolfe(evaluate, start, length, reach, tolerance=1e-9, limit=limit)

    def _evaluate(self, closure: Callable[[], Any]) -> tuple[Any, Tensor]:
        with torch.enable_grad():
            loss = closure()
        return self._minimized(loss), self._gradient()

    def _minimized(self, value: Any) -> Any:
        """Return a loss, or its gradient, with the sign for minimization."""
        return -value if self._maximizes else value

    def _gradient(self) -> Tensor:
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in self._updated]
        grads = [grad.to_dense() if grad.layout is not torch.strided else grad for grad in grads]
        gradient: Tensor = self._minimized(self._flat([as_real(grad.resolve_conj()) for grad in grads]))
        return gradient

    def _move(self, change: Tensor) -> None:
        numbers = [as_real(param) for param in self._updated]
        pieces = (self._flat(numbers) + change).split([n.numel() for n in numbers])
        torch._foreach_copy_(numbers, [piece.view(n.shape) for n, piece in zip(numbers, pieces, strict=True)])

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1).to(self._dtype) for tensor in tensors])

    def saved(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return ``state_dict`` with torch.optim.LBFGS's state. Waits for the device."""
        entries, first = packed(self._memory), state_dict["param_groups"][0]["params"][0]
        others = {name: value for name, value in state_dict["state"].pop(first, {}).items() if name not in ENTRIES}
        if entries["func_evals"] or others:
            state_dict["state"][first] = (entries if entries["func_evals"] else {}) | others
        return state_dict

    @torch.no_grad()
    def prepare_load(
        self, state_dict: Mapping[str, Any], prepare: Callable[[Mapping[str, Any]], PreparedLoad]
    ) -> PreparedLoad:
        """Prepare the load of a state dict of torch.optim.LBFGS or of this package. Raise an error where it does not fit."""
        memory, state_dict = self._memory, read(state_dict)
        if len(state_dict["param_groups"]) != 1:
            raise ValueError(f"LBFGS has one parameter group, the checkpoint {len(state_dict['param_groups'])}")
        params = state_dict["param_groups"][0]["params"]
        entries = state_dict["state"].pop(params[0], {}) if params else {}
        saved = {name: entries.pop(name) for name in ENTRIES if name in entries}
        if entries:
            state_dict["state"][params[0]] = entries
        load = prepare(state_dict)
        if not len(load.params) == len(self._sizes) == len({*params}):
            return load  # the vector is of other parameters
        size = load.group_values[0].get("history_size", self._group["history_size"])
        fresh = self._new_state(size)
        if saved:
            indices = [each.saved.index for each in load.params]
            with naming("the state of the checkpoint"):
                unpack(fresh, saved, [sorted(indices).index(index) for index in indices], self._sizes)
        if size != self._group["history_size"]:
            load.params[0].new.update(fresh)
            return load
        for name, value in fresh.items():
            check_writable(memory[name], f"the optimizer's own {name}", tuple(value.shape), value)
            load.copies.append((memory[name], value))
        return load


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``options`` have one that L-BFGS does not support."""
    for name in ("differentiable", "max_grad_norm", "skip_nonfinite"):
        value = options.get(name)
        if value is not None and value is not False:
            raise ValueError(f"LBFGS does not support {name}={value}")
    if is_per_parameter(options.get("lr_scale")):
        raise ValueError("LBFGS does not support lr_scale: several parameters count as one vector, which has one lr")


class LBFGS(CompiledOptimizer, steps=LBFGSStep):
    """L-BFGS (Liu and Nocedal, Mathematical Programming 45, 1989, doi:10.1007/BF01589116; Nocedal & Wright, Algorithm 7.5).

    A step makes up to ``max_iter`` iterations; see torch.optim.LBFGS for when it stops earlier. With ``fixed_iterations`` it
    makes exactly ``max_iter`` iterations and calls of the closure, with step size ``lr``; tolerances and ``max_eval`` are
    ignored. Such a step never waits for the device, so it can be traced and captured. All parameters together are one
    vector. A missing gradient is 0, a complex number two real ones. A negative tolerance never stops a step. If the history
    is empty, the direction is the negative gradient, scaled by the latest curvature. With ``maximize`` a step minimizes the
    negative of the closure's loss, as torch.optim.LBFGS does from 2.15 on, and returns the loss itself.

    Differs from torch.optim.LBFGS: a direction takes four matrix products with the history instead of four dot products per
    iteration in it; a line search treats a NaN loss as infinite; parameters may have any strides. The step runs as plain
    torch operations. Several groups or devices are a ``ValueError``.
    """

    lr: Number = hyper(default=1.0, ge=0, doc="an iteration moves by this times its direction; a line search begins at it.")
    max_iter: int = static(default=20, doc="iterations per step.")
    max_eval: int | None = static(default=None, doc="calls of the closure per step; None for 1.25 times ``max_iter``.")
    tolerance_grad: float = static(default=1e-7, doc="stop when no element of the gradient is larger.")
    tolerance_change: float = static(default=1e-9, doc="stop when neither parameters nor loss change by more.")
    history_size: int = static(default=100, doc="how many iterations estimate the curvature; each stores two vectors.")
    line_search_fn: str | None = static(default=None, doc='None or ``"strong_wolfe"``.')
    fixed_iterations: bool = static(default=False, kw_only=True, doc="make ``max_iter`` iterations, without a line search.")

    _step_supports_amp_scaling = False

    @classmethod
    def _state_names(cls) -> Iterable[str]:
        return ENTRIES

    def schedule(self, group: int | None = None, **functions: Any) -> None:
        """Refuse: a step has no coefficients to evaluate it with. torch's schedulers work."""
        raise ValueError(f"{type(self).__name__} does not support schedules inside the step; use one of torch's schedulers")

    @staticmethod
    def check(hypers: Mapping[str, Any], statics: Mapping[str, Any]) -> None:
        _refuse(statics)
        for name in ("max_iter", "max_eval", "history_size"):
            value = statics[name]
            if not (isinstance(value, int) and value >= 0) and not (name == "max_eval" and value is None):
                raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
        for name in ("tolerance_grad", "tolerance_change"):
            if not (statics[name] >= 0 or statics[name] < 0):
                raise ValueError(f"{name} must be a number, got {statics[name]!r}")
        if statics["line_search_fn"] not in (None, "strong_wolfe"):
            raise ValueError(f"line_search_fn must be None or 'strong_wolfe', got {statics['line_search_fn']!r}")
        if statics["fixed_iterations"] and statics["line_search_fn"] is not None:
            raise ValueError("fixed_iterations=True needs line_search_fn=None: a search decides when to stop")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[0]
        if group["max_eval"] is None:
            group["max_eval"] = group["max_iter"] * 5 // 4

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step, and return the loss before it. With ``fixed_iterations`` it can be traced.

        Args:
            closure: clears the gradients, re-evaluates the model, calls backward and returns the loss, a scalar.

        Raises:
            TypeError: there is no closure.
            ValueError: ``max_grad_norm`` or ``skip_nonfinite`` was assigned.
        """
        if not callable(closure):
            needed = "a function that clears the gradients, evaluates the loss, calls backward and returns the loss"
            raise TypeError(f"{type(self).__name__}.step needs a closure: {needed}; got {type(closure).__name__}")
        _refuse({"max_grad_norm": self.max_grad_norm, "skip_nonfinite": self.skip_nonfinite})
        engine = engine_of(self)
        if torch.compiler.is_dynamo_compiling() and isinstance(engine.step, LBFGSStep) and engine.step.is_fixed:
            first = engine.step.launch(closure)
            mend_tracing()
            return first
        return self._step_outside_graphs(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @outside_dynamo
    def _step_outside_graphs(self, closure: Callable[[], Any]) -> Any:
        return engine_of(self).run(closure=closure)
