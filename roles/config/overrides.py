"""Values that the command line or the environment give instead of the file: flag before environment before file before default.

A value is named as `tenuto config show` prints it, such as `cluster.gpus` or `models[0].slo_ms`, or by the name of what is listed:
`models.resnet50.slo_ms`, `cluster.nodes.a.gpus`. The environment has them in `TENUTO_SET`, separated by semicolons or lines.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from fabric.errors import ConfigError
from fabric.policy_options import brief
from roles.config.documents import read_value

VARIABLE: Final = "TENUTO_SET"
_PLACE: Final = re.compile(r"\[(\d{1,6})\]")
_NAMES: Final = ("name", "host")
"""By which of its keys an element of a list is named."""


class Override(Struct, frozen=True):
    """`origin`: who gives the value, as errors and `config show` say it."""

    path: str
    value: Any
    origin: str


def read_override(text: str, origin: str) -> Override:
    """`PATH=VALUE`, the value as YAML. Raises ConfigError."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"{origin}: {brief(text)} must be PATH=VALUE, such as cluster.gpus=4")
    return Override(path.strip(), read_value(value, f"{origin} {path.strip()}"), origin)


def of_environment(environment: Mapping[str, str] | None = None) -> list[Override]:
    """What the environment says. Raises ConfigError."""
    given = (os.environ if environment is None else environment).get(VARIABLE, "")
    parts = [part for part in re.split(r"[;\n]", given) if part.strip()]
    return [read_override(part, f"${VARIABLE}") for part in parts]


def overridden(
    document: Mapping[str, Any], overrides: Sequence[Override]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The document with these values, the last one of a path counts; and where each came from, by its path. Raises ConfigError."""
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    origins: dict[str, str] = {}
    for one in overrides:
        try:
            path = _set(changed, one.path, one.value)
        except ConfigError as error:
            raise ConfigError(f"{one.origin} {brief(one.path)}: {error}") from error
        origins[path] = one.origin
    return changed, origins


def _set(document: dict[str, Any], path: str, value: Any) -> str:
    """Set it; the path as `config show` prints it."""
    here: Any = document
    walked, rest = "", path
    while True:
        key, rest, walked = _step(here, rest, walked)
        if not rest:
            here[key] = copy.deepcopy(value)
            return walked
        if isinstance(here, dict) and not isinstance(here.get(key), dict | list):
            here[key] = {}  # was not there, or was a single word such as the name of a policy
        here = here[key]


def _step(here: Any, rest: str, walked: str) -> tuple[Any, str, str]:
    """The next key of `rest`, what is left of it, and the path so far."""
    if isinstance(here, list):
        place, left = _element(here, rest, walked)
        return place, left, f"{walked}[{place}]"
    if not isinstance(here, dict):
        raise ConfigError(f"{walked} is no mapping")
    key = re.split(r"[.\[]", rest, maxsplit=1)[0]
    if not key:
        raise ConfigError("is no path; write it like cluster.gpus or models.resnet50.slo_ms")
    left = rest[len(key) :].removeprefix(".")
    return key, left, f"{walked}.{key}" if walked else key


def _element(listed: Sequence[Any], rest: str, walked: str) -> tuple[int, str]:
    match = _PLACE.match(rest)
    if match is not None:
        place = int(match[1])
        if place >= len(listed):
            raise ConfigError(f"{walked} has {len(listed)} elements, counted from 0")
        return place, rest[match.end() :].removeprefix(".")
    names = {_name(one): place for place, one in enumerate(listed)}
    # Names may have dots themselves: the longest that fits is meant.
    fitting = [name for name in names if rest == name or rest.startswith(f"{name}.")]
    if not fitting:
        known = ", ".join(map(brief, list(names)[:10]))
        raise ConfigError(f"{walked} has no {brief(rest.partition('.')[0])}; there is {known}")
    name = max(fitting, key=len)
    return names[name], rest[len(name) :].removeprefix(".")


def _name(element: Any) -> str:
    found = [element[key] for key in _NAMES if key in element] if isinstance(element, dict) else []
    return str(found[0]) if found else ""
