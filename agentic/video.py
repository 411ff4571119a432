"""An mp4 of trials, played again from their seeds and actions."""

from pathlib import Path

from agentic.evaluator import Trials
from envs import DmcEnv, TaskSpec


def film(spec: TaskSpec, trials: Trials, path: Path) -> None:
    """Films the first context's first and last trial, one after the other, in real time.

    Raises:
        ValueError: the `video` extra is not installed.
    """
    try:
        import imageio.v2 as imageio
    except ImportError as error:
        raise ValueError("video: needs `pip install agentic-transformer[video]`") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    env = DmcEnv(spec.name, render_mode="rgb_array")
    last = trials.returns.shape[1] - 1
    with imageio.get_writer(path, fps=round(1 / spec.control_seconds)) as writer:
        for k in dict.fromkeys((0, last)):
            env.reset(seed=int(trials.seeds[0, k]))
            for action in trials.actions[k]:
                env.step(action)
                writer.append_data(env.render())  # type: ignore[attr-defined]
    env.close()
