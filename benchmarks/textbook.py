"""The algorithm of the original Transformer-XL code in its time-major einsum layout, for train_step.py to measure.

Our own code of that mathematics, with the costs of that layout: the length comes first and heads last, queries of the
memory's positions are computed and thrown away, the shift copies the scores, and the last layer's output is kept in
memory though nothing reads it.

Shape letters: L positions of the segment, M positions in memory, S = M + L, B batch, H heads, K head size, D width,
V vocabulary. In the einsums i is a query, j a key, b the batch, n a head, d a place in the head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.attention import sinusoid
from txl.model import ModelConfig, TransformerXL


def from_txl(model: TransformerXL) -> "Textbook":
    """A Textbook of the same sizes and weights, in the same mode and dtype."""
    textbook = Textbook(model.config).to(model.embedding.weight).train(model.training)
    textbook.load_state_dict(translate(model.state_dict()))
    return textbook


def translate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients by the names of TransformerXL -> by the names of Textbook, with q, k and v in one."""
    renamed = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
    for name in [name for name in renamed if name.endswith("w_q.weight")]:
        parts = [renamed.pop(name.replace("w_q", part)) for part in ("w_q", "w_kE", "w_v")]
        renamed[name.replace("w_q", "w_qkv")] = torch.cat(parts)  # [3 H K, D]
    return renamed


class Textbook(nn.Module):
    """The language model in the published form: post-norm, shared u and v, tied softmax, empty first memory."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        d_head = config.d_head or config.d_model // config.n_head
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.u = nn.Parameter(torch.empty(config.n_head, d_head))
        self.v = nn.Parameter(torch.empty(config.n_head, d_head))
        self.layers = nn.ModuleList(Layer(config, d_head) for _ in range(config.n_layer))
        self.softmax = nn.ParameterDict({"bias": torch.empty(config.vocab_size)})
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, targets: Tensor, mems: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """tokens, targets [L, B] and n_layer + 1 states [M, B, D] -> nll [L, B] and the next states."""
        h = self.embedding(tokens) * self.config.d_model**0.5
        if mems is None:
            mems = [h.new_empty(0, *h.shape[1:]) for _ in range(self.config.n_layer + 1)]
        L, M = h.shape[0], mems[0].shape[0]
        R = self.dropout(sinusoid(torch.arange(M + L - 1, -1, -1, device=h.device), self.config.d_model, h.dtype))
        mask = torch.triu(h.new_ones(L, M + L), diagonal=1 + M).bool()

        h = self.dropout(h)
        hids = [h]
        for layer, m in zip(self.layers, mems[:-1], strict=True):
            h = layer(h, m, R, self.u, self.v, mask)
            hids.append(h)
        h = self.dropout(h)
        logits = F.linear(h.view(-1, h.shape[-1]), self.embedding.weight, self.softmax["bias"])  # [L B, V]
        nll = F.cross_entropy(logits, targets.reshape(-1), reduction="none").view(targets.shape)
        return nll, self.update(mems, hids)

    @torch.no_grad()
    def update(self, mems: list[Tensor], hids: list[Tensor]) -> list[Tensor]:
        """The last mem_len positions of [mems; hids]."""
        end = len(mems[0]) + len(hids[0])
        begin = max(0, end - self.config.mem_len)
        return [torch.cat([m, h], 0)[begin:end].detach() for m, h in zip(mems, hids, strict=True)]


class Layer(nn.Module):
    """Attention and feed-forward block, each followed by its residual and its norm."""

    def __init__(self, config: ModelConfig, d_head: int):
        super().__init__()
        self.attention = Attention(config, d_head)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.d_model, config.d_inner),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(config.d_inner, config.d_model),
            nn.Dropout(config.dropout),
        )
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, memory: Tensor, R: Tensor, u: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """h [L, B, D], memory [M, B, D], R [S, D] from the farthest to the nearest, mask [L, S] -> [L, B, D]."""
        h = self.attention_norm(h + self.dropout(self.attention(h, memory, R, u, v, mask)))
        return self.feed_forward_norm(h + self.feed_forward(h))


class Attention(nn.Module):
    """Scores [L, S, B, H] by two einsums, the second one shifted."""

    def __init__(self, config: ModelConfig, d_head: int):
        super().__init__()
        self.shape, width = (config.n_head, d_head), config.n_head * d_head
        self.w_qkv = nn.Linear(config.d_model, 3 * width, bias=False)
        self.w_kR = nn.Linear(config.d_model, width, bias=False)
        self.w_o = nn.Linear(width, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropatt)
        self.scale = d_head**-0.5

    def forward(self, h: Tensor, memory: Tensor, R: Tensor, u: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """As Layer.forward."""
        q, k, value = self.w_qkv(torch.cat([memory, h], 0)).chunk(3, -1)
        q = q[-len(h) :].unflatten(-1, self.shape)  # [L, B, H, K]
        k, value = k.unflatten(-1, self.shape), value.unflatten(-1, self.shape)  # [S, B, H, K]
        r = self.w_kR(R).unflatten(-1, self.shape)  # [S, H, K]

        content = torch.einsum("ibnd,jbnd->ijbn", q + u, k)
        position = shift(torch.einsum("ibnd,jnd->ijbn", q + v, r))
        scores = (content + position).mul_(self.scale)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = wide.masked_fill(mask[:, :, None, None], -float("inf")).type_as(scores)
        p = self.dropout(scores.softmax(1))
        return self.w_o(torch.einsum("ijbn,jbnd->ibnd", p, value).flatten(2))


def shift(x: Tensor) -> Tensor:
    """[L, S, B, H], columns of distances -> columns of keys; what is left over lies in the future."""
    L, S, B, H = x.shape
    padded = torch.cat([x.new_zeros(L, 1, B, H), x], 1)
    return padded.view(S + 1, L, B, H)[1:].view_as(x)
