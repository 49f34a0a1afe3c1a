"""Sparse gradients: which rows change, how entries of one row add up, and that no step waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, relative_error
from forbidden import Forbidden
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_optim as co
from compiled_optim.lowering.kernels.cpp import CppKernel
from compiled_optim.lowering.rows import add_up, entries_of

FAR = {"lr": 0.3, "betas": (0.6, 0.8), "eps": 0.05}


@pytest.fixture(autouse=True)
def checked_invariants() -> Iterator[None]:
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield


def _table(rows: int = 12, width: int = 3, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, width, dtype=dtype))


def _twin(param: nn.Parameter, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(param.detach().to(dtype, copy=True))


def _gradient(param: torch.Tensor, rows: list[int], seed: int = 0, sparse_dims: int = 1) -> torch.Tensor:
    """An uncoalesced gradient with one entry per element of ``rows``, for more dimensions at ``(row, row % size, ...)``."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.tensor(rows, dtype=torch.int64)
    index = torch.stack([row % size for size in param.shape[:sparse_dims]])
    values = torch.randn(len(rows), *param.shape[sparse_dims:], dtype=param.dtype, generator=generator)
    return torch.sparse_coo_tensor(index, values, param.shape)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_embedding_equals_torch_and_leaves_other_rows_alone(lowering: str) -> None:
    ours, theirs = (nn.Embedding(20, 5, sparse=True, dtype=torch.float64) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    start = ours.weight.detach().clone()
    optimizer = co.SparseAdam(ours.parameters(), lowering=lowering, **FAR)
    reference = torch.optim.SparseAdam(theirs.parameters(), **FAR)
    touched: set[int] = set()
    for step, tokens in enumerate([[3, 3, 3, 7], [7, 1], [], [2, 3, 2, 3, 2, 3, 9], [1]]):
        for embedding in (ours, theirs):
            embedding.zero_grad()
            embedding(torch.tensor(tokens, dtype=torch.int64)).pow(2).mul(step + 1).sum().backward()
        assert not ours.weight.grad.is_coalesced() or len(tokens) < 2
        optimizer.step()
        reference.step()
        touched |= set(tokens)
    assert relative_error([ours.weight], [theirs.weight]) < 1e-14
    untouched = [row for row in range(20) if row not in touched]
    state = optimizer.state[ours.weight]
    assert torch.equal(ours.weight[untouched], start[untouched])
    assert not state["exp_avg"][untouched].any()
    assert not state["exp_avg_sq"][untouched].any()
    assert state["step"] == reference.state[theirs.weight]["step"] == 5  # a step without entries counts


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_repeated_rows_are_added_in_high_precision(dtype: torch.dtype, lowering: str) -> None:
    param = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    values = torch.full((512, 2), 1 + 2**-7, dtype=dtype)  # in bfloat16 the sum of these alone would stop growing
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1] * 512]), values, param.shape)
    optimizer = co.SparseAdam([param], lr=1.0, betas=(0.0, 0.0), eps=516.0, lowering=lowering)
    optimizer.step()
    expected = torch.zeros(3, 2, dtype=torch.float64)
    expected[1] = -0.5  # the sum is 516
    torch.testing.assert_close(param.detach().double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    ("shape", "sparse_dims"),
    [((7,), 1), ((6, 4), 2), ((5, 4, 3), 1), ((5, 4, 3), 2), ((5, 4, 3), 3), ((9, 700), 1), ((4, 0), 1)],
)
def test_shapes(shape: tuple[int, ...], sparse_dims: int, lowering: str) -> None:
    """Any number of sparse and dense dimensions, rows longer than a chunk, and rows without elements."""
    param = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    twin = _twin(param)
    optimizer, reference = co.SparseAdam([param], lowering=lowering, **FAR), torch.optim.SparseAdam([twin], **FAR)
    for step, rows in enumerate([[0, 3, 3, 2, 0], [1], [4, 1, 4, 1, 4, 0, 2, 3]]):
        param.grad = _gradient(param, rows, step, sparse_dims)
        twin.grad = param.grad.clone()
        optimizer.step()
        reference.step()
    assert optimizer.state[param]["step"] == 3
    if param.numel():
        assert relative_error([param], [twin]) < 1e-14


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("layout", ["transposed", "gaps", "misaligned"])
def test_memory_layouts(layout: str, lowering: str) -> None:
    memory = torch.randn(16, 16, dtype=torch.float64)
    values = {"transposed": memory.t()[:8], "gaps": memory[:8, ::2], "misaligned": memory.view(-1)[1:65].view(8, 8)}[layout]
    before = memory.clone()
    param = nn.Parameter(values)
    twin = _twin(param)
    optimizer, reference = co.SparseAdam([param], lowering=lowering, **FAR), torch.optim.SparseAdam([twin], **FAR)
    for step in range(3):
        param.grad = _gradient(param, [5, 2, 5], step)
        twin.grad = param.grad.clone()
        optimizer.step()
        reference.step()
    assert relative_error([param], [twin]) < 1e-14
    assert (memory != before).sum() == 2 * param.shape[1]  # two rows, and nothing between their elements


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_groups_absent_gradients_and_maximize(lowering: str) -> None:
    ours = [_table(), _table(5, 4), _table(30, 2), _table(3, 3)]
    theirs = [_twin(p) for p in ours]

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "lr": 0.1, "betas": (0.5, 0.6)},
            {"params": params[2:], "eps": 0.3, "maximize": True},
        ]

    optimizer = co.SparseAdam(groups(ours), lowering=lowering, **FAR)
    reference = torch.optim.SparseAdam(groups(theirs), **FAR)
    for step in range(8):
        for i, (param, twin) in enumerate(zip(ours, theirs, strict=True)):
            param.grad = None if (step + i) % 3 == 0 else _gradient(param, [0, 2, 1, 2], step)
            twin.grad = None if param.grad is None else param.grad.clone()
        optimizer.step()
        reference.step()
    assert relative_error(ours, theirs) < 1e-14
    for param, twin in zip(ours, theirs, strict=True):
        assert optimizer.state[param]["step"] == reference.state[twin]["step"]


@pytest.mark.usefixtures("fresh_kernels")
@pytest.mark.parametrize("lowering", ["multi_tensor", "inductor"])
def test_nothing_recompiles_while_entries_and_hyperparameters_change(lowering: str) -> None:
    param = _table()
    twin = _twin(param)
    optimizer, reference = co.SparseAdam([param], lowering=lowering, **FAR), torch.optim.SparseAdam([twin], **FAR)
    for step in range(6):
        if step == 1:
            assert co.compile_report(optimizer).compiles == 1
        param.grad = _gradient(param, [i * i % 12 for i in range(step * 3)], step)
        twin.grad = param.grad.clone()
        for group in (optimizer.param_groups[0], reference.param_groups[0]):
            group["lr"] = 0.3 / (step + 1)
            group["betas"] = (0.6 - 0.1 * step, 0.8 - 0.1 * step)
            group["eps"] = 0.05 * (step + 1)
        if step:
            with co.no_recompiles():
                optimizer.step()
        else:
            optimizer.step()
        reference.step()
    report = co.compile_report(optimizer)
    assert report.compiles == 1
    assert report.findings == ()
    assert report.lowering == lowering
    assert relative_error([param], [twin]) < 1e-14


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_no_step_waits_for_the_device(lowering: str) -> None:
    params = [_table(), _table(6, 4)]
    optimizer = co.SparseAdam(params, lowering=lowering)
    grads = (
        [_gradient(p, [1, 1, 4]) for p in params],
        [_gradient(params[0], [2, 2]), None],
        [_gradient(p, []) for p in params],
    )
    for present in grads:
        for param, grad in zip(params, present, strict=True):
            param.grad = grad
        optimizer.step()
    traces = []
    for present in grads:
        for param, grad in zip(params, present, strict=True):
            param.grad = grad
        with Forbidden() as mode:
            optimizer.step()
        traces.append(mode.seen)
    assert "index_put_" in traces[0]
    assert "lift_fresh" not in {
        name for trace in traces for name in trace
    }  # torch.tensor of a Python value: a copy from the host
    other = [_gradient(p, [0, 3, 5]) for p in params]
    for param, grad in zip(params, other, strict=True):
        param.grad = grad
    with Forbidden() as mode:
        optimizer.step()
    assert mode.seen == traces[0]  # the same operations, whatever the rows


def test_the_guard_itself_sees_torchs_optimizer_wait() -> None:
    param = _table()
    param.grad = _gradient(param, [1, 1, 4])
    with pytest.raises(AssertionError, match="waits for the device"), Forbidden():
        torch.optim.SparseAdam([param]).step()


def test_shapes_follow_from_the_number_of_entries() -> None:
    """Meta tensors have no data that a shape could depend on."""
    index = torch.zeros(1, 7, dtype=torch.int64, device="meta")
    grad = torch.sparse_coo_tensor(index, torch.ones(7, 4, device="meta"), (10, 4), check_invariants=False)
    entries = entries_of(grad, torch.float32, distinct=False)
    assert entries.sums.shape == (7, 4)
    assert entries.elected.shape == (7,)


def test_both_ways_of_adding_agree() -> None:
    """On an accelerator entries are added by index_put_, on a CPU by index_add_."""
    param = _table(6, 2)
    grad = _gradient(param, [4, 1, 4, 4, 0, 1])
    entries = entries_of(grad, torch.float64, distinct=False)
    sorted_sums = torch.zeros_like(entries.sums).index_put_((entries.elected,), grad._values(), accumulate=True)
    torch.testing.assert_close(entries.sums, sorted_sums, rtol=1e-15, atol=1e-15)
    dense = torch.zeros_like(param).index_put_(entries.index, entries.sums[entries.elected])
    torch.testing.assert_close(dense, grad.to_dense(), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_dense_gradient_changes_nothing(lowering: str) -> None:
    table, bias = _table(), _table(4, 4)
    optimizer = co.SparseAdam([("table", table), ("bias", bias)], lowering=lowering)
    table.grad, bias.grad = _gradient(table, [1, 2]), torch.randn(4, 4, dtype=torch.float64)
    before = table.detach().clone()
    with pytest.raises(
        TypeError, match="SparseAdam does not support dense gradients, please consider Adam instead; 'bias' has one"
    ):
        optimizer.step()
    assert torch.equal(table, before)
    assert optimizer.state[table]["step"] == 0
    bias.grad = None
    optimizer.step()
    assert optimizer.state[table]["step"] == 1


def test_refused_parameters() -> None:
    sparse = torch.zeros(3, 2, layout=torch.sparse_coo)
    for optimizer in (co.SparseAdam, co.AdamW):
        with pytest.raises(
            ValueError, match=f"{optimizer.__name__} requires dense parameter tensors; 'w' is torch.sparse_coo"
        ):
            optimizer([("w", sparse)])
    with pytest.raises(ValueError, match="SparseAdam does not support complex parameters; 'w' is one"):
        co.SparseAdam([("w", torch.zeros(3, dtype=torch.complex64))])


def test_inputs_that_torch_lists() -> None:
    info = next(i for i in optim_db if i.optim_cls is torch.optim.SparseAdam)
    for given in info.optim_inputs_func(device="cpu"):
        param = _table()
        twin = _twin(param)
        # torch computes the step size in the dtype of a tensor lr
        kwargs = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in given.kwargs.items()}
        optimizer, reference = co.SparseAdam([param], **kwargs), torch.optim.SparseAdam([twin], **kwargs)
        for step in range(4):
            param.grad = _gradient(param, [1, 5, 5], step)
            twin.grad = param.grad.clone()
            optimizer.step()
            reference.step()
        assert relative_error([param], [twin]) < 1e-14, given.desc


@pytest.mark.filterwarnings("ignore:.*Profiler.*")
def test_one_graph_holds_step_and_zero_grad() -> None:
    """Dynamo refuses to read a sparse gradient, so the operator reads it; backward of an embedding is outside the graph."""
    torch._dynamo.reset()
    ours, theirs = (nn.Embedding(10, 4, sparse=True, dtype=torch.float64) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = co.SparseAdam(ours.parameters(), **FAR)
    reference = torch.optim.SparseAdam(theirs.parameters(), **FAR)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def finish() -> torch.Tensor:
        optimizer.step()
        optimizer.zero_grad()
        return ours.weight.sum()  # of the new values

    for step, tokens in enumerate([[1, 1, 3], [2], [5, 5, 6, 7]]):
        for embedding in (ours, theirs):
            embedding(torch.tensor(tokens)).pow(2).sum().backward()
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.3 / (step + 1)
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(finish(), theirs.weight.sum())
        assert ours.weight.grad is None
    assert counter.frame_count == 1
    assert relative_error([ours.weight], [theirs.weight]) < 1e-14


def test_accelerators_sort_the_entries_of_a_row() -> None:
    """A sum of several entries is the same every time."""
    pytest.importorskip("triton")
    from compiled_optim.simulated.fake_cuda import fake_cuda
    from compiled_optim.simulated.record import recording

    with fake_cuda(90), recording("cuda") as recorder:
        rows, values = torch.zeros(3, dtype=torch.int64, device="cuda"), torch.zeros(3, 5, device="cuda")
        for options, takes_any_order in (({}, False), ({"sorts": False}, True)):
            add_up(rows, rows, values, rows.new_zeros(4), torch.zeros_like(values), **options)
            assert ("index_add_" in {operator.name for operator in recorder.take().operators}) == takes_any_order


class Work(TorchDispatchMode):
    """Counts the operations that compute something; those that look at a tensor in another way do not."""

    LOOKS = ("sparse_dim", "_nnz", "_indices", "_values", "is_coalesced", "detach", "unbind", "slice", "view", "alias")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self.LOOKS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_work_does_not_grow_with_the_number_of_tables(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = [0]

    def count(name: str) -> None:
        launch = getattr(CppKernel, name)

        def counted(kernel: CppKernel, *tables: Any) -> None:
            launches[0] += 1
            launch(kernel, *tables)

        monkeypatch.setattr(CppKernel, name, counted)

    for name in ("evaluate", "update", "step"):
        count(name)

    def step(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
        params = [_table(rows, width) for rows, width in shapes]
        twins = [_twin(p) for p in params]
        optimizer = co.SparseAdam(params, max_grad_norm=clip, **FAR)
        reference = torch.optim.SparseAdam(twins, **FAR)
        for i in range(3):
            for k, (param, twin) in enumerate(zip(params, twins, strict=True)):
                param.grad = _gradient(param, [k % 3, 3, 3, 2, 5][: 2 + k % 4], 7 * i + k)
                twin.grad = param.grad.clone()
            if clip is not None:
                norm = torch.stack([t.grad.coalesce().values().norm() for t in twins]).norm()
                for twin in twins:
                    twin.grad = twin.grad * (clip / (norm + 1e-6)).clamp(max=1)
            launches[0] = 0
            with Work() as work:
                optimizer.step()
            reference.step()
        assert relative_error(params, twins) < 1e-13
        return work.count, launches[0]

    one = step([(12, 3)])
    assert one[1] == 1
    assert step([(12, 3), (9, 3), (30, 3)]) == one
    assert step([(12 + k, 3) for k in range(16)]) == one
    two = step([(12, 3), (9, 4)])
    assert two[1] == 2
    assert step([(12 + k, 3 + k % 2) for k in range(16)]) == two


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_many_tables_of_any_kind_at_once(lowering: str) -> None:
    """Widths, dtypes, numbers of sparse dimensions and of entries, absent and coalesced gradients, in changing mixes."""
    shapes = [((12, 3), 1), ((9, 3), 1), ((8, 5), 1), ((6, 4), 2), ((7, 2), 2), ((5, 4, 3), 2), ((11, 3), 1), ((4, 3, 5), 1)]
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape, _ in shapes]
    twins = [_twin(p) for p in params]
    optimizer, reference = co.SparseAdam(params, lowering=lowering, **FAR), torch.optim.SparseAdam(twins, **FAR)
    for step in range(6):
        for k, (param, twin, (_, sparse_dims)) in enumerate(zip(params, twins, shapes, strict=True)):
            rows = [(3 * k + j * j) % 4 for j in range((step * k) % 7)]
            grad = _gradient(param, rows, 10 * step + k, sparse_dims)
            absent = (step + k) % 5 == 0
            param.grad = None if absent else grad.coalesce() if (step + k) % 3 == 0 else grad
            twin.grad = None if absent else grad.clone()
        optimizer.step()
        reference.step()
    assert relative_error(params, twins) < 1e-13
    for param, twin in zip(params, twins, strict=True):
        assert optimizer.state[param]["step"] == reference.state[twin]["step"]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1), (1, 2, 0)], ids=str)
def test_rows_that_do_not_lie_together(order: tuple[int, ...], lowering: str) -> None:
    ours = nn.Parameter(torch.randn(4, 3, 5, dtype=torch.float64).permute(order))
    theirs = nn.Parameter(ours.detach().contiguous())
    optimizer, reference = co.SparseAdam([ours], lowering=lowering, **FAR), torch.optim.SparseAdam([theirs], **FAR)
    for step in range(3):
        ours.grad = _gradient(ours, [0, 2, 2], step)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
        assert optimizer.state[ours]["step"] == step + 1
    assert relative_error([ours], [theirs]) < 1e-13
