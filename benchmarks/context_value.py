"""Whether there is anything to learn from the context: errors of actions on held-out episodes.

    python -m benchmarks.context_value reproduction/runs/step/*/AT-*/seed0

Of each run's newest checkpoint: the mean squared error of the actions of a chain's best trajectory,
whose episodes the training has not seen, where the model sees

- the chain: the other trajectories before it, and what has happened in it so far;
- the trial: what has happened in it so far;
- the step: nothing but the step's own state and return-to-go.

All three are of the same model and the same steps. A context that told what the state and the
return-to-go leave open would make the first error smaller than the second.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from agentic import checkpoint
from agentic.loading import load_store
from agentic.model import InUnits
from agentic.runs import read_config
from agentic.sampler import ChainSampler
from agentic.statistics import estimate
from agentic.store import split
from agentic.tokens import Steps
from benchmarks import measure
from benchmarks.report import Report, number
from envs import expand

SEEN = ("chain", "trial", "step")


def main(argv: Sequence[str] | None = None) -> None:
    """One table, a row of each run."""
    parser = measure.arguments(__doc__, rounds=1)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories of method=at")
    parser.add_argument("--data-dir", help="instead of the run's own")
    parser.add_argument("--trajectories", type=int, default=4, help="in a chain")
    parser.add_argument("--chains", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args(argv)
    torch.set_num_threads(settings.threads)
    names = ["/".join(run.parts[-3:]) for run in settings.runs]
    report = Report(settings.json, runs=names, trajectories=settings.trajectories)
    rows, cases = [], []
    for run, name in zip(settings.runs, names, strict=True):
        measure.log(name)
        error_NK = errors(run, settings.data_dir, settings.trajectories, settings.chains)
        change = estimate(error_NK[:, 0] / error_NK[:, 1] - 1)
        row = {"run": name}
        row |= {seen: number(float(e)) for seen, e in zip(SEEN, error_NK.mean(0), strict=True)}
        assert change.mean is not None
        row["chain / trial - 1"] = f"{change.mean:+.1%}"
        if change.interval is not None:
            row["chain / trial - 1"] += " ({:+.1%} to {:+.1%})".format(*change.interval)
        rows.append(row)
        cases.append({"run": name, "seen": SEEN, "errors": error_NK.tolist()})
    report.case(f"Squared error of actions, {settings.chains} chains", rows, {"cases": cases})
    report.note("Held-out episodes; 95 % bootstrap intervals over chains.")


@torch.no_grad()
def errors(run: Path, data_dir: str | None, trajectories: int, chains: int) -> np.ndarray:
    """Mean squared errors (chains, 3) of the last trajectory's actions, columns as in `SEEN`.

    Raises:
        ValueError: the run is no `method=at`, or its data are missing.
    """
    config = read_config(run)
    if config.method != "at":
        raise ValueError(f"{run}: got method={config.method}, expected at, which has a context")
    store = load_store(
        data_dir or config.data_dir,
        expand(config.task.name),
        config.algorithms or (config.task.collect.recipe,),
        config.data,
    )
    _, held_E = split(store, config.holdout)
    chain = dataclasses.replace(
        config.chain, trajectories=trajectories, count="fixed", window_share=0.0
    )
    T = store.steps
    sampler = ChainSampler(store, held_E, chain, batch_steps=trajectories * T, seed=config.seed)
    state = checkpoint.load(checkpoint.newest(run))
    model = checkpoint.restore_model(state, torch.device("cpu")).eval()
    return np.array([_errors(model, sampler.batch(i)[0], T) for i in range(chains)])


def _errors(model: InUnits, steps: Steps, T: int) -> list[float]:
    first = steps.timestep.shape[1] - T
    trial = _cut(steps, slice(first, None))
    alone = Steps(
        **{
            name: value.expand(T) if name == "task" else value[0][:, None]
            for name, value in vars(trial).items()
        }
    )
    predicted = (model(steps, first), model(trial), model(alone).transpose(0, 1))
    return [float((action_BLA - trial.action).square().mean()) for action_BLA in predicted]


def _cut(steps: Steps, part: slice) -> Steps:
    """These steps alone, as a chain of one trajectory."""
    taken = {
        name: value if name == "task" else value[:, part] for name, value in vars(steps).items()
    }
    return Steps(**taken | {"trajectory": torch.zeros_like(taken["trajectory"])})


if __name__ == "__main__":
    main()
