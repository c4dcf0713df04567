"""The same text with several memory lengths: a table and a picture."""

from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from txl.data.shards import Shard
from txl.evaluation.score import Score, evaluate
from txl.model import TransformerXL

MULTIPLES = (0, 1, 2, 4, 8)
"""Memory lengths that are tried unless others are asked for, as multiples of the trained one."""


def sweep(model: TransformerXL, shard: Shard, mem_lens: Iterable[int] | None = None, **options) -> list[Score]:
    """One score a memory length; options as of txl.evaluation.evaluate. Shows a bar on a terminal."""
    if mem_lens is None:
        mem_lens = [multiple * model.config.mem_len for multiple in MULTIPLES] if model.config.mem_len else [0]
    scores = []
    for mem_len in mem_lens:
        with tqdm(desc=f"memory {mem_len}", unit="segment", leave=False, disable=None) as bar:

            def show(done: int, steps: int, bar=bar) -> None:
                bar.total = steps
                bar.update(done - bar.n)

            scores.append(evaluate(model, shard, mem_len=mem_len, on_segment=show, **options))
    return scores


def table(scores: list[Score], trained_mem_len: int, word_level: bool = False) -> str:
    """The scores in columns; memory as a multiple of the trained length, losses also against the first row."""
    head = ["memory", "", "nats/token", "change", "bits/byte", "bits/char", "perplexity"]
    head += (["ppl/word"] if not word_level else []) + ["tokens/s"]
    rows = [head]
    for s in scores:
        multiple = f"{s.mem_len / trained_mem_len:g}x" if trained_mem_len else ""
        change = f"{100 * (s.nll / scores[0].nll - 1):+.2f} %" if s is not scores[0] else ""
        row = [str(s.mem_len), multiple, f"{s.nll:.4f}", change, f"{s.bits_per_byte:.4f}", f"{s.bits_per_char:.4f}"]
        row += [f"{s.ppl:.3f}"] + ([f"{s.word_ppl:.1f}"] if not word_level else []) + [f"{s.tokens_per_s:,.0f}"]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def picture(scores: list[Score], trained_mem_len: int, title: str, path: Path) -> None:
    """Loss against memory length, a PNG at path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    scores = sorted(scores, key=lambda s: s.mem_len)
    axes.plot(range(len(scores)), [s.nll for s in scores], "o-")
    for x, s in enumerate(scores):
        axes.annotate(f"{s.nll:.3f}", (x, s.nll), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
    labels = [f"{s.mem_len}\n(trained)" if s.mem_len == trained_mem_len else str(s.mem_len) for s in scores]
    axes.set_xticks(range(len(scores)), labels)
    axes.margins(y=0.18)
    axes.set(xlabel="memory length (positions)", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
