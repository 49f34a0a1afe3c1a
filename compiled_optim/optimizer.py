"""The base optimizer: constructor, parameter groups, state, step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from compiled_optim.checkpoint import state_dict as checkpoint
from compiled_optim.checkpoint.check import LoadReport, PreparedLoad
from compiled_optim.checkpoint.read import described, plain
from compiled_optim.groups.live import Live
from compiled_optim.groups.param_group import ParamGroup, group_keys
from compiled_optim.groups.parameters import as_groups
from compiled_optim.groups.per_parameter import kept
from compiled_optim.memory.layout import scalar_dtype, scalars_device
from compiled_optim.memory.torch_internals import (
    backward_number,
    is_capturing,
    outside_dynamo,
    outside_inference_mode,
    refuse_tracing,
)
from compiled_optim.plan.schedule import Schedule
from compiled_optim.rule.declared import Declared, no_hyperparameter
from compiled_optim.rule.fields import Choice, Hyper, Number, PerParameter, Scale, Static, flag, transform
from compiled_optim.rule.rule import TRAIN_MODE
from compiled_optim.rule.storage import StateDtype, stored
from compiled_optim.rule.transforms import cautious, check_decay, decay, lr_scaled
from compiled_optim.state import OptimizerState
from compiled_optim.step import traced
from compiled_optim.step.engine import Engine, refuse_whole
from compiled_optim.step.numerics import NumericsReport, check_numerics
from compiled_optim.step.rule_step import RuleStep
from compiled_optim.step.step import Step


def _of_engine(name: str, meaning: str) -> Any:
    """An attribute of an optimizer that its engine has under ``name``."""
    return property(
        lambda self: getattr(self._engine, name), lambda self, value: setattr(self._engine, name, value), None, meaning
    )


class CompiledOptimizer(Declared, Optimizer):
    """Base of all optimizers of the package; a subclass declares fields, ``coefficients`` and ``update``.

    Args:
        params: tensors, ``(name, tensor)`` pairs, a dict ``name -> tensor``, or dicts of parameter groups with any of these
            as ``params``. A tensor that a group lists under several names, as ``named_parameters(remove_duplicate=False)``
            lists tied ones, is one parameter: it takes the first name, and checkpoints find it under every one. What is
            there twice is updated once, and a warning says so, as where two tensors have one name. Integers are skipped.
        maximize: step along the gradient instead of against it.
        differentiable: record the step with autograd; implies ``lowering="eager"``. Gradients are dense.
        foreach, capturable, fused: accepted for torch.optim's sake and without effect.
        max_grad_norm: clip the gradients of all parameters together to this norm inside the step, as
            ``torch.nn.utils.clip_grad_norm_`` does before it; a number or a 0-dim tensor. See :attr:`grad_norm`.
        skip_nonfinite: skip steps whose norm, unscaled, is NaN or > 1.8e19: its square would be infinite. Where all
            parameters are float64, that is 1.3e154.
        decouple_wd: shrink parameters by ``lr * weight_decay`` before their step, as AdamW does, in place of adding decay to
            the gradient (False). None: as the optimizer does by itself, and True with ``decouple_lr``. Per group, for
            optimizers that add it.
        decouple_lr: divide ``weight_decay`` by ``max_lr``, so that at that learning rate a step takes ``weight_decay`` of
            the parameter away, and at others in proportion; per group, for optimizers with ``weight_decay``.
        max_lr: what ``decouple_lr`` divides by, and 0 for no decay. None: each group's own ``lr`` when it is made: pass it
            where a schedule goes above that, or decay is more than ``weight_decay``. torch's OneCycleLR writes its peak
            there. It is an entry of groups with ``decouple_lr``, and where it was given.
        cautious: move only elements whose step goes against their gradient, and those the more (arXiv:2411.16085); per
            group, for optimizers that work element by element on dense gradients. Both parts of a complex number are
            elements.
        lr_scale: a number >= 0 for each parameter, by which its ``lr`` is multiplied: a dict by name, where a name that is
            absent has 1, or a function of the name, None without names, and the parameter; per group. It is data: neither
            groups nor kernels are split. A function is asked when groups change. Checkpoints do not hold it.
        weights: how parameters in bfloat16 or float16 keep the bits that their dtype lacks, per group. None rounds them as
            torch.optim does. ``"kahan"`` keeps a compensation of the same dtype beside them, ``"split8"`` and ``"split16"``
            a remainder of 8 or 16 bits (24 or all 32 bits in all), ``"master"`` a copy in float32. ``"stochastic"`` keeps
            nothing and rounds at random, without bias. Parameters of other dtypes must be in ``exclude``. This and the next
            four are for optimizers that work element by element.
        kahan_sum: optimi's spelling: True and None are ``weights="kahan"`` for parameters of 16 bits. False says nothing.
        state_dtype: the dtype of averages in place of the parameter's, per group; ``"int8"`` for codes of 8 bits
            (``exp_avg_int8``) with a scale for each 64 elements, where one that is infinite or NaN spoils the others; or
            a dict by the name of the state tensor, for sums too. Averages in 16 bits or fewer are rounded by a number of a
            step and tensor, so that slow ones follow what they average; without this choice to nearest, as in torch.optim.
        exclude: shell-style patterns of names, such as ``("*.bias", "lm_head.*")``, per group. Parameters that match keep
            full state and weights: in float32, where they have 16 bits. So do all of fewer than 4096 elements. A pattern
            that matches none is a warning.
        rounding_seed: a whole number >= 0 and below 2**24, per group. With the step and the parameter's name it makes the
            random numbers. They are the same in every process and after a resume.
        lowering: how a step runs. ``"multi_tensor"``: one kernel for all tensors; an operator in a function that the user
            compiles. ``"inductor"``: torch.compile's code. A function that the user compiles holds its operations, nothing
            of it runs on the host, numbers are read where they are, and the function is traced again after a change of
            groups, of what gradients there are, or of what a step is made of; a step that cannot be inlined is the operator.
            ``"eager"``: plain torch operations. ``"auto"``: the fastest for the device.

    Groups in ``param_groups`` hold the numbers that you gave. Steps read 0-dim tensors, float64 where the device has it:
    :meth:`hyperparameter` returns them. The next step uses what you assign to a group, or write to such a tensor. State
    exists from construction for every parameter that requires a gradient.

    Raises:
        TypeError: something is not a tensor, a number or a known argument.
        ValueError: a hyperparameter is out of range, a parameter is no leaf or in two groups, or only some have names.
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
    decouple_wd: bool | None = transform(default=None, kw_only=True, by=decay, check=check_decay)
    decouple_lr: bool = transform(default=False, kw_only=True, by=decay, check=check_decay)
    max_lr: Number | None = transform(default=None, kw_only=True, by=decay, check=check_decay)
    cautious: bool = transform(default=False, kw_only=True, by=cautious)
    lr_scale: PerParameter | None = transform(default=None, kw_only=True, by=lr_scaled)
    weights: str | None = transform(default=None, kw_only=True, by=stored)
    kahan_sum: bool | None = transform(default=False, kw_only=True, by=stored)
    state_dtype: StateDtype = transform(default=None, kw_only=True, by=stored)
    exclude: Sequence[str] = transform(default=(), kw_only=True, by=stored)
    rounding_seed: int = transform(default=0, kw_only=True, by=stored)

    _step_class: ClassVar[type[Step]] = RuleStep

    def __init_subclass__(cls, *, steps: type[Step] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._step_class = steps or cls._step_class

    @outside_dynamo
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        made = {s.name: s.default for s in self._fields_of(Static) if not s.init}
        options = {**made, **self._arguments(args, kwargs)}
        params = options.pop("params")
        for choice in self._fields_of(Choice):
            choice.check(options[choice.name])
        self._step_class.check_options(type(self), options)
        self._begin(options["lowering"])
        self.max_grad_norm = options["max_grad_norm"]
        self.skip_nonfinite = options["skip_nonfinite"]
        defaults, self._engine.given = _as_defaults(type(self), options)
        groups = as_groups(params)
        _check_read(type(self), options, groups)
        self._engine.is_open = True
        super().__init__(cast(ParamsT, groups), defaults)
        self._engine.is_open = False
        self._engine.renew()

    def _begin(self, lowering: str) -> None:
        """Own nothing yet; who waits for the lock of an optimizer that is unpickled goes on waiting for it."""
        self._engine: Engine = vars(self).setdefault("_engine", Engine(self._step_class))
        self._engine.begin(type(self), lowering)

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
        """Perform one optimization step; parameters without a gradient, which may be all, stay as they are.

        Args:
            closure: re-evaluates the model, with gradients enabled, and returns the loss.

        Returns:
            The closure's loss, if there is a closure.

        Raises:
            TypeError: ``closure`` cannot be called, a gradient is sparse where the optimizer takes dense ones, or the other
                way round, or what was assigned since the last step is of a wrong type. Nothing is changed then, nor by any
                other error.
            ValueError: what was assigned since the last step is out of range or does not fit, such as ``max_grad_norm``.
            RecompileError: something would be compiled again inside ``no_recompiles``.
            RuntimeError: a CUDA graph is being captured that cannot hold what this step needs.
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
        with torch.no_grad():
            if torch.compiler.is_compiling():
                if self._engine.release is not None:
                    raise RuntimeError("compiled code cannot hold a step with gradient release: its backward runs no hooks")
                scaler = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
                traced.record_step(self._engine, scaler)
            else:
                self._engine.run()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters; can be traced.

        Args:
            set_to_none: set them to None instead of to zero.
        """
        if torch.compiler.is_compiling():
            traced.ask(self._engine.key, "preallocate_for_graphs")
        else:
            self._engine.current()
            self._engine.zeroed += backward_number() < 0
        if set_to_none and self._engine.note_zero_grad is not None:
            self._engine.note_zero_grad(self._engine)
        for param in self._engine.params:
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

    @property
    def optimizer_accumulation(self) -> bool:
        """Whether steps take gradients into the state only, until one with False moves the parameters: as in AdamA.

        A step is then made of the gradients of several micro-batches, and none need be kept (arXiv:2305.19982)::

            opt.optimizer_accumulation = index % 4 != 3
            (loss_of(model(x)) / 4).backward(); opt.step(); opt.zero_grad()

        Such a step counts once. Its first micro-batch lets the averages decay; each adds what its gradient ``g`` adds to
        them: with two micro-batches ``exp_avg`` becomes ``beta1 * exp_avg + (1 - beta1) * (g1 + g2)``, and ``exp_avg_sq``
        ``beta2 * exp_avg_sq + (1 - beta2) * (g1 * g1 + g2 * g2)``. The last one moves every parameter that had a gradient in
        any of them, and decays weights; decay that goes into the gradient goes into this one. A step of one micro-batch is
        as always. (The others may write a parameter with ``weights="kahan"`` as another sum, of the same value.)

        So divide the loss by the number of micro-batches, as for gradients that are summed. SGD with momentum then does what
        it does with those. Sums of squares are smaller than squares of sums where micro-batches agree, and steps larger: as
        in AdamA, whose authors find that it trains alike, since gradients of micro-batches are noise for the most part.

        optimi counts and decays in every micro-batch, and SGD without momentum loses all gradients but the last.

        It goes with gradient release and without, and not into CUDA graphs. State cannot be saved within a step.

        Raises:
            ValueError: assigned True where state cannot hold several gradients (optimizers whose step reads the gradient
                besides averages, SGD without momentum or with ``nesterov``, ``cautious``, ``differentiable``), or
                with clipping, ``skip_nonfinite`` or a gradient scaler, which are refused from then on.
            TypeError: assigned anything but a bool.
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
            accumulated.check(engine.distinct_groups, begins=True)
            if not accumulated.was_on:
                engine.changes.pending = accumulated.was_on = True
        accumulated.is_on = on

    _step_supports_amp_scaling = True  # torch's GradScaler hands over ``grad_scale`` and ``found_inf`` instead of waiting

    # torch's schedulers replace ``step`` on the instance to see that it was called, unless it says that they need not.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the last step, unscaled and before clipping: a 0-dim tensor, on the device.

        None where the step does not need it: without ``max_grad_norm`` and ``skip_nonfinite``. It neither overflows nor
        underflows for gradients from 1e-38 to 3e38; beyond that, in float64, it does from 1e-154 and 1e154 on.
        """
        clipping = self._engine.clipping
        return clipping.outcome(clipping.device)[0] if clipping.measures_norm else None

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps ``skip_nonfinite`` or a gradient scaler left out: a 0-dim tensor, on the device."""
        clipping = self._engine.clipping
        return clipping.outcome(clipping.device)[2]

    @outside_dynamo
    def check_numerics(self) -> NumericsReport:
        """Which parameters the next step is too small to move, by name; changes nothing, and waits for the device.

        The step is estimated with the gradients that are there, unscaled ones, or from momentum without them. The report's
        ``stuck`` lists such parameters, the worst first; ``uneven`` those whose state in 8 bits is too coarse. It prints as
        advice. ``NotImplementedError`` where steps need a closure.
        """
        with self._engine.lock:
            return check_numerics(self._engine)

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
        engine, kind = self._engine, type(self)
        engine.current()
        hypers = {h.name: h for h in kind._fields_of(Hyper)}
        if unknown := functions.keys() - hypers.keys():
            raise ValueError(no_hyperparameter(kind, min(unknown)))
        groups, schedules = engine.distinct_groups, engine.schedules.copy()
        for index in range(len(groups)) if group is None else [engine.place_of(group)]:
            for name, function in functions.items():
                if function is not None and name not in groups[index]:
                    raise ValueError(f"param_groups[{index}] has no {name}; it needs {hypers[name].when}=True")
                schedules.set(index, groups[index], hypers[name], function)
        engine.schedules = schedules
        schedules.follow(groups)
        engine.changes.pending = True

    def hyperparameter(self, name: str, group: int = 0) -> Tensor | tuple[Tensor, ...]:
        """The live tensor, or tuple of tensors, behind ``param_groups[group][name]``, which steps read where it lies.

        Its address stays, but for a tensor that a user gave and a group that is assigned another value. It can be traced.
        Write to it outside of compiled code: torch 2.13 loses in-place writes to 0-dim float64 tensors on the CPU there.
        What is written past the tensor's version, as to ``.data``, the group shows on a CPU alone.

        Raises:
            KeyError, IndexError: there is no such hyperparameter or group.
        """
        traced.ask(self._engine.key, "hand_out", name, group)
        assert self._engine.step is not None
        value: Tensor | tuple[Tensor, ...] = self._engine.step.live[group][name]
        return value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, which are dicts that check what they are given.

        Compiled code cannot read them: Dynamo writes into every group it reads, and knows plain dicts only.
        """
        refuse_tracing("param_groups", "read a hyperparameter with opt.hyperparameter(name, group), and set it outside")
        return self._engine.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._engine.groups = groups

    defaults = _of_engine("defaults", "What groups take that lack it: the constructor's values.")
    _opt_called = _of_engine("is_called", "Whether there was a step: torch's schedulers ask.")

    @property  # type: ignore[override]
    def state(self) -> OptimizerState:
        """Parameter -> its state, a mapping of tensors by name. Any mapping of mappings can be assigned.

        Under other names in a parameter's state, and under keys that are no tensors, hooks and wrappers may keep anything:
        it is saved, loaded, copied and pickled with the rest.
        """
        changes = self._engine.changes
        if not changes.is_state_handed_out:
            changes.is_state_handed_out = True
        return self._engine.state

    @state.setter
    def state(self, values: Mapping[Any, Any]) -> None:
        self._engine.replace_state(values)

    def __repr__(self) -> str:
        """As torch.optim's, and how the numbers of groups are stored."""
        devices = dict.fromkeys(scalars_device(g["params"]) for g in self.param_groups)
        stored = " and ".join(f"{str(scalar_dtype(d)).removeprefix('torch.')} scalars on {d}" for d in devices)
        return super().__repr__().replace("(\n", f"(numbers are {stored}\n", 1)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group as Python floats, for logs and JSON. Waits for the device."""
        self._engine.current()
        return [group.floats() for group in self._engine.distinct_groups]

    @outside_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state in torch.optim's layout, with ``param_names`` where the parameters have names.

        Hyperparameters are Python numbers, step counts and scalars copies on the CPU; buffers are the live tensors, as in
        torch.optim: to come back to them later, copy the state dict deeply. Run-time flags have their defaults.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        run_time = [name for name in self._group_flags if name != "maximize"]
        neutral = {name: self._all_fields[name].default for name in run_time}  # type: ignore[attr-defined]
        engine = self._engine
        with engine.lock:
            step = engine.current()
            engine.accumulated.check_ended("saved")
            engine.changes.is_state_handed_out = True
            saved = checkpoint.save(self._declaration, engine.distinct_groups, engine.state, engine.aliases, neutral)
            result = step.saved(saved)
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
        found under each of its names. Parameters without names take the checkpoint's ``param_names``, as in torch.optim.
        Static choices and run-time flags stay the optimizer's own. A frozen parameter without state in the checkpoint keeps
        what it has; any other starts anew. A step of another thread waits.

        State may come from other ``weights`` and ``state_dtype``: codes, numbers and what is beside weights become what
        the optimizer's own choices say. Load the model first: what is beside a weight is converted for the weight as it is.
        An optimizer that keeps nothing there reports it as mismatched, unless the weight has those bits itself; where the
        checkpoint has nothing, what is there stays.

        What hooks and wrappers keep in :attr:`state` is replaced by what they kept in the checkpoint, as in torch.optim: by
        copies, on the device of the parameter whose state it is in, and in its dtype where both are floating point.

        Args:
            state_dict: as returned by :meth:`state_dict` or ``co.named_state_dict``. It is not modified.
            strict: raise unless every parameter and every state entry matches; otherwise load the intersection.
            hyperparameters: ``"checkpoint"`` to take the checkpoint's values, ``"keep"`` to keep the groups'.

        Returns:
            The names that were missing, unexpected and mismatched; empty lists with ``strict``.

        Raises:
            ValueError, TypeError: the checkpoint does not match, naming what; the optimizer is then unchanged. Only an
                interrupt or an operator that fails while tensors are copied can leave part of a load; another mends that.
        """
        with self._engine.lock:
            prepared = prepare_load(self, state_dict, strict, hyperparameters)
            prepared.write()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        return prepared.report

    def __getstate__(self) -> dict[str, Any]:
        engine = self._engine
        engine.accumulated.check_ended("copied")
        unshown = [group.unshown() if isinstance(group, ParamGroup) else {} for group in engine.distinct_groups]
        own = {"lowering": engine.lowering, "aliases": engine.aliases, "schedules": engine.schedules.functions}
        chosen = {"max_grad_norm": self.max_grad_norm, "skip_nonfinite": self.skip_nonfinite}
        return {**super().__getstate__(), **own, **chosen, "unshown": unshown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = vars(self).get("_engine")
        values: dict[str, Any] = {"lowering": "auto", "aliases": {}, "schedules": {}, "unshown": (), "defaults": {}}
        values |= {"max_grad_norm": None, "skip_nonfinite": False}
        if before is not None:
            values |= {name: getattr(before, name) for name in ("lowering", "aliases", "defaults")} | before.assigned
        values |= {name: state.pop(name) for name in [*values] if name in state}
        groups, entries = state.pop("param_groups"), state.pop("state")
        self._begin(values["lowering"])
        self.max_grad_norm, self.skip_nonfinite = values["max_grad_norm"], values["skip_nonfinite"]
        self.param_groups, self.state, self.defaults = groups, entries, values["defaults"]
        super().__setstate__(state)
        self.defaults = _group_entries(type(self), self.defaults)  # torch adds a key
        self._engine.aliases, self._engine.schedules.functions = dict(values["aliases"]), dict(values["schedules"])
        self._engine.adopt(checked=True, unshown=values["unshown"])


def _assigned(name: str, meaning: str) -> Any:
    """An attribute that the engine keeps."""

    def read(self: CompiledOptimizer) -> Any:
        try:
            return self._engine.assigned[name]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'") from None

    def write(self: CompiledOptimizer, value: Any) -> None:
        self._engine.assign(name, value)

    def delete(self: CompiledOptimizer) -> None:
        del self._engine.assigned[name]
        self._engine.follow_clipping()

    return property(read, write, delete, meaning)


for _name, _meaning in {
    "max_grad_norm": "What the norm of all gradients is clipped to inside the step: None, a number or a 0-dim tensor.",
    "grad_scale": "What a gradient scaler that calls the step multiplied the gradients by; it sets and deletes this.",
    "found_inf": "Whether a gradient scaler that calls the step found an infinite gradient; it sets and deletes this.",
    "skip_nonfinite": "Whether steps whose norm is NaN or infinite are skipped.",
}.items():  # after the class, which takes fields of these names out of its body
    setattr(CompiledOptimizer, _name, _assigned(_name, _meaning))


def _group_entries(kind: type[Declared], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the constructor's ``options`` that groups hold: a choice that torch.optim lacks only where it was made."""
    added = kind._added_choices()
    found = {name: options[name] for name in group_keys(kind) if name in options}
    scales = {scale.name for scale in kind._fields_of(Scale)}
    chosen = {name: value for name, value in found.items() if name not in added or value != added[name]}
    return {**kind._modes, **{name: kept(value) if name in scales else value for name, value in chosen.items()}}


def _as_defaults(kind: type[Declared], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """:func:`_group_entries` with Python numbers for hyperparameters, and those that came in tensors with what they came as.

    Raises:
        TypeError, ValueError: a hyperparameter is no number, or out of range.
    """
    defaults, given = _group_entries(kind, options), {}
    for hyper in (h for h in kind._fields_of(Hyper) if h.name in defaults):
        elements = hyper.elements(options[hyper.name], "")
        numbers = tuple(e.item() if isinstance(e, Tensor) else e for e in elements)
        for index, number in enumerate(numbers):
            hyper.check(number, index, "")
        defaults[hyper.name] = hyper.plain(numbers)
        if any(isinstance(e, Tensor) for e in elements):
            given[hyper.name] = defaults[hyper.name], options[hyper.name]
    kind.check({**options, **defaults}, options)
    return defaults, given


def _check_read(kind: type[Declared], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` where the constructor was given a hyperparameter that none of ``groups`` has a use for."""
    for hyper in kind._fields_of(Hyper):
        if hyper.when is None or options[hyper.name] is None:
            continue
        if not any(group.get(hyper.when, options[hyper.when]) for group in groups):
            raise ValueError(f"nothing reads {hyper.name} without {hyper.when}=True, which no group has")


class ViewedOptimizer(CompiledOptimizer):
    """An optimizer whose parameters stand for others, which are to be evaluated; a subclass has ``views``.

    The entry ``train_mode`` of each group says which of them the parameters are. It is saved, and a load takes it from the
    checkpoint: the model's parameters are to be loaded from the same one.
    """

    _modes = {TRAIN_MODE: True}

    def eval(self) -> None:
        """Let parameters be those to evaluate and to save for use; a step is an error until :meth:`train`.

        Parameters that never took a step stay as they are. What was rounded to 16 bits is rounded again, there and back.

        Raises:
            RuntimeError: a CUDA graph is being captured, or a step of several micro-batches has not ended.
        """
        self._show(train=False)

    def train(self) -> None:
        """Let parameters be those to train, as they are at first; raises what :meth:`eval` does."""
        self._show(train=True)

    @outside_dynamo
    @outside_inference_mode()
    @torch.no_grad()
    def _show(self, *, train: bool) -> None:
        engine = self._engine
        with engine.lock:
            step, groups = engine.current(), engine.distinct_groups
            assert isinstance(step, RuleStep)
            if any(map(is_capturing, step.devices)):
                raise RuntimeError(
                    "a CUDA graph is being captured, which holds steps alone; call eval() and train() outside"
                )
            engine.accumulated.check_ended("evaluated")
            Live.send(engine.changes)
            if changed := [i for i, group in enumerate(groups) if group[TRAIN_MODE] is not train]:
                step.view(self._view_rules["train" if train else "eval"], changed)
            for index in changed:
                groups[index].set_quietly(TRAIN_MODE, train)


def engine_of(optimizer: CompiledOptimizer) -> Engine:
    """What runs the steps of ``optimizer``: for the rest of the package, which users have no need of."""
    return optimizer._engine


def prepare_load(
    optimizer: CompiledOptimizer, state_dict: Any, strict: bool, hyperparameters: Literal["checkpoint", "keep"]
) -> PreparedLoad:
    """Check all of a load, after the hooks that come before it. The caller holds the engine's lock until it is written.

    Raises:
        TypeError, ValueError: as :meth:`CompiledOptimizer.load_state_dict`.
    """
    if hyperparameters not in ("checkpoint", "keep"):
        raise ValueError(f"hyperparameters must be 'checkpoint' or 'keep', got {hyperparameters!r}")
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, such as torch.load(path) returns, got {described(state_dict)}")
    saved: dict[str, Any] = plain(state_dict, "the state dict")
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = pre_hook(optimizer, saved)
        saved = saved if replaced is None else replaced
    engine = optimizer._engine

    def prepare(saved: Mapping[str, Any]) -> PreparedLoad:
        groups, state, aliases = engine.distinct_groups, engine.state, engine.aliases
        return checkpoint.prepare_load(engine.kind, groups, state, aliases, saved, strict, hyperparameters)

    load = engine.current().prepare_load(saved, prepare)
    load.afterwards += [engine.accumulated.forget, engine.note_names]
    return load
