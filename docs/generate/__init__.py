"""Pages that are made from the code: `python -m docs.generate` writes them, a test holds them to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate.commands import commands_page
from docs.generate.decisions import decisions_page
from docs.generate.errors import errors_page
from docs.generate.file_keys import file_page
from docs.generate.messages import messages_page
from docs.generate.sdk import sdk_page

FOLDER = Path(__file__).resolve().parents[1]
MARK = "<!-- Made by `python -m docs.generate` (or `make docs`). Do not edit: change the code it is made from. -->\n"

PAGES: Mapping[str, Callable[[], str]] = {
    "reference/file.md": file_page,
    "reference/commands.md": commands_page,
    "reference/sdk.md": sdk_page,
    "reference/errors.md": errors_page,
    "reference/messages.md": messages_page,
    "adr/README.md": decisions_page,
}


def generated() -> dict[Path, str]:
    """What each page should be now."""
    return {FOLDER / name: MARK + page() for name, page in PAGES.items()}
