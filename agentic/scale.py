"""How a run is spread over processes: settings, and the mesh that they mean."""

import math
from dataclasses import dataclass

from agentic.strict import at_least, one_of

KINDS = ("none", "data", "cube", "ring")
MAX_TIMEOUT = 1e9  # seconds; clocks in nanoseconds hold ten times as many


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Which kind of parallelism; nothing of it changes what is learned."""

    kind: str = "none"  # none | data | cube | ring
    dp: int | None = None  # copies of the model, on different micro-batches; none: what is left
    shape: tuple[int, ...] | str = "auto"  # kind cube: [x, y, z], or auto: the planner's
    keys: str = "gather"  # of other slabs, where x cuts sequences: gather | ring
    timeout: float = 60.0  # seconds that a collective may take

    def __post_init__(self) -> None:
        one_of("parallel.kind", self.kind, KINDS)
        one_of("parallel.keys", self.keys, ("gather", "ring"))
        if self.dp is not None:
            at_least("parallel.dp", self.dp, 1)
        if isinstance(self.shape, str):
            one_of("parallel.shape", self.shape, ("auto",))
        elif len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(
                f"parallel.shape: got {list(self.shape)}, expected [x, y, z] of 1 or more, or auto"
            )
        if self.kind != "cube" and self.shape != "auto":
            raise ValueError(
                f"parallel.shape: got {list(self.shape)} with parallel={self.kind}, expected auto; "
                "parallel=cube takes a shape"
            )
        if self.kind == "none" and self.dp not in (None, 1):
            raise ValueError(
                f"parallel.dp: got {self.dp} with parallel=none, expected null; parallel=data, "
                "ring or cube make copies"
            )
        if not 0 < self.timeout <= MAX_TIMEOUT:
            raise ValueError(
                f"parallel.timeout: got {self.timeout}, expected seconds above 0, at most "
                f"{MAX_TIMEOUT:.0e}"
            )

    @property
    def cuts(self) -> bool:
        """Whether the model is cut over processes."""
        return self.kind in ("cube", "ring")

    def sides(self, processes: int) -> tuple[int, tuple[int, int, int] | None]:
        """Copies of the model and (x, y, z) for so many processes; None: for the planner.

        Raises:
            ValueError: they do not fit.
        """
        if self.kind == "none":
            shape: tuple[int, int, int] | None = (1, 1, 1)
            dp = 1
        elif self.kind == "data":
            shape, dp = (1, 1, 1), self.dp or processes
        elif self.kind == "ring":
            dp = self.dp or 1
            shape = (processes // dp, 1, 1)
        elif isinstance(self.shape, str):
            dp, shape = self.dp or 1, None
        else:
            x, y, z = self.shape
            shape, dp = (x, y, z), self.dp or max(1, processes // (x * y * z))
        side = processes // dp if shape is None else math.prod(shape)
        if dp * side != processes:
            cube = "" if shape is None else f" x {list(shape)}"
            needed = dp if shape is None else dp * side
            means = f" with {dp} cop{'y' if dp == 1 else 'ies'}{cube}"
            start = f"start them with torchrun --nproc-per-node {needed} -m agentic.train ..."
            if self.kind == "none":
                means, start = "", "choose parallel=data, ring or cube, or start without torchrun"
            raise ValueError(
                f"parallel: got {processes} process(es) for parallel={self.kind}{means}, expected "
                f"{'a multiple of ' if shape is None else ''}{needed}; {start}"
            )
        return dp, shape
