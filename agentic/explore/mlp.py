"""Several small multilayer perceptrons of one shape, evaluated together.

At the sizes used for collection (two layers of 64 or 128) a CPU spends as long on starting an
operation as on running it. Twin critics, and the different actors of parallel environments, are
therefore one batched matrix product each, and every network's parameters are one row of one
tensor: an optimiser step, a target update or a snapshot is then a single operation.

Axes: N networks, B batch, I inputs, O outputs, P parameters.
"""

from __future__ import annotations

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

    def __call__(
        self, x_NBI: Tensor, networks: slice = slice(None), frozen: bool = False
    ) -> Tensor:
        """Outputs (N, B, O) of the chosen networks; `frozen` stops gradients to parameters."""
        h = x_NBI
        for depth, (weight, bias) in enumerate(self.layers):
            if frozen:
                weight, bias = weight.detach(), bias.detach()
            h = torch.baddbmm(bias[networks], h, weight[networks])
            if depth == 0 and self.normalise:
                h = functional.layer_norm(h, h.shape[-1:])
            if depth < len(self.layers) - 1:
                h = h.relu()
        return h

    def gradient(self, loss: Tensor) -> Tensor:
        """Gradient (N, P) of a scalar with respect to `vector`."""
        leaves = [tensor for layer in self.layers for tensor in layer]
        return torch.cat([g.flatten(1) for g in torch.autograd.grad(loss, leaves)], dim=1)

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
