"""Rules on whole tensors: stacks of equal tensors, against torch.optim and a plain loop in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, SHAPES, Case, copies, give_gradients, relative_error, stacked, stacked_cases, wide_scalars
from new_process import printed_by
from torch.nn.utils import clip_grad_norm_
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_optim as co
from compiled_optim.lowering import stack_code, stack_loops
from compiled_optim.lowering.stacks import CodeStack, LoopStack
from compiled_optim.optimizer import engine_of

MATRICES = [(3, 5), (3, 5), (5, 3), (20, 50), (50, 20), (8, 8), (1, 6)]
FEW_MATRICES = [(3, 5), (3, 5), (50, 20)]
"""A wide stack and a high one."""
ANY = [*SHAPES, (3, 5), (7,), (1, 4), (4, 1)]
IN_FLOAT64 = [c for c in stacked_cases() if c.optimizer._granularity == "tensor"]
NEWER = Case(co.Muon, (("lr", 0.3), ("adjust_lr_fn", "spectral_unclamped")))  # in torch.optim from 2.15 on
IN_BFLOAT16 = [c for c in stacked_cases() if c.optimizer._granularity == "matrix"]
FAR_IN_BFLOAT16 = {c.optimizer: c for c in reversed(IN_BFLOAT16) if c.arguments}
ROUNDED = [(c, torch.float32) for c in IN_BFLOAT16] + [(c, torch.bfloat16) for c in FAR_IN_BFLOAT16.values()]


def _parameters(
    optimizer: type[co.CompiledOptimizer], dtype: torch.dtype, matrices: Sequence[tuple[int, ...]] = MATRICES
) -> list[torch.nn.Parameter]:
    """Shapes that repeat, so that there are stacks; one parameter is channels-last, another one transposed."""
    generator = torch.Generator().manual_seed(0)
    shapes = matrices if optimizer._granularity == "matrix" else ANY
    params = [torch.randn(s, dtype=dtype, generator=generator) for s in shapes]
    params = [p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p for p in params]
    params[0] = params[0].t().contiguous().t()
    return [torch.nn.Parameter(p) for p in params]


def _snapshot(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in params] + [v.clone() for s in optimizer.state.values() for v in s.values()]


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _without_empty(twins: list[torch.nn.Parameter]) -> None:
    """torch.optim.Adafactor divides by the number of elements."""
    for twin in twins:
        if not twin.numel():
            twin.grad = None


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("case", IN_FLOAT64, ids=str)
def test_equals_torch_in_float64(case: Case, lowering: str) -> None:
    with wide_scalars():
        params = _parameters(case.optimizer, torch.float64)
        twins = copies(params, torch.float64)
        optimizer, reference = case.optimizer(params, lowering=lowering, **case.kwargs), case.reference(twins, **case.kwargs)
        for step in range(6):
            give_gradients(params, twins, step, absent=3 if step % 2 else 0)
            _without_empty(twins)
            optimizer.step()
            reference.step()
    assert relative_error(params, twins) < 1e-13
    for param, twin in zip(params, twins, strict=True):
        for name, value in reference.state[twin].items():
            assert torch.allclose(optimizer.state[param][name], value.double(), rtol=1e-12, atol=1e-14), name


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in IN_FLOAT64 if c.arguments], ids=str)
def test_lower_precisions_stay_near_float64(case: Case, dtype: torch.dtype) -> None:
    params = _parameters(case.optimizer, dtype)
    twins = copies(params, torch.float64)
    kwargs = dict(case.kwargs)
    if kwargs["eps"][0] is None:  # that of the parameter's dtype, which the reference does not have
        kwargs["eps"] = (torch.finfo(dtype).eps, kwargs["eps"][1])
    optimizer = case.optimizer(params, **case.kwargs)
    with wide_scalars():
        reference = case.reference(twins, **kwargs)
        for step in range(4):
            give_gradients(params, twins, step)
            _without_empty(twins)
            optimizer.step()
            reference.step()
    # a 16-bit parameter and its state are rounded at every step
    assert relative_error(params, twins) < {torch.bfloat16: 0.1, torch.float16: 1e-2}.get(dtype, 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("case", "dtype"), ROUNDED, ids=str)
def test_equals_torch_up_to_bfloat16_products(case: Case, lowering: str, dtype: torch.dtype) -> None:
    """Both orthogonalize in bfloat16 (2**-9 relative), with other roundings between the products.

    Inductor takes 5 s for each shape of matrices. It compiles all of them for one case of each optimizer in both dtypes, and
    for its defaults in the tests below; for other cases few.
    """
    every = lowering != "inductor" or case == FAR_IN_BFLOAT16[case.optimizer]
    params = _parameters(case.optimizer, dtype, MATRICES if every else FEW_MATRICES)
    twins = copies(params, dtype)
    kwargs = dict(case.kwargs)
    flip = -1.0 if kwargs.get("maximize") else 1.0
    optimizer, reference = case.optimizer(params, lowering=lowering, **kwargs), case.reference(twins, **kwargs)
    start = [p.detach().clone() for p in params]
    for step in range(4):
        give_gradients(params, twins, step, absent=3 if step % 2 else 0)
        optimizer.step()
        reference.step()
    moved = [(p - s).float() * flip for p, s in zip(params, start, strict=True)]
    expected = [(t - s).float() for t, s in zip(twins, start, strict=True)]
    for ours, theirs in zip(moved, expected, strict=True):
        # relative to the distance moved: the roundings add up over the iteration's steps, and 16-bit parameters are rounded
        rounding = torch.finfo(dtype).eps * (theirs.numel() ** 0.5) * 4
        assert (ours - theirs).norm() <= 0.05 * theirs.norm() + rounding


@pytest.mark.parametrize("case", [*IN_BFLOAT16, NEWER], ids=str)
def test_equals_a_plain_loop_in_float64(case: Case) -> None:
    params = _parameters(case.optimizer, torch.float32)
    twins = copies(params, torch.float64)
    optimizer, reference = case.optimizer(params, **case.kwargs), case.naive(twins, **case.kwargs)
    start = [twin.detach().clone() for twin in twins]
    for step in range(3):
        give_gradients(params, twins, step)
        optimizer.step()
        reference.step()
    for param, end, begin in zip(params, twins, start, strict=True):
        assert ((param - end).norm() / (end - begin).norm()).item() < 0.05  # products in bfloat16
    for param, twin in zip(params, twins, strict=True):
        buffer = reference.state[twin]["momentum_buffer"]
        assert torch.allclose(optimizer.state[param]["momentum_buffer"].double(), buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("optimizer_class", stacked(), ids=lambda c: c.__name__)
class TestEveryOne:
    def test_nothing_recompiles_while_everything_changes(
        self, optimizer_class: type[co.CompiledOptimizer], lowering: str, fresh_kernels: None
    ) -> None:
        params = _parameters(optimizer_class, torch.float32)
        half = len(params) // 2
        optimizer = optimizer_class([{"params": params[:half]}, {"params": params[half:], "lr": 0.01}], lowering=lowering)
        give_gradients(params, params, 0)
        optimizer.step()
        with co.no_recompiles():
            for step in range(1, 51):
                for index, group in enumerate(optimizer.param_groups):
                    for hyper in optimizer._declaration.hypers:
                        values = hyper.default if hyper.is_tuple else (hyper.default,)
                        moved = tuple((0.1 if v is None else v) * (1 + 0.001 * (step + index)) for v in values)
                        moved = tuple(min(m, hyper.lt - 1e-3) if hyper.lt is not None else m for m in moved)
                        group[hyper.name] = moved if hyper.is_tuple else moved[0]
                give_gradients(params, params, step, absent=2 + step % 3)
                optimizer.step()
                if step == 25:
                    optimizer.load_state_dict(optimizer.state_dict())
        report = co.compile_report(optimizer)
        assert report.recompiles == 0
        if lowering == "eager":
            assert report.compiles == 0
        elif lowering == "inductor":  # for vectors and everything else, or for each shape
            assert report.compiles == (2 if optimizer_class._granularity == "tensor" else len(set(MATRICES)))
        else:  # for coefficients, and for these and single rows and columns, or for high matrices and others
            assert report.compiles == 1 + (4 if optimizer_class._granularity == "tensor" else 2)
        assert all(torch.isfinite(p).all() for p in params)

    def test_absent_gradients_change_nothing(self, optimizer_class: type[co.CompiledOptimizer], lowering: str) -> None:
        params = _parameters(optimizer_class, torch.float32)
        params[1].data.view(-1)[0] = -0.0
        optimizer = optimizer_class(params, lr=0.1, lowering=lowering)
        for step in range(4):
            give_gradients(params, params, step, absent=2)
            before = {p: (p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in params}
            optimizer.step()
            for param, (value, state) in before.items():
                if param.grad is None:
                    assert torch.equal(param.view(torch.int32), value.view(torch.int32))
                    assert all(torch.equal(optimizer.state[param][k], v) for k, v in state.items())
                elif param.numel():
                    assert optimizer.state[param]["step"] == state["step"] + 1

    def test_clip_scale_and_skip(self, optimizer_class: type[co.CompiledOptimizer], lowering: str) -> None:
        params = _parameters(optimizer_class, torch.float32)
        twins = copies(params, torch.float32)
        optimizer = optimizer_class(params, lr=0.1, max_grad_norm=0.5, skip_nonfinite=True, lowering=lowering)
        twin = optimizer_class(twins, lr=0.1, lowering=lowering)
        for step in range(4):
            give_gradients(params, twins, step)
            for param in params:
                param.grad.mul_(8.0)
            optimizer.grad_scale = torch.tensor(8.0)
            if step == 1:
                params[5].grad.view(-1)[0] = math.nan
                before = _snapshot(params, optimizer)
                optimizer.step()
                assert _equal(before, _snapshot(params, optimizer))
            else:
                norm = clip_grad_norm_(twins, 0.5)
                optimizer.step()
                twin.step()
                assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
        # the products of matrices are in bfloat16
        assert relative_error(params, twins) < (1e-5 if optimizer_class._granularity == "tensor" else 1e-2)

    def test_checkpoints_go_to_torch_and_back(self, optimizer_class: type[co.CompiledOptimizer], lowering: str) -> None:
        if not hasattr(torch.optim, optimizer_class.__name__):
            pytest.skip("torch has none")
        params = [p for p in _parameters(optimizer_class, torch.float32) if p.numel()]
        reference_class = getattr(torch.optim, optimizer_class.__name__)
        optimizer = optimizer_class(params, lr=0.1, lowering=lowering)
        for step in range(3):
            give_gradients(params, params, step)
            optimizer.step()
        twins, others = copies(params, torch.float32), copies(params, torch.float32)
        theirs = reference_class(twins)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        resumed = optimizer_class(others, lowering=lowering)
        resumed.load_state_dict(theirs.state_dict())
        assert resumed.hyperparameters() == optimizer.hyperparameters()
        for step in range(3, 8):
            give_gradients(params, twins, step)
            for other, param in zip(others, params, strict=True):
                other.grad = param.grad
            for o in (optimizer, theirs, resumed):
                o.step()
        assert _equal(params, others)
        assert relative_error(params, twins) < (1e-5 if optimizer_class._granularity == "tensor" else 2e-2)


class _Counting:
    """Code for stacks, or kernels of loops, and a note how many tensors each call updates."""

    def __init__(self, kernel: Any, calls: list[int]) -> None:
        self._kernel, self._calls = kernel, calls

    def __call__(self, tensors: Sequence[Any]) -> Any:
        self._calls.append(len(tensors[0]))
        return self._kernel(tensors)

    def run(self, arguments: Mapping[str, torch.Tensor], columns: int) -> None:
        self._calls.append(len(arguments["index"]))
        self._kernel.run(arguments, columns)


@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor"])
@pytest.mark.parametrize("optimizer_class", stacked(), ids=lambda c: c.__name__)
def test_kernel_calls_do_not_depend_on_the_number_of_tensors(
    optimizer_class: type[co.CompiledOptimizer], lowering: str
) -> None:
    counts = []
    for number in (10, 200):
        params = [torch.nn.Parameter(torch.randn(6, 4)) for _ in range(number)]
        optimizer = optimizer_class(params, lr=0.1, lowering=lowering)
        give_gradients(params, params, 0)
        optimizer.step()
        (lowered,) = engine_of(optimizer).step.lowerings
        calls: list[int] = []
        for stack in lowered.stacks:
            if isinstance(stack, LoopStack):
                stack.kernels = [_Counting(kernels, calls) for kernels in stack.kernels]
            else:
                assert isinstance(stack, CodeStack)
                stack.code = _Counting(stack.code, calls)
        optimizer.step()
        counts.append(calls)
    assert counts == [[10], [200]]


def _database() -> Iterator[Any]:
    for info in optim_db:
        if info.optim_cls.__name__ in {c.__name__ for c in stacked()}:
            for given in info.optim_inputs_func(device="cpu"):
                name = info.optim_cls.__name__
                yield pytest.param(getattr(co, name), info.optim_cls, given.kwargs, id=f"{name}-{given.desc}")


@pytest.mark.parametrize(("ours", "theirs", "kwargs"), list(_database()))
def test_every_input_of_torchs_own_tests(
    ours: type[co.CompiledOptimizer], theirs: type[torch.optim.Optimizer], kwargs: dict[str, Any]
) -> None:
    kwargs = {k: v for k, v in kwargs.items() if k not in ("foreach", "differentiable")}
    with wide_scalars():
        params = [p for p in _parameters(ours, torch.float64) if p.numel()]
        twins = copies(params, torch.float64)
        optimizer, reference = ours(params, **kwargs), theirs(twins, **kwargs)
        start = [p.detach().clone() for p in params]
        for step in range(3):
            give_gradients(params, twins, step)
            optimizer.step()
            reference.step()
    for param, twin, begin in zip(params, twins, start, strict=True):
        limit = 1e-13 if ours._granularity == "tensor" else 0.05
        assert (param - twin).norm() <= limit * (twin - begin).norm() + 1e-12


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_a_stack_lie_where_inductors_code_takes_them(count: int, dtype: torch.dtype) -> None:
    """It copies inputs that do not begin at a multiple of 16 bytes, one by one."""
    params = [torch.nn.Parameter(torch.ones(3, 4, dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    groups = [{"params": [p], "lr": 0.25 * (1 + i), "weight_decay": 0.0} for i, p in enumerate(params)]
    optimizer = co.Muon(groups, lowering="eager")
    optimizer.step()
    (lowered,) = engine_of(optimizer).step.lowerings
    (stack,) = lowered.stacks
    given: list[torch.Tensor] = []
    stack.code = lambda tensors: (given.extend(tensors), tensors[::2][:2])[1]  # type: ignore[func-returns-value]
    optimizer.step()
    numbers = given[3:]
    assert all(n.shape == (count, 1, 1) and n.data_ptr() % 16 == 0 for n in numbers)
    assert any(n.flatten().tolist() == [0.25 * (1 + i) for i in range(count)] for n in numbers)


_LAUNCHES = """\
Adafactor () | 6 Triton kernels
Adafactor (4,) | 6 Triton kernels
Adafactor (4, 6) | 12 Triton kernels
Adafactor (4, 3, 2, 2) | 12 Triton kernels
"""


@pytest.mark.full
def test_launches_on_a_gpu() -> None:
    """What Inductor makes of a stack for a GPU, whatever its size; in a process of its own, which pretends to have one."""
    pytest.importorskip("triton")
    assert printed_by("stacked_on_gpu") == _LAUNCHES


@pytest.mark.parametrize(
    ("operator", "given"), [(torch.ops.aten.mean.dim, ()), (torch.ops.aten.linalg_vector_norm.default, (2,))], ids=str
)
def test_sums_whose_dimensions_go_are_inductors(operator: Any, given: tuple[float, ...]) -> None:
    x, ours = torch.linspace(-1, 2, 24).view(2, 3, 4), stack_code.decompositions()[operator]
    assert ours(x, *given, [1, 2]) is NotImplemented
    torch.testing.assert_close(ours(x, *given, [1, 2], True), operator(x, *given, [1, 2], True))


def test_only_matrices_are_taken_and_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters .* size: torch.Size\(\[4\]\) \('0.bias'\)"):
        co.Muon(model.named_parameters())
    optimizer = co.Muon([("0.weight", model[0].weight)])
    with pytest.raises(ValueError, match=r"'0.bias'"):
        optimizer.add_param_group({"params": [("0.bias", model[0].bias)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("optimizer_class", stacked(), ids=lambda c: c.__name__)
def test_what_whole_tensors_exclude(optimizer_class: type[co.CompiledOptimizer]) -> None:
    param = torch.nn.Parameter(torch.randn(3, 4))
    name = optimizer_class.__name__
    with pytest.raises(ValueError, match=f"differentiable=True is for optimizers that work element by element; {name}"):
        optimizer_class([param], differentiable=True)
    with pytest.raises(ValueError, match=f"{name} does not support complex parameters; 'w' is one"):
        optimizer_class([("w", torch.nn.Parameter(torch.randn(3, 4, dtype=torch.complex64)))])


def test_none_stands_for_the_epsilon_of_each_dtype() -> None:
    optimizer = co.Adafactor([torch.nn.Parameter(torch.ones(3))])
    assert optimizer.hyperparameters()[0]["eps"] == (None, 1e-3)
    assert optimizer.state_dict()["param_groups"][0]["eps"] == (None, 1e-3)
    optimizer.param_groups[0]["eps"] = (0.5, 0.1)
    assert optimizer.hyperparameters()[0]["eps"] == (0.5, 0.1)
    optimizer.param_groups[0]["eps"] = (None, 0.1)
    assert optimizer.hyperparameters()[0]["eps"] == (None, 0.1)

    def use(eps: Any) -> None:
        optimizer.param_groups[0]["eps"] = eps
        optimizer.step()

    for bad, error in (((0.1, None), TypeError), ((-1.0, 0.1), ValueError), ((0.1, math.nan), ValueError)):
        with pytest.raises(error, match="eps"):
            use(bad)


@pytest.mark.full
def test_parameters_of_several_dtypes_have_their_own_epsilon_and_skip_once() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    results = []
    for lowering in LOWERINGS:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(4, 3, generator=generator).to(d)) for d in dtypes]
        optimizer = co.Adafactor(params, lr=0.3, skip_nonfinite=True, lowering=lowering)
        for step in range(5):
            for p in params:
                p.grad = torch.randn(4, 3, generator=generator).mul(1e-6).to(p)  # so small that the bound matters
            if step == 2:
                params[1].grad[0, 0] = math.inf
            if step == 3:
                params[2].grad = None
            optimizer.step()
        assert optimizer.skipped_steps == 1
        assert [optimizer.state[p]["step"] for p in params] == [4, 4, 3, 4]
        results.append(params)
    for other in results[:-1]:
        for p, expected in zip(other, results[-1], strict=True):
            assert torch.allclose(p, expected, rtol=1e-2 if p.dtype == torch.bfloat16 else 1e-5), p.dtype


def test_stacks_on_a_cpu_stay_small() -> None:
    """Of tensors that are reduced; a product of many matrices at once is faster than many."""
    results = []
    for lowering in ("inductor", "eager"):
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(64, 128, generator=generator)) for _ in range(40)]
        params += [torch.nn.Parameter(torch.randn(400, 400, generator=generator)) for _ in range(2)]
        optimizer = co.Adafactor(params, lr=0.1, lowering=lowering)
        for step in range(2):
            give_gradients(params, params, step, absent=3)
            optimizer.step()
        assert [len(s.positions) for s in engine_of(optimizer).step.lowerings[0].stacks] == [16, 16, 8, 1, 1]
        results.append(params)
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert len(engine_of(co.Muon(params, lowering=lowering)).step.lowerings[0].stacks) == 2
    assert [len(s.positions) for s in engine_of(co.Adafactor(params)).step.lowerings[0].stacks] == [40, 2]


def test_sums_in_stages_of_any_size(monkeypatch: pytest.MonkeyPatch, fresh_kernels: None) -> None:
    """What an accelerator computes, on the CPU."""
    monkeypatch.setattr(stack_code, "_SEQUENTIAL", set())
    shapes = [
        (1, 1),
        (6, 1),
        (255, 3),
        (256, 3),
        (257, 9),
        (33, 700),
        (5, 7, 3, 3),
        (1, 1, 300),
        (1,),
        (255,),
        (256,),
        (257,),
    ]
    params = [torch.nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in shapes for _ in range(2)]
    twins = copies(params, torch.float64)
    kwargs = {"lr": 0.1, "eps": (1e-3, 1e-2), "weight_decay": 0.1}
    optimizer = co.Adafactor(params, lowering="inductor", **kwargs)
    reference = torch.optim.Adafactor(twins, **kwargs)
    with wide_scalars():
        for step in range(3):
            give_gradients(params, twins, step)
            optimizer.step()
            reference.step()
    assert relative_error(params, twins) < 1e-13


@pytest.mark.parametrize("transposed", [False, True], ids=["in place", "copies"])
@pytest.mark.parametrize("optimizer_class", stacked(), ids=lambda c: c.__name__)
def test_batches_and_one_stack_are_alike(
    optimizer_class: type[co.CompiledOptimizer], transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms, results = [], []
    for elements in (1 << 24, 2 * 12 * 20):
        monkeypatch.setattr(stack_loops, "_ELEMENTS", dict.fromkeys(stack_loops._ELEMENTS, elements))
        generator = torch.Generator().manual_seed(0)
        shapes = [(12, 20), (20, 12)] * 5
        tensors = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
        params = [torch.nn.Parameter(t.mT.contiguous().mT if transposed else t) for t in tensors]
        optimizer = optimizer_class(params, lr=0.1, max_grad_norm=0.5)
        assert len(engine_of(optimizer).step.lowerings[0].stacks) == (2 if elements > 1000 else 6)
        for step in range(3):
            give_gradients(params, params, step, absent=3 if step else 0)
            optimizer.step()
        norms.append(optimizer.grad_norm.item())
        results.append(params)
    assert norms[0] == pytest.approx(norms[1], rel=1e-14)
    limit = 1e-13 if optimizer_class._granularity == "tensor" else 1e-2  # products in bfloat16
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours, expected, rtol=limit, atol=limit)


class _Copies(TorchDispatchMode):
    """Notes the dtypes of the lists that are copied at once."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            self.dtypes += [{t.dtype for t in tensors} for tensors in args[:2]]
        return func(*args, **(kwargs or {}))


def test_what_is_copied_at_once_has_one_dtype() -> None:
    """Lists of several dtypes are copied one by one."""
    params = [torch.nn.Parameter(torch.randn(6, 4).bfloat16()) for _ in range(4)]
    optimizer = co.Muon(params, lowering="eager")
    for param in params:
        optimizer.state[param]["momentum_buffer"] = torch.zeros(6, 4)
    give_gradients(params, params, 0)
    optimizer.step()
    with _Copies() as copied:
        optimizer.step()
    assert {torch.float32} in copied.dtypes
    assert all(len(dtypes) == 1 for dtypes in copied.dtypes)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize(
    ("where", "bad"), [("gradient", torch.nan), ("parameter", torch.nan), ("parameter", torch.inf)], ids=str
)
def test_adafactor_keeps_what_is_not_finite_where_torch_does(where: str, bad: float, shape: Any, lowering: str) -> None:
    value = torch.linspace(0.5, 1.5, math.prod(shape), dtype=torch.float64).view(shape)
    ours, theirs = (torch.nn.Parameter(value.clone()) for _ in range(2))
    optimizer, reference = co.Adafactor([ours], lr=0.1, lowering=lowering), torch.optim.Adafactor([theirs], lr=0.1)
    for step in range(3):
        for param, each in ((ours, optimizer), (theirs, reference)):
            param.grad = value * (step - 0.7)
            if step == 1:
                (param.grad if where == "gradient" else param.data).view(-1)[0] = bad
            each.step()
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=0, equal_nan=True)
