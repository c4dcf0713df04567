"""Training: every setting acts, equal settings give equal weights, and a resumed run is the uninterrupted one.

Run as a script, it writes golden_losses.txt again.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import english, new_run, trained_run, write_config
from safetensors.torch import load_file

from txl import cli
from txl.data.streams import SegmentStream, boundaries
from txl.errors import TrainingError
from txl.model import ModelConfig, TransformerXL
from txl.training import loop, metrics
from txl.training.checkpoint import TrainState
from txl.training.optim import OptimConfig, make_optimizer
from txl.training.run import Run, TrainConfig

GOLDEN = Path(__file__).with_name("golden_losses.txt")
ROOT = Path(__file__).parents[1]


def weights(run, step=None):
    return load_file(run.checkpoints / f"step-{step or run.config.train.steps:08d}" / "model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# every setting acts

ADAMW, SGD, DECAYING = ["optim.name=adamw"], ["optim.name=sgd"], ["optim.weight_decay=0.1"]
KNOBS = [
    ([], ["model.dropout=0.2"]),
    ([], ["model.dropatt=0.2"]),
    ([], ["model.mem_len=4"]),
    ([], ["model.mem_len=0"]),
    ([], ["model.clamp_len=4"]),
    ([], ["model.same_length=true"]),
    ([], ["model.memory_init=zeros"]),
    ([], ["model.init_std=0.03"]),
    ([], ["data.reset_on=The "]),
    ([], ["train.tgt_len=6"]),
    ([], ["train.batch_size=3"]),
    ([], ["train.loss=half"]),
    ([], ["train.dtype=bfloat16"]),
    ([], ["seed=1"]),
    ([], ["optim.lr=0.02"]),
    ([], ["optim.clip=0"]),
    ([], ["optim.clip=0.1"]),
    ([], ["optim.warmup_steps=3"]),
    ([], ["optim.schedule=linear"]),
    ([], ["optim.schedule=constant"]),
    ([], ["optim.min_lr=0.005"]),
    ([], ["optim.betas=[0.8, 0.999]"]),
    ([], ["optim.betas=[0.9, 0.99]"]),
    ([], DECAYING),
    (ADAMW, [*ADAMW, *DECAYING]),
    (SGD, [*SGD, *DECAYING]),
    (SGD, [*SGD, "optim.momentum=0.5"]),
    (DECAYING, [*DECAYING, *ADAMW]),
    ([], SGD),
]


@pytest.fixture(scope="module")
def trained_weights(tmp_path_factory):
    """The weights after a few steps with some settings; those of one list are computed once."""
    config = write_config(tmp_path_factory.mktemp("knobs"), 4000)
    known = {}

    def train(words, again=False):
        key = tuple(words)
        if again or key not in known:
            known[key] = weights(trained_run(config, f"run{len(list(config.parent.iterdir()))}", *words))
        return known[key]

    return train


@pytest.mark.parametrize("base, changed", KNOBS, ids=lambda words: " ".join(words) or "base")
def test_every_setting_changes_the_weights(trained_weights, base, changed):
    assert not equal(trained_weights(base), trained_weights(changed))


@pytest.mark.parametrize(
    "words",
    [[], ["model.dropout=0.2", "model.dropatt=0.2"], [*ADAMW, *DECAYING], SGD, ["train.dtype=bfloat16"],
     ["model.dropout=0.2", "train.grad_accumulation=3"]],
    ids=lambda words: " ".join(words) or "base",
)  # fmt: skip
def test_equal_settings_give_bitwise_equal_weights(trained_weights, words):
    assert equal(trained_weights(words), trained_weights(words, again=True))


@pytest.mark.parametrize(
    "word",
    ["eval.every=1", "eval.mem_len=3", "eval.tgt_len=3", "eval.batch_size=2", "eval.tokens=50", "checkpoint.every=2",
     "checkpoint.keep=1", "train.log_every=4"],
)  # fmt: skip
def test_watching_changes_nothing(trained_weights, word):
    base = ["model.dropout=0.2"]
    assert equal(trained_weights(base), trained_weights([*base, word]))


def test_training_learns(tmp_path):
    run = trained_run(write_config(tmp_path), "run", "train.steps=60", "train.tgt_len=16", "optim.lr=0.02")
    losses = [line["nll"] for line in metrics.read(run.directory / "metrics.jsonl") if line["split"] == "train"]
    assert losses[0] == pytest.approx(np.log(256), rel=0.1)
    assert losses[-1] < 0.6 * losses[0]


def test_torch_compile_is_reached_through_train_compile(config, monkeypatch):
    """A recorder in torch.compile's place: the compiler itself takes a minute, and has the slow test below."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(model) or model)
    trained_run(config, "eager")
    assert compiled == []
    trained_run(config, "compiled", "train.compile=true")
    assert [type(model) for model in compiled] == [TransformerXL]


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_compiled_training_has_the_losses_of_eager_training(config):
    runs = [trained_run(config, name, f"train.compile={name}", "train.steps=5") for name in ("false", "true")]
    eager, compiled = [[line["nll"] for line in metrics.read(r.directory / "metrics.jsonl")] for r in runs]
    assert len(eager) == 6 and compiled == pytest.approx(eager, rel=1e-4)


# one step: accumulation, documents, loss = half

TOKENS = np.frombuffer(english(2000).encode(), np.uint8)


def state_of(tokens, batch_size=6, chunks=1, cuts=None, tgt_len=8, **options):
    """A training state over these tokens, in float64, without a run directory."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_inner": 32, "mem_len": 12, "dropout": 0.0, "init_std": 0.2}
    model = TransformerXL(ModelConfig(vocab_size=256, **(sizes | options))).double()
    stream = SegmentStream(tokens, batch_size, tgt_len, cuts)
    memories = [model.init_memory(len(rows)) for rows in np.array_split(np.arange(batch_size), chunks)]
    return TrainState(model, make_optimizer(OptimConfig(name="sgd", lr=0.1), model), stream, memories)


def step(state, **options):
    """Loss, number of targets and gradients of one step; then the update is made."""
    loss, n = loop.accumulate_gradients(state.model, state, TrainConfig(**options))
    gradients = [p.grad.clone() for p in state.model.parameters()]
    state.optimizer.step()
    state.optimizer.zero_grad()
    return loss.item(), n, gradients


def assert_same_step(ours, wanted):
    assert ours[0] == pytest.approx(wanted[0], rel=1e-6)
    assert ours[1] == wanted[1]
    for a, b in zip(ours[2], wanted[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("loss", ["full", "half"])
@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
def test_accumulation_does_not_change_the_gradient(memory_init, loss, chunks):
    """Over several steps with memory, which each chunk keeps for itself."""
    whole = state_of(TOKENS, memory_init=memory_init)
    parts = state_of(TOKENS, chunks=chunks, memory_init=memory_init)
    for _ in range(5):
        assert_same_step(step(parts, loss=loss), step(whole, loss=loss))


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(
    "n_tokens, cut_at",
    [(6 * 20 + 1, None), (6 * 20 + 4, None), (6 * 16 + 4, None), (400, ord("T"))],
    ids=["even rows", "ragged rows", "rows of other numbers of segments", "documents"],
)
def test_accumulation_does_not_change_the_gradient_over_the_end_of_an_epoch(n_tokens, cut_at, chunks):
    tokens = TOKENS[:n_tokens]
    cuts = boundaries(tokens, None if cut_at is None else (cut_at,))
    whole, parts = state_of(tokens, cuts=cuts), state_of(tokens, chunks=chunks, cuts=cuts)
    for _ in range(14):
        assert_same_step(step(parts), step(whole))
    assert whole.stream.position["epoch"] >= 1


def test_memory_is_part_of_the_gradient():
    """The control of the accumulation tests: with memories that are emptied, the second step differs."""
    kept, emptied = state_of(TOKENS), state_of(TOKENS)
    assert_same_step(step(kept), step(emptied))
    emptied.memories = [emptied.model.init_memory(6)]
    assert step(kept)[0] != pytest.approx(step(emptied)[0], rel=1e-5)


def test_the_loss_is_the_mean_over_all_targets():
    state = state_of(TOKENS)
    segment = SegmentStream(TOKENS, 6, 8).next_segment()
    logits = state.model(segment.inputs).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), segment.targets.flatten())
    wanted.backward()
    gradients = [p.grad.clone() for p in state.model.parameters()]
    state.model.zero_grad()
    assert_same_step(step(state), (wanted.item(), 48, gradients))


@pytest.mark.parametrize("tgt_len, counted", [(8, [4, 5, 6, 7]), (7, [3, 4, 5, 6]), (2, [1])])
def test_half_the_loss_is_that_of_the_last_half_of_the_positions(tgt_len, counted):
    targets = torch.arange(3 * tgt_len).view(3, tgt_len)
    half = loop.scored(targets, "half")
    assert [i for i in range(tgt_len) if (half[:, i] != -100).all()] == counted
    assert torch.equal(half[:, counted], targets[:, counted])
    assert (half != -100).sum() == 3 * len(counted)
    assert torch.equal(loop.scored(targets, "full"), targets) and (targets != -100).all()


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
def test_a_document_does_not_see_the_one_before_it(batch_size, memory_init):
    """Another text in the first document: with reset_on, losses and gradients of what follows are the same."""
    body = english(500).replace("#", "")
    texts = [f"#{first}#{body}".encode() for first in ("the first document is this", "qwertyuiopasdfghjklzxcvbnm")]
    first, second = (np.frombuffer(text, np.uint8) for text in texts)
    assert len(first) == len(second)

    def differences(with_cuts):
        states = [
            state_of(t, batch_size, cuts=boundaries(t, (ord("#"),)) if with_cuts else None, memory_init=memory_init)
            for t in (first, second)
        ]
        found = []
        for _ in range(12):
            at = states[0].stream.position["cursors"][0]
            results = []
            for state in states:
                loss, _ = loop.accumulate_gradients(state.model, state, TrainConfig())
                results.append((loss.item(), [p.grad.clone() for p in state.model.parameters()]))
                state.model.zero_grad()
            largest = max((a - b).abs().max().item() for a, b in zip(results[0][1], results[1][1], strict=True))
            found.append((at, abs(results[0][0] - results[1][0]), largest))
        return found

    boundary = 27
    reset = differences(True)
    assert boundary in [at for at, *_ in reset]
    for at, loss, gradient in reset:
        if at >= boundary:
            assert loss < 1e-6 and gradient < 1e-12
        else:
            assert loss > 1e-3
    seen = [loss for at, loss, _ in differences(False) if boundary <= at < boundary + 24]
    assert max(seen) > 1e-4  # without reset_on the first document is seen


# resuming

RESUMED = {
    "dropout": (["model.dropout=0.2", "model.dropatt=0.1"], 20_000),
    "accumulation": (["model.dropout=0.2", "train.grad_accumulation=3"], 20_000),
    "over the end of an epoch": (["model.dropout=0.2"], 300),
    "at the end of an epoch": (["model.dropout=0.2", "data.valid={valid}", "data.test={valid}"], 4 * 8 * 6 + 1),
    "documents": (["data.reset_on=The ", "train.grad_accumulation=2"], 20_000),
    "zeros": (["model.memory_init=zeros", "data.reset_on=The "], 20_000),
    "momentum": (["optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.1"], 20_000),
    "bfloat16": (["train.dtype=bfloat16", "model.dropout=0.2"], 20_000),
    "no memory": (["model.mem_len=0", "model.dropout=0.2"], 20_000),
    "warm-up": (["optim.name=adamw", "optim.weight_decay=0.1", "optim.warmup_steps=8"], 20_000),
    "validation": (["eval.every=4", "model.dropout=0.2"], 20_000),
}


def what_is_left(run, step):
    """Everything of a checkpoint and of the metrics that does not tell the time."""
    path = run.checkpoints / f"step-{step:08d}"
    numbers = json.loads((path / "state.json").read_text())
    del numbers["seconds"], numbers["window"]["seconds"]
    lines = metrics.read(run.directory / "metrics.jsonl")
    for line in lines:
        del line["seconds"], line["tokens_per_s"]
    return load_file(path / "model.safetensors"), load_file(path / "state.safetensors"), numbers, lines


def assert_same_run(ours, wanted, step=12):
    for a, b in zip(what_is_left(ours, step), what_is_left(wanted, step), strict=True):
        if isinstance(a, dict) and any(isinstance(value, torch.Tensor) for value in a.values()):
            assert equal(a, b)
        else:
            assert a == b


def interrupted_copy(run, name, keep_step):
    """A run directory as it was after `keep_step` steps, but for later lines of metrics, as after a crash."""
    directory = run.directory.with_name(name)
    shutil.copytree(run.directory, directory)
    for path in (directory / "checkpoints").iterdir():
        if path.name > f"step-{keep_step:08d}":
            shutil.rmtree(path)
    return Run.open(directory)


@pytest.mark.parametrize("words, n_bytes", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, words, n_bytes):
    config = write_config(tmp_path, n_bytes)
    (tmp_path / "valid.txt").write_text(english(300, seed=2), encoding="utf-8")
    words = [word.format(valid=tmp_path / "valid.txt") for word in words]
    whole = trained_run(config, "whole", "train.steps=12", "checkpoint.every=6", "checkpoint.keep=9", *words)
    resumed = interrupted_copy(whole, "resumed", 6)
    assert loop.train(resumed, resume=True) is None
    assert_same_run(resumed, whole)
    state = json.loads((whole.checkpoints / "step-00000012" / "state.json").read_text())
    if n_bytes < 1000:
        assert state["stream"]["epoch"] == 1


@pytest.mark.parametrize("what", ["memory", "random state", "optimiser", "position"])
def test_all_of_a_checkpoint_is_needed(config, monkeypatch, what):
    """The control of the test above: when one part is not restored, the result is another."""
    words = ["train.steps=12", "checkpoint.every=6", "checkpoint.keep=9", "model.dropout=0.2"]
    whole = trained_run(config, "whole", *words)
    resumed = interrupted_copy(whole, "resumed", 6)
    restore = loop.restore_newest

    def forgetful(run, state):
        restore(run, state)
        if what == "memory":
            state.memories = [state.model.init_memory(4)]
        elif what == "random state":
            torch.manual_seed(0)
        elif what == "optimiser":
            state.optimizer = make_optimizer(run.config.optim, state.model)
        else:
            state.stream = run.stream()

    monkeypatch.setattr(loop, "restore_newest", forgetful)
    loop.train(resumed, resume=True)
    assert not equal(weights(resumed), weights(whole))


def test_lines_of_metrics_between_checkpoints_are_the_uninterrupted_ones(config):
    """A checkpoint that falls between two lines: the mean of the next line is over all of its steps."""
    words = ["train.steps=12", "checkpoint.every=6", "checkpoint.keep=9", "train.log_every=4"]
    whole = trained_run(config, "whole", *words)
    resumed = interrupted_copy(whole, "resumed", 6)
    loop.train(resumed, resume=True)
    assert_same_run(resumed, whole)


def raise_signal_at(monkeypatch, step, number):
    """The process gets a signal while a step is under way."""
    tick, done = metrics.Metrics.tick, []

    def tick_and_raise(self):
        tick(self)
        done.append(1)
        if len(done) == step:
            signal.raise_signal(number)

    monkeypatch.setattr(metrics.Metrics, "tick", tick_and_raise)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_a_checkpoint_from_which_it_goes_on_exactly(
    config, monkeypatch, capsys, number, status
):
    words = ["train.steps=12", "model.dropout=0.2"]
    whole = trained_run(config, "whole", *words)
    with monkeypatch.context() as patch:
        raise_signal_at(patch, 5, number)
        assert cli.train([str(config), f"run_dir={config.parent / 'stopped'}", *words]) == status
    stopped = Run.open(config.parent / "stopped")
    assert f"--resume {stopped.directory}" in capsys.readouterr().out
    assert [path.name for path in stopped.checkpoints.iterdir()] == ["step-00000005"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert loop.train(stopped, resume=True) is None
    assert_same_run(stopped, whole)


def test_a_signal_in_the_last_step_does_not_keep_the_run_from_being_done(config, monkeypatch):
    run = new_run(config, "run")
    raise_signal_at(monkeypatch, 6, signal.SIGTERM)
    assert loop.train(run) is None and run.is_finished


def start(config, run_dir, *words):
    """train.py in a process of its own, and the first lines of its output up to the second step."""
    command = [sys.executable, ROOT / "train.py", config, f"run_dir={run_dir}", "train.steps=1000000", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=config.parent, env=environment
    )
    for line in process.stdout:
        if line.startswith("step 2/"):
            return process
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_process(config, number, status):
    process = start(config, "run")  # relative: what is printed can be copied
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err == "stopping after this step, with a checkpoint; once more to stop at once\n"
    assert out.splitlines()[-1] == "stopped; go on with: python train.py --resume run"
    run = Run.open(config.parent / "run")
    (path,) = run.checkpoints.iterdir()
    done = int(path.name.removeprefix("step-"))
    assert done >= 2
    assert cli.train(["--resume", str(run.directory), f"train.steps={done + 2}"]) == 0
    lines = [line["step"] for line in metrics.read(run.directory / "metrics.jsonl") if line["split"] == "train"]
    assert lines == list(range(1, done + 3))


def test_a_killed_process_goes_on_from_its_last_checkpoint(config):
    process = start(config, "run", "checkpoint.every=1", "checkpoint.keep=3")
    process.kill()
    process.communicate(timeout=60)
    run = Run.open(config.parent / "run")
    done = max(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*"))
    assert cli.train(["--resume", str(run.directory), f"train.steps={done + 2}"]) == 0
    lines = [line["step"] for line in metrics.read(run.directory / "metrics.jsonl") if line["split"] == "train"]
    assert lines == list(range(1, done + 3))
    assert not list(run.checkpoints.glob(".tmp-*"))


# what stops a run


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(config, capsys, monkeypatch):
    directory = config.parent / "run"
    words = ["train.steps=50", "checkpoint.every=1", "checkpoint.keep=9", "optim.schedule=constant", "optim.clip=0"]
    assert cli.train([str(config), f"run_dir={directory}", *words, "optim.lr=1e20"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "stopped before the update" in line
    assert "optim.lr (1e+20)" in line
    run = Run.open(directory)
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert left and f"step {len(left) + 1}:" in line
    for path in run.checkpoints.iterdir():
        assert all(t.isfinite().all() for t in load_file(path / "model.safetensors").values())
    assert [line["step"] for line in metrics.read(directory / "metrics.jsonl")] == list(range(1, len(left) + 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_run_too(config, monkeypatch, value):
    run = new_run(config, "run", "checkpoint.every=1")
    compute = loop.accumulate_gradients

    def spoil(forward, state, settings):
        loss, n = compute(forward, state, settings)
        if state.step == 3:
            state.model.backbone.u.grad[0, 0] = value
        return loss, n

    monkeypatch.setattr(loop, "accumulate_gradients", spoil)
    with pytest.raises(TrainingError, match=r"step 4: loss .*gradient norm (nan|inf)"):
        loop.train(run)
    assert (run.checkpoints / "step-00000003").is_dir() and not (run.checkpoints / "step-00000004").exists()
    monkeypatch.undo()
    assert loop.train(run, resume=True) is None


def test_more_warm_up_than_steps_is_said(config, capsys):
    trained_run(config, "run", "optim.warmup_steps=7")
    assert "optim.warmup_steps 7 is more than train.steps 6" in capsys.readouterr().out


# the golden curve


def golden_run(directory, *words):
    """100 steps of a fixed configuration; the training loss of each."""
    config = write_config(directory, 20_000)
    fixed = ["train.steps=100", "train.tgt_len=16", "model.d_model=32", "model.n_head=4", "model.d_inner=64"]
    fixed += ["model.mem_len=16", "optim.lr=0.005", "optim.warmup_steps=10", "seed=7"]
    run = trained_run(config, "golden", *fixed, *words)
    return [line["nll"] for line in metrics.read(run.directory / "metrics.jsonl") if line["split"] == "train"]


def recorded():
    lines = [line.split() for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    assert [int(step) for step, _ in lines] == list(range(1, 101))
    return [float(loss) for _, loss in lines]


def test_the_loss_curve_is_the_recorded_one(tmp_path):
    """100 losses against golden_losses.txt, which guards against unnoticed changes of the mathematics.

    After a change that is meant, write the file again with

        python tests/test_training.py
    """
    assert golden_run(tmp_path) == pytest.approx(recorded(), rel=1e-3)


@pytest.mark.parametrize("word", ["optim.lr=0.0051", "model.mem_len=15", "model.same_length=true", "seed=8"])
def test_another_setting_misses_the_recorded_curve(tmp_path, word):
    assert golden_run(tmp_path, word) != pytest.approx(recorded(), rel=1e-3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        losses = golden_run(Path(folder))
    GOLDEN.write_text("".join(f"{i} {loss!r}\n" for i, loss in enumerate(losses, 1)), encoding="utf-8")
