"""State dicts by parameter name, of one optimizer or of several together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from compiled_optim.checkpoint import state_dict as checkpoint
from compiled_optim.checkpoint.read import Checkpoint, SavedGroup, described, match
from compiled_optim.checkpoint.state_dict import LoadReport
from compiled_optim.groups.parameters import named_parameters
from compiled_optim.optimizer import CompiledOptimizer, engine_of
from compiled_optim.saved_optimizer import prepare_load

Optimizers: TypeAlias = CompiledOptimizer | Sequence[CompiledOptimizer]
_SEVERAL = "a state dict of several optimizers"  # foreign state in it would have no owner


def by_label(optimizers: Any) -> dict[str, CompiledOptimizer]:
    """Return one or several ``optimizers`` by their names in messages; an error if one is none, or two share a parameter."""
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if foreign := [each for each in listed if not isinstance(each, CompiledOptimizer)]:
        raise TypeError(f"an optimizer of this package, or a list of some, is needed, got {described(foreign[0])}")
    if not listed:
        raise ValueError("the list of optimizers is empty")
    labeled = {f"optimizers[{index}] ({type(each).__name__})": each for index, each in enumerate(listed)}
    owners: dict[int, str] = {}
    for label, optimizer in labeled.items():
        for name, param in named_parameters(optimizer.param_groups):
            if (other := owners.setdefault(id(param), label)) != label:
                raise ValueError(f"{other} and {label} both have the parameter '{name}'")
    return labeled


@contextlib.contextmanager
def locked(optimizers: Iterable[CompiledOptimizer]) -> Iterator[None]:
    """Make steps, saves and loads of other threads wait during a ``with`` block."""
    with contextlib.ExitStack() as locks:
        for engine in sorted(map(engine_of, optimizers), key=lambda engine: int(engine.key)):
            locks.enter_context(engine.lock)
        yield


@contextlib.contextmanager
def labeling(label: str) -> Iterator[None]:
    """Prefix the message of an error with the ``label`` of its optimizer."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if len(error.args) == 1:
            error.args = (f"{label}: {error}",)
        raise


def named_state_dict(optimizer: Optimizers) -> dict[str, Any]:
    """Return a state dict whose keys are parameter names, of one optimizer or of several together.

    ``{"state": {"fc.bias": {...}}, "param_groups": [{"params": ["fc.bias"], "lr": ...}]}``. Prefixes that module wrappers
    insert are removed. Values are as in :meth:`CompiledOptimizer.state_dict`, so ``torch.distributed.checkpoint`` can save
    this dict and load into it.

    Several optimizers must have different parameters, such as Muon the matrices and AdamW the others. Their groups follow
    each other in ``"param_groups"``. ``"optimizers"`` lists the optimizers' names, and ``"optimizer"`` in a group is the
    index of its optimizer in that list.

    Args:
        optimizer: the optimizer, or a list of several.

    Raises:
        ValueError: parameters have no names, or two have the same; or a parameter is in two optimizers; or, of several
            optimizers, one has state under a key that is no parameter, or a group with an entry ``"optimizer"``.
    """
    if isinstance(optimizer, CompiledOptimizer):
        return Checkpoint.of(optimizer.state_dict()).named().as_dict()
    optimizers = by_label(optimizer)
    names = [type(each).__name__ for each in optimizers.values()]
    result: dict[str, Any] = {"state": {}, "param_groups": [], "optimizers": names}
    owners: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for index, (label, each) in enumerate(optimizers.items()):
        with labeling(label):
            part = Checkpoint.of(each.state_dict()).named()
            part.refuse_foreign(_SEVERAL)
            if any("optimizer" in group.entries for group in part.groups):
                raise ValueError("a group has an entry 'optimizer', which a state dict of several uses itself")
        for name in (*(name for group in part.groups for name in group.names or ()), *part.aliases):
            if (other := owners.setdefault(name, label)) != label:
                raise ValueError(f"{other} and {label} both have a parameter '{name}'")
        result["state"] |= part.state
        result["param_groups"] += [{"params": [*g.params], **g.entries, "optimizer": index} for g in part.groups]
        result["format_version"] = part.others["format_version"]
        aliases |= part.aliases
    return result | ({"aliases": aliases} if aliases else {})


def load_named_state_dict(
    optimizer: Optimizers,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    hyperparameters: Literal["checkpoint", "keep"] = "checkpoint",
) -> LoadReport:
    """Copy a state dict keyed by parameter name into the live tensors; see :meth:`CompiledOptimizer.load_state_dict`.

    Each of several optimizers loads the state of its parameters, even if another optimizer saved it, if it has the same
    entries. Either all optimizers load, or none does.

    Args:
        optimizer: the optimizer, or a list of several for different parameters.
        state_dict: from :func:`named_state_dict`, for one optimizer or for several.
        strict: as for :meth:`CompiledOptimizer.load_state_dict`.
        hyperparameters: as for :meth:`CompiledOptimizer.load_state_dict`.

    Returns:
        The names that were missing, unexpected, mismatched and changed, of all optimizers together.

    Raises:
        ValueError, TypeError: a parameter of the optimizer or the checkpoint has no name, or as
            :meth:`CompiledOptimizer.load_state_dict`. No optimizer is changed then.
    """
    saved = Checkpoint.of(state_dict).single()
    is_one, labeled = isinstance(optimizer, CompiledOptimizer), by_label(optimizer)
    optimizers = [*labeled.values()]
    for label, each in labeled.items():
        if not all("param_names" in group for group in each.param_groups):
            whose = "the optimizer's" if is_one else f"{label}'s"
            raise ValueError(f"{whose} parameters have no names: make it from named_parameters() or a dict")
    for i, group in enumerate(saved.groups):
        if group.names is None:
            raise ValueError(f"the state dict has no names for the parameters of param_groups[{i}]")
    if is_one:
        return optimizers[0].load_state_dict(saved.as_dict(), strict=strict, hyperparameters=hyperparameters)
    saved = saved.named()
    saved.refuse_foreign(_SEVERAL)
    with locked(optimizers):
        parts, unexpected = _parts(optimizers, saved)
        report = LoadReport([], unexpected, [], [])
        prepared = []
        for index, (label, each) in enumerate(labeled.items()):
            with labeling(label):
                prepared.append(load := prepare_load(each, parts[index], False, hyperparameters))
            report.missing.extend(load.report.missing)
            report.unexpected.extend(load.report.unexpected)
            for of_all, of_one in zip(report[2:], load.report[2:], strict=True):
                of_all += [f"optimizers[{index}].{name}" if name.startswith("param_groups[") else name for name in of_one]
        if strict:
            kinds = ", ".join(type(each).__name__ for each in optimizers)
            checkpoint.refuse_mismatches(report, checkpoint.STRICTLY.format(kinds))
        checkpoint.write(*prepared)
    for each in optimizers:
        for post_hook in each._optimizer_load_state_dict_post_hooks.values():
            post_hook(each)
    return report


def _parts(optimizers: Sequence[CompiledOptimizer], saved: Checkpoint) -> tuple[list[dict[str, Any]], list[str]]:
    """Split ``saved``, in the named form, into a state dict for each optimizer. Return them, and names that none has."""
    groups: list[Any] = []
    aliases: dict[str, str] = {}
    owners: list[int] = []  # the optimizer of each group
    for index, engine in enumerate(map(engine_of, optimizers)):
        engine.current()
        groups += engine.groups.distinct
        owners += [index] * len(engine.groups.distinct)
        aliases |= engine.groups.aliases
    kinds = [kind for each in optimizers for kind in engine_of(each).groups.kinds]
    params, _, unexpected = match(groups, aliases, saved, checkpoint.known_names(*kinds))

    def part(index: int) -> dict[str, Any]:
        names = {each.saved.key for each in params if owners[each.current.group] == index}
        kept = [(tuple([name for name in group.names or () if name in names]), group) for group in saved.groups]
        return saved._replace(
            groups=tuple([SavedGroup(params, params, group.entries, is_named=True) for params, group in kept if params]),
            state={name: entries for name, entries in saved.state.items() if name in names},
            aliases={alias: name for alias, name in saved.aliases.items() if name in names},
        ).as_dict()

    return [part(index) for index in range(len(optimizers))], unexpected
