"""A gateway's figures as metrics (docs/operate/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roles.gateway.statistics import Statistics
from roles.runtime.metrics import catalog
from roles.runtime.metrics.common import about_role
from roles.runtime.metrics.snapshot import MS, Measured
from roles.runtime.metrics.usage import cpu_ms, resident_bytes

_OF_COUNTERS = (
    (catalog.GATEWAY_READY, "is_ready"),
    (catalog.GATEWAY_UNDER_WAY, "under_way"),
    (catalog.GATEWAY_CONNECTIONS, "http_connections"),
    (catalog.GATEWAY_BODIES, "http_bytes_held"),
    (catalog.GATEWAY_HTTP, "http_requests"),
    (catalog.GATEWAY_REFUSED, "http_refused"),
    (catalog.GATEWAY_DEFECTS, "http_defects"),
    (catalog.GATEWAY_GRPC, "grpc_calls"),
    (catalog.GATEWAY_GRPC_UNDER_WAY, "grpc_under_way"),
    (catalog.GATEWAY_GRPC_UNREADABLE, "grpc_unreadable"),
)


def measured_gateway(statistics: Statistics, counters: Mapping[str, float]) -> Iterator[Measured]:
    """All of it. `counters`: as its status has them."""
    yield about_role("gateway")
    yield Measured(catalog.CPU, (), cpu_ms() * MS)
    yield Measured(catalog.MEMORY, (), resident_bytes())
    for metric, name in _OF_COUNTERS:
        yield Measured(metric, (), counters[name])
    for code, count in sorted(statistics.failures.items()):
        yield Measured(catalog.GATEWAY_FAILURES, (code,), count)
    for model, seen in statistics.by_model:
        yield Measured(catalog.GATEWAY_REQUESTS, (model, "success"), seen.success.count)
        yield Measured(catalog.GATEWAY_REQUESTS, (model, "fail"), seen.fail.count)
        yield Measured(catalog.GATEWAY_SECONDS, (model,), seen.success.ms * MS)
