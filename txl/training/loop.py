"""The training loop."""

import math
import signal
import sys
import time
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from txl.data.streams import IGNORE
from txl.errors import CheckpointError, ConfigError, TrainingError
from txl.evaluation import Score, evaluate
from txl.model import TransformerXL
from txl.training import checkpoint
from txl.training.checkpoint import TrainState, Window
from txl.training.metrics import Metrics
from txl.training.optim import learning_rate, make_optimizer
from txl.training.run import Run, TrainConfig


def train(run: Run, resume: bool = False) -> int | None:
    """Train a run to its last step, from its newest intact checkpoint when resume is set.

    SIGINT and SIGTERM end it after the step under way, with a checkpoint.

    Returns:
        None when the last step was done, or the signal that ended it before.

    Raises:
        TrainingError: loss or gradient is not finite; the update is not made and checkpoints are as they were.
    """
    config = run.config
    torch.manual_seed(config.seed)
    state = new_state(run)
    if resume:
        restore_newest(run, state)
        if state.step > config.train.steps:
            raise ConfigError(
                f"{run.directory} is at step {state.step}: train.steps must be more, got {config.train.steps}"
            )
        run.save_config()
    forward = torch.compile(state.model) if config.train.compile else state.model
    valid = run.valid_head()

    shard, step_path = run.shards["train"], run.directory / "metrics.jsonl"
    with Metrics(step_path, state.step, config.train.steps, len(shard) / shard.n_bytes) as log, signals() as stop:
        for line in describe(run, state):
            log.say(line)
        while state.step < config.train.steps and not stop:
            # learning rate
            lr = learning_rate(config.optim, state.step, config.train.steps)
            for group in state.optimizer.param_groups:
                group["lr"] = lr

            # forward and backward, chunk by chunk
            began = time.perf_counter()
            loss, n_tokens = accumulate_gradients(forward, state, config.train)

            # clip, check, update
            grad_norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.optim.clip or math.inf)
            if not (loss.isfinite() and grad_norm.isfinite()):
                raise TrainingError(
                    f"step {state.step + 1}: loss {loss.item():g}, gradient norm {grad_norm.item():g}; stopped before "
                    f"the update. Lower optim.lr ({config.optim.lr:g}) or optim.clip ({config.optim.clip:g})"
                )
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            state.step += 1
            seconds = time.perf_counter() - began
            state.tokens += n_tokens
            state.seconds += seconds
            state.window.nll += loss.item() * n_tokens
            state.window.tokens += n_tokens
            state.window.seconds += seconds

            # log
            log.tick()
            last = state.step == config.train.steps
            if last or state.step % config.train.log_every == 0:
                log.train(state, lr, grad_norm.item())
                state.window = Window()

            # validate, save
            score = None
            if last or (config.eval.every and state.step % config.eval.every == 0):
                score = validate(run, state.model, valid)
                log.valid(state.step, score, lr, state.seconds)
            due = config.checkpoint.every and state.step % config.checkpoint.every == 0
            if last or due or stop or (score and is_best(run, score)):
                checkpoint.save(run.checkpoints, state, run.tokenizer, score and score.nll, config.checkpoint.keep)
    return stop[0] if stop and state.step < config.train.steps else None


def new_state(run: Run) -> TrainState:
    """Model, optimiser, streams and memories at step 0."""
    config = run.config
    model = TransformerXL(config.model).to(pick_device(config.train.device)).train()
    chunks = np.array_split(np.arange(config.train.batch_size), config.train.grad_accumulation)
    memories = [model.init_memory(len(rows)) for rows in chunks]
    return TrainState(model, make_optimizer(config.optim, model), run.stream(), memories)


def accumulate_gradients(forward, state: TrainState, config: TrainConfig) -> tuple[Tensor, int]:
    """Gradients of one step: its rows in chunks, the sum of all losses over the number of all targets.

    Returns:
        The loss (nats per token, a scalar) and the number of targets.
    """
    device = state.model.embedding.weight.device
    segment = state.stream.next_segment()
    targets = scored(segment.targets, config.loss)
    n_tokens = int((targets != IGNORE).sum())
    total = torch.zeros((), device=device)
    chunks = np.array_split(np.arange(len(targets)), len(state.memories))
    for chunk, rows in enumerate(chunks):
        memory, reset = state.memories[chunk], segment.reset[rows]
        if reset.all():
            memory = state.model.init_memory(len(rows))
        elif reset.any():
            memory = memory.reset(reset.to(device))
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            output = forward(segment.inputs[rows].to(device), memory, targets[rows].to(device))
        loss = output.nll.sum() / max(n_tokens, 1)
        loss.backward()
        total += loss.detach()
        state.memories[chunk] = output.memory
    return total, n_tokens


def scored(targets: Tensor, loss: str) -> Tensor:
    """The targets that count: all, or with "half" those of the last half of the segment's positions."""
    if loss == "half":
        targets = targets.clone()
        targets[:, : targets.shape[1] // 2] = IGNORE
    return targets


def validate(run: Run, model: TransformerXL, shard) -> Score:
    """Score the model on (the first eval.tokens of) the validation split."""
    return evaluate(model, shard, mem_len=run.config.eval.mem_len, cuts=run.cuts(shard), **run.eval_options)


def is_best(run: Run, score: Score) -> bool:
    """No checkpoint so far has a validation loss as low."""
    losses = [checkpoint.valid_nll(path) for path in checkpoint.intact(run.checkpoints)]
    return score.nll < min(losses, default=math.inf)


def restore_newest(run: Run, state: TrainState) -> None:
    """Go on from the newest checkpoint that is intact; stay at step 0 where there is none yet."""
    found = checkpoint.steps(run.checkpoints)
    for path in reversed(found):
        try:
            checkpoint.verify(path)
        except CheckpointError as error:
            print(f"skipped a damaged checkpoint: {error}", flush=True)
            continue
        checkpoint.restore(path, state)
        return
    if found:
        raise CheckpointError(f"none of the {len(found)} checkpoints in {run.checkpoints} is intact")


def pick_device(name: str) -> torch.device:
    """The torch device of train.device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        return device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f'train.device "{name}" is not usable here: {reason}') from error


def describe(run: Run, state: TrainState) -> list[str]:
    """What is about to happen, in a few lines."""
    config, model = run.config, state.model
    train, pairs = config.train, len(run.shards["train"]) - 1
    n = sum(p.numel() for p in model.parameters())
    device = model.embedding.weight.device
    context = config.model.mem_len * config.model.n_layer + train.tgt_len
    lines = [
        f"{run.directory}: {n:,} parameters on {device}, {train.dtype}; vocabulary {config.model.vocab_size:,} "
        f"({run.tokenizer.kind}); {pairs:,} training tokens",
        f"segments of {train.tgt_len} x {train.batch_size} streams, memory {config.model.mem_len} "
        f"(context up to {context:,} through {config.model.n_layer} layers); "
        f"steps {state.step} to {train.steps}, {train.steps * train.tgt_len * train.batch_size / pairs:.1f} epochs",
    ]
    unknown = run.tokenizer.count_unknown(run.shards["train"].tokens)
    if unknown:
        lines.append(
            f"note: {unknown / pairs:.1%} of the training tokens are unknown to the vocabulary: they are easy to "
            "predict, so bits per byte are too low to compare with other tokenizers"
        )
    if config.optim.warmup_steps > train.steps:
        lines.append(
            f"note: optim.warmup_steps {config.optim.warmup_steps} is more than train.steps {train.steps}: "
            "the learning rate never reaches optim.lr"
        )
    return lines


@contextmanager
def signals():
    """A list that holds the first SIGINT or SIGTERM once it came; the second one acts as usual."""
    caught: list[int] = []
    previous = {}

    def note(number, _frame) -> None:
        caught.append(number)
        print("stopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr)
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            previous[signum] = signal.signal(signum, note)
    except ValueError:  # not the main thread: signals stay as they are
        previous.clear()
    try:
        yield caught
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
