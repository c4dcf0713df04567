"""What a user can get wrong: one line on stderr, exit status 2, and nothing left behind."""

import shutil
from pathlib import Path

import pytest
from conftest import english, write_config

from txl import cli


def refused(command, arguments, capsys):
    """The one line on stderr, after "error: "."""
    status = command([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert status == 2, (status, out, err)
    (line,) = err.splitlines()
    assert err.endswith("\n") and line.startswith("error: ") and len(line) < 600
    return line.removeprefix("error: ")


# train: settings

SETTINGS = {
    "unknown key": (["train.step=3"], ["unknown setting train.step", "did you mean train.steps?"]),
    "key of another section": (["model.lr=3"], ["unknown setting model.lr", "did you mean optim.lr?"]),
    "boundary that is nowhere": (["data.reset_on=%%%"], ["data.reset_on '%%%' is nowhere in the training text"]),
    "seed": ([f"seed={2**64}"], ["seed must be at least 0 and below 2 ** 63"]),
    "infinite": (["model.init_std=inf"], ["model.init_std must be below 2 ** 31, got inf"]),
    "mistyped section": (["trian.steps=3"], ["unknown setting trian", "did you mean train"]),
    "section without a key": (["train=3"], ["train is a section, expected train.key=value, got '3'"]),
    "key within a key": (["train.steps.x=3"], ["train.steps must be a whole number"]),
    "no equals sign": (["train.steps"], ['expected section.key=value on the command line, got "train.steps"']),
    "no key": (["=3"], ["expected section.key=value"]),
    "text for a number": (["train.steps=many"], ["train.steps must be a whole number, got 'many'"]),
    "a fraction for a whole number": (["train.steps=1.5"], ["train.steps must be a whole number, got 1.5"]),
    "a number for a choice": (["model.same_length=1"], ["model.same_length must be true or false, got 1"]),
    "one number for a list": (["optim.betas=0.9"], ["optim.betas must be a list of a number"]),
    "a list for a number": (["optim.lr=[1, 2]"], ["optim.lr must be a number, got [1, 2]"]),
    "not a number": (["optim.lr=nan"], ["optim.lr must be at least 0 and finite"]),
    "negative": (["model.mem_len=-1"], ["model.mem_len must be at least 0, got -1"]),
    "zero": (["train.batch_size=0"], ["train.batch_size must be at least 1, got 0"]),
    "heads": (["model.d_model=18", "model.n_head=4"], ["model.n_head 4 does not divide model.d_model 18", "d_head"]),
    "odd width": (["model.d_model=15", "model.d_head=4"], ["model.d_model must be even", "15"]),
    "vocabulary": (["model.vocab_size=300"], ["model.vocab_size is 300", "tokenizer has 256 tokens"]),
    "tokenizer": (["data.tokenizer=bytes"], ["data.tokenizer", "'bytes'", "did you mean 'byte'?", "char, word, bpe"]),
    "size of bpe": (["data.tokenizer=bpe", "data.vocab_size=100"], ["vocab_size", "at least 257, found 100"]),
    "source": (["data.source=wikipedia", "data.train="], ["data.source", "python-stdlib", "'wikipedia'"]),
    "source and train": (["data.source=python-stdlib"], ["data.source=python-stdlib", "data.train"]),
    "no text": (["data.train="], ["no text is given", "data.train=FILE"]),
    "document boundary": (["data.tokenizer=char", "data.reset_on=§"], ["data.reset_on='§'", "not in the vocabulary"]),
    "boundary of bpe": (
        ["data.tokenizer=bpe", "data.vocab_size=300", "data.reset_on=the "],
        ["data.reset_on='the '", "no token sequence of its own"],
    ),
    "optimiser": (["optim.name=lamb"], ["adam, adamw, sgd", "lamb"]),
    "schedule": (["optim.schedule=step"], ["cosine, linear, constant", "step"]),
    "dtype": (["train.dtype=half"], ["float32", "bfloat16", "half"]),
    "chunks": (["train.grad_accumulation=9"], ["train.grad_accumulation 9", "train.batch_size 4"]),
    "device": (["train.device=warp"], ['train.device "warp" is not usable here']),
    "absent device": (["train.device=cuda:99"], ['train.device "cuda:99" is not usable here']),
    "device without numbers": (["train.device=meta"], ['train.device "meta"']),
    "position": (["model.position=rope"], ["model.position", "rope"]),
    "memory": (["model.memory_init=ones"], ["model.memory_init", '"empty" or "zeros", got "ones"']),
    "unknown option": (["--resum", "run"], ["--resum"]),
    "unknown long option": (["--mem-len=3"], ["--mem-len=3", "--help"]),
    "too long segments": (
        ["train.batch_size=100", "train.tgt_len=200"],
        ["the train split has 18000 tokens", "batch_size 100", "tgt_len 200", "need at least 20001"],
    ),
    "missing text": (["data.train={folder}/absent.txt"], ["{folder}/absent.txt", "No such file"]),
    "folder as text": (["data.train={folder}"], ["{folder}", "Is a directory"]),
    "missing validation": (["data.valid={folder}/absent.txt"], ["{folder}/absent.txt", "No such file"]),
    "empty text": (["data.train={folder}/empty.txt"], ["{folder}/empty.txt", "an empty file"]),
    "empty validation": (["data.valid={folder}/empty.txt"], ["{folder}/empty.txt", "an empty file"]),
    "short text": (["data.train={folder}/short.txt"], ["train split has 27 tokens", "need at least 33"]),
    "very short text": (["data.train={folder}/tiny.txt"], ["{folder}/tiny.txt", "too few to take 5 %"]),
    "short validation": (["data.valid={folder}/one.txt"], ["the valid split has 1 token", "at least 2"]),
    "white space": (["data.tokenizer=word", "data.train={folder}/blank.txt"], ["white space only"]),
    "not UTF-8": (
        ["data.tokenizer=char", "data.train={folder}/latin1.txt"],
        ["{folder}/latin1.txt", "found byte 0xe9 at offset 2003", "data.errors=replace"],
    ),
    "validation not UTF-8": (
        ["data.tokenizer=bpe", "data.valid={folder}/latin1.txt"],
        ["{folder}/latin1.txt", "found byte 0xe9 at offset 2003"],
    ),
    "parent of the run is a file": (["run_dir={folder}/text.txt/run"], ["{folder}/text.txt"]),
    "run exists": (["run_dir={folder}"], ["{folder} exists", "--resume {folder}", "run_dir=NAME"]),
    "run is a file": (["run_dir={folder}/text.txt"], ["{folder}/text.txt exists"]),
}


@pytest.fixture
def folder(tmp_path):
    """A configuration, its text, and texts that will not do."""
    write_config(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "one.txt").write_text("x")
    (tmp_path / "tiny.txt").write_text("xyz")
    (tmp_path / "short.txt").write_text(english(30))
    (tmp_path / "blank.txt").write_text(" \t " * 100)
    (tmp_path / "latin1.txt").write_bytes(english(2000).encode() + "café naïve\n".encode("latin-1") * 300)
    return tmp_path


@pytest.mark.parametrize("words, fragments", SETTINGS.values(), ids=SETTINGS)
def test_train_refuses(folder, capsys, words, fragments):
    before = sorted(folder.rglob("*"))
    words = [word.format(folder=folder) for word in words]
    message = refused(cli.train, [folder / "tiny.toml", f"run_dir={folder}/run", *words], capsys)
    for fragment in fragments:
        assert fragment.format(folder=folder) in message
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        ([], ["expected a config file"]),
        (["train.steps=3"], ["expected a config file"]),
        (["{folder}/tiny.tml"], ["no config file {folder}/tiny.tml", "did you mean tiny.toml?"]),
        (["{folder}/no/tiny.toml"], ["no config file {folder}/no/tiny.toml"]),
        (["{folder}"], ["no config file {folder}"]),
        (["{folder}/latin1.txt"], ["{folder}/latin1.txt is not TOML"]),
        (["{folder}/broken.toml"], ["{folder}/broken.toml is not TOML", "line 2"]),
        (["{folder}/circle.toml"], ["{folder}/circle.toml", "in a circle"]),
        (["{folder}/unknown.toml"], ["{folder}/unknown.toml: unknown setting", "did you mean model.n_layer?"]),
        (["{folder}/list.toml"], ["{folder}/list.toml", "train"]),
        (["--resume", "{folder}/absent"], ["{folder}/absent is not a run directory"]),
        (["--resume", "{folder}"], ["{folder} is not a run directory"]),
        (["--resume", "{folder}/absent", "--print-config"], ["{folder}/absent"]),
        (["--resume", "{folder}/absent", "{folder}/tiny.toml"], ["leave out {folder}/tiny.toml"]),
        (["--resume"], ["--resume", "expected one argument"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_train_refuses_the_command(folder, capsys, arguments, fragments):
    (folder / "broken.toml").write_text('[train]\nsteps = "3\n')
    (folder / "circle.toml").write_text('extends = "circle.toml"\n')
    (folder / "unknown.toml").write_text("[model]\nn_layers = 3\n")
    (folder / "list.toml").write_text("train = [1]\n")
    before = sorted(folder.rglob("*"))
    message = refused(cli.train, [argument.format(folder=folder) for argument in arguments], capsys)
    for fragment in fragments:
        assert fragment.format(folder=folder) in message
    assert sorted(folder.rglob("*")) == before


def test_what_is_not_utf8_can_be_replaced(folder, capsys):
    words = ["data.tokenizer=char", f"data.train={folder}/latin1.txt", "data.errors=replace"]
    assert cli.train([str(folder / "tiny.toml"), f"run_dir={folder}/run", "train.steps=1", *words]) == 0
    assert capsys.readouterr().err == ""


# eval and generate: runs and texts


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def alter(path):
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


DAMAGED = {
    "shard cut": ("data/valid.bin", cut, ["data/valid.bin", "truncated"]),
    "shard altered": ("data/test.bin", alter, ["data/test.bin", "sha256"]),
    "shard removed": ("data/train.bin", Path.unlink, ["data/train.bin", "No such file"]),
    "shard emptied": ("data/test.bin", lambda path: path.write_bytes(b""), ["data/test.bin", "truncated"]),
    "shard replaced": ("data/test.bin", lambda path: path.write_bytes(b"x" * 999), ["data/test.bin", "no token shard"]),
    "tokenizer altered": (
        "tokenizer.json",
        lambda path: path.write_text(path.read_text().replace('"Z"', '"~~"')),
        ["tokenizer"],
    ),
    "tokenizer cut": ("tokenizer.json", lambda path: path.write_text(path.read_text()[:500]), ["tokenizer.json"]),
    "tokenizer removed": ("tokenizer.json", Path.unlink, ["tokenizer.json", "No such file"]),
    "tokenizer not UTF-8": ("tokenizer.json", lambda path: path.write_bytes(b"\xff{}"), ["tokenizer.json", "UTF-8"]),
    "config removed": ("config.toml", Path.unlink, ["--data"]),
    "config altered": ("config.toml", lambda path: path.write_text("[model]\nx = 1\n"), ["config.toml", "model.x"]),
    "weights cut": ("model.safetensors", cut, ["model.safetensors", "cut or altered"]),
    "weights altered": ("model.safetensors", alter, ["model.safetensors", "sha256"]),
    "weights removed": ("model.safetensors", Path.unlink, ["model.safetensors", "missing"]),
    "state altered": ("state.safetensors", alter, ["state.safetensors", "sha256"]),
    "manifest cut": ("manifest.json", lambda path: path.write_text(path.read_text()[:40]), ["manifest.json"]),
    "no checkpoints": ("checkpoints", shutil.rmtree, ["no checkpoint in", "has the run trained yet?"]),
}


@pytest.mark.parametrize("file, damage, fragments", DAMAGED.values(), ids=DAMAGED)
def test_eval_refuses_a_damaged_run(shared_run, tmp_path, capsys, file, damage, fragments):
    run = Path(shutil.copytree(shared_run[0], tmp_path / "run"))
    in_checkpoint = file in ("model.safetensors", "state.safetensors", "manifest.json")
    for path in (run / "checkpoints").glob(f"*/{file}") if in_checkpoint else [run / file]:
        damage(path)
    before = sorted(tmp_path.rglob("*"))
    message = refused(cli.evaluate, [run, "--mem-len", 8], capsys)
    for fragment in fragments:
        assert fragment in message
    assert str(run) in message
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "command, options, fragments",
    [
        (cli.evaluate, ["--mem-len", "-1"], ["--mem-len", "-1"]),
        (cli.evaluate, ["--mem-len=-1"], ["--mem-len must be at least 0 and below 2 ** 31, got -1"]),
        (cli.evaluate, ["--mem-len", "8", "many"], ["--mem-len", "many"]),
        (cli.evaluate, ["--mem-len"], ["--mem-len", "expected at least one argument"]),
        (cli.evaluate, ["--tgt-len", "0"], ["--tgt-len must be at least 1 and below 2 ** 31, got 0"]),
        (cli.evaluate, ["--clamp-len=-2"], ["--clamp-len must be at least 0 and below 2 ** 31, got -2"]),
        (cli.evaluate, ["--batch-size", "0"], ["--batch-size must be at least 1 and below 2 ** 31, got 0"]),
        (cli.evaluate, ["--nonsense"], ["--nonsense", "--help"]),
        (cli.evaluate, ["--split", "tset"], ["--split", "tset", "test"]),
        (cli.evaluate, ["--which", "newest"], ["--which", "newest", "last"]),
        (cli.evaluate, ["--device", "warp"], ["warp", "not usable here"]),
        (cli.evaluate, ["--device", "meta"], ["meta"]),
        (cli.evaluate, ["--data", "{folder}/absent.txt"], ["{folder}/absent.txt", "No such file"]),
        (cli.evaluate, ["--data", "{folder}"], ["{folder}", "Is a directory"]),
        (cli.evaluate, ["--data", "{folder}/empty.txt"], ["{folder}/empty.txt", "0 bytes"]),
        (cli.evaluate, ["--data", "{folder}/one.txt"], ["{folder}/one.txt has 1 token", "at least 2"]),
        (cli.evaluate, ["--mem-len", "0", "--json", "{folder}/no/scores.json"], ["{folder}/no/scores.json"]),
        (cli.generate, ["--tokens=-1"], ["tokens", "-1"]),
        (cli.generate, ["--tokens", "many"], ["--tokens", "many"]),
        (cli.generate, ["--temperature=-1"], ["temperature", "-1"]),
        (cli.generate, ["--temperature=nan"], ["temperature", "nan"]),
        (cli.generate, ["--top-k=-1"], ["top", "-1"]),
        (cli.generate, ["--mem-len=-1"], ["mem", "-1"]),
        (cli.generate, ["--prompt", ""], ["--prompt has no token"]),
        (cli.generate, ["--prompt", "\udcff"], ["surrogate"]),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "backslashreplace").decode() if isinstance(value, list) else None,
)
def test_eval_and_generate_refuse_the_options(shared_run, folder, capsys, command, options, fragments):
    message = refused(command, [shared_run[0], *(option.format(folder=folder) for option in options)], capsys)
    for fragment in fragments:
        assert fragment.format(folder=folder) in message


@pytest.mark.parametrize("command", [cli.evaluate, cli.generate])
def test_eval_and_generate_refuse_what_is_no_run(folder, capsys, command):
    assert "absent" in refused(command, [folder / "absent"], capsys)
    assert "no checkpoint in" in refused(command, [folder], capsys)
    assert "RUN" in refused(command, [], capsys)


def test_eval_refuses_a_text_that_is_not_utf8_unless_the_run_replaces(folder, capsys):
    run = folder / "run"
    words = [f"run_dir={run}", "data.tokenizer=char", "train.steps=1", "eval.tokens=50"]
    assert cli.train([str(folder / "tiny.toml"), *words]) == 0
    message = refused(cli.evaluate, [run, "--data", folder / "latin1.txt"], capsys)
    assert f"{folder}/latin1.txt" in message and "0xe9 at offset 2003" in message
    config = run / "config.toml"
    config.write_text(config.read_text().replace('errors = "strict"', 'errors = "replace"'))
    assert cli.evaluate([str(run), "--data", str(folder / "latin1.txt"), "--mem-len", "0"]) == 0


def test_a_message_with_line_ends_is_one_line_too(folder, capsys):
    assert "a b c" in refused(cli.train, [folder / "tiny.toml", "optim.name=a\nb\nc"], capsys)
