"""docs/adr/README.md: the list of decisions, by their titles."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "adr"
HEAD = """# Decisions

One page for each choice that was hard: the context, what was chosen, and what it costs.

"""


def decisions_page() -> str:
    """The page."""
    return HEAD + "".join(
        f"- [{path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}]({path.name})\n"
        for path in sorted(FOLDER.glob("[0-9]*.md"))
    )
