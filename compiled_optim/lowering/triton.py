"""A rule as Triton: two kernels that update every tensor of a plan in two launches.

The first evaluates the rule's coefficients, in float64, with one lane per tensor; the second updates one chunk of a tensor
per program. Both read addresses from the table in device memory, so they are compiled once per signature whatever the
tensors are.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from types import ModuleType

from compiled_optim.events import Signature
from compiled_optim.lowering.cache import cache_directory
from compiled_optim.lowering.rows import KernelTable, TableRows
from compiled_optim.lowering.symbols import Dialect, Program

BLOCK = 1024  # elements of a chunk, updated by one program
TENSORS = 32  # tensors whose coefficients one program evaluates
WARPS = 4

_DIALECT = Dialect("{} = {}", "{}", "&", "|")
_STORAGE = {"float32": "tl.float32", "float64": "tl.float64", "bfloat16": "tl.bfloat16", "float16": "tl.float16"}


def source(signature: Signature) -> str:
    """The text of a module with the kernels ``evaluate`` and ``update`` for one signature."""
    rule, statics = signature.rule, dict(signature.statics)
    program = Program.of(rule, statics, _DIALECT)
    rows = TableRows(rule, statics)
    storage = [_STORAGE[d] for d in (signature.param_dtype, signature.grad_dtype, *signature.buffer_dtypes)]
    compute = "tl.float64" if signature.param_dtype == "float64" else "tl.float32"
    scalars = range(1 + len(rule.scalars))
    evaluate = [f"scalars{i} = address(tensors, {rows.scalars + i}, count, t, here, tl.float64)" for i in scalars]
    evaluate += ["step = tl.load(scalars0, mask=here, other=0.0) + 1"]
    evaluate += [f"scalar{i} = tl.load(scalars{i + 1}, mask=here, other=0.0)" for i in range(len(rule.scalars))]
    evaluate += [f"hyper{i} = hyper_of(hypers, {rows.hypers} * group + {i}, here)" for i in range(rows.hypers)]
    evaluate += program.coefficients
    evaluate += [f"tl.store(scalars{i}, {value}, mask=here)" for i, value in enumerate(program.new_scalars)]
    evaluate += [f"tl.store(out + {i + 1} * count + t, {value}, mask=here)" for i, value in enumerate(program.numbers)]
    names = ("params", "grads", *(f"buffers{i}" for i in range(len(storage) - 2)))
    pointers = [
        f"{n} = chunk_of(tensors, {row}, count, t, {d}, ALIGNED)"
        for row, (n, d) in enumerate(zip(names, storage, strict=True))
    ]
    pointers += [f"sign = tl.load(coefficients + t).to({compute})"]
    pointers += [f"k{i} = tl.load(coefficients + {i + 1} * count + t).to({compute})" for i in range(len(program.numbers))]
    results = [program.new_param, *program.new_buffers]
    targets = [n for n in names if n != "grads"]
    kinds = [d for n, d in zip(names, storage, strict=True) if n != "grads"]

    def body(mask: str) -> list[str]:
        values = ("param", "grad", *(f"buffer{i}" for i in range(len(storage) - 2)))
        lines = [f"{v} = tl.load({n} + at{mask}).to({compute})" for v, n in zip(values, names, strict=True)]
        lines += ["grad = sign * grad", *program.update]
        return lines + [
            f"tl.store({n} + at, rounded({value}, {d}){mask})" for n, value, d in zip(targets, results, kinds, strict=True)
        ]

    return _TEMPLATE.format(
        group_row=rows.group,
        maximize_row=rows.maximize,
        numel_row=rows.numel,
        evaluate=_block(evaluate, 1),
        pointers=_block(pointers, 2),
        whole=_block(body(""), 3),
        tail=_block(body(", mask=inside"), 3),
    )


def _block(lines: list[str], level: int) -> str:
    return "\n".join("    " * level + line for line in lines)


_TEMPLATE = """\
import triton
import triton.language as tl


@triton.jit
def sqrt_(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def maximum_(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum_(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absolute_(x):
    return tl.abs(x)


@triton.jit
def sign_(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(x.dtype)


@triton.jit
def power_(x, y):
    base = x + 0.0 * y
    return tl.where(y == 0, 1.0, tl.exp(y * tl.log(base)))


@triton.jit
def where_(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def bias_correction_(beta, step):
    return 1 - tl.exp(step * tl.log(beta))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    return x.to(dtype)


@triton.jit
def address(tensors, row, count, t, here, dtype: tl.constexpr):
    return tl.load(tensors + row * count + t, mask=here, other=0).to(tl.pointer_type(dtype))


@triton.jit
def hyper_of(hypers, index, here):
    return tl.load(tl.load(hypers + index, mask=here, other=0).to(tl.pointer_type(tl.float64)), mask=here, other=0.5)


@triton.jit
def chunk_of(tensors, row, count, t, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(tensors + row * count + t).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit(do_not_specialize=["count"])
def evaluate(tensors, hypers, out, count, TENSORS: tl.constexpr):
    t = tl.program_id(0) * TENSORS + tl.arange(0, TENSORS)
    inside = t < count
    here = inside & (tl.load(tensors + count + t, mask=inside, other=0) != 0)
    group = tl.load(tensors + {group_row} * count + t, mask=here, other=0)
    maximize = tl.load(tensors + {maximize_row} * count + t, mask=here, other=0)
    tl.store(out + t, tl.where(maximize != 0, -1.0, 1.0).to(tl.float64), mask=here)
{evaluate}


@triton.jit(do_not_specialize=["count"])
def update(tensors, chunks, coefficients, count, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    chunk = tl.program_id(0)
    t = tl.load(chunks + 2 * chunk)
    if tl.load(tensors + count + t) != 0:
        start = tl.load(chunks + 2 * chunk + 1) * BLOCK
        size = tl.load(tensors + {numel_row} * count + t)
        at = start + tl.arange(0, BLOCK)
{pointers}
        if start + BLOCK <= size:
{whole}
        else:
            inside = at < size
{tail}
"""


class TritonKernel:
    """Both kernels of one signature."""

    chunk = BLOCK

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __call__(self, table: KernelTable) -> None:
        """Update the tensors of ``table`` in two launches."""
        count = table.tensors.shape[1]
        grid = (-(-count // TENSORS),)
        self._module.evaluate[grid](table.tensors, table.hypers, table.coefficients, count, TENSORS)
        if len(table.chunks):
            self._module.update[(len(table.chunks),)](
                table.tensors, table.chunks, table.coefficients, count, BLOCK, table.aligned, num_warps=WARPS
            )


def build(signature: Signature) -> TritonKernel:
    """The kernels for one signature; Triton compiles them when they first run."""
    return TritonKernel(load(source(signature)))


def load(text: str) -> ModuleType:
    """The module of ``text``, kept in a file because Triton reads the source of its functions."""
    path = cache_directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as scratch:
            scratch.write(text)
        os.replace(scratch.name, path)
    name = f"compiled_optim_kernel_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
