"""The scheduler as a process: one ROUTER, one core, one thread."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from fabric.clock import MonotonicClock
from fabric.ids import new_incarnation
from fabric.messages import StatusListed
from fabric.sockets import RouterLink
from roles.cluster import ClusterConfig
from roles.core import Heard, Lost, Send
from roles.drive import Driver, Source
from roles.environment import RunDir
from roles.hearing import LinkSource
from roles.journal import Journal, MessageCore, Recorded
from roles.process import RunFile, StopSignal, log, remove_run_file, write_run_file
from roles.scheduler.build import scheduler_core
from roles.scheduler.recorded import about_scheduler
from roles.scheduler.settings import settings_from

ROLE_ID = "scheduler-0"
# Before anything was measured: a first transfer also opens the socket it goes by. Both are soon replaced.
FIRST_GUARD_MS = 2.0
FIRST_TRANSFER_MS = 5.0


@dataclass(slots=True, frozen=True)
class Recording:
    """Where to keep a journal, and how large it may become."""

    path: Path
    bytes_max: int


def run_scheduler(
    config: ClusterConfig, run_dir: Path, stop: StopSignal, recording: Recording | None = None
) -> None:
    """Serve until told to stop. Raises ConfigError for a plan that cannot be, or an address in use."""
    settings = replace(
        settings_from(config, pid=os.getpid()), guard_ms=FIRST_GUARD_MS, transfer_ms=FIRST_TRANSFER_MS
    )
    core: MessageCore = scheduler_core(settings, config.batching)
    journal: Journal | None = None
    if recording is not None:
        journal = Journal(recording.path, about_scheduler(settings, config.batching), recording.bytes_max)
        core = Recorded(core, journal)
    link = RouterLink.bind([RunDir(run_dir).ipc_address(f"{ROLE_ID}.control")])
    clock = MonotonicClock()
    sources: list[Source[Heard | Lost]] = [LinkSource(link, clock), stop]

    def perform(action: Send) -> None:
        message = action.message
        if isinstance(message, StatusListed):
            measured = {
                "dispatch_late_p99_ms": driver.stats.late_ms(0.99),
                "turn_ms_max": driver.stats.turn_ms_max,
            }
            counters = {**message.counters, **link.counters, **measured}
            message = StatusListed(
                message.role_id, message.pid, message.slices, message.models, counters, message.gpus
            )
        # Refused: the peer is gone (the link will say so) or has not read for a long time. A frontend's
        # requests end by their own deadline timers then, a worker's batch by `latest`.
        link.send(action.peer, message)

    driver: Driver[Heard | Lost, Send] = Driver(core, sources, perform, clock)
    run_file = RunFile(ROLE_ID, os.getpid(), new_incarnation(), {"control": list(link.addresses)})
    write_run_file(run_dir, run_file)
    log.info(
        "scheduler_serving address=%s models=%d slices=%d",
        link.addresses[0],
        len(settings.models),
        len(settings.slices),
    )
    for model_id, reason in settings.unplaced.items():
        log.warning("model_unplaced model=%s reason=%r", model_id, reason)
    try:
        driver.run(lambda: stop.is_set)
    finally:
        remove_run_file(run_dir, run_file)
        driver.close()
        if journal is not None:
            journal.close()
        link.close()
