"""Checks that a configuration's values share, each with an error that says what would be right."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fabric.curve import is_wildcard
from fabric.errors import ConfigError
from fabric.policy_options import brief, shown, suggestion

_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "object": "a mapping",
    "array": "a list",
    "null": "nothing",
}
_ENDPOINTS = {"tcp": "tcp://127.0.0.1:8000", "ipc": "ipc:///run/tenuto/clients"}
_COMPLAINT = re.compile(r"(.*?)(?: - at `(key` in `)?\$([^`]*)`)?", re.DOTALL)
"""A decoder's words: what is wrong, whether it is a key, and where."""
_UNKNOWN_KEY = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
"""Names are parts of paths, so `.` and `..` are none: a host's folder would be the one above it."""


# No user means more; what is larger is a slip of the pen, and would end in an overflow far from the file.
DURATION_MS_MAX = 86_400_000.0
"""Of an SLO or a run time: a day."""
MOMENT_S_MAX = 31_536_000.0
"""Of a run: a year."""
RATE_RPS_MAX = 1e9
SCHEDULERS_MAX = 16
"""An epoch names its scheduler in four bits (`roles/runtime/epochs.py`)."""
LABEL_CHARS_MAX = 63
"""Of a host's name, between dots: DNS knows none longer."""
SEED_MAX = 2**53 - 1
"""What a double still counts exactly: seeds travel in messages, and in JSON."""


def finite(
    value: float, where: str, *, at_most: float, over: float | None = None, at_least: float = 0.0
) -> float:
    """The number, or ConfigError where it is not finite or out of range: over `over`, else `at_least` or more."""
    is_low = value <= over if over is not None else value < at_least
    if is_low or not value <= at_most:
        low = f"over {shown(over)}" if over is not None else f"from {shown(at_least)}"
        raise ConfigError(
            f"{where}: is {shown(value)}; it must be a number, {low} and at most {shown(at_most)}"
        )
    return value


def whole(value: int, where: str, least: int, most: int) -> int:
    """The whole number, or ConfigError where it is out of range."""
    if not least <= value <= most:
        raise ConfigError(f"{where}: is {shown(value)}; it must be from {least:,} to {most:,}")
    return value


def one_of(
    value: str, known: Sequence[str], where: str, others: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The word, or ConfigError with the closest known one. `others`: words of others for known ones, which may look like a wrong one."""
    if value not in known:
        close = suggestion(others.get(value.lower(), value), known)
        raise ConfigError(f"{where}: there is no {shown(value)}{close}")
    return value


def name_like(value: str, where: str) -> str:
    """The name, or ConfigError where it has other characters than letters, digits, dot, underscore, dash, or is `.` or `..`."""
    if not _NAME.fullmatch(value):
        dots = ", and not this" if value in (".", "..") else ""
        raise ConfigError(
            f"{where}: is {shown(value)}; it must be 1 to 128 letters, digits, '.', '_' or '-'{dots}"
        )
    return value


def check_endpoint(value: str, where: str, schemes: Sequence[str]) -> None:
    """Check an address to listen on: ``scheme://host:port``, ``ipc://path``, or ``host:port``.

    Only loopback or a named interface: listening everywhere is refused (design section 9).
    """
    scheme, mark, rest = value.partition("://")
    right = " or ".join(_ENDPOINTS[one] for one in schemes) or "127.0.0.1:8000"
    if (scheme if mark else None) not in (schemes or (None,)):
        raise ConfigError(f"{where}: is {shown(value)}; it must be like {right}")
    if scheme == "ipc" and mark:
        if not rest:
            raise ConfigError(f"{where}: is {shown(value)}; an ipc address needs a path")
        return
    host, colon, port = (rest if mark else value).rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
        raise ConfigError(f"{where}: is {shown(value)}; it must end in :PORT, 0 to 65535 (0: any free one)")
    if is_wildcard(host.strip("[]")):
        raise ConfigError(f"{where}: is {shown(value)}; name the interface's own address, or 127.0.0.1")
    if not all(1 <= len(label) <= LABEL_CHARS_MAX for label in host.removesuffix(".").split(".")):
        raise ConfigError(
            f"{where}: is {shown(value)}; each part of a host's name has 1 to {LABEL_CHARS_MAX} characters"
        )


def named(path: str, key: object) -> str:
    """The path of a key inside a mapping."""
    shown_key = brief(key) or "''"
    return f"{path}.{shown_key}" if path else shown_key


def translated(
    message: str, document: Any, sections: Mapping[str, Any], message_of: Callable[[Any], str]
) -> str:
    """A decoder's message in the words of the file: path first, then what is wrong and what would be right.

    `message_of`: what the decoder says of another document. It writes the keys of mappings as `[...]`, so we try them.
    """
    parts = _COMPLAINT.fullmatch(message)
    assert parts is not None
    what, of_key, at = parts.groups(default="")
    unknown = _UNKNOWN_KEY.fullmatch(message)
    # Of the whole file, which has no path. A key may look as if it went on with one.
    if unknown and unknown[1] in document:
        what, at = message, ""
    found = re.findall(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)", at)
    steps = _steps(found, document, lambda other: message_of(other) == message)
    path = _path(steps)
    unknown = _UNKNOWN_KEY.fullmatch(what)
    if unknown:
        names = [name for _, name in found if name]
        section = sections.get(".".join(names[-2:])) or sections[names[-1] if names else ""]
        known = section.__struct_encode_fields__
        return f"{named(path, unknown[1])}: unknown key{suggestion(unknown[1], known)}"
    missing = re.search(r"missing required field `(.*)`", what)
    if missing:
        return f"{named(path, missing[1])}: is missing"
    path, value = path or "the file", _value_at(document, steps)
    if what == "Number out of range":
        return f"{path}: is {shown(value)}; it must be a number of ordinary size"
    kinds = re.match(r"Expected `([^`]*)`", what)
    length = re.fullmatch(r"Expected `array` of length (\d+), got (\d+)", what)
    if length:
        return f"{path}: is a list of {length[2]}; it must be one of {length[1]}"
    if not kinds:
        return f"{path}: {what}"
    words = [word for word in kinds[1].split(" | ") if word != "null"]
    right = " or ".join(_WORDS.get(word, word) for word in words)
    if of_key:
        key = next(key for key in value if type(key).__name__ not in words)
        return f"{path}: has the key {shown(key)}; a key must be {right}: write it in quotes"
    quoted = ": write it in quotes" if right == "text" and type(value) in (int, float) else ""
    return f"{path}: is {shown(value)}; it must be {right}{quoted}"


def _steps(found: Sequence[tuple[str, str]], document: Any, is_same: Callable[[Any], bool]) -> list[Hashable]:
    """The indexes and keys that lead to what is wrong: of a mapping the last of its first keys that are as wrong without the others."""
    steps: list[Hashable] = []
    for index, name in found:
        if index != "...":
            steps.append(int(index) if index else name)
            continue
        items = list(_value_at(document, steps).items())

        def is_among_first(count: int, items: Sequence[Any] = items) -> bool:
            return is_same(_replaced(document, steps, dict(items[:count])))

        # A file may have a hundred thousand keys: halved, not tried one by one.
        steps.append(items[bisect_left(range(1, len(items)), True, key=is_among_first)][0])
    return steps


def _path(steps: Sequence[Hashable]) -> str:
    path = ""
    for step in steps:
        path = f"{path}[{step}]" if isinstance(step, int) else named(path, step)
    return path


def _value_at(document: Any, steps: Sequence[Hashable]) -> Any:
    value = document
    for step in steps:
        value = value.get(step) if isinstance(value, Mapping) else value[step]
    return value


def _replaced(document: Any, steps: Sequence[Hashable], value: Any) -> Any:
    """The same with another value there."""
    if not steps:
        return value
    first, *others = steps
    copy: Any = dict(document) if isinstance(document, Mapping) else list(document)
    copy[first] = _replaced(document[first], others, value)
    return copy


def unique(names: Sequence[str], where: str) -> None:
    """Raises ConfigError for a name that is there twice; `where` has {} for its place."""
    first: dict[str, int] = {}
    for place, name in enumerate(names):
        if name in first:
            raise ConfigError(
                f"{where.format(place)}: {name!r} is already the name at {where.format(first[name])}"
            )
        first[name] = place
