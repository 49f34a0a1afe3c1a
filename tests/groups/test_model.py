"""Groups and dtypes by the names of a model's parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import compiled_optim as co


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rotary_freq", torch.linspace(0, 1, 3))
        self.register_buffer("count", torch.arange(3), persistent=False)
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))


def _shape(groups: list[dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
    return [([n for n, _ in group["params"]], {k: v for k, v in group.items() if k != "params"}) for group in groups]


class TestParamGroups:
    def test_by_pattern_and_the_rest(self) -> None:
        groups = co.param_groups(Block(), {"*.bias|*norm*": {"weight_decay": 0}, "embed.*": {"lr": 0.3, "eps": 0.2}})
        assert _shape(groups) == [
            (["norm.weight", "norm.bias", "fc.bias"], {"weight_decay": 0}),
            (["embed.weight"], {"lr": 0.3, "eps": 0.2}),
            (["fc.weight"], {}),
        ]

    @pytest.mark.parametrize("optimizer", [co.AdamW, torch.optim.AdamW])
    def test_for_our_optimizers_and_torchs(self, optimizer: Any) -> None:
        model = Block()
        model.fc.weight.requires_grad_(False)
        made = optimizer(co.param_groups(model, {"*norm*": {"weight_decay": 0.0}}), lr=0.25, weight_decay=0.5)
        assert [group["weight_decay"] for group in made.param_groups] == [0.0, 0.5]
        assert [group["lr"] for group in made.param_groups] == [0.25, 0.25]
        assert [n for group in made.param_groups for n in group["param_names"]] == [
            *("norm.weight", "norm.bias"),
            *("embed.weight", "fc.weight", "fc.bias"),
        ]
        assert {id(p) for group in made.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}

    @pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
    def test_wrappers_do_not_matter(self, wrap: Any) -> None:
        patterns = {"fc.*": {"lr": 0.5}, "norm.*": {"lr": 0.25}}
        plain, wrapped = co.param_groups(Block(), patterns), co.param_groups(wrap(Block()), patterns)
        assert [len(group["params"]) for group in plain] == [len(group["params"]) for group in wrapped] == [2, 2, 1]
        assert all(n.startswith(("module.", "_orig_mod.")) for group in wrapped for n, _ in group["params"])
        assert len(co.param_groups(wrap(Block()), {"module.*|_orig_mod.*": {}})) == 1

    @pytest.mark.parametrize("pattern", ["embed*", "head*", "embed*|head*"])
    def test_a_tied_parameter_matches_by_any_name(self, pattern: str) -> None:
        groups = co.param_groups(Block(), {pattern: {"lr": 0.5}})
        assert _shape(groups)[0] == (["embed.weight"], {"lr": 0.5})

    def test_a_last_pattern_for_the_rest(self) -> None:
        groups = co.param_groups(Block(), {"*norm*": {"lr": 0.5}, "*": {"lr": 0.25}})
        assert [(len(names), options["lr"]) for names, options in _shape(groups)] == [(2, 0.5), (3, 0.25)]
        assert len(co.param_groups(Block(), {"*e*|*fc*|*norm*": {}, "*": {"lr": 0.25}})) == 1
        with pytest.raises(
            ValueError, match=r"parameter 'norm.weight' matches both the pattern '\*' and the pattern 'norm\*'"
        ):
            co.param_groups(Block(), {"*": {}, "norm*": {}})

    def test_pairs_and_dicts_of_parameters(self) -> None:
        model = Block()
        expected = _shape(co.param_groups(model, {"*norm*": {"lr": 0.5}}))
        assert _shape(co.param_groups(model.named_parameters(), {"*norm*": {"lr": 0.5}})) == expected
        assert _shape(co.param_groups(dict(model.named_parameters()), {"*norm*": {"lr": 0.5}})) == expected

    def test_options_are_copied(self) -> None:
        options = {"lr": 0.5}
        groups = co.param_groups(Block(), {"*norm*": options})
        groups[0]["lr"] = 1.0
        assert options == {"lr": 0.5}

    @pytest.mark.parametrize(
        ("patterns", "error", "message"),
        [
            ({"*.baiss": {}}, ValueError, r"the pattern '\*.baiss' matches no parameter; there are embed.weight, norm.we"),
            ({"FC.*": {}}, ValueError, r"the pattern 'FC.\*' matches no parameter"),
            (
                {"*.bias": {"lr": 0.5}, "*norm*": {"lr": 0.5}},
                ValueError,
                r"parameter 'norm.bias' matches both the pattern '\*.bias' and the pattern '\*norm\*'",
            ),
            (
                {"embed*": {}, "head*": {}},
                ValueError,
                r"'embed.weight' matches both the pattern 'embed\*' and the pattern 'h",
            ),
            ({"*.bias|": {}}, ValueError, r"the pattern '\*.bias\|' has an empty alternative"),
            ({"": {}}, ValueError, "the pattern '' has an empty alternative"),
            (
                {"fc*": {"params": []}},
                ValueError,
                r"the options of the pattern 'fc\*' hold 'params', which comes from the model",
            ),
            ({"fc*": 0.1}, TypeError, r"the options of the pattern 'fc\*' must be a dict with names, got 0.1"),
            ({"fc*": {1: 0.1}}, TypeError, r"the options of the pattern 'fc\*' must be a dict with names"),
            ({nn.Linear: {}}, TypeError, "a pattern must be a string, got <class"),
            (["fc*"], TypeError, "patterns must be a dict pattern -> options, got list"),
        ],
        ids=str,
    )
    def test_mistakes(self, patterns: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            co.param_groups(Block(), patterns)

    @pytest.mark.parametrize(
        ("model", "error", "message"),
        [
            (Block().parameters(), TypeError, "model must be a module, or names and parameters"),
            (3, TypeError, "model should be an iterable of Tensors or dicts, but got int"),
            ({"a": 1.0}, TypeError, "'a' of the model is no tensor"),
            ([("a", torch.ones(1)), ("a", torch.ones(1))], ValueError, "two parameters are named 'a'"),
            (nn.ReLU(), ValueError, r"the pattern 'a\*' matches no parameter$"),
        ],
        ids=["tensors", "number", "no tensors", "equal names", "no parameters"],
    )
    def test_mistaken_models(self, model: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            co.param_groups(model, {"a*": {}})


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OTHERS = {"count": torch.int64, "phase": torch.complex64}
ALL_BF16 = dict.fromkeys(("embed.weight", "norm.weight", "norm.bias", "fc.weight", "fc.bias", "rotary_freq"), BF16) | OTHERS


class TestToLowPrecision:
    @pytest.mark.parametrize(
        ("keep", "kept"),
        [
            ((), {}),
            ("*rotary*", {"rotary_freq": FP32}),
            (nn.LayerNorm, {"norm.weight": FP32, "norm.bias": FP32}),
            (["fc.*|norm.*", nn.Embedding], dict.fromkeys(["fc.weight", "fc.bias", "norm.weight", "norm.bias"], FP32)),
            ({"head*": FP64, nn.LayerNorm: FP16, "*rotary*": None, "*": BF16}, {"rotary_freq": FP32, "embed.weight": FP64}),
            ({nn.LayerNorm: FP64, "norm.*": FP64}, {"norm.weight": FP64, "norm.bias": FP64}),
            ({Block: FP64}, dict.fromkeys(ALL_BF16, FP64)),
        ],
        ids=str,
    )
    def test_converts_all_but_what_is_kept(self, keep: Any, kept: dict[str, torch.dtype]) -> None:
        model = Block()
        expected = {**ALL_BF16, **kept, **OTHERS}
        if isinstance(keep, list):
            expected["embed.weight"] = FP32
        if isinstance(keep, dict) and "head*" in keep:
            expected |= {"norm.weight": FP16, "norm.bias": FP16}
        before = {name: t.clone() for name, t in model.state_dict().items()}
        assert co.to_low_precision(model, keep=keep) is model
        assert _dtypes(model) == expected
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name].to(value.dtype))

    def test_modules_that_list_their_parameters_in_their_own_way(self) -> None:
        class Own(nn.Linear):
            def named_parameters(self, recurse: bool = True) -> Any:  # type: ignore[override]
                return iter(())

        assert {p.dtype for p in co.to_low_precision(Own(2, 2))._parameters.values() if p is not None} == {BF16}

    def test_modules_that_convert_in_their_own_way(self) -> None:
        class Own(nn.Linear):
            def _apply(self, fn: Any) -> Any:  # type: ignore[override]
                return super()._apply(fn)

        model = co.to_low_precision(nn.Sequential(nn.Linear(2, 2), Own(2, 2)))
        assert {p.dtype for p in model.parameters()} == {BF16}

    def test_what_is_shared_stays_shared(self) -> None:
        model = Block()
        model.again = nn.Module()
        model.again.register_buffer("rotary_freq", model.rotary_freq)
        params = dict(model.named_parameters())
        for param in params.values():
            param.grad = torch.full_like(param, 0.3)
        co.to_low_precision(model, FP16)
        assert model.head.weight is model.embed.weight
        assert model.again.rotary_freq is model.rotary_freq
        for name, param in model.named_parameters():
            assert param is params[name]
            assert param.requires_grad
            assert param.grad.dtype == FP16
            assert torch.equal(param.grad, torch.full_like(param, 0.3))

    @pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
    def test_wrappers_do_not_matter(self, wrap: Any) -> None:
        inner = Block()
        co.to_low_precision(wrap(inner), keep={"norm.*": FP64})
        assert _dtypes(inner) == {**ALL_BF16, "norm.weight": FP64, "norm.bias": FP64}

    def test_a_converted_model_runs(self) -> None:
        model = nn.Sequential(nn.LSTM(4, 5), nn.LazyLinear(3))
        co.to_low_precision(model)
        out, _ = model[0](torch.ones(2, 4, dtype=BF16))
        assert model[1](out).dtype == BF16

    def test_an_optimizer_that_was_made_before_goes_on(self) -> None:
        """With its state in the dtype that it had."""
        model = Block()
        optimizer = co.SGD(model.named_parameters(), lr=0.5, momentum=0.5)
        co.to_low_precision(model)
        before = model.fc.weight.detach().clone()
        model.fc.weight.grad = torch.ones_like(model.fc.weight)
        optimizer.step()
        assert torch.equal(model.fc.weight, before - 0.5)
        assert optimizer.state[model.fc.weight]["momentum_buffer"].dtype == FP32

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (
                {"keep": "*rope*"},
                ValueError,
                r"the pattern '\*rope\*' matches no parameter or buffer; there are rotary",
            ),
            ({"keep": nn.Conv2d}, ValueError, "the type Conv2d matches no parameter or buffer"),
            (
                {"keep": {nn.LayerNorm: FP64, "*.bias": FP32}},
                ValueError,
                r"parameter or buffer 'norm.bias' matches both the type LayerNorm and the pattern '\*.bias'",
            ),
            (
                {"keep": {"fc.*": torch.int8}},
                TypeError,
                r"the dtype of 'fc.\*' must be a dtype of floating-point numbers, got",
            ),
            ({"keep": {"fc.*": "float32"}}, TypeError, "must be a dtype of floating-point numbers, got 'float32'"),
            ({"dtype": torch.int8}, TypeError, "dtype must be a dtype of floating-point numbers, got torch.int8"),
            ({"dtype": torch.complex64}, TypeError, "dtype must be a dtype of floating-point numbers"),
            ({"keep": 3}, TypeError, "keep must be patterns and types of modules, or a dict"),
            ({"keep": [3]}, TypeError, "a pattern must be a string, got 3"),
            ({"keep": ["a||b"]}, ValueError, r"the pattern 'a\|\|b' has an empty alternative"),
        ],
        ids=str,
    )
    def test_mistakes_change_nothing(self, arguments: Any, error: type[Exception], message: str) -> None:
        model = Block()
        before = copy.deepcopy(_dtypes(model))
        with pytest.raises(error, match=message):
            co.to_low_precision(model, **arguments)
        assert _dtypes(model) == before

    def test_a_failing_conversion_changes_nothing(self) -> None:
        class Stubborn(torch.Tensor):
            def to(self, *args: Any, **kwargs: Any) -> Any:
                raise MemoryError

        model = Block()
        model.register_buffer("last", torch.ones(2).as_subclass(Stubborn))
        before = _dtypes(model)
        with pytest.raises(MemoryError):
            co.to_low_precision(model)
        assert _dtypes(model) == before

    def test_a_model_is_asked_for(self) -> None:
        with pytest.raises(TypeError, match="model must be a module, got dict"):
            co.to_low_precision(dict(Block().named_parameters()))
