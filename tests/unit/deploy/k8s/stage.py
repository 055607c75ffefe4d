"""A file, its keys, and the manifests that come of it; and how a kubelet reads what is in them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from deploy.k8s.commands import k8s
from roles.cli.keys import keys

Plain = dict[str, Any]

MODEL = {"name": "m", "slo_ms": 30, "profile": {"alpha_ms": 1, "beta_ms": 5}}
NODES: list[Plain] = [
    {"host": "gpu-a", "gpus": 2, "type": "v100", "device": "cuda"},
    {"host": "gpu-b.example", "gpus": 2, "type": "v100", "device": "cuda", "mps": False},
    {"host": "gpu-c", "gpus": 4, "device": "cuda"},
    {"host": "cpu-d", "device": "cpu"},
]
DOCUMENT: Plain = {
    "models": [MODEL],
    "cluster": {"nodes": NODES, "schedulers": 2, "frontends": 3},
    "security": {"keys": "keys"},
    "deploy": {"env": {"OMP_NUM_THREADS": "1"}},
}
IMAGE = "registry.example/tenuto:1.0"


class Stage:
    """Change `document`, and ask for manifests."""

    def __init__(self, folder: Path, document: Mapping[str, Any] = DOCUMENT) -> None:
        self.folder = folder
        self.file = folder / "cluster.yaml"
        self.document: Plain = {**document}

    def write(self) -> None:
        self.file.write_text(yaml.safe_dump(self.document))
        if not (self.folder / "keys").exists():
            made = CliRunner().invoke(keys, ["create", str(self.folder / "keys"), "--config", str(self.file)])
            assert made.exit_code == 0, made.output

    def run(self, *options: str) -> Any:
        return CliRunner().invoke(k8s, [str(self.file), *(options or ("--image", IMAGE))])

    def objects(self, *options: str) -> dict[tuple[str, str], Plain]:
        """By kind and name."""
        self.write()
        done = self.run("--image", IMAGE, *options)
        assert done.exit_code == 0, done.exception or done.output
        found = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
        assert len({_name(one) for one in found}) == len(found)
        return {_name(one): one for one in found}


def with_gateway(folder: Path, **more: Any) -> Stage:
    stage = Stage(folder)
    (folder / "tokens").write_text("a-token-of-some-length\n", encoding="utf-8")
    (folder / "tokens").chmod(0o600)
    stage.document = json.loads(json.dumps(stage.document))
    stage.document["listen"] = {"http": "127.0.0.1:8080", "grpc": "127.0.0.1:0"}
    stage.document["cluster"]["gateway"] = {"token_file": "tokens", "request_mb": 8, **more}
    return stage


def _name(one: Plain) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def pod_templates(objects: Mapping[tuple[str, str], Plain]) -> dict[str, Plain]:
    """By the name of the object that makes such pods."""
    return {
        name: one["spec"]["template"]
        for (kind, name), one in objects.items()
        if kind in ("StatefulSet", "Deployment", "DaemonSet")
    }


def containers(template: Plain) -> Iterator[Plain]:
    yield from template["spec"].get("initContainers", ())
    yield from template["spec"]["containers"]


def nodes_of(daemon_set: Plain) -> list[str]:
    """Those that its pods run on."""
    affinity = daemon_set["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    fields = [field for term in terms for field in term["matchFields"]]
    assert all(field["key"] == "metadata.name" and field["operator"] == "In" for field in fields)
    assert all(len(field["values"]) == 1 for field in fields), "more are refused by Kubernetes"
    return [field["values"][0] for field in fields]


def environment(container: Plain, fields: Mapping[str, str]) -> dict[str, str]:
    """A container's variables, in order, as the kubelet makes them. `fields`: of the pod, by path."""
    found: dict[str, str] = {}
    for one in container.get("env", ()):
        value = fields[one["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in one else one["value"]
        found[one["name"]] = expanded(value, found)
    return found


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """With each $(NAME) replaced, and $$ by $; a name that is not known stays, which is never meant."""

    def value(found: re.Match[str]) -> str:
        assert found[1] is None or found[1] in variables, f"{text}: has a variable that is not set"
        return "$" if found[1] is None else variables[found[1]]

    return re.sub(r"\$\$|\$\((\w+)\)", value, text)


def content_of(objects: Mapping[tuple[str, str], Plain], volume: Plain) -> dict[str, bytes]:
    """What is in a volume of a ConfigMap or a Secret, by path."""
    if "secret" in volume:
        data = objects["Secret", volume["secret"]["secretName"]]["data"]
        return {key: base64.b64decode(value) for key, value in data.items()}
    found = objects["ConfigMap", volume["configMap"]["name"]]
    held = {key: value.encode() for key, value in found["data"].items()}
    held |= {key: base64.b64decode(value) for key, value in found.get("binaryData", {}).items()}
    items = volume["configMap"].get("items")
    return held if items is None else {one["path"]: held[one["key"]] for one in items}
