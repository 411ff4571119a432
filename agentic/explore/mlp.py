"""Several small multilayer perceptrons of one shape, evaluated together.

At the sizes used for collection (two layers of 64 or 128) a CPU spends as long on starting an
operation as on running it. Twin critics, and the different actors of parallel environments, are
therefore one batched matrix product each, and every network's parameters are one row of one
tensor: an optimiser step, a target update or a snapshot is then a single operation.

Axes: N networks, B batch, I inputs, O outputs, P parameters.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


class MlpEnsemble:
    """`count` ReLU perceptrons whose parameters are the rows of `vector` (N, P) float32.

    Args:
        count: number of networks N.
        sizes: widths, input first and output last.
        normalise: layer normalisation (without gain and bias) after the first layer.
    """

    def __init__(self, count: int, sizes: Sequence[int], normalise: bool = False) -> None:
        self.sizes = tuple(sizes)
        self.normalise = normalise
        self.vector = torch.zeros(count, sum(i * o + o for i, o in pairwise(self.sizes)))
        self.layers = self._layers()

    def initialise(self, generator: torch.Generator) -> None:
        """Draws all parameters uniformly in +-1/sqrt(inputs), as `torch.nn.Linear` does."""
        for weight, bias in self.layers:
            bound = weight.shape[1] ** -0.5
            for tensor in (weight, bias):
                tensor.detach().uniform_(-bound, bound, generator=generator)

    def __call__(self, x_NBI: Tensor, only: int | None = None) -> Tensor:
        """Outputs (N, B, O).

        Args:
            x_NBI: inputs, float32.
            only: evaluate this network alone, N = 1, with its parameters as constants: gradients
                then reach the inputs only.
        """
        layers = self.layers
        if only is not None:
            rows = slice(only, only + 1)
            layers = [(w.detach()[rows], b.detach()[rows]) for w, b in layers]
        h = x_NBI
        for depth, (weight, bias) in enumerate(layers):
            h = torch.baddbmm(bias, h, weight)
            if depth == 0 and self.normalise:
                h = functional.layer_norm(h, h.shape[-1:])
            if depth < len(layers) - 1:
                h = h.relu()
        return h

    def backward(self, loss: Tensor) -> None:
        """Sets `vector.grad` to the gradient of a scalar; nothing accumulates."""
        leaves = [tensor for layer in self.layers for tensor in layer]
        parts = [part.flatten(1) for part in torch.autograd.grad(loss, leaves)]
        if self.vector.grad is None:
            self.vector.grad = torch.empty_like(self.vector)
        torch.cat(parts, dim=1, out=self.vector.grad)

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weights (N, I, O) and biases (N, 1, O): autograd leaves that share `vector`'s memory."""
        count, start, layers = len(self.vector), 0, []
        for inputs, outputs in pairwise(self.sizes):
            pair = []
            for shape in ((inputs, outputs), (1, outputs)):
                stop = start + shape[0] * shape[1]
                part = self.vector[:, start:stop].view(count, *shape)
                pair.append(part.detach().requires_grad_())
                start = stop
            layers.append((pair[0], pair[1]))
        return layers
