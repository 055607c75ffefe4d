"""What TCP connections have sent of messages that have not ended.

ZeroMQ bounds a frame, and how many whole messages wait. The frames of a message that has not ended it keeps, however many there
are, and shows them to nobody. But the kernel knows how much it has taken of each connection, and from whom whole messages come is
seen here. What had been taken of a connection when it was looked at is judged at the next look: if no message of it was among all
that were whole by then, it is of a message that has not ended.

A link that is busy has never taken all that is whole. But ZeroMQ asks its connections in turns (libzmq's `fq_t`): when one has given
three messages, each other that had one has been asked in between. A connection that ends may put off another one's turn, so a few
more are asked for (`TURNS`).

Where all together have begun too much, whoever has begun most pays: each key, and of who has not shown one each address. Of his
connections those go first by which nothing more comes: small ones that stand still are not to end a large one that is on its way.

In a handshake ZeroMQ takes as much as of a message, of whoever has no key too. Where keys are asked for, only what a handshake needs
is let through before it is over. ZeroMQ tells that one has succeeded, but not whose. The kernel knows how much of ours the other end
has got: with the last of our commands it is more than the others have.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import islice
from typing import Final

from fabric.clock import Clock
from fabric.sockets.monitor import StandingConnection
from fabric.sockets.options import LinkOptions
from fabric.tcp_connections import carried_by, hang_up, host_at

TOGETHER_TIMES: Final = (
    4  # so many of the largest messages may be under way at once, of all connections together
)
LOOK_EVERY_MS: Final = 250.0
LOOK_AT: Final = 64  # connections at once: they take under a millisecond
LOOK_AT_MANY: Final = 512  # where half of what all may have begun is there
TURNS: Final = 8
FRAMING_BYTES: Final = 64  # of ZeroMQ's and CURVE's, for each frame
HANDSHAKE_BYTES: Final = 4_096  # and what is told beside messages
REFUSED_BYTES: Final = (
    256  # of ours: a greeting of 64, WELCOME of 170, ERROR of 12; READY, of 50 and more, comes in its place
)


class UnfinishedMessages:
    """Ends connections that have sent more than a message may have without an end of it."""

    def __init__(
        self,
        standing: dict[int, StandingConnection],
        options: LinkOptions,
        ports: Container[int],
        *,
        asks_for_keys: bool,
    ) -> None:
        """`ports`: of ours, at which they were accepted."""
        self._standing = standing  # those looked at longest ago first
        self._ports = ports
        self._asks_for_keys = asks_for_keys
        self._clock: Clock = options.clock
        message_bytes = options.header_bytes_max + options.payload_bytes_max
        self._bytes_max = message_bytes + FRAMING_BYTES * (options.frames_max + 1) + HANDSHAKE_BYTES
        self._whole: set[int] = set()  # by which a message has ended since they were looked at
        self._turns: dict[int, int] | None = None  # messages by each, since not all could be taken
        self._have_all_turned = False  # one of them has had so many turns; a busy link asks after each read
        self._together = 0
        self._look_at_ms = self._clock.now_ms() + LOOK_EVERY_MS

    @property
    def is_due(self) -> bool:
        """Whether `look` should be called."""
        return bool(self._standing) and self._clock.now_ms() >= self._look_at_ms

    def ends(self, descriptor: int) -> None:
        """A whole message has come by that connection."""
        self._whole.add(descriptor)
        if self._turns is not None:
            turns = self._turns[descriptor] = self._turns.get(descriptor, 0) + 1
            self._have_all_turned |= turns >= TURNS

    def spoke(self, descriptor: int, key: str) -> None:
        """That public key has spoken by that connection."""
        connection = self._standing.get(descriptor)
        if connection is not None:
            connection.owner = key

    def look(self, *, is_all_taken: bool) -> int:
        """At some of them, when what was whole at the last look has been taken. How many connections were ended.

        `is_all_taken`: no whole message waits. Otherwise ZeroMQ has just been asked whether one does, so that it knows of all.
        `standing` must have each connection by which a message has come.
        """
        if not is_all_taken:
            if self._turns is None:
                self._turns = {}
            if not self._have_all_turned:
                return 0
        self._turns, self._have_all_turned = None, False
        self._whole.intersection_update(self._standing)  # the kernel gives descriptors out again
        self._look_at_ms = self._clock.now_ms() + LOOK_EVERY_MS
        is_much = 2 * self._together > TOGETHER_TIMES * self._bytes_max
        by_tcp = {descriptor: one for descriptor, one in self._standing.items() if one.is_by_tcp}
        in_turn = islice(by_tcp, LOOK_AT_MANY if is_much else LOOK_AT)
        strangers = (descriptor for descriptor, one in by_tcp.items() if self._is_stranger(one))
        for descriptor in {*in_turn, *islice(strangers, LOOK_AT)}:
            self._look_at(descriptor)
        return self._end_over()

    def _look_at(self, descriptor: int) -> None:
        connection = self._standing.pop(descriptor)
        self._standing[descriptor] = connection
        is_whole = descriptor in self._whole
        self._whole.discard(descriptor)
        carried = carried_by(descriptor, self._ports)
        if carried is None:  # it has ended, and we shall hear of it, or is not by TCP
            connection.is_by_tcp, connection.unfinished = False, 0
            return
        connection.is_let_in |= carried.acknowledged > REFUSED_BYTES
        if self._is_stranger(connection):
            connection.unfinished = carried.taken
            return
        if is_whole:
            connection.taken = connection.taken_before = carried.taken
        connection.unfinished = connection.taken - connection.taken_before
        connection.is_stalled = connection.taken == carried.taken
        connection.taken = carried.taken
        if connection.unfinished and not connection.owner:
            connection.owner = host_at(descriptor)

    def _is_stranger(self, connection: StandingConnection) -> bool:
        return self._asks_for_keys and not connection.is_let_in

    def _is_too_much(self, connection: StandingConnection) -> bool:
        is_stranger = self._is_stranger(connection)
        return connection.unfinished > (HANDSHAKE_BYTES if is_stranger else self._bytes_max)

    def _end_over(self) -> int:
        """Until each one and all together are within their bounds."""
        # Whose message has ended since he was looked at has begun nothing that is known.
        begun = {
            descriptor: one
            for descriptor, one in self._standing.items()
            if one.unfinished and descriptor not in self._whole
        }
        ended = [descriptor for descriptor, one in begun.items() if self._is_too_much(one)]
        together = sum(one.unfinished for one in begun.values())
        together -= sum(begun.pop(descriptor).unfinished for descriptor in ended)
        of_owners: dict[str, list[int]] = {}
        for descriptor in sorted(begun, key=lambda one: (begun[one].is_stalled, begun[one].unfinished)):
            of_owners.setdefault(begun[descriptor].owner, []).append(descriptor)
        sums = {owner: sum(begun[one].unfinished for one in own) for owner, own in of_owners.items()}
        while together > TOGETHER_TIMES * self._bytes_max:
            owner = max(sums, key=lambda one: sums[one])
            descriptor = of_owners[owner].pop()
            size = begun[descriptor].unfinished
            sums[owner] -= size
            together -= size
            ended.append(descriptor)
        for descriptor in ended:
            del self._standing[descriptor]
            hang_up(descriptor, self._ports)
        self._together = together
        return len(ended)
