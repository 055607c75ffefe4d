"""The manifests' own commands, run as plain processes, are a cluster that serves; and Kubernetes may do with it what it does."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fabric.client import BlockingClient, ClientOptions, ask_status
from fabric.errors import PeerLost, RequestError, Unauthorised
from fabric.ids import PeerId
from fabric.keys import Keyring
from fabric.messages import StatusListed
from roles.cli.keys import keys
from tests.integration.pods_stage import ROOT, Pod, Pods, pods, until_ready
from tests.integration.proc import until
from tests.unit.deploy.k8s.stage import Stage

pytestmark = pytest.mark.timeout(240)

NODES = [{"host": f"node-{name}.example", "gpus": 1} for name in "abc"]
DOCUMENT = {
    "models": [{"name": "fast", "slo_ms": 5_000, "profile": {"alpha_ms": 1, "beta_ms": 4, "max_batch": 16}}],
    "cluster": {"nodes": NODES, "schedulers": 2, "frontends": 2},
    "batching": "eager",
    "security": {"keys": "keys"},
}
SCHEDULERS = [f"tenuto-scheduler-{at}.tenuto-scheduler.tenuto.svc" for at in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("file")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Pods]:
    stage = Stage(folder, DOCUMENT)
    stage.write()
    for name in ("alice", "bob"):
        words = ["add", folder / "keys", f"client/{name}", "--out", folder / f"{name}.key"]
        assert CliRunner().invoke(keys, list(map(str, words))).exit_code == 0
    with pods(stage.objects()) as running:
        running.start_all(frontends=2)
        until_ready(list(running.running.values()))
        yield running


def frontends(cluster: Pods) -> list[Pod]:
    return [pod for name, pod in cluster.running.items() if name.startswith("tenuto-frontend-")]


def client_address(pod: Pod) -> str:
    return f"tcp://{pod.addresses['tenuto-frontend.tenuto.svc']}:5555"


def served(pod: Pod, key: Path, value: float = 3.0) -> None:
    with BlockingClient(client_address(pod), ClientOptions(key_file=key)) as client:
        outputs = client.infer("fast", {"input": np.full(4, value, np.float32)}, budget_ms=20_000.0).outputs
        assert outputs


def active(cluster: Pods, folder: Path) -> tuple[int, StatusListed] | None:
    """Which scheduler is, and what it says."""
    for number, host in enumerate(SCHEDULERS):
        pod = cluster.running[f"tenuto-scheduler-{number}"]
        if pod.process is None or pod.process.poll() is not None:
            continue
        keyring = Keyring.of_file(folder / "keys" / "operator.key")
        address = f"tcp://{cluster.address(host)}:5550"
        told = ask_status(address, 10_000.0, server=PeerId("scheduler"), keyring=keyring)
        if told.standing is not None and told.standing.state == "active":
            return number, told
    return None


def test_requests_are_served_through_every_frontend(cluster: Pods, folder: Path) -> None:
    for pod in frontends(cluster):
        served(pod, folder / "alice.key")
        assert pod.is_alive()


def test_every_role_is_who_it_should_be(cluster: Pods, folder: Path) -> None:
    found = active(cluster, folder)
    assert found is not None
    _, told = found
    assert told.counters["frontends"] == 2
    assert {one.slice_id.partition("/")[0] for one in told.slices} == {one["host"] for one in NODES}
    assert told.standing is not None
    assert told.standing.agents_granted == 3
    names = {path.name for pod in frontends(cluster) for path in pod.folder.rglob("frontend-*.json")}
    assert names == {f"frontend-{pod.name}.json" for pod in frontends(cluster)}


def test_commands_run_in_pods_without_a_key(cluster: Pods, folder: Path) -> None:
    found = active(cluster, folder)
    assert found is not None
    told = cluster.running[f"tenuto-scheduler-{found[0]}"].execute("tenuto", "status", "--json")
    assert told.returncode == 0, told.stderr
    assert [one["model_id"] for one in json.loads(told.stdout)["models"]] == ["fast"]
    frontend = frontends(cluster)[0]
    np.save(frontend.folder / "volumes" / "tmp" / "x.npy", np.zeros(4, np.float32))
    asked = frontend.execute("tenuto", "infer", "fast", "/tmp/x.npy", "--budget-ms", "20000")
    assert asked.returncode == 0, asked.stderr


def test_an_operator_reaches_it_by_the_network(cluster: Pods, folder: Path) -> None:
    found = active(cluster, folder)
    assert found is not None
    address = f"tcp://{cluster.address(SCHEDULERS[found[0]])}:5550"
    words = ["status", "--scheduler", address, "--key", str(folder / "keys" / "operator.key"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "roles.cli", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [one["model_id"] for one in json.loads(done.stdout)["models"]] == ["fast"]


def test_one_frontend_more_and_one_less_fails_no_request(cluster: Pods, folder: Path) -> None:
    """As the autoscaler does it, while a client of two sends."""
    addresses = [client_address(pod) for pod in frontends(cluster)]
    leaving = frontends(cluster)[0]
    more = cluster.start_frontend(9)
    until_ready([more])
    served(more, folder / "alice.key")
    failed: list[str] = []
    is_over = threading.Event()
    answered = 0

    def send() -> None:
        nonlocal answered
        options = ClientOptions(key_file=folder / "alice.key")
        with BlockingClient(addresses, options) as client:
            while not is_over.is_set():
                try:
                    client.infer("fast", {"input": np.zeros(4, np.float32)}, budget_ms=20_000.0)
                    answered += 1
                except RequestError as error:
                    failed.append(str(error))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        until(lambda: answered > 20, what="requests answered")
        assert leaving.end() == 0, leaving.log()
        before = answered
        until(lambda: answered > before + 20, what="requests answered after that")
    finally:
        is_over.set()
        sender.join(60)
    del cluster.running[leaving.name]
    assert failed == []


def test_a_schedulers_pod_is_replaced_and_the_cluster_serves_on(cluster: Pods, folder: Path) -> None:
    found = active(cluster, folder)
    assert found is not None
    number, _ = found
    pod = cluster.running[f"tenuto-scheduler-{number}"]
    pod.kill()
    assert not pod.is_alive()
    until(lambda: (now := active(cluster, folder)) is not None and now[0] != number, what="a take-over")
    for frontend in frontends(cluster):
        served(frontend, folder / "alice.key")
    anew = cluster.start_scheduler(number)
    until_ready([anew])
    now = active(cluster, folder)
    assert now is not None
    assert now[0] == 1 - number


def test_an_agents_pod_is_replaced_and_obeys_no_older_scheduler(cluster: Pods, folder: Path) -> None:
    """Its lease is the node's, not the pod's."""
    name = f"tenuto-node-agent-emulated-{NODES[0]['host']}"
    pod = cluster.running[name]
    (lease,) = pod.node.rglob("*.lease")
    granted = lease.read_bytes()
    pod.kill()
    assert lease.read_bytes() == granted
    anew = cluster._start("tenuto-node-agent-emulated", name, pod.fields)
    until_ready([anew])
    found = active(cluster, folder)
    assert found is not None
    until(
        lambda: (
            (now := active(cluster, folder)) is not None
            and sum(one.state == "ready" for one in now[1].slices) == 3
        ),
        what="three slices again",
    )


def test_who_is_revoked_is_refused_without_a_restart(cluster: Pods, folder: Path) -> None:
    frontend = frontends(cluster)[0]
    served(frontend, folder / "bob.key")
    bob = (folder / "bob.key").read_bytes()
    assert CliRunner().invoke(keys, ["revoke", str(folder / "keys"), "client/bob"]).exit_code == 0
    (folder / "bob.key").write_bytes(bob)
    (folder / "bob.key").chmod(0o600)
    objects = Stage(folder, DOCUMENT).objects()
    data = objects["ConfigMap", "tenuto-trusted"]["data"]
    frontend.change("trusted", {name: text.encode() for name, text in data.items()})

    def is_refused() -> bool:
        try:
            served(frontend, folder / "bob.key")
        except Unauthorised:
            return True
        except PeerLost:  # revoking ended the connection under this very request; the next one is told why
            return False
        return False

    until(is_refused, 30_000.0, "a refusal")
    served(frontend, folder / "alice.key")


def test_all_pods_end_in_their_time(cluster: Pods) -> None:
    for name in sorted(cluster.running):  # frontends, agents, schedulers
        pod = cluster.running[name]
        assert pod.end() == 0, pod.log()
        if not name.startswith("tenuto-node-agent"):
            assert not list(pod.folder.rglob("*.json.lock"))
