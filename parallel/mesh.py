"""The cube of devices: which processes share an axis, and what a lost one looks like.

Three axes share the work of one model (arXiv:2105.14450, corrected): x cuts rows (sequences, or
positions of a sequence) and stores weights in parts; y and z cut the width, in turns. A fourth one,
dp, repeats the cube on other data. Ranks count dp slowest, then y, z, and x fastest, so that
neighbours on x are neighbours on a machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.world import PeerLost, World

AXES = ("dp", "y", "z", "x")
CUBE = "cube"  # all ranks that share one copy of the model: y, z and x together


class CubeMesh:
    """This process's place among dp · y · z · x processes, with a group for every axis.

    Args:
        x, y, z: sides of the cube, 1 or more.
        dp: copies of the cube, on different data.
        device: "cpu" (gloo) or "cuda" (nccl).
        timeout: seconds that a collective may take; None: as the process group was told (a backend
            that only pretends to send has none).
        world: names the lost peer; None: only its axis can be named.

    Raises:
        ValueError: a side below 1, or sides that do not fit the number of processes.
    """

    def __init__(
        self,
        x: int = 1,
        y: int = 1,
        z: int = 1,
        *,
        dp: int = 1,
        device: str = "cpu",
        timeout: float | None = 60.0,
        world: World | None = None,
    ) -> None:
        self.shape = {"dp": dp, "y": y, "z": z, "x": x}
        for axis, side in self.shape.items():
            if side < 1:
                raise ValueError(f"cube: got {axis}={side}, expected 1 or more")
        count = dp * y * z * x
        processes = dist.get_world_size() if dist.is_initialized() else 1
        if count != processes:
            raise ValueError(
                f"cube: got dp={dp}, x={x}, y={y}, z={z} for {processes} process(es), expected "
                f"{count} process(es)"
            )
        self.device = torch.device(device)
        self.world = world
        self.sizes = {**self.shape, CUBE: y * z * x}
        self.place = dict.fromkeys(self.sizes, 0)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._mesh: DeviceMesh | None = None
        if count > 1:
            self._mesh = init_device_mesh(device, tuple(self.shape.values()), mesh_dim_names=AXES)
            flat = init_device_mesh(device, (dp, y * z * x), mesh_dim_names=("dp", CUBE))
            for axis in self.sizes:
                mesh = flat if axis == CUBE else self._mesh
                self._groups[axis] = mesh.get_group(axis)
                # The groups of a mesh do not inherit the timeout of the whole.
                if timeout is not None:
                    self._groups[axis].set_timeout(timedelta(seconds=timeout))
                self.place[axis] = mesh.get_local_rank(axis)

    def __deepcopy__(self, memo: dict) -> "CubeMesh":
        return self  # a copied module stays where it is

    def group(self, axis: str) -> dist.ProcessGroup:
        """The processes along one axis through this one."""
        return self._groups[axis]

    def peers(self, axis: str) -> list[int]:
        """Their ranks."""
        return dist.get_process_group_ranks(self._groups[axis])

    @property
    def cube(self) -> DeviceMesh:
        """The axes y, z, x as PyTorch's mesh, for DTensors."""
        assert self._mesh is not None
        return self._mesh["y", "z", "x"]

    @contextmanager
    def guard(self, axis: str) -> Iterator[None]:
        """Turns the failure of a collective on this axis into `PeerLost` with names."""
        try:
            yield
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            peers = [rank for rank in self.peers(axis) if rank != dist.get_rank()]
            if self.world is None:
                told = f"lost one of rank(s) {peers} on axis {axis}"
            else:
                told = self.world.blame(axis, peers)
            raise PeerLost(f"{told}: {reason}") from error
