"""What `--json` prints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import click


def echo_json(value: object, default: Callable[[Any], str] | None = None) -> None:
    """Print a result as JSON; `default` writes what JSON has no form for.

    NaN and Infinity are null: JSON has no words for them, and strict readers refuse the whole answer. Zero has no sign.
    """
    click.echo(json.dumps(_finite(value), allow_nan=False, default=default))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value + 0.0 if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value


def as_plain(value: Any) -> Any:
    """Structs and dataclasses with their field names, for JSON."""
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if names := getattr(value, "__struct_fields__", ()):
        return {name: as_plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_plain(item) for item in value]
    return value
