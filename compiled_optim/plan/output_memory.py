"""The outputs of updates, by parameter, and the memory to which they are written. It outlives plans."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from compiled_optim.memory.layout import has_memory, local, real_numel
from compiled_optim.rule.outputs import NONE, Outputs

_version = attrgetter("_version")


@dataclasses.dataclass
class ParamOutputs:
    """The outputs of one parameter.

    Attributes:
        param: the parameter in its group.
        address: of its memory, or of its local shard's, when that was last seen.
        is_written: whether others wrote it since changes were handed over.
        words: its changed bits, int32 of shape (elements / 32, rounded up,). Element ``i`` in the order of memory, of a
            DTensor's local shard, has bit ``i % 32`` of word ``i // 32``. Steps set bits, and clear none.
        sums: its sums in the last step that updated it, a view of the memory to which steps write; 0 before.
    """

    param: Tensor
    address: int
    is_written: bool
    words: Tensor
    sums: Tensor


class OutputMemory:
    """The outputs of one optimizer's updates, and the memory to which they are written.

    Writes of others are seen by a tensor's version or address. They are noted on the host, so that nothing is launched.

    Attributes:
        choice: the outputs that an update has.
        counters: by the indices of the parameters that a step in compiled code gets, one more tensor that it gets. After the
            step, compiled code counts up the versions of all of these together, when no Python of the package runs.
    """

    def __init__(self, choice: Outputs, device: torch.device) -> None:
        self.choice, self._device = choice, device
        self.counters: dict[tuple[int, ...], Tensor] = {}
        self._of: dict[int, ParamOutputs] = {}  # by the id of the parameter, which is kept alive
        self._params: Sequence[Tensor] = ()  # all of the step's
        self._watched: list[tuple[int, int]] = []  # for each of the following, the parameter's id and its index
        self._tensors: list[Tensor] = []  # parameters, and local shards of DTensors
        self._versions: list[int] = []  # of these
        self._counts: dict[tuple[int, ...], int] = {}  # the versions of the counters

    def follow(self, tracked: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        """Take the parameters whose updates have outputs from now on, and all ``params`` of the step."""
        self.see_writes()
        if [*map(id, params)] != [*map(id, self._params)]:
            self.counters.clear()
        self._params, indices = params, {id(param): index for index, param in enumerate(params)}
        self._of = {id(param): self._followed(param) for param in tracked}
        pairs = [(param, tensor) for param in tracked for tensor in {id(t): t for t in (param, local(param))}.values()]
        known = [(param, tensor) for param, tensor in pairs if not tensor.is_inference()]  # others have no version
        self._watched = [(id(param), indices[id(param)]) for param, _ in known]
        self._tensors = [tensor for _, tensor in known]
        self.note_step()

    def _followed(self, param: Tensor) -> ParamOutputs:
        """Return the outputs of ``param``, with new memory if its device or size changed."""
        values, of = local(param), self._of.get(id(param))
        count = -(-real_numel(values) // 32)
        if of is None or of.words.device != values.device or len(of.words) != count:
            words = torch.zeros(count, dtype=torch.int32, device=values.device)
            sums = torch.zeros(len(self.choice.sums), dtype=torch.float64, device=values.device)
            of = ParamOutputs(param, _address(values), of is not None, words, sums)
        return of

    def of(self, param: Tensor) -> ParamOutputs | None:
        """Return the outputs of ``param``; None if its updates have none."""
        if (of := self._of.get(id(param))) is not None and (address := _address(local(param))) != of.address:
            of.address, of.is_written = address, True
        return of

    def words(self, param: Tensor) -> Tensor:
        """Return :attr:`ParamOutputs.words` of a parameter that has outputs."""
        of = self.of(param)
        assert of is not None
        return of.words

    def note_step(self) -> None:
        """Note that all writes so far are those of a step, or are known."""
        self._versions = [*map(_version, self._tensors)]
        self._counts = {indices: counter._version for indices, counter in self.counters.items()}

    def see_writes(self) -> None:
        """Note which parameters were written since :meth:`note_step`, by others than compiled code with a step."""
        now = [*map(_version, self._tensors)]
        if now == self._versions:
            return
        by_code = Counter[int]()
        for indices, counter in self.counters.items():
            if more := counter._version - self._counts.get(indices, 0):
                by_code.update(dict.fromkeys(indices, more))
        for (key, index), version, old in zip(self._watched, now, self._versions, strict=True):
            if version != old + by_code[index]:
                self._of[key].is_written = True

    def counter(self, indices: Sequence[int]) -> None:
        """Make the counter of compiled code that steps the parameters at ``indices``, if there are changed bits."""
        if self.choice.served is not None:
            self.counters.setdefault((*indices,), torch.zeros(1, device=self._device))

    def clear(self) -> None:
        """Clear the changed bits of all parameters."""
        for of in self._of.values():
            of.words.zero_()
            of.is_written = False
        self.note_step()

    def sums(self, params: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the sums of ``params``, float64 of shape (sums, params), of the last step that updated each; 0 before."""
        sums = torch.stack([self._of[id(param)].sums.to(device) for param in params], dim=1)
        for param, of_param in zip(params, sums.unbind(1), strict=True):
            self._of[id(param)].sums = of_param
        return sums

    def read(self, param: Tensor) -> dict[str, Tensor]:
        """Return the sums of ``param`` by name, 0-dim views of the memory to which steps write."""
        return dict(zip(self.choice.sums, self._of[id(param)].sums, strict=True))


def _address(values: Tensor) -> int:
    return values.data_ptr() if has_memory(values) else 0


NO_OUTPUTS = OutputMemory(NONE, torch.device("cpu"))
"""No output and no memory."""
