from __future__ import annotations

import pytest

from fabric.ids import PeerId
from fabric.transit_time import TransitMeter

PEER = PeerId("frontend-0/1")
AHEAD_MS = 1e6  # the foreign clock's offset


def late(meter: TransitMeter, sent_ms: float, now_ms: float, peer: PeerId = PEER) -> float:
    return meter.late_ms(peer, sent_ms + AHEAD_MS, now_ms)


def test_the_fastest_message_of_a_link_is_not_late() -> None:
    meter = TransitMeter()
    assert late(meter, 0, 5) == 0
    assert late(meter, 10, 13) == 0


def test_queueing_is_what_a_message_has_above_the_fastest() -> None:
    meter = TransitMeter()
    late(meter, 0, 2)
    assert late(meter, 10, 19) == pytest.approx(7)


def test_half_the_smallest_round_trip_is_added() -> None:
    meter = TransitMeter()
    late(meter, 0, 2)
    meter.observe_rtt(PEER, 9.0, 10)
    meter.observe_rtt(PEER, 4.0, 11)
    meter.observe_rtt(PEER, 6.0, 12)
    assert late(meter, 20, 25) == pytest.approx(3 + 2)


def test_links_do_not_share_their_clocks() -> None:
    meter = TransitMeter()
    late(meter, 0, 2)
    assert meter.late_ms(PeerId("frontend-1/1"), -5e7, 100) == 0


def test_a_drifting_clock_is_followed_within_the_window() -> None:
    meter = TransitMeter(window_ms=1_000)
    late(meter, 0, 1)
    for step in range(1, 40):  # every 100 ms the foreign clock falls 0.01 ms behind
        drifted = late(meter, step * 100 - step * 0.01, step * 100 + 1)
        assert drifted <= 0.11


def test_after_a_long_silence_the_old_minimum_is_forgotten() -> None:
    meter = TransitMeter(window_ms=1_000)
    late(meter, 0, 1)
    assert late(meter, 5_000, 5_400) == 0


@pytest.mark.parametrize("up_since_ms", [20.0, 1e5, 9e5])
def test_a_peer_whose_clock_begins_anew_is_not_late(up_since_ms: float) -> None:
    """Its host was up for a thousand seconds, and has started again: nothing of what it says is days old."""
    meter = TransitMeter()
    for step in range(10):
        late(meter, step * 100, step * 100 + 2)
    meter.observe_rtt(PEER, 4.0, 1_000)
    for step in range(10):
        assert meter.late_ms(PEER, up_since_ms + step * 100, 3_000 + step * 100 + 2) == 0
    assert meter.late_ms(PEER, up_since_ms + 1_000, 3_000 + 1_000 + 9) == pytest.approx(7)


def test_only_the_newest_peers_are_remembered() -> None:
    meter = TransitMeter(peers_max=2)
    first, second, third = (PeerId(f"client/{i}") for i in range(3))
    late(meter, 0, 1, first)
    late(meter, 0, 1, second)
    late(meter, 0, 1, first)
    late(meter, 0, 1, third)
    assert late(meter, 10, 16, first) == pytest.approx(5)
    assert late(meter, 10, 16, second) == 0


def test_a_forgotten_peer_begins_anew() -> None:
    meter = TransitMeter()
    late(meter, 0, 1)
    meter.forget(PEER)
    assert late(meter, 10, 99) == 0


def test_a_peer_whose_clock_stood_still_is_late_until_the_next_round_trip_and_no_longer() -> None:
    meter = TransitMeter()
    for moment in range(10):
        meter.late_ms(PEER, 100.0 * moment, 100.0 * moment + 1.0)
    stood_ms = 400.0
    assert meter.late_ms(PEER, 1_000.0, 1_001.0 + stood_ms) == pytest.approx(stood_ms)
    meter.observe_rtt(PEER, 2.0, 1_001.0 + stood_ms)
    assert meter.late_ms(PEER, 1_100.0, 1_101.0 + stood_ms) == pytest.approx(1.0)  # half a round trip


def test_a_round_trip_that_took_as_long_as_its_answer_queued_says_nothing_of_clocks() -> None:
    meter = TransitMeter()
    meter.late_ms(PEER, 0.0, 1.0)
    meter.late_ms(PEER, 100.0, 151.0)
    meter.observe_rtt(PEER, 55.0, 151.0)
    assert meter.late_ms(PEER, 200.0, 251.0) == pytest.approx(50.0 + 27.5)


def test_a_peer_that_seems_late_is_asked_once_a_second_until_it_has_answered() -> None:
    meter = TransitMeter()
    late(meter, 0, 1)
    assert meter.ask(PEER, 1) is None, "it is not late"
    late(meter, 100, 101 + 400)
    assert meter.ask(PEER, 501) == 1
    assert meter.ask(PEER, 1_400) is None
    assert meter.ask(PEER, 1_600) is None, "it has not answered"
    late(meter, 1_000, 1_801)
    meter.take_answer(PEER, 1, 1_801)
    assert late(meter, 1_100, 1_901) == pytest.approx(800), "its answer was on the way for longer than that"
    assert meter.ask(PEER, 1_901) == 2
    late(meter, 1_102, 1_903)
    meter.take_answer(PEER, 2, 1_903)
    assert late(meter, 1_200, 2_001) == 0
    assert meter.ask(PEER, 9_000) is None


def test_a_ping_that_was_lost_with_its_connection_is_sent_again() -> None:
    meter = TransitMeter()
    late(meter, 0, 1)
    late(meter, 100, 501)
    assert meter.ask(PEER, 501) == 1
    assert meter.ask(PEER, 10_000) is None
    assert meter.ask(PEER, 10_501) == 2
    meter.take_answer(PEER, 1, 10_502)
    assert late(meter, 10_102, 10_503) == pytest.approx(400), "the answer to an older ping tells nothing"


def test_a_round_trip_of_a_bad_moment_is_not_taken_for_the_way() -> None:
    meter = TransitMeter()
    late(meter, 0, 1)
    late(meter, 100, 161)
    assert meter.ask(PEER, 161) == 1
    late(meter, 201, 262)
    meter.take_answer(PEER, 1, 262)
    assert late(meter, 300, 301) == 0
