"""Roles started by hand on three hosts are one cluster: by ipc inside a host, by TCP with keys between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from fabric.keys import TRUSTED_FILE
from roles.cli.keys import keys
from tests.integration.hosts_stage import (
    NETWORK,
    PYTHON,
    Host,
    capture,
    hosts,
    lay_out,
    needs_hosts,
    start_role,
    status_on,
    with_keys,
)
from tests.integration.proc import until

pytestmark = [needs_hosts, pytest.mark.timeout(300)]

MARK = b"this-was-readable-on-the-wire!!!"  # 32 bytes, eight floats
CLUSTER = f"""
models:
 - {{name: echo, slo_ms: 4000, loader: {{python: "tests.models.echo:Echo"}}}}
 - {{name: fast, slo_ms: 2000, profile: {{alpha_ms: 1, beta_ms: 4, max_batch: 16}}}}
cluster:
  nodes:
   - {{host: a, gpus: 1, device: emulated}}
   - {{host: b, gpus: 1, device: emulated}}
   - {{host: c, gpus: 1, device: cpu}}
  schedulers: [{{host: a}}]
  frontends: [{{host: a}}, {{host: b, listen: {{client: "tcp://eth0:7000"}}}}]
  addresses: {{a: {NETWORK}.1, b: {NETWORK}.2, c: {NETWORK}.3}}
batching: eager
placement:
  given:
    slices:
     - {{gpu: 0, models: [{{model: fast}}]}}
     - {{gpu: 1, models: [{{model: fast}}]}}
     - {{gpu: 2, models: [{{model: echo}}]}}
security: {{keys: keys}}
"""
CLIENT = f"""
import sys
from pathlib import Path
import numpy as np
from fabric.client import BlockingClient, ClientOptions
number, *addresses = sys.argv[1:]
image = np.frombuffer({MARK!r} * (3 * 224 * 224 // 8), np.float32).reshape(3, 224, 224)
options = ClientOptions(key_file=Path("alice.key"))
for address in addresses:
    with BlockingClient(address, options) as client:
        for _ in range(int(number)):
            same = client.infer("echo", {{"image": image}}, budget_ms=60_000.0).outputs["same"]
            assert same.tobytes() == image.tobytes()
        for value in range(int(number)):
            client.infer("fast", {{"input": np.full(4, value, np.float32)}}, budget_ms=60_000.0)
print("served")
"""


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    file = with_keys(tmp_path_factory.mktemp("file"), CLUSTER)
    with hosts(["a", "b", "c", "laptop"], tmp_path_factory.mktemp("hosts") / "home") as made:
        lay_out(file, made, ["laptop", "a"])
        made["laptop"].put("client.py", CLIENT.encode())
        made["a"].put("client.py", CLIENT.encode())
        # As systemd or a shell on each host would, in no order: everything waits for what it needs.
        for host, role in (("c", "node-agent"), ("b", "frontend"), ("b", "node-agent")):
            start_role(made[host], role, "cluster.yaml")
        for role in ("scheduler", "frontend", "node-agent"):
            start_role(made["a"], role, "cluster.yaml")
        until(lambda: is_ready(made["a"]), 120_000.0, "a cluster that is ready")
        yield made


def is_ready(host: Host) -> bool:
    slices = status_on(host).get("slices", ())
    return len(slices) == 3 and all(one["state"] == "ready" for one in slices)


def served(host: Host, number: int, *addresses: str) -> None:
    done = host.run(f"cd {host.home} && env {' '.join(PYTHON)} client.py {number} {' '.join(addresses)}")
    assert done.stdout == b"served\n"


def connections(host: Host) -> set[str]:
    """The addresses of the other ends of a host's TCP connections."""
    lines = host.run("ss -Htn state established").stdout.decode().splitlines()
    return {line.split()[3].rpartition(":")[0] for line in lines}


def test_requests_cross_hosts_bit_by_bit_and_no_byte_of_them_can_be_read(
    placed: dict[str, Host], tmp_path: Path
) -> None:
    with capture(tmp_path / "wire"):
        served(placed["laptop"], 5, f"tcp://{NETWORK}.1:5555", f"tcp://{NETWORK}.2:7000")
        until(lambda: (tmp_path / "wire").stat().st_size > 20 * 602_112, 10_000.0, "all of it captured")
    assert MARK not in (tmp_path / "wire").read_bytes()  # laptop -> a, b -> c and back


def test_a_capture_shows_what_is_not_encrypted(placed: dict[str, Host], tmp_path: Path) -> None:
    with capture(tmp_path / "wire"):
        script = f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto({MARK!r}, ('{NETWORK}.2', 9))"
        placed["a"].put("say.py", script.encode())
        placed["a"].run(f"python3 {placed['a'].home}/say.py")
        until(lambda: MARK in (tmp_path / "wire").read_bytes(), 10_000.0)


def test_inside_a_host_nothing_goes_by_tcp(placed: dict[str, Host]) -> None:
    home = placed["a"].home
    served(placed["a"], 3, f"ipc://{home}/run/frontend-0.client")
    processes = {one["role_id"]: one for one in status_on(placed["a"])["processes"]}
    assert set(processes) == {"scheduler-0", "frontend-0", "node-a"}
    assert f"{NETWORK}.1" not in connections(placed["a"])  # others it has: b, c
    assert {f"{NETWORK}.2", f"{NETWORK}.3"} <= connections(placed["a"])


def test_what_a_host_tells_of_itself_is_its_own_address(placed: dict[str, Host]) -> None:
    for name, role_id, purpose in (("a", "scheduler-0", "control"), ("b", "frontend-1", "payload")):
        host = placed[name]
        told = json.loads(host.run(f"cat {host.home}/run/{role_id}.json").stdout)["addresses"][purpose]
        (tcp,) = [address for address in told if address.startswith("tcp://")]
        assert tcp.startswith(f"tcp://{host.address}:")
        assert "?key=" in tcp


def test_without_its_key_a_host_is_nobody(placed: dict[str, Host], tmp_path: Path) -> None:
    """A stranger's agent under the name of a host that is listed gets neither slices nor a word."""
    path = tmp_path / "other"
    assert CliRunner().invoke(keys, ["create", str(path), "--config", str(_written(tmp_path))]).exit_code == 0
    laptop = placed["laptop"]
    laptop.put("cluster.yaml", CLUSTER.replace(f"c: {NETWORK}.3", f"c: {NETWORK}.4").encode())
    trusted = json.loads((path / TRUSTED_FILE).read_bytes())["keys"]
    real = json.loads(placed["a"].run(f"cat {placed['a'].home}/keys/{TRUSTED_FILE}").stdout)["keys"]
    mixed = {"keys": [key for key in trusted if key["principal"] == "node/c"] + real}
    laptop.put(f"keys/{TRUSTED_FILE}", json.dumps(mixed).encode())
    laptop.put("keys/node-c.key", (path / "node-c.key").read_bytes(), "600")
    before = status_on(placed["a"])["counters"]["keys_refused"]
    process = start_role(laptop, "node-agent", "cluster.yaml", "--node", "c")
    until(lambda: status_on(placed["a"])["counters"]["keys_refused"] > before, 30_000.0, "a refusal")
    process.kill()
    assert is_ready(placed["a"])


def test_the_scheduler_starts_again_and_finds_everybody(placed: dict[str, Host]) -> None:
    host = placed["a"]
    pid = next(one["pid"] for one in status_on(host)["processes"] if one["role_id"] == "scheduler-0")
    host.run(f"kill -9 {pid}")
    start_role(host, "scheduler", "cluster.yaml")
    until(
        lambda: is_ready(host) and status_on(host)["processes"] != [],
        60_000.0,
        "a cluster that is ready again",
    )
    served(placed["laptop"], 2, f"tcp://{NETWORK}.1:5555", f"tcp://{NETWORK}.2:7000")


def _written(folder: Path) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER)
    return path
