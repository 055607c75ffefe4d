"""A progress bar for commands that take a while: on stderr, so that stdout holds the result alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(title: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr, while somebody looks at it; the given function takes the part that is done, 0 to 1."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda done: bar.update(task, completed=done)
