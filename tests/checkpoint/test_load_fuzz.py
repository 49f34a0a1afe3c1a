"""Whatever is in a state dict: it loads whole and the optimizer steps on, or it is refused and nothing is changed."""

from __future__ import annotations

import copy
import math
import random
import re
import threading
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from catalog import Case, cases, registry, stacked_cases
from loading import (
    SHAPE,
    Incomparable,
    Liar,
    Named,
    Opaque,
    Uncopyable,
    Wrapper,
    addresses,
    content,
    fake,
    freed,
    live_tensors,
    nested,
    quantized,
    train,
    trained,
)
from torch import Tensor, nn

import compiled_optim as co
from compiled_optim.optimizer import ViewedOptimizer

EXAMPLES = 3000
_LBFGS = [{}, {"line_search_fn": "strong_wolfe"}, {"history_size": 2}, {"fixed_iterations": True}]
LBFGS = [Case(co.LBFGS, tuple({"max_iter": 2, "history_size": 4, **options}.items())) for options in _LBFGS]
CASES = [*cases(), *stacked_cases(), *LBFGS]

# What takes the place of a value. A tensor gets the shape of the one that it replaces, so that its other faults are seen.
ODD: list[Callable[[tuple[int, ...]], Any]] = [
    lambda shape: None,
    lambda shape: "text",
    lambda shape: b"bytes",
    lambda shape: "",
    lambda shape: True,
    lambda shape: -1,
    lambda shape: 1.5,
    lambda shape: 1e300,
    lambda shape: math.nan,
    lambda shape: math.inf,
    lambda shape: -math.inf,
    lambda shape: 2**63,
    lambda shape: -(2**100),
    lambda shape: 10**400,
    lambda shape: -(10**400),
    lambda shape: 1j,
    lambda shape: np.float32(0.5),
    lambda shape: np.ones(3),
    lambda shape: {},
    lambda shape: {"a": 1},
    lambda shape: {1: 2},
    lambda shape: [],
    lambda shape: [1],
    lambda shape: (0.5, 0.5),
    lambda shape: [freed(1), freed(1)],
    lambda shape: Liar({"step": 1}),
    lambda shape: MappingProxyType({"step": 1}),
    lambda shape: threading.Lock(),
    lambda shape: Uncopyable(),
    lambda shape: Incomparable(),
    lambda shape: (i for i in range(3)),
    lambda shape: lambda: None,
    lambda shape: object,
    lambda shape: _circle({}),
    lambda shape: _circle([]),
    lambda shape: torch.zeros(3),
    lambda shape: torch.zeros(()),
    lambda shape: torch.full(shape, math.nan),
    lambda shape: torch.ones(shape).to_sparse(),
    lambda shape: torch.ones(shape, device="meta"),
    lambda shape: torch.ones(shape, dtype=torch.complex64),
    lambda shape: torch.ones(shape, dtype=torch.int64),
    lambda shape: torch.ones(shape, dtype=torch.bool),
    lambda shape: torch.ones(shape, dtype=torch.uint16),
    lambda shape: torch.ones(shape, dtype=torch.float64),
    lambda shape: torch.ones(shape).to(torch.float8_e4m3fn),
    lambda shape: torch.zeros(shape, dtype=torch.float4_e2m1fn_x2),
    lambda shape: torch.ones(()).expand(shape),
    lambda shape: torch.ones(shape, requires_grad=True),
    lambda shape: torch.ones(shape, requires_grad=True) * 1,
    lambda shape: nn.Parameter(torch.ones(shape)),
    lambda shape: nn.UninitializedParameter(),
    lambda shape: torch._efficientzerotensor(shape),
    lambda shape: torch._neg_view(torch.ones(shape)),
    lambda shape: Wrapper(torch.ones(shape)),
    lambda shape: Opaque(torch.ones(shape)),
    lambda shape: fake(*shape),
    lambda shape: freed(*shape),
    lambda shape: freed(*shape, size=4),
    lambda shape: [freed(*shape).as_subclass(Named)],
    lambda shape: freed(*shape).as_subclass(Named),
    lambda shape: quantized(*shape),
    lambda shape: nested(),
    lambda shape: torch.ones(5).to_mkldnn(),
    lambda shape: torch.ones(*shape, 1),
    lambda shape: torch.inference_mode()(torch.ones)(shape),
]


def _circle(value: Any) -> Any:
    """``value``, a container, that holds itself."""
    value.append(value) if isinstance(value, list) else value.update(itself=value)
    return value


Place = tuple[Any, Any]
"""A dict or list in a state dict, and a key of it."""


def _places(tree: Any) -> list[Place]:
    """Every place in ``tree``, from the top."""
    containers, places = [tree], []
    for container in containers:
        keys = list(container) if isinstance(container, dict) else range(len(container))
        places += [(container, key) for key in keys]
        found = [container[key] for key in keys if type(container[key]) in (dict, list)]
        containers += [c for c in found if not any(c is known for known in containers)]
    return places


def _mutate(draw: random.Random, saved: Any, live: list[Tensor]) -> None:
    """Change one place of ``saved``, which is as deep as a state dict."""
    places = _places(saved)
    depth = draw.choice([[p for p in places if p[0] is saved], places, places])
    container, key = draw.choice(depth)
    value, (other, place) = container[key], draw.choice(places)
    shape = tuple(value.shape) if type(value) is Tensor and not value.is_nested else SHAPE
    how = draw.randrange(8)
    if how < 3:
        container[key] = draw.choice(ODD)(shape)
    elif how == 3:
        container[key] = draw.choice(live)
    elif how == 4:
        container[key], other[place] = other[place], value
    elif how == 5:
        del container[key]
    elif isinstance(container, list):
        container.insert(draw.randrange(len(container) + 1), value)
    else:
        container[draw.choice([*container, place, "exp_avgs", "b", "", 1, 17, None])] = (
            value if how == 6 else container.pop(key)
        )


def _lists(value: Any) -> Any:
    """``value`` with tuples as lists, so that there are more places to change."""
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def _load(case: Case, lowering: str, number: int) -> bool:
    """Load one mutated state dict, and say whether it was taken."""
    draw = random.Random(f"{case} {number}")
    torch.default_generator.manual_seed(number)
    kind, single = case.optimizer, case.optimizer is co.LBFGS
    names = "ab" if kind._granularity == "matrix" else "av"
    frozen = names[1] if draw.random() < 0.2 else ""
    optimizer = trained(kind, names, draw.randrange(3), frozen, lowering=lowering, **case.kwargs)
    other = trained(kind, names, draw.randrange(3), grouped=not single and draw.random() < 0.5, **case.kwargs)
    named, source = draw.random() < 0.3, draw.choice([optimizer, other, other])
    saved = _lists(co.named_state_dict(source) if named else source.state_dict())
    for _ in range(draw.choice([1, 1, 2, 3])):
        _mutate(draw, saved, [t for _, t in live_tensors(optimizer)])
    before, places, numbers = content(optimizer), addresses(optimizer), optimizer.hyperparameters()
    load = co.load_named_state_dict if named else type(optimizer).load_state_dict
    options = {"strict": draw.random() < 0.5, "hyperparameters": draw.choice(["checkpoint", "checkpoint", "keep"])}
    try:
        load(optimizer, saved, **options)
    except (ValueError, TypeError):
        assert content(optimizer) == before
        taken = False
    else:
        assert addresses(optimizer).items() >= places.items()
        taken = True
    _refuses_what_is_out_of_range(optimizer, numbers)
    if isinstance(optimizer, ViewedOptimizer):
        optimizer.train()
    train(optimizer)
    copy.deepcopy(optimizer.state_dict())
    return taken


def _refuses_what_is_out_of_range(optimizer: co.CompiledOptimizer, numbers: list[dict[str, Any]]) -> None:
    """A step refuses numbers that were loaded and no step can use; ``numbers`` are those to go on with."""
    groups: list[Any] = optimizer.param_groups
    if not (messages := [message for group in groups for message, _ in group.out_of_range.values()]):
        return
    with pytest.raises(ValueError, match=re.escape(messages[0])):
        train(optimizer)
    for group, own in zip(groups, numbers, strict=True):
        group.update({key: own[key] for key in group.out_of_range})


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mutated_state_dict_loads_or_is_refused(case: Case) -> None:
    count = math.ceil(EXAMPLES / len(CASES))
    assert {_load(case, "eager", number) for number in range(count)} == {False, True}


@pytest.mark.parametrize("kind", [co.AdamW, co.SGD, co.NAdam], ids=lambda c: c.__name__)
def test_into_a_compiled_optimizer(kind: type[co.CompiledOptimizer]) -> None:
    case = Case(kind, (("lr", 0.1),))
    assert {_load(case, "multi_tensor", number) for number in range(60)} == {False, True}


def test_every_optimizer_is_tried() -> None:
    assert {case.optimizer for case in CASES} == set(registry())
