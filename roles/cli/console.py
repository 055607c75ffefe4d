"""Where commands print for people. What a user's data contains is text there, never rich's markup or emoji."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_ENDLESS = 10_000
"""Columns of a terminal: nothing is folded there."""


def plain_console() -> Console:
    """On stdout. Who wants bold or colour gives a `Text` with a style."""
    return Console(markup=False, emoji=False)


def print_with_whole_names(console: Console, table: Table, may_go: Sequence[str]) -> None:
    """Print a table; where the terminal is too narrow for its names, without columns of `may_go`, the first ones first, and say so.

    A name that is folded cannot be copied, nor found with grep. Where it would be all the same, nothing is left out.
    """
    roomy, whole = console.options.update(width=_ENDLESS), table.columns
    assert {*may_go} <= {column.header for column in whole}, may_go
    for count in range(len(may_go) + 1):
        table.columns = [column for column in whole if column.header not in may_go[:count]]
        if Measurement.get(console, roomy, table).maximum <= console.width:
            break
    else:
        table.columns, count = whole, 0
    console.print(table)
    if count:
        left_out = ", ".join(may_go[:count]).replace("\n", " ")
        console.print(f"left out, as the terminal is narrow: {left_out}")
