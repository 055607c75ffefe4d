"""What a role's process asks of the kernel."""

from __future__ import annotations

import threading
from pathlib import Path

from roles.process import wake_exactly


def timer_slack_ns() -> int:
    """Of this thread."""
    return int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text(encoding="ascii"))


def test_only_the_thread_that_asks_for_it_wakes_exactly() -> None:
    before_ns = timer_slack_ns()
    seen_ns: list[int] = []

    def ask() -> None:
        wake_exactly()
        seen_ns.append(timer_slack_ns())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen_ns == [1]
    assert timer_slack_ns() == before_ns
