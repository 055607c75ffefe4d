"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike

from fabric.clock import Clock, MonotonicClock
from fabric.codec import BULKY_HEADER_BYTES_MAX
from fabric.curve import guarded
from fabric.errors import (
    DeadlineExceeded,
    InvalidInput,
    LocalProtocolError,
    Overloaded,
    PeerLost,
    TooLarge,
    Unauthorised,
    request_error,
)
from fabric.frames import ANSWER_BYTES_MAX, SMALL_BELOW_BYTES
from fabric.ids import ModelId, PeerId, new_incarnation, peer_id
from fabric.keys import Keyring
from fabric.limits import DURATION_MAX_MS
from fabric.link import NamedTensor, Received, Tensor
from fabric.liveness import HeartbeatTiming, Liveness
from fabric.margin import LearnedWay
from fabric.messages import (
    PRIORITY_MAX,
    Answer,
    AnyMessage,
    CancelRequest,
    Infer,
    Ledger,
    ModelInfo,
    ModelsAsked,
    ModelsListed,
    Ping,
    Pong,
    Refusal,
)
from fabric.outbox import Outbox
from fabric.shared_memory import is_shared_with
from fabric.sockets import DealerLink, LinkOptions
from fabric.tensors import ArenaSharing

_FRONTEND: Final = PeerId("frontend")  # what this side calls it; the connection leads to one only
_GREET_EVERY_S: Final = 0.05
_DEADLINES_KEPT: Final = 1_000  # of answered requests, before they are cleared away

Inputs = Mapping[str, ArrayLike | bytes]
"""By input name: anything numpy takes for an array, or the bytes of an encoded file (sent as 1-D uint8)."""


@dataclass(slots=True, frozen=True)
class ClientOptions:
    """Limits and heartbeats of a client, in ms. `grace_ms` is added to a budget for the way there and back.

    `shared_bytes_max`: of tensors that lie in memory shared with a frontend of this host; 0 for none, and what is
    over it travels. `key_file`: from `tenuto keys add`, for frontends that are reached by TCP and ask for keys; a new one in its
    place is taken over by a client that runs.
    """

    connect_timeout_ms: float = 5_000.0
    grace_ms: float = 500.0
    budget_unknown_ms: float = 60_000.0  # waited for a request without a budget of its own
    pending_max: int = 10_000
    payload_bytes_max: int = ANSWER_BYTES_MAX
    shared_bytes_max: int = 256 << 20
    heartbeats: HeartbeatTiming = field(default_factory=lambda: HeartbeatTiming(200.0, 600.0, 2_000.0))
    clock: Clock = field(default_factory=MonotonicClock)
    key_file: Path | None = None


@dataclass(slots=True, frozen=True)
class InferResult:
    """Outputs by name, read-only, and where the time went."""

    outputs: Mapping[str, Tensor]
    ledger: Ledger


class _Awaited(asyncio.Future[InferResult]):
    """The answer to one request; cancelling it tells the frontend."""

    def __init__(
        self,
        client: Client,
        message: Infer,
        inputs: Sequence[NamedTensor],
        sent_at_ms: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(loop=loop)
        self.number = message.request_no
        self.budget_ms = message.budget_ms
        self.inputs = inputs  # kept until the answer, with their places in shared memory
        self.sent_at_ms = sent_at_ms
        self._client = client

    def cancel(self, msg: Any | None = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self._client.forget(self.number)
        return is_cancelled


class Client:
    """One connection to a frontend, on the running asyncio loop. `address`: one, or several (ipc first)."""

    def __init__(self, address: str | Sequence[str], options: ClientOptions | None = None) -> None:
        self._addresses = (address,) if isinstance(address, str) else tuple(address)
        self._options = options or ClientOptions()
        self._clock = self._options.clock
        self._link: DealerLink | None = None
        self._requests = 0
        self._begin()

    def _begin(self) -> None:
        """Nothing of a former connection is left."""
        self._liveness = Liveness(self._options.heartbeats)
        self._greeted = asyncio.Event()
        self._pending: dict[int, _Awaited] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; answered requests leave it when they come up
        self._alarm: asyncio.TimerHandle | None = None
        self._has_sent = False  # in this turn of the loop
        self._listing: list[asyncio.Future[tuple[ModelInfo, ...]]] = []
        self._sharing = ArenaSharing(self._options.shared_bytes_max, SMALL_BELOW_BYTES)
        self._way = LearnedWay()  # there and back, our own event loop included
        self._tending: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Connect, and wait for a sign of life; after `close` too.

        Raises PeerLost when there is none in time, Unauthorised where a key is asked for and ours, or none, is not let in.
        """
        self.close()
        self._begin()
        key_file = self._options.key_file
        keyring = None if key_file is None else Keyring.of_file(key_file)
        own = peer_id("client" if keyring is None else keyring.own.principal, new_incarnation())
        limits = LinkOptions(
            clock=self._clock,
            # Never full before `pending_max` says so, so that a refused send can only mean: no connection.
            queue_messages_max=2 * self._options.pending_max + 1_000,
            header_bytes_max=BULKY_HEADER_BYTES_MAX,  # a frontend lists all its models
            payload_bytes_max=self._options.payload_bytes_max,
        )
        link = self._link = DealerLink.connect(own, _FRONTEND, self._addresses, limits, guarded(keyring))
        self._outbox = Outbox(link, self._unsent, self._options.payload_bytes_max)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link.fileno(), self._hear)
        try:
            async with asyncio.timeout(self._options.connect_timeout_ms / 1e3):
                while not self._greeted.is_set():
                    link.send(_FRONTEND, Ping(0))
                    if link.refusal:
                        raise Unauthorised(link.refusal)
                    self._hear_soon()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._greeted.wait(), _GREET_EVERY_S)
        except TimeoutError as error:
            raise PeerLost(f"no frontend answers at {self._addresses[0]}{link.trouble}") from error
        finally:
            if not self._greeted.is_set():
                self.close()

    def close(self) -> None:
        """Give up what is pending (PeerLost) and close the connection. Safe to call twice."""
        if self._link is None:
            return
        link, self._link = self._link, None
        self._loop.remove_reader(link.fileno())
        self._fail_all(PeerLost("the client was closed"))
        for timer in (self._tending, self._alarm):
            if timer is not None:
                timer.cancel()
        link.close()
        self._sharing.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def infer(
        self, model: str, inputs: Inputs, budget_ms: float | None = None, priority: int | None = None
    ) -> InferResult:
        """Send one request and wait for its answer; cancelling the waiting task cancels the request.

        `budget_ms` None means the model's SLO, `priority` (0 to 9) None the model's: of requests that cannot all be served
        those of a lower one go first. Arrays must not change until the answer is there: large ones are not copied, unless into
        memory that is shared with the frontend. Raises a RequestError with the frontend's code, or PeerLost; an Overloaded
        says in `retry_after_ms` when asking again may help.
        """
        return await self.submit(model, inputs, budget_ms, priority)

    def submit(
        self, model: str, inputs: Inputs, budget_ms: float | None = None, priority: int | None = None
    ) -> asyncio.Future[InferResult]:
        """Send one request; the future's `cancel()` tells the frontend to forget it.

        Raises at once what this side can tell: InvalidInput, TooLarge, Overloaded (too many pending), PeerLost.
        The first request of a turn of the loop leaves at once, those after it together when the turn ends.
        """
        self._connected()
        if len(self._pending) >= self._options.pending_max:
            raise Overloaded(f"{len(self._pending)} requests are pending on this client")
        limit_ms = limit_ms_of(budget_ms, self._options)
        if priority is not None and not 0 <= priority <= PRIORITY_MAX:
            raise InvalidInput(f"a priority of {priority}; priorities go from 0 to {PRIORITY_MAX}")
        tensors = [NamedTensor(name, _as_tensor(name, value)) for name, value in inputs.items()]
        if sum(tensor.array.nbytes for tensor in tensors) > self._options.payload_bytes_max:
            raise TooLarge(f"over {self._options.payload_bytes_max} bytes of inputs")
        self._requests += 1
        number, now_ms = self._requests, self._clock.now_ms()
        message = Infer(number, ModelId(model), _plain(budget_ms), self._way.planned_ms, priority)
        try:
            if self._outbox.is_sharing:
                self._sharing.share(tensors)
            self._outbox.put(_FRONTEND, message, tensors)
        except LocalProtocolError as error:
            raise InvalidInput(str(error)) from error
        future = self._pending[number] = _Awaited(self, message, tensors, now_ms, self._loop)
        self._set_alarm(now_ms + limit_ms, number, now_ms)
        self._send_soon()
        self._watch()
        if future.done():
            future.result()  # refused at once: raises, so that nobody need await it to know
        return future

    def forget(self, number: int) -> None:
        """The request was cancelled on this side: tell the frontend, if it has not answered."""
        if self._take_pending(number) is not None:
            self._tell_cancelled(number)

    async def models(self) -> tuple[ModelInfo, ...]:
        """What the frontend serves. Raises PeerLost if it does not say."""
        future: asyncio.Future[tuple[ModelInfo, ...]] = self._connected_loop().create_future()
        self._listing.append(future)
        try:
            if not self._connected().send(_FRONTEND, ModelsAsked()):
                raise self._disconnected()
            self._watch()
            self._hear_soon()
            async with asyncio.timeout(self._options.connect_timeout_ms / 1e3):
                return await future
        except TimeoutError as error:
            raise PeerLost(f"{self._addresses[0]} does not list its models") from error
        finally:
            if future in self._listing:
                self._listing.remove(future)

    # ------------------------------------------------------------ saying and hearing

    def _take_pending(self, number: int) -> _Awaited | None:
        awaited = self._pending.pop(number, None)
        if awaited is not None:
            awaited.inputs = ()
        return awaited

    def _send_soon(self) -> None:
        if self._has_sent:
            return
        self._has_sent = True
        self._outbox.flush()
        self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._has_sent = False
        self._outbox.flush()
        self._hear_soon()

    def _unsent(self, peer: PeerId, message: AnyMessage) -> None:
        del peer
        if isinstance(message, Infer):
            self._fail(message.request_no, self._disconnected())

    def _hear(self) -> None:
        if self._link is None:
            return
        came = self._link.receive(256)
        if came:
            now_ms = self._clock.now_ms()
            self._liveness.heard(_FRONTEND, now_ms)
            for received in came:
                self._take(received, now_ms)
        self._hear_soon()

    def _hear_soon(self) -> None:
        # The descriptor tells once, and a send may have swallowed it: ask the socket itself.
        if self._link is not None and self._link.has_more:
            self._loop.call_soon(self._hear)

    def _take(self, received: Received, now_ms: float) -> None:
        match received.message:
            case Answer(number, ledger):
                self._answer(number, ledger, received.tensors, now_ms)
            case Refusal(number, code, reason, _, retry_after_ms):
                self._fail(number, request_error(code, reason, retry_after_ms))
            case ModelsListed(models):
                for future in self._listing:
                    if not future.done():
                        future.set_result(models)
            case Ping(number):
                self._connected().send(_FRONTEND, Pong(number))
            case Pong(memory=memory):
                self._outbox.is_sharing = (
                    self._options.shared_bytes_max > 0
                    and self._connected().is_by_ipc
                    and is_shared_with(memory)
                )
                self._greeted.set()
            case _:  # nothing else is meant for a client, and a newer frontend may know more
                pass

    def _answer(self, number: int, ledger: Ledger, tensors: Sequence[NamedTensor], now_ms: float) -> None:
        awaited = self._take_pending(number)
        if awaited is None:
            return  # cancelled or given up before
        total_ms = now_ms - awaited.sent_at_ms
        self._way.note(total_ms - ledger.total_ms)
        if awaited.budget_ms is not None:
            self._way.note_end(total_ms - awaited.budget_ms, awaited.budget_ms)
        outputs = {tensor.name: tensor.array for tensor in tensors}
        awaited.set_result(InferResult(outputs, ledger.seen_by_client(total_ms)))

    # ------------------------------------------------------------ giving up

    def _fail(self, number: int, error: Exception) -> None:
        awaited = self._take_pending(number)
        if awaited is not None:
            awaited.set_exception(error)

    def _fail_all(self, error: PeerLost | Unauthorised) -> None:
        for number in list(self._pending):
            self._fail(number, type(error)(str(error)))
        for future in self._listing:
            if not future.done():
                future.set_exception(type(error)(str(error)))

    def _set_alarm(self, deadline_at_ms: float, number: int, now_ms: float) -> None:
        heapq.heappush(self._deadlines, (deadline_at_ms, number))
        if self._deadlines[0][1] == number:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._loop.call_later((deadline_at_ms - now_ms) / 1e3, self._expire)
        elif len(self._deadlines) > 2 * len(self._pending) + _DEADLINES_KEPT:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._pending]
            heapq.heapify(self._deadlines)

    def _expire(self) -> None:
        now_ms = self._clock.now_ms()
        while self._deadlines and (
            self._deadlines[0][0] <= now_ms or self._deadlines[0][1] not in self._pending
        ):
            _, number = heapq.heappop(self._deadlines)
            if number in self._pending:
                self._fail(number, DeadlineExceeded("no answer within the budget and its grace"))
                self._tell_cancelled(number)
        self._alarm = None
        if self._deadlines:
            self._alarm = self._loop.call_later((self._deadlines[0][0] - now_ms) / 1e3, self._expire)

    def _tell_cancelled(self, number: int) -> None:
        if self._link is not None:
            self._outbox.put(
                _FRONTEND, CancelRequest(number)
            )  # refused: then nobody there works on it either
            self._send_soon()

    # ------------------------------------------------------------ is anybody there?

    def _watch(self) -> None:
        """Something is awaited: from now on silence counts."""
        if self._tending is None:
            self._liveness.watch(_FRONTEND, self._clock.now_ms())
            self._tending = self._loop.call_later(self._options.heartbeats.ping_every_ms / 1e3, self._tend)

    def _tend(self) -> None:
        self._tending = None
        if self._link is None or not (self._pending or self._listing or not self._greeted.is_set()):
            self._liveness.forget(_FRONTEND)
            return
        now_ms = self._clock.now_ms()
        if self._liveness.lost(now_ms):
            self._fail_all(PeerLost(f"the frontend at {self._addresses[0]} is silent"))
            self._link.reconnect()
            self._outbox.is_sharing = False  # until we know who is there now
            self._greeted.clear()
            self._liveness.watch(_FRONTEND, now_ms)
        for peer, ping in self._liveness.due(now_ms):
            self._link.send(peer, ping)
        if self._link.refusal:
            self._fail_all(self._disconnected())
        wake_at_ms = self._liveness.wake_at_ms
        assert wake_at_ms is not None, "it is being watched"
        self._tending = self._loop.call_later(max(wake_at_ms - now_ms, 1.0) / 1e3, self._tend)
        self._hear_soon()

    def _disconnected(self) -> PeerLost | Unauthorised:
        """A send was refused: look after the connection until somebody answers again."""
        self._greeted.clear()
        self._watch()
        if self._link is not None and self._link.refusal:
            return Unauthorised(self._link.refusal)
        return PeerLost(f"not connected to {self._addresses[0]}")

    def _connected(self) -> DealerLink:
        if self._link is None:
            raise PeerLost("the client is not open")
        return self._link

    def _connected_loop(self) -> asyncio.AbstractEventLoop:
        self._connected()
        return self._loop


def _as_tensor(name: str, value: ArrayLike | bytes) -> Tensor:
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(f"input {name!r} is not an array: {error}") from error
    return array  # whether it can be sent is said when it is packed


def limit_ms_of(budget_ms: float | None, options: ClientOptions) -> float:
    """How long to wait at most. Raises InvalidInput for a budget that is none."""
    if budget_ms is None:
        return options.budget_unknown_ms + options.grace_ms
    if not 0 <= budget_ms <= DURATION_MAX_MS:
        raise InvalidInput(f"a budget of {budget_ms} ms")
    return budget_ms + options.grace_ms


def _plain(budget_ms: float | None) -> float | None:
    return None if budget_ms is None else float(budget_ms)  # numpy's floats are not the encoder's
