"""Gradients of the sublayers for a block of rows, written out.

Autograd would compute two matrix products more for every block, and would round a block's part of
a bias's gradient before it is summed. Sums over blocks are in fp32 (fp64 for fp64). Axis letters: B
batch, R rows of the block, N all rows of all sequences, D width, F feed-forward width, H heads, K
head width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.sublayers import LayerSize, Masks, Weights

aten = torch.ops.aten


def sum_dtype(x: Tensor) -> torch.dtype:
    """What gradients are summed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class WeightGradients:
    """Sums the gradients of a layer's weights over blocks.

    Args:
        weights: the layer's.
        wanted: which of them have a gradient.
    """

    def __init__(self, weights: Weights, wanted: Sequence[bool]) -> None:
        self.weights = weights
        self._sums: dict[str, Tensor] = {
            name: torch.zeros_like(weight, dtype=sum_dtype(weight))
            for name, weight, wants in zip(Weights._fields, weights, wanted, strict=True)
            if wants
        }

    def total(self) -> list[Tensor | None]:
        """In the order and the dtypes of the weights; None for the frozen ones."""
        found = [self._sums.get(name) for name in Weights._fields]
        return [
            None if grad is None else grad.to(weight.dtype)
            for grad, weight in zip(found, self.weights, strict=True)
        ]

    def finish(
        self,
        x_BRD: Tensor,
        attention_BHRK: Tensor,
        masks: Masks | None,
        dy_BRD: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the attention output, for `sublayers.finish` of the same rows."""
        w = self.weights
        attention_BRD = attention_BHRK.transpose(1, 2).flatten(2)
        branch_BRD = F.linear(attention_BRD, w.output_weight, w.output_bias)
        x_BRD = x_BRD + (branch_BRD if masks is None else masks.drop(0, branch_BRD))
        normed_BRD, *moments = self._normed("norm_feed_forward", x_BRD)
        hidden_BRF = F.relu(F.linear(normed_BRD, w.up_weight, w.up_bias))

        dbranch_BRD = dy_BRD.to(branch_BRD.dtype)
        if masks is not None:
            dbranch_BRD = masks.drop(1, dbranch_BRD)
        dhidden_BRF = self._linear("down", dbranch_BRD, hidden_BRF)
        aten.threshold_backward.grad_input(dhidden_BRF, hidden_BRF, 0, grad_input=dhidden_BRF)
        dnormed_BRD = self._linear("up", dhidden_BRF, normed_BRD)
        dx_BRD = self._norm("norm_feed_forward", dnormed_BRD, x_BRD, *moments).add_(dy_BRD)
        dbranch_BRD = dx_BRD.to(branch_BRD.dtype)
        if masks is not None:
            dbranch_BRD = masks.drop(0, dbranch_BRD)
        dattention_BRD = self._linear("output", dbranch_BRD, attention_BRD)
        return dx_BRD, dattention_BRD.unflatten(2, attention_BHRK.shape[1::2]).transpose(1, 2)

    def query(self, size: LayerSize, x_BRD: Tensor, dq_BHRK: Tensor) -> Tensor:
        """Gradient of x, for `sublayers.query`."""
        return self._project(x_BRD, [dq_BHRK], slice(0, size.width))

    def key_value(self, size: LayerSize, x_BRD: Tensor, dk_BHRK: Tensor, dv_BHRK: Tensor) -> Tensor:
        """Gradient of x, for `sublayers.key_value`."""
        return self._project(x_BRD, [dk_BHRK, dv_BHRK], slice(size.width, 3 * size.width))

    def _project(self, x_BRD: Tensor, grads: Sequence[Tensor], part: slice) -> Tensor:
        normed_BRD, *moments = self._normed("norm_attention", x_BRD)
        dout_BRE = torch.cat([grad.transpose(1, 2).flatten(2) for grad in grads], dim=2)
        dnormed_BRD = self._linear("query_key_value", dout_BRE, normed_BRD, part)
        return self._norm("norm_attention", dnormed_BRD, x_BRD, *moments)

    def _linear(
        self, name: str, dout_BRE: Tensor, x_BRD: Tensor, part: slice = slice(None)
    ) -> Tensor:
        """Gradient of x, for a linear map with these rows of its weight."""
        dout_NE, x_ND = dout_BRE.flatten(0, 1), x_BRD.flatten(0, 1)
        dweight_ED = self._sums.get(f"{name}_weight")
        if dweight_ED is not None and dweight_ED.dtype == dout_NE.dtype:
            dweight_ED[part].addmm_(dout_NE.T, x_ND)
        elif dweight_ED is not None:
            dweight_ED[part] += dout_NE.T @ x_ND
        dbias_E = self._sums.get(f"{name}_bias")
        if dbias_E is not None:
            dbias_E[part] += dout_NE.sum(0, dtype=dbias_E.dtype)
        weight_ED = getattr(self.weights, f"{name}_weight")[part]
        return (dout_NE @ weight_ED).unflatten(0, dout_BRE.shape[:2])

    def _normed(self, name: str, x_BRD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer norm in x's dtype, with mean and reciprocal deviation of every row."""
        wide = sum_dtype(x_BRD)
        weight_D, bias_D = (getattr(self.weights, f"{name}_{what}") for what in ("weight", "bias"))
        normed_BRD, mean, deviation = aten.native_layer_norm(
            x_BRD.to(wide), weight_D.shape, weight_D.to(wide), bias_D.to(wide), 1e-5
        )
        return normed_BRD.to(x_BRD.dtype), mean, deviation

    def _norm(
        self, name: str, dnormed_BRD: Tensor, x_BRD: Tensor, mean: Tensor, deviation: Tensor
    ) -> Tensor:
        """Gradient of x in fp32 or fp64, for the layer norm."""
        wide = sum_dtype(x_BRD)
        weight_D, bias_D = (getattr(self.weights, f"{name}_{what}") for what in ("weight", "bias"))
        wanted = [True, f"{name}_weight" in self._sums, f"{name}_bias" in self._sums]
        dx_BRD, dweight_D, dbias_D = aten.native_layer_norm_backward(
            dnormed_BRD.to(wide),
            x_BRD.to(wide),
            weight_D.shape,
            mean,
            deviation,
            weight_D.to(wide),
            bias_D.to(wide),
            wanted,
        )
        for what, grad_D in (("weight", dweight_D), ("bias", dbias_D)):
            if f"{name}_{what}" in self._sums:
                self._sums[f"{name}_{what}"] += grad_D
        return dx_BRD
