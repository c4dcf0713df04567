"""The command line from one end to the other, in this process."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import english, new_run

import txl
from txl import cli
from txl.data.shards import encode_shard
from txl.evaluation import evaluate
from txl.training import checkpoint, metrics
from txl.training.run import Run, RunConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture
def copy(shared_run, tmp_path):
    """A copy of the trained run that a test may change."""
    return Path(shutil.copytree(shared_run[0], tmp_path / "run"))


def scores(arguments, tmp_path, capsys):
    path = tmp_path / "scores.json"
    assert cli.evaluate([*map(str, arguments), "--json", str(path)]) == 0, capsys.readouterr().err
    return json.loads(path.read_text(encoding="utf-8"))


# train


def test_training_ends_with_table_sample_paths_and_the_next_command(shared_run):
    directory, out = shared_run
    first, *_ = out.splitlines()
    parameters = sum(p.numel() for p in txl.load(directory)[0].parameters())
    assert f"{parameters:,} parameters on cpu, float32; vocabulary 256 (byte); 17,999 training tokens" in first
    for fragment in (
        "validation: ",
        "299 tokens scored, tgt_len 8, clamp_len 0, same_length false, parts begin warm",
        "sample (the first 24 tokens are the validation text's):",
        f"run directory   {directory}",
        f"loss curve      {directory / 'loss.png'}",
        f"memory sweep    {directory / 'memory_valid.png'}",
        f"next: python eval.py {directory} --mem-len 0 8 16 32 64",
    ):
        assert fragment in out
    assert (directory / "memory_valid.png").read_bytes().startswith(b"\x89PNG")


def test_the_reported_number_is_the_best_checkpoints(shared_run):
    directory, out = shared_run
    best = checkpoint.valid_nll(checkpoint.pick(directory / "checkpoints", "best"))
    bits, nats = map(float, re.search(r"validation: (\S+) bits per byte \((\S+) nats", out).groups())
    assert (nats, bits) == (pytest.approx(best, abs=1e-4), pytest.approx(best / math.log(2), abs=1e-4))
    valid = [line["nll"] for line in metrics.read(directory / "metrics.jsonl") if line["split"] == "valid"]
    assert best == min(valid)


def test_print_config_is_read_back_as_the_same_settings(config, capsys, tmp_path):
    words = ["optim.lr=1e-5", 'data.reset_on="a\\tb\\u007f\'"', "eval.mem_lens=[0, 3]", "run_dir=here"]
    assert cli.train([str(config), *words, "--print-config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "printed.toml").write_text(printed, encoding="utf-8")
    assert RunConfig.load(tmp_path / "printed.toml", []) == RunConfig.load(config, words)
    assert cli.train([str(tmp_path / "printed.toml"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    assert not (tmp_path / "here").exists()


def test_print_config_of_a_run_is_the_runs(shared_run, capsys):
    assert cli.train(["--resume", str(shared_run[0]), "--print-config"]) == 0
    assert capsys.readouterr().out == (shared_run[0] / "config.toml").read_text(encoding="utf-8")
    assert cli.train(["--resume", str(shared_run[0]), "--print-config", "train.steps=99"]) == 0
    assert "steps = 99" in capsys.readouterr().out
    assert Run.open(shared_run[0]).config.train.steps == 40


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.train(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "optim.warmup_steps = 0" in out and "the first update included" in " ".join(out.split())
    assert "train.tgt_len = 128" in out and "the segment length" in out
    assert "model.same_length = false" in out and "--resume RUN" in out
    assert 'data.tokenizer = "byte"' in out and "byte, char, word or bpe" in " ".join(out.split())


@pytest.mark.parametrize("command", [cli.evaluate, cli.generate])
def test_the_other_commands_have_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        command(["--help"])
    assert caught.value.code == 0 and "--mem-len" in capsys.readouterr().out


def test_a_finished_run_is_done(copy, capsys):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert cli.train(["--resume", str(copy)]) == 0
    out, err = capsys.readouterr()
    assert "has done all its 40 steps" in out and "train.steps=N" in out and err == ""
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_a_finished_run_goes_on_with_more_steps(copy, capsys):
    assert cli.train(["--resume", str(copy), "train.steps=42"]) == 0
    out = capsys.readouterr().out
    assert "steps 40 to 42" in out and "validation loss by memory length" in out
    assert checkpoint.pick(copy / "checkpoints", "last").name == "step-00000042"


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_not_done(copy, capsys):
    weights = copy / "checkpoints" / "step-00000040" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert cli.train(["--resume", str(copy)]) == 0
    checkpoint.verify(weights.parent)


def test_no_steps_at_all(config, capsys):
    """An untrained model can be written and scored, or the setting is refused; not half of each."""
    status = cli.train([str(config), f"run_dir={config.parent / 'run'}", "train.steps=0"])
    assert status == (0 if (config.parent / "run").exists() else 2), capsys.readouterr().err


# eval


def test_eval_scores_are_those_of_the_python_functions(shared_run, tmp_path, capsys):
    found = scores([shared_run[0], "--mem-len", 0, 8, 20, "--batch-size", 3, "--split", "test"], tmp_path, capsys)
    run, (model, _) = Run.open(shared_run[0]), txl.load(shared_run[0])
    for result, mem_len in zip(found, (0, 8, 20), strict=True):
        wanted = evaluate(model, run.shards["test"], tgt_len=8, mem_len=mem_len)
        assert result["nll"] == pytest.approx(wanted.nll, rel=1e-5)
        assert result["bits_per_byte"] == pytest.approx(wanted.bits_per_byte, rel=1e-5)
        assert (result["mem_len"], result["tokens"], result["tgt_len"]) == (mem_len, 999, 8)
        assert result["ppl"] == pytest.approx(math.exp(result["nll"]))
    out = capsys.readouterr().out
    best = checkpoint.pick(shared_run[0] / "checkpoints", "best")
    assert f"{best}, weights {checkpoint.weight_hash(best)}" in out
    assert "test: 999 tokens scored, tgt_len 8, clamp_len 0, same_length false, parts begin warm" in out
    assert (shared_run[0] / "eval_test.png").read_bytes().startswith(b"\x89PNG")


def test_eval_without_options_tries_five_lengths_of_the_test_split(shared_run, tmp_path, capsys):
    assert [s["mem_len"] for s in scores([shared_run[0]], tmp_path, capsys)] == [0, 8, 16, 32, 64]


def test_eval_options_change_what_they_name(shared_run, tmp_path, capsys):
    base = scores([shared_run[0], "--mem-len", 16], tmp_path, capsys)[0]
    for option, name, value in (
        (["--tgt-len", 5], "tgt_len", 5),
        (["--clamp-len", 3], "clamp_len", 3),
        (["--same-length"], "same_length", True),
        (["--cold", "--batch-size", 7], "cold", True),
        (["--split", "valid"], "text", "valid"),
        (["--split", "train"], "tokens", 17_999),
    ):
        (result,) = scores([shared_run[0], "--mem-len", 16, *option], tmp_path, capsys)
        assert result[name] == value != base[name]
        assert result["nll"] != base["nll"]
    (result,) = scores([shared_run[0], "--mem-len", 16, "--no-same-length", "--batch-size", 2], tmp_path, capsys)
    assert result["nll"] == pytest.approx(base["nll"], rel=1e-6)


def test_eval_says_when_parts_begin_cold(shared_run, capsys):
    assert cli.evaluate([str(shared_run[0]), "--mem-len", "8", "--cold"]) == 0
    assert "parts begin cold" in capsys.readouterr().out


def test_eval_of_the_last_checkpoint(copy, tmp_path, capsys):
    (a,) = scores([copy, "--mem-len", 8, "--which", "last"], tmp_path, capsys)
    assert a["checkpoint"].endswith("step-00000040")
    shutil.rmtree(copy / "checkpoints" / "step-00000040")
    (b,) = scores([copy, "--mem-len", 8, "--which", "last"], tmp_path, capsys)
    assert b["checkpoint"].endswith("step-00000030") and a["weights"] != b["weights"] and a["nll"] != b["nll"]


def test_eval_of_another_text(copy, tmp_path, capsys):
    text = tmp_path / "other.txt"
    text.write_text(english(500, seed=9), encoding="utf-8")
    (result,) = scores([copy, "--data", text, "--mem-len", 8], tmp_path, capsys)
    model, tokenizer = txl.load(copy)
    wanted = evaluate(model, encode_shard(tokenizer, text.read_bytes(), "other"), tgt_len=8)
    assert (result["text"], result["tokens"]) == (str(text), 499)
    assert result["nll"] == pytest.approx(wanted.nll, rel=1e-5)
    assert (copy / "eval_data_other.png").is_file()


def test_eval_of_a_directory_of_save_pretrained_needs_a_text(shared_run, tmp_path, capsys):
    model, tokenizer = txl.load(shared_run[0])
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save(tmp_path / "saved" / "tokenizer.json")
    (tmp_path / "other.txt").write_text(english(500, seed=9), encoding="utf-8")
    (result,) = scores([tmp_path / "saved", "--data", tmp_path / "other.txt", "--mem-len", 8], tmp_path, capsys)
    assert (result["tgt_len"], result["tokens"]) == (128, 499)
    assert cli.evaluate([str(tmp_path / "saved")]) == 2
    assert "give --data FILE" in capsys.readouterr().err


def test_eval_resets_the_memory_at_documents_like_the_run(config, tmp_path, capsys):
    run = new_run(config, "run", "data.reset_on=The ", "train.steps=6")
    assert cli.train(["--resume", str(run.directory)]) == 0
    (result,) = scores([run.directory, "--mem-len", 8, "--split", "valid"], tmp_path, capsys)
    model, _ = txl.load(run.directory)
    valid = run.shards["valid"]
    assert result["nll"] == pytest.approx(evaluate(model, valid, tgt_len=8, cuts=run.cuts(valid)).nll, rel=1e-5)
    assert result["nll"] != pytest.approx(evaluate(model, valid, tgt_len=8).nll, rel=1e-5)


def test_eval_counts_what_the_vocabulary_does_not_know(config, capsys, tmp_path):
    run = new_run(config, "run", "data.tokenizer=word", "data.vocab_size=30", "eval.tokens=0")
    assert cli.train(["--resume", str(run.directory)]) == 0
    (tmp_path / "other.txt").write_text("The dog sees zebra zebra okapi\n" * 20, encoding="utf-8")
    capsys.readouterr()
    assert cli.evaluate([str(run.directory), "--data", str(tmp_path / "other.txt"), "--mem-len", "8"]) == 0
    out = capsys.readouterr().out
    unknown = int(re.search(r"note: (\d+) of 140 tokens are unknown", out)[1])
    assert 60 <= unknown < 140 and "ppl/word" not in out


# generate


def test_generate_continues_the_prompt(shared_run, capsys):
    command = [str(shared_run[0]), "--prompt", "The old dog", "--tokens", "30"]
    outs = []
    for options in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--temperature", "0"], ["--top-k", "1"]):
        assert cli.generate([*command, *options]) == 0
        outs.append(capsys.readouterr().out)
    assert all(out.startswith("The old dog") and len(out) >= 41 - 20 for out in outs)
    assert outs[0] == outs[1] != outs[2] and outs[3] == outs[4]


def test_generate_with_another_memory(shared_run, capsys):
    command = [str(shared_run[0]), "--prompt", english(70), "--temperature", "2", "--top-k", "0", "--seed", "1"]
    outs = set()
    for mem_len in ("0", "8"):
        assert cli.generate([*command, "--mem-len", mem_len]) == 0
        outs.add(capsys.readouterr().out)
    assert len(outs) == 2


# python -m txl


def test_the_three_commands_are_one(shared_run, capsys):
    assert cli.main(["eval", str(shared_run[0]), "--mem-len", "0"]) == 0
    assert cli.main(["generate", str(shared_run[0]), "--tokens", "3"]) == 0
    assert cli.main(["train", "--resume", str(shared_run[0])]) == 0
    assert cli.main(["--help"]) == 0
    assert "train,eval,generate" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["trian"]])
def test_another_command_is_refused(words, capsys):
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith("error: expected a command, one of train, eval, generate")


@pytest.mark.parametrize("command", [["-m", "txl", "eval"], ["eval.py"], ["train.py"]], ids=" ".join)
def test_the_scripts_exit_with_the_status(command):
    script = [sys.executable, *command, "--nonsense", "x"]
    result = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
