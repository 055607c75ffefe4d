"""The scheduler as a process: one ROUTER, one core, one thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fabric.clock import MonotonicClock
from fabric.curve import CONTROL_KINDS, guarded
from fabric.errors import LocalProtocolError
from fabric.ids import PeerId, new_incarnation
from fabric.inproc import HubLink
from fabric.keys import SCHEDULER as KEY_OF_SCHEDULERS
from fabric.keys import Keyring
from fabric.messages import AnyMessage, PlanAsked, StatusListed, replaced
from fabric.outbox import Outbox
from fabric.sockets import RouterLink
from roles.config.cluster import ClusterConfig
from roles.runtime.core import PLANNER, SCHEDULER, SCHEDULER_ID, Heard, Lost, Send
from roles.runtime.defects import DefectReport
from roles.runtime.environment import RunDir
from roles.runtime.journal import Journal, MessageCore, Recorded, kept_aside
from roles.runtime.loop.drive import Role, run_roles
from roles.runtime.loop.sources import WatchedLinkSource
from roles.runtime.process import RunFile, StopSignal, log, log_offences, remove_run_file, write_run_file
from roles.scheduler.build import scheduler_core
from roles.scheduler.planning.desired_state import ControllerSettings, controller_settings
from roles.scheduler.planning.planner import Planner
from roles.scheduler.planning.saved_plan import PLAN_FILE, SavedPlan
from roles.scheduler.replay_start import about_scheduler
from roles.scheduler.settings import SchedulerSettings, settings_from

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


class SchedulerShell:
    """Does what the core decides, with the links of one scheduler.

    It serves at the run directory's ipc address, at `listen.control` and at `control_addresses`. Raises ConfigError for a plan that
    cannot be, or an address in use.
    """

    def __init__(
        self,
        written: Written,
        run_dir: Path,
        recording: Recording | None = None,
        control_addresses: Sequence[str] = (),
    ) -> None:
        self._run_dir = run_dir
        self._config = config = written.config
        self._kept = SavedPlan(run_dir / PLAN_FILE, written.document)
        settings, planning = self._kept.read() or _first_plan(written)
        settings = replace(settings, pid=os.getpid(), guard_ms=FIRST_GUARD_MS, transfer_ms=FIRST_TRANSFER_MS)
        self._settings = settings
        self._core = scheduler_core(settings, config.batching, planning)
        assert self._core.controller is not None, "it was made with one"
        self._controller = self._core.controller
        self._clock = clock = MonotonicClock()
        keys = config.security.keys
        keyring = None if keys is None else Keyring.of_folder(keys, KEY_OF_SCHEDULERS)
        router = RouterLink.bind(
            [
                RunDir(run_dir).ipc_address(f"{SCHEDULER_ID}.control"),
                *control_addresses,
                *_configured(config),
            ],
            guard=guarded(keyring, CONTROL_KINDS),
        )
        self.link = HubLink(router, SCHEDULER, clock)
        # Recorded only once the address is ours: another scheduler that has it may be writing that very file.
        core: MessageCore = self._core
        self._journal: Journal | None = None
        if recording is not None:
            about = about_scheduler(settings, config.batching, planning)
            self._journal = Journal(recording.path, about, recording.bytes_max)
            core = Recorded(core, self._journal)
        self._outbox = Outbox(self.link, self._refused)
        self._planner = Planner()
        self.role = Role[Heard | Lost, Send](
            core, [WatchedLinkSource(self.link, clock), self._planner], self._perform, self._end_turn
        )
        journal = None if recording is None else kept_aside(recording.path)
        self.on_defect = DefectReport(SCHEDULER_ID, run_dir, journal, self._keep_journal)
        self._run_file = RunFile(
            SCHEDULER_ID, os.getpid(), new_incarnation(), {"control": list(self.link.addresses)}
        )

    def announce(self) -> None:
        """Say where it is, and what has no place."""
        write_run_file(self._run_dir, self._run_file)
        log.info(
            "scheduler_serving address=%s models=%d slices=%d",
            self.link.addresses[0],
            len(self._settings.models),
            len(self._settings.slices),
        )
        for model_id, reason in self._settings.unplaced.items():
            log.warning("model_unplaced model=%s reason=%r", model_id, reason)

    def serve_no_more(self) -> None:
        """An end in order: a successor begins with the configuration's plan. Any other leaves it the one that ran."""
        self._kept.forget()

    def close(self) -> None:
        """Give everything back."""
        remove_run_file(self._run_dir, self._run_file)
        self._planner.close()
        self._close_journal()
        self.link.close()

    def _perform(self, action: Send) -> None:
        message = action.message
        if action.peer == PLANNER:
            assert isinstance(message, PlanAsked), "nothing else goes there"
            self._planner.start(message)
            return
        if isinstance(message, StatusListed):
            message = replaced(message, counters={**message.counters, **self.link.counters, **self._lost()})
            message = self.role.stats.told_in(message)
        try:
            self._outbox.put(action.peer, message)
        except LocalProtocolError as error:  # of users' names and numbers, such as a batch of too many pieces
            log.warning("message_unsendable message=%s error=%r", type(message).__name__, str(error))

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _keep_journal(self) -> None:
        """Whoever starts next with the same options begins a journal of that name."""
        self._close_journal()
        if self._journal is not None:
            self._journal.set_aside()

    def _lost(self) -> dict[str, float]:
        """What a full disk cost."""
        lost = {"plan_writes_failed": float(self._kept.failures)}
        if self._journal is not None:
            lost["journal_events_lost"] = float(self._journal.events_lost)
        return lost

    def _refused(self, peer: PeerId, message: AnyMessage) -> None:
        """The peer is gone (the link will say so) or has not read for a long time.

        A frontend's requests end by their own deadline timers then, a worker's batch by `latest`.
        """

    def _end_turn(self) -> None:
        self._outbox.flush()
        controller, kept = self._controller, self._kept
        log_offences(self._core.offences)
        while controller.unlogged:
            log.info("placement %s", controller.unlogged.popleft())
        if controller.is_steady and kept.is_due(controller.settled, self._clock):
            about = about_scheduler(self._core.settings(), self._config.batching, controller.settings())
            kept.write(about, controller.settled, self._clock.now_ms())


def run_scheduler(
    written: Written,
    run_dir: Path,
    stop: StopSignal,
    recording: Recording | None = None,
    control_addresses: Sequence[str] = (),
) -> None:
    """Serve until told to stop; see `SchedulerShell`."""
    shell = SchedulerShell(written, run_dir, recording, control_addresses)
    try:
        shell.announce()
        run_roles([shell.role], stop, shell.on_defect.end)
        shell.serve_no_more()
    finally:
        shell.close()


def _configured(config: ClusterConfig) -> list[str]:
    control = config.listen.control
    return [] if control is None else [control]


def _first_plan(written: Written) -> tuple[SchedulerSettings, ControllerSettings]:
    config = written.config
    placement = config.place()
    settings = settings_from(config, placement)
    base_dir = str(written.base_dir.absolute())
    return settings, controller_settings(config, written.document, base_dir, placement, settings)
