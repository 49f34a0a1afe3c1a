"""The parameter group: a dict whose hyperparameters are 0-dim device tensors, and what assigning to it means.

A group's tensors belong to the group alone, but for one that the constructor was given and adopts. An assignment puts a
fresh tensor in the group, so nothing that somebody read, saved or passed in earlier changes; a write into the tensor itself
(``fill_``, which torch's schedulers use) is honoured, because the step reads the tensor. Neither changes a Python value that
compiled code could depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from compiled_optim.rule.fields import Hyper
from compiled_optim.torch_internals import is_capturing, is_fake, outside_dynamo
from compiled_optim.watched import Changes, WatchedDict, WatchedList

ROUNDING = 1e-9
"""How far what a scheduler computed may be out of range."""


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype of hyperparameters, step counts and coefficients: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def scalar(number: float, device: torch.device) -> Tensor:
    """A new 0-dim tensor on ``device``, filled there: to copy a number there would wait for the device."""
    return torch.full((), number, dtype=scalar_dtype(device), device=device)


def address(tensor: Tensor) -> int:
    """Where a tensor lies; 0 where it is a fake one, which must not be asked."""
    return 0 if is_fake(tensor) else tensor.data_ptr()


class ParamGroup(WatchedDict[str, Any]):
    """One entry of ``optimizer.param_groups``.

    Args:
        values: the group's entries, every hyperparameter among them.
        hypers: the declared hyperparameters.
        structural: keys whose change alters what is updated or with which code; a write to them is reported.
        device: where the hyperparameter tensors live.
        label: the group's name in error messages.
        check: called with all entries, before a write to a structural key that is no hyperparameter, to raise an error.
        changes: where a write to a structural key is reported.
        taken: addresses of tensors that belong to other groups and must not be adopted here.

    A hyperparameter that is already a 0-dim floating tensor on ``device`` is adopted: later in-place writes by its owner
    are seen. Every other value, and a tensor in its second place, is copied into a new tensor.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        hypers: Collection[Hyper],
        structural: Collection[str],
        device: torch.device,
        label: str,
        check: Callable[[Mapping[str, Any]], None],
        changes: Changes,
        taken: Collection[int] = (),
    ) -> None:
        super().__init__(changes=changes)
        self.label = label
        self._check = check
        self._hypers = {h.name: h for h in hypers}
        self._structural = frozenset(structural)
        self._device = device
        self.live: dict[str, Any] = {}  # the hyperparameters once more, in a dict that compiled code can read
        self._made: Any = WeakIdKeyDictionary()  # tensor -> (key, index) it was made or adopted for
        self.on_assignment: Callable[[str], None] | None = (
            None  # called with the name of a hyperparameter that got new tensors
        )
        self._zeros: dict[str, int] = {}  # structural hyperparameter assigned a Python 0 -> its tensor's version then
        adopted = set(taken)
        for key, value in values.items():
            if key in self._hypers:
                elements = self._hypers[key].elements(value, label)
                self._store(key, [self._adopt(key, i, e, adopted) for i, e in enumerate(elements)], elements)
            else:
                self.set_quietly(key, value)

    def set_quietly(self, key: str, value: Any) -> None:
        """Write without reporting; ``params`` becomes a list that reports."""
        super().set_quietly(key, WatchedList(self._changes, value) if key == "params" else value)

    def tensors(self, key: str) -> tuple[Tensor, ...]:
        """The live 0-dim tensors of one hyperparameter, single values and tuples alike."""
        value = self[key]
        elements = value if isinstance(value, tuple) else (value,)
        if all(isinstance(e, Tensor) for e in elements):
            return elements
        self[key] = value  # somebody wrote past this class, with dict.__setitem__
        return self.tensors(key)

    def nonzero(self, key: str) -> bool:
        """Whether a structural hyperparameter may differ from 0; the device is not read.

        It is 0 only where a Python 0 was assigned and nothing was written into the tensor since.
        """
        version = self._zeros.get(key)
        return version is None or self.tensors(key)[0]._version != version

    def to(self, device: torch.device) -> None:
        """Move the hyperparameters to ``device``, after their parameters moved there."""
        if device == self._device:
            return
        self._device = device
        for key in self._hypers:
            zero = (0.0,) if key in self._structural and not self.nonzero(key) else (self.tensors(key)[0],)
            self._store(key, [self._fresh(key, i, t) for i, t in enumerate(self.tensors(key))], zero)

    def floats(self) -> dict[str, Any]:
        """Every hyperparameter as Python floats."""
        values = {key: tuple(self._number(key, i, t) for i, t in enumerate(self.tensors(key))) for key in self._hypers}
        return {key: v if self._hypers[key].is_tuple else v[0] for key, v in values.items()}

    def _number(self, key: str, index: int, tensor: Tensor) -> float | None:
        number = tensor.item()
        return None if math.isnan(number) and self._hypers[key].optional(index) else number

    def validated(self, key: str, value: Any, slack: float = 0.0) -> tuple[float | Tensor, ...]:
        """The elements of ``value`` for hyperparameter ``key``.

        Raises:
            TypeError: an element is not a number.
            ValueError: an element is out of its range, of which inclusive bounds get ``slack``, or not a single number. A
                tensor on an accelerator is not read, since that would wait for the device.
        """
        return self._hypers[key].checked(value, self.label, slack)

    def fill(self, key: str, value: Any) -> None:
        """Copy ``value`` into the live tensors, whose identity and address stay.

        It may be as far out of range as a scheduler's rounding takes it.
        """
        elements = self.validated(key, value, ROUNDING)
        owned = self.tensors(key)
        for tensor, element in zip(owned, elements, strict=True):
            value = self._without_wait(element)
            live = tensor.detach()
            live.copy_(value.reshape(())) if isinstance(value, Tensor) else live.fill_(value)
        self._store(key, owned, elements)

    def own(self, key: str) -> None:
        """Replace the tensors of one hyperparameter by equal ones that nobody else holds."""
        owned = self.tensors(key)
        self._store(key, [self._fresh(key, i, t) for i, t in enumerate(owned)], owned)

    def restore(self, key: str, owned: Sequence[Tensor]) -> None:
        """Put tensors that were the group's own back in place of what was assigned since."""
        self._store(key, owned, tuple(owned))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As ``dict.update``; nothing is written if one of the values is refused."""
        values = dict(*args, **kwargs)
        numbers = {key: value for key, value in values.items() if key in self._hypers}
        for key, value in numbers.items():
            self.validated(key, value)
        if self._structural & (values.keys() - numbers.keys()):
            self._check({**self, **values})
        super().update({**numbers, **values})  # the choices last, which are checked against the numbers

    @outside_dynamo
    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._hypers:
            elements = self.validated(key, value)
            before = self.get(key)
            self._store(key, [self._settle(key, i, e) for i, e in enumerate(elements)], elements)
            if self.on_assignment is not None and self[key] is not before:
                self.on_assignment(f"{self.label}[{key!r}]")
            return
        if isinstance(value, Tensor) and value in self._made:
            value = value.detach().clone()  # "initial_lr" must not alias the live lr
        if key in self._structural:
            self._check({**self, key: value})
            self.report()
        self.set_quietly(key, value)

    def _store(self, key: str, owned: Sequence[Tensor], given: tuple[float | Tensor, ...]) -> None:
        self._zeros.pop(key, None)  # whatever happens from here on, it is not taken for 0
        self.live[key] = tuple(owned) if self._hypers[key].is_tuple else owned[0]
        self.set_quietly(key, self.live[key])
        if key in self._structural and not isinstance(given[0], Tensor) and given[0] == 0:
            self._zeros[key] = owned[0]._version

    def _settle(self, key: str, index: int, element: float | Tensor) -> Tensor:
        if isinstance(element, Tensor) and self._made.get(element) == (key, index):
            return element  # saved and put back: the identity is restored too
        return self._fresh(key, index, element)

    def _adopt(self, key: str, index: int, element: float | Tensor, taken: set[int]) -> Tensor:
        if not isinstance(element, Tensor) or element.device != self._device or not element.is_floating_point():
            return self._fresh(key, index, element)
        if address(element) in taken:
            return self._fresh(key, index, element)
        taken.add(address(element))
        adopted = element if element.dim() == 0 else element.reshape(())
        self._made[adopted] = (key, index)
        return adopted

    def _fresh(self, key: str, index: int, element: float | Tensor) -> Tensor:
        if is_capturing(self._device):
            raise RuntimeError(
                f"{self.label}[{key!r}] is assigned while a CUDA graph is being captured, and no replay would do that "
                "again; set hyperparameters outside"
            )
        dtype = scalar_dtype(self._device)
        value = self._without_wait(element)
        if not isinstance(value, Tensor):
            tensor = scalar(value, self._device)
        elif value.requires_grad:
            tensor = value.reshape(()).to(self._device, dtype)  # a differentiable step reaches back through it
        else:
            tensor = value.detach().reshape(()).to(self._device, dtype, copy=True)
        self._made[tensor] = (key, index)
        return tensor

    def _without_wait(self, element: float | Tensor) -> float | Tensor:
        """What to copy from: the number in a tensor on the host, where the group is elsewhere."""
        if not isinstance(element, Tensor) or element.requires_grad or self._device.type == "cpu":
            return element
        return element.item() if element.device.type == "cpu" else element
