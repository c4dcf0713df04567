"""RelativeAttention: Transformer-XL's attention as a module for any model.

Shape letters: B batch, L queries, M memory, S keys, N distances, H heads, D head size.
"""

import torch
from torch import Tensor, nn

from txl.attention.reference import relative_attention
from txl.attention.sinusoid import sinusoid


class RelativeAttention(nn.Module):
    """Multi-head attention with relative positions (Dai et al. 2019, section 3.3). No residual, no norm inside.

        q = x W_q     k = h~ W_kE     v = h~ W_v     r_t = W_kR R_t     with h~ = [stop_gradient(memory); x]

    Args:
        d_model: width of inputs and outputs.
        n_head: number of heads.
        d_head: size of a head; d_model / n_head unless given.
        position: "xl": sinusoidal R, projected by W_kR, with the learned biases u and v.
        causal: a query sees no position after itself.
        dropout: dropout of the attention weights while training.
        clamp_len: distances beyond it take the row of the distance clamp_len; 0 is off.
        own_biases: make u and v here; False where the caller shares one pair between layers and passes it in.

    Raises:
        ValueError: d_head is absent and n_head does not divide d_model; unknown position.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        d_head: int | None = None,
        position: str = "xl",
        causal: bool = True,
        dropout: float = 0.0,
        clamp_len: int = 0,
        own_biases: bool = True,
    ):
        super().__init__()
        if position != "xl":
            raise ValueError(f'position must be "xl", got {position!r}')
        if d_head is None and d_model % n_head:
            raise ValueError(f"n_head {n_head} does not divide d_model {d_model}: give d_head, or another n_head")
        self.d_model, self.n_head, self.d_head = d_model, n_head, d_head or d_model // n_head
        self.causal, self.dropout, self.clamp_len = causal, dropout, clamp_len
        width = n_head * self.d_head
        self.w_q = nn.Linear(d_model, width, bias=False)
        self.w_kE = nn.Linear(d_model, width, bias=False)
        self.w_v = nn.Linear(d_model, width, bias=False)
        self.w_kR = nn.Linear(d_model, width, bias=False)
        self.w_o = nn.Linear(width, d_model, bias=False)
        self.u = nn.Parameter(torch.empty(n_head, self.d_head)) if own_biases else None
        self.v = nn.Parameter(torch.empty(n_head, self.d_head)) if own_biases else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Every weight, u and v from N(0, std ** 2), as published."""
        for weight in self.parameters():
            nn.init.normal_(weight, std=std)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        memory: Tensor | None = None,
        *,
        R: Tensor | None = None,
        u: Tensor | None = None,
        v: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        key_start: Tensor | None = None,
        key_end: Tensor | None = None,
    ) -> Tensor:
        """Attend from x to [memory; x], or to a context of the caller's.

        Args:
            x: [B, L, d_model].
            context: [B, S, d_model], attended to instead of [memory; x]; the queries count as its last L positions.
            memory: [B, M, d_model], the positions before x; no gradient flows into it.
            R: [N, d_model], rows for the distances 0, 1, ... (the last row also for all beyond), where layers share
                one table or put dropout on it; only for causal attention.
            u, v: [H, D], used instead of the module's own.
            window, key_start, key_end: as in txl.attention.relative_attention; keys are counted from the first
                position of the memory or context.

        Returns:
            [B, L, d_model].
        """
        if context is not None and memory is not None:
            raise ValueError("give context or memory, not both: context replaces [memory; x]")
        u, v = self.u if u is None else u, self.v if v is None else v
        if u is None or v is None:
            raise ValueError("this attention was made with own_biases=False: pass u and v")
        for name, states in (("x", x), ("context", context), ("memory", memory)):
            if states is not None and (states.dim() != 3 or states.shape[::2] != (x.shape[0], self.d_model)):
                expected = f"[{x.shape[0]}, length, {self.d_model}]"
                raise ValueError(f"expected {name} {expected}, got {list(states.shape)}")
        h = context if context is not None else x if memory is None else torch.cat([memory.detach(), x], 1)
        L, S = x.shape[1], h.shape[1]

        future = 0 if self.causal else L - 1  # keys up to the last query
        if R is None:
            farthest = min(S - 1, self.clamp_len) if self.clamp_len else S - 1
            R = sinusoid(torch.arange(-future, farthest + 1, device=x.device), self.d_model, x.dtype)
        elif not self.causal:
            raise ValueError("R can be passed in for causal attention only: its first row is distance 0")
        out = relative_attention(
            self._split(self.w_q(x)),
            self._split(self.w_kE(h)),
            self._split(self.w_v(h)),
            self._split(self.w_kR(R)),
            u,
            v,
            future=future,
            causal=self.causal,
            window=window,
            key_start=key_start,
            key_end=key_end,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.w_o(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """[..., length, H * D] -> [..., H, length, D]."""
        return x.unflatten(-1, (self.n_head, self.d_head)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, n_head={self.n_head}, d_head={self.d_head}, causal={self.causal}"
