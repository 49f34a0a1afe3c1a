"""Which parameters are accepted: those that torch.optim accepts, with its results."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import registry, required
from round_trips import through_a_file
from torch import nn

import compiled_optim as co

OPTIMIZERS = (torch.optim.AdamW, co.AdamW)
DENSE = [kind for kind in registry() if kind._gradients == "dense"]


def _twins(make: Callable[[type[Any]], Any]) -> tuple[Any, Any]:
    """What ``make`` makes with torch.optim's AdamW and with ours, from one seed."""
    made = []
    for kind in OPTIMIZERS:
        torch.manual_seed(0)
        made.append(make(kind))
    return made[0], made[1]


def _plain(kind: type[co.CompiledOptimizer]) -> dict[str, Any]:
    """What saves the seconds that Inductor takes."""
    return {} if kind._granularity == "element" else {"lowering": "eager"}


def _step(optimizer: Any, count: int = 1, like: float = 1.0) -> None:
    for _ in range(count):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.full_like(param, like) if param.requires_grad else None
        optimizer.step()


def _values(optimizer: Any) -> list[Any]:
    return [p.tolist() for group in optimizer.param_groups for p in group["params"]]


class Quantized(nn.Linear):
    """A layer with frozen weights of 8 bits in front, as QLoRA has them."""

    def __init__(self) -> None:
        super().__init__(2, 2, dtype=torch.float64)
        own, self._parameters = self._parameters, {}
        self.frozen = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
        self._parameters |= own


class TestIntegers:
    """They can get no gradient, and are skipped."""

    @pytest.mark.parametrize("named", [False, True])
    @pytest.mark.parametrize("arguments", [{}, {"max_grad_norm": 0.5}, {"lowering": "eager"}, {"cautious": True}], ids=str)
    def test_training_and_checkpoints(self, named: bool, arguments: dict[str, Any]) -> None:
        def make(kind: type[Any]) -> Any:
            model = Quantized()
            own = arguments if kind is co.AdamW else {}
            return kind(model.named_parameters() if named else model.parameters(), **own)

        theirs, ours = _twins(make)
        for optimizer in (theirs, ours):
            _step(optimizer, 2)
        assert ours.param_groups[0]["params"][0].tolist() == [0, 1, 2, 3]
        if arguments in ({}, {"lowering": "eager"}):
            torch.testing.assert_close(_values(ours), _values(theirs), rtol=1e-12, atol=0)
        assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys() == {1, 2}
        theirs.load_state_dict(through_a_file(ours.state_dict()))
        assert ours.load_state_dict(through_a_file(theirs.state_dict())) == co.LoadReport([], [], [], [])

    @pytest.mark.parametrize("kind", DENSE, ids=lambda c: c.__name__)
    def test_every_optimizer(self, kind: type[co.CompiledOptimizer]) -> None:
        frozen = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
        param = nn.Parameter(torch.ones(2, 2))
        optimizer = kind([frozen, param], **required(kind), **_plain(kind))
        param.grad = torch.ones(2, 2)
        optimizer.step(*([lambda: torch.ones(())] if kind is co.LBFGS else []))
        assert frozen.tolist() == [[1, 1], [1, 1]]
        assert (param[0, 0].item() < 1) is (kind is not co.ADOPT)  # whose first step changes no parameter
        twin = kind([copy.deepcopy(frozen), copy.deepcopy(param)], **required(kind), **_plain(kind))
        assert not any(twin.load_state_dict(through_a_file(optimizer.state_dict())))

    def test_added_later_and_in_a_group_of_its_own(self) -> None:
        def make(kind: type[Any]) -> Any:
            optimizer = kind([nn.Parameter(torch.ones(2, dtype=torch.float64))])
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)]})
            optimizer.param_groups[0]["params"].append(torch.ones(2, dtype=torch.int32))
            return optimizer

        theirs, ours = _twins(make)
        for optimizer in (theirs, ours):
            _step(optimizer, 2)
        torch.testing.assert_close(_values(ours), _values(theirs), rtol=1e-12, atol=0)
        ours.zero_grad(set_to_none=False)

    def test_a_checkpoint_with_state_for_one(self) -> None:
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        source = co.AdamW(params)
        _step(source)
        target = co.AdamW([torch.ones(2, dtype=torch.uint8), *params[1:]])
        with pytest.raises(ValueError, match=r"mismatched: param_groups\[0\]\['params'\]\[0\]: its dtype is torch.uint8"):
            target.load_state_dict(source.state_dict())


class TestFloat8:
    """torch takes the parameters too, and fails in the step."""

    @pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
    def test_frozen_or_without_gradient(self, lowering: str) -> None:
        params = [torch.zeros(2).to(torch.float8_e4m3fn) for _ in range(2)]
        optimizer = co.AdamW([nn.Parameter(params[0]), params[1], nn.Parameter(torch.ones(2))], lowering=lowering)
        optimizer.param_groups[0]["params"][2].grad = torch.ones(2)
        optimizer.step()
        assert optimizer.param_groups[0]["params"][2][0] < 1
        assert optimizer.state_dict()["state"].keys() == {2}

    def test_with_gradient(self) -> None:
        param = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
        param.grad = torch.ones_like(param)
        with pytest.raises((RuntimeError, ValueError)):
            torch.optim.AdamW([param]).step()
        with pytest.raises(ValueError, match=r"can't optimize .*: its dtype is torch.float8_e4m3fn"):
            co.AdamW([param]).step()


def _tied(kind: type[Any], names: bool) -> Any:
    """An optimizer of two modules that share their first parameter."""
    encoder, decoder = (nn.Linear(2, 2, dtype=torch.float64) for _ in range(2))
    decoder.weight = encoder.weight
    if names:
        return kind([*encoder.named_parameters(), *(("decoder." + n, p) for n, p in decoder.named_parameters())])
    return kind([*encoder.parameters(), *decoder.parameters()])


DUPLICATES = "a parameter group with duplicate parameters"


class TestTwiceInOneGroup:
    def test_both_warn(self) -> None:
        with pytest.warns(UserWarning, match=DUPLICATES):
            _tied(torch.optim.AdamW, names=False)
        with pytest.warns(UserWarning, match=rf"{DUPLICATES}: 'param_groups\[0\]\['params'\]\[2\]' is listed before"):
            ours = _tied(co.AdamW, names=False)
        with pytest.warns(UserWarning, match=rf"{DUPLICATES}: 'a'"):
            co.AdamW([("a", nn.Parameter(torch.ones(2)))] * 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _step(ours)  # and once only
            copy.deepcopy(ours).step()

    @pytest.mark.filterwarnings(f"ignore:.*{DUPLICATES}")
    @pytest.mark.parametrize("kind", DENSE, ids=lambda c: c.__name__)
    def test_it_is_updated_once(self, kind: type[co.CompiledOptimizer]) -> None:
        once, twice = (nn.Parameter(torch.ones(2, 2, dtype=torch.float64)) for _ in range(2))
        arguments = {**required(kind), **_plain(kind)}
        optimizers = kind([once], **arguments), kind([twice, twice], **arguments)
        for _ in range(2):
            for param, optimizer in zip((once, twice), optimizers, strict=True):
                param.grad = param.detach().clone()
                optimizer.step(*([lambda: torch.ones(())] if kind is co.LBFGS else []))
        assert torch.equal(once, twice)
        resumed = kind([twice, twice], **arguments)
        assert not any(resumed.load_state_dict(through_a_file(optimizers[1].state_dict())))

    @pytest.mark.filterwarnings(f"ignore:.*{DUPLICATES}")
    def test_clipping_counts_it_once(self) -> None:
        once, twice = (nn.Parameter(torch.ones(2)) for _ in range(2))
        for params in ([once], [twice, twice]):
            optimizer = co.SGD(params, lr=1.0, max_grad_norm=0.5)
            _step(optimizer)
        assert torch.equal(once, twice)

    @pytest.mark.filterwarnings(f"ignore:.*{DUPLICATES}")
    def test_checkpoints_are_exchanged(self) -> None:
        theirs, ours = _twins(lambda kind: _tied(kind, names=False))
        _step(theirs), _step(ours)
        saved = ours.state_dict(), theirs.state_dict()
        assert saved[0]["param_groups"][0]["params"] == saved[1]["param_groups"][0]["params"] == [2, 1, 2, 3]
        assert saved[0]["state"].keys() == saved[1]["state"].keys() == {1, 2, 3}
        theirs.load_state_dict(through_a_file(saved[0]))
        assert not any(ours.load_state_dict(through_a_file(saved[1])))
        for param, bias in (ours.param_groups[0]["params"][:2], ours.param_groups[0]["params"][2:]):
            assert ours.state[param]["exp_avg"].shape == param.shape
            assert ours.state[bias]["exp_avg"].shape == bias.shape
        theirs.load_state_dict(through_a_file(ours.state_dict()))
        weight = theirs.param_groups[0]["params"][0]
        assert torch.equal(theirs.state[weight]["exp_avg"], ours.state[ours.param_groups[0]["params"][0]]["exp_avg"])

    @pytest.mark.filterwarnings(f"ignore:.*{DUPLICATES}")
    def test_names_of_torch(self) -> None:
        theirs, ours = _twins(lambda kind: _tied(kind, names=True))
        _step(theirs), _step(ours)
        saved = through_a_file(theirs.state_dict())
        assert saved["param_groups"][0]["params"] == [2, 1, 2, 3]
        (weight, *_), (own, *_) = (o.param_groups[0]["params"] for o in (theirs, ours))
        theirs.state[weight]["exp_avg"].fill_(7)
        assert not any(ours.load_state_dict(through_a_file(theirs.state_dict())))
        assert ours.state[own]["exp_avg"].tolist() == [[7, 7], [7, 7]]

    @pytest.mark.filterwarnings(f"ignore:.*{DUPLICATES}")
    def test_a_checkpoint_that_is_tied_in_another_way(self) -> None:
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        tied, untied, other = co.SGD([a, b, a]), co.SGD([a, b, nn.Parameter(torch.ones(2))]), co.SGD([a, a, b])
        with pytest.raises(ValueError, match="the checkpoint lists parameter 2 twice"):
            untied.load_state_dict(tied.state_dict())
        with pytest.raises(ValueError, match="the checkpoint lists parameter 2 twice"):
            other.load_state_dict(tied.state_dict())
        with pytest.raises(ValueError, match=r"param_groups\[0\] has a parameter twice where the checkpoint has two"):
            tied.load_state_dict(untied.state_dict())

    def test_appended_by_hand(self) -> None:
        param = nn.Parameter(torch.ones(2))
        optimizer = co.SGD([param], lr=0.5)
        optimizer.param_groups[0]["params"].append(param)
        _step(optimizer)
        assert param.tolist() == [0.5, 0.5]

    @pytest.mark.filterwarnings(f"ignore:.*{DUPLICATES}")
    def test_distributed_checkpoints(self) -> None:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizers = [kind([*model.parameters(), model[0].weight]) for kind in OPTIMIZERS]
        for optimizer in optimizers:
            _step(optimizer)
        saved = [get_optimizer_state_dict(model, optimizer) for optimizer in optimizers]
        assert [s["param_groups"][0]["params"] for s in saved] == [
            ["0.weight", "0.bias", "1.weight", "1.bias", "0.weight"]
        ] * 2
        set_optimizer_state_dict(model, optimizers[1], saved[0])
        assert optimizers[1].state[model[0].weight]["step"] == 2  # torch.optim took two steps of it

    def test_two_groups_are_refused(self) -> None:
        weight = nn.Parameter(torch.ones(2))
        for kind in OPTIMIZERS:
            with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
                kind([{"params": [weight]}, {"params": [weight]}])


@pytest.mark.parametrize("names", [True, False])
class TestRepeatedGroups:
    """``param_groups.extend(param_groups)``: torch.optim steps twice then, and numbers each parameter once."""

    @staticmethod
    def _pair(names: bool) -> list[Any]:
        def make(kind: type[Any]) -> Any:
            model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2))
            params = list(model.named_parameters() if names else model.parameters())
            return kind([{"params": params[:1]}, {"params": params[1:], "lr": 0.02}], lr=0.1)

        once, repeated = (_twins(make)[1] for _ in range(2))
        repeated.param_groups.extend(repeated.param_groups)
        return [once, repeated]

    def test_are_updated_once(self, names: bool) -> None:
        torch._dynamo.reset()
        once, repeated = self._pair(names)
        for optimizer in (once, repeated):
            optimizer.max_grad_norm = 0.5
            _step(optimizer, 3)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (once, repeated)]
        for optimizer, scheduler in zip((once, repeated), schedulers, strict=True):
            scheduler.step()
            optimizer.schedule(weight_decay=lambda step: 0.1 / step, group=1)
            torch.compile(optimizer.step, fullgraph=True, backend="eager")()
        assert [float(group["lr"]) for group in repeated.param_groups] == [0.05, 0.01, 0.05, 0.01]
        for ours, theirs in zip(_params(once), _params(repeated), strict=True):
            assert torch.equal(ours, theirs)

    def test_are_saved_once(self, names: bool) -> None:
        once, repeated = self._pair(names)
        for optimizer in (once, repeated):
            _step(optimizer)
        assert repeated.state_dict()["param_groups"] == once.state_dict()["param_groups"]
        (loaded, again) = self._pair(names)
        for optimizer in (loaded, again, copy.deepcopy(repeated)):
            assert not any(optimizer.load_state_dict(through_a_file(repeated.state_dict())))
            _step(optimizer)
            assert all(s["step"] == 2 for s in optimizer.state.values())

    def test_a_parameter_of_two_groups_is_refused(self, names: bool) -> None:
        _, repeated = self._pair(names)
        group = repeated.param_groups[0]
        repeated.param_groups.append({key: group[key] for key in ("params", "param_names") if key in group})
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
            repeated.step()


def _params(optimizer: Any) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups[:2] for param in group["params"]]


SHARED = "two parameters are named 'weight'"


def _joined(kind: type[Any], first: int = 2, modules: int = 2) -> Any:
    """An optimizer of modules whose parameters have the same names."""
    linear = [nn.Linear(first + i, 2, bias=False, dtype=torch.float64) for i in range(modules)]
    return kind([pair for module in linear for pair in module.named_parameters()])


class TestEqualNames:
    def test_a_warning(self) -> None:
        _joined(torch.optim.AdamW)
        with pytest.warns(UserWarning, match=rf"{SHARED}.*; give the names of each model a prefix"):
            _joined(co.AdamW)
        optimizer = co.AdamW([("weight", nn.Parameter(torch.ones(2)))])
        with pytest.warns(UserWarning, match=SHARED):
            optimizer.add_param_group({"params": [("weight", nn.Parameter(torch.ones(2)))]})

    @pytest.mark.filterwarnings(f"ignore:{SHARED}")
    def test_training_and_checkpoints(self) -> None:
        theirs, ours = _twins(_joined)
        for optimizer in (theirs, ours):
            _step(optimizer, 2)
        torch.testing.assert_close(_values(ours), _values(theirs), rtol=1e-12, atol=0)
        theirs.load_state_dict(through_a_file(ours.state_dict()))
        assert not any(ours.load_state_dict(through_a_file(theirs.state_dict())))
        assert not any(ours.load_state_dict(through_a_file(ours.state_dict())))
        with pytest.raises(ValueError, match="names parameter 'weight' twice"):
            co.named_state_dict(ours)

    @pytest.mark.filterwarnings(f"ignore:{SHARED}")
    def test_the_order_among_them_counts_and_nothing_is_mixed_up(self) -> None:
        ours = _joined(co.AdamW, 2, 3)
        _step(ours)
        assert [v["exp_avg"].shape[1] for v in ours.state_dict()["state"].values()] == [2, 3, 4]
        for modules in (1, 2):
            with pytest.raises(ValueError, match=r"names parameter 'weight' twice|weight \(1 of 2\)"):
                _joined(co.AdamW, 2, modules).load_state_dict(ours.state_dict())
        with pytest.raises(ValueError, match=r"weight \(1 of 3\): exp_avg has shape \(2, 2\) instead of \(2, 3\)"):
            _joined(co.AdamW, 3, 3).load_state_dict(ours.state_dict())

    @pytest.mark.filterwarnings("ignore:two parameters are named")
    def test_an_alias_that_is_another_parameters_name(self) -> None:
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        for params in ([("a", a), ("b", b), ("b", a)], [("a", a), ("b", a), ("b", b)]):
            optimizer = co.AdamW(params)
            _step(optimizer)
            assert not any(optimizer.load_state_dict(through_a_file(optimizer.state_dict())))
        grouped = co.AdamW([{"params": [("a", a), ("b", a)]}, {"params": [("b", b)]}])
        assert not any(grouped.load_state_dict(through_a_file(grouped.state_dict())))

    @pytest.mark.filterwarnings("ignore:two parameters are named")
    def test_lbfgs(self) -> None:
        sources = [nn.Parameter(torch.full((n,), float(n))) for n in (2, 3)]
        made = [co.LBFGS([("w", sources[0]), ("w", sources[1])], max_iter=3) for _ in range(2)]

        def closure() -> torch.Tensor:
            made[0].zero_grad()
            loss = sources[0].square().sum() + 3 * sources[1].square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        made[0].step(closure)
        made[1].load_state_dict(through_a_file(made[0].state_dict()))
        directions = [optimizer.state[sources[0]]["d"] for optimizer in made]
        assert torch.equal(*directions)


class TestLazy:
    @pytest.mark.parametrize("kind", [co.AdamW, co.SGD, co.Adafactor, co.Muon, co.LBFGS], ids=lambda c: c.__name__)
    def test_it_is_updated_once_initialized(self, kind: type[co.CompiledOptimizer]) -> None:
        results = []
        for made in (kind, getattr(torch.optim, kind.__name__)):
            torch.manual_seed(0)
            model = nn.LazyLinear(2, bias=False)
            if made is torch.optim.Muon:  # torch.optim.Muon asks for the size at construction
                model(torch.ones(1, 3))
            optimizer = made(model.parameters(), lr=0.1, **(_plain(kind) if made is kind else {}))
            assert optimizer.state_dict()["state"] == {}

            def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.ones(1, 3)).square().sum()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            if kind is not co.LBFGS:
                optimizer.step()  # without gradients nothing is done
            for _ in range(2):
                optimizer.step(closure)
            results.append(model.weight.detach())
        rough = 1e-2 if kind is co.Muon else 1e-5  # the iteration of torch.optim.Muon is in bfloat16
        torch.testing.assert_close(*results, rtol=rough, atol=rough)

    def test_its_state_is_not_loaded_before(self) -> None:
        model = nn.Linear(3, 2)
        source = co.AdamW(model.parameters())
        _step(source)
        lazy = nn.LazyLinear(2)
        target = co.AdamW(lazy.named_parameters())
        with pytest.raises(ValueError, match="weight: it is not initialized yet"):
            co.AdamW(lazy.named_parameters()).load_state_dict(
                co.AdamW(model.named_parameters()).state_dict() | {"state": source.state_dict()["state"]}
            )
        lazy(torch.ones(1, 3))
        assert not any(target.load_state_dict(source.state_dict()))
        assert target.state[lazy.weight]["step"] == 1

    def test_a_matrix_is_demanded_once_it_is_initialized(self) -> None:
        model = nn.LazyLinear(2)
        optimizer = co.Muon(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ValueError, match="only supports 2D parameters"):
            optimizer.step()


_LAYER = nn.Linear(2, 2)

WRONG: dict[str, tuple[Any, str]] = {
    "method": (_LAYER.parameters, r"iterable of Tensors or dicts, but got .*; did you mean to call it: parameters\(\)\?"),
    "None": (None, "iterable of Tensors or dicts, but got NoneType"),
    "module": (_LAYER, r"but got torch.nn.modules.linear.Linear; did you mean its parameters\(\)\?"),
    "iterable module": (nn.Sequential(_LAYER), r"Sequential; did you mean its parameters\(\)\?"),
    "modules": ([_LAYER], r"one of the params is torch.nn.modules.linear.Linear .*; did you mean its parameters\(\)\?"),
    "state dict": (_LAYER.state_dict(), r"of tensors without gradients; did you mean named_parameters\(\)"),
    "mapping": ({"a": torch.ones(2)}, "of tensors without gradients"),
    "number": (3, "but got int"),
}


class TestMessages:
    @pytest.mark.parametrize("params", WRONG)
    def test_what_are_no_parameters(self, params: str) -> None:
        given, message = WRONG[params]
        with pytest.raises(TypeError):
            torch.optim.AdamW(given)
        with pytest.raises(TypeError, match=message):
            co.AdamW(given)
        with pytest.raises(TypeError, match=message.replace("iterable of Tensors or dicts, ", "")):
            co.AdamW([{"params": given}])

    @pytest.mark.parametrize("kind", registry(), ids=lambda c: c.__name__)
    def test_numbers_are_checked_first(self, kind: type[co.CompiledOptimizer]) -> None:
        for made in (kind, getattr(torch.optim, kind.__name__, kind)):
            with pytest.raises(ValueError, match=r"(?i)invalid learning rate|learning rate should be"):
                made(None, lr=-1.0)

    def test_a_group_without_params(self) -> None:
        with pytest.raises(ValueError, match=r"param_groups\[0\] has no 'params'"):
            co.AdamW([{"lr": 0.1}])
        optimizer = co.AdamW([nn.Parameter(torch.ones(2))])
        with pytest.raises(ValueError, match=r"param_groups\[1\] has no 'params'"):
            optimizer.add_param_group({"param": [nn.Parameter(torch.ones(2))]})

    def test_a_non_leaf_and_nothing(self) -> None:
        for kind in OPTIMIZERS:
            with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
                kind([nn.Parameter(torch.ones(2)).to(torch.float64)])
            with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
                kind({})
        for own in registry():  # with the choice ``differentiable``, which lets it be, or without
            with pytest.raises(ValueError, match=r"computed from another, as .to\(\) does"):
                own([nn.Parameter(torch.ones(2, 2)).to(torch.float64)], **required(own))

    def test_frozen_parameters_are_no_mistake(self) -> None:
        model = nn.Linear(2, 2).requires_grad_(False)
        optimizer = co.AdamW(dict(model.named_parameters()))
        model.requires_grad_(True)
        _step(optimizer)
        assert len(optimizer.state_dict()["state"]) == 2


@pytest.mark.parametrize("lowering", ["eager", "multi_tensor"])
def test_parameters_can_be_swapped(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch swaps parameters where a module that holds wrappers is converted, or where it is told to."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    wide = copy.deepcopy(model).double()
    x = torch.randn(4, 3)
    kept = model.weight
    ours = co.AdamW(model.named_parameters(), lr=0.1, weight_decay=0.3, lowering=lowering)
    theirs = torch.optim.AdamW(wide.parameters(), lr=0.1, weight_decay=0.3)
    for turn in range(4):
        if turn == 2:
            model.double()
        for net, optimizer in ((model, ours), (wide, theirs)):
            optimizer.zero_grad()
            net(x.to(net.weight.dtype)).square().mean().backward()
            optimizer.step()
    assert model.weight is kept
    assert ours.param_groups[0]["param_names"] == ["weight", "bias"]
    torch.testing.assert_close(model.weight, wide.weight, rtol=1e-6, atol=1e-6)
