"""What a cluster's file wants of Kubernetes, checked; and the file as the pods read it. Sans-IO.

Kubernetes says where schedulers and frontends run, the file how many there are. Node agents are different: the GPUs are the file's, so
each of `cluster.nodes` names the Kubernetes node with them. In the pods' file the roles are placed as on hosts of one's own
(docs/operate/deploy.md): schedulers by their stable DNS names, frontends at one place that all of them share.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.k8s.gateway import GatewayWanted, gateway_wanted
from deploy.k8s.names import AGENT_NAME, APP, CONFIG_FILE, FRONTEND_NAME, KEYS_DIR, RUN_DIR, SCHEDULER_NAME
from deploy.ssh.config_bundle import Source, take_along, take_glue_along
from fabric.errors import ConfigError
from fabric.ipc import PATH_BYTES_MAX
from fabric.keys import key_file, principal_of_node
from fabric.policy_options import shown
from roles.config.cluster import ClusterConfig, NodeConfig
from roles.config.documents import through_json
from roles.config.hosts import CLIENT_PORT, CONTROL_PORT
from roles.config.listeners import check_apart
from roles.config.named_files import loaders_of

INTERFACE: Final = "eth0"
"""The interface of a pod's own address, by the convention of all runtimes."""
METRICS_PORT: Final = 8002
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NODE: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_IMAGE: Final = re.compile(
    r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)*(:[A-Za-z0-9_][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """Nodes that are alike: one DaemonSet. `gpus`: of each, on real devices; 0: its pods need none."""

    name: str
    nodes: tuple[NodeConfig, ...]
    gpus: int

    @property
    def key_files(self) -> tuple[str, ...]:
        """Of its nodes' keys."""
        return tuple(key_file(principal_of_node(node.host)) for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Wanted:
    """`files`: what the pods' configuration folder holds, a file here or its content.

    `remarks`: what is otherwise than the file says.
    """

    namespace: str
    image: str
    schedulers: int
    frontends: int
    agents: tuple[AgentGroup, ...]
    env: Mapping[str, str]
    keys: Path
    files: Mapping[str, Path | bytes]
    metrics_port: int = METRICS_PORT
    needs_hub: bool = False
    gateway: GatewayWanted | None = None
    remarks: tuple[str, ...] = ()


def checked_namespace(namespace: str) -> str:
    """The same. Raises ConfigError for what cannot be one."""
    if not _LABEL.fullmatch(namespace):
        raise ConfigError(
            f"--namespace: is {shown(namespace)}; it must be 1 to 63 small letters, digits or '-', as in {APP}"
        )
    return namespace


def checked_image(image: str) -> str:
    """The same. Raises ConfigError for what names no image."""
    if not _IMAGE.fullmatch(image):
        raise ConfigError(f"--image: is {shown(image)}; it must be like registry.example/tenuto:1.0")
    return image


def wanted_of(source: Source, namespace: str, image: str) -> Wanted:
    """What the file wants, with a checked namespace and image. Raises ConfigError for a file that is made for hosts, or lacks what pods need."""
    config = source.config
    cluster = source.document["cluster"]
    _check_places(cluster)
    _check_nodes(config, cluster)
    if config.security.keys is None:
        beside = source.path.parent / "keys"
        raise ConfigError(
            "security.keys: is missing; pods reach each other by the network, and that needs keys: write"
            f" security: {{keys: keys}} into {source.path}, and make them with"
            f" `{shlex.join(['tenuto', 'keys', 'create', str(beside), '--config', str(source.path)])}`"
        )
    remarks = []
    if not re.search(r":[^/:]+$", image):
        remarks.append(f"{image} has no tag: after a push, pods of one cluster may run different versions")
    if any(node.workers_outlive_agent for node in config.nodes):
        remarks.append("workers_outlive_agent: a container ends with its agent, and so do the workers in it")
    gateway = gateway_wanted(config.gateway)
    if config.gateway.is_wanted and gateway is None:
        remarks.append(
            "listen.http, listen.grpc: others reach a pod, and cluster.gateway has no token_file: the manifests have no gateway"
        )
    if gateway is not None and config.gateway.is_model_control:
        remarks.append(
            "cluster.gateway.model_control: no scheduler is beside a gateway in its pod: it is off"
        )
    metrics_port = _port(config.listen.metrics) or METRICS_PORT
    _check_ports(metrics_port, gateway)
    loaders = [loader for model in source.document["models"] for loader in loaders_of(model)]
    return Wanted(
        namespace=namespace,
        image=image,
        schedulers=config.schedulers,
        frontends=config.frontends,
        agents=_groups(config.nodes),
        env=config.deploy.env,
        keys=config.security.keys,
        files=_files(source, namespace, gateway),
        gateway=gateway,
        metrics_port=metrics_port,
        needs_hub=any(loader.get("from_hub") for loader in loaders),
        remarks=tuple(remarks),
    )


def scheduler_host(number: int, namespace: str) -> str:
    """The DNS name of a scheduler's pod. It stays when the pod is another one."""
    return f"{SCHEDULER_NAME}-{number}.{SCHEDULER_NAME}.{namespace}.svc"


def _check_places(cluster: Mapping[str, Any]) -> None:
    for key, example in (("schedulers", 2), ("frontends", 3)):
        if isinstance(cluster.get(key), Sequence):
            raise ConfigError(
                f"cluster.{key}: lists hosts; where they run is Kubernetes' choice here, so write how many,"
                f" such as {key}: {example}"
            )
    if cluster.get("addresses"):
        raise ConfigError(
            "cluster.addresses: has hosts' addresses; pods get theirs from Kubernetes, leave it out"
        )


def _check_ports(metrics_port: int, gateway: GatewayWanted | None) -> None:
    """What listens in one pod does so at its one address, whatever hosts the file says."""
    doors = {} if gateway is None else gateway.ports
    pods = {
        SCHEDULER_NAME: {"a scheduler's door": CONTROL_PORT},
        FRONTEND_NAME: {
            "a frontend's door": CLIENT_PORT,
            **{f"listen.{name}": port for name, port in doors.items()},
        },
    }
    page = {f"each pod's page of metrics (listen.metrics, or {METRICS_PORT})": metrics_port}
    check_apart(
        (what, pod, f"{pod}:{port}")
        for pod, ports in pods.items()
        for what, port in {**ports, **page}.items()
    )


def _check_nodes(config: ClusterConfig, cluster: Mapping[str, Any]) -> None:
    if cluster.get("nodes") is None:
        raise ConfigError(
            "cluster.gpus: says not where they are; list cluster.nodes, each with the name of its Kubernetes node"
            " as host (kubectl get nodes)"
        )
    for at, (node, written) in enumerate(zip(config.nodes, cluster["nodes"], strict=True)):
        where = f"cluster.nodes[{at}]"
        if not _NODE.fullmatch(node.host):
            raise ConfigError(
                f"{where}.host: is {shown(node.host)}; a Kubernetes node's name has small letters, digits, '-' and '.'"
            )
        socket = f"{RUN_DIR}/mps-{node.host}/gpu99/pipe/control_privileged"  # the longest of an agent's
        if len(socket) > PATH_BYTES_MAX:
            most = len(node.host) - len(socket) + PATH_BYTES_MAX
            raise ConfigError(
                f"{where}.host: has {len(node.host)} letters; an agent's socket has room for {most}"
            )
        if node.device == "cuda" and not written.get("gpus"):
            raise ConfigError(
                f"{where}.gpus: is missing or 0; its pod asks Kubernetes for so many GPUs of {node.host}, such as gpus: 4"
            )


def _groups(nodes: Sequence[NodeConfig]) -> tuple[AgentGroup, ...]:
    found: dict[str, list[NodeConfig]] = {}
    for node in nodes:
        name = f"{AGENT_NAME}-{node.device}" + (f"-{node.gpus}" if node.device == "cuda" else "")
        found.setdefault(name, []).append(node)
    return tuple(
        AgentGroup(name, tuple(alike), alike[0].gpus if alike[0].device == "cuda" else 0)
        for name, alike in found.items()
    )


def _files(source: Source, namespace: str, gateway: GatewayWanted | None) -> dict[str, Path | bytes]:
    """The configuration as every role reads it, and what it names."""
    files: dict[str, Path | bytes] = {}
    config = source.config
    document = through_json(source.document)
    for model in document["models"]:
        take_along(model, source.path.parent, files, {}, is_absolute_there=True)
    take_glue_along(document, source.path.parent, files, {})
    for node in document["cluster"]["nodes"]:
        node.pop("workers_outlive_agent", None)
    document["cluster"] |= {
        "schedulers": [
            {"host": scheduler_host(at, namespace), "standby": one.is_standby}
            | ({"shard": one.shard} if config.shards > 1 else {})
            for at, one in enumerate(config.places.schedulers)
        ],
        "frontends": [{"host": f"{FRONTEND_NAME}.{namespace}.svc"}],
    }
    document["deploy"] = {"interface": INTERFACE}
    document["security"] = {"keys": KEYS_DIR}
    document["listen"] = {}
    written = document["cluster"].pop("gateway", None)
    if gateway is not None:
        document["cluster"]["gateway"] = gateway.section(written or {})
    files[CONFIG_FILE] = json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
    return files


def _port(address: str | None) -> int | None:
    """Of host:port; None for none, and for any free one."""
    return int(address.rpartition(":")[2]) or None if address else None
