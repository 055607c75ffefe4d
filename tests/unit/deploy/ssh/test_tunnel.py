"""Which addresses a tunnel leads to, and which options open one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from deploy.ssh import tunnel as tunnels
from deploy.ssh.tunnel import _addresses_of, _sockets_of
from fabric.errors import FabricError
from roles.cli.options import key_option, via_option
from tests.unit.deploy.ssh.stage import CLUSTER, Stage


def test_by_key_all_schedulers_and_frontends_of_the_deployed_cluster_are_reached() -> None:
    stage = Stage(
        cluster={
            **CLUSTER,
            "schedulers": [{"host": "head"}, {"host": "g1", "standby": True, "port": 7}],
            "frontends": [
                {"host": "head"},
                {"host": "head"},
                {"host": "g1", "listen": {"client": "tcp://eth0:9"}},
                {"host": "g2", "listen": {"client": "ipc:///run/here-alone"}},
            ],
        }
    )
    document = json.loads(stage.goods.config.files["cluster.json"])  # type: ignore[arg-type]
    told = {key: document.get(key, {}) for key in ("cluster", "listen", "security")}
    found = _addresses_of(told)
    assert [(one.role_id, one.purpose, one.there) for one in found] == [
        ("scheduler-0", "control", "tcp://10.0.0.1:5550"),
        ("scheduler-1", "control", "tcp://10.0.0.2:7"),
        ("frontend-0", "client", "tcp://10.0.0.1:5555"),
        ("frontend-1", "client", "tcp://10.0.0.1:5556"),
        ("frontend-2", "client", "tcp://10.0.0.2:9"),
    ]
    assert len({one.here for one in found}) == len(found)
    assert all(one.here.startswith("tcp://127.0.0.1:") for one in found)
    assert found[0].option.endswith(":10.0.0.1:5550")
    assert found[0].option.startswith("127.0.0.1:")


def test_without_one_it_is_the_sockets_of_that_host(tmp_path: Path) -> None:
    addresses = {
        "control": ["ipc:///run/t/scheduler-0.control", "tcp://10.0.0.1:5550"],
        "payload": ["ipc:///x"],
    }
    (one,) = _sockets_of([{"role_id": "scheduler-0", "incarnation": "1", "addresses": addresses}], tmp_path)
    assert one.option == f"{tmp_path}/scheduler-0.control:/run/t/scheduler-0.control"
    with pytest.raises(FabricError, match="cannot be understood"):
        _sockets_of([{"role_id": "scheduler-0"}], tmp_path)


@pytest.mark.parametrize("is_key_first", [True, False])
def test_a_tunnel_is_opened_once_with_host_and_key_in_either_order(
    is_key_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, Path | None]] = []

    @contextmanager
    def tunnel(host: str, key_file: Path | None = None) -> Iterator[Path]:
        opened.append((host, key_file))
        yield tmp_path

    monkeypatch.setattr(tunnels, "tunnel", tunnel)
    monkeypatch.setenv("TENUTO_RUN_DIR", "before")
    key = tmp_path / "operator.key"
    key.touch()

    @click.command()
    @via_option
    @key_option
    def command(key_file: Path | None) -> None:
        click.echo(f"{key_file}")

    words = [["--key", str(key)], ["--via", "a"]]
    given = [word for pair in (words if is_key_first else words[::-1]) for word in pair]
    done = CliRunner().invoke(command, given)
    assert (done.exit_code, done.output) == (0, f"{key}\n")
    assert CliRunner().invoke(command, ["--via", "b"]).output == "None\n"
    assert CliRunner().invoke(command, []).output == "None\n"
    assert opened == [("a", key), ("b", None)]
