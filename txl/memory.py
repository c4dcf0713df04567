"""The memory of a Transformer-XL: the layer inputs of the positions before a segment.

Shape letters: B batch, M positions in memory, L positions in a segment.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """What a segment sees of its past (Dai et al. 2019, section 3.2). A value: nothing changes it in place.

    Make one with model.init_memory(batch_size, mem_len); every forward takes one and returns the next.
    """

    states: tuple[Tensor, ...]
    """For each layer its inputs at the last M <= mem_len positions, [B, M, d_model], detached."""

    start: Tensor
    """[B] int64: the first valid position of each row; positions before it are not attended to."""

    mem_len: int
    """The most positions that are kept."""

    zeros: bool = False
    """Started as mem_len attended zeros (memory_init = "zeros") rather than empty."""

    ragged: bool = False
    """Some row may start later than position 0, so attention needs `start`."""

    @classmethod
    def new(
        cls, n_layer: int, batch_size: int, d_model: int, mem_len: int, zeros: bool = False, device=None, dtype=None
    ) -> "Memory":
        """A memory of nothing: empty, or mem_len zeros that are attended to, as in the TensorFlow original."""
        length = mem_len if zeros else 0
        states = tuple(torch.zeros(batch_size, length, d_model, device=device, dtype=dtype) for _ in range(n_layer))
        return cls(states, torch.zeros(batch_size, dtype=torch.int64, device=device), mem_len, zeros)

    @property
    def length(self) -> int:
        """Positions held now, M."""
        return self.states[0].shape[1]

    def next(self, inputs: list[Tensor]) -> "Memory":
        """The memory after a segment: the last mem_len positions of [memory; inputs], detached.

        Args:
            inputs: for each layer its inputs over the segment, [B, L, d_model].
        """
        length = self.length + inputs[0].shape[1]
        dropped = max(length - self.mem_len, 0)
        states = tuple(_last(m, x.detach(), dropped) for m, x in zip(self.states, inputs, strict=True))
        return replace(self, states=states, start=(self.start - dropped).clamp(min=0))

    def reset(self, rows: Tensor) -> "Memory":
        """Forget the past of some rows, so that they go on as from a new memory; the others are untouched.

        Args:
            rows: [B] bool, or the indices of rows.
        """
        chosen = torch.zeros_like(self.start, dtype=torch.bool)
        chosen[rows] = True
        if self.zeros:
            states = tuple(m.masked_fill(chosen[:, None, None], 0) for m in self.states)
            return replace(self, states=states, start=self.start.masked_fill(chosen, 0))
        return replace(self, start=self.start.masked_fill(chosen, self.length), ragged=True)


def _last(memory: Tensor, x: Tensor, dropped: int) -> Tensor:
    """[memory; x] without its first `dropped` positions, in storage of its own."""
    M = memory.shape[1]
    if dropped >= M:
        return x[:, dropped - M :].to(memory.dtype, copy=True)
    return torch.cat([memory[:, dropped:], x.to(memory.dtype)], 1)
