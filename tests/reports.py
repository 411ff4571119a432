"""Finished runs on invented numbers, as a reproduction leaves them."""

import json

import numpy as np
import yaml
from trials import make_entry

from agentic import results

CORNERS = tuple(f"jaco_reach_{y}_{x}" for y in ("top", "bottom") for x in ("left", "right"))


def leave_run(
    output,
    row,
    kept,
    reset,
    *,
    task="walker_walk",
    seed=0,
    method="at",
    trajectories=4,
    section="step",
    place=None,
    sessions=({"seconds": 60.0, "cpu_seconds": 50.0, "peak_bytes": 2**30, "code": 0},),
    metrics=(),
    **about,
):
    """Writes a run into `output`/runs; random earns 2, the best 10.

    `kept` and `reset` are (C, n) returns or None, or for jaco_reach a list of four of them.
    """
    run_dir = output / "runs" / (place or f"{section}/{task}/{row}/seed{seed}")
    run_dir.mkdir(parents=True)
    about = {
        "checkpoint": f"/somewhere/{run_dir}/best.pt",
        "method": method,
        "train_seed": seed,
        "evaluation_seed": seed,
        "train_trajectories": trajectories,
        "train_steps": 100,
        "train_settings": f"{task}{row}",
        "relabel_mode": "with_control",
        "stop": False,
        "remember": None,
        "cache": "fp32",
    } | about
    names = CORNERS if task == "jaco_reach" else (task,)
    kept = kept if task == "jaco_reach" else [kept]
    reset = reset if task == "jaco_reach" else [reset]
    entries = [
        make_entry(_array(k), _array(r), task=name, about=about)
        for name, k, r in zip(names, kept, reset, strict=True)
    ]
    results.write(run_dir / "results.json", results.document(entries, {}))
    config = {
        "task": {"name": task, "collect": {"recipe": "td3"}},
        "algorithms": None,
        "chain": {"trajectories": trajectories, "top": 0.1 if method == "bc" else 1.0},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [json.dumps(line) + "\n" for line in metrics]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    if sessions:
        record = json.dumps({"sessions": list(sessions)})
        run_dir.with_name(f"{run_dir.name}.json").write_text(record)
    return run_dir


def _array(values):
    return None if values is None else np.array(values, float)


def leave_table(output, tasks=("walker_walk", "cheetah_run", "jaco_reach"), seeds=(0, 1, 2)):
    """A whole small reproduction of four rows, better and better; AT-8 on the first task only."""
    rng = np.random.default_rng(0)
    rows = {
        "BC-10%": ("bc", 1, 3.0),
        "DT": ("dt", 1, 4.0),
        "AT-4": ("at", 4, 6.0),
        "AT-8": ("at", 8, 7.0),
        "AT-32": ("at", 32, 8.0),
    }
    for seed in seeds:
        for task in tasks:
            for row, (method, count, level) in rows.items():
                if row == "AT-8" and task != tasks[0]:
                    continue
                shape = (4, 5, 3) if task == "jaco_reach" else (5, 3)
                reset = level + rng.normal(0, 0.5, shape)
                kept = reset + 0.3 * np.arange(3) if method == "at" else None
                metrics = [
                    {"step": 10 * k, "train/loss": 1 / k, "train/tokens": 1000.0}
                    for k in range(1, 400)
                ]
                metrics += [{"step": 1000 * k, "validation/loss": 2 / k} for k in range(1, 4)]
                metrics += [
                    {"step": 4000, f"rollout/{task}/trial_1": 3.0, f"rollout/{task}/trial_2": 4.0}
                ]
                leave_run(
                    output,
                    row,
                    [None] * 4 if kept is None and task == "jaco_reach" else kept,
                    reset,
                    task=task,
                    seed=seed,
                    method=method,
                    trajectories=count,
                    metrics=metrics,
                )
