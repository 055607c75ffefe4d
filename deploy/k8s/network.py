"""How pods find each other, and who may speak to whom: Services and NetworkPolicies.

Where identity matters (a scheduler is one certain process) the Service is headless and gives each pod its name; frontends are alike,
so theirs spreads connections. Payload of frontends and workers goes by ports that the system picks, so between
these two every port is open, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from deploy.k8s.names import AGENT_NAME, APP, FRONTEND_NAME, SCHEDULER_NAME
from deploy.k8s.pods import Plain, labels
from deploy.k8s.requirements import Wanted
from roles.config.hosts import CLIENT_PORT, CONTROL_PORT

OPERATOR_LABEL: Final = f"{APP}/operator"
_DNS: Final[Plain] = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


def services(wanted: Wanted) -> list[Plain]:
    """Of the schedulers, each by its own name, and of the frontends."""
    return [
        _object(
            "Service",
            "v1",
            SCHEDULER_NAME,
            wanted,
            {
                "clusterIP": "None",
                # One that is not ready is looked for too: it becomes ready by being found.
                "publishNotReadyAddresses": True,
                "selector": labels(SCHEDULER_NAME),
                "ports": [_port("control", CONTROL_PORT)],
            },
        ),
        _object(
            "Service",
            "v1",
            FRONTEND_NAME,
            wanted,
            {
                "selector": labels(FRONTEND_NAME),
                "ports": [_port(name, port) for name, port in _doors(wanted).items()],
            },
        ),
    ]


def _doors(wanted: Wanted) -> dict[str, int]:
    """Where clients come in: the frontend's and its gateway's."""
    return {"client": CLIENT_PORT, **({} if wanted.gateway is None else wanted.gateway.ports)}


def policies(wanted: Wanted) -> list[Plain]:
    """What is not listed is refused, both ways. Keys say who may do what; this says who gets to ask."""
    scheduler, frontend, agent = map(_pods, (SCHEDULER_NAME, FRONTEND_NAME, AGENT_NAME))
    operator = {"podSelector": {"matchLabels": {OPERATOR_LABEL: "true"}}}
    measured = {"from": [{"namespaceSelector": {}}], "ports": [_tcp(wanted.metrics_port)]}
    to_scheduler = {"to": [scheduler], "ports": [_tcp(CONTROL_PORT)]}
    hub = [{"ports": [_tcp(443)]}] if wanted.needs_hub else []
    return [
        _policy(
            SCHEDULER_NAME,
            wanted,
            [{"from": [scheduler, frontend, agent, operator], "ports": [_tcp(CONTROL_PORT)]}, measured],
            [to_scheduler, _DNS],
        ),
        _policy(
            FRONTEND_NAME,
            wanted,
            [{"ports": [_tcp(port) for port in _doors(wanted).values()]}, {"from": [agent]}, measured],
            [to_scheduler, {"to": [agent]}, _DNS],
        ),
        _policy(
            AGENT_NAME,
            wanted,
            [{"from": [frontend]}, measured],
            [to_scheduler, {"to": [frontend]}, _DNS, *hub],
        ),
    ]


def _policy(component: str, wanted: Wanted, ingress: Sequence[Plain], egress: Sequence[Plain]) -> Plain:
    spec = {
        "podSelector": {"matchLabels": labels(component)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": list(ingress),
        "egress": list(egress),
    }
    return _object("NetworkPolicy", "networking.k8s.io/v1", component, wanted, spec)


def _object(kind: str, version: str, component: str, wanted: Wanted, spec: Plain) -> Plain:
    metadata = {"name": component, "namespace": wanted.namespace, "labels": labels(component)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _pods(component: str) -> Plain:
    return {"podSelector": {"matchLabels": labels(component)}}


def _port(name: str, port: int) -> Plain:
    return {"name": name, "port": port, "targetPort": name}


def _tcp(port: int) -> Plain:
    return {"port": port, "protocol": "TCP"}
