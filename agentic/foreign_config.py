"""Hydra in front of the commands, less what it would do for whoever wrote a file of settings.

hydra makes whatever `_target_` its node `hydra` names, and sets the environment, logging and
folders by it; its --experimental-rerun unpickles. Of that node the commands need where sweeps lie
and what launches them, and that on the command line alone: files of settings in a --config-dir say
values of settings.
"""

import re
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult

from agentic.interpolation import check_calls
from agentic.texts import read_yaml

JOBS = 10_000  # of a sweep
LONGEST = 20_000  # characters of a setting
_OF_HYDRA = ("hydra.run", "hydra.output_subdir", "hydra.sweep", "hydra.launcher")
_NAMES_HYDRA = re.compile(r"(?:^|[\s/@.])hydra(?:$|[\s/@.:=])")


def guard(arguments: list[str]) -> None:
    """Checks a command line before hydra acts on it, and has files of settings checked when read.

    Raises:
        ValueError: it asks for what the commands do without; names it.
    """
    told = get_args_parser().parse_args(arguments)
    for flag in ("config_path", "config_name", "experimental_rerun"):
        if getattr(told, flag) is not None:
            raise ValueError(
                f"--{flag.replace('_', '-')}: got {getattr(told, flag)}, expected settings "
                "name=value, and --config-dir for a folder of files of them"
            )
    jobs = 1
    for text in told.overrides:
        jobs *= _count(check_override(text), JOBS + 1)
        if jobs > JOBS:
            raise ValueError(f"{text[:200]}: got a sweep of too many jobs, expected {JOBS:,}")
    Plugins.instance()  # registers hydra's own source of files, which ours replaces
    SourcesRegistry.instance().types["file"] = SettingsFolder


def check_override(text: str, *, hydra: bool = True) -> Override:
    """Reads one `name=value` of a command line.

    Args:
        text: as it stands there.
        hydra: whether what is needed of hydra's own settings may be set.

    Raises:
        ValueError: it is none, or of hydra's own.
    """
    if len(text) > LONGEST:  # hydra's parser takes seconds for more
        raise ValueError(f"{text[:100]}...: longer than {LONGEST:,} characters")
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:
        raise ValueError(
            f"settings: got {text[:200]!r}, expected name=value; what is no plain word needs "
            "quotes of its own, as in 'name=\"a=b\"'"
        ) from error
    name, package = override.key_or_group, override.package or ""
    known = name == "hydra/launcher" or any(f"{name}.".startswith(f"{k}.") for k in _OF_HYDRA)
    if _NAMES_HYDRA.search(f"{name}@{package}") and not (hydra and known and not package):
        raise ValueError(
            f"{name}: is hydra's own, expected settings"
            + (f", or of hydra's {[*_OF_HYDRA, 'hydra/launcher']}" if hydra else "")
        )
    check_calls(name, text.partition("=")[2], allowed=("now",) if known else ())
    return override


class SettingsFolder(FileConfigSource):
    """A folder of files of settings; each says values of the commands' settings, and no more."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Reads one file; ValueError names it."""
        path = Path(self.path) / self._normalize_file_name(config_path)
        try:
            self._check(PurePosixPath(config_path), path)
        except ValueError as error:
            raise ValueError(f"--config-dir: {path}: {error}") from error
        return super().load_config(config_path)

    def _check(self, name: PurePosixPath, path: Path) -> None:
        if ".." in name.parts or "hydra" in name.parts:
            raise ValueError("expected a file of settings within the folder")
        values = read_yaml(path)
        with open(path, encoding="utf-8") as file:
            package = self._get_header_dict(file.read(512)).get("package") or ""
        content = values if isinstance(values, dict) else {}
        for text in (package, *map(str, content), *_texts(content.get("defaults"))):
            if _NAMES_HYDRA.search(text):
                raise ValueError(f"got {text[:200]!r}, expected nothing of hydra's own in a file")
        for text in _texts(content.get("defaults")):
            check_calls("defaults", text)


def _texts(value: Any) -> list[str]:
    """All keys and values of plain values, as text."""
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in _texts(part)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [str(value)]


def _count(override: Override, most: int) -> int:
    """How many jobs a sweep over its values makes, up to `most`; 1 without a sweep."""
    swept = override.value() if override.is_sweep_override() else None
    if isinstance(swept, ChoiceSweep):
        return len(swept.list)
    if isinstance(swept, RangeSweep):
        try:
            return sum(1 for _ in islice(swept.range(), most))
        except (ArithmeticError, ValueError, HydraException) as error:
            name = override.key_or_group
            raise ValueError(f"{name}: got a range without an end ({error})") from error
    return 1
