"""Names of parameters when others take their places in a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catalog import registry

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


CHOICES: dict[str, Any] = {
    "lr_scale": {"0.weight": 0.0},
    "exclude": ("*.weight",),
    "stacks": ("0.w*",),
    "split": {"0.weight": 2},
}
"""All options by names of parameters."""


def test_these_are_all_options_by_name() -> None:
    found = {o.name for kind in registry() for o in kind._options()}
    by_name = {o.name for kind in registry() for o in kind._options() if o.patterns}
    assert by_name | {"lr_scale"} == {*CHOICES} <= found


def _chosen(option: str) -> Any:
    kind = co.Muon if option in ("stacks", "split") else co.AdamW
    params = [("0.weight", P(torch.ones(*[2] * (option == "stacks"), 4, 2))), ("0.other", P(torch.ones(2, 2)))]
    return kind(params, lr=0.1, lowering="eager", **{option: CHOICES[option]})


@pytest.mark.quick
@pytest.mark.parametrize("call", ["step", "load_state_dict", "state_dict", "add_param_group"])
@pytest.mark.parametrize("option", CHOICES)
def test_choices_for_names_that_are_gone_are_refused(option: str, call: str) -> None:
    """A flat tensor in the place of several, as DeepSpeed's ZeRO puts it there, is none of them."""
    optimizer, flat = _chosen(option), P(torch.ones(12, 1))
    saved, flat.grad = optimizer.state_dict(), torch.ones_like(flat)
    optimizer.param_groups[0]["params"] = [flat]
    given = {"load_state_dict": [saved], "add_param_group": [{"params": [("new", P(torch.ones(2, 2)))]}]}
    said = rf"{option} has '.*' for '0\.weight', which a tensor without a name replaced"
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            getattr(optimizer, call)(*given.get(call, []))
        assert bool((flat == 1).all())
        assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][option] = type(CHOICES[option])()
    optimizer.step()
    assert not bool((flat == 1).all())


@pytest.mark.parametrize("option", CHOICES)
def test_choices_for_names_that_stay_or_were_given_up_are_not(option: str) -> None:
    optimizer = _chosen(option)
    group = optimizer.param_groups[0]
    first, other = group["params"]
    for params, names in (
        ([P(torch.ones(first.shape)), other], ["0.weight", "0.other"]),  # the new one takes the name
        ([other], ["0.other"]),
        ([], []),
    ):
        group["params"] = params
        optimizer.state_dict()
        assert group["param_names"] == names


@pytest.mark.parametrize("more", [1, 2])
def test_a_parameter_that_is_removed_and_one_that_is_added_are_no_exchange(more: int) -> None:
    tensors = [torch.nn.Parameter(torch.ones(2)) for _ in range(3 + more)]
    named = list(zip(("a.w", "b.w", "c.w"), tensors, strict=False))
    optimizer = co.AdamW([{"params": named, "exclude": ("a.*",)}], weights=None, lr_scale={"a.w": 0.5})
    group = optimizer.param_groups[0]
    group["params"].pop(0)
    group["params"].extend(tensors[3:])
    for param in group["params"]:
        param.grad = torch.ones(2)
    optimizer.step()
    assert group["param_names"][:2] == ["b.w", "c.w"]
