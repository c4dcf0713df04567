"""Where the text comes from: files, or the Python standard library; and from text to tokenizer and token shards."""

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from txl.data.shards import Shard, encode_shard
from txl.data.tokenizer import KINDS, Tokenizer, decode_text, train_tokenizer, unknown_kind
from txl.errors import ConfigError, DataError

SPLITS = ("train", "valid", "test")
SOURCES = ("python-stdlib",)

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class DataConfig:
    """The text, its tokenizer and its documents. Give `source` or `train`, not both; commands without data neither."""

    source: str = ""
    "A text that is at hand: python-stdlib, the standard library's source of the running Python."
    train: str = ""
    "File with the training text."
    valid: str = ""
    "File with the validation text; when empty, 5 % from the end of the training text."
    test: str = ""
    "File with the test text; when empty, 5 % from the end of the training text."
    tokenizer: str = "byte"
    "What a token is: byte, char, word or bpe."
    vocab_size: int = 0
    "Number of tokens: cap for word (0: none), size for bpe (0: 8192); byte and char need none and ignore it."
    reset_on: str = ""
    "Text that begins a document: the memory is reset before it is read. Empty: never."
    errors: str = "strict"
    "What to do with bytes that are not UTF-8: strict (refuse the text) or replace (by U+FFFD)."

    def __post_init__(self) -> None:
        if self.tokenizer not in KINDS:
            raise ConfigError(f"data.tokenizer: {unknown_kind(self.tokenizer)}")
        if self.source not in ("", *SOURCES):
            raise ConfigError(
                f"data.source: expected {' or '.join(SOURCES)}, found {self.source!r}; files go in data.train"
            )
        if self.errors not in ("strict", "replace"):
            raise ConfigError(f"data.errors: expected strict or replace, found {self.errors!r}")
        if self.vocab_size < 0:
            raise ConfigError(f"data.vocab_size: expected 0 or more, found {self.vocab_size}")
        if self.source and (self.train or self.valid or self.test):
            raise ConfigError(f"data.source={self.source} brings its own splits: leave out data.train, valid and test")
        if (self.valid or self.test) and not self.train:
            raise ConfigError("data.valid and data.test go with data.train: set data.train=FILE")


def read_splits(config: DataConfig) -> dict[str, bytes]:
    """The texts under the keys train, valid and test.

    Of files, a split not given is 5 % of the training text, from its end: with neither given, train is the first
    90 %, valid the next 5 % and test the last 5 %. No character is divided. When data.tokenizer is not byte, the
    files must be UTF-8, or data.errors "replace".

    python-stdlib is every .py file below the standard library's folder, in the order of their paths, without
    site-packages and test suites; files that are not UTF-8 are left out. Of every 20 files one is valid, one test.
    A line `# file: <path>` stands before each file, so that reset_on "# file:" makes each a document.

    ConfigError when the configuration names no text; DataError when a file is missing, empty or too small to divide.
    """
    if config.source:
        return _read_stdlib()
    if not config.train:
        raise ConfigError("no text is given: set data.train=FILE or data.source=python-stdlib")
    given = {name: _read_file(getattr(config, name), config) for name in SPLITS if getattr(config, name)}
    missing = [name for name in SPLITS if name not in given]
    text = given["train"]
    edges = [_character_start(text, len(text) * (100 - 5 * k) // 100) for k in range(len(missing), -1, -1)]
    for name, start, end in zip(["train", *missing], [0, *edges], edges, strict=False):
        given[name] = text[start:end]
        if start == end:
            raise DataError(
                f"{config.train}: {len(text)} bytes are too few to take 5 % for {' and '.join(missing)}: "
                "give a longer text, or data.valid and data.test"
            )
    return {name: given[name] for name in SPLITS}


def prepare(config: DataConfig, tokenizer: Tokenizer | None = None) -> tuple[Tokenizer, dict[str, Shard]]:
    """Read the splits and tokenise them; the shards, in memory, are under the keys train, valid and test.

    Without `tokenizer` one of kind config.tokenizer is made: char from all splits, so that none has unknown
    characters (as is the custom for character data), word and bpe from train only. The share of unknown tokens
    is `tokenizer.count_unknown(shard.tokens) / len(shard)`. Errors: as `read_splits`, `train_tokenizer` and
    `encode_shard`.
    """
    texts = read_splits(config)
    if tokenizer is None:
        seen = list(texts.values()) if config.tokenizer == "char" else [texts["train"]]
        tokenizer = train_tokenizer(config.tokenizer, seen, config.vocab_size, config.errors)
    origin = config.source or config.train
    where = {name: getattr(config, name) or f"{origin} ({name} split)" for name in SPLITS}
    return tokenizer, {n: encode_shard(tokenizer, text, where[n], config.errors) for n, text in texts.items()}


def reset_ids(config: DataConfig, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The token ids of config.reset_on, as they stand in a tokenised text; None when it is empty.

    ConfigError when the tokenizer does not know it, or has no token sequence of its own for it.
    """
    if not config.reset_on:
        return None
    ids = tokenizer.encode(config.reset_on)
    if len(ids) == 0 or tokenizer.count_unknown(ids):
        raise ConfigError(
            f"data.reset_on={config.reset_on!r} is not in the vocabulary of this {tokenizer.kind} tokenizer: "
            "choose a text that the training text has"
        )
    if tokenizer.kind == "bpe":
        context = tokenizer.encode(f"\n{config.reset_on}x")
        found = any((context[i : i + len(ids)] == ids).all() for i in range(len(context) - len(ids) + 1))
        if not found or config.reset_on[-1].isspace():  # white space joins the token after it
            raise ConfigError(
                f"data.reset_on={config.reset_on!r} has no token sequence of its own with this bpe tokenizer: "
                "choose a text that does not end in white space, or another"
            )
    return tuple(ids.tolist())


def _read_file(path: str, config: DataConfig) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: expected a text file: {error.strerror}") from error
    if not data:
        raise DataError(f"{path}: expected text, found an empty file")
    if config.tokenizer != "byte":
        decode_text(data, path, config.errors)  # here, while offsets are still those of the file
    return data


def _character_start(text: bytes, at: int) -> int:
    """The last start of a UTF-8 character at or before `at`; in what is not UTF-8, at most 3 bytes before."""
    for start in range(at, max(0, at - 4), -1):
        if start == len(text) or text[start] & 0xC0 != 0x80:
            return start
    return at


def _read_stdlib() -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[bytes] = []
    for path in _source_files(root):
        data = (root / path).read_bytes()
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        line_end = b"" if data.endswith(b"\n") else b"\n"
        files.append(b"# file: " + os.fsencode(path) + b"\n" + data + line_end)
    if len(files) < 20:
        raise DataError(
            f"{root}: expected the standard library's source, found {len(files)} files: set data.train=FILE"
        )
    held_out = {18: "valid", 19: "test"}
    parts: dict[str, list[bytes]] = {name: [] for name in SPLITS}
    for i, data in enumerate(files):
        parts[held_out.get(i % 20, "train")].append(data)
    return {name: b"".join(part) for name, part in parts.items()}


def _source_files(root: Path) -> list[str]:
    """POSIX paths, relative to `root` and sorted, of the .py files that are the library itself."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _NOT_SOURCE and not name.startswith("config-")]
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)
