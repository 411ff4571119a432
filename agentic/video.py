"""An mp4 of trials, played again from their seeds and actions."""

from pathlib import Path

from agentic.evaluator import Trials
from envs import DmcEnv, TaskSpec


def check(spec: TaskSpec) -> None:
    """Draws one frame, so that a missing renderer shows before the rollouts and not after them.

    Raises:
        ValueError: the `video` extra or a renderer is missing; says what to do.
    """
    try:
        import imageio_ffmpeg  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ValueError("video: got true, expected `pip install .[video]` before") from error
    try:
        env = DmcEnv(spec.name, render_mode="rgb_array")
        env.reset(seed=0)
        env.render()
        env.close()
    except RuntimeError as error:
        raise ValueError(f"video: {error}") from error


def film(spec: TaskSpec, trials: Trials, path: Path) -> None:
    """Films the first context's first and last trial, one after the other, in real time."""
    import imageio.v2 as imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    env = DmcEnv(spec.name, render_mode="rgb_array")
    last = trials.returns.shape[1] - 1
    with imageio.get_writer(path, fps=round(1 / spec.control_seconds)) as writer:
        for k in dict.fromkeys((0, last)):
            if trials.failed[0, k]:
                continue  # its actions cannot be played again
            env.reset(seed=int(trials.seeds[0, k]))
            for action in trials.actions[k]:
                env.step(action)
                writer.append_data(env.render())  # type: ignore[attr-defined]
    env.close()
