"""Token ids to training segments: B contiguous streams that lose no token, and the single stream of evaluation.

N tokens give N - 1 pairs; pair t is (input tokens[t], target tokens[t + 1]). `cuts` are the positions at which a new
document begins: the memory is reset just before such a token is read as input, so nothing before it is visible.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from txl.errors import ConfigError, DataError

IGNORE = -100
"Target of a pair that does not count; what torch's cross-entropy ignores by default."


@dataclass(frozen=True, eq=False)
class Segment:
    """The next pairs of B streams. L is at most tgt_len; a row with fewer pairs is padded at its end."""

    inputs: torch.Tensor
    "[B, L] int64 ids; 0 in the padding."
    targets: torch.Tensor
    "[B, L] int64 ids; IGNORE in the padding."
    reset: torch.Tensor
    "[B] bool: rows whose memory must be reset before this segment."
    n_targets: int
    "Number of targets that count, over all rows."
    position: dict
    "`SegmentStream.position` after this segment."


class SegmentStream:
    """Endless segments of `batch_size` contiguous streams; one epoch holds every pair exactly once.

    Row b owns the pairs [b * (N - 1) // B, (b + 1) * (N - 1) // B). Each segment takes a row on by up to `tgt_len`
    pairs, but not past the next cut, so that a document begins a segment or is not in it. A row whose part is done
    waits, fully padded, until all are done and the next epoch begins. Every row is reset at the start of an epoch.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        tgt_len: int,
        cuts: np.ndarray | None = None,
        name: str = "the text",
    ) -> None:
        """tokens: [N] unsigned ids, may be memory-mapped; cuts: sorted positions, as of `boundaries`.

        ConfigError when batch_size or tgt_len is below 1; DataError, which calls the tokens `name`, when there are
        fewer than batch_size * tgt_len + 1 tokens.
        """
        if batch_size < 1 or tgt_len < 1:
            raise ConfigError(f"batch_size and tgt_len are at least 1, found {batch_size} and {tgt_len}")
        n_pairs = len(tokens) - 1
        if n_pairs < batch_size * tgt_len:
            raise DataError(
                f"{name} has {len(tokens)} tokens, but batch_size {batch_size} streams of tgt_len {tgt_len} need at "
                f"least {batch_size * tgt_len + 1}: give a longer text, or lower train.batch_size or train.tgt_len"
            )
        edges = [row * n_pairs // batch_size for row in range(batch_size + 1)]
        self.tokens = tokens
        self.tgt_len = tgt_len
        self._name = name
        self._starts = np.array(edges[:-1], np.int64)
        self._ends = np.array(edges[1:], np.int64)
        # The last cut is out of reach: every row then has a next one.
        self._cuts = np.append(np.asarray([] if cuts is None else cuts, np.int64), len(tokens))
        self._epoch = 0
        self._cursors = self._starts

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self._starts)

    @property
    def position(self) -> dict:
        """All of the state, in plain integers: {"epoch": int, "cursors": [next pair of each row]}."""
        return {"epoch": self._epoch, "cursors": self._cursors.tolist()}

    def seek(self, position: dict) -> None:
        """Go on from `position`, a value of `position` of an equal stream. DataError when it cannot be one."""
        match position:
            case {"epoch": int(epoch), "cursors": list(cursors)} if epoch >= 0 and all(type(c) is int for c in cursors):
                pass
            case _:
                raise DataError(f"{self._name}: expected a position of epoch and cursors, found {position!r:.200}")
        if len(cursors) != self.batch_size:
            raise DataError(
                f"{self._name}: the position is of {len(cursors)} streams, but batch_size is {self.batch_size}: "
                "go on with the batch_size of the saved run"
            )
        for row, (cursor, start, end) in enumerate(zip(cursors, self._starts, self._ends, strict=True)):
            if not start <= cursor <= end:
                raise DataError(
                    f"{self._name}: the position has row {row} at pair {cursor}, outside its range {start} .. {end}: "
                    "go on with the text and tokenizer of the saved run"
                )
        self._epoch = epoch
        self._cursors = np.array(cursors, np.int64)

    def next_segment(self) -> Segment:
        """The next segment; after the last of an epoch comes the first of the next."""
        if self._epoch_done():
            self._epoch += 1
            self._cursors = self._starts
        begin = self._cursors
        next_cut = np.searchsorted(self._cuts, begin, "right")
        end = np.minimum(np.minimum(begin + self.tgt_len, self._ends), self._cuts[next_cut])
        lengths = end - begin
        inputs = np.zeros((self.batch_size, int(lengths.max())), np.int64)
        targets = np.full_like(inputs, IGNORE)
        for row, (b, n) in enumerate(zip(begin.tolist(), lengths.tolist(), strict=True)):
            inputs[row, :n] = self.tokens[b : b + n]
            targets[row, :n] = self.tokens[b + 1 : b + n + 1]
        at_cut = self._cuts[np.maximum(next_cut - 1, 0)] == begin
        reset = ((begin == self._starts) | at_cut) & (lengths > 0)
        self._cursors = end
        return Segment(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            torch.from_numpy(reset),
            int(lengths.sum()),
            self.position,
        )

    def __iter__(self) -> Iterator[Segment]:
        """The segments up to the end of the epoch; of the next epoch when this one is done."""
        yield self.next_segment()
        while not self._epoch_done():
            yield self.next_segment()

    def _epoch_done(self) -> bool:
        return bool((self._cursors == self._ends).all())


def boundaries(tokens: np.ndarray, reset_ids: tuple[int, ...] | None) -> np.ndarray:
    """The positions, sorted int64, at which the ids `reset_ids` stand in `tokens` [N]; none for None or ()."""
    if not reset_ids:
        return np.empty(0, np.int64)
    found = np.flatnonzero(tokens[: max(0, len(tokens) - len(reset_ids) + 1)] == reset_ids[0])
    for offset, id in enumerate(reset_ids[1:], 1):
        found = found[tokens[found + offset] == id]
    return found.astype(np.int64)


def grid(n_tokens: int, tgt_len: int, cuts: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One stream of `n_tokens` tokens in segments of at most `tgt_len` pairs, none of which reaches past a cut.

    Returns starts, ends (int64: segment i is the pairs starts[i] .. ends[i] - 1) and resets (bool: the memory is
    reset before segment i, which is the first or begins at a cut), each [number of segments].
    ConfigError when tgt_len < 1, DataError when there are fewer than 2 tokens.
    """
    if tgt_len < 1:
        raise ConfigError(f"tgt_len is at least 1, found {tgt_len}")
    if n_tokens < 2:
        raise DataError(f"expected at least 2 tokens, one to read and one to predict, found {n_tokens}")
    n_pairs = n_tokens - 1
    inner = np.asarray([] if cuts is None else cuts, np.int64)
    edges = np.unique(np.concatenate([[0], inner[(inner > 0) & (inner < n_pairs)], [n_pairs]]))
    first, last = edges[:-1], edges[1:]  # of each document
    counts = -(-(last - first) // tgt_len)
    document = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = first[document] + nth * tgt_len
    return starts, np.minimum(starts + tgt_len, last[document]), nth == 0
