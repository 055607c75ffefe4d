"""How a gateway is: operators, and `tenuto up` while it restarts roles, ask by a local socket, as they ask every role."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Final

from fabric.link import Received
from fabric.messages import Ping, Pong, StatusAsked, StatusListed
from fabric.sockets import RouterLink
from roles.runtime.environment import RunDir

_TAKEN_AT_ONCE: Final = 64


class StatusLink:
    """Answers on the running loop. `counters`: what this gateway counted."""

    def __init__(self, run_dir: RunDir, role_id: str, counters: Callable[[], Mapping[str, float]]) -> None:
        self._role_id = role_id
        self._counters = counters
        self._link = RouterLink.bind([run_dir.ipc_address(f"{role_id}.control")])
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._link.fileno()
        self._loop.add_reader(self._descriptor, self._hear)
        self._hear()

    @property
    def addresses(self) -> list[str]:
        """Where it is asked."""
        return list(self._link.addresses)

    def close(self) -> None:
        """Answer nobody any more."""
        self._loop.remove_reader(self._descriptor)
        self._link.close()

    def _hear(self) -> None:
        for received in self._link.receive(_TAKEN_AT_ONCE):
            self._answer(received)
        self._link.take_lost()
        if self._link.has_more:  # its descriptor tells of a change once only
            self._loop.call_soon(self._hear)

    def _answer(self, received: Received) -> None:
        match received.message:
            case Ping(number):
                self._link.send(received.peer, Pong(number))
            case StatusAsked():
                counters = dict(self._counters())
                status = StatusListed(self._role_id, os.getpid(), (), (), counters)
                self._link.send(received.peer, status)
