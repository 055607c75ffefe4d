"""Moments of what roles said, as people write and read them."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Final

import click

_UNITS_MS: Final = {"s": 1e3, "m": 60e3, "h": 3_600e3, "d": 86_400e3}


class Ago(click.ParamType[float]):
    """A while ago: `90s`, `10m`, `2h`, `1d`."""

    name = "ago"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """In ms."""
        found = re.fullmatch(r"([0-9]{1,6})([smhd])", str(value))
        if found is None:
            self.fail(f"{str(value)[:40]!r} is no such time; it must be like 90s, 10m, 2h or 1d", param, ctx)
        return int(found[1]) * _UNITS_MS[found[2]]


def shown_moment(at_ms: float) -> str:
    """By this machine's clock. `at_ms`: since 1970."""
    return datetime.fromtimestamp(at_ms / 1e3).astimezone().isoformat(" ", "milliseconds")[:23]
