"""Write text with a model: one token at a time, the past in memory.

Shape letters: B batch, V vocabulary.
"""

import math

import torch
from torch import Tensor

from txl.errors import ConfigError
from txl.model import TransformerXL, eval_mode


@torch.no_grad()
def generate(
    model: TransformerXL,
    prompt: Tensor,
    n_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    mem_len: int | None = None,
    seed: int | None = None,
) -> Tensor:
    """Continue a prompt.

    The prompt is read in segments of at most mem_len tokens, so that it may be longer than the memory.

    Args:
        model: dropout is off during the call.
        prompt: [B, length >= 1] token ids.
        n_tokens: how many to add.
        temperature: of the softmax; 0 takes the likeliest token always.
        top_k: choose among this many likeliest tokens; 0 is all.
        mem_len: positions in memory; the model's own when absent.
        seed: of the choice; torch's default generator when absent.

    Returns:
        [B, length + n_tokens].
    """
    if prompt.dim() != 2 or prompt.shape[1] < 1:
        raise ValueError(f"expected a prompt [batch, length >= 1], got {list(prompt.shape)}")
    if not 0 <= temperature < math.inf or top_k < 0 or n_tokens < 0:
        raise ConfigError(
            f"temperature, top_k and n_tokens must be at least 0 and finite, got {temperature}, {top_k} and {n_tokens}"
        )
    generator = None if seed is None else torch.Generator(prompt.device).manual_seed(seed)
    memory = model.init_memory(prompt.shape[0], mem_len)
    tokens = [prompt]
    with eval_mode(model):
        for segment in prompt.split(max(memory.mem_len, 1), dim=1):
            output = model(segment, memory)
            memory = output.memory
        for _ in range(n_tokens):
            tokens.append(_choose(output.logits[:, -1].float(), temperature, top_k, generator))
            output = model(tokens[-1], memory)
            memory = output.memory
    return torch.cat(tokens, 1)


def _choose(logits: Tensor, temperature: float, top_k: int, generator) -> Tensor:
    """[B, V] -> [B, 1], sampled."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    logits = (logits - logits.amax(-1, keepdim=True)).double() / temperature
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
