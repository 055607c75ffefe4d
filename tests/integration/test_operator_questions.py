"""What an operator asks a `tenuto up` of another version."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.local.operator_link import operator_link, operator_source
from fabric.errors import FabricError, PeerLost
from fabric.ids import OPERATOR, PeerId, new_incarnation, peer_id
from fabric.link import Received
from fabric.messages import Ping, Pong, RoleDrainDryRun, StatusListed
from fabric.messages.base import Message
from fabric.sockets import DealerLink, RouterLink
from roles.cli.restart import ask_what_supervisor_would_answer
from roles.runtime.environment import RunDir
from roles.runtime.run_directory import UP_SOCKET, claim

PEER = PeerId("up")


class OfTomorrow(Message, frozen=True, tag=4_000):
    """A message that this version does not know."""

    request_no: int


@contextmanager
def listening(run_dir: Path, *, is_silent: bool = False) -> Iterator[RouterLink]:
    """A `tenuto up` as far as its operators see, which answers no dry runs. `is_silent`: nor anything else."""
    with claim(run_dir):
        link = operator_link(run_dir)
        source = operator_source(link, lambda: StatusListed("up", 1, (), (), {}))
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.wait(0.005):
                if not is_silent:
                    source.take(16, 0.0)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield link
        finally:
            is_over.set()
            thread.join()
            link.close()


def test_a_message_of_a_later_version_is_dropped_and_its_sender_is_heard_on(tmp_path: Path) -> None:
    with listening(tmp_path) as up:
        link = DealerLink.connect(
            peer_id(OPERATOR, new_incarnation()), PEER, [RunDir(tmp_path).ipc_address(UP_SOCKET)]
        )
        try:
            assert link.send(PEER, OfTomorrow(1))  # type: ignore[arg-type]  # that is the point
            heard: list[Received] = []
            for _ in range(1_000):
                link.send(PEER, Ping(1))
                heard += link.receive(16)
                if heard:
                    break
                threading.Event().wait(0.005)
            assert isinstance(heard[0].message, Pong)
            assert up.counters["garbage_in"] >= 1
        finally:
            link.close()


def test_a_supervisor_that_does_not_know_dry_runs_is_told_as_that_and_in_bounded_time(tmp_path: Path) -> None:
    with listening(tmp_path), pytest.raises(FabricError) as told:
        ask_what_supervisor_would_answer(tmp_path, RoleDrainDryRun(1, "frontend-1"), limit_ms=500.0)
    assert not isinstance(told.value, PeerLost)
    assert "does not know dry runs of roles, as it was started by an older version" in str(told.value)
    assert "nothing was done" in str(told.value)


def test_a_supervisor_that_is_silent_is_told_as_lost_and_nothing_is_said_to_be_unknown(
    tmp_path: Path,
) -> None:
    with listening(tmp_path, is_silent=True), pytest.raises(PeerLost) as told:
        ask_what_supervisor_would_answer(tmp_path, RoleDrainDryRun(1, "frontend-1"))
    assert "nobody answers" in str(told.value)
    assert "not known" not in str(told.value)
