"""Relative attention, written to be read beside the paper. Every faster form is tested against it.

    A_ij = q_i.k_j + q_i.r_{i-j} + u.k_j + w.r_{i-j}        (Dai et al. 2019, section 3.3; w is the paper's v)
           (a)       (b)           (c)     (d)

Terms (a) and (c) are one product, (q + u) k^T. Terms (b) and (d) are another, (q + w) r^T, whose columns stand for
distances; relative_shift moves each row so that columns stand for keys (appendix B).

Shape letters: B batch, H heads, L queries, S keys, D head size, N rows of r, W columns of distances.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from txl.dropout import dropout


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    u: Tensor | None = None,
    w: Tensor | None = None,
    *,
    values: Tensor | None = None,
    future: int = 0,
    offset: int | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention whose scores depend on contents and on the distance i - j between query and key.

    Query i sits at position offset + i of the sequence in which key j sits at j; the distance of the two is
    offset + i - j, and row t of r stands for the distance t - future. A distance beyond either end of r takes the
    end row: that is clamp_len for Transformer-XL, and the clip of Shaw et al. (2018).

    Args:
        q: queries [B, H, L, D].
        k, v: keys and values [B, H, S, D].
        r: projected distances [H, N, D], or [N, D] shared by heads. With future=0, row 0 is distance 0.
        u, w: learned biases [H, D] of terms (c) and (d); absent in Shaw's form.
        values: rows added to the values by distance, [H, N, D] or [N, D] (a^V of Shaw et al., equation 3).
        future: the number of rows of r that stand for negative distances (keys after the query).
        offset: position of query 0 among the keys; S - L unless given (the queries are the last L positions).
        causal: a query sees no key after itself.
        window: n: a query sees no key farther back than n (keys after it are causal's affair); (lo, hi): only keys
            at distances lo to hi.
        key_start, key_end: [B] integers; row b of the batch sees only keys key_start[b] <= j < key_end[b].
        dropout_p: dropout of the attention weights.
        scale: factor of the scores, D ** -0.5 unless given.
        backend: "auto" or "reference"; both are this function today.

    Returns:
        [B, H, L, D] in the dtype of q. A query that may see no key at all gives zeros.

    Raises:
        ValueError: shapes that do not fit together, or an unknown backend.
    """
    _check(q, k, v, r, u, w, values, window, key_start, key_end, backend)
    (_, H, L, D), S = q.shape, k.shape[2]
    offset = S - L if offset is None else offset
    scale = D**-0.5 if scale is None else scale
    lo, hi = _interval(window, causal)

    q_content = q * scale if u is None else (q + u[:, None]) * scale
    q_position = q * scale if w is None else (q + w[:, None]) * scale

    # One column for each distance that occurs, from the farthest to the nearest that may be seen.
    nearest = offset - S + 1 if lo is None else max(offset - S + 1, lo)
    columns = torch.arange(offset + L - 1, min(nearest, offset + L - S) - 1, -1, device=q.device)  # [W], W >= S
    # A column too many on the left takes the place that relative_shift would pad.
    rows = torch.cat([columns[:1], columns]) + future
    r_cols = r[..., rows.clamp(0, r.shape[-2] - 1), :]  # [H, 1 + W, D]

    scores = q_content @ k.transpose(-2, -1)  # (a) + (c), [B, H, L, S]
    scores += _shift_padded(q_position @ r_cols.transpose(-2, -1))[..., :S]  # (b) + (d)

    distance = offset + torch.arange(L, device=q.device)[:, None] - torch.arange(S, device=q.device)  # [L, S]
    visible = _visible(distance, lo, hi, key_start, key_end)  # [L, S] or [B, 1, L, S]
    # Half of the lowest number, not -inf: a row with nothing to see stays finite, and so do its gradients.
    hidden = torch.finfo(scores.dtype).min / 2
    scores += torch.zeros(visible.shape, dtype=scores.dtype, device=q.device).masked_fill_(~visible, hidden)

    p = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    sees_itself = 0 <= offset <= S - L and (lo is None or lo <= 0) and (hi is None or hi >= 0)
    if not sees_itself or key_start is not None or key_end is not None:
        p = p * visible.any(-1, keepdim=True)
    p = dropout(p, dropout_p)
    out = p @ v
    if values is not None:
        values = values.expand(H, *values.shape[-2:])
        out = out + torch.einsum("bhls,hlsd->bhld", p, values[:, (distance + future).clamp(0, values.shape[1] - 1)])
    return out


def relative_shift(x: Tensor) -> Tensor:
    """Move scores by distance to the keys they belong to: y[..., i, j] = x[..., i, j + L - 1 - i].

    The columns of x [..., L, W] stand for distances in falling order. The last query and the first key are the
    farthest apart, so for the last row nothing moves; each row above it is one position nearer to the first key and
    moves one more place to the left. The cost is linear in the length: pad one column, view, drop one row.

    The last L-1-i places of row i are left over: they hold the pad and the beginning of the next row. In causal
    attention they stand for the future and are masked; otherwise x carries L-1 further columns, for the negative
    distances, and the result is cut to the number of keys.

    Worked example, L = 3 queries (a, b, c) after M = 1 position of memory; the digit is the distance:

        x =     a3 a2 a1 a0         keys   m  a  b  c
                b3 b2 b1 b0
                c3 c2 c1 c0
        padded = 0 a3 a2 a1 a0      viewed in rows of 3:  0 a3 a2      first row dropped,   a1 a0  0 b3
                 0 b3 b2 b1 b0                           a1 a0  0      in rows of 4 again:  b2 b1 b0  0
                 0 c3 c2 c1 c0                            0 ...                             c3 c2 c1 c0

    Query a sees the memory at distance 1 and itself at distance 0; "0 b3" lies in its future and is masked.

    Args:
        x: [..., L, W].

    Returns:
        [..., L, W].
    """
    return _shift_padded(F.pad(x, (1, 0)))


def _shift_padded(x: Tensor) -> Tensor:
    """relative_shift of x[..., 1:], where x [..., L, 1 + W] has its pad column (of any content) already."""
    *batch, L, W = x.shape
    _, rest = x.view(*batch, W, L).split([1, W - 1], -2)  # split: the backward of a slice would fill zeros first
    return rest.view(*batch, L, W - 1)


def _interval(window, causal: bool) -> tuple[int | None, int | None]:
    """The visible distances lo <= i - j <= hi; None is unbounded."""
    lo, hi = window if isinstance(window, tuple) else (None, window)
    if causal:
        lo = max(lo, 0) if lo is not None else 0
    return lo, hi


def _visible(distance: Tensor, lo: int | None, hi: int | None, key_start, key_end) -> Tensor:
    """True where a query may see a key: an interval of distances and, for each row of the batch, of keys."""
    visible = torch.ones_like(distance, dtype=torch.bool)
    if lo is not None:
        visible = visible & (distance >= lo)
    if hi is not None:
        visible = visible & (distance <= hi)
    key = torch.arange(distance.shape[1], device=distance.device)
    if key_start is not None:
        visible = visible & (key >= key_start[:, None, None, None])
    if key_end is not None:
        visible = visible & (key < key_end[:, None, None, None])
    return visible


def _check(q, k, v, r, u, w, values, window, key_start, key_end, backend) -> None:
    if backend not in ("auto", "reference"):
        raise ValueError(f'backend must be "auto" or "reference", got {backend!r}')
    if q.dim() != 4 or k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(f"expected q [B, H, L, D] and k [B, H, S, D], got {list(q.shape)} and {list(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"expected v [B, H, S, D] with the B, H, S of k {list(k.shape)}, got {list(v.shape)}")
    B, H, _, D = q.shape
    for name, rows in (("r", r), ("values", values)):
        if rows is not None and (rows.dim() not in (2, 3) or rows.shape[-1] != D or rows.shape[:-2] not in ((), (H,))):
            raise ValueError(f"expected {name} [{H}, N, {D}] or [N, {D}], got {list(rows.shape)}")
        if rows is not None and rows.shape[-2] == 0:
            raise ValueError(f"expected at least one row in {name}, got {list(rows.shape)}")
    for name, bias in (("u", u), ("w", w)):
        if bias is not None and bias.shape != (H, D):
            raise ValueError(f"expected {name} [{H}, {D}], got {list(bias.shape)}")
    for name, bound in (("key_start", key_start), ("key_end", key_end)):
        if bound is not None and bound.shape != (B,):
            raise ValueError(f"expected {name} [{B}], got {list(bound.shape)}")
    if isinstance(window, int) and window < 0:
        raise ValueError(f"window must be at least 0 (a query sees itself), got {window}")
