from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fabric import frames
from fabric.clock import MonotonicClock
from fabric.ids import PeerId
from fabric.inproc import HubLink
from fabric.messages import StatusAsked, StatusListed
from fabric.sockets import RouterLink
from roles.runtime.core import Heard, Tick
from roles.runtime.loop.driver import COLLECT_AT_LAST_MS, TURN_LIMIT, YOUNG_MAX, Driver, DriverStats, Role
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.loop.server_connection import ServerSource
from roles.runtime.loop.sources import WatchedLinkSource


def test_a_quantile_of_the_lateness_is_never_too_low_and_at_most_an_eighth_too_high() -> None:
    for late_us in (0, 1, 15, 16, 17, 31, 32, 499, 500, 511, 512, 4_097, 999_999, 70_000_000):
        stats = DriverStats()
        stats.note_lateness(late_us / 1e3)
        assert late_us / 1e3 <= stats.late_ms(0.99) <= late_us / 1e3 * 1.125 + 0.001


def test_lateness_beyond_all_buckets_stays_in_the_last_one() -> None:
    stats = DriverStats()
    stats.note_lateness(1e9)
    assert stats.late_ms(1.0) > 100_000.0
    assert stats.late_ms_max == 1e9


def test_quantiles_are_those_of_all_ticks() -> None:
    stats = DriverStats()
    assert stats.late_ms(0.99) == 0.0
    for late_us in range(100):
        stats.note_lateness(late_us / 1e3)
    # The fiftieth is 49 us, in a bucket of 48 to 51; the hundredth is 99, in one of 96 to 103.
    assert stats.late_ms(0.5) == pytest.approx(0.052)
    assert stats.late_ms(1.0) == stats.late_ms_max == pytest.approx(0.099)


def test_a_status_tells_what_the_loop_measured_beside_what_the_role_counted() -> None:
    stats = DriverStats(turns=3, turn_ms_max=2.0, collect_ms_max=4.0)
    stats.note_lateness(0.005)
    told = stats.told_in(StatusListed("frontend-0", 1, (), (), {"requests": 5.0}))
    counters = dict(told.counters)
    assert counters.pop("cpu_ms") > 0
    assert counters.pop("memory_bytes") > 0
    assert counters == {
        "requests": 5.0,
        "turns": 3.0,
        "ticks": 1.0,
        "timer_late_p50_ms": 0.005,
        "timer_late_p99_ms": 0.005,
        "timer_late_ms_max": 0.005,
        "turn_ms_max": 2.0,
        "collect_ms_max": 4.0,
        "messages_unsendable": 0.0,
    }


class HandClock:
    """Moves by a millisecond with every look."""

    def __init__(self) -> None:
        self.at_ms = 1_000.0

    def now_ms(self) -> float:
        self.at_ms += 1.0
        return self.at_ms


class Alarm:
    """Wants these moments, one after the other."""

    def __init__(self, *moments_ms: float) -> None:
        self.left = list(moments_ms)

    @property
    def wake_at_ms(self) -> float | None:
        return self.left[0] if self.left else None

    def handle(self, event: Tick, now_ms: float) -> Sequence[None]:
        self.left.pop(0)
        return ()


def test_lateness_counts_from_the_moment_that_was_wanted() -> None:
    stats = ticks(Alarm(1_003.5))
    assert stats.ticks == 1
    assert 0.5 <= stats.late_ms_max < 10.0  # a few looks at the clock


@pytest.mark.parametrize("moments_ms", [(0.0,), (1_003.5, 0.0), (0.0, 1_003.5, 0.0), (0.0, 0.0)])
def test_a_core_that_wants_a_moment_of_the_past_is_late_only_from_when_it_said_so(
    moments_ms: tuple[float, ...],
) -> None:
    stats = ticks(Alarm(*moments_ms))
    assert stats.ticks == len(moments_ms)
    assert stats.late_ms_max < 10.0  # a few looks at the clock, not a second


def ticks(core: Alarm) -> DriverStats:
    role: Role[Tick, None] = Role(core, [], lambda _: None)
    driver = Driver([role], HandClock())
    try:
        driver.run(lambda: core.wake_at_ms is None)
    finally:
        driver.close()
    return driver.stats


class Pipe:
    """A source over a pipe: an event for each byte, and one for each that was put by without a descriptor's word."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK)
        self.quiet: list[str] = []
        self.wake_at_ms: float | None = None
        self.taken = 0

    def fileno(self) -> int:
        return self.read_fd

    @property
    def has_more(self) -> bool:
        return bool(self.quiet)

    def take(self, limit: int, now_ms: float) -> Sequence[str]:
        self.taken += 1
        if self.wake_at_ms is not None and self.wake_at_ms <= now_ms:
            self.wake_at_ms = None
            return ["woken"]
        if self.quiet:
            return [self.quiet.pop(0)]
        return list(os.read(self.read_fd, limit).decode())

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


class Listener:
    """Writes down what it hears."""

    wake_at_ms: float | None = None

    def __init__(self) -> None:
        self.heard: list[str | Tick] = []

    def handle(self, event: str | Tick, now_ms: float) -> Sequence[None]:
        self.heard.append(event)
        return ()


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe, Pipe]]:
    first, second = Pipe(), Pipe()
    yield first, second
    first.close()
    second.close()


def until_heard(count: int, *sources: Pipe) -> list[str | Tick]:
    core = Listener()
    role: Role[str, None] = Role(core, sources, lambda _: None)
    driver = Driver([role], MonotonicClock())
    try:
        driver.run(lambda: len(core.heard) >= count)
    finally:
        driver.close()
    return core.heard


def test_only_sources_that_have_something_are_asked(pipes: tuple[Pipe, Pipe]) -> None:
    os.write(pipes[0].write_fd, b"a")
    assert until_heard(1, *pipes) == ["a"]
    assert [pipe.taken for pipe in pipes] == [1, 0]


def test_a_source_whose_descriptor_says_nothing_is_heard_if_it_has_more(pipes: tuple[Pipe, Pipe]) -> None:
    pipes[1].quiet = ["b", "c"]
    assert until_heard(2, *pipes) == ["b", "c"]


def test_sources_are_heard_in_their_order_whichever_way_they_said_so(pipes: tuple[Pipe, Pipe]) -> None:
    os.write(pipes[0].write_fd, b"a")
    pipes[1].quiet = ["b"]
    assert until_heard(2, *pipes) == ["a", "b"]


def test_a_flood_on_one_source_does_not_keep_another_from_its_moment(pipes: tuple[Pipe, Pipe]) -> None:
    flooded, timed = pipes
    os.write(flooded.write_fd, b"x" * 1_000)
    timed.wake_at_ms = MonotonicClock().now_ms()
    heard = until_heard(200, flooded, timed)
    assert heard.index("woken") <= 2 * TURN_LIMIT


def test_a_source_is_woken_at_its_moment_and_not_before(pipes: tuple[Pipe, Pipe]) -> None:
    clock = MonotonicClock()
    pipes[0].wake_at_ms = wake_at_ms = clock.now_ms() + 7.5
    assert until_heard(1, *pipes) == ["woken"]
    assert clock.now_ms() >= wake_at_ms
    assert pipes[0].taken == 1


class Post:
    """What two roles of one process say to each other: a source without a descriptor."""

    wake_at_ms: float | None = None

    def __init__(self) -> None:
        self.waiting: list[str] = []

    def fileno(self) -> int:
        return -1

    @property
    def has_more(self) -> bool:
        return bool(self.waiting)

    def take(self, limit: int, now_ms: float) -> Sequence[str]:
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        return taken


class Talker:
    """Passes on what it hears, with its own mark, until that is long enough; and has a timer."""

    def __init__(self, mark: str, wake_at_ms: float) -> None:
        self.mark = mark
        self.wake_at_ms: float | None = wake_at_ms
        self.ticks = 0

    def handle(self, event: str | Tick, now_ms: float) -> Sequence[str]:
        if isinstance(event, Tick):
            self.ticks += 1
            self.wake_at_ms = None
            return ()
        return (event + self.mark,) if len(event) < 5 else ()


def test_roles_of_one_process_hear_their_own_sources_and_keep_their_own_timers() -> None:
    clock = MonotonicClock()
    cores = Talker("a", clock.now_ms() + 2.0), Talker("b", clock.now_ms() + 4.0)
    posts = Post(), Post()
    said: list[str] = []
    ends: list[str] = []

    def say(to: Post, words: str) -> None:
        said.append(words)
        to.waiting.append(words)

    first: Role[str, str] = Role(cores[0], [posts[0]], lambda w: say(posts[1], w), lambda: ends.append("a"))
    second: Role[str, str] = Role(cores[1], [posts[1]], lambda w: say(posts[0], w), lambda: ends.append("b"))
    posts[0].waiting.append(".")
    driver = Driver([first, second], clock)
    try:
        driver.turn()
        assert said == [".a", ".ab", ".aba"], (
            "what is handed over is heard in the same turn, and once what comes back"
        )
        assert ends == ["a", "b", "a"]
        driver.run(lambda: cores[0].ticks + cores[1].ticks == 2 and len(said) == 4)
    finally:
        driver.close()
    assert said == [".a", ".ab", ".aba", ".abab"]
    assert (cores[0].ticks, cores[1].ticks) == (1, 1)
    assert first.stats is second.stats is driver.stats


def test_what_a_frontend_hands_to_the_scheduler_of_its_process_is_heard_in_the_same_turn(
    tmp_path: Path,
) -> None:
    """By the very sources that the two roles have (ADR 0130)."""
    clock = MonotonicClock()
    router = RouterLink.bind([f"ipc://{tmp_path}/s"])
    hub = HubLink(router, PeerId("scheduler"), clock)
    local = hub.connect(PeerId("frontend-0/1"))
    start: Mailbox[str] = Mailbox()
    heard: list[object] = []

    class Saying:
        wake_at_ms = None

        def handle(self, event: object, now_ms: float) -> Sequence[object]:
            del now_ms
            heard.append(event)
            return [event]

    def say(_: object) -> None:
        if len(heard) == 1:
            local.send(PeerId("scheduler"), StatusAsked())

    def answer(action: object) -> None:
        if isinstance(action, Heard):
            hub.send(PeerId("frontend-0/1"), StatusAsked())

    frontend: Role[object, object] = Role(
        Saying(), [start, ServerSource(local, PeerId("scheduler"), clock)], say
    )
    scheduler: Role[object, object] = Role(Saying(), [WatchedLinkSource(hub, clock)], answer)
    start.post("go")
    driver = Driver([frontend, scheduler], clock)
    try:
        driver.turn()
        assert [type(one).__name__ for one in heard] == ["str", "Heard", "Heard"]
    finally:
        driver.close()
        hub.close()
        start.close()


def test_roles_that_talk_without_end_still_see_their_timers_and_the_end() -> None:
    clock = MonotonicClock()
    core = Talker("a", clock.now_ms() + 2.0)
    posts = Post(), Post()
    first: Role[str, str] = Role(core, [posts[0]], lambda _: posts[1].waiting.append("."))
    second: Role[str, str] = Role(
        Talker("b", clock.now_ms()), [posts[1]], lambda _: posts[0].waiting.append(".")
    )
    posts[0].waiting.append(".")
    driver = Driver([first, second], clock)
    try:
        driver.run(lambda: core.ticks > 0 and driver.stats.turns > 2)
    finally:
        driver.close()
    assert posts[0].waiting or posts[1].waiting, "they are not done yet"


def test_a_busy_thread_beside_a_loop_lets_it_in_soon_and_only_while_it_runs() -> None:
    core = Talker("a", 0.0)
    before_s = sys.getswitchinterval()
    seen_s: list[float] = []
    role: Role[str, str] = Role(core, [], lambda _: None, lambda: seen_s.append(sys.getswitchinterval()))
    driver = Driver([role], MonotonicClock())
    try:
        driver.run(lambda: core.ticks > 0)
    finally:
        driver.close()
    assert seen_s[0] == pytest.approx(1e-4)
    assert sys.getswitchinterval() == before_s


class Knot:
    """Refers to itself: only the collector frees it."""

    __slots__ = ("me",)
    living = 0

    def __init__(self) -> None:
        self.me = self
        Knot.living += 1

    def __del__(self) -> None:
        Knot.living -= 1


class Spinner:
    """Makes garbage with every event; counts the most there was of it. It keeps each for `rest` events."""

    wake_at_ms: float | None = None

    def __init__(self, rest: int = 0) -> None:
        self.kept: deque[Knot] = deque(maxlen=rest)
        self.events = 0
        self.most = 0

    def handle(self, event: str | Tick, now_ms: float) -> Sequence[None]:
        self.kept.append(Knot())
        self.events += 1
        self.most = max(self.most, Knot.living)
        return ()


class Endless(Post):
    """Always has another one."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = ["."]

    def take(self, limit: int, now_ms: float) -> Sequence[str]:
        return self.waiting


@pytest.mark.parametrize("rest", [0, 15_000])
def test_a_loop_that_is_never_idle_collects_all_the_same(rest: int) -> None:
    """Whether garbage is young when it becomes some, or has outlived collections before."""
    gc.collect()
    Knot.living = 0
    core = Spinner(rest)
    driver = Driver([Role[str, None](core, [Endless()], lambda _: None)], HandClock())
    try:
        driver.run(lambda: core.events >= 120_000)
    finally:
        driver.close()
    assert core.most < rest + 12 * YOUNG_MAX
    assert driver.stats.collect_ms_max > 0


def test_a_loop_without_time_to_spare_collects_all_of_it_at_last() -> None:
    gc.collect()
    Knot.living = 0
    core = Spinner()
    clock = HandClock()
    driver = Driver([Role[str, None](core, [Endless()], lambda _: None)], clock)
    gone_at_ms: list[float] = []

    def is_over() -> bool:
        if Knot.living < core.events and not gone_at_ms:
            gone_at_ms.append(clock.at_ms)
        return bool(gone_at_ms) or core.events > 0.9 * YOUNG_MAX

    began_ms = clock.at_ms
    try:
        driver.run(is_over)
    finally:
        driver.close()
    assert gone_at_ms, "there was too little of it for the young, and never time for all"
    assert COLLECT_AT_LAST_MS <= gone_at_ms[0] - began_ms < 1.5 * COLLECT_AT_LAST_MS


def test_a_message_that_cannot_be_sent_is_lost_and_counted_and_ends_no_role(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same one again and again is said once."""
    done: list[int] = []

    class Core:
        wake_at_ms = None

        def handle(self, event: str | Tick, now_ms: float) -> Sequence[int]:
            return (0, 600, 1)

    def perform(length: int) -> None:
        frames.pack(StatusListed("a", 1, (), (), {"x" * length: 1.0}))
        done.append(length)

    role: Role[str, int] = Role(Core(), [Endless()], perform)
    driver = Driver([role], MonotonicClock())
    try:
        driver.run(lambda: len(done) >= 6)
    finally:
        driver.close()
    assert done[:4] == [0, 1, 0, 1]
    assert role.stats.told_in(StatusListed("a", 1, (), (), {})).counters["messages_unsendable"] >= 3
    assert caplog.text.count("message_unsendable error=") == 1


def test_what_a_turn_raised_is_told_with_the_last_events_and_goes_on_its_way() -> None:
    told: list[tuple[float, object]] = []

    def fail(action: None) -> None:
        raise ValueError("planted")

    role: Role[str, None] = Role(Talker("a", 1e9), [Endless()], fail)  # type: ignore[arg-type]
    driver = Driver([role], MonotonicClock(), on_defect=lambda _, roles: told.extend(roles[0].recent))
    try:
        with pytest.raises(ValueError, match="planted"):
            driver.run(lambda: False)
    finally:
        driver.close()
    assert [event for _, event in told] == ["."]
    assert gc.isenabled()
