"""Parameters and state in fewer bytes, together with everything else that an optimizer does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalog import LOWERINGS
from round_trips import copied
from torch import Tensor, nn

import compiled_optim as co

MODES: dict[str, dict[str, Any]] = {
    "kahan": {"weights": "kahan"},
    "stochastic": {"weights": "stochastic", "state_dtype": "int8"},
    "split8": {"weights": "split8", "state_dtype": "int8"},
    "split16": {"weights": "split16", "state_dtype": torch.float32},
    "master": {"weights": "master", "state_dtype": "int8"},
    "int8": {"state_dtype": "int8"},
}
# To compile all modes with Inductor takes minutes.
IN_LOWERINGS = [(mode, low) for mode in MODES for low in LOWERINGS if low != "inductor" or mode in ("stochastic", "split8")]

pytestmark = pytest.mark.usefixtures("one_thread")


def _parameters() -> list[nn.Parameter]:
    """In bfloat16: with rows of whole groups, without, in another order, with gaps; small, empty, and large of both."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(96, 64), (4999,), (16, 8, 6, 6), (70, 128), (3, 5), (0, 64), (300, 64), (129, 131)]
    made = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    made[2] = made[2].contiguous(memory_format=torch.channels_last)
    made[3] = made[3][:, :70]
    return [nn.Parameter(t) for t in made]


def _give(params: list[nn.Parameter], step: int, absent: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if absent and (i + step) % absent == 0 else grad


def _train(params: list[nn.Parameter], optimizer: Any, steps: range = range(4), absent: int = 3) -> None:
    for step in steps:
        _give(params, step, absent)
        optimizer.step()


def _sgd(params: Any, **options: Any) -> co.SGD:
    """All arithmetic of its rule rounds once: multiplications are by powers of two."""
    return co.SGD(params, **{"lr": 2**-7, "momentum": 0.5, **options})


def _stored(params: list[nn.Parameter], optimizer: Any) -> dict[str, Tensor]:
    """Copies of all that is stored of parameters, by place and name."""
    found = {f"{i}.param": p for i, p in enumerate(params)}
    found |= {f"{i}.{name}": entry for i, p in enumerate(params) for name, entry in optimizer.state[p].items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), (name, (tensor != theirs[name]).sum())


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_lowerings_store_the_same(mode: str) -> None:
    """Bit for bit, where the rule's own arithmetic leaves no choice; a compiler cannot leave a rounding away."""
    stored = {}
    for lowering in (low for m, low in IN_LOWERINGS if m == mode):
        params = _parameters()
        optimizer = _sgd(params, lowering=lowering, **MODES[mode])
        _train(params, optimizer, range(6))
        stored[lowering] = _stored(params, optimizer)
        assert co.compile_report(optimizer).findings == ()
    for other in stored.values():
        _assert_equal(other, stored["eager"])
    assert ("0.momentum_buffer_scale" in stored["eager"]) == (MODES[mode].get("state_dtype") == "int8")


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", ["kahan", "stochastic", "split8", "split16", "master"])
def test_every_number_of_16_bits_in_every_lowering(weights: str, dtype: torch.dtype) -> None:
    """Subnormal ones, infinite ones, and what is none, with steps of all sizes."""
    numbers = torch.arange(1 << 16).to(torch.int16).view(dtype)
    lowerings = LOWERINGS if weights in ("stochastic", "split8") else ("multi_tensor", "eager")
    stored = []
    for lowering in lowerings:
        param = nn.Parameter(numbers.clone())
        optimizer = co.SGD([("w", param)], lr=1.0, weights=weights, lowering=lowering)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            factors = torch.randn(numbers.shape, generator=generator).exp2() * 2.0**-9
            param.grad = (numbers.float() * factors).to(dtype)
            optimizer.step()
        stored.append(_stored([param], optimizer))
    for other in stored[:-1]:
        for name, entry in other.items():
            assert torch.equal(entry.isnan(), stored[-1][name].isnan()), name
            assert torch.equal(entry.nan_to_num(0.0), stored[-1][name].nan_to_num(0.0)), name


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_rules_with_means_and_roots_are_near(lowering: str) -> None:
    """The mean over a tensor counts nothing that fills up its last group."""
    results = []
    for where in (lowering, "eager"):
        params = _parameters()
        _train(params, co.StableAdamW(params, lr=0.01, lowering=where, **MODES["split8"]))
        results.append([p.detach().float() for p in params])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_order_and_gaps_of_memory_change_nothing(mode: str) -> None:
    """Groups and random numbers follow memory: as of a contiguous parameter with the same elements in the same order."""
    lined, gaps = _parameters()[2:4]
    plain = [nn.Parameter(lined.detach().permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format))]
    plain += [nn.Parameter(gaps.detach().clone())]
    params = [lined, gaps]
    ours, theirs = _sgd(params, **MODES[mode]), _sgd(plain, **MODES[mode])
    for step in range(3):
        _give(params, step)
        plain[0].grad, plain[1].grad = lined.grad.permute(0, 2, 3, 1), gaps.grad
        ours.step()
        theirs.step()
    assert torch.equal(lined.permute(0, 2, 3, 1), plain[0])
    assert torch.equal(gaps, plain[1])
    for name, entry in theirs.state[plain[0]].items():
        own = ours.state[lined][name]
        own = own.permute(0, 2, 3, 1) if own.shape == lined.shape else own
        assert torch.equal(own.flatten(), entry.flatten()), name


@pytest.mark.parametrize(("mode", "lowering"), IN_LOWERINGS)
def test_a_skipped_step_changes_no_stored_bit(mode: str, lowering: str) -> None:
    params = _parameters()
    optimizer = _sgd(params, lowering=lowering, skip_nonfinite=True, **MODES[mode])
    _train(params, optimizer, range(2))
    before = _stored(params, optimizer)
    _give(params, 2)
    params[0].grad[3, 4] = math.inf
    optimizer.step()
    _assert_equal(_stored(params, optimizer), before)
    assert optimizer.skipped_steps == 1
    _give(params, 2)
    optimizer.step()
    assert not torch.equal(params[0], before["0.param"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
def test_clipping_is_that_of_wide_parameters(mode: str, lowering: str) -> None:
    params = _parameters()[:2]
    wide = [nn.Parameter(p.detach().float()) for p in params]
    ours = _sgd(params, lowering=lowering, max_grad_norm=3.0, **MODES[mode])
    theirs = torch.optim.SGD(wide, lr=2**-7, momentum=0.5)
    for step in range(4):
        _give(params, step)
        for p, w in zip(params, wide, strict=True):
            w.grad = p.grad.float()
        norm = nn.utils.clip_grad_norm_(wide, 3.0)
        ours.step()
        theirs.step()
        torch.testing.assert_close(ours.grad_norm.float(), norm)
    for p, w in zip(params, wide, strict=True):
        # Stochastic: every step rounds to one of two neighbours.
        torch.testing.assert_close(p.detach().float(), w.detach(), rtol=2**-5 if mode == "stochastic" else 2**-7, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_scaled_gradients(mode: str) -> None:
    """A scale that is a power of two changes nothing, and an overflow skips the step."""
    params, plain = _parameters(), _parameters()
    ours, theirs = _sgd(params, **MODES[mode]), _sgd(plain, **MODES[mode])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(4):
        scale = scaler.scale(torch.ones(())).item()
        _give(params, step)
        _give(plain, step)
        for p in params:
            p.grad.mul_(scale)
        if step == 2:
            params[1].grad[7] = math.inf
        else:
            theirs.step()
        scaler.step(ours)
        scaler.update()
    _assert_equal(_stored(params, ours), _stored(plain, theirs))


def test_groups_do_what_each_alone_does() -> None:
    """With other options in every group, and some of them absent."""
    kinds = [*MODES.values(), {}, {"weights": "split8", "exclude": ("b*",)}]
    together = [_parameters() for _ in kinds]
    groups = [
        {"params": [(f"{'ab'[j % 2]}{i}.{j}", p) for j, p in enumerate(ps)], "lr": 2.0 ** -(i + 3), **kind}
        for i, (ps, kind) in enumerate(zip(together, kinds, strict=True))
    ]
    alone = [{**group, "params": [(n, nn.Parameter(p.detach().clone())) for n, p in group["params"]]} for group in groups]
    optimizer, others = _sgd(groups), [_sgd([group]) for group in alone]
    twins = [other.param_groups[0]["params"] for other in others]
    for step in range(3):
        for ps, own, other in zip(together, twins, others, strict=True):
            _give(ps, step, 3)
            _give(own, step, 3)
            other.step()
        optimizer.step()
    for ps, own, other in zip(together, twins, others, strict=True):
        _assert_equal(_stored(ps, optimizer), _stored(own, other))
    assert "remainder" in optimizer.state[together[-1][0]]
    assert "master_param" in optimizer.state[together[-1][1]]


def _halved(step: Tensor) -> Tensor:
    return 2.0 ** -(step + 6)


@pytest.mark.parametrize(("mode", "lowering"), IN_LOWERINGS)
def test_schedules_and_writes(mode: str, lowering: str) -> None:
    """A schedule on the device, an assignment, and a write in place are one and the same number."""
    stored = []
    for way in ("schedule", "assigned", "filled"):
        params = _parameters()[:3]
        optimizer = _sgd(params, lowering=lowering, **MODES[mode])
        if way == "schedule":
            optimizer.schedule(lr=_halved)
        for step in range(3):
            value = 2.0 ** -(step + 7)
            if way == "assigned":
                optimizer.param_groups[0]["lr"] = value
            elif way == "filled":
                optimizer.hyperparameter("lr", 0).fill_(value)
            _train(params, optimizer, range(step, step + 1))
        stored.append(_stored(params, optimizer))
    _assert_equal(stored[0], stored[1])
    _assert_equal(stored[0], stored[2])


@pytest.mark.filterwarnings("ignore:.*Profiler.*")
@pytest.mark.parametrize("mode", MODES)
def test_a_training_step_compiled_whole(mode: str) -> None:
    torch._dynamo.reset()
    results = []
    for wrap in (lambda f: torch.compile(f, backend="aot_eager", fullgraph=True), lambda f: f):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 1)).bfloat16()
        optimizer = _sgd(model.named_parameters(), **MODES[mode])

        def train(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(torch.ones(2, 64, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = wrap(train)
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            for step in range(3):
                optimizer.param_groups[0]["lr"] = 2.0 ** -(step + 7)
                run()
        results.append(_stored(list(model.parameters()), optimizer))
    _assert_equal(*results)


@copied
@pytest.mark.parametrize("mode", MODES)
def test_copies_go_on(mode: str, copied: Callable[[Any], Any]) -> None:
    params = _parameters()
    optimizer = _sgd(params, **MODES[mode])
    _train(params, optimizer, range(2))
    twins, twin = copied((params, optimizer))
    for ps, each in ((params, optimizer), (twins, twin)):
        _train(ps, each, range(2, 4))
    _assert_equal(_stored(twins, twin), _stored(params, optimizer))


@pytest.mark.parametrize("mode", MODES)
def test_a_group_added_later(mode: str) -> None:
    params, twins = _parameters(), _parameters()
    optimizer = _sgd(params[:1])
    _train(params, optimizer, range(2))
    optimizer.add_param_group({"params": params[1:], **MODES[mode]})
    _train(params, optimizer, range(2, 4))
    others = _sgd([("param_groups[1]['params'][0]", p) for p in twins[1:2]], **MODES[mode])
    for step in range(2, 4):
        _give(twins, step, 3)
        others.step()
    if mode != "stochastic":  # its numbers depend on the name
        assert torch.equal(params[1], twins[1])


@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
@pytest.mark.parametrize("mode", ["kahan", "stochastic", "split8", "split16", "master"])
def test_weights_assigned_later(mode: str, lowering: str) -> None:
    """Parts appear with the next step."""
    params = _parameters()
    optimizer = _sgd(params, lowering=lowering)
    _train(params, optimizer, range(2), absent=0)
    before = _stored(params, optimizer)
    optimizer.param_groups[0]["weights"] = mode
    _train(params, optimizer, range(2, 3), absent=0)
    parts = {"kahan": "kahan_comp", "stochastic": "step", "master": "master_param"}
    assert all(parts.get(mode, "remainder") in optimizer.state[p] for p in params if p.numel() >= 4096)
    expected = before["0.param"].float() - 2**-7 * (0.5 * before["0.momentum_buffer"].float() + params[0].grad.float())
    torch.testing.assert_close(params[0].detach().float(), expected, rtol=2**-7, atol=0)


def test_a_bad_choice_assigned_later_changes_nothing() -> None:
    params = [("a", nn.Parameter(torch.ones(64, 64)))]
    optimizer = _sgd(params)
    for entry, value in (("weights", "split8"), ("weights", "plenty"), ("state_dtype", torch.int8), ("exclude", "a")):
        with pytest.raises((ValueError, TypeError), match=entry):
            optimizer.param_groups[0][entry] = value
        assert optimizer.param_groups[0].get(entry) in (None, ())


class Hollow(Tensor):
    """A tensor around another, without memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Hollow:
        made: Hollow = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(x: Any) -> Any:
            return x.inner if isinstance(x, Hollow) else x

        out = func(*torch.utils._pytree.tree_map(bare, args), **torch.utils._pytree.tree_map(bare, kwargs or {}))
        if func in (torch.ops.aten.detach.default, torch.ops.aten.zeros_like.default, torch.ops.aten.empty_like.default):
            return Hollow(out)
        return args[0] if func is torch.ops.aten.copy_.default else out


@pytest.mark.parametrize("mode", MODES)
def test_parameters_without_memory_of_their_own(mode: str) -> None:
    param = nn.Parameter(Hollow(torch.ones(64, 64, dtype=torch.bfloat16)))
    options = {"lowering": "eager", **MODES[mode]}
    if mode not in ("kahan", "split16"):
        with pytest.raises(ValueError, match=r"can't optimize 'hollow' .*no memory of its own; name it in exclude="):
            _sgd([("hollow", param)], **options)
        options["exclude"] = ("hollow",)
    optimizer = _sgd([("hollow", param)], **options)
    param.grad = torch.ones(64, 64, dtype=torch.bfloat16)
    optimizer.step()
    assert (param.inner < 1).all()


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("mode", MODES)
def test_meta_parameters(mode: str, lowering: str) -> None:
    """There is nothing to compute: shapes and dtypes are as elsewhere."""
    params = [nn.Parameter(p.detach().to("meta")) for p in _parameters()]
    optimizer = _sgd(params, lowering=lowering, **MODES[mode])
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step()
    real = _parameters()
    twin = _sgd(real, **MODES[mode])
    _train(real, twin, range(1), absent=0)
    for p, r in zip(params, real, strict=True):
        shapes = [{n: (e.shape, e.dtype) for n, e in o.state[x].items()} for o, x in ((optimizer, p), (twin, r))]
        assert shapes[0] == shapes[1]
        assert all(entry.is_meta for name, entry in optimizer.state[p].items() if name != "step")


@pytest.mark.parametrize("mode", MODES)
def test_lazy_parameters(mode: str) -> None:
    model = nn.LazyLinear(64, bias=False, dtype=torch.bfloat16)
    optimizer = _sgd(model.named_parameters(), **MODES[mode])
    optimizer.step()
    model(torch.ones(1, 80, dtype=torch.bfloat16)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert len(optimizer.state[model.weight]) > (1 if mode == "stochastic" else 2)
    assert not torch.equal(model.weight, before)


@pytest.mark.filterwarnings("ignore:.*share memory with other parameters:RuntimeWarning")
@pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_share_memory(mode: str, lowering: str) -> None:
    """They are updated one after the other, each from what the one before left."""
    results = []
    for together in (True, False):
        memory = _parameters()[0].detach()
        params = [nn.Parameter(memory), nn.Parameter(memory.view(-1)), nn.Parameter(memory[:80])]
        named = list(zip("abc", params, strict=True))
        parts = [named] if together else [[pair] for pair in named]
        optimizers = [_sgd(part, lowering=lowering, **MODES[mode]) for part in parts]
        for step in range(2):
            _give(params, step)
            for optimizer in optimizers:
                optimizer.step()
        results.append(memory)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (lambda: torch.ones(64, 64, dtype=torch.bfloat16), {"weights": "kahan", "differentiable": True}, "differentiable"),
        (lambda: torch.ones(64, 64), {"state_dtype": torch.bfloat16, "differentiable": True}, "differentiable"),
        (lambda: torch.ones(64, 64, dtype=torch.complex64), {"state_dtype": "int8"}, "is for real parameters; 'w'"),
        (
            lambda: torch.ones(64, 64, dtype=torch.complex64),
            {"weights": "split8"},
            "bfloat16 or float16; 'w' is torch.complex64",
        ),
        (lambda: torch.ones(64, 64), {"weights": "split8"}, "bfloat16 or float16; 'w' is torch.float32"),
        (
            lambda: torch.ones(64, 64, dtype=torch.float64),
            {"weights": "master"},
            "bfloat16 or float16; 'w' is torch.float64",
        ),
        (
            lambda: torch.ones(64, 64, dtype=torch.float64),
            {"state_dtype": "int8"},
            "float64; 'w' is one: name it in exclude=",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(made: Callable[[], Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _sgd([("w", nn.Parameter(made()))], **options)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_what_is_excluded_is_updated_as_ever(dtype: torch.dtype, lowering: str) -> None:
    params, twins = ([nn.Parameter(torch.ones(70, 70, dtype=dtype)) for _ in range(2)] for _ in range(2))
    options = {"lr": 0.1, "momentum": 0.9}
    optimizer = co.SGD([("w", params[0])], lowering=lowering, state_dtype="int8", kahan_sum=None, exclude=("w",), **options)
    theirs = torch.optim.SGD(twins[:1], **options)
    for step in range(3):
        _give(params, step)
        _give(twins, step)
        optimizer.step()
        theirs.step()
    torch.testing.assert_close(params[0], twins[0])


def test_150_steps_in_fewer_bytes_are_those_of_float32() -> None:
    """Whose loss bfloat16 alone misses by some percent."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, 64, generator=generator) for rows in (256, 64))
    target = (x @ y / 8).sin()

    def loss_after(kind: Any, dtype: torch.dtype, **options: Any) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(dtype)
        optimizer = kind(model.named_parameters(), lr=3e-4, **options)
        for _ in range(150):
            optimizer.zero_grad()
            loss = (model(x.to(dtype)).float() - target).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    wanted = loss_after(co.AdamW, torch.float32)
    assert loss_after(torch.optim.AdamW, torch.bfloat16) > 1.02 * wanted
    for options in ({"weights": "split8", "state_dtype": "int8"}, {"weights": "kahan"}, {"weights": "stochastic"}):
        assert abs(loss_after(co.AdamW, torch.bfloat16, **options) / wanted - 1) < 0.01
