"""A run directory: how it is made, what it records, and what it refuses."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import english, new_run, trained_run, write_config

from txl import cli
from txl.config import to_toml
from txl.errors import CheckpointError, ConfigError, DataError, TokenizerError, TxlError
from txl.training import loop, metrics
from txl.training.run import Run, RunConfig, TrainConfig


def contents(directory):
    """Every file below a directory with its bytes."""
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_new_run_holds_config_tokenizer_and_shards_and_no_leftovers(config):
    run = new_run(config, "run")
    assert sorted(str(path) for path in contents(run.directory)) == [
        "config.toml",
        "data/test.bin",
        "data/train.bin",
        "data/valid.bin",
        "tokenizer.json",
    ]
    assert sorted(path.name for path in config.parent.iterdir()) == ["run", "text.txt", "tiny.toml"]
    text = (config.parent / "text.txt").read_bytes()
    assert b"".join(run.shards[split].tokens.tobytes() for split in ("train", "valid", "test")) == text


def test_the_recorded_settings_are_the_resolved_ones(config):
    run = new_run(config, "run", "optim.lr=3e-4", "model.clamp_len=5", "data.reset_on=The ", "eval.mem_lens=[0, 4]")
    again = RunConfig.load(run.directory / "config.toml", [])
    assert again == run.config
    assert (again.model.vocab_size, again.optim.lr, again.model.clamp_len) == (256, 3e-4, 5)
    assert (again.data.reset_on, again.eval.mem_lens) == ("The ", (0, 4))
    assert to_toml(again) == (run.directory / "config.toml").read_text(encoding="utf-8")


def test_the_recorded_settings_make_the_same_run_again(config):
    first = trained_run(config, "first", "model.dropout=0.2", "seed=3")
    second = trained_run(first.directory / "config.toml", "../second")
    assert replace(second.config, run_dir="") == replace(first.config, run_dir="")
    path = "checkpoints/step-00000006/model.safetensors"
    assert (first.directory / path).read_bytes() == (second.directory / path).read_bytes()


def test_without_run_dir_the_name_is_that_of_the_config_file(config):
    assert RunConfig.load(config, []).run_dir == "runs/tiny"
    assert RunConfig.load(config, ["run_dir=elsewhere"]).run_dir == "elsewhere"


def test_an_existing_directory_is_refused_and_left_as_it_was(config):
    run = trained_run(config, "run")
    before = contents(config.parent)
    with pytest.raises(ConfigError) as caught:
        new_run(config, "run")
    assert f"--resume {run.directory}" in str(caught.value) and "run_dir=" in str(caught.value)
    assert contents(config.parent) == before


@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(), lambda path: path.symlink_to("nowhere"), lambda p: p.touch()]
)
def test_anything_of_that_name_is_refused(config, make):
    make(config.parent / "run")
    with pytest.raises(ConfigError, match="--resume"):
        new_run(config, "run")


def test_a_failure_while_the_directory_is_made_leaves_nothing(config, monkeypatch):
    from txl.training import run as module

    def fail(path, shard):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(module, "write_shard", fail)
    before = contents(config.parent)
    with pytest.raises(OSError, match="No space left"):
        new_run(config, "run")
    assert contents(config.parent) == before and not (config.parent / "run").exists()
    assert [path for path in config.parent.iterdir() if path.is_dir()] == []


def test_data_train_on_the_command_line_replaces_the_source(config):
    config.write_text(
        config.read_text().replace("[data]\n", "[data]\n#").replace("#train", 'source = "python-stdlib"\n#')
    )
    assert RunConfig.load(config, []).data.source == "python-stdlib"
    text = config.parent / "text.txt"
    loaded = RunConfig.load(config, [f"data.train={text}"])
    assert (loaded.data.source, loaded.data.train) == ("", str(text))
    run = new_run(config, "run", f"data.train={text}")
    assert run.shards["train"].n_bytes == 18_000
    with pytest.raises(ConfigError, match="python-stdlib brings its own splits"):
        RunConfig.load(config, [f"data.train={text}", "data.source=python-stdlib"])


@pytest.mark.parametrize("kind, found", [("byte", 256), ("char", None)])
def test_a_vocabulary_size_that_is_left_over_is_ignored(config, kind, found):
    run = new_run(config, "run", f"data.tokenizer={kind}", "data.vocab_size=8192")
    characters = len(set((config.parent / "text.txt").read_text())) + 1
    assert run.config.model.vocab_size == run.tokenizer.vocab_size == (found or characters)


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe"])
def test_every_tokenizer_trains_stops_and_goes_on(config, kind):
    run = trained_run(
        config, "run", f"data.tokenizer={kind}", "data.vocab_size=300", "data.reset_on=The", "train.steps=3"
    )
    assert len(run.cuts(run.shards["train"])) > 10
    again = Run.open(run.directory, ["train.steps=5"])
    assert again.tokenizer.kind == kind and again.tokenizer.fingerprint == run.tokenizer.fingerprint
    assert loop.train(again, resume=True) is None


def test_the_valid_head_is_the_first_tokens_of_the_split(config):
    run = new_run(config, "run")
    valid = run.shards["valid"]
    assert len(run.valid_head()) == 300 and len(valid) == 1000
    assert np.array_equal(run.valid_head().tokens, valid.tokens[:300])
    assert len(new_run(config, "all", "eval.tokens=0").valid_head()) == 1000


# resuming


@pytest.mark.parametrize(
    "word, name",
    [
        ("seed=1", "seed"),
        ("model.n_layer=3", "model"),
        ("model.mem_len=9", "model"),
        ("model.dropout=0.3", "model"),
        ("data.train=other.txt", "data"),
        ("data.tokenizer=char", "data"),
        ("data.reset_on=x", "data"),
        ("train.batch_size=3", "train.batch_size"),
        ("train.grad_accumulation=2", "train.grad_accumulation"),
    ],
)
def test_what_weights_and_data_belong_to_cannot_change_on_resume(config, word, name):
    run = new_run(config, "run")
    before = contents(run.directory)
    with pytest.raises(ConfigError, match=f"{name} cannot change when a run is resumed"):
        Run.open(run.directory, [word])
    assert contents(run.directory) == before


def test_other_settings_can_change_on_resume_and_are_recorded(config):
    run = trained_run(config, "run")
    words = ["train.steps=8", "optim.lr=0.5", "optim.schedule=constant", "eval.every=2", "train.tgt_len=6"]
    again = Run.open(run.directory, words)
    assert loop.train(again, resume=True) is None
    lines = [line for line in metrics.read(run.directory / "metrics.jsonl") if line["split"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["lr"] for line in lines[6:]] == [0.5, 0.5]
    assert Run.open(run.directory).config == again.config


@pytest.mark.parametrize(
    "word", ["train.tgt_len=100000", "train.device=nonsense", "data.train=", "optim.lr=-1", "train.loss=third"]
)
def test_a_refused_resume_leaves_the_run_as_it_was(config, capsys, word):
    run = trained_run(config, "run")
    before = contents(run.directory)
    assert cli.train(["--resume", str(run.directory), "train.steps=8", word]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert contents(run.directory) == before


def test_resuming_without_a_checkpoint_starts_at_step_0(config, capsys):
    run = new_run(config, "run", "model.dropout=0.2")
    assert loop.train(run, resume=True) is None
    assert "steps 0 to 6" in capsys.readouterr().out
    other = trained_run(config, "other", "model.dropout=0.2")
    path = "checkpoints/step-00000006/model.safetensors"
    assert (run.directory / path).read_bytes() == (other.directory / path).read_bytes()


def test_a_run_can_be_moved(config):
    run = trained_run(config, "run")
    moved = config.parent / "elsewhere" / "moved"
    moved.parent.mkdir()
    run.directory.rename(moved)
    (config.parent / "text.txt").unlink()
    again = Run.open(moved, ["train.steps=8"])
    assert loop.train(again, resume=True) is None
    assert again.is_finished and again.config.run_dir == str(moved) and not run.directory.exists()


@pytest.mark.parametrize(
    "file, error",
    [("tokenizer.json", TokenizerError), ("data/train.bin", DataError), ("config.toml", CheckpointError)],
)
def test_a_run_that_lacks_a_file_is_refused(shared_run, tmp_path, file, error):
    shutil.copytree(shared_run[0], tmp_path / "run")
    (tmp_path / "run" / file).unlink()
    with pytest.raises(error, match=file):
        Run.open(tmp_path / "run")


def test_another_tokenizer_in_the_run_is_refused(shared_run, tmp_path):
    other = new_run(write_config(tmp_path), "char", "data.tokenizer=char")
    shutil.copytree(shared_run[0], tmp_path / "run")
    shutil.copy(other.directory / "tokenizer.json", tmp_path / "run" / "tokenizer.json")
    with pytest.raises(TokenizerError, match=r"train\.bin"):
        Run.open(tmp_path / "run")


@pytest.mark.parametrize(
    "options, fragment",
    [
        ({"batch_size": 0}, "train.batch_size"),
        ({"tgt_len": 0}, "train.tgt_len"),
        ({"grad_accumulation": 0}, "train.grad_accumulation"),
        ({"log_every": 0}, "train.log_every"),
        ({"steps": -1}, "train.steps"),
        ({"batch_size": 2, "grad_accumulation": 3}, "at most train.batch_size 2"),
        ({"dtype": "float16"}, '"float32" or "bfloat16", got "float16"'),
        ({"loss": "third"}, '"full" or "half", got "third"'),
        ({"loss": "half", "tgt_len": 1}, "at least 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, fragment):
    with pytest.raises(ConfigError, match=fragment):
        TrainConfig(**options)


@pytest.mark.parametrize(
    "n_bytes, words, fragment",
    [
        (150, ["train.batch_size=16", "train.tgt_len=16"], "need at least 257"),
        (12, ["train.batch_size=1", "train.tgt_len=1"], "too few|at least 2"),
        (30, ["train.batch_size=1", "train.tgt_len=2"], "valid split has 1 token"),
    ],
)
def test_a_text_that_is_too_short_is_refused_with_the_length_it_needs(tmp_path, n_bytes, words, fragment):
    config = write_config(tmp_path, n_bytes)
    with pytest.raises(TxlError, match=fragment):
        new_run(config, "run", *words)
    assert not (tmp_path / "run").exists()


def test_the_shortest_text_that_is_said_to_do_does(tmp_path):
    config = write_config(tmp_path)
    for split, length in (("train", 257), ("valid", 2), ("test", 2)):
        (tmp_path / split).write_text(english(length))
    words = [f"data.{split}={tmp_path / split}" for split in ("train", "valid", "test")]
    run = trained_run(config, "run", "train.batch_size=16", "train.tgt_len=16", *words)
    state = json.loads((run.checkpoints / "step-00000006" / "state.json").read_text())
    assert state["tokens"] == 6 * 256


@pytest.mark.parametrize(
    "word, message",
    [("train.steps=10", "is at step 40: train.steps must be more"), ("run_dir=other", "run_dir cannot")],
)
def test_resume_refuses_what_would_do_nothing(shared_run, tmp_path, capsys, word, message):
    directory = tmp_path / "run"
    shutil.copytree(shared_run[0], directory)
    before = (directory / "config.toml").read_bytes()
    assert cli.train(["--resume", str(directory), word]) == 2
    assert message in capsys.readouterr().err
    assert (directory / "config.toml").read_bytes() == before


def test_another_tokenizer_drops_the_vocabulary_size_of_the_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[data]\ntokenizer = "bpe"\nvocab_size = 2048\n')
    assert RunConfig.load(path, ["data.tokenizer=word"]).data.vocab_size == 0
    assert RunConfig.load(path, ["data.tokenizer=word", "data.vocab_size=9"]).data.vocab_size == 9
    assert RunConfig.load(path, []).data.vocab_size == 2048


def test_a_finished_run_without_its_report_makes_it_up(shared_run, tmp_path, capsys):
    directory = tmp_path / "run"
    shutil.copytree(shared_run[0], directory)
    assert cli.train(["--resume", str(directory)]) == 0
    assert "validation loss by memory length" not in capsys.readouterr().out
    (directory / "memory_valid.png").unlink()
    assert cli.train(["--resume", str(directory)]) == 0
    assert "validation loss by memory length" in capsys.readouterr().out
    assert (directory / "memory_valid.png").is_file()
