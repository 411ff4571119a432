"""Attention of a few new tokens to a key/value cache, at the speed of reading it.

Axis letters: P tiles, N = B·H, C tokens of a tile, R new tokens, K head width, A tiles at a time.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from parallel.attention import attend
from parallel.cache import KVCache
from parallel.kernels import kernel_for

FEW = 64  # new tokens; of more, the scores take much memory and the kernel is soon as fast
CONVERTED = 2**22  # bytes of tiles that are converted at a time: they stay in the caches


@torch.no_grad()
def attend_cached(q_BHRK: Tensor, cache: KVCache) -> Tensor:
    """Attention of the cache's last R tokens to all tokens up to each of them.

    Computes in fp32, or fp64 where the cache is; on a GPU in the cache's dtype.

    Returns:
        The output (B, H, R, K) in the queries' dtype.
    """
    few = cache.key_PNCK.device.type == "cpu" and q_BHRK.shape[2] <= FEW
    with torch.autocast(q_BHRK.device.type, enabled=False):
        out_BHRK = _attend_tiles(q_BHRK, cache) if few else _attend_kernel(q_BHRK, cache)
    return out_BHRK.to(q_BHRK.dtype)


def _attend_kernel(q_BHRK: Tensor, cache: KVCache) -> Tensor:
    if q_BHRK.device.type == "cpu":
        k_BHSK, v_BHSK = (t.to(_wide(cache)) for t in cache.read(0, cache.length))
    else:
        heads = (cache.batch, cache.heads)
        k_BHSK = cache.key_PNCK[0, :, : cache.length].unflatten(0, heads)
        v_BHSK = cache.value_PNCK[0, :, : cache.length].unflatten(0, heads)
    kernel = kernel_for(q_BHRK.device, k_BHSK.dtype, q_BHRK.shape[3])
    places = range(cache.length - q_BHRK.shape[2], cache.length)
    return attend(kernel, q_BHRK.to(k_BHSK.dtype), k_BHSK, v_BHSK, places, True)[0]


def _attend_tiles(q_BHRK: Tensor, cache: KVCache) -> Tensor:
    """Both products with the tile on the left and the new tokens as contiguous columns.

    A product of such a shape reads a tile at memory bandwidth; in the other order, or with rows for
    columns, it takes up to ten times as long. All tiles are one batch, which threads share.
    """
    R, C, wide = q_BHRK.shape[2], min(cache.tile, cache.length), _wide(cache)
    P, first = -(-cache.length // C), cache.length - R
    q_NRK = (q_BHRK.to(wide) / math.sqrt(q_BHRK.shape[3])).flatten(0, 1)
    N = len(q_NRK)
    weight_PNRC = q_NRK.new_empty(P, N, R, C)
    for part, key_ANCK in _widened(cache.key_PNCK[:P, :, :C], wide):
        A = len(key_ANCK)
        score = torch.bmm(key_ANCK.flatten(0, 1), q_NRK.repeat(A, 1, 1).transpose(1, 2))
        weight_PNRC[part] = score.view(A, N, C, R).transpose(2, 3)
    # What a new token must not see is in the tiles from the first one's on.
    place_P11C = torch.arange(first // C * C, P * C).view(-1, 1, 1, C)
    hidden = place_P11C > torch.arange(first, cache.length)[:, None]
    weight_PNRC[first // C :].masked_fill_(hidden, -math.inf)
    weight_PNRC.sub_(weight_PNRC.amax((0, 3), keepdim=True)).exp_()
    out_NKR = torch.zeros_like(q_NRK).transpose(1, 2)
    for part, value_ANKC in _widened(cache.value_PNCK[:P, :, :C].transpose(2, 3), wide):
        weight_MCR = weight_PNRC[part].flatten(0, 1).transpose(1, 2)
        out = torch.bmm(value_ANKC.flatten(0, 1), weight_MCR)
        out_NKR += out.unflatten(0, (-1, N)).sum(0)
    out_NKR /= weight_PNRC.sum((0, 3))[:, None]
    return out_NKR.transpose(1, 2).unflatten(0, q_BHRK.shape[:2])


def _widened(tiles: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """All tiles; in parts, one after the other in the same memory, where they are converted."""
    if tiles.dtype == wide:
        yield slice(0, len(tiles)), tiles
        return
    many = max(CONVERTED // (tiles[0].numel() * wide.itemsize), 1)
    buffer = tiles.new_empty((min(many, len(tiles)), *tiles.shape[1:]), dtype=wide)
    for first in range(0, len(tiles), many):
        part = tiles[first : first + many]
        yield slice(first, first + len(part)), buffer[: len(part)].copy_(part)


def _wide(cache: KVCache) -> torch.dtype:
    dtype = cache.key_PNCK.dtype
    return torch.float64 if dtype == torch.float64 else torch.float32
