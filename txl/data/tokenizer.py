"""Text to token ids and back: bytes, characters, words or byte-level BPE, kept as one tokenizers-library JSON file."""

import difflib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import trainers

from txl.data.forms import BYTE_OF, KINDS, LINE_END, SYMBOLS, UNKNOWN, infer_kind, library_form
from txl.errors import ConfigError, DataError, TokenizerError

DEFAULT_BPE_SIZE = 8192

_PIECE = 1 << 20  # characters encoded at a time
_BATCH = 8  # pieces handed to the library at a time: enough for its threads, about 300 MB of encodings
_CUT = re.compile(r"\S[ \n\r\t]")
_WORD = re.compile(r"(?:\S|[\x1c-\x1f])+")  # the library takes these four controls for no white space


class Tokenizer:
    """One vocabulary and the rules that go with it; immutable. Made by `train_tokenizer` or `Tokenizer.load`.

    kind         one of KINDS
    vocab_size   number of ids, 0 .. vocab_size - 1
    fingerprint  sha256 (hex) of the JSON that `save` writes; equal for equal tokenizers
    """

    def __init__(self, text: str, where: str = "tokenizer") -> None:
        """text: tokenizer JSON of one of the four kinds; `where` names it in a TokenizerError when it is none."""
        try:
            self._json = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
            self._library = tokenizers.Tokenizer.from_str(self._json)
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{where}: expected the JSON of a tokenizer, found: {_one_line(error)}") from error
        vocab = self._library.get_vocab(with_added_tokens=False)
        self.kind = infer_kind(self._library, vocab, where)
        self.vocab_size = len(vocab)
        self.fingerprint = hashlib.sha256(self._json.encode()).hexdigest()
        self.dtype = id_dtype(self.vocab_size)
        self._tokens = sorted(vocab, key=vocab.__getitem__)
        self._unknown = vocab.get(UNKNOWN) if self.kind in ("char", "word") else None
        if self.kind in ("byte", "bpe"):
            self._bytes = [bytes(map(BYTE_OF.__getitem__, token)) for token in self._tokens]
        else:
            self._bytes = [token.encode() for token in self._tokens]
        if self.kind == "char":
            self._id_of_point = np.zeros(0x110000, self.dtype)
            self._id_of_point[[ord(char) for char in self._tokens[1:]]] = np.arange(1, self.vocab_size)

    def encode(self, text: bytes | str) -> np.ndarray:
        """The ids of `text`, 1-D, of dtype `id_dtype(vocab_size)`. Bytes must be UTF-8 unless kind is "byte"."""
        if self.kind == "byte":
            data = text if isinstance(text, bytes) else _utf8(text)
            return np.frombuffer(data, np.uint8).copy()
        if isinstance(text, bytes):
            text = decode_text(text, "the text to encode")
        else:
            _utf8(text)
        parts = self._encode_chars(text) if self.kind == "char" else self._encode_pieces(text)
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def _encode_chars(self, text: str) -> Iterator[np.ndarray]:
        for start in range(0, len(text), _PIECE):
            yield self._id_of_point[np.frombuffer(text[start : start + _PIECE].encode("utf-32-le"), "<u4")]

    def _encode_pieces(self, text: str) -> Iterator[np.ndarray]:
        batch: list[str] = []
        for piece in pieces(text):
            batch.append(piece)
            if len(batch) == _BATCH:
                yield from self._encode_batch(batch)
                batch = []
        yield from self._encode_batch(batch)

    def _encode_batch(self, batch: list[str]) -> Iterator[np.ndarray]:
        for encoding in self._library.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array(encoding.ids, self.dtype)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The text of `ids` (1-D integers) as bytes; exact also where a token ends inside a character.

        Of a word tokenizer only the line ends come back as they were; any other white space becomes one space.
        Raises TokenizerError for an id outside 0 .. vocab_size - 1.
        """
        ids = np.asarray(ids)
        if ids.size == 0:
            return b""
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            at = int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
            raise TokenizerError(
                f"token {at} has id {int(ids[at])}, but this {self.kind} tokenizer has the ids 0 .. "
                f"{self.vocab_size - 1}: use the tokenizer that made these ids"
            )
        if self.kind == "byte":
            return ids.astype(np.uint8).tobytes()
        if self.kind != "word":
            return b"".join(map(self._bytes.__getitem__, ids.tolist()))
        line_end = self._tokens.index(LINE_END)
        words = b" ".join(b"\n" if i == line_end else self._bytes[i] for i in ids.tolist())
        return words.replace(b" \n", b"\n").replace(b"\n ", b"\n")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Errors as `decode_bytes`."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def token(self, id: int) -> str:
        """One token in printable form: `the`, `\\n`, `\\xff`, `<eos>`."""
        self.decode_bytes([id])  # refuses an id out of range
        text = self._bytes[id].decode("utf-8", "backslashreplace")
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

    def count_unknown(self, ids: np.ndarray) -> int:
        """How many of `ids` stand for something outside the vocabulary; always 0 for byte and bpe."""
        return 0 if self._unknown is None else int(np.count_nonzero(np.asarray(ids) == self._unknown))

    def save(self, path: str | os.PathLike) -> None:
        """Write the JSON that `load` and the tokenizers library read; whole or not at all."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(self._json, encoding="utf-8", newline="")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise TokenizerError(f"{path}: cannot write the tokenizer: {error.strerror}") from error

    @staticmethod
    def load(path: str | os.PathLike) -> "Tokenizer":
        """Read what `save` wrote. TokenizerError when the file is missing or holds none of the four kinds."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise TokenizerError(f"{path}: expected a tokenizer JSON file: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path}: expected UTF-8 JSON, found byte {error.start} not to be UTF-8") from error
        return Tokenizer(text, str(path))


def train_tokenizer(kind: str, texts: Sequence[bytes], vocab_size: int = 0, errors: str = "strict") -> Tokenizer:
    """Make a tokenizer of `kind` from `texts`; the same texts always give the same tokenizer.

    byte  256 ids, the byte values; reads no text
    char  id 0 is <unk>, then the characters found, by code point
    word  id 0 is <eos> (a line end), id 1 <unk>, then words by falling frequency; `vocab_size` caps the total (0: none)
    bpe   byte-level BPE of `vocab_size` ids (0: 8192), fewer when the text has no more pairs to merge

    errors: "strict" or "replace", see `decode_text`. Raises TokenizerError for an unknown kind or a size unfit for it.
    """
    if kind not in KINDS:
        raise TokenizerError(unknown_kind(kind))
    smallest = {"word": 3, "bpe": 257}.get(kind, 0)
    if vocab_size != 0 and vocab_size < smallest:
        raise TokenizerError(f"the {kind} tokenizer needs vocab_size 0 or at least {smallest}, found {vocab_size}")
    if kind == "byte":
        return Tokenizer(library_form("byte", {symbol: i for i, symbol in enumerate(SYMBOLS)}).to_str())
    decoded = (decode_text(text, f"training text {i + 1} of {len(texts)}", errors) for i, text in enumerate(texts))
    if kind == "char":
        found = sorted(set().union(*decoded))
        return Tokenizer(library_form("char", {token: i for i, token in enumerate([UNKNOWN, *found])}).to_str())
    if kind == "word":
        counts: Counter[str] = Counter()
        for text in decoded:
            for piece in pieces(text):
                counts.update(_WORD.findall(piece))
        known = [LINE_END, UNKNOWN, *sorted(counts.keys() - {LINE_END, UNKNOWN}, key=lambda w: (-counts[w], w))]
        return Tokenizer(library_form("word", {word: i for i, word in enumerate(known[: vocab_size or None])}).to_str())
    library = library_form("bpe", {})
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size or DEFAULT_BPE_SIZE, show_progress=False, special_tokens=[], initial_alphabet=SYMBOLS
    )
    library.train_from_iterator((piece for text in decoded for piece in pieces(text)), trainer)
    return Tokenizer(library.to_str())


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """Cut `text` into pieces of about `size` characters; joined they are `text`.

    Every cut lies between a non-space and a space. There neither a word nor a pre-token of byte-level BPE is divided,
    so the pieces, encoded one by one, give the ids of the whole. (A cut after a space would not do: the BPE
    pre-tokenizer groups a run of white space by what follows it.)
    """
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + size - 1)
        end = cut.start() + 1 if cut else len(text)
        yield text[start:end]
        start = end


def decode_text(data: bytes, where: str, errors: str = "strict") -> str:
    """UTF-8 bytes to text. errors: "strict" raises DataError at the first bad byte; "replace" puts U+FFFD there."""
    if errors not in ("strict", "replace"):
        raise ConfigError(f"data.errors is strict or replace, found {errors!r}")
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: expected UTF-8, found byte 0x{data[error.start]:02x} at offset {error.start}: "
            "set data.errors=replace, or data.tokenizer=byte"
        ) from error


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16 and uint32 that holds the ids 0 .. vocab_size - 1."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def unknown_kind(kind: str) -> str:
    """The message for a tokenizer kind that does not exist: names the nearest, and all."""
    near = difflib.get_close_matches(str(kind), KINDS, 1, 0.5)
    return f"unknown tokenizer {kind!r}{f', did you mean {near[0]!r}?' if near else ':'} kinds are {', '.join(KINDS)}"


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the text has a lone surrogate at character {error.start}: give valid Unicode") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
