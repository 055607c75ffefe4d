"""`tenuto record`: the arrivals of a running cluster as a trace."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Final

import click

from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost
from fabric.ids import FRONTEND_PREFIX
from fabric.keys import Keyring
from roles.cli.json_output import echo_json
from roles.cli.options import (
    FloatRange,
    OutputPath,
    chosen_run_dir,
    json_option,
    key_option,
    keyring_of,
    remark,
    run_dir_flag,
    via_option,
    writing,
)
from roles.cli.progress import progress
from roles.cli.records import arrivals_of
from roles.observability.recording import Recording
from roles.runtime.running_cluster import active_schedulers, processes_in

DURATION_S_MAX: Final = 86_400.0
REMEMBERED_S: Final = 55.0
"""A frontend remembers a minute, of which asking takes some."""
ASK_EVERY_S: Final = 20.0
SETTLED_S: Final = 0.05
"""After the end its last bin is over."""


@click.command()
@click.option(
    "--output",
    "path",
    type=OutputPath(),
    default=Path("trace.csv"),
    show_default=True,
    help="The trace, as CSV.",
)
@click.option(
    "--duration",
    "duration_s",
    type=FloatRange(0, DURATION_S_MAX, is_low_allowed=False),
    help="Record so long from now on, in s; Ctrl-C ends it earlier.  [default: 60]",
)
@click.option(
    "--last",
    "last_s",
    type=FloatRange(0, REMEMBERED_S, is_low_allowed=False),
    help="Not from now on, but what came in the last so many s.",
)
@run_dir_flag
@via_option
@key_option
@json_option
def record(
    *,
    path: Path,
    duration_s: float | None,
    last_s: float | None,
    run_dir_option: Path | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Write when requests of the running cluster came, as a trace: tenuto simulate FILE --arrivals trace.csv plays it.

    Exact to within 5 ms. Requests that were refused at the door have come too.
    """
    if duration_s is not None and last_s is not None:
        raise click.UsageError("give either --duration or --last")
    now_ms = MonotonicClock().now_ms()
    if last_s is not None:
        recording = Recording(now_ms - 1e3 * last_s, now_ms)
    else:
        recording = Recording(now_ms, now_ms + 1e3 * (60.0 if duration_s is None else duration_s))
    home = chosen_run_dir(run_dir_option)
    try:
        silent = _record(recording, home.path, keyring_of(key_file))
    finally:
        home.remove()
    remark(f"{role_id} did not answer: some of its arrivals may be missing" for role_id in sorted(silent))
    remark(
        f"model {model_id} was removed meanwhile: up to {ASK_EVERY_S:g} s of its arrivals are missing"
        for model_id in sorted(recording.removed)
    )
    if recording.missed_s:
        remark(
            [f"{recording.missed_s:.1f} s of frontends' arrivals were forgotten before they were asked for"]
        )
    if recording.is_full:
        remark(["there were more arrivals than a trace may have: the rest is left out"])
    counts = recording.counts
    if not counts:
        raise FabricError("no request came: there is nothing to write")
    with writing(path), path.open("w", encoding="utf-8") as file:
        file.writelines(recording.lines())
    span_s = (recording.until_ms - recording.from_ms) / 1e3
    if as_json:
        echo_json({"file": str(path), "duration_s": span_s, "models": counts})
    else:
        click.echo(f"wrote {path}: {sum(counts.values())} requests of {len(counts)} models in {span_s:.1f} s")


def _record(recording: Recording, run_dir: Path, keyring: Keyring | None) -> set[str]:
    """Until it is over, or somebody has had enough; the frontends that did not answer at some time."""
    clock = MonotonicClock()
    silent: set[str] = set()
    _ask(recording, run_dir, keyring, silent)
    with progress("recording") as on_step:
        try:
            asked_at_ms = clock.now_ms()
            while (now_ms := clock.now_ms()) < recording.until_ms + 1e3 * SETTLED_S:
                select.select([], [], [], 0.2)
                on_step(min(1.0, (now_ms - recording.from_ms) / (recording.until_ms - recording.from_ms)))
                if now_ms - asked_at_ms > 1e3 * ASK_EVERY_S:
                    asked_at_ms = now_ms
                    _ask(recording, run_dir, keyring, silent)
        except KeyboardInterrupt:
            recording.until_ms = clock.now_ms()
    _ask(recording, run_dir, keyring, silent)
    return silent


def _ask(recording: Recording, run_dir: Path, keyring: Keyring | None, silent: set[str]) -> None:
    """Every frontend for every model that is served now. Raises PeerLost where there is no cluster any more."""
    schedulers = active_schedulers(run_dir, keyring).values()
    models = [model.model_id for one in schedulers for model in one.status.models]
    recording.served(models)
    for process in processes_in(run_dir):
        if not process.role_id.startswith(FRONTEND_PREFIX) or not process.alive:
            continue
        try:
            for model_id in models:
                told = arrivals_of(process, model_id, keyring)
                recording.note(process.role_id, model_id, told, MonotonicClock().now_ms())
        except PeerLost:
            silent.add(process.role_id)
