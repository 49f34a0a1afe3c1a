"""A settled step: what it needs is there, so that a compiler's warm-up and capture leave nothing in a graph's memory."""

from __future__ import annotations

from typing import Any

import pytest
import simulated_graph
import torch
from catalog import Case, cases, parameters, stacked_cases
from kept_memory import Made
from simulated_graph import SimulatedGraph
from torch import nn

import compiled_optim as co
from compiled_optim.optimizer import engine_of

OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "clipping": {"max_grad_norm": 0.5, "skip_nonfinite": True}}


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", [*cases("dense"), *stacked_cases()][::3], ids=str)
def test_steps_of_a_settled_optimizer_keep_no_memory(case: Case, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_graph.install(monkeypatch)
    params = [p for p in parameters(torch.float32) if case.optimizer._granularity != "matrix" or p.dim() == 2]
    params = params if case.optimizer._granularity == "element" else [p for p in params if p.numel()]
    optimizer = case.optimizer([{"params": params[:1]}, {"params": params[1:]}], **case.kwargs, **OPTIONS[options])
    optimizer.schedule(lr=lambda step: 0.01 / step)
    engine_of(optimizer).preallocate()
    grads = [torch.full_like(p, 0.1) for p in params]
    made, graph = Made(), SimulatedGraph(torch.device("cpu"))
    with made:
        engine_of(optimizer).run([*grads])
    with graph.capturing(), made:
        engine_of(optimizer).run([*grads])
    assert graph.nodes
    graph.release()
    assert made.kept() == 0


def test_the_number_of_clipping_has_one_address() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = co.SGD([param], lr=1.0, max_grad_norm=1.0)
    clipping = engine_of(optimizer).clipping
    engine_of(optimizer).preallocate()
    address = clipping.tensors(param.device)[0].data_ptr()
    for limit in (2.0, None, 0.5, torch.tensor(3.0), 0.25):
        optimizer.max_grad_norm = limit
        param.grad = torch.tensor([3.0, 4.0, 0.0])
        before = param.detach().clone()
        optimizer.step()
        length = min(5.0, float("inf") if limit is None else float(limit))
        torch.testing.assert_close(before - param, length / 5 * param.grad)
        if isinstance(limit, float):
            assert clipping.tensors(param.device)[0].data_ptr() == address
