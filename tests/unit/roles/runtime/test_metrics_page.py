"""The page of metrics, read by the client library's own parser; and the list of metrics in docs/operate/metrics.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from fabric.errors import ConfigError
from roles.runtime.loop.driver import DriverStats
from roles.runtime.metrics import catalog
from roles.runtime.metrics.catalog import METRICS, Kind
from roles.runtime.metrics.common import about_process, other_events
from roles.runtime.metrics.histogram import SLO_FRACTIONS, Histogram, of_slo
from roles.runtime.metrics.page import page_of
from roles.runtime.metrics.server import MetricsServer
from roles.runtime.metrics.snapshot import Buckets, Measured, buckets_of

PAGE = (Path(__file__).parents[4] / "docs" / "operate" / "metrics.md").read_text(encoding="utf-8")
UNITS = ("_seconds", "_bytes", "_ratio", "_rps", "_info", "_watts", "_hertz", "_celsius")
COUNTED = {  # what is a number of things, and needs no unit
    "tenuto_requests_pending",
    "tenuto_frontend_ready",
    "tenuto_frontend_shards_linked",
    "tenuto_frontend_tasks_pending",
    "tenuto_frontend_sockets_open",
    "tenuto_agent_ready",
    "tenuto_local_streams",
    "tenuto_batch_size",
    "tenuto_queue_requests",
    "tenuto_replicas",
    "tenuto_model_gpus_advised",
    "tenuto_gpus",
    "tenuto_gpus_advised",
    "tenuto_slices",
    "tenuto_frontends",
    "tenuto_scheduler_active",
    "tenuto_scheduler_epoch",
    "tenuto_scheduler_agents_granted",
    "tenuto_scheduler_standbys",
    "tenuto_gpu_throttled",
    "tenuto_workers",
    "tenuto_gateway_ready",
    "tenuto_gateway_under_way",
    "tenuto_gateway_connections",
    "tenuto_gateway_grpc_under_way",
}


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in read_text(page.decode())
        for sample in family.samples
    }


def test_a_histogram_counts_what_is_at_a_bound_below_it_and_adds_up() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.note(value)
    page, _ = page_of("frontend-0", [Measured(catalog.LATENCY, ("m",), buckets_of(histogram))])
    name, labels = catalog.LATENCY.name, (("model", "m"), ("role_id", "frontend-0"))
    found = samples(page)
    assert [found[f"{name}_bucket", (("le", le), *labels)] for le in ("0.001", "0.002", "+Inf")] == [2, 4, 5]
    assert found[f"{name}_count", labels] == 5
    assert found[f"{name}_sum", labels] == pytest.approx(0.008)


def test_buckets_are_parts_of_the_slo_and_one_ends_at_it() -> None:
    assert 25.0 in of_slo(25.0, SLO_FRACTIONS).bounds
    assert list(SLO_FRACTIONS) == sorted(SLO_FRACTIONS)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_both_formats_of_prometheus_are_read_by_its_own_parsers(accept: str) -> None:
    snapshot = [
        Measured(
            one,
            tuple("x" for _ in one.labels),
            Buckets((1.0,), (1, 2), 3.0) if one.kind is Kind.HISTOGRAM else 1.0,
        )
        for one in METRICS
    ]
    page, content_type = page_of("role", snapshot, accept)
    read = read_openmetrics if "openmetrics" in content_type else read_text
    found = {family.name for family in read(page.decode())}
    assert found == {metric.name.removesuffix("_total") for metric in METRICS}


@pytest.mark.parametrize("version", ["abc", "", "1", "1.x", "-1", "1.0.0.0.0", "9" * 5000, "é"])
def test_a_reader_that_asks_for_no_known_format_gets_one(version: str) -> None:
    accept = f"application/openmetrics-text; version={version}; escaping=nonsense"
    page, content_type = page_of("role", [Measured(catalog.MEMORY, (), 1.0)], accept)
    assert b"tenuto_process_resident_memory_bytes" in page
    assert "text" in content_type


def test_names_have_base_units_and_counters_say_that_they_are() -> None:
    for metric in METRICS:
        assert metric.name.startswith("tenuto_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.kind is Kind.COUNTER or metric.name.endswith(UNITS) or metric.name in COUNTED
        assert "_ms" not in metric.name
        assert set(metric.shown_by) <= set(catalog.ROLE_KINDS)
        assert metric.help.endswith(".")


def test_how_late_timers_were_is_counted_at_the_right_bounds() -> None:
    stats = DriverStats()
    for late_ms in (0.010, 0.015, 0.020, 0.031, 0.5, 3.0, 5_000.0):
        stats.note_lateness(late_ms)
    (lateness,) = [one.value for one in about_process(stats) if one.metric is catalog.TIMER_LATENESS]
    assert isinstance(lateness, Buckets)
    by_bound = dict(
        zip((*(round(1e3 * bound) for bound in lateness.bounds), None), lateness.counts, strict=True)
    )
    assert {bound: count for bound, count in by_bound.items() if count} == {
        16: 2,
        32: 2,
        512: 1,
        4096: 1,
        None: 1,
    }
    assert lateness.total == pytest.approx(5_003.576)


def test_a_role_with_too_many_counters_shows_some_of_them() -> None:
    assert len(list(other_events({f"c{number}": 1.0 for number in range(1_000)}))) == 256


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    rows = re.findall(r"^\| `(tenuto_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", PAGE, re.MULTILINE)
    told = {name: (kind, labels, help_) for name, kind, labels, help_ in rows}
    assert told == {
        metric.name: (metric.kind.value, ", ".join(f"`{label}`" for label in metric.labels), metric.help)
        for metric in METRICS
    }


def test_the_page_lists_each_role_s_metrics_under_its_heading() -> None:
    for kind in catalog.ROLE_KINDS:
        section = PAGE[PAGE.index(f"## {kind}") :]
        section = section[: section.find("\n## ", 3)]
        own = {metric.name for metric in METRICS if metric.shown_by == (kind,)}
        assert set(re.findall(r"^\| `(tenuto_\w+)`", section, re.MULTILINE)) == own


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "é" * 60], ids=["empty", "long", "long when written out"])
def test_what_can_be_no_hosts_name_is_refused_as_one_that_is_not_found(host: str) -> None:
    words = f"^listen.metrics: frontend-0's page cannot be served at {host}:1: no host can have that name$"
    with pytest.raises(ConfigError, match=words):
        MetricsServer(f"{host}:1", "frontend-0")
