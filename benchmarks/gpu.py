"""Everything about CUDA on any one GPU, in less than five minutes: parity first, then the table.

    python -m benchmarks.gpu --json results.json

Ends with status 1 where there is no GPU or a test fails.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import layers, measure
from parallel.kernels import kernel_for

HEAD_WIDTH = 128


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = measure.arguments(__doc__, rounds=5)
    parser.add_argument("--lengths", nargs="+", default=["4096", "16384", "65536"])
    parser.add_argument("--layers", nargs="+", default=["3"])
    settings = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu: PyTorch sees no CUDA device here: nothing was run")
        return 1
    for precision, dtype in measure.DTYPES.items():
        name = kernel_for(torch.device("cuda"), dtype, HEAD_WIDTH).name
        print(f"{torch.cuda.get_device_name()}, {precision}: attention kernel {name}", flush=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests"]
    if subprocess.run(tests, cwd=Path(__file__).parents[1]).returncode != 0:
        print("gpu: a test failed, or none is marked cuda: no table")
        return 1
    arguments = ["--device", "cuda", "--precision", *measure.DTYPES]
    arguments += ["--lengths", *settings.lengths, "--layers", *settings.layers]
    arguments += ["--rounds", str(settings.rounds)]
    if settings.json:
        arguments += ["--json", settings.json]
    layers.main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
