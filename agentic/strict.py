"""Plain values (hydra's yaml, a checkpoint's settings, json) into dataclasses, strictly."""

import contextlib
import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
MOST = 10**15  # of a number without a limit of its own
_SHOWN = 200  # most characters of a value in a message


def build(cls: type[T], values: object, field: str = "") -> T:
    """Fills the dataclass `cls` from plain values, strictly.

    Args:
        cls: a dataclass whose fields are int, float, bool, str, `tuple[X, ...]`, `dict[str, X]`,
            dataclasses, or unions of these and None.
        values: a mapping with exactly the fields of `cls` that have no default.
        field: dotted name of `values` in the whole configuration, for messages.

    Raises:
        ValueError: an unknown, missing or wrongly typed field; names it, what was given and what
            is expected.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{field or cls.__name__}: got {_shown(values)}, expected a mapping")
    prefix = f"{field}." if field else ""
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = [str(key)[:_SHOWN] for key in values if key not in known]
    if unknown:
        raise ValueError(f"{prefix}{unknown[0]}: unknown setting, expected one of {list(known)}")
    hints = get_type_hints(cls)
    arguments = {}
    for name, f in known.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], prefix + name)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{prefix}{name}: missing, expected {_spell(hints[name])}")
    return cls(**arguments)


def _convert(hint: Any, value: object, field: str) -> Any:
    """Checks `value` against one type hint; int widens to float, list to tuple, nothing else."""
    if dataclasses.is_dataclass(hint):
        return build(hint, value, field)  # type: ignore[arg-type]
    if isinstance(hint, types.UnionType):
        return _convert_to_one_of(hint, value, field)
    if get_origin(hint) is tuple:
        if isinstance(value, list | tuple):
            return tuple(_convert(get_args(hint)[0], item, field) for item in value)
    elif get_origin(hint) is dict:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            kind = get_args(hint)[1]
            return {key: _convert(kind, item, f"{field}.{key}") for key, item in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of an int that no float holds
            if math.isfinite(value):
                return float(value)
    elif type(value) is hint:
        return value
    raise ValueError(f"{field}: got {_shown(value)}, expected {_spell(hint)}")


def _convert_to_one_of(hint: types.UnionType, value: object, field: str) -> Any:
    """The first type of a union that takes the value."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if value is None and len(kinds) < len(get_args(hint)):
        return None
    if len(kinds) == 1:  # whose own message says more
        return _convert(kinds[0], value, field)
    for kind in kinds:
        try:
            return _convert(kind, value, field)
        except ValueError:
            continue
    raise ValueError(f"{field}: got {_shown(value)}, expected {_spell(hint)}")


def _shown(value: object) -> str:
    """The beginning of it: a file may hold anything of any length."""
    return repr(value)[:_SHOWN]


def _spell(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a list of {_spell(get_args(hint)[0])}, e.g. [a,b]"
    if get_origin(hint) is dict:
        return f"a mapping of names to {_spell(get_args(hint)[1])}"
    if isinstance(hint, types.UnionType):
        return " or ".join("null" if h is type(None) else _spell(h) for h in get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint)


def one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ValueError for a setting that is none of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{field}: got {_shown(value)}, expected one of {list(allowed)}")


def at_least(field: str, value: float, least: float, most: float = MOST) -> None:
    """Raises ValueError for a setting below its least value, for NaN, and beyond all reason."""
    if not value >= least:
        raise ValueError(f"{field}: got {value}, expected at least {least}")
    if value > most:
        raise ValueError(f"{field}: got {str(value)[:_SHOWN]}, expected at most {most:,}")


def between(field: str, value: float, low: float, high: float) -> None:
    """Raises ValueError for a setting outside [low, high]."""
    if not low <= value <= high:
        raise ValueError(f"{field}: got {value}, expected a value in [{low}, {high}]")
