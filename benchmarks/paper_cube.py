"""Tables 1 and 2 of arXiv:2105.14450, as they are printed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row of the paper's tables; seconds of a step, and what it prints for a sequence."""

    table: str
    ways: int
    processes: int
    batch: int
    width: int
    forward: float
    backward: float
    printed: float

    @property
    def seconds(self) -> float:
        """Of a sequence, from the times printed beside it."""
        return (self.forward + self.backward) / self.batch

    @property
    def name(self) -> str:
        """As it is spoken of."""
        return f"{self.table} {self.ways}-D at {self.processes}"


PAPER = [
    Row("weak", 1, 8, 60, 2048, 4.759, 15.676, 0.341),
    Row("weak", 1, 16, 60, 4096, 12.488, 30.894, 0.723),
    Row("weak", 1, 36, 40, 6120, 13.515, 31.822, 1.133),
    Row("weak", 1, 64, 30, 8192, 13.915, 32.890, 1.560),
    Row("weak", 2, 16, 192, 4096, 33.860, 101.981, 0.708),
    Row("weak", 2, 36, 288, 6120, 54.760, 165.850, 0.766),
    Row("weak", 2, 64, 384, 8192, 99.419, 304.707, 1.052),
    Row("weak", 3, 8, 192, 2048, 30.096, 81.212, 0.580),
    Row("weak", 3, 64, 384, 8192, 79.349, 125.037, 0.672),
    Row("strong", 1, 8, 12, 3072, 1.470, 5.699, 0.597),
    Row("strong", 1, 16, 12, 3072, 1.371, 5.152, 0.544),
    Row("strong", 1, 36, 12, 3072, 1.455, 5.414, 0.572),
    Row("strong", 1, 64, 12, 3072, 1.433, 5.167, 0.550),
    Row("strong", 2, 16, 24, 3072, 4.680, 13.698, 0.766),
    Row("strong", 2, 36, 24, 3072, 3.900, 11.433, 0.639),
    Row("strong", 2, 64, 24, 3072, 3.007, 8.920, 0.497),
    Row("strong", 3, 8, 24, 3072, 3.249, 9.120, 0.515),
    Row("strong", 3, 64, 24, 3072, 2.494, 6.129, 0.359),
]
