"""What `tenuto deploy` says on its own, whatever the hosts are like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from deploy.ssh.commands import deploy
from roles.runtime.exit_codes import EXIT_UNREACHABLE
from tests.unit.deploy.ssh.stage import MODEL

CLUSTER: dict[str, Any] = {"nodes": [{"host": "a"}], "addresses": {"a": "127.0.0.1"}}
GATEWAY = (
    "a gateway (listen.http, listen.grpc), which others would reach there; give cluster.gateway a token_file"
    " (docs/operate/deploy.md)"
)
PAGE = "the page (listen.page); docs/operate/deploy.md says how to run it there"
LISTEN = {"http": "127.0.0.1:8000", "page": "127.0.0.1:8004"}


@pytest.mark.parametrize("words", [("plan",), ("up", "--dry-run"), ("upgrade", "--dry-run")])
@pytest.mark.parametrize(
    ("gateway", "listen", "said"),
    [
        ({}, {}, []),
        ({"gateway": {}}, {}, [GATEWAY]),
        ({}, LISTEN, [GATEWAY, PAGE]),
        ({}, {"page": LISTEN["page"]}, [PAGE]),
        ({"gateway": {"token_file": "tokens"}}, {}, []),
    ],
)
def test_what_of_the_file_no_host_is_to_run_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    gateway: dict[str, Any],
    listen: dict[str, str],
    said: list[str],
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "tokens").write_text("a-token-of-some-length", encoding="utf-8")
    (tmp_path / "tokens").chmod(0o600)
    file = tmp_path / "cluster.yaml"
    document = {"models": [MODEL], "cluster": CLUSTER | gateway, "listen": listen}
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    ended = CliRunner().invoke(deploy, [words[0], str(file), *words[1:]])
    assert ended.exit_code == EXIT_UNREACHABLE, ended.output
    remarks = [line for line in ended.stderr.splitlines() if "not started on any host" in line]
    assert remarks == [f"tenuto: not started on any host: {one}" for one in said]
