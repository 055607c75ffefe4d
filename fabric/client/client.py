"""The client for asyncio: spreads requests over frontends, and sends to another what one of them took along."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self

from msgspec.structs import replace

from fabric.arena_sharing import ArenaSharing, lend
from fabric.client.client_options import ClientOptions
from fabric.client.connection import Connection
from fabric.client.listing import list_models
from fabric.client.request_checks import (
    Inputs,
    checked_inputs,
    checked_model,
    checked_priority,
    limit_ms_of,
    plain_budget,
)
from fabric.client.retries import RetryBudget
from fabric.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    LocalProtocolError,
    Overloaded,
    PeerLost,
    Unauthorised,
    WrongThread,
    request_error,
)
from fabric.frames import ANSWER_BYTES_MAX, SMALL_BELOW_BYTES
from fabric.ids import ModelId
from fabric.ipc import IPC
from fabric.link import NamedTensor, Received, Tensor
from fabric.messages import (
    Answer,
    CancelRequest,
    Infer,
    Ledger,
    ModelInfo,
    ModelsListed,
    Refusal,
    StageLine,
    StageResult,
)

_OTHERS_WAIT_S: Final = 0.1  # for the greetings of the other frontends, once one has answered
_DEADLINES_KEPT: Final = 1_000  # of answered requests, before they are cleared away


@dataclass(slots=True, frozen=True)
class InferResult:
    """What a request ends with."""

    outputs: Mapping[str, Tensor]
    """Arrays by name, read-only, without a batch axis."""
    ledger: Ledger
    """Where its time went."""
    stages: Sequence[StageLine] = ()
    results: Sequence[StageResult] = ()
    """Of an application asked as if it were a model: whose the outputs are, in their order (see `RunResult`)."""


@dataclass(slots=True, frozen=True)
class RunResult:
    """An application's answer: outputs by leaf of its graph, and one ledger with a line per stage.

    `outputs[stage]` has an item for each answer of the stage, {name: array}; an empty list where nothing followed. `places[stage]` says which one
    each was: its number among those after one answer, at each stage of the way there. Lines of stages that are on the
    path that took longest sum to the ledger of the whole.
    """

    outputs: Mapping[str, Sequence[Mapping[str, Tensor]]]
    places: Mapping[str, Sequence[tuple[int, ...]]]
    ledger: Ledger
    stages: Sequence[StageLine]

    @property
    def is_partial(self) -> bool:
        """Whether an optional stage lacks an answer; its line says why."""
        return any(line.reason for line in self.stages)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Awaited(asyncio.Future[InferResult]):
    """The answer to one request; cancelling it tells the frontend."""

    def __init__(
        self,
        client: Client,
        message: Infer,
        inputs: Sequence[NamedTensor],
        sent_at_ms: float,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(loop=loop)
        self.number = message.request_no
        self.message = message
        self.budget_ms = message.budget_ms
        self.inputs = inputs  # kept until the answer, with their places in shared memory
        self.sent_at_ms = sent_at_ms  # the first time
        self.connection = connection  # to the frontend that has it now
        self.was_sent_again = False
        self._client = client

    def cancel(self, msg: Any | None = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self._client.forget(self.number)
        return is_cancelled


class Client:
    """Connections to one or more frontends, on the running asyncio loop.

    `address`: of the frontend, or of each; of several that lead to one frontend the nearest is used. Requests go to those
    that are ready, in turn. What a frontend has not
    answered when it is lost goes to another one, as far as budgets and the retry budget (`fabric/client/retries.py`) allow;
    a frontend refuses it where the model must not run a request twice.

    A forked process cannot ask by its parent's: there everything raises WrongThread until it is opened anew, or closed, and the parent's
    goes on.
    """

    def __init__(self, address: str | Sequence[str], options: ClientOptions | None = None) -> None:
        addresses = [address] if isinstance(address, str) else list(dict.fromkeys(address))
        if not addresses or not all(isinstance(one, str) for one in addresses):
            raise ConfigError(
                f"{addresses!r:.60} has no addresses of frontends; give one or more, such as tcp://HOST:PORT"
            )
        self._addresses = tuple(sorted(addresses, key=lambda one: not one.startswith(IPC)))
        self._options = options or ClientOptions()
        heartbeats = self._options.heartbeats
        if not 0.0 < 2.0 * heartbeats.interval_ms <= heartbeats.patience_ms:
            raise ConfigError(
                f"heartbeats: patience_ms is {heartbeats.patience_ms:g}; it must be at least twice interval_ms, which is"
                f" {heartbeats.interval_ms:g} and must be over 0"
            )
        if (
            not 0 < self._options.payload_bytes_max <= ANSWER_BYTES_MAX
        ):  # a frontend ends a connection by which more comes
            raise ConfigError(
                f"payload_bytes_max is {self._options.payload_bytes_max:,}; it must be over 0 and at most {ANSWER_BYTES_MAX:,}"
            )
        self._clock = self._options.clock
        self._requests = 0
        self._is_open = False
        self._is_parents = False  # it was open when this process was forked
        self._loop: asyncio.AbstractEventLoop  # of the last opening
        self._openings = 0  # that were closed
        self._begin()
        _CLIENTS.add(self)

    def _begin(self) -> None:
        """Nothing of former connections is left."""
        self._connections: list[Connection] = []
        self._usable: list[Connection] = []
        """Those that may be sent to: the ready ones, or, if none is, those that at least are there."""
        self._turn = 0
        self._retries = RetryBudget()
        self._change = asyncio.Event()
        self._pending: dict[int, _Awaited] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; answered requests leave it when they come up
        self._alarm: asyncio.TimerHandle | None = None
        self._sharing = ArenaSharing(self._options.shared_bytes_max, SMALL_BELOW_BYTES, self._clock)

    async def open(self) -> None:
        """Connect, and wait for a sign of life; after `close` too. What was open, or is being opened, is closed first.

        One frontend that answers is enough; the others get a tenth of a second, then they join when they can. Raises
        PeerLost when there is none in time, or when it is closed meanwhile, WrongThread where it is open on another loop that runs, Unauthorised where a key is asked for and
        ours, or none, is not let in.
        """
        if self._is_open and not self._is_parents and self._loop.is_running():
            self._check_loop()
        self.close()
        self._begin()
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        opening = self._openings
        try:
            for address in self._addresses:
                self._connections.append(Connection(address, self._options, self, self._sharing))
            async with asyncio.timeout(self._options.connect_timeout_ms / 1e3):
                await self._greetings_of(1, opening)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OTHERS_WAIT_S):
                    await self._greetings_of(len(self._connections), opening)
            self._check_is_of(opening)
        except TimeoutError as error:
            self._check_is_of(opening)
            self.close()
            raise self._nobody() from error
        except BaseException:
            if self._openings == opening:  # what another call has opened since is not ours to close
                self.close()
            raise
        if not self._usable:  # lost again meanwhile
            self.close()
            raise self._nobody()

    def _check_loop(self) -> None:
        if (
            self._is_parents or _running_loop() is not self._loop
        ):  # elsewhere nobody would ever bring the answer
            raise WrongThread(
                "the client answers on the asyncio loop, thread and process that opened it: ask there, or open another client here"
            )

    def _nobody(self) -> PeerLost:
        trouble = next((one.trouble for one in self._connections if one.trouble), "")
        return PeerLost(f"no frontend answers at {self._where}{trouble}")

    async def _greetings_of(self, count: int, opening: int) -> None:
        """Wait until so many frontends have answered. Raises PeerLost when the client is closed meanwhile."""
        self._check_is_of(opening)
        while sum(one.is_greeted for one in self._connections) < count:
            if all(one.refusal for one in self._connections):
                raise Unauthorised(self._connections[0].refusal)
            self._change.clear()
            await self._change.wait()
            self._check_is_of(opening)

    def _check_is_of(self, opening: int) -> None:
        """Raises PeerLost if the client was closed since: its connections, if it has any, are another opening's."""
        if self._openings != opening:
            raise PeerLost("the client was closed, or opened anew, while it was being opened")

    def close(self) -> None:
        """Give up what is pending (PeerLost) and close the connections. Safe to call twice, and when the loop has ended."""
        if not self._is_open:
            return
        self._is_open = False
        self._openings += 1
        if self._is_parents:
            self._is_parents = False
            self._begin()
            return
        # A loop that has ended calls nobody back, and raises where somebody wants to be.
        unheard = contextlib.suppress(RuntimeError) if self._loop.is_closed() else contextlib.nullcontext()
        for number in list(self._pending):
            with unheard:
                self._fail(number, PeerLost("the client was closed"))
        for connection in self._connections:
            with unheard:
                connection.fail_listings("the client was closed")
            connection.close()
        if self._alarm is not None:
            self._alarm.cancel()
        self._usable = []
        self._sharing.close()
        with unheard:
            self._change.set()  # whoever is opening it hears so at once

    def leave_to_parent(self) -> None:
        """This process was just forked: what is open is the parent's, and of what both share, as epoll instances, nothing is to change."""
        if self._is_open:
            _INHERITED.append(self.__dict__.copy())
            self._is_parents = True

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
        says in `retry_after_ms` when asking again may help, a NoReplica when a slice should be ready, where that is known.
        """
        return await self.submit(model, inputs, budget_ms, priority)

    async def run(
        self, application: str, inputs: Inputs, budget_ms: float | None = None, priority: int | None = None
    ) -> RunResult:
        """Ask an application, all of its graph, and wait for its answer. Budget, priority and errors as `infer`.

        Raises InvalidInput for the name of a model.
        """
        return run_result(application, await self.submit(application, inputs, budget_ms, priority))

    def submit(
        self, model: str, inputs: Inputs, budget_ms: float | None = None, priority: int | None = None
    ) -> asyncio.Future[InferResult]:
        """Send one request; the future's `cancel()` tells the frontend to forget it.

        Raises at once what this side can tell: InvalidInput, TooLarge, Overloaded (too many pending), PeerLost, WrongThread.
        The first request of a turn of the loop leaves at once, those after it together when the turn ends.
        """
        if not self._is_open:
            raise PeerLost("the client is not open")
        self._check_loop()
        if len(self._pending) >= self._options.pending_max:
            raise Overloaded(f"{len(self._pending)} requests are pending on this client")
        budget_ms = plain_budget(budget_ms)
        limit_ms = limit_ms_of(budget_ms, self._options)
        priority = checked_priority(priority)
        model_id = ModelId(checked_model(model))
        tensors = checked_inputs(inputs, self._options)
        now_ms = self._clock.now_ms()
        connection = self._choose(now_ms)
        if connection is None:
            raise self._disconnected()
        self._requests += 1
        number = self._requests
        message = Infer(number, model_id, budget_ms, connection.way.planned_ms, priority)
        future = self._pending[number] = _Awaited(self, message, tensors, now_ms, connection, self._loop)
        connection.awaited.add(number)
        self._retries.note_request()
        try:
            connection.put(message, tensors)
        except LocalProtocolError as error:
            self._take_pending(number)
            raise InvalidInput(str(error)) from error
        except BaseException:  # such as a MemoryError
            self._take_pending(number)
            raise
        if future.done():
            future.result()  # refused at once: raises, so that nobody need await it to know
        self._set_alarm(now_ms + limit_ms, number, now_ms)
        future.connection.expect()
        return future

    def forget(self, number: int) -> None:
        """The request was cancelled on this side: tell the frontend, if it has not answered."""
        awaited = self._pending.get(number)
        if awaited is not None:
            lend(awaited.inputs)
            self._take_pending(number)
            self._tell_cancelled(awaited)

    async def models(self) -> tuple[ModelInfo, ...]:
        """What a frontend serves. Another one is asked where the first is lost or takes long. Raises PeerLost if none says."""
        if not self._is_open:
            raise PeerLost("the client is not open")
        self._check_loop()
        if not self._usable:
            raise self._disconnected()
        self._turn = (self._turn + 1) % len(self._usable)
        opening = self._openings

        def not_asked(asked: Collection[Connection]) -> list[Connection]:
            """In turn, but those last that leave requests unanswered. A listing is no trial: those are for requests."""
            if self._openings != opening:
                return []
            in_turn = self._usable[self._turn :] + self._usable[: self._turn]
            left = [one for one in in_turn if one not in asked]
            return sorted(left, key=lambda one: not one.circuit.is_closed)

        return await list_models(not_asked, self._options.connect_timeout_ms, self._clock)

    # ------------------------------------------------------------ which frontend

    @property
    def is_ready(self) -> bool:
        """Whether a frontend is there that wants requests."""
        return any(not one.is_unready for one in self._usable)

    @property
    def _where(self) -> str:
        first, *others = self._addresses
        return f"{first} or {len(others)} more" if others else first

    def _disconnected(self) -> PeerLost | Unauthorised:
        refused = [one.refusal for one in self._connections if one.refusal]
        if refused and len(refused) == len(self._connections):
            return Unauthorised(refused[0])
        return PeerLost(f"not connected to {self._where}")

    def _choose(self, now_ms: float) -> Connection | None:
        """The next one in turn whose circuit is closed; if none is, just the next one. None: nobody is there."""
        usable = self._usable
        for _ in usable:
            self._turn = (self._turn + 1) % len(usable)
            if len(usable) == 1 or usable[self._turn].circuit.allows(now_ms):
                return usable[self._turn]
        return usable[self._turn] if usable else None

    def changed(self) -> None:
        """A connection came or went, or its frontend wants requests now, or no more."""
        greeted: list[Connection] = []
        for one in self._connections:
            is_known = one.frontend and any(one.frontend == other.frontend for other in greeted)
            if one.is_greeted and not is_known:
                greeted.append(one)
        self._usable = [one for one in greeted if not one.is_unready] or greeted
        self._turn %= max(1, len(self._usable))
        self._change.set()

    def lost(self, connection: Connection, reason: str) -> None:
        """What it has not answered goes to another frontend."""
        now_ms = self._clock.now_ms()
        for number in sorted(connection.awaited):
            self._send_elsewhere(self._pending[number], reason, now_ms)
        connection.fail_listings(reason)

    def unsent(self, connection: Connection, number: int) -> None:
        """It has not left, so that another frontend may have it as if it were new."""
        if number in connection.awaited:
            reason = f"not connected to the frontend at {connection.address}"
            self._send_elsewhere(self._pending[number], reason, self._clock.now_ms(), has_left=False)

    def _send_elsewhere(
        self, awaited: _Awaited, reason: str, now_ms: float, *, has_left: bool = True
    ) -> None:
        awaited.connection.awaited.discard(awaited.number)
        if has_left:  # a worker may answer the frontend that we do not hear any more
            lend(awaited.inputs)
        spent_ms = now_ms - awaited.sent_at_ms
        connection = self._choose(now_ms)
        if connection is None or connection is awaited.connection:
            refusal = awaited.connection.refusal
            self._fail(awaited.number, Unauthorised(refusal) if refusal else PeerLost(reason))
        elif awaited.budget_ms is not None and spent_ms >= awaited.budget_ms:
            self._fail(awaited.number, PeerLost(f"{reason}, and the budget is spent"))
        elif has_left and not self._retries.take():
            self._fail(awaited.number, PeerLost(f"{reason}, and too many requests were sent again lately"))
        else:
            awaited.connection, awaited.was_sent_again = connection, True
            connection.awaited.add(awaited.number)
            awaited.message = again = replace(
                awaited.message,
                way_ms=connection.way.planned_ms,
                spent_ms=spent_ms,
                may_have_run=has_left or awaited.message.may_have_run,
            )
            connection.put(again, awaited.inputs)
            connection.expect()

    # ------------------------------------------------------------ hearing

    def heard(self, connection: Connection, received: Received, now_ms: float) -> None:
        """A frontend said something."""
        match received.message:
            case Answer():
                self._answer(connection, received.message, received.tensors, now_ms)
            case Refusal(number, code, reason, _, retry_after_ms, may_be_read):
                if number in connection.awaited:
                    connection.circuit.note_answer()
                    if may_be_read:
                        lend(self._pending[number].inputs)
                    self._fail(number, request_error(code, reason, retry_after_ms))
            case ModelsListed(models):
                for future in connection.listings:
                    if not future.done():
                        future.set_result(models)
            case _:  # nothing else is meant for a client, and a newer frontend may know more
                pass

    def _answer(
        self,
        connection: Connection,
        answer: Answer,
        tensors: Sequence[NamedTensor],
        now_ms: float,
    ) -> None:
        number, ledger = answer.request_no, answer.ledger
        if number not in connection.awaited:
            return  # cancelled or given up before
        connection.circuit.note_answer()
        if answer.may_be_read:
            lend(self._pending[number].inputs)
        awaited = self._take_pending(number)
        assert awaited is not None, "both tables have it"
        total_ms = now_ms - awaited.sent_at_ms
        if not awaited.was_sent_again:
            connection.way.note(total_ms - ledger.total_ms)
        if awaited.budget_ms is not None and not awaited.was_sent_again:
            connection.way.note_end(total_ms - awaited.budget_ms, awaited.budget_ms)
        outputs = {tensor.name: tensor.array for tensor in tensors}
        seen = ledger.seen_by_client(total_ms)
        awaited.set_result(InferResult(outputs, seen, answer.stages, answer.results))

    # ------------------------------------------------------------ giving up

    def _take_pending(self, number: int) -> _Awaited | None:
        awaited = self._pending.pop(number, None)
        if awaited is not None:
            awaited.inputs = ()
            awaited.connection.awaited.discard(number)
        return awaited

    def _fail(self, number: int, error: Exception) -> None:
        awaited = self._take_pending(number)
        if awaited is not None:
            awaited.set_exception(error)

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
            awaited = self._pending.get(number)
            if awaited is not None:
                awaited.connection.circuit.note_unanswered(now_ms)
                lend(awaited.inputs)
                self._fail(number, DeadlineExceeded("no answer within the budget and its grace"))
                self._tell_cancelled(awaited)
        self._alarm = None
        if self._deadlines:
            self._alarm = self._loop.call_later((self._deadlines[0][0] - now_ms) / 1e3, self._expire)

    def _tell_cancelled(self, awaited: _Awaited) -> None:
        if self._is_open and not self._is_parents:
            # Refused: then nobody there works on it either.
            awaited.connection.put(CancelRequest(awaited.number))


def run_result(application: str, answered: InferResult) -> RunResult:
    """An answer, sorted by stage. Raises InvalidInput where a model gave it."""
    if not answered.stages:
        raise InvalidInput(f"{application!r} is a model: `infer` asks it")
    stages = [line.stage for line in answered.stages if line.is_answer]
    outputs: dict[str, list[Mapping[str, Tensor]]] = {stage: [] for stage in stages}
    places: dict[str, list[tuple[int, ...]]] = {stage: [] for stage in stages}
    tensors = iter(answered.outputs.items())
    for result in answered.results:
        own = list(islice(tensors, result.tensors))
        prefix = f"{result.stage}.{'.'.join(map(str, result.place))}."
        outputs[result.stage].append({name.removeprefix(prefix): array for name, array in own})
        places[result.stage].append(result.place)
    return RunResult(outputs, places, answered.ledger, answered.stages)


_CLIENTS: Final[weakref.WeakSet[Client]] = weakref.WeakSet()
_INHERITED: Final[list[object]] = []  # kept, so that nothing of a parent's is ended in its fork


def _leave_to_parent() -> None:
    for client in list(_CLIENTS):
        client.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
