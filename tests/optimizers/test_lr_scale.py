"""A factor of the learning rate for each parameter, against groups of one parameter with their own learning rates."""

from __future__ import annotations

import copy
import functools
import math
import operator
import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, Case, configurations, copies, parameters, registry, relative_error, wide_scalars
from round_trips import pickled, through_a_file
from simulated_graph import install
from small_training import needs
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

import compiled_optim as co
from compiled_optim.groups import group_list
from compiled_optim.groups.per_parameter import ByName, check_names
from compiled_optim.optimizer import engine_of

SCALED = [c for c in registry() if hasattr(c, "_rule")]
FAR = [configurations(c)[1] for c in SCALED]
CHOSEN = [c for kind in (co.AdamW, co.SGD) for c in configurations(kind) if c.kwargs.keys() & {"cautious", "decouple_lr"}]
# Coefficients come from a kernel or from torch operations, which the lowerings "inductor" and "eager" share.
WAYS = [(case, lowering) for case in [*FAR, *CHOSEN] for lowering in ("multi_tensor", "eager")]
WAYS += [(case, "inductor") for case in FAR if case.optimizer in (co.AdamW, co.SparseAdam, co.Adafactor)]


def _scale(index: int) -> float:
    return (0.5, 3.0, 0.0, 1.0, 0.07)[index % 5]


def _parameters(case: Case, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    if case.optimizer._granularity == "matrix":
        shapes = [(3, 5), (3, 5), (5, 3), (20, 50), (3, 5), (8, 8)]
        return [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return case.parameters(dtype)


def _named(params: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    return {f"p{i}": param for i, param in enumerate(params)}


def _alone(params: list[nn.Parameter], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Groups of one parameter each, as every other package does it."""
    rates = [(name, options[name]) for name in ("lr", "max_lr") if name in options]
    return [{"params": [p], **{name: rate * _scale(i) for name, rate in rates}} for i, p in enumerate(params)]


def _train(case: Case, ours: list[Any], theirs: list[Any], optimizer: Any, reference: Any, steps: int = 6) -> None:
    """Steps under a schedule; gradients are absent now and then."""
    lr = optimizer.hyperparameters()[0]["lr"]
    for step in range(steps):
        case.give_gradients(ours, theirs, step, absent=3 if step % 2 else 0)
        now = lr * (1 - 0.1 * step)
        for group in optimizer.param_groups:
            group["lr"] = now
        for i, group in enumerate(reference.param_groups):
            group["lr"] = now * _scale(i)
            for twin in group["params"]:
                if not twin.numel():  # by whose number of elements torch.optim.Adafactor divides
                    twin.grad = None
        optimizer.step()
        with wide_scalars():
            reference.step()


@pytest.mark.parametrize(("case", "lowering"), WAYS, ids=str)
def test_equals_groups_of_torch(case: Case, lowering: str) -> None:
    ours = _parameters(case)
    theirs = copies(ours, ours[0].dtype)
    start = [p.detach().clone() for p in ours]
    scales = {f"p{i}": _scale(i) for i in range(len(ours))}
    optimizer = case.optimizer(_named(ours), lowering=lowering, lr_scale=scales, **case.kwargs)
    assert len(engine_of(optimizer).step.lowerings) == (2 if case.optimizer is co.Adafactor else 1)  # matrices and others
    with wide_scalars():
        reference = case.reference(_alone(theirs, case.kwargs), **case.kwargs)
    _train(case, ours, theirs, optimizer, reference)
    if case.optimizer._granularity != "matrix":
        assert relative_error(ours, theirs) < 1e-13
        return
    for param, twin, begin in zip(ours, theirs, start, strict=True):  # whose products are in bfloat16
        assert (param - twin).norm() <= 0.05 * (twin - begin).norm()


@pytest.mark.parametrize("case", FAR, ids=str)
def test_equals_our_own_groups(case: Case) -> None:
    """Bit for bit: scaled learning rates are products in float64, wherever they are multiplied."""
    ours = _parameters(case)
    theirs = copies(ours, ours[0].dtype)
    places = {param: i for i, param in enumerate(ours)}
    optimizer = case.optimizer(ours, lr_scale=lambda name, param: _scale(places[param]), **case.kwargs)
    reference = case.optimizer(_alone(theirs, case.kwargs), **case.kwargs)
    _train(case, ours, theirs, optimizer, reference)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_without_scales_nothing_changes(lowering: str) -> None:
    """Bit for bit, as with a scale of 1."""
    results = []
    for options in ({}, {"lr_scale": {}}, {"lr_scale": lambda name, param: 1}):
        params = parameters(torch.float32)
        optimizer = co.AdamW(_named(params), lr=0.0371, weight_decay=0.3, lowering=lowering, **options)
        assert ("lr_scale" in optimizer.param_groups[0]) == bool(options)
        for step in range(3):
            Case(co.AdamW, ()).give_gradients(params, params, step)
            optimizer.step()
        results.append(params)
    assert all(torch.equal(p, q) for other in results[1:] for p, q in zip(results[0], other, strict=True))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_groups_clipping_schedules_and_directions(lowering: str) -> None:
    ours = [p for p in parameters(torch.float64) if p.numel()]
    theirs = copies(ours, torch.float64)
    options = {"betas": (0.6, 0.8), "weight_decay": 0.4}
    half = len(ours) // 2
    groups = [
        {"params": ours[:half], "lr": 0.3, "maximize": True},
        {"params": ours[half:], "lr": 0.01, "lr_scale": lambda name, param: 4.0},
    ]
    common = {"lr_scale": lambda name, param: 2.0 + param.dim(), "lowering": lowering, "max_grad_norm": 0.7}
    optimizer = co.AdamW(groups, **common, **options)
    alone = [{"params": [p], "lr": 0.3 * (2.0 + p.dim()), "maximize": True} for p in theirs[:half]]
    reference = torch.optim.AdamW([*alone, {"params": theirs[half:], "lr": 0.04}], **options)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 12) for o in (optimizer, reference)]
    for step in range(8):
        Case(co.AdamW, ()).give_gradients(ours, theirs, step)
        torch.nn.utils.clip_grad_norm_(theirs, 0.7)
        for side in (optimizer, reference, *schedulers):
            side.step()
    assert relative_error(ours, theirs) < 1e-13


def test_schedules_of_the_step_are_scaled() -> None:
    param, twin = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = co.SGD({"a": param}, lr_scale={"a": 0.5})
    optimizer.schedule(lr=lambda step: 0.1 * step)
    reference = torch.optim.SGD([twin])
    for step in range(1, 4):
        param.grad = twin.grad = torch.ones(3)
        reference.param_groups[0]["lr"] = 0.1 * step * 0.5
        optimizer.step()
        reference.step()
    torch.testing.assert_close(param, twin)


def test_a_differentiable_step() -> None:
    """The derivative by a learning rate is that of the scaled one, times the scale."""
    start, grad = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    found = []
    for lr, options in ((0.1, {"lr_scale": {"a": 3.0}}), (0.3, {})):
        rate = torch.tensor(lr, dtype=torch.float64, requires_grad=True)
        param = start.clone()
        param.grad = grad
        co.SGD([("a", param)], lr=rate, differentiable=True, **options).step()
        param.square().sum().backward()
        found.append(rate.grad)
    torch.testing.assert_close(found[0], 3 * found[1])


class TestOnePlan:
    def test_of_300_scales(self) -> None:
        params = {f"p{i}": nn.Parameter(torch.ones(3)) for i in range(300)}
        scales = {name: 1 / (1 + i) for i, name in enumerate(params)}
        optimizer = co.SGD(params, lr=0.5, lr_scale=scales)
        for param in params.values():
            param.grad = torch.ones(3)
        optimizer.step()
        (lowering,) = engine_of(optimizer).step.lowerings
        assert (len(optimizer.param_groups), len(lowering.plan.members), len(lowering.tables)) == (1, 300, 1)
        assert all(torch.equal(p, torch.full((3,), 1 - 0.5 * scales[n])) for n, p in params.items())

    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_a_change_compiles_nothing(self, lowering: str) -> None:
        """It takes effect at the next step, and moves no state and no hyperparameter."""
        params = _named(parameters(torch.float32))
        optimizer = co.AdamW(params, lr=0.1, lowering=lowering, lr_scale={"p0": 0.5})
        live = optimizer.hyperparameter("lr")
        for step, chosen in enumerate([None, {"p0": 0.0}, lambda name, param: float(name == "p1"), {}, None]):
            Case(co.AdamW, ()).give_gradients([*params.values()], [*params.values()], step)
            if step:
                optimizer.param_groups[0]["lr_scale"] = chosen
            before = {name: p.detach().clone() for name, p in params.items()}
            with co.no_recompiles() if step else torch.enable_grad():
                optimizer.step()
            kept = {n for n, p in params.items() if p.numel() and torch.equal(p, before[n])}
            frozen = [set(), {"p0"}, {n for n, p in params.items() if p.numel() and n != "p1"}, set(), set()]
            assert kept == frozen[step]
        assert optimizer.hyperparameter("lr") is live

    def test_in_a_compiled_step(self) -> None:
        param = nn.Parameter(torch.ones(2))
        optimizer = co.SGD({"a": param}, lr=1.0, lr_scale={"a": 0.5})

        @torch.compile(fullgraph=True, backend="eager")
        def step() -> None:
            optimizer.step()

        for expected, chosen in [(0.5, {"a": 0.25}), (0.25, lambda name, p: 0.125), (0.125, None), (-0.875, None)]:
            param.grad = torch.ones(2)
            with co.no_recompiles() if expected < 0.5 else torch.enable_grad():
                step()
            assert param.tolist() == [expected] * 2
            optimizer.param_groups[0]["lr_scale"] = chosen

    def test_in_a_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A graph is captured again for another scale, and never replayed with the old one."""
        install(monkeypatch)
        param = nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        optimizer = co.SGD({"a": param}, lr=1.0, lr_scale={"a": 0.5})
        with co.CUDAGraphRunner(optimizer, warmup=1) as runner:
            for step in range(8):
                if step == 5:
                    optimizer.param_groups[0]["lr_scale"] = {"a": 2.0}
                before = param.detach().clone()
                runner.step()
                assert (before - param).tolist() == [0.5 if step < 5 else 2.0] * 2
        assert co.compile_report(optimizer).captures == ("", "param_groups[0]['lr_scale'] was written")


class TestWhoIsAsked:
    def test_names_and_parameters(self) -> None:
        seen: dict[Any, Tensor] = {}
        params = [nn.Parameter(torch.ones(2)) for _ in range(3)]

        def scale(name: str | None, param: Tensor) -> int:
            seen[name] = param
            return 1

        optimizer = co.SGD(zip("ab", params[:2], strict=True), lr_scale=scale)
        assert list(seen) == ["a", "b"]
        assert all(seen[name] is param for name, param in zip("ab", params[:2], strict=True))
        optimizer.add_param_group({"params": {"c": params[2]}})
        assert seen["c"] is params[2]
        assert optimizer.param_groups[1]["lr_scale"] is scale
        seen.clear()
        co.SGD(params[:1], lr_scale=scale)
        assert list(seen) == [None]

    def test_a_group_of_its_own(self) -> None:
        a, b, c, d = (nn.Parameter(torch.ones(1)) for _ in range(4))
        optimizer = co.SGD([{"params": {"a": a}}, {"params": {"b": b}, "lr_scale": None}], lr=1.0, lr_scale=lambda n, p: 0.5)
        optimizer.add_param_group({"params": {"c": c}, "lr_scale": {"c": 0.25}})
        optimizer.add_param_group({"params": {"d": d}})
        for param in (a, b, c, d):
            param.grad = torch.ones(1)
        optimizer.step()
        assert [p.item() for p in (a, b, c, d)] == [0.5, 0.0, 0.75, 0.5]

    def test_edited_groups_and_frozen_parameters(self) -> None:
        a, b = (nn.Parameter(torch.ones(1), requires_grad=flag) for flag in (True, False))
        optimizer = co.SGD({"a": a, "b": b}, lr=1.0, lr_scale={"a": 0.25, "b": 0.5})
        for step in range(2):
            if step:
                b.requires_grad_()
                optimizer.param_groups[0]["params"].remove(a)  # its number stays in the dict
            a.grad, b.grad = torch.ones(1), torch.ones(1) if step else None
            optimizer.step()
        assert (a.item(), b.item()) == (0.75, 0.5)

    def test_a_lazy_parameter_is_asked_about_when_it_has_a_shape(self) -> None:
        layer = nn.LazyLinear(2, bias=False)
        optimizer = co.SGD(layer.named_parameters(), lr=1.0, lr_scale=lambda name, param: 1 / param.shape[1])
        layer(torch.ones(1, 4)).sum().backward()
        before = layer.weight.detach().clone()
        optimizer.step()
        torch.testing.assert_close(before - layer.weight, torch.full((2, 4), 0.25))

    def test_tied_parameters(self) -> None:
        """A further name may have the number of the first."""
        weight = nn.Parameter(torch.ones(1))
        pairs = [("a", weight), ("b", weight)]
        optimizer = co.SGD(pairs, lr=1.0, lr_scale=dict.fromkeys("ab", 0.5))
        weight.grad = torch.ones(1)
        optimizer.step()
        assert weight.item() == 0.5
        for scales in ({"b": 0.5}, {"a": 0.5, "b": 0.25}):
            with pytest.raises(ValueError, match="lr_scale has another number for 'b' than for 'a', which it is tied to"):
                co.SGD(pairs, lr_scale=scales)


def _numbers(optimizer: co.CompiledOptimizer) -> list[float]:
    """By parameter, what each step multiplies its learning rate with."""
    plans = [lowering.plan for lowering in engine_of(optimizer).current().lowerings]
    members = [m for plan in plans for m in plan.members]
    numbers = [n for plan in plans for n in plan.numbers["lr_scale"]]
    by_place = {(m.group, m.index): number for m, number in zip(members, numbers, strict=True)}
    return [by_place[place] for place in sorted(by_place)]


def _params(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(2)) for name in names}


class TestWhichNamesADictMayHave:
    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_checkpoint_wrapped_module."])
    @pytest.mark.parametrize("where", ["constructor", "assigned", "added"])
    def test_wrappers_do_not_matter(self, prefix: str, where: str) -> None:
        plain = {"0.weight": 0.5, "0.bias": 0.25}
        wrapped = {f"{prefix}{name}": number for name, number in plain.items()}
        for scales, names in ((plain, wrapped), (wrapped, plain)):
            if where == "constructor":
                optimizer = co.SGD(_params(*names), lr_scale=scales)
            elif where == "assigned":
                optimizer = co.SGD(_params(*names))
                optimizer.param_groups[0]["lr_scale"] = scales
                optimizer.step()
            else:
                optimizer = co.SGD(_params("x"))
                optimizer.add_param_group({"params": _params(*names), "lr_scale": scales})
            assert _numbers(optimizer)[-2:] == [0.5, 0.25]

    def test_one_parameter_under_two_names_beside_one_with_a_similar_name(self) -> None:
        scales = {"norm.weight": 0.5, "module.norm.weight": 0.5}
        assert _numbers(co.SGD(_params("norm.weight", "norms.weight"), lr_scale=scales)) == [0.5, 1.0]

    def test_a_name_that_was_tied_to_a_parameter_that_is_gone(self) -> None:
        tied = nn.Parameter(torch.ones(2))
        optimizer = co.SGD([{"params": [("a", tied), ("head", tied)]}, {"params": _params("b")}])
        del optimizer.param_groups[0]
        with pytest.raises(ValueError, match="another number for 'head' than for 'a', which it is tied to"):
            optimizer.param_groups[0]["lr_scale"] = {"b": 0.5, "head": 0.25}

    def test_where_names_are_apart_by_prefixes_alone(self) -> None:
        assert _numbers(co.SGD(_params("a", "module.a"), lr_scale={"a": 0.5})) == [0.5, 1.0]
        assert _numbers(co.SGD(_params("a"), lr_scale={"a": 0.5, "module.a": 0.25})) == [0.5]
        assert _numbers(co.SGD(_params("module.a"), lr_scale={"a": 0.5, "_orig_mod.a": 0.5})) == [0.5]
        with pytest.raises(ValueError, match=r"different numbers for 'module\.a', under 'a' and '_orig_mod\.a'"):
            co.SGD(_params("module.a"), lr_scale={"a": 0.5, "_orig_mod.a": 0.25})

    @pytest.mark.parametrize("prefix", ["", "_orig_mod."])
    def test_one_dict_for_two_optimizers(self, prefix: str) -> None:
        """And what comes later finds its number."""
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        scales = {name: 1 / (2 + i) for i, (name, _) in enumerate(model.named_parameters())}
        pairs = [(f"{prefix}{name}", param) for name, param in model.named_parameters()]
        assert _numbers(co.Muon(pairs[::2], lr_scale=scales)) == [1 / 2, 1 / 4]
        optimizer = co.AdamW(pairs[1:2], lr_scale=scales)
        assert _numbers(optimizer) == [1 / 3]
        optimizer.add_param_group({"params": pairs[3:]})
        assert _numbers(optimizer) == [1 / 3, 1 / 5]

    @pytest.mark.parametrize(
        ("scales", "names"),
        [
            ({"layers.10.weight": 0.5, "x": 0.5}, ["layers.11.weight", "x"]),
            ({"layers.1.attn.q_proj.bias": 0.5, "x": 0.5}, ["layers.1.attn.q_proj.weight", "x"]),
            ({"encoder.norm.bias": 0.5, "x": 0.5}, ["decoder.norm.bias", "x"]),
            ({"layers.0.q_proj": 0.5, "x": 0.5}, ["layers.0.k_proj", "x"]),
            ({"linear1.weight": 0.5, "x": 0.5}, ["linear2.weight", "x"]),
            ({"fc.wieght": 0.5, "fc.weight": 0.5}, ["fc.weight"]),  # whose number is there
        ],
    )
    def test_others_of_other_optimizers(self, scales: dict[str, float], names: list[str]) -> None:
        co.SGD(_params(*names), lr_scale=scales)

    @pytest.mark.parametrize("typo", ["fc.wieght", "fc.weigth", "Fc.weight", "fc_weight", "fc.weights", "module.fc.wight"])
    def test_misspelled_ones(self, typo: str) -> None:
        said = re.escape(f"lr_scale has a number for '{typo}', which no parameter is called; did you mean")
        with pytest.raises(ValueError, match=f"{said} fc.weight?"):
            _optimizer(lr_scale={"fc.bias": 0.5, typo: 0.5})

    def test_many_names_are_checked_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many groups share a dict, and without comparing each name with each other."""
        compared = checked = 0

        class Name(str):
            __hash__ = str.__hash__

            def __eq__(self, other: object) -> bool:
                nonlocal compared
                compared += 1
                return str.__eq__(self, other)

        def count(chosen: Any, names: list[str], *args: Any, **kwargs: Any) -> None:
            nonlocal compared, checked
            names, compared, checked = [*map(Name, names)], 0, checked + 1
            check_names(ByName({Name(key): number for key, number in chosen.items()}), names, *args, **kwargs)
            assert compared < 20 * len(names)

        monkeypatch.setattr(group_list, "check_names", count)
        pairs = [*_params(*[f"layers.{i}.weight" for i in range(800)]).items()]
        scales = {name: 0.5 for name, _ in pairs} | {f"other.{i}": 0.5 for i in range(800)}
        optimizer = co.SGD([{"params": pairs[i::40]} for i in range(40)], lr_scale=scales)
        assert checked == 1
        optimizer.param_groups[0]["maximize"] = True
        optimizer.step()
        assert checked == 1


class TestDictsAreCopied:
    """What counts is what was given."""

    def test_edits_of_what_was_given_do_not_count(self) -> None:
        scales, own = {"a": torch.tensor(0.5), "b": 0.5, "c": 0.5}, {"b": 0.25}
        a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
        optimizer = co.SGD([{"params": {"a": a}}, {"params": {"b": b}, "lr_scale": own}], lr=1.0, lr_scale=scales)
        scales["a"].fill_(9.0)
        scales["c"] = own["b"] = -1.0
        optimizer.param_groups[0]["maximize"] = True  # a change, after which numbers are looked up anew
        optimizer.add_param_group({"params": {"c": c}})
        for param in (a, b, c):
            param.grad = torch.ones(1)
        optimizer.step()
        assert [p.item() for p in (a, b, c)] == [1.5, 0.75, 0.5]

    def test_nobody_edits_what_is_there(self) -> None:
        group = _optimizer(lr_scale={"fc.bias": 0.5}).param_groups[0]
        edits: list[Any] = [
            lambda d: d.update(a=1.0),
            lambda d: d.pop("fc.bias"),
            lambda d: operator.setitem(d, "fc.bias", 9.0),
        ]
        for edit in edits:
            with pytest.raises(TypeError, match="numbers by name cannot be edited in place; assign another dict to"):
                edit(group["lr_scale"])
        for twin in (copy.deepcopy(group["lr_scale"]), pickled(group["lr_scale"])):
            assert twin == {"fc.bias": 0.5}
        group["lr_scale"] = group["lr_scale"] | {"fc.weight": 0.25}
        assert group["lr_scale"] == {"fc.bias": 0.5, "fc.weight": 0.25}


def _optimizer(**options: Any) -> co.CompiledOptimizer:
    return co.AdamW({"fc.weight": nn.Parameter(torch.ones(2, 2)), "fc.bias": nn.Parameter(torch.ones(2))}, **options)


MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (
        {"fc.weigth": 0.5},
        ValueError,
        r"lr_scale has a number for 'fc\.weigth', which no parameter is called; did you mean fc",
    ),
    ({"fc.bias": -1}, ValueError, r"Invalid lr_scale value: -1\.0 \(lr_scale of 'fc\.bias' must be >= 0 and < inf\)"),
    ({"fc.bias": math.nan}, ValueError, r"Invalid lr_scale value: nan \(lr_scale of 'fc\.bias' must be"),
    (lambda name, param: math.inf, ValueError, r"Invalid lr_scale value: inf \(lr_scale of 'fc\.weight' must be"),
    (lambda name, param: None, TypeError, r"lr_scale of 'fc\.weight' must be a number or a 1-element tensor, got None"),
    (lambda name, param: "1", TypeError, r"lr_scale of 'fc\.weight' must be a number or a 1-element tensor, got '1'"),
    (lambda name, param: 1 / 0, ZeroDivisionError, "division by zero"),
    (lambda name: 1.0, TypeError, "takes 1 positional argument but 2 were given"),
    ([0.5], TypeError, r"lr_scale must be a dict name -> number or a function \(name, parameter\) -> number, got \[0\.5\]"),
]


class TestErrors:
    @pytest.mark.parametrize(("chosen", "kind", "said"), MISTAKES)
    def test_in_the_constructor(self, chosen: Any, kind: type[Exception], said: str) -> None:
        with pytest.raises(kind, match=said.replace("lr_scale must", "the argument lr_scale must")):
            _optimizer(lr_scale=chosen)

    @pytest.mark.parametrize(("chosen", "kind", "said"), MISTAKES)
    def test_in_a_group_and_assigned(self, chosen: Any, kind: type[Exception], said: str) -> None:
        """Nothing is changed: the group is not there, the assignment is not made, and steps go on."""
        optimizer = _optimizer(lr_scale={"fc.bias": 0.5})
        said = said.replace("lr_scale must", r"lr_scale of param_groups\[\d\] must").replace("'fc", "'(new|fc)")
        new = {"new.weight": nn.Parameter(torch.ones(2)), "new.bias": nn.Parameter(torch.ones(2))}
        moved = {n.replace("fc", "new"): v for n, v in chosen.items()} if isinstance(chosen, dict) else chosen
        with pytest.raises(kind, match=said.replace("mean fc", "mean new")):
            optimizer.add_param_group({"params": new, "lr_scale": moved})
        assert len(optimizer.param_groups) == 1
        assert not set(new.values()) & set(optimizer.state)
        with pytest.raises(kind, match=said):
            optimizer.param_groups[0]["lr_scale"] = chosen
        with pytest.raises(kind, match=said):
            optimizer.param_groups[0].update(lr_scale=chosen)
        assert optimizer.param_groups[0]["lr_scale"] == {"fc.bias": 0.5}
        optimizer.step()
        optimizer.state_dict()

    def test_assigned_names_are_those_of_all_groups(self) -> None:
        optimizer = co.SGD([{"params": _params("a")}, {"params": _params("b")}])
        first, second = optimizer.param_groups
        for names in ("a", "b", "ab"):
            second["lr_scale"] = dict.fromkeys(names, 0.5)
        assert _numbers(optimizer) == [1.0, 0.5]
        with pytest.raises(ValueError, match="lr_scale has a number for 'typo', which no parameter is called"):
            second["lr_scale"] = {"typo": 0.5}
        del optimizer
        first["lr_scale"] = {"typo": 0.5}  # in a group that outlived the optimizer

    def test_a_number_is_no_choice(self) -> None:
        with pytest.raises(TypeError, match="the argument lr_scale must be a dict"):
            _optimizer(lr_scale=0.5)

    def test_a_number_in_a_group_is_its_owners(self) -> None:
        """timm's schedulers multiply ``lr`` by it: no step does so once more. But it takes no other's place unnoticed."""
        a = nn.Parameter(torch.ones(1))
        a.grad = torch.ones(1)
        optimizer = co.SGD([{"params": [a], "lr_scale": 0.5}], lr=1.0)
        optimizer.step()
        assert a.item() == 0.0
        assert optimizer.state_dict()["param_groups"][0]["lr_scale"] == 0.5
        said = r"lr_scale of param_groups\[0\] must be a dict, a function or None, which stands for 1, got 0\.5"
        with pytest.raises(ValueError, match=said):
            co.SGD([{"params": [a], "lr_scale": 0.5}], lr_scale=lambda name, param: 2.0)
        optimizer = co.SGD([a], lr_scale=lambda name, param: 2.0)
        with pytest.raises(ValueError, match=said):
            optimizer.param_groups[0]["lr_scale"] = 0.5
        optimizer.param_groups = [{"params": [a], "lr_scale": 0.5}]
        with pytest.raises(ValueError, match=said):
            optimizer.step()

    @pytest.mark.parametrize("number", [torch.ones(4), torch.ones(0), "0.5", [0.5], 1j])
    def test_what_is_no_number_in_a_group(self, number: Any) -> None:
        with pytest.raises(TypeError, match=r"lr_scale of param_groups\[0\] must be a dict name -> number or a function"):
            co.SGD([{"params": _params("a"), "lr_scale": number}])

    @pytest.mark.parametrize("number", [1, 0.5, torch.tensor(0.5), torch.ones(1), Fraction(1, 2)])
    def test_what_is_a_number_in_a_group(self, number: Any) -> None:
        optimizer = co.SGD([{"params": _params("a"), "lr_scale": number}])
        assert optimizer.param_groups[0]["lr_scale"] is number
        assert _numbers(optimizer) == [1.0]

    def test_names_are_needed(self) -> None:
        params = [nn.Parameter(torch.ones(2))]
        said = r"lr_scale has numbers by name, and 'param_groups\[0\]\['params'\]\[0\]' has no name; pass model\.named_par"
        with pytest.raises(ValueError, match=said):
            co.AdamW(params, lr_scale={"fc.weight": 1.0})
        said = r"lr_scale of 'param_groups\[0\]\['params'\]\[0\]', a parameter without a name, raises: arg.*; pass model"
        with pytest.raises(TypeError, match=said):
            co.AdamW(params, lr_scale=lambda name, param: 0.1 if "head" in name else 1.0)
        with pytest.raises(AttributeError, match=said.replace("arg", "'NoneType' object has no attribute 'endswith'")):
            co.AdamW(params, lr_scale=lambda name, param: 0.1 if name.endswith("bias") else 1.0)

    def test_lbfgs_has_none(self) -> None:
        params = [nn.Parameter(torch.ones(2))]
        with pytest.raises(TypeError, match=r"LBFGS\(\) got an unexpected keyword argument 'lr_scale'"):
            co.LBFGS(params, lr_scale=lambda name, param: 1.0)
        with pytest.raises(ValueError, match="LBFGS does not support lr_scale: several parameters count as one vector"):
            co.LBFGS([{"params": params, "lr_scale": lambda name, param: 1.0}])
        optimizer = co.LBFGS(params)
        with pytest.raises(ValueError, match="LBFGS does not support lr_scale"):
            optimizer.param_groups[0]["lr_scale"] = lambda name, param: 1.0


def _by_two(name: str | None, param: Tensor) -> float:
    return 2.0


class TestCheckpoints:
    """The scale belongs to the model: no checkpoint has it, and a load leaves it as it is."""

    def test_of_our_own_and_torchs(self) -> None:
        scales = {"fc.bias": 0.5}
        optimizer, plain = _optimizer(lr_scale=scales), _optimizer()
        saved = through_a_file(optimizer.state_dict())
        assert saved["param_groups"][0]["lr_scale"] == 1.0  # torch.distributed.checkpoint wants the key, and timm a number
        plain.load_state_dict(saved)
        assert "lr_scale" not in plain.param_groups[0]
        reference = torch.optim.AdamW([{"params": g["params"], "lr_scale": 0.1} for g in plain.param_groups])
        reference.load_state_dict(saved)
        for theirs in (plain.state_dict(), reference.state_dict(), saved, optimizer.state_dict()):
            assert optimizer.load_state_dict(theirs).changed == []
            assert optimizer.param_groups[0]["lr_scale"] == scales

    @pytest.mark.parametrize("flatten", [False, True])
    def test_of_torchs_distributed_package(self, flatten: bool) -> None:
        models = [nn.Linear(2, 2) for _ in range(2)]
        ours, other = (co.AdamW(m.named_parameters(), lr_scale=_by_two, lr=0.1 * (1 + i)) for i, m in enumerate(models))
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=flatten)
        saved = dcp.get_optimizer_state_dict(models[0], ours, options=options)
        dcp.set_optimizer_state_dict(models[1], other, saved, options=options)
        assert other.hyperparameters()[0]["lr"] == 0.1
        assert other.param_groups[0]["lr_scale"] is _by_two

    def test_copies_have_it(self) -> None:
        for make in (copy.deepcopy, pickled):
            for chosen in (_by_two, {"fc.bias": 2.0, "fc.weight": 2.0}, functools.partial(_by_two)):
                twin = make(_optimizer(lr=0.25, weight_decay=0.0, lr_scale=chosen))
                param = twin.param_groups[0]["params"][1]
                param.grad = torch.ones(2)
                twin.step()
                torch.testing.assert_close(param, torch.full((2,), 0.5))
                twin.add_param_group({"params": {"new": nn.Parameter(torch.ones(1))}})
                assert "lr_scale" in twin.param_groups[1]


@pytest.mark.usefixtures("one_process")
def test_a_sharded_parameter_has_its_whole_shape() -> None:
    """And FSDP2 keeps names, but not what was noted on parameters: numbers by name are made before."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 6))
    shapes = {}

    def scale(name: str, param: Tensor) -> float:
        shapes[name] = tuple(param.shape)
        return 0.5

    optimizer = co.SGD(model.named_parameters(), lr=1.0, lr_scale=scale)
    assert shapes == {"weight": (6, 4), "bias": (6,)}
    before = model.bias.full_tensor().detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(before - model.bias.full_tensor(), torch.full((6,), 0.5))


@needs("timm")
def test_timm_layer_decay_is_not_applied_twice() -> None:
    """What tests/trainers/test_timm.py trains: the numbers in groups are timm's."""
    group = {"params": [nn.Parameter(torch.ones(1))], "lr_scale": 0.5}
    optimizer = co.AdamW([group])
    assert engine_of(optimizer).step.lowerings[0].plan.numbers["lr_scale"] == [1.0]
