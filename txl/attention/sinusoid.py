"""The sinusoids R of distances: no parameters, so they reach any memory length."""

import torch
from torch import Tensor


def sinusoid(distances: Tensor, d_model: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """R_t = [sin(t f_0) ... sin(t f_n), cos(t f_0) ... cos(t f_n)] with f_i = 10000 ** (-2 i / d_model).

    Sines and cosines are concatenated, not interleaved, as in the original code (Dai et al. 2019, section 3.3, after
    Vaswani et al. 2017, section 3.5).

    Args:
        distances: [N], integers; negative ones are keys after the query.
        d_model: an even width.
        dtype: of the result. The computation is in float32 or better: bfloat16 cannot tell 1001 from 1002.

    Returns:
        [N, d_model].
    """
    if d_model % 2:
        raise ValueError(f"sinusoids need an even d_model, got {d_model}")
    exact = torch.promote_types(dtype, torch.float32)
    frequency = 10000.0 ** -(torch.arange(0, d_model, 2, dtype=exact, device=distances.device) / d_model)
    angle = distances.to(exact)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1).to(dtype)
