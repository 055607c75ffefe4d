"""Prometheus rules of a cluster: goodput and bad rates by model, and when somebody should be told.

SLOs alarm by burn rates over several windows (Google, The Site Reliability Workbook, chapter 5, table 5-8): a long window
says that much of the allowance is gone, a short one that it is going on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from roles.config.cluster import ClusterConfig
from roles.observability.units import shown_ms
from roles.runtime.metrics import catalog

OBJECTIVE_PERCENT: Final = 99.0
BAD_MIN: Final = 10
"""Bad requests in the long window that an alarm needs: of a model that nobody uses one late answer is a large part."""
OUTAGE: Final = 0.9
"""A part of requests that is bad enough for every alarm: more than all cannot be, whatever an objective permits."""


@dataclass(frozen=True, slots=True)
class Burn:
    """Where the allowance is used up `rate` times as fast as the objective permits, in both windows."""

    long: str
    short: str
    rate: float
    severity: str


BURNS: Final = (
    Burn("1h", "5m", 14.4, "page"),
    Burn("6h", "30m", 6.0, "page"),
    Burn("1d", "2h", 3.0, "ticket"),
    Burn("3d", "6h", 1.0, "ticket"),
)
_WINDOWS: Final = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
_JOB: Final = "tenuto-"
"""So jobs of Prometheus that scrape roles begin; behind it comes the kind of role."""


def served(window: str, extra: str = "", by: str = "model") -> str:
    """Requests a second that count, as an expression."""
    faults = "|".join(catalog.CLIENT_FAULTS)
    return f'sum by ({by}) (rate({catalog.REQUESTS.name}{{outcome!~"{faults}"{extra}}}[{window}]))'


def good(window: str, by: str = "model") -> str:
    """Goodput, as an expression."""
    return f'sum by ({by}) (rate({catalog.REQUESTS.name}{{outcome="good"}}[{window}]))'


def rules_of(config: ClusterConfig, objective_percent: float = OBJECTIVE_PERCENT) -> dict[str, Any]:
    """The rule file as a document. `objective_percent`: of each model's requests, so many shall be good."""
    return {
        "groups": [
            {"name": "tenuto-rates", "interval": "15s", "rules": list(_rates())},
            {"name": "tenuto-slo", "rules": list(_burns(config, 1 - objective_percent / 100))},
            {"name": "tenuto-cluster", "rules": list(_cluster(config))},
        ]
    }


def _rates() -> Iterator[dict[str, Any]]:
    yield {"record": "tenuto:requests_rps:rate1m", "expr": served("1m")}
    yield {"record": "tenuto:goodput_rps:rate1m", "expr": good("1m")}
    for window in _WINDOWS:
        # A model of which nothing was good has no series of that outcome: its bad rate is 1 all the same.
        expression = f"1 - ({good(window)} or 0 * {served(window)}) / ({served(window)} > 0)"
        yield {"record": f"tenuto:bad_ratio:rate{window}", "expr": expression}
    # By model those of applications would count once more for each request of a stage: here it is what clients asked of frontends.
    requests = f'sum(rate({catalog.EVENTS.name}{{event=~"accepted|refused_at_door"}}[5m])) > 0'
    yield {
        "record": "tenuto:cpu_seconds_per_request:rate5m",
        "expr": (
            f"sum by (role) (rate({catalog.CPU.name}[5m]) * on (role_id) group_left (role)"
            f" max by (role_id, role) ({catalog.ROLE.name}))"
            f" / scalar({requests})"
        ),
    }
    yield {
        "record": "tenuto:cpu_seconds_per_request:rate5m",
        "expr": f"sum(rate({catalog.WORKER_CPU.name}[5m])) / scalar({requests})",
        "labels": {"role": "worker"},
    }


def _burns(config: ClusterConfig, allowance: float) -> Iterator[dict[str, Any]]:
    slos = "; ".join(f"{model.name} {shown_ms(model.slo_ms)}" for model in config.models[:20])
    for burn in BURNS:
        rate = min(burn.rate, OUTAGE / allowance)
        over = f"{rate:.3g} * {allowance:.6g}"
        bad = f"({served(burn.long)} - ({good(burn.long)} or 0 * {served(burn.long)}))"
        yield {
            "alert": "TenutoSloBurns",
            "expr": (
                f"tenuto:bad_ratio:rate{burn.long} > {over} and tenuto:bad_ratio:rate{burn.short} > {over}"
                f" and {bad} * {_seconds(burn.long)} > {BAD_MIN}"
            ),
            "labels": {"severity": burn.severity, "window": burn.long},
            "annotations": {
                "summary": (
                    "{{ $labels.model }} misses its SLO: {{ $value | humanizePercentage }} bad"
                    f" over {burn.long}, {rate:.3g} times what is allowed"
                ),
                "description": f"tenuto why {{{{ $labels.model }}}} says why. SLOs when this file was written: {slos}.",
            },
        }


def _cluster(config: ClusterConfig) -> Iterator[dict[str, Any]]:
    yield _alert(
        "TenutoNoActiveScheduler",
        f"sum({catalog.ACTIVE.name}) < {config.shards} or absent({catalog.ACTIVE.name})",
        "10s",
        "page",
        "no scheduler is active, so no request is served"
        if config.shards == 1
        else f"of {config.shards} shards one has no active scheduler, so no request for its models is served",
    )
    yield _alert(
        "TenutoRoleAway",
        f'up{{job=~"{_JOB}.+"}} == 0',  # its own series are gone with it, so that no other rule can tell
        "15s",
        "page",
        "{{ $labels.instance }} ({{ $labels.job }}) does not answer: the role is down, stopped, or out of reach",
    )
    yield _alert(
        "TenutoRoleStuck",
        f"{catalog.SNAPSHOT_AGE.name} > 5",
        "30s",
        "page",
        "the loop of {{ $labels.role_id }} does not answer",
    )
    yield _alert(
        "TenutoFrontendUnready",
        f"{catalog.FRONTEND_READY.name} == 0",
        "10s",
        "page",
        "{{ $labels.role_id }} has no scheduler",
    )
    yield _alert(
        "TenutoGatewayUnready",
        f"{catalog.GATEWAY_READY.name} == 0",
        "10s",
        "page",
        "{{ $labels.role_id }} has no frontend that takes requests",
    )
    yield _alert(
        "TenutoModelNotHosted",
        f"max by (model) ({catalog.REPLICAS.name}) == 0",
        "1m",
        "page",
        "no ready slice hosts {{ $labels.model }}",
    )
    yield _alert(
        "TenutoTooFewGpus",
        f"max({catalog.GPUS_ADVISED.name} > {catalog.GPUS.name})",  # of each shard: no other's GPUs help it
        "10m",
        "ticket",
        "the load asks for {{ $value }} GPUs, more than there are",
    )
    yield _alert(
        "TenutoSliceSlow",
        f"max by (slice, model) ({catalog.SLICE_SLOWDOWN.name}) > 1.25",
        "5m",
        "ticket",
        "{{ $labels.model }} takes {{ $value | humanize }} times its profile on {{ $labels.slice }}",
    )
    yield _alert(
        "TenutoTimersLate",
        f"histogram_quantile(0.99, sum by (role_id, le) (rate({catalog.TIMER_LATENESS.name}_bucket[5m]))) > 0.005",
        "5m",
        "ticket",
        "timers of {{ $labels.role_id }} are late by {{ $value | humanizeDuration }} (p99): its host has too little CPU",
    )
    yield _alert(
        "TenutoMovesFail",
        f'sum(increase({catalog.MOVES.name}{{outcome="failed"}}[30m])) > 2',
        "0s",
        "ticket",
        "the plan changes, and its moves fail: see tenuto status",
    )
    standbys = config.schedulers - config.shards
    if standbys > 0:
        yield _alert(
            "TenutoStandbyMissing",
            f"sum({catalog.STANDBYS.name} and {catalog.ACTIVE.name} == 1) < {standbys}",
            "1m",
            "ticket",
            "a scheduler that should stand by is not there",
        )


def _alert(name: str, expression: str, lasting: str, severity: str, summary: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }


def _seconds(window: str) -> int:
    return int(window[:-1]) * {"m": 60, "h": 3_600, "d": 86_400}[window[-1]]


def scrape_config(targets: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A Prometheus configuration that scrapes these: (kind of role, HOST:PORT)."""
    kinds = dict.fromkeys(kind for kind, _ in targets)
    return {
        "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
        "rule_files": ["tenuto-rules.yml"],
        "scrape_configs": [
            {
                "job_name": f"{_JOB}{kind}",
                "static_configs": [{"targets": [target for its, target in targets if its == kind]}],
            }
            for kind in kinds
        ],
    }
