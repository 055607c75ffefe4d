"""docs/guides/gateway.md as a reader does it: its file, its curl lines and its Python, with a cluster of real processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.process import read_run_file
from tests.documentation import blocks
from tests.integration.proc import until

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs/guides/gateway.md"
PAGE = PATH.read_text(encoding="utf-8")


pytestmark = pytest.mark.timeout(
    300
)  # torchvision is imported in the first one's time, perhaps on a busy host
CLUSTERS: dict[Path, TemporaryCluster] = {}


def block(language: str, at: int = 0) -> str:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found[at]


def commands(program: str) -> list[str]:
    """Of the blocks that this file runs."""
    lines = [line for one in blocks(PATH) if one.mark and one.mark[0] == "run by" for line in one.commands]
    return [line for line in lines if line.startswith(f"{program} ")]


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        return bound[0].getsockname()[1], bound[1].getsockname()[1]


@pytest.fixture(scope="module")
def folder(ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("g")
    file = home / "cluster.yaml"
    file.write_text(moved(block("yaml"), ports), encoding="utf-8")
    (picture,) = commands("python")
    subprocess.run([sys.executable, *shlex.split(picture)[1:]], cwd=home, check=True)
    with temporary_cluster(file) as cluster:
        assert cluster.endpoints["http"] == [f"http://127.0.0.1:{ports[0]}"]
        assert cluster.endpoints["grpc"] == [f"grpc://127.0.0.1:{ports[1]}"]
        CLUSTERS[home] = cluster
        yield home


def moved(text: str, ports: tuple[int, int]) -> str:
    return text.replace(":8000", f":{ports[0]}").replace(":8001", f":{ports[1]}")


def test_every_curl_line_does_what_the_page_says(folder: Path, ports: tuple[int, int]) -> None:
    lines = commands("curl")
    assert len(lines) > 10
    for line in lines:
        command, _, promised = moved(line, ports).partition(" # ")
        ran = subprocess.run(
            [*shlex.split(command), "-w", "\n%{http_code}"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        body, _, status = ran.stdout.rpartition("\n")
        document = json.loads(body) if body else {}
        code = document.get("code", "") if isinstance(document, dict) else ""
        assert f"{status} {code}".strip() == (promised.strip() or "200"), f"{line}: {ran.stdout}"
        if "picture.png" in line:
            assert len(document["outputs"]["indices"]) == 5
        if "repository/index" in line:
            assert {one["name"]: one["state"] for one in document} == {
                "mobilenet": "READY",
                "resnet50-like": "UNAVAILABLE",
            }


def test_the_python_of_the_page_runs(folder: Path, ports: tuple[int, int]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", moved(block("python"), ports)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) >= 5


def test_a_gateway_that_is_killed_is_back_where_its_clients_know_it(
    folder: Path, ports: tuple[int, int]
) -> None:
    run_dir = CLUSTERS[folder].run_dir
    former = read_run_file(run_dir / "gateway-0.json")
    assert former is not None
    os.kill(former.pid, signal.SIGKILL)

    def is_back() -> bool:
        found = read_run_file(run_dir / "gateway-0.json")
        return found is not None and found.pid != former.pid

    until(is_back)
    now = read_run_file(run_dir / "gateway-0.json")
    assert now is not None
    assert {purpose: now.addresses[purpose] for purpose in ("http", "grpc")} == {
        "http": [f"http://127.0.0.1:{ports[0]}"],
        "grpc": [f"grpc://127.0.0.1:{ports[1]}"],
    }


def test_the_page_has_every_code_and_every_key() -> None:
    from roles.config.sections import GatewaySection
    from roles.gateway.failures import GRPC_STATUS, STATUS

    for code, status in STATUS.items():
        (row,) = [line for line in PAGE.splitlines() if re.match(rf"\| [\d, ]*\b{status}\b", line)]
        assert f"`{code}`" in row
        assert GRPC_STATUS.get(status, "") in row
    for key in GatewaySection.__struct_fields__:
        assert f"| `{key}`" in PAGE or f"`{key}` |" in PAGE or f", `{key}`" in PAGE
