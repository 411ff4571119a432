"""Videos of trials, played again from their seeds and actions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentic.evaluator import Trials
from envs import DmcEnv, TaskSpec

SEPARATOR = 16  # columns between pictures: the width stays a multiple of 16, as encoders want it

Choice = str  # first | last | best


@dataclass(frozen=True, kw_only=True)
class Take:
    """One filmed trial.

    Attributes:
        choice: first | last | best.
        context: its row in the trials, from 0.
        trial: its column, from 0.
        path: the file that shows it.
    """

    choice: Choice
    context: int
    trial: int
    path: Path


def check(spec: TaskSpec) -> None:
    """Draws one frame, so that a missing renderer shows before the rollouts and not after them.

    Raises:
        ValueError: the `video` extra or a renderer is missing; says what to do.
    """
    try:
        import imageio_ffmpeg  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ValueError(
            "video: imageio-ffmpeg is missing, expected `pip install '.[video]'` before"
        ) from error
    try:
        env = DmcEnv(spec.name, render_mode="rgb_array")
        env.reset(seed=0)
        env.render()
        env.close()
    except RuntimeError as error:
        raise ValueError(f"video: {error}") from error


def film(
    spec: TaskSpec,
    trials: Trials,
    directory: Path,
    *,
    which: Sequence[Choice],
    side_by_side: bool,
) -> list[Take]:
    """Films trials in real time: the start and every step; a failed one up to its failure.

    "first" and "last" are the first context's first and last trial that was run, "best" the one of
    highest return of all contexts, failed ones apart; it is left out where all have failed.

    Args:
        spec: the task.
        trials: what was played.
        directory: for <task>_<choice>.mp4; made if missing.
        which: the trials to film.
        side_by_side: all in one <task>.mp4 instead, in step; one that has ended stands still.
    """
    directory.mkdir(parents=True, exist_ok=True)
    takes = []
    for choice in which:
        found = _choose(trials, choice)
        if found is not None:
            name = f"{spec.name}.mp4" if side_by_side else f"{spec.name}_{choice}.mp4"
            context, trial = found
            takes.append(Take(choice=choice, context=context, trial=trial, path=directory / name))
    for path in dict.fromkeys(take.path for take in takes):
        shown = [_frames(spec, trials, take) for take in takes if take.path == path]
        _write(path, round(1 / spec.control_seconds), _in_step(shown))
    return takes


def replay(env: DmcEnv, trials: Trials, context: int, trial: int) -> Iterator[np.ndarray]:
    """Plays one trial again: yields the states (P,) of the start and after every step.

    A failed trial ends where the rollout's failed.
    """
    yield env.reset(seed=int(trials.seeds[context, trial]))[1]["physics"]
    for action in trials.actions[context, trial]:
        try:
            info = env.step(action)[-1]
        except (ValueError, RuntimeError):
            if not trials.failed[context, trial]:
                raise
            return
        yield info["physics"]


def _choose(trials: Trials, choice: Choice) -> tuple[int, int] | None:
    """Context and trial of a choice."""
    returns_CN = trials.returns
    if choice == "first":
        return 0, 0
    if choice == "last":
        return 0, int((~np.isnan(returns_CN[0])).sum()) - 1
    sound = np.where(trials.failed | np.isnan(returns_CN), -np.inf, returns_CN)
    context, trial = np.unravel_index(sound.argmax(), sound.shape)
    return None if np.isinf(sound[context, trial]) else (int(context), int(trial))


def _frames(spec: TaskSpec, trials: Trials, take: Take) -> Iterator[np.ndarray]:
    """Pictures (240, 320, 3) uint8 of one trial."""
    env = DmcEnv(spec.name, render_mode="rgb_array")
    try:
        for _ in replay(env, trials, take.context, take.trial):
            yield env.render()
    finally:
        env.close()


def _in_step(shown: Sequence[Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    """All pictures of one moment beside each other, until the longest has ended."""
    pictures = [next(frames) for frames in shown]
    while True:
        gap = np.zeros((pictures[0].shape[0], SEPARATOR, 3), np.uint8)
        parts = [part for picture in pictures for part in (gap, picture)]
        yield np.concatenate(parts[1:], axis=1)
        following = [next(frames, None) for frames in shown]
        if all(picture is None for picture in following):
            return
        pictures = [
            old if new is None else new for old, new in zip(pictures, following, strict=True)
        ]


def _write(path: Path, fps: int, frames: Iterator[np.ndarray]) -> None:
    import imageio.v2 as imageio

    with imageio.get_writer(path, fps=fps) as writer:
        appended: Any = writer.append_data  # type: ignore[attr-defined]
        for frame in frames:
            appended(frame)
