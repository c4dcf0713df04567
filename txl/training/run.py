"""A run: its settings, and the directory from which it can be continued or evaluated.

RUN/config.toml          the resolved settings
RUN/tokenizer.json       the tokenizer, in the format of the tokenizers library
RUN/data/{train,valid,test}.bin      token shards
RUN/checkpoints/step-00001000/       model, optimiser, memory, position in the data
RUN/metrics.jsonl        one object a line
RUN/*.png                pictures
"""

import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from txl import config as settings
from txl.data.corpus import DataConfig, prepare, reset_ids
from txl.data.shards import Shard, open_shard, write_shard
from txl.data.streams import SegmentStream, boundaries
from txl.data.tokenizer import Tokenizer
from txl.errors import CheckpointError, ConfigError, DataError
from txl.evaluation.score import EvalConfig
from txl.model import ModelConfig
from txl.training.checkpoint import CheckpointConfig, is_intact
from txl.training.optim import OptimConfig

SPLITS = ("train", "valid", "test")
FIXED_ON_RESUME = ("seed", "model", "data", "train.batch_size", "train.grad_accumulation", "optim.name")
"""What a resumed run may not change: weights, data, memory and moments belong to these."""


@dataclass(frozen=True)
class TrainConfig:
    """Length and shape of the training."""

    steps: int = 1000
    """Updates in all."""
    batch_size: int = 8
    """Streams of a step, over all accumulation chunks."""
    tgt_len: int = 128
    """Tokens of each stream in a step: the segment length."""
    grad_accumulation: int = 1
    """Chunks in which the streams of a step are computed one after the other, each with its own memory."""
    dtype: str = "float32"
    """"float32", or "bfloat16": autocast; weights, sinusoids, the softmaxes and the loss stay float32."""
    compile: bool = False
    """Use torch.compile; needs a C++ compiler on a CPU."""
    loss: str = "full"
    """"full", or "half": only the last half of each segment's positions counts."""
    device: str = "auto"
    """"auto": a GPU when there is one; or a torch device such as "cpu" or "cuda:1"."""
    log_every: int = 50
    """Steps between two lines of metrics."""

    def __post_init__(self):
        for name in ("steps", "batch_size", "tgt_len", "grad_accumulation", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} must be at least 1, got {getattr(self, name)}")
        if self.grad_accumulation > self.batch_size:
            raise ConfigError(
                f"train.grad_accumulation {self.grad_accumulation} splits the streams of a step, so it can be at most "
                f"train.batch_size {self.batch_size}"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f'train.dtype must be "float32" or "bfloat16", got "{self.dtype}"')
        if self.loss not in ("full", "half"):
            raise ConfigError(f'train.loss must be "full" or "half", got "{self.loss}"')
        if self.loss == "half" and self.tgt_len < 2:
            raise ConfigError('train.loss "half" needs train.tgt_len of at least 2, got 1')


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run: what config.toml holds."""

    run_dir: str = ""
    """Where everything is written; runs/NAME of configs/NAME.toml when empty."""
    seed: int = 0
    """Of weights and dropout."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self):
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be at least 0 and below 2 ** 63, got {self.seed}")

    @classmethod
    def load(cls, path: str | Path, overrides: list[str]) -> "RunConfig":
        """From a TOML file and key=value words.

        Among the words, data.train replaces the file's data.source, and data.tokenizer its data.vocab_size.
        """
        changes = {}
        for word in overrides:
            settings.merge(changes, settings.parse_override(word))
        data = changes.get("data", {})
        if isinstance(data, dict):
            if "train" in data:
                data.setdefault("source", "")
            if "tokenizer" in data:
                data.setdefault("vocab_size", 0)
        values = settings.load(path)
        settings.merge(values, changes)
        config = settings.from_dict(cls, values, str(path))
        return config if config.run_dir else replace(config, run_dir=f"runs/{Path(path).stem}")


@dataclass(frozen=True)
class Run:
    """An open run directory."""

    directory: Path
    config: RunConfig
    tokenizer: Tokenizer
    shards: dict[str, Shard]

    @classmethod
    def create(cls, config: RunConfig) -> "Run":
        """Read the text, make tokenizer and shards, and write a new run directory, all of it or nothing.

        Raises:
            TxlError: the directory exists, or a text or setting cannot be used.
        """
        directory = Path(config.run_dir)
        if directory.exists() or directory.is_symlink():
            raise ConfigError(
                f"{directory} exists: continue it with --resume {directory}, or choose another run_dir=NAME"
            )
        tokenizer, shards = prepare(config.data)
        found, wanted = tokenizer.vocab_size, config.model.vocab_size
        if wanted not in (None, found):
            raise ConfigError(f"model.vocab_size is {wanted}, but the tokenizer has {found} tokens: leave it out")
        config = replace(config, model=replace(config.model, vocab_size=found))
        draft = cls(directory, config, tokenizer, shards)
        draft.stream()  # long enough?
        if config.data.reset_on and not len(draft.cuts(shards["train"])):
            raise ConfigError(f"data.reset_on {config.data.reset_on!r} is nowhere in the training text")
        for split in ("valid", "test"):
            if len(shards[split]) < 2:
                raise DataError(f"the {split} split has {len(shards[split])} token, but scoring needs at least 2")

        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
        try:
            (temporary / "data").mkdir(parents=True)
            for split, shard in shards.items():
                write_shard(temporary / "data" / f"{split}.bin", shard)
            tokenizer.save(temporary / "tokenizer.json")
            (temporary / "config.toml").write_text(settings.to_toml(config), encoding="utf-8")
            temporary.rename(directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return cls.open(directory)

    @classmethod
    def open(cls, directory: str | Path, overrides: list[str] | None = None) -> "Run":
        """Open what create made, with other settings where overrides name them, but for those of FIXED_ON_RESUME."""
        directory = Path(directory)
        if not (directory / "config.toml").is_file():
            raise CheckpointError(f"{directory} is not a run directory: no config.toml in it")
        config = RunConfig.load(directory / "config.toml", [])
        config = replace(config, run_dir=str(directory))
        if overrides:
            if any(word.partition("=")[0].strip() == "run_dir" for word in overrides):
                raise ConfigError(f"run_dir cannot change when a run is resumed: copy {directory} instead")
            changed = replace(RunConfig.load(directory / "config.toml", overrides), run_dir=str(directory))
            _refuse_fixed(config, changed)
            config = changed
        tokenizer = Tokenizer.load(directory / "tokenizer.json")
        shards = {split: open_shard(directory / "data" / f"{split}.bin", tokenizer) for split in SPLITS}
        return cls(directory, config, tokenizer, shards)

    def save_config(self) -> None:
        """Record the settings, with what was overridden, in config.toml."""
        temporary = self.directory / ".config.toml.tmp"
        temporary.write_text(settings.to_toml(self.config), encoding="utf-8")
        temporary.replace(self.directory / "config.toml")

    def stream(self) -> SegmentStream:
        """The training text as batch_size streams, from the beginning."""
        shard, train = self.shards["train"], self.config.train
        return SegmentStream(shard.tokens, train.batch_size, train.tgt_len, self.cuts(shard), "the train split")

    def cuts(self, shard: Shard) -> np.ndarray:
        """The positions of a shard at which the memory is reset (data.reset_on)."""
        return boundaries(shard.tokens, self.reset_ids())

    def reset_ids(self) -> tuple[int, ...] | None:
        """The tokens of data.reset_on."""
        return reset_ids(self.config.data, self.tokenizer)

    def valid_head(self) -> Shard:
        """The first eval.tokens of the validation split, or all of it."""
        valid = self.shards["valid"]
        return valid.head(self.config.eval.tokens or len(valid), self.tokenizer)

    @property
    def is_finished(self) -> bool:
        """An intact checkpoint of the last step is there."""
        return is_intact(self.checkpoints / f"step-{self.config.train.steps:08d}")

    @property
    def eval_options(self) -> dict[str, int | bool | None]:
        """The settings under [eval] as arguments of txl.evaluation.evaluate, all but mem_len."""
        config = self.config.eval
        return {
            "tgt_len": config.tgt_len or self.config.train.tgt_len,
            "clamp_len": config.clamp_len,
            "same_length": config.same_length,
            "batch_size": config.batch_size,
        }

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.directory / "checkpoints"


def _refuse_fixed(old: RunConfig, new: RunConfig) -> None:
    for name in FIXED_ON_RESUME:
        before, after = old, new
        for part in name.split("."):
            before, after = getattr(before, part), getattr(after, part)
        if before != after:
            raise ConfigError(f"{name} cannot change when a run is resumed: start a new run with run_dir=NAME")
