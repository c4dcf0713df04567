import json

import numpy as np
import pytest
import tokenizers

from txl.data.tokenizer import KINDS, Tokenizer, decode_text, id_dtype, pieces, train_tokenizer
from txl.errors import ConfigError, DataError, TokenizerError

AWKWARD = (
    "The cat\n\n\n  sat\ton it.\r\n\r\n\0\x1c\x1d x\x1cy \U0001f600\U0001f468\u200d\U0001f469 caf\u00e9 e\u0301 "
    "don't 123  \n \n\t\x85q\u2028\u3000z \xa0 <unk> <eos> x<eos>y ##a ##\n\nend  "
)
CODE = "def f(x):\n    if x:\n        return 'a b'\n\n\n\tpass  \n" * 40
TEXTS = [AWKWARD.encode(), CODE.encode()]
SIZES = {"byte": 0, "char": 0, "word": 0, "bpe": 300}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return train_tokenizer(request.param, TEXTS, SIZES[request.param])


def library(tokenizer, tmp_path):
    """The saved file as any other tool reads it."""
    tokenizer.save(tmp_path / "tokenizer.json")
    return tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
@pytest.mark.parametrize("text", [AWKWARD, CODE, "\n", " ", "\r\n", "\0"])
def test_round_trip_is_exact(kind, text):
    tokenizer = train_tokenizer(kind, TEXTS, SIZES[kind])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert np.array_equal(ids, tokenizer.encode(text.encode()))


def test_byte_takes_anything():
    data = bytes(range(256)) + b"\xff\xfe\xc3"
    tokenizer = train_tokenizer("byte", [])
    assert tokenizer.encode(data).tolist() == list(data)
    assert tokenizer.decode_bytes(tokenizer.encode(data)) == data
    assert tokenizer.decode(tokenizer.encode(b"a\xffb")) == "a\ufffdb"


def test_word_keeps_words_and_line_ends():
    tokenizer = train_tokenizer("word", [b"b a\na  c\tb\n\na\n"])
    assert [tokenizer.token(i) for i in range(tokenizer.vocab_size)] == ["<eos>", "<unk>", "a", "b", "c"]
    ids = tokenizer.encode("b a\n\n\n d <eos> c \n a")
    assert ids.tolist() == [3, 2, 0, 0, 0, 1, 0, 4, 0, 2]
    assert tokenizer.decode(ids) == "b a\n\n\n<unk>\nc\na"


@pytest.mark.parametrize("text", [AWKWARD, CODE, "unseen \u4e16\u754c words ~~", "", "\n\n"])
def test_ids_and_text_are_those_of_the_library(tokenizer, text, tmp_path):
    other = library(tokenizer, tmp_path)
    expected = other.encode(text).ids
    assert tokenizer.encode(text).tolist() == expected
    assert tokenizer.decode(expected) == other.decode(expected, skip_special_tokens=False)


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_pieces_give_the_ids_of_the_whole(tokenizer, size, monkeypatch, tmp_path):
    text = AWKWARD + CODE + "  \n \n" + AWKWARD
    cut = list(pieces(text, size))
    assert "".join(cut) == text and len(cut) > 20
    whole = library(tokenizer, tmp_path).encode(text).ids
    monkeypatch.setattr("txl.data.tokenizer._PIECE", size)
    monkeypatch.setattr("txl.data.tokenizer.pieces", lambda text: pieces(text, size))
    assert tokenizer.encode(text).tolist() == whole


def test_save_and_load_keep_ids_and_fingerprint(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert (loaded.kind, loaded.vocab_size) == (tokenizer.kind, tokenizer.vocab_size)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert np.array_equal(loaded.encode(AWKWARD), tokenizer.encode(AWKWARD))
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_fingerprint_survives_reformatting_but_no_change(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    (tmp_path / "pretty.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    assert Tokenizer.load(tmp_path / "pretty.json").fingerprint == tokenizer.fingerprint


def test_training_is_deterministic(tokenizer):
    again = train_tokenizer(tokenizer.kind, TEXTS, SIZES[tokenizer.kind])
    assert again.fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("kind", ["char", "word", "bpe"])
def test_fingerprint_tells_vocabularies_apart(kind):
    one = train_tokenizer(kind, [b"some text some text"], SIZES[kind])
    other = train_tokenizer(kind, [b"other words other words"], SIZES[kind])
    assert one.fingerprint != other.fingerprint


def test_dtype_is_the_smallest():
    sizes = {256: 1, 257: 2, 65536: 2, 65537: 4}
    assert {n: id_dtype(n).itemsize for n in sizes} == sizes


def test_encode_has_the_dtype_of_the_vocabulary(tokenizer):
    for text in (AWKWARD, ""):
        assert tokenizer.encode(text).dtype == id_dtype(tokenizer.vocab_size)


def test_char_ids_are_sorted_by_code_point():
    tokenizer = train_tokenizer("char", ["\u00e9b\n".encode(), b"a"])
    assert tokenizer.encode("\nab\u00e9\u20ac").tolist() == [1, 2, 3, 4, 0]
    assert tokenizer.token(0) == "<unk>" and tokenizer.token(1) == "\\n"


def test_word_cap_keeps_the_most_frequent():
    tokenizer = train_tokenizer("word", [b"z z z y y x x w"], 4)
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("z x y w").tolist() == [2, 3, 1, 1]


def test_bpe_size_and_merges():
    tokenizer = train_tokenizer("bpe", TEXTS, 300)
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(CODE)) < len(CODE) / 2


def test_unknown_is_counted():
    assert train_tokenizer("char", [b"ab"]).count_unknown(train_tokenizer("char", [b"ab"]).encode("abcd\n")) == 3
    word = train_tokenizer("word", [b"a b"])
    assert word.count_unknown(word.encode("a c b\nd")) == 2
    for kind in ("byte", "bpe"):
        tokenizer = train_tokenizer(kind, TEXTS, SIZES[kind])
        assert tokenizer.count_unknown(tokenizer.encode("\u4e16\0\x01")) == 0


def test_token_is_printable(tokenizer):
    assert all(tokenizer.token(i).isprintable() for i in range(tokenizer.vocab_size))


@pytest.mark.parametrize("id", [-1, 10**6])
def test_id_out_of_range_is_refused(tokenizer, id):
    with pytest.raises(TokenizerError, match=rf"token 1 has id {id}"):
        tokenizer.decode([0, id])
    with pytest.raises(TokenizerError):
        tokenizer.token(id)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("bytes", 0, "did you mean 'byte'.*byte, char, word, bpe"),
        ("xyz", 0, "byte, char, word, bpe"),
        ("bpe", 256, "at least 257"),
        ("word", 2, "at least 3"),
    ],
)
def test_bad_training_is_refused(kind, size, message):
    with pytest.raises(TokenizerError, match=message):
        train_tokenizer(kind, TEXTS, size)


@pytest.mark.parametrize("kind", ["char", "word", "bpe"])
def test_bad_utf8_names_text_and_offset(kind):
    size = SIZES[kind]
    with pytest.raises(DataError, match=r"training text 2 of 2.*0xff at offset 3"):
        train_tokenizer(kind, [b"ok", b"abc\xff"], size)
    tokenizer = train_tokenizer(kind, [b"ok", b"abc\xff"], size, errors="replace")
    assert tokenizer.count_unknown(tokenizer.encode("abc\ufffd")) == 0
    with pytest.raises(DataError, match="offset 3"):
        tokenizer.encode(b"abc\xff")
    with pytest.raises(DataError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")


def test_decode_text():
    assert decode_text("\u20ac".encode(), "x") == "\u20ac"
    assert decode_text(b"a\xffb", "x", "replace") == "a\ufffdb"
    with pytest.raises(DataError, match=r"^my\.txt: .*0xe2 at offset 4: .*data\.errors=replace.*data\.tokenizer=byte"):
        decode_text("\u00e9ab".encode() + b"\xe2\x82", "my.txt")
    with pytest.raises(ConfigError, match="ignore"):
        decode_text(b"a", "x", "ignore")


def foreign(change):
    content = json.loads(train_tokenizer("char", [b"ab"])._json)
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"version": "1.0", "model": {"type": "nonsense"}}',
        foreign(lambda c: c.update(decoder=None)),
        foreign(lambda c: c.update(normalizer={"type": "Lowercase"})),
        foreign(lambda c: c["model"]["vocab"].update(a=7)),
        foreign(lambda c: c["model"]["vocab"].update(ab=3)),
        "\u00e9".encode("latin-1"),
    ],
)
def test_load_refuses_what_is_no_tokenizer(content, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=r"bad\.json: expected") as caught:
        Tokenizer.load(path)
    assert "\n" not in str(caught.value)


def test_load_names_a_missing_file(tmp_path):
    with pytest.raises(TokenizerError, match=r"none\.json.*No such file"):
        Tokenizer.load(tmp_path / "none.json")
    with pytest.raises(TokenizerError, match=r"no/dir\.json: cannot write"):
        train_tokenizer("byte", []).save(tmp_path / "no" / "dir.json")
