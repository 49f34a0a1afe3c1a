"""The base optimizer: constructor, step, schedules, hyperparameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from compiled_optim.groups.numbers import send
from compiled_optim.groups.param_group import built_in_entries, group_entries
from compiled_optim.groups.parameters import as_groups
from compiled_optim.lowering.select import LoweringName
from compiled_optim.memory.layout import scalar_dtype, scalars_device
from compiled_optim.memory.torch_internals import (
    backward_number,
    has_hooks,
    is_capturing,
    is_observed,
    mend_tracing,
    outside_dynamo,
    outside_inference_mode,
    set_grad_enabled,
)
from compiled_optim.plan.changed_weights import ChangedWeights, changed_weights
from compiled_optim.plan.output_memory import NO_OUTPUTS, OutputMemory
from compiled_optim.plan.schedule import Schedule
from compiled_optim.rule.declared import Declared, no_hyperparameter
from compiled_optim.rule.fields import Number, PerParameter, added, option
from compiled_optim.rule.outputs import Outputs
from compiled_optim.rule.rule import TRAIN_MODE
from compiled_optim.rule.storage import StateDtype, Weights
from compiled_optim.rule.transforms import Split
from compiled_optim.saved_optimizer import SavedOptimizer
from compiled_optim.step import traced
from compiled_optim.step.engine import Engine, refuse_whole
from compiled_optim.step.rule_step import RuleStep, step_with_rule
from compiled_optim.step.step import Step

P = ParamSpec("P")
R = TypeVar("R")


class CompiledOptimizer(Declared, SavedOptimizer):
    """Base of all optimizers of the package; a subclass declares fields, ``coefficients`` and ``update``.

    Args:
        params: tensors, ``(name, tensor)`` pairs, a dict ``name -> tensor``, or dicts of parameter groups with any of these
            as ``params``. A tensor that a group lists under several names, as ``named_parameters(remove_duplicate=False)``
            lists tied ones, is one parameter: it takes the first name, and checkpoints find it under each. A tensor listed
            twice in a group is updated once, with a warning. Two tensors of one name are a warning too. Integer tensors are
            skipped.
        maximize: step along the gradient instead of against it.
        differentiable: record the step with autograd; implies ``lowering="eager"``. Gradients must be dense.
        foreach, capturable, fused: accepted for torch.optim's sake and without effect.
        max_grad_norm: clip the gradients of all parameters together to this norm inside the step, as
            ``torch.nn.utils.clip_grad_norm_`` does before it; a number or a 0-dim tensor. See :attr:`grad_norm`.
        skip_nonfinite: skip steps whose gradient norm, after unscaling, is NaN or so large that its square overflows: above
            1.8e19, or above 1.3e154 if all parameters are float64.
        decouple_wd: True multiplies parameters by ``1 - lr * weight_decay`` before the step, as AdamW does. False adds the
            decay to the gradient. None is the optimizer's default, and True with ``decouple_lr``. Per group, for optimizers
            that can add decay to the gradient.
        decouple_lr: divide ``weight_decay`` by ``max_lr``: a step then shrinks the parameter by the share ``weight_decay *
            lr / max_lr``. Per group, for optimizers with ``weight_decay``.
        max_lr: the learning rate that ``decouple_lr`` divides by; 0 switches decay off. None is the ``lr`` with which the
            group was made: pass ``max_lr`` if a schedule exceeds that, else decay exceeds ``weight_decay``. torch's
            OneCycleLR writes its peak here. Only groups with ``decouple_lr``, ``corrected_weight_decay`` or a given
            ``max_lr`` have it.
        corrected_weight_decay: multiply ``weight_decay`` by ``lr / max_lr``, so that decay follows the square of a schedule,
            as in AdamC (arXiv:2506.02285): ``lr**2 / max_lr * weight_decay`` for ``lr * weight_decay``. Per group, for
            optimizers with ``weight_decay``; the paper has it for layers whose output is normalized. This argument and the
            next do not go with decay in the gradient: pass ``decouple_wd=True`` to optimizers that have it.
        cautious_weight_decay: decay only elements whose value and step, which is subtracted, do not have opposite signs, so
            that decay never works against the step (arXiv:2510.12402, Algorithm 1). The signs are of the step without
            decay, and before ``cautious``. Per group, for optimizers with ``weight_decay`` but AdamWScheduleFree.
        cautious: move only elements whose step goes against their gradient, and enlarge their steps to make up for the
            others (arXiv:2411.16085). Per group, for optimizers that work element by element on dense gradients. The real
            and the imaginary part of a complex number are two elements.
        lr_scale: a factor >= 0 of ``lr`` for each parameter, per group: a dict ``name -> factor``, where absent names have
            1, or a function ``(name, parameter) -> factor``, where the name may be None. Groups and kernels are not split by
            it. The function is called when groups change. Checkpoints do not hold the factors.
        stacks: patterns of names, such as ``("*experts*",)``, per group, for optimizers that work on matrices. A matching
            parameter of shape ``(..., m, n)`` is a stack of matrices ``(m, n)``, each updated by itself. Any other one that
            is no matrix is refused: only you know which of its axes are experts, heads or a filter's.
        split: a dict that splits matrices along their rows, per group, for optimizers that work on matrices. Of a fused
            projection, each part is updated by itself: ``{"*qkv*": 3}`` means three equal parts, and ``{"*qkv*": (768, 256,
            256)}`` parts of so many rows. ``{"*q_proj*": 12}`` is for twelve heads.
        weights: how the state stores the bits that bfloat16 and float16 parameters lack, per group. None rounds the
            parameters, as torch.optim does; the first step warns of those that it is too small for. ``"kahan"`` stores a
            compensation of the same dtype, ``"split8"`` and ``"split16"`` a remainder (24 or 32 bits with the parameter's),
            ``"master"`` a float32 copy. ``"stochastic"`` stores nothing and rounds at random, without bias. Parameters of
            other dtypes must be in ``exclude``, but for ``"auto"``, which is ``"kahan"`` for 16-bit ones alone. This
            argument and the next four are for optimizers that work element by element or on matrices.
        kahan_sum: optimi's name: True and None are ``weights="kahan"`` for 16-bit parameters. False does not change
            ``weights``.
        state_dtype: the dtype of moving averages, per group; by default the parameter's. ``"int8"`` stores 8-bit codes
            (``exp_avg_int8``) with a scale per 64 elements; an infinite or NaN element spoils all 64. For optimizers on
            matrices, rows must then be of a multiple of 64 elements, or the matrix in ``exclude``. A dict ``state name ->
            dtype`` chooses for each state, and also for sums. With this argument, averages of at most 16 bits are dithered,
            so that small changes are not lost. Without it they are rounded to nearest, as in torch.optim.
        exclude: shell-style patterns of names, such as ``("*.bias", "lm_head.*")``, per group. Parameters that match, and
            all of fewer than 4096 elements, are not compressed: 16-bit ones have float32 state and a float32 copy. A pattern
            without a match is a warning.
        rounding_seed: a whole number >= 0 and below 2**24, per group. Random numbers depend on it, on the step count and on
            the parameter's name, so they are the same in every process and after a resume.
        lowering: how a step runs. ``"multi_tensor"``: one kernel updates all tensors; in a function that you compile, the
            step is one custom operator. ``"inductor"``: Inductor, torch.compile's compiler, generates the kernels; in a
            function that you compile, the step is inlined, and no Python runs. The function is retraced when groups, state
            tensors or the set of parameters with gradients change. A step that cannot be inlined becomes the operator.
            ``"eager"``: plain torch operations. ``"auto"``: the fastest one for the device.

    Groups in ``param_groups`` hold the numbers that you gave. Steps read 0-dim tensors, which :meth:`hyperparameter`
    returns; they are float64 where the device supports it. The next step uses a value that you assign to a group or write
    into such a tensor. Every parameter that requires a gradient has its state from construction on.

    Raises:
        TypeError: something is not a tensor, a number or a known argument.
        ValueError: a hyperparameter is out of range, a parameter is no leaf or in two groups, or some have no name.
        RuntimeError: both ``fused`` and ``foreach`` are True.
    """

    params: ParamsT
    maximize: bool = option(default=False, kw_only=True)
    foreach: bool | None = option(default=None, kw_only=True)
    capturable: bool = option(default=False, kw_only=True)
    differentiable: bool = option(default=False, kw_only=True)
    fused: bool | None = option(default=None, kw_only=True)
    max_grad_norm: float | Tensor | None = option(default=None, kw_only=True)
    skip_nonfinite: bool = option(default=False, kw_only=True)
    lowering: LoweringName = option(default="auto", kw_only=True)
    decouple_wd: bool | None = added(default=None, kw_only=True)
    decouple_lr: bool = added(default=False, kw_only=True)
    max_lr: Number | None = added(default=None, kw_only=True)
    corrected_weight_decay: bool = added(default=False, kw_only=True)
    cautious_weight_decay: bool = added(default=False, kw_only=True)
    cautious: bool = added(default=False, kw_only=True)
    lr_scale: PerParameter | None = added(default=None, kw_only=True)
    stacks: Sequence[str] = added(default=(), kw_only=True)
    split: Split | None = added(default=None, kw_only=True)
    weights: Weights | None = added(default=None, kw_only=True)
    kahan_sum: bool | None = added(default=False, kw_only=True)
    state_dtype: StateDtype = added(default=None, kw_only=True)
    exclude: Sequence[str] = added(default=(), kw_only=True)
    rounding_seed: int = added(default=0, kw_only=True)

    _step_class: ClassVar[type[Step]] = RuleStep
    _takes_module: ClassVar[bool] = False  # as params, since more than names tells its parameters apart

    def __init_subclass__(cls, *, steps: type[Step] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._step_class = steps or cls._step_class

    @outside_dynamo
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        statics = {s.name: s.default for s in self._declaration.statics if not s.init}
        options = built_in_entries(type(self), {**statics, **self._arguments(args, kwargs)})
        params = options.pop("params")
        for choice in self._options():
            choice.check(options[choice.name])
        if options["fused"] and options["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")  # torch's words
        self._step_class.check_options(type(self), options)
        self._begin(options["lowering"])
        self.max_grad_norm = options["max_grad_norm"]
        self.skip_nonfinite = options["skip_nonfinite"]
        defaults, self._engine.groups.tensor_defaults = _as_defaults(type(self), options)
        groups = as_groups(params)
        for hyper in [h for h in self._declaration.hypers if h.when and h.name in defaults]:
            if not any(hyper.is_read({**options, **group}) for group in groups):
                raise ValueError(f"nothing reads {hyper.name} without {hyper.needed}, which no group has")
        self._engine.is_open = True
        super().__init__(cast(ParamsT, groups), defaults)
        self._engine.is_open = False
        self._engine.renew()

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
        self._engine.add_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one optimization step. Parameters without a gradient stay as they are.

        Args:
            closure: re-evaluates the model, with gradients enabled, and returns the loss.

        Returns:
            The closure's loss, if there is a closure.

        Raises:
            TypeError: ``closure`` cannot be called, a gradient is sparse where the optimizer takes dense ones, or the other
                way round, or a value assigned since the last step has a wrong type. No error of a step changes anything.
            ValueError: a value assigned since the last step is out of range or does not fit, such as ``max_grad_norm``.
            RecompileError: something would be compiled again inside ``no_recompiles``.
            RuntimeError: a CUDA graph is being captured, and this step cannot be part of one.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(
                    f"step() takes nothing, or a function that evaluates the loss, got a {type(closure).__name__}; call "
                    "loss.backward() and then step()"
                )
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_dynamo_compiling():
            if self._engine.release is not None:
                raise RuntimeError("compiled code cannot hold a step with gradient release: its backward runs no hooks")
            scaler = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            with torch.no_grad():
                traced.record_step(self._engine, scaler)
            return loss
        is_recording = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)
            self._engine.run()
        finally:
            set_grad_enabled(is_recording)
        return loss

    @staticmethod
    def profile_hook_step(func: Callable[P, R]) -> Callable[P, R]:
        """Wrap a step as torch does, so that profilers and hooks see it; at less cost where there are none."""
        observed = Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(*args: P.args, **kwargs: P.kwargs) -> R:
            stepped: Any = args[0]
            if has_hooks(stepped) if torch.compiler.is_dynamo_compiling() else is_observed(stepped):
                return observed(*args, **kwargs)
            return func(*args, **kwargs)

        return step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters; can be traced.

        Args:
            set_to_none: set them to None instead of to zero.
        """
        if torch.compiler.is_dynamo_compiling():
            traced.preallocate(self._engine.key)
        else:
            self._engine.current()
            self._engine.is_zeroed |= backward_number() < 0
        if set_to_none and self._engine.note_zero_grad is not None:
            self._engine.note_zero_grad(self._engine)
        for param in self._engine.params:
            if set_to_none:
                param.grad = None  # unread, so that compiled code does not depend on whether there was one
            elif param.grad is not None:
                if param.grad.requires_grad and torch.compiler.is_dynamo_compiling():
                    param.grad = param.grad.detach()
                elif param.grad.grad_fn is not None:
                    param.grad.detach_()
                else:
                    param.grad.requires_grad_(False)
                param.grad.zero_()
        if torch.compiler.is_dynamo_compiling():
            traced.guard_params(self._engine)
            mend_tracing()

    @property
    def optimizer_accumulation(self) -> bool:
        """True if :meth:`step` only adds gradients to the state, as in AdamA; the next call with False moves the parameters.

        One step then takes the gradients of several micro-batches, and no gradient need be kept (arXiv:2305.19982)::

            opt.optimizer_accumulation = index % 4 != 3
            (loss_of(model(x)) / 4).backward(); opt.step(); opt.zero_grad()

        All micro-batches together count as one step. Averages decay only at the first one. Each micro-batch adds its
        gradient ``g``: with two, ``exp_avg`` becomes ``beta1 * exp_avg + (1 - beta1) * (g1 + g2)``, and ``exp_avg_sq``
        becomes ``beta2 * exp_avg_sq + (1 - beta2) * (g1 * g1 + g2 * g2)``. The last one moves every parameter that had a
        gradient in any of them, and decays weights; decay that is added to a gradient is added to this one. One micro-batch
        alone is an ordinary step. (With ``weights="kahan"``, earlier calls may split a weight anew.)

        Divide the loss by the number of micro-batches, as when you accumulate in ``.grad``. SGD with momentum gives the same
        result as that. In Adam, ``g1 * g1 + g2 * g2`` is smaller than ``(g1 + g2)**2`` if micro-batches agree, so steps are
        larger. AdamA's authors find that it trains alike, since gradients of micro-batches are mostly noise.

        optimi counts a step and decays averages in every micro-batch. Its SGD without momentum uses only the last gradient.

        It works with or without gradient release, not in CUDA graphs. State cannot be saved between micro-batches.

        Raises:
            ValueError: True is assigned where averages alone do not determine the step (optimizers whose step also reads the
                gradient, SGD without momentum or with ``nesterov``, ``cautious``, ``differentiable``), or together with
                clipping, ``skip_nonfinite`` or a gradient scaler. Those three cannot be switched on afterwards either.
            TypeError: a value that is no bool is assigned.
        """
        return bool(self._engine.accumulated.is_on)

    @optimizer_accumulation.setter
    def optimizer_accumulation(self, on: bool) -> None:
        if not isinstance(on, bool):
            raise TypeError(f"optimizer_accumulation must be a bool, got {on!r}")
        engine, accumulated = self._engine, self._engine.accumulated
        if on:
            refuse_whole("optimizer accumulation", engine.assigned)
            engine.current()
            accumulated.check(engine.groups.distinct, begins=True)
            if not accumulated.was_on:
                accumulated.was_on = True
                engine.changes.outdate("optimizer accumulation was switched on")
        accumulated.is_on = on

    _step_supports_amp_scaling = True  # torch's GradScaler hands over ``grad_scale`` and ``found_inf`` instead of waiting

    # torch's schedulers replace ``step`` on the instance to see that it was called, unless it says that they need not.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the last step, unscaled and before clipping, as a 0-dim tensor on the device.

        None without ``max_grad_norm`` and ``skip_nonfinite``, since the step then does not compute it. It does not overflow
        or underflow for float32 gradients. For float64 ones it does above 1e154 and below 1e-154.
        """
        clipping = self._engine.clipping
        return clipping.outcome(clipping.device)[0] if clipping.measures_norm else None

    @property
    def skipped_steps(self) -> Tensor:
        """The number of steps that ``skip_nonfinite`` or a gradient scaler skipped: a 0-dim tensor, on the device."""
        clipping = self._engine.clipping
        return clipping.outcome(clipping.device)[2]

    def watch_health(self, on: bool = True) -> None:
        """Let further steps record how they change a few elements of each parameter, for ``co.health``; False ends that.

        Steps with gradient release and of several micro-batches are not watched. In a function that you compile, a watched
        step is a custom operator. Graphs are captured again. ``NotImplementedError`` if steps need a closure.
        """
        with self._engine.lock:
            step_with_rule(self._engine, "be watched")
            if bool(on) != self._engine.is_watching:
                self._engine.is_watching = bool(on)
                self._engine.changes.outdate(f"watch_health({bool(on)}) was called")
                self._engine.current()

    @outside_dynamo
    def track_changes(self, dtype: torch.dtype | None = torch.bfloat16) -> None:
        """Let further steps note which weights they change, for :meth:`changes`: one bit per weight.

        A weight is changed where its bits differ before and after a step, in the dtype in which others read it. Bits of a
        16-bit weight that are in the optimizer's state do not count. Skipped steps change nothing.

        Updates of elementwise rules note it in the kernel that writes the weights. Other steps compare copies of the weights
        before and after. In a function that you compile, a tracked step is a custom operator. Graphs are captured again.
        A copy of the optimizer does not track changes, and checkpoints do not hold them.

        Args:
            dtype: the dtype in which others read the weights: float32, bfloat16 or float16. 16-bit weights are read in their
                own dtype, or in float32. None ends the tracking.

        Raises:
            ValueError: a parameter cannot be read in ``dtype``, is complex, or is of a class that wraps other tensors. The
                optimizer is then unchanged.
            NotImplementedError: steps need a closure.
        """
        engine = self._engine
        with engine.lock:
            _, before = step_with_rule(engine, "track changes"), engine.outputs
            try:
                engine.outputs = NO_OUTPUTS if dtype is None else OutputMemory(Outputs(dtype), engine.clipping.device)
                engine.changes.outdate(f"track_changes({dtype}) was called")
                engine.current()
            except BaseException:  # an interrupt, too
                engine.outputs = before
                engine.changes.outdate("track_changes() did not end")
                raise

    @outside_dynamo
    @torch.no_grad()
    def changes(self) -> list[ChangedWeights]:
        """Return the weights that changed since :meth:`track_changes` or the last call, and begin anew.

        Parameters without a change are absent. All elements of a parameter that others wrote are changed: by a load or
        ``copy_``, or by other memory in its place, also where no step updates it, and of one that was added to a group.
        Writes through ``.data``, and by the compiled function that takes the step, are not seen. All results are on the
        parameters' device, for which the call waits once.

        Of a DTensor each process returns the elements of its shard, with indices in the full tensor; of equal replicas, the
        first process alone. A plain tensor is returned by each process.

        Raises:
            RuntimeError: :meth:`track_changes` was not called, or a CUDA graph is being captured.
            ValueError: the storage of a parameter was freed. The next call has all of its elements.
        """
        engine = self._engine
        with engine.lock:
            step = engine.current()
            if engine.outputs is NO_OUTPUTS:
                raise RuntimeError("changes() returns what steps noted since track_changes(), which was not called")
            if any(map(is_capturing, step.devices)):
                raise RuntimeError("a CUDA graph is being captured, and changes() waits for the device; call it outside")
            try:
                changed = changed_weights(engine.groups.listed, engine.outputs)
                engine.outputs.clear()
                return changed
            except BaseException:  # an interrupt, too: nobody gets them
                engine.outputs.outdate()
                raise

    def schedule(self, group: int | None = None, **functions: Schedule | None) -> None:
        """Set hyperparameters by functions of the step count, which every step evaluates on the device.

        A CUDA graph then follows the schedule without the host: ``opt.schedule(lr=lambda step: 0.1 * 0.99**step)``. The step
        writes the value into the group's tensor before it reads it, and so overrides assigned values.

        Args:
            group: the index of a group; None for all groups.
            **functions: for each hyperparameter a function ``step -> value``, made of torch operations. ``step`` is a 0-dim
                float64 tensor, one more than the largest step count of any parameter: 1 in the first step. It continues from
                a loaded checkpoint, and a skipped step does not advance it. The value is a 0-dim tensor or a number, or a
                tuple of them for ``betas``; only the first value is checked against the hyperparameter's range. None ends
                the schedule and keeps the value that it has reached.

        Raises:
            TypeError, ValueError: a function does not fit; no schedule is changed then.
            IndexError: there is no such group.
        """
        engine = self._engine
        engine.current()
        groups, schedules = engine.groups.distinct, engine.schedules.copy()
        indices = [*range(len(groups))] if group is None else [engine.groups.index_of(group)]
        fields = {index: {h.name: h for h in groups[index].kind._declaration.hypers} for index in indices}
        if unknown := functions.keys() - {name for hypers in fields.values() for name in hypers}:
            kind = type(self) if group is None else groups[indices[0]].kind
            raise ValueError(no_hyperparameter(kind, min(unknown)))
        for index, hypers in fields.items():
            for name, function in ((n, f) for n, f in functions.items() if n in hypers):
                if function is not None and name not in groups[index]:
                    raise ValueError(f"param_groups[{index}] has no {name}; it needs {hypers[name].needed}")
                if function is not None:
                    groups[index].refuse_fixed(name)
                schedules.set(index, groups[index], hypers[name], function)
        engine.schedules = schedules
        schedules.follow(groups)
        engine.changes.outdate(f"schedule() was called for {', '.join(functions) or 'no hyperparameter'}")

    @overload
    def hyperparameter(self, name: Literal["lr", "weight_decay", "max_lr", "momentum"], group: int = 0) -> Tensor: ...

    @overload
    def hyperparameter(self, name: Literal["betas"], group: int = 0) -> tuple[Tensor, ...]: ...

    @overload
    def hyperparameter(self, name: str, group: int = 0) -> Tensor | tuple[Tensor, ...]: ...

    def hyperparameter(self, name: str, group: int = 0) -> Tensor | tuple[Tensor, ...]:
        """Return the live tensor, or tuple of tensors, from which steps read ``param_groups[group][name]``. Traceable.

        Its address stays, except if you passed the tensor yourself and then assign another value to the group. Write into it
        outside of compiled code: torch 2.13 loses in-place writes to 0-dim float64 CPU tensors there. A write that does not
        count up the tensor's version, as through ``.data``, reaches the steps, but the group shows it on a CPU only.

        Raises:
            KeyError, IndexError: there is no such hyperparameter or group.
        """
        traced.hand_out(self._engine.key, name, group)
        assert self._engine.step is not None
        value: Tensor | tuple[Tensor, ...] = self._engine.step.live[group][name]
        return value

    def __repr__(self) -> str:
        """Return torch.optim's text, with the lowering, and the dtype and device of the groups' numbers."""
        devices = dict.fromkeys(scalars_device(g["params"]) for g in self.param_groups)
        stored = " and ".join(f"{str(scalar_dtype(d)).removeprefix('torch.')} scalars on {d}" for d in devices)
        lowering = self._engine.step.name if self._engine.step else self._engine.lowering
        return super().__repr__().replace("(\n", f"({lowering} lowering, numbers are {stored}\n", 1)


def _assigned(name: str, meaning: str) -> Any:
    """Return a property that reads, assigns and deletes ``name`` in the engine's ``assigned``."""

    def read(self: CompiledOptimizer) -> Any:
        try:
            return self._engine.assigned[name]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'") from None

    return property(
        read, lambda self, value: self._engine.assign(name, value), lambda self: self._engine.unassign(name), meaning
    )


for _name, _meaning in {
    "max_grad_norm": "The norm to which a step clips all gradients together, as a number or a 0-dim tensor, or None.",
    "grad_scale": "The factor by which a gradient scaler scaled the loss. The scaler sets it for its step and deletes it.",
    "found_inf": "True if a gradient scaler found an infinite gradient. The scaler sets it for its step and deletes it.",
    "skip_nonfinite": "True if steps whose gradient norm is NaN or infinite are skipped.",
}.items():  # after the class, which takes fields of these names out of its body
    setattr(CompiledOptimizer, _name, _assigned(_name, _meaning))


def _as_defaults(kind: type[Declared], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """Return :func:`group_entries` with hyperparameters as numbers, and of those passed as tensors: name -> (number, value).

    Raises:
        TypeError, ValueError: a hyperparameter is no number, or out of range.
    """
    defaults, tensors = group_entries(kind, options), {}
    for hyper in (h for h in kind._declaration.hypers if h.name in defaults and h.choice(options[h.name]) is None):
        elements = hyper.elements(options[hyper.name], "")
        numbers = tuple(e.item() if isinstance(e, Tensor) else e for e in elements)
        for index, number in enumerate(numbers):
            hyper.check(number, index, "")
        defaults[hyper.name] = hyper.plain(numbers)
        if any(isinstance(e, Tensor) for e in elements):
            tensors[hyper.name] = defaults[hyper.name], options[hyper.name]
    kind.check({**options, **defaults}, options)
    return defaults, tensors


class ViewedOptimizer(CompiledOptimizer):
    """An optimizer that evaluates other weights than it trains. A subclass defines the conversion as ``views``.

    The entry ``train_mode`` of each group says whether the model holds the weights for training or for evaluation. It is
    saved with the state and loaded from the checkpoint: load the model's parameters from the same checkpoint.
    """

    _modes = {TRAIN_MODE: True}

    def eval(self) -> None:
        """Put the weights for evaluation into the parameters; a step is an error until :meth:`train`.

        Parameters that never took a step stay as they are. Each conversion of a 16-bit parameter rounds it again.

        Raises:
            RuntimeError: a CUDA graph is being captured, or a step of several micro-batches has not ended.
        """
        self._show(train=False)

    def train(self) -> None:
        """Put the weights for training back into the parameters. Raises as :meth:`eval`."""
        self._show(train=True)

    @outside_dynamo
    @outside_inference_mode()
    @torch.no_grad()
    def _show(self, *, train: bool) -> None:
        engine = self._engine
        with engine.lock:
            step, groups = engine.current(), engine.groups.distinct
            assert isinstance(step, RuleStep)
            if any(map(is_capturing, step.devices)):
                raise RuntimeError(
                    "a CUDA graph is being captured, which holds steps alone; call eval() and train() outside"
                )
            engine.accumulated.check_ended("evaluated")
            send(engine.changes)
            if changed := [i for i, group in enumerate(groups) if group.get(TRAIN_MODE, train) is not train]:
                step.view(self._view_rules["train" if train else "eval"], changed)
            for index in changed:
                groups[index].set_quietly(TRAIN_MODE, train)


def engine_of(optimizer: CompiledOptimizer) -> Engine:
    """Return the engine that runs the steps of ``optimizer``. For use in this package."""
    return optimizer._engine


def checked_engine(optimizer: Any, function: str) -> Engine:
    """Return the engine of ``optimizer``; ``TypeError`` that names ``function`` if it is not one of this package."""
    if not isinstance(optimizer, CompiledOptimizer):
        raise TypeError(f"{function} takes an optimizer of compiled_optim, got {type(optimizer).__name__}")
    return engine_of(optimizer)
