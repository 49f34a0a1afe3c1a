"""What a step sees of its parameters and gradients, looked at in one call in C++ and one by one in Python."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from catalog import LOWERINGS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_optim as co
from compiled_optim.memory import addresses, cache
from compiled_optim.memory.addresses import EMPTY, Addresses
from compiled_optim.optimizer import engine_of


@pytest.fixture(params=["C++", "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(addresses, "reader", lambda: "not wanted here")
    else:
        assert not isinstance(addresses.reader(), str), addresses.reader()


def _parameters() -> list[Tensor]:
    shapes = [(3, 5), (7,), (0,), (), (2, 3, 4, 4)]
    params: list[Tensor] = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    params.append(nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)))
    params.append(nn.Parameter(torch.randn(4, 3).t()))
    return params


def _with_gradients() -> list[Tensor]:
    params = _parameters()
    for param in params:
        param.grad = torch.empty_like(param).normal_()
    return params


def _expected(params: list[Tensor]) -> list[int]:
    return [0 if (g := p.grad) is None or g.is_sparse else g.data_ptr() or EMPTY for p in params]


@pytest.mark.usefixtures("way")
class TestWhatIsSeen:
    def test_gradients_that_come_and_go(self) -> None:
        params = _with_gradients()
        seen = Addresses(params)
        versions = {seen.version}
        for absent in ([], [0], [2, 4], range(len(params)), []):
            for i, param in enumerate(params):
                param.grad = None if i in absent else torch.empty_like(param)
            seen.read()
            assert seen.gradients.tolist() == _expected(params)
            assert not seen.unlike
            assert not seen.moved
            versions.add(seen.version)
            before = seen.version
            seen.read()
            assert seen.version == before
        assert len(versions) == 6

    def test_gradients_given_in_place_of_their_own(self) -> None:
        params = _with_gradients()
        seen = Addresses(params)
        given: list[Tensor | None] = [torch.empty_like(p) for p in params]
        given[1] = None
        seen.read(given)
        assert seen.gradients.tolist() == [0 if g is None else g.data_ptr() or EMPTY for g in given]
        assert not seen.unlike
        seen.read([torch.randn(5, 3).t(), *given[1:]])
        assert seen.unlike
        seen.read()
        assert seen.gradients.tolist() == _expected(params)

    @pytest.mark.parametrize(
        "unlike",
        [
            lambda p: torch.randn(5, 3).t(),
            lambda p: torch.randn(()).expand(3, 5),
            lambda p: torch.randn(3, 10)[:, ::2],
            lambda p: torch.randn(3, 5).to_sparse(),
            lambda p: torch.imag(torch.randn(3, 5, dtype=torch.complex64).conj()),
            lambda p: torch._efficientzerotensor((3, 5)),
        ],
        ids=["transposed", "expanded", "strided", "sparse", "negated", "zero"],
    )
    def test_a_gradient_in_another_form(self, unlike: Callable[[Tensor], Tensor]) -> None:
        params = _with_gradients()
        seen = Addresses(params)
        params[0].grad = unlike(params[0])
        seen.read()
        assert seen.unlike
        assert not seen.moved
        assert seen.gradients.tolist()[1:] == _expected(params)[1:]
        params[0].grad = torch.randn(3, 5)
        seen.read()
        assert not seen.unlike
        assert seen.gradients.tolist() == _expected(params)

    def test_conjugated_gradients(self) -> None:
        param = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        seen = Addresses([param])
        param.grad = torch.randn(3, dtype=torch.complex64).conj()
        seen.read()
        assert seen.unlike

    def test_gradients_of_another_dtype(self) -> None:
        param = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        param.grad_dtype = None  # type: ignore[attr-defined]
        param.grad = torch.randn(3)
        assert Addresses([param]).unlike
        seen = Addresses([param], [torch.float32])
        assert not seen.unlike
        assert seen.gradients.tolist() == [param.grad.data_ptr()]

    @pytest.mark.parametrize(
        "move",
        [
            lambda p: setattr(p, "data", p.data.clone()),
            lambda p: setattr(p, "data", p.data[:2]),
            lambda p: setattr(p, "data", p.data.as_strided((3, 5), (1, 3))),
            lambda p: setattr(p, "data", p.data.view(torch.int32).view(torch.float32)[:, :4]),
            lambda p: setattr(p, "data", p.data.double()),
            lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.randn(3, 5))),
            lambda p: p.data.resize_(30, 50),
        ],
        ids=["elsewhere", "shorter", "transposed", "narrower", "dtype", "swapped", "grown"],
    )
    def test_a_parameter_that_moves_is_seen_until_somebody_looks_anew(self, move: Callable[[Tensor], object]) -> None:
        params = _parameters()
        seen = Addresses(params)
        assert not seen.moved
        move(params[0])
        for _ in range(2):
            seen.read()
            assert seen.moved
        assert not Addresses(params).moved

    def test_classes_of_parameters(self) -> None:
        class Own(nn.Parameter):
            pass

        params = [Own(torch.randn(3)), torch.randn(4, requires_grad=True), nn.Parameter(torch.randn(5))]
        seen = Addresses(params)
        for param in params:
            param.grad = torch.randn_like(param.detach())
        seen.read()
        assert seen.gradients.tolist() == _expected(params)


def _spread(numbers: Tensor, *placements: Placement) -> Any:
    """A DTensor whose local part is ``numbers``, on a mesh of this process alone."""
    return DTensor.from_local(numbers, init_device_mesh("cpu", (1,)), placements or [Shard(0)], run_check=False)


class _OtherTensor(Tensor):
    """A tensor with as many attributes as a DTensor, none of which is set."""

    __slots__ = ("_first", "_second")


class _LocalProduct(torch.autograd.Function):
    """The inner product of a DTensor's local part and of a tensor, which is returned as the DTensor's gradient."""

    @staticmethod
    def forward(ctx: Any, owner: Any, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return (owner._local_tensor * factor).sum()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        return ctx.factor, None


@pytest.mark.usefixtures("way", "one_process")
class TestWhatIsSeenOfDTensors:
    @pytest.fixture
    def owners(self, one_process: None) -> list[Any]:
        owners = [nn.Parameter(_spread(torch.randn(shape))) for shape in [(3, 5), (7,), (0,), *[(2, 2)] * 30]]
        for owner in owners:
            owner.grad = _spread(torch.randn(owner.shape))
        return owners

    def _seen(self, owners: list[Any]) -> Addresses:
        return Addresses([owner._local_tensor for owner in owners], owners=owners)

    def _expected(self, owners: list[Any]) -> list[int]:
        return [0 if owner.grad is None else owner.grad._local_tensor.data_ptr() or EMPTY for owner in owners]

    def test_gradients_that_come_and_go(self, owners: list[Any]) -> None:
        seen = self._seen(owners)
        assert seen.gradients.tolist() == self._expected(owners)
        for absent in ([0], [1, 20], range(len(owners)), []):
            for i, owner in enumerate(owners):
                owner.grad = None if i in absent else _spread(torch.randn(owner.shape))
            seen.read()
            assert seen.gradients.tolist() == self._expected(owners)
            assert seen.present.tolist() == [owner.grad is not None for owner in owners]
            assert not seen.unlike
            assert not seen.moved

    def test_a_gradient_with_another_local_part(self, owners: list[Any]) -> None:
        seen = self._seen(owners)
        owners[0].grad._local_tensor = torch.randn(3, 5)
        seen.read()
        assert seen.gradients.tolist() == self._expected(owners)
        owners[0].grad._local_tensor = torch.randn(5, 3).t()
        seen.read()
        assert seen.unlike

    def test_local_parts_given_in_place_of_their_own(self, owners: list[Any]) -> None:
        seen = self._seen(owners)
        given: list[Tensor | None] = [None, *[torch.randn(owner.shape) for owner in owners[1:]]]
        seen.read(given)
        assert seen.gradients.tolist() == [0 if g is None else g.data_ptr() or EMPTY for g in given]
        assert not seen.unlike
        assert not seen.moved

    @pytest.mark.parametrize("changed", ["gradient", "its spec", "the parameter's spec"])
    def test_a_gradient_that_is_placed_otherwise(self, owners: list[Any], changed: str) -> None:
        seen, other = self._seen(owners), _spread(torch.randn(3, 5), Replicate())
        if changed == "gradient":
            owners[0].grad = other
        elif changed == "its spec":
            owners[0].grad._spec = other._spec
        else:
            owners[0]._spec = other._spec
        for _ in range(2):
            seen.read()
            assert seen.unlike
            assert seen.present[0]
            assert seen.gradients.tolist() == [0, *self._expected(owners)[1:]]
        owners[0].grad = _spread(torch.randn(3, 5), *owners[0].placements)
        seen.read()
        assert not seen.unlike
        assert seen.gradients.tolist() == self._expected(owners)

    @pytest.mark.parametrize("by", ["its own accumulation", "assignment"])
    def test_a_gradient_that_is_no_dtensor(self, owners: list[Any], by: str) -> None:
        """As of a function of autograd's that computes with the local part; torch copies its gradient without Python."""
        seen = self._seen(owners)
        for owner in owners:
            gradient, owner.grad = torch.randn(owner.shape), None
            if by == "assignment":
                owner.grad = gradient.as_subclass(_OtherTensor)
            else:
                _LocalProduct.apply(owner, gradient).backward()
        seen.read()
        assert seen.present.all()
        assert seen.unlike
        assert not seen.gradients.any()

    @pytest.mark.parametrize(
        "move",
        [
            lambda p: setattr(p, "_local_tensor", p._local_tensor.clone()),
            lambda p: setattr(p, "_local_tensor", p._local_tensor.view(3, 5)),
            lambda p: setattr(p._local_tensor, "data", p._local_tensor.clone()),
            lambda p: torch.utils.swap_tensors(p, nn.Parameter(_spread(torch.randn(3, 5)))),
        ],
        ids=["another", "another with the same memory", ".data", "swapped"],
    )
    def test_a_local_part_that_moves(self, owners: list[Any], move: Callable[[Any], object]) -> None:
        seen = self._seen(owners)
        owners[0].grad = None
        seen.read()
        assert not seen.moved
        move(owners[0])
        seen.read()
        assert seen.moved
        assert seen.first_moved() == 0
        assert not self._seen(owners).moved

    def test_both_are_told_that_they_were_written(self, owners: list[Any]) -> None:
        seen = self._seen(owners)
        owners[1].grad = None
        seen.read()
        before = [(owner._version, owner._local_tensor._version) for owner in owners]
        seen.finish()
        after = [(owner._version, owner._local_tensor._version) for owner in owners]
        assert after[1] == before[1]
        assert after[:1] + after[2:] == [(a + 1, b + 1) for a, b in before[:1] + before[2:]]


@pytest.mark.usefixtures("way", "one_process")
@pytest.mark.filterwarnings("ignore:.*one by one")
def test_steps_of_dtensors_follow_gradients_in_every_form() -> None:
    """Placed otherwise, still sent, of another class: a step after each is that of plain tensors."""
    generator = torch.Generator().manual_seed(5)
    numbers = [torch.randn(4, 3, generator=generator) for _ in range(6)]
    spread, plain = nn.Parameter(_spread(numbers[0].clone())), nn.Parameter(numbers[0].clone())
    optimizers = co.AdamW([spread], lr=0.1), co.AdamW([plain], lr=0.1)
    for index, gradient in enumerate(numbers[1:]):
        plain.grad, spread.grad = gradient.clone(), _spread(gradient.clone())
        if index == 1:
            spread.grad = _spread(gradient.clone(), Replicate())
        elif index == 2:
            spread.grad._local_tensor = AsyncCollectiveTensor(gradient.clone())  # type: ignore[union-attr]
        elif index == 3:
            spread.grad._local_tensor = nn.Parameter(gradient.clone())  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(spread.detach().full_tensor(), plain.detach(), rtol=0, atol=0)  # type: ignore[operator]


@pytest.mark.usefixtures("way")
@pytest.mark.filterwarnings("ignore:.*one by one")
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_steps_follow_every_form(lowering: str) -> None:
    """A step after each change equals torch's in float64, which reads everything anew."""

    def change(params: list[Tensor], index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        first, square = params[:2]
        if index == 1:
            first.grad = None
        elif index == 2:
            first.grad = torch.randn(5, 3, generator=generator, dtype=first.dtype).t()
        elif index == 3:
            first.grad = torch.randn((), generator=generator, dtype=first.dtype).expand(3, 5)
        elif index == 4:
            square.data = square.data.t()  # the same address and size
        elif index == 5:
            first.grad = torch._efficientzerotensor((3, 5), dtype=first.dtype)
        elif index == 6:
            first.data = first.data.clone()

    generator = torch.Generator().manual_seed(11)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (4, 4), (6,), (0,))]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    options = {"lr": 0.07, "betas": (0.6, 0.81), "eps": 1e-3, "weight_decay": 0.3}
    optimizer = co.AdamW(ours, **options, lowering=lowering)
    reference = torch.optim.AdamW(theirs, **options)
    for index in range(8):
        for params, stepped in ((ours, optimizer), (theirs, reference)):
            change(params, index)
            stepped.step()
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-13, atol=1e-13)


def test_a_machine_whose_compiler_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "reader", lambda: "the C++ compiler refused")
    param = nn.Parameter(torch.randn(3))
    param.grad = torch.randn(3)
    optimizer = co.AdamW([param])
    with pytest.warns(RuntimeWarning, match="looks at its tensors one by one: the C\\+\\+ compiler refused"):
        optimizer.step()
    assert any("one by one" in finding.evidence for finding in co.compile_report(optimizer).findings)


@pytest.mark.parametrize("name", ["aoti_torch_get_dim", "_ZNK3c1010TensorImpl4gradEv"])
def test_a_torch_that_lacks_a_function_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cache.library
    monkeypatch.setattr(addresses.cache, "library", lambda text, *rest: found(text.replace(name, "gone"), *rest))
    monkeypatch.setattr(addresses, "reader", addresses.reader.__wrapped__)
    assert addresses.reader() == "this version of torch has no gone"


@pytest.mark.parametrize("lost", ["cdata", "keys", "nothing"])
def test_a_torch_of_another_layout_is_told(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets are found by values; where one is missing, nothing is read."""
    offset_of = addresses._offset_of

    def elsewhere(examples: Any, *reach: int) -> int:
        is_lost = len(examples) == 6 if lost == "keys" else len(examples[0][1]) == 4
        return 0 if lost != "nothing" and is_lost else offset_of(examples, *reach)

    monkeypatch.setattr(addresses, "_offset_of", elsewhere)
    found = addresses.reader.__wrapped__()
    assert (found == "this version of torch is not understood") == (lost != "nothing")


@pytest.mark.parametrize("where", ["meta", "fake", "simulated"])
def test_the_offsets_are_those_of_real_tensors_in_every_mode(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process finds them once: those of a meta or fake tensor would make all its later steps slow."""
    from compiled_optim.simulated.fake_cuda import fake_cuda

    found, offsets = [], addresses._offsets
    monkeypatch.setattr(addresses, "_offsets", lambda: found.append(offsets()) or found[-1])
    addresses.reader.__wrapped__()
    with contextlib.ExitStack() as modes:
        if where == "simulated":
            modes.enter_context(fake_cuda(90))
        modes.enter_context(FakeTensorMode() if where == "fake" else torch.device("meta" if where == "meta" else "cuda"))
        addresses.reader.__wrapped__()
    assert found[0] == found[1] is not None


@pytest.mark.parametrize("replaced", [".data", "None"])
def test_memory_that_is_kept_alive_stays_until_the_end(replaced: str) -> None:
    numbers = np.ones(3, dtype=np.float32)
    param, there = nn.Parameter(torch.zeros(3)), weakref.ref(numbers)
    param.grad = torch.from_numpy(numbers)
    del numbers
    seen = Addresses([param])
    seen.read(keep_alive=True)
    if replaced == "None":
        param.grad = None
    else:
        assert param.grad is not None
        param.grad.data = torch.zeros(3)
    gc.collect()
    assert there() is not None
    seen.finish()
    gc.collect()
    assert there() is None


def test_more_dimensions_than_torch_holds_in_place() -> None:
    """The sizes and strides of six dimensions lie elsewhere, where they change without a change of the tensor."""
    param = torch.zeros(2, 1, 2, 1, 2, 3)
    param.grad = torch.zeros(2, 1, 2, 1, 2, 3)
    seen = Addresses([param])
    assert seen.gradients.tolist() == [param.grad.data_ptr()]
    assert not seen.moved
    param.grad.transpose_(0, 5)
    seen.read()
    assert seen.unlike
    param.grad.transpose_(0, 5)
    param.transpose_(0, 2)
    seen.read()
    assert seen.moved


class Untouched(TorchDispatchMode):
    """Fails at every torch operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def test_the_check_before_a_steady_step_allocates_and_computes_nothing() -> None:
    params = [nn.Parameter(torch.randn(7)) for _ in range(20)]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.1}]
    optimizer = co.AdamW(groups, max_grad_norm=1.0)
    engine = engine_of(optimizer)
    for index in range(4):
        for param in params:
            param.grad = torch.randn(7)
        with Untouched() if index else contextlib.nullcontext():
            step = engine.prepare()
        step.launch()
        engine.finish(step)


@pytest.mark.usefixtures("one_process")
def test_dtensors_that_python_reads_are_named_in_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of several classes, or where torch makes them otherwise."""
    monkeypatch.setattr(addresses, "_sharding", lambda tensors, owners: None)
    param = torch.nn.Parameter(_spread(torch.ones(4, 3)))
    param.grad = _spread(torch.ones(4, 3))
    optimizer = co.AdamW([param], lr=0.5, lowering="multi_tensor")
    with pytest.warns(RuntimeWarning, match="AdamW looks at its tensors one by one: .*DTensors of several classes"):
        optimizer.step()
