"""Dropout that does not cost more than the layers around it.

On a CPU torch draws one random number an element, which takes longer than the matrix products of a small model leave
time for. Here one 64-bit number serves four elements: the same distribution, a third of the time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = 1 << 16
"""A mask is drawn from 16 bits, so p is rounded to a multiple of 1 / 65536."""


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Zero each element of x with probability p and scale the others so that the mean stays.

    Draws from torch's default generator, so seeds, checkpoints and resumed runs hold. Other devices than a CPU, and
    compiled code, take torch's own.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout must be in [0, 1], got {p}")
    if not training or p == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    threshold = round(p * LEVELS)
    if threshold == LEVELS:
        return x * 0
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    bits = words.view(torch.int16)[: x.numel()].view(x.shape)
    keep = (bits >= threshold - LEVELS // 2).to(x.dtype).mul_(LEVELS / (LEVELS - threshold))
    return x * keep


class Dropout(nn.Module):
    """dropout as a module."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape."""
        return dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"
