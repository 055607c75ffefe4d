"""Remembered requests as OpenTelemetry spans: one for each request, with one below it for each part of its ledger.

The frontends know nothing of it: what they remember is read and exported by whoever wants spans (`tenuto spans`). Moments are
put on the time of day when they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

from roles.observability.remembered import RequestSeen

_STAGES: Final = ("preprocess", "held", "waited", "transfer", "queue", "gpu", "return")
_FLUSHED_AT: Final = 128
"""Requests, each of up to eight spans: half of what the library's queue holds."""


class _Heeding(SpanExporter):
    """Another exporter, and how many requests it could not export: the library only writes a line of log."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.refused = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.refused += sum(span.parent is None for span in spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class Spans:
    """Exports requests. `offset_ms`, where it is asked for: from the requests' clock to the time of day."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "tenuto"}))
        self._exporter = _Heeding(exporter)
        self._processor = BatchSpanProcessor(self._exporter)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("tenuto")

    @classmethod
    def to(cls, endpoint: str) -> Spans:
        """By OTLP over HTTP, such as to http://localhost:4318/v1/traces."""
        return cls(OTLPSpanExporter(endpoint=endpoint))

    def export(self, requests: Collection[RequestSeen], offset_ms: float) -> int:
        """Those, in the order in which they ended; how many."""
        for count, request in enumerate(sorted(requests, key=lambda one: one.ended_at_ms), 1):
            self._span(request, offset_ms)
            if count % _FLUSHED_AT == 0:  # more than its queue holds would be dropped
                self._processor.force_flush()
        return len(requests)

    def refused(self) -> int:
        """Requests that the collector has not taken, of all that were exported until now."""
        self._processor.force_flush()
        return self._exporter.refused

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _span(self, request: RequestSeen, offset_ms: float) -> None:
        record, ledger = request.record, request.ledger
        at_ms = request.asked_at_ms + offset_ms
        span = self._tracer.start_span(
            f"infer {record.model_id}",
            kind=SpanKind.SERVER,
            start_time=_ns(at_ms),
            attributes={
                "tenuto.model": record.model_id,
                "tenuto.request_id": record.request_id,
                "tenuto.outcome": record.outcome,
                "tenuto.budget_ms": record.budget_ms,
                "tenuto.slice": ledger.slice_id,
                "tenuto.batch_size": ledger.batch_size,
                "tenuto.dispatch_reason": ledger.reason,
                "tenuto.tries": record.tries,
            },
        )
        if not request.is_good:
            span.set_status(Status(StatusCode.ERROR, f"{record.outcome}: {record.reason}".rstrip(": ")))
        context = set_span_in_context(span)
        for stage in _STAGES:
            stage_ms: float = getattr(ledger, f"{stage}_ms")
            if stage_ms > 0:
                part = self._tracer.start_span(stage, context, start_time=_ns(at_ms))
                at_ms += stage_ms
                part.end(end_time=_ns(at_ms))
        span.end(end_time=_ns(request.ended_at_ms + offset_ms))


def _ns(at_ms: float) -> int:
    """To the microsecond: a double has no more for the time of day."""
    return round(at_ms * 1e3) * 1_000
