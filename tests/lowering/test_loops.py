"""Rules on whole tensors as loops in C++, against the same rules in torch operations."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog import copies, give_gradients, relative_error, wide_scalars
from matrix_averages import MatrixAverages
from new_process import printed_by
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_optim as co
from compiled_optim.lowering import stack_loops
from compiled_optim.lowering.kernels import cpp_stacks
from compiled_optim.lowering.stacks import CodeStack, LoopStack
from compiled_optim.optimizer import engine_of
from compiled_optim.rule import Number, absolute, buffer, hyper, identity, maximum, sqrt, static, where


class Sums(co.CompiledOptimizer, granularity="tensor"):
    """Sums along every axis and several at once, some of values that other sums are part of."""

    lr: Number = hyper(default=0.1, ge=0)
    every = buffer()
    of_rows = buffer(shape=lambda shape: (*shape[:-1], 1))
    of_all = buffer(shape=lambda shape: (1,) * len(shape))

    @staticmethod
    def coefficients(lr):
        return dict(lr=lr)

    @staticmethod
    def update(param, grad, c, every, of_rows, of_all):
        axes = range(1, param.dim())
        along = [param.mean(axis, keepdim=True) for axis in axes]
        of_all = 0.5 * of_all + (grad * grad).sum(tuple(axes), keepdim=True)
        of_rows = torch.lerp(of_rows, absolute(grad).mean(-1, keepdim=True), 0.3 * c.lr + 0.4)
        direction = grad / (1 + sqrt(of_all)) + 0.01 * of_rows * every
        for average in along:
            direction = direction - 0.1 * average
        spread = (direction * direction).mean(tuple(axes), keepdim=True)
        direction = where(spread > 1e-3, direction / sqrt(spread), direction)
        if param.dim() > 2:
            direction = direction + 0.2 * along[-1].mean((-2, -1), keepdim=True)
            direction = direction - 0.1 * grad.mT.mean(-2, keepdim=True).mT  # of matrices that lie transposed
        return dict(step=c.lr * direction, every=0.9 * every + param, of_rows=of_rows, of_all=of_all)


class Products(co.CompiledOptimizer, granularity="matrix"):
    """Products of matrices and transposed ones, in full precision or in bfloat16, which lie transposed or do not."""

    lr: Number = hyper(default=0.1, ge=0)
    in_half: bool = static(default=False)
    moving = buffer()

    @staticmethod
    def coefficients(lr):
        return dict(lr=lr, weight=0.25 + 0 * lr)

    @staticmethod
    def update(param, grad, c, moving, in_half):
        moving = torch.lerp(moving, grad, c.weight)
        x = moving.mT / maximum(torch.linalg.vector_norm(moving.mT, dim=(-2, -1), keepdim=True), 1e-7)
        x = x * math.sqrt(param.shape[-1]) + 0.1 * grad.mT  # which lie alike
        x = x.to(torch.bfloat16) if in_half else x
        gram, other = x @ x.mT, x.mT @ x
        mixed = ((2 * c.weight) * gram + c.lr * identity(gram)).to(x.dtype) @ x
        back = (other @ x.mT).to(param.dtype)
        wide = mixed.mT.to(param.dtype) + back + 0.1 * param  # of which one lies transposed
        return dict(step=c.lr * (wide - param.mean(-1, keepdim=True)), moving=moving)


SHAPES = [(1,), (7,), (3, 5), (1, 6), (6, 1), (2, 3, 4, 5), (70, 2, 3, 3), (2, 1, 9, 1)]
LARGE = [(140_000,), (300, 700), (1, 150_000), (150_000, 1), (3, 300, 200), (80, 90, 5, 5)]  # of several chunks
MATRICES = [(3, 5), (5, 3), (1, 6), (6, 1), (8, 8), (8, 8), (300, 700), (500, 300)]


def _params(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """A parameter of each shape, the last one of them not contiguous."""
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in (*shapes, *shapes[2:4])]
    last = params[-1].detach()
    return [*params[:-1], torch.nn.Parameter(last.mT.contiguous().mT if last.dim() > 1 else last)]


def _lowerings(optimizer: co.CompiledOptimizer) -> list[Any]:
    return list(engine_of(optimizer).step.lowerings)


def _kinds(optimizer: co.CompiledOptimizer) -> set[type]:
    return {type(stack) for lowering in _lowerings(optimizer) for stack in lowering.stacks}


@pytest.mark.parametrize("shapes", [SHAPES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str
)
def test_sums_are_those_of_torch_operations(shapes: Any, dtype: torch.dtype, limit: float) -> None:
    _equal_to_eager(Sums, _params(shapes, dtype), limit, {})


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_products_are_those_of_torch_operations(dtype: torch.dtype, limit: float) -> None:
    _equal_to_eager(Products, _params(MATRICES, dtype), limit, {})


@pytest.mark.parametrize("product_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_in_bfloat16(product_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a processor multiplies float32 numbers in their place: both round once, by up to 2**-9, or rarely twice."""
    monkeypatch.setattr(cpp_stacks, "_HALF", product_dtype)
    monkeypatch.setattr(stack_loops, "_kernels", {})
    _equal_to_eager(Products, _params(MATRICES, torch.float32), 1e-2, {"in_half": True})


def _equal_to_eager(kind: type[co.CompiledOptimizer], params: list[torch.nn.Parameter], limit: float, choices: Any) -> None:
    twins = copies(params, params[0].dtype)
    with wide_scalars():
        optimizer, reference = (
            kind(ps, lr=0.05, **choices, lowering=how) for ps, how in ((params, "auto"), (twins, "eager"))
        )
        for step in range(4):
            give_gradients(params, twins, step, absent=3 if step % 2 else 0)
            optimizer.step()
            reference.step()
    assert _kinds(optimizer) == {LoopStack}
    assert relative_error(params, twins) < limit
    for param, twin in zip(params, twins, strict=True):
        for name, value in reference.state[twin].items():
            assert torch.allclose(optimizer.state[param][name], value, rtol=10 * limit, atol=limit), name


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")  # puts the number back
@pytest.mark.parametrize("kind", [Sums, Products], ids=lambda kind: kind.__name__)
def test_the_number_of_threads_changes_no_bit(kind: type[co.CompiledOptimizer]) -> None:
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        params = _params(LARGE if kind is Sums else MATRICES, torch.float32)
        optimizer = kind(params, lr=0.1)
        for step in range(3):
            give_gradients(params, params, step)
            optimizer.step()
        results.append(params)
    if kind is Products:  # torch's products may depend on the threads
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(results[0], results[1], strict=True))
        return
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


@pytest.mark.usefixtures("one_thread")  # for each product, whose bits may depend on how many there are
def test_threads_step_at_the_same_time() -> None:
    """Each has memory of its own for what lives during an update."""

    def train(made: list[torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(64, 96, generator=generator)) for _ in range(20)]
        optimizer = co.Muon(params, lr=0.1)
        for _ in range(30):
            for param in params:
                param.grad = torch.randn(64, 96, generator=generator)
            optimizer.step()
        made += params

    results: list[list[torch.Tensor]] = [[] for _ in range(4)]
    train(results[0])
    threads = [threading.Thread(target=train, args=(made,)) for made in results[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in results[1:]:
        assert len(made) == 20
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(made, results[0], strict=True))


@pytest.mark.parametrize("kind", [co.Adafactor, co.Muon], ids=lambda kind: kind.__name__)
def test_gradients_may_lie_in_any_way(kind: type[co.CompiledOptimizer]) -> None:
    params = [torch.nn.Parameter(torch.randn(40, 30)) for _ in range(4)]
    twins = copies(params, torch.float32)
    optimizer, reference = kind(params, lr=0.1), kind(twins, lr=0.1)
    for step in range(3):
        give_gradients(params, twins, step)
        params[0].grad = params[0].grad.t().contiguous().t()
        params[1].grad = torch.stack([params[1].grad, params[1].grad], -1)[..., 0]
        params[2].grad = torch._neg_view(-params[2].grad)
        optimizer.step()
        reference.step()
        params[3].data, params[3].grad = params[3].data.clone(), params[3].grad.clone()  # the parameter moved
    assert all(map(torch.equal, params, twins))


class Unknown(Sums, granularity="tensor"):
    """An update that only a compiler for all of torch takes."""

    @staticmethod
    def update(param, grad, c, every, of_rows, of_all):
        way = torch.tanh(grad) + 0 * param.shape[0]
        return dict(step=c.lr * way, every=every, of_rows=of_rows + grad.mean(-1, True), of_all=of_all)


class DropsDimensions(Sums, granularity="tensor"):
    """An update with a mistake of its own in the words that loops know."""

    @staticmethod
    def update(param, grad, c, every, of_rows, of_all):
        return dict(step=c.lr * (grad - grad.amax(-1).unsqueeze(-1)), every=every, of_rows=of_rows, of_all=of_all)


@pytest.mark.full
@pytest.mark.parametrize("kind", [Unknown, DropsDimensions], ids=lambda kind: kind.__name__)
def test_other_rules_are_compiled_by_inductor(kind: type[co.CompiledOptimizer]) -> None:
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,))]
    twins = copies(params, torch.float32)
    with pytest.warns(RuntimeWarning, match=rf"Inductor compiles stacks, since {kind.__name__}\.update "):
        optimizer = kind(params, lr=0.1)
    reference = kind(twins, lr=0.1, lowering="eager")
    give_gradients(params, twins, 0)
    optimizer.step()
    reference.step()
    assert relative_error(params, twins) < 1e-6
    assert _kinds(optimizer) == {CodeStack}
    assert [finding.name for finding in co.compile_report(optimizer).findings] == ["slower"]


STORED = [
    *[(torch.bfloat16, weights, "int8") for weights in ("kahan", "stochastic", "split16")],
    *[(torch.bfloat16, weights, torch.bfloat16) for weights in ("split8", "master")],
    *[(torch.float16, "split8", "int8"), (torch.float16, "stochastic", torch.bfloat16)],
    *[(torch.float32, None, "int8"), (torch.float32, None, torch.float16)],
]


@pytest.mark.parametrize(("dtype", "weights", "state_dtype"), STORED, ids=str)
def test_numbers_are_stored_as_by_torch_operations(
    dtype: torch.dtype, weights: str | None, state_dtype: Any, request: pytest.FixtureRequest
) -> None:
    """Of the last matrix, chunks that threads take end within groups."""
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    shapes = [(48, 128), (130, 64), (130, 64), (3, 64 * 3001)]
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    twins = copies(params, dtype)
    options = {"lr": 0.003, "beta": 0.8, "weights": weights, "state_dtype": state_dtype}
    optimizer, reference = MatrixAverages(params, **options), MatrixAverages(twins, lowering="eager", **options)
    assert _kinds(optimizer) == {LoopStack}
    for step in range(4):
        give_gradients(params, twins, step)
        params[1].grad = twins[1].grad = None if step == 2 else params[1].grad
        optimizer.step()
        reference.step()
    for param, twin in zip(params, twins, strict=True):
        pairs = {name: (optimizer.state[param][name], value) for name, value in reference.state[twin].items()}
        equal = {name: (ours == its).float().mean().item() for name, (ours, its) in {**pairs, "": (param, twin)}.items()}
        assert min(equal.values()) > 0.99, equal  # last bits of divisions may differ


def test_code_does_not_depend_on_shapes_or_on_how_often_it_iterates() -> None:
    """A Muon of any depth and width compiles two libraries, of high matrices and of others, with four functions at most."""
    texts = set()
    for steps in (3, 5, 9):
        for shape in ((64, 256), (256, 512), (64, 64), (256, 64)):
            optimizer = co.Muon([torch.nn.Parameter(torch.randn(shape))], ns_steps=steps)
            optimizer.param_groups[0]["params"][0].grad = torch.randn(shape)
            optimizer.step()
            (stack,) = _lowerings(optimizer)[0].stacks
            texts.add(cpp_stacks.stack_source(stack.key, shape).text)
    assert len(texts) == 2
    assert all(text.count("OURS void part") <= 4 for text in texts)


@pytest.mark.full
def test_every_process_writes_the_same_code() -> None:
    """Which is found again by its text."""
    printed = {printed_by("loop_texts", PYTHONHASHSEED=seed) for seed in ("1", "2", "3")}
    assert len(printed) == 1
    assert len(printed.pop().split()) == 4


@pytest.mark.parametrize("lowering", ["auto", "eager"])
@pytest.mark.parametrize(
    "context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["inference", "autocast"]
)
def test_contexts_change_nothing(context: Any, lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in them nor afterwards, where memory that they may have made is used again."""
    monkeypatch.setattr(cpp_stacks, "_memory", cpp_stacks._Memory())
    params = [torch.nn.Parameter(torch.randn(12, 20)) for _ in range(2)]
    twins = copies(params, torch.float32)
    optimizer, reference = (Products(each, lr=0.1, lowering=lowering) for each in (params, twins))
    for step in range(4):
        give_gradients(params, twins, step)
        reference.step()
        with context() if step % 2 == 0 else contextlib.nullcontext():
            optimizer.step()
    assert all(map(torch.equal, params, twins))


def _made(granularity: str, update: Any, **fields: Any) -> Any:
    class Made(co.CompiledOptimizer, granularity=granularity):  # type: ignore[call-arg]
        lr: Number = hyper(default=0.1, ge=0)

        @staticmethod
        def coefficients(lr):
            return dict(lr=lr)

    return type("Made", (Made,), {"update": staticmethod(update), **fields})


def _leading(param, grad, c, n):
    return dict(step=c.lr * grad, n=n * 0.5 + c.lr)


def _turned_sums(param, grad, c):
    return dict(step=0.01 * c.lr * ((grad @ grad.mT + grad.mean(-1, keepdim=True).mT) @ param))


def _turned_total(param, grad, c, n):
    return dict(step=c.lr * grad, n=n + grad.mT.sum((-2, -1), keepdim=True))


def _rounded_and_back(param, grad, c):
    x = grad.to(torch.bfloat16).to(param.dtype)
    return dict(step=0.01 * c.lr * ((x @ x.mT) @ param))


def _lower_precision(param, grad, c):
    return dict(step=c.lr * grad.to(torch.float32).to(param.dtype))


def _masks_as_numbers(param, grad, c):
    m, n, k = ((x > y).to(param.dtype) for x, y in ((grad, 0), (param, 0), (grad, param)))
    both = ((grad > 0) & (param > 0)) | (grad > param)
    return dict(step=c.lr * ((m + n) / (k + n + 1) + maximum(m, 0.5) + where(both, m, grad)))


def _sums_of_masks(param, grad, c):
    return dict(step=c.lr * ((grad > 0) + (param > 0)) * grad)


def _masks_where(param, grad, c):
    return dict(step=c.lr * where(param > 0, grad > 0, grad))


def _integers(param, grad, c, n):
    return dict(step=c.lr * grad * n, n=n)


def _everything(param, grad, c):
    return dict(step=c.lr * grad / torch.linalg.vector_norm(grad[:1], keepdim=True).view([1] * grad.dim()))


def _chosen_halves(param, grad, c):
    half = grad.to(torch.bfloat16)
    return dict(step=(c.lr * where(param > 0, half, half * 3.1)).to(param.dtype))


def _powers(param, grad, c):
    return dict(step=c.lr * (grad**2 + absolute(grad) ** 0.5 + 2 ** (0.1 * grad)))


TOTAL = buffer(shape=lambda shape: (1,) * len(shape))


CASES: list[tuple[str, Any, dict[str, Any], str]] = [
    ("matrix", _turned_sums, {}, r"transposes sums along rows or columns \(.*grad\.mean\("),
    ("matrix", _turned_total, {"n": TOTAL}, ""),
    ("matrix", _rounded_and_back, {}, ""),
    ("tensor", _lower_precision, {}, r"computes in torch\.float32 \(.*grad\.to\(torch\.float32\)"),
    ("tensor", _masks_as_numbers, {}, ""),
    ("tensor", _sums_of_masks, {}, r"computes with a comparison \(.*\(grad > 0\) \+"),
    ("tensor", _masks_where, {}, r"computes with a comparison \(.*where\(param > 0, grad > 0"),
    ("tensor", _everything, {}, r"is not in the rules' vocabulary: .*not subscriptable \(.*grad\[:1\]"),
    ("matrix", _chosen_halves, {}, r"computes in bfloat16 \(.*half \* 3\.1"),
    ("tensor", _powers, {}, ""),
]
"""Rules, and what is said of those that are not written as loops: why, and the line."""


@pytest.mark.parametrize(("granularity", "update", "fields", "said"), [c for c in CASES if c[3]], ids=lambda v: "")
def test_what_inductor_compiles_is_said_once(granularity: str, update: Any, fields: dict[str, Any], said: str) -> None:
    kind = _made(granularity, update, **fields)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((8, 8), (4, 7), (6, 8))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = kind(params, lr=0.05)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.randn(3, 5, dtype=torch.float64))]})
        engine_of(optimizer).current()  # as a step does, before it compiles
    (warned,) = caught
    report = co.compile_report(optimizer)
    (finding,) = report.findings
    assert finding.said == str(warned.message).removeprefix("compiled_optim: ")
    assert finding.advice.startswith("that ")
    assert re.search(r"Made\.update " + said, finding.evidence)
    assert f"of {Path(__file__).name}: return dict(" in finding.evidence
    assert "Slower than it could be" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert co.compile_report(kind(params, lr=0.05, lowering="inductor")).findings == ()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:compiled_optim. Inductor compiles stacks:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("granularity", "update", "fields", "said"), CASES, ids=lambda v: v.__name__.strip("_") if callable(v) else ""
)
def test_what_loops_cannot_do_goes_another_way(
    granularity: str, update: Any, fields: dict[str, Any], said: str, dtype: torch.dtype
) -> None:
    """Shapes are such that a mistake would go unnoticed: as many tensors as rows, and state far smaller than its tensor."""
    kind = _made(granularity, update, **fields)
    shapes = [(8, 8), *[(4, 7)] * 4] if granularity == "matrix" else [(3, 2000, 3, 3), (4, 7), (9,)]
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    twins = copies(params, dtype)
    optimizer, reference = kind(params, lr=0.05), kind(twins, lr=0.05, lowering="eager")
    for step in range(3):
        give_gradients(params, twins, step)
        optimizer.step()
        reference.step()
    assert relative_error(params, twins) < (1e-2 if update is _chosen_halves else 1e-5)
    for param, twin in zip(params, twins, strict=True):
        assert all(torch.allclose(optimizer.state[param][name], v, rtol=1e-5) for name, v in reference.state[twin].items())
    is_written = not said or (update is _lower_precision and dtype == torch.float32)
    assert _kinds(optimizer) == {LoopStack if is_written else CodeStack}
    assert [finding.name for finding in co.compile_report(optimizer).findings] == ["slower"] * (not is_written)


def test_state_of_another_shape_is_not_taken() -> None:
    """An update sees all axes but the last two as one, of which this state has only the first."""
    kind = _made("tensor", _leading, n=buffer(shape=lambda shape: (shape[0], *[1] * (len(shape) - 1))))
    for shape, expected in (((3, 4, 5), True), ((3, 200, 3, 3), False)):
        param = torch.nn.Parameter(torch.randn(shape))
        optimizer = kind([param], lowering="eager")
        param.grad = torch.ones_like(param)
        optimizer.step()
        refusal = stack_loops.refusal(_lowerings(optimizer)[0].plan, stack_loops.LOOPS["cpu"])
        assert (refusal is None) is expected


def test_axes_are_for_tensors() -> None:
    with pytest.raises(TypeError, match="axes is for the granularity 'tensor'"):
        _made("matrix", lambda param, grad, c: dict(step=grad), axes=staticmethod(lambda shape: [1, 0]))


def test_nothing_is_multiplied_for_absent_gradients_or_in_a_skipped_step(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.nn.Parameter(torch.randn(8, 12)), torch.nn.Parameter(torch.randn(12, 8))]
    optimizer = co.Muon(params, lr=0.1, skip_nonfinite=True)
    products: list[Any] = []
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args, **kwargs: products.append(args) or real(*args, **kwargs))
    for value, expected in ((1.0, 15), (math.inf, 0)):
        params[0].grad = torch.full((8, 12), value)
        products.clear()
        optimizer.step()
        assert len(products) == expected
    assert optimizer.skipped_steps == 1


class _Doubled(co.CompiledOptimizer, granularity="tensor"):
    """A rule with a choice that has the name of an option of rules on matrices."""

    lr: Number = hyper(default=0.1, ge=0)
    split: bool = static(default=False)

    @staticmethod
    def coefficients(lr):
        return dict(lr=lr)

    @staticmethod
    def update(param, grad, c, split=False):
        return dict(step=c.lr * (2 if split else 1) * grad * (grad * grad).mean(-1, keepdim=True))


def test_a_choice_may_have_the_name_of_an_option_on_matrices() -> None:
    param = torch.nn.Parameter(torch.ones(3, 4))
    param.grad = torch.ones_like(param)
    _Doubled([param], split=True).step()
    assert torch.equal(param, torch.full_like(param, 0.8))


def test_sums_of_wide_matrices_need_little_memory() -> None:
    param = torch.nn.Parameter(torch.randn(64, 50_000))
    param.grad = torch.randn_like(param)
    optimizer = co.Adafactor([param])
    optimizer.step()
    (stack,) = _lowerings(optimizer)[0].stacks
    assert stack.kernels[0].bytes < param.numel()


def test_large_memory_goes_back_after_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for limit in (1 << 26, 0):
        monkeypatch.setattr(cpp_stacks, "_memory", memory := cpp_stacks._Memory())
        monkeypatch.setattr(cpp_stacks, "_KEPT", limit)
        param = torch.nn.Parameter(torch.ones(40, 60))
        param.grad = torch.arange(2400.0).view(40, 60).sin()
        co.Muon([param]).step()
        results.append(param)
        assert (len(memory._known), len(memory._all) > 0) == (int(limit > 0), limit > 0)
    assert torch.equal(*results)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "shape", [(64, 32, 1, 1), (64, 1, 3), (64, 1, 3, 3), (40, 1, 24), (40, 24, 1), (5, 1, 1), (3, 4, 1, 5)], ids=str
)
def test_dimensions_of_size_one_move_no_memory(shape: tuple[int, ...], count: int, transposed: bool) -> None:
    """A rule that sees axes in another order gets the same memory if only such dimensions change places."""
    tensors = [torch.randn(shape) for _ in range(count)]
    params = [torch.nn.Parameter(t.transpose(0, 1).contiguous().transpose(0, 1) if transposed else t) for t in tensors]
    twins = copies(params, torch.float32)
    optimizer, reference = (
        co.Adafactor(ps, lr=0.1, factored_dims="largest", lowering=how) for ps, how in ((params, "auto"), (twins, "eager"))
    )
    for step in range(3):
        give_gradients(params, twins, step, absent=count if step == 1 else 0)
        optimizer.step()
        reference.step()
    assert relative_error(params, twins) < 1e-6
    for param, twin in zip(params, twins, strict=True):
        for name, value in reference.state[twin].items():
            assert torch.allclose(optimizer.state[param][name], value, rtol=1e-5), name
    (stack,) = _lowerings(optimizer)[0].stacks
    sizes = [shape[axis] for axis in optimizer._rule.axes_of(torch.Size(shape), {"factored_dims": "largest"})]
    moves = [size for size in sizes if size > 1] != [size for size in shape if size > 1]
    assert (stack.copies is None) == (params[0].is_contiguous() and not moves)


class _Written(TorchDispatchMode):
    """Notes the memory that lists are copied to, and from."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            self.pairs += [(to.data_ptr(), new.data_ptr()) for to, new in zip(*args[:2], strict=True)]
        return func(*args, **(kwargs or {}))


def test_only_parameters_are_copied_back() -> None:
    """State that lives in stacks is updated there."""
    params = [torch.nn.Parameter(torch.randn(24, 40).t()) for _ in range(3)]
    optimizer = co.Muon(params)
    give_gradients(params, params, 0)
    optimizer.step()
    with _Written() as written:
        optimizer.step()
    assert {to for to, _ in written.pairs} == {param.data_ptr() for param in params}
    assert all(to != new for to, new in written.pairs)


def test_one_tensor_in_another_order_is_copied_alone() -> None:
    params = [torch.nn.Parameter(torch.randn(24, 40)) for _ in range(5)]
    params.append(torch.nn.Parameter(torch.randn(40, 24).t()))
    stacks = _lowerings(co.Muon(params))[0].stacks
    assert [(len(stack.positions), stack.copies is None) for stack in stacks] == [(5, True), (1, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_order_of_memory_compiles_nothing(dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.randn(24, 40).to(dtype))
    optimizer = co.Adafactor([param], lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with co.no_recompiles():
        param.data = param.detach().t().contiguous().t()
        optimizer.step()
    assert co.compile_report(optimizer).recompiles == 0
