"""metrics.jsonl, the console, and the loss curve."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
from conftest import new_run, trained_run

from txl.training import loop, metrics
from txl.training.checkpoint import Window
from txl.training.metrics import Metrics, loss_curve, read

KEYS = {"step", "split", "nll", "bits_per_byte", "tokens", "tokens_per_s", "lr", "seconds"}


def of(lines, split):
    return [line for line in lines if line["split"] == split]


def test_lines_have_the_promised_keys_and_steps_rise_per_split(shared_run):
    text = (shared_run[0] / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert text.endswith("\n") and all(line.keys() >= KEYS for line in lines)
    assert [line["step"] for line in of(lines, "train")] == list(range(1, 41))
    assert [line["step"] for line in of(lines, "valid")] == [10, 20, 30, 40]
    assert [line["tokens"] for line in of(lines, "train")] == [32 * step for step in range(1, 41)]
    assert {line["tokens"] for line in of(lines, "valid")} == {299}
    for line in lines:
        assert line["bits_per_byte"] == pytest.approx(line["nll"] / math.log(2), rel=0.01)
        assert line["tokens_per_s"] > 0 and line["seconds"] >= 0
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)


def test_bits_per_byte_of_training_counts_the_bytes_of_a_token(config):
    run = trained_run(config, "run", "data.tokenizer=bpe", "data.vocab_size=300")
    shard = run.shards["train"]
    assert len(shard) < 0.8 * shard.n_bytes
    for line in of(read(run.directory / "metrics.jsonl"), "train"):
        assert line["bits_per_byte"] == pytest.approx(line["nll"] / math.log(2) * len(shard) / shard.n_bytes)


def test_a_line_is_the_mean_since_the_line_before(config):
    fine, coarse = (trained_run(config, f"every{n}", f"train.log_every={n}", "train.steps=10") for n in (1, 4))
    each = [line["nll"] for line in of(read(fine.directory / "metrics.jsonl"), "train")]
    lines = of(read(coarse.directory / "metrics.jsonl"), "train")
    assert [line["step"] for line in lines] == [4, 8, 10]
    wanted = [sum(each[:4]) / 4, sum(each[4:8]) / 4, sum(each[8:]) / 2]
    assert [line["nll"] for line in lines] == pytest.approx(wanted)


def test_the_learning_rate_of_a_line_is_that_of_its_update(config):
    run = trained_run(config, "run", "optim.warmup_steps=3", "optim.schedule=constant")
    found = [line["lr"] for line in of(read(run.directory / "metrics.jsonl"), "train")]
    assert found == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.01, 0.01])


def write(path, step, numbers):
    with Metrics(path, step, 20, 1.0) as log:
        for number in numbers:
            window = Window(nll=20.0, tokens=10, seconds=0.1)
            state = SimpleNamespace(step=number, tokens=10 * number, seconds=float(number), window=window)
            log.train(state, lr=0.1, grad_norm=1.0)


def test_lines_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 8))
    write(path, 4, range(5, 10))
    assert [line["step"] for line in read(path)] == list(range(1, 10))
    write(path, 0, [1, 2])
    assert [line["step"] for line in read(path)] == [1, 2]


@pytest.mark.parametrize("tail", ['{"step": 7, "split": "tr', '{"step": 7', "{", "\0\0\0\0"])
def test_a_last_line_that_a_crash_has_torn_is_left_out_and_then_gone(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 7))
    with path.open("a", encoding="utf-8") as file:
        file.write(tail)
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5, 6]
    write(path, 6, [7, 8])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_absent_file_has_no_lines(tmp_path):
    assert read(tmp_path / "metrics.jsonl") == []


def test_outside_a_terminal_there_are_lines_and_no_carriage_returns(shared_run):
    out = shared_run[1]
    assert "\r" not in out and "\x1b" not in out
    assert sum(line.startswith("step ") and "/40 (" in line for line in out.splitlines()) == 40
    assert out.count("validation loss") == 4 + 1  # the table has it in its title


def test_on_a_terminal_there_is_a_bar(config, capsys, monkeypatch):
    run = new_run(config, "run")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    loop.train(run)
    out, err = capsys.readouterr()
    assert "\r" in err and "6/6" in err
    assert "\r" not in out and "validation loss" in out


def test_the_loss_curve_is_a_png(shared_run, tmp_path):
    for path in (shared_run[0] / "loss.png", tmp_path / "loss.png"):
        loss_curve(shared_run[0] / "metrics.jsonl", tmp_path / "loss.png")
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_loss_curve_draws_both_splits(shared_run, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, plot = {}, Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, x, y, *a, label, **k: drawn.update({label: x}) or plot(self, x, y, *a, label=label)
    )
    loss_curve(shared_run[0] / "metrics.jsonl", tmp_path / "loss.png")
    assert drawn == {"train": tuple(range(1, 41)), "valid": (10, 20, 30, 40)}


def test_a_loss_curve_of_nothing_is_a_picture_too(tmp_path, recwarn):
    loss_curve(tmp_path / "absent.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not [str(warning.message) for warning in recwarn]


def test_metrics_of_a_resumed_run_have_each_step_once(config):
    run = new_run(config, "run", "checkpoint.every=2", "checkpoint.keep=9", "eval.every=2")
    loop.train(run)
    for name in ("step-00000004", "step-00000006"):
        (run.checkpoints / name).rename(run.directory / name)
    loop.train(run, resume=True)
    lines = metrics.read(run.directory / "metrics.jsonl")
    assert [line["step"] for line in of(lines, "train")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in of(lines, "valid")] == [2, 4, 6]


def test_lines_that_are_none_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "split": "train", "nll": 2.0}\n5\n[1]\n{"step": 2}\n\xff\xfe\n{"step": 3, "spl')
    assert [line["step"] for line in metrics.read(path)] == [1]
