"""What each parameter gets from its optimizers, and the mistakes that names, shapes and module types tell."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import registry, required
from torch import nn

import compiled_optim as co
from compiled_optim.model import roles
from compiled_optim.optimizer import engine_of
from compiled_optim.rule.fields import Option, added


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.filters = nn.Conv1d(width, width, 3, groups=width)
        self.experts = nn.Parameter(torch.zeros(4, width, 2 * width))


class GPT(nn.Module):
    """Positions are as many as outputs of ``qkv``; the head is tied."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wte = nn.Embedding(70, width)
        self.wpe = nn.Embedding(3 * width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.lm_head = nn.Linear(width, 70, bias=False)
        self.lm_head.weight = self.wte.weight


MATRICES = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("qkv", "out")]
NUMBERS = {"lr": 0.03, "weight_decay": 0.4, "adamw_lr": 0.007, "adamw_weight_decay": 0.2}


def by_name(found: co.Explanation) -> dict[str, dict[str, Any]]:
    assert len({record["name"] for record in found.records}) == len(found.records)
    return {record["name"]: record for record in found.records}


class TestRecords:
    def test_a_gpt(self) -> None:
        model = GPT()
        found = co.explain(model, co.MuonAdamW(model, **NUMBERS))
        assert found.findings == ()
        records = by_name(found)
        assert [*records] == [name for name, _ in model.named_parameters()]
        assert [name for name, record in records.items() if record["matrices"]] == MATRICES
        for name, param in model.named_parameters():
            record = records[name]
            assert record["shape"] == [*param.shape]
            assert record["dtype"] == "float32"
            assert record["optimizer"] == 0
            is_matrix = name in MATRICES
            assert (record["rule"], record["group"]) == (("Muon", 0) if is_matrix else ("AdamW", 1))
            assert record["weight_decay"] == (0.4 if is_matrix else 0.2)
            assert record["lr"] == pytest.approx(0.03 * 0.2 * math.sqrt(max(param.shape)) if is_matrix else 0.007)
            assert record["matrices"] == ([1, *param.shape] if is_matrix else None)
        assert records["wte.weight"]["aliases"] == ["lm_head.weight"]
        assert records["wte.weight"]["why"] == "matches '*wte*'"
        assert records["blocks.0.experts"]["why"] == "has 3 dimensions"
        assert records["blocks.0.out.weight"]["why"] == "a matrix that no pattern matches"

    @pytest.mark.parametrize(
        ("adjustment", "ratio"),
        [
            ("original", 1.0),
            (None, 1.0),
            ("match_rms_adamw", 0.2 * math.sqrt(40)),
            ("spectral_unclamped", math.sqrt(10 / 40)),
        ],
    )
    def test_the_learning_rate_is_the_one_of_a_step(self, adjustment: str | None, ratio: float) -> None:
        """With orthogonal gradients and a momentum that is new, a step has the norm of its learning rate."""
        weight = nn.Parameter(torch.zeros(10, 40))
        scale = {"fc.weight": 0.25}
        made = co.Muon([("fc.weight", weight)], lr=0.3, adjust_lr_fn=adjustment, lr_scale=scale, weight_decay=0.0)
        (record,) = co.explain({"fc.weight": weight}, made).records
        assert record["lr"] == pytest.approx(0.3 * 0.25 * ratio)
        plain = nn.Parameter(torch.zeros(10, 40))
        other = co.Muon([plain], lr=record["lr"], adjust_lr_fn="original", weight_decay=0.0)
        weight.grad = plain.grad = torch.randn(10, 40)
        made.step(), other.step()
        torch.testing.assert_close(weight, plain)

    def test_a_schedule_and_an_assignment_are_followed(self) -> None:
        weight = nn.Parameter(torch.zeros(3, 4))
        made = co.AdamW([weight], lr=0.5)
        made.param_groups[0]["lr"] = 0.25
        assert co.explain({"w": weight}, made).records[0]["lr"] == 0.25
        made.hyperparameter("lr").fill_(0.125)
        assert co.explain({"w": weight}, made).records[0]["lr"] == 0.125
        made.schedule(lr=lambda step: 0.0625 * step)
        weight.grad = torch.zeros(3, 4)
        made.step(), made.step()
        assert co.explain({"w": weight}, made).records[0]["lr"] == 0.125
        assert co.explain({"w": weight}, made).records[0]["why"] == "default"

    def test_why(self) -> None:
        a, b, c, d, e = (nn.Parameter(torch.zeros(9, 9)) for _ in range(5))
        groups = [
            {"params": [("a", a)]},
            {"params": [("b", b)], "lr": 0.3},
            {"params": [("c", c)], "rule": co.SGD, "lr": 0.2},
            {"params": [("d", d)], "why": "it is new", "lr": 0.1},
            {"params": [("e", e)], "why": {"e": "it is old"}, "lr": 0.4},
        ]
        found = co.explain({"a": a, "b": b, "c": c, "d": d, "e": e}, co.AdamW(groups, lr=0.5))
        assert [r["why"] for r in found.records] == ["default", "its group", "its group", "it is new", "it is old"]
        assert [r["rule"] for r in found.records] == ["AdamW", "AdamW", "SGD", "AdamW", "AdamW"]
        assert [r["weight_decay"] for r in found.records] == [0.01, 0.01, 0.0, 0.01, 0.01]
        assert [r["group"] for r in found.records] == [0, 1, 2, 3, 4]
        assert found.findings == ()

    def test_precision(self) -> None:
        big, kept, full = (nn.Parameter(torch.zeros(64, 64, dtype=d)) for d in (torch.bfloat16,) * 2 + (torch.float32,))
        named = {"big": big, "kept": kept}
        made = co.AdamW(named, weights="split8", state_dtype="int8", exclude=("kept",))
        plain = co.SGD([full])
        found = co.explain(named | {"full": full}, [made, plain])
        assert [record["precision"] for record in found.records] == [
            "bfloat16 split8 state int8, uint8, float32",
            "bfloat16 master state float32",
            "float32",
        ]
        assert [record["optimizer"] for record in found.records] == [0, 0, 1]
        stochastic = co.AdamW({"big": big}, weights="stochastic", state_dtype=torch.float32)
        assert co.explain({"big": big}, stochastic).records[0]["precision"] == "bfloat16 stochastic state float32"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bytes_are_those_of_the_memory_report(self, dtype: torch.dtype) -> None:
        model = GPT(32).to(dtype)
        options = {} if dtype == torch.float32 else {"weights": "kahan", "state_dtype": "int8"}
        matrices = {name: p for name, p in model.named_parameters() if name in MATRICES}
        rest = {name: p for name, p in model.named_parameters() if name not in MATRICES}
        if options:
            options["exclude"] = ("blocks.*.experts",)
        both = [co.Muon(matrices), co.AdamW(rest, **options)]
        for param in [*matrices.values(), *[*rest.values()][:3]]:
            param.grad = torch.zeros_like(param)
        both[1].step()
        model.blocks[0].qkv = nn.Linear(4, 4).requires_grad_(False)  # which leaves two parameters to the optimizers alone
        found = co.explain(model, both)
        for index, report in enumerate(map(co.memory_report, both)):
            own = [record for record in found.records if record["optimizer"] == index]
            assert sum(record["parameter_bytes"] for record in own) == report.weights
            assert sum(record["gradient_bytes"] for record in own) == report.gradients > 0
            assert sum(record["state_bytes"] for record in own) == sum(report.state.values())
        assert {r["optimizer"] for r in found.records if r["name"] == "blocks.0.qkv.bias"} == {None, 1}

    @pytest.mark.parametrize("kind", registry(), ids=lambda c: c.__name__)
    def test_of_every_optimizer(self, kind: type[co.CompiledOptimizer]) -> None:
        weight = matrix()
        made = kind([("w", weight)], **required(kind) | {"lr": 0.25})
        found = co.explain({"w": weight}, made)
        (record,) = found.records
        assert (record["rule"], record["lr"], record["why"]) == (kind.__name__, 0.25, "default")
        assert record["weight_decay"] == made.param_groups[0].get("weight_decay")
        assert record["state_bytes"] == sum(co.memory_report(made).state.values()) > 0
        assert found.findings == ()

    def test_json_can_hold_them(self) -> None:
        model = GPT()
        model.late = nn.LazyLinear(3)
        model.wpe.weight.requires_grad_(False)
        made = co.MuonAdamW({n: p for n, p in model.named_parameters() if n != "late.bias"}, lr_scale={"wte.weight": 0.5})
        found = co.explain(model, made)
        assert len({tuple(record) for record in found.records}) == 1
        assert json.loads(json.dumps(found.records)) == found.records
        assert by_name(found)["late.weight"]["shape"] is None
        assert by_name(found)["late.bias"]["why"] == "no optimizer has it"

    def test_parameters_without_memory(self) -> None:
        with torch.device("meta"):
            model = GPT()
        found = co.explain(model, co.MuonAdamW(model, **NUMBERS))
        assert found.findings == ()
        plain = GPT()
        assert found.records == co.explain(plain, co.MuonAdamW(plain, **NUMBERS)).records

    def test_frozen_and_left_out(self) -> None:
        model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9).requires_grad_(False))
        for params in (model.parameters(), model[0].parameters()):
            found = co.explain(model, co.AdamW(params))
            assert found.findings == ()
            assert [record["state_bytes"] > 0 for record in found.records] == [True, True, False, False]
        assert [record["rule"] for record in found.records] == ["AdamW", "AdamW", None, None]
        assert found.records[2]["why"] == "it requires no gradient"

    @pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
    def test_wrappers_do_not_matter(self, wrap: Any) -> None:
        model = GPT()
        made = co.MuonAdamW(model, lr_scale={"wte.weight": 0.5}, **NUMBERS)
        plain, wrapped = co.explain(model, made), co.explain(wrap(model), made)
        assert wrapped.findings == ()
        assert [r["name"].split(".", 1)[1] for r in wrapped.records] == [r["name"] for r in plain.records]
        other = co.MuonAdamW(wrap(model), lr_scale={"wte.weight": 0.5}, **NUMBERS)
        found = co.explain(model, other)
        assert found.findings == ()
        assert found.records == plain.records

    def test_named_parameters_in_place_of_a_module(self) -> None:
        model = GPT()
        made = co.MuonAdamW(model)
        every = co.explain(model, made).records
        pairs = list(model.named_parameters(remove_duplicate=False))
        assert co.explain(pairs, made).records == co.explain(dict(pairs), made).records == every

    @pytest.mark.usefixtures("one_process")
    def test_of_dtensors(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(16, 64, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        made = co.Muon(model.named_parameters(), lr=0.5)
        found = co.explain(model, made)
        assert found.findings == ()
        (record,) = found.records
        assert record["matrices"] == [1, 64, 16]
        assert record["lr"] == 0.5 * 2
        assert record["parameter_bytes"] == co.memory_report(made).weights == 64 * 16 * 4


_MENTIONS = Option((), valid=lambda value, where: None, patterns=True, name="mentions")


class Stacked(co.Muon):
    """Muon with an option that names parameters."""

    mentions: tuple[str, ...] = added(default=(), kw_only=True)

    _transforms = (*co.Muon._transforms, lambda rule: dataclasses.replace(rule, options=(*rule.options, _MENTIONS)))


Case = tuple[Any, Any, str, list[str]]  # the model, its optimizers, and the kind and names of the finding
CASES: dict[str, Callable[[], Case]] = {}
CLEAN: dict[str, Callable[[], tuple[Any, Any]]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    CASES[function.__name__] = function
    return function


def clean(function: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    CLEAN[function.__name__] = function
    return function


def matrix(rows: int = 9, columns: int = 9) -> nn.Parameter:
    return nn.Parameter(torch.zeros(rows, columns))


def turned_into(shape: tuple[int, ...], **options: Any) -> tuple[nn.Module, co.Muon]:
    """A rule for matrices that has a parameter ``experts`` of another shape than a matrix's."""
    model = nn.Module()
    model.experts = matrix()
    made = Stacked(model.named_parameters(), **options)
    model.experts.data = torch.zeros(shape)
    return model, made


@case
def an_embedding() -> Case:
    model = nn.Sequential(nn.Embedding(20, 9), nn.Linear(9, 9, bias=False))
    return model, co.Muon(model.parameters()), "embedding", ["0.weight"]


@case
def a_bag_of_embeddings_by_another_rule_in_a_group() -> Case:
    model = nn.Sequential(nn.EmbeddingBag(20, 9), nn.Linear(9, 9))
    groups = [{"params": model[0].parameters(), "rule": co.Muon}, {"params": model[1].parameters()}]
    return model, co.AdamW(groups), "embedding", ["0.weight"]


@case
def a_head_that_is_tied() -> Case:
    model = GPT()
    rest = [p for name, p in model.named_parameters() if name not in (*MATRICES, "wte.weight")]
    matrices = [p for name, p in model.named_parameters() if name in (*MATRICES, "wte.weight")]
    return model, [co.Muon(matrices), co.AdamW(rest)], "embedding", ["wte.weight"]


@case
def a_head_by_its_size() -> Case:
    model = nn.Sequential(nn.Embedding(20, 9), nn.Linear(9, 20, bias=False), nn.Linear(20, 9, bias=False))
    model.append(nn.Linear(9, 20, bias=False)).append(nn.Linear(20, 12, bias=False))
    groups = [{"params": model[0].parameters(), "rule": co.AdamW}, {"params": model[1:].parameters()}]
    return model, co.Muon(groups), "head", ["3.weight"]


@case
def a_head_by_its_name() -> Case:
    model = nn.ModuleDict({"classifier": nn.Linear(9, 9, bias=False), "fc": nn.Linear(9, 9, bias=False)})
    model["output"] = nn.Linear(9, 12, bias=False)
    return model, co.Muon(model.parameters()), "head", ["output.weight"]


@case
def depthwise_filters() -> Case:
    model = nn.Conv1d(9, 18, 3, groups=9, bias=False)
    model.weight.data = torch.zeros(18, 9)
    made = co.Muon(model.named_parameters())
    model.weight.data = torch.zeros(18, 1, 3)
    return model, made, "depthwise", ["weight"]


@case
def an_axis_of_experts() -> Case:
    return *turned_into((4, 9, 9)), "axes", ["experts"]


@case
def narrow_matrices() -> Case:
    model = {"wide": matrix(7, 30), "square": matrix(8, 8), "tall": matrix(30, 1)}
    return model, co.Muon(model.values()), "narrow", ["wide", "tall"]


@case
def a_flattened_weight() -> Case:
    model = nn.Sequential(nn.Linear(9, 9), nn.Embedding(20, 9))
    model[0].weight.data = torch.zeros(81)
    return model, co.AdamW(model.parameters()), "placeholder", ["0.weight"]


@case
def a_weight_that_was_flattened_after_the_optimizer_was_made() -> Case:
    model = nn.Linear(9, 9, bias=False)
    made = co.Muon(model.parameters())
    model.weight.data = torch.zeros(81)
    return model, made, "placeholder", ["weight"]


@case
def weights_without_elements() -> Case:
    model = nn.Sequential(nn.Linear(9, 9), nn.Conv2d(9, 9, 3))
    model[0].weight.data, model[1].bias.data = torch.zeros(0), torch.zeros(0)
    return model, co.AdamW(model.parameters()), "placeholder", ["0.weight", "1.bias"]


@case
def a_matrix_without_elements() -> Case:
    model = {"w": matrix(9, 0)}
    return model, co.Muon(model.values()), "placeholder", ["w"]


@case
def a_placeholder_of_deepspeed() -> Case:
    model = nn.Linear(9, 9)
    model.weight.ds_shape = torch.Size((9, 9))
    return model, co.AdamW(model.parameters()), "placeholder", ["weight"]


@case
def parameters_that_no_group_has() -> Case:
    model = GPT()
    rest = [(name, p) for name, p in model.named_parameters() if "qkv" not in name and name not in MATRICES]
    matrices = [(name, model.get_parameter(name)) for name in MATRICES[1:]]
    missing = ["blocks.0.qkv.weight", "blocks.0.qkv.bias", "blocks.1.qkv.bias"]
    return model, [co.Muon(matrices), co.AdamW(rest)], "missing", missing


@case
def a_pattern_that_matches_nothing() -> Case:
    model = nn.Linear(90, 90, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="matches no parameter"):
        made = co.AdamW(model.named_parameters(), weights="kahan", exclude=("bias", "*.bais"))
    return model, made, "pattern", []


@case
def a_pattern_that_nothing_reads_now() -> Case:
    model = nn.Linear(90, 90)
    with pytest.warns(UserWarning, match="matches no parameter"):
        made = co.AdamW(model.named_parameters(), exclude=("*.bais",))
    return model, made, "pattern", []


@case
def a_pattern_of_another_option() -> Case:
    model = nn.Linear(9, 9, bias=False)
    with pytest.warns(UserWarning, match="matches no parameter"):
        made = Stacked(model.named_parameters(), mentions=("*.expert", "weight"))
    return model, made, "pattern", []


@case
def a_name_that_is_nobodys() -> Case:
    model = nn.Linear(9, 9)
    scale = {"weight": 0.5, "absent.weight": 0.25}
    return model, co.AdamW(model.named_parameters(), lr_scale=scale), "pattern", []


@case
def groups_of_equal_settings() -> Case:
    model = {name: matrix() for name in "abcdef"}
    groups = [{"params": [pair], "lr": 0.5 if pair[0] != "f" else 0.25} for pair in model.items()]
    del groups[0]["lr"]
    return model, co.AdamW(groups, lr=0.5), "groups", ["a", "b", "c", "d", "e"]


@case
def a_layer_that_was_built_anew() -> Case:
    model = GPT()
    made = co.MuonAdamW(model)
    model.blocks[1].out = nn.Linear(16, 16, bias=False)
    return model, made, "replaced", ["blocks.1.out.weight"]


@case
def a_layer_of_a_wrapped_model_that_was_built_anew() -> Case:
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    made = co.AdamW(torch.compile(model).named_parameters())
    model[1].bias = nn.Parameter(torch.zeros(9))
    return model, made, "replaced", ["_orig_mod.1.bias"]


@case
def a_layer_that_was_built_anew_without_names() -> Case:
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 12), nn.Linear(12, 9))
    made = co.AdamW(model.parameters())
    model[1] = nn.Linear(9, 12)
    return model, made, "replaced", ["param_groups[0]['params'][2]", "param_groups[0]['params'][3]"]


@case
def a_lazy_layer_that_is_gone() -> Case:
    model = nn.Sequential(nn.Linear(9, 9), nn.LazyLinear(9, bias=False))
    made = co.AdamW(model.parameters())
    del model[1]
    return model, made, "replaced", ["param_groups[0]['params'][2]"]


@case
def a_tied_layer_that_was_built_anew() -> Case:
    model = GPT()
    made = co.AdamW([(name.replace("wte", "lm_head"), p) for name, p in model.named_parameters()])
    model.wte.weight = model.lm_head.weight = nn.Parameter(torch.zeros(70, 16))
    return model, made, "replaced", ["lm_head.weight"]


@case
def a_layer_that_is_gone() -> Case:
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 12))
    made = co.AdamW(model.named_parameters())
    del model[1]
    return model, made, "replaced", ["1.weight", "1.bias"]


@case
def a_copy_of_the_model() -> Case:
    model = nn.Linear(9, 9)
    return torch.compile(copy.deepcopy(model)), co.AdamW(model.named_parameters()), "replaced", ["weight", "bias"]


@case
def a_parameter_in_two_optimizers() -> Case:
    model = nn.Linear(9, 9)
    return model, [co.Muon([model.weight]), co.AdamW(model.parameters())], "shared", ["weight"]


@case
def a_frozen_parameter_with_state() -> Case:
    model = nn.Linear(9, 9)
    made = co.AdamW(model.parameters())
    model.bias.requires_grad_(False)
    return model, made, "frozen", ["bias"]


@case
def a_rule_for_matrices_without_any() -> Case:
    model = nn.Linear(9, 9)
    return model, co.Muon([{"params": model.parameters(), "rule": co.AdamW}]), "matrices", []


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_the_only_one_found_and_names_its_parameters(name: str) -> None:
    model, optimizers, kind, names = CASES[name]()
    found = co.explain(model, optimizers)
    (finding,) = found.findings
    assert (finding.name, [*finding.params]) == (kind, names)
    last = str(found).splitlines()[-1]
    assert last == str(finding)
    assert last.startswith(f"warning ({kind}): ")
    assert all(name in last for name in names[:3])
    assert finding.evidence in last


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a_layer_that_was_built_anew", "other tensors there: blocks.1.out.weight"),
        ("a_layer_that_was_built_anew_without_names", "other tensors there: 1.weight, 1.bias"),
        ("a_layer_that_is_gone", "nothing instead"),
        ("a_copy_of_the_model", "other tensors there: _orig_mod.weight, _orig_mod.bias"),
        ("a_pattern_that_matches_nothing", "'*.bais'"),
        ("a_pattern_of_another_option", "'*.expert'"),
        ("a_name_that_is_nobodys", "'absent.weight'"),
        (
            "groups_of_equal_settings",
            "param_groups[0], param_groups[1], param_groups[2] and 2 more of AdamW have equal settings; make them one group",
        ),
        ("a_rule_for_matrices_without_any", "Muon orthogonalizes nothing"),
        ("an_embedding", "Muon orthogonalizes an embedding"),
    ],
)
def test_a_message_says_what_to_look_at(name: str, said: str) -> None:
    model, optimizers, _, _ = CASES[name]()
    (finding,) = co.explain(model, optimizers).findings
    assert said in finding.said


def test_the_record_of_a_parameter_in_two_optimizers_is_the_firsts() -> None:
    model, optimizers, _, _ = CASES["a_parameter_in_two_optimizers"]()
    for each in (optimizers, optimizers[::-1]):
        record = by_name(co.explain(model, each))["weight"]
        assert (record["optimizer"], record["rule"]) == (0, type(each[0]).__name__)


def test_a_lazy_layer_takes_no_place_of_another() -> None:
    model = nn.Sequential(nn.Linear(9, 9))
    made = co.AdamW(model.parameters())
    model[0] = nn.LazyLinear(9)
    replaced, missing = co.explain(model, made).findings
    assert (replaced.name, missing.name) == ("replaced", "missing")
    assert "other tensors there: 0.bias" not in replaced.evidence
    assert missing.params == ("0.weight", "0.bias")


def test_many_names_are_shortened_in_the_table_alone() -> None:
    model = {f"w{i}": matrix(9, 1) for i in range(5)}
    (finding,) = co.explain(model, co.Muon(model.values())).findings
    assert [*finding.params] == [*model]
    assert "(narrow): w0, w1, w2 and 2 more: " in str(finding)


@clean
def elementwise_rules_may_have_everything() -> tuple[Any, Any]:
    model = GPT()
    return model, co.AdamW(model.parameters())


@clean
def hidden_layers_as_wide_as_a_table_of_positions() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Embedding(27, 9), nn.Linear(9, 27, bias=False), nn.Linear(27, 9, bias=False))
    model.append(nn.Linear(9, 27, bias=False))
    groups = [{"params": [p for i in (0, 3) for p in model[i].parameters()], "rule": co.AdamW}]
    return model, co.Muon([*groups, {"params": [p for i in (1, 2) for p in model[i].parameters()]}])


@clean
def convolutions_of_one_channel() -> tuple[Any, Any]:
    model = nn.Conv1d(1, 9, 9, bias=False)
    model.weight.data = torch.zeros(9, 9)
    made = Stacked(model.named_parameters(), mentions=("weight",))
    model.weight.data = torch.zeros(9, 1, 9)
    return model, made


@clean
def experts_that_an_option_names() -> tuple[Any, Any]:
    return turned_into((4, 9, 9), mentions=("exp*",))


@clean
def a_narrow_matrix_that_an_option_names() -> tuple[Any, Any]:
    return turned_into((3, 9), mentions=("exp*",))


@clean
def groups_that_differ_in_a_rule_or_an_entry_of_the_users_own() -> tuple[Any, Any]:
    a, b, c = matrix(), matrix(), matrix()
    groups = [{"params": [a]}, {"params": [b], "rule": co.SGD, "lr": 1e-3}, {"params": [c], "team": "decoder"}]
    return {"a": a, "b": b, "c": c}, co.AdamW(groups)


@clean
def groups_that_an_empty_one_equals() -> tuple[Any, Any]:
    a = matrix()
    return {"a": a}, co.AdamW([{"params": [a]}, {"params": []}])


@clean
def a_name_that_another_optimizer_has() -> tuple[Any, Any]:
    a, b = matrix(), matrix()
    scale = {"a": 0.5, "b": 0.25}
    return {"a": a, "b": b}, [co.AdamW({"a": a}, lr_scale=scale), co.SGD({"b": b}, lr_scale=scale)]


@clean
def a_tensor_that_a_group_lists_under_two_names() -> tuple[Any, Any]:
    model = GPT()
    return model, co.AdamW(model.named_parameters(remove_duplicate=False))


@clean
def a_lazy_layer() -> tuple[Any, Any]:
    model = nn.LazyLinear(9)
    return model, co.AdamW(model.parameters())


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    found = co.explain(*CLEAN[name]())
    assert found.findings == ()
    assert "warning" not in str(found)


def test_what_a_pattern_names_is_asked_of_the_rules_own_options() -> None:
    """The same parameter without the option is found."""
    model, made = turned_into((4, 9, 9), mentions=())
    assert [finding.name for finding in co.explain(model, made).findings] == ["axes"]


def test_roles_of_weights() -> None:
    model = GPT()
    model.conv, model.first = nn.Conv2d(4, 4, 3), nn.Conv2d(1, 4, 3)
    named = {id(p): name for name, p in model.named_parameters()}
    assert {named[key]: role for key, role in roles(model).items()} == {
        "wte.weight": "embedding",
        "wpe.weight": "embedding",
        **dict.fromkeys(MATRICES, "linear"),
        "blocks.0.filters.weight": "depthwise",
        "blocks.1.filters.weight": "depthwise",
        "conv.weight": "convolution",
        "first.weight": "convolution",
    }


def everything(optimizer: co.CompiledOptimizer) -> dict[str, Any]:
    engine = engine_of(optimizer)
    state = {id(p): dict(entries) for p, entries in engine.state.items()}
    facts = {"step": engine.step, "stale": engine.changes.stale, "shown": engine.changes.is_state_handed_out}
    return {**facts, "state": state, "groups": [dict(dict.items(group)) for group in engine.groups.listed]}


@pytest.mark.parametrize("pending", [False, True])
def test_it_changes_nothing(pending: bool) -> None:
    model = GPT()
    made = co.MuonAdamW(model)
    if pending:
        made.param_groups.append({"params": [matrix()], "param_names": ["late"], "lr": 0.5})
    before, count = everything(made), len(engine_of(made).state)
    found = co.explain(model, made)
    after = everything(made)
    assert after["state"].keys() == before["state"].keys()
    assert len(engine_of(made).state) == count
    assert [*map(id, after["groups"][0].values())] == [*map(id, before["groups"][0].values())]
    assert {k: v for k, v in after.items() if k not in ("state", "groups")} == {
        k: v for k, v in before.items() if k not in ("state", "groups")
    }
    assert [f.name for f in found.findings] == ["replaced"] * pending
    assert ("late" in {r["name"] for r in found.records}) == pending


def test_it_does_not_wait_for_a_device() -> None:
    pytest.importorskip("triton")
    from compiled_optim.simulated.fake_cuda import fake_cuda
    from compiled_optim.simulated.record import recording

    with fake_cuda(90), recording("cuda") as recorder:
        rate = torch.full((), 0.5, device="cuda")
        params = {name: nn.Parameter(torch.zeros(9, 9, device="cuda")) for name in "abcd"}
        groups = [{"params": [("a", params["a"])], "lr": rate}, {"params": [("b", params["b"])], "lr": rate.clone()}]
        groups += [{"params": [("c", params["c"])], "lr": 0.25}, {"params": [("d", params["d"])], "lr": 0.125}]
        for group in groups:
            group["betas"] = (torch.full((), 0.5, device="cuda"), 0.75)
        made = co.AdamW(groups)
        made.hyperparameter("weight_decay", 2).fill_(0.5)
        recorder.take()
        found = co.explain(params, made)
        assert {operator.name for operator in recorder.take().operators} <= {"detach"}
    assert [record["lr"] for record in found.records] == ["on cuda:0", "on cuda:0", 0.25, 0.125]
    assert [record["weight_decay"] for record in found.records] == [0.01, 0.01, "on cuda:0", 0.01]
    assert found.findings == ()
    assert json.loads(json.dumps(found.records)) == found.records


class TestTable:
    def test_columns_are_aligned(self) -> None:
        model = GPT()
        lines = str(co.explain(model, co.MuonAdamW(model))).splitlines()
        assert lines[0].split() == ["name", "shape", "precision", "group", "rule", "lr", "decay", "bytes", "matrices", "why"]
        assert len(lines) == 1 + len(list(model.parameters()))
        at = lines[0].index("rule")
        assert {line[at:].split()[0] for line in lines[1:]} == {"AdamW", "Muon"}
        assert {line[at - 1] for line in lines} == {" "}

    def test_empty_columns_are_left_out(self) -> None:
        model = nn.Linear(9, 9)
        rule = co.Rprop(model.named_parameters())
        assert str(co.explain(model, rule)).splitlines()[0].split() == [
            *("name", "shape", "precision", "group", "rule", "lr", "bytes", "why")
        ]
        both = [co.SGD([model.weight]), co.SGD([model.bias])]
        assert "optimizer" in str(co.explain(model, both)).splitlines()[0]

    def test_of_no_parameters(self) -> None:
        assert str(co.explain({}, co.AdamW([{"params": []}]))) == ""

    def test_rich(self) -> None:
        console = pytest.importorskip("rich.console")
        model = nn.Linear(9, 9)
        made = co.AdamW([model.weight, matrix(20, 20)])
        out = io.StringIO()
        console.Console(file=out, width=400).print(co.explain(model, made))
        text = out.getvalue()
        assert "param_groups[0]['params'][1]" in text
        assert "warning (replaced): param_groups[0]['params'][1]: " in text
        assert "warning (missing): bias: " in text
        assert "9 x 9" in text

    def test_rich_takes_no_name_for_markup(self) -> None:
        console = pytest.importorskip("rich.console")
        params, out = {"w[bold]": matrix()}, io.StringIO()
        console.Console(file=out, width=400).print(co.explain(params, co.SGD(params)))
        assert "w[bold]" in out.getvalue()

    def test_rich_need_not_be_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "rich", None)
        model = nn.Linear(9, 9)
        assert "weight" in str(co.explain(model, co.AdamW(model.parameters())))


class TestErrors:
    @pytest.mark.parametrize("optimizers", [torch.optim.SGD([torch.zeros(1)]), [torch.optim.SGD([torch.zeros(1)])], None])
    def test_another_optimizer(self, optimizers: Any) -> None:
        with pytest.raises(TypeError, match=r"explain takes an optimizer of compiled_optim, got (SGD|NoneType)"):
            co.explain(nn.Linear(2, 2), optimizers)

    def test_no_optimizer(self) -> None:
        with pytest.raises(ValueError, match="the list of optimizers is empty"):
            co.explain(nn.Linear(2, 2), [])

    @pytest.mark.parametrize("model", [3, [torch.zeros(2)], {"a": 1}])
    def test_no_model(self, model: Any) -> None:
        with pytest.raises(TypeError, match=r"model"):
            co.explain(model, co.AdamW([torch.zeros(2)]))
