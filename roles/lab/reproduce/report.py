"""What an experiment of a paper came to: its stated numbers beside ours, row by row."""

from __future__ import annotations

from dataclasses import dataclass

Value = str | float | None
"""A number, or words; None where the paper (or we) state nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity: `what` it is with its unit, the paper's value, ours, and the reason where they differ."""

    what: str
    paper: Value
    ours: Value
    note: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers of ours alone, as a figure's bars: `rows` are (name, a value for each column)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Value, ...]], ...]


@dataclass(frozen=True, slots=True)
class Reproduction:
    """One experiment. `source` is where the paper's numbers stand: paper and section, table or figure.

    `grids` are for figures whose bars the paper does not label.
    """

    name: str
    title: str
    source: str
    rows: tuple[Row, ...]
    grids: tuple[Grid, ...] = ()
