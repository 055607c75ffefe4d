"""A cluster as objects of Kubernetes, in files. Sans-IO: what the file wants and what it is filled with in, plain values out."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.k8s.file_contents import Material
from deploy.k8s.names import AGENT_NAME, APP, FRONTEND_NAME, GATEWAY_NAME, SCHEDULER_NAME
from deploy.k8s.network import policies, services
from deploy.k8s.pods import (
    CONFIG_NAME,
    INSTANCE_LABEL,
    TRUSTED_NAME,
    Plain,
    agent_pod,
    config_keys,
    frontend_pod,
    labels,
    scheduler_pod,
)
from deploy.k8s.requirements import AgentGroup, Wanted
from fabric.keys import FRONTEND, SCHEDULER, TRUSTED_FILE, key_file
from roles.config.documents import as_yaml
from roles.config.hosts import FRONTENDS_MAX

PENDING_METRIC: Final = "tenuto_requests_pending"
"""Of each frontend: requests that it has taken on and not answered."""
PENDING_PER_FRONTEND: Final = 512
"""Where another frontend is asked for: a small part of what one can hold, a multiple of what waits when all is well."""
FRONTENDS_GROW: Final = 4
"""So many times the file's number there may be."""
CPU_PERCENT: Final = 70


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """`about`: for people, over the objects. `is_secret`: nobody but its owner may read it."""

    name: str
    about: str
    objects: tuple[Plain, ...]
    is_secret: bool = False

    @property
    def text(self) -> str:
        """As YAML."""
        comment = "".join(f"# {line}\n" for line in self.about.splitlines())
        return comment + "---\n".join(as_yaml(one) for one in self.objects)


def manifests(wanted: Wanted, material: Material) -> tuple[ManifestFile, ...]:
    """All files, in the order in which they are best applied."""
    return (
        ManifestFile("config.yaml", _CONFIG, (_config(wanted, material), _trusted(wanted, material))),
        ManifestFile("keys.yaml", _KEYS, tuple(_secrets(wanted, material)), is_secret=True),
        ManifestFile("network.yaml", _NETWORK, (*services(wanted), *policies(wanted))),
        ManifestFile("schedulers.yaml", _SCHEDULERS, _schedulers(wanted, material)),
        ManifestFile("frontends.yaml", _FRONTENDS, _frontends(wanted, material)),
        ManifestFile(
            "node-agents.yaml",
            f"{_AGENTS}\n{_GONE}\n  {deletion(wanted)}",
            tuple(_agents(wanted, material, group) for group in wanted.agents),
        ),
    )


def deletion(wanted: Wanted) -> str:
    """The command that deletes the agents of groups that the file has no more, which no apply does."""
    groups = ",".join(group.name for group in wanted.agents)
    selector = ",".join(f"{key}={value}" for key, value in labels(AGENT_NAME).items())
    return f"kubectl -n {wanted.namespace} delete daemonset,secret -l '{selector},{INSTANCE_LABEL} notin ({groups})'"


def _config(wanted: Wanted, material: Material) -> Plain:
    """Text as text, so that people can read it."""
    text, binary = {}, {}
    for path, key in config_keys(material).items():
        try:
            text[key] = material.config[path].decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(material.config[path]).decode()
    found = _object(wanted, "ConfigMap", "v1", CONFIG_NAME, labels(CONFIG_NAME)) | {"data": text}
    return found | {"binaryData": binary} if binary else found


def _trusted(wanted: Wanted, material: Material) -> Plain:
    """Apart from the configuration, which replaces pods when it changes: this is followed by those that run."""
    data = {TRUSTED_FILE: material.trusted.decode()}
    return _object(wanted, "ConfigMap", "v1", TRUSTED_NAME, labels(TRUSTED_NAME)) | {"data": data}


def _secrets(wanted: Wanted, material: Material) -> list[Plain]:
    """One for each role: its pods can get no other role's key."""
    files: Mapping[str, tuple[Mapping[str, str], Sequence[str]]] = {
        SCHEDULER_NAME: (labels(SCHEDULER_NAME), [key_file(SCHEDULER)]),
        FRONTEND_NAME: (labels(FRONTEND_NAME), [key_file(FRONTEND)]),
        **{group.name: (labels(AGENT_NAME, group.name), group.key_files) for group in wanted.agents},
    }
    if wanted.gateway is not None:
        files = {**files, GATEWAY_NAME: (labels(FRONTEND_NAME), list(wanted.gateway.files))}
    return [
        _object(wanted, "Secret", "v1", name, own_labels)
        | {"type": "Opaque", "data": {one: base64.b64encode(material.keys[one]).decode() for one in names}}
        for name, (own_labels, names) in files.items()
    ]


def _schedulers(wanted: Wanted, material: Material) -> tuple[Plain, ...]:
    spec = {
        "replicas": wanted.schedulers,
        "serviceName": SCHEDULER_NAME,
        # All at once at the start; one after the other, standbys first, when the template changes.
        "podManagementPolicy": "Parallel",
        "minReadySeconds": 5,  # a standby gets its copy of the plan
        "selector": {"matchLabels": labels(SCHEDULER_NAME)},
        "template": scheduler_pod(wanted, material),
    }
    return (
        _object(wanted, "StatefulSet", "apps/v1", SCHEDULER_NAME, labels(SCHEDULER_NAME)) | {"spec": spec},
        _disruption_budget(wanted, SCHEDULER_NAME),
    )


def _frontends(wanted: Wanted, material: Material) -> tuple[Plain, ...]:
    spec = {
        # No number of replicas: it is the autoscaler's, and applying this again must not take it back.
        "selector": {"matchLabels": labels(FRONTEND_NAME)},
        "minReadySeconds": 5,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": frontend_pod(wanted, material),
    }
    pending = {"type": "AverageValue", "averageValue": str(PENDING_PER_FRONTEND)}
    busy = {"type": "Utilization", "averageUtilization": CPU_PERCENT}
    scaling = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": FRONTEND_NAME},
        "minReplicas": wanted.frontends,
        "maxReplicas": min(FRONTENDS_GROW * wanted.frontends, FRONTENDS_MAX),
        "metrics": [
            {"type": "Pods", "pods": {"metric": {"name": PENDING_METRIC}, "target": pending}},
            {"type": "Resource", "resource": {"name": "cpu", "target": busy}},
        ],
    }
    name = (FRONTEND_NAME, labels(FRONTEND_NAME))
    return (
        _object(wanted, "Deployment", "apps/v1", *name) | {"spec": spec},
        _object(wanted, "HorizontalPodAutoscaler", "autoscaling/v2", *name) | {"spec": scaling},
        _disruption_budget(wanted, FRONTEND_NAME),
    )


def _agents(wanted: Wanted, material: Material, group: AgentGroup) -> Plain:
    spec = {
        "selector": {"matchLabels": labels(AGENT_NAME, group.name)},
        # A node's models stop while its agent is replaced: one node at a time, and the next when its slices serve again.
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        "minReadySeconds": 10,
        "template": agent_pod(wanted, material, group),
    }
    return _object(wanted, "DaemonSet", "apps/v1", group.name, labels(AGENT_NAME, group.name)) | {
        "spec": spec
    }


def _disruption_budget(wanted: Wanted, component: str) -> Plain:
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # what does not serve anyway keeps no node from being emptied
        "selector": {"matchLabels": labels(component)},
    }
    return _object(wanted, "PodDisruptionBudget", "policy/v1", component, labels(component)) | {"spec": spec}


def _object(
    wanted: Wanted, kind: str, version: str, name: str, own_labels: Mapping[str, str]
) -> dict[str, Any]:
    metadata = {"name": name, "namespace": wanted.namespace, "labels": dict(own_labels)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


_CONFIG: Final = """\
The cluster's file as the pods read it, with what it names; and the public keys that are trusted.
A change of the first replaces the pods. A change of the second is followed by those that run, within about a minute."""
_KEYS: Final = """\
Secrets. One for each role, and of the nodes' keys a pod gets that of its own node.
Keep this file out of version control; or make these objects by your own way of keeping secrets, under the same names."""
_NETWORK: Final = """\
Schedulers are found by their own names, frontends through one address.
Between frontends and node agents all TCP ports are open: tensors go by ports that the system picks. Commands from elsewhere in the cluster
(tenuto status, models, drain, with the operator's key) come from pods with the label tenuto/operator: "true"."""
_SCHEDULERS: Final = """\
One scheduler is active, the others stand by. Which is which, the node agents decide: Kubernetes' readiness says only that each does its part."""
_FRONTENDS: Final = f"""\
Frontends: as many as the load needs. {PENDING_METRIC} comes through the custom metrics API (an adapter of
Prometheus); without one the autoscaler goes by the processor alone. Processor time has no limit: it would be
taken away for up to 100 ms at a time, which is more than many SLOs."""
_GONE: Final = """\
A group of nodes that are alike is named by its device and how many GPUs each has. Where the file has a group no more, this deletes it:"""
_AGENTS: Final = f"""\
One node agent on each node of the file, with all its GPUs: it starts a worker process for every slice inside its own container.
hostIPC is not set. NVIDIA's MPS needs its daemon and its clients in one IPC namespace, and they are: the agent starts the
daemons, whose pipes are in its run directory, and the workers. hostIPC is needed where daemon and clients are in different pods; here it would only
let other pods' processes in. For the same reason the GPUs must not be shared by the device plugin (MPS, time-slicing): they are shared here.
The run directory is the node's (/var/lib/{APP}/NAMESPACE): which scheduler an agent obeys must outlive its pod
(docs/operate/availability.md). That, and the container that gives it to the agent's user, is what the "restricted" and "baseline" pod security
standards refuse; nothing else here is."""
