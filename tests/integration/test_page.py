"""The page beside a cluster of real processes, as a browser and as strangers see it."""

from __future__ import annotations

import http.client
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from fabric.client import BlockingClient
from fabric.errors import RequestError
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.page.questions import LIMIT_MS
from roles.page.server import files
from roles.runtime.process import read_run_file
from roles.runtime.running_cluster import processes_in
from tests.integration.proc import until as it_is

pytestmark = pytest.mark.timeout(300)
CLUSTER = """
models:
 - {name: fast, slo_ms: 4000, profile: {alpha_ms: 1, beta_ms: 10, max_batch: 32}}
 - {name: slow, slo_ms: 8000, profile: {alpha_ms: 2, beta_ms: 30, max_batch: 32}}
cluster: {gpus: 2}
listen: {page: "127.0.0.1:0"}
"""
ASKED_BY = {"X-Tenuto-Page": "1"}


def until(is_true: Callable[[], bool], limit_ms: float) -> None:
    """As `proc.until`, with less haste: the page is asked once a second by its readers."""

    def slowly() -> bool:
        select.select([], [], [], 0.1)
        return is_true()

    it_is(slowly, limit_ms)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporaryCluster]:
    file = tmp_path_factory.mktemp("p") / "cluster.yaml"
    file.write_text(CLUSTER, encoding="utf-8")
    with temporary_cluster(file) as found:
        yield found


def get(
    cluster: TemporaryCluster, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(cluster.endpoints["page"][0]).netloc, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def feed(cluster: TemporaryCluster, after: int = 0, served: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(cluster, f"/feed?after={after}&served={served}")[2])
    return found


@contextmanager
def load(cluster: TemporaryCluster) -> Iterator[None]:
    """Requests for both models, a few at a time, until the block is left."""
    stop = threading.Event()

    def ask(model: str) -> None:
        with BlockingClient(cluster.endpoints["client"][0]) as client:
            while not stop.is_set():
                try:
                    client.infer(model, {"x": np.zeros((1, 16), np.float32)})
                except RequestError:
                    stop.wait(0.05)

    threads = [threading.Thread(target=ask, args=(model,)) for model in ("fast", "slow")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_the_feed_shows_what_the_cluster_does(cluster: TemporaryCluster) -> None:
    frames: dict[int, dict[str, Any]] = {}
    with load(cluster):

        def is_shown() -> bool:
            told = feed(cluster, max(frames, default=0))
            frames.update({frame["seq"]: frame for frame in told["frames"]})
            models = {} if told["state"] is None else {one["id"]: one for one in told["state"]["models"]}
            return (
                set(models) == {"fast", "slow"}
                and all(one["goodput_rps"] and one["p99_ms"] and one["stages_ms"] for one in models.values())
                and sum(len(frame["batches"]) for frame in frames.values()) > 20
            )

        until(is_shown, 60_000.0)
        state = feed(cluster)["state"]
    numbers = {one["number"] for one in state["models"]}
    slices = {one["number"]: one for gpu in state["gpus"] for one in gpu["slices"]}
    assert {gpu["id"] for gpu in state["gpus"]} == {"local/gpu0", "local/gpu1"}
    assert sum(sum(one["busy"].values()) for one in slices.values()) > 0
    for slice_number, model_number, _, exec_ms, size, _ in (
        row for frame in frames.values() for row in frame["batches"]
    ):
        assert slice_number in slices
        assert model_number in numbers
        assert exec_ms >= 10
        assert size >= 1
    rows = [tuple(row) for frame in frames.values() for row in frame["batches"]]
    assert len(set(rows)) == len(rows), "no batch is told twice"
    for own in slices:  # a slice runs one batch at a time
        its = sorted((row[2], row[2] + row[3]) for row in rows if row[0] == own)
        overlapping = sum(begin < ended - 3.0 for (_, ended), (begin, _) in pairwise(its))
        # Clocks are put beside each other to about a millisecond, unless an answer was late on a busy host.
        assert overlapping <= len(its) / 4


def test_a_page_that_nobody_reads_does_not_look(cluster: TemporaryCluster) -> None:
    from fabric.client import ask_status

    page = read_run_file(cluster.run_dir / "page.json")
    assert page is not None

    def looks() -> float:
        return ask_status(page.addresses["control"], 10_000.0).counters["looks"]

    feed(cluster)
    until(lambda: looks() > 0, 30_000.0)
    last = -1.0

    def has_stopped() -> bool:
        nonlocal last
        former, last = last, looks()
        threading.Event().wait(1.5)
        return former == last

    until(has_stopped, 60_000.0)
    feed(cluster)
    until(lambda: looks() > last, 30_000.0)


def test_why_and_what_if_are_answered_by_a_child_at_idle_priority(cluster: TemporaryCluster) -> None:
    with load(cluster):
        until(lambda: bool((feed(cluster)["state"] or {}).get("models")), 30_000.0)
        threading.Event().wait(3.0)
        status, _, body = get(cluster, "/what-if?model=fast&rate=2&gpus=1", headers=ASKED_BY)
        assert status == 202, body
        told = json.loads(body)
        assert told["command"] == ["tenuto", "what-if", "--json", "--rate=fast=2", "--gpus=1"]
        page = read_run_file(cluster.run_dir / "page.json")
        assert page is not None
        policies: set[int] = set()

        def is_answered() -> bool:
            policies.update(_policies_of_children(page.pid))
            answer = json.loads(get(cluster, f"/answer?number={told['number']}", headers=ASKED_BY)[2])
            told.update(answer)
            return not answer.get("is_waiting")

        until(is_answered, 1.2 * LIMIT_MS)
    assert os.SCHED_IDLE in policies
    if "no time to spare" in told.get("error", ""):  # nor has this one, beside other work
        return
    assert "error" not in told, told
    assert set(told["answer"]["models"]) == {"fast", "slow"}
    today, then = told["answer"]["models"]["fast"]["today"], told["answer"]["models"]["fast"]["then"]
    assert then["rate_rps"] == pytest.approx(2 * today["rate_rps"])
    assert told["answer"]["gpus"] == {"today": 2, "then": 3}


def _policies_of_children(pid: int) -> set[int]:
    found = set()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        try:
            found.add(os.sched_getscheduler(int(child)))
        except ProcessLookupError:
            continue
    return found


@pytest.mark.parametrize("path", sorted(files()))
def test_all_that_a_browser_loads_is_here_and_may_load_nothing_from_elsewhere(
    cluster: TemporaryCluster, path: str
) -> None:
    status, headers, body = get(cluster, path)
    assert (status, body) == (200, files()[path][0])
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    text = body.decode()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "an address of somebody else's"
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
        assert forbidden not in text, "what users name must never become HTML"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/feed", {"Host": "evil.example"}, 421),
        ("/", {"Host": "evil.example:8004"}, 421),
        ("/feed", {"Host": ""}, 421),
        ("/feed", {"Host": "localhost:9000"}, 200),
        ("/feed", {"Host": "[::1]:9000"}, 200),
        ("/feed?after=" + "9" * 4_000, {}, 200),
        ("/feed?after=-1", {}, 200),
        ("/feed?" + "&".join("abcdefghijklmnop") + "&after=1", {}, 200),
        ("/why?model=fast", {}, 403),
        ("/what-if?gpus=1", {}, 403),
        ("/answer?number=1", {}, 403),
        ("/what-if?gpus=x", ASKED_BY, 400),
        ("/why?model=nobody", ASKED_BY, 400),
        ("/answer?number=4711", ASKED_BY, 404),
        ("/../../etc/passwd", {}, 404),
        ("/page.css/", {}, 404),
    ],
)
def test_what_is_not_the_pages_is_refused(
    cluster: TemporaryCluster, path: str, headers: dict[str, str], status: int
) -> None:
    assert get(cluster, path, headers=headers)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_written(cluster: TemporaryCluster, method: str) -> None:
    for path in ("/feed", "/why?model=fast", "/"):
        status, headers, _ = get(cluster, path, method=method, headers=ASKED_BY)
        assert status == 405
        assert "access-control-allow-origin" not in headers


def test_a_silent_crowd_keeps_no_reader_out(cluster: TemporaryCluster) -> None:
    host, _, port = urlsplit(cluster.endpoints["page"][0]).netloc.rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=20) for _ in range(200)]
    try:
        assert get(cluster, "/feed")[0] == 200
    finally:
        for one in silent:
            one.close()


def test_the_command_says_where_a_page_is_served_already(cluster: TemporaryCluster) -> None:
    command = [sys.executable, "-P", "-m", "roles.cli", "page", "--run-dir", str(cluster.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == cluster.endpoints["page"][0]


def test_a_page_comes_back_when_its_process_is_killed(cluster: TemporaryCluster) -> None:
    """Last of its file: the page's address changes."""
    page = read_run_file(cluster.run_dir / "page.json")
    assert page is not None
    os.kill(page.pid, signal.SIGKILL)

    def is_back() -> bool:
        found = read_run_file(cluster.run_dir / "page.json")
        return found is not None and found.pid != page.pid

    until(is_back, 60_000.0)
    others = {one.role_id: one.alive for one in processes_in(cluster.run_dir) if one.role_id != "page"}
    assert all(others.values())


def test_a_page_without_a_cluster_says_so_and_shows_one_that_is_started_there() -> None:
    run_dir = Path(tempfile.mkdtemp(prefix="tp-"))  # a short path for sockets
    tenuto = [sys.executable, "-P", "-m", "roles.cli"]
    command = [*tenuto, "page", "--run-dir", str(run_dir), "--address", "127.0.0.1:0"]
    try:
        with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                assert "no cluster runs in" in process.stderr.readline()
                url = process.stdout.readline().strip()
                served = TemporaryCluster({"page": [url]}, run_dir, process.pid)
                until(lambda: "no cluster runs in" in feed(served)["trouble"], 30_000.0)
                with subprocess.Popen([*tenuto, "up", "--run-dir", str(run_dir)], stderr=PIPE) as up:
                    try:
                        until(lambda: bool(feed(served)["state"]), 60_000.0)
                    finally:
                        up.terminate()
                until(lambda: "no cluster runs in" in feed(served)["trouble"], 30_000.0)
            finally:
                process.terminate()
            assert process.wait(20) == 0
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
