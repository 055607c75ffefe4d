"""What a run says when its senders fail."""

from __future__ import annotations

import itertools
import multiprocessing

import pytest

from fabric.errors import FabricError, PeerLost
from roles.benchmark.run import _collect
from roles.benchmark.share import OtherSenderFailed, StartGate

CAUSE = PeerLost("no frontend answers at ipc:///f")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_cause_is_told_and_not_what_it_did_to_the_others(order: tuple[int, ...]) -> None:
    """Whoever waited at the start may say so before the one that failed says why."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in order]
    said: list[FabricError] = [CAUSE, OtherSenderFailed("not ready"), OtherSenderFailed("not ready")]
    for place, (_, writer) in zip(order, pipes, strict=True):
        writer.send(said[place])
    with pytest.raises(PeerLost, match="no frontend answers"):
        _collect([reader for reader, _ in pipes], 1.0, 1.0, lambda _: None)


def test_a_sender_whose_start_is_broken_off_says_that_another_one_failed() -> None:
    context = multiprocessing.get_context("spawn")
    gate = StartGate(context.Barrier(2), context.Value("d", 0.0))
    gate.barrier.abort()
    with pytest.raises(OtherSenderFailed):
        gate.wait(0.0)
