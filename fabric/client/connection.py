"""A client's connection to one frontend: greeted, watched while something is awaited, made again when it is lost."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Final, Protocol

from fabric.arena_sharing import ArenaSharing
from fabric.client.client_options import ClientOptions
from fabric.client.retries import Circuit
from fabric.codec import BULKY_HEADER_BYTES_MAX
from fabric.curve import guarded
from fabric.errors import PeerLost
from fabric.frames import ANSWER_BYTES_MAX
from fabric.heartbeats import Liveness
from fabric.ids import Incarnation, PeerId, new_incarnation, peer_id
from fabric.keys import Keyring
from fabric.learned_margin import LearnedWay
from fabric.link import NamedTensor, Received
from fabric.messages import AnyMessage, Infer, ModelInfo, ModelsAsked, Ping, Pong, Unready
from fabric.outbox import Outbox
from fabric.shared_memory import is_shared_with
from fabric.sockets import DealerLink, LinkOptions

FRONTEND: Final = PeerId("frontend")  # what this side calls it; a connection leads to one only
GREET_EVERY_MS: Final = 50.0
GREET_EVERY_MS_MAX: Final = 200.0  # of a frontend that has been away for a while


class Owner(Protocol):
    """Who a connection belongs to."""

    def heard(self, connection: Connection, received: Received, now_ms: float) -> None:
        """The frontend said something."""
        ...

    def lost(self, connection: Connection, reason: str) -> None:
        """The frontend is gone, or cannot be reached; what it has not answered it never will."""
        ...

    def unsent(self, connection: Connection, number: int) -> None:
        """There was no connection: that request has not left."""
        ...

    def changed(self) -> None:
        """The connection is there, or is wanted, or neither any more."""
        ...


class Connection:
    """To the frontend at one address, from now on; belongs to the running loop. Raises ConfigError for a bad address."""

    def __init__(self, address: str, options: ClientOptions, owner: Owner, sharing: ArenaSharing) -> None:
        self.address = address
        self.way = LearnedWay()  # there and back, our own event loop included
        self.circuit = Circuit()
        self.is_greeted = False
        """It has said something since it was connected to."""
        self.is_unready = False
        """It would rather be asked nothing new."""
        self.frontend = Incarnation("")
        """Which one it leads to; empty: it does not say."""
        self.awaited: set[int] = set()
        """The numbers of the requests that it has not answered."""
        self.listings: list[asyncio.Future[tuple[ModelInfo, ...]]] = []
        """Who waits for the list of its models."""
        self._options = options
        self._owner = owner
        self._sharing = sharing
        self._clock = options.clock
        limits = LinkOptions(
            clock=self._clock,
            # Never full before `pending_max` says so, so that a refused send can only mean: no connection.
            queue_messages_max=2 * options.pending_max + 1_000,
            header_bytes_max=BULKY_HEADER_BYTES_MAX,  # a frontend lists all its models
            payload_bytes_max=ANSWER_BYTES_MAX,  # of answers; what is sent the outbox bounds
            queue_bytes_max=sys.maxsize,
        )
        keyring = None if options.key_file is None else Keyring.of_file(options.key_file)
        own = peer_id("client" if keyring is None else keyring.own.principal, new_incarnation())
        self._link = DealerLink.connect(own, FRONTEND, (address,), limits, guarded(keyring))
        self._outbox = Outbox(self._link, self._unsent, options.payload_bytes_max)
        self._liveness = Liveness(options.heartbeats)
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._link.fileno()
        self._loop.add_reader(self._descriptor, self._hear)
        self._is_open = True
        self._has_sent = False  # in this turn of the loop
        self._greet_every_ms = GREET_EVERY_MS
        self._tending: asyncio.TimerHandle | None = None
        self._watch()

    @property
    def refusal(self) -> str:
        """Why the frontend does not let us in; empty: nothing of that kind is known."""
        return self._link.refusal

    @property
    def trouble(self) -> str:
        """What may be wrong with a frontend that does not answer; empty: nothing is known."""
        return self._link.trouble

    def close(self) -> None:
        """Flush for at most 100 ms in the background. Safe to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._descriptor)
        if self._tending is not None:
            self._tending.cancel()
        self._link.close()

    # ------------------------------------------------------------ saying

    def put(self, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> None:
        """Say it, at the latest when this turn of the loop ends. Raises LocalProtocolError for what cannot be sent.

        The first message of a turn leaves at once, those after it together.
        """
        if self._outbox.is_sharing:
            self._sharing.share(tensors)
        self._outbox.put(FRONTEND, message, tensors)
        if not self._has_sent:
            self._has_sent = True
            self._outbox.flush()
            self._loop.call_soon(self._end_turn)

    def fail_listings(self, reason: str) -> None:
        """It will not say what it serves."""
        for future in self.listings:
            if not future.done():
                future.set_exception(PeerLost(reason))

    def expect(self) -> None:
        """Something is awaited of it: from now on silence counts."""
        self._watch()
        self._hear_soon()

    def _end_turn(self) -> None:
        self._has_sent = False
        if self._is_open:
            self._outbox.flush()
            self._hear_soon()

    def _unsent(self, peer: PeerId, message: AnyMessage) -> None:
        del peer
        self._begin_again()
        if isinstance(message, Infer):
            self._owner.unsent(self, message.request_no)
        elif isinstance(message, ModelsAsked):
            self.fail_listings(f"not connected to the frontend at {self.address}")

    # ------------------------------------------------------------ hearing

    def _hear(self) -> None:
        if not self._is_open:
            return
        came = self._link.receive(256)
        if came:
            now_ms = self._clock.now_ms()
            self._liveness.heard(FRONTEND, now_ms)
            for received in came:
                self._take(received, now_ms)
        if self._is_open and not came and self._link.take_lost():  # what it said before is read
            self._lose("was closed")
        self._hear_soon()

    def _hear_soon(self) -> None:
        # The descriptor tells once, and a send may have swallowed it: ask the socket itself.
        if self._is_open and self._link.has_more:
            self._loop.call_soon(self._hear)

    def _take(self, received: Received, now_ms: float) -> None:
        match received.message:
            case Ping(number):
                self._link.send(FRONTEND, Pong(number))
            case Pong(memory=memory, incarnation=incarnation):
                self._outbox.is_sharing = (
                    self._options.shared_bytes_max > 0 and self._link.is_by_ipc and is_shared_with(memory)
                )
                self._greeted(incarnation, is_unready=False)
            case Unready(incarnation):
                self._greeted(incarnation, is_unready=True)
            case _:
                self._owner.heard(self, received, now_ms)

    def _greeted(self, frontend: Incarnation, *, is_unready: bool) -> None:
        said = True, is_unready, frontend
        if said != (self.is_greeted, self.is_unready, self.frontend):
            if not is_unready:
                self._greet_every_ms = GREET_EVERY_MS
            self.is_greeted, self.is_unready, self.frontend = said
            self._owner.changed()

    # ------------------------------------------------------------ is anybody there?

    def _begin_again(self) -> None:
        """Greet it until it answers."""
        self._outbox.is_sharing = False  # until we know who is there now
        if self.is_greeted:
            self.is_greeted = False
            if self._tending is not None:  # its time is that of a heartbeat
                self._tending.cancel()
                self._tending = None
            self._owner.changed()
        self._watch()

    def _lose(self, what: str) -> None:
        self._outbox.refuse()  # that has not left, so it has not run there
        self._begin_again()
        self._owner.lost(self, f"the connection to the frontend at {self.address} {what}")

    @property
    def _is_wanted(self) -> bool:
        return bool(self.awaited or self.listings) or not self.is_greeted or self.is_unready

    def _watch(self) -> None:
        if self._tending is None and self._is_open:
            self._liveness.watch(FRONTEND, self._clock.now_ms())
            # Whoever is there need not be asked at once; whoever is not is asked as soon as this turn ends.
            self._tend_in(self._options.heartbeats.interval_ms if self.is_greeted else 0.0)

    def _tend(self) -> None:
        self._tending = None
        if not self._is_open:
            return
        if not self._is_wanted:
            self._liveness.forget(FRONTEND)
            return
        now_ms = self._clock.now_ms()
        if self._liveness.lost(now_ms):
            self._link.reconnect()
            self._liveness.watch(FRONTEND, now_ms)
            self._lose("is silent")
        pings = self._liveness.due(now_ms)
        if not pings and (not self.is_greeted or self.is_unready):
            pings = [(FRONTEND, Ping(0))]
        for peer, ping in pings:
            self._link.send(peer, ping)
        if self._link.refusal:
            self._lose("is not let in")
            self._owner.changed()
        wake_at_ms = self._liveness.wake_at_ms
        assert wake_at_ms is not None, "it is being watched"
        if not self.is_greeted or self.is_unready:
            wake_at_ms = min(wake_at_ms, now_ms + self._greet_every_ms)
            self._greet_every_ms = min(1.5 * self._greet_every_ms, GREET_EVERY_MS_MAX)
        self._tend_in(max(wake_at_ms - now_ms, 1.0))
        self._hear_soon()

    def _tend_in(self, after_ms: float) -> None:
        """The one timer of this connection."""
        if self._tending is not None:
            self._tending.cancel()
        self._tending = self._loop.call_later(after_ms / 1e3, self._tend)
