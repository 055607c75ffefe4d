"""HTTP and gRPC from `tenuto deploy`: a gateway on each host with frontends, with tokens that are carried as secrets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hosts_stage import NETWORK, ROOT, needs_hosts, needs_sshd
from tests.integration.operator_stage import Operator, fetch_wheels, operator_of
from tests.integration.proc import until

pytestmark = [needs_hosts, needs_sshd, pytest.mark.timeout(600)]

NAMES = ("a", "b")
TOKEN, NEXT_TOKEN = "a-token-of-some-length", "another-token-of-some-length"
CLUSTER = """
models:
 - {name: fast, slo_ms: 2000, profile: {alpha_ms: 1, beta_ms: 4, max_batch: 16}}
cluster:
  nodes:
   - {host: a, gpus: 1, device: emulated}
   - {host: b, gpus: 1, device: emulated}
  frontends: [{host: a}, {host: b}]
  heartbeats: {interval_ms: 250, patience_ms: 20000}  # a host that is starved for seconds is not gone
  gateway: {token_file: tokens}
listen: {http: "127.0.0.1:0", grpc: "127.0.0.1:0"}
batching: eager
security: {keys: keys}
deploy: {wheelhouse: wheels, python: /usr/bin/python3}
"""
ASK = """
import sys
import urllib.error, urllib.request
url, token = sys.argv[1:]
body = b'{"inputs": [[1, 2, 3]], "deadline_ms": 20000}'
request = urllib.request.Request(url + "/v1/models/fast:predict", body, {"Authorization": "Bearer " + token})
try:
    print(urllib.request.urlopen(request, timeout=30).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(error)
"""
ASK_BY_GRPC = """
import sys
import numpy as np
import tritonclient.grpc as triton
address, token = sys.argv[1:]
client = triton.InferenceServerClient(address)
tensor = triton.InferInput("x", [2], "FP32")
tensor.set_data_from_numpy(np.zeros(2, np.float32))
answer = client.infer("fast", [tensor], headers={"authorization": "Bearer " + token}, parameters={"deadline_ms": 20000})
print(answer.get_response().model_name)
"""
LOAD = """
import http.client, json, pathlib, sys
stop, token, *addresses = sys.argv[1:]
body = json.dumps({"inputs": [[1, 2, 3]], "deadline_ms": 20000})
fates = {"answered": 0, "elsewhere": 0, "cut": 0, "lost": 0}
while not pathlib.Path(stop).exists():
    for at, address in enumerate(addresses):
        connection = http.client.HTTPConnection(address, timeout=60)
        try:
            connection.connect()
        except OSError:
            fates["elsewhere"] += 1
            continue
        try:
            connection.request("POST", "/v1/models/fast:predict", body, {"Authorization": "Bearer " + token})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            fates["cut"] += 1
            continue
        finally:
            connection.close()
        if status == 200:
            fates["answered"] += 1
            break
        fates["elsewhere"] += 1
    else:
        fates["lost"] += 1
    addresses.reverse()
print(json.dumps(fates))
"""
"""One request after the other, at the two gateways in turn, as a balancer does: one that is refused goes to the other one."""


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheelhouse") / "wheels"
    problem = fetch_wheels(folder, ("httptools", "uvloop", "grpcio", "protobuf"))
    if problem:
        pytest.skip(problem)
    return folder


@pytest.fixture
def operator(wheelhouse: Path, tmp_path: Path) -> Iterator[Operator]:
    with operator_of(tmp_path, CLUSTER, wheelhouse, NAMES) as made:
        for name, text in (("ask.py", ASK), ("ask_by_grpc.py", ASK_BY_GRPC), ("load.py", LOAD)):
            (made.folder / name).write_text(text)
        tokens(made, TOKEN)
        yield made


def tokens(operator: Operator, *lines: str) -> None:
    file = operator.folder / "tokens"
    file.write_text("\n".join(lines) + "\n")
    file.chmod(0o600)


def said(operator: Operator, script: str, *words: str) -> str:
    line = f"cd {operator.folder} && PYTHONPATH={ROOT} {sys.executable} {script} {' '.join(words)}"
    return operator.laptop.run(line).stdout.decode().strip()


def asked(operator: Operator, number: int = 1, token: str = TOKEN, port: int = 8000) -> str:
    return said(operator, "ask.py", f"http://{NETWORK}.{number}:{port}", token)


def pids(operator: Operator, name: str) -> dict[str, int]:
    """By role id, of all roles of a host."""
    text = operator.hosts[name].run(f"cat /root/.tenuto/{name}/run/[fgns]*.json").stdout.decode()
    decoder, found, at = json.JSONDecoder(), {}, 0
    while at < len(text):
        one, at = decoder.raw_decode(text, at)
        found[one["role_id"]] = one["pid"]
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {role_id for role_id in before | after if before.get(role_id) != after.get(role_id)}


def started(found: dict[str, Any]) -> list[str]:
    return [one["detail"].split()[0] for one in found["done"] if one["what"] == "start"]


def test_a_gateway_is_beside_the_frontends_of_each_host_and_asks_for_a_token(operator: Operator) -> None:
    a, file = operator.hosts["a"], str(operator.file)
    a.start("sh", "-c", f"'echo $$ > {a.home}/taking; exec python3 -m http.server 8001'")
    until(lambda: b":8001" in a.run("ss -Hltn").stdout, 10_000.0)
    assert "port 8001 of gateway-a is taken by python3 (process" in operator.plan()["problems"]["a"][0]
    a.run(f"kill $(cat {a.home}/taking)")
    until(lambda: b":8001" not in a.run("ss -Hltn").stdout, 10_000.0)
    code, out, err = operator.tenuto("deploy", "up", file, "--json")
    assert code == 0, err
    found = json.loads(out)
    gateways = [(one["host"], one["detail"]) for one in found["steps"] if one["phase"] == "gateways"]
    assert gateways == [(name, f"gateway-{name} (ports 8000, 8001) starts") for name in NAMES]
    addresses = {
        protocol: [f"{protocol}://{NETWORK}.{number}:{port}" for number in (1, 2)]
        for protocol, port in (("http", 8000), ("grpc", 8001))
    }
    assert {key: found["endpoints"][key] for key in addresses} == addresses
    for address in (*addresses["http"], *addresses["grpc"]):
        assert f"serves {address}" in err
    for number in (1, 2):
        assert (asked(operator, number), asked(operator, number, "-")) == ("200", "401")
        assert said(operator, "ask_by_grpc.py", f"{NETWORK}.{number}:8001", TOKEN) == "fast"
    for name in NAMES:
        own = f"/root/.tenuto/{name}/keys/gateway.token_file"
        assert operator.hosts[name].run(f"stat -c %a {own}").stdout == b"600\n"
        where = operator.hosts[name].run(f"grep -rl {TOKEN} /root /tmp/tenuto-* 2> /dev/null; true").stdout
        assert where.decode().split() == [own]
        processes = operator.hosts[name].run("cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ; true").stdout
        assert TOKEN.encode() not in processes

    pid = pids(operator, "a")["gateway-a"]
    a.run(f"kill -9 {pid}")
    until(lambda: pids(operator, "a")["gateway-a"] != pid, 60_000.0, "another gateway")
    until(lambda: asked(operator) == "200", 30_000.0)

    before = {name: pids(operator, name) for name in NAMES}
    tokens(operator, NEXT_TOKEN)
    done = operator.up()["done"]
    assert sorted((one["host"], one["what"], one["detail"]) for one in done) == [
        (name, "keys", "gateway.token_file") for name in NAMES
    ]
    until(lambda: asked(operator, 1, NEXT_TOKEN) == asked(operator, 2, NEXT_TOKEN) == "200", 30_000.0)
    assert asked(operator) == "401"
    assert {name: pids(operator, name) for name in NAMES} == before
    assert operator.plan()["steps"] == []
    code, out, _ = operator.tenuto("deploy", "status", file, "--json")
    assert (code, json.loads(out)["hosts"][1]["roles"]["gateway-b"]) == (0, "runs")
    assert "gateway_serving" in operator.tenuto("deploy", "logs", file, "--role", "gateway-b")[1]


def test_gateways_are_changed_one_after_the_other_without_a_lost_request_and_end_with_all(
    operator: Operator,
) -> None:
    operator.up()
    text, file = operator.file.read_text(), str(operator.file)
    before = {name: pids(operator, name) for name in NAMES}
    operator.file.write_text(text.replace('http: "127.0.0.1:0"', 'http: "127.0.0.1:8080"'))
    assert sorted(started(operator.up())) == ["gateway-a", "gateway-b"]
    for name in NAMES:
        assert changed(before[name], pids(operator, name)) == {f"gateway-{name}"}
    assert asked(operator, 2, port=8080) == "200"
    assert "refused" in asked(operator, 2)
    code, _, err = operator.tenuto("deploy", "rollback", file)
    assert code == 0, err
    assert asked(operator, 2) == "200"

    before = {name: pids(operator, name) for name in NAMES}
    stop = operator.folder / "stop"
    line = f"cd {operator.folder} && {sys.executable} load.py {stop} {TOKEN}"
    line += f" {NETWORK}.1:8000 {NETWORK}.2:8000"
    load = subprocess.Popen(operator.laptop.inside("sh", "-c", line), stdout=subprocess.PIPE, text=True)
    operator.file.write_text(text.replace("deploy: {", "deploy: {env: {OF: everybody}, "))
    code, _, err = operator.tenuto("deploy", "upgrade", file)
    assert code == 0, err
    stop.touch()
    out, _ = load.communicate(timeout=60)
    sys.stderr.write(f"under an upgrade: {out}\n")
    fates = json.loads(out)
    assert (fates["cut"], fates["lost"]) == (0, 0), fates
    assert fates["answered"] > 100
    for name in NAMES:
        assert changed(before[name], pids(operator, name)) == {*before[name]}
    code, _, err = operator.tenuto("deploy", "down", file)
    assert code == 0, err
    for name in NAMES:
        assert operator.processes(name) == {}
        assert operator.hosts[name].run("ls -A /root").stdout.split() in ([b".ssh"], [])
