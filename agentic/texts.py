"""Plain values from files of anyone: json and yaml that neither run code nor blow up."""

import json
from pathlib import Path
from typing import Any, NoReturn

import yaml

YAML_BYTES = 2**20  # of a file of settings


def read_json(path: Path) -> Any:
    """The value in a file; see `parse_json`.

    Raises:
        ValueError: as there; does not name the file.
        OSError: it cannot be read.
    """
    return parse_json(path.read_text(encoding="utf-8"))


def parse_json(text: str, *, finite: bool = True) -> Any:
    """The value of a text.

    Raises:
        ValueError: it is not json; with `finite` not as the standard has it, without NaN.
    """
    try:
        return json.loads(text, parse_constant=_refuse if finite else None)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_yaml(path: Path) -> Any:
    """The value in a file of settings.

    Raises:
        ValueError: it is not yaml of plain values, is longer than `YAML_BYTES`, or has aliases,
            which a few lines can multiply into any size; does not name the file.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(YAML_BYTES + 1)
    if len(content) > YAML_BYTES:
        raise ValueError(f"it is longer than {YAML_BYTES:,} bytes")
    try:
        return yaml.load(content, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        # Scalars of an explicit type, `!!timestamp x`, fail in yaml in as many ways.
        raise ValueError(f"{type(error).__name__}: {error}") from error


class _Loader(yaml.SafeLoader):
    """Plain values only, each written out where it is."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.YAMLError(f"it has an alias in line {mark.line + 1}, expected none")
        return super().compose_node(parent, index)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"got {text}, expected a finite number")
