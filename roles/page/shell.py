"""The page as a process: it looks at the cluster about once a second while somebody reads, and not at all otherwise."""

from __future__ import annotations

import contextlib
import os
import select
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fabric.clock import Clock, MonotonicClock
from fabric.errors import ConfigError, FabricError
from fabric.ids import PAGE_ID, new_incarnation
from fabric.keys import Keyring
from fabric.link import Received
from fabric.messages import Ping, Pong, StatusAsked, StatusListed
from fabric.sockets import RouterLink
from roles.page.feed import Feed
from roles.page.polling import Looks
from roles.page.questions import Questions
from roles.page.server import PageServer
from roles.runtime.environment import RunDir
from roles.runtime.metrics.usage import cpu_ms, resident_bytes
from roles.runtime.process import RunFile, StopSignal, log, remove_run_file, write_run_file

ADDRESS_DEFAULT: Final = "127.0.0.1:8004"
LOOK_EVERY_MS: Final = 1_000.0
READ_LATELY_MS: Final = 5_000.0
"""Whoever has read that lately is taken to read on."""
_QUESTION_LOOK_MS: Final = 100.0
_IDLE_MS: Final = 60_000.0
_TAKEN_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class PageOptions:
    """`address`: HOST:PORT."""

    run_dir: Path
    address: str
    key_file: Path | None = None


class Page:
    """One page. Raises ConfigError for an address that cannot be bound, or a file that is no key."""

    def __init__(self, options: PageOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._clock = clock = clock or MonotonicClock()
        keyring = None if options.key_file is None else Keyring.of_file(options.key_file)
        self._feed = Feed()
        self._looks = Looks(options.run_dir, clock, keyring)
        self._questions = Questions(options.run_dir, options.key_file, clock)
        self._models: frozenset[str] = frozenset()
        self._read_at_ms = float("-inf")
        self._looked_at_ms = float("-inf")
        self._trouble = ""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._link: RouterLink | None = None
        self._run_file: RunFile | None = None
        self._reads = self._look_count = 0
        try:
            self._server = PageServer(
                options.address, self._feed, self._questions, lambda: self._models, self._on_read, clock
            )
        except ConfigError:
            os.close(self._wake)
            raise

    @property
    def url(self) -> str:
        """What a browser opens."""
        return self._server.url

    def announce(self) -> None:
        """Say where it is, as a role of the cluster."""
        self._link = RouterLink.bind([RunDir(self._options.run_dir).ipc_address(f"{PAGE_ID}.control")])
        addresses = {"control": list(self._link.addresses), "page": [self.url]}
        self._run_file = RunFile(PAGE_ID, os.getpid(), new_incarnation(), addresses)
        write_run_file(self._options.run_dir, self._run_file)

    def run(self, stop: StopSignal) -> None:
        """Until told to stop."""
        log.info("page_serving url=%s", self.url)
        with select.epoll() as poll:
            for descriptor in (stop.fileno(), self._wake, *([self._link.fileno()] if self._link else [])):
                poll.register(descriptor, select.EPOLLIN)
            while not stop.is_set:
                self._turn()
                poll.poll(self._sleep_ms() / 1e3)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)

    def close(self) -> None:
        """Give everything back."""
        if self._run_file is not None:
            remove_run_file(self._options.run_dir, self._run_file)
        self._server.close()
        self._questions.close()
        if self._link is not None:
            self._link.close()
        os.close(self._wake)

    # ------------------------------------------------------------ on the server's thread

    def _on_read(self) -> None:
        now_ms = self._clock.now_ms()
        is_asleep = now_ms - self._read_at_ms > READ_LATELY_MS
        self._read_at_ms = now_ms
        self._reads += 1
        if is_asleep or self._questions.is_busy:
            os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------ on its own

    def _turn(self) -> None:
        self._questions.turn()
        self._answer_roles()
        now_ms = self._clock.now_ms()
        if now_ms - self._read_at_ms <= READ_LATELY_MS and now_ms - self._looked_at_ms >= LOOK_EVERY_MS:
            self._looked_at_ms = now_ms
            self._look()

    def _look(self) -> None:
        self._look_count += 1
        try:
            look = self._looks.look()
        except (FabricError, OSError) as error:  # also where this host has no descriptor left
            if str(error) != self._trouble:
                log.warning("cluster_unseen error=%r", str(error))
            self._trouble = str(error)
            self._feed.fail(self._trouble)
            return
        self._trouble = ""
        self._models = frozenset(str(one.model_id) for one in look.report.scheduler.models)
        self._feed.look(look)

    def _sleep_ms(self) -> float:
        now_ms = self._clock.now_ms()
        if self._questions.is_busy:
            return _QUESTION_LOOK_MS
        if now_ms - self._read_at_ms > READ_LATELY_MS:
            return _IDLE_MS
        return max(1.0, self._looked_at_ms + LOOK_EVERY_MS - now_ms)

    def _answer_roles(self) -> None:
        """Operators ask it how it is, as they ask every role."""
        link = self._link
        if link is None:
            return
        while True:
            for received in link.receive(_TAKEN_AT_ONCE):
                self._reply(link, received)
            link.take_lost()
            if not link.has_more:
                return

    def _reply(self, link: RouterLink, received: Received) -> None:
        match received.message:
            case Ping(number):
                link.send(received.peer, Pong(number))
            case StatusAsked():
                counters = {
                    "pages_read": float(self._reads),
                    "looks": float(self._look_count),
                    "cpu_ms": cpu_ms(),
                    "memory_bytes": resident_bytes(),
                }
                link.send(received.peer, StatusListed(PAGE_ID, os.getpid(), (), (), counters))
