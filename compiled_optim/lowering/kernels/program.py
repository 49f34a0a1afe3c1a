"""A kernel before it is printed as C++ or Triton: the code for each parameter and the code for each element."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from compiled_optim.lowering.kernels.table import BUFFERS, FIRST_NUMBER, GROUP_INDEX, MAXIMIZE, PARAM, SCALARS
from compiled_optim.memory.layout import compute_dtype
from compiled_optim.plan.clipping import NAMES, scaled
from compiled_optim.plan.compilations import KernelKey
from compiled_optim.rule.symbols import Code, Dialect, Symbol


def indented(lines: Iterable[str], indent: str) -> str:
    """Return the text of ``lines``, each behind ``indent``."""
    return "\n".join(indent + line for line in lines)


def evaluation(key: KernelKey, dialect: Dialect, accesses: Mapping[str, str], indent: str) -> dict[str, object]:
    """Return the fields of a language's template of ``evaluate``, which runs once for each parameter, by name.

    The statements ``gradient`` read ``square_sum``; their results are the expressions ``factor``, ``norm`` and ``skip``. The
    statements ``coefficients`` read hyperparameters and scalars, and store new scalars and coefficients. ``group`` and
    ``maximize`` are rows of the table. The ``hypers`` of a group follow the ``controls``: both are counts.

    ``accesses`` are the language's formats to read and write table entries: ``{}`` is the index of a control, scalar,
    hyperparameter or coefficient, or a row of the table. In a definition or store, a second ``{}`` is its row or value.
    """
    rule, statics, define = key.rule, dict(key.statics), dialect.statement.format
    code = Code(dataclasses.replace(dialect, typed_words=frozenset()), "s")  # no numbers but 1 and 0
    controls = {f"control{i}": accesses["control"].format(i) for i in range(len(NAMES))}
    clipping = dict(zip(NAMES, (Symbol(code, name) for name in controls), strict=True))
    factor, norm, skip = map(code.operand, scaled(Symbol(code, "square_sum"), **clipping))

    written = rule.written_coefficients(statics, dialect)
    scalars = ["step", *(written.results[s.name] for s in rule.scalars)]
    numbers = [written.results[name] for name in rule.coefficient_names(statics)]
    hypers = sum(h.length for h in rule.present_hypers(statics))
    rows = itertools.chain(range(FIRST_NUMBER, SCALARS), itertools.count(SCALARS + len(scalars)))
    reads = {name: accesses["row"].format(row) for name, row in zip(rule.inputs(statics), rows, strict=False)}
    reads["step"] = accesses["scalar"].format(0) + " + 1"
    reads |= {f"scalar{i - 1}": accesses["scalar"].format(i) for i in range(1, len(scalars))}
    reads |= {f"hyper{i}": accesses["hyper"].format(i) for i in range(hypers)}
    coefficients = [
        *(accesses["address"].format(i, SCALARS + i) for i in range(len(scalars))),
        *map(define, reads, reads.values()),
        *written.lines,
        *(accesses["store_scalar"].format(i, value) for i, value in enumerate(scalars)),
        *(accesses["store_coefficient"].format(i, value) for i, value in enumerate(numbers, 1)),
    ]
    return {
        "gradient": indented([*map(define, controls, controls.values()), *code.lines], indent),
        "coefficients": indented(coefficients, indent),
        **{"factor": factor, "norm": norm, "skip": skip, "controls": len(NAMES), "hypers": hypers},
        **{"group": GROUP_INDEX, "maximize": MAXIMIZE},
    }


@dataclass(frozen=True)
class Array:
    """A parameter, its gradient or one of its buffers: its dtype, and a kernel's names of its address and element.

    ``row`` is its row in a :class:`~compiled_optim.lowering.kernels.table.TensorTable`, None for the gradient. An array is
    ``grouped`` if it has a number for each group of elements.
    """

    dtype: torch.dtype
    address: str
    element: str
    row: int | None
    grouped: bool = False

    @property
    def is_int(self) -> bool:
        """True if the rule sees the elements as integers."""
        return not (self.grouped or self.dtype.is_floating_point)


class Program:
    """The code for each element in the kernel of an elementwise rule: ``means`` by their stage, and an ``update``.

    ``arrays`` are the parameter, gradient and buffers. ``compute`` is the dtype in which they are updated. ``served`` and
    ``sums`` are the outputs of the update that are no arrays; ``words`` is the row of the addresses of changed bits.
    """

    def __init__(self, key: KernelKey, dialect: Dialect) -> None:
        rule, statics = key.rule, dict(key.statics)
        param, grad, *buffers = key.dtypes
        self.arrays = [Array(param, "params", "param", PARAM), Array(grad, "grad_values", "grad", None)]
        for i, (name, dtype) in enumerate(zip(rule.present_buffers(statics), buffers, strict=True)):
            grouped = name in rule.grouped_buffers(statics)
            self.arrays.append(Array(dtype, f"buffers{i}", f"buffer{i}", BUFFERS + i, grouped))
        self.compute = compute_dtype(param)
        key.outputs.check(param)
        self.served, self.words = key.outputs.served, BUFFERS + len(buffers)
        *means, self.update = rule.written(statics, dialect, key.outputs.sums)
        self.sums = self.update.sums
        self.means = {i: stage for i, stage in enumerate(means) if stage.results}

    def new_elements(self) -> list[tuple[Array, str, str | None]]:
        """Return the arrays that are updated, each with the expression of its new element, and an integer or None.

        The integer is given for a new bfloat16 that consists of the upper 16 bits of that integer.
        """
        integers = {s.name: s.reads[0] for s in self.update.statements if s.word == "from_upper"}
        pairs = zip([a for a in self.arrays if a.row is not None], self.update.results.values(), strict=True)
        return [(array, new, integers.get(new) if array.dtype == torch.bfloat16 else None) for array, new in pairs]
