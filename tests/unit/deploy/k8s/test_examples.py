"""The examples for clusters with metrics: Kubernetes takes them, and they speak of the metrics that the manifests ask for."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.k8s.manifests import PENDING_METRIC
from deploy.k8s.names import AGENT_NAME, FRONTEND_NAME, SCHEDULER_NAME
from deploy.k8s.pods import GPU_RESOURCE, labels
from tests.unit.deploy.k8s.stage import IMAGE, Stage

FOLDER = Path(__file__).parents[4] / "deploy" / "examples" / "kubernetes"
OBJECTS = list(yaml.safe_load_all((FOLDER / "gpu-nodes.yaml").read_text()))
(OVERLAY,) = yaml.safe_load_all((FOLDER / "kustomization.yaml").read_text())
(MONITOR,) = yaml.safe_load_all((FOLDER / "pod-monitor.yaml").read_text())
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


def merged(base: Any, patch: Any, key: str = "") -> Any:
    """As a strategic merge does it: lists of things with a name, or of mounts, by that; other lists are replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{name: merged(base.get(name), value, name) for name, value in patch.items()}}
    by = {"containers": "name", "volumes": "name", "volumeMounts": "mountPath"}.get(key)
    if by is None or base is None:
        return patch
    own = {one[by]: one for one in base}
    return [*(own | {one[by]: merged(own.get(one[by]), one) for one in patch}).values()]


def test_what_the_overlay_adds_fits_the_manifests(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.write()
    assert stage.run("--image", IMAGE, "--output", str(tmp_path / "manifests")).exit_code == 0
    written = {f"manifests/{path.name}" for path in (tmp_path / "manifests").glob("*.yaml")}
    assert set(OVERLAY["resources"]) == written
    secret, agents = (patch["patch"] for patch in OVERLAY["patches"])
    ((operation),) = yaml.safe_load(secret)
    patched = []
    for (kind, _), one in stage.objects().items():
        if kind not in OVERLAY["patches"][0]["target"]["kind"].split("|"):
            continue
        changed = deepcopy(one)
        assert operation["path"] == "/spec/template/spec/imagePullSecrets"
        changed["spec"]["template"]["spec"]["imagePullSecrets"] = operation["value"]
        if kind == "DaemonSet":
            patch = yaml.safe_load(agents) | {"metadata": changed["metadata"]}
            containers = [
                container["name"] for container in changed["spec"]["template"]["spec"]["containers"]
            ]
            changed = merged(changed, patch)
            spec = changed["spec"]["template"]["spec"]
            assert [container["name"] for container in spec["containers"]] == containers
            assert {"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
        kubernetes_validate.validate(changed, "1.37.0", strict=True)
        patched.append(kind)
    assert set(patched) == {"StatefulSet", "Deployment", "DaemonSet"}
    (agent_label,) = OVERLAY["patches"][1]["target"]["labelSelector"].split(",")
    assert agent_label == f"app.kubernetes.io/component={AGENT_NAME}"


@pytest.mark.parametrize("component", [SCHEDULER_NAME, FRONTEND_NAME, AGENT_NAME])
def test_the_monitor_finds_each_role_and_calls_its_job_as_the_alarms_do(
    component: str, tmp_path: Path
) -> None:
    own = labels(component)
    assert MONITOR["spec"]["selector"]["matchLabels"].items() <= own.items()
    assert own[MONITOR["spec"]["jobLabel"]].startswith("tenuto-")
    ports = {
        port["name"]
        for (kind, _), one in Stage(tmp_path).objects().items()
        if kind in ("StatefulSet", "Deployment", "DaemonSet")
        for container in one["spec"]["template"]["spec"]["containers"]
        for port in container.get("ports", ())
    }
    assert {endpoint["port"] for endpoint in MONITOR["spec"]["podMetricsEndpoints"]} <= ports
