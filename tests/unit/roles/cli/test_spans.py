"""Which requests `tenuto spans` exports: each once, also after pauses in which nobody could be asked. On a made-up cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fabric.errors import PeerLost
from fabric.ids import BatchId, ModelId, PeerId
from fabric.messages import Ledger, RecordsAsked, RequestRecord, RequestsRemembered, StatusListed
from roles.cli.spans import spans
from roles.frontend.recorder import RECORDS_MAX
from roles.observability.spans import Spans
from roles.runtime.running_cluster import ClusterReport, ProcessReport

_Ended = tuple[str, float]


class Interrupted(Exception):
    """By whoever called it."""


class Frontends:
    """By role id: the incarnation, and what it remembers. Each pause of the command is one of `steps`; then it is interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, tuple[str, list[_Ended]]] = {"frontend-0": ("aaaaaa", [])}
        self.now_ms = 0.0
        self.silent: set[str] = set()
        self.answers_left = 1 << 30
        self.is_away = False
        self.steps: list[Callable[[], None]] = []
        self.exporter = InMemorySpanExporter()
        monkeypatch.setattr("roles.cli.records.look", lambda *_: self._look())
        monkeypatch.setattr("roles.cli.records.ask_role", self._ask)
        monkeypatch.setattr("roles.cli.spans.select", SimpleNamespace(select=self._pause))
        monkeypatch.setattr(Spans, "to", lambda _: Spans(self.exporter))

    def run(self, tmp_path: Path, *steps: Callable[[], None]) -> str:
        """What it remarks."""
        self.steps = list(steps)
        command = ["--endpoint", "http://localhost:1/v1/traces", "--run-dir", str(tmp_path)]
        ended = CliRunner().invoke(spans, command)
        assert isinstance(ended.exception, Interrupted)
        return ended.stderr

    def ends(self, count: int, role_id: str = "frontend-0") -> None:
        incarnation, its = self.known[role_id]
        its += [(f"{incarnation}-{len(its) + at}", self.now_ms) for at in range(count)]

    @property
    def wanted(self) -> list[str]:
        return sorted(name for _, its in self.known.values() for name, _ in its)

    @property
    def exported(self) -> list[str]:
        """In all, of each request's own span."""
        its = [one.attributes or {} for one in self.exporter.get_finished_spans()]
        return sorted(str(one["tenuto.request_id"]) for one in its if one)

    def _look(self) -> ClusterReport:
        if self.is_away:
            raise PeerLost("no active scheduler answers")
        processes = [
            ProcessReport(role_id, 7, True, {"client": [role_id]}, incarnation)
            for role_id, (incarnation, _) in self.known.items()
        ]
        return ClusterReport({}, processes, StatusListed("scheduler-0", 7, (), (), {}), {})

    def _pause(self, *_: Any) -> None:
        if not self.steps:
            raise Interrupted
        self.now_ms += 2_000.0
        self.steps.pop(0)()

    def _ask(
        self, addresses: Sequence[str], asked: RecordsAsked, *_: Any, server: PeerId, keyring: None
    ) -> Any:
        assert (server, keyring) == (addresses[0], None)
        self.answers_left -= 1
        if server in self.silent or self.answers_left < 0:
            raise PeerLost("nobody answers")
        its = self.known[server][1]
        numbers = range(min(len(its), asked.before - 1), asked.after, -1)[:RECORDS_MAX]
        return RequestsRemembered(tuple(self._record(number, *its[number - 1]) for number in numbers))

    def _record(self, number: int, name: str, at_ms: float) -> RequestRecord:
        ago_ms, ledger = self.now_ms - at_ms, Ledger(request_id=name)
        return RequestRecord(number, name, ModelId("m"), "late", "", ago_ms, 25.0, ledger, BatchId(0))


@pytest.fixture
def frontends(monkeypatch: pytest.MonkeyPatch) -> Frontends:
    return Frontends(monkeypatch)


def test_each_request_is_exported_once(frontends: Frontends, tmp_path: Path) -> None:
    frontends.ends(3)
    assert frontends.run(tmp_path, lambda: frontends.ends(2), lambda: None) == ""
    assert frontends.exported == frontends.wanted
    assert len(frontends.wanted) == 5


def test_what_ended_while_nobody_could_be_asked_is_exported_too(frontends: Frontends, tmp_path: Path) -> None:
    """As the command's host was held up, or no scheduler was active for a while: far more than one answer holds."""
    frontends.ends(3)

    def goes() -> None:
        frontends.is_away = True
        frontends.ends(2 * RECORDS_MAX)

    def comes() -> None:
        frontends.is_away = False
        frontends.now_ms += 10_000.0
        frontends.ends(2 * RECORDS_MAX)

    said = frontends.run(tmp_path, goes, comes, lambda: frontends.ends(1))
    assert said == "tenuto: no active scheduler answers; it is asked again every 2 s\n"
    assert frontends.exported == frontends.wanted


def test_a_frontend_that_is_silent_is_told_of_once_and_exported_when_it_answers(
    frontends: Frontends, tmp_path: Path
) -> None:
    frontends.known["frontend-1"] = ("bbbbbb", [])
    frontends.ends(3, "frontend-1")

    def falls_silent() -> None:
        frontends.silent.add("frontend-1")
        frontends.ends(4)
        frontends.ends(4, "frontend-1")

    said = frontends.run(tmp_path, falls_silent, lambda: None, frontends.silent.clear)
    assert said == "tenuto: frontend-1 does not answer: what it remembers is exported when it does\n"
    assert frontends.exported == frontends.wanted


def test_a_frontend_that_falls_silent_between_two_answers_tells_nothing_twice(
    frontends: Frontends, tmp_path: Path
) -> None:
    def falls_silent() -> None:
        frontends.ends(2 * RECORDS_MAX)
        frontends.answers_left = 1

    def answers() -> None:
        frontends.answers_left = 1 << 30

    frontends.run(tmp_path, falls_silent, answers)
    assert frontends.exported == frontends.wanted


def test_a_frontend_that_was_started_anew_counts_anew_also_under_the_same_pid(
    frontends: Frontends, tmp_path: Path
) -> None:
    frontends.ends(9)
    _, before = frontends.known["frontend-0"]

    def starts_anew() -> None:
        frontends.known["frontend-0"] = ("cccccc", [])
        frontends.ends(4)

    frontends.run(tmp_path, starts_anew, lambda: None)
    assert frontends.exported == sorted([*(name for name, _ in before), *frontends.wanted])
