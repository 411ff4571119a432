"""How much memory a training step will take, said before it starts."""

from dataclasses import dataclass

from parallel.sublayers import LayerSize


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by kind; `total` is what the step needs at its peak, the framework itself aside."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def plan(
    *,
    parameters: int,
    layers: int,
    size: LayerSize,
    kind: str,
    recompute: bool,
    batch: int,
    sequence: int,
    element_bytes: int,
) -> MemoryPlan:
    """Estimates one forward and backward pass with AdamW in fp32.

    A layer keeps about 8 width-D tensors and one of the feed-forward's width for its backward
    pass, `vanilla` also the softmax and the mask. With `recompute` only the inputs are kept and
    one layer's worth is alive at a time. (Counted from the operations in `parallel.layers`.)

    Args:
        parameters: trainable numbers.
        layers: how many.
        size: their widths.
        kind: a key of `parallel.layers.LAYERS`.
        recompute: see `TransformerLayer`.
        batch: B of a micro-batch.
        sequence: S, tokens of each.
        element_bytes: of an activation, 4 (fp32) or 2 (bf16 autocast).
    """
    token = batch * sequence * size.width * element_bytes
    kept = 8 * token + token * size.feed_forward // size.width
    if kind == "vanilla":
        kept += batch * size.heads * sequence**2 * (element_bytes + 1)
    activations = layers * token + kept if recompute else layers * kept
    return MemoryPlan(
        parameters=4 * parameters,
        gradients=4 * parameters,
        optimizer=8 * parameters,
        activations=activations,
    )
