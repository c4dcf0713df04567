import json
from itertools import chain

import numpy as np
import pytest
import torch

from txl.data.streams import IGNORE, SegmentStream, boundaries, grid
from txl.errors import ConfigError, DataError

CASES = [(b, length, extra) for b in (1, 2, 3, 7) for length in (1, 4, 5) for extra in (0, 1, 3, 29)]
CUTS = {"none": None, "empty": np.empty(0, np.int64), "few": [0, 3, 4, 17, 30], "all": range(100), "end": [28, 10**6]}


def ids(n):
    """Distinct ids, so that no mix-up goes unseen."""
    return (np.arange(n) + 1000).astype(np.uint16)


def counted(segment, row):
    keep = segment.targets[row] != IGNORE
    return segment.inputs[row][keep].tolist(), segment.targets[row][keep].tolist()


def same(one, other):
    return (
        torch.equal(one.inputs, other.inputs)
        and torch.equal(one.targets, other.targets)
        and torch.equal(one.reset, other.reset)
        and (one.n_targets, one.position) == (other.n_targets, other.position)
    )


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("batch_size", "tgt_len", "extra"), CASES)
def test_an_epoch_holds_every_pair_once_in_order(batch_size, tgt_len, extra, cuts):
    tokens = ids(batch_size * tgt_len + 1 + extra)
    inputs, targets = [[[] for _ in range(batch_size)] for _ in range(2)]
    for segment in SegmentStream(tokens, batch_size, tgt_len, CUTS[cuts]):
        assert segment.inputs.shape == segment.targets.shape and segment.inputs.dtype == torch.int64
        assert 1 <= segment.inputs.shape[1] <= tgt_len
        assert segment.n_targets == int((segment.targets != IGNORE).sum())
        assert max(len(counted(segment, row)[0]) for row in range(batch_size)) == segment.inputs.shape[1]
        for row in range(batch_size):
            x, y = counted(segment, row)
            assert segment.targets[row, len(y) :].eq(IGNORE).all() and segment.inputs[row, len(x) :].eq(0).all()
            inputs[row] += x
            targets[row] += y
    assert list(chain(*targets)) == tokens[1:].tolist()
    assert list(chain(*inputs)) == tokens[:-1].tolist()
    assert max(map(len, targets)) - min(map(len, targets)) <= 1


def test_ragged_end_is_masked():
    segments = list(SegmentStream(ids(12), 2, 4))  # 11 pairs: rows of 5 and 6
    assert [tuple(s.inputs.shape) for s in segments] == [(2, 4), (2, 2)]
    assert segments[1].inputs.tolist() == [[1004, 0], [1009, 1010]]
    assert segments[1].targets.tolist() == [[1005, IGNORE], [1010, 1011]]
    assert [s.n_targets for s in segments] == [8, 3]
    assert [s.reset.tolist() for s in segments] == [[True, True], [False, False]]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_documents_begin_segments_and_reset(batch_size):
    cuts = np.array([0, 3, 4, 17, 29, 30, 31, 33, 44])
    tokens = ids(60)
    stream = SegmentStream(tokens, batch_size, 5, cuts)
    firsts = {1000 + row * 59 // batch_size for row in range(batch_size)}
    begins = {1000 + int(cut) for cut in cuts}
    seen = set()
    for segment in stream:
        for row in range(batch_size):
            x, _ = counted(segment, row)
            assert not begins & set(x[1:])
            assert bool(segment.reset[row]) == bool(x and x[0] in firsts | begins)
            seen |= begins & set(x)
    assert seen == begins


@pytest.mark.parametrize("cuts", CUTS)
def test_seek_resumes_exactly(cuts):
    tokens = ids(50)
    stream = SegmentStream(tokens, 3, 4, CUTS[cuts])
    segments = [stream.next_segment() for _ in range(40)]
    assert segments[-1].position["epoch"] >= 1
    for at in range(0, 40, 3):
        resumed = SegmentStream(tokens, 3, 4, CUTS[cuts])
        resumed.seek(json.loads(json.dumps(segments[at].position)))
        assert resumed.position == segments[at].position
        assert all(same(resumed.next_segment(), segment) for segment in segments[at + 1 :])


def test_epochs_repeat_and_are_counted():
    stream = SegmentStream(ids(30), 2, 4)
    assert stream.position == {"epoch": 0, "cursors": [0, 14]}
    first, second = list(stream), list(stream)
    assert [s.position["epoch"] for s in first + second] == [0] * 4 + [1] * 4
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, second, strict=True))
    assert first[0].reset.all() and second[0].reset.all() and not second[1].reset.any()


def test_too_short_names_the_least_that_works():
    message = (
        r"the train split has 1024 tokens, but batch_size 8 .* tgt_len 128 need at least 1025: .*train\.batch_size"
    )
    with pytest.raises(DataError, match=message):
        SegmentStream(ids(1024), 8, 128, name="the train split")
    (segment,) = SegmentStream(ids(1025), 8, 128)
    assert segment.n_targets == 1024
    with pytest.raises(ConfigError):
        SegmentStream(ids(10), 0, 1)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ({"epoch": 0, "cursors": [0, 25, 30]}, "of 3 streams"),
        ({"epoch": 0, "cursors": [0, 60]}, r"row 1 at pair 60, outside its range 24 \.\. 49"),
        ({"epoch": 0, "cursors": [25, 25]}, "row 0 at pair 25"),
        ({"epoch": -1, "cursors": [0, 25]}, "position of epoch and cursors"),
        ({"epoch": 0, "cursors": [0.5, 25]}, "position of epoch and cursors"),
        ({}, "position of epoch and cursors"),
        (None, "position of epoch and cursors"),
    ],
)
def test_seek_refuses(position, message):
    stream = SegmentStream(ids(50), 2, 4)
    with pytest.raises(DataError, match=message):
        stream.seek(position)
    assert stream.position == {"epoch": 0, "cursors": [0, 24]}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_memory_maps_of_every_width(dtype, tmp_path):
    tokens = np.arange(40, dtype=dtype)
    tokens[3] = np.iinfo(dtype).max
    tokens.tofile(tmp_path / "t")
    (row,) = SegmentStream(np.memmap(tmp_path / "t", dtype, "r"), 1, 39).next_segment().inputs.tolist()
    assert row == tokens[:-1].tolist()


def test_boundaries():
    tokens = np.array([5, 1, 2, 5, 1, 5, 5, 1, 2, 5], np.uint8)
    assert boundaries(tokens, (5,)).tolist() == [0, 3, 5, 6, 9]
    assert boundaries(tokens, (5, 1)).tolist() == [0, 3, 6]
    assert boundaries(tokens, (5, 1, 2)).tolist() == [0, 6]
    assert boundaries(tokens, (2, 5)).tolist() == [2, 8]
    assert boundaries(tokens, (9,)).tolist() == boundaries(tokens, (300,)).tolist() == []
    assert boundaries(tokens, None).tolist() == boundaries(tokens[:1], (5, 1)).tolist() == []
    assert boundaries(tokens, (5,)).dtype == boundaries(tokens, None).dtype == np.int64


@pytest.mark.parametrize("n_tokens", [2, 3, 17, 50, 51])
@pytest.mark.parametrize("tgt_len", [1, 4, 5, 1000])
@pytest.mark.parametrize("cuts", CUTS)
def test_grid_is_the_single_stream(n_tokens, tgt_len, cuts):
    starts, ends, resets = grid(n_tokens, tgt_len, CUTS[cuts])
    assert starts[0] == 0 and ends[-1] == n_tokens - 1 and (starts[1:] == ends[:-1]).all()
    assert (ends - starts >= 1).all() and (ends - starts <= tgt_len).all()
    inside = {0} | {c for c in (() if CUTS[cuts] is None else CUTS[cuts]) if c < n_tokens - 1}
    assert set(starts[resets].tolist()) == inside
    if n_tokens > tgt_len:
        stream = [
            (s.inputs[0, 0].item() - 1000, bool(s.reset)) for s in SegmentStream(ids(n_tokens), 1, tgt_len, CUTS[cuts])
        ]
        assert stream == list(zip(starts.tolist(), resets.tolist(), strict=True))


def test_grid_refuses():
    with pytest.raises(DataError, match="at least 2 tokens"):
        grid(1, 4)
    with pytest.raises(ConfigError):
        grid(10, 0)
