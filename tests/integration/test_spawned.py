"""Children that play runs or send load, when somebody presses Ctrl-C."""

from __future__ import annotations

import multiprocessing
import signal

import pytest

from roles.lab.parallel import executor_of
from tests.integration.proc import CLOCK, until


def mask() -> list[int]:
    return sorted(int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def play_until_interrupted() -> None:
    with executor_of(2) as (pool, _):
        running = [pool.submit(signal.pause) for _ in range(5)]
        until(lambda: any(one.running() for one in running), 60_000.0)
        raise KeyboardInterrupt


def test_ctrl_c_is_left_to_the_parent_from_a_childs_first_moment_on() -> None:
    """While it imports it would print a traceback."""
    before = mask()
    with executor_of(1) as (pool, _):
        assert int(signal.SIGINT) in pool.submit(mask).result(60)
    assert mask() == before


def test_an_interrupted_command_does_not_wait_for_what_its_children_play() -> None:
    began_ms = CLOCK.now_ms()
    with pytest.raises(KeyboardInterrupt):
        play_until_interrupted()
    assert CLOCK.now_ms() - began_ms < 120_000.0
    assert multiprocessing.active_children() == []
