"""Errors of the user's, each in one line: the setting or file, what was given, what is expected."""

import re
import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from envs import expand

_LONGEST = 1000  # characters: what a message quotes may be of any length
# What hydra says of a setting, and what is said here; hydra's own advice is for other software.
_OF_SETTINGS = (
    (r"Could not override '([^']*)'", "{0}: unknown setting, expected one that --cfg job shows"),
    (r"Could not delete .*'([^']*)' does not exist", "{0}: unknown setting, cannot be taken out"),
    (r"Could not append .* already at '([^']*)'", "{0}: is there already, expected {0}=value"),
    (
        r"(?:Ambiguous value for argument|Sweep parameters) '([^'=]*)=(.*)'",
        "{0}: got {1!r}, expected one value, a list [a,b] or, with -m, one job for each",
    ),
    (r"Error merging override ([^=]*)=(.*)", "{0}: got {1!r}, expected another kind of value"),
    (r"Multiple values for ([^.]*)\.", "{0}: given several times, expected once"),
)


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks and without hydra's tail."""
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror}"
    text = str(error)
    if isinstance(error, MissingConfigException):
        text = _unknown_choice(error)
    elif isinstance(error, ConfigCompositionException):
        text = text or str(error.__cause__)
        for pattern, words in _OF_SETTINGS:
            if found := re.match(pattern, text, re.DOTALL if "already" in pattern else 0):
                text = words.format(*found.groups())
                break
    elif isinstance(error, OmegaConfBaseException) and error.full_key:
        text = f"{error.full_key}: {str(error.msg or error).partition(chr(10))[0]}"
    # Hydra's long tail tells where it searched, which is inside the package.
    said = " ".join(text.split("Config search path")[0].split())
    return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."


def spell_setting(name: str, text: str) -> str:
    """The word of a shell's command line that sets `name` to the text, quoted where need be."""
    setting = f"{name}={text}"
    try:
        override = OverridesParser.create().parse_override(setting)
        plain = not override.is_sweep_override() and override.value() == text
    except HydraException:
        plain = False
    if not plain:  # hydra takes backslashes for its own where a quote follows
        doubled = re.sub(r"(\\+)(?='|$)", r"\1\1", text)
        quoted = doubled.replace("'", "\\'")
        setting = f"{name}='{quoted}'"
    return shlex.quote(setting)


def _unknown_choice(error: MissingConfigException) -> str:
    """A group has no such file."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if group == "task" and error.options:
        try:
            expand(name)
        except ValueError as unknown:
            return str(unknown)
        return f"task: {name} has no settings in configs/task"
    if group and error.options:
        return f"{group}: got {name!r}, expected one of {list(error.options)}"
    return str(error)
