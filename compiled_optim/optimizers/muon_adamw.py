"""MuonAdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from compiled_optim.groups.param_group import group_keys
from compiled_optim.groups.parameters import alternatives, as_groups, matches, names_and_tensors
from compiled_optim.model import roles
from compiled_optim.optimizer import engine_of
from compiled_optim.optimizers.adamw import AdamW
from compiled_optim.optimizers.muon import Muon
from compiled_optim.rule.fields import Number, option, static
from compiled_optim.rule.rule import RULE, WHY

_FOR_ADAMW = "*embed*|*wte*|*wpe*|lm_head.*|*.lm_head.*|head.*|*.head.*|*classifier*|*norm*|*bias*"
_UNFIT_ROLES = {"embedding": "is an embedding", "head": "is a head", "bare": "is not called a weight"}
_ADAMW = "adamw_"  # the prefix of AdamW's arguments


class MuonAdamW(Muon):
    """Muon for the matrices of hidden layers and AdamW for all other parameters, in one optimizer (arXiv:2502.16982).

    ``params`` may be a module, named parameters, or groups of named parameters. AdamW updates parameters that ``adamw``
    matches, those that are no matrix or have a single row or column, and a module's embeddings and heads of any name.
    Without ``adamw`` it also updates matrices of a module that are not called a weight, such as Mamba's ``A_log``. A group
    becomes two, one for each; a group that names its ``rule`` is not split. ``lr`` and ``weight_decay`` are for both:
    ``adjust_lr_fn`` gives Muon's updates the size of AdamW's. The arguments from ``adamw_lr`` on are AdamW's, where
    these differ from Muon's.

    Raises ``ValueError`` where no parameter is left for Muon, where a pattern in ``adamw`` matches nothing, and where a
    parameter was sharded or flattened before: it has no elements, or is the weight of a linear map with one dimension.
    """

    adjust_lr_fn: str | None = static(default="match_rms_adamw", doc="as Muon's; the default lets one ``lr`` suit both.")
    adamw: str | None = option(
        default=None, kw_only=True, doc="patterns of names; None is for usual names of embeddings, heads and norms."
    )
    adamw_lr: Number | None = option(default=None, kw_only=True, doc="AdamW's ``lr``; None is ``lr``.")
    adamw_betas: tuple[Number, Number] = option(default=(0.9, 0.95), kw_only=True, doc="AdamW's ``betas``.")
    adamw_eps: Number = option(default=1e-8, kw_only=True, doc="AdamW's ``eps``.")
    adamw_weight_decay: Number | None = option(default=None, kw_only=True, doc="AdamW's; None is ``weight_decay``.")

    _takes_module = True

    @classmethod
    def _arguments(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super()._arguments(args, kwargs)
        for_adamw = {name.removeprefix(_ADAMW): value for name, value in arguments.items() if name.startswith(_ADAMW)}
        for_adamw = {name: arguments[name] if value is None else value for name, value in for_adamw.items()}
        adamw, stacks = {RULE: AdamW, **for_adamw}, arguments["stacks"]
        arguments["params"] = _routed(arguments["params"], arguments["adamw"], adamw, stacks)
        return arguments

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in every optimizer; a later group must name its ``rule``, since it is not split."""
        if isinstance(param_group, dict) and RULE not in param_group and not engine_of(self).is_open:
            advice = f"{RULE}=MuonAdamW for matrices of hidden layers, which Muon updates, or {RULE}=AdamW for others"
            raise ValueError(f"a group that is added to MuonAdamW must name its rule: {advice}")
        super().add_param_group(param_group)


def _routed(params: Any, patterns: str | None, adamw: Mapping[str, Any], stacks: Sequence[str]) -> list[dict[str, Any]]:
    """Return groups in which each parameter has one rule; those for AdamW begin with the options ``adamw``."""
    known = roles(params) if isinstance(params, nn.Module) else {}
    if patterns is not None:  # they replace guesses from names
        known = {key: role for key, role in known.items() if role != "bare"}
    if isinstance(params, nn.Module):
        params = params.named_parameters(remove_duplicate=False)
    unused = {} if patterns is None else dict.fromkeys(alternatives(patterns))
    wanted = alternatives(patterns or _FOR_ADAMW)
    routed: list[dict[str, Any]] = []
    for index, group in enumerate(as_groups(params)):
        where = f"param_groups[{index}]"
        if RULE in group or "params" not in group:
            routed.append(group)
            continue
        names, tensors = names_and_tensors(group["params"], f"{where}['params']")
        if len(names) != len(tensors):
            raise TypeError(f"MuonAdamW tells parameters apart by name, and those of {where} have none: pass the model")
        every: dict[int, list[str]] = {}
        for name, tensor in zip(names, tensors, strict=True):
            every.setdefault(id(tensor), []).append(name)
        parts: dict[bool, list[tuple[str, Any]]] = {False: [], True: []}
        reasons: dict[str, str] = {}
        for name, tensor in zip(names, tensors, strict=True):
            matched = [pattern for pattern in wanted if matches(pattern, every[id(tensor)])]
            for pattern in matched:
                unused.pop(pattern, None)
            is_stack = any(matches(pattern, [name]) for pattern in group.get("stacks", stacks))
            reason = f"matches {matched[0]!r}" if matched else _unfit(name, tensor, known.get(id(tensor), ""), is_stack)
            parts[bool(reason)].append((name, tensor))
            reasons[name] = reason or "a matrix that no pattern matches"
        for is_adamw, pairs in parts.items():
            why = {WHY: {name: reasons[name] for name, _ in pairs}}
            foreign = {*group_keys(Muon if is_adamw else AdamW)} - {*group_keys(AdamW if is_adamw else Muon)}
            entries = {key: value for key, value in group.items() if key not in foreign}
            routed += [{**(adamw if is_adamw else {}), **entries, **why, "params": pairs}] if pairs else []
    if unused:
        raise ValueError(f"adamw: the pattern {next(iter(unused))!r} matches no parameter")
    if not any(RULE not in group or group[RULE] is Muon for group in routed):
        raise ValueError("no parameter is left for Muon; use AdamW, other patterns in adamw= or groups with rule=MuonAdamW")
    return routed


def _unfit(name: str, param: Any, role: str, is_stack: bool) -> str:
    """Return why Muon should not have a parameter, or ''. Raise ``ValueError`` where it was sharded or flattened."""
    if not isinstance(param, Tensor) or nn.parameter.is_lazy(param):
        return ""
    if param.numel() == 0 or hasattr(param, "ds_shape"):
        raise ValueError(
            f"'{name}' of shape {tuple(param.shape)} stands for a parameter elsewhere: make the optimizer before it is "
            "sharded or offloaded, since its rule depends on its shape"
        )
    if role in ("linear", "head") and param.dim() != 2:
        raise ValueError(f"'{name}' is the weight of a linear map, but has shape {tuple(param.shape)}: it was flattened")
    if role in _UNFIT_ROLES:
        return _UNFIT_ROLES[role]
    if param.dim() == 2:
        return "is a single row or column" if 1 in param.shape else ""
    if is_stack and param.dim() > 2:
        return ""
    return f"has {param.dim()} dimension{'' if param.dim() == 1 else 's'}"
