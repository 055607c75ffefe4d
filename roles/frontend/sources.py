"""What a frontend's driver hears from. Each channel passes on only the messages that may come by it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from fabric.clock import Clock
from fabric.ids import PeerId
from fabric.link import Link, NamedTensor, Received
from fabric.messages import (
    BatchFailed,
    CancelRequest,
    Directory,
    Dropped,
    Grant,
    Infer,
    ModelsAsked,
    Outputs,
    Ping,
    Returned,
    StatusAsked,
    TensorSpec,
)
from fabric.sockets import DealerLink
from roles.core import Lost
from roles.frontend.core import FrontendCore
from roles.frontend.events import (
    Asked,
    BatchBroke,
    ClientSaid,
    Computed,
    FrontendEvent,
    SchedulerLost,
    SchedulerSaid,
    TurnEnded,
    Unannounced,
    Unpushed,
)
from roles.hearing import UNROUTABLE, LinkSource
from roles.payloads import Payloads

SCHEDULER = PeerId("scheduler")


class _Plain:
    """A link whose peers are not watched."""

    def __init__(self, link: Link, payloads: Payloads) -> None:
        self.unexpected: Counter[str] = Counter()
        self._link = link
        self._payloads = payloads

    def fileno(self) -> int:
        """The link's descriptor."""
        return self._link.fileno()

    @property
    def has_more(self) -> bool:
        """Whether a message is waiting."""
        return self._link.has_more

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def _keep(self, tensors: Sequence[NamedTensor]) -> tuple[int, tuple[TensorSpec, ...]]:
        """Bytes and description of tensors."""
        specs = tuple(TensorSpec(one.name, one.array.dtype.name, one.array.shape) for one in tensors)
        return sum(one.array.nbytes for one in tensors), specs


class ClientSource(_Plain):
    """Clients: their requests with tensors, and what else they may ask."""

    def take(self, limit: int, now_ms: float) -> Sequence[FrontendEvent]:  # noqa: ARG002  a Source's signature
        """At most `limit` messages, and the clients that a send found gone."""
        events: list[FrontendEvent] = []
        for received in self._link.receive(limit):
            match received.message:
                case Infer() as message:
                    events.append(self._asked(received, message))
                case CancelRequest() | ModelsAsked() | StatusAsked() | Ping() as message:
                    events.append(ClientSaid(received.peer, message))
                case message:
                    self.unexpected[type(message).__name__] += 1
        events.extend(Lost(peer, UNROUTABLE) for peer in self._link.take_lost())
        return events

    def _asked(self, received: Received, message: Infer) -> Asked:
        size_bytes, specs = self._keep(received.tensors)
        handle = self._payloads.put(received.tensors)
        assert handle is not None, "the core bounds the bytes, and has to see a request to refuse it"
        return Asked(received.peer, message, received.late_ms, handle, specs, size_bytes)


class OutputsSource(_Plain):
    """Workers: outputs and failed batches."""

    def take(self, limit: int, now_ms: float) -> Sequence[FrontendEvent]:  # noqa: ARG002  a Source's signature
        """At most `limit` messages."""
        events: list[FrontendEvent] = []
        for received in self._link.receive(limit):
            match received.message:
                case Outputs() as message:
                    _, specs = self._keep(received.tensors)
                    handle = self._payloads.put(received.tensors)
                    assert handle is not None, "outputs are gone again before the turn ends"
                    events.append(Computed(message, handle, specs))
                case BatchFailed() as message:
                    events.append(BatchBroke(message))
                case message:
                    self.unexpected[type(message).__name__] += 1
        return events


class SchedulerSource:
    """The scheduler: its messages, and its silence."""

    def __init__(self, link: DealerLink, clock: Clock) -> None:
        self.unexpected: Counter[str] = Counter()
        self._link = link
        self._hearing = LinkSource(link, clock)
        self._hearing.watch(SCHEDULER)

    def fileno(self) -> int:
        """The link's descriptor."""
        return self._hearing.fileno()

    @property
    def has_more(self) -> bool:
        """Whether a message is waiting."""
        return self._hearing.has_more

    @property
    def wake_at_ms(self) -> float | None:
        """The next ping, or the moment to give the scheduler up."""
        return self._hearing.wake_at_ms

    def take(self, limit: int, now_ms: float) -> Sequence[FrontendEvent]:
        """At most `limit` messages."""
        events: list[FrontendEvent] = []
        for event in self._hearing.take(limit, now_ms):
            if isinstance(event, Lost):
                events.append(SchedulerLost())
                self._link.reconnect()
                self._hearing.watch(SCHEDULER)
                continue
            match event.message:
                case Directory() | Grant() | Dropped() | Returned() as message:
                    events.append(SchedulerSaid(message))
                case message:
                    self.unexpected[type(message).__name__] += 1
        return events


class Refused:
    """What our own sends could not get rid of comes back as events."""

    def __init__(self) -> None:
        self._events: deque[Unannounced | Unpushed] = deque()

    def put(self, event: Unannounced | Unpushed) -> None:
        """Hear of it in the next turn."""
        self._events.append(event)

    def fileno(self) -> int:
        """None: it is only filled by our own turns."""
        return -1

    @property
    def has_more(self) -> bool:
        """Whether something came back."""
        return bool(self._events)

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[FrontendEvent]:  # noqa: ARG002  a Source's signature
        """At most `limit` of them."""
        return [self._events.popleft() for _ in range(min(limit, len(self._events)))]


class TurnEnd:
    """Says that a turn has ended: the last of a driver's sources, which has more while the core has gathered."""

    def __init__(self, core: FrontendCore) -> None:
        self._core = core

    def fileno(self) -> int:
        """None: a turn ends by itself."""
        return -1

    @property
    def has_more(self) -> bool:
        """Whether there is something to announce."""
        return self._core.has_gathered

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[FrontendEvent]:  # noqa: ARG002  a Source's signature
        """The one event."""
        return (TurnEnded(),)
