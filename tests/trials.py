"""Made-up trials and entries of results.json."""

import numpy as np

from agentic import results
from agentic.evaluator import Trials

DATASET = {"min": 0.0, "median": 4.0, "p90": 8.0, "max": 10.0, "mean": 4.5}
NOT_RUN = float("nan")
ABOUT = {
    "checkpoint": "run/checkpoints/best.pt",
    "checkpoint_step": 100,
    "method": "at",
    "layout": "step",
    "train_seed": 0,
}


def make_trials(returns, failed=(), actions=None, seeds=None):
    """Trials of the given returns (C, n); `failed` lists (context, trial)."""
    returns = np.array(returns, float)
    marks = np.zeros(returns.shape, bool)
    for place in failed:
        marks[tuple(place)] = True
    return Trials(
        returns=returns,
        failed=marks,
        seeds=np.arange(returns.size).reshape(returns.shape) if seeds is None else seeds,
        actions=np.zeros((*returns.shape, 1, 1), np.float32) if actions is None else actions,
    )


def make_entry(kept, reset, *, task="walker_walk", asked="1x", about=None, **changes):
    """An entry; random earns 2 on average, the dataset's best 10."""
    arguments = {
        "about": ABOUT | (about or {}),
        "task": task,
        "target": {"asked": asked, "return": 10.0},
        "kept": make_trials(kept) if isinstance(kept, list | np.ndarray) else kept,
        "reset": make_trials(reset) if isinstance(reset, list | np.ndarray) else reset,
        "random": np.array([1.0, 3.0]),
        "dataset": DATASET,
        "dataset_returns": np.arange(11.0),
    }
    return results.task_result(**arguments | changes)
