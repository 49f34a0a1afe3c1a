"""The names with which the file of an optimizer declares fields and writes its rule."""

from compiled_optim.rule.fields import Number, buffer, fact, hyper, scalar, static
from compiled_optim.rule.rule import ema, mean, total
from compiled_optim.rule.transforms import Accumulation, decayed
from compiled_optim.rule.vocabulary import (
    absolute,
    bias_correction,
    exp,
    floor,
    gram,
    identity,
    log,
    maximum,
    minimum,
    power,
    product,
    quadratic,
    sign,
    sqrt,
    where,
)

__all__ = [
    "Accumulation",
    "Number",
    "absolute",
    "bias_correction",
    "buffer",
    "decayed",
    "ema",
    "exp",
    "fact",
    "floor",
    "gram",
    "hyper",
    "identity",
    "log",
    "maximum",
    "mean",
    "minimum",
    "power",
    "product",
    "quadratic",
    "scalar",
    "sign",
    "sqrt",
    "static",
    "total",
    "where",
]
