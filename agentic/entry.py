"""What every command shares: hydra in front, one clear line for the user when something is off."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import hydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from envs import expand, quiet_simulator


def run(command: str, config_name: str, task: Callable[[dict[str, Any]], None]) -> None:
    """Runs `task` on the composed configuration, as the command line `command`.

    A ValueError, an OSError or a configuration that hydra refuses ends the process with exit
    code 2 and one line on standard error. Programming errors keep their traceback. Ctrl-C and
    SIGTERM end it with 130 and 143, after everything has been closed.
    """
    # Without it hydra prints its own multi-line report and exits before a caller can word it.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    quiet_simulator()
    signal.signal(signal.SIGTERM, _terminate)

    def call(config: DictConfig) -> None:
        # Told here as well, since hydra would add lines of its own to an exception of the task.
        with _told(command):
            task(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]

    with _told(command):
        hydra.main(version_base="1.3", config_path="pkg://configs", config_name=config_name)(call)()


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as tidily as Ctrl-C does."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def _told(command: str) -> Iterator[None]:
    """Ends the process with one line for errors that are the user's to mend."""
    try:
        yield
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        print(f"{command}: error: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except Terminated:
        print(f"{command}: terminated", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _unknown_task(name: str) -> str:
    """What `envs` has to say of it."""
    try:
        expand(name)
    except ValueError as error:
        return str(error)
    return f"task: {name} has no settings in configs/task"


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group == "task":
            return _unknown_task(name)
    # Hydra's long tail tells where it searched, which is inside the package.
    return " ".join(str(error).split("Config search path")[0].split())
