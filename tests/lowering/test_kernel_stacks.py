"""Rules on whole tensors as Triton loops without a GPU: interpreted on a CPU, compiled for a device that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from in_triton import interpret
from matrix_averages import MatrixAverages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import compiled_optim as co
from compiled_optim.lowering import stack_loops
from compiled_optim.lowering.stacks import CodeStack
from compiled_optim.memory import torch_internals
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import Number, hyper, storage
from compiled_optim.simulated import ptx
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import Record, recording
from perf.workloads import WORKLOADS

triton = pytest.importorskip("triton")


@dataclass
class Limits:
    """For the errors of state, and of what steps add to parameters, beside those that are rounded in another way."""

    state: float
    steps: float
    products: float = 0.0  # of polynomials of products, which eager steps round to bfloat16 in between


LIMITS = {
    "Muon float32": Limits(2e-7, 1e-6, 0.006),
    "Muon float64": Limits(4e-16, 1e-14, 0.006),
    "Muon bfloat16": Limits(1e-3, 0.01, 0.1),  # small steps are rounded by large parameters
    "Muon polar_express float32": Limits(2e-7, 1e-6, 0.03),
    "Muon matched float32": Limits(2e-7, 1e-6, 0.03),
    "Muon in parts float32": Limits(2e-7, 1e-6, 0.03),
    "NorMuon in parts float32": Limits(2e-7, 2e-6, 0.03),
    "NorMuon float32": Limits(2e-7, 2e-6, 0.03),
    "NorMuon float64": Limits(4e-16, 1e-14, 0.03),
    "NorMuon bfloat16": Limits(1e-3, 0.01, 0.05),
    "Adafactor float32": Limits(3e-7, 1e-6),
    "Adafactor float64": Limits(1e-15, 1e-14),
    "Adafactor bfloat16": Limits(1e-4, 1e-3),
    "Adafactor defaults float32": Limits(3e-7, 3e-5),  # small steps are rounded by large parameters
    "Adafactor transposed float32": Limits(3e-7, 1e-6),
    "Muon transposed float32": Limits(2e-7, 1e-6, 0.006),
    "Muon transposed in parts float32": Limits(2e-7, 1e-6, 0.03),
    "Muon sharded float32": Limits(2e-7, 1e-6, 0.006),
    # Of weights in few bits, a last bit of a division moves a remainder from one end to the other.
    "MatrixAverages split8 int8": Limits(0.05, 1e-3),
    "MatrixAverages split16 int8": Limits(0.05, 1e-3),
    "MatrixAverages stochastic bfloat16": Limits(1e-6, 1e-3),
    "MatrixAverages kahan int8": Limits(1e-3, 1e-3),
    "MatrixAverages int8": Limits(1e-6, 1e-5),
    "MatrixAverages int8 in parts": Limits(1e-3, 1e-3),
}
SYMMETRIC = {"Muon": "0126", "NorMuon": "01", "Muon in parts": "2", "Muon transposed in parts": "2"}
"""By optimizer, the parameters with products that our kernel computes."""
PRODUCTS = {"Muon": 3, "NorMuon": 1, "Muon in parts": 1, "Muon transposed in parts": 1}
"""By optimizer, the stacks that have them. Each of four steps has two in each of five iterations."""


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What one process finds that interprets the cases that this run takes."""
    own = (item for item in request.session.items if item.originalname == "test_interpreted_loops_equal_eager_steps")
    wanted = [item.callspec.params["case"] for item in own]
    found: dict[str, Any] = interpret("interpreted_loops", *wanted)
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", LIMITS)
def test_interpreted_loops_equal_eager_steps(case: str, interpreted: dict[str, Any]) -> None:
    """The program itself asserts that absent gradients and a skipped step change nothing, and all others something."""
    found, limits = interpreted[case], LIMITS[case]
    optimizer = case.rpartition(" ")[0] if " in parts" in case else case.split()[0]
    assert found["symmetric products"] == 4 * 5 * 2 * PRODUCTS.get(optimizer, 0)
    over = {}
    for entry, error in found["errors"].items():
        place, _, field = entry.partition(" ")
        if place in SYMMETRIC.get(optimizer, "") and field in ("", "row_var"):
            limit = limits.products
        else:
            limit = {"": limits.steps, "step": 0.0}.get(field, limits.state)
        if error > limit:
            over[entry] = error
    assert over == {}
    assert len(found["errors"]) >= 15


Params = list[nn.Parameter]


def _parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, device: str = "cuda") -> Params:
    params = [nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.empty_like(param)
    return params


@contextlib.contextmanager
def _gpu(arch: int = 90) -> Iterator[Record]:
    with fake_cuda(arch), recording("cuda") as recorder:
        yield recorder


def _ways(optimizer: co.CompiledOptimizer) -> set[str]:
    """How stacks are updated: by loops "in place" or in "copies", or by "code" of torch operations."""
    stacks = [stack for lowering in engine_of(optimizer).step.lowerings for stack in lowering.stacks]
    return {"code" if isinstance(s, CodeStack) else "in place" if s.copies is None else "copies" for s in stacks}


class _Rows(co.CompiledOptimizer, granularity="tensor"):
    """A rule whose operations loops have."""

    lr: Number = hyper(default=0.1, ge=0)

    @staticmethod
    def coefficients(lr):
        return dict(lr=lr)

    @staticmethod
    def update(param, grad, c):
        return dict(step=c.lr * grad / (1 + (grad * grad).mean(-1, keepdim=True)))


class _Sorted(_Rows, granularity="tensor"):
    """One whose operations they do not have."""

    @staticmethod
    def update(param, grad, c):
        return dict(step=c.lr * torch.sort(grad, dim=-1).values)


class _Columns(_Rows, granularity="tensor"):
    """One that sees other axes than memory has."""

    @staticmethod
    def axes(shape):
        return range(len(shape))[::-1]


def _channels_last(param: Tensor) -> Tensor:
    return param.contiguous(memory_format=torch.channels_last)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _held_apart(param: Tensor) -> Tensor:
    return torch.empty(*param.shape[:-1], 2 * param.shape[-1], dtype=param.dtype, device=param.device)[..., ::2]


@pytest.mark.parametrize(
    ("optimizer", "shape", "arranged", "options", "way"),
    [
        *[(kind, (24, 40), dtype, {}, "in place") for kind in (co.Muon, co.NorMuon, co.Adafactor) for dtype in DTYPES],
        (co.Muon, (3, 24, 40), torch.float32, {"stacks": ["*"]}, "in place"),
        (co.Muon, (2, 3, 24, 40), torch.float32, {"stacks": ["*"]}, "in place"),
        (co.Muon, (24, 40), torch.float32, {"split": {"w": 3}}, "in place"),
        (co.NorMuon, (24, 40), torch.float32, {"split": {"w": (12, 6, 6)}}, "in place"),
        (co.Muon, (2, 24, 40), torch.float32, {"stacks": ["*"], "split": {"w": 3}}, "in place"),
        (co.Muon, (2, 24, 40), torch.float32, {"stacks": ["*"], "split": {"w": (16, 8)}}, "code"),
        (co.Muon, (64, 100), torch.float16, {"split": {"w": 4}, "weights": "stochastic"}, "in place"),
        (co.Muon, (64, 100), torch.float16, {"split": {"w": (48, 16)}, "weights": "stochastic"}, "code"),
        (co.Adafactor, (7,), torch.float32, {}, "in place"),
        (co.Adafactor, (4, 3, 2, 5), torch.float32, {}, "in place"),
        (_Rows, (24, 40), torch.float32, {}, "in place"),
        (_Sorted, (24, 40), torch.float32, {}, "code"),
        (_Columns, (24, 40), torch.float32, {}, "copies"),
        (co.Muon, (24, 40), Tensor.t, {}, "copies"),
        (co.Adafactor, (4, 3, 2, 5), _channels_last, {}, "copies"),
        (co.Adafactor, (24, 40), _held_apart, {}, "copies"),
        (co.Muon, (64, 128), torch.float32, {"state_dtype": "int8"}, "in place"),
        (co.NorMuon, (64, 128), torch.bfloat16, {"state_dtype": "int8", "weights": "split8"}, "in place"),
        (co.Muon, (64, 100), torch.float16, {"state_dtype": torch.bfloat16, "weights": "stochastic"}, "in place"),
        (co.Muon, (64, 100), torch.float64, {"state_dtype": torch.bfloat16}, "code"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_which_plans_loops_serve(
    optimizer: type[co.CompiledOptimizer],
    shape: tuple[int, ...],
    arranged: torch.dtype | Callable[[Tensor], Tensor],
    options: dict[str, Any],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all others Inductor compiles stacks."""
    monkeypatch.setattr(storage, "MINIMUM", 64)
    with fake_cuda(90):
        dtype = arranged if isinstance(arranged, torch.dtype) else torch.float32
        param = torch.empty(shape, dtype=dtype, device="cuda")
        param = nn.Parameter(param if isinstance(arranged, torch.dtype) else arranged(param))
        is_said = optimizer is _Sorted or (dtype, options) == (torch.float64, {"state_dtype": torch.bfloat16})  # by its rule
        with pytest.warns(RuntimeWarning, match="Inductor compiles stacks, since") if is_said else contextlib.nullcontext():
            optimizer_made = optimizer([("w", param)], **options)
            ways = _ways(optimizer_made)
        assert ways == {way}
        assert [finding.name for finding in co.compile_report(optimizer_made).findings] == ["slower"] * is_said


def test_shards_are_gathered(one_process: None) -> None:
    param = nn.Parameter(distribute_tensor(torch.randn(24, 40), init_device_mesh("cpu", (1,)), [Shard(0)]))
    assert _ways(co.Muon([("w", param)])) == {"copies"}
    assert _ways(co.Muon([("w", nn.Parameter(torch.randn(24, 40)))])) == {"in place"}


def _products(recorder: Record) -> int:
    return sum(operator.name == "bmm" for operator in recorder.take().operators)


@pytest.mark.full
def test_stacks_without_a_gradient_take_no_time_but_in_a_graph(fresh_kernels: None) -> None:
    with _gpu() as recorder:
        params = _parameters([(40, 24), (40, 24), (16, 24)])
        optimizer = co.Muon(params)
        optimizer.step()
        (lowering,) = engine_of(optimizer).step.lowerings
        counts = []
        for absent in ([], [0], [2], [0, 1, 2]):
            for i, param in enumerate(params):
                param.grad = None if i in absent else torch.empty_like(param)
            recorder.take()
            optimizer.step()
            counts.append(_products(recorder))
        lowering.prepare(None)
        recorder.take()
        with mock.patch.dict(torch_internals.CAPTURING, {"cuda": lambda: True}):
            lowering.launch()
        assert _products(recorder) == counts[0] > 0
        optimizer.step()  # which goes on as before the capture
        assert _products(recorder) == 0
    assert counts == [counts[0], counts[0], counts[0] // 2, 0]


def test_stacks_have_no_more_tensors_than_a_grid_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stack_loops.MOST_TENSORS < 1 << 16
    monkeypatch.setattr(stack_loops, "MOST_TENSORS", 5)
    with fake_cuda(90):
        (lowering,) = engine_of(co.Muon(_parameters([(4, 3)] * 12))).step.lowerings
    assert [len(stack.positions) for stack in lowering.stacks] == [5, 5, 2]


LAUNCHES = {
    ("Muon", 90): (57, 20),
    ("Muon", 80): (37, 60),
    ("NorMuon", 90): (77, 20),
    ("NorMuon", 80): (57, 60),
    ("Adafactor", 90): (86, 0),
}
"""Of kernels, and of torch's products, for GPT-2: its matrices are four stacks, and its vectors three. At 768 rows, an A100
multiplies with torch."""


@pytest.mark.full
@pytest.mark.parametrize(("name", "arch"), LAUNCHES, ids=str)
def test_a_step_is_loops_and_products_alone(name: str, arch: int, fresh_kernels: None) -> None:
    from torch._inductor import compile_fx

    workload = WORKLOADS["gpt2-124m" if name == "Adafactor" else "gpt2-matrices"]()
    with (
        _gpu(arch) as recorder,
        mock.patch.object(compile_fx, "compile_fx", side_effect=AssertionError("Inductor compiles")),
    ):
        optimizer = getattr(co, name)(_parameters(workload))
        optimizer.step()
        first = recorder.take()
        optimizer.step()
        later = recorder.take()
    assert _ways(optimizer) == {"in place"}
    assert not first.graphs + later.graphs
    assert (len(later.launches), len(later.operators)) == LAUNCHES[name, arch]
    assert {operator.name for operator in later.operators} <= {"bmm"}
    symmetric = sum(launch.name == "symmetric_product" for launch in later.launches)
    assert symmetric == (40 if arch == 90 and name != "Adafactor" else 0)
    kernels = [compilation.kernel for compilation in co.compile_report(optimizer).compilations]
    assert all("[coefficients]" in kernel or "[loops over stacks like " in kernel for kernel in kernels)


@pytest.mark.parametrize(("device", "kinds"), [("cuda", 3), ("cpu", 1)])
def test_sizes_for_which_triton_compiles_apart_have_keys_of_their_own(device: str, kinds: int) -> None:
    with fake_cuda(90):
        made = [co.Adafactor(_parameters([shape], device=device)) for shape in ((32, 64), (48, 80), (33, 64), (32, 65))]
        stacks = [stack for optimizer in made for stack in engine_of(optimizer).step.lowerings[0].stacks]
        keys = [stack_loops._key_of(stack.key, *stack.parts, stack_loops.LOOPS[device]) for stack in stacks]
    assert len({key.arrangement for key in keys}) == kinds


SPILLED = {("Adafactor", 80): 20}
"""Bytes, of one kernel, that the assembler puts aside around a division though it has registers; otherwise none."""
STORED: list[dict[str, Any]] = [
    {"state_dtype": "int8"},
    {"weights": "kahan"},
    *[{"weights": weights, "state_dtype": "int8"} for weights in ("kahan", "split8", "split16")],
    {"weights": "master", "state_dtype": torch.bfloat16},
    {"weights": "stochastic", "state_dtype": torch.bfloat16},
]
FORMS: list[tuple[type[co.CompiledOptimizer], torch.dtype, dict[str, Any]]] = [
    *((kind, d, {}) for kind in (co.Muon, co.NorMuon, co.Adafactor) for d in (torch.float32, torch.bfloat16)),
    *((kind, torch.bfloat16, form) for kind in (co.Muon, co.NorMuon, MatrixAverages) for form in STORED),
    *((kind, torch.float32, {"state_dtype": "int8"}) for kind in (co.Muon, co.NorMuon)),
]


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("kind", "dtype", "form"), FORMS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_loops_compile_without_spills_and_with_wide_accesses(
    kind: type[co.CompiledOptimizer],
    dtype: torch.dtype,
    form: dict[str, Any],
    arch: int,
    fresh_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 16 bytes, or of 4 for codes, for what has a number for each element of a loop; others move far less."""
    monkeypatch.setattr(storage, "MINIMUM", 64)
    with _gpu(arch) as recorder:
        optimizer = kind(_parameters([(256, 512)], dtype), **form)
        optimizer.step()
        texts = {launch.name: launch.kernel.asm["ptx"] for launch in recorder.take().launches}
        (lowering,) = engine_of(optimizer).step.lowerings
        (stack,) = lowering.stacks
    used = {kernel: ptx.resources(text, arch) for kernel, text in texts.items()}
    assert sum(resources.spills for resources in used.values()) <= SPILLED.get((kind.__name__, arch), 0)
    source = stack.kernels[0]._source
    assert texts.keys() - {"add"} == {"evaluate", *(loop.name for loop in source.loops)}
    for loop in (loop for loop in source.loops if {"r", "c"} & {*loop.axes}):
        found = ptx.read(texts[loop.name])
        assert found.extern == ()
        assert used[loop.name].registers <= 128
        if loop.axes != source.update.axes:
            continue
        arrays = {name: source.dtypes[name] for name in (*loop.loads, *loop.results) if name in source.update.inputs}
        per_thread = 16 if len(arrays) < 4 and all(d.is_floating_point for d in arrays.values()) else 8
        for way, names in {"ld": loop.loads, "st": [*loop.outputs, *loop.results]}.items():
            sizes = [source.dtypes[n].itemsize for n in names if source.axes_of(n) == loop.axes]
            least = 16 if 1 not in sizes else 4
            wide = [a for a in found.full_path if a.elementwise and a.kind == way and a.bytes >= least]
            assert sum(a.bytes for a in wide) >= sum(sizes) * per_thread, (loop.name, way)


def test_sizes_and_numbers_compile_nothing(fresh_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of tensors nor of hyperparameters: stacks whose code is equal have one entry, and Triton compiles it once."""
    monkeypatch.setattr(stack_loops, "_examples", {})
    compiled = []
    with _gpu() as recorder:
        for shapes in ([(64, 256)], [(256, 512)] * 5 + [(64, 512)], [(64, 64)] * 2, [(256, 64)]):
            optimizer = co.Muon([(f"w{i}", p) for i, p in enumerate(_parameters(shapes))], weight_decay=0.2)
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.5
            with co.no_recompiles():
                optimizer.step()
            taken = recorder.take()
            compiled.append({launch.kernel for launch in taken.launches if launch.name.startswith("loop")})
        names = [key.arrangement for key in stack_loops._kernels]
    assert names == ["loops over stacks like 64 x 256", "loops over stacks like 256 x 64"]
    assert compiled[0] == compiled[1] == compiled[2]
    assert co.compile_report(optimizer).recompiles == 0


def test_stacks_of_several_tensors_are_bounded() -> None:
    """By bytes of the numbers that are computed with; a larger tensor is alone."""
    shapes = [(4096, 4096)] * 5 + [(32000, 4096)] * 2 + [(768, 768)] * 100
    for dtype in (torch.float32, torch.bfloat16):
        with fake_cuda(90):
            (lowering,) = engine_of(co.Adafactor(_parameters(shapes, dtype))).step.lowerings
        assert [len(stack.positions) for stack in lowering.stacks] == [2, 2, 1, 1, 1, 56, 44]
