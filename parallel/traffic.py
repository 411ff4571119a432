"""Counts what a process receives from others, collective by collective.

Bytes are those of the best ring, so that they depend on what is asked for and not on the backend.
Each of p processes receives of a part n that all gather (p - 1) n; of a whole m that is summed and
scattered (p - 1) m / p; of m that is summed for all 2 (p - 1) m / p; of an exchange all parts but
its own; else what the call delivers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.mesh import AXES, CUBE, CubeMesh


@dataclass(frozen=True, kw_only=True)
class Line:
    """One kind of collective on one kind of group.

    Attributes:
        axis: of the mesh; "" for a group that is none of its axes.
        size: processes of the group.
        kind: "all-gather", "all-to-all", ...
        calls: how many.
        bytes: received by this process; a fraction where a sum does not divide evenly.
    """

    axis: str
    size: int
    kind: str
    calls: int
    bytes: float


class Traffic(TorchDispatchMode):
    """A context that counts the collectives of this process, backward passes among them.

    It sees PyTorch's own as well: DTensor's, tensor parallelism's, FSDP's, DDP's. What is counted
    does not depend on the tensors' device, and the backend may be one that only pretends.

    Args:
        mesh: names the axes; None: groups are told by their size. An axis that alone is the whole
            cube takes what goes over the cube.

    Raises:
        NotImplementedError: inside, a collective that it has no rule for.
    """

    def __init__(self, mesh: CubeMesh | None = None) -> None:
        super().__init__()
        self._axes: dict[str, str] = {}
        if mesh is not None:
            alone = [axis for axis in AXES[1:] if mesh.sizes[axis] == mesh.sizes[CUBE]]
            for axis in mesh.sizes:
                if mesh.sizes[axis] > 1:
                    name = alone[0] if axis == CUBE and alone else axis
                    self._axes[mesh.group(axis).group_name] = name
        self._counts: dict[tuple[str, int, str], tuple[int, float]] = {}

    @property
    def lines(self) -> list[Line]:
        """Everything so far, sorted by axis and kind."""
        return [
            Line(axis=axis, size=size, kind=kind, calls=calls, bytes=received)
            for (axis, size, kind), (calls, received) in sorted(self._counts.items())
        ]

    def bytes(self, axis: str | None = None, kind: str | None = None) -> float:
        """Bytes received, on all axes or one, by all kinds or one."""
        return sum(line.bytes for line in self._chosen(axis, kind))

    def calls(self, axis: str | None = None, kind: str | None = None) -> int:
        """Calls, likewise."""
        return sum(line.calls for line in self._chosen(axis, kind))

    def _chosen(self, axis: str | None, kind: str | None) -> Iterable[Line]:
        return (
            line for line in self.lines if axis in (None, line.axis) and kind in (None, line.kind)
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Runs every operation, and counts those that are collectives."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as operations on parts
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {}) | {_RESULT: result}
            self._count(func._schema.name, given)
        return result

    def _count(self, operation: str, given: dict[str, Any]) -> None:
        if operation in _LOCAL:
            return
        if operation not in _OPERATIONS:
            raise NotImplementedError(f"traffic: no rule for {operation}")
        kind, sent, delivered = _OPERATIONS[operation]
        group = _group(given)
        key = self._axes.get(group.group_name, ""), group.size(), kind
        calls, received = self._counts.get(key, (0, 0))
        received += _received(kind, given[sent], given[delivered], given, group)
        self._counts[key] = calls + 1, received


def _received(
    kind: str, sent: Any, delivered: Any, given: dict[str, Any], group: dist.ProcessGroup
) -> float:
    """Bytes of one call."""
    p, rank = group.size(), group.rank()
    root = given.get("root_rank", given.get("src"))  # both count within the group
    match kind:
        case "all-gather":
            return _bytes(delivered) - _bytes(sent)
        case "reduce-scatter":
            return _bytes(sent) - _bytes(delivered)
        case "all-reduce":
            return 2 * (p - 1) * _bytes(sent) / p
        case "reduce":  # a chain to the root: all but its first receive; the mean of all
            return (p - 1) * _bytes(sent) / p
        case "all-to-all":
            if isinstance(delivered, list):
                return _bytes(delivered) - _bytes(delivered[rank])
            parts = given.get("output_split_sizes") or [1] * p
            return _bytes(delivered) - _bytes(delivered) * parts[rank] / max(sum(parts), 1)
        case "broadcast" | "scatter":
            return 0 if root == rank else _bytes(delivered)
        case "gather":
            return _bytes(delivered) - _bytes(sent) if root == rank else 0
        case "receive":
            return _bytes(delivered)
        case _:
            assert kind in ("send", "barrier"), kind
            return 0


def _bytes(tensors: Any) -> int:
    leaves = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def _group(given: dict[str, Any]) -> dist.ProcessGroup:
    """Operations name their group, hold it, or hold it in a box of TorchScript."""
    group = given["process_group"] if "process_group" in given else given["group_name"]
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group


_RESULT = "result"
_LOCAL = (
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "c10d::check_for_nan",
)

# Of every operation its kind, the argument that it sends, and that in which it delivers.
_OPERATIONS = {
    "c10d::_allgather_base_": ("all-gather", "input_tensor", "output_tensor"),
    "c10d::allgather_": ("all-gather", "input_tensors", "output_tensors"),
    "c10d::allgather_coalesced_": ("all-gather", "input_list", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", "inputs", "outputs"),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", "input", _RESULT),
    "_c10d_functional::all_gather_into_tensor_out": ("all-gather", "input", _RESULT),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all-gather", "inputs", _RESULT),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", "input_tensor", "output_tensor"),
    "c10d::reduce_scatter_": ("reduce-scatter", "input_tensors", "output_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", "inputs", "outputs"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", "input", _RESULT),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce-scatter", "input", _RESULT),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce-scatter", "inputs", _RESULT),
    "c10d::allreduce_": ("all-reduce", "tensors", "tensors"),
    "c10d::allreduce_coalesced_": ("all-reduce", "tensors", "tensors"),
    "_c10d_functional::all_reduce": ("all-reduce", "input", _RESULT),
    "_c10d_functional::all_reduce_": ("all-reduce", "input", _RESULT),
    "_c10d_functional::all_reduce_coalesced": ("all-reduce", "inputs", _RESULT),
    "_c10d_functional::all_reduce_coalesced_": ("all-reduce", "inputs", _RESULT),
    "c10d::alltoall_": ("all-to-all", "input_tensors", "output_tensors"),
    "c10d::alltoall_base_": ("all-to-all", "input", "output"),
    "_c10d_functional::all_to_all_single": ("all-to-all", "input", _RESULT),
    "_dtensor::shard_dim_alltoall": ("all-to-all", "input", _RESULT),
    "c10d::broadcast_": ("broadcast", "tensors", "tensors"),
    "_c10d_functional::broadcast": ("broadcast", "input", _RESULT),
    "_c10d_functional::broadcast_": ("broadcast", "input", _RESULT),
    "c10d::reduce_": ("reduce", "tensors", "tensors"),
    "c10d::gather_": ("gather", "input_tensors", "output_tensors"),
    "c10d::scatter_": ("scatter", "input_tensors", "output_tensors"),
    "c10d::send": ("send", "tensors", "tensors"),
    "_c10d_functional::isend": ("send", "tensor", _RESULT),
    "c10d::recv_": ("receive", "tensors", "tensors"),
    "c10d::recv_any_source_": ("receive", "tensors", "tensors"),
    "_c10d_functional::irecv": ("receive", "tensor", _RESULT),
    "c10d::barrier": ("barrier", "tensor", "tensor"),
    "c10d::monitored_barrier_": ("barrier", "tensor", "tensor"),
}
