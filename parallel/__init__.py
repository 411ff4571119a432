"""Transformer layers for long sequences. Knows tensors, and no reinforcement learning.

Axis letters: B batch, S sequence, D model width, H heads, K head width, F feed-forward width.
"""

from parallel.attention import Scope
from parallel.blocks import BlockSettings, BlockSizes, in_blocks
from parallel.cache import KVCache
from parallel.cube import CubeLayer
from parallel.layers import LAYERS, TransformerLayer
from parallel.mesh import CubeMesh
from parallel.rows import RowLayout
from parallel.sublayers import LayerSize
from parallel.traffic import Traffic
from parallel.world import World

__all__ = [
    "LAYERS",
    "BlockSettings",
    "BlockSizes",
    "CubeLayer",
    "CubeMesh",
    "KVCache",
    "LayerSize",
    "RowLayout",
    "Scope",
    "Traffic",
    "TransformerLayer",
    "World",
    "in_blocks",
]
