"""What a benchmark found: tables, and lines that it holds or misses. Printed, and written for `report.py`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

AWAKE_VARIABLE = "BENCHMARK_CORES_AWAKE"
"""Set by `benchmarks/awake.py`."""

Cell = str | int | float | None
"""None is shown as a dash."""


@dataclass(slots=True)
class Table:
    """`caption` says what is measured and in which unit."""

    caption: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Line:
    """A figure, and the least or the most that it may be. Exactly one of the two is given."""

    what: str
    measured: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_held(self) -> bool:
        """Not so where nothing was measured (nan)."""
        above = self.at_least is None or self.measured >= self.at_least
        below = self.at_most is None or self.measured <= self.at_most
        return above and below

    @property
    def bound(self) -> str:
        """The line in words."""
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


@dataclass(slots=True)
class Figures:
    """All of one run; `load_average` is that of its start, `remarks` whatever is no number.

    `is_awake`: the cores were kept from going idle (`benchmarks/awake.py`). `device`: what `benchmarks/device.py` says of a
    real device; empty: none was used.
    """

    title: str
    tables: list[Table] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    load_average: float = field(default_factory=lambda: os.getloadavg()[0])
    is_awake: bool = field(default_factory=lambda: AWAKE_VARIABLE in os.environ)
    device: str = ""

    def table(self, caption: str, *columns: str) -> Table:
        """A new table, to be filled."""
        self.tables.append(Table(caption, columns))
        return self.tables[-1]

    def show(self) -> None:
        """Print everything."""
        print(f"{self.title}; {os.cpu_count()} cores, {self.conditions}")
        for table in self.tables:
            print(f"\n{table.caption}")
            for row in aligned([table.columns, *(tuple(map(shown, row)) for row in table.rows)]):
                print(f"  {row}")
        if self.lines:
            print()
        for line in self.lines:
            verdict = "held" if line.is_held else "MISSED"
            print(f"{verdict:6}  {line.what}: {shown(line.measured)} (line {line.bound})")
        for remark in self.remarks:
            print(remark)

    @property
    def conditions(self) -> str:
        """Under what it was measured."""
        kept = ", cores kept from going idle" if self.is_awake else ""
        device = f"; {self.device}" if self.device else ""
        return f"load average {self.load_average:.2f}{kept}{device}"

    def as_json(self) -> dict[str, Any]:
        """What `read` takes."""
        return asdict(self)


def read(document: dict[str, Any]) -> Figures:
    """Figures that were written as JSON."""
    tables = [
        Table(one["caption"], tuple(one["columns"]), [tuple(row) for row in one["rows"]])
        for one in document["tables"]
    ]
    lines = [Line(**line) for line in document["lines"]]
    return Figures(
        document["title"],
        tables,
        lines,
        document["remarks"],
        document["load_average"],
        is_awake=document.get("is_awake", False),
        device=document.get("device", ""),
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`, the same for every benchmark."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def tell(figures: Figures, path: Path | None) -> None:
    """Print the figures; where a path is given, write them too."""
    figures.show()
    if path is not None:
        path.write_text(json.dumps(figures.as_json(), indent=1) + "\n", encoding="utf-8")


def shown(cell: Cell) -> str:
    """Three figures that count, and whole numbers whole."""
    match cell:
        case None:
            return "-"
        case float():
            if abs(cell) >= 1_000:
                return f"{cell:,.0f}"
            return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
        case int():
            return f"{cell:,}"
        case _:
            return cell


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; the first to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    ]
