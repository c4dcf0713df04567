import sysconfig
from pathlib import Path

import pytest

from txl.data.corpus import SPLITS, DataConfig, _source_files, prepare, read_splits, reset_ids
from txl.data.streams import boundaries
from txl.data.tokenizer import train_tokenizer
from txl.errors import ConfigError, DataError, TokenizerError

STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture
def write(tmp_path):
    def write(name, data):
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return write


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of 43 small files, and what must be left out."""
    root = tmp_path / "lib"
    names = [f"m{i:02}.py" for i in range(40)] + ["pkg/__init__.py", "pkg/last.py", "turtledemo/x.py"]
    left_out = ["test/a.py", "pkg/tests/a.py", "site-packages/a.py", "dist-packages/a.py", "idlelib/idle_test/a.py"]
    left_out += ["__pycache__/a.py", "config-3.11-x/a.py", "notes.txt"]
    for name in names + left_out:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if name.startswith("pkg/__") else f"# {name} here\nx = 1".encode())
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    return root, sorted(names)


def files_in(text):
    return [line.removeprefix("# file: ") for line in text.decode().split("\n") if line.startswith("# file: ")]


def test_stdlib_is_the_library_without_tests():
    splits = read_splits(DataConfig(source="python-stdlib"))
    assert splits == read_splits(DataConfig(source="python-stdlib"))
    assert tuple(splits) == SPLITS
    paths = _source_files(STDLIB)
    assert {"abc.py", "json/decoder.py", "unittest/case.py"} <= set(paths)
    banned = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not [p for p in paths if banned & set(p.split("/")[:-1])]
    files = {name: set(files_in(text)) & set(paths) for name, text in splits.items()}
    assert len(files["train"]) > 10 * len(files["valid"]) > 100
    assert not files["train"] & files["valid"] and not files["train"] & files["test"]
    assert not files["valid"] & files["test"]


def test_stdlib_is_split_by_file_in_order_of_path(library):
    root, names = library
    (root / "m03.py").write_bytes(b"# latin-1: \xe9\n")
    names.remove("m03.py")
    splits = read_splits(DataConfig(source="python-stdlib"))
    files = {name: files_in(text) for name, text in splits.items()}
    assert files["valid"] == [names[18], names[38]] and files["test"] == [names[19], names[39]]
    assert files["train"] == [n for n in names if n not in files["valid"] + files["test"]]
    assert splits["valid"].startswith(f"# file: {names[18]}\n# {names[18]} here\nx = 1\n# file: ".encode())


def test_no_stdlib_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=rf"{tmp_path}: .*data\.train=FILE"):
        read_splits(DataConfig(source="python-stdlib"))


def test_last_tenth_is_held_out(write):
    text = bytes(range(200)) * 5
    splits = read_splits(DataConfig(train=write("a.txt", text)))
    assert {k: len(v) for k, v in splits.items()} == {"train": 900, "valid": 50, "test": 50}
    assert b"".join(splits.values()) == text


@pytest.mark.parametrize("given", ["valid", "test"])
def test_one_split_given_the_other_is_taken(write, given):
    text = bytes(range(200)) * 5
    splits = read_splits(DataConfig(train=write("a.txt", text), **{given: write("b.txt", b"other")}))
    other = {"valid": "test", "test": "valid"}[given]
    assert splits[given] == b"other" and splits["train"] == text[:950] and splits[other] == text[950:]
    assert tuple(splits) == SPLITS


def test_all_splits_given(write):
    config = DataConfig(train=write("a", b"train"), valid=write("b", b"valid"), test=write("c", b"test"))
    assert read_splits(config) == {"train": b"train", "valid": b"valid", "test": b"test"}


@pytest.mark.parametrize("shift", range(4))
def test_no_character_is_divided(write, shift):
    text = b"a" * shift + "\U0001f600".encode() * 101
    splits = read_splits(DataConfig(train=write("a", text)))
    assert b"".join(splits.values()) == text
    assert all(part.decode() for part in splits.values())


def test_invalid_utf8_is_cut_all_the_same(write):
    splits = read_splits(DataConfig(train=write("a", b"\x80" * 1000)))
    assert [len(part) for part in splits.values()] == [900, 50, 50]


def test_bad_files_are_named(write, tmp_path):
    good = write("good", b"text " * 100)
    bad = {"missing": "No such file", "folder": "Is a directory", "empty": "an empty file"}
    (tmp_path / "folder").mkdir()
    write("empty", b"")
    for name, message in bad.items():
        for config in (DataConfig(train=str(tmp_path / name)), DataConfig(train=good, test=str(tmp_path / name))):
            with pytest.raises(DataError, match=f"{tmp_path / name}: .*{message}") as caught:
                read_splits(config)
            assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"tiny: 8 bytes are too few .* valid"):
        read_splits(DataConfig(train=write("tiny", b"8 bytes.")))


@pytest.mark.parametrize("kind", ["char", "word", "bpe"])
def test_bad_utf8_is_named_with_its_offset_in_the_file(write, kind):
    path = write("latin.txt", b"x " * 490 + b"caf\xe9 " + b"y " * 5)
    with pytest.raises(DataError, match=r"latin\.txt: .*0xe9 at offset 983"):
        prepare(DataConfig(train=path, tokenizer=kind))
    tokenizer, shards = prepare(DataConfig(train=path, tokenizer=kind, errors="replace"))
    assert tokenizer.kind == kind and shards["train"].n_bytes > 800
    assert prepare(DataConfig(train=path))[1]["train"].vocab_size == 256


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "chars"}, "did you mean 'char'"),
        ({"source": "wikipedia"}, "python-stdlib"),
        ({"errors": "ignore"}, "strict or replace"),
        ({"vocab_size": -1}, "0 or more"),
        ({"source": "python-stdlib", "train": "a"}, "own splits"),
        ({"valid": "a"}, r"data\.train=FILE"),
        ({"test": "a"}, r"data\.train=FILE"),
    ],
)
def test_config_refuses(settings, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**settings)


def test_no_text_is_refused_on_reading_only():
    with pytest.raises(ConfigError, match=r"data\.train=FILE or data\.source=python-stdlib"):
        read_splits(DataConfig())


def test_prepare_trains_char_on_all_and_word_on_train(write):
    paths = {"train": write("a", b"a b b\n"), "valid": write("b", b"b c\n"), "test": write("c", b"d a d\n")}
    char, shards = prepare(DataConfig(**paths, tokenizer="char"))
    assert char.vocab_size == 1 + len("\n abcd")
    assert [char.count_unknown(s.tokens) for s in shards.values()] == [0, 0, 0]
    word, shards = prepare(DataConfig(**paths, tokenizer="word"))
    assert word.vocab_size == 4
    assert [word.count_unknown(s.tokens) for s in shards.values()] == [0, 1, 2]
    assert tuple(shards) == SPLITS and shards["test"].n_words == 3


def test_prepare_keeps_a_given_tokenizer(write):
    path = write("a", b"some text " * 50)
    given = train_tokenizer("char", [b"some tx"])
    tokenizer, shards = prepare(DataConfig(train=path), given)
    assert tokenizer is given and shards["train"].fingerprint == given.fingerprint
    assert len(shards["train"]) == 450


def test_prepare_passes_the_size_on(write):
    path = write("a", b"one two three two three three " * 20)
    assert prepare(DataConfig(train=path, tokenizer="word", vocab_size=4))[0].vocab_size == 4
    with pytest.raises(TokenizerError, match="at least 257"):
        prepare(DataConfig(train=path, tokenizer="bpe", vocab_size=100))


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe"])
def test_every_document_is_found(library, kind):
    config = DataConfig(source="python-stdlib", tokenizer=kind, reset_on="# file:")
    tokenizer, shards = prepare(config)
    found = boundaries(shards["train"].tokens, reset_ids(config, tokenizer))
    assert len(found) == len(files_in(read_splits(config)["train"])) == 39
    assert found[0] == 0
    assert tokenizer.decode(shards["train"].tokens[found[1] :]).startswith("# file: ")


def test_reset_ids():
    char, word = train_tokenizer("char", [b"ab\n"]), train_tokenizer("word", [b"a b\n"])
    bpe = train_tokenizer("bpe", [b"hello world hello\n" * 9], 280)
    assert reset_ids(DataConfig(), char) is None
    assert reset_ids(DataConfig(reset_on="a\n"), char) == (2, 1)
    assert reset_ids(DataConfig(reset_on="\u00e9"), train_tokenizer("byte", [])) == (0xC3, 0xA9)
    assert reset_ids(DataConfig(reset_on="<eos>"), word) == reset_ids(DataConfig(reset_on="\n"), word) == (0,)
    for tokenizer, text in ((char, "c"), (word, "a c"), (word, "  ")):
        with pytest.raises(ConfigError, match="not in the vocabulary"):
            reset_ids(DataConfig(reset_on=text), tokenizer)
    assert reset_ids(DataConfig(reset_on="hello"), bpe) == tuple(bpe.encode("hello").tolist())
    for text in ("hello ", "hel", "\n\n"):  # would be joined to what follows
        with pytest.raises(ConfigError, match="no token sequence of its own"):
            reset_ids(DataConfig(reset_on=text), train_tokenizer("bpe", [b"helx hello world\n" * 9], 280))
