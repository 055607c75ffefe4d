"""What the roles of a running cluster remember of the last minute, asked for by an operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fabric.clock import MonotonicClock
from fabric.errors import PeerLost
from fabric.ids import FRONTEND_PREFIX, ModelId, PeerId
from fabric.keys import Keyring
from fabric.messages import BatchesRemembered, RecordsAsked, RequestsRemembered
from fabric.operator_questions import ask_role
from roles.observability.remembered import (
    AbsenceSeen,
    BatchSeen,
    RequestSeen,
    absences_seen,
    batches_seen,
    requests_seen,
)
from roles.runtime.core import SCHEDULER
from roles.runtime.running_cluster import (
    ActiveScheduler,
    ClusterReport,
    ProcessReport,
    having,
    look,
)

NEWEST: Final = 1 << 52
ANSWER_MS: Final = 5_000.0
LOOK_MS: Final = 1_000.0
"""The same of who looks again soon."""
PAGES_MAX: Final = 32
"""Answers asked for one after the other: all that a scheduler or a frontend remembers."""


@dataclass(slots=True)
class Remembered:
    """`arrivals`: by model, of each frontend's bins of `bin_ms` added up, and `bad` ones of the last minute. `plan`: see `BatchesRemembered.document`."""

    report: ClusterReport
    requests: list[RequestSeen] = field(default_factory=list)
    batches: list[BatchSeen] = field(default_factory=list)
    arrivals: dict[ModelId, list[int]] = field(default_factory=dict)
    bin_ms: float = 0.0
    bad: dict[ModelId, int] = field(default_factory=dict)
    unserved: dict[ModelId, int] = field(default_factory=dict)
    """Of the bad ones: how many found no slice, or lost theirs."""
    absences: list[AbsenceSeen] = field(default_factory=list)
    plan: str = ""
    keyring: Keyring | None = None
    silent: list[str] = field(default_factory=list)
    """Frontends that did not answer."""


def remembered(
    run_dir: Path,
    models: Sequence[ModelId] = (),
    *,
    request_id: str = "",
    last_ms: float | None = None,
    is_with_batches: bool = True,
    keyring: Keyring | None = None,
) -> Remembered:
    """Of these models' requests (none: of all), and of all batches. Raises PeerLost where there is no cluster."""
    found = Remembered(look(run_dir, keyring), keyring=keyring)
    if is_with_batches:
        active = found.report.active
        # Where models are asked about, their shard's plan is the one that counts.
        for shard in sorted(active, key=lambda one: bool(models) and one not in having(models[0], active)):
            _ask_scheduler(found, active[shard], last_ms)
    for process in found.report.processes:
        if process.role_id.startswith(FRONTEND_PREFIX) and process.alive:
            try:
                for model_id in models or (ModelId(""),):
                    _ask_frontend(
                        found, process.role_id, process.addresses["client"], model_id, request_id, last_ms
                    )
            except PeerLost:
                found.silent.append(process.role_id)
    return found


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
    asked = RecordsAsked(ModelId(""), NEWEST, bad_only=True)
    for process in report.processes:
        addresses = process.addresses.get("client", ())
        if not process.role_id.startswith(FRONTEND_PREFIX) or not process.alive or not addresses:
            continue
        server = PeerId(process.role_id)
        try:
            answer = ask_role(addresses, asked, RequestsRemembered, LOOK_MS, server=server, keyring=keyring)
        except PeerLost:
            silent.append(process.role_id)
        else:
            found += requests_seen(answer, MonotonicClock().now_ms())
    return [one for one in found if one.is_bad], silent


def arrivals_of(
    process: ProcessReport, model_id: ModelId, keyring: Keyring | None = None
) -> RequestsRemembered:
    """What a frontend counted of a model's requests in the last minute. Raises PeerLost."""
    # No record has so low a number: the counts are wanted alone.
    asked = RecordsAsked(model_id, 0)
    server = PeerId(process.role_id)
    return ask_role(
        process.addresses["client"], asked, RequestsRemembered, LOOK_MS, server=server, keyring=keyring
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


def _ask_frontend(
    found: Remembered,
    role_id: str,
    addresses: Sequence[str],
    model_id: ModelId,
    request_id: str,
    last_ms: float | None,
) -> None:
    before = NEWEST
    for page in range(PAGES_MAX):
        answer = ask_role(
            addresses,
            RecordsAsked(model_id, before, request_id),
            RequestsRemembered,
            ANSWER_MS,
            server=PeerId(role_id),
            keyring=found.keyring,
        )
        found.requests += requests_seen(answer, MonotonicClock().now_ms())
        if page == 0 and answer.arrivals:
            found.bin_ms = answer.bin_ms
            found.bad[model_id] = found.bad.get(model_id, 0) + answer.bad
            found.unserved[model_id] = found.unserved.get(model_id, 0) + answer.unserved
            former = found.arrivals.get(model_id, [0] * len(answer.arrivals))
            found.arrivals[model_id] = [a + b for a, b in zip(former, answer.arrivals, strict=True)]
        oldest = answer.requests[-1] if answer.requests else None
        if oldest is None or request_id or (last_ms is not None and oldest.ended_ago_ms > last_ms):
            return
        before = oldest.number


def newest_bad(requests: Sequence[RequestSeen], model_id: ModelId) -> Iterator[RequestSeen]:
    """Of a model, newest first."""
    bad = [one for one in requests if one.is_bad and one.record.model_id == model_id]
    yield from sorted(bad, key=lambda one: -one.ended_at_ms)
