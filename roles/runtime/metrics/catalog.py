"""Every metric that Tenuto has. `docs/operate/metrics.md` shows this list, and a page has nothing that is not in it.

Names follow Prometheus' rules: base units (seconds, bytes), `_total` for what only grows, ratios from 0 to 1. Labels are
of what an operator configured, so that no client can add a time series: models, slices, GPUs, workers, and fixed words.
"""

from __future__ import annotations

import enum
from typing import Final

from msgspec import Struct


class Kind(enum.StrEnum):
    """What a metric's value does."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(Struct, frozen=True):
    """`labels` beside `role_id`, which every time series has. `shown_by`: the kinds of role that have it."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    shown_by: tuple[str, ...]


_LOOPED: Final = ("frontend", "scheduler", "node-agent")
"""Whose loop is ours."""
ROLE_KINDS: Final = (*_LOOPED, "gateway")
_KNOWN: dict[str, Metric] = {}


def _metric(kind: Kind, name: str, labels: str, help_: str, *shown_by: str) -> Metric:
    assert name not in _KNOWN, name
    metric = _KNOWN[name] = Metric(f"tenuto_{name}", kind, tuple(labels.split()), help_, shown_by)
    return metric


def _counter(name: str, labels: str, help_: str, *shown_by: str) -> Metric:
    return _metric(Kind.COUNTER, f"{name}_total", labels, help_, *shown_by)


def _gauge(name: str, labels: str, help_: str, *shown_by: str) -> Metric:
    return _metric(Kind.GAUGE, name, labels, help_, *shown_by)


def _histogram(name: str, labels: str, help_: str, *shown_by: str) -> Metric:
    return _metric(Kind.HISTOGRAM, name, labels, help_, *shown_by)


# ---------------------------------------------------------------- every role

ROLE = _gauge("role_info", "role version", "1. Which role this is, and of which version.", *ROLE_KINDS)
SNAPSHOT_AGE = _gauge(
    "snapshot_age_seconds",
    "",
    "How old the figures on this page are: more than a second where the role's loop does not answer.",
    *_LOOPED,
)
CPU = _counter(
    "process_cpu_seconds", "", "CPU time of the process, user and system, all its threads.", *ROLE_KINDS
)
MEMORY = _gauge("process_resident_memory_bytes", "", "Resident memory of the process.", *ROLE_KINDS)
TURNS = _counter("loop_turns", "", "Turns of the process's loop.", *_LOOPED)
TURN_MAX = _gauge("loop_turn_max_seconds", "", "Longest turn since the start.", *_LOOPED)
COLLECT_MAX = _gauge(
    "loop_collect_max_seconds", "", "Longest pause for collecting garbage since the start.", *_LOOPED
)
TIMER_LATENESS = _histogram(
    "timer_lateness_seconds", "", "How long after its moment a timer was handled.", *_LOOPED
)
EVENTS = _counter(
    "events",
    "event",
    "Other things that a role counts, under the names that `tenuto status --json` has them.",
    *_LOOPED,
)
LOCAL_STREAMS = _gauge(
    "local_streams",
    "link",
    "Peers that a link of a frontend or scheduler speaks with by Unix sockets now.",
    "frontend",
    "scheduler",
)

# ---------------------------------------------------------------- frontend

REQUESTS = _counter(
    "requests",
    "model outcome",
    "Requests that have had their answer. outcome: good (answered within the budget), late (answered after it), abandoned"
    " (its client went away), or the code of its refusal.",
    "frontend",
)
LATENCY = _histogram(
    "request_latency_seconds",
    "model",
    "From the receipt of a request at the frontend to its answer there; buckets are parts of the model's SLO.",
    "frontend",
)
HELD = _histogram(
    "request_held_seconds",
    "model",
    "What the scheduler chose to wait, so that a batch grows; of answered requests.",
    "frontend",
)
WAITED = _histogram(
    "request_waited_seconds",
    "model",
    "What requests were forced to wait: no slice was free, or a grant came to nothing; of answered requests.",
    "frontend",
)
STAGES = _counter(
    "request_stage_seconds",
    "model stage",
    "The ledgers of answered requests, added up. stage: preprocess, held, waited, transfer, queue, gpu, return.",
    "frontend",
)
PENDING = _gauge("requests_pending", "", "Requests without an answer.", "frontend")
PENDING_BYTES = _gauge("requests_pending_bytes", "", "Their payload.", "frontend")
MARGIN = _gauge(
    "return_margin_seconds",
    "model",
    "What is kept back of each budget for the way back to the client.",
    "frontend",
)
FRONTEND_READY = _gauge(
    "frontend_ready", "", "1 while a scheduler lists this frontend, so that requests are served.", "frontend"
)
SHARDS_LINKED = _gauge(
    "frontend_shards_linked", "", "Shards of whose scheduler it has a connection now.", "frontend"
)
TASKS_PENDING = _gauge(
    "frontend_tasks_pending",
    "",
    "Requests of stages without an answer; only where there are applications.",
    "frontend",
)
SOCKETS_OPEN = _gauge(
    "frontend_sockets_open", "link", "ZeroMQ sockets to workers that are open now.", "frontend"
)

CLIENT_FAULTS: Final = (
    "InvalidInput",
    "TooLarge",
    "ModelNotFound",
    "Unauthorised",
    "Cancelled",
    "abandoned",
)
"""Outcomes of requests that say nothing about how well a model is served."""

# ---------------------------------------------------------------- scheduler

BATCHES = _counter(
    "batches",
    "model reason",
    "Batches that were sent. reason: why each left then (docs/results/disciplines.md).",
    "scheduler",
)
BATCH_SIZE = _histogram("batch_size", "model", "Requests in a batch that was sent.", "scheduler")
DROPS = _counter(
    "requests_dropped",
    "model reason",
    "Requests that the scheduler gave up. reason: expired, batch (to keep the size of the batch behind), share (more than"
    " the model's share was asked), no_replica, removed.",
    "scheduler",
)
RETURNS = _counter(
    "requests_returned", "model", "Requests granted that did not run, and were announced again.", "scheduler"
)
QUEUE = _gauge("queue_requests", "model", "Requests that wait for a batch.", "scheduler")
REPLICAS = _gauge("replicas", "model", "Ready slices that host the model.", "scheduler")
SLO = _gauge("slo_seconds", "model", "The model's SLO.", "scheduler")
RATE = _gauge(
    "model_rate_rps",
    "model",
    "Requests per second: the highest mean of 5 s in the last 30 s, by which plans go.",
    "scheduler",
)
PLANNED_RATE = _gauge(
    "model_planned_rate_rps", "model", "Requests per second that the present plan is for.", "scheduler"
)
MODEL_ADVICE = _gauge(
    "model_gpus_advised",
    "model",
    "Scale advice: GPUs that the model lacks, or (negative) leaves idle.",
    "scheduler",
)
GPUS = _gauge("gpus", "", "GPUs that the plan may use.", "scheduler")
GPUS_ADVISED = _gauge("gpus_advised", "", "Scale advice: GPUs that the load asks for.", "scheduler")
SLICES = _gauge("slices", "state", "Slices of the plan by state.", "scheduler")
SLICE_BUSY = _counter(
    "slice_busy_seconds",
    "slice model",
    "Run time of the batches that ended on a slice, as workers measured it.",
    "scheduler",
)
SLICE_BATCHES = _counter("slice_batches", "slice status", "Batches by how they ended.", "scheduler")
SLICE_SLOWDOWN = _gauge(
    "slice_slowdown_ratio",
    "slice model",
    "Measured run time by the profile's, with a margin; shown where they differ.",
    "scheduler",
)
GPU_BUSY = _counter(
    "gpu_busy_seconds",
    "node gpu",
    "Run time of batches on a GPU, weighted by their slices' shares; over one second a second where slices without a share"
    " run at once.",
    "scheduler",
)
GUARD = _gauge(
    "dispatch_guard_seconds",
    "",
    "How much earlier batches are sent because timers are late (p99).",
    "scheduler",
)
FRONTENDS = _gauge("frontends", "", "Frontends that are connected.", "scheduler")
ACTIVE = _gauge("scheduler_active", "", "1: it is the active scheduler; 0: it stands by.", "scheduler")
EPOCH = _gauge("scheduler_epoch", "", "The epoch that was granted last.", "scheduler")
TAKEOVERS = _counter("scheduler_takeovers", "", "How often it became the active one.", "scheduler")
LEASES = _gauge("scheduler_agents_granted", "", "Agents that hold its lease now.", "scheduler")
STANDBYS = _gauge("scheduler_standbys", "", "Standbys that it is connected with.", "scheduler")
MOVES = _counter("plan_moves", "outcome", "Moves of slices that were done, or failed.", "scheduler")

# ---------------------------------------------------------------- node agent

AGENT_READY = _gauge(
    "agent_ready",
    "",
    "1 since a scheduler has told it what to run; 0: none has since its start.",
    "node-agent",
)
GPU_SENSOR_BUSY = _gauge(
    "gpu_sensor_busy_ratio",
    "gpu",
    "Of the last sampling period, the part in which a kernel ran.",
    "node-agent",
)
GPU_MEMORY = _gauge("gpu_memory_used_bytes", "gpu", "Memory in use on the device.", "node-agent")
GPU_MEMORY_TOTAL = _gauge("gpu_memory_bytes", "gpu", "Memory of the device.", "node-agent")
GPU_POWER = _gauge("gpu_power_watts", "gpu", "Power that the device takes.", "node-agent")
GPU_CLOCK = _gauge("gpu_sm_clock_hertz", "gpu", "Clock of its multiprocessors.", "node-agent")
GPU_TEMPERATURE = _gauge("gpu_temperature_celsius", "gpu", "Its temperature.", "node-agent")
GPU_THROTTLED = _gauge(
    "gpu_throttled", "gpu", "1 while something keeps its clocks lower than they could be.", "node-agent"
)
WORKERS = _gauge("workers", "", "Worker processes that answered when this page was asked for.", "node-agent")
WORKER_CPU = _counter("worker_cpu_seconds", "worker", "CPU time of a worker process.", "node-agent")
WORKER_MEMORY = _gauge(
    "worker_resident_memory_bytes", "worker", "Resident memory of a worker process.", "node-agent"
)
WORKER_TURNS = _counter("worker_loop_turns", "worker", "Turns of a worker's loop.", "node-agent")
WORKER_LATENESS = _gauge(
    "worker_timer_lateness_seconds",
    "worker quantile",
    "How late a worker's timers were since its start. quantile: 0.5, 0.99, 1.",
    "node-agent",
)
WORKER_EVENTS = _counter(
    "worker_events",
    "worker event",
    "Other things that a worker counts, under the names that `tenuto status --json` has them.",
    "node-agent",
)

# ---------------------------------------------------------------- gateway

GATEWAY_READY = _gauge("gateway_ready", "", "1 while a frontend is there that wants requests.", "gateway")
GATEWAY_REQUESTS = _counter(
    "gateway_requests",
    "model outcome",
    "Inferences that this gateway answered, each one however many rows it has. outcome: success (with outputs, in time or not), fail.",
    "gateway",
)
GATEWAY_SECONDS = _counter(
    "gateway_request_seconds",
    "model",
    "What inferences with outputs took here, from the moment that their requests were whole to the answer.",
    "gateway",
)
GATEWAY_FAILURES = _counter(
    "gateway_failures", "code", "Inferences without outputs by code, of all models.", "gateway"
)
GATEWAY_UNDER_WAY = _gauge("gateway_under_way", "", "Inferences without an answer.", "gateway")
GATEWAY_CONNECTIONS = _gauge("gateway_connections", "", "Open HTTP connections.", "gateway")
GATEWAY_BODIES = _gauge(
    "gateway_bodies_bytes",
    "",
    "Bodies that are held, of HTTP and gRPC, and answers that are not read yet.",
    "gateway",
)
GATEWAY_HTTP = _counter("gateway_http_requests", "", "HTTP requests that were whole.", "gateway")
GATEWAY_REFUSED = _counter(
    "gateway_http_refused", "", "HTTP requests that were not: no HTTP, too large, too slow.", "gateway"
)
GATEWAY_DEFECTS = _counter(
    "gateway_http_defects",
    "",
    "HTTP requests that were refused because reading them failed by a defect of ours; the log has the first.",
    "gateway",
)
GATEWAY_GRPC = _counter("gateway_grpc_calls", "", "gRPC calls and requests of streams.", "gateway")
GATEWAY_GRPC_UNDER_WAY = _gauge(
    "gateway_grpc_under_way",
    "",
    "gRPC calls under way, ServerLive and ServerReady aside; a stream is one.",
    "gateway",
)
GATEWAY_GRPC_UNREADABLE = _counter(
    "gateway_grpc_unreadable",
    "",
    "Times that gRPC read a value of a call's metadata, or a call's path, that is no UTF-8; none is in a log.",
    "gateway",
)

METRICS: Final = tuple(_KNOWN.values())
