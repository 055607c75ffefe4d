"""Checks that a configuration's values share, each with an error that says what would be right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


# No user means more; what is larger is a slip of the pen, and would end in an overflow far from the file.
DURATION_MS_MAX = 86_400_000.0
"""Of an SLO or a run time: a day."""
MOMENT_S_MAX = 31_536_000.0
"""Of a run: a year."""
RATE_RPS_MAX = 1e9
SCHEDULERS_MAX = 16
"""An epoch names its scheduler in four bits (`roles/runtime/epochs.py`)."""
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
    """The name, or ConfigError where it has other characters than letters, digits, dot, underscore, dash."""
    if not _NAME.fullmatch(value):
        raise ConfigError(f"{where}: is {shown(value)}; it must be 1 to 128 letters, digits, '.', '_' or '-'")
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


def named(path: str, key: object) -> str:
    """The path of a key inside a mapping."""
    return f"{path}.{brief(key)}" if path else brief(key)


def translated(message: str, document: Any, sections: Mapping[str, Any]) -> str:
    """A decoder's message in the words of the file: path first, then what is wrong and what would be right."""
    what, _, at = message.partition(" - at `")
    path = at.rstrip("`").removeprefix("key in ").removeprefix("$").lstrip(".")
    names = [name for name in re.split(r"\[[^\]]*\]|\.", path) if name]
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown:
        key = unknown[1]
        known = sections[names[-1] if names else ""].__struct_encode_fields__
        return f"{named(path, key)}: unknown key{suggestion(key, known)}"
    missing = re.search(r"missing required field `(.*)`", what)
    if missing:
        return f"{named(path, missing[1])}: is missing"
    if what == "Number out of range":
        return f"{path or 'the file'}: is {_shown(document, path)}; it must be a number of ordinary size"
    expected = re.match(r"Expected `(.*)`, got `(.*)`", what)
    if expected:
        right = " or ".join(_WORDS.get(word, word) for word in expected[1].split(" | ") if word != "null")
        if at.startswith("key in "):
            return f"{path or 'the file'}: has a key of the wrong kind; it must be {right}"
        return f"{path or 'the file'}: is {_shown(document, path)}; it must be {right}"
    return f"{path or 'the file'}: {what}"


def _shown(document: Any, path: str) -> str:
    """The value at a path, short; a mapping's values have no name in it and are shown by their kind."""
    value = document
    for index, key in re.findall(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)", path):
        if index == "..." or not isinstance(value, Mapping | Sequence) or isinstance(value, str):
            return "of the wrong kind"
        value = value[int(index)] if index else value.get(key) if isinstance(value, Mapping) else None
    return shown(value)


def unique(names: Sequence[str], where: str) -> None:
    """Raises ConfigError for a name that is there twice; `where` has {} for its place."""
    first: dict[str, int] = {}
    for place, name in enumerate(names):
        if name in first:
            raise ConfigError(
                f"{where.format(place)}: {name!r} is already the name at {where.format(first[name])}"
            )
        first[name] = place
