"""Two schedulers on two hosts, one of which stands by: started by hand, and killed while requests come."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from typing import Any

import pytest

from roles.runtime.epochs import LEASE_MS
from tests.integration.hosts_stage import (
    NETWORK,
    TENUTO,
    Host,
    hosts,
    lay_out,
    loaded,
    needs_hosts,
    start_role,
    status_on,
    with_keys,
)
from tests.integration.proc import until

pytestmark = [needs_hosts, pytest.mark.timeout(300)]

CLUSTER = f"""
models:
 - {{name: fast, slo_ms: 20000, profile: {{alpha_ms: 1, beta_ms: 4, max_batch: 16}}}}
cluster:
  nodes: [{{host: a, gpus: 1}}, {{host: b, gpus: 1}}, {{host: c, gpus: 1}}]
  schedulers: [{{host: a}}, {{host: b, standby: true}}]
  frontends: [{{host: c}}]
  addresses: {{a: {NETWORK}.1, b: {NETWORK}.2, c: {NETWORK}.3}}
batching: eager
security: {{keys: keys}}
"""
FRONTEND = f"tcp://{NETWORK}.3:5555"
GAP_MAX_S = LEASE_MS / 1e3 + 0.5
"""From the end of the active scheduler to the first answer of a request that was asked after it."""


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    file = with_keys(tmp_path_factory.mktemp("file"), CLUSTER)
    with hosts(["a", "b", "c", "laptop"], tmp_path_factory.mktemp("hosts") / "home") as made:
        lay_out(file, made)
        for host, role in (("b", "scheduler"), ("c", "frontend"), ("a", "scheduler")):
            start_role(made[host], role, "cluster.yaml")
        for host in "abc":
            start_role(made[host], "node-agent", "cluster.yaml")
        yield made


def standing(host: Host) -> dict[str, Any]:
    found: dict[str, Any] = status_on(host).get("scheduling") or {}
    return found


def is_active(host: Host, *, slices: int = 3) -> bool:
    """It is the active one, every slice is ready, and the other one stands by with the plan."""
    status = status_on(host)
    ready = [one for one in status.get("slices", ()) if one["state"] == "ready"]
    standbys = (status.get("scheduling") or {}).get("standbys", ())
    return len(ready) == slices and [one["has_plan"] for one in standbys] == [True]


def pid_of_scheduler(host: Host, number: int) -> int:
    processes = {one["role_id"]: one["pid"] for one in status_on(host)["processes"]}
    return int(processes[f"scheduler-{number}"])


def gap_s(found: dict[str, Any], lost_at_s: float) -> float:
    """From a moment to the first answer of a request that was asked after it."""
    answered: list[float] = [
        end for asked, end, fate in found["moments"] if fate == "ok" and asked > lost_at_s
    ]
    return min(answered) - lost_at_s


def test_the_standby_on_another_host_takes_over_from_a_scheduler_that_is_killed(
    placed: dict[str, Host],
) -> None:
    a, b, laptop = (placed[name] for name in ("a", "b", "laptop"))
    until(lambda: is_active(a), 120_000.0, "a cluster that is ready, with a standby")
    told = b.run(f"TENUTO_RUN_DIR={b.home}/run env {' '.join(TENUTO)} status", check=False)
    assert (told.returncode, b"scheduler-1 stands by; the active one is scheduler-0: ask" in told.stderr) == (
        5,
        True,
    )
    epoch = standing(a)["epoch"]
    pid = pid_of_scheduler(a, 0)
    with loaded(laptop, "fast", 100.0, 20_000.0, [FRONTEND]) as found:
        select.select([], [], [], 1.0)
        lost_at_s = time.monotonic()
        a.run(f"kill -9 {pid}")
        until(lambda: bool(standing(b)), 30_000.0, "a take-over")
    assert gap_s(found, lost_at_s) < GAP_MAX_S
    assert set(found["fates"]) == {"ok"}, found["fates"]
    assert found["fates"]["ok"] == found["asked"], "each has its answer"
    assert standing(b)["epoch"] > epoch
    start_role(a, "scheduler", "cluster.yaml")  # its next process stands by, and gets the plan
    until(lambda: is_active(b), 60_000.0, "it stands by")


def test_the_loss_of_the_active_schedulers_whole_host_is_a_take_over_too(placed: dict[str, Host]) -> None:
    a, b, laptop = (placed[name] for name in ("a", "b", "laptop"))
    until(lambda: is_active(a) or is_active(b), 120_000.0, "a cluster that is ready, with a standby")
    active, standby = (a, b) if is_active(a) else (b, a)
    with loaded(laptop, "fast", 100.0, 20_000.0, [FRONTEND]) as found:
        select.select([], [], [], 1.0)
        lost_at_s = time.monotonic()
        active.kill()
        until(lambda: bool(standing(standby)), 30_000.0, "a take-over")
    assert gap_s(found, lost_at_s) < GAP_MAX_S
    refused = {fate: count for fate, count in found["fates"].items() if fate != "ok"}
    assert found["asked"] == sum(found["fates"].values()), "each has its answer"
    assert sum(refused.values()) <= 0.05 * found["asked"], refused  # what its slice had in hand
