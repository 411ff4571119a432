"""The training step on a very long context over several processes, beside that of one.

    python -m benchmarks.long_spread --shapes '2,1,1 ring' '2,1,1 gather'

The same model, data and gradients as in `benchmarks.long_step`: loss and gradients beside those of
one process, the resident memory that the step takes in each process, and what each one receives.
(The counter of `benchmarks.long_step` misses what the threads of a collective free.)
"""

import resource
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentic.cube_model import CubeTransformer
from agentic.model import AgenticTransformer
from benchmarks import measure, processes
from benchmarks.report import Report
from benchmarks.whole_model import LAYERS, WIDTH, draw_steps, make_spec
from parallel.collectives import all_reduce
from parallel.mesh import CUBE, CubeMesh
from parallel.traffic import Traffic


def step(
    shape: tuple[int, int, int], keys: str, trajectories: int, episode_steps: int
) -> dict[str, Any]:
    """One training step of this process: loss, norms of gradients, seconds, bytes."""
    mesh = CubeMesh(*shape, timeout=3600)
    spec = make_spec("blockwise", trajectories, episode_steps)
    torch.manual_seed(0)
    whole = AgenticTransformer(spec)
    model: Any = whole
    if mesh.sizes[CUBE] > 1:
        model = CubeTransformer(whole, mesh, ring=keys == "ring")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps, losses = draw_steps(spec), []
    weight_BL = torch.ones(steps.valid.shape)
    gradients: dict[str, Tensor] = {}

    def update() -> None:
        loss = model.loss(steps, weight_BL)
        loss.backward()
        losses.append(loss.detach())
        gradients.update((name, p.grad) for name, p in model.named_parameters())
        optimizer.step()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    with Traffic(mesh) as traffic:
        update()
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    seconds = time.perf_counter() - began
    found = {}
    for name, own in gradients.items():
        entire = own if model is whole else model.cuts[name].whole(own, mesh)
        found[name] = entire.double().flatten().tolist() if mesh.place[CUBE] == 0 else []
    return {
        "loss": float(all_reduce(losses[0], mesh, CUBE)),
        "gradients": found,
        "seconds": seconds,
        "peak": peak,
        "received": {axis: traffic.bytes(axis) for axis in ("x", "y", "z", CUBE)},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = measure.arguments(__doc__, rounds=1)
    parser.add_argument("--shapes", nargs="+", default=["2,1,1 ring", "2,1,1 gather"])
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--episode-steps", type=int, default=1000)
    settings = parser.parse_args(argv)
    size = settings.trajectories, settings.episode_steps
    answers = {"1 process": processes.run(1, step, (1, 1, 1), "gather", *size)}
    for told in settings.shapes:
        sides, keys = told.split()
        x, y, z = map(int, sides.split(","))
        measure.log(f"{told}: {x * y * z} processes")
        answers[told] = processes.run(x * y * z, step, (x, y, z), keys, *size)
    rows, base = [], answers["1 process"][0]
    for told, found in answers.items():
        first = found[0]
        apart = _apart(first["gradients"], base["gradients"])
        rows.append(
            {
                "shape, keys": told,
                "loss": f"{first['loss']:.9f}",
                "gradients apart": f"{apart:.1e}",
                "s": f"{max(f['seconds'] for f in found):.0f}",
                "resident MB of each": "  ".join(f"{f['peak'] / 1e6:.0f}" for f in found),
                "received MB, each": f"{sum(first['received'].values()) / 1e6:.0f}",
            }
        )
    tokens = 4 * settings.trajectories * settings.episode_steps
    Report(settings.json, **vars(settings)).case(
        f"{tokens:,} tokens, {LAYERS} layers, width {WIDTH}, fp32, one thread a process",
        rows,
        {"rows": rows},
    )


def _apart(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    """The largest distance of a parameter's gradients, relative to their norm."""
    worst = 0.0
    for name, values in theirs.items():
        a, b = torch.tensor(ours[name]), torch.tensor(values)
        worst = max(worst, float((a - b).norm() / b.norm().clamp(min=1e-30)))
    return worst


if __name__ == "__main__":
    main()
