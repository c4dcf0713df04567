"""Checkpoints: what comes back, which are kept, and that no damage goes unnoticed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import new_run, trained_run
from safetensors.torch import load_file, save_file

import txl
from txl.data.tokenizer import train_tokenizer
from txl.errors import CheckpointError, ConfigError, TokenizerError
from txl.training import checkpoint, loop, metrics
from txl.training.checkpoint import CheckpointConfig
from txl.training.run import Run

FILES = [
    "config.json",
    "manifest.json",
    "model.safetensors",
    "state.json",
    "state.safetensors",
    "tokenizer.json",
]


def names(run):
    return sorted(path.name for path in run.checkpoints.iterdir())


def state_after(run, steps=3):
    """A state with memory, moments and a position, as training makes it."""
    torch.manual_seed(5)
    state = loop.new_state(run)
    for _ in range(steps):
        loop.accumulate_gradients(state.model, state, run.config.train)
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        state.tokens += 32
        state.seconds += 0.5
    return state


def save(run, state, valid_nll=None, keep=9):
    return checkpoint.save(run.checkpoints, state, run.tokenizer, valid_nll, keep)


def copy_of(shared_run, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(shared_run[0], directory)
    return directory


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def alter(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {"cut": cut, "altered": alter, "removed": Path.unlink, "emptied": lambda path: path.write_bytes(b"")}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train.grad_accumulation=3"],
        ["optim.name=sgd", "optim.momentum=0.9"],
        ["optim.name=sgd"],
        ["data.reset_on=The ", "model.memory_init=zeros"],
        ["data.reset_on=The ", "train.batch_size=2"],
        ["model.mem_len=0"],
    ],
    ids=str,
)
def test_all_of_a_state_comes_back(config, words):
    run = new_run(config, "run", *words)
    state = state_after(run)
    path = save(run, state, 1.25)
    random_numbers = torch.rand(3)
    other = loop.new_state(run)
    torch.manual_seed(99)
    checkpoint.restore(path, other)
    assert torch.equal(torch.rand(3), random_numbers)
    assert (other.step, other.tokens, other.seconds) == (3, 96, 1.5)
    assert other.stream.position == state.stream.position
    for name, t in state.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], t)
    for a, b in zip(other.memories, state.memories, strict=True):
        assert (a.mem_len, a.zeros, a.ragged, a.length) == (b.mem_len, b.zeros, b.ragged, b.length)
        assert torch.equal(a.start, b.start)
        assert all(torch.equal(x, y) for x, y in zip(a.states, b.states, strict=True))
    ours, theirs = other.optimizer.state_dict(), state.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"] and ours["state"].keys() == theirs["state"].keys()
    for index, moments in theirs["state"].items():
        assert all(m is None or torch.equal(ours["state"][index][key], m) for key, m in moments.items())
    assert other.model.training
    assert checkpoint.valid_nll(path) == 1.25


def test_a_checkpoint_is_safetensors_and_json_and_no_pickle(config):
    run = new_run(config, "run")
    path = save(run, state_after(run))
    assert sorted(file.name for file in path.iterdir()) == FILES
    for file in path.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        else:
            length = int.from_bytes(file.read_bytes()[:8], "little")
            json.loads(file.read_bytes()[8 : 8 + length])
            assert load_file(file)


def test_every_file_but_itself_is_in_the_manifest(config):
    run = new_run(config, "run")
    path = save(run, state_after(run))
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted([*manifest, "manifest.json"]) == FILES
    assert all(entry["bytes"] == (path / name).stat().st_size for name, entry in manifest.items())


# which are kept


@pytest.mark.parametrize(
    "keep, losses, wanted",
    [
        (1, [3.0, 2.0, 1.0], [3]),
        (1, [1.0, 2.0, 3.0], [1, 3]),
        (2, [3.0, 1.0, 2.0, 5.0, 4.0], [2, 4, 5]),
        (2, [None, None, None, None], [3, 4]),
        (2, [2.0, None, None, None], [1, 3, 4]),
        (1, [1.0, 1.0, None], [2, 3]),
        (9, [1.0, 2.0, 3.0], [1, 2, 3]),
    ],
)
def test_the_newest_and_the_best_are_kept(config, keep, losses, wanted):
    run = new_run(config, "run")
    state = state_after(run, 1)
    for step, loss in enumerate(losses, 1):
        state.step = step
        save(run, state, loss, keep)
    assert names(run) == [f"step-{step:08d}" for step in wanted]
    best = min((loss, -step) for step, loss in enumerate(losses, 1) if loss is not None) if any(losses) else (0, -4)
    assert checkpoint.pick(run.checkpoints, "best").name == f"step-{-best[1]:08d}"
    assert checkpoint.pick(run.checkpoints, "last").name == f"step-{len(losses):08d}"


def test_a_run_writes_checkpoints_when_due_at_a_new_best_and_at_the_end(config):
    run = trained_run(config, "run", "train.steps=11", "checkpoint.every=4", "checkpoint.keep=9", "eval.every=3")
    valid = {line["step"]: line["nll"] for line in metrics.read(run.directory / "metrics.jsonl") if "mem_len" in line}
    best, bests = float("inf"), []
    for step, nll in valid.items():
        bests += [step] if nll < best else []
        best = min(best, nll)
    assert names(run) == [f"step-{step:08d}" for step in sorted({4, 8, 11, *bests})]
    found = {path.name: checkpoint.valid_nll(path) for path in checkpoint.steps(run.checkpoints)}
    assert found == {name: valid.get(int(name[5:]), float("inf")) for name in found}


def test_every_0_is_the_end_only(config):
    assert names(trained_run(config, "run")) == ["step-00000006"]


@pytest.mark.parametrize("options", [{"every": -1}, {"keep": 0}], ids=str)
def test_settings_that_cannot_be_are_refused(options):
    with pytest.raises(ConfigError, match=r"checkpoint.every must be at least 0 and checkpoint.keep at least 1"):
        CheckpointConfig(**options)


# damage


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_refused_by_name(shared_run, tmp_path, file, damage):
    directory = copy_of(shared_run, tmp_path)
    path = checkpoint.pick(directory / "checkpoints", "last")
    DAMAGES[damage](path / file)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify(path)
    message = str(caught.value)
    if (file, damage) == ("manifest.json", "altered"):  # what it says of another file is then no longer true
        assert str(path) in message
    else:
        assert str(path / file) in message
    with pytest.raises(CheckpointError):
        txl.load(directory, "last")


@pytest.mark.parametrize("file", FILES)
def test_resuming_falls_back_to_the_newest_intact_checkpoint_and_says_so(shared_run, tmp_path, capsys, file):
    directory = copy_of(shared_run, tmp_path)
    cut(directory / "checkpoints" / "step-00000040" / file)
    run = Run.open(directory, ["train.steps=42"])
    assert loop.train(run, resume=True) is None
    out = capsys.readouterr().out
    assert "skipped a damaged checkpoint" in out and str(directory / "checkpoints" / "step-00000040" / file) in out
    assert "steps 30 to 42" in out
    lines = [line["step"] for line in metrics.read(directory / "metrics.jsonl") if line["split"] == "train"]
    assert lines == list(range(1, 43))


def test_a_damaged_checkpoint_is_written_again_when_its_step_comes(shared_run, tmp_path):
    directory = copy_of(shared_run, tmp_path)
    path = directory / "checkpoints" / "step-00000040"
    before = {name: t.clone() for name, t in load_file(path / "model.safetensors").items()}  # not the mapped file
    cut(path / "model.safetensors")
    loop.train(Run.open(directory), resume=True)
    checkpoint.verify(path)
    after = load_file(path / "model.safetensors")
    assert all(torch.equal(after[name], t) for name, t in before.items())


def test_no_intact_checkpoint_is_an_error_not_a_fresh_start(shared_run, tmp_path):
    directory = copy_of(shared_run, tmp_path)
    for path in checkpoint.steps(directory / "checkpoints"):
        cut(path / "state.safetensors")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .* is intact"):
        loop.train(Run.open(directory), resume=True)


def test_leftovers_of_a_crash_are_ignored_and_removed(config):
    run = new_run(config, "run", "checkpoint.every=3")
    leftover = run.checkpoints / ".tmp-step-00000009"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half of it")
    assert checkpoint.steps(run.checkpoints) == []
    with pytest.raises(CheckpointError, match="no checkpoint"):
        txl.load(run.directory)
    assert loop.train(run, resume=True) is None
    assert names(run) == ["step-00000003", "step-00000006"]


def test_a_crash_while_a_checkpoint_is_written_leaves_the_others_alone(config, monkeypatch):
    run = new_run(config, "run", "checkpoint.every=2", "checkpoint.keep=9", "train.steps=4")
    replace_ = Path.rename

    def crash(self, target):
        if "step-00000004" in str(target):
            raise KeyboardInterrupt
        return replace_(self, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        loop.train(run)
    monkeypatch.undo()
    assert checkpoint.pick(run.checkpoints, "last").name == "step-00000002"
    checkpoint.verify(run.checkpoints / "step-00000002")
    assert loop.train(run, resume=True) is None
    assert names(run) == ["step-00000002", "step-00000004"]


# txl.load


def test_load_takes_a_run_a_checkpoint_or_a_directory_of_save_pretrained(shared_run, tmp_path):
    run = Run.open(shared_run[0])
    best, last = (checkpoint.pick(run.checkpoints, which) for which in ("best", "last"))
    model, tokenizer = txl.load(best)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save(tmp_path / "saved" / "tokenizer.json")
    weights = load_file(best / "model.safetensors")
    for source in (run.directory, str(run.directory), best, tmp_path / "saved"):
        again, its_tokenizer = txl.load(source)
        assert all(torch.equal(again.state_dict()[name], t) for name, t in weights.items())
        assert not again.training
        assert its_tokenizer.fingerprint == run.tokenizer.fingerprint
    newest, _ = txl.load(run.directory, "last")
    weights = load_file(last / "model.safetensors")
    assert all(torch.equal(newest.state_dict()[name], t) for name, t in weights.items())


def test_best_and_last_differ_where_the_last_is_not_the_best(shared_run, tmp_path):
    directory = copy_of(shared_run, tmp_path)
    numbers = json.loads((directory / "checkpoints/step-00000040/state.json").read_text())
    (directory / "checkpoints/step-00000040/state.json").write_text(json.dumps(numbers | {"valid_nll": 99.0}))
    assert checkpoint.locate(directory, "best").name == "step-00000030"
    with pytest.raises(CheckpointError, match=r"state.json"):  # altered, after all
        checkpoint.locate(directory, "last")


def test_load_refuses_what_is_not_there(tmp_path, config):
    with pytest.raises(CheckpointError, match=r"no directory .*nowhere"):
        txl.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        txl.load(tmp_path)
    with pytest.raises(CheckpointError, match="has the run trained yet"):
        txl.load(new_run(config, "run").directory)
    with pytest.raises(CheckpointError, match='"best" or "last", got "newest"'):
        txl.load(new_run(config, "other").directory, "newest")


def test_load_refuses_a_tokenizer_of_another_size(shared_run, tmp_path):
    model, _ = txl.load(shared_run[0])
    model.save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer.json"):
        txl.load(tmp_path)
    train_tokenizer("char", [b"abc"]).save(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer.json has 4 tokens, the model 256"):
        txl.load(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "removed", "emptied"])
def test_load_refuses_a_damaged_directory_of_save_pretrained(shared_run, tmp_path, file, damage):
    model, tokenizer = txl.load(shared_run[0])
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")
    DAMAGES[damage](tmp_path / file)
    with pytest.raises(CheckpointError, match=file if damage != "removed" or file == "config.json" else "checkpoint"):
        txl.load(tmp_path)


def test_load_refuses_weights_of_another_model(shared_run, tmp_path):
    model, tokenizer = txl.load(shared_run[0])
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")
    weights = load_file(tmp_path / "model.safetensors")
    weights["extra"] = torch.zeros(1)
    weights["backbone.u"] = torch.zeros(3, 3)
    del weights["embedding.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        txl.load(tmp_path)
    for fragment in ("missing embedding.weight", "unexpected extra", "backbone.u is [3, 3], expected [2, 8]"):
        assert fragment in str(caught.value)


def test_the_hash_of_the_weights_tells_checkpoints_apart(config):
    run = trained_run(config, "run", "checkpoint.every=3")
    hashes = {checkpoint.weight_hash(path) for path in checkpoint.steps(run.checkpoints)}
    assert len(hashes) == 2 and all(len(h) == 12 for h in hashes)


@pytest.mark.parametrize(
    "before, after",
    [
        (["optim.name=sgd", "optim.momentum=0.9"], ["optim.name=adam"]),
        (["optim.name=adam"], ["optim.name=sgd", "optim.momentum=0.9"]),
        (["optim.name=adam"], ["optim.name=adamw", "optim.weight_decay=0.1"]),
        (["optim.name=sgd"], ["optim.momentum=0.9"]),
    ],
    ids=str,
)
def test_another_optimiser_goes_on_or_is_refused_in_one_line(config, before, after):
    run = trained_run(config, "run", *before)
    try:
        changed = Run.open(run.directory, ["train.steps=8", *after])
        assert loop.train(changed, resume=True) is None
    except (CheckpointError, ConfigError) as error:
        assert "optim" in str(error)
    else:
        assert replace(changed.config.optim, **vars(run.config.optim)) != changed.config.optim


def test_a_damaged_best_checkpoint_does_not_stay_the_best(shared_run, tmp_path):
    directory = copy_of(shared_run, tmp_path)
    root = directory / "checkpoints"
    best = checkpoint.pick(root, "best")
    state = json.loads((best / "state.json").read_text())
    (best / "state.json").write_text(json.dumps(state | {"valid_nll": 0.1}))
    loop.train(Run.open(directory, ["train.steps=50"]), resume=True)
    now = checkpoint.pick(root, "best")
    checkpoint.verify(now)
    assert now == root / "step-00000050"


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"model.safetensors": 3}'])
def test_a_manifest_that_lists_too_little_is_refused(shared_run, tmp_path, text):
    path = checkpoint.pick(copy_of(shared_run, tmp_path) / "checkpoints", "last")
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing or damaged"):
        checkpoint.verify(path)
