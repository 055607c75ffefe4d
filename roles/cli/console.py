"""Where commands print for people. What a user's data contains is text there, never rich's markup or emoji."""

from __future__ import annotations

from rich.console import Console


def plain_console() -> Console:
    """On stdout. Who wants bold or colour gives a `Text` with a style."""
    return Console(markup=False, emoji=False)
