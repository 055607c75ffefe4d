"""What the roles of a running cluster remember of the last minute, asked for by an operator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost
from fabric.ids import ModelId, PeerId
from fabric.keys import Keyring
from fabric.messages import BatchesRemembered, RecordsAsked, RequestsRemembered
from fabric.operator_questions import ask_role
from roles.cli.options import via_host
from roles.observability.remembered import (
    AbsenceSeen,
    BatchSeen,
    CountsSeen,
    RequestSeen,
    absences_seen,
    batches_seen,
    requests_seen,
    zero_of_clock_ms,
)
from roles.runtime.core import SCHEDULER
from roles.runtime.live_figures import applications_of
from roles.runtime.running_cluster import (
    ActiveScheduler,
    ClusterReport,
    ProcessReport,
    frontends_of,
    having,
    look,
    unknown_frontends,
)

NEWEST: Final = 1 << 52
ANSWER_MS: Final = 5_000.0
LOOK_MS: Final = 1_000.0
"""The same of who looks again soon."""
PAGES_MAX: Final = 32
"""Answers asked for one after the other: all that a scheduler or a frontend remembers."""


@dataclass(slots=True)
class Remembered:
    """`counts`: what frontends counted of each model that was asked for. `plan`: see `BatchesRemembered.document`."""

    report: ClusterReport
    requests: list[RequestSeen] = field(default_factory=list)
    batches: list[BatchSeen] = field(default_factory=list)
    counts: CountsSeen = field(default_factory=CountsSeen)
    absences: list[AbsenceSeen] = field(default_factory=list)
    plan: str = ""
    keyring: Keyring | None = None
    silent: list[str] = field(default_factory=list)
    """Frontends that did not answer."""
    unasked: int = 0
    """Frontends of the cluster that are not known here."""

    @property
    def remarks(self) -> Iterator[str]:
        """What is not in it."""
        yield from (f"{role_id} does not answer: what it remembers is left out" for role_id in self.silent)
        if self.unasked:
            yield unasked_remark(self.unasked, self.keyring)


def unasked_remark(count: int, keyring: Keyring | None) -> str:
    """Of a command that asks every frontend it can reach."""
    were = "frontend of another host was" if count == 1 else "frontends of other hosts were"
    # With both, what was reached is all that there is to reach.
    advice = "" if keyring and via_host() else ": with --via HOST and --key all of a deployed cluster are"
    return f"{count} {were} not asked{advice}"


def remembered(
    run_dir: Path,
    models: Sequence[ModelId] = (),
    *,
    report: ClusterReport | None = None,
    request_id: str = "",
    last_ms: float | None = None,
    keyring: Keyring | None = None,
) -> Remembered:
    """Of these models' requests (none: of all), and of all batches. Raises PeerLost where there is no cluster.

    `report`: of a look at it just now, where there was one.
    """
    found = Remembered(report or look(run_dir, keyring), keyring=keyring)
    active = found.report.active
    # Where models are asked about, their shard's plan is the one that counts.
    for shard in sorted(active, key=lambda one: bool(models) and one not in having(models[0], active)):
        _ask_scheduler(found, active[shard], last_ms)
    asked = frontends_of(found.report.processes)
    found.unasked = unknown_frontends(active.values(), asked)
    for frontend in asked:
        try:
            told = [
                _remembered_by(frontend, model_id, request_id, last_ms, keyring)
                for model_id in models or (ModelId(""),)
            ]
        except PeerLost:  # a part of what it remembers would be taken for the whole
            found.silent.append(frontend.role_id)
            continue
        zero_ms = min(one.zero_ms for one in told)
        for one in told:
            found.requests += one.requests
            found.counts.add(one.model_id, one.first, zero_ms)
    return found


class NewRequests:
    """What the frontends of a run directory remember, each request once, however long nobody asked: as far back as they remember."""

    def __init__(self, run_dir: Path, keyring: Keyring | None) -> None:
        self._run_dir = run_dir
        self._keyring = keyring
        self._newest: dict[str, tuple[str, int]] = {}
        """By frontend: its incarnation, which counts anew, and the number of its newest request that was told."""
        self.unasked = 0
        """Frontends of the cluster that were not known here the last time."""

    def ask(self) -> tuple[list[RequestSeen], set[str]]:
        """Those that were not told before, and the frontends that do not answer. Raises PeerLost where there is no cluster."""
        found: list[RequestSeen] = []
        silent: set[str] = set()
        report = look(self._run_dir, self._keyring)
        frontends = frontends_of(report.processes)
        self.unasked = unknown_frontends(report.active.values(), frontends)
        for frontend in frontends:
            try:
                found += self._told_by(frontend)
            except PeerLost:  # what it has told this time is asked for again
                silent.add(frontend.role_id)
        return found, silent

    def _told_by(self, frontend: ProcessReport) -> list[RequestSeen]:
        incarnation, after = self._newest.get(frontend.role_id, ("", 0))
        if incarnation != frontend.incarnation:
            after = 0
        found: list[RequestSeen] = []
        before = NEWEST
        for _ in range(PAGES_MAX):
            answer = _asked(
                frontend, RecordsAsked(ModelId(""), before, after=after), ANSWER_MS, self._keyring
            )
            found += requests_seen(answer, MonotonicClock().now_ms())
            before = answer.requests[-1].number if answer.requests else 0
            if before <= after + 1:
                break
        if found:
            self._newest[frontend.role_id] = frontend.incarnation, found[0].record.number
        return found


def require_model(report: ClusterReport, name: ModelId, command: str, keyring: Keyring | None) -> None:
    """FabricError where no model of that name is served; of an application with the models to ask for, by `command` with their names."""
    known = [one.model_id for one in report.scheduler.models]
    if name in known:
        return
    asked = next((one.asks for one in applications_of(report.processes, keyring) if one.model_id == name), ())
    if asked:
        instead = ", ".join(command.format(model_id) for model_id in asked)
        raise FabricError(
            f"{name!r} is an application: its stages ask {' and '.join(asked)}; ask for these: {instead}"
        )
    raise FabricError(f"no model {name!r} is served; there is {', '.join(known)}")


def models_beside(model_id: ModelId, report: ClusterReport) -> tuple[ModelId, ...]:
    """All that its shard serves, itself too: what is planned together, and played together."""
    shard = having(model_id, report.active)[0]
    return tuple(one.model_id for one in report.active[shard].status.models)


def newest_bad_of_all(
    report: ClusterReport, keyring: Keyring | None = None
) -> tuple[list[RequestSeen], list[str]]:
    """The newest late and refused requests of every frontend, as many as one answer holds, and the frontends that say nothing."""
    found: list[RequestSeen] = []
    silent: list[str] = []
    for frontend in frontends_of(report.processes):
        try:
            answer = _asked(frontend, RecordsAsked(ModelId(""), NEWEST, bad_only=True), LOOK_MS, keyring)
        except PeerLost:
            silent.append(frontend.role_id)
        else:
            found += requests_seen(answer, MonotonicClock().now_ms())
    return [one for one in found if one.is_bad], silent


def arrivals_of(
    process: ProcessReport, model_id: ModelId, keyring: Keyring | None = None
) -> RequestsRemembered:
    """What a frontend counted of a model's requests in the last minute. Raises PeerLost."""
    # No record has so low a number: the counts are wanted alone.
    return _asked(process, RecordsAsked(model_id, 0), LOOK_MS, keyring)


def _asked(
    frontend: ProcessReport, asked: RecordsAsked, limit_ms: float, keyring: Keyring | None
) -> RequestsRemembered:
    return ask_role(
        frontend.addresses["client"],
        asked,
        RequestsRemembered,
        limit_ms,
        server=PeerId(frontend.role_id),
        keyring=keyring,
    )


def _ask_scheduler(found: Remembered, scheduler: ActiveScheduler, last_ms: float | None) -> None:
    before = NEWEST
    for _ in range(PAGES_MAX):
        answer = ask_role(
            scheduler.addresses,
            RecordsAsked(ModelId(""), before),
            BatchesRemembered,
            ANSWER_MS,
            server=SCHEDULER,
            keyring=found.keyring,
        )
        now_ms = MonotonicClock().now_ms()
        found.plan = found.plan or answer.document
        found.batches += batches_seen(answer, now_ms)
        found.absences += absences_seen(answer, now_ms)
        oldest = answer.batches[-1] if answer.batches else None
        if oldest is None or (last_ms is not None and oldest.ended_ago_ms > last_ms):
            return
        before = oldest.number


@dataclass(slots=True)
class _Told:
    """All that a frontend said of a model. `first`: its first answer, of whose moment the counts are. `zero_ms`: see `CountsSeen.add`."""

    model_id: ModelId
    first: RequestsRemembered
    zero_ms: float
    requests: list[RequestSeen]


def _remembered_by(
    frontend: ProcessReport,
    model_id: ModelId,
    request_id: str,
    last_ms: float | None,
    keyring: Keyring | None,
) -> _Told:
    told: _Told | None = None
    before = NEWEST
    for _ in range(PAGES_MAX):
        answer = _asked(frontend, RecordsAsked(model_id, before, request_id), ANSWER_MS, keyring)
        now_ms = MonotonicClock().now_ms()
        told = told or _Told(model_id, answer, math.inf, [])
        if answer.bin_ms:
            told.zero_ms = min(told.zero_ms, zero_of_clock_ms(answer, now_ms))
        told.requests += requests_seen(answer, now_ms)
        oldest = answer.requests[-1] if answer.requests else None
        if oldest is None or request_id or (last_ms is not None and oldest.ended_ago_ms > last_ms):
            break
        before = oldest.number
    assert told is not None, "it is asked at least once"
    return told


def newest_bad(requests: Sequence[RequestSeen], model_id: ModelId) -> Iterator[RequestSeen]:
    """Of a model, newest first."""
    bad = [one for one in requests if one.is_bad and one.record.model_id == model_id]
    yield from sorted(bad, key=lambda one: -one.ended_at_ms)
