"""An optimizer's groups and state, as users read, assign, save, load, copy and pickle them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch.optim import Optimizer

from compiled_optim.checkpoint import state_dict as checkpoint
from compiled_optim.checkpoint.read import described, plain
from compiled_optim.checkpoint.save import save
from compiled_optim.checkpoint.state_dict import LoadReport, PreparedLoad
from compiled_optim.groups.param_group import ParamGroup, group_entries
from compiled_optim.memory.torch_internals import outside_dynamo, refuse_tracing
from compiled_optim.plan.clipping import CHOSEN
from compiled_optim.state import OptimizerState, ParamState
from compiled_optim.step.engine import Engine
from compiled_optim.step.rule_step import step_with_rule
from compiled_optim.step.step import Step


class SavedOptimizer(Optimizer):
    """The part of :class:`~compiled_optim.CompiledOptimizer` that concerns groups and state, which its engine has."""

    _step_class: ClassVar[type[Step]]

    def _begin(self, lowering: str) -> None:
        """Empty the engine. An optimizer that is unpickled in place keeps it, since threads may wait for its lock."""
        self._engine: Engine = vars(self).setdefault("_engine", Engine(self._step_class))
        self._engine.begin(type(self), lowering)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, dicts that check the values that you assign.

        Compiled code cannot read them: Dynamo supports only plain dicts as groups, and writes into every one that it reads.
        """
        refuse_tracing("param_groups", "read a hyperparameter with opt.hyperparameter(name, group), and set it outside")
        return self._engine.groups.listed

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._engine.groups.replace(groups)

    @property
    def defaults(self) -> dict[str, Any]:
        """The constructor's values. A group takes them for entries that it does not set."""
        return self._engine.groups.defaults

    @defaults.setter
    def defaults(self, values: dict[str, Any]) -> None:
        self._engine.groups.defaults = values

    @property
    def _opt_called(self) -> bool:
        """True if a step was taken. torch's schedulers read this."""
        return self._engine.is_called

    @_opt_called.setter
    def _opt_called(self, called: bool) -> None:
        self._engine.is_called = called

    @property  # type: ignore[override]
    def state(self) -> OptimizerState:
        """A mapping from each parameter to its state, a mapping of tensors by name. Any mapping of mappings can be assigned.

        Hooks and wrappers may keep anything under other names in a parameter's state, and under keys that are no tensors.
        All of it is saved, loaded, copied and pickled.
        """
        changes = self._engine.changes
        if not changes.is_state_handed_out:
            changes.is_state_handed_out = True
        return self._engine.state

    @state.setter
    def state(self, values: Mapping[Any, Any]) -> None:
        self._engine.replace_state(values)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return the hyperparameters of each group as Python floats, for logs and JSON. Waits for the device."""
        self._engine.current()
        return [group.floats() for group in self._engine.groups.distinct]

    @outside_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in torch.optim's layout, with ``param_names`` where the parameters have names.

        Hyperparameters are Python numbers. Step counts and other scalars are copies on the CPU. Other state tensors are the
        live ones, as in torch.optim: keep their values with ``copy.deepcopy``. ``foreach`` and such have defaults.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        engine = self._engine
        with engine.lock:
            step = engine.current()
            engine.accumulated.check_ended("saved")
            engine.changes.is_state_handed_out = True
            saved = save(engine.groups.distinct, engine.state, engine.groups.aliases)
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
        """Copy a state dict of this class, or of torch.optim's or optimi's class of the same name, into the live tensors.

        Parameters are matched by name, in any order and grouping, or by position if one side has no names. Prefixes of
        module wrappers are ignored if names stay different without them. A tied parameter is found under each of its names.
        Parameters without names take the checkpoint's ``param_names``, as in torch.optim. A parameter that the checkpoint
        lists without state is reset, but a frozen one keeps its state. A step of another thread waits for the load.

        The checkpoint's options of groups count, such as ``nesterov`` and ``maximize``: the report's ``changed`` names those
        that were others, and compiled steps are renewed once. An option that decides which buffers exist, such as
        ``amsgrad``, must be the same. ``weights``, ``state_dtype``, ``exclude``, ``stacks``, ``split``, ``lr_scale`` and
        run-time flags such as ``foreach`` stay as they are.

        State that was saved with other ``weights`` and ``state_dtype`` is converted to the optimizer's. Load the model
        first: the extra bits of a weight (remainder, compensation, master copy) are computed from the weight that is there.
        An optimizer that cannot store these bits reports them as mismatched, unless the weight's dtype holds them. If the
        checkpoint has no such bits, the optimizer's stay.

        Entries that hooks and wrappers keep in :attr:`state` are replaced by copies of the checkpoint's, as in torch.optim:
        on the device of their parameter, and in its dtype if both are floating point.

        Args:
            state_dict: as returned by :meth:`state_dict` or ``co.named_state_dict``. It is not modified.
            strict: raise unless every parameter and every state entry matches; otherwise load the intersection.
            hyperparameters: ``"checkpoint"`` takes the checkpoint's values, ``"keep"`` keeps the present ones.

        Returns:
            The names that were missing, unexpected and mismatched, which are empty lists with ``strict``, and the changed
            options.

        Raises:
            ValueError, TypeError: the checkpoint does not match; the message says where. The optimizer is then unchanged.
                Only an interrupt or an operator that fails while tensors are copied can leave a partial load; load again
                then.
        """
        with self._engine.lock:
            prepared = prepare_load(self, state_dict, strict, hyperparameters)
            checkpoint.write(prepared)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        return prepared.report

    def __getstate__(self) -> dict[str, Any]:
        engine = self._engine
        engine.accumulated.check_ended("copied")
        unshown = [group.unshown() if isinstance(group, ParamGroup) else {} for group in engine.groups.distinct]
        attributes = {"lowering": engine.lowering, "aliases": engine.groups.aliases, "is_watching": engine.is_watching}
        attributes |= {name: engine.assigned[name] for name in CHOSEN}
        attributes["rules"] = {key: entries.rule for key, entries in engine.state.items() if isinstance(entries, ParamState)}
        return {**super().__getstate__(), **attributes, "schedules": engine.schedules.functions, "unshown": unshown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        before, state = vars(self).get("_engine"), dict(state)
        values: dict[str, Any] = {"lowering": "auto", "aliases": {}, "schedules": {}, "unshown": (), "rules": {}}
        values |= {"max_grad_norm": None, "skip_nonfinite": False, "is_watching": False, "defaults": {}}
        if before is not None:
            values |= {name: getattr(before, name) for name in ("lowering", "is_watching")} | before.assigned
            values |= {name: getattr(before.groups, name) for name in ("aliases", "defaults")}
            values["schedules"] = before.schedules.functions
            state = {"param_groups": before.groups.listed, "state": before.state, **state}  # which may be a part of it
        values |= {name: state.pop(name) for name in [*values] if name in state}
        groups, entries = state.pop("param_groups"), state.pop("state")
        self._begin(values["lowering"])
        for name in CHOSEN:
            self._engine.assign(name, values[name])
        self.param_groups, self.state, self.defaults = groups, entries, values["defaults"]
        super().__setstate__(state)
        self.defaults = group_entries(self._engine.kind, self.defaults)  # torch adds a key
        self._engine.groups.aliases, self._engine.schedules.functions = dict(values["aliases"]), dict(values["schedules"])
        self._engine.is_watching = values["is_watching"]
        for param, rule in values["rules"].items():
            self._engine.state[param].rule = rule
        self._engine.groups.adopt(checked=True, unshown=values["unshown"])


def prepare_load(
    optimizer: SavedOptimizer, state_dict: Any, strict: bool, hyperparameters: Literal["checkpoint", "keep"]
) -> PreparedLoad:
    """Run the pre-hooks and check a whole load. The caller holds the engine's lock until the load is written.

    Raises:
        TypeError, ValueError: as :meth:`SavedOptimizer.load_state_dict`.
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
    step, groups = engine.current(), engine.groups.distinct
    prepare = functools.partial(checkpoint.prepare_load, engine.groups.kinds, groups, engine.state, engine.groups.aliases)
    load = step.prepare_load(saved, functools.partial(prepare, strict=strict, hyperparameters=hyperparameters))

    def note_load() -> None:
        for watch in step_with_rule(engine, "be watched").watches.values() if engine.is_watching else ():
            watch.note_load()

    load.afterwards += [engine.accumulated.forget, engine.groups.note_names, note_load]
    return load
