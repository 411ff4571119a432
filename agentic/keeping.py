"""Checkpoints in the course of a training: those that are kept, and what a full disk does to it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from agentic import checkpoint
from agentic.config import TrainConfig
from agentic.console import say
from agentic.layout import Layout
from parallel.world import World


class Keeping:
    """Writes a run's checkpoints; all processes call the same methods in the same order.

    Args:
        config: the run's settings.
        run_dir: the run's folder.
        world: the processes.
        layout: of this process; None: it is alone.

    Attributes:
        step: the last one with a checkpoint.
    """

    def __init__(
        self, config: TrainConfig, run_dir: Path, world: World, layout: Layout | None
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self.world, self.layout = world, layout
        self.step: int | None = None

    def save(self, state: dict[str, Any], *, last: bool) -> None:
        """Writes the checkpoint of a step and removes those beyond `keep_checkpoints`.

        Args:
            state: of the training.
            last: whether the run ends with it. Else one that cannot be written is left out.

        Raises:
            OSError: the last one cannot be written; the older ones are as they were.
            MainFailed: in the other processes then.
        """
        if self._write(checkpoint.step_path(self.run_dir, state["step"]), state, last):
            self.step = state["step"]
            self.prune()

    def prune(self) -> None:
        """Removes checkpoints beyond `keep_checkpoints`, as a save that was killed has not."""
        if self.world.main:
            for old in checkpoint.step_files(self.run_dir)[: -self.config.keep_checkpoints]:
                checkpoint.remove(old)

    def save_best(self, state: dict[str, Any]) -> bool:
        """Writes the best checkpoint; whether that could be done. Of the last step: see `save`."""
        path = self.run_dir / checkpoint.FOLDER / checkpoint.BEST
        return self._write(path, state, state["step"] == self.config.steps)

    def _write(self, path: Path, state: dict[str, Any], last: bool) -> bool:
        """Whether the state could be written, for all processes alike."""
        failure: OSError | None = None
        try:
            checkpoint.save(path, state, self.layout)
        except OSError as error:
            failure = error

        def verdict() -> bool:
            if failure is None:
                return True
            self._clear()
            files = checkpoint.step_files(self.run_dir)
            if last or state["step"] == self.config.steps:
                newest = f"the newest checkpoint is {files[-1]}" if files else "there is none yet"
                raise OSError(
                    failure.errno,
                    f"{failure.strerror or failure}; {newest}; mend that, then go on with "
                    f"resume={self.run_dir}",
                    failure.filename or str(path),
                )
            say(
                f"step {state['step']}: {failure.filename or path}: {failure.strerror or failure}; "
                "training goes on without this checkpoint, the newest one is "
                f"{files[-1] if files else 'none yet'}, the next try is at step "
                f"{self._next(state['step'])}"
            )
            return False

        return self.world.on_main(verdict)

    def _clear(self) -> None:
        """Removes directories that did not become checkpoints: there is little room."""
        for place in (self.run_dir / "checkpoints").glob(checkpoint.STEP):
            if not checkpoint.exists(place):
                with suppress(OSError):  # what has gone wrong is told already
                    checkpoint.remove(place)

    def _next(self, step: int) -> int:
        """The next step with a checkpoint, but for rollouts."""
        every, steps = self.config.clocks.checkpoint_steps, self.config.steps
        return min(steps, (step // every + 1) * every) if every else steps
