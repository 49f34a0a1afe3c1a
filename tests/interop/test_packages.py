"""Files that other packages made go on here as there, and every form gives back what it was given, bit for bit."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_memory import MostAlive
from new_process import printed_by
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import compiled_optim as co
from compiled_optim.cli import convert as command
from compiled_optim.interop.convert import READ, WRITTEN, convert, read, write

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # which torch's own functions give

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two weights: one has more than 4096 elements, and neither a whole number of blocks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(66, 129), nn.Linear(129, 5)).to(dtype)


def _train(model: nn.Module, optimizer: Any, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 66, generator=generator).to(dtype)).float().square().mean().backward()
        optimizer.step()


def _distance(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def _module(name: str) -> Any:
    """An optional package, whose import warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


# What of another package, with which options; as which optimizer here; the part of their way that steps may differ by.
CASES: dict[str, tuple[str, str, str, dict[str, Any], float]] = {
    "AdamW": ("torch.optim", "AdamW", "torch", {}, 1e-4),
    "bitsandbytes AdamW": ("bitsandbytes.optim", "AdamW", "bitsandbytes", {"weight_decay": 0.1}, 1e-4),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", "bitsandbytes", {}, 0.1),
    "bitsandbytes Lion": ("bitsandbytes.optim", "Lion", "bitsandbytes", {"weight_decay": 0.1}, 1e-4),
    "bitsandbytes SGD": ("bitsandbytes.optim", "SGD", "bitsandbytes", {"momentum": 0.9, "weight_decay": 0.1}, 1e-4),
    "bitsandbytes SGD8bit": ("bitsandbytes.optim", "SGD8bit", "bitsandbytes", {"momentum": 0.9}, 0.01),
    "FlashOptim AdamW": ("flashoptim", "FlashAdamW", "flashoptim", {"quantize": False}, 1e-4),
    "FlashOptim Lion": ("flashoptim", "FlashLion", "flashoptim", {"quantize": False}, 1e-4),
    "FlashOptim SGD": ("flashoptim", "FlashSGD", "flashoptim", {"quantize": False, "momentum": 0.9}, 1e-4),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", "torch", {"block_size": 6}, 0.1),
    "torchao AdamW4bit": ("torchao.optim", "AdamW4bit", "torch", {"block_size": 6}, 0.5),
    "torchao AdamWFp8": ("torchao.optim", "AdamWFp8", "torch", {"block_size": 6}, 0.2),
    "optimi AdamW": ("optimi", "AdamW", "optimi", {"triton": False}, 1e-4),
}


def test_optimis_stable_adamw_comes_back(tmp_path: Path) -> None:
    """No group of it says how weights decay."""
    model = _model()
    theirs = _module("optimi").StableAdamW(model.parameters(), lr=1e-3, triton=False)
    _train(model, theirs, 3, seed=1)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    convert(tmp_path / "theirs.pt", tmp_path / "ours.pt", "compiled_optim")
    convert(tmp_path / "ours.pt", tmp_path / "back.pt", "optimi")
    back = torch.load(tmp_path / "back.pt")["state"]
    assert [*back] == [*theirs.state_dict()["state"]]
    for key, entries in theirs.state_dict()["state"].items():
        torch.testing.assert_close(back[key]["exp_avg_sq"], entries["exp_avg_sq"])


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_training_goes_on(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps with the package, then three more with it and with ours, from a file that it made."""
    module, name, form, options, tolerance = CASES[case]
    if module == "torchao.optim":
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # which is all that is left out
    if module == "flashoptim":
        options = {**options, "fused": False, "master_weight_bits": None}
    kind = getattr(_module(module), name)
    model = _model()
    theirs = kind(model.parameters(), lr=1e-3, **options)
    _train(model, theirs, 3, seed=1)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    assert convert(tmp_path / "theirs.pt", tmp_path / "ours.pt", "compiled_optim") == (form, 4, 1)
    start, twin = copy.deepcopy(model), copy.deepcopy(model)
    ours = getattr(co, name.removeprefix("Flash").rstrip("48bit").removesuffix("Fp"))(twin.parameters(), lr=1.0)
    ours.load_state_dict(torch.load(tmp_path / "ours.pt"))
    _train(model, theirs, 3, seed=2)
    _train(twin, ours, 3, seed=2)
    assert _distance(model, twin) < tolerance * _distance(start, model)


def test_what_bitsandbytes_decodes(tmp_path: Path) -> None:
    """Codes of 8 bits become the float32 that bitsandbytes takes them for."""
    functional = _module("bitsandbytes.functional")
    model = _model()
    theirs = _module("bitsandbytes.optim").AdamW8bit(model.parameters())
    _train(model, theirs, 3, seed=1)
    torch.save(theirs.state_dict(), tmp_path / "a.pt")
    found = read(tmp_path / "a.pt")["state"][0]
    state = theirs.state[next(model.parameters())]
    for i, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        codes, scales, table = state[f"state{i}"], state[f"absmax{i}"], state[f"qmap{i}"]
        expected = functional.dequantize_blockwise(codes, absmax=scales, code=table, blocksize=256)
        assert torch.equal(found[name], expected)


def test_what_flashoptim_decodes(tmp_path: Path) -> None:
    """Codes that its kernels made become the float32 that its kernel decodes."""
    pytest.importorskip("flashoptim")
    model = _model()
    theirs = _module("flashoptim").FlashAdamW(model.parameters(), fused=False, quantize=False, master_weight_bits=None)
    _train(model, theirs, 3, seed=1)
    torch.save(theirs.state_dict(), tmp_path / "plain.pt")
    printed_by("flashoptim_codes", str(tmp_path), TRITON_INTERPRET="1")
    found = read(tmp_path / "coded.pt")["state"]
    for (param, name), expected in torch.load(tmp_path / "decoded.pt").items():
        assert torch.equal(found[param][name], expected)


class _FusedAdam:
    """TransformerEngine's and apex' FusedAdam in its documented layout, as a naive loop; with it, the state dict."""

    def __init__(self, params: Iterator[nn.Parameter], masters: str | None) -> None:
        self.params, self.masters, self.steps = list(params), masters, 0
        self.weights = [p.detach().float().clone() for p in self.params]
        self.averages = [(torch.zeros_like(w), torch.zeros_like(w)) for w in self.weights]

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for p, weight, (mean, square) in zip(self.params, self.weights, self.averages, strict=True):
            grad = p.grad.float()
            mean.lerp_(grad, 0.1)
            square.lerp_(grad * grad, 0.001)
            step = mean / (1 - 0.9**self.steps) / ((square / (1 - 0.999**self.steps)).sqrt() + 1e-8)
            weight -= 1e-3 * (step + 0.01 * weight)
            if self.masters == "remainders":  # halves are rounded up
                p.copy_((((weight.view(torch.int32) + 0x8000) >> 16) << 16).view(torch.float32))
            else:
                p.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        state = {}
        for i, (weight, (mean, square)) in enumerate(zip(self.weights, self.averages, strict=True)):
            lower = weight.view(torch.int32).to(torch.int16)
            master = {None: {}, "float32": {"master_param": weight}, "remainders": {"master_param": lower}}[self.masters]
            state[i] = {"exp_avg": mean, "exp_avg_sq": square, **master}
        options = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        return {"state": state, "param_groups": [{**options, "step": self.steps, "params": [0, 1, 2, 3]}]}


@pytest.mark.parametrize(
    ("masters", "dtype", "weights"),
    [(None, torch.float32, None), ("float32", torch.bfloat16, "master"), ("remainders", torch.bfloat16, "split16")],
)
def test_training_of_fused_adam_goes_on(masters: Any, dtype: torch.dtype, weights: Any, tmp_path: Path) -> None:
    """From a file of the documented layout: neither package can be installed without a GPU."""
    model = _model(dtype)
    theirs = _FusedAdam(model.parameters(), masters)
    _train(model, theirs, 3, seed=1)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    assert convert(tmp_path / "theirs.pt", tmp_path / "ours.pt", "compiled_optim").form == "fused"
    start, twin = [w.clone() for w in theirs.weights], copy.deepcopy(model)
    ours = co.AdamW(twin.parameters(), lr=1.0, weights=weights, state_dtype=torch.float32 if weights else None)
    ours.load_state_dict(torch.load(tmp_path / "ours.pt"))
    found = [w for w in co.full_precision_state_dict(twin, ours).values()] if weights else [*twin.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, start, strict=True))
    _train(model, theirs, 3, seed=2)
    _train(twin, ours, 3, seed=2)
    found = [w for w in co.full_precision_state_dict(twin, ours).values()] if weights else [*twin.parameters()]
    moved = max((a - b).abs().max().item() for a, b in zip(theirs.weights, start, strict=True))
    assert max((a - b).abs().max().item() for a, b in zip(theirs.weights, found, strict=True)) < 0.02 * moved
    convert(tmp_path / "ours.pt", tmp_path / "back.pt", "fused")
    _assert_equal(torch.load(tmp_path / "back.pt"), torch.load(tmp_path / "theirs.pt"))


def _save_universal(folder: Path, saved: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """DeepSpeed's universal checkpoint of a named state dict, as its documentation and loader describe it."""
    for group in saved["param_groups"]:
        for name in group["params"]:
            place = folder / "zero" / name
            place.mkdir(parents=True)
            entries = dict(saved["state"][name])
            torch.save(int(entries.pop("step")), place / "step.pt")
            for key, value in {**entries, "fp32": weights[name]}.items():
                torch.save({"param": value, "cat_dim": 0}, place / f"{key}.pt")
    groups = [{**group, "params": [i]} for i, group in enumerate(saved["param_groups"])]
    torch.save({"zero_stage": 1, "param_groups": groups}, folder / "zero" / "optimizer_state.pt")
    shapes = [{name: weights[name].shape for name in group["params"]} for group in saved["param_groups"]]
    torch.save({"param_shapes": shapes, "module": weights}, folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_of_deepspeed_goes_on(dtype: torch.dtype, groups: int, tmp_path: Path) -> None:
    """From a folder of the documented layout: DeepSpeed needs a compiler and a launcher."""
    model = _model(dtype)
    named = list(model.named_parameters())
    listed: list[Any] = [{"params": named}] if groups == 1 else [{"params": named[1::2], "lr": 1e-2}, {"params": named[::2]}]
    theirs = co.AdamW(listed, lr=1e-3, weights=None if dtype == torch.float32 else "master")
    _train(model, theirs, 3, seed=1)
    saved = co.named_state_dict(theirs)
    for entries in saved["state"].values():
        entries.pop("master_param", None)
    _save_universal(tmp_path / "universal", saved, co.full_precision_state_dict(model, theirs))
    done = convert(tmp_path / "universal", tmp_path / "ours.pt", "named")
    assert done == ("deepspeed", 4, groups)
    twin = copy.deepcopy(model)
    listed = [{"params": [(name, dict(twin.named_parameters())[name]) for name, _ in group["params"]]} for group in listed]
    ours = co.AdamW(listed, lr=1.0, weights=None if dtype == torch.float32 else "master")
    co.load_named_state_dict(ours, torch.load(tmp_path / "ours.pt"))
    _train(model, theirs, 3, seed=2)
    _train(twin, ours, 3, seed=2)
    assert _distance(model, twin) == 0


def test_deepspeed_has_its_order_in_the_model_s_file(tmp_path: Path) -> None:
    saved = _saved()
    saved["param_groups"] = [{**saved["param_groups"][0], "params": list(NAMES)}]
    _save_universal(tmp_path / "in", saved, {name: torch.ones(3) for name in NAMES})
    assert read(tmp_path / "in")["param_groups"][0]["params"] == list(NAMES)
    (tmp_path / "in" / "mp_rank_00_model_states.pt").unlink()
    convert(tmp_path / "in", tmp_path / "a.safetensors", "safetensors")
    for source in ("in", "a.safetensors"):
        with pytest.raises(ValueError, match="the order of the parameters is not in the checkpoint"):
            convert(tmp_path / source, tmp_path / "out.pt", "fused")


def _assert_equal(found: Any, expected: Any) -> None:
    """The same values of the same types, tensors bit for bit."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            _assert_equal(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            _assert_equal(a, b)
    else:
        assert found == expected
        assert type(found) is type(expected)


def _saved(kind: str = "AdamW", **options: Any) -> dict[str, Any]:
    """A state dict with names, in two groups, of three steps."""
    model = _model()
    named = list(model.named_parameters())
    groups = [{"params": named[:3], "weight_decay": 0.3}, {"params": named[3:], "lr": 0.02}]
    optimizer = getattr(co, kind)(groups, lr=1e-3, **options)
    _train(model, optimizer, 3, seed=1)
    return co.named_state_dict(optimizer)


def _path(folder: Path, name: str, form: str) -> Path:
    return folder / {"safetensors": f"{name}.safetensors", "dcp": name}.get(form, f"{name}.pt")


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "SGD"])
@pytest.mark.parametrize("second", WRITTEN)
@pytest.mark.parametrize("first", WRITTEN)
def test_every_pair_gives_back_what_it_got(first: str, second: str, kind: str, tmp_path: Path) -> None:
    """By way of two other forms; nothing of a form may get lost or change on the way through another that holds it."""
    if kind != "AdamW" and "fused" in (first, second):
        pytest.skip("FusedAdam has no other rule")
    saved = _saved(kind, **({"momentum": 0.9} if kind == "SGD" else {}))
    names = [name for group in saved["param_groups"] for name in group["params"]]
    write(saved, _path(tmp_path, "a", "named"), "named")
    for source, target, form in (("a.pt", "b", first), (_path(tmp_path, "b", first).name, "c", second)):
        if first == "fused" and form in ("bitsandbytes", "optimi"):  # only the constructor of FusedAdam says how it decays
            with pytest.raises(ValueError, match="decoupled_weight_decay=unknown"):
                convert(tmp_path / source, _path(tmp_path, target, form), form)
            return
        convert(tmp_path / source, _path(tmp_path, target, form), form)
    found = read(_path(tmp_path, "c", second))
    state = {names[k] if isinstance(k, int) else k: entries for k, entries in found["state"].items()}
    for name, entries in saved["state"].items():
        for key, value in entries.items():
            if key == "step" and kind != "AdamW":
                continue
            if "optimi" in (first, second) and value.dim():
                torch.testing.assert_close(state[name][key], value, rtol=1e-6, atol=0)
            else:
                assert torch.equal(torch.as_tensor(state[name][key]).float(), value.float()), (name, key)
    options = {"AdamW": ("lr", "betas", "eps", "weight_decay"), "Lion": ("lr", "betas", "weight_decay")}
    for name in names:
        ours, theirs = (_group_of(name, each, names) for each in (saved, found))
        for key in options.get(kind, ("lr", "momentum", "weight_decay")):
            assert ours[key] == theirs[key]


def _group_of(name: str, saved: dict[str, Any], names: list[str]) -> dict[str, Any]:
    [group] = [g for g in saved["param_groups"] if name in g["params"] or names.index(name) in g["params"]]
    return {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}


@ALONE
@pytest.mark.parametrize("layout", ["flat", "nested", "top", "indexed", "ours"])
def test_folders_of_torch(layout: str, tmp_path: Path) -> None:
    """As torch.distributed.checkpoint, torchtitan and this package make them, with a model beside."""
    model = _model()
    optimizer = (co if layout == "ours" else torch.optim).AdamW(model.named_parameters(), lr=1e-3)
    _train(model, optimizer, 3, seed=1)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = {
        "flat": lambda: {"optimizer": get_optimizer_state_dict(model, optimizer, options=flat)},
        "nested": lambda: {"optim": get_optimizer_state_dict(model, optimizer)},
        "top": lambda: get_optimizer_state_dict(model, optimizer, options=flat),
        "indexed": lambda: {"o": optimizer.state_dict()},
        "ours": lambda: {"o": co.named_state_dict(optimizer)},
    }[layout]()
    save({**saved, "model": {"state": model.state_dict()}}, storage_writer=FileSystemWriter(tmp_path / "in"))
    if layout in ("flat", "top"):
        convert(tmp_path / "in", tmp_path / "named.pt", "named")
        for source in ("in", "named.pt"):
            with pytest.raises(ValueError, match="the order of the parameters is not in the checkpoint"):
                convert(tmp_path / source, tmp_path / "out.pt", "torch")
        twin = co.AdamW(copy.deepcopy(model).named_parameters(), lr=1.0)
        co.load_named_state_dict(twin, torch.load(tmp_path / "named.pt"))
        torch.save(twin.state_dict(), tmp_path / "in.pt")
        assert convert(tmp_path / "in.pt", tmp_path / "out.pt", "torch").form == "torch"
    else:
        assert convert(tmp_path / "in", tmp_path / "out.pt", "torch") == ("dcp", 4, 1)
    found, expected = torch.load(tmp_path / "out.pt"), optimizer.state_dict()
    for i in range(4):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found["state"][i][key], expected["state"][i][key].float())
    twin = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1.0)
    twin.load_state_dict(found)
    assert twin.param_groups[0]["lr"] == 1e-3


_LRS = {"near": [1.23e-3, 1.18e-3, 1.23e-3], "equal": [1e-3, 1e-3, 2e-3], "again": [1.0, 2.0, 1.0]}


@pytest.mark.parametrize("lrs", _LRS.values(), ids=_LRS)
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_folders_keep_groups(kind: Any, lrs: list[float], tmp_path: Path) -> None:
    """By way of a folder, torch loads each number to the parameter and group that it was of."""
    named = list(_model().named_parameters())
    parts = [named[:1], named[1:2], named[2:]]
    theirs = torch.optim.AdamW([{"params": part, "lr": kind(lr)} for part, lr in zip(parts, lrs, strict=True)])
    for i, (_, param) in enumerate(named):
        param.grad = torch.full_like(param, i + 1.0)
    theirs.step()
    torch.save(theirs.state_dict(), tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "folder", "dcp")
    convert(tmp_path / "folder", tmp_path / "out.pt", "torch")
    found, expected = torch.load(tmp_path / "out.pt"), theirs.state_dict()
    _assert_equal(found["state"], expected["state"])
    for ours, group in zip(found["param_groups"], expected["param_groups"], strict=True):
        _assert_equal(ours, group)


@ALONE
@pytest.mark.parametrize("order", [None, list("abc")])
def test_groups_of_folders_without_them(order: list[str] | None, tmp_path: Path) -> None:
    """Options that differ in any bit make groups; the order of the parameters is known only where groups keep it."""
    lrs = {"a": torch.tensor(1.23e-3), "b": torch.tensor(1.18e-3), "c": torch.tensor(1.23e-3)}
    flat = {f"param_groups.{name}.lr": lr for name, lr in lrs.items()} | ({"order": order} if order else {})
    save({"optimizer": flat}, storage_writer=FileSystemWriter(tmp_path / "in"))
    found = read(tmp_path / "in")
    assert sorted((group["params"], group["lr"]) for group in found["param_groups"]) == [
        (["a", "c"], lrs["a"]),
        (["b"], lrs["b"]),
    ]
    assert found["unordered"]


def test_a_folder_has_no_place_for_an_empty_group(tmp_path: Path) -> None:
    saved = _saved()
    saved["param_groups"].insert(1, {**saved["param_groups"][0], "params": []})
    with pytest.raises(ValueError, match=r"param_groups\[1\] has no parameters"):
        write(saved, tmp_path / "a", "dcp")


@ALONE
def test_torch_loads_the_folder(tmp_path: Path) -> None:
    """By its own functions, in the way of torchtitan."""
    write(_saved(), tmp_path / "folder", "dcp")
    model = _model()
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())[:3]}, {"params": [model[1].bias]}], lr=1.0)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    target = {"optimizer": get_optimizer_state_dict(model, optimizer, options=flat)}
    load(target, checkpoint_id=tmp_path / "folder")
    set_optimizer_state_dict(model, optimizer, target["optimizer"], options=flat)
    saved = _saved()
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[param][key], saved["state"][name][key])
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(1e-3, 0.3), (0.02, 0.01)]


def test_bitsandbytes_loads_the_file(tmp_path: Path) -> None:
    model = _model()
    write(_saved(), tmp_path / "a.pt", "bitsandbytes")
    groups = [{"params": list(model.parameters())[:3]}, {"params": [model[1].bias]}]
    optimizer = _module("bitsandbytes.optim").AdamW(groups, lr=1.0)
    optimizer.load_state_dict(torch.load(tmp_path / "a.pt"))
    saved = _saved()["state"]
    for name, param in model.named_parameters():
        assert torch.equal(optimizer.state[param]["state1"], saved[name]["exp_avg"])
        assert optimizer.state[param]["step"] == 3
    _train(model, optimizer, 1, seed=2)


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _group(**options: Any) -> dict[str, Any]:
    return {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0], **options}


_ZEROS = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
_BNB = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}


@pytest.mark.parametrize(
    ("content", "to", "message"),
    [
        ({"state1": torch.ones(3), "step": 1}, "torch", r"betas=\(0.9, 0.999\) and eps=1e-08, unlike bitsandbytes"),
        (({"state1": torch.ones(2, 3)}, {**_BNB, "betas": (0.9, 0.99, 0.999)}), "torch", "betas=.*, unlike bitsandbytes"),
        (({"state1": torch.ones(3), "step": 1}, _BNB), "torch", "the state of 0 has no state2"),
        (({"state1": torch.ones(3, dtype=torch.uint8)}, _BNB), "torch", "8 bits without a qmap1 .* and an absmax1"),
        (
            ({"state1": torch.ones(2, 3, dtype=torch.uint8).t(), "qmap1": torch.ones(256), "absmax1": torch.ones(1)}, _BNB),
            "torch",
            "has a state1 that is not in contiguous blocks with a scale each",
        ),
        (
            ({"state1": torch.ones(3), "state2": torch.ones(3), "unorm_vec": torch.ones(1)}, _BNB),
            "torch",
            "has unorm_vec, which no optimizer here has",
        ),
        (
            ({**_ZEROS, "error_bits": torch.ones(3)}, {"master_bytewidth": 3}),
            "torch",
            "0 has error_bits.*without the weights",
        ),
        (({"exp_avg::quantized": torch.ones(3)}, {"master_bytewidth": 3}), "torch", "exp_avg::quantized without scales"),
        (
            (
                {"exp_avg::quantized": torch.ones(33, dtype=torch.int8), "exp_avg::scales": torch.ones(1).half()},
                {"master_bytewidth": 3},
            ),
            "torch",
            "has 1 scales for 33 elements, not one for each 32",
        ),
        ((_ZEROS, {"bias_correction": False, "step": 1}), "torch", "bias_correction=False, without which no Adam"),
        ((_ZEROS, {"bias_correction": True}), "torch", "the state of 0 exists, but its group has no step"),
        ((_ZEROS, {"bias_correction": True, "step": 1, "max_grad_norm": 1.0}), "torch", "max_grad_norm, which are not"),
        (({**_ZEROS, "step": 1}, {"amsgrad": True}), "fused", "amsgrad=True, unsupported by FusedAdam"),
        (({**_ZEROS, "step": 1, "other": 1}, {}), "fused", "the state of 0 has 'other', unsupported by FusedAdam"),
        (({**_ZEROS, "step": 1}, {"maximize": True}), "bitsandbytes", "maximize=True, unsupported by bitsandbytes"),
        (({**_ZEROS, "step": 1}, {"decoupled_weight_decay": False}), "bitsandbytes", "decoupled_weight_decay=False"),
        (({**_ZEROS, "step": 1}, {}), "bitsandbytes", "decoupled_weight_decay=unknown"),
        ({"step": 1, "square_avg": torch.ones(3)}, "bitsandbytes", "no optimizer with the state square_avg"),
        (
            {"step": 1, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3).double()},
            "bitsandbytes",
            "exp_avg_sq in the state of 0 is torch.float64",
        ),
        (({**_ZEROS, "step": 1}, {"amsgrad": False}), "optimi", r"param_groups\[0\] has decoupled_weight_decay=unknown"),
        ({"step": 1, **_ZEROS}, "dcp", "the parameters have no names"),
        *(
            (({**_ZEROS, "step": 1}, {"caution": True}), to, r"param_groups\[0\] has caution=True, which has no counterpart")
            for to in WRITTEN
        ),
    ],
)
def test_what_a_form_cannot_hold_is_named(content: Any, to: str, message: str, tmp_path: Path) -> None:
    entries, options = content if isinstance(content, tuple) else (content, {})
    torch.save({"state": {0: entries}, "param_groups": [_group(**options)]}, tmp_path / "in.pt")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "in.pt", _path(tmp_path, "out", to), to)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("to", [form for form in WRITTEN if form not in ("optimi", "dcp", "named")])
def test_what_schedulers_and_users_keep_in_groups_stays(to: str, tmp_path: Path) -> None:
    own = {"initial_lr": 0.1, "max_lr": 0.3, "base_momentum": 0.8, "mine": "x", "caution": False}
    group = _group(decoupled_weight_decay=True, **own)
    torch.save({"state": {0: {**_ZEROS, "step": 1}}, "param_groups": [group]}, tmp_path / "in.pt")
    target = _path(tmp_path, "out", to)
    convert(tmp_path / "in.pt", target, to)
    (found,) = read(target)["param_groups"]
    assert {key: found[key] for key in own} == own


def test_steps_by_parameter_do_not_become_steps_by_group(tmp_path: Path) -> None:
    saved = _saved()
    saved["state"]["0.bias"]["step"] += 1
    with pytest.raises(ValueError, match=r"parameters of param_groups\[0\] took 3 to 4 steps"):
        write(saved, tmp_path / "a.pt", "fused")


@pytest.mark.parametrize("to", ["torch", "compiled_optim", "safetensors"])
def test_the_name_of_the_class_goes_with_the_state_and_no_other_optimizer_does(to: str, tmp_path: Path) -> None:
    saved = co.AdamW({"w": torch.ones(3, requires_grad=True)}).state_dict()
    assert saved["optimizer"] == "AdamW"
    write(saved, _path(tmp_path, "a", to), to)
    if to != "compiled_optim":  # which keeps what is beside the state
        with pytest.raises(ValueError, match="beside the optimizer's state it holds 'optimizer', which would be lost"):
            write({**saved, "optimizer": {"state": {}, "param_groups": []}}, _path(tmp_path, "b", to), to)


def test_lossy_leaves_out_what_needs_the_weights(tmp_path: Path) -> None:
    content = {"step": 1, **_ZEROS, "error_bits": torch.ones(3, dtype=torch.bfloat16)}
    torch.save({"state": {0: content}, "param_groups": [_group(master_bytewidth=3)]}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.pt", "torch", lossy=True)
    assert torch.load(tmp_path / "out.pt")["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


class TestFolders:
    def test_is_never_replaced(self, tmp_path: Path) -> None:
        write(_saved(), tmp_path / "folder", "dcp")
        before = sorted((path.name, path.read_bytes()) for path in (tmp_path / "folder").iterdir())
        for target in ("torch", "dcp"):
            with pytest.raises(ValueError, match="folder is in the way"):
                write(_saved(), tmp_path / "folder", target)
        assert sorted((path.name, path.read_bytes()) for path in (tmp_path / "folder").iterdir()) == before
        assert len(list(tmp_path.iterdir())) == 1

    def test_nothing_in_the_metadata_is_executed(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(_Hostile(tmp_path / "executed")))
        with pytest.raises(ValueError, match=r"in is damaged.*the metadata asks for posix.mkdir"):
            read(tmp_path / "in")
        assert not (tmp_path / "executed").exists()

    @ALONE
    def test_nothing_in_an_entry_is_executed(self, tmp_path: Path) -> None:
        saved = _saved()
        saved["param_groups"][0]["lr"] = _Hostile(tmp_path / "executed")
        save({"optimizer": saved}, storage_writer=FileSystemWriter(tmp_path / "in"))
        with pytest.raises(ValueError, match="in is damaged"):
            read(tmp_path / "in")
        assert not (tmp_path / "executed").exists()

    @ALONE
    def test_the_prefix_chooses_among_several(self, tmp_path: Path) -> None:
        save({"a": _saved(), "b": _saved("Lion")}, storage_writer=FileSystemWriter(tmp_path / "in"))
        with pytest.raises(ValueError, match="got 'a', 'b'; choose by key"):
            read(tmp_path / "in")
        assert read(tmp_path / "in", "b")["state"]["0.bias"].keys() == {"step", "exp_avg"}
        with pytest.raises(ValueError, match="got none"):
            read(tmp_path / "in", "c")

    @pytest.mark.parametrize("form", ["dcp", "deepspeed"])
    def test_damage_ends_in_a_message(self, form: str, tmp_path: Path) -> None:
        places = random.Random(4)
        if form == "dcp":
            write(_saved(), tmp_path / "whole", "dcp")
        else:
            _save_universal(tmp_path / "whole", _saved(), {name: torch.ones(3) for name in NAMES})
        files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
        failures: list[str] = []
        for _ in range(60):
            shutil.copytree(tmp_path / "whole", tmp_path / "in")
            path = tmp_path / "in" / places.choice(files)
            content = bytearray(path.read_bytes())
            for _ in range(places.choice((1, 8))):
                content[places.randrange(len(content))] ^= 1 << places.randrange(8)
            path.write_bytes(content[: places.randrange(len(content))] if places.random() < 0.3 else content)
            try:
                convert(tmp_path / "in", tmp_path / "out.pt", "named")
            except (ValueError, OSError) as error:
                failures.append(str(error))
            else:
                (tmp_path / "out.pt").unlink()
            shutil.rmtree(tmp_path / "in")
        assert len(failures) > 10
        assert all(failures)
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_few_tensors_are_in_memory_at_a_time(tmp_path: Path) -> None:
    """With 24 tensors of 4 MB, a conversion's own memory is less than 8 of them, whatever the two forms."""
    size, count = 1 << 20, 12
    steps = [("in.pt", "a.pt", "optimi"), ("a.pt", "b.safetensors", "safetensors"), ("b.safetensors", "c", "dcp")]
    steps += [("c", "d.pt", "torch")]
    (small := tmp_path / "small").mkdir()
    _write_eight_bits(small / "in.pt", 1, 300)
    _write_eight_bits(tmp_path / "in.pt", count, size)

    def most_alive(folder: Path) -> int:
        with MostAlive() as alive:
            for source, target, form in steps:
                convert(folder / source, folder / target, form)
        return alive.bytes

    most_alive(small)  # which imports modules
    tracemalloc.start()
    try:
        most = most_alive(tmp_path) + tracemalloc.get_traced_memory()[1]  # of Python's objects and NumPy's arrays
    finally:
        tracemalloc.stop()
    assert most < 8 * 4 * size
    assert (tmp_path / "d.pt").stat().st_size > 2 * count * 4 * size


def _write_eight_bits(path: Path, count: int, size: int) -> None:
    """A file of bitsandbytes' 8-bit AdamW, with names."""
    table = torch.linspace(0, 1, 256)
    entries = {
        "step": 1,
        **{f"state{i}": torch.arange(size).to(torch.uint8) for i in (1, 2)},
        **{f"qmap{i}": table for i in (1, 2)},
        **{f"absmax{i}": torch.ones(-(-size // 256)) for i in (1, 2)},
    }
    names = [f"layer.{i}" for i in range(count)]
    group = _group(**_BNB, param_names=names) | {"params": list(range(count))}
    torch.save({"state": {i: {k: v for k, v in entries.items()} for i in range(count)}, "param_groups": [group]}, path)


class TestCommandLine:
    def test_forms_are_the_package_s(self) -> None:
        assert {*command.TO} == {*WRITTEN}
        assert {*command.FROM} == {*READ}

    def test_json(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        write(_saved(), tmp_path / "a.pt", "bitsandbytes")
        monkeypatch.setattr(
            sys, "argv", ["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--to", "torch", "--json"]
        )
        assert command.run(command.parsed()) == 0
        assert json.loads(capsys.readouterr().out) == {"form": "bitsandbytes", "parameters": 4, "groups": 2}

    @pytest.mark.parametrize("form", ["dcp", "bitsandbytes"])
    def test_a_wrong_form_is_an_error(self, form: str, tmp_path: Path) -> None:
        write(_saved(), tmp_path / "a.pt", "named")
        with pytest.raises(ValueError, match=r"a\.pt.*(is in the form torch, not dcp|has betas|has no state1)"):
            read(tmp_path / "a.pt", form=form)

    @pytest.mark.parametrize(
        "make", [lambda p: read(p, form="x"), lambda p: convert(p, p, "x"), lambda p: write({}, p, "x")]
    )
    def test_unknown_forms(self, make: Callable[[Path], Any], tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"must be one of torch, .* got 'x'"):
            make(tmp_path / "a.pt")
