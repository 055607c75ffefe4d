"""What every role's page has: its process and its loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

from fabric.clock import Clock
from roles.runtime.loop.driver import DriverStats
from roles.runtime.metrics import catalog
from roles.runtime.metrics.catalog import Metric
from roles.runtime.metrics.snapshot import MS, Buckets, Measured
from roles.runtime.metrics.usage import cpu_ms, resident_bytes
from roles.runtime.own_version import own_version

if TYPE_CHECKING:
    from roles.runtime.metrics.server import MetricsServer

_LATENESS_BITS = range(
    4, 21
)  # 16 us to 1 s, each twice the one before: edges that the driver's own buckets have
_LATENESS_BOUNDS_MS = tuple(2.0**bits * 1e-3 for bits in _LATENESS_BITS)
_NAMES_MAX = 256  # of a role's other counters
_OF_LINKS = {"local_streams": catalog.LOCAL_STREAMS, "sockets_open": catalog.SOCKETS_OPEN}
"""By how names of links' counters end."""


def page_server(address: str | None, role_id: str, clock: Clock) -> MetricsServer | None:
    """Serve a role's page from now on, where it has an address for it; raises as `MetricsServer` does."""
    if address is None:
        return None
    from roles.runtime.metrics.server import MetricsServer  # noqa: PLC0415  with asyncio: a tenth of a role's start

    return MetricsServer(address, role_id, clock)


@cache
def about_role(kind: str) -> Measured:
    """Which role it is."""
    return Measured(catalog.ROLE, (kind, own_version()), 1.0)


def about_process(stats: DriverStats) -> Iterator[Measured]:
    """The process and its loop: of one of its roles only, where it has several."""
    yield Measured(catalog.CPU, (), cpu_ms() * MS)
    yield Measured(catalog.MEMORY, (), resident_bytes())
    yield Measured(catalog.TURNS, (), stats.turns)
    yield Measured(catalog.TURN_MAX, (), stats.turn_ms_max * MS)
    yield Measured(catalog.COLLECT_MAX, (), stats.collect_ms_max * MS)
    yield Measured(catalog.TIMER_LATENESS, (), _lateness(stats))


def _lateness(stats: DriverStats) -> Buckets:
    """Its buckets joined: eight share each doubling of microseconds, from the 16th microsecond on."""
    running = list(accumulate(stats.late_buckets))
    # The first 16 are a microsecond wide; then bucket 8 * shift + 15 is the last under 2 ** (shift + 4) us.
    upto = [running[8 * (bits - 4) + 15] for bits in _LATENESS_BITS]
    counts = [high - low for low, high in zip((0, *upto), (*upto, running[-1]), strict=True)]
    return Buckets(_LATENESS_BOUNDS_MS, tuple(counts), stats.late_ms_total)


def other_events(
    counters: Mapping[str, float], levels: Mapping[str, Metric] = MappingProxyType({})
) -> Iterator[Measured]:
    """What else a role counts. What only grows is an event; what falls again is none: of the role `levels`, and what its links have now."""
    names = sorted(name for name in counters if not name.endswith(("_max", "_ms")))
    for name in names[:_NAMES_MAX]:
        of_link = next((suffix for suffix in _OF_LINKS if name.endswith(suffix)), "")
        if name in levels:
            yield Measured(levels[name], (), counters[name])
        elif of_link:  # a scheduler has one link and no name for it
            link = name.removesuffix(of_link).removesuffix("_") or "control"
            yield Measured(_OF_LINKS[of_link], (link,), counters[name])
        else:
            yield Measured(catalog.EVENTS, (name,), counters[name])
