"""What a frontend's driver hears from: each channel's messages as events. The core's check says which may come by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fabric.clock import Clock
from fabric.inproc import ServerLink
from fabric.link import Link, NamedTensor, Received
from fabric.messages import Infer, Outputs, TensorSpec
from fabric.tensors import dtype_name
from roles.frontend.events import (
    Asked,
    ClientSaid,
    Computed,
    FrontendEvent,
    SchedulerLost,
    SchedulerSaid,
    Unannounced,
    Unpushed,
    WorkerSaid,
)
from roles.runtime.core import SCHEDULER, Heard, Lost
from roles.runtime.payloads import Payloads
from roles.runtime.server_connection import ServerSource
from roles.runtime.sources import UNROUTABLE, PlainSource, Translated


class ClientSource(PlainSource[FrontendEvent]):
    """Clients: their requests with tensors, what else they may ask, and those that a send found gone."""

    def __init__(self, link: Link, payloads: Payloads) -> None:
        super().__init__(link, self._said, lambda peer: Lost(peer, UNROUTABLE))
        self._payloads = payloads

    def _said(self, received: Received) -> FrontendEvent:
        match received.message:
            case Infer() as message:
                specs, size_bytes = _described(received.tensors)
                handle = self._payloads.put(received.tensors)
                assert handle is not None, "the core bounds the bytes, and has to see a request to refuse it"
                return Asked(received.peer, message, received.late_ms, handle, specs, size_bytes)
            case message:
                return ClientSaid(received.peer, message)


class OutputsSource(PlainSource[FrontendEvent]):
    """Workers: outputs and failed batches."""

    def __init__(self, link: Link, payloads: Payloads) -> None:
        super().__init__(link, self._came)
        self._payloads = payloads

    def _came(self, received: Received) -> FrontendEvent:
        match received.message:
            case Outputs() as message:
                specs, _ = _described(received.tensors)
                handle = self._payloads.put(received.tensors)
                assert handle is not None, "outputs are gone again before the turn ends"
                return Computed(message, handle, specs)
            case message:
                return WorkerSaid(message)


class SchedulerSource(Translated[Heard | Lost, FrontendEvent]):
    """The scheduler: its messages, and its silence."""

    def __init__(self, link: ServerLink, clock: Clock) -> None:
        super().__init__(ServerSource(link, SCHEDULER, clock), self._said)

    def _said(self, event: Heard | Lost) -> FrontendEvent:
        if isinstance(event, Lost):
            return SchedulerLost()
        return SchedulerSaid(event.message)


class UnsentMessages:
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


def _described(tensors: Sequence[NamedTensor]) -> tuple[tuple[TensorSpec, ...], int]:
    """What they are, and their bytes."""
    specs = tuple([TensorSpec(one.name, dtype_name(one.array.dtype), one.array.shape) for one in tensors])
    return specs, sum([one.array.nbytes for one in tensors])
