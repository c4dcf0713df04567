"""Tokens per second of a training step: txl, the original's algorithm (textbook.py), and the bare matrix products.

    python benchmarks/train_step.py [--shape A B] [--rounds 7] [--steps 3] [--threads 2] [--dtype float32]

A step is forward, mean loss, backward, clipping at 0.25, Adam and zero_grad, with the memory carried on and full.
Both models use torch.optim.Adam(fused=True), where the original has the plain one, so that only the model differs.
The contestants take turns in every round and the medians are printed: a busy machine slows them alike. Before any
timing, both must give the same losses and gradient norms in float32 without dropout; if not, the exit status is 1.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch
from textbook import Textbook, from_txl
from torch import Tensor, nn

from txl.model import ModelConfig, TransformerXL

SHAPES = {  # sizes of the model, batch, length of the segment; the memory is as long
    "A": (ModelConfig(205, n_layer=6, n_head=8, d_model=256, d_head=32, d_inner=1024, mem_len=128), 8, 128),
    "B": (ModelConfig(205, n_layer=4, n_head=8, d_model=512, d_head=64, d_inner=2048, mem_len=256), 4, 256),
    "tiny": (ModelConfig(205, n_layer=2, n_head=2, d_model=32, d_head=16, d_inner=64, mem_len=8), 2, 8),
}


def main() -> int:
    """Check and measure each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["A", "B"])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16: by autocast")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{cpu()}, torch {torch.__version__}, {args.threads} threads, {args.dtype}")
    for name in args.shape:
        config, batch, length = SHAPES[name]
        print(
            f"\nshape {name}: n_layer {config.n_layer}, d_model {config.d_model}, n_head {config.n_head}, "
            f"d_inner {config.d_inner}, batch {batch}, tgt_len {length}, mem_len {config.mem_len}"
        )
        difference = check(config, batch, length)
        if difference:
            print(f"txl and textbook differ: {difference}", file=sys.stderr)
            return 1
        contestants = {
            "txl": training(config, batch, length, args.dtype, TransformerXL, txl_losses),
            "textbook": training(config, batch, length, args.dtype, Textbook, textbook_losses),
            "GEMM floor": matrix_products(config, batch, length, getattr(torch, args.dtype)),
        }
        report(race(contestants, args.rounds, args.steps), batch * length)
    return 0


def cpu() -> str:
    """The processor's model, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown CPU")


def check(config: ModelConfig, batch: int, length: int, segments: int = 3) -> str:
    """What differs between the two models without dropout, over some segments with memory; "" if nothing does."""
    ours, theirs = models(replace(config, dropout=0.0, dropatt=0.0, init_std=0.1))  # larger: positions must matter
    data = random_segments(config.vocab_size, batch, length)
    losses = zip(txl_losses(ours, data), textbook_losses(theirs, data), strict=True)
    for i, (loss, expected) in enumerate(islice(losses, segments)):
        norms = []
        for model, value in ((ours, loss), (theirs, expected)):
            model.zero_grad()
            value.backward()
            norms.append(nn.utils.get_total_norm(p.grad for p in model.parameters()).item())
        for what, a, b in (("loss", loss.item(), expected.item()), ("gradient norm", *norms)):
            if not math.isclose(a, b, rel_tol=1e-4):
                return f"{what} {a:.6f} and {b:.6f} at segment {i}"
    return ""


def models(config: ModelConfig) -> tuple[TransformerXL, Textbook]:
    """Both models, with the same random weights."""
    torch.manual_seed(0)
    ours = TransformerXL(config)
    return ours, from_txl(ours)


def random_segments(vocab_size: int, batch: int, length: int, n: int = 8) -> list[tuple[Tensor, Tensor]]:
    """n consecutive segments of random tokens and their targets, [batch, length]."""
    stream = torch.randint(vocab_size, (batch, n * length + 1), generator=torch.Generator().manual_seed(0))
    return list(zip(stream[:, :-1].split(length, 1), stream[:, 1:].split(length, 1), strict=True))


def txl_losses(model: TransformerXL, segments, dtype: str = "float32") -> Iterator[Tensor]:
    """The mean loss of one segment after the other, without end; the memory is carried on."""
    memory = None
    for tokens, targets in cycle(segments):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            out = model(tokens, memory, targets)
        memory = out.memory
        yield out.loss


def textbook_losses(model: Textbook, segments, dtype: str = "float32") -> Iterator[Tensor]:
    """As txl_losses, time first."""
    mems = None
    for tokens, targets in cycle([(tokens.T.contiguous(), targets.T.contiguous()) for tokens, targets in segments]):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            nll, mems = model(tokens, targets, mems)
        yield nll.mean()


def training(config: ModelConfig, batch: int, length: int, dtype: str, kind: type, losses: Callable) -> Callable:
    """A function that does one training step of the model of this kind; the memory is full already."""
    model = next(model for model in models(config) if isinstance(model, kind)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4, fused=True)
    loss = losses(model, random_segments(config.vocab_size, batch, length), dtype)

    def step():
        next(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(1 + math.ceil(config.mem_len / length)):
        step()
    return step


def matrix_products(config: ModelConfig, batch: int, length: int, dtype: torch.dtype) -> Callable:
    """A function that does the matrix products of one training step, forward and backward, and nothing else.

    Queries on the L positions of the segment, keys and values on S = M + L with no gradient into the memory, r once;
    no copies, no elementwise work, every result into a buffer that is there already.
    """
    H, K, D, inner = config.n_head, config.d_head, config.d_model, config.d_inner
    S = config.mem_len + length
    rows, context = batch * length, batch * S

    def buffer(*shape):
        return torch.randn(shape, dtype=dtype)

    def linear(n, fan_in, fan_out, grad_rows=rows):  # y, dx, dw
        x, w, y = buffer(n, fan_in), buffer(fan_out, fan_in), buffer(n, fan_out)
        return [(x, w.T, y), (y[:grad_rows], w, buffer(grad_rows, fan_in)), (y.T, x, buffer(fan_out, fan_in))]

    def attention():
        q, out, dq = (buffer(batch * H, length, K) for _ in range(3))
        k, v, r, dk, dv, dr = (buffer(batch * H, S, K) for _ in range(6))
        p, position, dp = (buffer(batch * H, length, S) for _ in range(3))
        forward = [(q, k.mT, p), (q, r.mT, position), (p, v, out)]
        backward = [(out, v.mT, dp), (p.mT, out, dv), (dp, k, dq), (position, r, dq)]
        return [*forward, *backward, (dp.mT, q, dk), (position.mT, q, dr)]

    products = linear(rows, D, config.vocab_size)
    for _ in range(config.n_layer):
        products += linear(rows, D, H * K) + linear(rows, H * K, D)  # q, o
        products += linear(context, D, H * K) + linear(context, D, H * K)  # k, v
        products += linear(S, D, H * K, grad_rows=0)  # r
        products += attention() + linear(rows, D, inner) + linear(rows, inner, D)

    def step():
        for a, b, out in products:
            (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out=out)

    step()
    return step


def race(contestants: dict[str, Callable], rounds: int, steps: int) -> dict[str, float]:
    """The median seconds of a step of each contestant; all take turns in every round."""
    seconds = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            start = time.perf_counter()
            for _ in range(steps):
                step()
            seconds[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(times) for name, times in seconds.items()}


def report(seconds: dict[str, float], tokens: int) -> None:
    """Print the table, and the ratio that counts."""
    print(f"{'':12}{'ms a step':>12}{'tokens/s':>12}{'x textbook':>12}{'floor share':>12}")
    textbook, floor = seconds["textbook"], seconds["GEMM floor"]
    for name, s in seconds.items():
        print(f"{name:12}{s * 1000:12.1f}{tokens / s:12.0f}{textbook / s:12.2f}{floor / s:12.0%}")
    print(f"ratio: txl trains {textbook / seconds['txl']:.2f} times as fast as the textbook form")


if __name__ == "__main__":
    sys.exit(main())
