"""An application is seen by who looks after a cluster: rows of its own, and where to ask why it is late."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from fabric.client import BlockingClient
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.cli.group import tenuto

pytestmark = pytest.mark.timeout(60)

CLUSTER = """
models:
 - {name: det, slo_ms: 4000, profile: {alpha_ms: 1, beta_ms: 2}}
 - {name: cls, slo_ms: 4000, profile: {alpha_ms: 1, beta_ms: 2}}
applications:
 - {name: shop, slo_ms: 8000, stages: {first: {model: det}, second: {model: cls, after: first}, again: {model: cls, after: first}}}
cluster: {gpus: 1}
"""
ANSWERED = 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporaryCluster]:
    path = tmp_path_factory.mktemp("seen") / "cluster.yaml"
    path.write_text(CLUSTER, encoding="utf-8")
    with temporary_cluster(path) as one:
        with BlockingClient(one.endpoints["client"]) as client:
            for _ in range(ANSWERED):
                client.infer("shop", {"input": np.zeros(4, np.float32)})
        yield one


def asked(cluster: TemporaryCluster, *arguments: str) -> Result:
    return CliRunner().invoke(tenuto, [*arguments, "--run-dir", str(cluster.run_dir)])


def plain(cluster: TemporaryCluster, *arguments: str) -> dict[str, Any]:
    result = asked(cluster, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("command", [("status",), ("models", "list")], ids=" ".join)
def test_it_has_a_row_with_what_its_frontends_counted_from_end_to_end(
    cluster: TemporaryCluster, command: tuple[str, ...]
) -> None:
    found = plain(cluster, *command)
    assert [(one["model_id"], one["slo_ms"], one["asks"]) for one in found["applications"]] == [
        ("shop", 8000.0, ["det", "cls"])
    ]
    assert {one["model_id"] for one in found["models"]} == {"det", "cls"}
    text = asked(cluster, *command).stdout
    assert "Applications" in text
    (row,) = (line for line in text.splitlines() if line.lstrip().startswith("shop"))
    assert row.split()[-2:] == ["8000", "1"]
    figures = found["live"]["shop"]
    assert figures["bad_rate"] in (0.0, None), "None where the last answer is longer than 10 s ago"


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("why", "shop"), "tenuto why det, tenuto why cls"),
        (
            ("explain", "--last-late", "shop"),
            "tenuto explain --last-late det, tenuto explain --last-late cls",
        ),
        (
            ("what-if", "--rate", "shop=2"),
            "tenuto what-if --rate det=1.5, tenuto what-if --rate cls=1.5",
        ),
    ],
    ids=("why", "explain", "what-if"),
)
def test_whoever_asks_of_it_as_of_a_model_is_told_of_which_to_ask(
    cluster: TemporaryCluster, arguments: tuple[str, ...], instead: str
) -> None:
    told = str(asked(cluster, *arguments).exception)
    assert told == f"'shop' is an application: its stages ask det and cls; ask for these: {instead}"


def test_top_has_it_below_the_models_it_asks(cluster: TemporaryCluster) -> None:
    text = asked(cluster, "top", "--once").stdout
    assert any(line.split()[:1] == ["shop"] for line in text.splitlines()), text
