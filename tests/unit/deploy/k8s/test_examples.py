"""The examples for clusters with metrics: Kubernetes takes them, and they speak of the metrics that the manifests ask for."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import yaml

from deploy.k8s.manifests import PENDING_METRIC
from deploy.k8s.pods import GPU_RESOURCE

FOLDER = Path(__file__).parents[4] / "deploy" / "examples" / "kubernetes"
OBJECTS = list(yaml.safe_load_all((FOLDER / "gpu-nodes.yaml").read_text()))
(RULES,) = yaml.safe_load_all((FOLDER / "prometheus-adapter.yaml").read_text())


def test_kubernetes_takes_the_pods_that_hold_nodes() -> None:
    for one in OBJECTS:
        kubernetes_validate.validate(one, "1.37.0", strict=True)


def test_a_held_node_gives_way_to_an_agent_and_has_as_many_gpus_as_are_counted_for_it() -> None:
    priority, deployment, scaler = OBJECTS
    pod = deployment["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == priority["metadata"]["name"]
    assert priority["value"] < 0, "agents have 0"
    (container,) = pod["containers"]
    (metric,) = scaler["spec"]["metrics"]
    assert str(container["resources"]["limits"][GPU_RESOURCE]) == metric["external"]["target"]["averageValue"]
    served = [rule["name"]["as"] for rule in RULES["rules"]["external"]]
    assert metric["external"]["metric"]["name"] in served


def test_the_adapter_serves_what_the_frontends_autoscaler_asks_for() -> None:
    (rule,) = RULES["rules"]["custom"]
    assert rule["seriesQuery"].startswith(f"{PENDING_METRIC}{{")
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
