"""`tenuto spans`: what frontends remember, as OpenTelemetry spans."""

from __future__ import annotations

import re
import select
from pathlib import Path

import click

from fabric.clock import MonotonicClock, WallClock
from fabric.errors import FabricError, PeerLost
from fabric.policy_options import shown
from roles.cli import importing
from roles.cli.options import (
    FloatRange,
    chosen_run_dir,
    key_option,
    keyring_of,
    remark,
    run_dir_flag,
    via_option,
)
from roles.cli.records import NewRequests, unasked_remark

EVERY_S_MIN, EVERY_S_MAX = 0.2, 60.0


@click.command()
@click.option(
    "--endpoint",
    required=True,
    help="Of a collector, by OTLP over HTTP, such as http://localhost:4318/v1/traces.",
)
@click.option(
    "--every",
    "every_s",
    type=FloatRange(EVERY_S_MIN, EVERY_S_MAX),
    default=2.0,
    show_default=True,
    help="Ask the frontends so often, in s.",
)
@click.option("--once", "is_once", is_flag=True, help="Export what is remembered now, and end.")
@run_dir_flag
@via_option
@key_option
def spans(
    *, endpoint: str, every_s: float, is_once: bool, run_dir_option: Path | None, key_file: Path | None
) -> None:
    """Export requests of the running cluster as OpenTelemetry spans until interrupted: all late and refused ones, a sample of the others.

    It needs the extra 'otel'.
    """
    if not re.match(r"https?://[^/]", endpoint):
        raise click.UsageError(
            f"--endpoint is {shown(endpoint)}; it must be like http://localhost:4318/v1/traces"
        )
    try:
        with importing():
            from roles.observability.spans import Spans  # noqa: PLC0415  an extra
    except ImportError as error:
        raise click.ClickException(
            f"this needs the extra 'otel': pip install 'tenuto[otel]' ({error})"
        ) from error
    home = chosen_run_dir(run_dir_option)
    exported = Spans.to(endpoint)
    is_first, is_away = True, False
    silent: set[str] = set()
    try:
        keyring = keyring_of(key_file)
        asked = NewRequests(home.path, keyring)
        while True:
            former = silent
            try:
                requests, silent = asked.ask()
            except PeerLost as error:
                if is_first:  # there was none from the beginning: more likely the wrong place
                    raise
                if not is_away:
                    remark([f"{error}; it is asked again every {every_s:g} s"])
                is_away = True
                select.select([], [], [], every_s)
                continue
            if is_first and asked.unasked:
                remark([unasked_remark(asked.unasked, keyring)])
            is_first = is_away = False
            remark(
                f"{role_id} does not answer: what it remembers is {'left out' if is_once else 'exported when it does'}"
                for role_id in sorted(silent - former)
            )
            offset_ms = WallClock().now_ms() - MonotonicClock().now_ms()
            count = exported.export(requests, offset_ms)
            if is_once:
                _tell_once(count, exported.refused(), endpoint)
                return
            select.select([], [], [], every_s)
    finally:
        exported.close()
        home.remove()


def _tell_once(count: int, refused: int, endpoint: str) -> None:
    click.echo(f"{count - refused} requests exported")
    if refused:
        raise FabricError(f"the collector at {endpoint} did not take {refused} of {count} requests")
