"""A valid checkpoint with one change, for each thing that can be wrong: a message names it, and a load changes nothing."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loading import (
    SHAPE,
    Liar,
    Named,
    Opaque,
    Uncopyable,
    by_name,
    content,
    fake,
    freed,
    model,
    nested,
    quantized,
    train,
    trained,
)
from torch import Tensor, nn

import compiled_optim as co

FORMS = ("indexed", "unnamed", "named", "several")
INDEXED, ALONE = FORMS[:2], FORMS[:3]


class Valid:
    """One or several optimizers with state, and a checkpoint in one of the ``FORMS`` that has other numbers everywhere."""

    def __init__(self, form: str, kind: type[co.CompiledOptimizer] = co.NAdam) -> None:
        first = kind(model("ab").values(), lowering="eager") if form == "unnamed" else trained(kind, steps=0)
        self.optimizers = [first, trained(co.SGD, "c", momentum=0.5)] if form == "several" else [first]
        for optimizer in self.optimizers:
            train(optimizer, 2)
        self._target: Any = self.optimizers if form == "several" else first
        by_names = form in ("named", "several")
        saved = copy.deepcopy(co.named_state_dict(self._target) if by_names else first.state_dict())
        saved["param_groups"][0]["lr"] = 0.7
        for entries in saved["state"].values() if kind is co.NAdam else ():
            entries |= {key: value + 1 for key, value in entries.items()}
        self.saved, self.by_names, self.b = (
            saved,
            by_names,
            "b" if form != "unnamed" else r"param_groups\[0\]\['params'\]\[1\]",
        )

    @property
    def last(self) -> dict[str, Any]:
        """The saved state of ``b``, or all that L-BFGS has."""
        return [*self.saved["state"].values()][min(1, len(self.saved["state"]) - 1)]

    def load(self, saved: Any, **options: Any) -> co.LoadReport:
        if self.by_names:
            return co.load_named_state_dict(self._target, saved, **options)
        return self.optimizers[0].load_state_dict(saved, **options)

    def content(self) -> Any:
        """All that a load may change."""
        beside = [[(k, id(v)) for k, v in o.state.items() if not isinstance(k, Tensor)] for o in self.optimizers]
        return list(map(content, self.optimizers)), beside


class Row(NamedTuple):
    """A message, where ``{b}`` is the second parameter, and the change that it is about.

    ``spoil`` gets the checkpoint, its first group and the state of ``b``. A dict that it returns replaces the checkpoint.
    With ``strict=False``, what ``is_left`` is reported, and the rest is loaded; anything else is an error then too.
    """

    message: str
    spoil: Callable[[Any, Any, Any], Any]
    is_left: bool = False
    forms: tuple[str, ...] = FORMS
    kind: type[co.CompiledOptimizer] = co.NAdam


def _writes(target: int, **values: Any) -> Callable[[Any, Any, Any], Any]:
    """Write entries, or what a function returns for them: a value that no other test has seen."""
    return lambda *parts: parts[target].update({k: v() if callable(v) else v for k, v in values.items()})


top, group, state = (partial(_writes, target) for target in range(3))

NOT_NUMBERS: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.ones(1).to_sparse(), "is a torch.sparse_coo tensor"),
    "nested": (nested, "is a nested tensor"),
    "meta": (lambda: torch.ones((), device="meta"), "is a meta tensor"),
    "fake": (lambda: fake(1), "is a meta tensor"),
    "freed": (lambda: freed(1), "has no memory: its storage is empty or too small"),
    "mkldnn": (lambda: torch.ones(1).to_mkldnn(), "is a torch._mkldnn tensor"),
    "float4": (lambda: torch.zeros((), dtype=torch.float4_e2m1fn_x2), "cannot be read"),
    "opaque": (lambda: Opaque(torch.ones(())), "cannot be read"),
    "complex": (lambda: torch.ones((), dtype=torch.complex64), "is not a number"),
    "of two": (lambda: torch.ones(2), "is not a number"),
    "too small": (lambda: -(10**400), "is too large"),
    "too large": (lambda: 10**400, "is too large"),
    "numpy's complex": (lambda: np.complex128(1 + 2j), "is not a number"),
    "text": (lambda: "1", "is not a number"),
    "list": (lambda: [1.0], "is not a number"),
}
NOT_FINITE = {
    "nan": (lambda: math.nan, "is nan"),
    "inf": (lambda: math.inf, "is inf"),
    "a tensor of nan": (lambda: torch.tensor(math.nan), "is nan"),
}
NOT_BUFFERS: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.ones(SHAPE).to_sparse(), "is a torch.sparse_coo tensor"),
    "nested": (nested, "is a nested tensor"),
    "meta": (lambda: torch.ones(SHAPE, device="meta"), "is a meta tensor"),
    "fake": (lambda: fake(*SHAPE), "is a meta tensor"),
    "freed": (lambda: freed(*SHAPE), "has no memory: its storage is empty or too small"),
    "freed in part": (lambda: freed(*SHAPE, size=20), "has no memory"),
    "freed, a view": (lambda: freed(3, *SHAPE, size=48, view=lambda t: t[2]), "has no memory"),
    "freed, expanded": (lambda: freed(1, view=lambda t: t.expand(SHAPE)), "has no memory"),
    "mkldnn": (lambda: torch.ones(SHAPE).to_mkldnn(), "is a torch._mkldnn tensor"),
    "float4": (lambda: torch.zeros(SHAPE, dtype=torch.float4_e2m1fn_x2), "is torch.float4_e2m1fn_x2"),
    "quantized": (lambda: quantized(*SHAPE), "is torch.qint8"),
    "integer": (lambda: torch.ones(SHAPE, dtype=torch.int32), "is torch.int32"),
    "complex": (lambda: torch.ones(SHAPE, dtype=torch.complex64), "is torch.complex64 instead of torch.float32"),
    "opaque": (lambda: Opaque(torch.ones(SHAPE)), "cannot be read"),
    "uninitialized": (nn.UninitializedParameter, "cannot be read"),
    "number": (lambda: 1.0, "is not a tensor"),
    "text": (lambda: "zeros", "is not a tensor"),
    "reshaped": (lambda: torch.zeros(3, 2), r"has shape \(3, 2\) instead of \(2, 3\)"),
}
NOT_COPIED: dict[str, tuple[Callable[[], Any], str]] = {
    "lock": (threading.Lock, "cannot be copied"),
    "computed": (lambda: torch.ones(2, requires_grad=True) * 2, "cannot be copied"),
    "refuses": (Uncopyable, "cannot be copied"),
    "inside": (lambda: [Uncopyable()], "cannot be copied"),
    "generator": (lambda: (i for i in range(3)), "cannot be copied"),
    "freed": (lambda: freed(2), "has no memory"),
    "freed inside": (lambda: {"it": [freed(2).as_subclass(Named)]}, "has no memory"),
}


STATE = {
    f"{key}, {kind}": Row(f"mismatched: {{b}}: {key} {message}", state(**{key: make}), is_left=True)
    for keys, values in ((("step", "mu_product"), NOT_NUMBERS | NOT_FINITE), (("exp_avg",), NOT_BUFFERS))
    for key in keys
    for kind, (make, message) in values.items()
}
STATE |= {
    "step, negative": Row("mismatched: {b}: step is -1.0", state(step=-1.0), is_left=True),
    "step, absent": Row("{b}: the checkpoint has no step for it", lambda s, g, e: e.pop("step"), is_left=True),
    "exp_avg, absent": Row("{b}: the checkpoint has no exp_avg for it", lambda s, g, e: e.pop("exp_avg"), is_left=True),
    "exp_avg, misspelled": Row("no exp_avg for it", lambda s, g, e: e.update(exp_avg_=e.pop("exp_avg")), is_left=True),
}
"""Of these ``b`` keeps its state, and ``a`` is loaded, where a load is not strict."""

GROUPS = {
    f"{key}, {kind}": Row(rf"{key} of param_groups\[0\] {message}", group(**{key: value}))
    for kind, (make, message) in NOT_NUMBERS.items()
    if kind != "list"
    for key, value in (("momentum_decay", make), ("betas", lambda make=make: (0.5, make())))
}
for kind, (make, message) in NOT_COPIED.items():
    GROUPS[f"hook, {kind}"] = Row(rf"hook of param_groups\[0\] {message}", group(hook=make))
    beside: Any = lambda s, g, e, make=make: s["state"].update(hook=make())  # noqa: E731
    GROUPS[f"state beside, {kind}"] = Row(f"the state of 'hook' {message}", beside, forms=ALONE)
GROUPS |= {
    "an option": Row(r"maximize of param_groups\[0\] is not a number", group(maximize="yes")),
    "an option of others": Row("the checkpoint's caution=True has no counterpart", group(caution=True), is_left=True),
    "no lr": Row(r"param_groups\[0\]: the checkpoint has no lr for it", lambda s, g, e: g.pop("lr"), is_left=True),
    "another rule": Row(r"rule is 'Adam' in the checkpoint, and NAdam here", group(rule="Adam"), is_left=True),
    "state of others": Row("{b}: the optimizer has no kahan_comp for it", state(kahan_comp=torch.ones(SHAPE)), is_left=True),
}


def _deep() -> Any:
    value: Any = ()
    for _ in range(100_000):
        value = (value,)
    return value


class Raising(str):
    """A text whose methods fail."""

    __slots__ = ()

    def _fail(self, *args: Any) -> Any:
        raise KeyError("nothing")

    __hash__ = __repr__ = replace = _fail


class Unread(list[Any]):
    def __iter__(self) -> Any:
        raise KeyError("nothing")


def _second(saved: Any) -> Any:
    return [*saved["state"]][1]


FORM = {
    "no groups": Row("must be a dict with 'state' and 'param_groups'", lambda s, g, e: s.pop("param_groups")),
    "groups in a dict": Row("'param_groups' must be a list and 'state' a dict", top(param_groups={})),
    "a list as group": Row(r"param_groups\[0\] must be a dict with a list 'params'", top(param_groups=[[]])),
    "a number of params": Row(r"param_groups\[0\] must be a dict with a list 'params'", group(params=1)),
    "a state dict as state": Row("its 'state' is a whole state dict", lambda s, g, e: s.update(state={**s})),
    "a list as state": Row(
        "the state of .* must be a dict, got a list", lambda s, g, e: s["state"].update({_second(s): []})
    ),
    "an alias of a number": Row("'aliases' must be a dict name -> name, got a dict", top(aliases={"c": 1})),
    "a later version": Row("format_version 99; this release reads up to 1", top(format_version=99)),
    "a deep version": Row("format_version .*a tuple", top(format_version=_deep)),
    "a large version": Row("format_version a int", top(format_version=10**6000)),
    "a freed version": Row("format_version a Tensor", top(format_version=lambda: freed(1))),
    "a deep index": Row(r"params'\] must be integers or names", group(params=lambda: [_deep()])),
    "a tensor as index": Row("must be integers or names", group(params=lambda: [freed(1)] * 2)),
    "a nameless entry": Row("must have names, got 7", lambda s, g, e: g.update({7: 1.0})),
    "a large index, twice": Row("lists parameter a int twice", group(params=[10**6000] * 2), forms=INDEXED),
    "an index, twice": Row("the checkpoint lists parameter 0 twice", group(params=[0, 0]), forms=INDEXED),
    "an index and True": Row("the checkpoint lists parameter 1 twice", group(params=[1, True]), forms=INDEXED),
    "a name, twice": Row("names parameter 'b' twice", group(params=["b", "b"])),
    "a name for two": Row("names parameter 'b' twice", group(param_names=["b", "b"]), forms=INDEXED),
    "an alias for two": Row("names parameter 'b' twice", top(aliases={"b": "a"}), forms=("indexed", "named", "several")),
    "few names": Row(r"param_groups\[0\] has 2 params but 1 param_names", group(param_names=["a"]), forms=INDEXED),
    "a number as name": Row("must be a list of names, got a list", group(param_names=["a", 1]), forms=INDEXED),
    "another name": Row("missing: b; unexpected: c", group(param_names=["a", "c"]), is_left=True, forms=INDEXED[:1]),
    "a text that fails": Row("missing: a; unexpected: x", group(param_names=[Raising("x"), "b"]), True, INDEXED[:1]),
    "a text that fails, twice": Row("names parameter 'x' twice", group(param_names=[Raising("x")] * 2), forms=INDEXED),
    "names that fail": Row(r"param_names'\] cannot be read", group(param_names=Unread("ab")), forms=INDEXED),
    "numbers that fail": Row(r"betas of param_groups\[0\] cannot be read", group(betas=Unread([0.5, 0.5]))),
    "a lying state dict": Row("the state dict cannot be read", lambda s, g, e: Liar(s)),
    "a lying group": Row(r"param_groups\[0\] cannot be read", top(param_groups=[Liar({"params": [0]})])),
    "lying aliases": Row("'aliases' cannot be read", top(aliases=Liar({"c": "a"}))),
    "lying states": Row("'state' cannot be read", lambda s, g, e: s.update(state=Liar(s["state"]))),
    "a lying state": Row("the state of .* cannot be read", lambda s, g, e: s["state"].update({_second(s): Liar(e)})),
    "state of no parameter": Row("unexpected: the state of 'c'", lambda s, g, e: s["state"].update(c=e), True, ALONE),
}
for key in ("aliases", "state", "param_groups"):
    itself: Any = lambda s, g, e, key=key: s.update({key: s})  # noqa: E731
    FORM[f"{key} of itself"] = Row("must be|not an optimizer state dict", itself)
for message, rename in {"'0'": str, "a Tensor": torch.tensor, "7": lambda key: key + 7}.items():
    renamed: Any = lambda s, g, e, rename=rename: s.update(state={rename(k): v for k, v in s["state"].items()})  # noqa: E731
    FORM[f"state under {message}"] = Row(f"unexpected: the state of {message}", renamed, is_left=True, forms=INDEXED)

LBFGS = {
    "n_iter of the checkpoint is a nested tensor": state(n_iter=nested),
    "n_iter of the checkpoint is not a number": state(n_iter=torch.ones(2)),
    "n_iter of the checkpoint is 1.5, not a count": state(n_iter=1.5),
    "func_evals of the checkpoint is -1.0, not a count": state(func_evals=-1),
    "func_evals of the checkpoint is .*e.21, not a count": state(func_evals=2**70),
    "func_evals of the checkpoint is inf": state(func_evals=math.inf),
    "prev_loss of the checkpoint is too large": state(prev_loss=-(10**400)),
    "H_diag of the checkpoint has no memory": state(H_diag=lambda: freed(1)),
    "d of the checkpoint is a torch._mkldnn tensor": state(d=lambda: torch.ones(12).to_mkldnn()),
    "d of the checkpoint has no memory": state(d=lambda: freed(12)),
    "d of the checkpoint is torch.complex64 instead of": state(d=torch.ones(12) * 1j),
    "old_dirs of the checkpoint is not a list": state(old_dirs=1.0),
    "old_dirs of the checkpoint is not a tensor": state(old_dirs=[1.0]),
    "the state of the checkpoint cannot be read": state(exact=1.5),
    "the checkpoint has no products": lambda s, g, e: e["exact"].pop("products"),
    r"products has shape \(7, 7\) instead of": lambda s, g, e: e["exact"].update(products=torch.ones(7, 7)),
    "pairs of the checkpoint is nan": lambda s, g, e: e["exact"].update(pairs=math.nan),
}
OF_LBFGS = {message: Row(message, spoil, forms=INDEXED, kind=co.LBFGS) for message, spoil in LBFGS.items()}
for shared in ("a later version", "a deep index", "an index, twice", "state of no parameter", "state under '0'"):
    OF_LBFGS[shared] = FORM[shared]._replace(kind=co.LBFGS, forms=INDEXED[:1])
ROWS = {
    f"{part}: {name}": row
    for part, rows in {"state": STATE, "groups": GROUPS, "form": FORM, "LBFGS": OF_LBFGS}.items()
    for name, row in rows.items()
}
CASES = [pytest.param(name, form, id=f"{name}-{form}") for name, row in ROWS.items() for form in row.forms]


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [co.NAdam, co.LBFGS])
def test_without_a_change_it_is_loaded(kind: type[co.CompiledOptimizer], form: str) -> None:
    if kind is co.LBFGS and form not in INDEXED:
        form = "indexed"
    valid = Valid(form, kind)
    before = valid.content()
    assert not any(valid.load(valid.saved))
    assert valid.content() != before
    assert valid.optimizers[0].hyperparameters()[0]["lr"] == 0.7
    if kind is co.NAdam:
        loaded = [*by_name(valid.optimizers[0]).values()][1]
        assert all(torch.equal(loaded[key], torch.as_tensor(value)) for key, value in valid.last.items())


@pytest.mark.quick
@pytest.mark.parametrize(("name", "form"), CASES)
def test_is_refused_and_changes_nothing(name: str, form: str) -> None:
    row = ROWS[name]
    valid = Valid(form, row.kind)
    saved = row.spoil(valid.saved, valid.saved["param_groups"][0], valid.last)
    saved = saved if isinstance(saved, (dict, Liar)) else valid.saved
    before, message = valid.content(), row.message.replace("{b}", valid.b)
    for strict in (True,) if row.is_left else (True, False):
        with pytest.raises((ValueError, TypeError), match=message):
            valid.load(saved, strict=strict)
        assert valid.content() == before
    if row.is_left:
        assert any(valid.load(saved, strict=False)[:3])
    for optimizer in valid.optimizers:
        train(optimizer)


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STATE)
def test_a_parameter_keeps_its_whole_state_and_others_are_loaded(name: str, form: str) -> None:
    valid = Valid(form)
    expected = copy.deepcopy(next(iter(valid.saved["state"].values())))
    STATE[name].spoil(valid.saved, valid.saved["param_groups"][0], valid.last)
    kept = copy.deepcopy([*by_name(valid.optimizers[0]).values()][1])
    (problem,) = valid.load(valid.saved, strict=False).mismatched
    assert problem.startswith(valid.b.replace("\\", "") + ": ")
    a, b = by_name(valid.optimizers[0]).values()
    assert all(torch.equal(a[key], torch.as_tensor(value)) for key, value in expected.items())
    assert all(torch.equal(b[key], value) for key, value in kept.items())


def test_honest_mappings_and_tuples_are_loaded() -> None:
    valid, view = Valid("indexed"), MappingProxyType
    groups = tuple(view({**g, "params": tuple(g["params"])}) for g in valid.saved["param_groups"])
    state = view({key: view(entries) for key, entries in valid.saved["state"].items()})
    assert not any(valid.load(view({**valid.saved, "state": state, "param_groups": groups})))
    assert torch.equal(by_name(valid.optimizers[0])["b"]["exp_avg"], valid.last["exp_avg"])
