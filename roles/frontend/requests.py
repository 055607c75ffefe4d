"""The requests a frontend owes an answer, found by client, by seq, by slice and by deadline.

A request's life, as a table. Decoding a picture is not a stage of it: it runs beside being gathered and
announced (`is_ready` says whether it has ended), and only a request whose grant, or drop for want of time, comes too early waits for it (a broken picture is
the better answer)::

    GATHERED --announce--> ANNOUNCED --grant--> GRANTED --answer--> ANSWERED
       ^                     |    |                |
       +-----give back-------+    +-miss->DECODING |      every stage may end in ANSWERED (a refusal)
       +-----give back-------------------|---------+
       +-----decoded---------------------+

A request whose batch is stopped for a larger one is queued again by the scheduler itself and granted once more, so a
GRANTED one may be granted or dropped: only the newest grant counts. One whose inputs are back from its worker stays GRANTED
until its scheduler has said what becomes of it: at most `SCHEDULER_SAYS_WITHIN_MS`, but for one that the scheduler has queued again.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

from msgspec import Struct

from fabric.ids import BatchId, ModelId, PeerId, SliceId
from fabric.messages import BatchFailed, InputsReturned, Outputs, SeqRun
from roles.frontend.announced_runs import AnnouncedRun
from roles.runtime.core import Handle

NO_SEQ = -1
NO_HEAD: Final = ModelId("")
_COMPACT_OVER = 1024  # a heap with fewer answered requests than this is not worth rebuilding
SCHEDULER_SAYS_WITHIN_MS: Final = 100.0
"""What becomes of a request that was not run. Mostly its worker tells both in the same moment; else the scheduler is gone, or what was said is."""
_STOPPED_MAX = 8  # a result of an even earlier grant is counted as nobody's


class RequestState(enum.IntEnum):  # the hash of a plain Enum is Python's own work, and each step needs two
    """Where a request is."""

    GATHERED = enum.auto()  # to be announced when the turn ends, or when the scheduler is back
    ANNOUNCED = enum.auto()
    DECODING = enum.auto()  # missed its grant: announced again when its picture is decoded, or else refused
    GRANTED = enum.auto()  # its inputs are on their way to a slice, or there
    ANSWERED = enum.auto()


class RequestTransition(enum.IntEnum):
    """What happens to a request."""

    ANNOUNCE = enum.auto()
    GRANT = enum.auto()
    MISS = enum.auto()
    DECODED = enum.auto()
    GIVE_BACK = enum.auto()
    ANSWER = enum.auto()


TRIES_MAX: Final = 1
LATE_RETURNS_MAX: Final = 15
"""Of a request whose slice was late, beyond `TRIES_MAX`. Its budget ends that first, but on a host that stands still."""

NEXT: Final[Mapping[tuple[RequestState, RequestTransition], RequestState]] = {
    (RequestState.GATHERED, RequestTransition.ANNOUNCE): RequestState.ANNOUNCED,
    (RequestState.ANNOUNCED, RequestTransition.GRANT): RequestState.GRANTED,
    (RequestState.GRANTED, RequestTransition.GRANT): RequestState.GRANTED,
    (RequestState.ANNOUNCED, RequestTransition.MISS): RequestState.DECODING,
    (RequestState.ANNOUNCED, RequestTransition.GIVE_BACK): RequestState.GATHERED,
    (RequestState.GRANTED, RequestTransition.GIVE_BACK): RequestState.GATHERED,
    (RequestState.DECODING, RequestTransition.DECODED): RequestState.GATHERED,
    (RequestState.GATHERED, RequestTransition.ANSWER): RequestState.ANSWERED,
    (RequestState.ANNOUNCED, RequestTransition.ANSWER): RequestState.ANSWERED,
    (RequestState.DECODING, RequestTransition.ANSWER): RequestState.ANSWERED,
    (RequestState.GRANTED, RequestTransition.ANSWER): RequestState.ANSWERED,
}


class BatchSlot(Struct, frozen=True, gc=False):
    """What a grant said: where a request runs, and why its batch left when it did."""

    batch_id: BatchId
    slice_id: SliceId
    granted_at_ms: float
    waited_ms: float
    reason: str
    generation: int = 0
    """`Registration.generation` of that moment."""

    def is_of(self, message: Outputs | BatchFailed | InputsReturned) -> bool:
        """Whether a worker speaks of that batch."""
        return self.slice_id == message.slice_id and self.batch_id == message.batch_id


class TaskId(NamedTuple):
    """One request of a stage, of an application's request."""

    application: ModelId
    number: int


@dataclass(slots=True, eq=False)
class Request:
    """One request of a client, or of a stage of an application. Moments are on the frontend's clock."""

    client: PeerId
    number: int
    model_id: ModelId
    payload: Handle
    tensors: int
    size_bytes: int
    asked_at_ms: float
    due_at_ms: float
    deadline_at_ms: float
    is_ready: bool
    priority: int | None = None
    request_id: str = ""  # by which people ask what became of it
    stage: RequestState = RequestState.GATHERED
    seq: int = NO_SEQ
    former_seq: int = NO_SEQ  # under which it was granted to a worker that was lost; a result may still come
    former_place: BatchSlot | None = None
    preprocess_ms: float = 0.0
    first_announced_at_ms: float | None = None
    announced_at_ms: float = 0.0
    run: AnnouncedRun | None = None  # while the scheduler has it queued
    shard: int = 0  # which one it was announced to last: nobody else decides about it
    place: BatchSlot | None = None  # while granted
    unread: int = 0  # grants to workers, each of which reads its inputs when it begins the batch, that brought no outputs
    stopped: tuple[BatchSlot, ...] = ()  # the newest of those that a later grant replaced
    tries_left: int = TRIES_MAX  # how often it may be announced again after a grant that came to nothing
    late_returns_left: int = LATE_RETURNS_MAX  # and before that, where its batch did not run for being late
    are_inputs_back: bool = False  # while granted: it was not run, and its scheduler has not said so yet
    has_lost_worker: bool = False
    task: TaskId | None = None  # it is a stage's, and no client's
    is_application: bool = False  # it waits for its tasks, and is never announced itself
    tasks: list[Request] = field(default_factory=list)  # those so far, which may pass on what it brought
    head: ModelId = NO_HEAD  # of `model_id`, in whose batches it runs; empty: that model has none
    drop_reason: str = ""  # the scheduler gave it up while its picture was being decoded

    def step(self, step: RequestTransition) -> None:
        """Go to the next stage; a step the table does not have is a bug of ours."""
        self.stage = NEXT[self.stage, step]

    @property
    def asked_name(self) -> ModelId:
        """By which its client asked."""
        return self.head or self.model_id

    @property
    def may_be_read(self) -> bool:
        """Whether a worker may have its inputs in a batch yet: whoever has answered has read them."""
        return self.unread > 0 or any(task.may_be_read for task in self.tasks)

    def may_try_again(self, *, was_late: bool) -> bool:
        """Whether it may be announced once more, which counts. `was_late`: its batch did not run, as it was late."""
        if was_late and self.late_returns_left:
            self.late_returns_left -= 1
        elif self.tries_left:
            self.tries_left -= 1
        else:
            return False
        return True


class Pending:
    """All requests without an answer. Nothing here looks at all of them but `__iter__`."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._count = 0
        self._by_client: dict[PeerId, dict[int, Request]] = {}
        self._bytes_by_client: dict[PeerId, int] = {}
        self._by_seq: dict[ModelId, dict[int, Request]] = {}
        self._by_slice: dict[SliceId, dict[Request, None]] = {}
        self._deadlines = _Deadlines()
        self._inputs_back: deque[tuple[float, Request, BatchSlot]] = deque()
        self.inputs_back_until_ms: float | None = None
        """When the scheduler of the first of those will not say any more what becomes of it; None: there are none."""
        self.next_deadline_at_ms: float | None = None
        """The earliest deadline; None: nothing is pending. It is asked for before and after every event."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """In the order they were asked, client by client."""
        for requests in self._by_client.values():
            yield from requests.values()

    def expired(self, now_ms: float) -> Request | None:
        """The request with the earliest deadline if that has come. It stays pending until removed."""
        next_at_ms = self.next_deadline_at_ms
        return self._deadlines.head() if next_at_ms is not None and next_at_ms <= now_ms else None

    def add(self, request: Request) -> None:
        """Owe an answer."""
        client = request.client
        self._by_client.setdefault(client, {})[request.number] = request
        self._bytes_by_client[client] = self._bytes_by_client.get(client, 0) + request.size_bytes
        self._deadlines.add(request)
        next_at_ms = self.next_deadline_at_ms
        if next_at_ms is None or request.deadline_at_ms < next_at_ms:
            self.next_deadline_at_ms = request.deadline_at_ms
        self._count += 1
        self.size_bytes += request.size_bytes

    def remove(self, request: Request) -> None:
        """The answer is out."""
        numbers = self._by_client[request.client]
        del numbers[request.number]
        if numbers:
            self._bytes_by_client[request.client] -= request.size_bytes
        else:
            del self._by_client[request.client], self._bytes_by_client[request.client]
        self._forget_seqs(request, (request.seq, request.former_seq))
        self.leave_slice(request)
        self._deadlines.note_answered()
        if request.deadline_at_ms == self.next_deadline_at_ms:
            self.next_deadline_at_ms = self._deadlines.next_at_ms
        self._count -= 1
        self.size_bytes -= request.size_bytes

    def numbered(self, client: PeerId, number: int) -> Request | None:
        """A client's request by the client's own number."""
        return self._by_client.get(client, {}).get(number)

    def held_by(self, client: PeerId) -> tuple[int, int]:
        """How many are of one client, and their bytes."""
        return len(self._by_client.get(client, ())), self._bytes_by_client.get(client, 0)

    def of_client(self, client: PeerId) -> list[Request]:
        """All of one client."""
        return list(self._by_client.get(client, {}).values())

    def at(self, model_id: ModelId, runs: Sequence[SeqRun]) -> list[Request]:
        """Requests that have these seqs now, each once; seqs of answered, unknown or announced-again ones give none."""
        known = self._by_seq.get(model_id, {})
        found: list[Request] = []
        for run in runs:
            if run.count <= len(known):
                seqs: Iterable[int] = range(run.first_seq, run.first_seq + run.count)
            else:  # mostly of the dead, or nonsense: whatever it says, it costs no more than what we have
                seqs = sorted(seq for seq in known if 0 <= seq - run.first_seq < run.count)
            for seq in seqs:
                request = known.get(seq)
                if request is not None and request.seq == seq:
                    found.append(request)
        return (
            found if len(runs) < 2 else list(dict.fromkeys(found))
        )  # whoever wrote them may have repeated himself

    def with_seq(self, model_id: ModelId, seq: int) -> Request | None:
        """The request that has, or had when it was granted, this seq."""
        return self._by_seq.get(model_id, {}).get(seq)

    def set_seq(self, request: Request, seq: int) -> None:
        """Announced under `seq`. A seq it had before is forgotten, unless a worker may still answer to it."""
        if request.seq != request.former_seq:
            self._forget_seqs(request, (request.seq,))
        request.seq = seq
        self._by_seq.setdefault(request.model_id, {})[seq] = request

    def keep_former(self, request: Request) -> None:
        """Its grant came to nothing, though a result may still come; none is waited for of the grant before."""
        if request.former_seq != request.seq:
            self._forget_seqs(request, (request.former_seq,))
        request.former_seq, request.former_place = request.seq, request.place

    def enter_slice(self, request: Request, place: BatchSlot) -> None:
        """Granted to a slice, and no longer to the one before."""
        if request.place is not None:
            request.stopped = (*request.stopped, request.place)[-_STOPPED_MAX:]
        self.leave_slice(request)
        request.place = place
        request.unread += 1
        self._by_slice.setdefault(place.slice_id, {})[request] = None

    def leave_slice(self, request: Request) -> None:
        """No longer there; nothing if it was on none."""
        request.are_inputs_back = False
        if request.place is None:
            return
        granted = self._by_slice[request.place.slice_id]
        del granted[request]
        if not granted:
            del self._by_slice[request.place.slice_id]
        request.place = None

    def granted_to(self, returned: InputsReturned) -> Iterator[Request]:
        """Those of the message that are granted to its batch now. Others have a fate already, or another grant."""
        for seq in returned.seqs:
            request = self.with_seq(returned.model_id, seq)
            if request is None or request.seq != seq or request.place is None:
                continue
            if request.place.is_of(returned):
                yield request

    def note_inputs_back(self, request: Request, now_ms: float, *, is_stopped: bool) -> None:
        """A granted one has no outputs, as its worker says; nothing new where that was said before.

        `is_stopped`: its scheduler has it queued again, and may take its time.
        """
        assert request.place is not None, "it is granted"
        if request.are_inputs_back:
            return
        request.are_inputs_back = True
        if not is_stopped:
            self._inputs_back.append((now_ms + SCHEDULER_SAYS_WITHIN_MS, request, request.place))
            self.inputs_back_until_ms = self._inputs_back[0][0]

    def unsaid(self, now_ms: float) -> list[Request]:
        """Those whose inputs are back for so long that their scheduler will not say what becomes of them."""
        found, waiting = [], self._inputs_back
        while waiting and waiting[0][0] <= now_ms:
            _, request, place = waiting.popleft()
            if request.are_inputs_back and request.place is place:
                found.append(request)
        self.inputs_back_until_ms = waiting[0][0] if waiting else None
        return found

    def on_slice(self, slice_id: SliceId) -> list[Request]:
        """All that are granted to a slice."""
        return list(self._by_slice.get(slice_id, ()))

    def _forget_seqs(self, request: Request, seqs: Iterable[int]) -> None:
        known = self._by_seq.get(request.model_id)
        if known is None:
            return
        for seq in seqs:
            known.pop(seq, None)
        if not known:
            del self._by_seq[request.model_id]


@dataclass(slots=True)
class _Deadlines:
    """A heap with lazy deletion. Answered requests stay in it until popped, or until they are the larger half."""

    _heap: list[tuple[float, int, Request]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)
    _answered: int = 0

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.deadline_at_ms, next(self._order), request))

    def note_answered(self) -> None:
        self._answered += 1
        if self._answered > _COMPACT_OVER and 2 * self._answered > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].stage is not RequestState.ANSWERED]
            heapq.heapify(self._heap)
            self._answered = 0

    @property
    def next_at_ms(self) -> float | None:
        while self._heap and self._heap[0][2].stage is RequestState.ANSWERED:
            heapq.heappop(self._heap)
            self._answered -= 1
        return self._heap[0][0] if self._heap else None

    def head(self) -> Request:
        return self._heap[0][2]
