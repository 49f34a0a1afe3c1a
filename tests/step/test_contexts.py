"""Optimizers of meta, fake and inference tensors, under another default device, and made in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from catalog import LOWERINGS, registry, required
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import compiled_optim as co

KINDS = registry()
PAIR = (torch.optim.AdamW, co.AdamW)
RULES = [kind for kind in KINDS if kind is not co.LBFGS]


def name_of(kind: type[Any]) -> str:
    return kind.__name__


def _gradient(param: torch.Tensor, kind: type[co.CompiledOptimizer]) -> None:
    param.grad = torch.ones_like(param)
    if kind._gradients == "sparse":
        param.grad = param.grad.to_sparse(1)


def _step(optimizer: Any, param: torch.Tensor, kind: type[co.CompiledOptimizer]) -> None:
    _gradient(param, kind)
    optimizer.step(*([lambda: torch.ones((), device="cpu")] if kind is co.LBFGS else []))


@pytest.fixture
def swapping() -> Iterator[None]:
    """Parameters keep their identity where a module moves."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
class TestMeta:
    @pytest.mark.parametrize("make_real", [lambda m: m.to_empty(device="cpu"), lambda m: m], ids=["to_empty", "stays"])
    @pytest.mark.parametrize("stepped", [False, True])
    def test_hyperparameters_are_kept(self, swapping: None, make_real: Callable[[Any], Any], stepped: bool) -> None:
        results = []
        for kind in PAIR:
            model = nn.Linear(2, 2, device="meta")
            optimizer = kind(model.parameters(), lr=0.5, weight_decay=0.25)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            if stepped:
                model(torch.ones(1, 2, device="meta")).sum().backward()
                optimizer.step()
            make_real(model)
            scheduler.step()
            optimizer.param_groups[0]["eps"] = 1e-3
            results.append((optimizer, model, scheduler))
        assert [float(o.param_groups[0][k]) for o, *_ in results for k in ("lr", "weight_decay", "eps")] == [
            0.25,
            0.25,
            1e-3,
        ] * 2
        if results[0][1].weight.is_meta:
            return
        for optimizer, model, _ in results:
            if stepped:  # torch.optim has meta tensors in its state now
                optimizer.state.clear()
            for param in model.parameters():
                nn.init.ones_(param)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        torch.testing.assert_close(results[1][1].weight, results[0][1].weight)
        assert results[1][0].hyperparameter("lr").device.type == "cpu"

    def test_state_of_meta_tensors_becomes_real(self, swapping: None) -> None:
        model = nn.Linear(2, 2, device="meta")
        optimizer = co.AdamW(model.parameters(), lr=0.5)
        model(torch.ones(1, 2, device="meta")).sum().backward()
        optimizer.step()
        model.to_empty(device="cpu")
        assert not optimizer.state[model.weight]["step"].is_meta
        optimizer.zero_grad()
        assert all(not v.is_meta for entries in optimizer.state_dict()["state"].values() for v in entries.values())

    @pytest.mark.parametrize("first", [False, True])
    @pytest.mark.parametrize("lowering", ["multi_tensor", "eager"])
    def test_beside_real_ones(self, first: bool, lowering: str) -> None:
        results = []
        for kind in PAIR:
            torch.manual_seed(0)
            model, away = nn.Linear(2, 2), nn.Linear(3, 3, device="meta")
            params = [*(away if first else model).parameters(), *(model if first else away).parameters()]
            optimizer = kind(params, lr=0.5, **({"lowering": lowering} if kind is co.AdamW else {}))
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            results.append((model.weight.detach(), optimizer.state_dict()))
            optimizer.load_state_dict(results[-1][1])
        torch.testing.assert_close(results[1][0], results[0][0])
        assert results[1][1]["state"].keys() >= results[0][1]["state"].keys()  # ours has meta tensors for the others
        assert results[1][1]["param_groups"][0]["lr"] == 0.5

    @pytest.mark.parametrize("clips", [{}, {"max_grad_norm": 0.5}], ids=str)
    @pytest.mark.parametrize("kind", [k for k in RULES if k._gradients == "dense"], ids=name_of)
    def test_a_step_of_both(self, kind: type[co.CompiledOptimizer], clips: dict[str, Any]) -> None:
        """What is on the meta device has no numbers; the others are updated as without it."""
        real, alone = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
        away = nn.Parameter(torch.ones(3, 2, device="meta"))
        arguments = {**required(kind), **clips, **({} if kind._granularity == "element" else {"lowering": "eager"})}
        both, one = kind([away, real], **arguments), kind([alone], **arguments)
        for _ in range(2):
            _gradient(away, kind)
            _step(both, real, kind)
            _step(one, alone, kind)
        assert torch.equal(real, alone)
        assert both.state[away]["step"] == 2

    @pytest.mark.parametrize("lowering", ["auto", "eager"])
    def test_a_cautious_step_of_both(self, lowering: str) -> None:
        real, alone = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
        away = nn.Parameter(torch.ones(3, 2, device="meta"))
        sides = [[away, real], [alone]]
        optimizers = [co.AdamW(params, cautious=True, lowering=lowering) for params in sides]
        for _ in range(2):
            for params, optimizer in zip(sides, optimizers, strict=True):
                for param in params:
                    param.grad = torch.ones_like(param)
                optimizer.step()
        assert torch.equal(real, alone)

    def test_a_distributed_checkpoint(self) -> None:
        saved = []
        for kind in PAIR:
            model = nn.Linear(2, 2, device="meta")
            optimizer = kind(model.parameters(), lr=0.5)
            saved.append(get_optimizer_state_dict(model, optimizer))
            assert float(optimizer.param_groups[0]["lr"]) == 0.5
        theirs, ours = ({k: sorted(v) for k, v in s["state"].items()} for s in saved)
        assert ours == theirs
        assert ours.keys() == {"weight", "bias"}


class TestDefaultDevice:
    @pytest.mark.parametrize("kind", KINDS, ids=name_of)
    def test_of_another_kind(self, kind: type[co.CompiledOptimizer]) -> None:
        """Nothing is made on the default device."""
        params = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
        for param, device in zip(params, ("cpu", "meta"), strict=True):
            with torch.device(device):
                optimizer = kind([param], **required(kind))
                _step(optimizer, param, kind)
                optimizer.load_state_dict(optimizer.state_dict())
            torch.set_default_device(device)
            try:
                _step(optimizer, param, kind)
            finally:
                torch.set_default_device(None)
        assert torch.equal(*params)
        assert (params[0] < 1).all()

    @pytest.mark.parametrize("lowering", LOWERINGS)
    def test_every_lowering(self, lowering: str) -> None:
        param = nn.Parameter(torch.ones(3, 2))
        with torch.device("meta"):
            optimizer = co.AdamW([param], lowering=lowering, max_grad_norm=1.0, skip_nonfinite=True)
            optimizer.schedule(lr=lambda step: 0.5 / step)
            _step(optimizer, param, co.AdamW)
        assert (param < 1).all()


class TestFake:
    @pytest.mark.parametrize("kind", RULES, ids=name_of)
    def test_a_step(self, kind: type[co.CompiledOptimizer]) -> None:
        with FakeTensorMode():
            param = nn.Parameter(torch.ones(3, 2))
            optimizer = kind([param], **required(kind))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            for _ in range(2):
                _step(optimizer, param, kind)
                scheduler.step()
            saved = optimizer.state_dict()
        assert isinstance(param.data, FakeTensor)
        assert saved["state"].keys() == {0}

    @pytest.mark.parametrize("arguments", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}, {"cautious": True}], ids=str)
    def test_options(self, arguments: dict[str, Any]) -> None:
        with FakeTensorMode():
            param = nn.Parameter(torch.ones(3, 2))
            optimizer = co.AdamW([param], **arguments)
            _step(optimizer, param, co.AdamW)
            optimizer.zero_grad()

    def test_memory_is_counted_as_with_torch(self) -> None:
        sizes = []
        for kind in PAIR:
            with FakeTensorMode():
                param = nn.Parameter(torch.ones(1024, 1024))
                optimizer = kind([param])
                _step(optimizer, param, co.AdamW)
                sizes.append(sum(v.numel() * v.itemsize for v in optimizer.state[param].values() if v.dim()))
        assert sizes == [2 * 4 * 1024**2] * 2


class TestInference:
    @pytest.mark.parametrize("where", ["constructor", "assignment", "scheduler", "step", "load", "group"])
    def test_schedulers_go_on_outside(self, where: str) -> None:
        results = []
        for kind in PAIR:
            param, other = (nn.Parameter(torch.ones(2)) for _ in range(2))

            def make(kind: Any = kind, param: Any = param) -> Any:
                return kind([param], lr=0.5)

            if where == "constructor":
                with torch.inference_mode():
                    optimizer = make()
            else:
                optimizer = make()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            _step(optimizer, param, co.AdamW)
            with torch.inference_mode():
                if where == "assignment":
                    optimizer.param_groups[0]["lr"] = 0.25
                if where == "scheduler":
                    scheduler.step()
                if where == "step" and kind is co.AdamW:  # torch.optim cannot write here
                    optimizer.step()
                if where == "load" and kind is co.AdamW:
                    optimizer.load_state_dict(optimizer.state_dict())
                if where == "group":
                    optimizer.add_param_group({"params": [other]})
            scheduler.step() if where != "group" else None
            _step(optimizer, param, co.AdamW)
            results.append(optimizer.param_groups[0]["lr"])
        assert results[0] == results[1]


class TestMadeInCompiledCode:
    @pytest.mark.parametrize("kind", KINDS, ids=name_of)
    def test_a_graph_breaks(self, kind: type[co.CompiledOptimizer]) -> None:
        def make(param: nn.Parameter) -> co.CompiledOptimizer:
            return kind([param], **required(kind))

        param, twin = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
        torch._dynamo.reset()
        optimizer = torch.compile(make, backend="eager")(param)
        assert type(optimizer) is kind
        of_twin = make(twin)
        for _ in range(2):  # ADOPT's first step moves nothing
            _step(optimizer, param, kind)
            _step(of_twin, twin, kind)
        assert torch.equal(param, twin)
        assert (param < 1).all()

    def test_a_whole_graph_is_refused(self) -> None:
        for kind in PAIR:
            torch._dynamo.reset()
            with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Optimizer\.(__init__|add_param_group)"):
                torch.compile(lambda p, kind=kind: kind([p]), backend="eager", fullgraph=True)(nn.Parameter(torch.ones(2)))
