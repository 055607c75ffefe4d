"""Arbitrary well-formed messages, made from the structs' own annotations: a new message is covered without being listed.

Drawn from a `random.Random`, thousands for one example. `names` says what ids may be called: those of a correct run
make a message that nearly fits, which is what a check has to tell from one that does.
"""

from __future__ import annotations

import random
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from msgspec.structs import replace

from fabric import frames
from fabric.limits import (
    CHOICES,
    FLOAT_BOUNDS,
    INTEGER_BOUNDS,
    INTEGER_MAX,
    NAME_CHARS_MAX,
    OutOfBounds,
    check,
    float_bounds,
)
from fabric.messages import AnyMessage, Ledger, Message

TEXTS = (
    "",
    "x",
    "[]",
    "{}",
    '[{"name": "x"}]',
    "[" * 3_000,
    '[{"name": 5}]',
    "memory://a/b/c",
    "ipc:///x",
    "é" * 64,
    "n" * NAME_CHARS_MAX,
)
INTEGERS = (0, 0, 1, 1, 2, 3, 7, 64, 65_536, INTEGER_MAX)
FLOATS = (0.0, 0.0, 1e-300, 1e-3, 0.5, 1.0, 5.0, 20.0, 1e3, 1e9, 1e18, -1.0)
TYPES: tuple[type, ...] = typing.get_args(AnyMessage)


class Hostile:
    """Says anything that the wire allows."""

    def __init__(self, draws: random.Random, names: Mapping[str, Sequence[Any]]) -> None:
        self._draws = draws
        self._names = names

    def message(self, types_: Sequence[type] = TYPES) -> Any:
        """One of these types, with any content."""
        return self._within_bounds(lambda: self._struct(self._draws.choice(types_)))

    def mutant(self, message: Any) -> Any:
        """The same message but for a field or two."""

        kind: Any = type(message)

        def mutate() -> Any:
            hints = _hints(kind)
            names = self._draws.choices(list(hints), k=self._draws.choice((1, 1, 2))) if hints else []
            return replace(message, **{name: self._value(kind, name, hints[name]) for name in names})

        return self._within_bounds(mutate)

    def _within_bounds(self, make: typing.Callable[[], Any]) -> Any:
        while True:
            made = make()
            try:
                check(made)
            except OutOfBounds:  # a sum or a length, which no single field knows of
                continue
            return made

    def _struct(self, struct: type) -> Any:
        return struct(**{name: self._value(struct, name, hint) for name, hint in _hints(struct).items()})

    def _value(self, owner: type, name: str, hint: Any) -> Any:
        known = self._names.get(getattr(hint, "__name__", ""))
        if known is not None and self._draws.random() < 0.95:
            return self._draws.choice(known)
        hint = getattr(hint, "__supertype__", hint)
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if hint is bool:
            return self._draws.random() < 0.5
        if hint is str:
            return self._draws.choice(CHOICES.get((owner, name), TEXTS))
        if hint is int:
            low, high = INTEGER_BOUNDS.get(name, (0, INTEGER_MAX))
            return min(high, max(low, self._draws.choice(INTEGERS)))
        if hint is float:
            return self._float(owner, name)
        if origin is tuple and inner[-1] is not ...:
            return tuple(self._value(owner, name, item) for item in inner)
        if origin is tuple:
            return tuple(
                self._value(owner, name, inner[0]) for _ in range(self._draws.choice((0, 1, 1, 2, 3, 8)))
            )
        if origin is dict:
            return {
                self._draws.choice(TEXTS): self._draws.choice(FLOATS)
                for _ in range(self._draws.randint(0, 3))
            }
        if origin is types.UnionType:
            return None if self._draws.random() < 0.5 else self._value(owner, name, inner[0])
        return self._struct(hint)

    def _float(self, owner: type, name: str) -> float:
        number = self._draws.choice(FLOATS)
        if owner is Ledger or name in FLOAT_BOUNDS or name.endswith("_ms"):
            low, high = (-1e9, 1e9) if owner is Ledger else float_bounds(owner, name)
            return min(high, max(low, number))
        return number


def check_sendable(action: object) -> None:
    """Whatever peers have said, what a core says of it is within a message's bounds. Raises LocalProtocolError."""
    message = getattr(action, "message", None)
    if isinstance(message, Message):
        frames.pack(typing.cast("AnyMessage", message))


@cache
def _hints(struct: type) -> Mapping[str, Any]:
    return typing.get_type_hints(struct)
