"""What the parameters of a model get from their optimizers, and why; and what in that is probably a mistake."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from compiled_optim.groups.param_group import ParamGroup, inherited, rule_of
from compiled_optim.groups.parameters import canonical_name, first_three, matches, parameter_names
from compiled_optim.groups.per_parameter import ignores_prefixes, number_of
from compiled_optim.memory.addresses import gradient
from compiled_optim.memory.torch_internals import is_fake
from compiled_optim.model import Listed, Model, listed_parameters, roles
from compiled_optim.optimizer import CompiledOptimizer
from compiled_optim.report import bytes_of, checked_engine
from compiled_optim.rule.declared import Declared
from compiled_optim.rule.fields import Hyper, Scale
from compiled_optim.rule.rule import RULE, WHY, ByName
from compiled_optim.rule.storage import PARTS
from compiled_optim.state import has_own_entries
from compiled_optim.step.engine import Engine

_Found: TypeAlias = Iterator[tuple[str, str, Sequence[str]]]  # the kind, message and names of findings
_COLUMNS = ("name", "shape", "precision", "optimizer", "group", "rule", "lr", "decay", "bytes", "matrices", "why")
_NARROW = 8  # a matrix with a shorter side is narrow
_DIMENSIONS = {"embedding": 2, "head": 2, "linear": 2, "depthwise": 3, "convolution": 3}  # at least, by a weight's role
_MISPLACED = {
    "embedding": "orthogonalizes an embedding, whose rows are apart from each other",
    "head": "orthogonalizes the last linear map, and is for hidden ones",
    "depthwise": "orthogonalizes filters for one channel each, which are no matrix",
    "bare": "orthogonalizes a matrix that is not called a weight, and may be a table of something else",
    "axes": "orthogonalizes more than 2 dimensions, and no pattern in an option says what they are",
    "narrow": f"orthogonalizes a matrix with a side below {_NARROW}, and makes the noise in it as large as the rest",
}
_PLACEHOLDER = "it has no elements or fewer dimensions than its module makes: it was flattened, or the weight is elsewhere"


class Finding(NamedTuple):
    """What is probably a mistake.

    Attributes:
        kind: ``embedding``, ``head``, ``depthwise``, ``bare``, ``axes`` or ``narrow`` where a rule for matrices has the
            parameters; ``placeholder``, ``missing``, ``replaced``, ``shared``, ``frozen``, ``pattern``, ``groups`` or
            ``matrices``.
        names: the parameters; none for a pattern, nor for a rule for matrices that has none.
        message: what is wrong.
    """

    kind: str
    names: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"warning ({self.kind}): {f'{first_three(self.names)}: ' if self.names else ''}{self.message}"


@dataclass(frozen=True)
class Explanation:
    """What each parameter gets. ``str`` makes a table, and rich shows one of its own.

    Attributes:
        records: a dict for each parameter, the model's first. JSON can hold them, ``pandas.DataFrame`` takes them. They have
            ``name``, ``aliases`` (further names of a tied one), ``shape`` (None if it is lazy) and ``dtype``; ``optimizer``
            and ``group``, counted from 0, and ``rule``, a class name, all None where no optimizer has it; ``lr``, times
            ``lr_scale`` and what the rule makes of the shape, and ``weight_decay``: a number, or ``"on cuda:0"`` where only
            that device knows it; ``precision``, the dtypes of weight and state and what ``weights=`` does; this process's
            ``parameter_bytes``, ``gradient_bytes`` and ``state_bytes``, as in ``co.memory_report``; ``matrices``, the
            number, rows and columns of those that a step orthogonalizes, or None, with rows like ``"8+4"`` where ``split``
            makes uneven parts; and ``why`` it is in its group.
        warnings: what is probably a mistake.
    """

    records: list[dict[str, Any]]
    warnings: tuple[Finding, ...]

    def _table(self) -> list[tuple[str, ...]]:
        """The rows of a table, the head first, without empty columns."""
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
        return "\n".join([*lines, *map(str, self.warnings)])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        head, *rows = self._table() or [()]
        table = Table(*head)
        for row in rows:
            table.add_row(*map(Text, row))  # whose brackets are no markup
        return Group(table, *(Text(str(finding), style="yellow") for finding in self.warnings))


class _Unknown(str):
    """What stands for a number that only a device knows. It equals no other one."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class _Group(NamedTuple):
    """A parameter group, with its entries as users write them, but without tensors as numbers."""

    optimizer: int
    engine: Engine
    place: int
    kind: type[Declared]
    entries: dict[str, Any]
    is_default: bool  # whether it chooses nothing itself


class _Placed(NamedTuple):
    """A parameter in a group, under the name that it has there."""

    name: str
    param: Tensor
    group: _Group
    weights: str  # how bits that its dtype lacks are stored; empty where they are not
    parts: tuple[int, ...]  # the rows of the matrices in it, where it holds several; else empty
    is_named: bool  # whether a pattern in an option matches it
    factor: float  # of ``lr``

    @property
    def is_matrix(self) -> bool:
        return self.group.kind._granularity == "matrix" and not is_lazy(self.param)


def explain(model: Model, optimizer: CompiledOptimizer | Sequence[CompiledOptimizer]) -> Explanation:
    """Say of each parameter which rule updates it, with which numbers, in which precision, and why; warn of mistakes.

    ``print(co.explain(model, opt))``

    It changes nothing and does not wait for a device. Parameters are told apart as tensors, not by name. A group says why
    its parameters are there by an entry ``"why"``: a text, or a dict from name to text.

    Args:
        model: a module, or its parameters as ``(name, parameter)`` pairs or as a dict ``name -> parameter``. Without a
            module, nothing tells embeddings, heads, depthwise filters and flattened weights.
        optimizer: an optimizer of this package, or a list of those that update the model together.

    Raises:
        TypeError: something is not of the type that is said here.
        ValueError: the list of optimizers is empty, or a choice that was assigned does not fit, as the next step would say.
    """
    listed = listed_parameters(model)
    known = roles(model) if isinstance(model, nn.Module) else {}
    engines = [checked_engine(o, "explain") for o in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])]
    if not engines:
        raise ValueError("the list of optimizers is empty")
    groups = [group for index, engine in enumerate(engines) for group in _groups(engine, index)]
    used: dict[str, bool] = {}
    placed = [each for group in groups for each in _placed(group, used)]
    first = {id(each.param): each for each in reversed(placed)}
    own = {id(entry.tensor): name for name, entry in listed.items()}
    records = [_record(name, e.names[1:], e.tensor, first.get(id(e.tensor))) for name, e in listed.items()]
    others = [p for key, p in first.items() if key not in own][::-1]
    records += [_record(p.name, [], p.param, p) | {"why": "it is not in the model"} for p in others]
    names = {canonical_name(n) for n in (*(n for e in listed.values() for n in e.names), *(p.name for p in placed))}
    scales = [group.entries.get(scale.name) for group in groups for scale in group.kind._fields_of(Scale)]
    used |= {key: canonical_name(key) in names for scale in scales if isinstance(scale, Mapping) for key in scale}
    found: dict[tuple[str, str], dict[str, None]] = {}
    for kind, message, concerned in (
        *_unfit([(own.get(id(p.param), p.name), known.get(id(p.param), ""), p) for p in placed]),
        *_elsewhere(listed, placed),
        *_of_groups(groups),
        *[("pattern", f"{text!r} in an option matches no parameter", ()) for text, is_used in used.items() if not is_used],
    ):
        found.setdefault((kind, message), {}).update(dict.fromkeys(concerned))
    return Explanation(records, tuple(Finding(kind, tuple(which), message) for (kind, message), which in found.items()))


def _groups(engine: Engine, optimizer: int) -> Iterator[_Group]:
    groups = engine.distinct_groups
    for place, group in enumerate(groups):
        kind = rule_of(group, engine.kind, f"param_groups[{place}]")
        defaults = {**kind._added_choices(), **inherited(kind, engine.kind, engine.defaults, f"param_groups[{place}]")}
        known = group.known() if isinstance(group, ParamGroup) else {}
        entries = {**defaults, **dict(dict.items(group)), **known}  # a group itself would ask the device
        entries |= {h.name: _number(entries[h.name]) for h in kind._fields_of(Hyper) if h.name in entries}
        differ = (value is not None and entries[key] != value for key, value in defaults.items())
        is_own = RULE in group or (len(groups) > 1 and any(differ))  # a schedule may have changed all numbers of one group
        yield _Group(optimizer, engine, place, kind, entries, is_default=not is_own)


def _number(value: Any) -> Any:
    """A hyperparameter without tensors."""
    if isinstance(value, tuple):
        return tuple(map(_number, value))
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.device.type == "cpu" and not is_fake(value) else _Unknown(f"on {value.device}")


def _placed(group: _Group, used: dict[str, bool]) -> Iterator[_Placed]:
    """The parameters of a group; notes in ``used`` which patterns of its options match one of them."""
    entries, kind, scales = group.entries, group.kind, group.kind._fields_of(Scale)
    by_short_name = ignores_prefixes(scales, group.engine.groups)
    for place, (name, param) in enumerate(zip(parameter_names(entries, group.place), entries["params"], strict=True)):
        if is_lazy(param):
            yield _Placed(name, param, group, "", (), False, 1.0)
            continue
        factors = [number_of(s, entries, group.place, place, by_short_name=by_short_name) for s in scales]
        if kind._lr_ratio is not None and param.dim() > 1 and param.numel():
            factors.append(ByName(kind._lr_ratio)({**entries, "shape": param.shape}))
        yield _Placed(name, param, group, *_chosen(group, name, param, used), math.prod(factors))


def _chosen(group: _Group, name: str, param: Tensor, used: dict[str, bool]) -> tuple[str, tuple[int, ...], bool]:
    """How a group's options store and split a parameter, and whether one of their patterns matches its name."""
    fitting: set[str] = set()

    def is_matched(patterns: Sequence[str]) -> bool:
        found = {pattern for pattern in patterns if matches(pattern, [name])}
        fitting.update(found)
        used.update({pattern: used.get(pattern, False) or pattern in found for pattern in patterns})
        return bool(found)

    weights, parts = "", ()
    for option in group.kind._declaration.options:
        if option.of is not None:
            choice = option.of(group.entries, is_matched, param, f"'{name}'")
            weights = choice[0] if option.name == "weights" and choice else weights
            parts = choice if option.name == "split" and choice else parts
        elif isinstance(listed := group.entries.get(option.name), (tuple, list)):
            is_matched([pattern for pattern in listed if isinstance(pattern, str)])
    return weights, parts, bool(fitting)


def _record(name: str, aliases: Sequence[str], param: Tensor, placed: _Placed | None) -> dict[str, Any]:
    shape, dtype = None if is_lazy(param) else list(param.shape), str(param.dtype).removeprefix("torch.")
    grad = None if shape is None else gradient(param)
    record: dict[str, Any] = {"name": name, "aliases": list(aliases), "shape": shape, "dtype": dtype, "precision": dtype}
    record |= dict.fromkeys(("optimizer", "group", "rule", "lr", "weight_decay", "matrices"))
    sizes = [0 if t is None or shape is None else bytes_of(t) for t in (param, grad)]
    record |= {"parameter_bytes": sizes[0], "gradient_bytes": sizes[1], "state_bytes": 0}
    record["why"] = "no optimizer has it" if param.requires_grad else "it requires no gradient"
    if placed is None:
        return record
    optimizer, engine, group, kind, entries, is_default = placed.group
    state = {n: entry for n, entry in engine.state.get(param, {}).items() if isinstance(entry, Tensor)}
    buffers = [state[b.name] for b in kind._declaration.buffers if b.name in state and b.name not in PARTS]
    dtypes = ", ".join(dict.fromkeys(str(b.dtype).removeprefix("torch.") for b in buffers))
    why, lr, decay = entries.get(WHY), entries.get("lr"), entries.get("weight_decay")
    why = why.get(placed.name) if isinstance(why, Mapping) else why
    if placed.is_matrix and shape is not None and len(shape) > 1:
        count, rows = math.prod(shape[:-2]), placed.parts or (shape[-2],)
        is_even = len(set(rows)) == 1
        record["matrices"] = [
            count * len(rows) if is_even else count,
            rows[0] if is_even else "+".join(map(str, rows)),
            shape[-1],
        ]
    return record | {
        "optimizer": optimizer,
        "group": group,
        "rule": next((base.__name__ for base in kind.__mro__ if "update" in vars(base)), kind.__name__),
        "lr": lr * placed.factor if isinstance(lr, (float, int)) else lr and str(lr),
        "weight_decay": str(decay) if isinstance(decay, str) else decay,
        "precision": " ".join(filter(None, (dtype, placed.weights, dtypes and f"state {dtypes}"))),
        "state_bytes": sum(map(bytes_of, state.values())),
        "why": why or ("default" if is_default else "its group"),
    }


def _unfit(placed: Sequence[tuple[str, str, _Placed]]) -> _Found:
    """Findings about parameters in their groups, each with the model's name and its role."""
    for name, role, each in placed:
        param, kind = each.param, each.group.kind
        if not param.requires_grad and has_own_entries(kind._declaration, each.group.engine.state.get(param, {})):
            yield "frozen", "it requires no gradient, but has state", [name]
        if is_lazy(param):
            continue
        if param.numel() == 0 or hasattr(param, "ds_shape") or param.dim() < _DIMENSIONS.get(role, 0):
            yield "placeholder", _PLACEHOLDER, [name]
        elif each.is_matrix and not each.is_named:
            is_narrow = min(param.shape, default=0) < _NARROW
            found = role if role in _MISPLACED else "axes" if param.dim() > 2 else "narrow" if is_narrow else ""
            if found:
                yield found, f"{kind.__name__} {_MISPLACED[found]}", [name]


def _elsewhere(listed: Mapping[str, Listed], placed: Sequence[_Placed]) -> _Found:
    """Findings about parameters that no optimizer has, that two have, and that the model lacks."""
    own = {id(entry.tensor): name for name, entry in listed.items()}
    first: dict[int, _Placed] = {}
    for each in placed:
        if first.setdefault(id(each.param), each).group.optimizer != each.group.optimizer:
            yield "shared", "two optimizers update it", [own.get(id(each.param), each.name)]
    left = {n: entry.tensor for n, entry in listed.items() if id(entry.tensor) not in first and entry.tensor.requires_grad}
    present = {canonical_name(alias): [name] for name, entry in listed.items() for alias in entry.names}
    gone = [each for key, each in first.items() if key not in own]
    now: list[str] = []
    for each in gone:
        if "param_names" in each.group.entries:
            now += present.get(canonical_name(each.name), [])
        elif not is_lazy(each.param):
            now += [n for n, p in left.items() if not is_lazy(p) and p.shape == each.param.shape and n not in now][:1]
    if gone:
        there = f"other tensors there: {first_three(now)}" if now else "nothing in its place"
        yield "replaced", f"it is not in the model, which has {there}", [each.name for each in gone]
    if missing := [name for name in left if name not in now]:
        yield "missing", "it requires a gradient, and no optimizer has it", missing


def _of_groups(groups: Sequence[_Group]) -> _Found:
    for engine in dict.fromkeys(group.engine for group in groups):
        filled = [group for group in groups if group.engine is engine and group.entries["params"]]
        if engine.kind._granularity == "matrix" and not any(group.kind._granularity == "matrix" for group in filled):
            yield "matrices", f"{engine.kind.__name__} orthogonalizes nothing: all parameters follow other rules", ()
        alike: list[tuple[dict[str, Any], list[_Group]]] = []
        for group in filled:
            told = {k: v for k, v in group.entries.items() if k not in ("params", "param_names", WHY)}
            told = {"kind": group.kind} | {k: v for k, v in told.items() if not isinstance(v, Tensor)}
            equals = next((groups for settings, groups in alike if settings == told), None)
            equals.append(group) if equals is not None else alike.append((told, [group]))
        for equals in (groups for _, groups in alike if len(groups) > 1):
            which = first_three([f"param_groups[{group.place}]" for group in equals])
            names = [name for group in equals for name in parameter_names(group.entries, group.place)]
            yield "groups", f"{which} of {engine.kind.__name__} have equal settings, and could be one group", names
