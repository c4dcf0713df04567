"""Relative attention: tensors in, tensors out; knows nothing of models or training."""

from txl.attention.module import RelativeAttention
from txl.attention.reference import relative_attention, relative_shift
from txl.attention.sinusoid import sinusoid

__all__ = ["RelativeAttention", "relative_attention", "relative_shift", "sinusoid"]
