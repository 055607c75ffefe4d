"""Looks at a running cluster as an operator does: everything that is asked, any operator may ask."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from fabric.clock import Clock
from fabric.errors import PeerLost
from fabric.ids import ModelId, PeerId
from fabric.keys import Keyring
from fabric.messages import BatchesRemembered, RecordsAsked, RequestsRemembered
from fabric.operator_questions import ask_role
from roles.observability.remembered import BatchSeen, RequestSeen, batches_seen, requests_seen
from roles.page.recent_history import KEPT_MS
from roles.page.snapshot import Look
from roles.runtime.core import SCHEDULER
from roles.runtime.live_figures import live_figures
from roles.runtime.running_cluster import ActiveScheduler, ProcessReport, epoch_of, frontends_of, look

NEWEST: Final = 1 << 52
ANSWER_MS: Final = 1_000.0
BATCH_PAGES_MAX: Final = 4
"""Answers with batches that a scheduler is asked for in one look: half a millisecond of its loop each."""
WITHOUT_PLAN: Final = 1
"""Whoever asks a scheduler for what came after a batch does not get the plan, which is large. No batch has this number."""


class _Told(NamedTuple):
    """`newest`: the number of the newest record that was seen, of those that a role counted as this `incarnation` in this `epoch`."""

    incarnation: str
    epoch: int
    newest: int


class Looks:
    """Of the cluster of a run directory. Remembers up to which number each role has told what it remembers."""

    def __init__(self, run_dir: Path, clock: Clock, keyring: Keyring | None) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._keyring = keyring
        self._told: dict[str, _Told] = {}
        """By role id."""

    def look(self) -> Look:
        """Ask all roles. Raises PeerLost where there is no cluster, or no scheduler of it answers."""
        report = look(self._run_dir, self._keyring)
        figures = live_figures(report.processes, self._keyring)
        alive = {one.role_id: one for one in report.processes if one.alive}
        # Whoever is silent this time tells the next time what came since; so it is of all where this look fails.
        told = {role_id: its for role_id, its in self._told.items() if role_id in alive}
        batches: list[BatchSeen] = []
        requests: list[RequestSeen] = []
        from_ms = self._clock.now_ms() - KEPT_MS
        for active in report.active.values():
            role_id = active.status.role_id
            incarnation = alive[role_id].incarnation if role_id in alive else ""
            # Who becomes the active scheduler again counts anew, in the same process.
            after = self._told_by(role_id, _Told(incarnation, epoch_of(active.status), WITHOUT_PLAN))
            newest, its, its_from_ms = self._batches(active, after.newest)
            told[role_id] = after._replace(newest=newest)
            batches += its
            from_ms = max(from_ms, its_from_ms)
        at_ms = self._clock.now_ms()  # what runs while frontends are silent is not in `batches`
        for frontend in frontends_of(alive.values()):
            after = self._told_by(frontend.role_id, _Told(frontend.incarnation, 0, 0))
            newest, seen = self._requests(frontend, after.newest)
            told[frontend.role_id] = after._replace(newest=newest)
            requests += seen
        batches.sort(key=lambda one: one.ended_at_ms)
        requests.sort(key=lambda one: one.ended_at_ms)
        self._told = told
        return Look(at_ms, report, figures, batches, requests, from_ms)

    def _told_by(self, role_id: str, nothing: _Told) -> _Told:
        told = self._told.get(role_id, nothing)
        return told if told[:2] == nothing[:2] else nothing

    def _batches(self, active: ActiveScheduler, after: int) -> tuple[int, list[BatchSeen], float]:
        """The newest number, those after that one, and the moment since when none of them is missing; -inf: none is."""
        found: list[BatchSeen] = []
        newest, before = after, NEWEST
        for _ in range(BATCH_PAGES_MAX):
            try:
                answer = ask_role(
                    active.addresses,
                    RecordsAsked(ModelId(""), before, after=after),
                    BatchesRemembered,
                    ANSWER_MS,
                    server=SCHEDULER,
                    keyring=self._keyring,
                )
            except PeerLost:  # it was there a moment ago. The next look tells all of them: those before `found` are not known yet
                return after, [], self._clock.now_ms()
            if not answer.batches:
                return newest, found, float("-inf")
            newest = max(newest, answer.batches[0].number)
            found += batches_seen(answer, self._clock.now_ms())
            before = answer.batches[-1].number
            if before == after + 1:
                return newest, found, float("-inf")
        return newest, found, found[-1].ended_at_ms

    def _requests(self, process: ProcessReport, after: int) -> tuple[int, list[RequestSeen]]:
        """The newest number, and those after that one."""
        try:
            answer = ask_role(
                process.addresses["client"],
                RecordsAsked(ModelId(""), NEWEST, after=after),
                RequestsRemembered,
                ANSWER_MS,
                server=PeerId(process.role_id),
                keyring=self._keyring,
            )
        except PeerLost:
            return after, []
        newest = answer.requests[0].number if answer.requests else after
        return newest, requests_seen(answer, self._clock.now_ms())
