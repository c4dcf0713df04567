"""Score a text: every token once, whatever the batch size, with any memory length.

The text is one stream in segments of tgt_len. To use a batch, it is dealt in contiguous parts; each part begins
n_layer * ceil(mem_len / tgt_len) segments early, unscored, so that its memory holds what the single stream's would.
"""

import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from txl.data.shards import Shard
from txl.data.streams import IGNORE, grid
from txl.errors import ConfigError
from txl.model import Backbone, TransformerXL, eval_mode

LEAST = {"every": 0, "tokens": 0, "batch_size": 1, "tgt_len": 1, "mem_len": 0, "clamp_len": 0}


@dataclass(frozen=True)
class EvalConfig:
    """How a run is validated while it trains, and scored at its end."""

    every: int = 500
    """Validate each this many steps; 0 is at the end only."""
    tgt_len: int | None = None
    """Tokens of a segment; train.tgt_len when absent."""
    mem_len: int | None = None
    """Positions in memory; model.mem_len when absent."""
    clamp_len: int | None = None
    """Distances beyond it count as this one, 0 is off; model.clamp_len when absent."""
    same_length: bool | None = None
    """Every query sees at most mem_len keys; model.same_length when absent."""
    batch_size: int = 4
    """Parts of the text that are scored side by side; the result does not depend on it."""
    tokens: int = 0
    """Validate on the first this many tokens of the split; 0 is all of it."""
    mem_lens: tuple[int, ...] | None = None
    """Memory lengths of the table at the end of training; 0, 1, 2, 4 and 8 times model.mem_len when absent."""

    def __post_init__(self):
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"eval.{name} must be at least {least}, got {value}")
        if self.mem_lens is not None and (not self.mem_lens or min(self.mem_lens) < 0):
            raise ConfigError(f"eval.mem_lens must be lengths of at least 0, got {list(self.mem_lens)}")
        if self.tokens == 1:
            raise ConfigError("eval.tokens must be 0 or at least 2 (one to read and one to predict), got 1")


@dataclass(frozen=True)
class Score:
    """A result and the settings it holds for."""

    mem_len: int
    tgt_len: int
    clamp_len: int
    same_length: bool
    batch_size: int
    cold: bool
    """Parts began without their warm-up: later parts lack context, and the result depends on batch_size."""
    tokens: int
    """Tokens scored: all but the first of the text."""
    nll: float
    """Nats a token."""
    bits_per_byte: float
    bits_per_char: float
    ppl: float
    """exp(nll), per token of this tokenizer."""
    word_ppl: float
    """Perplexity per white-space separated word, comparable between tokenizers."""
    seconds: float
    tokens_per_s: float
    """Tokens scored a second; the unscored warm-up costs time too."""


@torch.inference_mode()
def evaluate(
    model: TransformerXL,
    shard: Shard,
    *,
    tgt_len: int,
    mem_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    batch_size: int = 1,
    cold: bool = False,
    cuts: np.ndarray | None = None,
    on_segment: Callable[[int, int], None] | None = None,
) -> Score:
    """Score the N - 1 tokens after the first of a shard, in float32 (the model's dtype), summed in float64.

    Args:
        model: dropout is off during the call.
        shard: the text.
        tgt_len: tokens of a segment.
        mem_len, clamp_len, same_length: positions in memory, the largest distance told apart (0: all are), and the
            same number of keys for every query; the model's own when absent.
        batch_size: parts side by side; changes the speed, not the result, unless cold.
        cold: begin every part with a new memory instead of warming up.
        cuts: positions at which documents begin and the memory is reset (txl.data.streams.boundaries).
        on_segment: called with (steps done, steps in all).
    """
    mem_len = model.config.mem_len if mem_len is None else mem_len
    starts, ends, resets = grid(len(shard), tgt_len, cuts)
    batch_size = min(batch_size, len(starts))
    parts = np.arange(batch_size + 1) * len(starts) // batch_size
    warm_up = 0 if cold else model.config.n_layer * math.ceil(mem_len / tgt_len)
    first = np.maximum(parts[:-1] - warm_up, 0)  # [B], the segment each row begins with
    steps = int((parts[1:] - first).max())

    began = time.perf_counter()
    device = model.embedding.weight.device
    memory = model.init_memory(batch_size, mem_len)
    total, scored = torch.zeros((), dtype=torch.float64, device=device), 0
    with (
        eval_mode(model),
        _settings(model.backbone, clamp_len, same_length),
        torch.autocast(device.type, enabled=False),
    ):
        for step in range(steps):
            rows = np.flatnonzero(first + step < parts[1:])
            segments = first[rows] + step
            tokens, targets = _batch(shard.tokens, starts[segments], ends[segments], rows, batch_size)
            if step and resets[segments].any():
                memory = memory.reset(torch.from_numpy(rows[resets[segments]]).to(device))
            unscored = np.ones(batch_size, bool)
            unscored[rows] = segments < parts[:-1][rows]
            targets[torch.from_numpy(unscored)] = IGNORE
            output = model(tokens.to(device), memory, targets.to(device))
            memory = output.memory
            total += output.nll.double().sum()
            scored += int((targets != IGNORE).sum())
            if on_segment:
                on_segment(step + 1, steps)
    total = float(total)
    seconds = time.perf_counter() - began
    assert scored == len(shard) - 1, f"{scored} tokens scored of {len(shard) - 1}"

    nll, bits = total / scored, total / scored / math.log(2)
    return Score(
        mem_len=mem_len,
        tgt_len=tgt_len,
        clamp_len=model.backbone.clamp_len if clamp_len is None else clamp_len,
        same_length=model.backbone.same_length if same_length is None else same_length,
        batch_size=batch_size,
        cold=cold,
        tokens=scored,
        nll=nll,
        bits_per_byte=bits * len(shard) / shard.n_bytes,
        bits_per_char=bits * len(shard) / shard.n_chars,
        ppl=_exp(nll),
        word_ppl=_exp(nll * len(shard) / max(shard.n_words, 1)),
        seconds=seconds,
        tokens_per_s=scored / seconds,
    )


@contextmanager
def _settings(backbone: Backbone, clamp_len: int | None, same_length: bool | None):
    """Other settings of the backbone within the block, where they are given."""
    before = backbone.clamp_len, backbone.same_length
    backbone.clamp_len = before[0] if clamp_len is None else clamp_len
    backbone.same_length = before[1] if same_length is None else same_length
    try:
        yield
    finally:
        backbone.clamp_len, backbone.same_length = before


def _batch(tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray, rows: np.ndarray, batch_size: int):
    """Inputs and targets [batch_size, longest segment]; what no segment fills is 0 and IGNORE."""
    inputs = np.zeros((batch_size, int((ends - starts).max())), np.int64)
    targets = np.full_like(inputs, IGNORE)
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        inputs[row, : end - start] = tokens[start:end]
        targets[row, : end - start] = tokens[start + 1 : end + 1]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def _exp(x: float) -> float:
    """exp that says infinity instead of failing: an untrained model's perplexity per word has no bound."""
    return math.exp(x) if x < 700 else math.inf
