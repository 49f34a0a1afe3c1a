"""The memory of the outputs of updates, by parameter. It outlives plans, since outputs gather over steps."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from compiled_optim.rule.outputs import NONE, Outputs


class OutputMemory:
    """The outputs of one optimizer's updates, and the memory to which they are written.

    Attributes:
        choice: the outputs that an update has.
    """

    def __init__(self, choice: Outputs) -> None:
        self.choice = choice
        self._words: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self._sums: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def words(self, param: Tensor, numel: int, device: torch.device) -> Tensor:
        """Return the words of the changed bits of ``param``, int32 of shape (numel / 32, rounded up,).

        Element ``i`` in the order of memory has bit ``i % 32`` of word ``i // 32``. Steps set the bits of the elements that
        they change, and clear none.
        """
        count = -(-numel // 32)
        words = self._words.get(param)
        if words is None or words.device != device or len(words) != count:
            words = self._words[param] = torch.zeros(count, dtype=torch.int32, device=device)
        return words

    def sums(self, params: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the sums of ``params``, float64 of shape (sums, params), of the last step that updated each; 0 before."""
        none = torch.zeros(len(self.choice.sums), dtype=torch.float64, device=device)
        sums = torch.stack([self._sums.get(param, none).to(device) for param in params], dim=1)
        self._sums.update(zip(params, sums.unbind(1), strict=True))
        return sums

    def read(self, param: Tensor) -> dict[str, Tensor]:
        """Return the sums of ``param`` by name, 0-dim views of the memory to which steps write."""
        return dict(zip(self.choice.sums, self._sums[param], strict=True))


NO_OUTPUTS = OutputMemory(NONE)
"""No output and no memory."""
