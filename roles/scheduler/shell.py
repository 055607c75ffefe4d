"""The scheduler as a process: one ROUTER, one core, one thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fabric.clock import MonotonicClock
from fabric.ids import PeerId, new_incarnation
from fabric.messages import AnyMessage, PlanAsked, StatusListed, replaced
from fabric.outbox import Outbox
from fabric.sockets import RouterLink
from roles.cluster import ClusterConfig
from roles.core import PLANNER, Heard, Lost, Send
from roles.drive import Driver, Source
from roles.environment import RunDir
from roles.hearing import LinkSource
from roles.journal import Journal, MessageCore, Recorded
from roles.process import RunFile, StopSignal, log, remove_run_file, write_run_file
from roles.scheduler.build import scheduler_core
from roles.scheduler.desired import ControllerSettings, controller_settings
from roles.scheduler.kept import PLAN_FILE, KeptPlan
from roles.scheduler.planner import Planner
from roles.scheduler.recorded import about_scheduler
from roles.scheduler.settings import SchedulerSettings, settings_from

ROLE_ID = "scheduler-0"
# Before anything was measured: a first transfer also opens the socket it goes by. Both are soon replaced.
FIRST_GUARD_MS = 2.0
FIRST_TRANSFER_MS = 5.0


@dataclass(slots=True, frozen=True)
class Recording:
    """Where to keep a journal, and how large it may become."""

    path: Path
    bytes_max: int


@dataclass(slots=True, frozen=True)
class Written:
    """A configuration, and the document that it was read from; paths in that are relative to `base_dir`."""

    config: ClusterConfig
    document: Mapping[str, Any]
    base_dir: Path


def run_scheduler(
    written: Written,
    run_dir: Path,
    stop: StopSignal,
    recording: Recording | None = None,
    control_addresses: Sequence[str] = (),
) -> None:
    """Serve until told to stop, at the run directory's ipc address and at `control_addresses`.

    Raises ConfigError for a plan that cannot be, or an address in use.
    """
    config = written.config
    kept = KeptPlan(run_dir / PLAN_FILE, written.document)
    settings, planning = kept.read() or _first_plan(written)
    settings = replace(settings, pid=os.getpid(), guard_ms=FIRST_GUARD_MS, transfer_ms=FIRST_TRANSFER_MS)
    scheduler = scheduler_core(settings, config.batching, planning)
    controller = scheduler.controller
    assert controller is not None, "it was made with one"
    core: MessageCore = scheduler
    journal: Journal | None = None
    if recording is not None:
        journal = Journal(
            recording.path, about_scheduler(settings, config.batching, planning), recording.bytes_max
        )
        core = Recorded(core, journal)
    link = RouterLink.bind([RunDir(run_dir).ipc_address(f"{ROLE_ID}.control"), *control_addresses])
    clock = MonotonicClock()
    planner = Planner()
    sources: list[Source[Heard | Lost]] = [LinkSource(link, clock), planner, stop]

    def perform(action: Send) -> None:
        message = action.message
        if action.peer == PLANNER:
            assert isinstance(message, PlanAsked), "nothing else goes there"
            planner.start(message)
            return
        if isinstance(message, StatusListed):
            message = replaced(message, counters={**message.counters, **link.counters})
            message = driver.stats.told_in(message)
        outbox.put(action.peer, message)

    def refused(peer: PeerId, message: AnyMessage) -> None:
        """The peer is gone (the link will say so) or has not read for a long time.

        A frontend's requests end by their own deadline timers then, a worker's batch by `latest`.
        """

    def end_turn() -> None:
        outbox.flush()
        while controller.unsaid:
            log.info("placement %s", controller.unsaid.popleft())
        if controller.settled != kept.settled and controller.is_steady:
            kept.write(
                about_scheduler(scheduler.settings(), config.batching, controller.settings()),
                controller.settled,
            )

    outbox = Outbox(link, refused)
    driver: Driver[Heard | Lost, Send] = Driver(core, sources, perform, clock, end_turn)
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
        kept.forget()
        remove_run_file(run_dir, run_file)
        driver.close()
        planner.close()
        if journal is not None:
            journal.close()
        link.close()


def _first_plan(written: Written) -> tuple[SchedulerSettings, ControllerSettings]:
    config = written.config
    placement = config.place()
    settings = settings_from(config, placement)
    base_dir = str(written.base_dir.absolute())
    return settings, controller_settings(config, written.document, base_dir, placement, settings)
