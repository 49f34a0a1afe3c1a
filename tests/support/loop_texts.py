"""Prints digests of the C++ of rules on whole tensors, whose steps import no compiler of torch's."""

from __future__ import annotations

import hashlib
import sys

import torch

import compiled_optim as co
from compiled_optim.lowering.kernels.cpp_stacks import stack_source
from compiled_optim.optimizer import engine_of


def main() -> None:
    for kind, shapes in ((co.Adafactor, [(7,), (2, 5, 6)]), (co.Muon, [(5, 9), (9, 5)])):
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer = kind(params)
        optimizer.step()
        for stack in (stack for lowering in engine_of(optimizer).step.lowerings for stack in lowering.stacks):
            source = stack_source(stack.key, stack.parts[0].shape)
            assert source is not None
            print(hashlib.sha256(source.text.encode()).hexdigest())
    assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()


if __name__ == "__main__":
    main()
