"""What the manifests mean: read as Kubernetes would, never compared with a text of ours."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
from click.testing import CliRunner

from deploy.k8s.manifests import PENDING_METRIC
from deploy.local.role_plans import AGENT_STOP_MS, FRONTEND_STOP_MS, SCHEDULER_STOP_MS
from fabric.keys import read_pair
from roles.cli.group import LazyGroup
from roles.cli.keys import keys
from roles.config.read_config import parse_config
from tests.unit.deploy.k8s.stage import (
    MODEL,
    NODES,
    Plain,
    Stage,
    containers,
    content_of,
    environment,
    expanded,
    nodes_of,
    pod_templates,
    with_gateway,
)

FIELDS = {
    "metadata.name": "tenuto-frontend-7d9f8b6c5d-x2x4z",
    "metadata.labels['apps.kubernetes.io/pod-index']": "1",
    "spec.nodeName": "gpu-a",
    "status.podIP": "10.1.2.3",
}
AGENTS = {"tenuto-node-agent-cuda-2", "tenuto-node-agent-cuda-4", "tenuto-node-agent-cpu"}
ROLES = {"tenuto-scheduler", "tenuto-frontend", *AGENTS}


@pytest.fixture
def objects(tmp_path: Path) -> dict[tuple[str, str], Plain]:
    return Stage(tmp_path).objects()


@pytest.mark.parametrize("version", ["1.28.0", "1.37.0"])
def test_kubernetes_takes_every_object(objects: dict[tuple[str, str], Plain], version: str) -> None:
    for one in objects.values():
        kubernetes_validate.validate(one, version, strict=True)


def test_a_schema_finds_what_is_wrong(objects: dict[tuple[str, str], Plain]) -> None:
    objects["Deployment", "tenuto-frontend"]["spec"]["templates"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects["Deployment", "tenuto-frontend"], "1.37.0", strict=True)


def test_it_is_all_in_the_namespace(tmp_path: Path) -> None:
    for one in Stage(tmp_path).objects("--namespace", "serving-2").values():
        assert one["metadata"]["namespace"] == "serving-2"
        assert "tenuto.svc" not in json.dumps(one)


def test_every_object_finds_its_own_pods_and_no_others(objects: dict[tuple[str, str], Plain]) -> None:
    templates = pod_templates(objects)
    assert set(templates) == ROLES
    expected = {name: {name} for name in ROLES} | {"tenuto-node-agent": AGENTS}
    for (kind, name), one in objects.items():
        spec = one.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector"))
        if selector is not None:
            wanted = selector if kind == "Service" else selector["matchLabels"]
            found = {
                pod for pod, one in templates.items() if wanted.items() <= one["metadata"]["labels"].items()
            }
            assert found == expected[name], (kind, name)


# ------------------------------------------------------------ places


def test_the_pods_file_places_schedulers_at_the_names_that_kubernetes_gives_them(
    objects: dict[tuple[str, str], Plain], tmp_path: Path
) -> None:
    stateful = objects["StatefulSet", "tenuto-scheduler"]
    service = objects["Service", stateful["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    config = read(objects, tmp_path)
    names = [
        f"tenuto-scheduler-{at}.tenuto-scheduler.tenuto.svc" for at in range(stateful["spec"]["replicas"])
    ]
    assert [place.host for place in config.places.schedulers] == names
    assert {config.places.control_address(at) for at in range(2)} == {f"tcp://{name}:5550" for name in names}
    assert [one["port"] for one in service["spec"]["ports"]] == [5550]
    assert config.places.is_written, "or all of it would be one host's"


def test_the_frontends_are_at_one_place_where_clients_come_in(
    objects: dict[tuple[str, str], Plain], tmp_path: Path
) -> None:
    config = read(objects, tmp_path)
    assert len(config.places.frontends) == 1
    assert config.places.client_address(0, "10.1.2.3") == "tcp://10.1.2.3:5555"
    service = objects["Service", "tenuto-frontend"]["spec"]
    assert [one["port"] for one in service["ports"]] == [5555]
    ports = pod_templates(objects)["tenuto-frontend"]["spec"]["containers"][0]["ports"]
    by_name = {one["name"]: one["containerPort"] for one in ports}
    assert [by_name[one["targetPort"]] for one in service["ports"]] == [5555]


def test_every_node_of_the_file_has_its_agent_with_its_gpus(objects: dict[tuple[str, str], Plain]) -> None:
    found: dict[str, int] = {}
    for (kind, _), one in objects.items():
        if kind == "DaemonSet":
            (container,) = one["spec"]["template"]["spec"]["containers"]
            gpus = container["resources"].get("limits", {}).get("nvidia.com/gpu", "0")
            assert container["resources"]["requests"].get("nvidia.com/gpu", "0") == gpus
            found |= dict.fromkeys(nodes_of(one), int(gpus))
    assert found == {"gpu-a": 2, "gpu-b.example": 2, "gpu-c": 4, "cpu-d": 0}


def test_what_the_file_says_of_hosts_is_not_the_pods(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.document["listen"] = {
        "client": "tcp://127.0.0.1:7777",
        "http": "127.0.0.1:8080",
        "metrics": "127.0.0.1:9100",
    }
    stage.document["deploy"] = {"user": "me", "interface": "ens5", "env": {"A": "b", "B": "$(A)$$c$d"}}
    objects = stage.objects()
    config = read(objects, tmp_path)
    assert config.places.client_address(0, "10.1.2.3") == "tcp://10.1.2.3:5555"
    assert config.deploy.interface == "eth0"
    assert (config.gateway.is_wanted, config.listen.metrics) == (False, None)
    assert [one["port"] for one in objects["Service", "tenuto-frontend"]["spec"]["ports"]] == [5555]
    for template in pod_templates(objects).values():
        (container,) = template["spec"]["containers"]
        assert {"name": "A", "value": "b"} in container["env"]
        assert environment(container, FIELDS)["B"] == "$(A)$$c$d", "it is as the file has it"
        assert expanded("$(POD_IP):9100", environment(container, FIELDS)) == "10.1.2.3:9100"
        assert container["command"][-2:] == ["--metrics", "$(POD_IP):9100"]


# ------------------------------------------------------------ commands


def test_every_command_is_one_of_tenuto_with_options_that_it_has(
    objects: dict[tuple[str, str], Plain],
) -> None:
    seen = set()
    for template in pod_templates(objects).values():
        (container,) = template["spec"]["containers"]
        variables = environment(container, FIELDS)
        lines = [container["command"]]
        lines += [
            container[f"{kind}Probe"]["exec"]["command"] for kind in ("startup", "readiness", "liveness")
        ]
        for line in lines:
            words = [expanded(word, variables) for word in line]
            assert words[0] == "tenuto"
            command = LazyGroup().get_command(click.Context(LazyGroup()), words[1])
            assert command is not None
            seen.add(words[1])
            command.make_context(words[1], words[2:])  # raises for what it does not understand
    assert seen == {"scheduler", "frontend", "node-agent", "health"}


def test_a_role_is_given_the_time_that_it_needs_to_end(objects: dict[tuple[str, str], Plain]) -> None:
    templates = pod_templates(objects)
    needed_ms = {"tenuto-scheduler": SCHEDULER_STOP_MS, "tenuto-frontend": FRONTEND_STOP_MS}
    for name, template in templates.items():
        (container,) = template["spec"]["containers"]
        before = (
            container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        )
        assert before[0] == "sleep"
        left_s = template["spec"]["terminationGracePeriodSeconds"] - float(before[1])
        assert left_s > needed_ms.get(name, AGENT_STOP_MS) / 1_000
    # A Service goes on sending for a moment to whoever ends.
    assert "lifecycle" in templates["tenuto-frontend"]["spec"]["containers"][0]


# ------------------------------------------------------------ volumes and keys


def test_every_mount_has_its_volume_and_every_volume_its_source(
    objects: dict[tuple[str, str], Plain],
) -> None:
    for template in pod_templates(objects).values():
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        used = {mount["name"] for one in containers(template) for mount in one["volumeMounts"]}
        assert used == set(volumes)
        for volume in volumes.values():
            if "secret" in volume or "configMap" in volume:
                assert content_of(objects, volume)


@pytest.mark.parametrize("node", [str(one["host"]) for one in NODES])
def test_an_agent_gets_the_key_of_its_own_node_and_no_other(
    objects: dict[tuple[str, str], Plain], tmp_path: Path, node: str
) -> None:
    (daemon_set,) = [
        one for (kind, _), one in objects.items() if kind == "DaemonSet" and node in nodes_of(one)
    ]
    assert principals(objects, daemon_set["spec"]["template"], {"spec.nodeName": node}, tmp_path) == [
        f"node/{node}"
    ]


@pytest.mark.parametrize("role", ["scheduler", "frontend"])
def test_a_role_gets_its_own_key(objects: dict[tuple[str, str], Plain], tmp_path: Path, role: str) -> None:
    template = pod_templates(objects)[f"tenuto-{role}"]
    assert principals(objects, template, FIELDS, tmp_path) == [role]


def test_no_secret_is_outside_of_the_secrets_and_the_operators_is_nowhere(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    objects = stage.objects()
    open_text = json.dumps([one for (kind, _), one in objects.items() if kind != "Secret"])
    names = {key for (kind, _), one in objects.items() if kind == "Secret" for key in one["data"]}
    assert names == {path.name for path in (tmp_path / "keys").glob("*.key")} - {"operator.key"}
    for path in (tmp_path / "keys").glob("*.key"):
        assert read_pair(path).secret not in open_text


def test_a_change_of_the_file_or_of_its_key_replaces_a_roles_pods_and_one_of_the_trusted_does_not(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    before = marks(stage)
    assert marks(stage) == before
    run_keys("add", tmp_path / "keys", "client/alice", "--out", tmp_path / "alice.key")
    assert marks(stage) == before
    run_keys("rotate", tmp_path / "keys", "frontend")
    rotated = marks(stage)
    assert {name for name in ROLES if rotated[name] != before[name]} == {"tenuto-frontend"}
    stage.document["models"] = [{**MODEL, "slo_ms": 31}]
    assert all(mark != rotated[name] for name, mark in marks(stage).items())


def test_the_files_that_a_file_names_are_carried_byte_by_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "model one.py").write_text("x = 1\n")
    (tmp_path / "weights.safetensors").write_bytes(bytes(range(256)))
    (tmp_path / "trace.csv").write_text("at_ms\n1\n2\n")
    stage.document["models"] = [
        {
            **MODEL,
            "loader": {"python": "mine:Model", "weights": "weights.safetensors"},
            "arrival": {"process": "trace", "path": "trace.csv"},
        },
        {
            **MODEL,
            "name": "far",
            "loader": {"zoo": "torchvision", "arch": "resnet18", "weights": "/models/r.pt"},
        },
    ]
    objects = stage.objects()
    config = read(objects, tmp_path)
    folder = tmp_path / "folder"
    monkeypatch.chdir(folder)  # the pods' working folder
    near, far = config.models[0].loader, config.models[1].loader
    assert near is not None
    assert far is not None
    assert Path(near.weights or "").read_bytes() == bytes(range(256))
    assert config.models[0].arrival.trace_path is not None
    assert config.models[0].arrival.trace_path.read_text() == "at_ms\n1\n2\n"
    assert (folder / "mine" / "model one.py").read_text() == "x = 1\n"
    assert far.weights == "/models/r.pt", "what is in the image stays there"
    for one in objects.values():
        kubernetes_validate.validate(one, "1.37.0", strict=True)
    for key in objects["ConfigMap", "tenuto-cluster"]["data"]:
        assert re.fullmatch(r"[-._a-zA-Z0-9]+", key)


# ------------------------------------------------------------ what an operator looks for


def test_every_container_is_closed_but_the_one_that_gives_a_folder_away(
    objects: dict[tuple[str, str], Plain],
) -> None:
    for name, template in pod_templates(objects).items():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod)
        for container in containers(template):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            is_giver = name in AGENTS and container["name"] == "run-folder"
            assert context.get("runAsUser", pod["securityContext"]["runAsUser"]) == (
                0 if is_giver else 10_001
            )
            assert context["capabilities"].get("add", []) == (["CHOWN"] if is_giver else [])
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "cpu" not in container["resources"].get("limits", {})
        # With a root file system that cannot be written, what roles write is in volumes.
        (container,) = pod["containers"]
        mounts = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
        assert {"/run/tenuto", "/tmp"} <= mounts <= {"/run/tenuto", "/tmp", "/dev/shm"}
        assert environment(container, FIELDS)["TENUTO_RUN_DIR"].startswith("/run/tenuto/")


def test_a_lost_node_takes_neither_both_schedulers_nor_all_frontends(
    objects: dict[tuple[str, str], Plain],
) -> None:
    for name in ("tenuto-scheduler", "tenuto-frontend"):
        (spread,) = pod_templates(objects)[name]["spec"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        labels = pod_templates(objects)[name]["metadata"]["labels"]
        assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
        assert objects["PodDisruptionBudget", name]["spec"]["maxUnavailable"] == 1


def test_frontends_are_as_many_as_the_load_needs(objects: dict[tuple[str, str], Plain]) -> None:
    assert "replicas" not in objects["Deployment", "tenuto-frontend"]["spec"]
    scaler = objects["HorizontalPodAutoscaler", "tenuto-frontend"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 12)
    assert scaler["scaleTargetRef"]["name"] == "tenuto-frontend"
    assert [one["pods"]["metric"]["name"] for one in scaler["metrics"] if one["type"] == "Pods"] == [
        PENDING_METRIC
    ]
    requests = pod_templates(objects)["tenuto-frontend"]["spec"]["containers"][0]["resources"]["requests"]
    assert "cpu" in requests, "or there is no percentage of it"


def read(objects: dict[tuple[str, str], Plain], tmp_path: Path) -> Any:
    """The configuration as a role in a pod reads it."""
    folder = tmp_path / "folder"
    (volume,) = [
        one
        for one in pod_templates(objects)["tenuto-scheduler"]["spec"]["volumes"]
        if one["name"] == "cluster"
    ]
    for path, content in content_of(objects, volume).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return parse_config(json.loads((folder / "cluster.json").read_bytes()), folder)


def principals(
    objects: dict[tuple[str, str], Plain], template: Plain, fields: dict[str, str], tmp_path: Path
) -> list[str]:
    """Whose keys a pod's containers can see."""
    volumes = {one["name"]: one for one in template["spec"]["volumes"]}
    found = []
    for container in containers(template):
        for mount in container["volumeMounts"]:
            if "secret" in volumes[mount["name"]]:
                key = expanded(mount["subPathExpr"], environment(container, fields))
                path = tmp_path / "seen.key"
                path.write_bytes(content_of(objects, volumes[mount["name"]])[key])
                path.chmod(0o600)
                assert environment(container, fields)["KEY_FILE"] == key
                found.append(read_pair(path).principal)
    return found


def marks(stage: Stage) -> dict[str, Any]:
    return {name: one["metadata"]["annotations"] for name, one in pod_templates(stage.objects()).items()}


def run_keys(*words: object) -> None:
    done = CliRunner().invoke(keys, [str(word) for word in words])
    assert done.exit_code == 0, done.output


# ------------------------------------------------------------ a gateway


def test_a_gateway_is_beside_each_frontend_and_asks_it_by_its_local_socket(tmp_path: Path) -> None:
    objects = with_gateway(tmp_path, model_control=True).objects()
    for one in objects.values():
        kubernetes_validate.validate(one, "1.37.0", strict=True)
    template = pod_templates(objects)["tenuto-frontend"]
    frontend, gateway = template["spec"]["containers"]
    assert [one["port"] for one in objects["Service", "tenuto-frontend"]["spec"]["ports"]] == [
        5555,
        8080,
        8001,
    ]
    assert {one["name"]: one["containerPort"] for one in gateway["ports"]} == {"http": 8080, "grpc": 8001}
    words = [expanded(word, environment(gateway, FIELDS)) for word in gateway["command"]]
    assert words[:3] == ["tenuto", "gateway", "cluster.json"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--frontend": f"ipc:///run/tenuto/run/frontend-{FIELDS['metadata.name']}.client",
        "--http": "10.1.2.3:8080",
        "--grpc": "10.1.2.3:8001",
    }
    command = LazyGroup("tenuto").get_command(click.Context(LazyGroup("tenuto")), "gateway")
    assert command is not None
    assert set(options) <= {flag for parameter in command.params for flag in parameter.opts}
    own, other = (environment(one, FIELDS)["TENUTO_RUN_DIR"] for one in (gateway, frontend))
    assert own == f"{other}/gateway", "probes of one say nothing of the other"
    stops = [int(one["lifecycle"]["preStop"]["exec"]["command"][1]) for one in (gateway, frontend)]
    assert stops[1] - stops[0] >= 5, "a gateway has ended before its frontend begins to"
    assert template["spec"]["terminationGracePeriodSeconds"] > stops[1] + FRONTEND_STOP_MS / 1e3
    config = read(objects, tmp_path)
    assert config.gateway.token_file == Path("/run/tenuto-keys/gateway/token_file")
    assert (config.gateway.request_bytes_max, config.gateway.is_model_control) == (8 << 20, False)
    (copied,) = [one for one in template["spec"]["initContainers"] if one["name"] == "tokens"]
    assert (
        "install -m 0400 /etc/tenuto/gateway/token_file /run/tenuto-keys/gateway/token_file"
        in copied["command"][2]
    )
    secret = objects["Secret", "tenuto-gateway"]
    assert base64.b64decode(secret["data"]["token_file"]) == b"a-token-of-some-length\n"
    policy = objects["NetworkPolicy", "tenuto-frontend"]["spec"]["ingress"]
    assert {"ports": [{"port": port, "protocol": "TCP"} for port in (5555, 8080, 8001)]} in policy


def test_another_token_replaces_the_pods_and_no_token_is_no_gateway(tmp_path: Path) -> None:
    stage = with_gateway(tmp_path)
    before = pod_templates(stage.objects())["tenuto-frontend"]["metadata"]["annotations"]
    (tmp_path / "tokens").write_text("another-token-of-some-length\n", encoding="utf-8")
    assert pod_templates(stage.objects())["tenuto-frontend"]["metadata"]["annotations"] != before
    del stage.document["cluster"]["gateway"]["token_file"]
    assert ("Secret", "tenuto-gateway") not in stage.objects()
    done = stage.run()
    assert "cluster.gateway has no token_file: the manifests have no gateway" in done.stderr


@pytest.mark.parametrize(
    ("listen", "refusal"),
    [
        ({"http": "127.0.0.1:8002"}, "tenuto-frontend:8002', where listen.http is"),
        ({"grpc": "127.0.0.1:8002"}, "tenuto-frontend:8002', where listen.grpc is"),
        ({"http": "127.0.0.1:9000", "metrics": "127.0.0.2:9000"}, "tenuto-frontend:9000', where listen.http is"),
        ({"http": "127.0.0.1:8001", "grpc": "127.0.0.1:0"}, "listen.grpc: is 'tenuto-frontend:8001', where listen.http is"),
        ({"http": "127.0.0.1:5555"}, "listen.http: is 'tenuto-frontend:5555', where a frontend's door is"),
        ({"metrics": "127.0.0.1:5555"}, "tenuto-frontend:5555', where a frontend's door is"),
        ({"metrics": "127.0.0.1:5550"}, "tenuto-scheduler:5550', where a scheduler's door is"),
    ],
)  # fmt: skip
def test_two_at_one_port_of_a_pod_are_refused(tmp_path: Path, listen: Plain, refusal: str) -> None:
    stage = with_gateway(tmp_path)
    stage.document["listen"] = listen
    stage.write()
    assert refusal in str(stage.run().exception)
