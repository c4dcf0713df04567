"""The sinusoids R of distances: no parameters, so they reach any memory length."""

import torch
from torch import Tensor


def sinusoid(distances: Tensor, d_model: int) -> Tensor:
    """R_t = [sin(t f_0) ... sin(t f_n), cos(t f_0) ... cos(t f_n)] with f_i = 10000 ** (-2 i / d_model).

    Sines and cosines are concatenated, not interleaved, as in the original code (Dai et al. 2019, section 3.3, after
    Vaswani et al. 2017, section 3.5). Always computed in float32 or better: bfloat16 cannot tell 1001 from 1002.

    Args:
        distances: [N], integers; negative ones are keys after the query.
        d_model: an even width.

    Returns:
        [N, d_model], float64 for float64 distances, else float32.
    """
    if d_model % 2:
        raise ValueError(f"sinusoids need an even d_model, got {d_model}")
    dtype = torch.float64 if distances.dtype == torch.float64 else torch.float32
    frequency = 10000.0 ** -(torch.arange(0, d_model, 2, dtype=dtype, device=distances.device) / d_model)
    angle = distances.to(dtype)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)
