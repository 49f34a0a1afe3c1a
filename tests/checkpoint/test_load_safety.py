"""A load happens whole or not at all, whatever the checkpoint holds and whichever live tensors it shares."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import reference_of, registry, required
from loading import (
    SHAPE,
    Incomparable,
    Wrapper,
    addresses,
    by_name,
    content,
    freed,
    live_tensors,
    model,
    refuses,
    train,
    trained,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_optim as co
from compiled_optim.groups.changes import Changes, WatchedDict, WatchedList
from compiled_optim.optimizer import engine_of


def spoiled(optimizer: co.CompiledOptimizer) -> dict[str, Any]:
    """A copy of the state dict with other numbers everywhere."""
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.7
    for entries in saved["state"].values():
        for key, value in entries.items():
            entries[key] = value + 1
    return saved


class TestState:
    def test_of_a_parameter_that_is_frozen(self) -> None:
        """What the load would have made for another parameter is not made."""
        saved = spoiled(trained(co.NAdam))
        params = model("ab")
        params["a"].requires_grad_(False)
        optimizer = co.NAdam(params, lowering="eager")
        saved["state"][1]["exp_avg"] = freed(*SHAPE)
        refuses(optimizer, saved, "b: exp_avg has no memory")
        assert params["a"] not in optimizer.state


@pytest.mark.parametrize("kind", [k for k in registry() if k is not co.LBFGS], ids=lambda c: c.__name__)
def test_a_step_count_is_absent_only_where_torch_keeps_none(kind: type[co.CompiledOptimizer]) -> None:
    param = model("a")["a"]
    sparse = kind._gradients == "sparse"
    param.grad = torch.ones(SHAPE).to_sparse(1) if sparse else torch.ones(SHAPE)
    theirs = reference_of(kind)([param], **required(kind))
    theirs.step()
    counts = "step" in theirs.state[param]
    optimizer = trained(kind, **({"momentum": 0.5} if kind is co.SGD else {}))
    saved = spoiled(optimizer)
    del saved["state"][1]["step"]
    if counts:
        refuses(optimizer, saved, "b: the checkpoint has no step for it")
    else:
        optimizer.load_state_dict(saved)
        assert by_name(optimizer)["b"].get("step") == 1.0


@pytest.mark.parametrize("number", [-(2**100), 2**100, 1.5, True, torch.tensor(3, dtype=torch.uint8), torch.tensor([[2.5]])])
def test_a_number_of_any_kind_and_size(number: Any) -> None:
    optimizer = trained(co.NAdam)
    saved = spoiled(optimizer)
    saved["state"][1]["mu_product"] = number
    optimizer.load_state_dict(saved)
    assert by_name(optimizer)["b"]["mu_product"].item() == float(number)


def test_a_number_is_not_rounded() -> None:
    optimizer = trained(co.NAdam)
    saved = spoiled(optimizer)
    saved["state"][1]["mu_product"] = 0.1
    optimizer.load_state_dict(saved)
    assert by_name(optimizer)["b"]["mu_product"].item() == 0.1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float64])
def test_a_buffer_of_any_dtype(dtype: torch.dtype) -> None:
    optimizer = trained(co.NAdam)
    saved = spoiled(optimizer)
    value = torch.tensor([[1.0, -2.0, 0.5], [0.0, 4.0, -1.0]])
    for given in (value.to(dtype), Wrapper(value.to(dtype)), value.to(dtype).t().contiguous().t(), torch._neg_view(-value)):
        saved["state"][1]["exp_avg"] = given
        optimizer.load_state_dict(saved)
        assert torch.equal(by_name(optimizer)["b"]["exp_avg"], value)
        by_name(optimizer)["b"]["exp_avg"].zero_()


def test_an_expanded_buffer_is_copied() -> None:
    optimizer = trained(co.NAdam)
    saved = spoiled(optimizer)
    saved["state"][1]["exp_avg"] = torch.tensor([[3.0], [4.0]]).expand(SHAPE)
    optimizer.load_state_dict(saved)
    assert torch.equal(by_name(optimizer)["b"]["exp_avg"], torch.tensor([[3.0] * 3, [4.0] * 3]))


class OnceCopied(Tensor):
    """A tensor that can be read a single time."""

    reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            cls.reads += 1
            if cls.reads > 1:
                raise OSError("read before")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_buffer_of_a_class_of_its_own_is_read_before_anything_is_written() -> None:
    optimizer = trained(co.NAdam)
    saved = spoiled(optimizer)
    saved["state"][1]["exp_avg"] = torch.full(SHAPE, 3.0).as_subclass(OnceCopied)
    optimizer.load_state_dict(saved)
    assert torch.equal(by_name(optimizer)["b"]["exp_avg"], torch.full(SHAPE, 3.0))


class TestGroups:
    @pytest.mark.parametrize(
        "make",
        [Incomparable, lambda: freed(2), lambda: torch.ones(2), object],
        ids=["incomparable", "freed", "tensor", "object"],
    )
    def test_what_cannot_be_compared(self, make: Callable[[], Any]) -> None:
        """Parameters that were in two groups are in one now."""
        source = co.NAdam([{"params": {n: p}} for n, p in model("ab").items()])
        saved = source.state_dict()
        saved["param_groups"][0]["extra"], saved["param_groups"][1]["extra"] = make(), make() if make is object else 1
        refuses(trained(co.NAdam), saved, r"different extra: \[a |extra of param_groups\[0\] has no memory")

    def test_a_value_that_refers_to_itself(self) -> None:
        optimizer = trained(co.NAdam)
        saved = spoiled(optimizer)
        circle: dict[str, Any] = {}
        circle["itself"] = circle
        saved["param_groups"][0]["extra"] = circle
        optimizer.load_state_dict(saved)
        loaded = optimizer.param_groups[0]["extra"]
        assert loaded["itself"] is loaded is not circle

    def test_a_number_that_does_not_fit_the_live_tensor(self) -> None:
        optimizer = trained(co.NAdam, lr=torch.tensor(0.1, dtype=torch.float16))
        saved = spoiled(optimizer)
        saved["param_groups"][0]["lr"] = 1e6
        refuses(optimizer, saved, r"lr of param_groups\[0\] cannot be written")

    def test_a_start_value_that_does_not_fit(self) -> None:
        """Rprop's steps start at the learning rate, and b's have to."""
        optimizer = trained(co.Rprop)
        saved = spoiled(optimizer)
        saved["param_groups"][0]["lr"] = 1e300
        del saved["state"][1]
        refuses(optimizer, saved, "b: the optimizer's own step_size cannot be written")


def test_a_load_under_a_mode_whose_tensors_have_no_numbers() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    optimizer = trained(co.NAdam)
    saved = spoiled(optimizer)
    before = content(optimizer)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=r"cannot be (read|written)"):
        optimizer.load_state_dict(saved)
    assert content(optimizer) == before


@pytest.mark.parametrize(("params", "twice"), [([[0], [0]], "0"), ([[0, 1], [1]], "1")], ids=str)
def test_an_index_in_two_groups(params: list[list[int]], twice: str) -> None:
    optimizer = co.NAdam([{"params": model("abc"[: len(own)]).values()} for own in params])
    saved = spoiled(optimizer)
    for group, own in zip(saved["param_groups"], params, strict=True):
        group["params"] = own
    refuses(optimizer, saved, f"the checkpoint lists parameter {twice} twice")


def test_names_for_some_groups_only() -> None:
    """Positions would give a parameter the state of another that is named."""
    saved = spoiled(trained(co.NAdam, "abc", grouped=True))
    saved["param_groups"][1:] = saved["param_groups"][:0:-1]
    del saved["param_groups"][0]["param_names"]
    for strict in (True, False):
        refuses(trained(co.NAdam, "abc", grouped=True), saved, "names for the parameters of some groups only", strict=strict)
    params = model("abc")
    unnamed = co.NAdam([{"params": p} for p in params.values()], lowering="eager")
    assert not any(unnamed.load_state_dict(saved))


class TestInfinity:
    @pytest.mark.parametrize("kind", registry(), ids=lambda c: c.__name__)
    def test_a_learning_rate_is_finite(self, kind: type[co.CompiledOptimizer]) -> None:
        with pytest.raises(ValueError, match=r"Invalid learning rate: inf \(the argument lr must be >= 0"):
            kind(model("ab"), lr=math.inf)
        optimizer = trained(kind)
        params = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        for value in (math.inf, torch.tensor(math.inf)):
            optimizer.load_state_dict(spoiled_numbers(optimizer, lr=value))
            with pytest.raises(
                ValueError, match=r"Invalid learning rate: inf \(lr of param_groups\[0\] must be >= 0 and < inf\)"
            ):
                train(optimizer)
        assert all(map(torch.equal, params, optimizer.param_groups[0]["params"]))

    @pytest.mark.parametrize(
        ("kind", "values"),
        [(co.ASGD, {"t0": math.inf}), (co.Rprop, {"step_sizes": (0.0, math.inf)}), (co.Adafactor, {"d": math.inf})],
    )
    def test_a_bound_may_be_infinite(self, kind: type[co.CompiledOptimizer], values: dict[str, Any]) -> None:
        optimizer = trained(kind, **values)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer)
        assert all(p.isfinite().all() for p in optimizer.param_groups[0]["params"])


def spoiled_numbers(optimizer: co.CompiledOptimizer, **values: Any) -> dict[str, Any]:
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(values)
    return saved


LOWERINGS = [(co.AdamW, "eager"), (co.AdamW, "multi_tensor"), (co.AdamW, "inductor"), (co.NAdam, "multi_tensor")]
STACKS = [(co.Muon, "eager"), (co.Adafactor, "eager"), (co.SparseAdam, "eager")]


class TestSharedMemory:
    """The state dict's tensors are the live ones, in other places."""

    @pytest.mark.parametrize(("kind", "lowering"), [*LOWERINGS, *STACKS], ids=lambda v: getattr(v, "__name__", v))
    @pytest.mark.parametrize("turn", ["ab>ba", "abc>bca", "abcd>dcba", "abc>abc"])
    @pytest.mark.parametrize("how", ["state", "names"])
    def test_in_another_order(self, kind: type[co.CompiledOptimizer], lowering: str, turn: str, how: str) -> None:
        names, _, turned = turn.partition(">")
        optimizer = trained(kind, names, lowering=lowering)
        before = copy.deepcopy(by_name(optimizer))
        places = addresses(optimizer)
        if how == "state":
            saved = co.named_state_dict(optimizer)
            saved["state"] = {name: saved["state"][other] for name, other in zip(names, turned, strict=True)}
            co.load_named_state_dict(optimizer, saved)
        else:
            saved = optimizer.state_dict()
            saved["param_groups"][0]["param_names"] = [names[turned.index(name)] for name in names]
            optimizer.load_state_dict(saved)
        for name, other in zip(names, turned, strict=True):
            for key, value in by_name(optimizer)[name].items():
                assert torch.equal(value, before[other][key]), (name, key)
        assert addresses(optimizer) == places
        train(optimizer)

    @pytest.mark.parametrize("turned", ["abc", "bca"])
    def test_of_lbfgs(self, turned: str) -> None:
        optimizer = trained(co.LBFGS, "abc", max_iter=3)
        whole = copy.deepcopy(optimizer.state_dict())
        places = addresses(optimizer)
        saved = optimizer.state_dict()
        saved["param_groups"][0]["param_names"] = list(turned)
        optimizer.load_state_dict(saved)
        loaded, order = optimizer.state_dict()["state"][0], [turned.index(name) for name in "abc"]
        for key in ("d", "prev_flat_grad"):
            pieces = whole["state"][0][key].split(math.prod(SHAPE))
            assert torch.equal(loaded[key], torch.cat([pieces[i] for i in order]))
        assert addresses(optimizer) == places

    @pytest.mark.parametrize(
        ("key", "given"),
        [
            ("a.exp_avg_sq", lambda o, s: s["a"]["exp_avg"]),
            ("a.exp_avg", lambda o, s: s["a"]["exp_avg"].t()),
            ("a.exp_avg", lambda o, s: s["a"]["exp_avg"][1].expand(3, 3)),
            ("a.exp_avg", lambda o, s: o.param_groups[0]["params"][0]),
            ("b.exp_avg", lambda o, s: s["a"]["step"]),
            ("b.exp_avg", lambda o, s: o.hyperparameter("lr")),
        ],
        ids=["other buffer", "transposed", "part", "parameter", "number", "learning rate"],
    )
    def test_of_another_kind(self, key: str, given: Callable[[Any, Any], Tensor]) -> None:
        optimizer = co.NAdam({"a": nn.Parameter(torch.randn(3, 3)), "b": nn.Parameter(torch.randn(()))}, lowering="eager")
        train(optimizer, 2)
        saved = co.named_state_dict(optimizer)
        spoiled_state = {name: {k: v + 1 for k, v in entries.items()} for name, entries in saved["state"].items()}
        name, entry = key.split(".")
        spoiled_state[name][entry] = given(optimizer, by_name(optimizer))
        expected = spoiled_state[name][entry].detach().clone().float()
        saved["param_groups"][0]["lr"] = 0.7
        co.load_named_state_dict(optimizer, {**saved, "state": spoiled_state})
        assert torch.equal(by_name(optimizer)[name][entry], expected)

    def test_of_two_storages_in_one_memory(self) -> None:
        """As arrays of numpy are, and shared memory."""
        optimizer = trained(co.SGD, "abc", momentum=0.5)
        size = math.prod(SHAPE)
        memory = bytearray(4 * 3 * size)
        whole = torch.frombuffer(memory, dtype=torch.float32)
        whole.copy_(torch.arange(3.0 * size))
        before = [part.clone() for part in whole.split(size)]
        for i, param in enumerate(optimizer.param_groups[0]["params"]):
            part = torch.frombuffer(memory, dtype=torch.float32, count=size, offset=4 * i * size)
            optimizer.state[param]["momentum_buffer"] = part.view(SHAPE)
        saved = copy.copy(optimizer.state_dict())
        for i, j in enumerate((0, 2, 1)):
            saved["state"][i]["momentum_buffer"] = whole.split(size)[j].view(SHAPE)
        optimizer.load_state_dict(saved)
        assert torch.equal(whole, torch.cat([before[j] for j in (0, 2, 1)]))

    def test_beside_other_numbers_in_one_storage_nothing_is_cloned(self) -> None:
        optimizer = trained(co.SGD, "a", momentum=0.5)
        both = torch.stack([torch.ones(SHAPE), torch.full(SHAPE, 2.0)])
        optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"] = both[0]
        saved = optimizer.state_dict()
        saved["state"][0]["momentum_buffer"] = both[1]
        cloned: list[Any] = []

        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.overloadpacket is torch.ops.aten.clone and args[0].shape == SHAPE:
                    cloned.append(args[0])
                return func(*args, **(kwargs or {}))

        with Seen():
            optimizer.load_state_dict(saved)
        assert torch.equal(both[0], both[1])
        assert cloned == []

    @pytest.mark.parametrize(("turned", "copied"), [("abcd", 0), ("bacd", 4)])
    def test_only_what_is_overwritten_is_copied(self, turned: str, copied: int) -> None:
        """Two buffers of two parameters; the others are left alone."""
        optimizer = trained(co.AdamW, "abcd")
        saved = co.named_state_dict(optimizer)
        saved["state"] = {name: saved["state"][other] for name, other in zip("abcd", turned, strict=True)}
        calls: list[str] = []

        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if any(isinstance(a, Tensor) and a.shape == SHAPE for a in args):
                    calls.append(func.overloadpacket.__name__)
                return func(*args, **(kwargs or {}))

        with Seen():
            co.load_named_state_dict(optimizer, saved)
        assert [calls.count("clone"), calls.count("copy_")] == [copied, copied]


class TestBesideAStep:
    """A step of another thread waits for what reads or writes groups and state."""

    @pytest.mark.parametrize(
        ("kind", "inside", "act"),
        [
            (co.SGD, "current", lambda o, saved: o.load_state_dict(saved)),
            (co.SGD, "current", lambda o, saved: o.state_dict()),
            (co.SGD, "renew", lambda o, saved: o.add_param_group({"params": model("z")})),
            (co.LBFGS, "current", lambda o, saved: o.load_state_dict(saved)),
        ],
        ids=["load", "save", "add", "LBFGS"],
    )
    def test_it_waits(
        self, kind: type[co.CompiledOptimizer], inside: str, act: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        optimizer = trained(kind)
        saved = copy.deepcopy(optimizer.state_dict())
        engine = engine_of(optimizer)
        original = getattr(engine, inside)
        entered, leave, known, stepped = (threading.Event() for _ in range(4))

        class Lock:
            """The engine's, which says that somebody waits for it."""

            def __enter__(self) -> None:
                if not lock.acquire(blocking=False):
                    known.set()
                    lock.acquire()

            def __exit__(self, *_: Any) -> None:
                lock.release()

        def held(*args: Any, **kwargs: Any) -> Any:
            entered.set()
            assert leave.wait(200)
            return original(*args, **kwargs)

        def step() -> None:
            train(optimizer)
            stepped.set()
            known.set()

        monkeypatch.setattr(engine, inside, held)
        threads = [threading.Thread(target=act, args=(optimizer, saved)), threading.Thread(target=step)]
        threads[0].start()
        assert entered.wait(200)
        monkeypatch.undo()
        lock = engine.lock
        monkeypatch.setattr(engine, "lock", Lock())
        threads[1].start()
        try:
            assert known.wait(200)
            assert not stepped.is_set()
        finally:
            leave.set()
            for thread in threads:
                thread.join()
        assert stepped.is_set()

    def test_what_a_rebuild_in_the_middle_of_a_write_does_not_see_is_reported_after_it(self) -> None:
        changes = Changes()

        class Name(str):
            __slots__ = ()

            def __hash__(self) -> int:
                changes.stale = ""  # as a rebuild of another thread does at its end
                return super().__hash__()

        state = WatchedDict({"exp_avg": 0}, changes=changes)
        for write in (
            lambda name: state.update({name: 1}),
            state.pop,
            lambda name: state.update({name: 1}),
            state.__delitem__,
        ):
            write(Name("key"))
            assert changes.stale
        params = WatchedList(changes, [2, 1])
        params.sort(key=lambda value: hash(Name(str(value))))
        assert changes.stale


class TestInferenceMode:
    """What a load makes there can be written outside."""

    def _check(self, optimizer: co.CompiledOptimizer, saved: Any) -> None:
        with torch.inference_mode():
            optimizer.load_state_dict(saved)
        assert not any(tensor.is_inference() for _, tensor in live_tensors(optimizer))
        optimizer.load_state_dict(saved)
        train(optimizer)

    def test_a_buffer_that_was_not_needed(self) -> None:
        self._check(trained(co.SGD), trained(co.SGD, momentum=0.5).state_dict())

    def test_a_frozen_parameters_state(self) -> None:
        params = model("ab", frozen="b")
        self._check(co.AdamW(params, lowering="eager"), trained(co.AdamW).state_dict())

    @pytest.mark.parametrize("kind", [co.AdamW, co.LBFGS])
    def test_state_that_was_cleared(self, kind: type[co.CompiledOptimizer]) -> None:
        optimizer = trained(kind)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.state.clear()
        self._check(optimizer, saved)

    def test_a_recorded_buffer(self) -> None:
        param = torch.randn(SHAPE, requires_grad=True).clone()
        optimizer = co.AdamW({"a": param}, differentiable=True)
        saved = copy.deepcopy(optimizer.state_dict())
        param.grad = torch.randn(SHAPE, requires_grad=True)
        optimizer.step()
        with torch.inference_mode():
            optimizer.load_state_dict(saved)
        assert not any(tensor.is_inference() for _, tensor in live_tensors(optimizer))

    def test_an_optimizer_that_was_made_there(self) -> None:
        saved = spoiled(trained(co.AdamW))
        with torch.inference_mode():
            optimizer = co.AdamW(model("ab"), lowering="eager")
            optimizer.load_state_dict(saved)
        assert optimizer.hyperparameters()[0]["lr"] == 0.7


class TestAutograd:
    def test_what_requires_grad_is_loaded_as_a_number(self) -> None:
        optimizer = trained(co.NAdam)
        saved = spoiled(optimizer)
        expected = copy.deepcopy(saved)
        saved["state"][1]["exp_avg"] = nn.Parameter(saved["state"][1]["exp_avg"])
        saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].requires_grad_() * 1.0
        for key in ("step", "mu_product"):
            saved["state"][1][key] = saved["state"][1][key].requires_grad_()
        saved["param_groups"][0]["lr"] = torch.tensor(0.7, requires_grad=True)
        optimizer.load_state_dict(saved)
        assert not any(t.requires_grad for _, t in live_tensors(optimizer))
        for index, name in enumerate("ab"):
            assert torch.equal(by_name(optimizer)[name]["exp_avg"], expected["state"][index]["exp_avg"])
        copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(spoiled(optimizer))

    def test_a_recorded_state_is_replaced(self) -> None:
        """The loaded state depends on nothing, and what was recorded before can still be differentiated."""
        weight = torch.randn(SHAPE, requires_grad=True)
        scale = torch.tensor(2.0, requires_grad=True)
        param = weight.clone()
        optimizer = co.NAdam({"a": param}, differentiable=True)
        saved = copy.deepcopy(optimizer.state_dict())
        for _ in range(2):
            param.grad = weight * scale
            optimizer.step()
        recorded = optimizer.state[param]["exp_avg"]
        before = recorded.detach().clone()
        optimizer.load_state_dict(saved)
        assert torch.equal(recorded, before)
        assert not any(
            value.requires_grad or value.any() for k, value in optimizer.state[param].items() if k != "mu_product"
        )
        (gradient,) = torch.autograd.grad(recorded.sum(), scale, retain_graph=True)
        assert gradient != 0
        other = torch.randn(SHAPE, requires_grad=True)
        param.grad = other
        optimizer.step()
        after = optimizer.state[param]["exp_avg"].sum()
        assert not torch.autograd.grad(after, scale, retain_graph=True)[0]
        assert torch.autograd.grad(after, other)[0].any()

    def test_a_given_leaf_stays_as_it_is(self) -> None:
        param = torch.randn(SHAPE, requires_grad=True).clone()
        optimizer = co.AdamW({"a": param}, differentiable=True)
        leaf = torch.ones(SHAPE, requires_grad=True)
        optimizer.state[param]["exp_avg"] = leaf
        saved = spoiled(optimizer)
        optimizer.load_state_dict(saved)
        assert torch.equal(leaf, torch.ones(SHAPE))
        assert torch.equal(optimizer.state[param]["exp_avg"], torch.full(SHAPE, 2.0))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (lambda: freed(*SHAPE), "has no memory"),
        (lambda: torch.zeros(1, 3).expand(SHAPE), "has elements that share memory"),
        (lambda: torch.zeros(3, 2), r"has shape \(3, 2\) instead of \(2, 3\)"),
    ],
)
def test_a_live_tensor_that_cannot_be_written(entry: Callable[[], Tensor], message: str) -> None:
    optimizer = trained(co.NAdam)
    saved = spoiled(optimizer)
    dict.__setitem__(optimizer.state[optimizer.param_groups[0]["params"][1]], "exp_avg", entry())
    versions = {name: t._version for name, t in live_tensors(optimizer)}
    with pytest.raises(ValueError, match=f"b: the optimizer's own exp_avg {message}"):
        optimizer.load_state_dict(saved)
    assert {name: t._version for name, t in live_tensors(optimizer)} == versions
    assert optimizer.hyperparameters()[0]["lr"] != 0.7
    b = optimizer.state[optimizer.param_groups[0]["params"][1]]
    dict.__delitem__(b, "exp_avg_sq")
    optimizer.load_state_dict(saved, strict=False)
    assert sorted(b) == ["exp_avg", "mu_product", "step"]  # nothing new beside what cannot be written


class TestLbfgs:
    @pytest.mark.parametrize("names", ["xy", "ax"])
    def test_its_history_is_kept_where_the_parameters_are_others(self, names: str) -> None:
        optimizer = trained(co.LBFGS)
        expected = copy.deepcopy(by_name(optimizer))
        report = optimizer.load_state_dict(trained(co.LBFGS, names).state_dict(), strict=False)
        assert report == co.LoadReport([n for n in "ab" if n not in names], [n for n in names if n not in "ab"], [], [])
        assert expected["a"]["n_iter"] > 0
        for key, value in by_name(optimizer)["a"].items():
            assert torch.equal(value, expected["a"][key]), key

    @pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(math.nan), 1e300])
    @pytest.mark.parametrize("key", ["t", "prev_loss", "H_diag"])
    def test_a_run_that_met_infinity(self, key: str, value: Any) -> None:
        optimizer = trained(co.LBFGS)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0][key] = value
        assert not any(optimizer.load_state_dict(saved))
        loaded = by_name(optimizer)["a"][key].item()
        assert not math.isfinite(loaded)
        train(optimizer)
