"""Two processes with gloo: shards, steps compiled with them, and torch.distributed.checkpoint in every form torch has."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import two_processes
from catalog import ruled, stacked
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import compiled_optim as co
from compiled_optim.lowering import stack_code

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


class Model(nn.Module):
    """Tied embeddings, 7 rows and 3 features over two processes: uneven shards, and an empty one for ``out``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.mid = nn.Linear(3, 3)
        self.out = nn.Linear(3, 1)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.mid(self.embed(tokens))
        return self.head(hidden).square().mean() + self.out(hidden).mean()


def _build(sharded: bool = True) -> Model:
    torch.manual_seed(0)
    model = Model()
    return fully_shard(model) if sharded else model


def _adamw(model: nn.Module, **options: Any) -> co.AdamW:
    return co.AdamW(model.named_parameters(remove_duplicate=False), lr=0.01, **options)


def _sgd(model: nn.Module, kind: Any = co.SGD) -> torch.optim.Optimizer:
    """One group with momentum, one without any state tensor."""
    named = dict(model.named_parameters())
    stateless = {"params": [(n, p) for n, p in named.items() if n.startswith("out")], "momentum": 0.0}
    rest = {"params": [(n, p) for n, p in named.items() if not n.startswith("out")], "momentum": 0.9}
    return kind([rest, stateless], lr=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        model(torch.randint(7, (9,), generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _twin(model: nn.Module) -> Model:
    """Another model of the same weights."""
    twin = _build()
    twin.load_state_dict(model.state_dict())
    return twin


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters, state and numbers by name, whole and detached."""
    state = co.named_state_dict(optimizer)
    names = [n for g in optimizer.param_groups for n in g["param_names"]]
    params = [p for g in optimizer.param_groups for p in g["params"]]
    return {
        "params": {n: _full(p.detach()).clone() for n, p in zip(names, params, strict=True)},
        "state": {n: {k: _full(v).clone() for k, v in s.items()} for n, s in state["state"].items()},
        "hyperparameters": optimizer.hyperparameters(),
    }


def _assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _assert_same(a[key], b[key])
    else:
        assert a == b


def sharded_steps_equal_unsharded_ones(directory: Path) -> None:
    for lowering in ("auto", "inductor", "eager"):
        sharded, whole = _build(), _build(sharded=False)
        ours, theirs = _adamw(sharded, lowering=lowering), torch.optim.AdamW(whole.named_parameters(), lr=0.01)
        _train(sharded, ours, 5)
        _train(whole, theirs, 5)
        for (name, param), reference in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            assert torch.allclose(_full(param), reference, atol=1e-6), (lowering, name)
            for key in ("exp_avg", "exp_avg_sq"):
                buffer = ours.state[param][key]
                assert buffer.placements == param.placements
                assert torch.allclose(_full(buffer), theirs.state[reference][key], atol=1e-7), (lowering, name, key)


def means_are_those_of_whole_parameters(directory: Path) -> None:
    """The share of elements that move, or the mean of squares; each process sees some of the elements."""
    kinds = ((co.AdamW, True), (co.StableAdamW, False), (co.StableAdamW, True), (co.LAMB, False), (co.Prodigy, False))
    kinds += ((co.MARS, False),)
    for kind, cautious in kinds:
        options = {"lr": 0.01, "betas": (0.8, 0.6), "eps": 1e-4, "weight_decay": 0.5}
        options |= {"lr": 0.9, "d0": 0.02} if kind is co.Prodigy else {"gamma": 9.0} if kind is co.MARS else {}

        def trained(sharded: bool, kind: Any = kind, options: Any = options, **more: Any) -> Model:
            model = _build(sharded)
            _train(model, kind(model.named_parameters(), **options, **more), 5)
            return model

        whole, plain = trained(False, lowering="eager", cautious=cautious), trained(False)
        for lowering in ("auto", "inductor", "eager"):
            sharded = trained(True, lowering=lowering, cautious=cautious)
            for (name, param), reference in zip(sharded.named_parameters(), whole.parameters(), strict=True):
                assert torch.allclose(_full(param), reference, atol=1e-6), (kind, lowering, name)
        assert not cautious or not torch.allclose(whole.embed.weight, plain.embed.weight, atol=1e-4)


def shards_are_viewed_as_whole_parameters(directory: Path) -> None:
    options = {"lr": 0.05, "betas": (0.6, 0.8), "eps": 1e-4, "weight_decay": 0.5}
    whole = _build(sharded=False)
    reference = co.AdamWScheduleFree(whole.named_parameters(), lowering="eager", **options)
    _train(whole, reference, 5)
    trained = [p.detach().clone() for p in whole.parameters()]
    reference.eval()
    for lowering in ("auto", "inductor", "eager"):
        sharded = _build(sharded=True)
        optimizer = co.AdamWScheduleFree(sharded.named_parameters(), lowering=lowering, **options)
        _train(sharded, optimizer, 5)
        for change, expected in ((optimizer.eval, list(whole.parameters())), (optimizer.train, trained)):
            change()
            for (name, param), other in zip(sharded.named_parameters(), expected, strict=True):
                assert torch.allclose(_full(param), other, atol=1e-6), (lowering, name)


def replicas_step_as_torchs(directory: Path) -> None:
    """DistributedDataParallel: gradients of their own or in its buckets, where most are unaligned, and accumulation."""
    for lowering, in_buckets, set_to_none in itertools.product(("auto", "inductor"), (False, True), (False, True)):
        ours, theirs = (DistributedDataParallel(_build(sharded=False), gradient_as_bucket_view=in_buckets) for _ in range(2))
        optimizer = _adamw(ours.module, lowering=lowering, max_grad_norm=0.05)
        reference = torch.optim.AdamW(theirs.module.parameters(), lr=0.01)
        for step in range(5):
            batches = [
                torch.randint(7, (9,), generator=torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank()))
                for part in range(2)
            ]
            for model in (ours, theirs):
                with model.no_sync():
                    model(batches[0]).backward()
                model(batches[1]).backward()
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
            optimizer.step()
            reference.step()
            assert torch.allclose(optimizer.grad_norm, norm.double(), rtol=1e-6)
            optimizer.zero_grad(set_to_none)
            reference.zero_grad(set_to_none)
        for (name, param), other in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
            assert torch.allclose(param, other, atol=1e-6), (lowering, in_buckets, set_to_none, name)
            copies = [torch.empty_like(param) for _ in range(2)]
            dist.all_gather(copies, param.detach())
            assert torch.equal(*copies), (lowering, in_buckets, set_to_none, name)


def the_norm_is_that_of_all_shards(directory: Path) -> None:
    for lowering in ("auto", "inductor", "eager"):
        sharded, whole = _build(), _build(sharded=False)
        ours = _adamw(sharded, lowering=lowering, max_grad_norm=0.05)
        theirs = torch.optim.AdamW(whole.named_parameters(), lr=0.01)
        for step in range(3):
            for model in (sharded, whole):
                model(torch.randint(7, (9,), generator=torch.Generator().manual_seed(step))).backward()
            if step == 1:  # a process alone may have nothing to add
                sharded.mid.weight.grad = whole.mid.weight.grad = None
            norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
            ours.step()
            theirs.step()
            assert torch.allclose(ours.grad_norm, norm.double(), rtol=1e-6), (lowering, step)
            ours.zero_grad()
            theirs.zero_grad()
        for (name, param), reference in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            assert torch.allclose(_full(param), reference, atol=1e-6), (lowering, name)


def a_nonfinite_gradient_of_one_process_skips_the_step_of_all(directory: Path) -> None:
    model = _build()
    optimizer = _adamw(model, skip_nonfinite=True)
    _train(model, optimizer, 1)
    before = _snapshot(optimizer)
    model(torch.arange(7)).backward()
    if dist.get_rank() == 0:
        model.embed.weight.grad.to_local().fill_(float("nan"))
    optimizer.step()
    _assert_same(_snapshot(optimizer), before)
    assert optimizer.skipped_steps.item() == 1


def a_step_takes_gradients_of_other_placements(directory: Path) -> None:
    model = _build()
    optimizer, twin_model = _adamw(model), _build()
    twin = _adamw(twin_model)
    for value, (param, other) in enumerate(zip(model.parameters(), twin_model.parameters(), strict=True)):
        param.grad = torch.full_like(param, value)
        other.grad = torch.full_like(other, value).redistribute(placements=[Replicate()])
    optimizer.step()
    twin.step()
    _assert_same(_snapshot(optimizer), _snapshot(twin))


def compiled_steps_on_shards_equal_others(directory: Path) -> None:
    """Of the same sharding: with a scheduler, clipping, an absent gradient, and gradients of other layouts."""
    for backend, spread in (("eager", [Replicate()]), ("aot_eager", [Shard(0)])):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        models = [_build() for _ in range(3)]
        compiled, uncompiled = (_adamw(model, max_grad_norm=0.05, skip_nonfinite=True) for model in models[:2])
        stock = torch.optim.AdamW(models[2].parameters(), lr=0.01)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (compiled, uncompiled, stock)]
        sides = [(compiled, torch.compile(compiled.step, backend=counter, fullgraph=True))]
        sides += [(uncompiled, uncompiled.step), (stock, stock.step)]
        norms = []
        for index in range(6):
            for model, (_, step) in zip(models, sides, strict=True):
                model(torch.randint(7, (9,), generator=torch.Generator().manual_seed(index))).backward()
                grad = model.mid.weight.grad
                columns_first = grad.to_local().mT.contiguous().mT
                model.mid.weight.grad = DTensor.from_local(
                    columns_first, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape, stride=grad.stride()
                )
                if index > 3:
                    model.mid.weight.grad = None
                model.embed.weight.grad = model.embed.weight.grad.redistribute(placements=spread)
                if model is models[2]:
                    model.embed.weight.grad = model.embed.weight.grad.redistribute(placements=[Shard(0)])
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor())
                step()
                model.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            assert compiled.grad_norm == uncompiled.grad_norm
            assert torch.allclose(compiled.grad_norm, norms[-1].double(), rtol=1e-6)
        assert counter.frame_count == 2  # the second one without a gradient
        _assert_same(_snapshot(compiled), _snapshot(uncompiled))
        for param, reference in zip(models[0].parameters(), models[2].parameters(), strict=True):
            assert torch.allclose(_full(param), _full(reference), atol=1e-6), backend

        models[0](torch.arange(7)).backward()
        if dist.get_rank() == 0:
            models[0].embed.weight.grad.to_local().fill_(float("nan"))
        before = _snapshot(compiled)
        sides[0][1]()
        _assert_same(_snapshot(compiled), before)
        assert compiled.skipped_steps.item() == 1


def a_step_on_shards_compiles_with_inductor(directory: Path) -> None:
    torch._dynamo.reset()
    models = [fully_shard(copy.deepcopy(model)) for model in [nn.Linear(3, 3)] * 2]
    optimizers = [co.AdamW(model.named_parameters()) for model in models]
    steps = [torch.compile(optimizers[0].step, fullgraph=True), optimizers[1].step]
    for index, (model, step) in itertools.product(range(2), zip(models, steps, strict=True)):
        (index + model(torch.ones(1, 3))).square().sum().backward()
        step()
        model.zero_grad()
    _assert_same(*map(_snapshot, optimizers))


def _tensor_parallel() -> nn.Module:
    """Linear layers in two parts, and a norm that is whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4))
    return parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def a_training_step_compiled_whole_equals_torchs_where_some_parameters_are_split(directory: Path) -> None:
    torch._dynamo.reset()
    ours, theirs = _tensor_parallel(), _tensor_parallel()
    assert {type(p.data) for p in ours.parameters()} == {DTensor, torch.Tensor}
    optimizer, reference = _adamw(ours), torch.optim.AdamW(theirs.parameters(), lr=0.01)
    optimizer.schedule(lr=lambda step: 0.01 * 0.5**step)
    counter = CompileCounterWithBackend("aot_eager")

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(train_step, backend=counter, fullgraph=True)
        for step in range(4):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            reference.param_groups[0]["lr"] = 0.01 * 0.5 ** (step + 1)
            loss = compiled(ours, optimizer, x)
            assert torch.allclose(loss, train_step(theirs, reference, x), atol=1e-6)
    assert counter.frame_count == 1
    for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(_full(param), _full(other), atol=1e-6)


def _matrices(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, param) for name, param in model.named_parameters() if param.dim() == 2]


def every_optimizer_of_dense_gradients_steps_compiled(directory: Path) -> None:
    for kind in (*ruled("dense"), *stacked()):
        torch._dynamo.reset()
        weight = torch.linspace(-1, 1, 9).view(3, 3)
        models = [nn.Linear(3, 3, bias=False) for _ in range(2)]
        for model in models:
            model.load_state_dict({"weight": weight})
            fully_shard(model)
        optimizers = [kind(model.parameters(), lr=0.01, lowering="eager") for model in models]
        steps = [torch.compile(optimizers[0].step, backend="eager", fullgraph=True), optimizers[1].step]
        for index, (model, step) in itertools.product(range(2), zip(models, steps, strict=True)):
            (index + model(torch.ones(1, 3))).square().sum().backward()
            step()
            model.zero_grad()
        assert optimizers[0].state[next(models[0].parameters())]["step"] == 2
        whole = [_full(next(model.parameters())) for model in models]
        assert torch.equal(*whole)
        assert not torch.equal(whole[0], weight)


def rules_on_whole_tensors_step_shards_as_whole_ones(directory: Path) -> None:
    """Rows that do not divide evenly, parts without elements, columns that are split, and clipping."""
    halves = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    # Inductor's kernels take seconds each, and are the same as of whole tensors.
    uncompiled = pytest.MonkeyPatch()
    uncompiled.setattr(stack_code, "_make", stack_code._uncompiled)
    for kind, lowering in itertools.product(stacked(), ("eager", "auto")):
        sharded, whole = _build(), _build(sharded=False)
        options = {"lr": 0.05, "lowering": lowering, "max_grad_norm": 0.02, "skip_nonfinite": True}
        ours, theirs = kind(_matrices(sharded), **options), kind(_matrices(whole), **options)
        for step in range(4):
            for model, optimizer in ((sharded, ours), (whole, theirs)):
                model(torch.randint(7, (9,), generator=torch.Generator().manual_seed(step))).backward()
                if step == 1:
                    model.mid.weight.grad = None
                optimizer.step()
                model.zero_grad()
            assert torch.allclose(ours.grad_norm, theirs.grad_norm, rtol=1e-6)
        for (name, param), (_, reference) in zip(_matrices(sharded), _matrices(whole), strict=True):
            assert torch.allclose(_full(param), reference, atol=1e-6), (kind, lowering, name)
            for key, entry in ours.state[param].items():
                assert torch.allclose(_full(entry), theirs.state[reference][key], atol=1e-7), (kind, lowering, name, key)
                assert key != "momentum_buffer" or entry.placements == param.placements

        options |= {"max_grad_norm": None, "skip_nonfinite": False}
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
        split = parallelize_module(copy.deepcopy(plain), init_device_mesh("cpu", (2,)), halves)
        optimizers = [kind(model.parameters(), **options) for model in (plain, split)]
        for (model, optimizer), step in itertools.product(zip((plain, split), optimizers, strict=True), range(3)):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            (model(x) * x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for param, reference in zip(split.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(_full(param), reference, atol=1e-5), (kind, lowering)
    uncompiled.undo()


def muon_steps_as_torchs_does_on_the_same_shards(directory: Path) -> None:
    """torch.optim.Muon needs at least as many rows as there are processes."""
    sides = []
    for kind, options in ((co.Muon, {"lowering": "eager"}), (torch.optim.Muon, {})):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(3, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)))
        optimizer = kind(model.parameters(), lr=0.05, adjust_lr_fn="match_rms_adamw", **options)
        for step in range(3):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            (model(x) * x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sides.append((model, optimizer))
    for param, reference in zip(*(model.parameters() for model, _ in sides), strict=True):
        pairs = zip(sides, (param, reference), strict=True)
        momenta = [optimizer.state[p]["momentum_buffer"] for (_, optimizer), p in pairs]
        assert torch.allclose(*map(_full, momenta), atol=1e-4)
        assert torch.allclose(_full(param), _full(reference), atol=3e-3)  # bfloat16, where our iteration rounds elsewhere


def checkpoints_of_rules_on_whole_tensors_resume(directory: Path) -> None:
    for kind, flatten in itertools.product(stacked(), (False, True)):

        def make(model: nn.Module, kind: Any = kind) -> torch.optim.Optimizer:
            return kind(_matrices(model), lr=0.05, lowering="eager")

        model = _build()
        optimizer = make(model)
        _train(model, optimizer, 2)
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        path = directory / f"{kind.__name__}-{flatten}"
        dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=path)
        fresh = _twin(model)
        resumed = make(fresh)
        target = get_optimizer_state_dict(fresh, resumed, options=options)
        dcp.load(target, checkpoint_id=path)
        set_optimizer_state_dict(fresh, resumed, target, options=options)
        _assert_same(_snapshot(resumed), _snapshot(optimizer))
        full = StateDictOptions(full_state_dict=True)
        other = make(_twin(model))
        co.load_named_state_dict(other, co.named_state_dict(optimizer))
        _assert_same(_snapshot(other), _snapshot(optimizer))
        if not flatten:
            fresh, resumed = _round_trip(make, model, optimizer, full)
            _assert_same(_snapshot(resumed), _snapshot(optimizer))
        model.zero_grad()
        for each_model, each in ((model, optimizer), (fresh, resumed)):
            _train(each_model, each, 2, first=2)
        _assert_same(_snapshot(resumed), _snapshot(optimizer))


def what_cannot_be_sharded_is_refused_by_name(directory: Path) -> None:
    model = _build()
    for kind in (co.LBFGS, co.SparseAdam):
        with pytest.raises(ValueError, match=rf"{kind.__name__} does not support DTensors; 'embed\.weight' is one; use an"):
            kind(model.named_parameters())


def shards_that_replace_parameters_leave_no_whole_state(directory: Path) -> None:
    """As in Accelerate, which puts single elements into the groups of a fresh optimizer, shards, and puts in the shards."""
    model, twin_model = _build(sharded=False), _build()
    optimizer, twin = _adamw(model, max_grad_norm=0.05), _adamw(twin_model, max_grad_norm=0.05)
    group = optimizer.param_groups[0]
    optimizer.load_state_dict(optimizer.state_dict())
    names = {id(param): name for name, param in model.named_parameters()}
    order = [names[id(param)] for param in group["params"]]
    for index in range(len(order)):
        group["params"][index] = torch.empty(1)
    fully_shard(model)
    params = dict(model.named_parameters())
    group["params"] = [params[name] for name in order]
    _train(model, optimizer, 2)
    _train(twin_model, twin, 2)
    assert set(optimizer.state) == set(model.parameters())
    _assert_same(_snapshot(optimizer), _snapshot(twin))


def compiled_replicas_step_as_torchs(directory: Path) -> None:
    torch._dynamo.reset()
    ours, theirs = (DistributedDataParallel(_build(sharded=False)) for _ in range(2))
    optimizer, reference = _adamw(ours.module), torch.optim.AdamW(theirs.module.parameters(), lr=0.01)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(optimizer.step, backend=counter, fullgraph=True)
    for index in range(3):
        for model in (ours, theirs):
            model(torch.randint(7, (9,), generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))).backward()
        step()
        reference.step()
        for each in (optimizer, reference):
            each.zero_grad()
            each.param_groups[0]["lr"] = each.param_groups[0]["lr"] * 0.5
    assert counter.frame_count == 1
    for param, other in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        assert torch.allclose(param, other, atol=1e-6)


def state_that_each_process_has_a_part_of_steps_as_torchs(directory: Path) -> None:
    """ZeroRedundancyOptimizer gives each process some of the parameters to update."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of what it imports itself

    models = [DistributedDataParallel(_build(sharded=False)) for _ in range(2)]
    kinds = (co.AdamW, torch.optim.AdamW)
    for model, kind in zip(models, kinds, strict=True):
        _train(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=0.01), 3)
    for param, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(param, other, atol=1e-6)


def asking_a_fresh_optimizer_for_its_state_changes_nothing(directory: Path) -> None:
    for make, flatten in itertools.product((_adamw, _sgd), (False, True)):
        asked_model, model = _build(), _build()
        asked, optimizer = make(asked_model), make(model)
        get_optimizer_state_dict(asked_model, asked, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
        _assert_same(_snapshot(asked), _snapshot(optimizer))
        assert all(entries["step"] == 0 for entries in asked.state.values())
        _train(asked_model, asked, 1)
        _train(model, optimizer, 1)
        _assert_same(_snapshot(asked), _snapshot(optimizer))


def _options() -> list[StateDictOptions]:
    switches = itertools.product((False, True), repeat=5)
    return [
        StateDictOptions(
            full_state_dict=full,
            cpu_offload=offload,
            flatten_optimizer_state_dict=flatten,
            broadcast_from_rank0=broadcast,
            strict=strict,
        )
        for full, offload, flatten, broadcast, strict in switches
        # Offloading a full state dict leaves it on rank 0 alone, from where it has to be broadcast.
        if broadcast == (full and offload) or (full and broadcast)
    ]


def _round_trip(make: Any, model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> Any:
    """A fresh model and optimizer with the weights and state of ``model`` and ``optimizer``."""
    saved = get_optimizer_state_dict(model, optimizer, options=copy.copy(options))
    if options.broadcast_from_rank0 and dist.get_rank() != 0:
        saved = {}
    fresh = _twin(model)
    resumed = make(fresh)
    set_optimizer_state_dict(fresh, resumed, saved, options=copy.copy(options))
    return fresh, resumed


def every_option_that_works_for_torch_works(directory: Path) -> None:
    reference_model = _build()
    stock = torch.optim.AdamW(reference_model.named_parameters(), lr=0.01)
    _train(reference_model, stock, 2)
    worked = 0
    for options in _options():
        try:
            _round_trip(lambda m: torch.optim.AdamW(m.named_parameters(), lr=0.5), reference_model, stock, options)
        except KeyError:
            assert options.full_state_dict, options
            assert options.flatten_optimizer_state_dict, options
            continue
        worked += 1
        for make in (_adamw, _sgd):
            model = _build()
            optimizer = make(model)
            _train(model, optimizer, 2)
            fresh, resumed = _round_trip(make, model, optimizer, options)
            _assert_same(_snapshot(resumed), _snapshot(optimizer))
            _train(model, optimizer, 2, first=2)
            _train(fresh, resumed, 2, first=2)
            _assert_same(_snapshot(resumed), _snapshot(optimizer))
    assert worked >= 8


def checkpoints_of_torch_optim_load_both_ways(directory: Path) -> None:
    for make_ours, make_theirs in (
        (_adamw, lambda m: torch.optim.AdamW(m.named_parameters(), lr=0.01)),
        (_sgd, lambda m: _sgd(m, torch.optim.SGD)),
    ):
        model = _build()
        theirs = make_theirs(model)
        _train(model, theirs, 2)
        options = StateDictOptions(strict=False)  # torch's strict refuses its own SGD without momentum
        fresh = _twin(model)
        ours = make_ours(fresh)
        set_optimizer_state_dict(fresh, ours, get_optimizer_state_dict(model, theirs, options=options), options=options)
        back_model = _twin(model)
        back = make_theirs(back_model)
        saved = copy.deepcopy(
            get_optimizer_state_dict(fresh, ours, options=options)
        )  # torch.optim keeps the tensors it is given
        set_optimizer_state_dict(back_model, back, saved, options=options)
        for each_model, each in ((model, theirs), (fresh, ours), (back_model, back)):
            _train(each_model, each, 3, first=2)
        for a, b, c in zip(model.parameters(), fresh.parameters(), back_model.parameters(), strict=True):
            assert torch.allclose(_full(a), _full(b), atol=1e-6)
            assert torch.allclose(_full(a), _full(c), atol=1e-6)


def frozen_state_survives(directory: Path) -> None:
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        model = _build()
        optimizer = _adamw(model)
        _train(model, optimizer, 2)
        model.mid.requires_grad_(False)
        _train(model, optimizer, 2, first=2)
        path = directory / f"frozen-{flatten}"
        dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=path)
        fresh = _twin(model)
        resumed = _adamw(fresh)
        fresh.mid.requires_grad_(False)
        target = get_optimizer_state_dict(fresh, resumed, options=options)
        dcp.load(target, checkpoint_id=path)
        set_optimizer_state_dict(fresh, resumed, target, options=options)
        _assert_same(_snapshot(resumed), _snapshot(optimizer))
        assert resumed.state[fresh.mid.weight]["step"] == 2
        for each_model, each in ((model, optimizer), (fresh, resumed)):
            each_model.mid.requires_grad_(True)
            _train(each_model, each, 2, first=4)
        _assert_same(_snapshot(resumed), _snapshot(optimizer))


def whole_tensors_load_into_shards(directory: Path) -> None:
    """What one process saved with ``torch.save`` loads into shards, and by name under the embedding's other name."""
    for file, load in (("whole.pt", co.SGD.load_state_dict), ("whole-named.pt", co.load_named_state_dict)):
        model = _build()
        optimizer = _sgd(model)
        load(optimizer, torch.load(directory / file, weights_only=True))
        _assert_same(_snapshot(optimizer)["state"], torch.load(directory / "whole-expected.pt"))


def shards_of_the_optimizer_itself_load_in_another_place(directory: Path) -> None:
    model = _build()
    optimizer = _adamw(model)
    _train(model, optimizer, 2)
    before = _snapshot(optimizer)["state"]
    saved = co.named_state_dict(optimizer)
    for entries in saved["state"].values():
        entries["exp_avg"], entries["exp_avg_sq"] = entries["exp_avg_sq"], entries["exp_avg"]
    co.load_named_state_dict(optimizer, saved)
    for name, entries in _snapshot(optimizer)["state"].items():
        assert torch.equal(entries["exp_avg"], before[name]["exp_avg_sq"]), name
        assert torch.equal(entries["exp_avg_sq"], before[name]["exp_avg"]), name


def a_shard_without_memory_is_refused(directory: Path) -> None:
    model = _build()
    optimizer = _adamw(model)
    _train(model, optimizer, 2)
    before = _snapshot(optimizer)
    saved = co.named_state_dict(optimizer)
    saved["param_groups"][0]["lr"] = 0.7
    lost = saved["state"]["mid.weight"]["exp_avg"] = saved["state"]["mid.weight"]["exp_avg"].clone()
    lost.to_local().untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"mid\.weight: exp_avg has no memory"):
        co.load_named_state_dict(optimizer, saved)
    _assert_same(_snapshot(optimizer), before)


def a_part_of_another_shape_is_refused(directory: Path) -> None:
    """It says that it is a part of a tensor of the right shape."""
    model, unsharded = _build(), _build(sharded=False)
    optimizer, plain = _adamw(model), _adamw(unsharded)
    _train(model, optimizer, 2)
    _train(unsharded, plain, 2)
    whole = optimizer.state[model.mid.weight]["exp_avg"]
    flat, square = whole.device_mesh, init_device_mesh("cpu", (2, 1))
    for mesh, placements in ((flat, [Shard(0)]), (flat, [Replicate()]), (square, [Shard(0), Replicate()])):
        part = DTensor.from_local(
            torch.ones(1, 1), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        for each in (optimizer, plain):
            before = _snapshot(each)
            saved = co.named_state_dict(each)
            saved["param_groups"][0]["lr"] = 0.7
            saved["state"]["mid.weight"]["exp_avg"] = part
            with pytest.raises(
                ValueError, match=r"mid\.weight: exp_avg has a part of shape \(1, 1\) on this process instead"
            ):
                co.load_named_state_dict(each, saved)
            _assert_same(_snapshot(each), before)


def saved_on_one_process_and_loaded_on_two(directory: Path) -> None:
    model = _build()
    optimizer = _adamw(model)
    state = co.named_state_dict(optimizer)
    dcp.load(state, checkpoint_id=directory / "one")
    report = co.load_named_state_dict(optimizer, state)
    assert not any(report)
    _assert_same(_snapshot(optimizer)["state"], torch.load(directory / "one-expected.pt"))


def saved_on_two_processes_for_one(directory: Path) -> None:
    model = _build()
    optimizer = _adamw(model)
    _train(model, optimizer, 3)
    dcp.save(co.named_state_dict(optimizer), checkpoint_id=directory / "two-named")
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=directory / f"two-{flatten}")
    expected = _snapshot(optimizer)["state"]
    if dist.get_rank() == 0:
        torch.save(expected, directory / "two-expected.pt")


CHECKS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        sharded_steps_equal_unsharded_ones,
        means_are_those_of_whole_parameters,
        shards_are_viewed_as_whole_parameters,
        replicas_step_as_torchs,
        the_norm_is_that_of_all_shards,
        a_nonfinite_gradient_of_one_process_skips_the_step_of_all,
        a_step_takes_gradients_of_other_placements,
        compiled_steps_on_shards_equal_others,
        a_step_on_shards_compiles_with_inductor,
        a_training_step_compiled_whole_equals_torchs_where_some_parameters_are_split,
        every_optimizer_of_dense_gradients_steps_compiled,
        rules_on_whole_tensors_step_shards_as_whole_ones,
        muon_steps_as_torchs_does_on_the_same_shards,
        checkpoints_of_rules_on_whole_tensors_resume,
        what_cannot_be_sharded_is_refused_by_name,
        shards_that_replace_parameters_leave_no_whole_state,
        compiled_replicas_step_as_torchs,
        state_that_each_process_has_a_part_of_steps_as_torchs,
        asking_a_fresh_optimizer_for_its_state_changes_nothing,
        every_option_that_works_for_torch_works,
        checkpoints_of_torch_optim_load_both_ways,
        frozen_state_survives,
        whole_tensors_load_into_shards,
        shards_of_the_optimizer_itself_load_in_another_place,
        a_shard_without_memory_is_refused,
        a_part_of_another_shape_is_refused,
        saved_on_one_process_and_loaded_on_two,
        saved_on_two_processes_for_one,
    )
}


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both processes have run the checks, after one process wrote what they load."""
    directory = tmp_path_factory.mktemp("distributed")
    model = _build(sharded=False)
    optimizer = _adamw(model)
    _train(model, optimizer, 3)
    dcp.save(co.named_state_dict(optimizer), checkpoint_id=directory / "one", no_dist=True)
    torch.save(_snapshot(optimizer)["state"], directory / "one-expected.pt")
    model = _build(sharded=False)
    sgd = _sgd(model)
    _train(model, sgd, 3)
    torch.save(sgd.state_dict(), directory / "whole.pt")
    torch.save(co.named_state_dict(sgd), directory / "whole-named.pt")
    torch.save(_snapshot(sgd)["state"], directory / "whole-expected.pt")
    two_processes.run(CHECKS, request, directory)
    return directory


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_processes(check: str, directory: Path) -> None:
    two_processes.passed(check, directory)


@pytest.mark.full
@pytest.mark.parametrize("form", ["named", "False", "True"])
@pytest.mark.parametrize("check", ["saved_on_two_processes_for_one"])
def test_saved_on_two_processes_and_loaded_on_one(check: str, form: str, directory: Path) -> None:
    model = _build(sharded=False)
    optimizer = _adamw(model)
    path = directory / f"two-{form}"
    if form == "named":
        state = co.named_state_dict(optimizer)
        dcp.load(state, checkpoint_id=path, no_dist=True)
        co.load_named_state_dict(optimizer, state)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=form == "True")
        state = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.load(state, checkpoint_id=path, no_dist=True)
        set_optimizer_state_dict(model, optimizer, state, options=options)
    _assert_same(_snapshot(optimizer)["state"], torch.load(directory / "two-expected.pt"))
