"""Scoring: loss, bits per byte and perplexity of a text, and how they change with the memory length."""

from txl.evaluation.score import EvalConfig, Score, evaluate
from txl.evaluation.sweep import picture, sweep, table

__all__ = ["EvalConfig", "Score", "evaluate", "picture", "sweep", "table"]
