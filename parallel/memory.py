"""How much memory a training step takes at its peak, predicted from the operations.

For each kind of layer two things are counted: what is kept of it until its backward pass, and what
is alive at the worst moment of that pass. The peak of the step is the worst of these moments, with
what the layers below still keep and the gradients of those above. The residual stream is fp32; what
linear maps and attention take and give has `half` of it under bf16 autocast. Left out, as far below
the rest: means and deviations of norms, gradients of biases, the head. Counted for PyTorch on CPUs;
`benchmarks/memory_plan.py` measures it. Axis letters as in `parallel.layers`; R rows of the last
layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from parallel.attention import Scope, pieces
from parallel.blocks import BlockSettings, BlockSizes, cut
from parallel.kernels import kernel_for
from parallel.sublayers import LayerSize

FULL = 4  # bytes of a number in fp32


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The layers of a model, and how they are computed."""

    size: LayerSize
    layers: int
    kind: str  # a key of `parallel.layers.LAYERS`
    recompute: bool
    half: bool  # under bf16 autocast
    blocks: BlockSettings = BlockSettings()
    device: torch.device = torch.device("cpu")

    @property
    def element(self) -> int:
        """Bytes of a number that a linear map or attention takes or gives."""
        return 2 if self.half else FULL

    @property
    def layer_parameters(self) -> int:
        """Numbers in the weights of one layer."""
        return self.size.matrices + self.size.vectors


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of a micro-batch, and what the last layer computes of them."""

    sequences: int
    tokens: int  # of each
    scope: Scope = Scope()

    @property
    def rows(self) -> int:
        """R, positions of a sequence at which the last layer is computed."""
        return len(self.scope.positions(self.tokens))


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes at the peak of a training step, by kind; the framework itself is not among them."""

    parameters: int
    averaged: int
    optimizer: int
    gradients: int  # those that exist at the peak
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.averaged + self.optimizer + self.gradients + self.activations


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Bytes of one layer.

    Attributes:
        kept: until its backward pass, its input among them.
        moments: the worst of its backward pass: gradients of its weights, and all else that is
            alive; what was kept counts as far as it still is.
    """

    kept: int
    moments: tuple[tuple[int, int], ...]


def plan(
    stack: Stack,
    batch: Batch,
    *,
    parameters: int,
    around: int = 0,
    averaged: bool = False,
    accumulate: bool = False,
    shards: int = 1,
) -> MemoryPlan:
    """Predicts the peak of one forward and backward pass and AdamW's step, parameters in fp32.

    Args:
        stack: the layers.
        batch: a micro-batch.
        parameters: trainable numbers of the whole model.
        around: bytes that what stands around the layers keeps until the end of the backward pass.
        averaged: whether an averaged copy of the weights is kept.
        accumulate: whether the gradients of earlier micro-batches are there.
        shards: devices that share parameters, gradients and optimiser, as fully sharded data
            parallelism does; every one computes whole layers, whose weights it gathers.
    """
    layer = LAYER_BYTES[stack.kind]
    inner, last = (layer(stack, b) for b in (replace(batch, scope=Scope()), batch))
    below = inner.kept
    if stack.recompute:
        below = FULL * batch.sequences * batch.tokens * stack.size.width  # the input alone
    gathered = FULL * stack.layer_parameters * (shards > 1)
    shared = FULL * parameters // shards
    moments = [(shared, 0)]  # AdamW's step: all gradients
    for n in range(stack.layers):  # the backward pass of the layer with n layers below it
        above = FULL * stack.layer_parameters * (stack.layers - 1 - n) // shards
        there = shared if accumulate else above
        for own, alive in (last if n == stack.layers - 1 else inner).moments:
            moments.append((there + own, around + gathered + n * below + alive))
    gradients, activations = max(moments, key=sum)
    return MemoryPlan(
        parameters=shared,
        averaged=shared * averaged,
        optimizer=2 * shared,
        gradients=gradients,
        activations=activations,
    )


def longest(fits: Callable[[int], bool], limit: int = 2**32) -> int:
    """The largest n up to `limit` that fits, where everything below it does; 0: not even 1."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _vanilla(stack: Stack, batch: Batch) -> _Layer:
    """Beside the dense terms the softmax and the mask of the future; no attention output."""
    B, S, D, e = batch.sequences, batch.tokens, stack.size.width, stack.element
    matrix = B * stack.size.heads * S * S * e
    # Gradients of values and softmax, and the gradient of the scores that comes of it.
    return _dense(
        stack, batch, kept=matrix + S * S, backward=B * S * D * e + 2 * matrix, copied=True
    )


def _memory_efficient(stack: Stack, batch: Batch) -> _Layer:
    """Beside the dense terms the attention output and its log-sum-exp."""
    token = batch.sequences * batch.tokens * stack.size.width * stack.element
    lse = FULL * batch.sequences * stack.size.heads * batch.tokens
    # Gradients of the attention output, the queries, the keys and the values.
    backward = 4 * token + _kernel_buffers(stack)
    return _dense(
        stack, batch, kept=token + lse, backward=backward, copied=batch.rows < batch.tokens
    )


def _dense(stack: Stack, batch: Batch, *, kept: int, backward: int, copied: bool) -> _Layer:
    """A layer left to autograd.

    Args:
        stack: the layers.
        batch: a micro-batch.
        kept: bytes of what attention keeps beside queries, keys and values.
        backward: bytes that are alive only in attention's backward pass.
        copied: whether the output projection takes a copy of what attention gives.
    """
    B, R, D, F = batch.sequences, batch.rows, stack.size.width, stack.size.feed_forward
    token, row, e = B * batch.tokens * D, B * R * D, stack.element
    attention = FULL * token + 4 * e * token + kept  # x; its norm, queries, keys, values
    attention += 2 * stack.layer_parameters * stack.half  # autocast's copies of the weights
    finish = FULL * row + e * (row + B * R * F) + e * row * copied  # x again, norm, hidden
    if stack.size.dropout:
        finish += 2 * row  # masks, a byte each
    # Gradients of the output and, before and behind the ReLU, of the hidden activation.
    in_finish = attention + finish + FULL * row + 2 * e * B * R * F
    in_attention = attention + FULL * token + backward  # gradient of x by the residual
    moments = (FULL * D * F, in_finish), (FULL * (D * D + 2 * D * F), in_attention)
    return _Layer(kept=attention + finish, moments=moments)


def _blockwise(stack: Stack, batch: Batch) -> _Layer:
    """Keeps x, the attention output and log-sum-exp; the rest exists for one block at a time."""
    B, S, R, D, e = batch.sequences, batch.tokens, batch.rows, stack.size.width, stack.element
    blocks = stack.blocks.sizes(
        stack.size, batch=B, sequence=S, element_bytes=FULL, device=stack.device
    )
    token, row = B * S * D, B * R * D
    kept = FULL * token + e * row + FULL * B * stack.size.heads * R
    # Gradients of output and x; keys and values, and their gradients.
    whole = kept + FULL * (row + token) + 2 * (e + FULL) * token
    Q = min(blocks.query, R)
    rows = min(blocks.rows, Q)
    # Of the block of queries: themselves, gradients of the attention output and of x.
    block = B * Q * D * (2 * e + FULL)
    # Attention: the sum of the queries' gradients, and what the kernel gives.
    in_attention = B * D * (Q * FULL + e * _kernel_rows(stack, batch, blocks))
    in_attention += _kernel_buffers(stack)
    # Feed-forward: output of attention's branch, x, norm, hidden, gradients of hidden, norm and x.
    # The norm's are in fp32.
    per_row = D * (3 * e + 2 * FULL) + 2 * e * stack.size.feed_forward
    per_row += D * (FULL * stack.half + 2 * bool(stack.size.dropout))
    in_finish = B * rows * per_row
    own = FULL * stack.layer_parameters  # summed over the blocks, there from the beginning
    return _Layer(kept=kept, moments=((own, whole + block + max(in_attention, in_finish)),))


def _kernel_rows(stack: Stack, batch: Batch, blocks: BlockSizes) -> int:
    """Rows of gradients of queries, keys and values that one call of the kernel gives."""
    dtype = torch.bfloat16 if stack.half else torch.float32
    kernel = kernel_for(stack.device, dtype, stack.size.head_width)
    threads = torch.get_num_threads() if stack.device.type == "cpu" else 1
    # Of a single sequence `kernels.CpuFlash` makes a batch, with key gradients of every part.
    parts = max(threads // stack.size.heads, 1) if batch.sequences == 1 else 1
    positions = batch.scope.positions(batch.tokens)[-blocks.query :]
    rows = []
    for piece in pieces(positions, batch.tokens, True, kernel.largest_square):
        queries = len(range(len(positions))[piece.queries])
        keys = range(batch.tokens)[piece.keys]
        if piece.causal:
            rows.append(queries + 2 * len(keys))
        else:
            rows += [queries + 2 * parts * len(some) for some in cut(range(len(keys)), blocks.key)]
    return max(rows)


def _kernel_buffers(stack: Stack) -> int:
    """What PyTorch's flash attention for CPUs allocates in its backward pass.

    Every thread has a tile of weights and one of their gradients, under autocast also in bf16.
    """
    threads = torch.get_num_threads() if stack.device.type == "cpu" else 0
    return threads * 2 * 256 * 512 * (FULL + 2 * stack.half)


LAYER_BYTES = {
    "vanilla": _vanilla,
    "memory_efficient": _memory_efficient,
    "blockwise": _blockwise,
}
