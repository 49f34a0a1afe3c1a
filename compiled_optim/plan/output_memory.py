"""The outputs of updates, by parameter, and the memory to which they are written. It outlives plans."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from operator import attrgetter
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from compiled_optim.memory.layout import has_memory, local, real_numel
from compiled_optim.rule.outputs import NONE, Outputs

_version = attrgetter("_version")


@dataclasses.dataclass
class ParamOutputs:
    """The outputs of one parameter.

    Attributes:
        param: the parameter in its group, which is kept alive.
        index: its index among the step's parameters.
        is_written: whether others wrote it since changes were handed over.
        words: its changed bits, int32 of shape (elements / 32, rounded up,). Element ``i`` in the order of memory, of a
            DTensor's local shard, has bit ``i % 32`` of word ``i // 32``. Steps set bits, and clear none. None if no step
            updates it.
        sums: its sums in the last step that updated it, a view of the memory to which steps write; 0 before.
        address: of its memory, or of its local shard's, when that was last seen.
    """

    param: Tensor
    index: int
    is_written: bool
    words: Tensor | None
    sums: Tensor
    address: int


class OutputMemory:
    """The outputs of one optimizer's updates, and the memory to which they are written.

    Writes of others are seen by a tensor's version or address. They are noted on the host, so that nothing is launched.

    Attributes:
        choice: the outputs that an update has.
        marks: whether changed bits are among them.
        counters: tensors that steps in compiled code get beside their parameters, as attributes. After a step, compiled code
            counts up the versions of all of these together, when no Python of the package runs.
    """

    def __init__(self, choice: Outputs, device: torch.device) -> None:
        self.choice, self.marks, self._device = choice, choice.served is not None, device
        self.counters = SimpleNamespace()
        self._known: dict[int, ParamOutputs] = {}  # by the id of the parameter
        # Parameters, and the local shards of DTensors, each with its parameter's outputs, and their versions after a step.
        self._watched: tuple[list[ParamOutputs], list[Tensor], list[int]] = [], [], []
        self._counted: dict[tuple[int, ...], str] = {}  # names of counters, by the indices of parameters
        self._counts: dict[str, int] = {}  # the versions of the counters, after the last step
        self._is_begun = False  # whether parameters were followed before

    def follow(self, updated: Collection[Tensor], params: Sequence[Tensor]) -> None:
        """Take the parameters of a step from now on, and those of them whose updates have outputs."""
        self.see_writes()
        ids = set(map(id, updated))
        known = {id(param): self._followed(param, index, id(param) in ids) for index, param in enumerate(params)}
        if [*known] != [*self._known]:  # compiled code is traced again
            self.counters, self._counted = SimpleNamespace(), {}
        pairs = [(of, t) for of in known.values() for t in {id(t): t for t in (of.param, local(of.param))}.values()]
        seen = [(of, tensor) for of, tensor in pairs if not (is_lazy(tensor) or tensor.is_inference())]  # with versions
        self._known, self._is_begun = known, True
        self._watched = [of for of, _ in seen], [tensor for _, tensor in seen], [tensor._version for _, tensor in seen]
        self.note_step()

    def _followed(self, param: Tensor, index: int, is_updated: bool) -> ParamOutputs:
        """Return the outputs of ``param``. It counts as written if it comes after others, or has other memory."""
        values, known, words, is_written = local(param), self._known.get(id(param)), None, self._is_begun
        sums = torch.zeros(len(self.choice.sums), dtype=torch.float64, device=values.device)
        if known is not None:
            self._see_address(known)
            words, is_written, sums = known.words, known.is_written, known.sums
        count = -(-real_numel(values) // 32) if is_updated else 0
        if words is None or len(words) != count or words.device != values.device:
            words = torch.zeros(count, dtype=torch.int32, device=values.device)
        return ParamOutputs(param, index, is_written, words if is_updated else None, sums, _address(param))

    def of(self, param: Tensor) -> ParamOutputs:
        """Return the outputs of a parameter of the step."""
        return self._known[id(param)]

    def words(self, param: Tensor) -> Tensor:
        """Return the changed bits of a parameter that steps update."""
        words = self.of(param).words
        assert words is not None
        return words

    def note_step(self) -> None:
        """Note that all writes so far are those of a step, or are known."""
        owners, tensors, _ = self._watched
        self._watched = owners, tensors, [*map(_version, tensors)]  # at once, whatever interrupts it
        self._counts = {name: counter._version for name, counter in vars(self.counters).items()}

    def see_writes(self) -> None:
        """Note which versions changed since :meth:`note_step`, by others than compiled code with a step."""
        owners, tensors, versions = self._watched
        now = [*map(_version, tensors)]
        if now == versions:
            return
        by_code = Counter[int]()
        for indices, name in self._counted.items():
            if more := getattr(self.counters, name)._version - self._counts.get(name, 0):
                by_code.update(dict.fromkeys(indices, more))
        for of, version, old in zip(owners, now, versions, strict=True):
            of.is_written |= version != old + by_code[of.index]

    def see_addresses(self) -> None:
        """Note which parameters have other memory."""
        for known in self._known.values():
            self._see_address(known)

    @staticmethod
    def _see_address(of: ParamOutputs) -> None:
        if (address := _address(of.param)) != of.address:
            of.is_written, of.address = True, address

    def counter(self, indices: Sequence[int]) -> str:
        """Return the name of the counter of compiled code that steps the parameters at ``indices``."""
        key = tuple(indices)
        if (name := self._counted.get(key)) is None:
            name = self._counted[key] = f"counter{len(self._counted)}"
            setattr(self.counters, name, torch.zeros(1, device=self._device))
        return name

    def counter_of(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the counter of a step of the parameters at ``indices`` in compiled code, if there is one."""
        return [getattr(self.counters, name)] if (name := self._counted.get(tuple(indices))) else []

    def outdate(self) -> None:
        """Let all parameters count as written, after a step or a read that did not end."""
        for known in self._known.values():
            known.is_written = True

    def clear(self) -> None:
        """Clear the changed bits of all parameters."""
        for known in self._known.values():
            if known.words is not None:
                known.words.zero_()
            known.is_written = False
        self.note_step()

    def sums(self, params: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the sums of ``params``, float64 of shape (sums, params), of the last step that updated each; 0 before."""
        sums = torch.stack([self.of(param).sums.to(device) for param in params], dim=1)
        for param, of_param in zip(params, sums.unbind(1), strict=True):
            self.of(param).sums = of_param
        return sums

    def read(self, param: Tensor) -> dict[str, Tensor]:
        """Return the sums of ``param`` by name, 0-dim views of the memory to which steps write."""
        return dict(zip(self.choice.sums, self.of(param).sums, strict=True))


def _address(param: Tensor) -> int:
    """Return the address of the memory of a parameter, or of its local shard; 0 if it has none."""
    return 0 if is_lazy(param) or not has_memory(values := local(param)) else values.data_ptr()


NO_OUTPUTS = OutputMemory(NONE, torch.device("cpu"))
"""No output and no memory."""
