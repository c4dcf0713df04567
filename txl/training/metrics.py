"""What a run says while it trains: metrics.jsonl always, a bar on a terminal, lines elsewhere."""

import json
import math
import sys
from pathlib import Path

from tqdm import tqdm


class Metrics:
    """Writes metrics.jsonl and the console. Use as a context manager.

    Args:
        path: metrics.jsonl; lines of steps after `step` are dropped, so a resumed run repeats none.
        step: updates done already.
        steps: updates in all.
        tokens_per_byte: of the training text, for bits per byte.
    """

    def __init__(self, path: Path, step: int, steps: int, tokens_per_byte: float):
        self.steps, self.tokens_per_byte = steps, tokens_per_byte
        kept = [line for line in read(path) if line["step"] <= step]
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._bar = tqdm(total=steps, initial=step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
        self._file.close()

    def tick(self) -> None:
        """One step is done: the bar moves."""
        self._bar.update()

    def train(self, state, lr: float, grad_norm: float) -> None:
        """A line of training.

        Args:
            state: a TrainState; its window holds the sums since the last line.
            lr: of the last update.
            grad_norm: of the last update, before clipping.
        """
        step, window = state.step, state.window
        nll, rate = window.nll / window.tokens, window.tokens / window.seconds
        bits = nll / math.log(2) * self.tokens_per_byte
        self._write(step, "train", nll, bits, state.tokens, rate, lr, state.seconds, grad_norm=grad_norm)
        if self._bar.disable:
            left = (self.steps - step) * state.seconds / step
            self.say(
                f"step {step}/{self.steps} ({100 * step / self.steps:.0f} %) | loss {nll:.4f} | "
                f"{bits:.3f} bits/byte | lr {lr:.2e} | {rate:,.0f} tok/s | eta {tqdm.format_interval(left)}"
            )
        else:
            self._bar.set_postfix_str(f"loss {nll:.3f}, {bits:.3f} bits/byte, lr {lr:.1e}, {rate:,.0f} tok/s")

    def valid(self, step: int, score, lr: float, seconds: float) -> None:
        """A line of validation, from a txl.evaluation.Score."""
        self._write(
            step, "valid", score.nll, score.bits_per_byte, score.tokens, score.tokens_per_s, lr, seconds,
            mem_len=score.mem_len, tgt_len=score.tgt_len,
        )  # fmt: skip
        self.say(f"step {step}: validation loss {score.nll:.4f}, {score.bits_per_byte:.4f} bits/byte")

    def say(self, text: str) -> None:
        """A line on the console that does not tear the bar."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def _write(self, step, split, nll, bits, tokens, rate, lr, seconds, **more) -> None:
        line = {"step": step, "split": split, "nll": nll, "bits_per_byte": bits, "tokens": tokens}
        line |= {"tokens_per_s": round(rate, 1), "lr": lr, "seconds": round(seconds, 3), **more}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read(path: Path) -> list[dict]:
    """The lines of metrics.jsonl; none when it is absent. What is no such line, torn by a crash say, is left out."""
    lines = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for text_line in text.splitlines():
        try:
            line = json.loads(text_line)
        except ValueError:
            continue
        if isinstance(line, dict) and line.keys() >= {"step", "split", "nll"}:
            lines.append(line)
    return lines


def loss_curve(metrics: Path, picture: Path) -> None:
    """Training and validation loss against the step, a PNG at picture."""
    from matplotlib.figure import Figure

    lines = read(metrics)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for split, style in (("train", "-"), ("valid", "o--")):
        points = [(line["step"], line["nll"]) for line in lines if line["split"] == split]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=split)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=f"{metrics.parent.name}: loss")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(picture, dpi=120)
