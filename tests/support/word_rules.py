"""Rules made of every word of the vocabulary and of random expressions, and their values in Python's floats."""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import compiled_optim as co
from compiled_optim import rule
from compiled_optim.rule import Number, buffer, hyper

A, PARAM, GRAD, STEPS = 0.37, (0.3, -1.7, 2.9), (-0.6, 0.2, 1.1), 3
"""The hyperparameter, and elements: no number of these is one of float32."""


def _python(name: str, *values: Any) -> Any:
    """A word of plain numbers."""
    if name == "where":
        return values[1] if values[0] else values[2]
    if name == "bias_correction":
        return -math.expm1(values[1] * math.log(values[0]))
    plain: dict[str, Callable[..., Any]] = {
        **{"absolute": abs, "exp": math.exp, "floor": math.floor, "log": math.log, "maximum": max, "minimum": min},
        **{"power": math.pow, "product": operator.mul, "sign": lambda x: (x > 0) - (x < 0), "sqrt": math.sqrt},
    }
    return plain[name](*values)


class Words:
    """The words of the vocabulary, on symbols or on plain numbers."""

    def __init__(self, plain: bool) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Callable[..., Any]:
        of_symbols, of_numbers = getattr(rule, name), functools.partial(_python, name)

        def word(*values: Any) -> Any:
            is_plain = self._plain or all(isinstance(value, float) for value in values)
            return of_numbers(*values) if is_plain else of_symbols(*values)

        return word


Expression = Callable[[Words, Sequence[Any]], Any]
"""An expression of the vocabulary and a few values."""

EXPRESSIONS: dict[str, Expression] = {
    "where of two numbers": lambda w, v: 1 - (1 - w.where(v[0] > 1.5, 0.1, 0.3)) * 0.7,
    "where of a number and a value": lambda w, v: w.where(v[0] > 1.5, v[1], 0.3),
    "where of a value and a number": lambda w, v: w.where(v[0] > 1.5, 0.1, v[1]) * 0.7,
    "where of comparisons": lambda w, v: w.where(v[0] > 1.5, v[1] > 0.2, 0.3),
    "a comparison times a number": lambda w, v: (v[0] > 1.5) * 0.1,
    "a number less a comparison": lambda w, v: 0.1 - (v[0] == 1),
    "a negative comparison": lambda w, v: 0.1 * -(v[0] <= 1.5),
    "comparisons added up": lambda w, v: 0.1 * ((v[0] > 0.5) + (v[1] > 0.2)),
    "the larger of a comparison": lambda w, v: w.maximum(v[0] > 1.5, 0.1),
    "maximum of a value and a number": lambda w, v: w.maximum(v[1] - 9, 0.1),
    "maximum of a number and a value": lambda w, v: w.maximum(0.1, v[1] - 9),
    "minimum of a value and a number": lambda w, v: w.minimum(v[1] + 9, 0.1),
    "minimum of a number and a value": lambda w, v: w.minimum(0.1, v[1] + 9),
    "power of a number": lambda w, v: w.power(0.96, v[0]),
    "power to a number": lambda w, v: w.power(w.absolute(v[0]), 0.3),
    "product with a number": lambda w, v: w.product(v[0], 0.1),
    "product of a number": lambda w, v: w.product(0.1, v[0]),
    "bias correction of a number": lambda w, v: w.bias_correction(0.9, w.absolute(v[0])),
    "bias correction at a number": lambda w, v: w.bias_correction(v[1] * v[1] / 9, 3.7),
    "logarithm": lambda w, v: w.log(w.absolute(v[0]) + 0.1) * 0.3,
    "exponential": lambda w, v: w.exp(-v[0]) * 0.3,
}


def _random(seed: int) -> Expression:
    """A random expression; two steps of equal chances are never near each other."""
    chance = random.Random(seed)

    def tree(depth: int, *, plain: bool = False) -> Expression:
        if plain:
            number = round(chance.uniform(-3, 3), 2)
            return lambda w, v: number
        if depth == 0:
            index = chance.randrange(2)
            return lambda w, v: v[index]
        name = chance.choice([*_SAFE])
        function, count = _SAFE[name]
        arguments = [tree(depth - 1, plain=k > 0 and chance.random() < 0.5) for k in range(count)]
        chance.shuffle(arguments)
        return lambda w, v: function(w, *(argument(w, v) for argument in arguments))

    return tree(4)


_SAFE: dict[str, tuple[Callable[..., Any], int]] = {
    "+": (lambda w, x, y: x + y, 2),
    "-": (lambda w, x, y: x - y, 2),
    "*": (lambda w, x, y: x * y, 2),
    "/": (lambda w, x, y: x / (y * y + 0.7), 2),
    "> *": (lambda w, x, y, z: (x > y) * z, 3),
    "<= -": (lambda w, x, y, z: z - (x <= y), 3),
    "absolute": (lambda w, x: w.absolute(x), 1),
    "exp": (lambda w, x: w.exp(w.minimum(x, 1.3)), 1),
    "log": (lambda w, x: w.log(x * x + 0.1), 1),
    "maximum": (lambda w, x, y: w.maximum(x, y), 2),
    "minimum": (lambda w, x, y: w.minimum(x, y), 2),
    "power": (lambda w, x, y: w.power(x * x + 0.3, w.maximum(w.minimum(y, 1.7), -0.9)), 2),
    "product": (lambda w, x, y: w.product(x, y), 2),
    "sign": (lambda w, x: w.sign(x) * 0.1, 1),
    "sqrt": (lambda w, x: w.sqrt(x * x + 0.1), 1),
    "where": (lambda w, x, y, z: w.where(x > 0.2, y, z), 3),
    "where of numbers": (lambda w, x: w.where(x > 0.2, 0.1, 0.3), 1),
    "bias_correction": (lambda w, x, y: w.bias_correction(0.9 / (x * x + 1.1), y * y + 1.3), 2),
    "floor": (lambda w, x: w.floor(x * 1.37) * 0.1, 1),
}


def expressions() -> dict[str, Expression]:
    """All expressions, by name."""
    return EXPRESSIONS | {f"random {seed}": _random(seed) for seed in range(12)}


def optimizer() -> type[co.CompiledOptimizer]:
    """An optimizer whose state has the value of every expression, of numbers and of elements."""
    functions = [*expressions().values()]

    def coefficients(step: Any, a: Any) -> dict[str, Any]:
        return {"a": a, **{f"c{i}": function(Words(False), (step, a)) for i, function in enumerate(functions)}}

    def update(param: Any, grad: Any, c: Any, **_: Any) -> dict[str, Any]:
        numbers = {f"number{i}": getattr(c, f"c{i}") + 0 * param for i in range(len(functions))}
        elements = {f"element{i}": function(Words(False), (param, c.a)) for i, function in enumerate(functions)}
        return {**numbers, **{name: value + 0 * param for name, value in elements.items()}, "step": 0 * grad}

    fields = {f"{kind}{i}": buffer() for kind in ("number", "element") for i in range(len(functions))}
    body = {"a": hyper(default=A), "coefficients": staticmethod(coefficients), "update": staticmethod(update), **fields}
    return type("OfWords", (co.CompiledOptimizer,), {**body, "__annotations__": {"a": Number}})


def errors(results: Iterable[dict[str, torch.Tensor]]) -> dict[str, float]:
    """By expression, the largest error of its value relative to Python's, or to 1, in the state after each step."""
    largest: dict[str, float] = {}
    for step, state in enumerate(results, 1):
        for i, (name, function) in enumerate(expressions().items()):
            number = float(function(Words(True), (float(step), A)))
            exact = {"number": [number] * len(PARAM), "element": [float(function(Words(True), (x, A))) for x in PARAM]}
            for kind, values in exact.items():
                pairs = zip(state[f"{kind}{i}"].tolist(), values, strict=True)
                error = max(abs(result - value) / max(abs(value), 1.0) for result, value in pairs)
                largest[f"{name}, {kind}"] = max(largest.get(f"{name}, {kind}", 0.0), error)
    return largest


def run(lowering: str, *, inlined: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """The errors of steps in a lowering, or in a function that is compiled with the step in it."""
    param = nn.Parameter(torch.tensor(PARAM, dtype=dtype, device="cpu"))
    made = optimizer()([param], lowering=lowering)
    step = torch.compile(made.step, fullgraph=True) if inlined else made.step
    results = []
    for _ in range(STEPS):
        param.grad = torch.tensor(GRAD, dtype=dtype, device="cpu")
        step()
        results.append({name: value.clone() for name, value in made.state[param].items()})
    return errors(results)


def interpreted() -> dict[str, float]:
    """Return the errors of Triton's kernels."""
    return run("multi_tensor")
