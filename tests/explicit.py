"""The equations by explicit loops over (i, j): slow, obvious, independent of every shift trick."""

import torch


def explicit_attention(
    q, k, v, r, u=None, w=None, *, values=None, future=0, offset=None, causal=True, window=None, key_start=None,
    key_end=None, scale=None,
):  # fmt: skip
    B, H, L, D = q.shape
    S = k.shape[2]
    r = r.expand(H, *r.shape[-2:])
    offset = S - L if offset is None else offset
    scale = D**-0.5 if scale is None else scale
    lo, hi = window if isinstance(window, tuple) else (-(10**9), 10**9 if window is None else window)
    lo = max(lo, 0) if causal else lo
    zero = torch.zeros(D, dtype=q.dtype)
    rows = []
    for b in range(B):
        for h in range(H):
            u_h = zero if u is None else u[h]
            w_h = zero if w is None else w[h]
            for i in range(L):
                scores, terms = [], []
                for j in range(S):
                    t = offset + i - j
                    first = 0 if key_start is None else int(key_start[b])
                    last = S if key_end is None else int(key_end[b])
                    if not (lo <= t <= hi and first <= j < last):
                        continue
                    n = min(max(t + future, 0), r.shape[1] - 1)
                    a = q[b, h, i] @ k[b, h, j] + q[b, h, i] @ r[h, n] + u_h @ k[b, h, j] + w_h @ r[h, n]
                    scores.append(a * scale)
                    term = v[b, h, j]
                    if values is not None:
                        value_rows = values.expand(H, *values.shape[-2:])[h]
                        term = term + value_rows[min(max(t + future, 0), value_rows.shape[0] - 1)]
                    terms.append(term)
                if scores:
                    rows.append(torch.stack(scores).softmax(0) @ torch.stack(terms))
                else:
                    rows.append((q[b, h, i] * 0).sum() + zero)
    return torch.stack(rows).view(B, H, L, D)
