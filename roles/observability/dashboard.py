"""A Grafana dashboard of a cluster, from its configuration file: the models with their SLOs, the GPUs, the processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from roles.config.cluster import ClusterConfig, ModelConfig
from roles.observability.alert_rules import good
from roles.observability.units import shown_ms
from roles.runtime.metrics import catalog

MODELS_MAX: Final = 40
"""Models with a row of their own; the overview has all."""
_WIDTH: Final = 24
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WINDOW: Final = "$__rate_interval"
_STAGES_WORDS: Final = "where requests spend their time, in seconds a second"


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture: expressions with their legends. `mark`: a value to draw a line at."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8
    mark: float | None = None
    is_stacked: bool = False
    kind: str = "timeseries"
    most: float | None = None


def dashboard_of(config: ClusterConfig) -> dict[str, Any]:
    """The dashboard's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in _rows(config):
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": _at(0, y, _WIDTH, 1),
            }
        )
        y += 1
        x = 0
        for panel in row:
            if x + panel.width > _WIDTH:
                x, y = 0, y + 8
            panels.append(_panel(len(panels) + 1, panel, _at(x, y, panel.width, 8)))
            x += panel.width
        y += 8
    return {
        "uid": "tenuto",
        "title": "Tenuto",
        "tags": ["tenuto"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def _rows(config: ClusterConfig) -> Iterator[tuple[str, Sequence[Panel]]]:
    yield "Models", _overview(config)
    for model in config.models[:MODELS_MAX]:
        yield f"{model.name}: SLO {shown_ms(model.slo_ms)}", _model(model)
    yield "GPUs and slices", _gpus()
    yield "Processes", _processes()
    yield "Schedulers and plan", _plan()


def _overview(config: ClusterConfig) -> Sequence[Panel]:
    return (
        # A request of an application is one of its stages' models too: as one pile it would be there several times.
        Panel("goodput", "reqps", ((good(_WINDOW), "{{model}}"),), is_stacked=not config.applications),
        Panel("bad rate", "percentunit", (("tenuto:bad_ratio:rate5m", "{{model}}"),), mark=0.01),
        Panel(
            "requests that were not good, by outcome",
            "reqps",
            (
                (
                    f'sum by (outcome) (rate({catalog.REQUESTS.name}{{outcome!="good"}}[{_WINDOW}]))',
                    "{{outcome}}",
                ),
            ),
            is_stacked=True,
        ),
        Panel("queue", "short", ((f"sum by (model) ({catalog.QUEUE.name})", "{{model}}"),)),
        Panel(
            "given up by the scheduler",
            "reqps",
            ((f"sum by (model, reason) (rate({catalog.DROPS.name}[{_WINDOW}]))", "{{model}} {{reason}}"),),
        ),
        Panel(
            "GPUs advised, of those there are",
            "short",
            ((f"sum({catalog.GPUS_ADVISED.name})", "advised"), (f"sum({catalog.GPUS.name})", "there are")),
        ),
    )


def _model(model: ModelConfig) -> Sequence[Panel]:
    its = f'model="{model.name}"'
    slo_s = model.slo_ms / 1e3

    def quantile(metric: catalog.Metric, fraction: float) -> str:
        return (
            f"histogram_quantile({fraction:g}, sum by (le) (rate({metric.name}_bucket{{{its}}}[{_WINDOW}])))"
        )

    def mean(metric: catalog.Metric) -> str:
        parts = (f"sum(rate({metric.name}_{part}{{{its}}}[{_WINDOW}]))" for part in ("sum", "count"))
        return " / ".join(parts)

    return (
        Panel(
            "latency at the frontend",
            "s",
            tuple((quantile(catalog.LATENCY, at), f"p{100 * at:g}") for at in (0.5, 0.9, 0.99)),
            width=6,
            mark=slo_s,
        ),
        Panel(
            "held (chosen) and waited (forced)",
            "s",
            (
                (mean(catalog.HELD), "held, mean"),
                (quantile(catalog.HELD, 0.99), "held, p99"),
                (mean(catalog.WAITED), "waited, mean"),
                (quantile(catalog.WAITED, 0.99), "waited, p99"),
            ),
            width=6,
        ),
        Panel(
            "batch size, and why batches left",
            "short",
            (
                (mean(catalog.BATCH_SIZE), "size, mean"),
                (
                    f"sum by (reason) (rate({catalog.BATCHES.name}{{{its}}}[{_WINDOW}]))",
                    "{{reason}}, a second",
                ),
            ),
            width=6,
        ),
        Panel(
            _STAGES_WORDS,
            "s",
            ((f"sum by (stage) (rate({catalog.STAGES.name}{{{its}}}[{_WINDOW}]))", "{{stage}}"),),
            width=6,
            is_stacked=True,
        ),
    )


def _gpus() -> Sequence[Panel]:
    return (
        Panel(
            "GPU busy with batches",
            "percentunit",
            ((f"sum by (node, gpu) (rate({catalog.GPU_BUSY.name}[{_WINDOW}]))", "{{node}}/gpu{{gpu}}"),),
            most=1.0,
        ),
        Panel(
            "slice busy, by model",
            "percentunit",
            ((f"sum by (slice, model) (rate({catalog.SLICE_BUSY.name}[{_WINDOW}]))", "{{slice}} {{model}}"),),
            is_stacked=True,
        ),
        Panel(
            "run time, of the profile's",
            "none",
            ((f"max by (slice, model) ({catalog.SLICE_SLOWDOWN.name})", "{{slice}} {{model}}"),),
            mark=1.0,
        ),
        Panel(
            "sensors: busy", "percentunit", ((catalog.GPU_SENSOR_BUSY.name, "{{role_id}} {{gpu}}"),), width=6
        ),
        Panel("sensors: memory", "bytes", ((catalog.GPU_MEMORY.name, "{{role_id}} {{gpu}}"),), width=6),
        Panel("sensors: power", "watt", ((catalog.GPU_POWER.name, "{{role_id}} {{gpu}}"),), width=6),
        Panel(
            "sensors: clocks held down",
            "none",
            ((catalog.GPU_THROTTLED.name, "{{role_id}} {{gpu}}"),),
            width=6,
        ),
    )


def _processes() -> Sequence[Panel]:
    return (
        Panel(
            "CPU",
            "percentunit",
            (
                (f"sum by (role_id) (rate({catalog.CPU.name}[{_WINDOW}]))", "{{role_id}}"),
                (f"sum by (worker) (rate({catalog.WORKER_CPU.name}[{_WINDOW}]))", "{{worker}}"),
            ),
        ),
        Panel("CPU a request", "s", (("tenuto:cpu_seconds_per_request:rate5m", "{{role}}"),)),
        Panel(
            "timers late, p99",
            "s",
            (
                (
                    f"histogram_quantile(0.99, sum by (role_id, le) (rate({catalog.TIMER_LATENESS.name}_bucket[{_WINDOW}])))",
                    "{{role_id}}",
                ),
                (f'{catalog.WORKER_LATENESS.name}{{quantile="0.99"}}', "{{worker}}, since its start"),
            ),
        ),
        Panel(
            "memory",
            "bytes",
            ((catalog.MEMORY.name, "{{role_id}}"), (catalog.WORKER_MEMORY.name, "{{worker}}")),
        ),
        Panel(
            "kept back of budgets",
            "s",
            ((f"max by (role_id, model) ({catalog.MARGIN.name})", "{{role_id}} {{model}}"),),
        ),
        Panel("requests pending", "short", ((catalog.PENDING.name, "{{role_id}}"),)),
    )


def _plan() -> Sequence[Panel]:
    return (
        Panel(
            "active scheduler",
            "none",
            ((catalog.ACTIVE.name, "{{role_id}}"),),
            width=6,
            kind="state-timeline",
        ),
        Panel(
            "epoch and standbys",
            "none",
            (
                (catalog.EPOCH.name, "{{role_id}} epoch"),
                (f"{catalog.STANDBYS.name} and {catalog.ACTIVE.name} == 1", "{{role_id}} standbys"),
            ),
            width=6,
        ),
        Panel(
            "measured and planned rate",
            "reqps",
            (
                (f"max by (model) ({catalog.RATE.name})", "{{model}}"),
                (f"max by (model) ({catalog.PLANNED_RATE.name})", "{{model}}, planned"),
            ),
            width=6,
        ),
        Panel(
            "slices by state",
            "short",
            ((f"sum by (state) ({catalog.SLICES.name})", "{{state}}"),),
            width=6,
            is_stacked=True,
        ),
    )


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.mark is not None:
        steps.append({"color": "red", "value": panel.mark})
    custom: dict[str, Any] = {"stacking": {"mode": "normal" if panel.is_stacked else "none"}}
    if panel.is_stacked:
        custom["fillOpacity"] = 25
    if panel.mark is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": custom if panel.kind == "timeseries" else {},
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend, "datasource": _SOURCE}
            for at, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}
