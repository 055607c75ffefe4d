"""What several commands have in common: the file argument, the options of a run, and the pictures."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import click

EXIT_SLO_MISSED, EXIT_PARTIAL = 4, 6
POSITIVE = click.FloatRange(min=0, min_open=True)

file_argument = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else."
)
plot_option = click.option(
    "--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw a PNG."
)
warmup_option = click.option(
    "--warmup",
    "warmup_s",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Before it, in s.",
)
duration_option = click.option(
    "--duration", "duration_s", type=POSITIVE, default=60.0, show_default=True, help="Window in s."
)
seed_option = click.option("--seed", type=click.IntRange(min=0), help="Instead of the file's.")
workers_option = click.option(
    "--workers", type=click.IntRange(min=1), help="Processes.  [default: one per core]"
)


def painters() -> ModuleType:
    """The module of pictures, asked for before any work: a missing package is said at once."""
    try:
        from roles import plots  # noqa: PLC0415  matplotlib is an extra, and slow to import
    except ImportError as error:
        raise click.ClickException(
            f"--plot needs the extra 'plots': pip install 'tenuto[plots]' ({error})"
        ) from error
    return plots
