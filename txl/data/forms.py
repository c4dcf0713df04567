"""The four kinds of tokenizer in the tokenizers library's own terms, so that other tools can load what txl saves."""

import json

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from txl.errors import TokenizerError

KINDS = ("byte", "char", "word", "bpe")
UNKNOWN = "<unk>"
LINE_END = "<eos>"

# GPT-2's alphabet: a printable stand-in for every byte, in the order of the bytes.
_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
SYMBOLS = [chr(b if b in _PRINTABLE else 256 + _HIDDEN.index(b)) for b in range(256)]
BYTE_OF = {symbol: byte for byte, symbol in enumerate(SYMBOLS)}


def library_form(kind: str, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """The tokenizers-library form of one kind over `vocab`."""
    if kind in ("byte", "bpe"):
        library = tokenizers.Tokenizer(models.BPE(vocab, []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bpe")
        library.decoder = decoders.ByteLevel()
    elif kind == "char":
        library = tokenizers.Tokenizer(models.WordLevel(vocab, UNKNOWN))
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
    else:
        library = tokenizers.Tokenizer(models.WordLevel(vocab, UNKNOWN))
        library.normalizer = normalizers.Replace("\n", f" {LINE_END} ")
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        line_end = decoders.Replace(Regex(rf"\A{LINE_END}\z"), "\n")
        join = decoders.WordPiece("\t", cleanup=False)  # no word begins with a tab, so all are joined by a space
        trim = decoders.Replace(Regex(" ?\n ?"), "\n")
        library.decoder = decoders.Sequence([line_end, join, decoders.Fuse(), trim])
    return library


def infer_kind(library: tokenizers.Tokenizer, vocab: dict[str, int], where: str) -> str:
    """The kind whose rules these are; TokenizerError when they are no kind's, or the vocabulary does not fit them."""
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise TokenizerError(f"{where}: expected the ids 0 .. {len(vocab) - 1}, each once: the vocabulary has gaps")
    fits = {
        "byte": vocab == {symbol: i for i, symbol in enumerate(SYMBOLS)},
        "char": vocab.get(UNKNOWN) == 0 and all(len(token) == 1 for token in vocab if token != UNKNOWN),
        "word": vocab.get(LINE_END) == 0 and vocab.get(UNKNOWN) == 1,
        "bpe": vocab.keys() >= set(SYMBOLS) and set().union(*vocab) == set(SYMBOLS),
    }
    for kind in KINDS:
        if fits[kind] and _rules(library) == _rules(library_form(kind, {UNKNOWN: 0})):
            return kind
    raise TokenizerError(f"{where}: expected a {', '.join(KINDS)} tokenizer saved by txl, found another form")


def _rules(library: tokenizers.Tokenizer) -> dict:
    """All of the JSON but the vocabulary and the merges."""
    rules = json.loads(library.to_str())
    rules["model"] = {key: value for key, value in rules["model"].items() if key not in ("vocab", "merges")}
    return rules
