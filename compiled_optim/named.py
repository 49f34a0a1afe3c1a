"""The state of optimizers keyed by parameter name instead of by integer, of one or of several of one model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from compiled_optim.checkpoint.check import known_names
from compiled_optim.checkpoint.match import match
from compiled_optim.checkpoint.read import described, foreign_state, group_names, named, read
from compiled_optim.checkpoint.state_dict import LoadReport, refuse_mismatches
from compiled_optim.optimizer import CompiledOptimizer, engine_of, prepare_load

Optimizers: TypeAlias = CompiledOptimizer | Sequence[CompiledOptimizer]


def listed(optimizers: Any) -> list[CompiledOptimizer]:
    """``optimizers``, one or several, as a list; an error if they are none of this package."""
    result = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if foreign := [each for each in result if not isinstance(each, CompiledOptimizer)]:
        raise TypeError(f"an optimizer of this package, or a list of some, is needed, got {described(foreign[0])}")
    if not result:
        raise ValueError("the list of optimizers is empty")
    return result


def check_disjoint(optimizers: Sequence[CompiledOptimizer]) -> None:
    """Raise ``ValueError`` where a parameter is in two of ``optimizers``."""
    owners: dict[int, str] = {}
    for index, optimizer in enumerate(optimizers):
        label = label_of(index, optimizer)
        for group in optimizer.param_groups:
            for j, param in enumerate(group["params"]):
                if (other := owners.setdefault(id(param), label)) != label:
                    name = (group.get("param_names") or {j: j})[j]
                    raise ValueError(f"{other} and {label} both have the parameter '{name}'")


@contextlib.contextmanager
def locked(optimizers: Sequence[CompiledOptimizer]) -> Iterator[None]:
    """Let steps, saves and loads of other threads wait during a ``with`` block."""
    with contextlib.ExitStack() as locks:
        for engine in sorted(map(engine_of, optimizers), key=lambda engine: int(engine.key)):
            locks.enter_context(engine.lock)
        yield


def label_of(index: int, optimizer: CompiledOptimizer) -> str:
    """What messages call the optimizer at ``index`` of a list."""
    return f"optimizers[{index}] ({type(optimizer).__name__})"


@contextlib.contextmanager
def labeling(label: str) -> Iterator[None]:
    """Let an error begin with the ``label`` of its optimizer."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if len(error.args) == 1:
            error.args = (f"{label}: {error}",)
        raise


def named_state_dict(optimizer: Optimizers) -> dict[str, Any]:
    """The state dict with parameter names for keys, of one optimizer or of several together.

    ``{"state": {"fc.bias": {...}}, "param_groups": [{"params": ["fc.bias"], "lr": ...}]}``. Prefixes that module wrappers
    insert are removed. Values are those of :meth:`CompiledOptimizer.state_dict`, so ``torch.distributed.checkpoint`` can
    save it, and load into it, as it is.

    Of a list of optimizers for different parameters, such as Muon for the matrices of a model and AdamW for the rest, it has
    the groups one after another: ``"optimizers"`` lists the optimizers' names, and ``"optimizer"`` in a group is the index
    of its optimizer in that list.

    Args:
        optimizer: the optimizer, or a list of several.

    Raises:
        ValueError: the optimizers' parameters have no names, or two of them the same; or a parameter is in two optimizers,
            or one of several keeps state under the key of no parameter, or has a group with an entry ``"optimizer"``.
    """
    if isinstance(optimizer, CompiledOptimizer):
        return named(optimizer.state_dict())
    optimizers = listed(optimizer)
    check_disjoint(optimizers)
    result: dict[str, Any] = {"state": {}, "param_groups": [], "optimizers": [type(o).__name__ for o in optimizers]}
    owners: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for index, each in enumerate(optimizers):
        label = label_of(index, each)
        with labeling(label):
            part = named(each.state_dict())
            _check_has_no_foreign_state(part)
            if any("optimizer" in group for group in part["param_groups"]):
                raise ValueError("a group has an entry 'optimizer', which a state dict of several uses itself")
        for name in (*(name for group in part["param_groups"] for name in group["params"]), *part.get("aliases", {})):
            if (other := owners.setdefault(name, label)) != label:
                raise ValueError(f"{other} and {label} both have a parameter '{name}'")
        result["state"] |= part["state"]
        result["param_groups"] += [{**group, "optimizer": index} for group in part["param_groups"]]
        result["format_version"] = part["format_version"]
        aliases |= part.get("aliases", {})
    return result | ({"aliases": aliases} if aliases else {})


def load_named_state_dict(
    optimizer: Optimizers,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    hyperparameters: Literal["checkpoint", "keep"] = "checkpoint",
) -> LoadReport:
    """Copy a state dict keyed by parameter name into the live tensors; see :meth:`CompiledOptimizer.load_state_dict`.

    Several optimizers get what their parameters have in it, whichever optimizer had them when it was saved, if its kind of
    state fits: all of them, or where something does not fit none.

    Args:
        optimizer: the optimizer, or a list of several for different parameters.
        state_dict: of :func:`named_state_dict`, whether of one optimizer or of several.
        strict: as for :meth:`CompiledOptimizer.load_state_dict`.
        hyperparameters: as there.

    Returns:
        What was missing, unexpected and mismatched, of all optimizers together.

    Raises:
        ValueError, TypeError: a parameter on either side has no name, or as :meth:`CompiledOptimizer.load_state_dict`. No
            optimizer is changed then.
    """
    state_dict = read(state_dict)
    is_one, optimizers = isinstance(optimizer, CompiledOptimizer), listed(optimizer)
    for index, each in enumerate(optimizers):
        if not all("param_names" in group for group in each.param_groups):
            whose = "the optimizer's" if is_one else f"{label_of(index, each)}'s"
            raise ValueError(f"{whose} parameters have no names: make it from named_parameters() or a dict")
    for i, group in enumerate(state_dict["param_groups"]):
        if group_names(group) is None:
            raise ValueError(f"the state dict has no names for the parameters of param_groups[{i}]")
    if is_one:
        return optimizers[0].load_state_dict(state_dict, strict=strict, hyperparameters=hyperparameters)
    return _load_parts(optimizers, named(state_dict), strict, hyperparameters)


def _load_parts(
    optimizers: list[CompiledOptimizer],
    saved: Mapping[str, Any],
    strict: bool,
    hyperparameters: Literal["checkpoint", "keep"],
) -> LoadReport:
    check_disjoint(optimizers)
    _check_has_no_foreign_state(saved)
    with locked(optimizers):
        parts, unexpected = _split(optimizers, saved)
        prepared = []
        for index, (optimizer, part) in enumerate(zip(optimizers, parts, strict=True)):
            with labeling(label_of(index, optimizer)):
                prepared.append(prepare_load(optimizer, part, False, hyperparameters))
        report = LoadReport([], unexpected, [])
        for index, each in enumerate(prepared):
            report.missing.extend(each.report.missing)
            report.unexpected.extend(each.report.unexpected)
            for name in each.report.mismatched:
                report.mismatched.append(f"optimizers[{index}].{name}" if name.startswith("param_groups[") else name)
        if strict:
            refuse_mismatches(report, ", ".join(type(optimizer).__name__ for optimizer in optimizers))
        targets = [target for each in prepared for target in each.targets]
        for each in prepared:
            each.set_apart(targets)
        for each in prepared:
            each.write()
    for optimizer in optimizers:
        for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            post_hook(optimizer)
    return report


def _split(optimizers: Sequence[CompiledOptimizer], saved: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """What ``saved``, a named state dict, has for each optimizer, as state dicts; and the names that no optimizer has."""
    groups: list[Any] = []
    aliases: dict[str, str] = {}
    owners: list[int] = []  # the optimizer of each group
    for index, optimizer in enumerate(optimizers):
        engine_of(optimizer).current()
        engine = engine_of(optimizer)
        groups += engine.distinct_groups
        owners += [index] * len(engine.distinct_groups)
        aliases |= engine.aliases
    params, _, unexpected = match(groups, aliases, saved, {}, known_names())
    parts = []
    for index in range(len(optimizers)):
        names = {each.key for each in params if owners[each.group] == index}
        its_groups = [{**g, "params": [name for name in g["params"] if name in names]} for g in saved["param_groups"]]
        part = {
            "state": {name: entries for name, entries in saved["state"].items() if name in names},
            "param_groups": [group for group in its_groups if group["params"]],
            "aliases": {alias: name for alias, name in saved.get("aliases", {}).items() if name in names},
        }
        parts.append({**saved, **part})
    return parts, unexpected


def _check_has_no_foreign_state(state_dict: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where state lies under the key of no parameter: nobody could say whose it is."""
    for key in foreign_state(state_dict):
        raise ValueError(
            f"the state holds {described(key)}, which is no parameter's and has no place in a state dict of several "
            "optimizers"
        )
