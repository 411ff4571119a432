"""What a layer on a cube receives from other processes, and which shape of the cube receives least.

Counted are numbers that a process receives in the best ring (see `parallel.traffic`), per layer and
step of `parallel.cube.CubeLayer`. It gathers what it needs, and keeps no gathered rows or weights
for the backward pass, which therefore receives twice what the forward pass does: everything once
more, and the gradients. Sums of gradients, vectors and moments are in fp32 whatever the rest is.
P processes make up a cube.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from parallel.memory import FULL
from parallel.mesh import CUBE
from parallel.sublayers import LayerSize


class Shape(NamedTuple):
    """Sides of a cube."""

    x: int
    y: int
    z: int

    @property
    def processes(self) -> int:
        """How many make up the cube."""
        return self.x * self.y * self.z

    def __str__(self) -> str:
        return f"{self.x}x{self.y}x{self.z}"


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of what a layer receives.

    Attributes:
        what: is sent.
        axis: along which; an axis that alone is the whole cube takes what goes over the cube.
        forward: numbers received in the forward pass.
        backward: in the backward pass.
        full: in fp32, however the rest is computed.
    """

    what: str
    axis: str
    forward: float
    backward: float
    full: bool = False

    def bytes(self, element_bytes: int) -> float:
        """Both passes."""
        element_bytes = max(element_bytes, FULL) if self.full else element_bytes
        return (self.forward + self.backward) * element_bytes


def layer_terms(
    shape: Shape, size: LayerSize, *, batch: int, tokens: int, unit: int = 1, ring: bool = False
) -> list[Term]:
    """All that one layer receives in a step; where nothing is sent, zeros.

    Args:
        shape: of the cube.
        size: of the layer.
        batch: sequences of all processes of the cube.
        tokens: of each sequence.
        unit: tokens that stay together.
        ring: whether keys and values go round a ring along x, where x cuts sequences.
    """
    (x, y, z), P = shape, shape.processes
    rows = padded(shape, batch, tokens, unit) * batch
    narrow, wide = rows * size.width / P, rows * size.feed_forward / P
    cuts_sequences = batch % x != 0
    moments = 2 * rows / (x * y)  # of one norm: two numbers for every row of the slab
    whole = next((axis for axis in "yzx" if getattr(shape, axis) == P), CUBE)

    def term(what: str, axis: str, forward: float, backward: float, full: bool = False) -> Term:
        return Term(what=what, axis=axis, forward=forward, backward=backward, full=full)

    def rows_of(what: str, axis: str, forward: float) -> Term:
        return term(what, axis, forward, 2 * forward)

    slab, others = 2 * (z - 1) * narrow, 2 * cuts_sequences * (x - 1) * z * narrow
    matrices, vectors = (x - 1) * size.matrices / P, (P - 1) * size.vectors / P
    return [
        rows_of("rows to queries, keys, values", "y", (y - 1) * narrow),
        rows_of("queries, keys, values", "z", 3 * (z - 1) * narrow),
        term("keys, values of the slab", "z", slab, slab),
        term("gradients of keys, values of the slab", "z", 0, slab, full=True),
        term("keys, values of other slabs", "x", others, others),
        # In a ring they have one way more, home.
        term(
            "gradients of keys, values of other slabs",
            "x",
            0,
            others * x / (x - 1) if ring and x > 1 else others,
            full=True,
        ),
        rows_of("rows to attention's output map", "z", (z - 1) * narrow),
        rows_of("attention's output map", "y", (y - 1) * narrow),
        rows_of("rows to feed-forward", "y", (y - 1) * narrow),
        rows_of("feed-forward's hidden rows", "z", (z - 1) * wide),
        rows_of("hidden rows to the second map", "z", (z - 1) * wide),
        rows_of("feed-forward's output", "y", (y - 1) * narrow),
        term("matrices", "x", matrices, matrices),
        term("gradients of matrices", "x", 0, matrices, full=True),
        # Few enough to stay gathered.
        term("vectors", whole, vectors, vectors, full=True),
        # Two norms, attention's three times in all; their gradients need two sums over all columns,
        # which are summed for all.
        term(
            "moments of norms",
            "z",
            2 * (z - 1) * moments,
            3 * (z - 1) * moments + 2 * 2 * (z - 1) / z * moments,
            full=True,
        ),
    ]


def padded(shape: Shape, batch: int, tokens: int, unit: int = 1) -> int:
    """Positions of a sequence, with those that fill up its parts."""
    stripes = 1 if batch % shape.x == 0 else 2 * shape.x
    part = stripes * unit * shape.y * shape.z
    return -(-tokens // part) * part


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A shape that fits.

    Attributes:
        shape: of the cube.
        received: bytes of one layer and step at every process, by axis.
        parameters: numbers of all layers that every process holds.
    """

    shape: Shape
    received: dict[str, float]
    parameters: int

    @property
    def total(self) -> float:
        """Bytes of all axes."""
        return sum(self.received.values())

    def row(self) -> dict[str, str]:
        """For a table, in 10^6 bytes."""
        axes = {
            f"{axis} MB": f"{self.received.get(axis, 0) / 1e6:,.1f}"
            for axis in ("x", "y", "z", CUBE)
        }
        return {
            "x y z": str(self.shape),
            **axes,
            "MB per layer": f"{self.total / 1e6:,.1f}",
            "parameters": f"{self.parameters:,}",
        }


def plan_shape(
    world: int,
    size: LayerSize,
    *,
    layers: int,
    batch: int,
    tokens: int,
    unit: int = 1,
    ring: bool = False,
    element_bytes: int = FULL,
) -> list[Candidate]:
    """All shapes of `world` processes that fit, those that receive least first.

    Args:
        world: processes of the cube.
        size: of a layer.
        layers: of the model.
        batch: sequences of a step, over the whole cube.
        tokens: of each sequence.
        unit: tokens that stay together.
        ring: whether keys and values go round a ring.
        element_bytes: of a number that is sent.

    Raises:
        ValueError: no shape fits; names what does not, and what would.
    """
    candidates = []
    for shape in shapes(world):
        if misfits(shape, size):
            continue
        received = dict.fromkeys(("x", "y", "z", CUBE), 0.0)
        for term in layer_terms(shape, size, batch=batch, tokens=tokens, unit=unit, ring=ring):
            received[term.axis] += term.bytes(element_bytes)
        parameters = layers * (size.matrices + size.vectors) // world
        candidates.append(Candidate(shape=shape, received=received, parameters=parameters))
    if not candidates:
        # What no shape can mend: the widths, which are cut over all processes.
        told = "; ".join(misfits(Shape(world, 1, 1), size))
        common = math.gcd(size.width, size.feed_forward)
        fitting = [str(n) for n in range(1, world) if common % n == 0]
        raise ValueError(f"{told}; or one of these numbers of processes: {', '.join(fitting)}")
    return sorted(candidates, key=lambda candidate: (candidate.total, candidate.shape))


def shapes(world: int) -> Iterator[Shape]:
    """All shapes of so many processes."""
    for x in range(1, world + 1):
        for y in range(1, world // x + 1):
            if world % (x * y) == 0:
                yield Shape(x, y, world // (x * y))


def misfits(shape: Shape, size: LayerSize) -> list[str]:
    """What of a layer cannot be cut into equal parts; empty: the shape fits."""
    whole = f"x*y*z={shape.processes}"
    demands = (
        ("width", size.width, shape.processes, whole),
        ("feed_forward", size.feed_forward, shape.processes, whole),
        ("heads", size.heads, shape.y, f"y={shape.y}"),
    )
    return [
        f"{field}: got {value}, expected a multiple of {told} ({_nearest(value, parts)})"
        for field, value, parts, told in demands
        if value % parts
    ]


def _nearest(value: int, parts: int) -> str:
    below = value // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)
