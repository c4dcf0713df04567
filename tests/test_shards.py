import dataclasses
import hashlib
import struct

import numpy as np
import pytest

from txl.data.shards import HEADER_BYTES, Shard, encode_shard, open_shard, write_shard
from txl.data.tokenizer import train_tokenizer
from txl.errors import DataError, TokenizerError

TEXT = "caf\u00e9 au lait,\n\n  two \U0001f600 words\tand more\n" * 5
BYTE = train_tokenizer("byte", [])


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "text.tokens"
    write_shard(path, encode_shard(BYTE, TEXT.encode(), "text"))
    return path


def made(tokens, vocab_size):
    return Shard(None, np.asarray(tokens), 1, 1, 1, vocab_size, BYTE.fingerprint)


def reseal(path, change):
    """Alter the file and put its checksums right again: what only a faulty writer would make."""
    data = bytearray(path.read_bytes())
    change(data)
    data[56:88] = hashlib.sha256(data[HEADER_BYTES:]).digest()
    data[248:256] = hashlib.sha256(data[:248]).digest()[:8]
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe"])
def test_round_trip(kind, tmp_path):
    tokenizer = train_tokenizer(kind, [TEXT.encode()], 270 if kind == "bpe" else 0)
    shard = encode_shard(tokenizer, TEXT.encode(), "text")
    write_shard(tmp_path / "a.tokens", shard)
    opened = open_shard(tmp_path / "a.tokens", tokenizer)
    assert opened.path == tmp_path / "a.tokens" and shard.path is None
    assert isinstance(opened.tokens, np.memmap) and not opened.tokens.flags.writeable
    assert opened.tokens.dtype == shard.tokens.dtype and np.array_equal(opened.tokens, shard.tokens)
    assert len(opened) == len(tokenizer.encode(TEXT))
    for field in ("n_bytes", "n_chars", "n_words", "vocab_size", "fingerprint"):
        assert getattr(opened, field) == getattr(shard, field)
    assert [p.name for p in tmp_path.iterdir()] == ["a.tokens"]


def test_counts():
    for kind in ("byte", "char"):
        shard = encode_shard(train_tokenizer(kind, [TEXT.encode()]), TEXT.encode(), "text")
        assert (shard.n_bytes, shard.n_chars, shard.n_words) == (len(TEXT.encode()), len(TEXT), len(TEXT.split()))


def test_byte_counts_what_is_not_utf8():
    shard = encode_shard(BYTE, b"a\xff \xfe", "text")
    assert (len(shard), shard.n_bytes, shard.n_chars, shard.n_words) == (4, 4, 4, 2)


def test_encode_refuses():
    word = train_tokenizer("word", [b"a b"])
    with pytest.raises(DataError, match=r"^my\.txt: .*0 bytes"):
        encode_shard(BYTE, b"", "my.txt")
    with pytest.raises(DataError, match=r"^my\.txt: .*white space only"):
        encode_shard(word, b"  \t", "my.txt")
    with pytest.raises(DataError, match=r"^my\.txt: .*0xff at offset 2"):
        encode_shard(word, b"a \xff", "my.txt")
    assert encode_shard(word, b"a \xff", "my.txt", "replace").tokens.tolist() == [2, 1]


@pytest.mark.parametrize(("vocab_size", "width"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_width_follows_the_vocabulary(vocab_size, width, tmp_path):
    tokens = np.array([0, vocab_size - 1, 3])
    write_shard(tmp_path / "a", made(tokens, vocab_size))
    assert (tmp_path / "a").stat().st_size == HEADER_BYTES + 3 * width
    opened = open_shard(tmp_path / "a")
    assert opened.tokens.dtype.itemsize == width and opened.tokens.tolist() == tokens.tolist()


def test_every_flipped_bit_is_noticed(path):
    good = path.read_bytes()
    random = np.random.default_rng(0)
    for bit in random.choice(len(good) * 8, 200, replace=False).tolist():
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(DataError, match=r"text\.tokens: "):
            open_shard(path)
    path.write_bytes(good)
    open_shard(path, BYTE)


@pytest.mark.parametrize("keep", [0, 1, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, -1])
@pytest.mark.parametrize("verify", [True, False])
def test_truncation_is_refused(path, keep, verify):
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"truncated: expected .* found {len(data)}\b"):
        open_shard(path, verify=verify)


def test_extra_bytes_are_refused(path):
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DataError, match="too long"):
        open_shard(path, verify=False)


def test_what_is_no_shard_is_refused(path, tmp_path):
    with pytest.raises(DataError, match=r"none\.tokens.*No such file"):
        open_shard(tmp_path / "none.tokens")
    with pytest.raises(DataError, match="Is a directory"):
        open_shard(tmp_path)
    path.write_bytes(b"just text " * 100)
    with pytest.raises(DataError, match="no token shard"):
        open_shard(path)


def test_other_version_or_width_is_refused(path):
    good = path.read_bytes()
    reseal(path, lambda data: data.__setitem__(slice(8, 12), struct.pack("<I", 2)))
    with pytest.raises(DataError, match="format version 1, found 2"):
        open_shard(path)
    path.write_bytes(good)
    reseal(path, lambda data: data.__setitem__(slice(12, 16), struct.pack("<I", 2)))
    with pytest.raises(DataError, match="tokens of 1 bytes"):
        open_shard(path)


def test_wrong_tokenizer_is_refused(path):
    char = train_tokenizer("char", [TEXT.encode()])
    with pytest.raises(TokenizerError, match=rf"text\.tokens.*{BYTE.fingerprint[:12]}.*{char.fingerprint[:12]}"):
        open_shard(path, char)
    with pytest.raises(TokenizerError):
        open_shard(path).head(3, char)


@pytest.mark.parametrize("bad", [200, -1])
def test_id_outside_the_vocabulary_is_refused_on_write(bad, tmp_path):
    with pytest.raises(DataError, match=rf"below the vocabulary size 200, found id {bad} at token 2"):
        write_shard(tmp_path / "a", made([0, 199, bad], 200))
    assert list(tmp_path.iterdir()) == []


def test_id_outside_the_vocabulary_is_refused_on_open(tmp_path):
    path = tmp_path / "a"
    write_shard(path, made([0, 199, 5], 200))
    reseal(path, lambda data: data.__setitem__(HEADER_BYTES + 1, 201))
    with pytest.raises(DataError, match="found id 201 at token 1"):
        open_shard(path)
    assert open_shard(path, verify=False).tokens[1] == 201


def test_write_refuses(tmp_path):
    with pytest.raises(DataError, match="found none"):
        write_shard(tmp_path / "a", made([], 200))
    with pytest.raises(DataError, match="cannot write"):
        write_shard(tmp_path / "no" / "a", made([1], 200))


def test_rewriting_from_its_own_memory_map(path):
    shard = open_shard(path)
    write_shard(path, dataclasses.replace(shard, tokens=shard.tokens[:10]))
    assert len(open_shard(path)) == 10


def test_head_counts_the_text_it_holds(path):
    shard = open_shard(path)
    head = shard.head(7, BYTE)
    assert head.tokens.tobytes() == b"caf\xc3\xa9 a"
    assert (len(head), head.n_bytes, head.n_chars, head.n_words, head.path) == (7, 7, 6, 2, None)
    inside = shard.head(4, BYTE)
    assert (inside.n_bytes, inside.n_chars) == (4, 4)
    assert shard.head(len(shard), BYTE) is shard and shard.head(10**9, BYTE) is shard
    with pytest.raises(DataError, match="at least 1"):
        shard.head(0, BYTE)
