"""Reproductions as Markdown (`docs/reproduction.md`) and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from roles.reproduce.report import Reproduction, Value

_HEAD = """\
# The papers' figures beside ours

Written by `tenuto reproduce --all --write docs/reproduction.md`; not edited by hand. Everything runs in emulation:
plans come from the policies in `policies/placement/`, runs from the simulator with the shipped profiles. A note says
where a difference comes from. An empty cell: the paper states no number, or there is none to give.
"""


def markdown(found: Sequence[Reproduction]) -> str:
    """The whole document, experiments in the given order."""
    contents = "\n".join(f"- [{_plain(one.title)}](#{one.name})" for one in found)
    return "\n".join([_HEAD, contents, *(_chapter(one) for one in found)])


def value_text(value: Value) -> str:
    """A cell: numbers with six significant digits, nothing for None."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, int | float) else value


def rows_with_numbers(found: Reproduction) -> list[tuple[str, float, float]]:
    """(what, paper, ours) of the rows where both are numbers: what a picture can show."""
    return [
        (row.what, float(row.paper), float(row.ours))
        for row in found.rows
        if isinstance(row.paper, int | float) and isinstance(row.ours, int | float)
    ]


def as_json(found: Reproduction) -> dict[str, object]:
    """For tools."""
    return {
        "name": found.name,
        "title": found.title,
        "source": found.source,
        "rows": [
            {"what": row.what, "paper": row.paper, "ours": row.ours, "note": row.note} for row in found.rows
        ],
    }


def _chapter(found: Reproduction) -> str:
    lines = [
        f'\n<a id="{found.name}"></a>\n',
        f"## {_plain(found.title)}\n",
        f"{found.source} Again: `tenuto reproduce {found.name}`\n",
        "| what | paper | ours | note |",
        "|---|---|---|---|",
    ]
    for row in found.rows:
        cells = (row.what, value_text(row.paper), value_text(row.ours), row.note)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
