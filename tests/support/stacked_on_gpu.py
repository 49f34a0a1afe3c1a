"""Prints what Inductor's code for stacks of a reducing rule launches on a GPU, without one: it is generated, not run.

Loops of our own would serve these parameters, and are put aside here: they do not serve transposed ones, for example.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn

import compiled_optim as co
from compiled_optim.lowering import stack_code, stack_loops
from compiled_optim.simulated.fake_cuda import fake_cuda
from compiled_optim.simulated.record import recording
from perf.lowering import inductor_source

SHAPES = [(), (4,), (4, 6), (4, 3, 2, 2)]


def main() -> None:
    for shape in SHAPES:
        stack_code._kernels.clear()  # a graph is recorded where it is made
        with fake_cuda(90), mock.patch.object(stack_loops, "LOOPS", {}):
            params = [nn.Parameter(torch.empty(shape, device="cuda")) for _ in range(2)]
            for param in params:
                param.grad = torch.empty_like(param)
            optimizer = co.Adafactor(params)
            with recording("cuda") as recorder:
                optimizer.step()
                recorder.take()
                optimizer.step()
                record = recorder.take()
        assert not any(operator.waits or operator.crosses for operator in record.operators)
        (graph,) = record.graphs
        calls = graph.source[graph.source.index("def call(") :]
        print(f"Adafactor {shape} | {len(inductor_source._RUN.findall(calls))} Triton kernels")


if __name__ == "__main__":
    main()
