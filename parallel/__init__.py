"""Transformer layers for long sequences. Knows tensors, and no reinforcement learning.

Axis letters: B batch, S sequence, D model width, H heads, K head width, F feed-forward width.
"""

from parallel.cache import KVCache
from parallel.layers import LAYERS, LayerSize, TransformerLayer

__all__ = ["LAYERS", "KVCache", "LayerSize", "TransformerLayer"]
