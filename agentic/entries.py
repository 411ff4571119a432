"""The form of an evaluation's entries, for those who read results.json of anyone."""

import math
from collections.abc import Sequence
from typing import Any

LARGEST = 1e12  # of a number in an entry, far beyond any return

_INTERVAL = (None, [float])
_MEAN = {"mean": (None, float), "interval_over_contexts": _INTERVAL}
_STATISTIC = _MEAN | {"contexts": int, "normalised": (None, _MEAN)}
_PART = {
    "returns": [[(None, float)]],
    "failed": {"count": int},
    "reached": {"contexts": int, "trial": [(None, int)]},
    "by_trial": [_STATISTIC],
    "first": _STATISTIC,
    "last": _STATISTIC,
    "mean": _STATISTIC,
    "max": _STATISTIC,
    "slope": _STATISTIC,
}
_ENTRY = {
    "task": str,
    "target": {"asked": str, "return": float},
    "contexts": int,
    "trials": int,
    "kept": (None, _PART),
    "reset": (None, _PART),
    "kept_minus_reset": (None, {"last": _STATISTIC}),
    "max_beside": {
        "kept": (None, _STATISTIC),
        "independent": (None, _STATISTIC),
        "dataset": (None, float),
    },
    "random": {"mean": float},
    "dataset": {"median": float, "p90": float, "max": float},
    "checkpoint": str,
    "checkpoint_step": int,
    "method": str,
    "layout": str,
    "train_trajectories": int,
    "train_steps": int,
    "train_settings": str,
    "train_seed": int,
    "evaluation_seed": int,
}


def check_entries(entries: Any) -> None:
    """Checks what readers of entries rely on; more keys are left alone.

    Raises:
        ValueError: one is not as `results.task_result` makes them; names the place, got and
            expected.
    """
    check("results", entries, [_ENTRY])
    for number, entry in enumerate(entries):
        place = f"results.{number}"
        if entry["kept"] is None and entry["reset"] is None:
            raise ValueError(f"{place}: has neither kept nor reset, expected one of them")
        shape = entry["contexts"], entry["trials"]
        if min(shape) < 1:
            raise ValueError(f"{place}: got {shape} contexts and trials, expected 1 or more")
        for context in ("kept", "reset"):
            if entry[context] is not None:
                _check_returns(f"{place}.{context}", entry[context]["returns"], *shape)


def check(field: str, value: Any, form: Any) -> None:
    """Checks a plain value.

    Args:
        field: dotted name, for messages.
        value: of json.
        form: a type (a float may be an int); {key: form} for a dict that has these keys at least;
            [form] for a list of any length; a tuple of alternatives, of which None is the first.

    Raises:
        ValueError: it is of another form.
    """
    if isinstance(form, tuple):
        if value is not None:
            check(field, value, form[1])
    elif isinstance(form, dict):
        if not isinstance(value, dict):
            raise _unexpected(field, value, "a mapping")
        for key, of_item in form.items():
            if key not in value:
                raise ValueError(f"{field}.{key}: missing")
            check(f"{field}.{key}", value[key], of_item)
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise _unexpected(field, value, "a list")
        for index, item in enumerate(value):
            check(f"{field}.{index}", item, form[0])
    elif form in (int, float):
        known = type(value) is int or (form is float and type(value) is float)
        if not (known and abs(value) <= LARGEST and math.isfinite(value)):
            raise _unexpected(field, value, f"{form.__name__} up to {LARGEST:g}")
    elif type(value) is not form:
        raise _unexpected(field, value, form.__name__)


def _check_returns(field: str, returns: Sequence[list], contexts: int, trials: int) -> None:
    """Of every context all trials, the first ones run: what readers count on."""
    if len(returns) != contexts or any(len(row) != trials for row in returns):
        raise ValueError(f"{field}.returns: expected {contexts} lists of {trials} returns")
    for row in returns:
        ran = [value is not None for value in row]
        if not ran[0] or sorted(ran, reverse=True) != ran:
            raise ValueError(f"{field}.returns: got trials left out before the last that was run")


def _unexpected(field: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{field}: got {str(value)[:100]!r}, expected {expected}")
