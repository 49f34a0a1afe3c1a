"""u-muP's optimizers against unit_scaling.optim, whose groups have one parameter each."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from round_trips import pickled
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import engine_of

uu = pytest.importorskip("unit_scaling")

DEPTHS = (None, 1, 3, 24)
KINDS = {"Adam": co.mup.Adam, "AdamW": co.mup.AdamW, "SGD": co.mup.SGD}
NO_DECAY: dict[str, Any] = {"lr": 0.3}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, NO_DECAY) for name in KINDS),
    ("Adam", {"lr": 0.3, "betas": (0.6, 0.8), "eps": 1e-3, "weight_decay": 0.02}),
    ("Adam", {"lr": 0.3, "weight_decay": 0.02, "amsgrad": True, "decoupled_weight_decay": True}),
    ("Adam", {"lr": 0.3, "eps": 1e-3, "weight_decay": 0.3, "independent_weight_decay": False}),
    ("AdamW", {"lr": 0.3, "betas": (0.6, 0.8), "weight_decay": 0.02}),
    ("AdamW", {"lr": 0.3, "weight_decay": 0.3, "independent_weight_decay": False, "maximize": True}),
    ("SGD", {"lr": 0.3, "weight_decay": 0.02, "momentum": 0.8, "nesterov": True}),
    ("SGD", {"lr": 0.003, "weight_decay": 0.02, "momentum": 0.8, "readout_constraint": "to_output_scale"}),
    ("SGD", {"lr": 0.003, "weight_decay": 0.3, "independent_weight_decay": False, "readout_constraint": "to_output_scale"}),
]


def _model(constraint: str | None = None) -> nn.Module:
    """Every layer that has parameters, some of them in stacks."""
    torch.manual_seed(0)
    width = 6
    return nn.ModuleDict(
        {
            "embedding": uu.Embedding(9, width),
            "convolution": uu.Conv1d(width, width, 3, padding=1, bias=True),
            "stack": uu.DepthSequential(
                *(nn.Sequential(uu.LayerNorm(width), uu.Linear(width, width, bias=True)) for _ in range(3))
            ),
            "norm": uu.RMSNorm(width, elementwise_affine=True),
            "readout": uu.LinearReadout(width, 5, bias=True, constraint=constraint),
        }
    ).double()


def _loss(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(9, (4, 7), generator=torch.Generator().manual_seed(step))
    x = model["embedding"](tokens)
    x = model["convolution"](x.mT).mT
    x = model["readout"](model["norm"](model["stack"](x)))
    return (x - x.detach().cos() - step % 3).square().mean()


def _tagged(shape: tuple[int, ...], kind: str = "weight", depth: int | None = None) -> nn.Parameter:
    return uu.Parameter(torch.ones(shape), kind, depth)


def _train(model: nn.Module, optimizer: Any, steps: int = 20) -> list[Tensor]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1.2 - step / 20))
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in model.parameters()]


def _scales(optimizer: Any) -> list[float]:
    (lowering,) = engine_of(optimizer).current().lowerings
    return lowering.plan.numbers["lr_scale"]


class TestScales:
    SHAPES = [(7,), (8, 4), (5, 3, 2), (1,), (48, 1, 3), (1000, 333)]
    KINDS = ["weight", "bias", "norm", "output"]

    @pytest.mark.parametrize("constraint", [None, "to_output_scale"])
    @pytest.mark.parametrize("depth", DEPTHS)
    def test_are_equal_bit_for_bit(self, depth: int | None, constraint: str | None) -> None:
        for shape in self.SHAPES:
            for kind in self.KINDS:
                param = _tagged(shape, kind, depth)
                assert co.mup.lr_scale_for_adam("p", param) == uu.optim.lr_scale_func_adam(param)
                ours = co.mup.lr_scale_for_sgd("p", param, readout_constraint=constraint)
                assert ours == uu.optim.lr_scale_func_sgd(constraint)(param)

    @pytest.mark.parametrize(("name", "options"), CASES)
    def test_of_a_model_and_its_first_learning_rates(self, name: str, options: dict[str, Any]) -> None:
        constraint = options.get("readout_constraint")
        model = _model(constraint)
        theirs = getattr(uu.optim, name)(model.parameters(), **options)
        ours = KINDS[name](model.named_parameters(), **options)
        assert [options["lr"] * scale for scale in _scales(ours)] == [g["lr"] for g in theirs.param_groups]

    def test_of_tensors_without_elements(self) -> None:
        assert co.mup.lr_scale_for_adam("p", _tagged((3, 0))) == 1.0

    @pytest.mark.parametrize("kind", [co.Muon, co.SGD, co.Lion])
    def test_for_any_optimizer(self, kind: type[co.CompiledOptimizer]) -> None:
        params = {"a": _tagged((4, 16)), "b": _tagged((4, 9), depth=4)}
        optimizer = kind(params, lr=0.1, lr_scale=co.mup.lr_scale_for_adam)
        assert _scales(optimizer) == [0.25, 1 / 6]


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_unit_scaling(name: str, options: dict[str, Any], lowering: str) -> None:
    """In one group, and one call of a kernel."""
    models = [_model(options.get("readout_constraint")) for _ in range(2)]
    ours = KINDS[name](models[0].named_parameters(), lowering=lowering, **options)
    theirs = getattr(uu.optim, name)(models[1].parameters(), **options)
    start = [p.detach().clone() for p in models[0].parameters()]
    results = _train(models[0], ours), _train(models[1], theirs)
    assert len(ours.param_groups) == 1
    assert len(theirs.param_groups) == len(start) > 10
    for param, twin, before in zip(*results, start, strict=True):
        assert twin.isfinite().all()
        assert not torch.equal(twin, before)
        assert (param - twin).norm() <= 1e-6 * twin.norm()


@pytest.mark.parametrize("name", KINDS)
def test_groups_have_their_own_rates(name: str) -> None:
    results = []
    for kind in (KINDS[name], getattr(uu.optim, name)):
        model = _model()
        head, *rest = model.parameters()
        groups = [{"params": [head], "lr": 0.1, "weight_decay": 0.05}, {"params": rest, "maximize": True}]
        results.append(_train(model, kind(groups, lr=0.02, weight_decay=0.01), 6))
    for param, twin in zip(*results, strict=True):
        assert (param - twin).norm() <= 1e-6 * twin.norm()


class TestWhatUnitScalingDoesWrong:
    def test_arguments_by_position(self) -> None:
        """They are torch.optim's, in its order."""
        params = [_tagged((4, 16))]
        with pytest.raises(TypeError):
            uu.optim.Adam(params, 0.1, (0.5, 0.6))
        group = co.mup.Adam(params, 0.1, (0.5, 0.6), 1e-3, 0.2, True).param_groups[0]
        assert (group["betas"], group["eps"], group["weight_decay"], group["amsgrad"]) == ((0.5, 0.6), 1e-3, 0.2, True)
        group = co.mup.SGD(params, 0.1, 0.9, 0.0, 0.3, True).param_groups[0]
        assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.9, 0.3, True)
        for name, kind in KINDS.items():
            torchs, ours = inspect.signature(getattr(torch.optim, name)), inspect.signature(kind).parameters
            positional = [p.name for p in torchs.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert [*ours][: len(positional)] == positional
            theirs = inspect.signature(getattr(uu.optim, name)).parameters.values()
            for parameter in (p for p in theirs if p.kind is p.KEYWORD_ONLY or p.name == "lr"):
                assert ours[parameter.name].default == parameter.default

    @pytest.mark.parametrize("name", KINDS)
    def test_names_dicts_and_groups_of_them(self, name: str) -> None:
        model = _model()
        with pytest.raises(AttributeError):
            getattr(uu.optim, name)(model.named_parameters())
        named = dict(model.named_parameters())
        half = dict(list(named.items())[:4]), dict(list(named.items())[4:])
        for params in (model.named_parameters(), named, [{"params": part} for part in half]):
            optimizer = KINDS[name](params)
            assert _scales(optimizer) == [co.mup.lr_scale_for_adam(n, p) for n, p in named.items()]
            assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "embedding.weight"

    @pytest.mark.parametrize("name", KINDS)
    def test_a_learning_rate_of_0(self, name: str) -> None:
        """A warm-up may begin there; ``max_lr`` then says what decay is compared to."""
        with pytest.raises(ZeroDivisionError):
            getattr(uu.optim, name)([_tagged((4, 16))], lr=0.0, weight_decay=0.1)
        results = []
        for first, options in ((0.0, {"max_lr": 0.2}), (0.2, {})):
            param = _tagged((4, 16))
            optimizer = KINDS[name]([param], lr=first, weight_decay=0.1, **options)
            for lr in (0.0, 0.1, 0.2):
                optimizer.param_groups[0]["lr"] = lr
                param.grad = torch.ones_like(param)
                before = param.detach().clone()
                optimizer.step()
                assert torch.equal(param, before) == (lr == 0.0)
            results.append(param.detach())
        assert torch.equal(*results)
        twin, plain = _tagged((4, 16)), _tagged((4, 16))
        with pytest.warns(UserWarning, match="weights will not decay"):
            without = KINDS[name]([twin], lr=0.0, weight_decay=0.1), KINDS[name]([plain], lr=0.0)
        for optimizer in without:
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 16)
            optimizer.step()
        assert torch.equal(twin, plain)

    @pytest.mark.parametrize("name", KINDS)
    def test_added_groups_are_scaled_and_decay_as_asked(self, name: str) -> None:
        params = {"a": _tagged((4, 16)), "b": _tagged((4, 16))}
        theirs = getattr(uu.optim, name)([params["a"]], lr=0.1)
        theirs.add_param_group({"params": [params["b"]], "lr": 0.1})
        assert theirs.param_groups[1]["lr"] == 4 * theirs.param_groups[0]["lr"]
        optimizer = KINDS[name]({"a": params["a"]}, lr=0.1)
        optimizer.add_param_group({"params": {"b": params["b"]}})
        assert _scales(optimizer) == [0.25, 0.25]
        first, second = optimizer.hyperparameters()
        assert first == second
        assert first["weight_decay"] == 0

    @pytest.mark.parametrize("name", KINDS)
    def test_messages_name_the_parameter(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"\(no mup_type\), shape \(2, 3\)$"):
            getattr(uu.optim, name)([nn.Parameter(torch.ones(2, 3))])
        params = {"fc.weight": nn.Parameter(torch.ones(2, 3))}
        with pytest.raises(ValueError, match=r"'fc\.weight', of shape \(2, 3\), has no mup_type and mup_scaling_depth"):
            KINDS[name](params)
        with pytest.raises(
            ValueError, match=r"lr_scale of 'param_groups\[0\]\['params'\]\[0\]', a parameter without a name"
        ):
            KINDS[name](params.values())
        optimizer = KINDS[name](params, allow_non_unit_scaling_params=True)
        assert _scales(optimizer) == [1.0]
        optimizer = KINDS[name]({"a": _tagged((4, 16))})
        with pytest.raises(ValueError, match=r"'fc\.weight', of shape \(2, 3\), has no mup_type"):
            optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == 1


def test_300_scales_are_one_group_and_one_plan() -> None:
    params = {f"p{i}": _tagged((3, 1 + i), depth=3) for i in range(300)}
    optimizer = co.mup.AdamW(params, lr=0.5, weight_decay=0.1)
    assert len(set(_scales(optimizer))) == 300
    assert len(optimizer.param_groups) == 1
    with torch.no_grad():
        for param in params.values():
            param.grad = torch.zeros_like(param)
    optimizer.step()
    for param in params.values():  # decay is independent of the scale
        torch.testing.assert_close(param, torch.full_like(param, 0.9))


@pytest.mark.usefixtures("one_process")
def test_sharded_models_bring_their_scales() -> None:
    """FSDP2 makes new parameters, without what was noted on the old ones."""
    from torch.distributed.fsdp import fully_shard

    results = []
    for shards in (False, True):
        model = nn.Sequential(uu.Linear(16, 4), uu.Linear(4, 4, bias=True))
        for i, param in enumerate(model.parameters()):
            nn.init.constant_(param, 0.1 * (i + 1))
        scales = {name: co.mup.lr_scale_for_adam(name, param) for name, param in model.named_parameters()}
        if shards:
            fully_shard(model)
            with pytest.raises(
                ValueError, match=r"'0\.weight', of .* before they are sharded; pass lr_scale, or allow_non_unit"
            ):
                co.mup.AdamW(model.named_parameters())
        optimizer = co.mup.AdamW(model.named_parameters(), weight_decay=0.1, lr_scale=scales if shards else None)
        for param in model.parameters():
            param.grad = param.detach().clone()
        optimizer.step()
        results.append([p.full_tensor() if shards else p for p in model.parameters()])
    torch.testing.assert_close(*results)


class TestErrors:
    @pytest.mark.parametrize(
        ("param", "said"),
        [
            (_tagged((2, 3, 4, 5)), r"no fan-in for 4 dimensions; 'p', of shape \(2, 3, 4, 5\), has them"),
            (_tagged(()), "no fan-in for 0 dimensions"),
            (_tagged((2,), "bias", 0), r"mup_scaling_depth of 'p', of shape \(2,\), must be >= 1, got 0"),
            (_tagged((2,), "bias", -4), "must be >= 1, got -4"),
        ],
    )
    def test_parameters(self, param: nn.Parameter, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            co.mup.Adam({"p": param})

    def test_arguments(self) -> None:
        params = {"p": _tagged((2, 3))}
        with pytest.raises(ValueError, match="readout_constraint must be None or 'to_output_scale', got 'gmean'"):
            co.mup.SGD(params, readout_constraint="gmean")
        for name, value in {"decouple_lr": True, "decouple_wd": True}.items():
            with pytest.raises(TypeError, match=f"co.mup.Adam sets {name} itself; pass it to co.Adam instead"):
                co.mup.Adam(params, **{name: value})
        with pytest.raises(TypeError, match="the argument independent_weight_decay must be a bool, got 1"):
            co.mup.AdamW(params, independent_weight_decay=1)
        with pytest.raises(TypeError, match=r"independent_weight_decay is an option of the whole optimizer"):
            co.mup.AdamW([{"params": params, "independent_weight_decay": False}])


class TestCopiesAndCheckpoints:
    @pytest.mark.parametrize("name", KINDS)
    def test_copies_go_on_alike(self, name: str) -> None:
        model = _model()
        optimizer = KINDS[name](model.named_parameters(), lr=0.1, weight_decay=0.1)
        _train(model, optimizer, 2)
        for make in (copy.deepcopy, pickled):
            _, twin = make((model, optimizer))
            assert _scales(twin) == _scales(optimizer)
            twin.add_param_group({"params": {"new": _tagged((4, 16))}})
            assert _scales(twin)[-1] == 0.25

    @pytest.mark.parametrize("name", KINDS)
    def test_resumes_by_name(self, name: str) -> None:
        options = {"lr": 0.1, "weight_decay": 0.1}
        model, resumed = _model(), _model()
        optimizer = KINDS[name](model.named_parameters(), **options)
        _train(model, optimizer, 3)
        resumed.load_state_dict(model.state_dict())
        twin = KINDS[name](list(resumed.named_parameters())[::-1], **options)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for expected, param in zip(_train(model, optimizer, 3), _train(resumed, twin, 3), strict=True):
            assert (expected - param).norm() <= 1e-12 * expected.norm()

    @pytest.mark.parametrize("name", KINDS)
    def test_takes_over_the_state_of_unit_scaling(self, name: str) -> None:
        """With the learning rates kept: those in its checkpoint are scaled."""
        options = {"lr": 0.1, "weight_decay": 0.1}
        model, resumed = _model(), _model()
        theirs = getattr(uu.optim, name)(model.parameters(), **options)
        for step in range(3):
            theirs.zero_grad()
            _loss(model, step).backward()
            theirs.step()
        resumed.load_state_dict(model.state_dict())
        groups = [{"params": {n: p}} for n, p in resumed.named_parameters()]
        twin = KINDS[name](groups, **options)
        twin.load_state_dict(theirs.state_dict(), hyperparameters="keep")
        for expected, param in zip(_train(model, theirs, 3), _train(resumed, twin, 3), strict=True):
            assert (expected - param).norm() <= 1e-6 * expected.norm()
