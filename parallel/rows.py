"""Which rows of a batch of sequences a process of the cube holds.

Rows are first cut along x: whole sequences where x divides their number, else every sequence into
2·x stripes, of which peer i takes stripe i and the i-th from the end ("zig-zag"), so that causal
attention is the same work for all. What a peer on x holds is its slab; a slab is cut into blocks,
and every block along y (or z) into consecutive parts: gathered, they are the block again.

Tensors of rows have the position as their first and the sequence as their second dimension.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.mesh import CubeMesh


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The rows of one process, for sequences padded on the right to `padded` positions.

    Attributes:
        mesh: the cube.
        sequences: those of this process.
        blocks: of positions, in the order in which the process holds them, all of one length.
        length: positions of a sequence without padding.
        padded: with it.
        stripes: parts of a sequence; more than one: x cuts sequences.
    """

    mesh: CubeMesh
    sequences: slice
    blocks: tuple[range, ...]
    length: int
    padded: int
    stripes: int

    @classmethod
    def of(
        cls, mesh: CubeMesh, *, batch: int, length: int, unit: int = 1, block: int = 2**31
    ) -> "RowLayout":
        """For `batch` sequences of `length` positions.

        Args:
            mesh: the cube.
            batch: sequences.
            length: positions of each, before padding.
            unit: positions that stay together.
            block: most positions of a block, before they are rounded up.
        """
        x, place = mesh.sizes["x"], mesh.place["x"]
        cuts_batch = batch % x == 0
        stripes = 1 if cuts_batch else 2 * x
        fine = unit * mesh.sizes["y"] * mesh.sizes["z"]
        count = -(-length // (stripes * block))  # blocks of a stripe
        size = -(-length // (stripes * count * fine)) * fine
        own = [0] if cuts_batch else [place, stripes - 1 - place]
        share = batch // x if cuts_batch else batch
        first = place * share if cuts_batch else 0
        starts = [(stripe * count + k) * size for stripe in own for k in range(count)]
        return cls(
            mesh=mesh,
            sequences=slice(first, first + share),
            blocks=tuple(range(start, start + size) for start in starts),
            length=length,
            padded=stripes * count * size,
            stripes=stripes,
        )

    def part(self, block: range, *axes: str) -> range:
        """What this process holds of a block that is cut along `axes`, the outermost first."""
        for axis in axes:
            size = len(block) // self.mesh.sizes[axis]
            block = block[self.mesh.place[axis] * size : (self.mesh.place[axis] + 1) * size]
        return block

    def positions(self, *axes: str) -> Tensor:
        """Positions of this process's rows, in order, where blocks are cut along `axes`."""
        parts = [self.part(block, *axes) for block in self.blocks]
        return torch.cat([torch.arange(part.start, part.stop) for part in parts])

    def own(self, x_BSD: Tensor) -> Tensor:
        """This process's rows and columns (R, B, C) of whole sequences, as a layer takes them.

        Rows are cut along y and columns along z; beyond the sequences' length stand zeros. A loss
        is each process's own, of its own rows without the padding, and what gradients belong to is
        the sum of all processes' losses.
        """
        padded_BSD = F.pad(x_BSD, (0, 0, 0, self.padded - x_BSD.shape[1]))
        x_RBD = padded_BSD[self.sequences][:, self.positions("y")].transpose(0, 1)
        z = self.mesh.sizes["z"]
        return x_RBD.chunk(z, dim=2)[self.mesh.place["z"]].contiguous()

    def split(self, x_RB: Tensor) -> tuple[Tensor, ...]:
        """Rows of a process, block by block."""
        return x_RB.split(len(x_RB) // len(self.blocks))

    @property
    def kept_on_x(self) -> bool:
        """Whether a sequence's rows are all in one slab."""
        return self.stripes == 1

    @property
    def slab(self) -> tuple[range, ...]:
        """The stripes of this process's slab."""
        return self.slab_of(self.mesh.place["x"])

    def slab_of(self, place: int) -> tuple[range, ...]:
        """The stripes of the slab of a peer on x."""
        own = [0] if self.kept_on_x else [place, self.stripes - 1 - place]
        size = self.padded // self.stripes
        return tuple(range(stripe * size, (stripe + 1) * size) for stripe in own)

    def join_z(self, x_ZR: Tensor) -> Tensor:
        """(z, rows, ...) parts of all peers on z as the slab's rows in order."""
        return x_ZR.unflatten(1, (len(self.blocks), -1)).movedim(0, 1).flatten(0, 2)

    def cut_z(self, x_S: Tensor) -> Tensor:
        """The reverse of `join_z`."""
        z = self.mesh.sizes["z"]
        return x_S.unflatten(0, (len(self.blocks), z, -1)).movedim(1, 0).flatten(1, 2)

    def join_x(self, x_XS: Tensor) -> Tensor:
        """(x, slab, ...) slabs of all peers on x as all positions in order."""
        front, back = x_XS.unflatten(1, (2, -1)).unbind(1)
        return torch.cat([front.flatten(0, 1), back.flip(0).flatten(0, 1)])

    def cut_x(self, x_S: Tensor) -> Tensor:
        """The reverse of `join_x`."""
        front, back = x_S.unflatten(0, (2, self.mesh.sizes["x"], -1)).unbind(0)
        return torch.stack([front, back.flip(0)], dim=1).flatten(1, 2)
