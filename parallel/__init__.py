"""Transformer layers for long sequences. Knows tensors, and no reinforcement learning.

Axis letters: B batch, S sequence, D model width, H heads, K head width, F feed-forward width.
"""

from parallel.attention import Scope
from parallel.blocks import BlockSettings, BlockSizes, in_blocks
from parallel.cache import KVCache
from parallel.layers import LAYERS, TransformerLayer
from parallel.sublayers import LayerSize

__all__ = [
    "LAYERS",
    "BlockSettings",
    "BlockSizes",
    "KVCache",
    "LayerSize",
    "Scope",
    "TransformerLayer",
    "in_blocks",
]
