"""The base optimizer: constructor, parameter groups, state, step."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from compiled_optim import checkpoint, traced
from compiled_optim.addresses import gradient
from compiled_optim.arguments import as_groups, hand_over, names_and_tensors, without_aliases
from compiled_optim.checkpoint import LoadReport
from compiled_optim.controls import Controls
from compiled_optim.events import EventLog
from compiled_optim.formats import plain
from compiled_optim.hyperparameters import ParamGroup, address
from compiled_optim.lowering.choice import LOWERINGS, lower, refuse
from compiled_optim.lowering.cpp_library import CompilerError
from compiled_optim.lowering.interface import Capturable, Lowering
from compiled_optim.lowering.square_sums import SquareSums
from compiled_optim.parameters import check_names, check_params
from compiled_optim.plan import partition
from compiled_optim.rule.fields import Choice, Hyper, Static, flag
from compiled_optim.rule.rule import Declared
from compiled_optim.schedule import Schedule, Schedules
from compiled_optim.state import OptimizerState, ParamState
from compiled_optim.torch_internals import (
    current_capture,
    fakes_are_made,
    is_capturing,
    is_fake,
    mend_tracing,
    outside_dynamo,
    outside_inference_mode,
    refuse_tracing,
)
from compiled_optim.watched import Changes


class CompiledOptimizer(Declared, Optimizer):
    """Base of all optimizers of the package; a subclass declares fields, ``coefficients`` and ``update``.

    Args:
        params: tensors, ``(name, tensor)`` pairs, a dict ``name -> tensor``, or dicts of parameter groups with any of these
            as ``params``. A tensor that a group lists under several names, as ``named_parameters(remove_duplicate=False)``
            lists tied ones, is one parameter: it takes the first name, and checkpoints find it under every one.
        maximize: step along the gradient instead of against it.
        differentiable: record the step with autograd; implies ``lowering="eager"``. Gradients are dense.
        foreach, capturable, fused: accepted for torch.optim's sake and without effect.
        max_grad_norm: clip the gradients of all parameters together to this norm inside the step, as
            ``torch.nn.utils.clip_grad_norm_`` does before it; a number or a 0-dim tensor. See :attr:`grad_norm`.
        skip_nonfinite: change nothing in a step whose gradients have an infinite or NaN norm. See :attr:`skipped_steps`.
        lowering: ``"multi_tensor"``, ``"inductor"``, ``"eager"``, or ``"auto"``, the fastest for the device.

    Hyperparameters are 0-dim tensors in ``param_groups``, float64 where the device has it; see
    :class:`~compiled_optim.hyperparameters.ParamGroup` for what assigning to them means. State exists from construction
    for every parameter that requires a gradient.

    Raises:
        TypeError: something is not a tensor, a number or a known argument.
        ValueError: a hyperparameter is out of range, or a parameter is duplicate, not a leaf, or not floating point, or a
            name stands for two parameters or is given to some parameters only.
    """

    params: ParamsT
    maximize: bool = flag(default=False, kw_only=True)
    foreach: bool | None = flag(default=None, kw_only=True)
    capturable: bool = flag(default=False, kw_only=True)
    differentiable: bool = flag(default=False, kw_only=True)
    fused: bool | None = flag(default=None, kw_only=True)
    max_grad_norm: float | Tensor | None = flag(default=None, kw_only=True)
    skip_nonfinite: bool = flag(default=False, kw_only=True)
    lowering: str = flag(default="auto", kw_only=True)

    implied_state: ClassVar[Mapping[str, float]] = {}
    """The state that checkpoints of torch.optim's optimizer of this name leave out, as it is where they hold other state."""

    _is_made = False
    """Whether the constructor has taken all of its groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            bound = inspect.signature(type(self)).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}() {error}") from None
        bound.apply_defaults()
        made = {s.name: s.default for s in self.fields_of(Static) if not s.init}
        options = {**made, **bound.arguments}
        params = options.pop("params")
        self._configure(options)
        groups = as_groups(params)
        defaults = {name: options[name] for name in self._group_keys()}
        for hyper in self.fields_of(Hyper):
            elements = hyper.elements(options[hyper.name], "the defaults")
            if any(isinstance(e, Tensor) for e in elements):
                hand_over(hyper.name, options[hyper.name], groups)
            numbers = tuple(e.item() if isinstance(e, Tensor) else e for e in elements)
            for index, number in enumerate(numbers):
                hyper.check(number, index, "the defaults")
            defaults[hyper.name] = numbers if hyper.is_tuple else numbers[0]
        super().__init__(cast(ParamsT, groups), defaults)
        self._is_made = True
        self._rebuild()

    def _configure(self, options: Mapping[str, Any]) -> None:
        lowering = options["lowering"]
        if lowering not in LOWERINGS:
            raise ValueError(f"lowering must be one of {', '.join(LOWERINGS)}, got {lowering!r}")
        for choice in self.fields_of(Choice):
            choice.check(options[choice.name])
        if options["differentiable"] and self.gradients == "sparse":
            raise ValueError(f"differentiable=True needs dense gradients; {type(self).__name__} takes sparse ones")
        if self.granularity != "element" and options["differentiable"]:
            raise ValueError(
                f"differentiable=True is for optimizers that work element by element; {type(self).__name__} does not"
            )
        self._lowering = lowering
        self.max_grad_norm = options["max_grad_norm"]
        self.skip_nonfinite = options["skip_nonfinite"]
        self._aliases: dict[str, str] = {}
        self._reset()

    def _reset(self) -> None:
        """Forget everything that :meth:`_rebuild` derives."""
        self.units: list[Lowering] = []
        self._stateless: list[int] = []
        self._positions: list[list[int]] = []
        self._group_shapes: list[tuple[Any, ...]] = []
        self.events = EventLog()
        self._controls = Controls(torch.device("cpu"))
        self._square_sums: SquareSums | None = None
        self._schedules = Schedules()
        self._traceable: list[Tensor] = []
        self._live: list[dict[str, Any]] = []
        self._number = traced.register(self)
        self._replay: Callable[[], None] | None = None
        self._has_runner = False
        self._kept: list[object] = []  # what graphs captured by hand read; nobody says when they are gone
        self._is_by_hand = False
        self._changes: Changes = vars(self).setdefault("_changes", Changes())  # shared with groups and state
        self._changes.pending = True
        self._lock: contextlib.AbstractContextManager[bool] = vars(self).setdefault("_lock", threading.RLock())

    @classmethod
    def _group_keys(cls) -> list[str]:
        return [f.name for f in (*cls.fields_of(Hyper), *cls.fields_of(Static))] + list(cls.group_flags)

    @classmethod
    def _structural_keys(cls) -> set[str]:
        return {
            "params",
            "maximize",
            "differentiable",
            *cls.declaration.structural_hypers,
            *(s.name for s in cls.declaration.statics),
        }

    @outside_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; missing entries take the constructor's values.

        Args:
            param_group: ``params`` (tensors, pairs or a dict ``name -> tensor``) and any hyperparameters. The dict itself
                is not modified.

        Raises:
            TypeError, ValueError: as the constructor. The optimizer is then unchanged.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        with self._lock:
            self._add_group(param_group)

    def _add_group(self, param_group: Mapping[str, Any]) -> None:
        index = len(self.param_groups)
        values = {**self.defaults, **param_group}
        unknown = [k for k in values if k in self.fields and k not in self._group_keys()]
        if unknown:
            raise TypeError(f"{unknown[0]} is an option of the whole optimizer, not of param_groups[{index}]")
        names, params, aliases = without_aliases(*names_and_tensors(param_group["params"]))
        values["params"] = params
        if names:
            values["param_names"] = names
        self._check_params(values, index)
        check_names([*names, *aliases], self.param_groups, self._aliases)
        self._check_values(values, index)
        self.param_groups.append(self._new_group(values, index))
        self._aliases |= aliases
        self._changes.pending = True
        if self._is_made:
            known = list(self._state)
            try:
                self._rebuild()
            except (TypeError, ValueError):
                self.param_groups.pop()
                kept_state = {p: self._state[p] for p in known}
                self._state.clear()
                self._state.update(kept_state)
                self._aliases = {name: kept for name, kept in self._aliases.items() if name not in aliases}
                raise

    def _new_group(self, values: Mapping[str, Any], index: int) -> ParamGroup:
        device = values["params"][0].device if values["params"] else torch.get_default_device()
        others = [g for i, g in enumerate(self.param_groups) if i != index and isinstance(g, ParamGroup)]
        return ParamGroup(
            values,
            self.fields_of(Hyper),
            self._structural_keys(),
            device,
            f"param_groups[{index}]",
            functools.partial(self._check_values, index=index),
            self._changes,
            {address(t) for g in others for h in self.fields_of(Hyper) for t in g.tensors(h.name)},
        )

    def _check_params(self, group: Mapping[str, Any], index: int) -> None:
        check_params(type(self), group, index, self.param_groups[:index])

    @classmethod
    def _check_values(cls, group: Mapping[str, Any], index: int) -> None:
        where = f"param_groups[{index}]"
        for choice in cls.fields_of(Choice):
            choice.check(group.get(choice.name, choice.default), where)
        hypers = {h.name: group[h.name] for h in cls.fields_of(Hyper)}
        for hyper in cls.fields_of(Hyper):
            hyper.checked(hypers[hyper.name], where)
        cls.check(hypers, group)

    @staticmethod
    def check(hypers: Mapping[str, Any], statics: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` where fields do not fit each other; for subclasses to override.

        A group is checked when it is added and when one of its choices is assigned; not with every hyperparameter, whose
        values are on the device.
        """

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one optimization step.

        Args:
            closure: re-evaluates the model, with gradients enabled, and returns the loss.

        Returns:
            The closure's loss, if there is a closure.

        Raises:
            TypeError: a gradient is sparse where the optimizer takes dense ones, or the other way round, or what was
                assigned since the last step is of a wrong type. Nothing is changed then, nor by any other error.
            ValueError: what was assigned since the last step is out of range or does not fit, such as ``max_grad_norm``.
            RecompileError: something would be compiled again inside ``no_recompiles``.
            RuntimeError: a CUDA graph is being captured that cannot hold what this step needs.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if torch.compiler.is_compiling():
                self._step_traced()
            else:
                self.step_now()
        return loss

    _step_supports_amp_scaling = True  # torch's GradScaler hands over ``grad_scale`` and ``found_inf`` instead of waiting

    # torch's schedulers replace ``step`` on the instance to see that it was called, unless it says that they need not.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _step_traced(self) -> None:
        """Record the step in the graph that is being traced; reads nothing that Dynamo treats specially."""
        mend_tracing()
        if self.gradients == "sparse":
            torch.ops.compiled_optim.step_own_gradients(self._traceable, self._number)
            return
        positions = [i for i, p in enumerate(self._traceable) if p.grad is not None]
        params = [self._traceable[i] for i in positions]
        grads = [p.grad for p in params]
        torch.ops.compiled_optim.step(params, grads, positions, self._number)

    def traceable_params(self) -> list[Tensor]:
        """All parameters, group by group, as they were when the plans were last made."""
        return self._traceable

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters; can be traced.

        Args:
            set_to_none: set them to None instead of to zero.
        """
        if not torch.compiler.is_compiling() and (self._changes.pending or self._regrouped()):
            with self._lock:
                self._rebuild()
        for param in self._traceable:
            if set_to_none:
                param.grad = None  # unread, so that compiled code does not depend on whether there was one
            elif param.grad is not None:
                if param.grad.requires_grad and torch.compiler.is_compiling():
                    param.grad = param.grad.detach()
                elif param.grad.grad_fn is not None:
                    param.grad.detach_()
                else:
                    param.grad.requires_grad_(False)
                param.grad.zero_()

    @outside_dynamo
    def step_now(self, grads: list[Tensor | None] | None = None) -> None:
        """Update the parameters, without closure and hooks; see :meth:`prepare` for ``grads``. One thread at a time does."""
        with self._lock:
            self.prepare(grads)
            (self._replay or self.launch)()
            self.finish()

    def prepare(self, grads: list[Tensor | None] | None = None) -> None:
        """The host's part of a step: follow what changed since the last one; nothing is updated yet.

        Args:
            grads: gradients to take in place of the parameters' own, one entry for each of :meth:`traceable_params`.

        Raises:
            TypeError, ValueError, RecompileError, RuntimeError: as :meth:`step`.
        """
        if any(is_capturing(unit.plan.device) for unit in self.units):
            self._check_capture(grads)
        if fakes_are_made() and not all(map(is_fake, self._traceable)):
            raise RuntimeError(
                "a step of real parameters under FakeTensorMode would compute with fake tensors; leave the mode, or make "
                "the parameters in it"
            )
        self._opt_called = True  # torch's schedulers ask
        self._take_controls()
        if self._changes.pending or self._regrouped() or self._wakes(grads) or not self._read(grads):
            grads = self._rebuild(grads)
            described = self._read(grads)
            assert described
        self._prepare_units(grads)

    def _prepare_units(self, grads: list[Tensor | None] | None) -> None:
        by_unit = self._by_unit(grads)
        for unit, own in zip(self.units, by_unit, strict=True):
            if not unit.is_compiled:
                self._changes.pending = True  # to the end, whatever interrupts it
                try:
                    unit.compile()
                except CompilerError as error:
                    refuse(unit.plan, str(error))  # and let the plans have another lowering
                    self.prepare(grads)
                    return
                unit.plan.settle(own)
        self._changes.pending = False
        if self._controls.measures_norm and self._square_sums is None:
            self._square_sums = SquareSums(self.units)
            self._leave_graphs()
        self._schedules.hold()
        for unit, own in zip(self.units, by_unit, strict=True):
            unit.prepare(own)

    @property
    def taken_scaler(self) -> tuple[Any, Any]:
        """``grad_scale`` and ``found_inf`` of the last step."""
        return self._controls.scaler

    def check_capturable(self, *, alone: bool) -> None:
        """Raise ``ValueError`` where no graph can hold a step; ``alone`` says that it is to hold nothing else."""
        self._capturable()

    def _capturable(self) -> list[Capturable]:
        for unit in self.units:
            if not isinstance(unit, Capturable):
                raise ValueError(
                    f"a CUDA graph holds steps with lowering='multi_tensor'; {type(self).__name__} updates "
                    f"'{unit.plan.members[0].name}' in another way ({unit.name})"
                )
        return cast("list[Capturable]", self.units)

    def launch_key(self) -> tuple[object, ...]:
        """What a graph that holds :meth:`launch` depends on: it is valid for as long as this stays equal."""
        return (self._square_sums, *(unit.launch_key() for unit in self._capturable()))

    def hold(self) -> None:
        """Bring the prepared gradients to where a :meth:`launch` reads them that is captured now or was before."""
        for unit in self._capturable():
            unit.hold()

    def refresh(self, grad_scale: Any, found_inf: Any) -> tuple[object, ...] | None:
        """Hand over what was assigned since the last step to a graph that holds whole steps, without preparing one.

        Args:
            grad_scale: the gradient scaler's tensor that the graph reads; None without one.
            found_inf: likewise.

        Returns:
            What the graph depends on: it is valid for as long as this stays equal. None if the step would have to be
            derived anew from groups and state.
        """
        if self._changes.pending or self._regrouped() or not all(unit.is_compiled for unit in self.units):
            return None
        if self._hands_out_state and any(unit.plan.state_moved for unit in self.units):
            return None
        self._controls.take(self.max_grad_norm, grad_scale, found_inf, self.skip_nonfinite)
        if self._controls.measures_norm != (self._square_sums is not None):
            return None
        units = self._capturable()
        self._schedules.hold()
        for unit in units:
            unit.refresh()
        return (self._square_sums, *units, *(unit.copied() for unit in units))

    @contextlib.contextmanager
    def launched_by(self, replay: Callable[[], None]) -> Iterator[None]:
        """Let steps inside a ``with`` block call ``replay`` in place of :meth:`launch`."""
        try:
            self._replay = replay
            yield
        finally:
            self._replay = None

    @contextlib.contextmanager
    def captured_by_runner(self, steps: int) -> Iterator[None]:
        """Let up to ``steps`` steps inside a ``with`` block be captured by one who follows assignments himself."""
        with contextlib.ExitStack() as stack:
            for unit in self._capturable():
                stack.enter_context(unit.uploading_later(steps))
            try:
                self._has_runner = True
                yield
            finally:
                self._has_runner = False

    def _check_capture(self, grads: list[Tensor | None] | None) -> None:
        """Refuse to capture a step that needs more than a graph can hold; warn of assignments after one that is captured."""
        if not self._has_runner and any(current_capture(unit.plan.device) in _runner_captures for unit in self.units):
            raise RuntimeError(
                f"{type(self).__name__} is stepped in a function that a CUDAGraphRunner captures, but is not one of the "
                "runner's optimizers; name it there"
            )
        elsewhere = any(t.device != u.plan.device for u in self.units for t in self._controls.tensors(u.plan.device))
        reasons = {
            "groups or state changed since the last step": self._changes.pending or self._regrouped(),
            "a parameter got its first gradient": bool(self.units) and self._wakes(grads),
            "its kernels are not compiled yet": not all(unit.is_compiled for unit in self.units),
            "clipping was switched on or off": (self.max_grad_norm is not None or self.skip_nonfinite)
            != (self._square_sums is not None),
            "max_grad_norm or skip_nonfinite was assigned": not self._controls.are_tensors(*self._given_controls()),
            "max_grad_norm is a tensor on another device": elsewhere and not self._has_runner,
        }
        reason = next((r for r, holds in reasons.items() if holds), None)
        if reason is None and not self._read(grads):
            reason = "a parameter moved or its gradient has another dtype"
        if reason is not None:
            raise RuntimeError(
                f"{type(self).__name__}.step() cannot be captured in a CUDA graph now: {reason}; "
                "take one step before capturing, or let co.CUDAGraphRunner do so"
            )
        if not self._has_runner:
            self._keep_for_graph()

    def _keep_for_graph(self) -> None:
        """Note that a graph captured by hand is to read what the step uses now."""
        if not self._is_by_hand:
            self._kept.append((self.units, self._square_sums, self._schedules))
        self._is_by_hand = True
        for group in self._groups:
            group.on_assignment = self._warn_of_graph

    def _leave_graphs(self) -> None:
        """Warn where the step no longer uses what a graph captured by hand reads."""
        if self._is_by_hand:
            self._is_by_hand = False
            warnings.warn(
                "groups, state or clipping changed after step() was captured in a CUDA graph, which goes on with those it "
                "was captured with; capture it again, or with co.CUDAGraphRunner",
                RuntimeWarning,
                stacklevel=3,
            )

    def _warn_of_graph(self, label: str) -> None:
        for group in self._groups:
            group.on_assignment = None
        warnings.warn(
            f"{label} was assigned after step() was captured in a CUDA graph, which goes on reading the old tensor; "
            "write into it with fill_, or capture with co.CUDAGraphRunner",
            RuntimeWarning,
            stacklevel=4,
        )

    def launch(self) -> None:
        """The device's part of a prepared step; a graph may capture it."""
        self._schedules.evaluate()
        if self._square_sums is not None:
            self._square_sums.measure()
        for unit in self.units:
            unit.launch()

    def finish(self) -> None:
        """End a step that was launched."""
        self.events.steps += 1
        for unit in self.units:
            unit.finish()

    def _take_controls(self) -> None:
        self._controls.take(*self._given_controls())
        if self._square_sums is not None and not self._controls.measures_norm:
            self._changes.pending = True

    def _given_controls(self) -> tuple[Any, ...]:
        scaler = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # set and deleted by torch's GradScaler
        return self.max_grad_norm, *scaler, self.skip_nonfinite

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the last step, unscaled and before clipping: a 0-dim tensor, on the device.

        None where the step does not need it: without ``max_grad_norm`` and ``skip_nonfinite``.
        """
        return self._controls.outcome(self.units[0].plan.device)[0] if self._controls.measures_norm and self.units else None

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps were left out because of infinite or NaN gradients: a 0-dim tensor, on the device."""
        return self._controls.outcome(self.units[0].plan.device if self.units else self._controls.device)[2]

    def _read(self, grads: list[Tensor | None] | None) -> bool:
        """Look at all parameters and gradients; whether the plans still describe them."""
        state = self._hands_out_state
        hold = bool(self._schedules.functions)
        by_unit = zip(self.units, self._by_unit(grads), strict=True)
        return all([unit.plan.read(own, state=state, hold=hold) for unit, own in by_unit])

    def _by_unit(self, grads: list[Tensor | None] | None) -> Sequence[list[Tensor | None] | None]:
        if grads is None:
            return [None] * len(self.units)
        return [list(map(grads.__getitem__, positions)) for positions in self._positions]

    def _wakes(self, grads: list[Tensor | None] | None) -> bool:
        """Whether a parameter without state has a gradient."""
        return any((self._traceable[i].grad if grads is None else grads[i]) is not None for i in self._stateless)

    def _regrouped(self) -> bool:
        """Whether somebody replaced groups behind the optimizer's back, as torch allows."""
        return [self._group_shape(g) for g in self.param_groups] != self._group_shapes

    def _group_shape(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """What of a group may change unreported: identity, length, a write into a hyperparameter that was 0."""
        grown = [isinstance(group, ParamGroup) and group.nonzero(name) for name in self.declaration.structural_hypers]
        return (id(group), len(group.get("params", ())), *grown)

    @outside_inference_mode()
    def _rebuild(self, grads: Sequence[Tensor | None] | None = None) -> list[Tensor | None] | None:
        """Derive everything the step uses from the groups and the state, and take ``grads`` for the parameters' own.

        Returns:
            ``grads`` in the order in which the parameters are now; None if they are the parameters' own.
        """
        self._changes.pending = True  # to the end, whatever interrupts it
        given = {} if grads is None else dict(zip(map(id, self._traceable), grads, strict=True))

        def grad_of(param: Tensor) -> Tensor | None:
            return given[id(param)] if id(param) in given else gradient(param)

        for index, group in enumerate(self.param_groups):
            if not isinstance(group, ParamGroup):
                if "params" not in group:
                    raise ValueError(f"param_groups[{index}] has no 'params'")
                values = {**self.defaults, **group}
                if self._group_shapes:  # else it is the copy of one that was checked
                    self._check_values(values, index)
                self.param_groups[index] = self._new_group(values, index)
        groups = self._groups
        for index, group in enumerate(groups):
            self._check_params(group, index)
            if group["params"]:
                group.to(group["params"][0].device)
        self._traceable = [p for g in groups for p in g["params"]]
        self._make_units(groups, grad_of)
        place = {id(p): i for i, p in enumerate(self._traceable)}
        self._positions = [[place[id(p)] for p in unit.plan.params] for unit in self.units]
        planned = {i for positions in self._positions for i in positions}
        self._stateless = [i for i in range(len(self._traceable)) if i not in planned]
        self._group_shapes = [self._group_shape(g) for g in groups]
        self._changes.pending = False
        self._leave_graphs()
        return None if grads is None else list(map(grad_of, self._traceable))

    def _make_units(self, groups: Sequence[ParamGroup], grad_of: Callable[[Tensor], Tensor | None]) -> None:
        """Set ``units``, what runs the step, and complete the state; for an optimizer without a rule to override."""
        plans = partition(self.rule, groups, self._state, grad_of)
        differentiable = any(g.get("differentiable", False) for g in groups)
        if plans and self._controls.device != plans[0].device:
            self._controls = Controls(plans[0].device)
        self._take_controls()
        if differentiable and self._controls.measures_norm:
            raise ValueError("differentiable=True does not work with max_grad_norm and skip_nonfinite: clip before the step")
        self.units = [lower(plan, self._lowering, self._controls, self.events, differentiable) for plan in plans]
        for plan in plans:
            plan.settle(None)
        later = [f"'{member.name}'" for plan in plans if plan.shares_memory for member in plan.members]
        if later:
            more = f" and {len(later) - 3} more" if len(later) > 3 else ""
            self.events.fall_back(
                f"{', '.join(later[:3])}{more} share memory with other parameters, and are updated after them",
                "a step has more launches for it",
            )
        self._square_sums = None
        self._schedules.follow(groups, plans)
        self._live = [g.live for g in groups]

    def schedule(self, group: int | None = None, **functions: Schedule | None) -> None:
        """Make hyperparameters functions of the step count, evaluated on the device as part of every step.

        A captured graph then moves them by itself, without the host: ``opt.schedule(lr=lambda step: 0.1 * 0.99**step)``. The
        value is written into the group's tensor before the step uses it, and overrides what was assigned.

        Args:
            group: the index of a group; None for all groups.
            **functions: by hyperparameter, a function from the step that is about to be taken to the value. The step is a
                0-dim float64 tensor, one more than the largest step count of any parameter: 1 at first, and what a loaded
                checkpoint or a skipped step make of it. The value is a 0-dim tensor or a number, a tuple of them for
                ``betas``; only the first one is checked against the hyperparameter's range. The function must consist of
                torch operations. None ends the schedule, at the value that it has reached.

        Raises:
            TypeError, ValueError: a function does not fit; no schedule is changed then.
            IndexError: there is no such group.
        """
        indices = range(len(self.param_groups)) if group is None else [range(len(self.param_groups))[group]]
        hypers = {h.name: h for h in self.fields_of(Hyper)}
        unknown = functions.keys() - hypers.keys()
        if unknown:
            raise ValueError(f"{type(self).__name__} has no hyperparameter '{min(unknown)}'; it has {', '.join(hypers)}")
        schedules = self._schedules.copy()
        for index in indices:
            for name, function in functions.items():
                schedules.set(index, self._groups[index], hypers[name], function)
        self._schedules = schedules
        self._changes.pending = True

    def scheduled(self) -> dict[tuple[int, str], Schedule]:
        """The schedules, by group and hyperparameter."""
        return {key: function for key, (_, function) in self._schedules.functions.items()}

    def hyperparameter(self, name: str, group: int = 0) -> Tensor | tuple[Tensor, ...]:
        """The live tensor, or tuple of tensors, in ``param_groups[group][name]``; unlike that, it can be traced.

        Write to it outside of compiled code: torch 2.13 loses in-place writes to 0-dim float64 tensors on the CPU there.

        Raises:
            KeyError, IndexError: there is no such hyperparameter or group.
        """
        value: Tensor | tuple[Tensor, ...] = self._live[group][name]
        return value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups; see :class:`~compiled_optim.hyperparameters.ParamGroup`.

        Compiled code cannot read them: Dynamo writes into every group it reads, and knows plain dicts only.
        """
        refuse_tracing("param_groups", "read a hyperparameter with opt.hyperparameter(name, group), and set it outside")
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    _hands_out_state = False
    """Whether somebody may hold state tensors, and so give them other memory."""

    @property
    def _state(self) -> OptimizerState:
        state: OptimizerState = self.__dict__["state"]
        return state

    @property  # type: ignore[override]
    def state(self) -> OptimizerState:
        """Parameter -> its state, see :class:`~compiled_optim.state.ParamState`. Any mapping of mappings can be assigned."""
        if not self._hands_out_state:
            self._hands_out_state = True
        return self._state

    @state.setter
    def state(self, values: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self._changes.pending = True
        self._hands_out_state = bool(values)
        own = OptimizerState(changes=self._changes)
        for param, entries in values.items():
            own.set_quietly(param, ParamState(entries, changes=self._changes))
        self.__dict__["state"] = own

    def hyperparameters(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group as Python floats, for logs and JSON. Waits for the device."""
        return [group.floats() for group in self._groups]

    @outside_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state in torch.optim's layout, with ``param_names`` where the parameters have names.

        Hyperparameters are Python numbers, step counts and scalars copies on the CPU; buffers are the live tensors, as in
        torch.optim. Run-time flags have their defaults, whatever the optimizer was made with.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        neutral = {name: self.fields[name].default for name in self.group_flags}  # type: ignore[attr-defined]
        with self._lock:
            if self._changes.pending or self._regrouped():
                self._rebuild()
            result = self._save(neutral)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, result)
            result = result if replaced is None else replaced
        return result

    @outside_dynamo
    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        hyperparameters: Literal["checkpoint", "keep"] = "checkpoint",
    ) -> LoadReport:
        """Copy a state dict into the live tensors: of this package, or of torch.optim's or optimi's optimizer of this name.

        Parameters are matched by name where both sides have names, whatever the order and grouping, else by position.
        Prefixes that module wrappers insert do not matter where names stay different without them, and a tied parameter is
        found under each of its names. Static choices and run-time flags stay the optimizer's own. A frozen parameter without
        state in the checkpoint keeps what it has; any other starts anew. A step of another thread waits.

        Args:
            state_dict: as returned by :meth:`state_dict` or ``co.named_state_dict``. It is not modified.
            strict: raise unless every parameter and every state entry matches; otherwise load the intersection.
            hyperparameters: ``"checkpoint"`` to take the checkpoint's values, ``"keep"`` to keep the groups'.

        Returns:
            The names that were missing, unexpected and mismatched; empty lists with ``strict``.

        Raises:
            ValueError, TypeError: the checkpoint does not match, naming what; the optimizer is then unchanged. Only an
                interrupt (Ctrl-C) while the tensors are copied can leave part of a load; another load mends that.
        """
        if hyperparameters not in ("checkpoint", "keep"):
            raise ValueError(f"hyperparameters must be 'checkpoint' or 'keep', got {hyperparameters!r}")
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        saved: dict[str, Any] = plain(state_dict, "the state dict")
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, saved)
            saved = saved if replaced is None else replaced
        with self._lock:
            if self._changes.pending or self._regrouped():
                self._rebuild()
            report = self._load(saved, strict, hyperparameters)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        return report

    def _save(self, neutral: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict, with the values of ``neutral`` for run-time flags."""
        return checkpoint.save(self.declaration, self._groups, self.state, self._aliases, neutral)

    def _load(
        self, state_dict: Mapping[str, Any], strict: bool, hyperparameters: Literal["checkpoint", "keep"]
    ) -> LoadReport:
        """Copy ``state_dict`` into groups and state, or raise before anything is changed."""
        return checkpoint.load(
            self.declaration,
            self._groups,
            self._state,
            state_dict,
            aliases=self._aliases,
            implied=self.implied_state,
            keep={*self.group_flags, *(s.name for s in self.declaration.statics)},
            strict=strict,
            hyperparameters=hyperparameters,
        )

    @property
    def _groups(self) -> list[ParamGroup]:
        return cast("list[ParamGroup]", self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        own = {"lowering": self._lowering, "aliases": self._aliases, "schedules": self._schedules.functions}
        return {**super().__getstate__(), **own, "max_grad_norm": self.max_grad_norm, "skip_nonfinite": self.skip_nonfinite}

    def __setstate__(self, state: dict[str, Any]) -> None:
        lowering = state.pop("lowering", getattr(self, "_lowering", "auto"))
        self._aliases = dict(state.pop("aliases", getattr(self, "_aliases", {})))
        self.max_grad_norm = state.pop("max_grad_norm", getattr(self, "max_grad_norm", None))
        self.skip_nonfinite = state.pop("skip_nonfinite", getattr(self, "skip_nonfinite", False))
        schedules = state.pop("schedules", {})
        super().__setstate__(state)
        self._lowering = lowering
        self._reset()
        self._schedules.functions = dict(schedules)
        self.defaults = {name: self.defaults[name] for name in self._group_keys()}  # torch adds a key
        self.state = self.__dict__["state"]
        self._is_made = True


_runner_captures: set[object] = set()


@contextlib.contextmanager
def recorded_by_runner(device: torch.device) -> Iterator[None]:
    """Refuse steps that are captured meanwhile, on any thread, of optimizers that the runner was not told of."""
    capture = current_capture(device)
    _runner_captures.add(capture)
    try:
        yield
    finally:
        _runner_captures.discard(capture)
