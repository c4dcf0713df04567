"""The benchmark: its two models are one function, and it runs."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from txl.model import ModelConfig, TransformerXL

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from textbook import from_txl, translate  # noqa: E402


def test_textbook_equals_txl():
    """Every loss and every gradient, over three segments while the memory grows and fills."""
    torch.manual_seed(0)
    config = ModelConfig(11, n_layer=2, n_head=2, d_model=8, d_head=3, d_inner=12, mem_len=6, dropout=0.0)
    ours = TransformerXL(config).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.5)
    theirs = from_txl(ours)
    memory, mems = None, None
    for _ in range(3):
        tokens, targets = torch.randint(11, (2, 2, 4))
        out = ours(tokens, memory, targets)
        nll, mems = theirs(tokens.T, targets.T, mems)
        memory = out.memory
        torch.testing.assert_close(nll.T, out.nll)

        ours.zero_grad()
        theirs.zero_grad()
        out.nll.sum().backward()
        nll.sum().backward()
        expected = translate({name: p.grad for name, p in ours.named_parameters()})
        torch.testing.assert_close({name: p.grad for name, p in theirs.named_parameters()}, expected)
    assert memory.length == len(mems[0]) == 6


def test_train_step_runs():
    """Every dtype, on sizes of no interest."""
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, ROOT / "benchmarks" / "train_step.py", "--shape", "tiny", "--rounds", "1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run([*command, "--dtype", dtype], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        assert "ratio: txl trains" in run.stdout
