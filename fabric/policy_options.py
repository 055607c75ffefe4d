"""Options of a policy as data: what may be written under its name, and the check that says what is wrong.

A policy is chosen by a name, or by a name with options (design section 10). Whoever registers a policy lists
its options once; reading a configuration, the registry and `tenuto config show` all use that list.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from msgspec import Struct

from fabric.errors import ConfigError

PREFIX_CHARS_MIN = 3
"""Fewer are the beginning of too many names to be meant as one."""


class _Short(reprlib.Repr):
    """Of containers that Python does not know as its own only the kind and size: their text may be of any length."""

    def repr_instance(self, value: Any, level: int) -> str:
        """A value of any other class."""
        if isinstance(value, bytes | bytearray | memoryview | Mapping | Sequence | AbstractSet):
            try:
                return f"<{type(value).__name__} of {len(value)}>"
            except Exception:  # noqa: BLE001  somebody else's class, which may raise anything
                return f"<{type(value).__name__}>"
        return super().repr_instance(value, level)


_SHORT = _Short()  # a few YAML aliases make a list whose whole text does not fit into memory
_SHORT.maxother = _SHORT.maxlong = 10_000
_SHORT.maxstring = 60


class Choice(Struct, frozen=True):
    """One of a few words; the first is the default, unless the option may be absent."""

    names: tuple[str, ...]
    is_default_given: bool = True

    @property
    def default(self) -> str | None:
        """What holds where nothing is written; None: the option is absent then."""
        return self.names[0] if self.is_default_given else None

    def check(self, value: Any, where: str) -> str:
        """The word, or ConfigError with the closest one."""
        if isinstance(value, str) and value in self.names:
            return value
        raise ConfigError(f"{where} is {shown(value)}; it must be one of {', '.join(self.names)}")


class Number(Struct, frozen=True):
    """A number over `minimum` (or at it), up to `maximum`; `default` None means the option may be absent."""

    default: float | None
    minimum: float = 0.0
    maximum: float = 1e9
    is_minimum_allowed: bool = False
    is_whole: bool = False

    def check(self, value: Any, where: str) -> float:
        """The number, or ConfigError with its range."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_over = is_number and (value > self.minimum or (value == self.minimum and self.is_minimum_allowed))
        # NaN is over nothing, and an int may be too large for every function that takes a float.
        if not is_over or value > self.maximum or (self.is_whole and value != int(value)):
            kind = "a whole number" if self.is_whole else "a number"
            bound = "at least" if self.is_minimum_allowed else "over"
            raise ConfigError(
                f"{where} is {shown(value)}; it must be {kind}, {bound} {shown(self.minimum)}"
                f" and at most {shown(self.maximum)}"
            )
        return int(value) if self.is_whole else float(value)


class Flag(Struct, frozen=True):
    """True or false."""

    default: bool

    def check(self, value: Any, where: str) -> bool:
        """The flag; ConfigError for anything else, 0 and 1 too."""
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where} is {shown(value)}; it must be true or false")


class Free(Struct, frozen=True):
    """Anything; the policy itself checks it. It has no default."""

    default: None = None

    def check(self, value: Any, where: str) -> Any:  # noqa: ARG002  the shape every option has
        """The value as it is."""
        return value


Option = Choice | Number | Flag | Free
Schema = Mapping[str, Option]


def checked_options(schema: Schema, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The given options with the defaults filled in; an option without a default that is absent stays absent.

    Raises ConfigError for an unknown option, with the closest known one, or for a value that cannot be.
    """
    for name in given:
        if name not in schema:
            raise ConfigError(f"{where}.{brief(name)}: unknown option{suggestion(name, schema)}")
    options: dict[str, Any] = {}
    for name, option in schema.items():
        if name in given:
            options[name] = option.check(given[name], f"{where}.{name}")
        elif option.default is not None:
            options[name] = option.default
    return options


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    if isinstance(value, float):
        return f"{value:,.12g}" if abs(value) < 1e12 else f"{value:g}"
    return written(value)


def written(value: object) -> str:
    """A value as Python writes it, a float too, in one line and cut where it is long."""
    if isinstance(value, str):
        return brief(repr(value))
    try:
        text = _SHORT.repr(value)
    except ValueError:  # more digits than Python writes
        return "a number of thousands of digits"
    return brief(text) if isinstance(value, int) or len(text) <= 60 else f"{text[:40]}…"  # it is cut already


def brief(text: object) -> str:
    """A text in a message, cut where it is long; what would break the line, or is no character, is escaped."""
    whole = str(text)
    if not whole.isprintable():
        whole = repr(whole)[1:-1]
    return whole if len(whole) <= 60 else f"{whole[:40]}… ({len(whole)} characters)"


def counted(number: int, thing: str) -> str:
    """`1 wheel`, `2 wheels`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """How an error about an unknown name goes on: the closest known one, else all of them."""
    names = list(known)
    close = [one for one in names if one.lower() == str(name).lower()]
    close = close or difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    close = close or [
        one for one in names if len(str(name)) >= PREFIX_CHARS_MIN and one.startswith(str(name))
    ]
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there is {', '.join(names)}" if names else "; there are none here"
