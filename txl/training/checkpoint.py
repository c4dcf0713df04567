"""Checkpoints: directories of safetensors and JSON that are complete or absent, and whose every byte is checked.

checkpoints/step-00001000/
    model.safetensors  config.json  tokenizer.json     what txl.load and from_pretrained read
    state.safetensors  state.json                      optimiser, memory, random state, position in the data
    manifest.json                                      size and sha256 of each of them, written last
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from txl.data.streams import SegmentStream
from txl.data.tokenizer import Tokenizer
from txl.errors import CheckpointError, ConfigError
from txl.memory import Memory
from txl.model import TransformerXL

FILES = ("model.safetensors", "config.json", "tokenizer.json", "state.safetensors", "state.json")


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written. The best by validation loss and the last are always kept."""

    every: int = 1000
    """Steps between two checkpoints; 0 is only at a new best validation loss and at the end."""
    keep: int = 2
    """How many of the newest to keep, besides the best."""

    def __post_init__(self):
        if self.every < 0 or self.keep < 1:
            raise ConfigError(
                f"checkpoint.every must be at least 0 and checkpoint.keep at least 1, got {self.every} and {self.keep}"
            )


@dataclass
class Window:
    """Sums since the last line of metrics."""

    nll: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class TrainState:
    """Everything a run needs to go on exactly as if it had not stopped, besides its directory."""

    model: TransformerXL
    optimizer: torch.optim.Optimizer
    stream: SegmentStream
    """Where the next segments come from."""
    memories: list[Memory]
    """One a chunk of gradient accumulation, of its rows."""
    step: int = 0
    """Updates done."""
    tokens: int = 0
    """Tokens trained on."""
    seconds: float = 0.0
    """Spent training, without validation."""
    window: Window = field(default_factory=Window)
    """For the next line of metrics."""


def save(root: Path, state: TrainState, tokenizer: Tokenizer, valid_nll: float | None, keep: int) -> Path:
    """Write a checkpoint: into a temporary directory first, synced, and then renamed. Then drop the old ones.

    Args:
        root: the directory of all checkpoints.
        valid_nll: validation loss at this step, where it was measured.
        keep: how many of the newest stay, besides the best.
    """
    final = root / f"step-{state.step:08d}"
    if final.exists():
        if is_intact(final):
            return final
        shutil.rmtree(final)
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".tmp-*"):
        shutil.rmtree(leftover)
    temporary = root / f".tmp-{final.name}"
    state.model.save_pretrained(temporary)
    tokenizer.save(temporary / "tokenizer.json")
    save_file(_tensors(state), temporary / "state.safetensors")
    numbers = {
        "step": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "window": asdict(state.window),
        "valid_nll": valid_nll,
        "tokenizer": tokenizer.fingerprint,
        "stream": state.stream.position,
        "memories": [{"mem_len": m.mem_len, "zeros": m.zeros, "ragged": m.ragged} for m in state.memories],
    }
    (temporary / "state.json").write_text(json.dumps(numbers) + "\n", encoding="utf-8")
    files = [temporary / name for name in FILES]
    manifest = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    temporary.rename(final)
    _sync(root)
    _drop_old(root, keep)
    return final


def restore(path: Path, state: TrainState) -> None:
    """Put a checkpoint into a state that was built from the same settings.

    Raises:
        CheckpointError: the checkpoint is damaged, or of other settings.
    """
    verify(path)
    state.model.load_state_dict(TransformerXL.from_pretrained(path).state_dict())
    numbers = json.loads((path / "state.json").read_text(encoding="utf-8"))
    tensors = load_file(path / "state.safetensors")
    device = state.model.embedding.weight.device
    state.step, state.tokens, state.seconds = numbers["step"], numbers["tokens"], numbers["seconds"]
    state.window = Window(**numbers["window"])
    state.stream.seek(numbers["stream"])
    state.memories = [
        replace(
            _memory(tensors, f"memory.{chunk}", len(memory.states), device),
            mem_len=settings["mem_len"],
            zeros=settings["zeros"],
            ragged=settings["ragged"],
        )
        for chunk, (memory, settings) in enumerate(zip(state.memories, numbers["memories"], strict=True))
    ]
    moments = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            moments.setdefault(int(index), {})[key] = tensor
    state.optimizer.load_state_dict({"state": moments, "param_groups": state.optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)


def load(run_or_dir: str | Path, which: str = "best") -> tuple[TransformerXL, Tokenizer]:
    """The model and tokenizer of a run directory, or of a directory that holds them.

    Args:
        run_or_dir: a run directory, one of its checkpoints, or a directory of save_pretrained with a tokenizer.json.
        which: of a run: "best" by validation loss, or "last".

    Raises:
        CheckpointError: nothing there, damaged, or the tokenizer is not the model's.
    """
    directory = locate(run_or_dir, which)
    model = TransformerXL.from_pretrained(directory)
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    if tokenizer.vocab_size != model.config.vocab_size:
        raise CheckpointError(
            f"{directory}: tokenizer.json has {tokenizer.vocab_size} tokens, the model {model.config.vocab_size}: "
            "they do not belong together"
        )
    return model, tokenizer


def locate(run_or_dir: str | Path, which: str = "best") -> Path:
    """The directory with model.safetensors that load reads, its files verified where it has a manifest."""
    directory = Path(run_or_dir)
    if not directory.is_dir():
        raise CheckpointError(f"no directory {directory}: expected a run directory or one of save_pretrained")
    of_a_run = not (directory / "model.safetensors").is_file()
    if of_a_run:
        directory = pick(directory / "checkpoints", which)
    if of_a_run or (directory / "manifest.json").is_file():
        verify(directory)
    return directory


def pick(root: Path, which: str) -> Path:
    """The "best" (lowest validation loss; the last where none was measured) or "last" checkpoint below root."""
    if which not in ("best", "last"):
        raise CheckpointError(f'which must be "best" or "last", got "{which}"')
    found = steps(root)
    if not found:
        raise CheckpointError(f"no checkpoint in {root}: has the run trained yet?")
    return _best(found) if which == "best" else found[-1]


def intact(root: Path) -> list[Path]:
    """The checkpoints below root that verify has nothing against, oldest first."""
    return [path for path in steps(root) if is_intact(path)]


def steps(root: Path) -> list[Path]:
    """The checkpoints below root, oldest first."""
    return sorted(path for path in root.glob("step-*") if path.is_dir())


def verify(path: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: names the first file that is missing, cut or altered.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        expected = [(name, manifest[name]["bytes"], manifest[name]["sha256"]) for name in FILES]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path / 'manifest.json'} is missing or damaged: use another checkpoint") from error
    for name, size, sha256 in expected:
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: use another checkpoint")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes, expected {size}: it was cut or altered; "
                "use another checkpoint"
            )
        if _sha256(file) != sha256:
            raise CheckpointError(f"{file} was altered: its sha256 is not the manifest's; use another checkpoint")


def is_intact(path: Path) -> bool:
    """Whether there is a checkpoint at path that verify has nothing against."""
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def valid_nll(path: Path) -> float:
    """The validation loss that was measured when a checkpoint was written; infinity where none was."""
    try:
        value = json.loads((path / "state.json").read_text(encoding="utf-8"))["valid_nll"]
    except (OSError, ValueError, KeyError, TypeError):
        value = None
    return float("inf") if value is None else value


def weight_hash(path: Path) -> str:
    """The first 12 hex digits of the sha256 of the weights."""
    return _sha256(path / "model.safetensors")[:12]


def _tensors(state: TrainState) -> dict[str, Tensor]:
    tensors = {"rng.cpu": torch.get_rng_state()}
    if state.model.embedding.weight.device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(state.model.embedding.weight.device)
    for index, moments in state.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": t for key, t in moments.items() if t is not None}
    for chunk, memory in enumerate(state.memories):
        tensors |= {f"memory.{chunk}.{layer}": t for layer, t in enumerate(memory.states)}
        tensors[f"memory.{chunk}.start"] = memory.start
    return {name: t.detach().cpu().contiguous() for name, t in tensors.items()}


def _memory(tensors: dict[str, Tensor], prefix: str, n_layer: int, device) -> Memory:
    states = tuple(tensors[f"{prefix}.{layer}"].to(device) for layer in range(n_layer))
    return Memory(states, tensors[f"{prefix}.start"].to(device), mem_len=0)


def _drop_old(root: Path, keep: int) -> None:
    good = intact(root)
    kept = {*good[-keep:], _best(good)}
    for path in steps(root):
        if path not in kept:
            shutil.rmtree(path)


def _best(found: list[Path]) -> Path:
    losses = {path: valid_nll(path) for path in found}
    return min(reversed(found), key=losses.__getitem__)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
