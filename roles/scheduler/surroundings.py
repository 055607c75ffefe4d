"""What a scheduler's process has of its own: clock, links, name, addresses, and the processes that it asks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeVar

from msgspec import Struct, field

from fabric.clock import Clock, MonotonicClock
from fabric.ids import BatchId, Incarnation, new_incarnation
from fabric.json_files import write_whole
from fabric.messages import PlanAsked, RehearsalAsked
from fabric.transport import ZMQ, Transport
from roles.config.cluster import ClusterConfig
from roles.runtime.core import Heard
from roles.runtime.loop.sources import Source
from roles.scheduler.planning.plan_launcher import PlanLauncher
from roles.scheduler.rehearsing.rehearsal_launcher import RehearsalLauncher

_BATCH_ID_BITS: Final = 53  # what the wire takes
_BATCHES_BITS: Final = 33  # of these: as many batches as a scheduler ever counts
AskedT_contra = TypeVar("AskedT_contra", contravariant=True)


class Asking(Source[Heard], Protocol[AskedT_contra]):
    """Has one question at a time answered in another process, whose answer is an event of the loop."""

    def start(self, asked: AskedT_contra) -> None:
        """Begin."""
        ...

    def abandon(self) -> None:
        """End what runs; its answer is nobody's."""
        ...

    def close(self) -> None:
        """End what runs, and give everything back."""
        ...


def drawn_batch_id() -> BatchId:
    """The first one. Drawn, so that no batch of a former scheduler that still runs has the same."""
    return BatchId((secrets.randbits(_BATCH_ID_BITS - _BATCHES_BITS) << _BATCHES_BITS) + 1)


class SchedulerSurroundings(Struct, frozen=True):
    """What a process has of its own; tests may know better."""

    clock: Clock = field(default_factory=MonotonicClock)
    incarnation: Incarnation = field(default_factory=new_incarnation)
    transport: Transport = ZMQ
    make_planner: Callable[[float], Asking[PlanAsked]] = PlanLauncher
    """Of the seconds that a plan may take."""
    make_rehearser: Callable[[], Asking[RehearsalAsked]] = RehearsalLauncher
    first_batch_id: Callable[[], BatchId] = drawn_batch_id
    write_file: Callable[[Path, str], None] = write_whole


class Recording(Struct, frozen=True):
    """Where to keep a journal, and how large it may become."""

    path: Path
    bytes_max: int


class SchedulerAddresses(Struct, frozen=True):
    """`control`: where this scheduler serves beside its ipc address and `listen.control`.

    `elsewhere`: of the schedulers on other hosts, by role id; those of this host are found in the run directory.
    """

    control: Sequence[str] = ()
    elsewhere: Mapping[str, Sequence[str]] = field(default_factory=dict)
    metrics: str | None = None
    """HOST:PORT of its page of metrics; None: it has none."""


HERE_ALONE = SchedulerAddresses()


def configured_addresses(config: ClusterConfig, number: int) -> list[str]:
    """Where the file says; scheduler i listens i ports above, as frontends do, and 0 stays 0."""
    control = config.listen.control
    if control is None:
        return []
    host, _, port = control.rpartition(":")
    return [control if port == "0" or not number else f"{host}:{int(port) + number}"]
