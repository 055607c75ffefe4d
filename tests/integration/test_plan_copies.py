"""Which plan an active scheduler's copies hold: at each epoch the one that it settled last, whoever asks for it and when."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fabric import frames
from fabric.clock import VirtualClock
from fabric.codec import LONG_HEADER_BYTES_MAX
from fabric.ids import Incarnation, ModelId, NodeId, PeerId
from fabric.json_files import write_whole
from fabric.messages import (
    AnyMessage,
    Changed,
    LeaseAsked,
    LeaseReport,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    PlanChange,
    PlanCopy,
    SchedulerHello,
)
from roles.config.read_config import parse_config
from roles.runtime.core import Heard, Send, Tick
from roles.runtime.epochs import HELD_MS
from roles.runtime.loop.mailbox import Mailbox
from roles.scheduler.availability.replica import NOT_ACTIVE
from roles.scheduler.planning.start_config import Written
from roles.scheduler.replay_start import settings_of
from roles.scheduler.shell import SchedulerShell
from roles.scheduler.surroundings import SchedulerSurroundings

MODEL = {"name": "fast", "slo_ms": 3_000, "profile": {"alpha_ms": 0.5, "beta_ms": 2, "max_batch": 32}}
NODES = ("one", "two", "three")
DOCUMENT: dict[str, Any] = {
    "models": [MODEL],
    "cluster": {"nodes": [{"host": host} for host in NODES], "schedulers": 2},
    "batching": "eager",
}
OPERATOR = PeerId("operator/1")
STANDBY = PeerId("scheduler-1/0")


class Unanswering(Mailbox[Heard]):
    """A planner that is still at it: as long as it is asked, a change is under way."""

    def start(self, asked: object) -> None:
        """Take the question."""

    def abandon(self) -> None:
        """As `Asking`."""


class Active:
    """Scheduler 0 of two in its real shell, which agents that this plays have made the active one. Its moments are ours."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock = VirtualClock(1_000.0)
        surroundings = SchedulerSurroundings(
            clock=self._clock, make_planner=lambda _: Unanswering(), write_file=self._write
        )
        written = Written(parse_config(DOCUMENT, run_dir), DOCUMENT, run_dir)
        self.shell = SchedulerShell(written, run_dir, surroundings=surroundings)
        self.copies: list[PlanCopy] = []
        """What the standby was sent."""
        self.answers: list[Changed] = []
        """What the operator was told."""
        self.disk_takes_ms = 0.0
        self._file = run_dir / "scheduler-0.plan"
        self._sent: list[tuple[PeerId, AnyMessage]] = []
        self._leases = {
            host: LeaseReport(NodeId(host), 0, "", Incarnation("0"), is_free=True) for host in NODES
        }
        monkeypatch.setattr(self.shell._outbox, "put", self._put)

    def begin(self) -> None:
        """Two of the three agents are there, and as nobody has sent a plan one is made before the election."""
        for host in NODES[:2]:
            self.feed(Heard(agent(host), self._leases[host]))
        for _ in range(2):
            self._pass(1_000.0)
            self.feed(Tick())
        self.feed(Heard(STANDBY, SchedulerHello("scheduler-1", Incarnation("0"))))

    def raise_epoch(self) -> None:
        """The third agent is back, with an epoch of a campaign that only it heard of."""
        former = self.epoch
        self._leases["three"] = LeaseReport(
            NodeId("three"), former + 1, "scheduler-1", Incarnation("0"), is_free=True
        )
        self.feed(Heard(agent("three"), self._leases["three"]))
        assert self.epoch > former

    def settle(self, term: int) -> None:
        """An operator's change that needs no plan."""
        self.feed(Heard(OPERATOR, ModelSet(term, ModelId("fast"), term=term)))
        assert self.is_steady

    def settle_and_lapse(self, term: int) -> None:
        """The same; and before the turn is over the lease turns out to have lapsed."""
        self._handle(Heard(OPERATOR, ModelSet(term, ModelId("fast"), term=term)))
        self._pass(10 * HELD_MS)
        self.feed(Tick())

    def begin_change(self) -> None:
        """An operator's change that is under way from here on."""
        self.feed(Heard(OPERATOR, ModelsAdd(99, json.dumps([MODEL | {"name": "other"}]))))
        assert not self.is_steady

    def greet(self) -> None:
        """The standby says hello again: it wants a copy."""
        self.feed(Heard(STANDBY, SchedulerHello("scheduler-1", Incarnation("0"))))

    def feed(self, *events: Heard | Tick) -> None:
        """One turn, and what agents answer."""
        for event in events:
            self._handle(event)
        self.shell.role.end_turn()
        sent, self._sent = self._sent, []
        for peer, message in sent:
            if peer == STANDBY and isinstance(message, PlanCopy):
                self.copies.append(message)
            elif isinstance(message, Changed):
                self.answers.append(message)
            elif isinstance(message, LeaseAsked):
                self._grant(peer, message)

    def _handle(self, event: Heard | Tick) -> None:
        for action in self.shell._replica.handle(event, self._clock.now_ms()):
            self.shell._perform(action)

    def _put(self, peer: PeerId, message: AnyMessage) -> None:
        frames.pack(message)
        self._sent.append((peer, message))

    def _pass(self, ms: float) -> None:
        self._clock.advance(self._clock.now_ms() + ms)

    def _write(self, path: Path, text: str) -> None:
        write_whole(path, text)
        self._pass(self.disk_takes_ms)

    def _grant(self, peer: PeerId, asked: LeaseAsked) -> None:
        host = next(host for host in NODES if agent(host) == peer)
        self._leases[host] = LeaseReport(
            NodeId(host),
            asked.epoch,
            asked.scheduler_id,
            asked.incarnation,
            is_free=False,
            number=asked.number,
        )
        self.feed(Heard(peer, self._leases[host]))

    @property
    def epoch(self) -> int:
        return self.shell._replica.epoch

    @property
    def is_steady(self) -> bool:
        core = self.shell._core
        assert core is not None
        assert core.controller is not None
        return core.controller.is_steady

    @property
    def on_disk(self) -> tuple[int, int]:
        """Epoch of the file's plan, and its term."""
        kept = json.loads(self._file.read_text(encoding="utf-8"))
        return kept["epoch"], term_of(kept["about"])


def agent(host: str) -> PeerId:
    return PeerId(f"node-{host}/0")


def term_of(document: str) -> int:
    (model,) = settings_of(document.encode())[0].models
    return model.term


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Active]:
    active = Active(tmp_path, monkeypatch)
    with closing(active.shell):
        active.begin()
        yield active


STEPS: dict[str, Callable[[Active], None]] = {
    "raise": Active.raise_epoch,
    "change": Active.begin_change,
    "greet": Active.greet,
}


@pytest.mark.parametrize("terms", [0, 1, 2])
@pytest.mark.parametrize(
    "steps",
    [
        ("raise", "greet"),
        ("change", "greet"),
        ("raise", "change", "greet"),
        ("change", "raise", "greet"),
        ("change", "greet", "raise"),
        ("raise", "raise", "change", "greet"),
    ],
    ids="-".join,
)
def test_a_copy_holds_the_plan_that_was_settled_last(one: Active, terms: int, steps: Sequence[str]) -> None:
    """And so does the disk, each time with the present epoch: of any plan that is about, the next scheduler goes on from this one."""
    for term in range(1, terms + 1):
        one.settle(term)
    for step in steps:
        STEPS[step](one)
    assert one.on_disk == (one.epoch, terms)
    newest = max(one.copies, key=lambda copy: (copy.epoch, copy.number))
    assert (newest.epoch, term_of(newest.document)) == one.on_disk


@pytest.mark.parametrize(
    "next_", [ModelsAdd(99, json.dumps([MODEL | {"name": "other"}])), ModelsRemove(99, (ModelId("fast"),))]
)
def test_what_an_operator_was_told_is_kept_though_the_next_change_begins_in_the_same_turn(
    one: Active, next_: PlanChange
) -> None:
    one.feed(Heard(OPERATOR, ModelSet(1, ModelId("fast"), term=1)), Heard(OPERATOR, next_))
    assert not one.is_steady
    assert one.on_disk == (one.epoch, 1)
    one.greet()
    assert (one.copies[-1].epoch, term_of(one.copies[-1].document)) == (one.epoch, 1)


def test_what_an_operator_changed_is_kept_though_the_lease_lapses_in_the_same_turn(one: Active) -> None:
    """It is not confirmed: had another one been elected, it could have begun without it."""
    former = one.shell._core
    one.settle_and_lapse(1)
    assert one.shell._core is not former
    assert one.on_disk == (one.epoch, 1)
    assert (one.copies[-1].epoch, term_of(one.copies[-1].document)) == (one.epoch, 1)
    assert [(answer.request_no, answer.code) for answer in one.answers] == [(1, NOT_ACTIVE)]


def test_a_change_is_confirmed_only_if_it_was_kept_within_the_lease(one: Active) -> None:
    one.settle(1)
    one.disk_takes_ms = 2 * HELD_MS
    one.settle(2)
    assert [(answer.status, answer.code) for answer in one.answers] == [("ok", ""), ("refused", NOT_ACTIVE)]
    assert one.on_disk == (one.epoch, 2)


@pytest.mark.parametrize("then", ["the turn ends", "the lease lapses"])
def test_an_answer_that_no_message_holds_is_counted_and_what_follows_is_done(one: Active, then: str) -> None:
    one.shell._perform(Send(OPERATOR, Changed(1, "failed", document="x" * LONG_HEADER_BYTES_MAX)))
    former = one.shell._core
    if then == "the lease lapses":
        one.settle_and_lapse(2)
        assert one.shell._core is not former
    else:
        one.settle(2)
    assert [answer.request_no for answer in one.answers] == [2]
    assert one.shell.role.stats.unsendable == 1


def test_numbers_go_on_where_the_epoch_is_raised(one: Active) -> None:
    one.settle(1)
    one.raise_epoch()
    one.settle(2)
    versions = [(copy.epoch, copy.number) for copy in one.copies]
    assert versions == sorted(versions)
    assert one.on_disk == (one.epoch, 2)
