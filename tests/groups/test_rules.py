"""Groups that name their rule: one optimizer that equals two side by side, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, sparse_rows
from round_trips import copied, pickled, through_a_file
from simulated_graph import install
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch_schedulers import SCHEDULERS, STEPS, advance

import compiled_optim as co
from compiled_optim.optimizer import CompiledOptimizer, engine_of

MUON = {"lr": 0.03, "momentum": 0.8, "weight_decay": 0.4, "ns_steps": 4}
ADAMW = {"lr": 0.02, "betas": (0.6, 0.8), "eps": 0.03, "weight_decay": 0.3}
PAIRS: dict[str, tuple[type[CompiledOptimizer], dict[str, Any], type[CompiledOptimizer], dict[str, Any]]] = {
    "Muon and AdamW": (co.Muon, MUON, co.AdamW, ADAMW),
    "AdamW and Muon": (co.AdamW, ADAMW, co.Muon, MUON),
    "SGD and Lion": (co.SGD, {"lr": 0.1, "momentum": 0.7}, co.Lion, {"lr": 0.01, "betas": (0.6, 0.7), "weight_decay": 0.2}),
    "SGD and Muon": (co.SGD, {"lr": 0.1, "momentum": 0.9}, co.Muon, MUON),
    "Prodigy and LAMB": (co.Prodigy, {"lr": 0.5, "d0": 1e-3}, co.LAMB, {"lr": 0.05, "eps": 0.01, "weight_decay": 0.3}),
    "Adafactor and StableAdamW": (co.Adafactor, {"lr": 0.1, "d": 1.7}, co.StableAdamW, {"lr": 0.03, "betas": (0.6, 0.8)}),
    "LAMB and Prodigy": (co.LAMB, {"lr": 0.05}, co.Prodigy, {"lr": 0.5, "d0": 1e-3, "weight_decay": 0.2}),
    "AdamWScheduleFree and SGD": (
        co.AdamWScheduleFree,
        {"lr": 0.05, "warmup_steps": 3},
        co.SGD,
        {"lr": 0.1, "momentum": 0.5},
    ),
}
pairs = pytest.mark.parametrize("pair", PAIRS)


def named(count: int = 3, rows: int = 6) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Parameters for the first rule and for the second one; every call makes the same ones."""
    generator = torch.Generator().manual_seed(5)

    def made(prefix: str) -> list[tuple[str, nn.Parameter]]:
        shapes = [(rows + i, 5) for i in range(count)]
        return [(f"{prefix}{i}", nn.Parameter(torch.randn(s, generator=generator))) for i, s in enumerate(shapes)]

    return made("a"), made("b")


def sides(pair: str, **options: Any) -> tuple[CompiledOptimizer, list[CompiledOptimizer]]:
    """One optimizer with two rules, and two optimizers, on equal parameters."""
    first, given, second, others = PAIRS[pair]
    a, b = named()
    one = first([{"params": a, **given}, {"params": b, "rule": second, **others}], **options)
    a, b = named()
    return one, [first(a, **given, **options), second(b, **others, **options)]


def params(optimizers: Sequence[CompiledOptimizer]) -> list[Tensor]:
    return [p for each in optimizers for group in each.param_groups for p in group["params"]]


def give(one: CompiledOptimizer, two: Sequence[CompiledOptimizer], step: int) -> None:
    """Equal gradients; one parameter in four has none."""
    generator = torch.Generator().manual_seed(step)
    for i, (p, q) in enumerate(zip(params([one]), params(two), strict=True)):
        grad = torch.randn(p.shape, generator=generator)
        p.grad, q.grad = (None, None) if (i + step) % 4 == 0 else (grad, grad.clone())


def everything(optimizers: Sequence[CompiledOptimizer]) -> list[Tensor]:
    """The parameters and all of their state, in one order."""
    found = []
    for each in optimizers:
        for p in params([each]):
            found += [p, *(v for _, v in sorted(each.state[p].items()))]
    return found


def assert_equal(one: CompiledOptimizer, two: Sequence[CompiledOptimizer]) -> None:
    for a, b in zip(everything([one]), everything(two), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pairs
def test_equals_two_optimizers(pair: str, lowering: str) -> None:
    one, two = sides(pair, lowering=lowering)
    before = [p.detach().clone() for p in params([one])]
    for step in range(6):
        give(one, two, step)
        for each in (one, *two):
            each.step()
        assert_equal(one, two)
    assert not any(torch.equal(p, q) for p, q in zip(params([one]), before, strict=True))


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("pair", ["Muon and AdamW", "SGD and Lion"])
def test_clips_all_gradients_together(pair: str, lowering: str) -> None:
    one, two = sides(pair, lowering=lowering)
    one.max_grad_norm = 0.7
    for step in range(3):
        give(one, two, step)
        norm = nn.utils.clip_grad_norm_(params(two), 0.7)
        for each in (one, *two):
            each.step()
        torch.testing.assert_close(one.grad_norm.float(), norm)
        for a, b in zip(params([one]), params(two), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2 if "Muon" in pair else 1e-5, atol=1e-4)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_follows_one_scheduler_as_two_follow_two(name: str) -> None:
    """Of two groups each side, so that what a scheduler gives to the first and the second group falls on equal ones."""
    a, b = named()
    one = co.Muon([{"params": a, **MUON}, {"params": b, "rule": co.AdamW, **ADAMW}])
    (c, d), (e, f) = named(), named()
    two = [co.Muon([{"params": c, **MUON}, {"params": d, **MUON}]), co.AdamW([{"params": e}, {"params": f}], **ADAMW)]
    make = SCHEDULERS[name]
    cycles = "momentum" in name or name in ("OneCycleLR", "OneCycleLR-three-phases")
    with (
        pytest.warns(UserWarning, match=r"nothing reads momentum of param_groups\[1\]: AdamW, its rule, has no such number")
        if cycles
        else (contextlib.nullcontext())
    ):
        schedulers = [make(one)]
    schedulers += [make(each) for each in two]
    rates = []
    for step in range(STEPS):
        rates.append([one.hyperparameter("lr", i).item() for i in (0, 1)])
        assert rates[-1] == [two[0].hyperparameter("lr", 0).item(), two[1].hyperparameter("lr", 1).item()]
        generator = torch.Generator().manual_seed(step)
        for group, twins in zip(one.param_groups, (two[0].param_groups[0], two[1].param_groups[1]), strict=True):
            for p, q in zip(group["params"], twins["params"], strict=True):
                p.grad = torch.randn(p.shape, generator=generator)
                q.grad = p.grad.clone()
        with contextlib.nullcontext() if step == 0 else co.no_recompiles():
            for each in (one, *two):
                each.step()
        for scheduler in schedulers:
            advance(scheduler, step)
    moved = [p for group in (two[0].param_groups[0], two[1].param_groups[1]) for p in group["params"]]
    half = 3 if cycles else 6  # torch's cycles move one name: the momentum of Muon's group, and not the betas of AdamW's
    for p, q in list(zip(params([one]), moved, strict=True))[:half]:
        assert torch.equal(p, q)
    assert all(first != last for first, last in zip(rates[0], rates[-1], strict=True)) or name.startswith("Cyclic")


@pytest.mark.full
@pytest.mark.parametrize("pair", ["Muon and AdamW", "SGD and Lion", "LAMB and Prodigy"])
def test_captured(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    one, two = sides(pair)
    runner = co.CUDAGraphRunner(one)
    for step in range(12):
        for group, (twin,) in zip(one.param_groups, (each.param_groups for each in two), strict=True):
            group["lr"] = twin["lr"] = 0.1 / (step + 1)
        give(one, two, step)
        runner.step()
        for each in two:
            each.step()
        assert_equal(one, two)
    report = co.compile_report(one)
    assert report.replays >= 8
    assert report.recaptures == 0


@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor"])
def test_compiled_step_of_a_gpt_is_one_graph_over_a_schedule(lowering: str) -> None:
    from perf.loops import GPT as LanguageModel
    from perf.loops import SIZES

    torch.manual_seed(1)
    size = SIZES["tiny"]
    models = [LanguageModel(size) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    # A key's bias has no gradient but noise, which a small eps would make a step of its own.
    made = [co.MuonAdamW(m, lr=0.03, adamw_eps=0.01, ns_steps=2, lowering=lowering) for m in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in made]
    counter = CompileCounterWithBackend("inductor" if lowering == "inductor" else "aot_eager")

    def train(model: nn.Module, optimizer: CompiledOptimizer, text: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = torch.compile(train, backend=counter, fullgraph=True)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(size.words, (size.batch, size.length + 1), generator=generator)
        with (
            torch._dynamo.config.patch(trace_autograd_ops=True)
            if hasattr(torch._dynamo.config, "trace_autograd_ops")
            else (contextlib.nullcontext()),
            contextlib.nullcontext() if step < 2 else co.no_recompiles(),
        ):
            compiled(models[0], made[0], text)
        train(models[1], made[1], text)
        for scheduler in schedulers:
            scheduler.step()
    assert counter.frame_count == 1
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)
    assert made[0].hyperparameter("lr", 1).item() == pytest.approx(0.03 * 0.8**6)
    assert [len(group["params"]) for group in made[0].param_groups] == [4, 12]


@pairs
def test_is_resumed_by_name_in_another_order(pair: str) -> None:
    first, given, second, others = PAIRS[pair]
    one, two = sides(pair)
    for step in range(3):
        give(one, two, step)
        one.step()
    saved = through_a_file(one.state_dict())
    a, b = named()
    with torch.no_grad():
        for p, q in zip([p for _, p in (*a, *b)], params([one]), strict=True):
            p.copy_(q)
    shaping = ("momentum", "ns_steps", "warmup_steps")
    own, other = ({"lr": 0.5, **{k: v for k, v in each.items() if k in shaping}} for each in (given, others))
    resumed = first([{"params": b[::-1], "rule": second, **other}, {"params": a[::-1], **own}])
    assert not any(resumed.load_state_dict(saved))
    assert resumed.param_groups[0]["lr"] == others["lr"]
    by_name = {
        name: p for group in resumed.param_groups for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    for step in range(3, 6):
        give(one, two, step)
        for name, p in zip([n for g in one.param_groups for n in g["param_names"]], params([one]), strict=True):
            by_name[name].grad = None if p.grad is None else p.grad.clone()
        one.step()
        resumed.step()
    for name, p in zip([n for g in one.param_groups for n in g["param_names"]], params([one]), strict=True):
        assert torch.equal(p, by_name[name])


def test_takes_over_the_checkpoints_of_two_optimizers() -> None:
    one, two = sides("Muon and AdamW")
    for step in range(3):
        give(one, two, step)
        for each in two:
            each.step()
    saved = through_a_file(co.named_state_dict(two))
    with torch.no_grad():
        for p, q in zip(params([one]), params(two), strict=True):
            p.copy_(q)
    for group in one.param_groups:
        group["lr"] = 0.9
    assert not any(co.load_named_state_dict(one, saved))
    assert [group["lr"] for group in one.param_groups] == [MUON["lr"], ADAMW["lr"]]
    for step in range(3, 6):
        give(one, two, step)
        for each in (one, *two):
            each.step()
    assert_equal(one, two)


def test_gives_its_checkpoint_to_two_optimizers() -> None:
    one, two = sides("Muon and AdamW")
    for step in range(3):
        give(one, two, step)
        one.step()
    assert not any(co.load_named_state_dict(two, co.named_state_dict(one)))
    for p, q in zip(params([one]), params(two), strict=True):
        assert all(torch.equal(one.state[p][k], v) for each in two if q in each.state for k, v in each.state[q].items())


def test_a_checkpoint_of_another_rule_is_refused_by_name() -> None:
    one, two = sides("Muon and AdamW")
    give(one, two, 1)
    one.step()
    saved = one.state_dict()
    a, b = named()
    other = co.Muon([{"params": a[:2]}, {"params": [*a[2:], *b], "rule": co.AdamW}])
    with pytest.raises(ValueError, match="a2: the checkpoint has no exp_avg"):
        other.load_state_dict(saved)
    third = co.Muon([{"params": a}, {"params": b, "rule": co.Lion, "lr": 0.1}])
    with pytest.raises(ValueError, match=r"param_groups\[1\]: rule is 'AdamW' in the checkpoint, and Lion here"):
        third.load_state_dict(saved)


@copied
@pairs
def test_copies_go_on_alike(pair: str, copied: Callable[[Any], Any]) -> None:
    one, two = sides(pair)
    give(one, two, 1)
    one.step()
    twin = copied(one)
    assert [g.kind for g in engine_of(twin).groups.distinct] == [g.kind for g in engine_of(one).groups.distinct]
    give(one, [twin], 2)
    one.step()
    twin.step()
    assert_equal(one, [twin])


def test_a_group_begins_with_defaults_of_its_own_rule() -> None:
    """A learning rate means another distance in another rule; what means the same for all is taken over."""
    a, b = named()
    one = co.SGD([{"params": a}, {"params": b, "rule": co.Adam}], lr=0.5, weight_decay=0.3, maximize=True, cautious=True)
    first, second = one.param_groups
    assert (first["lr"], first["weight_decay"]) == (0.5, 0.3)
    assert (second["lr"], second["weight_decay"], second["betas"]) == (1e-3, 0.0, (0.9, 0.999))
    assert second["maximize"] is second["cautious"] is True
    assert "momentum" not in second


def test_parameters_that_share_memory_are_updated_in_the_order_of_groups() -> None:
    """Whatever their rules: here one of another rule lies between two of the first."""

    def made(memory: Tensor) -> list[dict[str, Any]]:
        views = [nn.Parameter(memory[start : start + 4]) for start in (0, 2, 4)]
        kinds = [{}, {"rule": co.SGD, "lr": 0.3, "momentum": 0.5}, {}]
        groups = [{"params": [(f"p{i}", p)], **kind} for i, (p, kind) in enumerate(zip(views, kinds, strict=True))]
        for i, p in enumerate(views):
            p.grad = torch.arange(4.0) + i
        return groups

    memory, reference = torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8)
    with pytest.warns(RuntimeWarning, match="'p1', 'p2' share memory with other parameters") as told:
        co.AdamW(made(memory), lr=0.1, weight_decay=0.5).step()
    assert told[0].filename == __file__  # past the wrappers of a step
    for group in made(reference):  # one after the other, as torch.optim's loops update them
        kind = co.SGD if "rule" in group else co.AdamW
        given = {key: value for key, value in group.items() if key != "rule"}
        kind([{"lr": 0.1, "weight_decay": 0.5, **given} if kind is co.AdamW else given]).step()
    assert torch.equal(memory, reference)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kind", [co.SGD, co.LAMB, co.Prodigy])
@pytest.mark.filterwarnings("ignore:.* share memory:RuntimeWarning")
def test_parameters_with_gaps_that_share_memory(kind: Any, lowering: str) -> None:
    """Each update begins with what the one before it left, as if parameters had no gaps; also where sums come first."""
    results = []
    for way in (lowering, "eager"):
        memory = torch.linspace(1.0, 2.0, 24, dtype=torch.float64)
        params = [nn.Parameter(memory[::2]), nn.Parameter(memory[:6]), nn.Parameter(memory[1:20:3])]
        optimizer = kind(params, lr=0.1, lowering=way)
        for step in range(3):
            for place, param in enumerate(params):
                param.grad = None if place == step else torch.full_like(param, 1.0 + place)
            optimizer.step()
        results.append(memory)
    assert results[0].allclose(results[1], rtol=1e-9)
    if kind is co.SGD:
        moved = torch.linspace(1.0, 2.0, 24, dtype=torch.float64) - results[0]
        assert moved[:4].allclose(torch.tensor([0.2 + 0.4, 0.4 + 0.6, 0.2 + 0.4, 0.4], dtype=torch.float64))


def test_a_group_can_be_added() -> None:
    a, b = named()
    one = co.Muon(a, **MUON)
    one.add_param_group({"params": b, "rule": co.AdamW, **ADAMW})
    _, two = sides("Muon and AdamW")
    for step in range(3):
        give(one, two, step)
        for each in (one, *two):
            each.step()
    assert_equal(one, two)


def swap(one: CompiledOptimizer, place: int = 0) -> list[nn.Parameter]:
    """Move the parameter at ``place`` of each of two groups to the other one; returns them, in the order of their groups."""
    taken = [(group["params"].pop(place), group["param_names"].pop(place)) for group in one.param_groups]
    for group, (param, name) in zip(one.param_groups, reversed(taken), strict=True):
        group["params"].append(param)
        group["param_names"].append(name)
    return [group["params"][-1] for group in one.param_groups]


@pairs
@pytest.mark.parametrize("copied", [lambda one: one, copy.deepcopy, pickled])
def test_a_parameter_that_moves_to_another_rule_begins_anew(pair: str, copied: Callable[[Any], Any]) -> None:
    """With the step count of before, averages that begin at 0 would get no bias correction."""
    one, two = sides(pair)
    for step in range(3):
        give(one, two, step)
        one.step()
    swap(one)
    one = copied(one)
    moved = [group["params"][-1] for group in one.param_groups]
    kind, given, second, others = PAIRS[pair]
    copies = [nn.Parameter(p.detach().clone()) for p in moved]
    fresh = [kind([("a", copies[0])], **given), second([("b", copies[1])], **others)]
    for _ in range(3):
        for p, q in zip(moved, copies, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        for each in (one, *fresh):
            each.step()
    for p, q, other in zip(moved, copies, fresh, strict=True):
        assert one.state[p]["step"] == 3
        if "Prodigy" not in pair:  # whose distance is of all parameters of its groups
            assert torch.equal(p, q)
            assert one.state[p].keys() == other.state[q].keys()


def test_a_step_that_is_refused_keeps_the_state_of_moved_parameters() -> None:
    one, two = sides("Muon and AdamW")
    give(one, two, 1)
    one.step()
    rest = one.param_groups[1]["params"][1]
    moved = swap(one)
    before = [copy.deepcopy(dict(one.state[p])) for p in moved]
    one.state[rest]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match="state 'exp_avg' of 'b1' must have shape"):
        one.step()
    assert [list(one.state[p]) for p in moved] == [list(entries) for entries in before]
    swap(one, -1)
    del one.state[rest]["exp_avg"]
    for p in moved:
        p.grad = torch.ones_like(p)
    one.step()
    assert [one.state[p]["step"].item() for p in moved] == [entries["step"] + 1 for entries in before]


def test_state_that_somebody_wrote_for_the_new_rule_stays() -> None:
    one, two = sides("Muon and AdamW")
    give(one, two, 1)
    one.step()
    param = swap(one)[1]
    del one.state[param]["momentum_buffer"]
    one.state[param].update(step=7.0, exp_avg=torch.ones_like(param), exp_avg_sq=torch.full_like(param, 4.0))
    param.grad = torch.zeros_like(param)
    one.step()
    assert one.state[param]["step"] == 8
    assert one.state[param]["exp_avg_sq"].min() > 1


def test_a_weight_keeps_its_bits_where_its_rule_changes() -> None:
    weight = nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16))
    rest = [nn.Parameter(torch.randn(64, 65, dtype=torch.bfloat16)) for _ in range(2)]
    groups = [{"params": [weight, rest[0]]}, {"params": [rest[1]], "rule": co.Lion, "lr": 0.01}]
    one = co.AdamW(groups, lr=0.01, weights="kahan")
    weight.grad = torch.randn_like(weight)
    one.step()
    kept = one.state[weight]["kahan_comp"].clone()
    assert kept.any()
    one.param_groups[1]["params"].append(one.param_groups[0]["params"].pop(0))
    weight.grad = None
    rest[1].grad = torch.randn_like(rest[1])
    one.step()
    assert torch.equal(one.state[weight]["kahan_comp"], kept)
    assert "exp_avg_sq" not in one.state[weight]


def test_numbers_of_each_rule() -> None:
    one, _ = sides("Muon and AdamW")
    assert [sorted(numbers)[:2] for numbers in one.hyperparameters()] == [["eps", "lr"], ["betas", "eps"]]
    assert one.hyperparameter("betas", 1)[0].item() == 0.6
    with pytest.raises(KeyError, match="AdamW has no hyperparameter 'momentum'"):
        one.hyperparameter("momentum", 1)
    one.param_groups[1]["betas"] = (0.5, 1.5)
    give(one, [one], 1)
    with pytest.raises(ValueError, match=r"betas\[1\] of param_groups\[1\].* 1.5|[Ii]nvalid beta"):
        one.step()


def test_a_schedule_in_the_step_drives_the_groups_that_have_the_number() -> None:
    one, two = sides("Muon and AdamW")
    one.schedule(momentum=lambda step: 0.9 / step, lr=lambda step: 0.1 / step)
    two[0].schedule(momentum=lambda step: 0.9 / step, lr=lambda step: 0.1 / step)
    two[1].schedule(lr=lambda step: 0.1 / step)
    for step in range(4):
        give(one, two, step)
        for each in (one, *two):
            each.step()
    assert_equal(one, two)
    with pytest.raises(ValueError, match="AdamW has no hyperparameter 'momentum'"):
        one.schedule(group=1, momentum=lambda step: 0.9)
    with pytest.raises(ValueError, match="Muon has no hyperparameter 'nonsense'"):
        one.schedule(nonsense=lambda step: 0.9)


def test_evaluates_other_weights_of_the_groups_that_have_them() -> None:
    one, two = sides("AdamWScheduleFree and SGD")
    for step in range(3):
        give(one, two, step)
        for each in (one, *two):
            each.step()
    one.eval()
    two[0].eval()
    assert_equal(one, two)
    with pytest.raises(RuntimeError, match="evaluation mode"):
        one.step()
    one.train()
    two[0].train()
    assert_equal(one, two)


def test_sparse_gradients_beside_dense_ones() -> None:
    a, b = named()
    one = co.AdamW([{"params": a, **ADAMW}, {"params": b, "rule": co.SparseAdam, "lr": 0.1}])
    c, d = named()
    two = [co.AdamW(c, **ADAMW), co.SparseAdam(d, lr=0.1)]
    compiled = torch.compile(one.step, backend="aot_eager", fullgraph=True)
    for step in range(4):
        give(one, two, step)
        for (_, p), (_, q) in zip(b, d, strict=True):
            if p.grad is not None:
                p.grad = sparse_rows(p.grad, step)
                q.grad = p.grad.clone()
        compiled() if step == 3 else one.step()
        for each in two:
            each.step()
        assert_equal(one, two)


def test_two_launches_for_all_groups_of_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their numbers; and stacks of equal matrices are one launch."""
    install(monkeypatch)
    a, b = named(count=6)
    one = co.Muon(
        [{"params": a, **MUON}, *({"params": [pair], "rule": co.AdamW, "lr": 0.01 * (i + 1)} for i, pair in enumerate(b))]
    )
    kinds = [lowering.plan.rule.name for lowering in engine_of(one).current().lowerings]
    assert kinds == ["Muon", "AdamW"]
    assert len(engine_of(one).current().lowerings[1].plan.members) == 6


@pytest.mark.parametrize(
    ("rule", "error", "said"),
    [
        ("adamw", TypeError, r"rule of param_groups\[1\] must be the class of an optimizer of this package, got 'adamw'"),
        (torch.optim.AdamW, TypeError, "must be the class of an optimizer"),
        (co.AdamWScheduleFree, ValueError, "has eval.. and train..: construct AdamWScheduleFree"),
        (co.LBFGS, ValueError, "LBFGS shares no step with another optimizer"),
        (CompiledOptimizer, ValueError, "CompiledOptimizer shares no step"),
    ],
)
def test_a_rule_that_does_not_go(rule: Any, error: type[Exception], said: str) -> None:
    a, b = named()
    with pytest.raises(error, match=said):
        co.AdamW([{"params": a}, {"params": b, "rule": rule}])
    one = co.AdamW(a)
    with pytest.raises(error, match=said):
        one.add_param_group({"params": b, "rule": rule})
    assert len(one.param_groups) == 1


def test_what_a_group_cannot_be() -> None:
    a, b = named()
    with pytest.raises(ValueError, match="LBFGS shares no step"):
        co.LBFGS([{"params": a, "rule": co.AdamW}])
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters whereas .*'c'"):
        co.AdamW([{"params": a}, {"params": [("c", nn.Parameter(torch.ones(3)))], "rule": co.Muon}])
    with pytest.raises(ValueError, match=r"betas\[0\]|[Bb]eta"):
        co.Muon([{"params": a}, {"params": b, "rule": co.AdamW, "betas": (1.5, 0.9)}])
    with pytest.raises(
        ValueError, match=r"cautious=True does not go with Muon, the rule of param_groups\[1\]: give it to groups"
    ):
        co.AdamW([{"params": a}, {"params": b, "rule": co.Muon}], cautious=True)
    with pytest.raises(ValueError, match="differentiable=True does not go with Muon"):
        co.AdamW([{"params": a}, {"params": b, "rule": co.Muon}], differentiable=True)
    with pytest.raises(ValueError, match=r"param_groups\[1\] has no lr, for which Lion has no default"):
        co.Muon([{"params": a}, {"params": b, "rule": co.Lion}], lr=0.1)
    with pytest.warns(
        UserWarning, match=r"nothing reads momentum of param_groups\[1\]: AdamW, its rule, has no such number"
    ):
        co.Muon([{"params": a}, {"params": b, "rule": co.AdamW, "momentum": 0.5}])
    with pytest.warns(UserWarning, match="did you mean"):
        co.Muon([{"params": a}, {"params": b, "rule": co.AdamW, "beta": (0.5, 0.9)}])


def test_the_rule_of_a_group_stays() -> None:
    one, _ = sides("Muon and AdamW")
    for write in (
        lambda: one.param_groups[1].update(rule=co.Lion),
        lambda: one.param_groups[0].update(rule=co.AdamW),
        lambda: one.param_groups[1].pop("rule"),
    ):
        with pytest.raises(ValueError, match="rule of param_groups"):
            write()
    assert one.param_groups[1]["rule"] is co.AdamW
    assert "rule" not in one.param_groups[0]


def test_plain_dicts_in_place_of_groups() -> None:
    one, two = sides("Muon and AdamW")
    one.param_groups = [dict(group) for group in one.param_groups]
    give(one, two, 1)
    for each in (one, *two):
        each.step()
    assert_equal(one, two)


def test_what_one_rule_cannot_do_the_optimizer_refuses() -> None:
    one, _ = sides("Muon and AdamW")
    with pytest.raises(ValueError, match="Muon has no optimizer accumulation"):
        one.optimizer_accumulation = True
    model = nn.Linear(3, 3)
    pairs = list(model.named_parameters())
    with pytest.raises(ValueError, match="does not go with Prodigy, which sums over all parameters"):
        co.prepare_for_gradient_release(model, co.AdamW([{"params": pairs[:1]}, {"params": pairs[1:], "rule": co.Prodigy}]))


def test_accumulates_where_every_rule_can() -> None:
    a, b = named()
    one = co.AdamW([{"params": a, **ADAMW}, {"params": b, "rule": co.SGD, "lr": 0.1, "momentum": 0.7}])
    c, d = named()
    two = [co.AdamW(c, **ADAMW), co.SGD(d, lr=0.1, momentum=0.7)]
    for step in range(6):
        give(one, two, step)
        for each in (one, *two):
            each.optimizer_accumulation = step % 3 != 2
            each.step()
    assert_equal(one, two)


def test_reports_cover_both_rules() -> None:
    one, two = sides("Muon and AdamW")
    give(one, two, 1)
    one.step()
    reported = str(co.memory_report(one))
    assert "exp_avg_sq" in reported
    assert "momentum_buffer" in reported
    assert co.check_numerics(one).checked
    assert "AdamW" in repr(one)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)


class GPT(nn.Module):
    """A GPT with names of its own: no pattern matches its table ``tok`` and its ``out``."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv1d(8, 8, 3, groups=8)
        self.out = nn.Linear(8, 11, bias=False)
        if tied:
            self.out.weight = self.tok.weight


MATRICES = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("qkv", "proj")]


def names(optimizer: CompiledOptimizer, kind: type[CompiledOptimizer]) -> list[str]:
    groups = engine_of(optimizer).groups.distinct
    return sorted(name for g in groups if (g.kind is kind) for name in g["param_names"])


class TestMuonAdamW:
    @pytest.mark.parametrize("tied", [False, True])
    def test_tells_by_module_name_and_shape(self, tied: bool) -> None:
        model = GPT(tied=tied)
        one = co.MuonAdamW(model, lr=0.01, weight_decay=0.2)
        assert names(one, co.MuonAdamW) == sorted(MATRICES)
        rest = {name for name, _ in model.named_parameters()} - {*MATRICES}
        assert names(one, co.AdamW) == sorted(rest)
        why = one.param_groups[1]["why"]
        assert why["tok.weight"] == "is an embedding"
        assert tied or why["out.weight"] == "is a head"
        assert why["conv.weight"] == "has 3 dimensions"
        assert why["blocks.0.ln.weight"] == "has 1 dimension"
        assert why["blocks.0.ln.bias"] == "matches '*bias*'"
        assert [(g["lr"], g["weight_decay"]) for g in one.param_groups] == [(0.01, 0.2)] * 2
        assert "why" not in one.state_dict()["param_groups"][1]

    def test_patterns_that_are_given_count_alone(self) -> None:
        one = co.MuonAdamW(GPT(), adamw="*qkv*|tok*", adamw_lr=0.5, adamw_betas=(0.1, 0.2), adamw_eps=0.3)
        assert names(one, co.MuonAdamW) == ["blocks.0.proj.weight", "blocks.1.proj.weight"]
        group = one.param_groups[1]
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.1, 0.2), 0.3, 0.1)

    def test_named_parameters_and_groups(self) -> None:
        model = GPT()
        listed = list(model.named_parameters())
        one = co.MuonAdamW(listed, adamw="tok*|out*")
        assert names(one, co.MuonAdamW) == sorted(MATRICES)
        decayed = [pair for pair in listed if pair[1].dim() > 1]
        rest = [pair for pair in listed if pair[1].dim() <= 1]
        sgd = [decayed.pop()]
        two = co.MuonAdamW(
            [
                {"params": decayed, "weight_decay": 0.3},
                {"params": rest, "lr": 0.5, "weight_decay": 0},
                {"params": sgd, "rule": co.SGD},
            ],
            lr=0.02,
            adamw="tok*",
        )
        found = [(g.kind.__name__, g["lr"], g["weight_decay"]) for g in engine_of(two).groups.distinct]
        assert found == [("MuonAdamW", 0.02, 0.3), ("AdamW", 0.02, 0.3), ("AdamW", 0.5, 0), ("SGD", 1e-3, 0.0)]

    def test_equals_muon_and_adamw(self) -> None:
        torch.manual_seed(2)
        models = [GPT() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        one = co.MuonAdamW(models[0], lr=0.02, momentum=0.8, weight_decay=0.3, adamw_betas=(0.6, 0.7), adamw_eps=0.1)
        listed = dict(models[1].named_parameters())
        muon = co.Muon(
            {n: listed.pop(n) for n in MATRICES}, lr=0.02, momentum=0.8, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"
        )
        two = [muon, co.AdamW(listed, lr=0.02, betas=(0.6, 0.7), eps=0.1, weight_decay=0.3)]
        for step in range(4):
            give(one, two, step)
            for each in (one, *two):
                each.step()
        assert_equal(one, two)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                lambda m: setattr(m.blocks[0].qkv, "weight", nn.Parameter(torch.ones(192))),
                "'blocks.0.qkv.weight' .*flattened",
            ),
            (
                lambda m: setattr(m.blocks[0].proj, "weight", nn.Parameter(torch.ones(0))),
                "'blocks.0.proj.weight' .*elsewhere",
            ),
            (lambda m: setattr(m.blocks[0].proj.weight, "ds_shape", (8, 8)), "'blocks.0.proj.weight' .*elsewhere"),
        ],
        ids=["flattened", "empty", "placeholder"],
    )
    def test_refuses_shapes_that_are_not_the_parameters_own(self, change: Callable[[Any], None], said: str) -> None:
        model = GPT()
        change(model)
        with pytest.raises(ValueError, match=said):
            co.MuonAdamW(model)

    def test_matrices_that_are_not_called_a_weight(self) -> None:
        """Mamba's rates are no linear map, an attention's fused projections are; patterns of one's own replace guesses."""
        model = GPT()
        model.attention, model.scan = nn.MultiheadAttention(8, 2), nn.Module()
        model.scan.A_log, model.scan.w1 = (nn.Parameter(torch.rand(16, 16)) for _ in range(2))
        model.weighting = nn.Module()
        model.weighting.table = nn.Parameter(torch.rand(16, 16))
        model.scan.table = model.blocks[1].proj.weight
        nn.utils.parametrizations.weight_norm(model.blocks[0].proj)
        one = co.MuonAdamW(model)
        mine = [n for n in MATRICES if n != "blocks.0.proj.weight"]
        mine += ["attention.in_proj_weight", "attention.out_proj.weight", "scan.w1"]
        mine += ["blocks.0.proj.parametrizations.weight.original1"]  # the other one is a column of norms
        assert names(one, co.MuonAdamW) == sorted(mine)
        assert {r["name"]: r["why"] for r in co.explain(model, one).records}["scan.A_log"] == "is not called a weight"
        other = co.MuonAdamW(model, adamw="tok*|out*")
        assert {"scan.A_log", "weighting.table"} <= {*names(other, co.MuonAdamW)}
        assert not [finding for finding in co.explain(model, other).findings if finding.name == "bare"]
        found = co.explain(model, co.Muon([("scan.A_log", model.scan.A_log)])).findings
        assert [finding.params for finding in found if finding.name == "bare"] == [("scan.A_log",)]

    def test_is_explained(self) -> None:
        model = GPT()
        explained = co.explain(model, co.MuonAdamW(model, lr=0.01))
        rules = {r["name"]: (r["rule"], r["why"]) for r in explained.records}
        assert rules["blocks.0.qkv.weight"] == ("Muon", "a matrix that no pattern matches")
        assert rules["tok.weight"] == ("AdamW", "is an embedding")
        assert explained.findings == ()

    def test_stacks_and_splits_are_explained(self) -> None:
        params = {"experts": torch.randn(4, 6, 5), "qkv": torch.randn(12, 5), "gqa": torch.randn(16, 5)}
        params = {name: nn.Parameter(p) for name, p in params.items()}
        one = co.MuonAdamW(params, stacks=("experts",), split={"qkv": 3, "gqa": (8, 4, 4)})
        explained = {r["name"]: r["matrices"] for r in co.explain(params, one).records}
        assert explained == {"experts": [4, 6, 5], "qkv": [3, 4, 5], "gqa": [1, "8+4+4", 5]}
        assert co.explain(params, one).findings == ()

    def test_each_half_of_a_group_takes_the_numbers_that_its_rule_has(self) -> None:
        model = GPT()
        groups = [{"params": list(model.named_parameters()), "momentum": 0.5, "betas": (0.1, 0.2), "lr": 0.3}]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            muon, adamw = co.MuonAdamW(groups, adamw="tok*|out*").param_groups
        assert (muon["momentum"], muon["lr"], "betas" in muon) == (0.5, 0.3, False)
        assert (adamw["betas"], adamw["lr"], "momentum" in adamw) == ((0.1, 0.2), 0.3, False)

    def test_a_group_that_is_added_names_its_rule(self) -> None:
        one = co.MuonAdamW(GPT(), lr=0.01)
        late = nn.Parameter(torch.ones(4, 4))
        with pytest.raises(ValueError, match="a group that is added to MuonAdamW must name its rule"):
            one.add_param_group({"params": [("late", late)]})
        one.add_param_group({"params": [("late", late)], "rule": co.MuonAdamW})
        one.add_param_group({"params": [("later", nn.Parameter(torch.ones(4)))], "rule": co.AdamW})
        assert [g.kind for g in engine_of(one).groups.distinct][2:] == [co.MuonAdamW, co.AdamW]
        assert one.param_groups[2]["adjust_lr_fn"] == "match_rms_adamw"

    def test_refuses_what_would_be_wrong_without_a_word(self) -> None:
        model = GPT()
        with pytest.raises(ValueError, match="no parameter is left for Muon"):
            co.MuonAdamW(model, adamw="*")
        with pytest.raises(ValueError, match=r"adamw: the pattern '\*embed\*' matches no parameter"):
            co.MuonAdamW(model, adamw="tok*|*embed*")
        with pytest.raises(TypeError, match="tells parameters apart by name"):
            co.MuonAdamW(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            co.MuonAdamW(model)
