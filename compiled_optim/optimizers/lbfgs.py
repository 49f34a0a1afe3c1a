"""L-BFGS: the optimizer, and its step: iterations, each with a direction, a length and an evaluation of the closure.

The two-loop recursion (Nocedal & Wright, Numerical Optimization, Algorithm 7.4) makes two products of vectors per pair, one
after the other. Written with the matrix of all products of steps and changes (Byrd, Nocedal and Schnabel, Mathematical
Programming 63, 1994, Theorem 2.2), the same direction takes four products of the history with a vector, whatever its length.
It does not wait for the device, where the count of accepted pairs is. A line search waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.checkpoint.read import Unloadable, as_buffer, as_number, naming, plain, read
from compiled_optim.checkpoint.state_dict import PreparedLoad, check_writable
from compiled_optim.groups.numbers import send
from compiled_optim.groups.parameters import parameter_name
from compiled_optim.memory.layout import as_real, compute_dtype, is_sharded, obstacle, real_numel, scalar_dtype
from compiled_optim.memory.torch_internals import in_range, is_capturing, mend_tracing, outside_dynamo
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.fields import Number, hyper, is_per_parameter, static
from compiled_optim.state import ParamState
from compiled_optim.step.engine import Engine
from compiled_optim.step.step import Step

COUNTS = ("func_evals", "n_iter")
VECTORS = ("d", "prev_flat_grad")
NUMBERS = ("t", "prev_loss")
HISTORY = ("old_stps", "old_dirs")
MEMORY = (*COUNTS, *VECTORS, *NUMBERS, *HISTORY, "products", "H_diag", "pairs")  # entries that a step reads and writes
ENTRIES = (*MEMORY, "ro", "exact")  # with those of state dicts only: torch.optim's, and one for exact loads here

LEAST_CURVATURE = 1e-10  # torch.optim's limit: a pair with a smaller product would make the matrix indefinite
SUFFICIENT_DECREASE = 1e-4
CURVATURE = 0.9
SMALLEST_GROWTH, LARGEST_GROWTH = 0.01, 10.0  # factors of the next trial's length, after one that is too short
MARGIN = 0.1  # the least distance, over a bracket's length, of a second successive trial from its ends


def new_state(size: int, numel: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return the initial state, with an empty history of up to ``size`` pairs; pair ``n`` is in row ``n % size``.

    ``old_stps`` are steps and ``old_dirs`` changes of the gradient: torch.optim's names. ``products`` are of every step with
    every change that is not older, ``H_diag`` is the scale of the initial inverse Hessian, and ``pairs`` the number of pairs
    accepted so far. Empty rows are 0.
    """
    shapes = {**dict.fromkeys(VECTORS, (numel,)), **dict.fromkeys(HISTORY, (size, numel)), "products": (size, size)}
    dtypes = dict.fromkeys((*COUNTS, "pairs"), torch.int64)
    state = {n: torch.zeros(shapes.get(n, ()), dtype=dtypes.get(n, dtype), device=device) for n in MEMORY}
    state["H_diag"].fill_(1)
    return state


def record(pairs: Mapping[str, Tensor], step: Tensor, change: Tensor, allowed: Tensor) -> None:
    """Add the pair of a step and of the gradient's change over it; in a full history it replaces the oldest pair.

    Nothing changes unless ``allowed``, a 0-dim bool, is true and the pair's curvature is positive.
    """
    curvature = change.dot(step)
    accepted = (curvature > LEAST_CURVATURE) & allowed
    if size := len(pairs["products"]):
        row = (pairs["pairs"] % size).view(1)
        for name, new in (("old_stps", step), ("old_dirs", change)):
            ring = pairs[name]
            ring.index_copy_(0, row, torch.where(accepted, new, ring.index_select(0, row)))
        column = pairs["old_stps"] @ pairs["old_dirs"].index_select(0, row).view(-1)
        pairs["products"].index_copy_(1, row, column.view(-1, 1))
    pairs["H_diag"].copy_(torch.where(accepted, curvature / change.dot(change), pairs["H_diag"]))
    pairs["pairs"].add_(accepted)


def direction(pairs: Mapping[str, Tensor], gradient: Tensor, rows: int) -> Tensor:
    """Return minus the inverse Hessian that ``pairs``, in up to ``rows`` rows, imply times ``gradient``, (numel,)."""
    scale, count = pairs["H_diag"], pairs["pairs"]
    if rows == 0:
        return -scale * gradient
    steps, changes = pairs["old_stps"][:rows], pairs["old_dirs"][:rows]
    number = torch.arange(rows, device=gradient.device)
    by_age, back = (count + number) % rows, (number - count) % rows  # empty rows first, then from the oldest pair on
    products = pairs["products"].index_select(0, by_age).index_select(1, by_age)
    empty = (number < rows - count).to(products.dtype)
    triangle = products.triu() + torch.diag(empty)
    alpha = torch.linalg.solve_triangular(triangle, -(steps @ gradient)[by_age, None], upper=True)
    result = -scale * (gradient + changes.t() @ alpha[back, 0])
    right = products.diagonal()[:, None] * alpha - (changes @ result)[by_age, None]
    gamma = torch.linalg.solve_triangular(triangle.t(), right, upper=False)
    return torch.addmv(result, steps.t(), gamma[back, 0])


class Trial(NamedTuple):
    """A point of the line: the step length, and the function's value, gradient and slope along the direction there."""

    length: float
    value: float
    gradient: Tensor
    slope: float


def strong_wolfe(
    evaluate: Callable[[float], Trial], start: Trial, length: float, reach: float, tolerance: float, limit: int
) -> tuple[Trial, int]:
    """Search a step length with sufficient decrease and a small slope (Nocedal & Wright, Algorithms 3.5 and 3.6).

    Trials are at the minimum of the cubic through the two latest ones, with the safeguards of torch.optim. They are
    results of ``evaluate`` for a length, with infinity for NaN: first for ``length``, and then for up to ``limit`` others.
    The slope of ``start``, of length 0, is negative. A bracket is not divided further if no element, which changes by up to
    ``reach`` per unit of length, changes by the ``tolerance``.

    Returns:
        The best trial, and the number of trials.
    """

    def decreases(trial: Trial) -> bool:
        return trial.value <= start.value + SUFFICIENT_DECREASE * trial.length * start.slope

    def is_flat(trial: Trial) -> bool:
        return abs(trial.slope) <= -CURVATURE * start.slope

    previous, latest = start, evaluate(length)
    count = 1
    while count <= limit:
        if not decreases(latest) or (count > 2 and latest.value >= previous.value):
            break
        if is_flat(latest):
            return latest, count
        if latest.slope >= 0:
            break
        shortest = latest.length + SMALLEST_GROWTH * (latest.length - previous.length)
        length = _cubic_minimum(previous, latest, shortest, LARGEST_GROWTH * latest.length)
        previous, latest = latest, evaluate(length)
        count += 1
    else:
        return (start if start.value <= latest.value else latest), count

    ends = [previous, latest]
    best = _best(ends)
    was_near_an_end = False
    while count <= limit:
        first, last = sorted(end.length for end in ends)
        if (last - first) * reach < tolerance:
            break
        length = _cubic_minimum(ends[0], ends[1], first, last)
        margin = MARGIN * (last - first)
        is_near_an_end = min(last - length, length - first) < margin
        if is_near_an_end and (was_near_an_end or not first < length < last):
            length = last - margin if abs(length - last) < abs(length - first) else first + margin
            is_near_an_end = False
        was_near_an_end = is_near_an_end
        trial = evaluate(length)
        count += 1
        other = 1 - best
        if not decreases(trial) or trial.value >= ends[best].value:
            ends[other] = trial
            best = _best(ends)
            continue
        if not is_flat(trial) and trial.slope * (ends[other].length - ends[best].length) >= 0:
            ends[other] = ends[best]
        ends[best] = trial
        if is_flat(trial):
            break
    return ends[best], count


def _best(ends: list[Trial]) -> int:
    return 0 if ends[0].value <= ends[1].value else 1


def _cubic_minimum(a: Trial, b: Trial, lowest: float, highest: float) -> float:
    """Return the position of the minimum of the cubic through both trials, limited to bounds (equation 3.59).

    Without a minimum, return the middle of the bounds. If the cubic is a straight line, return a bound.
    """
    a, b = sorted((a, b), key=lambda trial: trial.length)
    span = b.length - a.length
    middle = (lowest + highest) / 2
    if span == 0:
        return middle
    mean = a.slope + b.slope - 3 * (a.value - b.value) / (a.length - b.length)
    square = mean * mean - a.slope * b.slope
    if not square >= 0:
        return middle
    root = math.sqrt(square)
    divisor, numerator = b.slope - a.slope + 2 * root, b.slope + root - mean
    part = numerator / divisor if divisor else numerator * math.inf  # NaN where both are 0
    minimum = b.length - span * part
    return middle if math.isnan(minimum) else min(max(minimum, lowest), highest)


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
        state, fresh = self._memory, self._new_state()
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
    def _memory(self) -> ParamState:
        memory: ParamState = self._state[self.params[0]]
        return memory

    def _new_state(self) -> dict[str, Tensor]:
        return new_state(self._group["history_size"], sum(self._sizes), self._dtype, self.devices[0])

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
        group, memory = self._group, self._memory
        limit, tolerance = group["max_eval"], group["tolerance_change"]
        limit = group["max_iter"] * 5 // 4 if limit is None else limit  # a checkpoint may have None
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
                start, line = Trial(0.0, loss, gradient, slope), self._line(closure)
                best, calls = strong_wolfe(line, start, length, reach, tolerance=1e-9, limit=limit - evaluations)
                length, loss, gradient, _ = best
                memory["t"].fill_(length)
                self._move(length * memory["d"])
            else:
                self._move(memory["t"] * memory["d"])
                if iteration < group["max_iter"]:
                    value, gradient = self._evaluate(closure)
                    loss, calls = float(value), 1
            evaluations += calls
            memory["func_evals"].add_(calls)
            if (
                evaluations >= limit
                or iteration == group["max_iter"]
                or gradient.abs().amax().item() <= group["tolerance_grad"]
                or abs(length) * reach <= tolerance
                or abs(loss - before) < tolerance
            ):
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

    def _line(self, closure: Callable[[], Any]) -> Callable[[float], Trial]:
        """Return the closure as a function of the length along ``d``; it restores the parameters."""
        towards = self._memory["d"]
        origin = [p.clone(memory_format=torch.preserve_format) for p in self._updated]

        def evaluate(length: float) -> Trial:
            self._move(length * towards)
            loss, gradient = self._evaluate(closure)
            value, slope = float(loss), gradient.dot(towards).item()
            torch._foreach_copy_(self._updated, origin)
            return Trial(length, math.inf if math.isnan(value) else value, gradient, slope)

        return evaluate

    def _evaluate(self, closure: Callable[[], Any]) -> tuple[Any, Tensor]:
        with torch.enable_grad():
            loss = closure()
        return self._minimized(loss), self._gradient()

    def _minimized(self, value: Any) -> Any:
        """Return a loss, or its gradient, with the sign for minimization."""
        return -value if self._maximizes else value

    def _gradient(self) -> Tensor:
        grads = []
        for param in self._updated:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            grads.append(grad.to_dense() if grad.layout is not torch.strided else grad)
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
        fresh = new_state(size, sum(self._sizes), self._dtype, self.devices[0])
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


def _rows_by_age(count: int, size: int) -> list[int]:
    """Return the rows of the stored pairs, the oldest first, after ``count`` were accepted."""
    return [n % size for n in range(max(count - size, 0), count)]


def packed(memory: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return torch.optim.LBFGS's state, and an entry for an exact :func:`unpack` of ``memory``. Waits for the device."""
    counts = {name: int(memory[name]) for name in COUNTS}
    if not counts["n_iter"]:
        return counts
    pairs = int(memory["pairs"])
    rows = _rows_by_age(pairs, len(memory["products"]))
    products = memory["products"][rows][:, rows]
    return {
        **counts,
        **{name: memory[name].clone() for name in (*VECTORS, "H_diag")},
        **{name: memory[name].item() for name in NUMBERS},
        **{name: list(memory[name][rows].unbind()) for name in HISTORY},
        "ro": list((1 / products.diagonal()).unbind()),
        "exact": {"n_iter": counts["n_iter"], "pairs": pairs, "products": products},
    }


def unpack(fresh: Mapping[str, Tensor], entries: Mapping[str, Any], order: Sequence[int], sizes: Sequence[int]) -> None:
    """Fill ``fresh`` from the state of torch.optim.LBFGS or of this package, with the newest pairs that fit.

    For each parameter, ``order`` has its index in the checkpoint, and ``sizes`` its number of real numbers.
    """
    like, saved_sizes = fresh["d"], [size for _, size in sorted(zip(order, sizes, strict=True))]

    def vector(value: Any, name: str) -> Tensor:
        parts = as_buffer(value, f"{name} of the checkpoint", tuple(like.shape), like.dtype).to(like).split(saved_sizes)
        return torch.cat([parts[index] for index in order])

    def history(name: str) -> Tensor:  # vectors as the rows of a matrix, the oldest first
        if not isinstance(vectors := plain(entries[name], name), list):
            raise Unloadable(f"{name} of the checkpoint is not a list")
        return torch.stack([vector(v, name) for v in vectors]) if vectors else like.new_empty(0, len(like))

    _require(entries, COUNTS)
    counts = {name: _count(entries[name], name) for name in COUNTS}
    for name, count in counts.items():
        fresh[name].fill_(count)
    if not counts["n_iter"]:
        return
    _require(entries, (*VECTORS, *NUMBERS, *HISTORY, "H_diag"))
    for name in VECTORS:
        fresh[name].copy_(vector(entries[name], name))
    for name in (*NUMBERS, "H_diag"):  # infinite or NaN if the run had such a loss
        fresh[name].copy_(like.new_tensor(as_number(entries[name], f"{name} of the checkpoint", finite=False)))
    steps, changes = map(history, HISTORY)
    if len(steps) != len(changes):
        raise Unloadable("old_stps and old_dirs of the checkpoint must be equally long")
    exact = plain(entries.get("exact", {}), "exact")
    if "n_iter" in exact and _count(exact["n_iter"], "n_iter of exact") == counts["n_iter"]:
        _require(exact, ("products", "pairs"))
        products = as_buffer(exact["products"], "products", (len(steps), len(steps)), like.dtype).to(like)
        pairs = _count(exact["pairs"], "pairs")
    else:  # torch.optim passes this package's entry on unchanged
        products, pairs = steps @ changes.t(), len(steps)
    size = len(fresh["products"])
    if len(_rows_by_age(pairs, size)) != len(steps):
        pairs = len(steps)
    rows = torch.tensor(_rows_by_age(pairs, size), dtype=torch.int64, device=like.device)
    first = len(steps) - len(rows)
    fresh["old_stps"][rows], fresh["old_dirs"][rows] = steps[first:], changes[first:]
    fresh["products"][rows[:, None], rows] = products[first:, first:]
    fresh["pairs"].fill_(pairs)


def _require(entries: Mapping[str, Any], names: Sequence[str]) -> None:
    if absent := [name for name in names if entries.get(name) is None]:
        raise Unloadable(f"the checkpoint has no {', '.join(absent)}")


def _count(value: Any, name: str) -> int:
    number = as_number(value, f"{name} of the checkpoint")
    if not (number.is_integer() and 0 <= number < 2**63):
        raise Unloadable(f"{name} of the checkpoint is {number}, not a count")
    return int(number)


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
