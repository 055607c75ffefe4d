"""Who may speak to whom: the policies, evaluated as Kubernetes does, beside a table written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.k8s.stage import MODEL, Plain, Stage, pod_templates

OTHERS = {"operator": {"tenuto/operator": "true"}, "stranger": {"app": "shop"}}
OUTSIDE: dict[str, str] = {}  # an address that is no pod's
CONTROL, CLIENT, METRICS, PAYLOAD, WEB, DNS = 5550, 5555, 8002, 40_123, 443, 53

# (from, to) -> the ports of those above that are open. What is not listed is closed.
OPEN = {
    ("scheduler", "scheduler"): {CONTROL},
    ("frontend", "scheduler"): {CONTROL},
    ("agent", "scheduler"): {CONTROL},
    ("operator", "scheduler"): {CONTROL, METRICS},
    ("operator", "frontend"): {CLIENT, METRICS},
    ("operator", "agent"): {METRICS},
    ("stranger", "scheduler"): {METRICS},
    ("stranger", "frontend"): {CLIENT, METRICS},
    ("stranger", "agent"): {METRICS},
    ("outside", "frontend"): {CLIENT},
    ("frontend", "agent"): {CONTROL, CLIENT, METRICS, PAYLOAD, WEB, DNS},
    ("agent", "frontend"): {CONTROL, CLIENT, METRICS, PAYLOAD, WEB, DNS},
    ("scheduler", "outside"): {DNS},
    ("frontend", "outside"): {DNS},
    ("agent", "outside"): {DNS},
    ("scheduler", "stranger"): {DNS},
    ("frontend", "stranger"): {DNS},
    ("agent", "stranger"): {DNS},
    ("scheduler", "operator"): {DNS},
    ("frontend", "operator"): {DNS},
    ("agent", "operator"): {DNS},
}


@pytest.mark.parametrize("from_hub", [False, True])
def test_each_role_reaches_what_it_needs_and_nothing_else(tmp_path: Path, from_hub: bool) -> None:
    stage = Stage(tmp_path)
    if from_hub:
        loader = {"zoo": "transformers", "arch": "distilbert-base", "from_hub": True}
        stage.document["models"] = [{**MODEL, "loader": loader}]
    objects = stage.objects()
    templates = pod_templates(objects)
    pods = {
        "scheduler": templates["tenuto-scheduler"]["metadata"]["labels"],
        "frontend": templates["tenuto-frontend"]["metadata"]["labels"],
        "agent": templates["tenuto-node-agent-cuda-4"]["metadata"]["labels"],
        **OTHERS,
        "outside": OUTSIDE,
    }
    policies = [one["spec"] for (kind, _), one in objects.items() if kind == "NetworkPolicy"]
    roles = {"scheduler", "frontend", "agent"}
    for source, from_labels in pods.items():
        for target, to_labels in pods.items():
            if not {source, target} & roles:
                continue
            expected = set(OPEN.get((source, target), ()))
            if from_hub and source == "agent" and target not in roles:
                expected.add(WEB)
            found = {
                port
                for port in (CONTROL, CLIENT, METRICS, PAYLOAD, WEB, DNS)
                if is_let(policies, "Egress", from_labels, to_labels, target != "outside", port)
                and is_let(policies, "Ingress", to_labels, from_labels, source != "outside", port)
            }
            assert found == expected, (source, target)


def is_let(
    policies: list[Plain],
    direction: str,
    own: Mapping[str, str],
    other: Mapping[str, str],
    is_pod: bool,
    port: int,
) -> bool:
    """Whether the policies over a pod let it speak to (or be spoken to by) another, by TCP at a port."""
    over = [
        policy for policy in policies if own and policy["podSelector"]["matchLabels"].items() <= own.items()
    ]
    if not any(direction in policy["policyTypes"] for policy in over):
        return True  # nobody says anything about it
    rules = [rule for policy in over for rule in policy[direction.lower()]]
    key = "to" if direction == "Egress" else "from"
    return any(
        (key not in rule or any(is_meant(peer, other, is_pod) for peer in rule[key]))
        and ("ports" not in rule or {"port": port, "protocol": "TCP"} in rule["ports"])
        for rule in rules
    )


def is_meant(peer: Mapping[str, Any], labels: Mapping[str, str], is_pod: bool) -> bool:
    if peer == {"namespaceSelector": {}}:
        return is_pod
    assert set(peer) == {"podSelector"}, "of the same namespace"
    return is_pod and peer["podSelector"]["matchLabels"].items() <= labels.items()
