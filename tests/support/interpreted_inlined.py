"""Runs what Inductor wrote for inlined steps on a GPU in Triton's interpreter, on a CPU, beside the eager lowering.

``FOLDER`` has a module of Inductor's for each optimizer, by its name, and ``SHAPES`` those of its parameters. Prints the
largest difference for each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from triton import language
from triton.runtime.interpreter import TensorHandle

import compiled_optim as co
from compiled_optim.lowering.torch_ops.inlined import InlinedPlan

PROGRAMS = 64  # more than there are blocks; the others find nothing to do
_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)^'''", re.MULTILINE | re.DOTALL)
_HEAD = "import triton\nimport triton.language as tl\nfrom torch._inductor.runtime import triton_helpers\n\n"


class _Functions:
    """CUDA's mathematical functions, which the interpreter lacks."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = {"pow": np.power, "mul_rn": np.multiply}.get(name) or getattr(np, name)

        def call(*values: Any) -> Any:
            first = values[0]
            found = np.asarray(function(*(value.handle.data for value in values))).astype(first.handle.data.dtype)
            return language.core.tensor(TensorHandle(found, first.handle.dtype), first.type)

        return call


class _Kernel:
    def __init__(self, name: str, text: str, folder: Path) -> None:
        body = text[text.index("@triton.jit") :]
        path = folder / f"{name[:60]}.py"
        path.write_text(_HEAD + body)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        vars(module)["libdevice"] = _Functions()
        self._function = getattr(module, name)
        self._has_block = "XBLOCK :" in body[: body.index("):\n")]

    def run(self, *values: Any, stream: int) -> None:
        self._function[(PROGRAMS,)](*values, **({"XBLOCK": 128} if self._has_block else {}))


def _loaded(source: str, folder: Path) -> Callable[[list[Tensor]], Any]:
    """The function of a module that Inductor wrote, on CPU tensors."""
    space: dict[str, Any] = {name: _Kernel(name, text, folder) for name, text in _KERNEL.findall(source)}
    start = source.index("def call(self, args):") if "def call(self, args):" in source else source.index("def call(args):")
    start = source.rindex("\n", 0, start) + 1
    end = source.index("\n", source.index("return ", start))
    text = textwrap.dedent(source[start:end]).replace("def call(self, args)", "def call(args)")
    text = text.replace("with torch.cuda._DeviceGuard(0):", "if True:").replace("torch.cuda.set_device(0)", "pass")
    space |= {
        "torch": torch,
        "copy_if_misaligned": lambda tensor: tensor,
        "assert_size_stride": lambda *_: None,
        "get_raw_stream": lambda _: 0,
        "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        "reinterpret_tensor": lambda tensor, *where: tensor.as_strided(*where),
    }
    exec(compile(text, "inlined step", "exec"), space)
    call: Callable[[list[Tensor]], Any] = space["call"]
    return call


def _stepped(name: str, call: Callable[[list[Tensor]], Any] | None) -> list[Tensor]:
    """Parameters and state after three steps: of ``call`` if it is there, else eager ones."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in json.loads(os.environ["SHAPES"])]
    optimizer = getattr(co, name)(params, lr=0.1, lowering="eager" if call is None else "inductor")

    def backend(module: Any, example: Any) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> tuple[()]:
            assert call is not None
            call(list(inputs))
            return ()

        return run

    step = optimizer.step if call is None else torch.compile(optimizer.step, backend=backend, fullgraph=True)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape)
        step()
    return [*(p.detach() for p in params), *(v for p in params for v in optimizer.state[p].values())]


def main() -> None:
    InlinedPlan.fuses_lists = staticmethod(lambda device: True)  # type: ignore[method-assign]
    folder = Path(os.environ["FOLDER"])
    found = {}
    for path in sorted(folder.glob("*.txt")):
        sides = [_stepped(path.stem, call) for call in (_loaded(path.read_text(), folder), None)]
        found[path.stem] = max(((a - b).abs() / (1 + b.abs())).max().item() for a, b in zip(*sides, strict=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
