"""Reproductions as Markdown (`docs/results/reproduction.md`) and as JSON.

The document is a chapter per experiment, and can be read back as such: what is run again replaces its own chapter and
leaves the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from roles.lab.reproduce.report import Range, Reproduction, Row, Value

_TITLE = "# The papers' figures beside ours"
_HEAD = f"""\
{_TITLE}

Written by `tenuto reproduce --all --write docs/results/reproduction.md`, not by hand; each chapter says when. An empty cell: the
paper states no number there, or there is none to give. A note says where a difference comes from.

What is what:

- **Nothing here ran on a GPU.** Plans come from the policies in `policies/placement/`; what is *emulated* comes from the
  simulator with the shipped profiles and an interference model. Planned and emulated numbers are as good as those.
- iGniter's V100: coefficients and 750 co-located pairs measured by its authors. **Its T4 is an estimate**: the
  authors published no coefficients for it.
- The thesis: run times and requirements of its Table A.1, measured by its author. **Interference is the model `sm`**, whose one
  constant is fitted to two of the thesis' observations ([ADR 0040](../adr/0040-interference-sm.md)). **iGniter's
  coefficients for these models are estimates** ([how](../guides/profiles.md)); the thesis measured its own and did not
  publish them. **Its router is `fixed` with its own rule**: replicas get requests in proportion to their batch sizes (section 4.3.3), not to
  the plan's rates as elsewhere in Tenuto; of its policies only iGniter's plans have replicas for which the two differ ([ADR 0012](../adr/0012-the-thesis-router.md)).
- gpulet: SLOs, memory, utilisations and constants are the authors'. **The latency table is synthetic**, because theirs was never
  published: orders and ratios can be compared, counts cannot ([more](gpulet.md)).

What of each paper is run again, and what is not:

- iGniter: table 1 and figures 11 to 14 and 18 to 21, planned and emulated. Not figures 2 to 9, which are measurements on a GPU, nor 15 to 17,
  latencies and shares over time.
- The thesis: figures 5.5 to 5.10, 6.1, 6.10 and 6.15 and what its text states of 6.2 to 6.8, 6.11 to 6.13, 6.16, 6.18 and 6.19, emulated in
  place of its cluster. Not its measured metrics (figures 5.2 to 5.4), its transport (figures 4.4 and 4.5, table 4.1), nor the latencies of figures 6.9, 6.14 and 6.17.
- gpulet: figures 5, 13 and 16, planned, and 14, emulated; 12 to 14 once more with its applications as graphs. Not what was measured (figures 4, 6, 7 and 10).
- Symphony: table 2 and figures 1, 2, 5 to 7 and 9 to 16, by the discipline alone on virtual time, as its own "scheduler-only" runs: no network, no lateness, and
  rivals that decide in no time and know all requests ([ADR 0013](../adr/0013-nexus-clockwork-shepherd.md)). Windows are short: goodput is good to about 3 %, and `--full` takes the windows and
  seeds of `tenuto goodput`. Not figure 17, measurements of a network; figures 3, 4, 8 and 18 are drawings, of which 4 is a test. More workloads and seeds: [disciplines](disciplines.md).
- Usher: figures 3 and 7, and 6a and 16 on the thesis' models, since it publishes no requirements. Not figures 1, 2, 4, 5 and 13 to 26, measured under traces of production on 24 V100s, or of a GPU's cache. Its
  estimator (table 4): [estimator](../guides/estimator.md). Of its merger the exact part, served: [worker](../guides/worker.md#models-on-one-backbone).
- Nexus, Clockwork and Shepherd: none of their own papers' experiments; they take part in those above.
"""
_AGREES = 0.05
_ROWS_HEAD = "| what | paper | ours | ours / paper | note |"
_CELLS = re.compile(r"(?<!\\)\|")
_ANCHOR = re.compile(r'^<a id="([^"]+)"></a>$', re.MULTILINE)
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_FAILED = "**Failed:**"


def markdown(chapters: Mapping[str, str], missing: Sequence[str] = ()) -> str:
    """The whole document; chapters by the experiments' names, in the order in which they come. `missing` have none yet."""
    contents = "\n".join(f"- [{_heading_of(text)}](#{name})" for name, text in chapters.items())
    if missing:
        contents += f"\n\nNot run for this page yet (`--all --missing`): {', '.join(missing)}."
    parts = [
        _HEAD,
        contents,
        "",
        _agreement(chapters),
        *(f'\n<a id="{name}"></a>\n\n{text}' for name, text in chapters.items()),
    ]
    return "\n".join(parts)


def chapters_of(document: str) -> dict[str, str] | None:
    """The chapters of a document that `markdown` wrote, None for any other text."""
    if not document.startswith(_TITLE):
        return None
    parts = _ANCHOR.split(document)[1:]
    return {name: f"{text.strip()}\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}


def chapter(found: Reproduction, day: str) -> str:
    """An experiment that was run on that day."""
    lines = [
        f"## {_plain(found.title)}\n",
        f"{found.source} Of {day}; again: `tenuto reproduce {found.name}`\n",
        _ROWS_HEAD,
        "|---|---|---|---|---|",
    ]
    for row in found.rows:
        cells = (row.what, value_text(row.paper), value_text(row.ours), ratio_text(row.ratio), row.note)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    for grid in found.grids:
        lines += [f"\n{_plain(grid.title)}\n", f"| | {' | '.join(grid.columns)} |"]
        lines.append(f"|---|{'---:|' * len(grid.columns)}")
        for name, values in grid.rows:
            lines.append(f"| {_cell(name)} | {' | '.join(value_text(value) for value in values)} |")
    return "\n".join(lines) + "\n"


def failed_chapter(name: str, reason: str, day: str) -> str:
    """An experiment that could not be run on that day."""
    return f"## {name}\n\n{_FAILED} {_plain(reason)}\n\nOf {day}; again: `tenuto reproduce {name}`\n"


def is_failed(text: str) -> bool:
    """A chapter without a result."""
    return _FAILED in text


def value_text(value: Value) -> str:
    """A cell: numbers with six significant digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, Range):
        return f"{value.low:.6g} to {value.high:.6g}"
    return f"{value:.6g}" if isinstance(value, int | float) else value


def ratio_text(ratio: float | None) -> str:
    """Ours over the paper's, three digits behind the point."""
    return "" if ratio is None else f"{ratio:.3f}"


def rows_with_numbers(found: Reproduction) -> list[Row]:
    """Those where both are numbers: what a picture can show."""
    return [row for row in found.rows if row.ratio is not None]


def as_json(found: Reproduction) -> dict[str, object]:
    """For tools."""
    return {
        "name": found.name,
        "title": found.title,
        "source": found.source,
        "rows": [
            {
                "what": row.what,
                "paper": [row.paper.low, row.paper.high] if isinstance(row.paper, Range) else row.paper,
                "ours": row.ours,
                "ratio": row.ratio,
                "note": row.note,
            }
            for row in found.rows
        ],
        "grids": [
            {
                "title": grid.title,
                "rows": [
                    {"name": name, "values": dict(zip(grid.columns, values, strict=True))}
                    for name, values in grid.rows
                ],
            }
            for grid in found.grids
        ],
    }


def in_order(chapters: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The chapters in the order of those names; an experiment that is no more loses its chapter."""
    return {name: chapters[name] for name in names if name in chapters}


def _agreement(chapters: Mapping[str, str]) -> str:
    """What of all chapters agrees within 5 %, read from their own tables, and what does not."""
    lines = [
        "## What agrees within 5 %\n",
        "Of the rows in which the paper states a number or a range. Words, and figures without labels, are not counted.\n",
        "| experiment | numbers stated | within 5 % |",
        "|---|---:|---:|",
    ]
    others = ["| experiment | what | paper | ours | ours / paper | why |", "|---|---|---|---|---|---|"]
    total = within = 0
    for name, text in chapters.items():
        rows = [row for row in _rows_of(text) if row[3]]
        good = [row for row in rows if abs(float(row[3]) - 1) <= _AGREES]
        if rows:
            lines.append(f"| [{_cell(_heading_of(text))}](#{name}) | {len(rows)} | {len(good)} |")
        others += [f"| [{name}](#{name}) | {' | '.join(row)} |" for row in rows if row not in good]
        total, within = total + len(rows), within + len(good)
    lines.append(f"| all | {total} | {within} |")
    return "\n".join([*lines, "\n### What does not\n", *others]) + "\n"


def _rows_of(text: str) -> list[list[str]]:
    """The cells of the rows that a chapter has, as they are written."""
    _, _, table = text.partition(f"{_ROWS_HEAD}\n")
    found = []
    for line in table.splitlines()[1:]:
        if not line.startswith("| "):
            break
        found.append([cell.strip() for cell in _CELLS.split(line)[1:-1]])
    return found


def _heading_of(text: str) -> str:
    found = _HEADING.search(text)
    return "" if found is None else found.group(1)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
