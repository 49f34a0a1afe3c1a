"""Processes that hold nothing of some parameters: every optimizer steps and saves as one process does, and nobody waits."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from catalog import COMBINED, registry, required
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from two_processes import passed, run

import compiled_optim as co

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

KINDS = [c for c in [*registry(), *COMBINED] if c is not co.LBFGS and c._gradients == "dense"]
"""All that step by a rule: LBFGS has none, and rows of sparse gradients are not shared out."""

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "vectors": [(1,), (1,), (3,), (6,)],
    "matrices": [(1, 4), (1, 4), (3, 5), (2, 3)],
}
"""Fewer rows than there are processes, alone and in stacks of several, and where the last process has none of more rows."""

SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "clip": {"max_grad_norm": 0.5, "skip_nonfinite": True}}
"""The second one skips a step whose gradient is infinite on one process."""


def saved(value: Any, directory: Path) -> Any:
    written = io.BytesIO()
    torch.save(value, written)
    written.seek(0)
    return torch.load(written)


FORMS: dict[str, Callable[[Any, Path], Any]] = {
    "save": saved,
    "copy": lambda value, directory: copy.deepcopy(value),
    "pickle": lambda value, directory: pickle.loads(pickle.dumps(value)),
}


def parameters(shapes: list[tuple[int, ...]], mesh: DeviceMesh | None) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(t if mesh is None else distribute_tensor(t, mesh, [Shard(0)])) for t in tensors]


def made(kind: Any, params: list[nn.Parameter], **options: Any) -> Any:
    """An optimizer whose first parameter has a choice of its own, and so is in a plan of its own: of it, some hold nothing.

    Prodigy's groups must agree in their choices.
    """
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    choices = (
        [] if kind is co.Prodigy else [s.name for s in kind._declaration.statics if s.name in ("decouple_lr", "cautious")]
    )
    own = dict.fromkeys(choices[:1], True)
    return kind([{"params": named[:1], **own}, {"params": named[1:]}], **required(kind), **options)


def step(optimizer: Any, params: list[nn.Parameter], number: int, *, overflow: bool = False) -> None:
    """A step; with ``overflow`` the first process has an infinite gradient."""
    generator = torch.Generator().manual_seed(number)
    for p in params:
        grad = torch.randn(p.shape, generator=generator)
        if overflow:
            grad.view(-1)[0] = torch.inf
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
    optimizer.step()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(optimizer: Any, params: list[nn.Parameter]) -> list[Tensor]:
    """What this process holds."""
    entries = [optimizer.state[p][name] for p in params for name in sorted(optimizer.state[p])]
    return [local(t.detach()).clone() for t in (*params, *entries)]


def kinds(shapes: str) -> list[Any]:
    return [c for c in KINDS if shapes == "matrices" or getattr(c, "_granularity", "") != "matrix"]


def steps(directory: Path, *, shapes: str, setting: str, lowering: str, of: Sequence[Any] = ()) -> None:
    """Numbers are those of one process, whose sums have another order; ``of`` these optimizers, or all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in of or kinds(shapes):
        plain, parts = parameters(SHAPES[shapes], None), parameters(SHAPES[shapes], mesh)
        sides = [(made(kind, params, lowering=lowering, **SETTINGS[setting]), params) for params in (plain, parts)]
        for number in range(3):
            for optimizer, params in sides:
                step(optimizer, params, number, overflow=setting == "clip" and number == 1)
        for p, q in zip(plain, parts, strict=True):
            assert p.isfinite().all(), kind
            expected = distribute_tensor(p.detach(), mesh, [Shard(0)]).to_local()
            close = {"rtol": 1e-2, "atol": 2e-3} if kind in ROUGH else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(q.to_local(), expected, **close, msg=lambda text, kind=kind: f"{kind}: {text}")


ROUGH = [c for c in KINDS if c in COMBINED or c._granularity == "matrix"]
"""What multiplies matrices in bfloat16."""


def goes_on(directory: Path, *, shapes: str) -> None:
    """State that was saved or copied in any form is loaded, is as it was, and is what the next step updates."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in kinds(shapes):
        params = parameters(SHAPES[shapes], mesh)
        optimizer = made(kind, params, lowering="eager")
        step(optimizer, params, 0)
        before, weights = held(optimizer, params), [p.detach().clone() for p in params]
        forms = {name: form(optimizer.state_dict(), directory) for name, form in FORMS.items()}
        whole = {name: form(optimizer, directory) for name, form in FORMS.items() if name != "save"}
        folder = directory / f"{kind.__name__}-{shapes}-{dist.get_world_size()}"
        dcp.save(co.named_state_dict(optimizer), checkpoint_id=folder)
        step(optimizer, params, 1)
        expected = held(optimizer, params)
        for name, load in {**forms, "dcp": None}.items():
            fresh = [nn.Parameter(w.clone()) for w in weights]
            resumed = made(kind, fresh, lowering="eager")
            if load is None:
                read = co.named_state_dict(resumed)
                dcp.load(read, checkpoint_id=folder)
                co.load_named_state_dict(resumed, read)
            else:
                resumed.load_state_dict(load)
            check(held(resumed, fresh), before, kind, name)
            step(resumed, fresh, 1)
            check(held(resumed, fresh), expected, kind, name)
        for name, copied in whole.items():
            named = (pair for g in copied.param_groups for pair in zip(g["param_names"], g["params"], strict=True))
            own = [p for _, p in sorted(named)]
            check(held(copied, own), before, kind, name)
            step(copied, own, 1)
            check(held(copied, own), expected, kind, name)


def check(found: list[Tensor], expected: list[Tensor], kind: Any, name: str) -> None:
    assert all(map(torch.equal, found, expected)), (kind.__name__, name)
    assert len(found) == len(expected)


CHECKS: dict[str, Callable[[Path], None]] = {
    **{
        "-".join(case): functools.partial(steps, **dict(zip(("shapes", "setting", "lowering"), case, strict=True)))
        for case in itertools.product(SHAPES, SETTINGS, ("eager", "multi_tensor"))
    },
    "few": functools.partial(steps, shapes="vectors", setting="clip", lowering="multi_tensor", of=[co.AdamW]),
    **{f"{shapes}-goes-on": functools.partial(goes_on, shapes=shapes) for shapes in SHAPES},
}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    directory = tmp_path_factory.mktemp("empty_shards")
    run(CHECKS, request, directory, request.param)
    return directory, request.param


@pytest.mark.quick
@pytest.mark.parametrize("check", [c if c == "few" else pytest.param(c, marks=pytest.mark.full) for c in CHECKS])
def test_on_processes(check: str, ran: tuple[Path, int]) -> None:
    passed(check, *ran)
