"""How a parameter is cut over a cube, so that every process holds 1/P of it.

A part is a plain tensor; only a checkpoint sees it as a DTensor. Where one dimension is cut along
several axes, y is the outermost and x the innermost.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel.collectives import all_gather, gather, joined
from parallel.mesh import CUBE, CubeMesh


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which dimension is cut along each axis; None: none is, all peers hold the same.

    Attributes:
        y, z, x: the dimension.
        stack: the rows are so many matrices, one below the other, and each is cut alike; a part
            then has one dimension more in front, which the others count.
    """

    y: int | None = None
    z: int | None = None
    x: int | None = None
    stack: int = 1

    @property
    def dims(self) -> dict[str, int | None]:
        """The dimension of every axis, the outermost first."""
        return {"y": self.y, "z": self.z, "x": self.x}

    def part(self, whole: Tensor, mesh: CubeMesh) -> Tensor:
        """This process's part of the whole parameter."""
        part = whole if self.stack == 1 else whole.unflatten(0, (self.stack, -1))
        for axis, dim in self.dims.items():
            if dim is not None:
                part = part.unflatten(dim, (mesh.sizes[axis], -1)).select(dim, mesh.place[axis])
        return part.contiguous()

    def whole(self, part: Tensor, mesh: CubeMesh) -> Tensor:
        """The whole parameter in its own shape; all of the cube take part."""
        for axis, dim in reversed(self.dims.items()):
            if dim is not None:
                part = joined(all_gather(part, mesh, axis), dim)
        return part if self.stack == 1 else part.flatten(0, 1)

    def dtensor(self, part: Tensor, mesh: CubeMesh) -> DTensor:
        """The same memory as a DTensor on the mesh (y, z, x); a stack keeps its dimension."""
        placements = [Replicate() if dim is None else Shard(dim) for dim in self.dims.values()]
        return DTensor.from_local(part, mesh.cube, placements, run_check=False)


SPREAD = Cut(y=0, z=0, x=0)  # a vector, over all processes


def gathered_spread(parts: Mapping[str, tuple[Tensor, Cut]], mesh: CubeMesh) -> dict[str, Tensor]:
    """Parameters of which one dimension is cut over all processes, whole, in one call.

    Every process may use what it likes of them: its gradients are summed over the cube.
    """
    flat = gather(torch.cat([part.flatten() for part, _ in parts.values()]), mesh, CUBE, 0)
    pieces = flat.unflatten(0, (mesh.sizes[CUBE], -1)).split(
        [part.numel() for part, _ in parts.values()], dim=1
    )
    whole = {}
    for piece, (name, (part, cut)) in zip(pieces, parts.items(), strict=True):
        assert cut.x is not None, "not spread over all processes"
        assert cut.x == cut.y == cut.z
        whole[name] = joined(piece.unflatten(1, part.shape), cut.x)
    return whole
