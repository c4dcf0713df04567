"""What is said about a run: at the end of its training, and by eval.py."""

from dataclasses import dataclass
from pathlib import Path

import torch

from txl.data.shards import Shard, encode_shard
from txl.data.streams import boundaries
from txl.errors import ConfigError, DataError
from txl.evaluation import Score, picture, sweep, table
from txl.generate import generate
from txl.training.checkpoint import load, locate, weight_hash
from txl.training.loop import pick_device
from txl.training.metrics import loss_curve
from txl.training.run import Run

PROMPT_TOKENS, SAMPLE_TOKENS = 24, 120


def training_report(run: Run) -> str:
    """Score the best checkpoint on the validation split with several memory lengths, and write the pictures.

    Returns:
        The text for the console: table, sample, paths, and the command to try next.
    """
    config = run.config
    model, tokenizer = load(run.directory, "best")
    model = model.to(pick_device(config.train.device))
    valid = run.valid_head()
    scores = sweep(model, valid, config.eval.mem_lens, cuts=run.cuts(valid), **run.eval_options)
    trained = next((s for s in scores if s.mem_len == config.model.mem_len), scores[0])
    curve, memory = run.directory / "loss.png", run.directory / "memory_valid.png"
    loss_curve(run.directory / "metrics.jsonl", curve)
    picture(scores, config.model.mem_len, f"{run.directory.name}: validation loss by memory length", memory)

    prompt = torch.from_numpy(valid.tokens[:PROMPT_TOKENS].astype("int64"))[None].to(model.embedding.weight.device)
    tokens = generate(model, prompt, SAMPLE_TOKENS, temperature=0.8, top_k=40, seed=config.seed)
    sample = tokenizer.decode(tokens[0].tolist())
    return "\n".join(
        [
            "",
            f"validation: {trained.bits_per_byte:.4f} bits per byte ({trained.nll:.4f} nats per token) with memory "
            f"{trained.mem_len}; {settings(trained)}",
            "",
            "validation loss by memory length:",
            table(scores, config.model.mem_len, word_level=tokenizer.kind == "word"),
            "",
            f"sample (the first {prompt.shape[1]} tokens are the validation text's):",
            "    " + sample.replace("\n", "\n    "),
            "",
            f"run directory   {run.directory}",
            f"best weights    {locate(run.directory)}",
            f"loss curve      {curve}",
            f"memory sweep    {memory}",
            "",
            f"next: python eval.py {run.directory} --mem-len {' '.join(str(s.mem_len) for s in scores)}",
        ]
    )


@dataclass(frozen=True)
class Evaluation:
    """What eval.py found."""

    scores: list[Score]
    origin: dict[str, str | int | None]
    """What was scored: text, tokens unknown to the vocabulary, checkpoint (its name has the step), weights."""
    text: str
    """For the console."""


def evaluate_text(
    directory: str | Path,
    *,
    data: str | None = None,
    split: str = "test",
    mem_lens: list[int] | None = None,
    tgt_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    batch_size: int | None = None,
    cold: bool = False,
    which: str = "best",
    device: str = "auto",
) -> Evaluation:
    """Score a split of a run, or any text, with several memory lengths; a picture goes into the directory.

    Args:
        directory: a run directory, or one of save_pretrained with a tokenizer.json, which needs data.
        data: a text file, instead of a split.
        split: "train", "valid" or "test" of the run.
        mem_lens: memory lengths; 0, 1, 2, 4 and 8 times the trained one when absent.
        tgt_len, clamp_len, same_length, batch_size: the run's eval settings when absent; without a run tgt_len is
            128, batch_size 1, and the others are the model's.
        cold, which, device: as of txl.evaluation.evaluate, txl.load and train.device.

    Raises:
        TxlError: what the command line says in one line.
    """
    for name, value, least in (("tgt", tgt_len, 1), ("clamp", clamp_len, 0), ("batch", batch_size, 1)):
        if value is not None and not least <= value < 2**31:
            option = "--batch-size" if name == "batch" else f"--{name}-len"
            raise ConfigError(f"{option} must be at least {least} and below 2 ** 31, got {value}")
    for value in mem_lens or []:
        if not 0 <= value < 2**31:
            raise ConfigError(f"--mem-len must be at least 0 and below 2 ** 31, got {value}")
    directory = Path(directory)
    checkpoint = locate(directory, which)
    model, tokenizer = load(checkpoint)
    model = model.to(pick_device(device))
    run = Run.open(directory) if (directory / "config.toml").is_file() else None
    if run is None and data is None:
        raise ConfigError(f"{directory} is no run directory and holds no text: give --data FILE")
    shard = run.shards[split] if data is None else _read(data, tokenizer, run)
    cuts = None if run is None else boundaries(shard.tokens, run.reset_ids())
    options = run.eval_options if run else {"tgt_len": 128, "batch_size": 1}
    given = {"tgt_len": tgt_len, "clamp_len": clamp_len, "same_length": same_length, "batch_size": batch_size}
    options |= {name: value for name, value in given.items() if value is not None}
    scores = sweep(model, shard, mem_lens, cuts=cuts, cold=cold, **options)
    name = split if data is None else Path(data).stem
    path = directory / (f"eval_{name}.png" if data is None else f"eval_data_{name}.png")
    try:
        picture(scores, model.config.mem_len, f"{directory.name}: loss on {name} by memory length", path)
        drawn = f"picture: {path}"
    except OSError as error:  # the numbers are worth more than the picture
        drawn = f"no picture: {path}: {error.strerror}"
    unknown = tokenizer.count_unknown(shard.tokens)
    origin = {
        "text": data or split,
        "unknown_tokens": unknown,
        "checkpoint": str(checkpoint),
        "weights": weight_hash(checkpoint),
    }
    text = [
        f"{checkpoint}, weights {origin['weights']}",
        f"{origin['text']}: {settings(scores[0])}",
        *([f"note: {unknown:,} of {len(shard):,} tokens are unknown to the vocabulary"] if unknown else []),
        table(scores, model.config.mem_len, word_level=tokenizer.kind == "word"),
        drawn,
    ]
    return Evaluation(scores, origin, "\n".join(text))


def settings(score: Score) -> str:
    """What a number holds for: no result is printed without it."""
    start = "parts begin cold" if score.cold else "parts begin warm"
    return (
        f"{score.tokens:,} tokens scored, tgt_len {score.tgt_len}, clamp_len {score.clamp_len}, "
        f"same_length {str(score.same_length).lower()}, {start}"
    )


def _read(path: str, tokenizer, run: Run | None) -> Shard:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: expected a text file: {error.strerror}") from error
    shard = encode_shard(tokenizer, text, path, run.config.data.errors if run else "strict")
    if len(shard) < 2:
        raise DataError(f"{path} has {len(shard)} token, but scoring needs at least 2")
    return shard
