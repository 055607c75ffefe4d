from __future__ import annotations

import pytest

from fabric.heartbeats import NEXT, HeartbeatTiming, Liveness, PeerState, Sign
from fabric.ids import PeerId
from fabric.messages import Ping

PEER = PeerId("worker-0/1")
HEARTBEATS = HeartbeatTiming(interval_ms=100, patience_ms=500, rtt_every_ms=1_000)


def watching() -> Liveness:
    liveness = Liveness(HEARTBEATS)
    liveness.watch(PEER, 0)
    return liveness


def play(liveness: Liveness, until_ms: float) -> tuple[list[float], list[float]]:
    """Call at every `wake_at_ms`; when pings went out and when the peer was lost."""
    pinged, lost = [], []
    while liveness.wake_at_ms is not None and liveness.wake_at_ms <= until_ms:
        now_ms = liveness.wake_at_ms
        lost += [now_ms for _ in liveness.lost(now_ms)]
        pinged += [now_ms for _ in liveness.due(now_ms)]
    return pinged, lost


def test_a_watched_peer_is_pinged_at_once_and_then_whenever_it_is_quiet() -> None:
    liveness = watching()
    assert liveness.due(0) == [(PEER, Ping(1))]
    assert liveness.wake_at_ms == 100
    assert liveness.due(79) == []
    assert liveness.due(100) == [(PEER, Ping(2))]


def test_pings_that_are_soon_due_go_together() -> None:
    liveness = Liveness(HEARTBEATS)
    others = [PeerId(f"worker-{number}/1") for number in range(3)]
    for number, peer in enumerate(others):
        liveness.watch(peer, 9.0 * number)
        liveness.due(9.0 * number)
    assert liveness.wake_at_ms == 100
    assert [peer for peer, _ in liveness.due(100)] == others, "the last one only by 118"
    assert liveness.wake_at_ms == 200


def test_of_two_ends_that_are_both_quiet_one_asks_at_a_time() -> None:
    """And neither wakes up for anything else."""
    ends = [watching(), watching()]
    pings, wakes = [0, 0], [0, 0]
    now_ms, way_ms = 0.0, 1.0
    while now_ms < 10_000:
        now_ms = max(now_ms, min(end.wake_at_ms or 0.0 for end in ends))
        for place, end in enumerate(ends):
            if end.wake_at_ms is not None and end.wake_at_ms <= now_ms:
                wakes[place] += 1
                for _, ping in end.due(now_ms):
                    pings[place] += 1
                    ends[1 - place].pinged(PEER, now_ms + way_ms)
                    assert end.pong(PEER, ping.number, now_ms + 2 * way_ms) == 2 * way_ms
                assert end.lost(now_ms) == []
    assert pings == pytest.approx([50, 50], abs=4), "each 100 ms one asks, and both learn the round trip"
    assert sum(wakes) <= sum(pings) + 2


def test_a_silent_peer_is_lost_once_and_at_its_moment() -> None:
    pinged, lost = play(watching(), 10_000)
    assert pinged == [0, 100, 200, 300, 400]
    assert lost == [500]


def test_silence_makes_suspect_and_a_sign_of_life_heals() -> None:
    liveness = watching()
    play(liveness, 299)
    assert liveness.state(PEER) is PeerState.ALIVE
    play(liveness, 300)
    assert liveness.state(PEER) is PeerState.SUSPECT
    liveness.heard(PEER, 301)
    assert liveness.state(PEER) is PeerState.ALIVE
    assert play(liveness, 800)[1] == []
    assert play(liveness, 900)[1] == [801]


def test_a_talking_peer_is_pinged_only_to_measure_the_round_trip() -> None:
    liveness = watching()
    pinged = []
    for now_ms in range(0, 3_000, 50):
        liveness.heard(PEER, now_ms)
        assert liveness.lost(now_ms) == []
        pinged += [now_ms for _ in liveness.due(now_ms)]
    assert pinged == [0, 1_000, 2_000]


def test_a_pong_gives_the_round_trip_of_its_ping_once() -> None:
    liveness = watching()
    assert liveness.pong(PEER, 0, 0) is None
    for at_ms in (0, 100, 200):
        liveness.due(at_ms)
    assert liveness.pong(PEER, 2, 204) == 104
    assert liveness.pong(PEER, 1, 205) is None, "a later one was answered before"
    assert liveness.pong(PEER, 2, 205) is None
    assert liveness.pong(PEER, 4, 205) is None
    assert liveness.pong(PeerId("stranger/1"), 3, 205) is None
    assert liveness.pong(PEER, 3, 205) == 5


@pytest.mark.parametrize("way_ms", [120, 700, 1_250])
@pytest.mark.parametrize("is_busy", [True, False])
def test_round_trips_count_however_long_they_take(way_ms: int, is_busy: bool) -> None:
    """Of a busy peer that is asked every second as it seems late, and of one that is quiet but for its answers."""
    liveness = Liveness(HeartbeatTiming(interval_ms=250, patience_ms=4_000, rtt_every_ms=5_000))
    liveness.watch(PEER, 0)
    on_the_way: list[tuple[int, int]] = []
    round_trips = []
    for now_ms in range(0, 8_000, 10):
        pings = [ping for _, ping in liveness.due(now_ms)]
        if is_busy:
            liveness.heard(PEER, now_ms)
            asked = liveness.ask(PEER, now_ms)
            pings += [] if asked is None else [asked]
        on_the_way += [(now_ms + 2 * way_ms, ping.number) for ping in pings]
        while on_the_way and on_the_way[0][0] <= now_ms:
            round_trips.append(liveness.pong(PEER, on_the_way.pop(0)[1], now_ms))
        assert liveness.lost(now_ms) == []
    assert len(round_trips) >= 5
    assert set(round_trips) == {2 * way_ms}


def test_a_process_that_slept_itself_judges_nobody() -> None:
    liveness = watching()
    liveness.due(0)
    assert liveness.lost(30_000) == []
    assert liveness.due(30_000) == [(PEER, Ping(2))]
    assert play(liveness, 31_000)[1] == [30_500]


def test_a_lost_peer_can_be_watched_anew() -> None:
    liveness = watching()
    play(liveness, 600)
    assert liveness.state(PEER) is PeerState.LOST
    assert liveness.wake_at_ms is None
    liveness.heard(PEER, 700)
    assert liveness.state(PEER) is PeerState.LOST
    liveness.watch(PEER, 10_000)
    assert liveness.state(PEER) is PeerState.ALIVE
    assert play(liveness, 10_600)[1] == [10_500]


def test_a_forgotten_peer_is_never_lost() -> None:
    liveness = watching()
    liveness.forget(PEER)
    assert liveness.lost(1e6) == []
    assert liveness.wake_at_ms is None


@pytest.mark.parametrize("sign", Sign)
@pytest.mark.parametrize("state", [PeerState.ALIVE, PeerState.SUSPECT])
def test_the_table_knows_every_sign_in_every_living_state(state: PeerState, sign: Sign) -> None:
    assert (state, sign) in NEXT


def test_whoever_looks_at_the_very_moment_it_asked_for_is_not_woken_at_that_moment_again() -> None:
    """13,430.6 + 10,000 - 13,430.6 is less than 10,000 in floats: nobody was lost at that moment, and time stood still."""
    for tenth in range(2_000):
        liveness = Liveness(HeartbeatTiming(interval_ms=2_000.0, patience_ms=10_000.0))
        liveness.watch(PEER, 13_000.1 + tenth / 10)
        for _ in range(20):
            now_ms = liveness.wake_at_ms
            if now_ms is None:
                break
            liveness.due(now_ms)
            liveness.lost(now_ms)
            assert liveness.wake_at_ms is None or liveness.wake_at_ms > now_ms
        assert liveness.wake_at_ms is None, "it never answered, and is lost"
