"""What Inductor wrote for inlined and called steps on a GPU, beside the eager lowering."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_code_cases import CASES, MINIMUM, GPUCase, in_lists_of_two
from torch import Tensor
from triton import language
from triton.runtime.interpreter import TensorHandle

from compiled_optim.lowering import list_program
from compiled_optim.memory.torch_compiler import ListFunction
from compiled_optim.rule import storage

_numbers = itertools.count()
BLOCK = 128
_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)^'''", re.MULTILINE | re.DOTALL)
_HEAD = "import triton\nimport triton.language as tl\nfrom torch._inductor.runtime import triton_helpers\n"
_HEAD += "from torch._inductor.runtime.triton_helpers import math as tl_math\n\n"


class _Functions:
    """CUDA's mathematical functions, which the interpreter lacks."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = {"pow": np.power, "mul_rn": np.multiply}.get(name) or getattr(np, name)

        def call(*values: Any) -> Any:
            first = values[0]
            found = np.asarray(function(*(value.handle.data for value in values))).astype(first.handle.data.dtype)
            return language.core.tensor(TensorHandle(found, first.handle.dtype), first.type)

        return call


class _Product:
    """A kernel that the package wrote itself, which gets its grid behind its arguments."""

    def __init__(self, name: str, text: str, folder: Path) -> None:
        constants = re.search(r"'constants': (\{.*?\})", text)
        assert constants is not None
        self._constants = ast.literal_eval(constants[1])
        body = text[text.index("@triton.jit") :]
        (function,) = re.findall(r"^def ([a-z]\w+)\(", body, re.MULTILINE)
        self._function = getattr(_module(name, body, folder), function)

    def run(self, *values: Any, stream: int) -> None:
        self._function[values[-3:]](*values[:-3], **self._constants)


def _module(name: str, body: str, folder: Path) -> Any:
    """A module with the kernels in ``body``, in a file, since Triton reads their text."""
    path = folder / f"{next(_numbers)}_{name[:60]}.py"  # kernels of two modules may have one name
    path.write_text(_HEAD + body)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Kernel:
    def __init__(self, name: str, text: str, folder: Path) -> None:
        body = text[text.index("@triton.jit") :]
        module = _module(name, body, folder)
        vars(module)["libdevice"] = _Functions()
        self._function = getattr(module, name)
        self._lists = len({*re.findall(r"num_xblocks_\d+", body)})
        self._arguments = [a.split(":")[0].strip() for a in body[body.index("(") + 1 : body.index("):\n")].split(",")]

    def run(self, *values: Any, stream: int) -> None:
        block = {name: BLOCK for name in ("XBLOCK", "YBLOCK", "R0_BLOCK") if name in self._arguments}
        given = dict(zip(self._arguments, values, strict=False))
        # Each tensor of a kernel of lists is a block, or less.
        programs = -(-given["xnumel"] // (BLOCK if block else 1)) if "xnumel" in given else self._lists
        self._function[(programs, -(-given.get("ynumel", 1) // BLOCK))](*values, **block)


def _loaded(source: str, folder: Path) -> Callable[[list[Tensor]], Any]:
    """The function of a module that Inductor wrote, on CPU tensors."""
    space: dict[str, Any] = {
        name: (_Product if "custom_kernel=True" in text else _Kernel)(name, text, folder)
        for name, text in _KERNEL.findall(source)
    }
    start = source.index("def call(self, args):") if "def call(self, args):" in source else source.index("def call(args):")
    start = source.rindex("\n", 0, start) + 1
    end = source.index("\n", source.index("return ", start))
    text = textwrap.dedent(source[start:end]).replace("def call(self, args)", "def call(args)")
    text = text.replace("with torch.cuda._DeviceGuard(0):", "if True:").replace("torch.cuda.set_device(0)", "pass")
    space |= {
        "torch": torch,
        "extern_kernels": torch,
        # Of these, torch's versions write several.
        **dict.fromkeys(re.findall(r"\bcopy_\w*misaligned", text), lambda tensor: tensor),
        **dict.fromkeys(re.findall(r"\bassert_\w+", text), lambda *_: None),
        "get_raw_stream": lambda _: 0,
        "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        "reinterpret_tensor": lambda tensor, *where: tensor.as_strided(*where),
    }
    exec(compile(text, "inlined step", "exec"), space)
    call: Callable[[list[Tensor]], Any] = space["call"]
    return call


def _stepped(case: GPUCase, lowering: str, compiled: Callable[[list[Tensor]], Any] | None = None) -> dict[str, Tensor]:
    """Parameters and state after the case's steps, which may be ``compiled``."""
    params, optimizer = case.make(lowering)

    def backend(module: Any, example: Any) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> tuple[()]:
            assert compiled is not None
            compiled(list(inputs))
            return ()

        return run

    step = optimizer.step if compiled is None else torch.compile(optimizer.step, backend=backend, fullgraph=True)
    for grads in case.gradients():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        step()
    return {f"{i} {n}": v for i, p in enumerate(params) for n, v in {"param": p.detach(), **optimizer.state[p]}.items()}


def _inlined(case: GPUCase, source: str, folder: Path) -> dict[str, Tensor]:
    """After steps whose operations a compiled function holds."""
    with mock.patch.object(list_program, "fuses_lists", return_value=True):
        return _stepped(case, "inductor", _loaded(source, folder))


def _unused(tensors: list[Tensor]) -> Any:
    raise AssertionError("a function was called that the process which compiled it did not call")


def _called(case: GPUCase, sources: list[str], folder: Path) -> dict[str, Tensor]:
    """After steps that are called, by lists."""
    given = iter(sources)

    def compiled(*_: Any, **__: Any) -> ListFunction:
        source = next(given)
        return _loaded(source, folder) if source else _unused

    with in_lists_of_two(compiled):
        found = _stepped(case, "inductor")
    assert next(given, None) is None
    return found


def _differences(case: GPUCase, found: dict[str, Tensor]) -> list[str]:
    """The tensors that differ from those of eager steps by more than rounding, which may move a few codes by one."""
    differing = []
    for name, wanted in _stepped(case, "eager").items():
        error = (found[name].double() - wanted.double()).abs() / (1 + wanted.double().abs())
        share = (error > 1e-6).double().mean().item()
        coarse = torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 1.0
        if not (error.max() < 1e-6 if case.is_full else error.max() <= 4 * coarse and share < 0.02):
            differing.append(f"{name} by {error.max()}, {share:.1%} of it")
    return differing


def interpreted(place: str) -> dict[str, list[str]]:
    """Return what differs, by case.

    Args:
        place: a folder with a file for each of some of :data:`CASES`, with the modules that Inductor wrote.
    """
    storage.MINIMUM = MINIMUM
    folder = Path(place)
    found = {}
    for path in sorted(folder.glob("*.json")):
        written = json.loads(path.read_text())
        case = CASES[path.stem]
        torch._dynamo.reset()  # which gives up on a function that was compiled for many optimizers in one process
        if written["inlined"]:
            found[f"{path.stem} inlined"] = _differences(case, _inlined(case, written["inlined"], folder))
        found[f"{path.stem} called"] = _differences(case, _called(case, written["called"], folder))
    return found
