"""Transformer-XL: train it, evaluate it with a longer memory, import its relative attention."""

from txl.attention import RelativeAttention
from txl.memory import Memory
from txl.model import ModelConfig, Output, TransformerXL
from txl.training.checkpoint import load

__version__ = "0.1.0"

__all__ = ["Memory", "ModelConfig", "Output", "RelativeAttention", "TransformerXL", "load"]
