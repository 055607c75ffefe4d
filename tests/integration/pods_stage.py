"""Pods without Kubernetes: what the manifests say is done as a kubelet does it, with plain processes and folders.

Volumes are folders with what is in them laid out as in a pod: through the links that a kubelet swaps when a ConfigMap changes. Init containers run
first, then the container, each with its own command, variables and working folder; probes are run as they are written. What
is not as in a pod: paths of mounts are mapped into the pod's folder, addresses to loopback, and the user is the test's.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from roles.runtime.process import PARENT_VARIABLE
from tests.environment import AT_ONCE
from tests.integration.proc import until
from tests.unit.deploy.k8s.stage import (
    Plain,
    containers,
    content_of,
    environment,
    expanded,
    nodes_of,
    pod_templates,
)

ROOT = Path(__file__).parents[2]
Objects = Mapping[tuple[str, str], Plain]


@dataclass
class Pod:
    """One of an object's. `fields`: what the downward API tells of it. `addresses`: of the hosts in its file, on loopback."""

    name: str
    template: Plain
    fields: Mapping[str, str]
    folder: Path
    node: Path
    objects: Objects
    addresses: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    _volumes: dict[str, Path] = field(default_factory=dict)

    @property
    def container(self) -> Plain:
        (found,) = self.template["spec"]["containers"]
        assert isinstance(found, dict)
        return found

    def start(self) -> None:
        """Volumes, init containers, container."""
        self.folder.mkdir(parents=True)
        for volume in self.template["spec"]["volumes"]:
            self._make(volume)
        for container in self.template["spec"]["initContainers"]:
            done = self._run(container, container["command"])
            assert done.returncode == 0, f"{self.name}: {container['name']}: {done.stderr.decode()}"
        words, settings = self._started(self.container, self.container["command"])
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, **settings)

    def is_ready(self) -> bool:
        """What its readiness probe says."""
        return self._probe("readinessProbe")

    def is_alive(self) -> bool:
        """What its liveness probe says."""
        return self._probe("livenessProbe")

    def execute(self, *command: str) -> subprocess.CompletedProcess[bytes]:
        """As `kubectl exec` does."""
        return self._run(self.container, command)

    def end(self) -> int:
        """As Kubernetes ends a pod; the exit code. A process that outlasts the grace period fails."""
        assert self.process is not None
        before = self.container.get("lifecycle", {}).get("preStop")
        if before is not None:
            assert self._run(self.container, before["exec"]["command"]).returncode == 0
        self.process.terminate()
        return self.process.wait(self.template["spec"]["terminationGracePeriodSeconds"])

    def kill(self) -> None:
        """At once, with all that it started."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def change(self, name: str, content: Mapping[str, bytes]) -> None:
        """A ConfigMap or Secret that it mounts has other content."""
        (volume,) = [one for one in self.template["spec"]["volumes"] if one["name"] == name]
        assert "secret" in volume or "configMap" in volume
        write_volume(self._volumes[name], content)

    def _make(self, volume: Plain) -> None:
        path = self.folder / "volumes" / volume["name"]
        if "hostPath" in volume:
            path = self.node / volume["hostPath"]["path"].lstrip("/")
            path.mkdir(parents=True, exist_ok=True)
        elif "emptyDir" in volume:
            path.mkdir(parents=True)
        else:
            path.mkdir(parents=True)
            write_volume(
                path, {one: self._mapped(text) for one, text in content_of(self.objects, volume).items()}
            )
        self._volumes[volume["name"]] = path

    def _mapped(self, content: bytes) -> bytes:
        """A file that roles read: where they are is another place here."""
        if b'"models"' not in content:
            return content
        document = json.loads(content)
        document["cluster"]["addresses"] = dict(self.addresses)
        document["deploy"]["interface"] = "lo"
        document["security"]["keys"] = self._placed(document["security"]["keys"])
        return json.dumps(document).encode()

    def _placed(self, text: str) -> str:
        """With every path of a mount as it is here: also one that only another container has, to which a link may lead."""
        places = {}
        for container in containers(self.template):
            for mount in container["volumeMounts"]:
                path = self._volumes.get(mount["name"], self.folder / "volumes" / mount["name"])
                if "subPathExpr" in mount:
                    path /= expanded(mount["subPathExpr"], environment(container, self.fields))
                places[mount["mountPath"]] = path
        longest_first = sorted(places, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, longest_first)), lambda found: str(places[found[0]]), text)

    def _started(self, container: Plain, command: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """A command line in a container, and how to run it."""
        variables = environment(container, self.fields)
        words = [self._placed(expanded(word, variables)) for word in command]
        words = [word.replace("10001:10001", f"{os.getuid()}:{os.getgid()}") for word in words]
        if words[0] == "tenuto":
            words[:1] = [sys.executable, "-m", "roles.cli"]
        env = {name: self._placed(value) for name, value in variables.items()}
        env |= AT_ONCE | {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            PARENT_VARIABLE: str(os.getpid()),
        }
        folder = self._placed(container["workingDir"]) if "workingDir" in container else "/"
        return words, {"env": env, "cwd": folder}

    def _run(self, container: Plain, command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        words, settings = self._started(container, command)
        return subprocess.run(words, capture_output=True, check=False, timeout=60, **settings)

    def _probe(self, kind: str) -> bool:
        probe = self.container[kind]
        return self._run(self.container, probe["exec"]["command"]).returncode == 0


@dataclass
class Pods:
    """All that run. `template_of`: by object's name."""

    folder: Path
    objects: Objects
    network: str
    running: dict[str, Pod] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """Of a host in the pods' file."""
        return self._addresses[name]

    def start_all(self, frontends: int) -> None:
        """As the controllers of Kubernetes would: so many schedulers, an agent on each node, and the frontends."""
        stateful = self.objects["StatefulSet", "tenuto-scheduler"]["spec"]
        for number in range(stateful["replicas"]):
            self.start_scheduler(number)
        for (kind, name), one in self.objects.items():
            if kind == "DaemonSet":
                for node in nodes_of(one):
                    self._start(name, f"{name}-{node}", {"spec.nodeName": node})
        for number in range(frontends):
            self.start_frontend(number)

    def start_scheduler(self, number: int) -> Pod:
        """Number `number` of the StatefulSet: with its name, but nothing of the pod that had it before."""
        index = {"metadata.labels['apps.kubernetes.io/pod-index']": str(number)}
        return self._start("tenuto-scheduler", f"tenuto-scheduler-{number}", index)

    def start_frontend(self, number: int) -> Pod:
        """One more of the Deployment."""
        name = f"tenuto-frontend-7d9f8b6c5d-{secrets.token_hex(3)[:5]}"
        host = "tenuto-frontend.tenuto.svc"
        own = {host: f"{self.network}.{100 + number}"}
        return self._start("tenuto-frontend", name, {"metadata.name": name}, own)

    def _start(
        self, owner: str, name: str, fields: Mapping[str, str], own: Mapping[str, str] | None = None
    ) -> Pod:
        folder = self.folder / str(len(list(self.folder.iterdir())))
        node = self.folder / "nodes" / fields.get("spec.nodeName", "any")
        node.mkdir(parents=True, exist_ok=True)
        addresses = {**self._addresses, **(own or {})}
        fields = {**fields, "status.podIP": f"{self.network}.{130 + int(folder.name)}"}
        pod = Pod(name, pod_templates(self.objects)[owner], fields, folder, node, self.objects, addresses)
        self.running[name] = pod
        pod.start()
        return pod

    @property
    def _addresses(self) -> dict[str, str]:
        config = json.loads(self.objects["ConfigMap", "tenuto-cluster"]["data"]["cluster.json"])["cluster"]
        hosts = [one["host"] for one in (*config["schedulers"], *config["nodes"], *config["frontends"])]
        return {host: f"{self.network}.{at}" for at, host in enumerate(hosts, start=1)}


@contextmanager
def pods(objects: Objects) -> Iterator[Pods]:
    """A place to run them; at its end nothing runs any more."""
    with TemporaryDirectory(prefix="tnt-") as folder:  # short: there are sockets in it
        network = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
        stage = Pods(Path(folder), objects, network)
        try:
            yield stage
        finally:
            for pod in stage.running.values():
                pod.kill()


def until_ready(running: Sequence[Pod], limit_ms: float = 90_000.0) -> None:
    """By their own probes."""
    waiting = list(running)

    def are_ready() -> bool:
        for pod in waiting:
            assert pod.process is not None
            assert pod.process.poll() is None, f"{pod.name} ended: {pod.log()}"
        waiting[:] = [pod for pod in waiting if not pod.is_ready()]
        return not waiting

    until(are_ready, limit_ms, "that all pods are ready")


def write_volume(folder: Path, content: Mapping[str, bytes]) -> None:
    """As a kubelet does: all of it at once, behind one link that is swapped."""
    version = folder / f"..{secrets.token_hex(4)}"
    for path, data in content.items():
        (version / path).parent.mkdir(parents=True, exist_ok=True)
        (version / path).write_bytes(data)
        (version / path).chmod(0o444)
    draft = folder / "..data_tmp"
    draft.symlink_to(version.name)
    draft.rename(folder / "..data")
    for top in {Path(path).parts[0] for path in content}:
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(Path("..data") / top)
