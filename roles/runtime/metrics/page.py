"""A snapshot as the text that Prometheus reads, written by its own client library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from roles.runtime.metrics.catalog import Kind, Metric
from roles.runtime.metrics.snapshot import Buckets, Measured


class _Once(Collector):
    """A registry's collector that has these families."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def describe(self) -> Iterable[Family]:
        """Nothing: the families are not looked at before they are asked for."""
        return ()

    def collect(self) -> Iterable[Family]:
        """All of them."""
        return self._families


def page_of(role_id: str, snapshot: Iterable[Measured], accept: str = "") -> tuple[bytes, str]:
    """The page and its content type, in the format that the reader asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(list(_families(role_id, snapshot))))
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is none
        encode, content_type = choose_encoder("")
    page: bytes = encode(registry)
    return page, content_type


def _families(role_id: str, snapshot: Iterable[Measured]) -> Iterator[Family]:
    by_metric: dict[Metric, list[Measured]] = {}
    for one in snapshot:
        by_metric.setdefault(one.metric, []).append(one)
    for metric, series in by_metric.items():
        labels = ("role_id", *metric.labels)
        match metric.kind:
            case Kind.HISTOGRAM:
                histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
                for one in series:
                    assert isinstance(one.value, Buckets), metric.name
                    histogram.add_metric((role_id, *one.labels), *_cumulative(one.value))
                yield histogram
            case Kind.COUNTER:
                counter = CounterMetricFamily(metric.name, metric.help, labels=labels)
                for one in series:
                    counter.add_metric((role_id, *one.labels), _number(one))
                yield counter
            case Kind.GAUGE:
                gauge = GaugeMetricFamily(metric.name, metric.help, labels=labels)
                for one in series:
                    gauge.add_metric((role_id, *one.labels), _number(one))
                yield gauge


def _number(one: Measured) -> float:
    assert not isinstance(one.value, Buckets), one.metric.name
    return one.value


def _cumulative(buckets: Buckets) -> tuple[list[tuple[str, float]], float]:
    unit = buckets.unit
    bounds = [*(f"{bound * unit:.6g}" for bound in buckets.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(buckets.counts)), strict=True)), buckets.total * unit
