"""Token shards: one file of token ids that is memory-mapped, and of which no byte can change unnoticed.

A file is a header of 256 bytes and the ids, all little-endian:

    offset  bytes  field
         0      8  magic, b"TXLTOKS\\0"
         8      4  format version, 1
        12      4  bytes of one id: 1, 2 or 4, the smallest that holds the vocabulary
        16      8  vocabulary size
        24      8  number of tokens
        32     24  bytes, characters and words of the text, 8 bytes each
        56     32  sha256 of the ids
        88     32  sha256 of the tokenizer
       120    128  zero
       248      8  the first 8 bytes of the sha256 of the header up to here
"""

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from txl.data.tokenizer import Tokenizer, decode_text, id_dtype, pieces
from txl.errors import DataError, TokenizerError

MAGIC = b"TXLTOKS\0"
VERSION = 1
HEADER_BYTES = 256

_FIELDS = struct.Struct("<8sIIQQQQQ32s32s")
_SUMMED = HEADER_BYTES - 8
_BLOCK = 1 << 24  # ids looked at together


@dataclass(frozen=True, eq=False)
class Shard:
    """A tokenised text, in memory or memory-mapped."""

    path: Path | None
    "The file; None when the shard lives in memory only."
    tokens: np.ndarray
    "The ids, 1-D, uint8, uint16 or uint32; a read-only memory map when `path` is given."
    n_bytes: int
    "UTF-8 bytes of the text."
    n_chars: int
    "Unicode code points of the text."
    n_words: int
    "Words of the text: what white space separates."
    vocab_size: int
    "All ids are below it."
    fingerprint: str
    "`Tokenizer.fingerprint` of the tokenizer that made the ids, 64 hex digits."

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, n: int, tokenizer: Tokenizer) -> "Shard":
        """The first `n` >= 1 tokens, with the counts of the text that they decode to; itself when it has no more.

        DataError when n < 1, TokenizerError when `tokenizer` is not the one that made the shard.
        """
        if n < 1:
            raise DataError(f"{_name(self)}: expected at least 1 token to keep, found {n}")
        _check_tokenizer(_name(self), self.fingerprint, tokenizer)
        if n >= len(self):
            return self
        tokens = self.tokens[:n]
        text = tokenizer.decode_bytes(tokens)
        return Shard(None, tokens, *_counts(text, text.decode("utf-8", "replace")), self.vocab_size, self.fingerprint)


def encode_shard(tokenizer: Tokenizer, text: bytes, where: str, errors: str = "strict") -> Shard:
    """Tokenise `text` in memory. `where` names it in messages; `errors` is as in `decode_text`.

    A byte tokenizer takes any bytes; the others raise DataError for what is not UTF-8 when errors is "strict".
    DataError also when the text is empty, or gives no token.
    """
    if not text:
        raise DataError(f"{where}: expected text, found none (0 bytes): give a file that holds text")
    decoded = decode_text(text, where, "replace" if tokenizer.kind == "byte" else errors)
    tokens = tokenizer.encode(text if tokenizer.kind == "byte" else decoded)
    if len(tokens) == 0:
        raise DataError(f"{where}: expected words, found white space only ({len(text)} bytes): give a file with words")
    return Shard(None, tokens, *_counts(text, decoded), tokenizer.vocab_size, tokenizer.fingerprint)


def write_shard(path: str | os.PathLike, shard: Shard) -> None:
    """Write `shard` to `path`, whole or not at all: under a temporary name beside it, synced, then renamed.

    DataError when the shard is empty, an id is not below vocab_size, or the file cannot be written.
    """
    path = Path(path)
    if len(shard) == 0:
        raise DataError(f"{path}: expected tokens to write, found none")
    _check_ids(path, shard.tokens, shard.vocab_size)
    dtype = id_dtype(shard.vocab_size)
    tokens = np.ascontiguousarray(shard.tokens, dtype)
    counts = (shard.vocab_size, len(shard), shard.n_bytes, shard.n_chars, shard.n_words)
    payload_sum = hashlib.sha256(tokens).digest()
    fields = _FIELDS.pack(MAGIC, VERSION, dtype.itemsize, *counts, payload_sum, bytes.fromhex(shard.fingerprint))
    header = fields.ljust(_SUMMED, b"\0")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(header + hashlib.sha256(header).digest()[:8])
            file.write(tokens)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot write the token shard: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def open_shard(path: str | os.PathLike, tokenizer: Tokenizer | None = None, verify: bool = True) -> Shard:
    """Memory-map the shard at `path`.

    verify     also read all ids, and check their sha256 and that each is below the vocabulary size
    tokenizer  when given, must be the one that made the shard (else TokenizerError)

    DataError when the file is missing, is no shard, is cut short or too long, or has been altered.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: expected a token shard: {error.strerror}") from error
    again = "write the shard again from its text"
    if len(header) < HEADER_BYTES:
        raise DataError(f"{path}: truncated: expected a header of {HEADER_BYTES} bytes, found {size} bytes: {again}")
    if not header.startswith(MAGIC):
        raise DataError(f"{path}: no token shard: expected {MAGIC!r} at offset 0, found {header[: len(MAGIC)]!r}")
    if hashlib.sha256(header[:_SUMMED]).digest()[:8] != header[_SUMMED:]:
        raise DataError(f"{path}: the header (offset 0 to {HEADER_BYTES}) does not match its checksum: {again}")
    _, version, width, vocab_size, n_tokens, *counts, payload_sum, fingerprint = _FIELDS.unpack_from(header)
    if version != VERSION:
        raise DataError(f"{path}: expected format version {VERSION}, found {version}: {again} with this version of txl")
    dtype = id_dtype(vocab_size)
    if width != dtype.itemsize or n_tokens == 0:
        raise DataError(
            f"{path}: expected tokens of {dtype.itemsize} bytes for {vocab_size} ids, "
            f"found {n_tokens} tokens of {width} bytes: {again}"
        )
    expected = HEADER_BYTES + n_tokens * width
    if size != expected:
        fault = "truncated" if size < expected else "too long"
        raise DataError(f"{path}: {fault}: expected {expected} bytes for {n_tokens} tokens, found {size}: {again}")
    tokens = np.memmap(path, dtype, "r", HEADER_BYTES, (n_tokens,))
    if verify:
        if hashlib.sha256(tokens).digest() != payload_sum:
            raise DataError(f"{path}: the tokens (from offset {HEADER_BYTES}) do not match their sha256: {again}")
        _check_ids(path, tokens, vocab_size)
    if tokenizer is not None:
        _check_tokenizer(str(path), fingerprint.hex(), tokenizer)
    return Shard(path, tokens, *counts, vocab_size, fingerprint.hex())


def _check_ids(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        if int(block.max()) >= vocab_size or int(block.min()) < 0:
            at = start + int(np.flatnonzero((block >= vocab_size) | (block < 0))[0])
            raise DataError(
                f"{path}: expected ids below the vocabulary size {vocab_size}, found id {int(tokens[at])} "
                f"at token {at}: encode the text again"
            )


def _check_tokenizer(where: str, fingerprint: str, tokenizer: Tokenizer) -> None:
    if fingerprint != tokenizer.fingerprint:
        raise TokenizerError(
            f"{where}: the tokens were made by tokenizer {fingerprint[:12]}, but this is {tokenizer.kind} tokenizer "
            f"{tokenizer.fingerprint[:12]}: use the tokenizer of the shard, or encode the text again"
        )


def _counts(data: bytes, text: str) -> tuple[int, int, int]:
    """Bytes, characters and words; by pieces, for the list of all words of a large text would not fit in memory."""
    return len(data), len(text), sum(len(piece.split()) for piece in pieces(text))


def _name(shard: Shard) -> str:
    return str(shard.path) if shard.path else "the token shard"
