"""Constructors, defaults and errors of every optimizer of the installed torch.optim, against ours of that name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from catalog import registry
from torch.testing._internal.common_optimizers import optim_db

INSTALLED = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
OURS = {kind.__name__: kind for kind in registry()}

# What we have in every version, and torch.optim from 2.15 on: arguments, and what is said of them where they are wrong.
EARLIER: list[tuple[str, dict[str, Any], str | None]] = [
    ("ASGD", {"lambd": -1.0}, "Invalid lambd value: -1.0"),
    ("ASGD", {"alpha": -1.0}, "Invalid alpha value: -1.0"),
    ("LBFGS", {"maximize": True}, None),
    ("Muon", {"adjust_lr_fn": "spectral_unclamped"}, None),
]

# torch's restrictions on its own implementations, which do not exist here.
_LIFTED = ("foreach", "fused", "betas must be either both floats or both Tensors")

# torch 2.15 takes a set of parameters and warns of it. Earlier and later versions raise an error, as ours do.
_REFUSED = ("warn on a bare unordered set of params",)

# torch.optim.Adafactor words its bounds in a way of its own.
_REWORDED = {
    "epsilon1 should be >= 0": r"Invalid epsilon value: .* \(the argument eps\[0\] must be >= 0 and < inf\)",
    "Clipping threshold d should be >= 1": r"\(the argument d must be >= 1\)",
    "beta2_decay should be <= 0": r"\(the argument beta2_decay must be > -inf and <= 0\)",
}


def _weight() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2, 3))]


def _inputs() -> list[Any]:
    return [
        pytest.param(info.optim_cls.__name__, given.kwargs, id=f"{info.optim_cls.__name__}-{given.desc}")
        for info in optim_db
        for given in info.optim_inputs_func(device="cpu")
    ]


def _errors() -> list[Any]:
    return [
        pytest.param(info.optim_cls.__name__, error, id=f"{info.optim_cls.__name__}-{error.optimizer_error_input.desc}")
        for info in optim_db
        for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
        if not any(word in error.error_regex for word in _LIFTED)
        and error.error_on.name == "CONSTRUCTION_ERROR"
        and error.optimizer_error_input.desc not in _REFUSED
    ]


def test_torch_lists_inputs_and_errors_of_all_that_it_has() -> None:
    assert {p.values[0] for p in _inputs()} == {p.values[0] for p in _errors()} == set(INSTALLED) <= set(OURS)


@pytest.mark.parametrize("name", INSTALLED)
def test_signature_begins_like_torchs(name: str) -> None:
    """Names, order, defaults and kinds of torch.optim's parameters; ours add only keyword-only ones."""
    theirs = inspect.signature(INSTALLED[name]).parameters.values()
    ours = inspect.signature(OURS[name]).parameters
    positional = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    for parameter in theirs:
        assert ours[parameter.name].default == parameter.default, parameter.name
        assert ours[parameter.name].kind == parameter.kind, parameter.name


@pytest.mark.parametrize("name", INSTALLED)
def test_defaults_and_groups_are_torchs(name: str) -> None:
    ours, theirs = OURS[name](_weight()), INSTALLED[name](_weight())
    if name == "LBFGS":
        theirs.defaults["max_eval"] = None  # ours is the group's that it belongs to: what max_iter makes it
    assert ours.defaults == theirs.defaults
    assert ours.param_groups[0].keys() == theirs.param_groups[0].keys()
    (saved,), (expected,) = (optimizer.state_dict()["param_groups"] for optimizer in (ours, theirs))
    assert saved == expected


@pytest.mark.parametrize(("name", "given"), _inputs())
def test_what_torch_takes_is_taken(name: str, given: dict[str, Any]) -> None:
    theirs = INSTALLED[name](_weight(), **given).state_dict()["param_groups"][0]
    ours = OURS[name](_weight(), **given).state_dict()["param_groups"][0]
    run_time = {"foreach", "capturable", "differentiable", "fused"}
    assert {k: v for k, v in ours.items() if k not in run_time} == {
        k: tuple(map(_number, v)) if isinstance(v, tuple) else _number(v) for k, v in theirs.items() if k not in run_time
    }


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("name", "error"), _errors())
def test_errors_of_torch(name: str, error: Any) -> None:
    given = error.optimizer_error_input
    params = given.params if given.params is not None else _weight()
    with pytest.raises(error.error_type, match=_REWORDED.get(error.error_regex, error.error_regex)):
        OURS[name](params, **given.kwargs)


@pytest.mark.parametrize(("name", "arguments", "message"), EARLIER)
def test_what_is_here_before_it_is_in_torch(name: str, arguments: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert arguments.items() <= OURS[name](_weight(), **arguments).param_groups[0].items()
        return
    with pytest.raises(ValueError, match=message):
        OURS[name](_weight(), **arguments)
