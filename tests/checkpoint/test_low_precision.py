"""State of parameters in fewer bits: saved and resumed, loaded across modes, and converted where an option is assigned."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from catalog import required, ruled
from loading import content
from round_trips import through_a_file, through_a_folder
from test_load_fuzz import ODD
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import compiled_optim as co
from compiled_optim.rule import storage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MODES = (None, "kahan", "stochastic", "split8", "split16", "master")
PARTS = {"kahan": "kahan_comp", "split8": "remainder", "split16": "remainder", "master": "master_param"}
SHAPES = {"rows": (80, 64), "vector": (4111,), "images": (24, 10, 5, 5), "small": (10,)}


def _model(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, nn.Parameter]:
    """Groups that end with rows, a last one that is not full, another order of memory, and a tensor that is left out."""
    generator = torch.Generator().manual_seed(seed)
    model = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    model["images"] = model["images"].to(memory_format=torch.channels_last)
    return {name: nn.Parameter(param) for name, param in model.items()}


def _twin(model: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(param.detach().clone()) for name, param in model.items()}


def _adamw(model: Any, **options: Any) -> co.AdamW:
    return co.AdamW(model, **{"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.1, "lowering": "eager", **options})


def _train(optimizer: Any, model: Mapping[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in model.values():
            scale = torch.rand(param.shape, generator=generator).pow(4)  # magnitudes that differ within a group
            param.grad = (scale * torch.randn(param.shape, generator=generator)).to(param.dtype)
        optimizer.step()


def _run(
    model: dict[str, nn.Parameter] | None = None, steps: int = 3, **options: Any
) -> tuple[co.AdamW, dict[str, nn.Parameter]]:
    model = _model() if model is None else model
    optimizer = _adamw(model, **options)
    _train(optimizer, model, range(steps))
    return optimizer, model


def _in_memory_order(tensor: Tensor) -> Tensor:
    axes = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(axes).reshape(-1)


def _parts(codes: Any, kind: torch.dtype) -> np.ndarray[Any, Any]:
    """The part of a scale that each code stands for: its root, or how far a float32's bits are from those of an offset."""
    if kind == torch.uint8:
        return (np.asarray(codes, dtype=np.float64) / 255) ** 2
    sizes = np.abs(np.asarray(codes, dtype=np.int64))
    return (0x3D8CCCCD + sizes * 2**18).astype(np.int32).view(np.float32).astype(np.float64) - np.float32(0.06875)


def _numbers(codes: Tensor, scales: Tensor) -> np.ndarray[Any, Any]:
    """What codes stand for, in float64 and in the order of memory, one after the other."""
    flat, scale = _in_memory_order(codes).tolist(), scales.reshape(-1).tolist()
    parts = _parts(flat, codes.dtype)
    return np.array(
        [math.copysign(part, code) * scale[i // 64] for i, (code, part) in enumerate(zip(flat, parts, strict=True))]
    )


def _tensor(state: Mapping[str, Tensor]) -> Tensor:
    """The numbers of ``exp_avg`` of the images, in the shape and order of memory that it has."""
    numbers = torch.empty_like(state["exp_avg_int8"], dtype=torch.float64)
    numbers.as_strided((numbers.numel(),), (1,)).copy_(
        torch.from_numpy(_numbers(state["exp_avg_int8"], state["exp_avg_scale"]))
    )
    return numbers


def _weight(param: Tensor, state: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """A weight in bfloat16 with its part, in float64, as the formats are documented."""
    value = param.detach().double().numpy()
    if "kahan_comp" in state:
        return value + state["kahan_comp"].detach().double().numpy()
    if "master_param" in state:
        return state["master_param"].detach().double().numpy()
    if "remainder" in state:
        bits = value.astype(np.float32).view(np.int32).astype(np.int64)
        unit = 256 if state["remainder"].dtype == torch.int8 else 1
        magnitude = (bits & 0x7FFFFFFF) + state["remainder"].numpy().astype(np.int64) * unit
        return np.sign(value) * magnitude.astype(np.int32).view(np.float32).astype(np.float64)
    return value


def _states(optimizer: co.CompiledOptimizer, model: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
    return {name: dict(optimizer.state[param]) for name, param in model.items()}


def _same(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    for name in SHAPES:
        torch.testing.assert_close(ours[1][name], theirs[1][name], rtol=0, atol=0)
        first, second = ours[0].state[ours[1][name]], theirs[0].state[theirs[1][name]]
        assert first.keys() == second.keys()
        for entry in first:
            assert first[entry].dtype == second[entry].dtype
            torch.testing.assert_close(first[entry], second[entry], rtol=0, atol=0, equal_nan=True)


def _by_safetensors(saved: Any, target: Any, path: Any) -> Any:
    """Which holds contiguous tensors only, so that another order of memory is lost."""
    files = pytest.importorskip("compiled_optim.interop.convert")
    pytest.importorskip("safetensors")
    files.write(saved, path / "state.safetensors", "safetensors")
    return files.read(path / "state.safetensors")


class TestResume:
    """A resumed run equals an uninterrupted one, bit for bit."""

    @pytest.mark.parametrize("state_dtype", [None, "int8", torch.bfloat16, {"exp_avg_sq": "int8"}], ids=str)
    @pytest.mark.parametrize("weights", MODES)
    def test_by_torch(self, weights: str | None, state_dtype: Any) -> None:
        options = {"weights": weights, "state_dtype": state_dtype}
        optimizer, model = _run(**options)
        twin = _twin(model)
        resumed = _adamw(twin, **options)
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
        _same((optimizer, model), (resumed, twin))
        _train(optimizer, model, range(3, 6))
        _train(resumed, twin, range(3, 6))
        _same((optimizer, model), (resumed, twin))

    @pytest.mark.parametrize("by", [through_a_file, _by_safetensors, through_a_folder])
    @pytest.mark.parametrize("weights", ["stochastic", "split8"])
    def test_by_name(self, weights: str, by: Callable[..., Any], tmp_path: Any) -> None:
        options = {"weights": weights, "state_dtype": "int8", "exclude": ["small"]}
        optimizer, model = _run(**options)
        twin = _twin(model)
        resumed = _adamw(dict(reversed(twin.items())), **options)
        co.load_named_state_dict(resumed, by(co.named_state_dict(optimizer), resumed, tmp_path))
        _same((optimizer, model), (resumed, twin))
        _train(optimizer, model, range(3, 5))
        _train(resumed, twin, range(3, 5))
        _same((optimizer, model), (resumed, twin))

    def test_compiled(self) -> None:
        options = {"weights": "split8", "state_dtype": "int8", "lowering": "multi_tensor"}
        optimizer, model = _run(**options)
        twin = _twin(model)
        resumed = _adamw(twin, **options)
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
        _train(optimizer, model, range(3, 5))
        _train(resumed, twin, range(3, 5))
        _same((optimizer, model), (resumed, twin))

    @pytest.mark.parametrize("kind", ruled("dense"), ids=lambda kind: kind.__name__)
    def test_every_optimizer(self, kind: Any) -> None:
        codes = {"state_dtype": "int8"} if any(b.int8 for b in kind._declaration.buffers) else {}
        options = {**required(kind), **codes, "weights": "split8", "lowering": "eager"}
        options |= {"momentum": 0.9} if kind.__name__ in ("SGD", "RMSprop") else {}
        runs = []
        for _ in range(2):
            model = _model()
            runs.append((kind(model, **options), model))
        _train(*runs[0], range(4))
        _train(*runs[1], range(2))
        saved, twin = through_a_file(runs[1][0].state_dict()), _twin(runs[1][1])
        resumed = kind(twin, **options)
        resumed.load_state_dict(saved)
        _train(resumed, twin, range(2, 4))
        _same(runs[0], (resumed, twin))


def _ulps(param: Tensor, difference: np.ndarray[Any, Any]) -> float:
    """The largest difference between weights, in units in the last place of a bfloat16."""
    ulp = 2.0 ** (np.floor(np.log2(np.abs(param.detach().double().numpy()))) - 7)
    return float(np.max(np.abs(difference) / ulp))


# How far a weight and what a part says of it are apart at most, in units in the last place of a bfloat16: half a unit of the
# part; or a whole one halfway between two numbers, where the parameter stays, and is not the one that rounding takes.
UNITS = {"kahan": 2.0**-9, "split8": 2.0**-8, "split16": 2.0**-16, "master": 2.0**-16}


class TestAcrossModes:
    """A checkpoint of one mode in an optimizer of another."""

    @pytest.mark.parametrize("target", PARTS)
    @pytest.mark.parametrize("source", PARTS)
    def test_weights_keep_their_bits(self, source: str, target: str) -> None:
        optimizer, model = _run(weights=source)
        half = torch.tensor([2.0**-9, 2.0**-8, -(2.0**-8), 0.0]).repeat(20)  # also halfway between two numbers
        with torch.no_grad():
            model["rows"][:, 0] = torch.tensor([1.0, 1.0, 1 + 2.0**-6, -1.0]).repeat(20)
            if source in ("kahan", "master"):
                part = model["rows"][:, 0].float() + half if source == "master" else half
                optimizer.state[model["rows"]][PARTS[source]][:, 0] = part
        twin = _twin(model)
        other = _adamw(twin, weights=target)
        other.load_state_dict(through_a_file(optimizer.state_dict()))
        for name in ("rows", "vector", "images"):
            before, after = (_weight(m[name], o.state[m[name]]) for o, m in ((optimizer, model), (other, twin)))
            assert torch.equal(model[name], twin[name])
            assert _ulps(model[name], before - model[name].detach().double().numpy()) > 0.3
            assert _ulps(model[name], after - before) <= (0 if source == target else UNITS[target])
            assert set(other.state[twin[name]]) == {"step", "exp_avg", "exp_avg_sq", PARTS[target]}
        _train(other, twin, range(3, 4))

    @pytest.mark.parametrize("target", [None, "stochastic"])
    @pytest.mark.parametrize("source", PARTS)
    def test_bits_without_a_place_are_reported(self, source: str, target: str | None) -> None:
        optimizer, model = _run(weights=source)
        twin = _twin(model)
        other = _adamw(twin, weights=target, exclude=["small"])
        before = content(other)
        with pytest.raises(ValueError, match=f"rows: the optimizer has no {PARTS[source]} for it"):
            other.load_state_dict(optimizer.state_dict())
        assert content(other) == before
        report = other.load_state_dict(optimizer.state_dict(), strict=False)
        assert len(report.mismatched) == (4 if target is None else 3)
        assert torch.equal(other.state[twin["rows"]]["exp_avg"], optimizer.state[model["rows"]]["exp_avg"])
        for part in ("kahan_comp", "remainder"):
            if part in optimizer.state[model["rows"]]:
                for param in model.values():
                    optimizer.state[param].get(part, torch.zeros(())).zero_()
        if source != "master":  # which has bits of the tensor that is too small for the others
            for param in model.values():
                if "master_param" in optimizer.state[param]:
                    optimizer.state[param]["master_param"].copy_(param)
            assert not any(other.load_state_dict(optimizer.state_dict())[:3])

    @pytest.mark.parametrize("source", PARTS)
    def test_a_model_in_float32_has_the_bits_itself(self, source: str) -> None:
        optimizer, model = _run(weights=source)
        module = nn.ParameterDict({name: model[name] for name in SHAPES})
        full = co.full_precision_state_dict(module, optimizer)
        twin = {name: nn.Parameter(full[name].clone()) for name in SHAPES}
        other = _adamw(twin)
        assert not any(other.load_state_dict(optimizer.state_dict())[:3])
        assert torch.equal(other.state[twin["rows"]]["exp_avg"], optimizer.state[model["rows"]]["exp_avg"].float())
        with torch.no_grad():
            twin["rows"].view(-1)[7] += 0.001
        with pytest.raises(ValueError, match=f"rows: the optimizer has no {PARTS[source]} for it"):
            other.load_state_dict(optimizer.state_dict())

    @pytest.mark.parametrize("target", MODES)
    def test_no_parts(self, target: str | None) -> None:
        """A checkpoint of torch.optim has none: what is there goes on to stand for weights that were loaded before."""
        model = _model(torch.float32)
        theirs = torch.optim.AdamW(model.values(), lr=1e-3)
        _train(theirs, model, range(3))
        module = nn.ParameterDict({name: nn.Parameter(param.detach().bfloat16()) for name, param in model.items()})
        twin = {name: module[name] for name in SHAPES}
        other = _adamw(list(twin.values()), weights=target, state_dtype="int8")
        co.load_full_precision_state_dict(module, other, nn.ParameterDict(model).state_dict())
        before = {name: _weight(param, other.state[param]) for name, param in twin.items()}
        other.load_state_dict(theirs.state_dict())
        for name, param in twin.items():
            assert np.array_equal(before[name], _weight(param, other.state[param]))
            assert other.state[param]["step"] == 3
        if target in PARTS:
            assert _ulps(twin["rows"], before["rows"] - model["rows"].detach().double().numpy()) <= UNITS[target]


class TestCodes:
    """State in 8 bits from state in floating point, and back."""

    def _checked(self, state: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> None:
        for entry, expected in numbers.items():
            stored = state[f"{entry}_int8"]
            ours, wanted = _numbers(stored, state[f"{entry}_scale"]), _in_memory_order(expected).double().numpy()
            groups = np.pad(np.abs(wanted), (0, -len(wanted) % 64)).reshape(-1, 64)
            peak = np.repeat(groups.max(1), 64)[: len(wanted)]
            codes = np.abs(_in_memory_order(stored).numpy().astype(np.int64))
            if stored.dtype == torch.uint8:  # nearest root, and no positive number is 0
                root = np.sqrt(np.abs(wanted) / peak)
                assert np.all((np.abs(root * 255 - codes) <= 0.501) | ((codes == 1) & (root > 0)))
            else:
                bits = (np.abs(wanted) / peak + np.float32(0.06875)).astype(np.float32).view(np.int32).astype(np.int64)
                assert np.all(np.abs(bits - 0x3D8CCCCD - codes * 2**18) <= 2**17 + 4)
            assert np.array_equal(ours < 0, (wanted < 0) & (ours != 0))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_from_numbers(self, dtype: torch.dtype) -> None:
        optimizer, model = _run(_model(dtype))
        twin = _twin(model)
        other = _adamw(twin, state_dtype="int8")
        other.load_state_dict(through_a_file(optimizer.state_dict()))
        for name in ("rows", "vector", "images"):
            state = other.state[twin[name]]
            assert state["exp_avg_int8"].stride() == twin[name].stride()
            assert state["exp_avg_int8"].dtype == torch.int8
            assert "exp_avg" not in state
            self._checked(state, {entry: optimizer.state[model[name]][entry] for entry in ("exp_avg", "exp_avg_sq")})
        _train(other, twin, range(3, 4))

    def test_to_numbers(self) -> None:
        optimizer, model = _run(state_dtype="int8")
        twin = _twin(model)
        other = _adamw(twin, state_dtype=torch.float32)
        assert not any(other.load_state_dict(through_a_file(optimizer.state_dict()))[:3])
        for name in ("rows", "vector", "images"):
            ours, theirs = optimizer.state[model[name]], other.state[twin[name]]
            assert set(theirs) == {"step", "exp_avg", "exp_avg_sq"}
            for entry in ("exp_avg", "exp_avg_sq"):
                wanted = _numbers(ours[f"{entry}_int8"], ours[f"{entry}_scale"])
                np.testing.assert_allclose(_in_memory_order(theirs[entry]).double(), wanted, rtol=3e-7, atol=0)
        again = _adamw(_twin(model), state_dtype="int8")
        again.load_state_dict(other.state_dict())
        _same((optimizer, model), (again, dict(zip(SHAPES, again.param_groups[0]["params"], strict=True))))

    def test_another_order_of_memory(self) -> None:
        optimizer, model = _run(state_dtype="int8")
        twin = {
            name: nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format)) for name, param in model.items()
        }
        other = _adamw(twin, state_dtype="int8")
        other.load_state_dict(through_a_file(optimizer.state_dict()))
        ours, theirs = optimizer.state[model["images"]], other.state[twin["images"]]
        self._checked(theirs, {"exp_avg": _tensor(ours).contiguous()})

    @pytest.mark.parametrize("by", [through_a_file, _by_safetensors, through_a_folder])
    def test_after_an_overflow(self, by: Callable[..., Any], tmp_path: Any) -> None:
        """A gradient whose square is infinite makes an infinite scale, which loads as it is."""
        optimizer, model = _run(weights="split8", state_dtype="int8")
        for param in model.values():
            assert param.grad is not None
            param.grad[(0,) * param.dim()] = 1e22
        optimizer.step()
        for name in ("rows", "vector", "images"):
            assert optimizer.state[model[name]]["exp_avg_sq_scale"].isinf().sum() == 1
        twin = _twin(model)
        other = _adamw(twin, weights="split8", state_dtype="int8")
        co.load_named_state_dict(other, by(co.named_state_dict(optimizer), other, tmp_path))
        _same((optimizer, model), (other, twin))

    def test_scales_of_another_shape(self) -> None:
        optimizer, model = _run(state_dtype="int8")
        saved = through_a_file(optimizer.state_dict())
        saved["state"][0]["exp_avg_scale"] = saved["state"][0]["exp_avg_scale"].reshape(-1)
        twin = _twin(model)
        other = _adamw(twin, state_dtype="int8")
        other.load_state_dict(saved)
        _same((optimizer, model), (other, twin))


def _renamed(saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict as it was when codes had the names of numbers."""
    state = {
        param: {entry.removesuffix("_int8"): value for entry, value in entries.items()}
        for param, entries in saved["state"].items()
    }
    assert {*state[next(iter(state))]} >= {"exp_avg", "exp_avg_scale"}
    return {**saved, "state": state}


class TestNamesOfCodes:
    """Codes have names that no other optimizer takes for numbers."""

    @pytest.mark.parametrize(("package", "missing"), [("torch.optim", "exp_avg"), ("optimi", "kahan_sum")])
    def test_another_package_does_not_step_on_codes(self, package: str, missing: str) -> None:
        """Groups of optimi's own are not there either: ``co.optimi_state_dict`` makes them, and numbers of codes."""
        optimizer, model = _run(_model(torch.float32), state_dtype="int8", exclude=["small"])
        twin = _twin(model)
        theirs = pytest.importorskip(package).AdamW(list(twin.values()), lr=1e-3)

        def load_and_step() -> None:
            theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            _train(theirs, twin, range(3, 4))

        with pytest.raises(KeyError, match=f"'{missing}'"):
            load_and_step()
        assert torch.equal(twin["rows"], model["rows"])

    @pytest.mark.parametrize("kind", ruled("dense"), ids=lambda kind: kind.__name__)
    def test_every_optimizer(self, kind: Any) -> None:
        """No integers lie under the name of a buffer; and where there are codes, there are their scales."""
        if not any(b.int8 for b in kind._declaration.buffers):
            pytest.skip("has no state that 8 bits can hold")
        options = {**required(kind), "state_dtype": "int8", "lowering": "eager"}
        options |= {"momentum": 0.9} if kind.__name__ in ("SGD", "RMSprop") else {}
        model = _model()
        optimizer = kind(model, **options)
        _train(optimizer, model, range(2))
        for entries in (optimizer.state_dict()["state"][0], optimizer.state[model["rows"]]):
            integers = {name for name, value in entries.items() if not value.is_floating_point()}
            assert integers == {
                f"{b.name}_int8" for b in kind._declaration.buffers if b.int8 and f"{b.name}_scale" in entries
            }
            assert integers

    @pytest.mark.parametrize("named", [False, True], ids=["indexed", "named"])
    @pytest.mark.parametrize("target", ["int8", torch.bfloat16, None], ids=str)
    def test_codes_under_the_names_of_numbers_load(self, target: Any, named: bool) -> None:
        """As the package saved them once."""
        optimizer, model = _run(weights="split8", state_dtype="int8")
        save: Any = co.named_state_dict if named else co.CompiledOptimizer.state_dict
        load: Any = co.load_named_state_dict if named else co.CompiledOptimizer.load_state_dict
        runs = []
        for change in (lambda saved: saved, _renamed):
            twin = _twin(model)
            runs.append((_adamw(twin, weights="split8", state_dtype=target), twin))
            assert not any(load(runs[-1][0], change(through_a_file(save(optimizer))))[:3])
        _same(*runs)

    def test_codes_under_the_names_of_numbers_are_found_in_pickles(self) -> None:
        optimizer, model = _run(state_dtype="int8")
        other = copy.deepcopy(optimizer)
        twin = dict(zip(SHAPES, other.param_groups[0]["params"], strict=True))
        other.state = _renamed({"state": dict(other.state)})["state"]
        for each, params in ((optimizer, model), (other, twin)):
            _train(each, params, range(3, 5))
        _same((optimizer, model), (other, twin))

    @pytest.mark.parametrize("flatten", [False, True])
    @pytest.mark.parametrize("weights", [None, "split8"])
    def test_torchs_distributed_state_dicts(self, weights: str | None, flatten: bool) -> None:
        """torch looks for what a flattened one holds under the names of the live state."""
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        modules = [nn.ParameterDict(_model()) for _ in range(2)]
        runs = [(_adamw(dict(m.named_parameters()), weights=weights, state_dtype="int8"), dict(m.items())) for m in modules]
        _train(*runs[0], range(3))
        modules[1].load_state_dict(modules[0].state_dict())
        saved = copy.deepcopy(get_optimizer_state_dict(modules[0], runs[0][0], options=options))
        set_optimizer_state_dict(modules[1], runs[1][0], saved, options=options)
        _same(*runs)


class TestAssignedOptions:
    """Options that are assigned while there is state."""

    def test_state_dtype(self) -> None:
        optimizer, model = _run(weights="split16")
        before = _states(optimizer, model)
        optimizer.param_groups[0]["state_dtype"] = "int8"
        optimizer.state_dict()
        for name in ("rows", "vector", "images"):
            TestCodes()._checked(optimizer.state[model[name]], {e: before[name][e] for e in ("exp_avg", "exp_avg_sq")})
        coded = _states(optimizer, model)
        _train(optimizer, model, range(3, 4))
        for dtype in (torch.float32, None):
            optimizer.param_groups[0]["state_dtype"] = dtype
            optimizer.state_dict()
            for name in ("rows", "vector", "images"):
                state = optimizer.state[model[name]]
                assert state["exp_avg"].dtype == torch.float32
                assert not {"exp_avg_int8", "exp_avg_scale"} & state.keys()
        assert coded["rows"]["exp_avg_int8"].dtype == torch.int8
        optimizer.param_groups[0]["state_dtype"] = torch.bfloat16
        optimizer.state_dict()
        assert optimizer.state[model["rows"]]["exp_avg_sq"].dtype == torch.bfloat16

    @pytest.mark.parametrize("source", MODES)
    def test_weights(self, source: str | None) -> None:
        for target in MODES:
            optimizer, model = _run(weights=source, steps=2)
            before = {name: _weight(param, optimizer.state[param]) for name, param in model.items()}
            optimizer.param_groups[0]["weights"] = target
            saved = optimizer.state_dict()["state"]
            for i, (name, param) in enumerate(model.items()):
                if name == "small":
                    continue
                part = {PARTS[target]} if target in PARTS else set()
                assert set(saved[i]) == {"step", "exp_avg", "exp_avg_sq"} | part
                difference = before[name] - _weight(param, optimizer.state[param])
                if target in PARTS and source in PARTS:
                    assert _ulps(param, difference) <= UNITS[target]
            _train(optimizer, model, range(2, 3))

    @pytest.mark.parametrize("source", PARTS)
    @pytest.mark.parametrize("target", PARTS)
    def test_an_interrupt_between_two_writes_loses_no_bit(self, source: str, target: str) -> None:
        """A new part is there before the old one goes, and counts from then on."""
        optimizer, model = _run(weights=source)
        param, finished = model["rows"], copy.deepcopy(optimizer)
        finished.param_groups[0]["weights"] = target
        finished.state_dict()
        wanted = finished.state[finished.param_groups[0]["params"][0]]
        if PARTS[source] != PARTS[target]:
            optimizer.state[param][PARTS[target]] = wanted[PARTS[target]].clone()
        optimizer.param_groups[0]["weights"] = target
        optimizer.state_dict()
        assert optimizer.state[param].keys() == wanted.keys()
        assert torch.equal(optimizer.state[param][PARTS[target]], wanted[PARTS[target]])

    def test_the_step_that_follows(self) -> None:
        """It is that of an optimizer with the option, which loaded the state."""
        optimizer, model = _run()
        twin = _twin(model)
        other = _adamw(twin, weights="split8", state_dtype="int8")
        other.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0].update(weights="split8", state_dtype="int8")
        _train(optimizer, model, range(3, 5))
        _train(other, twin, range(3, 5))
        for name in ("rows", "vector", "images"):
            assert torch.equal(model[name], twin[name])

    def test_another_order_of_memory(self) -> None:
        """Codes follow a parameter whose memory was arranged anew."""
        optimizer, model = _run(state_dtype="int8")
        state = optimizer.state[model["images"]]
        before = _tensor(state)
        model["images"].data = model["images"].data.contiguous()
        optimizer.zero_grad()
        optimizer.step()  # which looks at where the parameters are
        TestCodes()._checked(optimizer.state[model["images"]], {"exp_avg": before.contiguous()})

    def test_numbers_in_place_of_codes(self) -> None:
        optimizer, model = _run(state_dtype="int8")
        new = torch.randn(SHAPES["rows"])
        optimizer.state[model["rows"]]["exp_avg"] = new
        optimizer.state_dict()
        TestCodes()._checked(optimizer.state[model["rows"]], {"exp_avg": new})
        del optimizer.state[model["rows"]]["exp_avg_scale"]
        with pytest.raises(ValueError, match="the state of 'rows' does not fit: exp_avg_int8 has codes of 8 bits without"):
            optimizer.state_dict()

    def test_codes_where_numbers_belong(self) -> None:
        optimizer, model = _run()
        optimizer.state[model["rows"]]["exp_avg"] = torch.ones(SHAPES["rows"], dtype=torch.int8)
        with pytest.raises(ValueError, match="the state of 'rows' does not fit"):
            optimizer.step()


def _entry(name: str, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def damage(entries: dict[str, Any]) -> None:
        entries[name] = change(entries[name])

    return damage


class TestBadInput:
    @pytest.mark.parametrize("options", [{"weights": "split8", "state_dtype": "int8"}, {}, {"weights": "master"}])
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (_entry("remainder", lambda t: t[:-1]), r"remainder has shape \(79, 64\) instead of \(80, 64\)"),
            (_entry("remainder", lambda t: t.float()), "remainder is torch.float32"),
            (_entry("remainder", lambda t: t.int()), "remainder is torch.int32"),
            (_entry("remainder", lambda t: "text"), "remainder is not a tensor"),
            (
                _entry("exp_avg_scale", lambda t: t.index_fill(0, torch.tensor([3]), math.nan)),
                "exp_avg_scale has numbers that",
            ),
            (
                _entry("exp_avg_scale", lambda t: t.double().index_fill(0, torch.tensor([3]), 1e39)),
                "exp_avg_scale has numbers that are no scales: negative, NaN, or beyond float32's range",
            ),
            (
                _entry("exp_avg_int8", lambda t: t.index_fill(0, torch.tensor([3]), -128)),
                "exp_avg_int8 has -128, which is no code",
            ),
            (_entry("exp_avg_sq_scale", lambda t: -t), "exp_avg_sq_scale has numbers that are no scales"),
            (_entry("exp_avg_scale", lambda t: t[:-1]), "exp_avg_scale has 79 numbers for 80 groups"),
            (_entry("exp_avg_scale", lambda t: t.int()), "exp_avg_scale is torch.int32"),
            (_entry("exp_avg_int8", lambda t: t[:-1]), r"exp_avg_int8 has shape \(79, 64\) instead of \(80, 64\)"),
            (
                _entry("exp_avg_int8", lambda t: t.to(torch.uint8)),
                "exp_avg_int8 is torch.uint8; its codes are of signed numbers",
            ),
            (_entry("exp_avg_int8", lambda t: t.int()), "exp_avg_int8 is torch.int32"),
            (_entry("exp_avg_int8", lambda t: t.float()), "exp_avg_int8 is torch.float32"),
            (
                lambda entries: entries.update(exp_avg=entries.pop("exp_avg_int8").float()),
                "exp_avg_scale belongs to codes of 8 bits",
            ),
            (lambda entries: entries.update(exp_avg=entries["exp_avg_int8"].float()), "both exp_avg and exp_avg_int8"),
            (lambda entries: entries.update(exp_avg=entries["exp_avg_int8"]), "both exp_avg and exp_avg_int8"),
            (lambda entries: entries.pop("exp_avg_scale"), "the checkpoint has no exp_avg_scale for"),
            (
                lambda entries: entries.pop("exp_avg_int8"),
                "no exp_avg(_int8)? for it|the optimizer has no exp_avg_scale",
            ),
            (lambda entries: entries.update(kahan_comp=torch.zeros(80, 64)), "it has both kahan_comp and remainder"),
        ],
        ids=lambda value: value if isinstance(value, str) else "damage",
    )
    def test_changes_nothing(self, damage: Callable[[dict[str, Any]], None], message: str, options: dict[str, Any]) -> None:
        saved = through_a_file(_run(weights="split8", state_dtype="int8")[0].state_dict())
        damage(saved["state"][0])
        optimizer, _ = _run(**options)
        before = content(optimizer)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert content(optimizer) == before

    def test_integers_for_numbers(self) -> None:
        optimizer, _ = _run()
        saved = through_a_file(optimizer.state_dict())
        saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].to(torch.int8)
        before = content(optimizer)
        with pytest.raises(ValueError, match="exp_avg has codes of 8 bits, and the checkpoint has no"):
            optimizer.load_state_dict(saved)
        assert content(optimizer) == before

    def test_files_of_torchs_form(self, tmp_path: Any) -> None:
        files = pytest.importorskip("compiled_optim.interop.convert")
        for options, entry in (({"state_dtype": "int8"}, "exp_avg"), ({"weights": "split8"}, "remainder")):
            with pytest.raises(ValueError, match=f"{entry}.* in a form that torch.optim lacks"):
                files.write(_run(**options)[0].state_dict(), tmp_path / "state.pt", "torch")
        files.write(_run(state_dtype=torch.float32)[0].state_dict(), tmp_path / "state.pt", "torch")


@pytest.mark.parametrize(
    "entry", ["exp_avg_int8", "exp_avg_scale", "exp_avg_sq_int8", "exp_avg_sq_scale", "remainder", "step"]
)
def test_whatever_an_entry_is(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads and the optimizer steps on, or it is refused and nothing is changed."""
    monkeypatch.setattr(storage, "MINIMUM", 1)
    model = {"w": nn.Parameter(torch.randn(2, 64).bfloat16())}
    options = {"weights": "split8", "state_dtype": "int8"}
    source, _ = _run(model, 2, **options)
    refused = 0
    for odd in ODD:
        for loading in (options, {"weights": "kahan"}):
            optimizer, twin = _run(_twin(model), 1, **loading)
            before, saved = content(optimizer), source.state_dict()
            own = saved["state"][0]
            own[entry] = odd(tuple(own[entry].shape))
            try:
                optimizer.load_state_dict(saved)
            except (ValueError, TypeError):
                refused += 1
                assert content(optimizer) == before
                continue
            _train(optimizer, twin, range(2, 3))
    assert refused > len(ODD)
