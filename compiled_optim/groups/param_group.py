"""The parameter group: a dict whose hyperparameters are 0-dim device tensors, and what assigning to it means.

A group's tensors belong to the group alone, except one that the constructor was given and adopts. An assignment puts a new
tensor in the group, so nothing that somebody read, saved or passed in earlier changes. A write into the tensor itself
(``fill_``, which torch's schedulers use) counts too, because the step reads the tensor. Neither changes a Python value that
compiled code could depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from compiled_optim.groups.watched import Changes, WatchedDict, WatchedList
from compiled_optim.memory.layout import scalar, scalar_dtype
from compiled_optim.rule.rule import Declaration
from compiled_optim.torch_internals import is_capturing, is_fake, outside_dynamo

ROUNDING = 1e-9
"""How far a number that a scheduler computed may be out of range."""


class ParamGroup(WatchedDict[str, Any]):
    """One entry of ``optimizer.param_groups``.

    A write to a *structural* key is reported, since it changes which parameters are updated or with which code: ``params``,
    ``maximize``, ``differentiable`` and the static choices. A hyperparameter that decides, by being 0 or not, whether a
    buffer exists is not reported, since a write into its tensor cannot be: :meth:`nonzero` is asked before each step.

    Args:
        values: the group's entries, every hyperparameter among them.
        declaration: what the optimizer declares.
        device: where the hyperparameter tensors live.
        label: the group's name in error messages.
        check: called with all entries before a write to a structural key, to raise an error.
        changes: where a write to a structural key is reported.
        others: the optimizer's other groups, whose tensors this one does not adopt.

    A hyperparameter that is already a 0-dim floating tensor on ``device`` is adopted: later in-place writes by its owner
    are seen. Every other value is copied into a new tensor, and so is a tensor that stands in a second place.

    Attributes:
        live: the hyperparameters once more, in a dict that compiled code can read.
        on_assignment: called with the name of a hyperparameter that got new tensors.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        declaration: Declaration,
        device: torch.device,
        label: str,
        check: Callable[[Mapping[str, Any]], None],
        changes: Changes,
        others: Iterable[ParamGroup],
    ) -> None:
        super().__init__(changes=changes)
        self.label = label
        self.live: dict[str, Any] = {}
        self.on_assignment: Callable[[str], None] | None = None
        self._check = check
        self._hypers = {h.name: h for h in declaration.hypers}
        self._structural = {"params", "maximize", "differentiable", *(s.name for s in declaration.statics)}
        self._device = device
        self._made: Any = WeakIdKeyDictionary()  # tensor -> the (key, index) it was made or adopted for
        self._zeros: dict[str, int] = {}  # hyperparameter that was assigned a Python 0 -> its tensor's version then
        taken = {_address(t) for group in others for key in group._hypers for t in group.tensors(key)}
        for key, value in values.items():
            if key in self._hypers:
                elements = self._hypers[key].elements(value, label)
                self._store(key, [self._adopt(key, i, e, taken) for i, e in enumerate(elements)], elements)
            else:
                self.set_quietly(key, value)

    def set_quietly(self, key: str, value: Any) -> None:
        """Write without reporting; ``params`` becomes a list that reports."""
        super().set_quietly(key, WatchedList(self._changes, value) if key == "params" else value)

    def tensors(self, key: str) -> tuple[Tensor, ...]:
        """The live tensors of one hyperparameter, 0-dim and of :func:`scalar_dtype`: one for each number that it holds."""
        value = self[key]
        elements = value if isinstance(value, tuple) else (value,)
        if all(isinstance(e, Tensor) for e in elements):
            return elements
        self[key] = value  # ``dict.__setitem__`` went past this class
        return self.tensors(key)

    def nonzero(self, key: str) -> bool:
        """Whether a hyperparameter of one number may differ from 0. The device is not read.

        The hyperparameter counts as 0 only if a Python 0 was assigned and nothing was written into its tensor since.
        """
        version = self._zeros.get(key)
        return version is None or self.tensors(key)[0]._version != version

    def to(self, device: torch.device) -> None:
        """Move the hyperparameters to ``device``, after their parameters moved there."""
        if device == self._device:
            return
        self._device = device
        for key in self._hypers:
            tensors = self.tensors(key)
            self._store(
                key, [self._fresh(key, i, t) for i, t in enumerate(tensors)], tensors if self.nonzero(key) else (0.0,)
            )

    def floats(self) -> dict[str, Any]:
        """Every hyperparameter as a Python float or a tuple of them. Waits for the device."""
        values = {key: tuple(self._number(key, i, t) for i, t in enumerate(self.tensors(key))) for key in self._hypers}
        return {key: v if self._hypers[key].is_tuple else v[0] for key, v in values.items()}

    def _number(self, key: str, index: int, tensor: Tensor) -> float | None:
        number = tensor.item()
        return None if math.isnan(number) and self._hypers[key].optional(index) else number

    def validated(self, key: str, value: Any, slack: float = 0.0) -> tuple[float | Tensor, ...]:
        """The elements of ``value`` for hyperparameter ``key``.

        Raises:
            TypeError: an element is not a number.
            ValueError: an element is not a single number, or out of its range, whose inclusive bounds are wider by
                ``slack``. A tensor on an accelerator is not read, since that would wait for the device.
        """
        return self._hypers[key].checked(value, self.label, slack)

    def fill(self, key: str, value: Any) -> None:
        """Copy ``value`` into the live tensors, whose identity and address stay.

        Raises:
            TypeError, ValueError: as :meth:`validated`, with a slack of :data:`ROUNDING`.
        """
        elements = self.validated(key, value, ROUNDING)
        tensors = self.tensors(key)
        for tensor, element in zip(tensors, elements, strict=True):
            value = self._without_wait(element)
            live = tensor.detach()
            live.copy_(value.reshape(())) if isinstance(value, Tensor) else live.fill_(value)
        self._store(key, tensors, elements)

    def unshare(self, key: str) -> None:
        """Replace the tensors of one hyperparameter by equal ones that nobody else holds."""
        tensors = self.tensors(key)
        self._store(key, [self._fresh(key, i, t) for i, t in enumerate(tensors)], tensors)

    def reinstate(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Put tensors that the group held earlier back in place of what was assigned since."""
        self._store(key, tensors, tuple(tensors))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As ``dict.update``, but nothing is written if one of the values is refused."""
        values = dict(*args, **kwargs)
        numbers = {key: value for key, value in values.items() if key in self._hypers}
        for key, value in numbers.items():
            self.validated(key, value)
        if self._structural & (values.keys() - numbers.keys()):
            self._check({**self, **values})
        super().update({**numbers, **values})  # numbers first: choices are checked against them

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

    def _store(self, key: str, tensors: Sequence[Tensor], values: Sequence[float | Tensor]) -> None:
        """Let ``tensors`` be the live ones of a hyperparameter, which was assigned ``values``."""
        self._zeros.pop(key, None)  # an interrupt after this line leaves nothing that is wrongly taken for 0
        self.live[key] = tuple(tensors) if self._hypers[key].is_tuple else tensors[0]
        self.set_quietly(key, self.live[key])
        if not isinstance(values[0], Tensor) and values[0] == 0:
            self._zeros[key] = tensors[0]._version

    def _settle(self, key: str, index: int, element: float | Tensor) -> Tensor:
        if isinstance(element, Tensor) and self._made.get(element) == (key, index):
            return element  # somebody saved the group's tensor and puts it back
        return self._fresh(key, index, element)

    def _adopt(self, key: str, index: int, element: float | Tensor, taken: set[int]) -> Tensor:
        if not isinstance(element, Tensor) or element.device != self._device or not element.is_floating_point():
            return self._fresh(key, index, element)
        if _address(element) in taken:
            return self._fresh(key, index, element)
        taken.add(_address(element))
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
        """``element``, or the number in it if it is a tensor on the host and the group is elsewhere."""
        if not isinstance(element, Tensor) or element.requires_grad or self._device.type == "cpu":
            return element
        return element.item() if element.device.type == "cpu" else element


def _address(tensor: Tensor) -> int:
    """Where a tensor lies; 0 for a fake one, which must not be asked."""
    return 0 if is_fake(tensor) else tensor.data_ptr()
