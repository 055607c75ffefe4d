"""Calls that an agent leaves to threads of their own."""

from __future__ import annotations

from roles.node_agent.blocking_calls import BlockingCalls
from tests.scarcity import no_threads


def test_a_call_without_a_thread_is_made_all_the_same() -> None:
    calls: BlockingCalls[str] = BlockingCalls()
    with no_threads():
        calls.run(lambda: "an answer")
    assert calls.take(8, 0.0) == ["an answer"]
    calls.close()
