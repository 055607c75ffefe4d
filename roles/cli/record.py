"""`tenuto record`: the arrivals of a running cluster as a trace."""

from __future__ import annotations

import select
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost
from fabric.ids import ModelId
from fabric.keys import Keyring
from roles.cli.json_output import echo_json
from roles.cli.options import (
    SHORTEST_S,
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
from roles.cli.records import arrivals_of, unasked_remark
from roles.observability.recording import Recording
from roles.runtime.running_cluster import (
    active_schedulers,
    frontends_of,
    processes_in,
    unknown_frontends,
)

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
    type=FloatRange(SHORTEST_S, DURATION_S_MAX),
    help="Record so long from now on, in s; Ctrl-C ends it earlier.  [default: 60]",
)
@click.option(
    "--last",
    "last_s",
    type=FloatRange(SHORTEST_S, REMEMBERED_S),
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
        keyring = keyring_of(key_file)
        asker = _Asker(recording, home.path, keyring)
        asker.record()
    finally:
        home.remove()
    remark(f"{name} did not answer: some arrivals may be missing" for name in sorted(asker.silent))
    if asker.unasked:
        remark([unasked_remark(asker.unasked, keyring)])
    missing = f"up to {ASK_EVERY_S:g} s of its arrivals are missing"
    remark(f"{role_id} ended meanwhile: {missing}" for role_id in sorted(recording.ended))
    remark(f"model {one} was removed meanwhile: {missing}" for one in sorted(recording.removed))
    remark(f"model {one} got another SLO meanwhile: {missing}" for one in sorted(recording.renewed))
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


@dataclass(slots=True)
class _Asker:
    """`silent`: who did not answer at some time. `unasked`: how many frontends of other hosts there are."""

    recording: Recording
    run_dir: Path
    keyring: Keyring | None
    silent: set[str] = field(default_factory=set)
    unasked: int = 0
    _slo_ms: dict[int, dict[ModelId, float]] = field(default_factory=dict)
    """By shard, of the models that its scheduler told of last."""

    def record(self) -> None:
        """Until it is over, or somebody has had enough. Raises PeerLost where there is no cluster to begin with."""
        clock, recording = MonotonicClock(), self.recording
        self.ask()
        with progress("recording") as on_step:
            try:
                asked_at_ms = clock.now_ms()
                while (now_ms := clock.now_ms()) < recording.until_ms + 1e3 * SETTLED_S:
                    select.select([], [], [], 0.2)
                    on_step(min(1.0, (now_ms - recording.from_ms) / (recording.until_ms - recording.from_ms)))
                    if now_ms - asked_at_ms > 1e3 * ASK_EVERY_S:
                        asked_at_ms = now_ms
                        self.ask()
            except KeyboardInterrupt:
                recording.until_ms = clock.now_ms()
        self.ask()

    def ask(self) -> None:
        """Every frontend for every model that is served now; of a shard whose scheduler does not answer, for those that were served last.

        Raises PeerLost where no scheduler ever answered.
        """
        try:
            active = active_schedulers(self.run_dir, self.keyring)
        except PeerLost:
            if not self._slo_ms:
                raise
            active = {}
        for shard in self._slo_ms.keys() - active.keys():
            self.silent.add("the scheduler" + (f" of shard {shard}" if len(self._slo_ms) > 1 else ""))
        for shard, one in active.items():
            self._slo_ms[shard] = {model.model_id: model.slo_ms for model in one.status.models}
        slo_ms = {model_id: ms for its in self._slo_ms.values() for model_id, ms in its.items()}
        frontends = frontends_of(processes_in(self.run_dir))
        if active:
            self.unasked = unknown_frontends(active.values(), frontends)
        incarnations = {process.role_id: process.incarnation for process in frontends}
        self.recording.asks(slo_ms, incarnations, MonotonicClock().now_ms())
        for process in frontends:
            try:
                for model_id in slo_ms:
                    told = arrivals_of(process, model_id, self.keyring)
                    self.recording.note(process.role_id, model_id, told, MonotonicClock().now_ms())
            except PeerLost:
                self.silent.add(process.role_id)
