"""All reports take the optimizers of this package, and have findings of one type."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import compiled_optim as co

REPORTS: dict[str, Callable[[Any], Any]] = {
    "check_numerics": co.check_numerics,
    "compile_report": co.compile_report,
    "explain": lambda optimizer: co.explain({}, optimizer),
    "health": co.health,
    "memory_report": co.memory_report,
}


@pytest.mark.parametrize("name", [*REPORTS, "as_module"])
def test_other_optimizers_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} takes an optimizer of compiled_optim, got SGD$"):
        {**REPORTS, "as_module": co.as_module}[name](torch.optim.SGD([torch.zeros(1)]))


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_a_record_that_explains_each_attribute(name: str) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = co.SGD([("weight", weight)], lr=1e-9)
    weight.grad = torch.ones_like(weight)
    report = REPORTS[name](optimizer)
    assert type(report).__dataclass_params__.frozen
    attributes = [field.name for field in dataclasses.fields(report)]
    assert re.findall(r"^    (\w+): ", inspect.getdoc(type(report)), re.MULTILINE) == attributes
    assert type(report.findings) is tuple
    assert all(type(finding) is co.Finding for finding in report.findings)
    assert bool(report.findings) == (name in ("check_numerics", "explain"))
    assert {finding.params for finding in report.findings} <= {("weight",)}


def test_a_finding_in_words() -> None:
    finding = co.Finding("narrow", ("a", "b", "c", "d", "e"), "it is narrow")
    assert str(finding) == "warning (narrow): a, b, c and 2 more: it is narrow"
    assert str(dataclasses.replace(finding, params=(), advice="widen it")) == "warning (narrow): it is narrow; widen it"
    assert len({finding, dataclasses.replace(finding)}) == 1
