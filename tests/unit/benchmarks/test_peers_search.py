from __future__ import annotations

import pytest

from benchmarks.peers.search import Best, best_setting, highest_good_rps, highest_good_rps_near


class Server:
    """Good up to a rate; counts what it was asked."""

    def __init__(self, limit_rps: float) -> None:
        self.limit_rps = limit_rps
        self.asked: list[float] = []

    def is_good(self, rate_rps: float) -> bool:
        self.asked.append(rate_rps)
        return rate_rps <= self.limit_rps


@pytest.mark.parametrize("limit_rps", [15.0, 99.5, 200.0, 562.0, 700.0])
def test_the_search_ends_just_below_the_limit(limit_rps: float) -> None:
    server = Server(limit_rps)
    found_rps = highest_good_rps(server.is_good, 730, 0.02)
    assert limit_rps / 1.02 <= found_rps <= limit_rps
    assert len(set(server.asked)) == len(server.asked) <= 12


def test_a_server_that_carries_nothing_has_a_goodput_of_zero_after_few_questions() -> None:
    server = Server(0.0)
    assert highest_good_rps(server.is_good, 1024, 0.02) == 0
    assert len(server.asked) == 6  # 1024 / 2**6 = 16 is under 2 % of 1024


def test_a_setting_that_is_no_better_costs_one_question() -> None:
    server = Server(200.0)
    assert highest_good_rps(server.is_good, 730, 0.02, beat_rps=200.0) == 0
    assert server.asked == [204.0]


def test_a_setting_that_is_better_is_searched_from_there_up() -> None:
    server = Server(400.0)
    found_rps = highest_good_rps(server.is_good, 730, 0.02, beat_rps=200.0)
    assert 400 / 1.02 <= found_rps <= 400
    assert min(server.asked) == 204.0


def test_nothing_is_asked_where_the_rate_to_beat_is_the_bound() -> None:
    server = Server(1000.0)
    assert highest_good_rps(server.is_good, 730, 0.02, beat_rps=725.0) == 0
    assert server.asked == []


@pytest.mark.parametrize("limit_rps", [15.0, 150.0, 199.0, 201.0, 210.0, 400.0, 729.0])
@pytest.mark.parametrize("guess_rps", [100.0, 200.0, 725.0, 900.0])
def test_from_a_guess_the_search_ends_at_the_same_place(limit_rps: float, guess_rps: float) -> None:
    server = Server(limit_rps)
    found_rps = highest_good_rps_near(guess_rps, server.is_good, 730, 0.02)
    assert limit_rps / 1.021 <= found_rps <= limit_rps
    assert len(set(server.asked)) == len(server.asked)


def test_a_good_guess_costs_few_questions() -> None:
    for limit_rps in (194.0, 199.0, 201.0, 206.0):
        server = Server(limit_rps)
        highest_good_rps_near(200.0, server.is_good, 730, 0.02)
        assert len(server.asked) <= 4  # plain bisection asks 8


def test_from_a_guess_a_server_that_carries_nothing_has_a_goodput_of_zero() -> None:
    assert highest_good_rps_near(200.0, Server(0.0).is_good, 730, 0.02) == 0


def test_the_best_setting_is_the_one_that_beats_all_before_it() -> None:
    rates_rps = {"short": 150.0, "long": 120.0, "middle": 210.0, "odd": 0.0}
    beaten: list[float] = []

    def measure(setting: str, beat_rps: float) -> float:
        beaten.append(beat_rps)
        return rates_rps[setting] if rates_rps[setting] > beat_rps else 0.0

    assert best_setting(rates_rps, measure) == Best("middle", 210.0)
    assert beaten == [0.0, 150.0, 150.0, 210.0]
