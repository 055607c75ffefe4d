"""`tenuto deploy` from one host to three others: real sshd, own homes, no package index."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from roles.cli.keys import keys
from tests.integration.hosts_stage import Host, needs_hosts, needs_sshd, sh
from tests.integration.operator_stage import Operator, fetch_wheels, operator_of
from tests.integration.proc import CLOCK, until

pytestmark = [needs_hosts, needs_sshd, pytest.mark.timeout(600)]

NAMES = ("a", "b", "c")
SERVERS = (*NAMES, "d")
STARVED_MAX = 0.01
"""Of requests, that may be refused where all hosts share a few busy cores: there a scheduler now and then loses its lease, or workers are
late to say that they are there. `benchmarks/several_hosts.py` has the figures."""
MOMENTS = 6
"""At which an `up` is killed in one test."""
CLUSTER = """
models:
 - {name: fast, slo_ms: 2000, profile: {alpha_ms: 1, beta_ms: 4, max_batch: 16}}
cluster:
  nodes:
   - {host: a, gpus: 1, device: emulated}
   - {host: b, gpus: 1, device: emulated}
   - {host: c, gpus: 1, device: emulated}
  frontends: [{host: a}, {host: b}]
  heartbeats: {interval_ms: 250, patience_ms: 20000}  # a host that is starved for seconds is not gone
batching: eager
placement: symphony
security: {keys: keys}
deploy: {wheelhouse: wheels, python: /usr/bin/python3}
"""
CLOCK_OFF = b"""#!/root/real -I
import sys, time
now = time.time
time.time = lambda: now() + 60.0
exec(sys.argv[3])  # python -I -c CODE
"""
WITH_STANDBY = CLUSTER.replace(
    "  frontends:", "  schedulers: [{host: a}, {host: b, standby: true}]\n  frontends:"
)


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a host without a package index is given, fetched once; it needs one here."""
    folder = tmp_path_factory.mktemp("wheelhouse") / "wheels"
    problem = fetch_wheels(folder)
    if problem:
        pytest.skip(problem)
    return folder


@pytest.fixture
def operator(wheelhouse: Path, tmp_path: Path) -> Iterator[Operator]:
    with operator_of(tmp_path, CLUSTER, wheelhouse, SERVERS) as made:
        yield made


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(step["host"], step["what"]) for step in found["steps"]]


def test_three_bare_hosts_become_a_cluster_and_a_second_up_changes_nothing(operator: Operator) -> None:
    planned = operator.plan()
    assert planned["problems"] == {}
    prepared = ["wheels", "environment", "configuration", "keys"]
    assert rows(planned) == [
        *((host, what) for host in NAMES for what in prepared),
        *((host, "start") for host in NAMES),  # agents
        ("a", "start"),  # the scheduler
        *((host, "start") for host in ("a", "b")),  # frontends
    ]
    done = operator.up()
    assert sorted(map(tuple, (one.items() for one in done["done"]))) == sorted(
        tuple((key, value) for key, value in one.items() if key != "phase") for one in planned["steps"]
    )
    operator.serves()
    before = {name: operator.processes(name) for name in NAMES}
    code, out, err = operator.tenuto("deploy", "up", str(operator.file), "--json")
    assert (code, json.loads(out)["done"]) == (0, [])
    assert "nothing to do" in err
    assert {name: operator.processes(name) for name in NAMES} == before
    assert operator.plan()["steps"] == []
    secrets = [path.read_bytes() for path in (operator.folder / "keys").glob("*.key")]
    for name in NAMES:
        files = (
            operator.hosts[name]
            .run("ls -l /root/.tenuto/*/keys; cat /root/.tenuto/*/logs/* /proc/[0-9]*/cmdline")
            .stdout
        )
        assert not any(json.loads(secret)["secret"].encode() in files for secret in secrets)
    own = operator.hosts["c"].run("ls /root/.tenuto/c/keys").stdout.split()
    assert own == [b"node-c.key", b"trusted.json"]  # and no other's
    run_file = "cat /root/.tenuto/b/run/frontend-1.json"  # its unit brings a role back
    pid = json.loads(operator.hosts["b"].run(run_file).stdout)["pid"]
    operator.hosts["b"].run(f"kill -9 {pid}")
    until(
        lambda: json.loads(operator.hosts["b"].run(run_file).stdout)["pid"] != pid,
        30_000.0,
        "another frontend",
    )
    operator.serves()


def test_killed_at_any_moment_up_is_repeated_and_nothing_runs_twice(operator: Operator) -> None:
    draw = random.Random(5)
    longest_ms = 15_000.0
    for _ in range(MOMENTS):
        process = subprocess.Popen(
            operator.command("deploy", "up", str(operator.file)),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        kill_at_ms = CLOCK.now_ms() + draw.uniform(100.0, longest_ms)
        while process.poll() is None and CLOCK.now_ms() < kill_at_ms:
            select.select([], [], [], 0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    operator.up()
    operator.serves()
    assert operator.plan()["steps"] == []
    for name, roles in (
        ("a", ["node-a", "scheduler", "frontend"]),
        ("b", ["node-b", "frontend"]),
        ("c", ["node-c"]),
    ):
        lines = list(operator.processes(name).values())
        assert sum("supervisord" in line and "supervisorctl" not in line for line in lines) == 1, lines
        for role in roles:
            word = "node-agent" if role.startswith("node-") else role
            assert sum(f"/bin/tenuto {word} " in line for line in lines) == 1, lines
        assert sum("roles.gpu_worker" in line for line in lines) == 1, lines
        assert not [line for line in lines if "pip" in line.split("/")[-1]]


def test_what_is_wrong_with_a_host_is_one_line_and_the_next_up_finishes(operator: Operator) -> None:
    a, b, c = (operator.hosts[name] for name in NAMES)
    text = operator.file.read_text()
    # An unknown host, a key that is refused, a port that is taken, another Python, a file that is no cluster.
    operator.file.write_text(text.replace("host: c", "host: nowhere.invalid"))
    code, _, err = operator.tenuto("deploy", "plan", str(operator.file))
    assert code == 6
    assert "nowhere.invalid is an unknown host" in err or "node-nowhere.invalid.key" in err
    operator.file.write_text(text.replace("{host: b, gpus: 1, device: emulated}", "{host: a}"))
    code, _, err = operator.tenuto("deploy", "up", str(operator.file))
    assert (code, err.count("\n")) == (3, 1)
    assert "cluster.nodes[1].host: 'a' is already the name at cluster.nodes[0].host" in err
    operator.file.write_text(text)
    a.start("sh", "-c", "'echo $$ > taking; exec python3 -m http.server 5550'")
    until(lambda: b"5550" in a.run("ss -Hltn").stdout, 10_000.0)
    code, out, err = operator.tenuto("deploy", "up", str(operator.file))
    assert code == 1, err
    assert "port 5550 of scheduler-0 is taken by python3 (process" in err
    assert "scheduler-0 starts" not in err
    a.run(f"kill $(cat {a.home}/taking)")
    b.run("mount -t tmpfs -o size=30m tmpfs /root")
    code, _, err = operator.tenuto("deploy", "up", str(operator.file))
    assert "MB are free in /root/.tenuto/b; it needs" in err
    assert code == 6, err  # the others serve
    b.run("umount /root")
    c.run("mount --bind /bin/false /usr/bin/python3.11")
    code, out, err = operator.tenuto("deploy", "plan", str(operator.file), "--json")
    assert list(json.loads(out)["problems"]) == ["c"], err
    c.run("umount /usr/bin/python3.11")
    c.run("cp /usr/bin/python3.11 /root/real && cat > /root/off && chmod 700 /root/off", stdin=CLOCK_OFF)
    c.run("mount --bind /root/off /usr/bin/python3.11")
    code, out, err = operator.tenuto("deploy", "plan", str(operator.file), "--json")
    assert (code, json.loads(out)["problems"].keys()) == (6, {"c"}), err
    assert "s ahead of this host's: start an NTP client on it" in out  # less what its answer took
    c.run("umount /usr/bin/python3.11; rm /root/real /root/off")
    operator.file.write_text(text.replace("python: /usr/bin/python3", "python: /usr/bin/python3.1"))
    code, _, err = operator.tenuto("deploy", "plan", str(operator.file))
    assert code == 1
    assert "has no /usr/bin/python3.1: install Python 3.11" in err
    operator.file.write_text(text)
    wrong = operator.laptop.ssh / "sshd_config"
    before = wrong.read_text()
    wrong.write_text(before.replace("operator.pub", "server.pub"))
    for host in operator.hosts.values():
        if host.is_server:
            os.kill(_sshd(host), signal.SIGHUP)
    code, _, err = operator.tenuto("deploy", "plan", str(operator.file))
    assert code == 5
    assert err.count("refuses this user's key") == 3
    wrong.write_text(before)
    for host in operator.hosts.values():
        if host.is_server:
            os.kill(_sshd(host), signal.SIGHUP)
    up = operator.command("deploy", "up", str(operator.file))
    with subprocess.Popen(up, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.readline()  # it has read the file
        operator.file.write_text(text.replace("slo_ms: 2000", "slo_ms: 1900"))
        err = said + process.stderr.read()
    assert process.returncode == 0, err
    assert "cluster.yaml was changed meanwhile; this did what it said before: run it again" in err
    assert [one["host"] for one in operator.up()["done"] if one["what"] == "start"] == ["a"]
    assert operator.plan()["steps"] == []
    operator.serves()


def test_a_host_that_is_down_is_left_out_and_taken_in_when_it_is_back(operator: Operator) -> None:
    operator.up()
    operator.hosts["c"].kill()
    code, out, err = operator.tenuto("deploy", "up", str(operator.file), "--json")
    assert code == 6, err
    assert set(json.loads(out)["failed"]) == {"c"}
    assert json.loads(out)["done"] == []  # the others are as they were
    operator.serves()
    operator.hosts["c"].boot()
    found = operator.up()
    assert {one["host"] for one in found["done"]} == {"c"}
    operator.serves()


def test_a_cluster_is_looked_at_changed_rolled_back_and_ended_while_it_serves(operator: Operator) -> None:
    operator.file.write_text(WITH_STANDBY)
    operator.up()
    file = str(operator.file)
    code, out, _ = operator.tenuto("deploy", "status", file, "--json")
    assert code == 0
    assert {row["host"]: set(row["roles"].values()) for row in json.loads(out)["hosts"]} == {
        name: {"runs"} for name in NAMES
    }
    code, out, _ = operator.tenuto("deploy", "logs", file, "--since", "1h")
    assert code == 0
    for line in ("scheduler_serving", "frontend_serving", "agent_serves"):
        assert line in out
    only = operator.tenuto("deploy", "logs", file, "--role", "node-b")[1].splitlines()
    assert only
    assert all(line.split()[2:4] == ["b", "node-b"] for line in only)
    by_host = json.loads(operator.tenuto("deploy", "logs", file, "--role", "node-b", "--json")[1])
    assert set(by_host) == set(NAMES)
    assert [one["line"] for one in by_host["b"]["lines"]]
    assert {one["role"] for its in by_host.values() for one in its["lines"]} == {"node-b"}
    code, out, _ = operator.tenuto("deploy", "run", file, "--", "hostname; test $(hostname) != b")
    assert (code, out.split()) == (6, ["a", "a", "b", "b", "c", "c"])

    before = {name: operator.processes(name) for name in NAMES}
    version = json.loads(operator.tenuto("deploy", "status", file, "--json")[1])["hosts"][0]["config"]
    with operator.load() as found:
        code, _, err = operator.tenuto(
            "deploy", "restart", file, "--rolling", "--role", "node-b", "--role", "frontend-1"
        )
        assert code == 0, err
        assert "not drained" not in err
        assert set(operator.processes("c")) >= set(before["c"])  # not touched
        text = operator.file.read_text().replace("slo_ms: 2000", "slo_ms: 1900")
        operator.file.write_text(text.replace("deploy: {", "deploy: {env: {OF: everybody}, "))
        code, _, err = operator.tenuto("deploy", "upgrade", file)
        assert code == 0, err
    assert not set(operator.processes("c")) & set(before["c"]) - supervisors(operator, "c")
    sys.stderr.write(f"under a rolling restart and an upgrade: {found['fates']}\n")
    refused = sum(found["fates"].values()) - found["fates"]["ok"]
    assert refused <= STARVED_MAX * found["asked"], found["fates"]
    assert found["asked"] > 1_000
    changed = json.loads(operator.tenuto("deploy", "status", file, "--json")[1])["hosts"]
    assert version not in {row["config"] for row in changed}
    began_ms = CLOCK.now_ms()
    code, _, err = operator.tenuto("deploy", "rollback", file)
    assert code == 0, err
    sys.stderr.write(f"rollback took {(CLOCK.now_ms() - began_ms) / 1e3:.1f} s\n")
    back = json.loads(operator.tenuto("deploy", "status", file, "--json")[1])["hosts"]
    assert {row["config"] for row in back} == {version}
    operator.serves()

    code, _, err = operator.tenuto("deploy", "down", file)
    assert code == 0, err
    for name in NAMES:
        assert operator.processes(name) == {}
        assert operator.hosts[name].run("ls -A /root").stdout.split() in ([b".ssh"], [])
    code, _, err = operator.tenuto("deploy", "down", file)
    assert code == 0
    assert "nothing to do: there is nothing of it on any host" in err
    assert operator.tenuto("deploy", "down", file, "--dry-run") == (0, "", err)
    code, out, _ = operator.tenuto("deploy", "status", file, "--json")
    assert code == 6
    assert json.loads(out)["cluster"] is None


def test_hosts_come_and_go_with_the_file_while_requests_are_answered(operator: Operator) -> None:
    """A line more and `up`, a line less and `up`; nothing that the change does not concern starts again."""
    operator.file.write_text(WITH_STANDBY)
    operator.up()
    roles = {"a": ["node-a", "frontend-0"], "b": ["node-b", "frontend-1"]}
    before = {name: pids(operator, name, its) for name, its in roles.items()}
    file = operator.file.read_text()
    with operator.load(100.0) as found:
        added = CliRunner().invoke(keys, ["add", str(operator.folder / "keys"), "node/d"])
        assert added.exit_code == 0, added.output
        operator.file.write_text(
            file.replace("device: emulated}\n  sch", "device: emulated}\n   - {host: d}\n  sch")
        )
        done = [
            (one["host"], one["detail"].split()[0]) for one in operator.up()["done"] if one["what"] == "start"
        ]
        assert done == [("d", "node-d"), ("b", "scheduler-1"), ("a", "scheduler-0")]
        assert nodes_that_serve(operator) == {"a", "b", "c", "d"}
        operator.file.write_text(
            operator.file.read_text().replace("   - {host: c, gpus: 1, device: emulated}\n", "")
        )
        done = [(one["host"], one["what"]) for one in operator.up()["done"]]
        assert [one for one in done if one[0] == "c"] == [("c", "drain"), ("c", "stop"), ("c", "remove")]
        assert nodes_that_serve(operator) == {"a", "b", "d"}
    sys.stderr.write(f"while a host came and another one went: {found['fates']}\n")
    refused = sum(found["fates"].values()) - found["fates"]["ok"]
    assert refused <= STARVED_MAX * found["asked"], found["fates"]
    assert operator.processes("c") == {}
    assert operator.hosts["c"].run("ls -A /root").stdout.split() in ([b".ssh"], [])
    assert {name: pids(operator, name, its) for name, its in roles.items()} == before
    assert operator.plan()["steps"] == []


def supervisors(operator: Operator, name: str) -> set[int]:
    return {pid for pid, line in operator.processes(name).items() if "supervisord" in line}


def pids(operator: Operator, name: str, roles: list[str]) -> list[int]:
    """Of roles on a host, by their run files."""
    read = [operator.hosts[name].run(f"cat /root/.tenuto/{name}/run/{role}.json").stdout for role in roles]
    return [json.loads(one)["pid"] for one in read]


def nodes_that_serve(operator: Operator) -> set[str]:
    found = json.loads(operator.tenuto("deploy", "status", str(operator.file), "--json")[1])["cluster"]
    return {one["slice_id"].partition("/")[0] for one in found["slices"] if one["state"] == "ready"}


def test_a_laptop_sees_the_cluster_and_uses_it_through_ssh_to_one_host(operator: Operator) -> None:
    """It has no way to any other host; the active scheduler is on one of those in the end."""
    operator.file.write_text(WITH_STANDBY)
    operator.up()
    for name in ("b", "c", "d"):
        sh("ip", "-n", operator.laptop.namespace, "route", "add", "unreachable", operator.hosts[name].address)
    assert operator.laptop.run(f"ping -c1 -W1 {operator.hosts['b'].address}", check=False).returncode != 0
    np.save(operator.folder / "x.npy", np.zeros(4, np.float32))
    request = ("infer", "fast", str(operator.folder / "x.npy"), "--json", "--budget-ms", "20000")
    for way in (["--via", "a"], ["--via", "a", "--key", str(operator.folder / "keys/operator.key")]):
        code, out, err = operator.tenuto("status", *way, "--json")
        assert code == 0, err
        assert {one["slice_id"].partition("/")[0] for one in json.loads(out)["slices"]} == set(NAMES)
        code, out, err = operator.tenuto(*request, *way)
        assert code == 0, err
        assert json.loads(out)["outputs"]
    assert set(json.loads(operator.tenuto("status", *way, "--json")[1])["roles"]) >= {
        *("scheduler-0", "scheduler-1", "frontend-0", "frontend-1")
    }
    code, _, err = operator.tenuto("drain", "c", "--via", "a")
    assert code == 0, err
    _, out, _ = operator.tenuto("status", "--via", "a", "--json")
    assert {one["slice_id"].partition("/")[0] for one in json.loads(out)["slices"]} == {"a", "b"}
    pid = pids(operator, "a", ["scheduler-0"])[0]
    operator.hosts["a"].run(f"kill -9 {pid}")
    until(lambda: operator.tenuto("models", "list", *way)[0] == 0, 60_000.0, "the active scheduler, on b")
    code, _, err = operator.tenuto("drain", "c", "--back", *reversed_pairs(way))
    assert code == 0, err
    code, _, err = operator.tenuto("models", "set", "fast", "--rate", "10", "--via", "a")
    assert (code, "scheduler-0 stands by; the active one is scheduler-1: ask" in err) == (5, True), err
    load = ["bench", str(operator.file), "--warmup", "0", "--duration", "1", "--json"]
    operator.file.write_text(WITH_STANDBY.replace("slo_ms: 2000,", "slo_ms: 20000, rate_rps: 50,"))
    code, out, err = operator.tenuto(*load, *way)
    assert code in (0, 1), err  # 1: the senders were starved
    found = json.loads(out)["models"]["fast"]
    assert found["good"] == found["offered"] > 0
    assert operator.tenuto("status", "--via", "c")[0] == 5  # no scheduler there
    code, _, err = operator.tenuto("status", "--via", "nowhere.invalid")
    assert (code, "is an unknown host" in err) == (5, True)
    assert list(Path(tempfile.gettempdir()).glob("tenuto-via-*")) == []


def reversed_pairs(way: list[str]) -> list[str]:
    """The same options in the other order."""
    return [*way[2:], *way[:2]]


def _sshd(host: Host) -> int:
    return host.first_pid
