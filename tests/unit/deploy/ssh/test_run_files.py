"""`--via HOST`: whichever way that host is spelled, it is the cluster that runs there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploy.ssh import tunnel as tunnels
from deploy.ssh.connection import HostConnection
from deploy.ssh.on_host.folders import Place
from deploy.ssh.on_host.requests import run_files
from deploy.ssh.on_host.system import Refused
from fabric.errors import PeerLost

Starts = Callable[[str, str], Path]


@pytest.fixture
def starts(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    """A role of a cluster in that directory, on a host with that name in its file."""
    monkeypatch.setenv("HOME", str(short_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path / "runtime"))
    monkeypatch.delenv("TENUTO_RUN_DIR", raising=False)
    with ExitStack() as processes:

        def start(directory: str, host: str) -> Path:
            place = Place({"host": host, "directory": directory, "units": "auto"})
            config = place.base / "configs/c1"
            config.mkdir(parents=True)
            (config / "cluster.json").write_text(json.dumps({"cluster": {"of": directory}}))
            (place.base / "state.json").write_text(json.dumps({"version": "1", "config": "c1"}))
            place.run_dir.mkdir()
            role = processes.enter_context(subprocess.Popen(["sleep", "1000"], cwd=config))
            processes.callback(role.kill)
            (place.run_dir / "node-a.json").write_text(json.dumps({"role_id": "node-a", "pid": role.pid}))
            return place.run_dir

        yield start


def told(host: str) -> dict[str, Any]:
    return run_files(Place({"host": host, "directory": ".tenuto", "units": "auto"}), {})


@pytest.mark.parametrize("spelled", ["head", "head.example", "10.0.0.1"])
@pytest.mark.parametrize("directory", [".tenuto", "srv", "srv/tenuto"])
def test_the_cluster_that_runs_there_is_found(starts: Starts, directory: str, spelled: str) -> None:
    run_dir = starts(directory, "head")
    found = told(spelled)
    assert [one["role_id"] for one in found["run_files"]] == ["node-a"]
    assert found["looked_in"] == [str(run_dir)]
    assert found["cluster"]["cluster"] == {"of": directory}


def test_the_cluster_is_found_where_the_home_is_a_link_to_a_long_path(
    starts: Starts, short_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its roles know the short path, and their run directory is there; their folders are told by the long one."""
    real = tmp_path / ("long-" * 18)
    real.mkdir()
    (short_path / "home").symlink_to(real)
    monkeypatch.setenv("HOME", str(short_path / "home"))
    run_dir = starts(".tenuto", "head")
    assert [one["role_id"] for one in told("10.0.0.1")["run_files"]] == ["node-a"]
    assert Path(told("10.0.0.1")["looked_in"][0]).samefile(run_dir)


def test_of_several_it_is_the_one_that_is_named(starts: Starts) -> None:
    starts("srv", "head")
    ours = starts(".tenuto", "head")
    assert told("head")["looked_in"] == [str(ours)]
    with pytest.raises(Refused, match="several clusters of this user run on it"):
        told("10.0.0.1")


def test_where_tenuto_up_takes_requests_is_told_while_it_lives(starts: Starts) -> None:
    run_dir = starts(".tenuto", "head")
    assert told("head")["up"] is None
    supervisor = {"pid": os.getpid(), "is_ready": True, "endpoints": {}, "drained": ["frontend-1"]}
    (run_dir / "up.json").write_text(json.dumps(supervisor))
    assert told("head")["up"] == {"socket": f"{run_dir}/up.control", "drained": ["frontend-1"]}
    (run_dir / "up.json").write_text(json.dumps(supervisor | {"pid": 0}))
    assert told("head")["up"] is None


def test_what_is_there_and_does_not_run_is_none(starts: Starts, short_path: Path) -> None:
    (starts("srv", "head") / "node-a.json").write_text(json.dumps({"role_id": "node-a", "pid": 0}))
    assert told("head")["run_files"] == []
    assert told("head")["looked_in"][0] == f"{short_path}/.tenuto/head/run"


@pytest.mark.parametrize("host", ["head", "tenuto@head", "ssh://tenuto@head", "ssh://head/"])
def test_a_host_is_asked_by_its_name_alone(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ask(connection: HostConnection, request: Any) -> dict[str, Any]:
        asked.append((connection.host, request["host"]))
        return {"run_files": [], "looked_in": [], "cluster": {}}

    monkeypatch.setattr(HostConnection, "ask", ask)
    with pytest.raises(PeerLost), tunnels.tunnel(host):
        pass
    assert asked == [(host, "head")]
