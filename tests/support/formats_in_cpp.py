"""The formats of parameters as C++, made from the same symbols as the kernels, and what must hold of every float32."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_optim.lowering.kernels.cpp import DIALECT, WORDS
from compiled_optim.memory.cache import library
from compiled_optim.rule import formats
from compiled_optim.rule.symbols import Code, Symbol

_TWICE = "size(x) < NORMAL && size(n - q) <= 2 * TINY && size(x - n) <= TINY + LOST"  # where it is rounded twice
_ROUNDED8 = "2 * half8 + 2 * LOST"  # how much farther from x than the nearest a parameter may be that 8 more bits are to fit
# Beside an infinite parameter they mean nothing.
_RESTS_STAY = "(p - p != 0 || r == rr) && (p8 - p8 != 0 || r8 == rr8)"
INVARIANTS = {
    "the parameter is a number of the dtype": "same(p, H(p)) && same(p8, H(p8))",
    "the rests fit": "int32_t(r) == int16_t(r) && int32_t(r8) == int8_t(r8)",
    "signs stay": "nan || ((to_bits(p) ^ u) >> 31 == 0 && (to_bits(w) ^ u) >> 31 == 0 && (to_bits(w8) ^ u) >> 31 == 0)",
    "what is no number stays that": "!quiet || (p != p && p8 != p8 && w != w && w8 != w8 && n != n)",
    "infinity stays infinite, and has no rest": "!infinite || (p == x && p8 == x && w == x && w8 == x && !r && !r8)",
    "the parameter is the nearest": "!finite || size(x - p) <= size(x - q) + 2 * LOST",
    "the parameter is the nearest, with 8 bits more": f"!finite || size(x - p8) <= size(x - q) + {_ROUNDED8}",
    "of 16 bits more nothing is lost": "!finite || size(x - w) <= LOST",
    "of 8 bits more at most half a unit is": "!finite || size(x - w8) <= half8",
    "more bits are never worse": "!finite || (size(x - w) <= size(x - w8) && size(x - w8) <= size(x - q) + LOST)",
    "what fits stays": "x != q || !finite || (p == x && p8 == x && !r && !r8)",
    "what fits in 8 bits more stays": "!finite || (to_bits(scaled) & LOW8) || size(x) < NORMAL || w8 == x",
    "storing again changes nothing": f"nan || (same(p, pp) && same(p8, pp8) && {_RESTS_STAY})",
    "nearest rounds to even": f"nan || same(n, q) || ({_TWICE})",
}
"""What must hold of a float32 ``x`` with the bits ``u``, in C++.

``q`` is ``x`` in the dtype, by arithmetic of the processor; ``n`` that by the formats; ``p``, ``r`` and ``w`` are parameter,
rest and what both give of 16 bits, ``p8``, ``r8`` and ``w8`` of 8; ``pp``, ``rr`` are ``w`` taken apart again.
"""

_CONSTANTS = {
    # What float16 has no exponents for is lost; half a unit of its smallest numbers; numbers from which all bits are there.
    "float16": {"LOST": "(size(x) < NORMAL ? 0x1p-38f : 0.f)", "TINY": "0x1p-25f", "NORMAL": "0x1p-14f", "LOW8": "0x1fu"},
    "bfloat16": {"LOST": "0.f", "TINY": "0x1p-134f", "NORMAL": "0.f", "LOW8": "0xffu"},
}
_CONSTANTS["float16"]["HALF8"] = "(size(p8) < 0x1p-14f ? 0x1p-14f : power_of(p8)) * 0x1p-19f + LOST"
_CONSTANTS["bfloat16"]["HALF8"] = "(size(p8) < 0x1p-126f ? 0x1p-126f : power_of(p8)) * 0x1p-16f"


def _function(name: str, results: dict[str, str], arguments: list[str], body: Callable[..., Any]) -> str:
    code = Code(DIALECT, "e")
    values = body(*(Symbol(code, argument) for argument in arguments))
    values = values if isinstance(values, tuple) else (values,)
    outs = [f"{kind}& {result}" for result, kind in results.items()]
    stores = [f"{result} = {value.name};" for result, value in zip(results, values, strict=True)]
    head = ", ".join([*(f"float {argument}" for argument in arguments), *outs])
    return f"static inline void {name}({head}) {{ using T = float;\n" + "\n".join([*code.lines, *stores]) + "}\n"


def _source(dtype: str) -> str:
    parts = {"param_": "float", "rest_": "uint32_t"}
    text = _function("nearest", {"out": "float"}, ["x"], lambda x: formats.nearest(x, dtype))
    for count in (8, 16):
        text += _function(f"split{count}", parts, ["x"], lambda x, n=count: formats.split(x, dtype, n))
        text += _function(
            f"joined{count}", {"out": "float"}, ["p", "r"], lambda p, r, n=count: formats.joined(p, r, dtype, n)
        )
    constants = "".join(f"#define {name} {value}\n" for name, value in _CONSTANTS[dtype].items())
    held = [text.replace("&&", "&").replace("||", "|") for text in INVARIANTS.values()]  # without branches
    indices = range(len(held))
    totals = "".join(f"    uint32_t bad{i} = 0;\n" for i in indices)
    checks = "".join(f"      bad{i} += !({text});\n" for i, text in enumerate(held))
    counts = ", ".join(f"bad{i}" for i in indices)
    stores = "".join(
        f"    found[{2 * i}] += bad{i}; if (bad{i}) found[{2 * i + 1}] = first + b * stride;\n" for i in indices
    )
    half = f"static inline float H(float x) {{ return float({dtype}(x)); }}\n"
    return (
        WORDS
        + half
        + _HELP
        + constants
        + text
        + _LOOP.format(totals=totals, counts=counts, checks=checks, stores=stores, scale=_SCALE[dtype], block=_BLOCK)
        + "".join(_THROUGH.format(count=count) for count in (8, 16))
    )


_SCALE = {"bfloat16": "1.f", "float16": "0x1p-112f"}

_HELP = """
static inline bool same(float x, float y) { return x == y || (x != x && y != y); }
static inline float size(float x) { return std::fabs(x); }
static inline float power_of(float x) { return from_bits(to_bits(x) & 0x7f800000u); }
"""

_LOOP = """
extern "C" void check(int64_t first, int64_t stride, int64_t count, int64_t* found) {{
  for (int64_t b = 0; b < count; b += {block}) {{
    const int32_t size_of_block = int32_t(count - b < {block} ? count - b : {block});
{totals}
#pragma omp simd reduction(+ : {counts})
    for (int32_t i = 0; i < size_of_block; i++) {{
      const uint32_t u = uint32_t(first + b * stride) + uint32_t(i) * uint32_t(stride);
      const float x = from_bits(u);
      float n, p, w, pp, p8, w8, pp8;
      uint32_t r, rr, r8, rr8;
      const float q = H(x), scaled = x * {scale};
      nearest(x, n);
      split16(x, p, r);
      split8(x, p8, r8);
      joined16(p, float(int16_t(r)), w);
      joined8(p8, float(int8_t(r8)), w8);
      split16(w, pp, rr);
      split8(w8, pp8, rr8);
      const bool nan = x != x, quiet = nan & (u >> 22);
      const bool infinite = (x - x != 0) & !nan, finite = (p8 - p8 == 0) & (q - q == 0);
      const float half8 = HALF8;
      (void)scaled;
{checks}
    }}
{stores}
  }}
}}
"""

_BLOCK = 4096


_THROUGH = """
extern "C" void through{count}(const float* x, float* param, float* rest, float* out, int64_t count) {{
  for (int64_t i = 0; i < count; i++) {{
    uint32_t r;
    split{count}(x[i], param[i], r);
    rest[i] = float(int{count}_t(r));
    joined{count}(param[i], rest[i], out[i]);
  }}
}}
"""


@functools.cache
def _checker(dtype: str) -> ctypes.CDLL:
    return library(_source(dtype))


def violations(dtype: str, *, first: int = 0, stop: int = 1 << 32, stride: int = 1) -> dict[str, str]:
    """Which of :data:`INVARIANTS` a float32 with bits in this range violates, how many do, and where the last ones are."""
    found = np.zeros(2 * len(INVARIANTS), dtype=np.int64)
    check = _checker(dtype).check
    check.argtypes, check.restype = [ctypes.c_int64] * 3 + [ctypes.c_void_p], None
    check(first, stride, -(-(stop - first) // stride), found.ctypes.data)
    pairs = found.reshape(-1, 2).tolist()
    counted = zip(INVARIANTS, pairs, strict=True)
    return {name: f"{bad} times, last among the {_BLOCK} from {at:#x}" for name, (bad, at) in counted if bad}


def through(dtype: str, rest_bits: int, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter and rest of float32 ``values``, and what both give, by generated code."""
    outs = tuple(torch.empty_like(values) for _ in range(3))
    function = getattr(_checker(dtype), f"through{rest_bits}")
    function.argtypes, function.restype = [*[ctypes.c_void_p] * 4, ctypes.c_int64], None
    function(*(t.data_ptr() for t in (values, *outs)), len(values))
    return outs[0], outs[1], outs[2]


if __name__ == "__main__":  # all 2**32, which takes two minutes each
    for dtype in _CONSTANTS:
        print(dtype, violations(dtype) or "all held")
