from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fabric.ids import PeerId
from roles.simulator.network import Network, NetworkModel

A, B = PeerId("a/1"), PeerId("b/1")


def test_without_jitter_every_message_takes_the_same_time() -> None:
    network = Network(NetworkModel(control_ms=2.0, result_ms=3.0), seed=1)
    assert network.control_at_ms(A, B, 10.0) == 12.0
    assert network.result_at_ms(10.0) == 13.0
    assert_array_equal(network.announced_at_ms(np.array([0, 1]), np.array([0.0, 5.0])), [2.0, 7.0])


def test_jitter_has_the_standard_deviation_asked_for_and_is_never_early() -> None:
    network = Network(NetworkModel(control_ms=1.0, jitter_ms=0.5), seed=1)
    spread = np.arange(0.0, 2e6, 100.0)  # so far apart that none has to wait for its predecessor
    late_ms = network.announced_at_ms(np.zeros(spread.size, int), spread) - spread - 1.0
    assert late_ms.min() >= 0
    assert late_ms.std() == pytest.approx(0.5, rel=0.03)
    drawn = np.array([network.control_at_ms(A, B, at_ms) - at_ms - 1.0 for at_ms in spread])
    assert drawn.min() >= 0
    assert drawn.std() == pytest.approx(0.5, rel=0.03)


def test_messages_of_one_connection_do_not_overtake_each_other() -> None:
    network = Network(NetworkModel(jitter_ms=5.0), seed=1)
    arrived = [network.control_at_ms(A, B, at_ms * 0.1) for at_ms in range(200)]
    assert arrived == sorted(arrived)
    announced = network.announced_at_ms(np.zeros(200, int), np.arange(0.0, 20.0, 0.1))
    assert np.all(np.diff(announced) >= 0)


def test_another_connection_is_not_held_up() -> None:
    network = Network(NetworkModel(jitter_ms=5.0), seed=1)
    late = max(network.control_at_ms(A, B, 0.0) for _ in range(50))
    assert min(network.control_at_ms(B, PeerId(f"c/{k}"), 0.0) for k in range(50)) < late


def test_a_seed_gives_the_same_delays_and_another_seed_others() -> None:
    model = NetworkModel(jitter_ms=1.0)
    first, again, other = (Network(model, seed).control_at_ms(A, B, 0.0) for seed in (1, 1, 2))
    assert first == again != other
