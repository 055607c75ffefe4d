"""What `tenuto dashboards` writes: it loads, names only metrics that there are, and promtool takes it where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from msgspec.structs import replace

from roles.cli.dashboards import dashboards
from roles.config.metrics_pages import metrics_pages
from roles.config.read_config import parse_config
from roles.observability.alert_rules import rules_of
from roles.observability.dashboard import MODELS_MAX, dashboard_of
from roles.runtime.metrics.catalog import METRICS, Kind

DOCUMENT: dict[str, Any] = {
    "models": [
        {"name": "resnet50", "slo_ms": 25, "profile": {"alpha_ms": 1, "beta_ms": 5}},
        {"name": "bert", "slo_ms": 40.5, "profile": {"alpha_ms": 1, "beta_ms": 5}},
    ],
    "cluster": {"gpus": 2, "frontends": 2, "schedulers": 2},
    "listen": {"metrics": "127.0.0.1:8002"},
}
SERIES = {metric.name: metric for metric in METRICS}
FORMS = {
    *(metric.name for metric in METRICS if metric.kind is not Kind.HISTOGRAM),
    *(
        f"{metric.name}_{part}"
        for metric in METRICS
        if metric.kind is Kind.HISTOGRAM
        for part in ("bucket", "sum", "count")
    ),
}


def config_of(document: dict[str, Any]) -> Any:
    return parse_config(document, Path())


def expressions_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["expr"]] if "expr" in value else []
        return own + [found for inner in value.values() for found in expressions_in(inner)]
    return [found for inner in value for found in expressions_in(inner)] if isinstance(value, list) else []


def written(tmp_path: Path, document: dict[str, Any], *flags: str) -> dict[str, str]:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    folder = tmp_path / "out"
    ended = CliRunner().invoke(dashboards, [str(file), "--output", str(folder), *flags])
    assert ended.exit_code == 0, ended.output
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*")}


def test_it_writes_what_grafana_and_prometheus_read(tmp_path: Path) -> None:
    files = written(tmp_path, DOCUMENT)
    board = json.loads(files["tenuto-dashboard.json"])
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == [
        "Models",
        "resnet50: SLO 25 ms",
        "bert: SLO 40 ms",
        "GPUs and slices",
        "Processes",
        "Schedulers and plan",
    ]
    scraped = yaml.safe_load(files["prometheus.yml"])
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in scraped["scrape_configs"]}
    assert targets == {
        "tenuto-scheduler": ["127.0.0.1:8002", "127.0.0.1:8003"],
        "tenuto-frontend": ["127.0.0.1:8004", "127.0.0.1:8005"],
        "tenuto-node-agent": ["127.0.0.1:8006"],
    }
    assert scraped["rule_files"] == [name for name in files if "rules" in name]


@pytest.mark.parametrize(
    ("address", "cluster", "is_said"),
    [
        ("127.0.0.1:9100", {"schedulers": [{"host": "a"}]}, True),
        ("10.0.0.9:9100", {"schedulers": [{"host": "a"}]}, False),
        ("127.0.0.1:9100", {"schedulers": 1}, False),  # all of it on one host
        (  # a rehearsal: hosts by name alone
            "127.0.0.1:9100",
            {"schedulers": [{"host": "a"}], "addresses": {"a": "127.0.0.1", "b": "127.0.0.2"}},
            False,
        ),
    ],
)
def test_pages_that_prometheus_cannot_reach_are_said(
    tmp_path: Path, address: str, cluster: dict[str, Any], is_said: bool
) -> None:
    cluster = {"nodes": [{"host": "a"}, {"host": "b"}], **cluster}
    document = {**DOCUMENT, "cluster": cluster, "listen": {"metrics": address}, "security": {"keys": "keys"}}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    ended = CliRunner().invoke(dashboards, [str(file), "--dry-run"])
    assert ended.exit_code == 0
    assert ("on loopback" in ended.stderr) == is_said


def test_without_pages_there_is_nothing_to_scrape_and_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    assert "prometheus.yml" not in written(tmp_path, {**DOCUMENT, "listen": {}})
    dry = tmp_path / "dry"
    dry.mkdir()
    assert written(dry, DOCUMENT, "--dry-run") == {}


def test_expressions_name_only_metrics_that_there_are_with_their_labels() -> None:
    config = config_of(DOCUMENT)
    rules = rules_of(config)
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    expressions = [*expressions_in(rules), *expressions_in(dashboard_of(config))]
    assert len(expressions) > 40
    for expression in expressions:
        assert set(re.findall(r"tenuto:[\w:]+", expression)) <= recorded
        named = set(re.findall(r"\btenuto_\w+", expression))
        assert named <= FORMS, expression
        bases = [SERIES.get(name) or SERIES[name.rpartition("_")[0]] for name in named]
        labels = {"role_id", "le", "role", "job", *(label for metric in bases for label in metric.labels)}
        used = set(re.findall(r"[{,](\w+)(?:=|!~)", expression))
        for group in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", expression):
            used |= {label.strip() for label in group.split(",")}
        assert used <= labels, expression


def test_what_is_summed_over_models_is_what_clients_asked() -> None:
    """Stages of applications ask models too: such a request is counted for its application and for each of them."""
    plain = config_of(DOCUMENT)
    (rates, *_) = rules_of(plain)["groups"]
    for rule in rates["rules"]:
        if rule["record"].startswith("tenuto:cpu_seconds_per_request"):
            assert 'tenuto_events_total{event=~"accepted|refused_at_door"}' in rule["expr"]
    with_applications = replace(plain, applications=("an application",))
    stacked = [
        dashboard_of(config)["panels"][1]["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"]
        for config in (plain, with_applications)
    ]
    assert stacked == ["normal", "none"]


def test_every_counter_is_only_ever_asked_for_its_rate_or_increase() -> None:
    config = config_of(DOCUMENT)
    for expression in [*expressions_in(rules_of(config)), *expressions_in(dashboard_of(config))]:
        bare = re.sub(r"(?:rate|increase)\([^()]*\)", "", expression)
        assert not re.search(r"tenuto_\w+_(?:total|bucket|sum|count)\b", bare), expression


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    panels = dashboard_of(config_of(DOCUMENT))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_many_models_make_no_endless_dashboard() -> None:
    models = [
        {"name": f"m{number}", "slo_ms": 25, "profile": {"alpha_ms": 1, "beta_ms": 5}}
        for number in range(300)
    ]
    panels = dashboard_of(config_of({**DOCUMENT, "models": models}))["panels"]
    assert sum(panel["type"] == "row" for panel in panels) == MODELS_MAX + 4


def test_the_allowance_follows_the_objective() -> None:
    rules = rules_of(config_of(DOCUMENT), 99.9)["groups"][1]["rules"]
    assert "> 14.4 * 0.001 and tenuto:bad_ratio:rate5m > 14.4 * 0.001" in rules[0]["expr"]
    assert [rule["labels"]["severity"] for rule in rules] == ["page", "page", "ticket", "ticket"]


@pytest.mark.parametrize("objective", [50.0, 80.0, 90.0, 93.0, 99.999])
def test_a_whole_outage_is_over_every_threshold_whatever_the_objective(objective: float) -> None:
    for rule in rules_of(config_of(DOCUMENT), objective)["groups"][1]["rules"]:
        limits = re.findall(r"bad_ratio:rate\w+ > (\S+) \* (\S+)", rule["expr"])
        assert len(limits) == 2
        for rate, allowance in limits:
            assert 1 - objective / 100 <= 1.001 * float(rate) * float(allowance) < 0.95
            assert f"{rate} times what is allowed" in rule["annotations"]["summary"]


def test_every_role_has_a_port_of_its_own_and_other_hosts_bind_their_own_address() -> None:
    placed = {
        **DOCUMENT,
        "cluster": {
            "nodes": [{"host": "b", "gpus": 1}, {"host": "c", "gpus": 1}],
            "schedulers": [{"host": "a"}],
            "frontends": [{"host": "a"}, {"host": "b", "listen": {"metrics": "127.0.0.1:9100"}}],
            "addresses": {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"},
        },
        "listen": {"metrics": "10.0.0.1:8002"},
        "security": {"keys": "keys"},
    }
    pages = {page.role_id: page for page in metrics_pages(config_of(placed))}
    assert {role_id: page.address for role_id, page in pages.items()} == {
        "scheduler-0": "10.0.0.1:8002",
        "frontend-0": "10.0.0.1:8003",
        "frontend-1": "127.0.0.1:9100",
        "node-b": "10.0.0.1:8005",
        "node-c": "10.0.0.1:8006",
    }
    assert pages["node-c"].bound_at("10.0.0.3") == "10.0.0.3:8006"
    assert pages["frontend-1"].bound_at("10.0.0.2") == "127.0.0.1:9100"


@pytest.mark.parametrize(("shards", "of_each"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 3)])
def test_alarms_of_schedulers_are_silent_in_a_whole_cluster_and_told_of_one_that_is_missing(
    shards: int, of_each: int
) -> None:
    nodes = [{"host": f"h{number}", "gpus": 1} for number in range(3)]
    models = [{**DOCUMENT["models"][0], "name": f"m{number}"} for number in range(3)]
    cluster = {"nodes": nodes, "shards": shards, "schedulers": of_each}
    rules = rules_of(config_of({"models": models, "cluster": cluster}))["groups"][2]["rules"]
    limits = {
        rule["alert"]: int(found[1])
        for rule in rules
        if (found := re.match(r"sum\(tenuto_scheduler_.*?\) < (\d+)", rule["expr"]))
    }
    whole = {"TenutoNoActiveScheduler": shards, "TenutoStandbyMissing": shards * (of_each - 1)}
    assert limits == {name: count for name, count in whole.items() if count}


def test_a_role_that_does_not_answer_at_all_alarms_though_its_series_are_gone(tmp_path: Path) -> None:
    files = written(tmp_path, DOCUMENT)
    rules = yaml.safe_load(files["tenuto-rules.yml"])["groups"][2]["rules"]
    alarms = {rule["alert"]: rule["expr"] for rule in rules}
    (meant,) = re.findall(r'^up\{job=~"([^"]+)"\} == 0$', alarms["TenutoRoleAway"])
    jobs = [job["job_name"] for job in yaml.safe_load(files["prometheus.yml"])["scrape_configs"]]
    assert len(jobs) == 3
    assert all(re.fullmatch(meant, job) for job in jobs)
    assert not re.fullmatch(meant, "node-exporter")
    assert alarms["TenutoGatewayUnready"] == "tenuto_gateway_ready == 0"


PROMTOOL = shutil.which("promtool")

RULE_TEST = """
rule_files: [tenuto-rules.yml]
evaluation_interval: 1m
tests:
 - interval: 1m
   input_series:
    - {series: 'tenuto_requests_total{model="resnet50",outcome="good",role_id="f"}', values: '0+80x120'}
    - {series: 'tenuto_requests_total{model="resnet50",outcome="Overloaded",role_id="f"}', values: '0+20x120'}
    - {series: 'tenuto_requests_total{model="bert",outcome="good",role_id="f"}', values: '0+100x120'}
    - {series: 'tenuto_requests_total{model="bert",outcome="Cancelled",role_id="f"}', values: '0+900x120'}
   promql_expr_test:
    - {expr: 'floor(1000 * tenuto:bad_ratio:rate5m{model="resnet50"})', eval_time: 90m, exp_samples: [{labels: '{model="resnet50"}', value: 200}]}
    - {expr: 'floor(1000 * tenuto:bad_ratio:rate5m{model="bert"})', eval_time: 90m, exp_samples: [{labels: '{model="bert"}', value: 0}]}
   alert_rule_test:
    - eval_time: 90m
      alertname: TenutoSloBurns
      exp_alerts: [EXPECTED]
"""


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_takes_the_rules_and_a_burning_model_alarms(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    written(tmp_path, DOCUMENT)
    folder = tmp_path / "out"
    for check in (("check", "config", "prometheus.yml"), ("check", "rules", "tenuto-rules.yml")):
        subprocess.run([PROMTOOL, *check], cwd=folder, check=True, capture_output=True)
    rules = yaml.safe_load((folder / "tenuto-rules.yml").read_text())["groups"][1]["rules"]
    expected = [
        {
            "exp_labels": {
                "severity": rule["labels"]["severity"],
                "window": rule["labels"]["window"],
                "model": "resnet50",
            },
            "exp_annotations": {
                "summary": rule["annotations"]["summary"]
                .replace("{{ $labels.model }}", "resnet50")
                .replace("{{ $value | humanizePercentage }}", "20%"),
                "description": rule["annotations"]["description"].replace("{{ $labels.model }}", "resnet50"),
            },
        }
        for rule in rules
    ]
    test = RULE_TEST.replace("[EXPECTED]", json.dumps(expected))
    (folder / "test.yml").write_text(test, encoding="utf-8")
    ended = subprocess.run(
        [PROMTOOL, "test", "rules", "test.yml"], cwd=folder, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
