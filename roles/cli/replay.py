"""`tenuto replay FILE`: a recorded scheduler once more, and whether it decides the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import asdict

from fabric.errors import ConfigError
from roles.cli import importing
from roles.cli.json_output import echo_json
from roles.runtime.defects import HEADLINE
from roles.runtime.exit_codes import EXIT_DEFECT, EXIT_FAILURE

if TYPE_CHECKING:
    from roles.runtime.journal import Replay


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--json", "is_json", is_flag=True, help="{same, events, actions, cut, difference, defect} on stdout."
)
def replay(file: Path, is_json: bool) -> None:  # noqa: FBT001  click's flag
    """Play a journal (`tenuto scheduler --journal FILE`) into a fresh scheduler and compare what it does."""
    with importing():
        from roles.runtime.journal import replay as play  # noqa: PLC0415  only this command needs it
        from roles.scheduler.replay_start import scheduler_from  # noqa: PLC0415  see above

    _refuse_report(file)
    sys.exit(show(play(file, scheduler_from), is_json=is_json))


def show(played: Replay, *, is_json: bool) -> int:
    """Print what a replay found; the exit code."""
    found = played.difference
    if is_json:
        echo_json(
            {
                "same": found is None and not played.defect,
                "events": played.events,
                "actions": played.actions,
                "cut": played.is_cut,
                "difference": None if found is None else asdict(found),
                "defect": played.defect or None,
            }
        )
    elif played.defect:
        click.echo(f"a defect after {played.events} events and {played.actions} actions")
        click.echo(played.defect.rstrip())
    elif found is None:
        cut = "; the file ends within an event, or the next one could not be written" if played.is_cut else ""
        click.echo(f"same: {played.events} events, {played.actions} actions{cut}")
    else:
        click.echo(f"different after {played.events} events and {played.actions} actions")
        click.echo(f"event {found.number} at {found.now_ms} ms: {found.event}")
        click.echo(f"recorded: {found.recorded or 'nothing'}")
        click.echo(f"replayed: {found.replayed or 'nothing'}")
    if played.defect:
        return EXIT_DEFECT
    return 0 if found is None else EXIT_FAILURE


def _refuse_report(file: Path) -> None:
    """The report of a defect is text: it says itself what can be played."""
    try:
        with file.open("rb") as opened:
            is_report = opened.read(len(HEADLINE)) == HEADLINE.encode()
    except FileNotFoundError:  # of a journal there may be the older part alone
        return
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if is_report:
        raise ConfigError(f"{file} is the report of a defect: read it, it says what can be replayed")
