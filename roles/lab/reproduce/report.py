"""What an experiment of a paper came to: its stated numbers beside ours, row by row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """A paper's "2.0 to 2.4"."""

    low: float
    high: float


Value = str | float | Range | None
"""A number, a range or words; None where the paper (or we) state nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity: `what` it is with its unit, the paper's value, ours, and the reason where they differ."""

    what: str
    paper: Value
    ours: Value
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's, 1 inside its range, else over the end that is closer; None where there are no two numbers."""
        if not isinstance(self.ours, int | float):
            return None
        paper = self.paper
        if isinstance(paper, Range):
            paper = min(max(self.ours, paper.low), paper.high)
        if not isinstance(paper, int | float):
            return None
        if paper == self.ours:
            return 1.0
        return self.ours / paper if paper else None


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
