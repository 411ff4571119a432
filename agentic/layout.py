"""A trainer's state in parts: the same tree in every process, each with its part of the tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parallel.mesh import CubeMesh
from parallel.sharding import Cut

WEIGHTS = ("model", "averaged", "optimizer")  # the keys of a state that hold the model's tensors

Place = tuple[str | int, ...]  # the keys that lead to a tensor, from the root of a state


@dataclass(frozen=True)
class Layout:
    """How a model lies on the cube of which this process is one.

    Attributes:
        mesh: the processes. Every copy of the cube holds the same.
        cuts: of each parameter by its name in the serial model, in the optimizer's order. What has
            no name here, as a buffer, every process holds whole.
    """

    mesh: CubeMesh
    cuts: dict[str, Cut]

    def cut(self, place: Place) -> Cut:
        """How the tensor at `place` is cut; an optimizer's moments are cut like their parameter.

        Raises:
            ValueError: moments of a parameter that is not there.
        """
        if place[:2] != ("optimizer", "state"):
            return self.cuts.get(name(place[1:]), Cut())
        number = int(place[2])
        if number >= len(self.cuts):
            raise ValueError(f"got {name(place)}, expected {len(self.cuts)} parameters")
        return list(self.cuts.values())[number]

    def part(self, place: Place, whole: Tensor) -> Tensor:
        """This process's part of the tensor at `place`.

        Raises:
            ValueError: its shape cannot be cut so.
        """
        try:
            return self.cut(place).part(whole, self.mesh)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"got {name(place)} of shape {tuple(whole.shape)}, expected one that can be cut "
                f"over {self.mesh.shape}"
            ) from error

    def whole(self, place: Place, part: Tensor) -> Tensor:
        """The whole tensor at `place`; all processes of the cube take part."""
        return self.cut(place).whole(part, self.mesh)


def name(place: Place) -> str:
    """The place as a name."""
    return ".".join(map(str, place))


def changed(state: dict[str, Any], change: Callable[[Place, Tensor], Tensor]) -> dict[str, Any]:
    """The same state with `change(place, tensor)` for every weight and moment.

    A tensor without dimensions, as an optimizer's count of steps, stays.
    """

    def walk(tree: Any, place: Place) -> Any:
        if isinstance(tree, dict):
            return {key: walk(value, (*place, key)) for key, value in tree.items()}
        return change(place, tree) if isinstance(tree, Tensor) and tree.ndim else tree

    return {key: walk(value, (key,)) if key in WEIGHTS else value for key, value in state.items()}
