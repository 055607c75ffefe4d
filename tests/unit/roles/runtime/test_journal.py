"""The flight recorder: what it keeps, what it gives up, and what a replay says."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from fabric.errors import ConfigError, PayloadTooLarge
from fabric.ids import FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    ITEMS_MAX,
    Arrivals,
    DesiredSlices,
    Dropped,
    FrontendHello,
    ModelSpec,
    NodeHello,
    Ping,
    Pong,
    ReplicaInfo,
    SliceReady,
    SliceSpec,
)
from roles.cli.replay import replay as replay_command
from roles.cli.replay import show
from roles.config.cluster import PolicyChoice
from roles.runtime.core import Heard, Lost, Send, Tick
from roles.runtime.exit_codes import EXIT_DEFECT
from roles.runtime.journal import (
    Event,
    Journal,
    JournalReader,
    Recorded,
    Replay,
    packed,
    replay,
    require_journal,
    unpacked,
)
from roles.scheduler.build import scheduler_core
from roles.scheduler.replay_start import about_scheduler, scheduler_from
from roles.scheduler.settings import SchedulerSettings
from tests.scarcity import full_disk, no_descriptors

PEER = PeerId("agent/1")
MODEL = ModelSpec(ModelId("m"), 20.0, 4, None, (6.0, 7.0, 8.0, 9.0))
SETTINGS = SchedulerSettings(
    models=(MODEL,),
    slices=((NodeId("n"), SliceSpec(SliceId("n/gpu0/0"), 0, "emulated", None, (MODEL,))),),
)
DEFERRED = PolicyChoice("deferred", {})


class Echo:
    """Answers every Ping with a Pong of its number plus `error`."""

    wake_at_ms: float | None = None

    def __init__(self, error: int = 0) -> None:
        self._error = error

    def handle(self, event: Event, now_ms: float) -> Sequence[Send]:
        del now_ms
        match event:
            case Heard(peer, Ping(number=number)):
                return [Send(peer, Pong(number + self._error))]
            case _:
                return ()


def record(path: Path, pings: int, bytes_max: int = 1 << 20) -> None:
    journal = Journal(path, b"echo", bytes_max)
    core = Recorded(Echo(), journal)
    for number in range(pings):
        core.handle(Heard(PEER, Ping(number), 0.5), float(number))
    journal.close()


def test_a_replay_of_the_same_core_is_the_same(tmp_path: Path) -> None:
    record(tmp_path / "j", 3)
    played = replay(tmp_path / "j", lambda _: Echo())
    assert (played.events, played.actions, played.difference, played.is_cut) == (3, 3, None, False)


class Clumsy(Echo):
    """Says what no message may hold."""

    def handle(self, event: Event, now_ms: float) -> Sequence[Send]:
        return [*super().handle(event, now_ms), Send(PEER, Dropped(MODEL.model_id, (), "x" * 10_000, ""))]


def test_what_cannot_be_sent_ends_neither_the_core_nor_its_journal(tmp_path: Path) -> None:
    """The shell that would send it says so and goes on; a recorded core must not be worse off."""
    journal = Journal(tmp_path / "j", b"echo")
    core = Recorded(Clumsy(), journal)
    for number in range(2):
        assert len(core.handle(Heard(PEER, Ping(number)), float(number))) == 2
    journal.close()
    assert replay(tmp_path / "j", lambda _: Clumsy()) == Replay(2, 4, None, is_cut=False)
    found = replay(tmp_path / "j", lambda _: Echo()).difference
    assert found is not None
    assert found.recorded == "to agent/1: a message that could not be sent"
    assert found.replayed is None


def test_a_message_that_is_too_long_to_be_written_ends_neither_the_core_nor_its_journal(
    tmp_path: Path,
) -> None:
    """A peer may write whole numbers for floats, of which each takes us eight bytes more."""
    replica = ReplicaInfo(MODEL.model_id, 1, (1,) * ITEMS_MAX)
    ready = SliceReady(SliceId("n/gpu0/0"), Incarnation("0"), NodeId("n"), 0, (), (replica,) * 30)
    heard = unpacked(packed(ready))
    with pytest.raises(PayloadTooLarge):
        packed(heard)
    journal = Journal(tmp_path / "j", b"echo")
    core = Recorded(Echo(), journal)
    for message in (Ping(0), heard, Ping(1)):
        core.handle(Heard(PEER, message), 0.0)
    journal.close()
    assert journal.events_lost == 1
    assert replay(tmp_path / "j", lambda _: Echo()) == Replay(1, 1, None, is_cut=True)


def test_every_event_is_read_as_it_was_taken(tmp_path: Path) -> None:
    events: list[Event] = [Heard(PEER, Ping(1), 0.25), Lost(PEER, "still für immer"), Tick()]
    journal = Journal(tmp_path / "j", b"echo")
    for at_ms, event in enumerate(events):
        journal.note(event, at_ms / 3, ())
    journal.close()
    reader = JournalReader(tmp_path / "j")
    assert reader.about == b"echo"
    assert [(entry.now_ms, entry.event) for entry in reader.entries()] == [
        (at_ms / 3, event) for at_ms, event in enumerate(events)
    ]


def test_the_first_difference_is_told(tmp_path: Path) -> None:
    record(tmp_path / "j", 3)
    found = replay(tmp_path / "j", lambda _: Echo(error=1)).difference
    assert found is not None
    assert (found.number, found.now_ms) == (0, 0.0)
    assert found.recorded == "to agent/1: Pong(number=0, memory='', incarnation='')"
    assert found.replayed == "to agent/1: Pong(number=1, memory='', incarnation='')"


def test_a_file_that_ends_within_an_event_is_played_as_far_as_it_goes(tmp_path: Path) -> None:
    record(tmp_path / "j", 3)
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-5])
    played = replay(tmp_path / "j", lambda _: Echo())
    assert (played.events, played.difference, played.is_cut) == (2, None, True)


def test_a_journal_of_two_parts_is_one_history(tmp_path: Path) -> None:
    record(tmp_path / "j", 40, bytes_max=4000)
    assert (tmp_path / "j.1").exists()
    assert replay(tmp_path / "j", lambda _: Echo()).events == 40


def test_a_journal_is_bounded_and_says_when_its_beginning_is_gone(tmp_path: Path) -> None:
    record(tmp_path / "j", 500, bytes_max=4000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4200
    with pytest.raises(ConfigError, match=r"first \d+ events were given up"):
        replay(tmp_path / "j", lambda _: Echo())


def test_a_new_journal_replaces_the_one_before_it(tmp_path: Path) -> None:
    record(tmp_path / "j", 40, bytes_max=4000)
    record(tmp_path / "j", 2)
    assert replay(tmp_path / "j", lambda _: Echo()).events == 2


@pytest.mark.parametrize(
    "content", [b"", b"\x01", b"\xc1\xc1", b"models: []\n", b"\x94\x01\x01\x00\xc4\x00\x01"]
)
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(ConfigError, match="not a journal"):
        replay(tmp_path / "j", lambda _: Echo())
    with pytest.raises(ConfigError, match="cannot read"):
        replay(tmp_path / "none", lambda _: Echo())


def test_a_scheduler_is_made_again_from_its_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", about_scheduler(SETTINGS, DEFERRED))
    core = Recorded(scheduler_core(SETTINGS, DEFERRED), journal)
    core.handle(Heard(PeerId("node-n/1"), NodeHello(NodeId("n"), Incarnation("1"), (), ())), 0.0)
    core.handle(Heard(PeerId("f/1"), FrontendHello(FrontendId("f"), Incarnation("1"), ())), 0.5)
    core.handle(Heard(PeerId("f/1"), Arrivals(MODEL.model_id, 1, 1, 20.0)), 1.0)
    journal.close()
    (hello, greeting, arrival) = JournalReader(tmp_path / "j").entries()
    assert len(hello.sent) == len(greeting.sent) == len(arrival.sent) == 1
    again = scheduler_from(JournalReader(tmp_path / "j").about)
    (want,) = again.handle(hello.event, hello.now_ms)
    assert again.handle(greeting.event, greeting.now_ms)
    (dropped,) = again.handle(arrival.event, arrival.now_ms)
    assert isinstance(want.message, DesiredSlices)
    assert want.message.slices == (SETTINGS.slices[0][1],)
    assert isinstance(dropped.message, Dropped)

    result = CliRunner().invoke(replay_command, [str(tmp_path / "j")])
    assert (result.exit_code, result.output) == (0, "same: 3 events, 3 actions\n")


def test_the_command_exits_1_where_the_decisions_differ(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", about_scheduler(SETTINGS, DEFERRED))
    journal.note(Heard(PEER, Ping(4)), 2.0, [Send(PEER, Pong(5))])
    journal.close()
    result = CliRunner().invoke(replay_command, [str(tmp_path / "j"), "--json"])
    assert result.exit_code == 1
    told = json.loads(result.output)
    assert told["same"] is False
    assert told["difference"]["replayed"] == "to agent/1: Pong(number=4, memory='', incarnation='')"
    assert (
        "recorded: to agent/1: Pong(number=5, memory='', incarnation='')"
        in CliRunner().invoke(replay_command, [str(tmp_path / "j")]).output
    )


def test_a_journal_of_somebody_else_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "j", 1)
    with pytest.raises(ConfigError, match="does not say what scheduler"):
        replay(tmp_path / "j", scheduler_from)


class Brittle(Echo):
    """Does not take the ping of this number."""

    def handle(self, event: Event, now_ms: float) -> Sequence[Send]:
        assert not isinstance(event, Heard) or event.message != Ping(2), "planted"
        return super().handle(event, now_ms)


def test_the_event_that_raised_is_the_last_of_the_journal_and_raises_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", b"brittle")
    core = Recorded(Brittle(), journal)
    for number in range(2):
        core.handle(Heard(PEER, Ping(number)), float(number))
    with pytest.raises(AssertionError, match="planted"):
        core.handle(Heard(PEER, Ping(2)), 2.0)
    journal.close()
    played = replay(tmp_path / "j", lambda _: Brittle())
    assert (played.events, played.actions, played.difference) == (2, 2, None)
    assert "AssertionError: planted" in played.defect
    mended = replay(tmp_path / "j", lambda _: Echo()).difference
    assert mended is not None
    assert (mended.number, mended.recorded) == (2, None)


def test_the_command_shows_a_defect_and_ends_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    played = Replay(3, 2, None, is_cut=False, defect="Traceback …\nAssertionError: planted\n")
    assert show(played, is_json=False) == EXIT_DEFECT
    assert capsys.readouterr().out == (
        "a defect after 3 events and 2 actions\nTraceback …\nAssertionError: planted\n"
    )
    assert show(played, is_json=True) == EXIT_DEFECT
    said = json.loads(capsys.readouterr().out)
    assert (said["same"], said["difference"], said["defect"]) == (False, None, played.defect)


def test_a_full_disk_ends_the_journal_and_not_the_role(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(Path("/dev/full"), b"echo")
    core = Recorded(Echo(), journal)
    for number in range(5):
        assert core.handle(Heard(PEER, Ping(number)), 1_000.0 * number)
    journal.close()
    assert journal.events_lost == 5
    assert caplog.text.count("journal_ends") == 1


def test_a_disk_that_fills_up_when_a_part_is_full_ends_the_journal_and_not_the_role(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", b"echo", 4_000)
    core = Recorded(Echo(), journal)
    with full_disk():
        for number in range(100):
            assert core.handle(Heard(PEER, Ping(number), 0.5), float(number))
    journal.close()
    assert journal.events_lost > 0


def test_a_journal_that_cannot_even_begin_ends_no_role_that_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_journal(tmp_path / "j")
    with full_disk():
        journal = Journal(tmp_path / "j", b"x" * 100_000)
    assert caplog.text.count("journal_ends") == 1
    core = Recorded(Echo(), journal)
    assert core.handle(Heard(PEER, Ping(1)), 1.0)
    journal.close()
    assert journal.events_lost == 1


def test_where_no_journal_may_be_is_said_before_it_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the journal"):
        require_journal(tmp_path / "nowhere" / "j")


def kept(path: Path) -> Path:
    return path.with_name(f"{path.name}-{os.getpid()}")


def end_with_a_defect(path: Path, pings: int, bytes_max: int = 1 << 20) -> None:
    journal = Journal(path, b"echo", bytes_max)
    core = Recorded(Echo(), journal)
    for number in range(pings):
        core.handle(Heard(PEER, Ping(number), 0.5), float(number))
    journal.close()
    journal.set_aside()


@pytest.mark.parametrize("pings", [3, 40])
def test_a_journal_that_is_kept_aside_is_one_history_also_after_another_of_that_pid(
    tmp_path: Path, pings: int
) -> None:
    """In a container each process has the same pid."""
    end_with_a_defect(tmp_path / "j", 38, bytes_max=4000)
    assert replay(kept(tmp_path / "j"), lambda _: Echo()).events == 38
    end_with_a_defect(tmp_path / "j", pings, bytes_max=4000)
    assert replay(kept(tmp_path / "j"), lambda _: Echo()).events == pings


def test_a_journal_that_could_not_begin_keeps_none_of_another_process_aside(tmp_path: Path) -> None:
    record(tmp_path / "j", 3)
    with no_descriptors():
        journal = Journal(tmp_path / "j", b"echo")
    journal.close()
    journal.set_aside()
    assert not kept(tmp_path / "j").exists()


def test_parts_of_two_histories_are_not_played_as_one(tmp_path: Path) -> None:
    record(tmp_path / "j", 40, bytes_max=4000)
    record(tmp_path / "other", 3)
    (tmp_path / "other").replace(tmp_path / "j")
    with pytest.raises(ConfigError, match=r"goes on behind 0 events, .* they are parts of two histories"):
        replay(tmp_path / "j", lambda _: Echo())


def test_a_journal_that_ended_when_its_part_was_full_is_played_to_its_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", b"echo", 4_000)
    core = Recorded(Echo(), journal)
    with no_descriptors():
        for number in range(100):
            assert core.handle(Heard(PEER, Ping(number), 0.5), float(number))
    journal.close()
    assert not (tmp_path / "j").exists()
    played = replay(tmp_path / "j", lambda _: Echo())
    assert 0 < played.events < 100
    assert (played.difference, played.is_cut) == (None, False)
    journal.set_aside()
    assert replay(kept(tmp_path / "j"), lambda _: Echo()).events == played.events
