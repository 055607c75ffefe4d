"""What profile files hold, checked as it is read: whole numbers where there are counts, and numbers that are finite.

The bounds leave room for whatever is computed from the numbers: products and quotients of a few stay finite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from fabric.errors import ProfileError
from fabric.policy_options import written

NUMBER_MAX: Final = 2.0**53
"""What a double still counts exactly."""
POSITIVE_MIN: Final = 1e-9
"""Less than any run time in ms or clock in MHz, and far from where a quotient overflows."""

NotNegative = Annotated[float, Meta(ge=0, le=NUMBER_MAX)]
Positive = Annotated[float, Meta(ge=POSITIVE_MIN, le=NUMBER_MAX)]
SharePercent = Annotated[float, Meta(ge=POSITIVE_MIN, le=100)]
Count = Annotated[int, Meta(ge=0, le=int(NUMBER_MAX))]
BatchSize = Annotated[int, Meta(ge=1, le=int(NUMBER_MAX))]

TypeT = TypeVar("TypeT")
_COMPLAINT: Final = re.compile(r"(.*?)(?: - at `(key` in `)?\$\.?([^`]*)`)?", re.DOTALL)
"""A decoder's words: what would be right, whether of a key, and where."""
_STEP: Final = re.compile(r"\.?([^.\[\]]+)|\[([^\]]*)\]")
_ANY_KEY: Final = "[...]"
"""In the words, some key of an object."""
_WORDS: Final = {
    r"Expected (.*?)(, got .*)?": r"it must be \1",
    r"Object missing required field (.*)": r"\1 is missing",
    r"Object contains unknown field (.*)": r"\1 is none of its fields",
    r"Number out of range": f"it must be at most {NUMBER_MAX:g}",
}
_KINDS: Final = {
    "`int`": "a whole number",
    "`int | null`": "a whole number or null",
    "`float`": "a number",
    "`float | null`": "a number or null",
    "`str`": "text",
    "`object`": "an object",
    "`object | null`": "an object or null",
    "`array`": "a list",
    "`array` of": "a list of",
    "`array | null`": "a list or null",
}


def converted(document: object, type_: type[TypeT]) -> TypeT:
    """What a file said, as that type. Raises ProfileError that names the field, what it is and what would be right."""
    try:
        return msgspec.convert(document, type_, str_keys=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ProfileError(_explained(error, document, type_)) from error


def checked_number(entry: Mapping[str, Any], name: str, least: float = -NUMBER_MAX) -> float:
    """`entry[name]`, at least that large. Raises ProfileError where it is missing, no number or out of range."""
    value = entry.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= NUMBER_MAX:
        return value
    raise ProfileError(f"{name} is {written(value)}; it must be a number from {least:g} to {NUMBER_MAX:g}")


def _explained(error: Exception, document: object, type_: type) -> str:
    complaint = _COMPLAINT.fullmatch(str(error))
    if complaint is None or isinstance(error, UnicodeEncodeError):
        return "a name in it holds half of a character; it must be whole text"
    right, is_key, path = complaint[1], complaint[2] is not None, complaint[3] or ""
    for words, ours in _WORDS.items():
        right = re.sub(rf"{words}\Z", ours, right, flags=re.DOTALL)
    for kind, ours in _KINDS.items():
        right = right.replace(kind, ours)
    if isinstance(document, Mapping) and (is_key or _ANY_KEY in path):
        key = _first_wrong(document, path.partition("[")[0], type_)
        if is_key and _ANY_KEY not in path:
            return f"{path} has the key {written(key)}; {right}"
        path = path.replace(_ANY_KEY, f"[{key}]", 1)
    if is_key or _ANY_KEY in path:
        return f"{path}: a key or a value in it; {right}"
    value: Any = document
    for field, place in _STEP.findall(path):
        value = value[field] if field else value[int(place) if isinstance(value, list) else place]
    return f"{path or 'it'} is {written(value)}; {right}"


def _first_wrong(document: Mapping[str, Any], name: str, type_: type) -> str:
    """The first key of that object of the document with which alone in it the document is wrong."""
    for key, value in document[name].items():
        try:
            msgspec.convert({**document, name: {key: value}}, type_, str_keys=True)
        except msgspec.ValidationError:
            return str(key)
    raise AssertionError("some key was wrong")
