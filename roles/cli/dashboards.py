"""`tenuto dashboards`: a Grafana dashboard, alarms, and what Prometheus should scrape, from the configuration file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from fabric.curve import is_loopback
from roles.cli.json_output import echo_json
from roles.cli.options import FloatRange, file_argument, json_option, remark, writing
from roles.config.cluster import ClusterConfig
from roles.config.documents import as_yaml
from roles.config.metrics_pages import MetricsPage, metrics_pages
from roles.config.read_config import load_config
from roles.observability.alert_rules import OBJECTIVE_PERCENT, rules_of, scrape_config
from roles.observability.dashboard import MODELS_MAX, dashboard_of

OBJECTIVE = FloatRange(50, 99.999)


@click.command()
@file_argument
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tenuto-dashboards"),
    show_default=True,
    help="The folder to write to.",
)
@click.option(
    "--objective",
    "objective_percent",
    type=OBJECTIVE,
    default=OBJECTIVE_PERCENT,
    show_default=True,
    help="Of each model's requests, so many percent shall be good.",
)
@click.option("--dry-run", "is_dry", is_flag=True, help="Only say what would be written.")
@json_option
def dashboards(*, file: Path, output: Path, objective_percent: float, is_dry: bool, as_json: bool) -> None:
    """Write a Grafana dashboard, Prometheus rules with SLO alarms, and a scrape configuration for FILE's cluster."""
    config = load_config(file)
    texts = {
        "tenuto-dashboard.json": json.dumps(dashboard_of(config), indent=1) + "\n",
        "tenuto-rules.yml": as_yaml(rules_of(config, objective_percent)),
    }
    pages = [page for page in metrics_pages(config) if not page.address.endswith(":0")]
    if pages:
        targets = [(page.kind, _target(page, config)) for page in pages]
        texts["prometheus.yml"] = as_yaml(scrape_config(targets))
        remark(_out_of_reach(pages, config))
    else:
        why = "listen.metrics is not set, or has port 0: no prometheus.yml is written"
        remark([f"{why} (tenuto status --json has the addresses of a running cluster's pages)"])
    if len(config.models) > MODELS_MAX:
        remark([f"the first {MODELS_MAX} of {len(config.models)} models have a row of their own"])
    paths = {name: output / name for name in texts}
    if not is_dry:
        _write(output, texts)
    if as_json:
        echo_json({"files": [str(path) for path in paths.values()], "written": not is_dry})
    else:
        for path in paths.values():
            click.echo(f"{'would write' if is_dry else 'wrote'} {path}")


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def _out_of_reach(pages: Sequence[MetricsPage], config: ClusterConfig) -> Iterator[str]:
    places = config.places
    hosts = {page.host for page in pages if page.is_on_loopback} if places.is_written else set()
    if len(hosts) > 1 and not all(is_loopback(places.addresses.get(host, host)) for host in hosts):
        yield (
            f"pages of {len(hosts)} hosts are on loopback, and prometheus.yml has them so: only a Prometheus on the same host reaches one."
            " Give listen.metrics an address that is not loopback: then each role serves at its own host's"
        )


def _target(page: MetricsPage, config: ClusterConfig) -> str:
    return (
        page.bound_at(config.places.addresses.get(page.host, page.host))
        if config.places.is_written
        else page.address
    )
