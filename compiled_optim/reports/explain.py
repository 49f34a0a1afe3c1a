"""Report the rule, numbers and precision of each parameter of a model, the reasons, and probable mistakes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from compiled_optim.groups.param_group import ParamGroup, inherited
from compiled_optim.groups.parameters import canonical_name, first_few, matches, parameter_names
from compiled_optim.groups.per_parameter import choices_of, ignores_prefixes, lr_scale_of, patterns_of
from compiled_optim.memory.addresses import gradient
from compiled_optim.memory.torch_internals import is_fake
from compiled_optim.model import Listed, Model, listed_parameters, roles
from compiled_optim.optimizer import CompiledOptimizer, checked_engine
from compiled_optim.reports.finding import Finding
from compiled_optim.reports.memory import bytes_of
from compiled_optim.rule.declared import Declared, rule_name
from compiled_optim.rule.fields import LR_SCALE
from compiled_optim.rule.rule import RULE, WHY, by_name
from compiled_optim.rule.storage import PARTS
from compiled_optim.state import has_declared_entries
from compiled_optim.step.engine import Engine

_COLUMNS = ("name", "shape", "precision", "optimizer", "group", "rule", "lr", "decay", "bytes", "matrices", "why")
_NARROW = 8  # a matrix with a shorter side is narrow
_DIMENSIONS = {"embedding": 2, "head": 2, "linear": 2, "depthwise": 3, "convolution": 3}  # at least, by a weight's role
_UNSUITABLE = {
    "embedding": "orthogonalizes an embedding, whose rows are independent of each other",
    "head": "orthogonalizes the last linear map, and is for hidden ones",
    "depthwise": "orthogonalizes filters for one channel each, which are no matrix",
    "bare": "orthogonalizes a matrix that is not called a weight, and may be a table of something else",
    "axes": "orthogonalizes more than 2 dimensions, and no pattern in an option says what they are",
    "narrow": f"orthogonalizes a matrix with a side below {_NARROW}, and makes its noise as large as the signal",
}
_PLACEHOLDER = "it has no elements or fewer dimensions than its module makes: it was flattened, or the weight is elsewhere"


@dataclass(frozen=True)
class Explanation:
    """The rule, numbers and precision of each parameter. ``str`` makes a table, and rich shows one of its own.

    Attributes:
        records: a dict for each parameter, the model's first. JSON can hold them, ``pandas.DataFrame`` takes them. They have
            ``name``, ``aliases`` (further names of a tied one), ``shape`` (None if it is lazy) and ``dtype``; ``optimizer``
            and ``group``, counted from 0, and ``rule``, a class name, all None where no optimizer has it; ``lr``, times
            ``lr_scale`` and the rule's factor for the shape, and ``weight_decay``: a number, or ``"on cuda:0"`` where only
            that device knows it; ``precision``, the dtypes of weight and state and the mode of ``weights=``; this process's
            ``parameter_bytes``, ``gradient_bytes`` and ``state_bytes``, as in ``co.memory_report``; ``matrices``, the
            number, rows and columns of those that a step orthogonalizes, or None, with rows like ``"8+4"`` where ``split``
            makes uneven parts; and ``why`` it is in its group.
        findings: probable mistakes. The ``name`` is ``embedding``, ``head``, ``depthwise``, ``bare``, ``axes`` or
            ``narrow`` where a rule for matrices has the parameters; ``placeholder``, ``missing``, ``replaced``, ``shared``,
            ``frozen``, ``pattern``, ``groups`` or ``matrices``; ``too small`` or ``not judged``, of 16-bit ones.
    """

    records: list[dict[str, Any]]
    findings: tuple[Finding, ...]

    def _table(self) -> list[tuple[str, ...]]:
        """Return the rows of a table, the head first, without empty columns."""
        several = len({r["optimizer"] for r in self.records} - {None}) > 1
        rows = [_COLUMNS] if self.records else []
        for r in self.records:
            shape, matrices = (" x ".join(map(str, r[key] or ())) for key in ("shape", "matrices"))
            size = f"{r['parameter_bytes'] + r['gradient_bytes'] + r['state_bytes']:,}"
            numbers = (f"{n:.6g}" if isinstance(n, float) else n for n in (r["lr"], r["weight_decay"]))
            optimizer = (r["optimizer"] if several else None, r["group"], r["rule"], *numbers)
            cells = (r["name"], shape, r["precision"], *optimizer, size, matrices, r["why"])
            rows.append(tuple("" if cell is None else str(cell) for cell in cells))  # type: ignore[arg-type]
        return list(zip(*(column for column in zip(*rows, strict=True) if any(column[1:])), strict=True))

    def __str__(self) -> str:
        rows = self._table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *map(str, self.findings)])

    def __rich__(self) -> Any:
        try:
            from rich.console import Group
            from rich.table import Table
            from rich.text import Text
        except ModuleNotFoundError as error:
            message = "rich shows this table, and is not installed: pip install 'compiled-optim[tables]'"
            raise ModuleNotFoundError(message) from error

        head, *rows = self._table() or [()]
        table = Table(*head)
        for row in rows:
            table.add_row(*map(Text, row))  # in a Text, brackets are no markup
        return Group(table, *(Text(str(finding), style="yellow") for finding in self.findings))


class _Unknown(str):
    """A placeholder for a number that only a device knows. It equals no other one."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class _Group(NamedTuple):
    """A parameter group, with its entries as users write them, but without tensors as numbers."""

    optimizer: int
    engine: Engine
    group_index: int
    kind: type[Declared]
    entries: dict[str, Any]
    settings: dict[str, Any]  # which distinguish groups
    is_default: bool  # whether it sets nothing itself
    patterns: list[str]  # of names, in its options


class _Grouped(NamedTuple):
    """A parameter in a group, under the name that it has there."""

    name: str
    param: Tensor
    group: _Group
    patterns: list[str]  # those of the group that match it
    choices: dict[str, Any]  # from the group's options, by name
    factor: float  # of ``lr``


def explain(model: Model, optimizer: CompiledOptimizer | Sequence[CompiledOptimizer]) -> Explanation:
    """Report for each parameter which rule updates it, with which numbers, in which precision, and why; warn of mistakes.

    ``print(co.explain(model, opt))``

    It changes nothing and does not wait for a device. Parameters are identified as tensors, not by name. A group says why
    its parameters are there by an entry ``"why"``: a text, or a dict from name to text.

    Args:
        model: a module, or its parameters as ``(name, parameter)`` pairs or as a dict ``name -> parameter``. Without a
            module, embeddings, heads, depthwise filters and flattened weights are not recognized.
        optimizer: an optimizer of this package, or a list of those that update the model together.

    Raises:
        TypeError: an argument has another type than described here.
        ValueError: the list of optimizers is empty, or a choice that was assigned does not fit, as the next step would say.
    """
    listed = listed_parameters(model)
    known = roles(model) if isinstance(model, nn.Module) else {}
    engines = [checked_engine(o, "explain") for o in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])]
    if not engines:
        raise ValueError("the list of optimizers is empty")
    groups = [group for index, engine in enumerate(engines) for group in _groups(engine, index)]
    grouped = [each for group in groups for each in _grouped(group)]
    first: dict[int, _Grouped] = {}
    names_of = {id(entry.tensor): name for name, entry in listed.items()}
    problems: dict[tuple[str, str], dict[str, None]] = {}
    for each in grouped:
        is_shared = first.setdefault(id(each.param), each).group.optimizer != each.group.optimizer
        for problem in _unfit(each, known.get(id(each.param), ""), is_shared):
            problems.setdefault(problem, {})[names_of.get(id(each.param), each.name)] = None
    records = [_record(name, e.names[1:], e.tensor, first.get(id(e.tensor))) for name, e in listed.items()]
    gone = [each for key, each in first.items() if key not in names_of]
    records += [_record(each.name, [], each.param, each) | {"why": "it is not in the model"} for each in gone]
    unowned = {name: e.tensor for name, e in listed.items() if e.tensor.requires_grad and id(e.tensor) not in first}
    others = (*_elsewhere(listed, unowned, gone), *_of_groups(groups), *_unused(listed, groups, grouped))
    findings = [*(Finding(name, tuple(names), evidence) for (name, evidence), names in problems.items()), *others]
    findings += [Finding(*each) for engine in engines for each in engine.trial.findings]
    return Explanation(records, tuple(findings))


def _groups(engine: Engine, optimizer: int) -> Iterator[_Group]:
    groups = engine.groups.distinct
    for index, group in enumerate(groups):
        kind, defaults = inherited(group, engine.kind, engine.groups.defaults, f"param_groups[{index}]")
        defaults = {**kind._added_choices(), **defaults}
        numbers = group.floats(wait=False) if isinstance(group, ParamGroup) else {}
        entries = {**defaults, **dict(dict.items(group)), **numbers}  # a group's own items would wait for the device
        entries |= {h.name: _number(entries[h.name]) for h in kind._declaration.hypers if h.name in entries}
        differ = (value is not None and entries[key] != value for key, value in defaults.items())
        chooses = RULE in group or (len(groups) > 1 and any(differ))  # a schedule may have changed all numbers of one group
        patterns = [pattern for _, pattern in patterns_of(kind._declaration.options, entries)]
        keys = entries.keys() - {"params", "param_names", WHY}
        settings = {key: entries[key] for key in keys if not isinstance(entries[key], Tensor)}
        yield _Group(optimizer, engine, index, kind, entries, settings, not chooses, patterns)


def _number(value: Any) -> Any:
    """Return a hyperparameter without tensors."""
    if isinstance(value, tuple):
        return tuple(map(_number, value))
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.device.type == "cpu" and not is_fake(value) else _Unknown(f"on {value.device}")


def _grouped(group: _Group) -> Iterator[_Grouped]:
    entries, kind, group_index, scales_lr = group.entries, group.kind, group.group_index, group.kind._declaration.scales_lr
    by_short_name = ignores_prefixes(group.engine.groups.listed)
    for index, (name, param) in enumerate(zip(parameter_names(entries, group_index), entries["params"], strict=True)):
        choices, factors = {}, []
        if not is_lazy(param):
            choices = choices_of(kind._declaration.options, entries, group_index, index)
            factors = [lr_scale_of(entries, group_index, index, by_short_name=by_short_name)] if scales_lr else []
            if kind._lr_ratio is not None and param.dim() > 1 and param.numel():
                factors.append(by_name(kind._lr_ratio)({**entries, "shape": param.shape}))
        matched = [pattern for pattern in group.patterns if matches(pattern, [name])]
        yield _Grouped(name, param, group, matched, choices, math.prod(factors))


def _record(name: str, aliases: Sequence[str], param: Tensor, grouped: _Grouped | None) -> dict[str, Any]:
    shape, dtype = None if is_lazy(param) else list(param.shape), str(param.dtype).removeprefix("torch.")
    tensors = [param, gradient(param)] if shape is not None else [None, None]
    record: dict[str, Any] = {"name": name, "aliases": list(aliases), "shape": shape, "dtype": dtype, "precision": dtype}
    record |= dict.fromkeys(("optimizer", "group", "rule", "lr", "weight_decay", "matrices"))
    record |= zip(("parameter_bytes", "gradient_bytes"), (0 if t is None else bytes_of(t) for t in tensors), strict=True)
    record |= {"state_bytes": 0, "why": "no optimizer has it" if param.requires_grad else "it requires no gradient"}
    if grouped is None:
        return record
    group, kind, entries = grouped.group, grouped.group.kind, grouped.group.entries
    state = {n: entry for n, entry in group.engine.state.get(param, {}).items() if isinstance(entry, Tensor)}
    buffers = [state[b.name] for b in kind._declaration.buffers if b.name in state and b.name not in PARTS]
    dtypes = ", ".join(dict.fromkeys(str(b.dtype).removeprefix("torch.") for b in buffers))
    weights, *_ = grouped.choices.get("weights") or ("",)
    why, lr, decay = entries.get(WHY), entries.get("lr"), entries.get("weight_decay")
    why = why.get(grouped.name) if isinstance(why, Mapping) else why
    if kind._granularity == "matrix" and shape is not None and len(shape) > 1:
        count, rows = math.prod(shape[:-2]), grouped.choices.get("split") or (shape[-2],)
        is_even = len(set(rows)) == 1
        record["matrices"] = [count * len(rows), rows[0]] if is_even else [count, "+".join(map(str, rows))]
        record["matrices"].append(shape[-1])
    return record | {
        "optimizer": group.optimizer,
        "group": group.group_index,
        "rule": rule_name(kind),
        "lr": lr * grouped.factor if isinstance(lr, (float, int)) else lr and str(lr),
        "weight_decay": str(decay) if isinstance(decay, str) else decay,
        "precision": " ".join(filter(None, (dtype, weights, dtypes and f"state {dtypes}"))),
        "state_bytes": sum(map(bytes_of, state.values())),
        "why": why or ("default" if group.is_default else "its group"),
    }


def _unfit(grouped: _Grouped, role: str, is_shared: bool) -> Iterator[tuple[str, str]]:
    """Yield name and evidence of findings about a parameter in its group; ``role`` is its use in the model."""
    param, kind = grouped.param, grouped.group.kind
    if is_shared:
        yield "shared", "two optimizers update it"
    if not param.requires_grad and has_declared_entries(kind._declaration, grouped.group.engine.state.get(param, {})):
        yield "frozen", "it requires no gradient, but has state"
    if is_lazy(param):
        return
    if param.numel() == 0 or hasattr(param, "ds_shape") or param.dim() < _DIMENSIONS.get(role, 0):
        yield "placeholder", _PLACEHOLDER
    elif kind._granularity == "matrix" and not grouped.patterns:
        is_known = role in _UNSUITABLE and (role != "bare" or WHY not in grouped.group.entries)
        problem = role if is_known else "axes" if param.dim() > 2 else "narrow"
        if problem != "narrow" or min(param.shape, default=0) < _NARROW:
            yield problem, f"{kind.__name__} {_UNSUITABLE[problem]}"


def _elsewhere(listed: Mapping[str, Listed], unowned: Mapping[str, Tensor], gone: Sequence[_Grouped]) -> Iterator[Finding]:
    """Yield findings about parameters that the model lacks, and about ``unowned`` ones, which no optimizer has."""
    present = {canonical_name(alias): [name] for name, entry in listed.items() for alias in entry.names}
    new: list[str] = []
    for each in gone:
        if "param_names" in each.group.entries:
            new += present.get(canonical_name(each.name), [])
        elif not is_lazy(each.param):
            new += [n for n, p in unowned.items() if not is_lazy(p) and p.shape == each.param.shape and n not in new][:1]
    if gone:
        others = f"other tensors there: {first_few(new)}" if new else "nothing instead"
        yield Finding("replaced", tuple(each.name for each in gone), f"it is not in the model, which has {others}")
    if missing := tuple(name for name in unowned if name not in new):
        yield Finding("missing", missing, "it requires a gradient, and no optimizer has it")


def _of_groups(groups: Sequence[_Group]) -> Iterator[Finding]:
    for engine in dict.fromkeys(group.engine for group in groups):
        name, filled = engine.kind.__name__, [g for g in groups if g.engine is engine and g.entries["params"]]
        if engine.kind._granularity == "matrix" and not any(group.kind._granularity == "matrix" for group in filled):
            yield Finding("matrices", (), f"{name} orthogonalizes nothing: all parameters follow other rules")
        while filled:
            alike = [group for group in filled if group.settings == filled[0].settings]
            filled = [group for group in filled if group.settings != alike[0].settings]
            if len(alike) > 1:
                which = first_few([f"param_groups[{group.group_index}]" for group in alike])
                names = (name for group in alike for name in parameter_names(group.entries, group.group_index))
                yield Finding("groups", tuple(names), f"{which} of {name} have equal settings", "make them one group")


def _unused(listed: Mapping[str, Listed], groups: Sequence[_Group], grouped: Sequence[_Grouped]) -> Iterator[Finding]:
    names = {canonical_name(n) for n in (*(n for e in listed.values() for n in e.names), *(p.name for p in grouped))}
    scales = [g.entries.get(LR_SCALE) for g in groups if g.kind._declaration.scales_lr]
    matched = {pattern for each in grouped for pattern in each.patterns}
    unused = [pattern for group in groups for pattern in group.patterns if pattern not in matched]
    unused += [key for scale in scales if isinstance(scale, Mapping) for key in scale if canonical_name(key) not in names]
    for text in dict.fromkeys(unused):
        yield Finding("pattern", (), f"{text!r} in an option matches no parameter")
