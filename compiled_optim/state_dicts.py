"""Other forms of state dicts: by name, of several optimizers, for optimi, and of a model with all bits of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from compiled_optim.checkpoint import state_dict as checkpoint
from compiled_optim.checkpoint.optimi import in_optimis_storage, to_optimi
from compiled_optim.checkpoint.read import (
    Unloadable,
    as_buffer,
    described,
    group_names,
    match,
    named,
    plain,
    read,
    refuse_foreign,
)
from compiled_optim.checkpoint.state_dict import Copies, LoadReport
from compiled_optim.groups.parameters import named_parameters, parameters_of
from compiled_optim.memory.layout import as_part_of, local
from compiled_optim.memory.torch_internals import outside_dynamo
from compiled_optim.optimizer import CompiledOptimizer, engine_of, prepare_load
from compiled_optim.rule.storage import parts_of
from compiled_optim.state import StateForm, mode_of, shard_like, weight

Optimizers: TypeAlias = CompiledOptimizer | Sequence[CompiledOptimizer]
_SEVERAL = "a state dict of several optimizers"  # foreign state in it would have no owner


def _labeled(optimizers: Any) -> dict[str, CompiledOptimizer]:
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
def _locked(optimizers: Iterable[CompiledOptimizer]) -> Iterator[None]:
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
        return named(optimizer.state_dict())
    optimizers = _labeled(optimizer)
    names = [type(each).__name__ for each in optimizers.values()]
    result: dict[str, Any] = {"state": {}, "param_groups": [], "optimizers": names}
    owners: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for index, (label, each) in enumerate(optimizers.items()):
        with labeling(label):
            part = named(each.state_dict())
            refuse_foreign(part, _SEVERAL)
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
    state_dict = read(state_dict)
    is_one, labeled = isinstance(optimizer, CompiledOptimizer), _labeled(optimizer)
    optimizers = [*labeled.values()]
    for label, each in labeled.items():
        if not all("param_names" in group for group in each.param_groups):
            whose = "the optimizer's" if is_one else f"{label}'s"
            raise ValueError(f"{whose} parameters have no names: make it from named_parameters() or a dict")
    for i, group in enumerate(state_dict["param_groups"]):
        if group_names(group) is None:
            raise ValueError(f"the state dict has no names for the parameters of param_groups[{i}]")
    if is_one:
        return optimizers[0].load_state_dict(state_dict, strict=strict, hyperparameters=hyperparameters)
    saved = named(state_dict)
    refuse_foreign(saved, _SEVERAL)
    with _locked(optimizers):
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


def _parts(optimizers: Sequence[CompiledOptimizer], saved: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Split ``saved``, a named state dict, into one for each optimizer. Return them, and the names that no optimizer has."""
    groups: list[Any] = []
    aliases: dict[str, str] = {}
    owners: list[int] = []  # the optimizer of each group
    for index, engine in enumerate(map(engine_of, optimizers)):
        engine.current()
        groups += engine.distinct_groups
        owners += [index] * len(engine.distinct_groups)
        aliases |= engine.aliases
    kinds = [kind for each in optimizers for kind in engine_of(each).kinds]
    params, _, unexpected = match(groups, aliases, saved, checkpoint.known_names(*kinds))

    def part(index: int) -> dict[str, Any]:
        names = {each.saved.key for each in params if owners[each.current.group] == index}
        its_groups = [{**g, "params": [name for name in g["params"] if name in names]} for g in saved["param_groups"]]
        return {
            **saved,
            "state": {name: entries for name, entries in saved["state"].items() if name in names},
            "param_groups": [group for group in its_groups if group["params"]],
            "aliases": {alias: name for alias, name in saved.get("aliases", {}).items() if name in names},
        }

    return [part(index) for index in range(len(optimizers))], unexpected


def optimi_state_dict(optimizer: CompiledOptimizer) -> dict[str, Any]:
    """Return a state dict for optimi's optimizer of the same name, with which training continues as with ``optimizer``.

    For SGD, Adam, AdamW, RAdam, Lion, Adan, StableAdamW and Ranger of optimi 0.3. Its tensors are copies, which optimi can
    write into. optimi takes its options from this dict instead of its constructor's arguments, and runs its for-loop
    implementation. In the other direction, :meth:`CompiledOptimizer.load_state_dict` loads optimi's state dicts.

    8-bit codes are decoded. The bits that a weight's dtype lacks become ``kahan_comp``, in that dtype. ``max_grad_norm`` and
    other options outside of groups are not in it. optimi's RAdam adds ``eps`` after the second bias correction, and this
    package before it: the steps differ until that correction is 1.

    Raises:
        ValueError: optimi has no such optimizer or option; or ``weights`` is ``"stochastic"``; or the parameters of a group
            have different step counts, and optimi has one for the group.
    """
    saved = optimizer.state_dict()
    kind = type(optimizer)
    return to_optimi(in_optimis_storage(kind, engine_of(optimizer).distinct_groups, saved), kind)


class _SplitWeight(NamedTuple):
    """A weight whose bits are in two tensors: the parameter, and an entry of its state."""

    param: Tensor
    name: str  # of the entry
    entry: Tensor
    half: str  # the parameter's dtype

    @property
    def mode(self) -> str:
        return mode_of(self.name, self.entry)

    def joined(self) -> Tensor:
        """Return the weight in float32: a DTensor if the parameter is one.

        If it is halfway between its parameter and another number, by a compensation of half a unit, it is moved one bit
        towards the parameter. So a load restores the same parameter and the same compensation.
        """
        full = weight(self.param, {self.name: self.entry}, self.mode, self.half)
        if self.mode == "kahan":
            param = local(self.param.detach())
            nearer = torch.nextafter(full, param.float())
            is_halfway = (full.to(param.dtype) != param) & (nearer.to(param.dtype) == param)
            full = torch.where(is_halfway, nearer, full)
        return as_part_of(full, self.param)

    def copies(self, value: Tensor) -> Copies:
        """Return pairs (tensor, value to copy into it) that set the weight to ``value``."""
        new = parts_of(shard_like(value, self.param).float(), {}, self.mode, self.half)
        return [(local(self.param), new["param"]), (local(self.entry), new[self.name])]


@outside_dynamo
@torch.no_grad()
def full_precision_state_dict(model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """Return a model's state dict, with float32 weights where an optimizer keeps more bits than the 16-bit parameter has.

    ``torch.save(co.full_precision_state_dict(model, opt), path)`` writes a file that a float32 model loads. The float32
    weights are copies. They have all 32 bits with ``weights="split16"`` and ``"master"``, and at least 24 with ``"split8"``
    and ``"kahan"``. float16 weights below 2**-14 have all bits only with ``"master"``. Everything else is as in
    ``model.state_dict()``: buffers, frozen parameters, rounded parameters. A tied parameter is one tensor under all its
    names; DTensors stay DTensors.

    Args:
        model: the module. The names are those of ``model.state_dict()``, with the prefixes of a wrapper.
        optimizer: the optimizer, or a list of several for different parameters. Parameters of other models are ignored.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` none of this package.
        ValueError: no parameter of the model is in the optimizer, or a parameter is in two optimizers; or a state-dict hook
            of the model renames, reshapes or omits one of the float32 weights.
    """
    with _split_weights(model, optimizer) as split:
        entries = _entries(model, split)
        joined = {key: split[key].joined() for key in dict.fromkeys(map(id, entries.values())) if key in split}
        for name, entry in entries.items():
            if isinstance(entry, Tensor):
                entries[name] = joined[id(entry)] if id(entry) in joined else entry.detach()
    return entries


@outside_dynamo
@torch.no_grad()
def load_full_precision_state_dict(model: nn.Module, optimizer: Optimizers, state_dict: Mapping[str, Any]) -> None:
    """Load float32 weights into a model and into the extra bits that its optimizers keep of 16-bit parameters.

    The weights are rounded to the bits that model and optimizer can hold together. All entries, buffers too, are copied into
    the existing tensors; other state of the optimizers does not change. Load an optimizer's checkpoint that was saved with
    these weights before you call this. If the saved optimizer had the same ``weights=``, you may also load it afterwards:
    its extra bits belong to the same 16-bit parameters.

    Args:
        model: the module.
        optimizer: as for :func:`full_precision_state_dict`.
        state_dict: from :func:`full_precision_state_dict`, or of the same model in float32, with the keys of
            ``model.state_dict()``. It is not modified. A full tensor may replace a DTensor if it is equal on every process.

    Raises:
        TypeError: as :func:`full_precision_state_dict`, or ``state_dict`` is no dict.
        ValueError: an entry is missing, unexpected, or has for example another shape; or as
            :func:`full_precision_state_dict`. Nothing is changed then.
    """
    with _split_weights(model, optimizer) as split:
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got {described(state_dict)}")
        saved: dict[str, Any] = plain(state_dict, "the state dict")
        live = {id(t) for t in (*model.parameters(), *model.buffers())}
        entries = _entries(model, split)
        foreign = {name for name, entry in entries.items() if id(entry) not in live}
        copies: Copies = []
        for name, value in _read(entries, saved, foreign).items():
            stored = split.get(id(entries[name]))
            copies += [(entries[name], value)] if stored is None else stored.copies(value)
        if foreign:  # such as entries of get_extra_state; this may fail
            model.load_state_dict({name: saved[name] for name in foreign}, strict=False)
        checkpoint.copy_all(copies)


@contextlib.contextmanager
def _split_weights(model: nn.Module, optimizer: Optimizers) -> Iterator[dict[int, _SplitWeight]]:
    """Yield the weights that have more bits in optimizers than in the model, by ``id`` of the parameter. Steps wait."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {described(model)}")
    params = {id(param) for param in model.parameters()}
    split: dict[int, _SplitWeight] = {}
    is_known = False
    optimizers = _labeled(optimizer).values()
    with _locked(optimizers):
        for engine in map(engine_of, optimizers):
            engine.current()
            for i, group in enumerate(groups := engine.distinct_groups):
                forms = StateForm.of_group(group.kind._declaration, groups, i)
                for param, j in parameters_of(group).items():
                    is_known |= id(param) in params
                    name, _, half = forms(j).split or ("", "", "")
                    if (entry := engine.state.get(param, {}).get(name)) is not None:
                        split[id(param)] = _SplitWeight(param, name, entry, half)
        if not is_known:
            raise ValueError("no parameter of the model is in the optimizer")
        yield split


def _entries(model: nn.Module, split: Mapping[int, _SplitWeight]) -> dict[str, Any]:
    """Return the state dict of ``model`` with its own tensors, also where hooks replaced parameters in ``split``."""
    entries: dict[str, Any] = model.state_dict(keep_vars=True)
    named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) in split]
    entries |= {name: p for name, p in named if getattr(entries.get(name), "shape", None) == p.shape}
    present = {id(entry) for entry in entries.values()}
    for name, param in named:
        if id(param) not in present:
            raise ValueError(f"the model's state dict does not have the parameter '{name}' as it is: a hook changes it")
    return entries


def _read(entries: Mapping[str, Any], saved: Mapping[str, Any], foreign: set[str]) -> dict[str, Tensor]:
    """Return the values of ``saved`` for ``entries``, without ``foreign`` ones; ``ValueError`` names all mismatches."""
    absent, others = [name for name in entries if name not in saved], [str(name) for name in saved if name not in entries]
    report = LoadReport(absent, others, [], [])
    values: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, entry in entries.items():
        if name in saved and name not in foreign:
            try:
                values[name] = value = as_buffer(saved[name], name, tuple(entry.shape), entry.dtype)
                checkpoint.check_writable(entry, f"the model's own {name}", tuple(entry.shape), value)
                tied = first.setdefault(id(entry), name)
                if value is not values[tied] and not value.to(values[tied]).allclose(values[tied], 0, 0, equal_nan=True):
                    raise Unloadable(f"{name} is not equal to {tied}, which is the same tensor in the model")
            except Unloadable as problem:
                report.mismatched.append(str(problem))
    checkpoint.refuse_mismatches(report, "the state dict does not match the model")
    return values
