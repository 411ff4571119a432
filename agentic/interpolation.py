"""Composed settings as plain values, which may name other settings and nothing else.

OmegaConf's `${name:...}` calls a function: the default ones read the environment and files of its
own. `${name}`, another setting, is all that settings need.
"""

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

MOST = 10**6  # characters and values of all settings; names of names of names multiply
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_NAME = re.compile(r"\.*[\w/%+-]+(?:\.[\w/%+-]+|\[[\w/%+-]+\])*")


def plain(config: DictConfig) -> dict[str, Any]:
    """The settings with all that they refer to in place.

    Raises:
        ValueError: a setting is missing, calls a function, refers to none, to itself, or to what
            makes the settings longer than `MOST`; names it.
    """
    try:
        _Lengths(OmegaConf.to_container(config, resolve=False)).of(())
        for name in sorted(OmegaConf.missing_keys(config)):
            raise ValueError(f"{name}: missing, expected {name}=...")
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).partition("\n")[0]
        raise ValueError(f"{error.full_key}: {reason}") from error
    except RecursionError as error:
        raise ValueError("settings: they refer to each other too often") from error


def check_calls(field: str, text: str, allowed: tuple[str, ...] = ()) -> None:
    """Raises ValueError where a setting's text calls a function that is not allowed."""
    for called in _REFERENCE.findall(text):
        if called.partition(":")[0] in allowed and ":" in called:
            continue
        if not _NAME.fullmatch(called):
            raise _refused(field, text)
    if "${" in _REFERENCE.sub("", text):  # a reference within a reference
        raise _refused(field, text)


def check_values(values: Any, field: str = "settings") -> None:
    """Raises ValueError where resolved settings still refer to anything."""
    if isinstance(values, dict):
        for key, item in values.items():
            check_values(item, str(key) if field == "settings" else f"{field}.{key}")
    elif isinstance(values, list):
        for item in values:
            check_values(item, field)
    elif isinstance(values, str) and "${" in values:
        raise ValueError(f"{field}: got {values[:200]!r}, expected a value")


def _refused(field: str, text: str) -> ValueError:
    return ValueError(
        f"{field}: got {text[:200]!r}, expected a value, or ${{name}} of another setting; nothing "
        "else is looked up"
    )


class _Lengths:
    """How long settings are when all that they refer to is in place; each is measured once."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self._known: dict[tuple[str, ...], int | None] = {}  # None: being measured

    def of(self, path: tuple[str, ...]) -> int:
        """Of the value at a path; 0 where there is none, which OmegaConf will say."""
        value = self._values
        for name in path:
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                return 0
        return self._measure(value, path)

    def _measure(self, value: Any, path: tuple[str, ...]) -> int:
        field = ".".join(path)
        if path in self._known:
            known = self._known[path]
            if known is None:
                raise ValueError(f"{field}: refers to itself")
            return known
        self._known[path] = None
        length = 1
        if isinstance(value, dict):
            length += sum(self._measure(item, (*path, str(key))) for key, item in value.items())
        elif isinstance(value, list):
            length += sum(self._measure(item, (*path, str(k))) for k, item in enumerate(value))
        elif isinstance(value, str):
            check_calls(field, value)
            length += len(value) + sum(self.of(_target(r, path)) for r in _REFERENCE.findall(value))
        if length > MOST:
            raise ValueError(f"{field or 'settings'}: longer than {MOST:,} characters and values")
        self._known[path] = length
        return length


def _target(reference: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of what is referred to at a path; leading dots count from there."""
    name = reference.lstrip(".")
    dots = len(reference) - len(name)
    names = tuple(re.findall(r"[^.\[\]]+", name))
    return (path[: max(0, len(path) - dots)] if dots else ()) + names
