"""Which layer trains on how many trajectories: the BPT paper's row of "out of memory", here.

    python -m benchmarks.memory_row --measure 16 --json results.json

One chain of N trajectories of 1,000 steps, four tokens a step, the loss on the last trajectory,
AdamW and averaged weights; the paper's model as its table of hyperparameters has it (3 layers of
width 128, 1 head), and one of the 350M parameters that its text speaks of. Every number of
trajectories is planned for every kind of layer and held against two memories; those with at most
`--measure` trajectories that fit here are run for one step, whose peak PyTorch's allocator tells.
The plan is the one that `agentic-train` refuses a run by; `benchmarks.memory_plan` tests it.
"""

import gc
from collections.abc import Sequence
from typing import Any

import torch

from agentic.budget import PROCESS, VARIANTS
from benchmarks import measure
from benchmarks.allocations import allocated
from benchmarks.memory_plan import chain_settings, model_plan, model_step
from benchmarks.report import Report

EPISODE_STEPS = 1000
MACHINES = {"24 GiB": 24 * 2**30, "80 GB": 80 * 10**9}


def gigabytes(size: float) -> str:
    """As one reads it beside 24 GiB."""
    return f"{size / 2**30:,.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    """One table: trajectories down, kinds across."""
    parser = measure.arguments(__doc__, rounds=1)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128])
    parser.add_argument(
        "--models", nargs="+", default=["3/128/1", "24/1024/16"], metavar="LAYERS/WIDTH/HEADS"
    )
    parser.add_argument("--measure", type=int, default=8, help="most trajectories that are run")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args(argv)
    torch.set_num_threads(settings.threads)  # the plan counts a kernel's buffers of each
    report = Report(settings.json, **vars(settings))
    for model in settings.models:
        layers, width, heads = map(int, model.split("/"))
        rows: list[dict[str, str]] = []
        cases: list[dict[str, Any]] = []
        for kind, recompute in VARIANTS:
            row = {"layer": f"{kind}{', recompute' if recompute else ''}"}
            for trajectories in settings.trajectories:
                measure.log(f"{model} {kind} {recompute}, {trajectories} trajectories")
                size = {"trajectories": trajectories, "episode_steps": EPISODE_STEPS}
                told = chain_settings(kind, recompute, settings.precision, **size) | {
                    "chain.loss_on": "last",
                    "model.layers": layers,
                    "model.width": width,
                    "model.heads": heads,
                }
                planned = model_plan(**size, **told)
                needed = PROCESS + planned.total
                fits = {name: needed <= memory for name, memory in MACHINES.items()}
                case = {"kind": kind, "recompute": recompute, "trajectories": trajectories}
                case |= {"needed_bytes": needed, "fits": fits}
                row[f"{trajectories}"] = gigabytes(needed)
                room = 0.8 * measure.available_bytes(torch.device("cpu"))
                if trajectories <= settings.measure and needed < room:
                    # Parameters, their average and moments are there before the step.
                    there = needed - planned.gradients - planned.activations
                    gc.collect()
                    case["measured_bytes"] = there + allocated(model_step(**size, **told)).peak
                    row[f"{trajectories}"] += f" ({gigabytes(case['measured_bytes'])})"
                row[f"{trajectories}"] += "" if fits["24 GiB"] else " x" if fits["80 GB"] else " xx"
                cases.append(case)
            rows.append(row)
        title = f"{layers} layers, width {width}, {heads} head(s), {settings.precision}"
        report.case(f"{title}: GiB planned (measured)", rows, {"model": model, "cases": cases})
    report.note(
        f"A step on one chain of N trajectories of {4 * EPISODE_STEPS:,} tokens. x: does not fit "
        "24 GiB; xx: nor 80 GB. 0.50 GiB of each are the process itself."
    )


if __name__ == "__main__":
    main()
