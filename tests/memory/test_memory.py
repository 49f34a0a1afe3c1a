"""What a kernel is told lies where it is: moved state, tensors without memory of their own, and shared memory."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from catalog import LOWERINGS, registry, relative_error, required
from new_process import printed_by
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

import compiled_optim as co
from compiled_optim.lowering.kernels.table import Kernel
from compiled_optim.memory.addresses import EMPTY
from compiled_optim.optimizer import CompiledOptimizer, engine_of

FAR = {"lr": 0.07, "betas": (0.6, 0.81), "eps": 1e-3, "weight_decay": 0.3}


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value)).strip("_")


def resize(tensor: Tensor) -> None:
    tensor.resize_(2 * tensor.numel())


def shorten(tensor: Tensor) -> None:
    tensor.resize_(2)
    tensor.untyped_storage().resize_(2 * tensor.element_size())


def free(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


class TestStateThatMoves:
    """Of one parameter that is not the first, as where somebody offloads large tensors only."""

    @staticmethod
    def sides(dtype: torch.dtype = torch.float64) -> list[tuple[list[nn.Parameter], Any]]:
        values = [torch.randn(8, dtype=dtype), torch.randn(40, 30, dtype=dtype), torch.randn(3, dtype=dtype)]
        params = [[nn.Parameter(v.clone()) for v in values] for _ in range(2)]
        named = [(f"p{i}", p) for i, p in enumerate(params[0])]
        return [(params[0], named), (params[1], params[1])]

    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize(
        "move",
        [
            lambda v: setattr(v, "data", v.data.clone()),
            lambda v: v.set_(v.clone()),
            lambda v: torch.utils.swap_tensors(v, v.clone()),
            lambda v: setattr(v, "data", v.data.t().contiguous().t()),
            lambda v: setattr(v, "data", v.data.flip(0)),
        ],
        ids=["data", "set_", "swap_tensors", "transposed memory", "flipped"],
    )
    def test_is_followed(self, move: Callable[[Tensor], object], lowering: str) -> None:
        (ours, named), (theirs, _) = self.sides()
        optimizer, reference = co.AdamW(named, lowering=lowering, **FAR), torch.optim.AdamW(theirs, **FAR)
        generator = torch.Generator().manual_seed(5)
        for _ in range(4):
            for own, other in zip(ours, theirs, strict=True):
                own.grad = torch.randn(own.shape, generator=generator, dtype=own.dtype)
                other.grad = own.grad.clone()
            optimizer.step()
            reference.step()
            for each in (optimizer, reference):
                for state in each.state.values():
                    for value in state.values():
                        if value.numel() > 1000:
                            move(value)
        assert relative_error(ours, theirs) < 1e-13

    @pytest.mark.parametrize("lowering", ["multi_tensor", "inductor"])
    @pytest.mark.parametrize("optimizer", [co.Muon, co.Adafactor], ids=name_of)
    def test_of_stacks_too(self, optimizer: type[CompiledOptimizer], lowering: str) -> None:
        params, twins = ([nn.Parameter(torch.full((4, 3), 1.0 + i)) for i in range(3)] for _ in range(2))
        ours, twin = optimizer(params, lr=0.1, lowering=lowering), optimizer(twins, lr=0.1, lowering=lowering)
        generator = torch.Generator().manual_seed(5)
        for _ in range(4):
            for own, other in zip(params, twins, strict=True):
                own.grad = torch.randn(own.shape, generator=generator)
                other.grad = own.grad.clone()
            ours.step()
            twin.step()
            for name, value in ours.state[params[1]].items():
                value.data = torch.zeros_like(value)
                twin.state[twins[1]][name].zero_()
        assert all(torch.equal(own, other) for own, other in zip(params, twins, strict=True))

    @pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])  # the other keeps several tensors in one storage
    @pytest.mark.parametrize("spoil", [resize, shorten, free], ids=name_of)
    def test_what_cannot_be_followed_is_refused(self, spoil: Callable[[Tensor], None], lowering: str) -> None:
        (params, named), _ = self.sides()
        optimizer = co.AdamW(named, lowering=lowering, **FAR)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        before = [p.detach().clone() for p in params]
        kept = optimizer.state[params[1]]["exp_avg"].clone()
        spoil(optimizer.state[params[1]]["exp_avg"])
        for _ in range(2):
            with pytest.raises(ValueError, match=r"state 'exp_avg' of 'p1' (must have shape|cannot be updated: it has no)"):
                optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        optimizer.state[params[1]]["exp_avg"] = kept
        optimizer.step()
        assert [float(optimizer.state[p]["step"]) for p in params] == [2.0, 2.0, 2.0]

    def test_a_copy_on_write_clone_stays_as_it_is(self) -> None:
        (params, named), _ = self.sides()
        optimizer = co.AdamW(named, **FAR)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        snapshot = torch._lazy_clone(optimizer.state[params[1]]["exp_avg"])
        before = optimizer.state[params[1]]["exp_avg"].tolist()
        optimizer.step()
        assert snapshot.tolist() == before
        assert optimizer.state[params[1]]["exp_avg"].tolist() != before


class Wrapped(Tensor):
    """A tensor whose elements lie in another one."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inner_args, inner_kwargs = tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs))
        result = tree_map_only(Tensor, Wrapped, func(*inner_args, **inner_kwargs))
        return return_and_correct_aliasing(func, args, kwargs, result)


@pytest.fixture
def collective() -> Iterator[Callable[[Tensor], Tensor]]:
    """The sum over the only process there is, as a tensor that is still under way."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda tensor: collectives.all_reduce(tensor, "sum", dist.group.WORLD)
    dist.destroy_process_group()


class TestWithoutMemoryOfTheirOwn:
    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("optimizer", [co.AdamW, co.Adafactor, co.Muon], ids=name_of)
    @pytest.mark.parametrize("wrap", ["wrapped", "collective"])
    def test_gradients_are_copied(
        self, wrap: str, optimizer: type[CompiledOptimizer], lowering: str, collective: Callable[[Tensor], Tensor]
    ) -> None:
        params, twins = ([nn.Parameter(torch.full((4, 3), 1.0 + i)) for i in range(2)] for _ in range(2))
        ours, twin = optimizer(params, lr=0.1, lowering=lowering), optimizer(twins, lr=0.1, lowering=lowering)
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            for i, (own, other) in enumerate(zip(params, twins, strict=True)):
                other.grad = torch.randn(own.shape, generator=generator)
                own.grad = other.grad.clone()
                if i:
                    own.grad = Wrapped(own.grad) if wrap == "wrapped" else collective(own.grad)
            ours.step()
            twin.step()
        assert all(torch.equal(own, other) for own, other in zip(params, twins, strict=True))

    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_state_is_copied(self, lowering: str) -> None:
        params, twins = ([nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(2)] for _ in range(2))
        ours, twin = co.AdamW(params, lowering=lowering, **FAR), co.AdamW(twins, lowering=lowering, **FAR)
        for i in range(3):
            for param in (*params, *twins):
                param.grad = torch.full_like(param, 0.5)
            ours.step()
            twin.step()
            if i == 1:
                ours.state[params[1]]["exp_avg"] = Wrapped(torch.full((3,), 4.0))
                twin.state[twins[1]]["exp_avg"] = torch.full((3,), 4.0)
        assert all(torch.equal(own, other) for own, other in zip(params, twins, strict=True))

    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("optimizer", [co.AdamW, co.SGD], ids=name_of)
    def test_parameters_are_updated_by_their_own_operations(self, optimizer: type[CompiledOptimizer], lowering: str) -> None:
        plain, inner = torch.full((4, 3), 2.0), torch.full((4, 3), 1.0)
        params = [nn.Parameter(plain.clone()), nn.Parameter(Wrapped(inner))]
        twins = [nn.Parameter(plain.clone()), nn.Parameter(inner.clone())]
        told = [] if lowering == "eager" else [RuntimeWarning]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = optimizer([("plain", params[0]), ("wrapped", params[1])], lr=0.1, lowering=lowering)
            twin = optimizer(twins, lr=0.1, lowering="eager")
            for i in range(3):
                for param in twins:
                    param.grad = torch.full_like(param, 0.5 + i)
                params[0].grad, params[1].grad = twins[0].grad.clone(), Wrapped(twins[1].grad.clone())
                ours.step()
                twin.step()
        assert [w.category for w in caught] == told
        assert all("'wrapped' is updated with plain torch operations" in str(w.message) for w in caught)
        assert relative_error([params[0], params[1].inner], twins) < 1e-6
        assert not torch.equal(inner, torch.full((4, 3), 1.0))

    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("optimizer", [co.AdamW, co.Adafactor], ids=name_of)
    @pytest.mark.parametrize("what", ["a freed gradient", "a shortened gradient", "a fake gradient", "a freed parameter"])
    def test_refused_by_name(self, what: str, optimizer: type[CompiledOptimizer], lowering: str) -> None:
        params = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))]
        made = optimizer([("first", params[0]), ("second", params[1])], lowering=lowering)
        for param in params:
            param.grad = torch.ones(8)
        made.step()
        before = params[0].detach().clone()
        kept = params[1].data.clone()
        if what == "a freed gradient":
            free(params[1].grad)
        elif what == "a shortened gradient":
            params[1].grad.untyped_storage().resize_(8)
        elif what == "a fake gradient":
            with FakeTensorMode():
                fake = torch.ones(8)
            params[1].grad = fake
        else:
            free(params[1])
        message = (
            "'second' cannot be updated: it has no memory" if what == "a freed parameter" else "the gradient of 'second'"
        )
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                made.step()
        assert torch.equal(params[0], before)
        params[1].data, params[1].grad = kept, torch.ones(8)
        made.step()
        assert [float(made.state[p]["step"]) for p in params] == [2.0, 2.0]

    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_a_freed_parameter_without_gradient_is_left_alone(self, lowering: str) -> None:
        """As where the weights of an expert are on another device for a while."""
        params = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))]
        optimizer = co.SGD(params, lr=0.5, momentum=0.5, lowering=lowering)
        for param in params:
            param.grad = torch.ones(8)
        optimizer.step()
        kept = params[1].data.clone()
        free(params[1])
        params[1].grad = None
        optimizer.step()
        assert torch.equal(params[0], torch.full((8,), 1 - 0.5 - 0.75))
        params[1].data, params[1].grad = kept, torch.ones(8)
        optimizer.step()
        assert torch.equal(params[1], torch.full((8,), 1 - 0.5 - 0.75))

    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("optimizer", [co.AdamW, co.Adafactor, co.Muon], ids=name_of)
    @pytest.mark.parametrize("count", [1, 2])
    def test_a_negated_and_a_zero_gradient(self, count: int, optimizer: type[CompiledOptimizer], lowering: str) -> None:
        params, twins = ([nn.Parameter(torch.full((4, 3), 1.0 + i)) for i in range(count)] for _ in range(2))
        ours, twin = optimizer(params, lr=0.1, lowering=lowering), optimizer(twins, lr=0.1, lowering=lowering)
        grads = [torch.randn(4, 3) for _ in range(count)]
        for form in ("negated", "zero"):
            for own, other, grad in zip(params, twins, grads, strict=True):
                own.grad = torch._neg_view(grad) if form == "negated" else torch._efficientzerotensor((4, 3))
                other.grad = -grad if form == "negated" else torch.zeros(4, 3)
            ours.step()
            twin.step()
            assert all(torch.equal(own, other) for own, other in zip(params, twins, strict=True)), form

    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_an_expanded_parameter_is_refused_before_anything_is_updated(self, lowering: str) -> None:
        first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
        with pytest.raises(ValueError, match="can't optimize 'w': several of its elements share memory"):
            co.AdamW([("a", first), ("w", nn.Parameter(torch.zeros(1).expand(5)))], lowering=lowering)
        optimizer = co.AdamW([("a", first), ("w", second)], lowering=lowering)
        first.grad, second.grad = torch.ones(3), torch.ones(5)
        optimizer.step()
        second.data = torch.zeros(1).expand(5)
        before = first.detach().clone()
        for _ in range(2):
            with pytest.raises(ValueError, match="can't optimize 'w': several of its elements share memory"):
                optimizer.step()
        assert torch.equal(first, before)

    def test_the_stand_in_for_no_address_is_for_empty_gradients_only(self) -> None:
        params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(0))]
        optimizer = co.SGD(params)
        for param in params:
            param.grad = Wrapped(torch.ones_like(param))
        optimizer.step()
        (table,) = engine_of(optimizer).step.lowerings[0].tables
        assert table.grads.tolist()[1] == EMPTY
        assert table.grads.tolist()[0] not in (0, EMPTY)


class TestSharedMemory:
    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adafactor"])
    def test_parameters_are_updated_one_after_the_other(self, optimizer: str, lowering: str) -> None:
        """A flat buffer beside its halves, and two views of one of them."""

        def make(kind: Any, **kwargs: Any) -> tuple[Tensor, list[nn.Parameter], Any]:
            memory = torch.linspace(1, 2, 4096, dtype=torch.float64)
            views = [memory.view(64, 64), memory[:2048].view(64, 32), memory[2048:].view(32, 64), memory[:2048].view(64, 32)]
            params = [nn.Parameter(view) for view in views]
            return memory, params, kind(params, lr=0.1, **kwargs)

        with pytest.warns(RuntimeWarning, match="share memory with other parameters, and are updated after them"):
            ours, params, stepped = make(getattr(co, optimizer), lowering=lowering)
        theirs, twins, reference = make(getattr(torch.optim, optimizer), foreach=False)
        generator = torch.Generator().manual_seed(7)
        for _ in range(3):
            for own, other in zip(params, twins, strict=True):
                own.grad = torch.randn(own.shape, generator=generator, dtype=own.dtype)
                other.grad = own.grad.clone()
            stepped.step()
            reference.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    def test_no_update_is_lost(self) -> None:
        memory = torch.zeros(32768)
        with pytest.warns(RuntimeWarning, match=r"\[1\]', .*\[2\]', .*\[3\]' and 4 more share memory"):
            optimizer = co.SGD([nn.Parameter(memory[:]) for _ in range(8)], lr=1.0)
        for i in range(20):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.full_like(param, -1.0)
            optimizer.step()
            assert torch.equal(memory, torch.full((32768,), 8.0 * (i + 1)))

    def test_neighbours_share_nothing(self) -> None:
        memory = torch.zeros(100)
        optimizer = co.SGD([nn.Parameter(piece) for piece in memory.split(7)])
        assert len(engine_of(optimizer).step.lowerings) == 1


def _entries(indices: list[list[int]], shape: tuple[int, ...], *, coalesced: bool) -> Tensor:
    values = torch.ones(len(indices[0]), *shape[len(indices) :], dtype=torch.float64)
    made = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    return made._coalesced_(True) if coalesced else made


class TestSparseIndices:
    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("coalesced", [True, False])
    @pytest.mark.parametrize("wrong", [10_000_000, -5_000_000, 100, -1])
    def test_outside_of_the_table(self, wrong: int, coalesced: bool, lowering: str) -> None:
        tables = [nn.Parameter(torch.ones(100, 4, dtype=torch.float64)) for _ in range(2)]
        optimizer = co.SparseAdam([("a", tables[0]), ("b", tables[1])], lowering=lowering)
        tables[0].grad = _entries([[3, 5]], (100, 4), coalesced=coalesced)
        tables[1].grad = _entries([[7, wrong]], (100, 4), coalesced=coalesced)
        with pytest.raises(
            IndexError, match=f"the gradient of 'b' has an entry at {wrong} of dimension 0; .* >= 0 and < 100"
        ):
            optimizer.step()
        assert all((t == 1).all() for t in tables)
        assert [float(optimizer.state[t]["step"]) for t in tables] == [0.0, 0.0]

    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_outside_of_one_dimension_but_inside_of_the_table(self, lowering: str) -> None:
        table = nn.Parameter(torch.ones(5, 5, 2, dtype=torch.float64))
        optimizer = co.SparseAdam([("table", table)], lowering=lowering)
        table.grad = _entries([[0], [10]], (5, 5, 2), coalesced=False)
        with pytest.raises(IndexError, match="'table' has an entry at 10 of dimension 1; it must be >= 0 and < 5"):
            optimizer.step()

    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("rows", [[1, 1, 3], [3, 1, 3], [4, 2, 0]])
    def test_a_gradient_that_is_not_coalesced_as_it_says(self, rows: list[int], lowering: str) -> None:
        ours, theirs = (nn.Parameter(torch.ones(6, 2, dtype=torch.float64)) for _ in range(2))
        optimizer, twin = (co.SparseAdam([t], lr=0.1, lowering=lowering) for t in (ours, theirs))
        for _ in range(2):
            ours.grad = _entries([rows], (6, 2), coalesced=True)
            theirs.grad = _entries([rows], (6, 2), coalesced=False).coalesce()
            optimizer.step()
            twin.step()
        assert torch.equal(ours, theirs)


class TestNumbers:
    """Hyperparameters and controls are tensors of the user's, too."""

    @staticmethod
    def stepped(**options: Any) -> tuple[nn.Parameter, co.SGD]:
        param = nn.Parameter(torch.ones(4))
        optimizer = co.SGD([("w", param)], **{"lr": 0.5, **options})
        param.grad = torch.full((4,), 2.0)
        optimizer.step()
        return param, optimizer

    @pytest.mark.parametrize("first", [True, False], ids=["before the first step", "later"])
    @pytest.mark.parametrize("name", ["lr", "max_grad_norm"])
    def test_freed_ones_are_refused(self, name: str, first: bool) -> None:
        number = torch.tensor(0.5, dtype=torch.float64)
        param = nn.Parameter(torch.ones(4))
        optimizer = co.SGD([param], **{"lr": 0.1, name: number})
        param.grad = torch.ones(4)
        if not first:
            optimizer.step()
        before = param.detach().clone()
        free(number)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{name}.* its storage was freed"):
                optimizer.step()
            assert torch.equal(param, before)

    @pytest.mark.parametrize("name", ["lr", "max_grad_norm"])
    def test_fake_ones_are_refused(self, name: str) -> None:
        with FakeTensorMode():
            fake = torch.tensor(0.5, dtype=torch.float64)
        with pytest.raises(ValueError, match=f"{name}.* is a tensor without memory"):
            self.stepped(**{name: fake})

    def test_negated_views_have_their_sign(self) -> None:
        number = torch.tensor(1 - 0.5j, dtype=torch.complex128)
        assert self.stepped(lr=number.conj().imag)[0].tolist() == [0.0] * 4
        assert self.stepped(max_grad_norm=number.conj().imag)[0].tolist() == pytest.approx([0.875] * 4)

    @pytest.mark.parametrize("shape", [(), (1,)], ids=str)
    def test_a_control_is_followed_to_other_memory(self, shape: tuple[int, ...]) -> None:
        limit = torch.full(shape, 1e9, dtype=torch.float64)
        param, optimizer = self.stepped(max_grad_norm=limit)
        limit.data = torch.full(shape, 0.5, dtype=torch.float64)
        before = param.detach().clone()
        optimizer.step()
        assert (before - param).tolist() == pytest.approx([0.125] * 4)


class TestWhileAStepRuns:
    def test_a_schedule_that_drops_the_gradients(self) -> None:
        """In a process without other threads, whose presence alone would keep the gradients alive."""
        assert printed_by("dropped_gradients") == "True True True "

    @pytest.mark.parametrize("optimizer", [co.AdamW, co.Adafactor, co.SparseAdam], ids=name_of)
    @pytest.mark.parametrize("lowering", ["auto", "inductor"])
    def test_fake_tensors_are_not_made_for_real_ones(self, optimizer: type[CompiledOptimizer], lowering: str) -> None:
        param = nn.Parameter(torch.ones(4, 3))
        made = optimizer([param], lr=0.1, lowering=lowering)

        def give() -> None:
            param.grad = torch.ones(4, 3).to_sparse(1) if optimizer is co.SparseAdam else torch.ones(4, 3)

        for _ in range(2):
            give()
            before = param.detach().clone()
            with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="under FakeTensorMode"):
                made.step()
            assert torch.equal(param, before)
            made.step()
            assert not torch.equal(param, before)

    def test_a_default_device_is_not_the_tables(self) -> None:
        param = nn.Parameter(torch.ones(4, 3))
        optimizer = co.SparseAdam([param], lr=0.1)
        param.grad = torch.ones(4, 3).to_sparse(1)
        with torch.device("meta"):
            optimizer.step()
        assert torch.allclose(param, torch.full((4, 3), 0.9))


class TestGradientsOfOtherKinds:
    @pytest.mark.parametrize("part", ["_values", "_indices"])
    def test_a_freed_part_of_a_sparse_one(self, part: str) -> None:
        param = nn.Parameter(torch.ones(4, 3))
        optimizer = co.SparseAdam([("table", param)], lr=0.1)
        param.grad = torch.ones(4, 3).to_sparse(1)
        free(getattr(param.grad, part)())
        with pytest.raises(ValueError, match="the gradient of 'table' has no memory: its storage was freed"):
            optimizer.step()
        assert torch.equal(param, torch.ones(4, 3))

    @pytest.mark.parametrize("lowering", LOWERINGS)
    @pytest.mark.parametrize("shift", [-1, 1])
    def test_one_that_lies_across_its_parameter(self, shift: int, lowering: str) -> None:
        memory = torch.randn(50_001)
        whole = {-1: (slice(1, None), slice(None, -1)), 1: (slice(None, -1), slice(1, None))}[shift]
        param = nn.Parameter(memory[whole[0]])
        param.grad = memory[whole[1]]
        expected = param.detach() - 0.5 * param.grad
        optimizer = co.SGD([param], lr=0.5, lowering=lowering)
        optimizer.step()
        assert torch.equal(param, expected)

    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_one_that_a_subclass_makes(self, lowering: str) -> None:
        class Own(nn.Parameter):
            @property
            def grad(self) -> Tensor:
                return torch.full((4,), 2.0)

        param = Own(torch.ones(4))
        optimizer = co.SGD([param], lr=0.25, lowering=lowering)
        for expected in (0.5, 0.0):
            optimizer.step()
            assert param.tolist() == [expected] * 4


class TestSpoiledOptimizers:
    """Nothing is updated, and the error says what is wrong until it is mended."""

    @pytest.mark.parametrize(
        ("entry", "value", "said"),
        [
            ("step", torch.tensor([5.0, 6.0], dtype=torch.float64), "must be a real number or a 1-element tensor of one"),
            ("step", "abc", "must be a real number or a 1-element tensor of one, got 'abc'"),
            ("step", torch.tensor([5.0]).to_sparse(), "must be a real number or a 1-element tensor of one"),
            ("step", torch.tensor(1j), "must be a real number or a 1-element tensor of one"),
            ("exp_avg", torch.zeros(4, 4, dtype=torch.float8_e4m3fn), "is torch.float8_e4m3fn"),
            ("exp_avg", torch.zeros(4, 4).to_sparse(), "torch.sparse_coo"),
            ("exp_avg", torch.zeros(4, 4, dtype=torch.int32), "is torch.int32"),
            ("exp_avg", FakeTensorMode().from_tensor(torch.zeros(4, 4)), "it is a FakeTensor"),
        ],
        ids=["two steps", "no step", "sparse step", "complex step", "float8", "sparse", "int", "fake"],
    )
    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_state(self, entry: str, value: Any, said: str, lowering: str) -> None:
        params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
        optimizer = co.AdamW([("first", params[0]), ("second", params[1])], lr=0.1, lowering=lowering)
        for param in params:
            param.grad = torch.ones(4, 4)
        optimizer.step()
        good = optimizer.state[params[1]][entry]
        optimizer.state[params[1]][entry] = value
        before = [p.detach().clone() for p in params]
        for _ in range(2):
            with pytest.raises(ValueError, match=f"state '{entry}' of 'second' .*{said}"):
                optimizer.step()
            assert all(map(torch.equal, params, before))
        optimizer.state[params[1]][entry] = good
        optimizer.step()
        assert optimizer.state[params[1]]["step"].item() == 2

    @pytest.mark.parametrize(
        "value",
        [None, torch.tensor([1.0], dtype=torch.float64), 1, torch.tensor(1)],
        ids=["none", "vector", "int", "integer"],
    )
    def test_state_that_will_do(self, value: Any) -> None:
        param = nn.Parameter(torch.ones(4, 4))
        optimizer = co.AdamW([param], lr=0.1)
        param.grad = torch.ones(4, 4)
        optimizer.step()
        optimizer.state[param]["step"] = value
        optimizer.step()
        assert optimizer.state[param]["step"].item() == (1 if value is None else 2)
        optimizer.state[param]["exp_avg"] = None
        optimizer.step()
        assert optimizer.state[param]["exp_avg"].norm() > 0

    @pytest.mark.parametrize(
        ("spoil", "error", "said"),
        [
            (lambda o, p: o.param_groups[0]["params"].append(3), TypeError, "can only optimize Tensors"),
            (lambda o, p: o.param_groups.append({}), ValueError, r"param_groups\[1\] has no 'params'"),
        ],
        ids=["no tensor", "no params"],
    )
    def test_groups(self, spoil: Callable[[Any, Any], None], error: type[Exception], said: str) -> None:
        param = nn.Parameter(torch.ones(4))
        optimizer = co.SGD([param], lr=0.5)
        param.grad = torch.ones(4)
        optimizer.step()
        spoil(optimizer, param)
        for _ in range(2):
            with pytest.raises(error, match=said):
                optimizer.step()
            assert param.tolist() == [0.5] * 4


class TestThreads:
    @pytest.mark.parametrize("optimizer", [co.AdamW, co.Muon], ids=name_of)
    def test_that_step_one_optimizer_take_turns(self, optimizer: type[CompiledOptimizer]) -> None:
        params = [nn.Parameter(torch.ones(8, 8)) for _ in range(6)]
        made = optimizer(params, lr=1e-3)
        for param in params:
            param.grad = torch.ones_like(param)
        made.step()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(50):
                    made.step()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert {float(s["step"]) for s in made.state.values() if "step" in s} <= {201.0}
        assert engine_of(made).steps == 201

    def test_gradients_that_another_thread_replaces_stay_until_the_kernel_has_read_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It replaces them between the reading of their addresses and the launch."""
        params = [nn.Parameter(torch.zeros(8)) for _ in range(4)]
        optimizer, launch = co.SGD(params, lr=1.0), Kernel._launch
        read: list[StorageWeakRef] = []

        def give(value: float) -> None:
            for param in params:
                param.grad = torch.full((8,), value)

        def launch_later(*args: Any) -> None:
            read[:] = [StorageWeakRef(param.grad.untyped_storage()) for param in params]
            thread.submit(give, 9.0).result()
            assert not any(storage.expired() for storage in read)
            launch(*args)

        monkeypatch.setattr(Kernel, "_launch", launch_later)
        with ThreadPoolExecutor(1) as thread:
            for step in range(1, 4):
                thread.submit(give, 1.0).result()
                optimizer.step()
                assert all(torch.equal(param, torch.full((8,), -float(step))) for param in params)
                assert len(read) == 4
                assert all(storage.expired() for storage in read)


class Guarded:
    """Tensors between guard zones, at odd offsets."""

    def __init__(self) -> None:
        self._whole: list[tuple[Tensor, int, int]] = []

    def place(self, values: Tensor) -> Tensor:
        offset = 64 + len(self._whole) % 5
        whole = torch.full((values.numel() + 160,), 12.5, dtype=values.dtype)
        whole[offset : offset + values.numel()] = values.reshape(-1)
        self._whole.append((whole, offset, values.numel()))
        return whole[offset : offset + values.numel()].view(values.shape)

    def check(self) -> None:
        for whole, offset, count in self._whole:
            assert (whole[:offset] == 12.5).all()
            assert (whole[offset + count :] == 12.5).all()


GUARDED = [
    (optimizer, dtype, lowering)
    for optimizer in registry()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for lowering in ("multi_tensor", "inductor")
    if optimizer is not co.LBFGS  # runs torch's own operations
    and (lowering == "multi_tensor" or dtype is torch.float32)
    # Inductor's C++ does not mix float16 with bfloat16; float64 stacks are Adafactor's, too.
    and not (optimizer._granularity == "matrix" and dtype in (torch.float16, torch.float64))
]


@pytest.mark.parametrize(("optimizer", "dtype", "lowering"), GUARDED, ids=name_of)
def test_guard_zones_stay_untouched(optimizer: type[CompiledOptimizer], dtype: torch.dtype, lowering: str) -> None:
    guarded = Guarded()
    last = [(1, 1), (130, 65)] if optimizer is co.SparseAdam or optimizer._granularity == "matrix" else [(1,), (8193,)]
    params = [nn.Parameter(guarded.place(torch.randn(shape).to(dtype))) for shape in [(7, 3), (9, 131), *last]]
    made = optimizer(params, lowering=lowering, max_grad_norm=1.0, **required(optimizer))
    for step in range(4):
        for param in params:
            grad = guarded.place(torch.randn(param.shape).to(dtype))
            if optimizer is co.SparseAdam:
                rows = torch.arange(0, len(param), 2)
                grad = torch.sparse_coo_tensor(rows[None], grad[::2], param.shape, check_invariants=True)
            param.grad = grad
        made.step()
        if step == 1:
            for state in made.state.values():
                for name, value in list(state.items()):
                    state[name] = guarded.place(value)
    guarded.check()
