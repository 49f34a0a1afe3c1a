"""What is read from a group is a value: like the float of torch.optim, and like the 0-dim tensor that it is."""

from __future__ import annotations

import copy
import decimal
import fractions
import io
import math
import pickle
import statistics
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

import compiled_optim as co
from compiled_optim.groups.reading import Reading
from compiled_optim.lowering.kernels.pointers import HyperPointers
from perf.lowering.fake_cuda import fake_cuda
from perf.lowering.record import recording

X = np.array([1.0, 2.0])
T = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


def plateau(o: torch.optim.Optimizer) -> int:
    scheduler = ReduceLROnPlateau(o, patience=0, factor=0.1)
    reduced = 0
    for _ in range(4):
        before = o.param_groups[0]["lr"]
        scheduler.step(1.0)
        reduced += o.param_groups[0]["lr"] < before
    return reduced


def history(o: torch.optim.Optimizer) -> list[float]:
    scheduler, seen = ExponentialLR(o, 0.5), []
    for _ in range(3):
        seen.append(o.param_groups[0]["lr"])
        o.step()
        scheduler.step()
    return seen


def best_put_back(o: torch.optim.Optimizer) -> list[float]:
    scheduler, best, seen = StepLR(o, 1, 0.5), None, []
    for i in range(5):
        if i == 1:
            best = o.param_groups[0]["lr"]
        o.step()
        scheduler.step()
    o.param_groups[0]["lr"] = best
    seen.append(o.param_groups[0]["lr"])
    return seen


def ratio_to_base(o: torch.optim.Optimizer) -> list[float]:
    base, scheduler, seen = o.param_groups[0]["lr"], LambdaLR(o, lambda e: 1 / (e + 1)), []
    for _ in range(3):
        o.step()
        scheduler.step()
        seen.append(o.param_groups[0]["lr"] / base)
    return seen


def a_local(o: torch.optim.Optimizer) -> tuple[float, float]:
    lr = o.param_groups[0]["lr"]
    lr *= 0.5
    return lr, o.param_groups[0]["lr"]


def base_and_in_place(o: torch.optim.Optimizer) -> list[float]:
    base = [g["lr"] for g in o.param_groups]
    o.param_groups[0]["lr"] *= 0.1
    return base


def one_cycle(o: torch.optim.Optimizer) -> list[Any]:
    scheduler, seen = OneCycleLR(o, 0.2, total_steps=7), []
    for _ in range(6):
        o.step()
        scheduler.step()
        seen += [scheduler.get_last_lr(), o.param_groups[0]["lr"], o.param_groups[0]["betas"]]
    return seen


def frame(o: torch.optim.Optimizer) -> str:
    return pd.DataFrame({"lr": [float(o.param_groups[0]["lr"])]}).to_csv()


WITH_OPTIMIZER = [plateau, history, best_put_back, ratio_to_base, a_local, base_and_in_place, one_cycle, frame]

ON_NUMBER: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "str": str,
    "repr": repr,
    "hash": hash,
    "round": lambda x: round(x, 3),
    "round to an int": round,
    "abs": abs,
    "neg": lambda x: -x,
    "pos": lambda x: +x,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "f-string": lambda x: f"{x} {x:.2e} {x:8.5f} {x!r} {x:g}",
    "percent": lambda x: "%s %.6f %g %r" % (x, x, x, x),  # noqa: UP031
    "format": lambda x: format(x, ".3f"),
    "join": lambda x: ",".join(map(str, [x, x])),
    "add": lambda x: x + 1,
    "radd": lambda x: 1.5 + x,
    "sub": lambda x: x - 2,
    "rsub": lambda x: 2 - x,
    "mul": lambda x: x * 0.3,
    "rmul": lambda x: 3 * x,
    "div": lambda x: x / 3,
    "rdiv": lambda x: 3 / x,
    "floordiv": lambda x: x // 0.01,
    "rfloordiv": lambda x: 1 // x,
    "mod": lambda x: x % 0.007,
    "rmod": lambda x: 1 % x,
    "divmod": lambda x: divmod(x, 0.007),
    "rdivmod": lambda x: divmod(1, x),
    "pow": lambda x: x**2,
    "rpow": lambda x: 2**x,
    "with itself": lambda x: (x + x, x * x, x / x, x - x, x**x),
    "bool operand": lambda x: x * True,
    "fraction": lambda x: x * fractions.Fraction(1, 3),
    "less": lambda x: (x < 1, x <= 1, x > 1, x >= 1, x > 1),
    "equal": lambda x: (x == 0.05, x != 0.05, x == 0.05, x == x, x == "x", x is None, x == None),  # noqa: E711
    "decimal equal": lambda x: x == decimal.Decimal("0.5"),
    "isclose": lambda x: math.isclose(x, 0.05),
    "log10": math.log10,
    "sqrt": math.sqrt,
    "max": lambda x: max(x * 0.5, 1e-6),
    "max of": lambda x: max([x, 0.01]),
    "min": lambda x: min(x, 1.0),
    "sum": lambda x: sum([x, x]),
    "fsum": lambda x: math.fsum([x, x]),
    "mean": lambda x: statistics.fmean([x, x * 3]),
    "sorted": lambda x: sorted([x, 0.01, 1]),
    "in a list": lambda x: x in [1, 0.05],
    "key": lambda x: {0.05: "hit"}.get(x),
    "as a key": lambda x: {x: "hit"}.get(0.05),
    "set": lambda x: len({x, x, 0.05}),
    "numpy add": lambda x: (X * x).tolist(),
    "add numpy": lambda x: (x * X).tolist(),
    "numpy scalar": lambda x: float(np.float64(2) * x),
    "scalar numpy": lambda x: float(x * np.float64(2)),
    "np.array": lambda x: (np.array([x, x]).tolist(), np.array([x, x]).dtype),
    "np.asarray": lambda x: np.asarray(x).item(),
    "np.mean": lambda x: float(np.mean([x, x])),
    "np.interp": lambda x: float(np.interp(x, [0, 1], [0, 10])),
    "np.isclose": lambda x: bool(np.isclose(x, 0.05)),
    "np.log": lambda x: float(np.log(x)),
    "series": lambda x: pd.Series([float(x), 1.0]).dtype,
    "torch list": lambda x: torch.tensor([x, x], dtype=torch.float64).tolist(),
    "full": lambda x: torch.full((2,), float(x), dtype=torch.float64).tolist(),
    "times a tensor": lambda x: (T * x).tolist(),
    "tensor times": lambda x: (x * T).tolist(),
    "tensor minus": lambda x: (x - T).tolist(),
    "alpha": lambda x: torch.add(T, T, alpha=float(x)).tolist(),
    "addcmul": lambda x: torch.addcmul(T, T, T, value=float(x)).tolist(),
    "where": lambda x: torch.where(T > 0, x, T).tolist(),
    "foreach": lambda x: torch._foreach_mul([T, T], float(x))[0].tolist(),
    "clamp": lambda x: T.clamp(max=float(x)).tolist(),
    "deepcopy": lambda x: float(copy.deepcopy(x)),
    "copy": lambda x: float(copy.copy(x)),
    "pickle": lambda x: float(pickle.loads(pickle.dumps(x))),
}


def twins() -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    made = []
    for cls in (co.AdamW, torch.optim.AdamW):
        param = Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        made.append(cls([param], lr=0.05))
    return made[0], made[1]


@pytest.mark.parametrize("idiom", WITH_OPTIMIZER, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_idioms_with_schedulers(idiom: Callable[..., Any]) -> None:
    ours, theirs = map(idiom, twins())
    assert ours == theirs


@pytest.mark.parametrize("idiom", ON_NUMBER.values(), ids=ON_NUMBER)
def test_idioms(idiom: Callable[[Any], Any]) -> None:
    ours, theirs = (idiom(o.param_groups[0]["lr"]) for o in twins())
    assert ours == theirs
    assert type(ours) in (type(theirs), Reading)  # one that is passed on


def test_it_is_a_tensor() -> None:
    optimizer, _ = twins()
    read, live = optimizer.param_groups[0]["lr"], optimizer.hyperparameter("lr")
    assert isinstance(read, Tensor)
    assert torch.is_tensor(read)
    assert (read.shape, read.dim(), read.numel(), read.dtype, read.device) == ((), 0, 1, live.dtype, live.device)
    assert not read.requires_grad
    assert torch.equal(read, live)
    for made in (read.clone(), read.detach(), read.double(), read.cpu(), torch.stack([read, read])[0], read.view(1)[0]):
        assert made.item() == 0.05


@pytest.mark.parametrize(
    "write",
    [
        lambda o: o.param_groups[0].update(lr=0.5),
        lambda o: o.param_groups[0]["lr"].fill_(0.5),
        lambda o: o.param_groups[0]["lr"].data.copy_(torch.tensor(0.5)),
        lambda o: o.hyperparameter("lr").fill_(0.5),
        lambda o: o.hyperparameter("lr").numpy().fill(0.5),
        lambda o: StepLR(o, 1).step(),
        lambda o: o.load_state_dict(co.AdamW([torch.ones(2)], lr=0.5).state_dict()),
        lambda o: (o.schedule(lr=lambda step: 0.5 * step), o.step()),
        lambda o: o.param_groups[0]["lr"].numpy().fill(0.5),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_nobody_else_changes_it(write: Callable[[Any], object]) -> None:
    optimizer, _ = twins()
    read = optimizer.param_groups[0]["lr"]
    copied, texts = read.clone(), (str(read), hash(read))
    write(optimizer)
    assert read == copied == 0.05
    assert torch.equal(read * T, 0.05 * T)
    assert (str(read), hash(read)) == texts


def test_in_place_methods_write_to_the_group_and_operators_do_not() -> None:
    optimizer, _ = twins()
    group = optimizer.param_groups[0]
    live, address = optimizer.hyperparameter("lr"), optimizer.hyperparameter("lr").data_ptr()
    read = group["lr"]
    assert read.mul_(2).add_(0.1) is read
    assert read == group["lr"] == live == 0.2
    group["betas"][1].fill_(0.5)
    assert group["betas"] == (0.9, 0.5)
    read = group["lr"]
    read *= 10
    read = group["lr"]
    read += T[0]
    assert group["lr"] == 0.2
    copied = group["lr"].clone()
    assert copied.mul_(3) == copied
    assert copied == pytest.approx(0.6)
    assert group["lr"] == 0.2
    group["lr"].fill_(-1.0)
    with pytest.raises(ValueError, match=r"lr of param_groups\[0\] must be >= 0"):
        optimizer.step()
    group["lr"].fill_(0.2)
    assert optimizer.hyperparameter("lr") is live
    assert live.data_ptr() == address


def test_a_reading_outlives_its_group() -> None:
    optimizer, _ = twins()
    read = optimizer.param_groups[0]["lr"]
    del optimizer
    assert read.fill_(3.0) is read
    assert read == 3.0


def test_files_hold_plain_tensors() -> None:
    optimizer, _ = twins()
    file = io.BytesIO()
    torch.save({"lr": optimizer.param_groups[0]["lr"], "betas": optimizer.param_groups[0]["betas"]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["lr"]) is Tensor
    assert (loaded["lr"], loaded["betas"]) == (0.05, (0.9, 0.999))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, lr: x * lr,
        lambda x, lr: lr * x,
        lambda x, lr: x - lr**2 + lr,
        lambda x, lr: torch.where(x > 0, lr, x),
        lambda x, lr: (x * lr).sum() + lr.clone(),
    ],
)
def test_compiled_code_takes_it_as_a_tensor(function: Callable[..., Tensor], backend: str) -> None:
    optimizer, _ = twins()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for number in (0.1, 0.2, 0.7, 0.3):
        optimizer.param_groups[0]["lr"] = number
        expected = function(T, torch.tensor(number, dtype=torch.float64))
        assert torch.allclose(compiled(T, optimizer.param_groups[0]["lr"]), expected, rtol=1e-15)
    assert counter.frame_count == 1


def test_functional_transforms_take_it_as_a_tensor() -> None:
    optimizer, _ = twins()
    lr, plain = optimizer.param_groups[0]["lr"], torch.tensor(0.05, dtype=torch.float64)
    for run in (
        lambda x: torch.vmap(lambda v: v * x)(T),
        lambda x: torch.vmap(lambda v, s: v * s, in_dims=(0, None))(T, x),
        lambda x: torch.func.grad(lambda v: (v.square() * x).sum())(T),
        lambda x: torch._foreach_mul([T], x)[0],
        lambda x: torch._foreach_add([T], [x])[0],
    ):
        assert torch.equal(run(lr), run(plain))
    weight = T.clone().requires_grad_()
    product = weight * lr
    optimizer.param_groups[0]["lr"] = 7.0
    product.sum().backward()
    assert torch.equal(weight.grad, torch.full_like(T, 0.05))


# These make a tensor on the device, or a copy of one.
NOT_ON_HOST = {"where", "foreach", "alpha", "addcmul", "clamp", "pickle", "copy", "torch list", "full"}


def on_device() -> tuple[co.AdamW, Any]:
    param = torch.zeros(3, device="cuda", requires_grad=True)
    param.grad = torch.zeros_like(param)
    return co.AdamW([{"params": [param]}], lr=0.05), param


@pytest.mark.parametrize("name", [n for n in ON_NUMBER if "tensor" not in n and n not in NOT_ON_HOST])
def test_what_the_host_knows_asks_no_device(name: str) -> None:
    with fake_cuda(90), recording("cuda") as recorder:
        optimizer, _ = on_device()
        read = optimizer.param_groups[0]["lr"]
        recorder.take()
        ours = ON_NUMBER[name](read)
        assert recorder.take().operators == []
    assert ours == ON_NUMBER[name](0.05)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "fakes": FakeTensorMode,
    "no_grad": torch.no_grad,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_reading_and_writing_in_every_context(context: Callable[[], Any]) -> None:
    optimizer, twin = twins()
    group, live = optimizer.param_groups[0], optimizer.hyperparameter("lr")
    with context():
        assert group["lr"] == 0.05
        group["lr"] = 0.25
        assert f"{group['lr']}" == "0.25"
        group["betas"][0].fill_(0.5)
        group["weight_decay"] *= 2
        copied = copy.deepcopy(group["lr"])
    twin.param_groups[0].update(lr=0.25, betas=(0.5, 0.999), weight_decay=0.02)
    assert copied == live == group["lr"] == 0.25
    assert optimizer.hyperparameter("lr") is live
    assert group["betas"] == (0.5, 0.999)
    for o in (optimizer, twin):
        o.step()
    assert torch.allclose(*(o.param_groups[0]["params"][0] for o in (optimizer, twin)), rtol=1e-6)


def test_fake_and_meta_optimizers_know_their_numbers() -> None:
    with FakeTensorMode():
        fake = co.AdamW([Parameter(torch.ones(2))], lr=0.5, lowering="eager")
        fake.param_groups[0]["lr"] *= 0.5
        assert fake.param_groups[0]["lr"] == 0.25
    meta = co.AdamW([Parameter(torch.ones(2, device="meta"))], lr=0.5, eps=0.125, lowering="eager")
    assert (meta.param_groups[0]["lr"], meta.param_groups[0]["eps"]) == (0.5, 0.125)
    assert meta.param_groups[0]["lr"].device.type == "cpu"  # where the numbers outlast the move to a device


def test_tensors_without_memory_are_not_taken_for_one() -> None:
    options = {name: torch.full((), 0.5, device="meta") for name in ("lr", "eps")}
    optimizer = co.AdamW([Parameter(torch.ones(2, device="meta"))], lr=0.5)
    optimizer.add_param_group({"params": [Parameter(torch.ones(2, device="meta"))], **options})
    assert optimizer.hyperparameter("lr", 1) is options["lr"]
    assert optimizer.hyperparameter("eps", 1) is options["eps"]


class TestNothingIsShared:
    """No memory that somebody got from a reading is what others read."""

    @pytest.mark.parametrize(
        "write",
        [
            lambda lr: lr.view(1).mul_(5),
            lambda lr: lr.unsqueeze(0).fill_(7.0),
            lambda lr: copy.copy(lr).mul_(3),
            lambda lr: pickle.loads(ForkingPickler.dumps(lr)).mul_(3),
            lambda lr: np.from_dlpack(lr),
        ],
    )
    def test_with_what_was_made_of_it(self, write: Callable[[Tensor], object]) -> None:
        optimizer, _ = twins()
        read = optimizer.param_groups[0]["lr"]
        write(read)
        for lr in (read, optimizer.param_groups[0]["lr"]):
            assert lr == 0.05
            assert torch.equal(lr * T, 0.05 * T)

    @pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
    def test_with_another_context(self, context: Callable[[], Any]) -> None:
        optimizer, _ = twins()
        with context():
            assert (optimizer.param_groups[0]["lr"] * torch.ones(2)).shape == (2,)
        torch.func.grad(lambda x: (x * optimizer.param_groups[0]["lr"]).sum())(T)
        weight = T.clone().requires_grad_()
        (weight * optimizer.param_groups[0]["lr"]).sum().backward()
        assert torch.equal(weight.grad, torch.full_like(T, 0.05))

    def test_with_another_optimizer_that_got_a_copy_of_the_group(self) -> None:
        optimizer, _ = twins()
        other = torch.optim.AdamW([optimizer.param_groups[0].copy()])
        scheduler = StepLR(other, 1, 0.5)
        other.step()
        scheduler.step()
        assert (other.param_groups[0]["lr"], optimizer.param_groups[0]["lr"]) == (0.025, 0.05)

    def test_with_another_entry(self) -> None:
        optimizer, _ = twins()
        group = optimizer.param_groups[0]
        group["initial_lr"] = group["lr"]
        group["initial_lr"].fill_(0.5)
        assert (group["lr"], group["initial_lr"]) == (0.05, 0.5)
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            group = copied.param_groups[0]
            live = copied.hyperparameter("lr")
            group["lr"] = 0.25
            assert (group["lr"], group["initial_lr"]) == (0.25, 0.5)
            assert copied.hyperparameter("lr") is live

    @pytest.mark.parametrize("make", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
    def test_a_copys_group_is_written(self, make: Callable[[Any], Any]) -> None:
        stepped = []
        for copied in map(make, twins()):
            group = copied.param_groups[0]
            group["lr"] = 0.5
            group["params"][0].grad = torch.ones(2)
            copied.step()
            stepped.append(group["params"][0])
        assert torch.allclose(*stepped, rtol=1e-6)


def test_in_place_methods_change_the_reading_and_the_group() -> None:
    optimizer, _ = twins()
    group = optimizer.param_groups[0]
    lr = group["lr"]
    for _ in range(3):
        lr.mul_(0.5)
    assert lr == group["lr"] == 0.00625
    for _ in range(2):
        torch._foreach_mul_([lr], 2.0)
    assert lr == group["lr"] == 0.025
    assert torch.mul(group["lr"], 2.0, out=lr) is lr
    assert lr == group["lr"] == 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_mirror_of_a_group_is_written_like_the_group(dtype: torch.dtype) -> None:
    """As ZeroRedundancyOptimizer does: it keeps entries, which schedulers fill, and assigns them before each step."""
    optimizer = co.SGD([Parameter(torch.ones(2))], lr=torch.tensor(0.5, dtype=dtype))
    group = optimizer.param_groups[0]
    for value in (0.1, torch.tensor(0.3), 0.7):
        mirror = {key: group[key] for key in ("lr", "momentum")}
        mirror["lr"].fill_(value)
        assert mirror["lr"] == group["lr"]
        group["lr"] = mirror["lr"]
        assert group["lr"] == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("name", ["share_memory_", "apply_", "map_", "set_", "resize_", "requires_grad_"])
def test_what_needs_memory_is_refused(name: str) -> None:
    optimizer, _ = twins()
    with pytest.raises(TypeError, match=rf"a value without memory; it has no {name}\(\)"):
        getattr(optimizer.param_groups[0]["lr"], name)(torch.ones(1))


def test_a_freed_tensor_that_was_adopted_is_refused() -> None:
    rate = torch.tensor(0.5)
    group = co.SGD([Parameter(torch.ones(2))], lr=rate).param_groups[0]
    rate.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="lr is a tensor whose storage was freed; it has no value"):
        group["lr"]


def test_live_tensors_that_are_swapped() -> None:
    optimizer, _ = twins()
    first, second = optimizer.hyperparameter("betas")
    optimizer.param_groups[0]["betas"] = (second, first)
    assert optimizer.param_groups[0]["betas"] == (0.999, 0.9)
    optimizer.param_groups[0].update(lr=optimizer.hyperparameter("eps"), eps=optimizer.hyperparameter("lr"))
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]) == (1e-8, 0.05)


@pytest.mark.parametrize("bad", ["meta", "fake", "freed"])
def test_a_tensor_without_memory_is_refused_before_anything_is_written(bad: str) -> None:
    optimizer, _ = twins()
    group = optimizer.param_groups[0]
    if bad == "fake":
        with FakeTensorMode():
            value = torch.tensor(0.5)
    else:
        value = torch.full((), 0.5, device="meta" if bad == "meta" else "cpu")
        if bad == "freed":
            value.untyped_storage().resize_(0)
    before = dict(group)
    for write in (lambda: group.update(lr=0.7, eps=value), lambda: group.update(betas=(0.5, value))):
        with pytest.raises(ValueError, match=r"of param_groups\[0\] must be a number, got a tensor without memory"):
            write()
        assert dict(group) == before


def test_a_refused_schedule_leaves_what_was_adopted() -> None:
    rate = torch.tensor(0.5)
    optimizer = co.Adam([Parameter(torch.ones(2))], lr=rate)
    with pytest.raises(ValueError, match="eps"):
        optimizer.schedule(lr=lambda step: 0.1 / step, eps=lambda step: -1.0)
    rate.fill_(0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_group_that_is_gone_shares_nothing() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = co.SGD([{"params": [Parameter(torch.ones(2))]} for _ in range(2)], lr=rate)
    del optimizer.param_groups[1]
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert rate == 0.25


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_what_was_adopted_is_replaced_in_every_context(context: Callable[[], Any]) -> None:
    param = Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = co.SGD([param], lr=torch.tensor(0.5))
    with context():
        optimizer.param_groups[0]["lr"] = 0.25
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert param.tolist() == [0.875, 0.875]


def test_a_tensor_that_requires_grad_is_read_itself() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = co.SGD([Parameter(torch.ones(2))], lr=rate, differentiable=True)
    assert optimizer.param_groups[0]["lr"] == 0.5
    rate.requires_grad_()
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("write", [lambda g: g.update(lr=0.25), lambda g: g["lr"].fill_(0.25)], ids=["assign", "fill"])
def test_an_interrupt_while_an_adopted_tensor_is_replaced(
    write: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before those who read it were told: the next step looks again."""
    rate = torch.tensor(0.5, dtype=torch.float64)
    params = [Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = co.SGD([{"params": [p]} for p in params], lr=rate)
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    group = optimizer.param_groups[0]
    with monkeypatch.context() as patch:
        patch.setattr(HyperPointers, "follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(group)
    optimizer.step()
    assert (params[0].tolist(), params[1].tolist()) == ([0.25, 0.25], [0.0, 0.0])
    assert group["lr"] == 0.25


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_host_follows_memory_that_moves(dtype: torch.dtype) -> None:
    optimizer = co.SGD([Parameter(torch.ones(2))], lr=torch.tensor(0.5, dtype=dtype))
    group, live = optimizer.param_groups[0], optimizer.hyperparameter("lr")
    group["lr"].fill_(0.25)
    for move in (live.share_memory_, lambda: setattr(live, "data", torch.tensor(0.125, dtype=dtype))):
        move()
        assert group["lr"] == live.item()
        live.data.fill_(2.0)  # uncounted
        assert group["lr"] == 2.0
        group["lr"].fill_(0.75)
        assert live.item() == group["lr"].item() == 0.75


def test_a_write_is_counted() -> None:
    optimizer = co.SGD([Parameter(torch.ones(2))], lr=0.5)
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * optimizer.hyperparameter("lr")).sum()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_detached_it_writes_as_a_tensor_does() -> None:
    optimizer, _ = twins()
    optimizer.param_groups[0]["lr"].detach().fill_(0.9)
    assert optimizer.param_groups[0]["lr"] == 0.9


def test_a_reading_outlives_its_entry() -> None:
    optimizer, _ = twins()
    read = optimizer.param_groups[0].pop("lr")
    assert read.fill_(0.3) == 0.3


def test_it_is_rounded_as_the_group_where_fakes_are_made() -> None:
    optimizer = co.SGD([Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    read = optimizer.param_groups[0]["lr"]
    with FakeTensorMode():
        read.fill_(0.3)
    assert read == optimizer.param_groups[0]["lr"] == torch.tensor(0.3).item()
