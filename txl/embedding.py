"""Tokens to vectors, and vectors back to tokens.

Shape letters: B batch, L positions, V vocabulary, E width of the embedding, D width of the model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """A row of the table for each token, projected from E to D where they differ, times sqrt(D)."""

    def __init__(self, vocab_size: int, d_embed: int, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_embed))  # [V, E]
        self.proj = nn.Parameter(torch.empty(d_model, d_embed)) if d_embed != d_model else None  # [D, E]
        self.scale = d_model**0.5

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, L] integers -> [B, L, D]."""
        h = F.embedding(tokens, self.weight)
        if self.proj is not None:
            h = F.linear(h, self.proj)
        return h * self.scale


class Softmax(nn.Module):
    """Scores of every token, and the loss of the right one. A tied table is lent by the embedding at each call."""

    def __init__(self, vocab_size: int, d_embed: int, d_model: int, tied: bool):
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, d_embed))  # [V, E]
        self.bias = nn.Parameter(torch.empty(vocab_size))
        self.proj = nn.Parameter(torch.empty(d_model, d_embed)) if d_embed != d_model else None  # [D, E]

    def forward(self, h: Tensor, tied_weight: Tensor) -> Tensor:
        """h [B, L, D] -> logits [B, L, V]."""
        if self.proj is not None:
            h = h @ self.proj
        return F.linear(h, tied_weight if self.weight is None else self.weight, self.bias)

    def nll(self, h: Tensor, targets: Tensor, tied_weight: Tensor) -> Tensor:
        """-log p of each target in nats, [B, L] float32 in token order; 0 where the target is -100."""
        logits = self(h, tied_weight).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=-100).view_as(targets)
