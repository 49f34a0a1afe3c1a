"""Checkpoints of torch.optim, of optimi and of this package in each other's optimizers, and in files."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog import registry, relative_error
from round_trips import pickled
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import compiled_optim as co
from compiled_optim.interop import convert as files
from compiled_optim.interop.optimi import to_optimi

SHAPES = {"fc.weight": (4, 3), "fc.bias": (4,), "scale": ()}


def _model(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return {n: nn.Parameter(torch.randn(s, dtype=dtype, generator=generator)) for n, s in SHAPES.items()}


def _twin(model: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(p.detach().clone()) for n, p in model.items()}


def _train(optimizer: torch.optim.Optimizer, model: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.values():
            param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator).to(param.dtype)
        optimizer.step()


def _same_future(a: tuple[Any, Any], b: tuple[Any, Any], tolerance: float) -> None:
    """Five more steps of both end in the same parameters."""
    for optimizer, model in (a, b):
        _train(optimizer, model, range(10, 15))
    assert relative_error(list(a[1].values()), list(b[1].values())) <= tolerance


def _copied(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict as a file would give it: torch.optim keeps the tensors that it is given."""
    return copy.deepcopy(optimizer.state_dict())


def _with_a_choice_of_buffers() -> list[tuple[type[co.CompiledOptimizer], str]]:
    """Every optimizer of torch.optim's with an option that decides which buffers it has."""
    found = {}
    for kind in (c for c in registry() if hasattr(torch.optim, c.__name__) and hasattr(c, "_declaration")):
        options = {static.name for static in kind._declaration.statics}
        found |= {(kind, b.when): None for b in kind._declaration.buffers if b.when in options}
    return [*found]


class TestTorch:
    @pytest.mark.quick
    @pytest.mark.parametrize("into", ["itself", "a fresh one", "torch's"])
    @pytest.mark.parametrize(("kind", "option"), _with_a_choice_of_buffers())
    def test_what_an_option_that_was_taken_back_left(self, kind: type[co.CompiledOptimizer], option: str, into: str) -> None:
        """It is loaded, and goes on where the option is chosen again."""
        theirs = getattr(torch.optim, kind.__name__)
        sides = []
        for make in (kind, theirs):
            model = _model()
            optimizer = make([*model.items()], lr=0.03, eps=0.1, **{option: True})
            _train(optimizer, model, range(2))
            optimizer.param_groups[0][option] = False
            _train(optimizer, model, range(2, 4))
            saved = _copied(optimizer)
            if into != "itself":
                optimizer = (kind if into == "a fresh one" else theirs)([*model.items()], lr=0.5)
            optimizer.load_state_dict(saved)
            _train(optimizer, model, range(4, 6))
            optimizer.param_groups[0][option] = True
            sides.append((optimizer, model))
        _same_future(*sides, 1e-12)

    @pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
    @pytest.mark.parametrize(
        "step", [torch.tensor, float, int, lambda n: torch.tensor([n])], ids=["tensor", "float", "int", "vector"]
    )
    def test_every_implementation_and_kind_of_step(self, flags: dict[str, bool], step: Any) -> None:
        model = _model()
        theirs = torch.optim.AdamW(model.items(), lr=0.05, eps=1e-3, weight_decay=0.3, **flags)
        _train(theirs, model, range(3))
        saved = _copied(theirs)
        for entries in saved["state"].values():
            entries["step"] = step(entries["step"].item())
        twin = _twin(model)
        ours = co.AdamW(twin.items())
        assert ours.load_state_dict(saved) == co.LoadReport([], [], [], [])
        _same_future((theirs, model), (ours, twin), 1e-14)

    def test_to_torch(self) -> None:
        model = _model()
        ours = co.AdamW(model.items(), lr=0.05, eps=1e-3)
        _train(ours, model, range(3))
        twin = _twin(model)
        theirs = torch.optim.AdamW(twin.items())
        theirs.load_state_dict(_copied(ours))
        _same_future((ours, model), (theirs, twin), 1e-14)

    @pytest.mark.parametrize("kind", [k for k in registry() if hasattr(torch.optim, k.__name__)], ids=lambda k: k.__name__)
    def test_groups_have_torchs_keys_and_no_others(self, kind: type[co.CompiledOptimizer]) -> None:
        weight = nn.Parameter(torch.ones(2, 2))
        theirs = getattr(torch.optim, kind.__name__)([weight])
        ours = kind([weight])
        assert set(ours.param_groups[0]) == set(theirs.param_groups[0])
        assert set(ours.defaults) <= set(theirs.defaults)
        assert {"format_version", "optimizer", *theirs.state_dict()} == set(ours.state_dict())
        for duplicate in (copy.deepcopy(ours), pickled(ours)):
            assert set(duplicate.param_groups[0]) == set(theirs.param_groups[0])

    @pytest.mark.parametrize("flatten", [False, True])
    @pytest.mark.parametrize("back", [False, True], ids=["from", "to"])
    def test_muon_in_distributed_checkpoints(self, flatten: bool, back: bool) -> None:
        """torch reads of a flattened one what the groups of the optimizer hold that is to load it."""
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        first, second = (torch.optim.Muon, co.Muon)[:: -1 if back else 1]
        model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        source = first(model.parameters(), lr=0.25)
        _train(source, dict(model.named_parameters()), range(2))
        saved = copy.deepcopy(get_optimizer_state_dict(model, source, options=options))
        model.zero_grad()  # or torch gives its own optimizer no state to load into
        target = second(model.parameters())
        set_optimizer_state_dict(model, target, saved, options=options)
        momentum = "momentum_buffer"
        assert torch.equal(target.state[model.weight][momentum], source.state[model.weight][momentum])
        assert target.param_groups[0]["lr"] == 0.25

    @pytest.mark.parametrize(
        ("kind", "option"), [(co.Muon, "maximize"), (co.LBFGS, "fixed_iterations")], ids=lambda v: getattr(v, "__name__", v)
    )
    def test_a_choice_that_torch_lacks_stays_in_a_load_of_torchs(
        self, kind: type[co.CompiledOptimizer], option: str
    ) -> None:
        weight = nn.Parameter(torch.ones(2, 2))
        ours = kind([weight], **{option: True})
        ours.load_state_dict(copy.deepcopy(getattr(torch.optim, kind.__name__)([weight], lr=0.25).state_dict()))
        assert ours.param_groups[0][option] is True
        assert ours.param_groups[0]["lr"] == 0.25
        plain = kind([weight])
        plain.load_state_dict(_copied(ours))
        assert plain.param_groups[0][option] is True

    def test_muon_maximizes_as_assigned(self) -> None:
        weights = [nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)) for _ in range(2)]
        one, other = (co.Muon([weight], weight_decay=0.0) for weight in weights)
        other.param_groups[0]["maximize"] = True
        for optimizer, weight in ((one, weights[0]), (other, weights[1])):
            weight.grad = torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=torch.float64)
            optimizer.step()
        assert torch.equal(weights[0], -weights[1])
        with pytest.raises(TypeError, match=r"maximize of param_groups\[0\] must be a bool, got 1"):
            one.param_groups[0]["maximize"] = 1

    def test_another_rule_is_refused_although_its_state_looks_the_same(self) -> None:
        model = _model()
        adam = torch.optim.Adam(model.items())
        _train(adam, model, range(2))
        ours = co.AdamW(model.items())
        with pytest.raises(ValueError, match=r"param_groups\[0\]: decoupled_weight_decay is False in the checkpoint"):
            ours.load_state_dict(_copied(adam))
        assert not any(entries["step"] for entries in ours.state.values())

    @pytest.mark.parametrize("name", ["Adam", "AdamW"])
    def test_without_decay_adam_and_adamw_are_one(self, name: str) -> None:
        model = _model()
        theirs = getattr(torch.optim, name)(model.items(), lr=0.02, weight_decay=0.0)
        _train(theirs, model, range(3))
        twin = _twin(model)
        ours = getattr(co, {"Adam": "AdamW", "AdamW": "Adam"}[name])(twin.items(), weight_decay=0.0)
        assert ours.load_state_dict(_copied(theirs))[:3] == ([], [], [])
        _same_future((theirs, model), (ours, twin), 1e-12)

    def test_another_optimizer_is_refused_before_it_took_a_step(self) -> None:
        model = _model()
        fresh = torch.optim.AdamW(model.items()).state_dict()
        with pytest.raises(ValueError, match=r"param_groups\[0\]: the checkpoint has no momentum, dampening for it"):
            co.SGD(model.items()).load_state_dict(fresh)


@pytest.fixture
def optimi() -> Any:
    return pytest.importorskip("optimi")


OPTIMI = [
    ("AdamW", {"eps": 1e-3, "weight_decay": 0.3, "betas": (0.8, 0.95)}, {}),
    ("Adam", {"eps": 1e-3, "weight_decay": 0.3, "betas": (0.8, 0.95)}, {}),
    ("SGD", {"momentum": 0.8, "weight_decay": 0.3}, {}),
    ("SGD", {"momentum": 0.8}, {"dampening": (True, 0.8)}),
    ("SGD", {}, {}),
]


class TestOptimi:
    @pytest.mark.parametrize(("name", "arguments", "differing"), OPTIMI, ids=lambda v: str(v))
    @pytest.mark.parametrize("back", [False, True], ids=["from", "to"])
    def test_next_steps_are_equal(self, optimi: Any, name: str, arguments: Any, differing: Any, back: bool) -> None:
        theirs_differing, ours_differing = ({k: v[i] for k, v in differing.items()} for i in (0, 1))
        model = _model()

        def make_theirs(params: Any) -> Any:
            return getattr(optimi, name)(params, lr=0.05, **arguments, **theirs_differing, foreach=False, triton=False)

        def make_ours(params: Any) -> Any:
            return getattr(co, name)(params, lr=0.05, **arguments, **ours_differing)

        first = make_ours(model.items()) if back else make_theirs(model.values())
        _train(first, model, range(4))
        twin = _twin(model)
        second = make_theirs(twin.values()) if back else make_ours(twin.items())
        second.load_state_dict(to_optimi(_copied(first), type(first)) if back else _copied(first))
        _same_future((first, model), (second, twin), 1e-12)

    @pytest.mark.parametrize("dampening", [0.0, 0.8])
    def test_torchs_momentum_has_no_step_count(self, optimi: Any, dampening: float) -> None:
        model = _model()
        theirs = torch.optim.SGD(model.values(), lr=0.05, momentum=0.8, dampening=dampening, weight_decay=0.3)
        _train(theirs, model, range(4))
        twin = _twin(model)
        options = {"momentum": 0.8, "dampening": dampening != 0, "foreach": False, "triton": False}
        converted = optimi.SGD(twin.values(), lr=0.1, **options)
        converted.load_state_dict(to_optimi(_copied(theirs), co.SGD))
        _same_future((theirs, model), (converted, twin), 1e-12)

    def test_what_has_no_counterpart_is_refused_by_name(self, optimi: Any) -> None:
        model = _model(torch.bfloat16)
        kahan = optimi.AdamW(model.values(), lr=0.1, foreach=False, triton=False)
        _train(kahan, model, range(2))
        with pytest.raises(ValueError, match="the optimizer has no kahan_comp for it"):
            co.AdamW(model.values()).load_state_dict(kahan.state_dict())
        model = _model()
        stable = optimi.StableAdamW(model.values(), lr=0.1, foreach=False, triton=False)
        _train(stable, model, range(2))
        with pytest.raises(ValueError, match=r"param_groups\[0\] of the optimi checkpoint has state 'eps_sq'"):
            co.AdamW(model.values()).load_state_dict(stable.state_dict())
        l2 = optimi.Adam(model.values(), lr=0.1, foreach=False, triton=False)
        _train(l2, model, range(2))
        with pytest.raises(ValueError, match="decoupled_weight_decay is False in the checkpoint"):
            co.AdamW(model.values()).load_state_dict(l2.state_dict())
        decoupled = optimi.AdamW(model.values(), lr=0.1, weight_decay=1e-5, decouple_lr=True, foreach=False, triton=False)
        by_lr = co.AdamW(model.values())
        by_lr.load_state_dict(decoupled.state_dict())
        assert by_lr.param_groups[0]["decouple_lr"] is True
        ours = co.AdamW(model.items(), amsgrad=True)
        _train(ours, model, range(2))
        with pytest.raises(ValueError, match="'amsgrad', 'max_exp_avg_sq', which has no counterpart in optimi"):
            to_optimi(ours.state_dict(), co.AdamW)
        uneven = co.AdamW(model.items())
        _train(uneven, model, range(2))
        model["scale"].grad = None
        uneven.step()
        with pytest.raises(ValueError, match="took different numbers of steps"):
            to_optimi(uneven.state_dict(), co.AdamW)


def _trained() -> tuple[co.AdamW, dict[str, nn.Parameter]]:
    model = _model()
    optimizer = co.AdamW([{"params": list(model.items())[:2], "lr": 0.1}, {"params": list(model.items())[2:]}], eps=1e-3)
    _train(optimizer, model, range(3))
    return optimizer, model


class TestFiles:
    @pytest.mark.quick
    @pytest.mark.parametrize("form", ["torch", "compiled_optim", "named", "optimi", "safetensors"])
    def test_every_form_is_read_back(self, form: str, tmp_path: Path) -> None:
        if form == "safetensors":
            pytest.importorskip("safetensors")
        optimizer, model = _trained()
        path = tmp_path / f"state.{'safetensors' if form == 'safetensors' else 'pt'}"
        files.write(optimizer.state_dict(), path, form)
        twin = _twin(model)
        resumed = co.AdamW([{"params": list(twin.items())[:2]}, {"params": list(twin.items())[2:]}])
        resumed.load_state_dict(files.read(path))
        assert resumed.hyperparameters() == optimizer.hyperparameters()
        _same_future((optimizer, model), (resumed, twin), 1e-12 if form == "optimi" else 0.0)

    def test_safetensors_are_plain(self, tmp_path: Path) -> None:
        safetensors = pytest.importorskip("safetensors.torch")
        optimizer, model = _trained()
        files.write(optimizer.state_dict(), tmp_path / "state.safetensors", "safetensors")
        tensors = safetensors.load_file(tmp_path / "state.safetensors")
        assert set(tensors) == {f"{n}.{k}" for n in model for k in ("step", "exp_avg", "exp_avg_sq")}
        assert torch.equal(tensors["fc.weight.exp_avg"], optimizer.state[model["fc.weight"]]["exp_avg"])
        groups = json.loads((tmp_path / "state.json").read_text())["param_groups"]
        assert [g["params"] for g in groups] == [["fc.weight", "fc.bias"], ["scale"]]
        assert groups[0]["lr"] == 0.1

    def test_without_names(self, tmp_path: Path) -> None:
        pytest.importorskip("safetensors")
        model = _model()
        optimizer = co.AdamW(model.values())
        _train(optimizer, model, range(3))
        files.write(optimizer.state_dict(), tmp_path / "state.safetensors", "safetensors")
        twin = _twin(model)
        resumed = co.AdamW(twin.values())
        resumed.load_state_dict(files.read(tmp_path / "state.safetensors"))
        _same_future((optimizer, model), (resumed, twin), 0.0)
        with pytest.raises(ValueError, match="the parameters have no names"):
            files.write(optimizer.state_dict(), tmp_path / "state.pt", "named")

    def test_torchs_form_is_torchs(self, tmp_path: Path) -> None:
        files.write(_trained()[0].state_dict(), tmp_path / "state.pt", "torch")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
        assert set(saved) == {"state", "param_groups"}
        assert saved["state"][0]["step"].dtype == torch.float32


class _Hostile:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "executed")


class TestBadFiles:
    """A clear error, and an optimizer that is bit-identical to before."""

    def _refused(self, path: Path, message: str) -> None:
        optimizer, _ = _trained()
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(files.read(path))
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for index, entries in before["state"].items():
            assert all(torch.equal(after["state"][index][k], v) for k, v in entries.items())

    def test_hostile(self, tmp_path: Path) -> None:
        saved = _trained()[0].state_dict()
        marker = tmp_path / "marker"
        saved["state"][0]["exp_avg"] = _Hostile(marker)
        torch.save(saved, tmp_path / "zip.pt")
        (tmp_path / "bare.pt").write_bytes(pickle.dumps(saved))
        for name in ("zip.pt", "bare.pt"):
            self._refused(tmp_path / name, "objects other than tensors and plain values, which are not loaded")
        assert not marker.exists()

    def test_safetensors(self, tmp_path: Path) -> None:
        pytest.importorskip("safetensors")
        path = tmp_path / "state.safetensors"
        files.write(_trained()[0].state_dict(), path, "safetensors")
        content, groups = path.read_bytes(), path.with_suffix(".json").read_text()
        for size in (0, 4, 60, len(content) - 1):
            path.write_bytes(content[:size])
            self._refused(path, "state.safetensors is damaged")
        path.write_bytes(content)
        for text in ("", "[]", groups[: len(groups) // 2], "{}"):
            path.with_suffix(".json").write_text(text)
            self._refused(path, "state.json is damaged")
        path.with_suffix(".json").write_text(groups.replace('"fc.bias"', '"fc.other"'))
        self._refused(path, "holds 'fc.bias.exp_avg', but .*state.json has no parameter 'fc.bias'")
        path.with_suffix(".json").unlink()
        with pytest.raises(FileNotFoundError):
            files.read(path)

    def test_wrong_optimizer(self, tmp_path: Path) -> None:
        model = _model()
        sgd = co.SGD([{"params": list(model.items())[:2]}, {"params": list(model.items())[2:]}], momentum=0.9)
        _train(sgd, model, range(2))
        torch.save(sgd.state_dict(), tmp_path / "state.pt")
        self._refused(tmp_path / "state.pt", "fc.weight: the checkpoint has no exp_avg, exp_avg_sq for it")

    def test_not_a_state_dict(self, tmp_path: Path) -> None:
        torch.save({"epoch": 3}, tmp_path / "state.pt")
        self._refused(tmp_path / "state.pt", "state.pt: not an optimizer state dict")
        with pytest.raises(ValueError, match=r"state.pt has no entry 'optimizer'"):
            files.read(tmp_path / "state.pt", "optimizer")
