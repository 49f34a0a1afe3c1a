"""Names of parameters when others take their places in a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_optim as co

P = torch.nn.Parameter


def _optimizer(**options: Any) -> co.AdamW:
    return co.AdamW([("0.weight", P(torch.ones(4, 2))), ("0.bias", P(torch.ones(4)))], lowering="eager", **options)


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ([(12,)], [None]),  # one flat tensor for all
        ([(8,), (4,), (3,)], [None, "0.bias", None]),
        ([(4, 2)], ["0.weight"]),
        ([(2, 4), (4,)], ["0.weight", "0.bias"]),  # as many as before
    ],
)
def test_a_name_is_inherited_where_the_shape_or_the_number_stays(shapes: Any, names: Any) -> None:
    optimizer = _optimizer()
    group = optimizer.param_groups[0]
    group["params"] = [P(torch.ones(shape)) for shape in shapes]
    optimizer.state_dict()
    assert group["param_names"] == [n or f"param_groups[0]['params'][{i}]" for i, n in enumerate(names)]


def test_numbers_for_names_that_are_gone_are_refused() -> None:
    optimizer = _optimizer(lr_scale={"0.weight": 0.0})
    flat = P(torch.ones(12))
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    with pytest.raises(ValueError, match=r"lr_scale has a number for '0\.weight', which no parameter is called"):
        optimizer.step()
    assert bool((flat == 1).all())
