"""The Agentic Transformer on a cube of devices: the same parameters, of which each process has 1/P.

Every process makes the whole micro-batch, whose raw numbers are few, and turns only its own rows
and columns of it into tokens. Parameters have the serial model's names and order.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call

from agentic.model import AgenticTransformer, InUnits, action_loss
from agentic.tokens import ACTION_READ_AT, Steps, TokenInputs
from parallel import Scope
from parallel.collectives import everywhere, scatter
from parallel.cube import CubeLayer, layer_cuts
from parallel.cube_norm import cube_norm
from parallel.mesh import CUBE, CubeMesh
from parallel.rows import RowLayout
from parallel.sharding import Cut, gathered_spread


class CubeTransformer(InUnits):
    """An `AgenticTransformer` of which this process holds its part.

    Args:
        model: the whole one, the same on all processes; it is left as it is.
        mesh: the cube.
        ring: see `CubeLayer`.

    Raises:
        ValueError: sizes that cannot be cut into equal parts.
    """

    def __init__(self, model: AgenticTransformer, mesh: CubeMesh, *, ring: bool = False) -> None:
        super().__init__(model.spec)
        self.mesh = mesh
        self.cuts = cuts_of(model)
        self._count = model.parameter_count()
        for name, module in model.named_children():  # in their order, which optimisers number
            if name == "layers":
                layers = [CubeLayer(layer, mesh, ring=ring) for layer in model.layers]  # type: ignore[arg-type]
                self.layers = nn.ModuleList(layers)
            else:
                self.add_module(name, self._parts(name, module))
        for name, buffer in model.named_buffers():
            self.register_buffer(name, buffer.clone())
        # Shapes without numbers: how tokens are embedded, given columns of the parameters. In a
        # list, since its parameters are not this module's.
        self._embed = [copy.deepcopy(model.embedding).to("meta")]

    def _parts(self, name: str, module: nn.Module) -> nn.Module:
        """A module without a function, of the parts of another one's parameters."""
        parts = nn.Module()
        for kind, parameter in module.named_parameters():
            *path, leaf = kind.split(".")
            inner = parts
            for step in path:
                if step not in inner._modules:
                    inner.add_module(step, nn.Module())
                inner = inner.get_submodule(step)
            part = self.cuts[f"{name}.{kind}"].part(parameter.detach(), self.mesh).clone()
            inner.register_parameter(leaf, nn.Parameter(part))
        return parts

    def loss(self, steps: Steps, weight_BL: Tensor) -> Tensor:
        """This process's share of `AgenticTransformer.loss`; the cube's sum is the loss."""
        B, L = weight_BL.shape
        group = self.spec.tokens_per_step
        layout = RowLayout.of(
            self.mesh, batch=B, length=L * group, unit=group, block=self._block(B, L * group)
        )
        first = int(weight_BL.any(dim=0).nonzero()[0])
        predicted_RBA = self(self.normalise(steps), layout, first)
        own_R = layout.positions("y", "z")[::group] // group
        real_R = own_R[own_R < L]  # padding stands at the end of blocks, not of the whole
        weight_BR = weight_BL[layout.sequences][:, real_R]
        action_BRA = steps.action[layout.sequences][:, real_R]
        predicted_BRA = predicted_RBA.transpose(0, 1)[:, own_R < L]
        return action_loss(predicted_BRA, action_BRA, weight_BR, weight_BL.sum())

    def forward(self, steps: Steps, layout: RowLayout, first: int) -> Tensor:
        """Actions (R, B, A) of this process's steps, which are cut along y and z.

        Args:
            steps: normalised, whole chains.
            layout: of the tokens.
            first: the serial model's last layer computes none before it; for its dropout.
        """
        group, read_at = self.spec.tokens_per_step, ACTION_READ_AT[self.spec.tokens.layout]
        spread = self._spread()
        x_RBC = self._tokens(steps, layout, spread)
        inner = Scope()
        last = Scope(start=first * group + read_at, stride=group)
        for layer in self.layers:
            scope = last if layer is self.layers[-1] else inner
            if self.spec.layer.recompute and torch.is_grad_enabled():
                x_RBC = torch.utils.checkpoint.checkpoint(
                    layer, x_RBC, layout, scope, use_reentrant=False
                )
            else:
                x_RBC = layer(x_RBC, layout, scope)
        bias_A = everywhere(self.get_parameter("head.bias"), self.mesh, CUBE)
        actions = []
        for block_RBC in layout.split(x_RBC):
            actions.append(_recomputed(self._act, block_RBC[read_at::group], spread, bias_A))
        return torch.cat(actions)

    def parameter_count(self) -> int:
        """Trainable numbers of all processes of the cube together."""
        return self._count

    def _tokens(self, steps: Steps, layout: RowLayout, spread: dict[str, Tensor]) -> Tensor:
        """This process's tokens and columns (R, B, C)."""
        own_R = layout.positions("y")[:: self.spec.tokens_per_step] // self.spec.tokens_per_step
        (embedding,) = self._embed
        inputs = embedding.train(self.training).inputs(steps)
        # Padding repeats the last step: anything finite.
        own = inputs.at(layout.sequences, own_R.clamp(max=steps.valid.shape[1] - 1))
        weights = {
            name.removeprefix("embedding."): weight
            for name, weight in spread.items()
            if name.startswith("embedding.")
        }

        def norm(x_BLGC: Tensor) -> Tensor:
            weight_C, bias_C = weights["norm.weight"], weights["norm.bias"]
            return cube_norm(x_BLGC.flatten(0, 1), weight_C, bias_C, self.mesh).view_as(x_BLGC)

        def embed(own: TokenInputs) -> Tensor:
            return functional_call(embedding, weights, (own, norm))

        return _recomputed(embed, own).transpose(0, 1).contiguous()

    def _act(self, x_RBC: Tensor, spread: dict[str, Tensor], bias_A: Tensor) -> Tensor:
        """Actions of the rows along z; every peer has the products of its columns."""
        normed_RBC = cube_norm(x_RBC, spread["norm.weight"], spread["norm.bias"], self.mesh)
        part_RBA = nn.functional.linear(normed_RBC, spread["head.weight"])
        part_RBA = part_RBA.to(bias_A.dtype)  # sums over peers are never in half precision
        return torch.tanh(scatter(part_RBA, self.mesh, "z", 0) + bias_A)

    def _spread(self) -> dict[str, Tensor]:
        """This process's columns along z of all that is spread over the cube, in one call."""
        parts = {
            name: (self.get_parameter(name), cut)
            for name, cut in self.cuts.items()
            if not name.startswith("layers.") and cut.x is not None
        }
        z, place = self.mesh.sizes["z"], self.mesh.place["z"]
        columns = {}
        for name, whole in gathered_spread(parts, self.mesh).items():
            columns[name] = whole.chunk(z, int(self.cuts[name].x or 0))[place]
        return columns

    def _block(self, batch: int, length: int) -> int:
        """Rows of a block, as the serial layer's blocks of queries."""
        return (
            self.spec.block_settings()
            .sizes(
                self.spec.layer_size(),
                batch=batch,
                sequence=length,
                element_bytes=4,
                device=self.mesh.device,
            )
            .query
        )


def cuts_of(model: AgenticTransformer) -> dict[str, Cut]:
    """How every parameter is cut, in their order: what is not a layer's, in columns over all."""
    inner = layer_cuts()
    cuts = {}
    for name, _ in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if name.startswith("layers."):
            cuts[name] = inner[name.split(".", 2)[2]]
        elif name == "head.bias":  # as many numbers as an action has: all have all of them
            cuts[name] = Cut()
        else:
            by_rows = isinstance(model.get_submodule(module), nn.Embedding) or module == "head"
            dim = 1 if by_rows else 0
            cuts[name] = Cut(y=dim, z=dim, x=dim)
    return cuts


def _recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The function's value, of which only the arguments are kept for the backward pass."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)
