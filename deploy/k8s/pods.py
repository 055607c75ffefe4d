"""The pods of each role: one container that runs the role as by hand, after one that lays its key where the role wants it.

What all of them have in common is here: an ordinary user, a root file system that cannot be written, no capabilities, nothing of the
Kubernetes API; own run directory; probes that ask the role itself through its local socket (`tenuto health`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.k8s.file_contents import Material
from deploy.k8s.gateway import (
    GATEWAY_RUN_DIR,
    SECRET_DIR,
    STOP_S,
    GatewayWanted,
    gateway_command,
    key_script,
)
from deploy.k8s.names import (
    AGENT_NAME,
    APP,
    CONFIG_FILE,
    FRONTEND_NAME,
    GATEWAY_NAME,
    KEYS_DIR,
    RUN_DIR,
    SCHEDULER_NAME,
)
from deploy.k8s.requirements import AgentGroup, Wanted
from deploy.local.role_plans import AGENT_STOP_MS, FRONTEND_STOP_MS, SCHEDULER_STOP_MS
from fabric.keys import FRONTEND, SCHEDULER, TRUSTED_FILE, key_file, principal_of_node
from roles.config.hosts import CLIENT_PORT, CONTROL_PORT

Plain = dict[str, Any]

USER: Final = 10_001
CONFIG_DIR: Final = "/etc/tenuto/cluster"
TRUSTED_DIR: Final = "/etc/tenuto/trusted"
OWN_KEY: Final = "/etc/tenuto/own.key"
GPU_RESOURCE: Final = "nvidia.com/gpu"
CONFIG_NAME: Final = f"{APP}-cluster"
TRUSTED_NAME: Final = f"{APP}-trusted"
UNROUTED_S: Final = 5
"""From the end of a pod's address in its Service to the last connection that still comes: kube-proxies follow one by one."""
SPARE_S: Final = 4
_NODE_MARK: Final = "NODE"


_RUN_OF_POD: Final[Plain] = {"name": "run", "emptyDir": {"sizeLimit": "256Mi"}}


@dataclass(frozen=True, slots=True)
class PodRole:
    """What differs from role to role.

    `name`: of its objects, its Secret among them, which holds `key_files`; `own_key` is
    the one of them that a pod gets, and may name variables of `env` in Kubernetes' way. `arguments`: of the `tenuto` command.
    `stop_ms`: what the role needs for its end. `unrouted_s`: what its Service needs before that.
    """

    name: str
    component: str
    arguments: tuple[str, ...]
    env: tuple[Plain, ...]
    key_files: tuple[str, ...]
    own_key: str
    ports: Mapping[str, int]
    requests: Mapping[str, str]
    stop_ms: float
    limits: Mapping[str, str]
    unrouted_s: int = 0


INSTANCE_LABEL: Final = "app.kubernetes.io/instance"


def labels(component: str, instance: str | None = None) -> dict[str, str]:
    """By which a role's pods are found. `instance`: only those of one object, where several have such pods."""
    found = {"app.kubernetes.io/name": APP, "app.kubernetes.io/component": component}
    return found if instance is None else {**found, INSTANCE_LABEL: instance}


def scheduler_pod(wanted: Wanted, material: Material) -> Plain:
    """Finds out which one it is by its number in the StatefulSet."""
    index = "metadata.labels['apps.kubernetes.io/pod-index']"
    role = PodRole(
        name=SCHEDULER_NAME,
        component=SCHEDULER_NAME,
        arguments=("scheduler", CONFIG_FILE, "--index", "$(POD_INDEX)"),
        env=(_from_field("POD_INDEX", index),),
        key_files=(key_file(SCHEDULER),),
        own_key=key_file(SCHEDULER),
        ports={"control": CONTROL_PORT, "metrics": wanted.metrics_port},
        requests={"cpu": "1", "memory": "512Mi"},
        limits={"memory": "2Gi"},
        stop_ms=SCHEDULER_STOP_MS,
    )
    return _template(role, wanted, material, [_spread(SCHEDULER_NAME)], _RUN_OF_POD)


def frontend_pod(wanted: Wanted, material: Material) -> Plain:
    """Named after its pod: Kubernetes says how many there are."""
    role = PodRole(
        name=FRONTEND_NAME,
        component=FRONTEND_NAME,
        arguments=("frontend", CONFIG_FILE, "--name", "$(POD_NAME)"),
        env=(_from_field("POD_NAME", "metadata.name"),),
        key_files=(key_file(FRONTEND),),
        own_key=key_file(FRONTEND),
        ports={"client": CLIENT_PORT, "metrics": wanted.metrics_port},
        requests={"cpu": "1", "memory": "1Gi"},
        limits={"memory": "3Gi"},  # it keeps up to 1 GiB of requests that wait
        stop_ms=FRONTEND_STOP_MS,
        # A gateway ends first: what it still answers is asked of this frontend.
        unrouted_s=UNROUTED_S + (0 if wanted.gateway is None else STOP_S),
    )
    spread = _spread(FRONTEND_NAME) | {"matchLabelKeys": ["pod-template-hash"]}
    template = _template(role, wanted, material, [spread], _RUN_OF_POD)
    if wanted.gateway is not None:
        _add_gateway(template["spec"], wanted, wanted.gateway)
        ids = " ".join(material.key_ids[name] for name in wanted.gateway.files)
        template["metadata"]["annotations"][f"{APP}/tokens"] = hashlib.sha256(ids.encode()).hexdigest()[:12]
    return template


def _add_gateway(spec: Plain, wanted: Wanted, gateway: GatewayWanted) -> None:
    """One more container beside the frontend's, with the same folders."""
    of_frontend = spec["containers"][0]
    env = [one for one in of_frontend["env"] if one["name"] != "TENUTO_RUN_DIR"]
    container = {
        **of_frontend,
        "name": GATEWAY_NAME.removeprefix(f"{APP}-"),
        "command": gateway_command(gateway, CONFIG_FILE),
        "env": [*env, {"name": "TENUTO_RUN_DIR", "value": GATEWAY_RUN_DIR}],
        "ports": [{"name": name, "containerPort": port} for name, port in gateway.ports.items()],
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(UNROUTED_S)]}}},
    }
    spec["containers"].append(container)
    spec["initContainers"].append(
        {
            "name": "tokens",
            "image": wanted.image,
            "command": ["sh", "-c", key_script(gateway)],
            "resources": _small(),
            "securityContext": _closed(),
            "volumeMounts": [
                {"name": "tokens", "mountPath": SECRET_DIR, "readOnly": True},
                {"name": "keys", "mountPath": KEYS_DIR},
                {"name": "run", "mountPath": RUN_DIR.rpartition("/")[0]},
            ],
        }
    )
    secret = {"secretName": GATEWAY_NAME, "defaultMode": 0o440}
    spec["volumes"].append({"name": "tokens", "secret": secret})


def agent_pod(wanted: Wanted, material: Material, group: AgentGroup) -> Plain:
    """On the group's nodes, with all their GPUs. Its run directory is the node's: leases must outlive the pod."""
    gpus = {GPU_RESOURCE: str(group.gpus)} if group.gpus else {}
    role = PodRole(
        name=group.name,
        component=AGENT_NAME,
        arguments=("node-agent", CONFIG_FILE, "--node", "$(NODE_NAME)"),
        env=(
            _from_field("NODE_NAME", "spec.nodeName"),
            *([{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"}] if gpus else []),
        ),
        key_files=group.key_files,
        own_key=key_file(principal_of_node(_NODE_MARK)).replace(_NODE_MARK, "$(NODE_NAME)"),
        ports={"metrics": wanted.metrics_port},
        requests={"cpu": str(1 + group.gpus), "memory": f"{1 + 4 * group.gpus}Gi", **gpus},
        limits=gpus,  # of memory none: a worker that is killed for it is a slice that is lost
        stop_ms=AGENT_STOP_MS,
    )
    folder = {"path": f"/var/lib/{APP}/{wanted.namespace}", "type": "DirectoryOrCreate"}
    template = _template(role, wanted, material, [], {"name": "run", "hostPath": folder})
    spec = template["spec"]
    spec["initContainers"].insert(0, _run_folder_of(wanted.image))
    terms = [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node.host]}]}
        for node in group.nodes
    ]
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    spec["affinity"] = {"nodeAffinity": affinity}
    if gpus:
        spec["tolerations"] = [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]
        spec["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
        spec["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108  the pod's own
    return template


def _template(
    role: PodRole,
    wanted: Wanted,
    material: Material,
    spread: Sequence[Plain],
    run: Plain,
) -> Plain:
    keys_id = hashlib.sha256(" ".join(material.key_ids[name] for name in role.key_files).encode()).hexdigest()
    # Pods are replaced when these change.
    marks = {f"{APP}/config": material.config_id, f"{APP}/keys": keys_id[:12]}
    grace_s = role.unrouted_s + math.ceil(role.stop_ms / 1_000) + SPARE_S
    spec: Plain = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # their variables would begin with TENUTO_, as ours do
        "shareProcessNamespace": True,  # so that a role is not process 1, which has to take in orphans and gets no signals
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"topologySpreadConstraints": list(spread)} if spread else {}),
        "initContainers": [_key_container(role, wanted.image)],
        "containers": [_container(role, wanted)],
        "volumes": [
            {"name": "cluster", "configMap": {"name": CONFIG_NAME, "items": config_items(material)}},
            {"name": "trusted", "configMap": {"name": TRUSTED_NAME}},
            {"name": "secret", "secret": {"secretName": role.name, "defaultMode": 0o400}},
            {"name": "keys", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "4Gi"}},
            run,
        ],
    }
    return {"metadata": {"labels": labels(role.component, role.name), "annotations": marks}, "spec": spec}


def _as_it_is(value: str) -> str:
    """Kubernetes reads `$(NAME)` as another variable's value and `$$` as `$`."""
    return value.replace("$", "$$")


def _container(role: PodRole, wanted: Wanted) -> Plain:
    env = {**wanted.env, "TENUTO_RUN_DIR": RUN_DIR, "HOME": "/tmp"}  # noqa: S108  the pod's own
    own = {one["name"] for one in role.env}
    container: Plain = {
        "name": role.component.removeprefix(f"{APP}-"),
        "image": wanted.image,
        "command": ["tenuto", *role.arguments, "--metrics", f"$(POD_IP):{wanted.metrics_port}"],
        "workingDir": CONFIG_DIR,
        "env": [
            _from_field("POD_IP", "status.podIP"),
            *role.env,
            *({"name": name, "value": _as_it_is(value)} for name, value in env.items() if name not in own),
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in role.ports.items()],
        "resources": {"requests": dict(role.requests), "limits": dict(role.limits)},
        "securityContext": _closed(),
        # It may have to plan first, or to wait for the cores that models load on.
        "startupProbe": _probe("--live", every_s=2, failures=90),
        "readinessProbe": _probe(every_s=10, failures=2),
        # A probe starts Python: on a node that is short of processor time a role that answers at once shall not be ended for that.
        "livenessProbe": _probe("--live", every_s=30, failures=3, limit_s=20),
        "volumeMounts": [
            {"name": "cluster", "mountPath": CONFIG_DIR, "readOnly": True},
            {"name": "trusted", "mountPath": TRUSTED_DIR, "readOnly": True},
            {"name": "keys", "mountPath": KEYS_DIR, "readOnly": True},
            {"name": "run", "mountPath": RUN_DIR.rpartition("/")[0]},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  the pod's own
        ],
    }
    if not role.limits:
        del container["resources"]["limits"]
    if role.unrouted_s:
        # SIGTERM begins the drain. Before it: connections that the Service still sends here.
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(role.unrouted_s)]}}}
    return container


def _key_container(role: PodRole, image: str) -> Plain:
    """Secret volumes belong to root, and roles refuse keys that others may read: so the role's user gets a copy, in memory.

    The list of who is trusted is linked, so that a key that is revoked there is refused without a restart.
    """
    script = (
        f'install -m 0400 {OWN_KEY} "{KEYS_DIR}/$KEY_FILE" &&'
        f" ln -sf {TRUSTED_DIR}/{TRUSTED_FILE} {KEYS_DIR}/{TRUSTED_FILE}"
    )
    return {
        "name": "keys",
        "image": image,
        "command": ["sh", "-c", script],
        "env": [*role.env, {"name": "KEY_FILE", "value": role.own_key}],
        "resources": _small(),
        "securityContext": _closed(),
        "volumeMounts": [
            # This one key alone: the others in the Secret are not the pod's.
            {"name": "secret", "mountPath": OWN_KEY, "subPathExpr": role.own_key, "readOnly": True},
            {"name": "keys", "mountPath": KEYS_DIR},
        ],
    }


def _run_folder_of(image: str) -> Plain:
    """A folder of the node is root's when it is made; this gives it to the agent's user, and does nothing else."""
    return {
        "name": "run-folder",
        "image": image,
        "command": ["sh", "-c", f"umask 077 && mkdir -p {RUN_DIR} && chown {USER}:{USER} {RUN_DIR}"],
        "resources": _small(),
        "securityContext": {
            **_closed(),
            "runAsNonRoot": False,
            "runAsUser": 0,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
        },
        "volumeMounts": [{"name": "run", "mountPath": RUN_DIR.rpartition("/")[0]}],
    }


def config_items(material: Material) -> list[Plain]:
    """Which key of the ConfigMap is which path: keys have no slashes."""
    return [{"key": key, "path": path} for path, key in config_keys(material).items()]


def config_keys(material: Material) -> dict[str, str]:
    """By path."""
    names = {path: path.replace("/", "_") for path in material.config}
    return {
        path: name if is_plain(name) and list(names.values()).count(name) == 1 else f"file-{number}"
        for number, (path, name) in enumerate(names.items())
    }


def is_plain(name: str) -> bool:
    """Whether a ConfigMap takes it as a key."""
    return len(name) <= 253 and all(one.isascii() and (one.isalnum() or one in "-._") for one in name)


def _from_field(name: str, path: str) -> Plain:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _small() -> Plain:
    return {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}}


def _closed() -> Plain:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _probe(*flags: str, every_s: int, failures: int, limit_s: int = 5) -> Plain:
    command = {"command": ["tenuto", "health", *flags]}
    return {
        "exec": command,
        "periodSeconds": every_s,
        "timeoutSeconds": limit_s,
        "failureThreshold": failures,
    }


def _spread(component: str) -> Plain:
    """On different nodes where there are some: a standby beside the one it stands by for is lost with it."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels(component)},
    }
