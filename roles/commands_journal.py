"""`tenuto replay FILE`: a recorded scheduler once more, and whether it decides the same."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from roles.command_parts import echo_json

EXIT_DIFFERS = 1


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "is_json", is_flag=True, help="{same, events, actions, cut, difference} on stdout.")
def replay(file: Path, is_json: bool) -> None:  # noqa: FBT001  click's flag
    """Play a journal (`tenuto scheduler --journal FILE`) into a fresh scheduler and compare what it does."""
    from roles.journal import replay as play  # noqa: PLC0415  only this command needs it
    from roles.scheduler.recorded import scheduler_from  # noqa: PLC0415  see above

    played = play(file, scheduler_from)
    found = played.difference
    if is_json:
        echo_json(
            {
                "same": found is None,
                "events": played.events,
                "actions": played.actions,
                "cut": played.is_cut,
                "difference": None if found is None else asdict(found),
            }
        )
    elif found is None:
        cut = "; the file ends within an event" if played.is_cut else ""
        click.echo(f"same: {played.events} events, {played.actions} actions{cut}")
    else:
        click.echo(f"different after {played.events} events and {played.actions} actions")
        click.echo(f"event {found.number} at {found.now_ms} ms: {found.event}")
        click.echo(f"recorded: {found.recorded or 'nothing'}")
        click.echo(f"replayed: {found.replayed or 'nothing'}")
    if found is not None:
        sys.exit(EXIT_DIFFERS)
