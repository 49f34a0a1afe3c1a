"""L-BFGS."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from compiled_optim.checkpoint import LoadReport, check_writable
from compiled_optim.curvature import direction, new_pairs, record, restore, rows_by_age
from compiled_optim.formats import canonical_names, group_names, plain, read
from compiled_optim.hyperparameters import ParamGroup, scalar_dtype
from compiled_optim.line_search import Trial, strong_wolfe
from compiled_optim.lowering.layout import as_real, compute_dtype, real_numel
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.rule.fields import Number, hyper, static
from compiled_optim.saved_values import Unloadable, as_buffer, as_number, naming
from compiled_optim.sharding import is_sharded
from compiled_optim.state import ParamState
from compiled_optim.torch_internals import is_capturing, mend_tracing, outside_dynamo

_VECTORS = ("d", "prev_flat_grad")
_NUMBERS = ("t", "prev_loss")
_HISTORY = ("old_stps", "old_dirs")
_COUNTS = ("func_evals", "n_iter")

_makings = itertools.count()


class LBFGS(CompiledOptimizer):
    """L-BFGS (Liu and Nocedal, Mathematical Programming 45, 1989, doi:10.1007/BF01589116; Nocedal & Wright, Algorithm 7.5).

    A step makes up to ``max_iter`` iterations; see torch.optim.LBFGS for when it stops earlier. With ``fixed_iterations``
    it makes exactly ``max_iter``, of the given ``lr`` and with ``max_iter`` calls of the closure, whatever the tolerances
    and ``max_eval``; such a step never waits for the device, so that a training step with it can be traced and captured.
    Several parameters count as one vector, a missing gradient as 0, a complex number as two real ones.

    Differs from torch.optim.LBFGS: the direction takes four products with the whole history in place of four per pair; the
    history is in float32 also for lower-precision parameters; a line search takes NaN for an infinite loss; parameters may
    lie in memory in any way. The step runs as plain torch operations.

    Raises:
        ValueError: there are several groups or devices, or an argument is out of range.
    """

    lr: Number = hyper(default=1.0, ge=0)
    max_iter: int = static(default=20)
    max_eval: int | None = static(default=None)
    tolerance_grad: float = static(default=1e-7)
    tolerance_change: float = static(default=1e-9)
    history_size: int = static(default=100)
    line_search_fn: str | None = static(default=None)
    fixed_iterations: bool = static(default=False, kw_only=True)

    def _configure(self, options: Mapping[str, Any]) -> None:
        super()._configure(options)
        _refuse(options)
        if options["lowering"] not in ("auto", "eager"):
            raise ValueError(
                f"{type(self).__name__} has no lowering {options['lowering']!r}; it runs plain torch operations"
            )

    _step_supports_amp_scaling = False

    def schedule(self, group: int | None = None, **functions: Any) -> None:
        """Refuse: a step has no coefficients to evaluate it with. torch's schedulers work."""
        raise ValueError(f"{type(self).__name__} does not support schedules inside the step; use one of torch's schedulers")

    @staticmethod
    def check(hypers: Mapping[str, Any], statics: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` where a choice is out of range or does not fit another."""
        _refuse(statics)
        for name in ("max_iter", "max_eval", "history_size"):
            value = statics[name]
            if not (isinstance(value, int) and value >= 1) and not (name == "max_eval" and value is None):
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        for name in ("tolerance_grad", "tolerance_change"):
            if not statics[name] >= 0:
                raise ValueError(f"{name} must be >= 0, got {statics[name]!r}")
        if statics["line_search_fn"] not in (None, "strong_wolfe"):
            raise ValueError(f"line_search_fn must be None or 'strong_wolfe', got {statics['line_search_fn']!r}")
        if statics["fixed_iterations"] and statics["line_search_fn"] is not None:
            raise ValueError("fixed_iterations=True needs line_search_fn=None: a search decides when to stop")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the one group there can be."""
        super().add_param_group(param_group)
        group = self.param_groups[0]
        if group["max_eval"] is None:
            group["max_eval"] = group["max_iter"] * 5 // 4

    def _check_params(self, group: Mapping[str, Any], index: int) -> None:
        super()._check_params(group, index)
        if index:
            raise ValueError("LBFGS doesn't support per-parameter options (parameter groups)")
        devices = sorted({str(p.device) for p in group["params"]})
        if len(devices) > 1 or any(map(is_sharded, group["params"])):
            raise ValueError(f"LBFGS needs whole parameters on one device, got {', '.join(devices)} or DTensors")
        if not sum(map(real_numel, group["params"])):
            raise ValueError("LBFGS needs parameters with at least one element")

    def _make_units(self, groups: Sequence[ParamGroup], grad_of: Callable[[Tensor], Tensor | None]) -> None:
        (group,) = groups
        self._vector: list[Tensor] = group["params"]
        self._sizes = [real_numel(p) for p in self._vector]
        self._dtype = torch.float32
        for param in self._vector:
            self._dtype = torch.promote_types(self._dtype, compute_dtype(param.dtype))
        state, fresh = self._memory, self._new_state()
        if not state or state["d"].shape != fresh["d"].shape:
            state.update(fresh)
        elif any(state[name].shape != value.shape or state[name].dtype != value.dtype for name, value in fresh.items()):
            self._carry_over(state, fresh)
        for name, value in state.items():
            state.set_quietly(name, value.to(self._vector[0].device))
        # A dict that can be traced, of vectors: torch 2.13 loses writes to 0-dim float64 tensors in compiled CPU code.
        self._tensors = {name: value.view(1) if value.dim() == 0 else value for name, value in state.items()}
        self._fixed, self._iterations, self._history = (
            group[name] for name in ("fixed_iterations", "max_iter", "history_size")
        )
        self._live = [group.live]
        self._captured_lr = group.live["lr"].detach().clone()  # what a runner's graph reads
        self._made = next(_makings)

    def _carry_over(self, state: ParamState, fresh: dict[str, Tensor]) -> None:
        """Continue in tensors of another history size or dtype, with as many of the newest pairs as they hold."""
        for name in (*_COUNTS, *_VECTORS, *_NUMBERS):
            fresh[name].copy_(state[name])
        rows = rows_by_age(int(state["pairs"]), len(state["products"]))
        steps, changes = (state[name][rows] for name in _HISTORY)
        restore(fresh, steps, changes, state["products"][rows][:, rows], state["H_diag"])
        state.update(fresh)

    def _new_state(self) -> dict[str, Tensor]:
        group, device = self._groups[0], self._vector[0].device
        pairs = new_pairs(group["history_size"], sum(self._sizes), self._dtype, device)
        vectors = {name: torch.zeros_like(pairs["old_stps"][0]) for name in _VECTORS}
        numbers = {name: torch.zeros_like(pairs["H_diag"]) for name in _NUMBERS}
        counts = {name: torch.zeros_like(pairs["pairs"]) for name in _COUNTS}
        return {**counts, **vectors, **numbers, **pairs}

    @property
    def _memory(self) -> ParamState:
        return self._state[self._vector[0]]

    def step(self, closure: Callable[[], Any]) -> Any:
        """Perform one optimization step. With ``fixed_iterations`` it can be traced.

        Args:
            closure: clears the gradients, re-evaluates the model, calls backward and returns the loss, a scalar.

        Returns:
            The loss before the step.

        Raises:
            ValueError: ``max_grad_norm`` or ``skip_nonfinite`` was assigned.
        """
        _refuse({"max_grad_norm": self.max_grad_norm, "skip_nonfinite": self.skip_nonfinite})
        if not (torch.compiler.is_compiling() and self._fixed):
            return self._step_outside_graphs(closure)
        with torch.enable_grad():
            first = closure()
        with torch.no_grad():
            self._iterate_fixed(closure, first, self._live[0]["lr"])
        mend_tracing()
        return first

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @outside_dynamo
    def _step_outside_graphs(self, closure: Callable[[], Any]) -> Any:
        if is_capturing(self._groups[0]["params"][0].device):
            self._check_capture(None)
        self._opt_called = True
        with self._lock:
            if self._changes.pending or self._regrouped():
                self._rebuild()
            with torch.enable_grad():
                first = closure()
            with torch.no_grad():
                run = self._iterate_fixed if self._fixed else self._iterate
                is_captured = self._has_runner and is_capturing(self._vector[0].device)
                run(closure, first, self._captured_lr if is_captured else self._live[0]["lr"])
            self.events.steps += 1
        return first

    def check_capturable(self, *, alone: bool) -> None:
        """Raise ``ValueError`` where no graph can hold a step; ``alone`` says that it is to hold nothing else."""
        if alone:
            raise ValueError(
                "a step of LBFGS calls its closure: let the CUDA graph hold a function that calls step(closure)"
            )
        if not self._fixed:
            raise ValueError("LBFGS decides on the host when to stop; a CUDA graph needs fixed_iterations=True")

    def refresh(self, grad_scale: Any, found_inf: Any) -> tuple[object, ...] | None:
        """Hand an assigned learning rate over; see :meth:`CompiledOptimizer.refresh`."""
        if self._changes.pending or self._regrouped():
            return None
        self._captured_lr.copy_(self._live[0]["lr"])
        return (self._made,)

    def _iterate_fixed(self, closure: Callable[[], Any], loss: Any, lr: Tensor) -> None:
        memory = self._tensors
        gradient = self._gradient()
        for left in reversed(range(self._iterations)):
            self._turn(gradient, loss, lr, self._history)
            self._move(memory["t"] * memory["d"])
            memory["func_evals"].add_(1)
            if left:
                loss, gradient = self._evaluate(closure)

    def _iterate(self, closure: Callable[[], Any], first: Any, lr: Tensor) -> None:
        group, memory = self._groups[0], self._memory
        limit, tolerance = group["max_eval"], group["tolerance_change"]
        loss, gradient = float(first), self._gradient()
        memory["func_evals"].add_(1)
        evaluations, pairs = 1, int(memory["pairs"])
        if _norm(gradient) <= group["tolerance_grad"]:
            return
        for iteration in range(1, group["max_iter"] + 1):
            before = loss
            self._turn(gradient, loss, lr, min(pairs + 1, group["history_size"]))
            numbers = [gradient.dot(memory["d"]), memory["t"], memory["d"].abs().amax(), memory["pairs"]]
            slope, length, reach, count = torch.stack([n.to(scalar_dtype(n.device)) for n in numbers]).tolist()
            pairs = int(count)
            if slope > -tolerance:
                break
            made = 0
            if group["line_search_fn"] is not None:
                start = Trial(0.0, loss, gradient, slope)
                found, made = strong_wolfe(
                    self._line(closure), start, length, reach, tolerance=1e-9, limit=limit - evaluations
                )
                loss, gradient, length = found.value, found.gradient, found.length
                memory["t"].fill_(length)
                self._move(length * memory["d"])
            else:
                self._move(memory["t"] * memory["d"])
                if iteration < group["max_iter"]:
                    value, gradient = self._evaluate(closure)
                    loss, made = float(value), 1
            evaluations += made
            memory["func_evals"].add_(made)
            if (
                evaluations >= limit
                or iteration == group["max_iter"]
                or _norm(gradient) <= group["tolerance_grad"]
                or abs(length) * reach <= tolerance
                or abs(loss - before) < tolerance
            ):
                break

    def _turn(self, gradient: Tensor, loss: Any, lr: Tensor, rows: int) -> None:
        """Take in the gradient at the present point; set the next direction ``d`` and step length ``t``."""
        memory = self._tensors
        is_first = memory["n_iter"] == 0
        record(memory, memory["t"] * memory["d"], gradient - memory["prev_flat_grad"], ~is_first)
        memory["d"].copy_(direction(memory, gradient, rows))
        memory["prev_flat_grad"].copy_(gradient)
        memory["prev_loss"].copy_(loss) if isinstance(loss, Tensor) else memory["prev_loss"].fill_(loss)
        shortened = (1 / torch.linalg.vector_norm(gradient, 1)).clamp(max=1)
        memory["t"].copy_(lr.to(self._dtype) * torch.where(is_first, shortened, 1))
        memory["n_iter"].add_(1)

    def _line(self, closure: Callable[[], Any]) -> Callable[[float], Trial]:
        """The closure as a function on the line from the present point along ``d``; it leaves the parameters as they are."""
        towards = self._memory["d"]
        origin = [p.clone(memory_format=torch.preserve_format) for p in self._vector]

        def evaluate(length: float) -> Trial:
            self._move(length * towards)
            loss, gradient = self._evaluate(closure)
            value, slope = float(loss), gradient.dot(towards).item()
            torch._foreach_copy_(self._vector, origin)
            return Trial(length, math.inf if math.isnan(value) else value, gradient, slope)

        return evaluate

    def _evaluate(self, closure: Callable[[], Any]) -> tuple[Any, Tensor]:
        with torch.enable_grad():
            loss = closure()
        return loss, self._gradient()

    def _gradient(self) -> Tensor:
        """All gradients as one vector."""
        grads = []
        for param in self._vector:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            grads.append(grad.to_dense() if grad.layout is not torch.strided else grad)
        return self._flat([as_real(grad.resolve_conj()) for grad in grads])

    def _move(self, change: Tensor) -> None:
        """Add a vector to the parameters."""
        numbers = [as_real(param) for param in self._vector]
        pieces = (self._flat(numbers) + change).split(self._sizes)
        torch._foreach_copy_(numbers, [piece.view(n.shape) for n, piece in zip(numbers, pieces, strict=True)])

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1).to(self._dtype) for tensor in tensors])

    def _save(self, neutral: Mapping[str, Any]) -> dict[str, Any]:
        """The state of torch.optim.LBFGS, and what makes loading it here exact. Waits for the device."""
        result, memory = super()._save(neutral), self._memory
        counts = {name: int(memory[name]) for name in _COUNTS}
        result["state"] = {0: counts} if counts["func_evals"] else {}
        if counts["n_iter"]:
            count = int(memory["pairs"])
            rows = rows_by_age(count, len(memory["products"]))
            products = memory["products"][rows][:, rows]
            result["state"][0] |= {
                **{name: memory[name].clone() for name in (*_VECTORS, "H_diag")},
                **{name: memory[name].item() for name in _NUMBERS},
                **{name: list(memory[name][rows].unbind()) for name in _HISTORY},
                "ro": list((1 / products.diagonal()).unbind()),
                "exact": {"n_iter": counts["n_iter"], "pairs": count, "products": products},
            }
        return result

    @torch.no_grad()
    def _load(
        self, state_dict: Mapping[str, Any], strict: bool, hyperparameters: Literal["checkpoint", "keep"]
    ) -> LoadReport:
        state_dict = read(state_dict)
        if len(state_dict["param_groups"]) != 1:
            raise ValueError(f"LBFGS has one parameter group, the checkpoint {len(state_dict['param_groups'])}")
        saved = state_dict["param_groups"][0]
        entries = state_dict["state"].pop(saved["params"][0], None) if saved["params"] else None
        order = self._order_of(saved)
        fresh = self._new_state()
        if order is not None and entries:
            with naming("the state of the checkpoint"):
                self._unpack(fresh, entries, order)
        for name, value in fresh.items():
            check_writable(self._memory[name], f"the optimizer's own {name}", tuple(value.shape), value)
        report = super()._load(state_dict, strict, hyperparameters)
        if order is not None:
            for name, value in fresh.items():
                self._memory[name].copy_(value)
        return report

    @naming("the state dict", passing=(ValueError, TypeError))
    def _order_of(self, saved: Mapping[str, Any]) -> list[int] | None:
        """Which of the checkpoint's parameters each of ours is; None if they are not the same ones."""
        ours, theirs = self._groups[0].get("param_names"), group_names(saved)
        if ours is None or theirs is None:
            return list(range(len(self._vector))) if len(saved["params"]) == len(self._vector) else None
        ours, theirs = canonical_names(ours), canonical_names(theirs)
        return [theirs.index(name) for name in ours] if sorted(ours) == sorted(theirs) else None

    def _unpack(self, fresh: dict[str, Tensor], entries: Mapping[str, Any], order: Sequence[int]) -> None:
        """Fill ``fresh`` from the state of torch.optim.LBFGS or of this class."""
        _require(entries, _COUNTS)
        counts = {name: _count(entries[name], name) for name in _COUNTS}
        for name, count in counts.items():
            fresh[name].fill_(count)
        if not counts["n_iter"]:
            return
        _require(entries, (*_VECTORS, *_NUMBERS, *_HISTORY, "H_diag"))
        like = fresh["d"]
        for name in _VECTORS:
            fresh[name].copy_(self._vector_of(entries[name], name, like, order))
        for name in _NUMBERS:
            fresh[name].copy_(_number(entries[name], name, like))
        steps, changes = (self._history_of(entries[name], name, like, order) for name in _HISTORY)
        if len(steps) != len(changes):
            raise Unloadable("old_stps and old_dirs of the checkpoint must be equally long")
        scale = _number(entries["H_diag"], "H_diag", like)
        exact = plain(entries.get("exact", {}), "exact")
        if "n_iter" not in exact or _count(exact["n_iter"], "n_iter of exact") != counts["n_iter"]:
            restore(fresh, steps, changes, steps @ changes.t(), scale)  # torch.optim carries our own entry along unchanged
            return
        _require(exact, ("products", "pairs"))
        products = as_buffer(exact["products"], "products", (len(steps), len(steps)), like.dtype).to(like)
        restore(fresh, steps, changes, products, scale, _count(exact["pairs"], "pairs"))

    def _vector_of(self, value: Any, name: str, like: Tensor, order: Sequence[int]) -> Tensor:
        """A vector of the checkpoint, with its pieces in the order of our parameters."""
        sizes = [0] * len(order)
        for position, size in zip(order, self._sizes, strict=True):
            sizes[position] = size
        pieces = as_buffer(value, f"{name} of the checkpoint", tuple(like.shape), like.dtype).to(like).split(sizes)
        return torch.cat([pieces[i] for i in order])

    def _history_of(self, value: Any, name: str, like: Tensor, order: Sequence[int]) -> Tensor:
        """Vectors of the checkpoint, the oldest first, as the rows of a matrix."""
        vectors = plain(value, name)
        if not isinstance(vectors, list):
            raise Unloadable(f"{name} of the checkpoint is not a list")
        rows = [self._vector_of(v, name, like, order) for v in vectors]
        return torch.stack(rows) if rows else like.new_empty(0, len(like))


def _require(entries: Mapping[str, Any], names: Sequence[str]) -> None:
    absent = [name for name in names if entries.get(name) is None]
    if absent:
        raise Unloadable(f"the checkpoint has no {', '.join(absent)}")


def _count(value: Any, name: str) -> int:
    number = as_number(value, f"{name} of the checkpoint")
    if not (number.is_integer() and 0 <= number < 2**63):
        raise Unloadable(f"{name} of the checkpoint is {number}, not a count")
    return int(number)


def _number(value: Any, name: str, like: Tensor) -> Tensor:
    """A number of the checkpoint; infinite or NaN if the run had such a loss."""
    return like.new_tensor(as_number(value, f"{name} of the checkpoint", finite=False))


def _refuse(options: Mapping[str, Any]) -> None:
    for name in ("maximize", "differentiable", "max_grad_norm", "skip_nonfinite"):
        value = options.get(name)
        if value is not None and value is not False:
            raise ValueError(f"LBFGS does not support {name}={value}")


def _norm(vector: Tensor) -> float:
    return vector.abs().amax().item()
