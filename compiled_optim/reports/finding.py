"""The type of all that reports find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compiled_optim.groups.parameters import first_few


@dataclass(frozen=True)
class Finding:
    """An error, or something that is probably a mistake or costs time. Each class of report lists the names of its own.

    Attributes:
        name: a word or two for all findings of this kind, such as ``"no gradient"``.
        params: the names of the parameters concerned; empty if it is about something else, such as compiled code.
        evidence: the facts, in words.
        advice: a remedy, or the cost; "" if there is none to tell.
        figures: the numbers in ``evidence`` by name; empty except in a :class:`NumericsReport`.
    """

    name: str
    params: tuple[str, ...]
    evidence: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"warning ({self.name}): {f'{first_few(self.params)}: ' if self.params else ''}{self.said}"

    @property
    def said(self) -> str:
        """The evidence with the advice, if there is some."""
        return "; ".join(filter(None, (self.evidence, self.advice)))
