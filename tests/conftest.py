"""What the end-to-end tests share: a text by formula, a tiny configuration, and one trained run."""

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch

from txl import cli
from txl.training import loop
from txl.training.run import Run, RunConfig

CONFIG = """
[model]
n_layer = 2
n_head = 2
d_model = 16
d_inner = 32
mem_len = 8
dropout = 0.0
init_std = 0.1

[data]
train = "{text}"

[train]
steps = 6
batch_size = 4
tgt_len = 8
log_every = 1
device = "cpu"

[optim]
lr = 0.01

[eval]
every = 0
tokens = 300

[checkpoint]
every = 0
"""

NOUNS = ["dog", "river", "lamp", "city", "horse", "garden", "letter", "winter", "bridge", "captain"]
VERBS = ["sees", "crosses", "remembers", "paints", "follows", "leaves", "finds", "mends"]
ADJECTIVES = ["old", "small", "bright", "silent", "green", "foreign", "patient"]


def english(n_bytes: int, seed: int = 1) -> str:
    """Sentences of a few words, the same on every machine: a linear congruential generator chooses."""
    state, lines, length = seed, [], 0

    def choose(words):
        nonlocal state
        state = (state * 1103515245 + 12345) % 2**31
        return words[(state >> 8) % len(words)]

    while length < n_bytes:
        subject = f"The {choose(ADJECTIVES)} {choose(NOUNS)}"
        line = f"{subject} {choose(VERBS)} the {choose(NOUNS)}, and the {choose(NOUNS)} {choose(VERBS)} it.\n"
        lines.append(line)
        length += len(line)
    return "".join(lines)[:n_bytes]


def write_config(directory: Path, n_bytes: int = 20_000) -> Path:
    """A text and a configuration in a directory; the path of the configuration."""
    text = directory / "text.txt"
    text.write_text(english(n_bytes), encoding="utf-8")
    config = directory / "tiny.toml"
    config.write_text(CONFIG.format(text=text.as_posix()), encoding="utf-8")
    return config


def new_run(config: Path, name: str, *words: str) -> Run:
    """A new run directory beside the configuration."""
    return Run.create(RunConfig.load(config, [f"run_dir={config.parent / name}", *words]))


def trained_run(config: Path, name: str, *words: str) -> Run:
    """A run that has done its steps, without the report."""
    run = new_run(config, name, *words)
    assert loop.train(run) is None
    return run


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def config(tmp_path) -> Path:
    """A tiny configuration in a directory of its own."""
    return write_config(tmp_path)


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory) -> tuple[Path, str]:
    """A run directory after a whole train.py, and what it printed. Not to be changed: copy it."""
    directory = tmp_path_factory.mktemp("shared")
    config = write_config(directory)
    words = ["train.steps=40", "eval.every=10", "checkpoint.every=10", "checkpoint.keep=2", "model.dropout=0.1"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.train([str(config), f"run_dir={directory / 'run'}", *words])
    assert (status, err.getvalue()) == (0, ""), err.getvalue()
    os.remove(directory / "text.txt")  # a run holds all it needs
    return directory / "run", out.getvalue()
