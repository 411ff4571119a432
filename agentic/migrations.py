"""What older versions of this software have written, in today's form."""

from collections.abc import Mapping
from typing import Any

from envs import expand

VERSION = 2  # of checkpoints
MIGRATED = "migrated"  # the key of what could not be kept as it was: lines for the user


def settings(values: Any) -> tuple[Any, list[str]]:
    """A run's settings as `TrainConfig` has them, and what could not be kept as it was.

    Settings that are newer than the run have their defaults, which `build` fills in.

    Args:
        values: as they were read. What is not a run's settings stays what it is.
    """
    chain = values.get("chain") if isinstance(values, Mapping) else None
    if not isinstance(chain, Mapping) or "window_fraction" not in chain:
        return values, []
    chain = dict(chain)
    told = []
    if "window_batch" not in chain:  # one setting was both, and no window longer than an episode
        chain["window_batch"] = chain.get("window_steps")
        steps, episode = chain["window_batch"], _episode_steps(values)
        if type(steps) is int and episode is not None:
            chain["window_steps"] = min(steps, episode)
    # A first part of the training on windows alone, then a share of them: now one share for all.
    first, then = chain.pop("window_fraction"), chain.get("window_share")
    if _is_share(first) and _is_share(then):
        chain["window_share"] = first + (1 - first) * then
        told.append(
            f"chain.window_fraction={first} became chain.window_share={chain['window_share']:g}"
        )
    return {**values, "chain": chain}, told


def state(old: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's state as the trainer has it today; wrong types stay what they are.

    Version 1 had no checksum, and first neither rollouts' times nor a stream of its own.

    Raises:
        ValueError: its version is not known here; the message has no name of the file.
    """
    version = old.get("version")
    if type(version) is int and version > VERSION:
        raise ValueError(
            f"has version {version}, which is of a newer version of this software, expected at "
            f"most {VERSION}"
        )
    if version not in (1, VERSION) or type(version) is not int:
        raise ValueError(f"has version {version!r}, expected 1 to {VERSION}")
    if version == VERSION:
        return old | {MIGRATED: []}
    config, told = settings(old.get("config"))
    new = _filled(old) | old | {"config": config, "version": VERSION, MIGRATED: told}
    if "tensors" in old:
        new["digests"] = None
    if isinstance(new.get("data"), dict):
        new["data"] = {"returns": None} | new["data"]
    return new


def _filled(old: dict[str, Any]) -> dict[str, Any]:
    """What the oldest lack: no rollout is done twice, and every step had its micro-batches."""
    step, config = old.get("step"), old.get("config")
    optimizer = config.get("optimizer") if isinstance(config, dict) else None
    each = optimizer.get("accumulate") if isinstance(optimizer, dict) else None
    taken = step * each if type(step) is int and type(each) is int else None
    return {
        "stream": {"position": taken},
        "rolled": step,
        "spent": [0.0, 0.0, 0.0],
        "updated": [0.0, 0],
        "skipped": [0, 0],
        "logged": None,
    }


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def _episode_steps(values: Mapping[str, Any]) -> int | None:
    task = values.get("task")
    name = task.get("name") if isinstance(task, Mapping) else None
    try:
        return expand(name)[0].episode_steps if isinstance(name, str) else None
    except ValueError:  # said of the setting itself, later
        return None
