"""Looks at a running cluster as an operator does: everything that is asked, any operator may ask."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fabric.clock import Clock
from fabric.errors import PeerLost
from fabric.ids import FRONTEND_PREFIX, ModelId, PeerId
from fabric.keys import Keyring
from fabric.messages import BatchesRemembered, RecordsAsked, RequestsRemembered
from fabric.operator_questions import ask_role
from roles.observability.remembered import BatchSeen, RequestSeen, batches_seen, requests_seen
from roles.page.recent_history import KEPT_MS
from roles.page.snapshot import Look
from roles.runtime.core import SCHEDULER
from roles.runtime.live_figures import live_figures
from roles.runtime.running_cluster import ActiveScheduler, ProcessReport, look

NEWEST: Final = 1 << 52
ANSWER_MS: Final = 1_000.0
BATCH_PAGES_MAX: Final = 4
"""Answers with batches that a scheduler is asked for in one look: half a millisecond of its loop each."""
FIRST: Final = 1
"""Whoever asks for what came after a record does not get the plan: it is large, and a page has no use for it."""

_Who = tuple[str, int]


class Looks:
    """Of the cluster of a run directory. Remembers up to which number each role has told what it remembers."""

    def __init__(self, run_dir: Path, clock: Clock, keyring: Keyring | None) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._keyring = keyring
        self._told: dict[_Who, int] = {}
        """By role id and pid: its newest record that was seen."""

    def look(self) -> Look:
        """Ask all roles. Raises PeerLost where there is no cluster, or no scheduler of it answers."""
        former, self._told = self._told, {}
        report = look(self._run_dir, self._keyring)
        figures = live_figures(report.processes, self._keyring)
        batches: list[BatchSeen] = []
        from_ms = self._clock.now_ms() - KEPT_MS
        for active in report.active.values():
            who = active.status.role_id, active.status.pid
            its, its_from_ms = self._batches(active, who, former.get(who, FIRST))
            batches += its
            from_ms = max(from_ms, its_from_ms)
        requests: list[RequestSeen] = []
        for process in report.processes:
            if process.role_id.startswith(FRONTEND_PREFIX) and process.alive:
                requests += self._requests(process, former.get((process.role_id, process.pid), FIRST))
        batches.sort(key=lambda one: one.ended_at_ms)
        requests.sort(key=lambda one: one.ended_at_ms)
        return Look(self._clock.now_ms(), report, figures, batches, requests, from_ms)

    def _batches(self, active: ActiveScheduler, who: _Who, after: int) -> tuple[list[BatchSeen], float]:
        """Those after that number, and the moment since when none of them is missing; -inf: none is."""
        found: list[BatchSeen] = []
        self._told[who] = after
        before = NEWEST
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
            except PeerLost:  # it was there a moment ago: the next look tells
                break
            if not answer.batches:
                return found, float("-inf")
            self._told[who] = max(self._told[who], answer.batches[0].number)
            found += batches_seen(answer, self._clock.now_ms())
            before = answer.batches[-1].number
            if before == after + 1:
                return found, float("-inf")
        return found, found[-1].ended_at_ms if found else self._clock.now_ms()

    def _requests(self, process: ProcessReport, after: int) -> list[RequestSeen]:
        who = process.role_id, process.pid
        self._told[who] = after
        try:
            answer = ask_role(
                process.addresses.get("client", ()),
                RecordsAsked(ModelId(""), NEWEST, after=after),
                RequestsRemembered,
                ANSWER_MS,
                server=PeerId(process.role_id),
                keyring=self._keyring,
            )
        except PeerLost:
            return []
        if answer.requests:
            self._told[who] = answer.requests[0].number
        return requests_seen(answer, self._clock.now_ms())
