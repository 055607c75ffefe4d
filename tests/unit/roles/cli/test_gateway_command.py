"""What `tenuto gateway` refuses before it listens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fabric.errors import ConfigError
from roles.cli.gateway import gateway


def refused(tmp_path: Path, *words: str, **document: Any) -> str:
    model = {"name": "m", "slo_ms": 50, "profile": {"alpha_ms": 1, "beta_ms": 5}}
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"models": [model], "cluster": {"gpus": 1}, **document}), encoding="utf-8")
    result = CliRunner().invoke(gateway, [str(file), "--run-dir", str(tmp_path), *words])
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def test_a_file_that_says_nothing_of_http_is_refused(tmp_path: Path) -> None:
    assert "neither listen.http nor listen.grpc" in refused(tmp_path)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--http", "0.0.0.0:8000"), "name the interface's own address"),
        (("--http", "10.0.0.1:8000"), "that needs cluster.gateway.token_file"),
        (("--grpc", "http://127.0.0.1:1"), "it must be like"),
        (("--http", "127.0.0.1"), "it must end in :PORT"),
    ],
)
def test_addresses_where_nobody_may_listen_are_refused(
    tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    assert reason in refused(tmp_path, *words)


def test_a_gateway_has_a_number_or_a_host(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}", encoding="utf-8")
    result = CliRunner().invoke(gateway, [str(tmp_path / "c.json"), "--index", "1", "--node", "a"])
    assert (result.exit_code, "not both" in result.output) == (2, True)
