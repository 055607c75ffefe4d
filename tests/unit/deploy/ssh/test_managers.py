"""What keeps roles alive: what systemd, supervisord and cron are told, and what becomes of logs beside systemd."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy.ssh.on_host import managers
from deploy.ssh.on_host.folders import Place
from deploy.ssh.on_host.managers import (
    boot_script,
    crontab,
    log_limit,
    supervisor_conf,
    supervisor_unit,
    systemd_unit,
)
from deploy.ssh.on_host.system import until


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("HOME", str(tmp_path))
    return Place({"host": "a", "directory": ".t", "units": "supervisor"})


def test_what_systemd_and_supervisor_are_told(place: Place) -> None:
    base = place.base
    assert (
        systemd_unit(
            place,
            "frontend-0",
            place.script("frontend-0"),
            "0123456789abcdef0123456789abcdef",
            place.log("frontend-0"),
        )
        == f"""\
[Unit]
Description=Tenuto frontend-0 on a
ConditionHost=0123456789abcdef0123456789abcdef
StartLimitIntervalSec=0

[Service]
ExecStart="{base}/roles/frontend-0.sh"
Restart=on-failure
RestartSec=5
KillMode=mixed
TimeoutStopSec=30
LimitNOFILE=infinity
StandardOutput=append:{base}/logs/frontend-0.log
StandardError=append:{base}/logs/frontend-0.log

[Install]
WantedBy=default.target
"""
    )
    modes = {
        name: [line for line in unit.splitlines() if line.startswith("KillMode=")]
        for name in ("node-a", "scheduler-0", "frontend-0", "logs")
        for unit in (systemd_unit(place, name, place.script(name), "0123456789abcdef0123456789abcdef"),)
    }
    assert modes == {
        "node-a": [
            "KillMode=process"
        ],  # its workers may outlive it, and guards end their daemons when it is gone
        "scheduler-0": ["KillMode=mixed"],
        "frontend-0": ["KillMode=mixed"],
        "logs": ["KillMode=mixed"],
    }
    assert f'command="{base}/roles/frontend-0.sh"' in supervisor_unit(place, "frontend-0")
    assert f"serverurl=unix://{place.run_dir}/supervisor.sock" in supervisor_conf(place)


def test_supervisord_begins_with_the_host_though_its_directory_has_gone_but_in_none_of_anothers(
    place: Place,
) -> None:
    daemon = ["touch", str(place.run_dir / "supervisor.sock")]
    assert subprocess.run(["sh", "-c", boot_script(place, daemon)], check=False).returncode == 0
    assert (place.run_dir / "supervisor.sock").exists()
    assert place.run_dir.stat().st_mode & 0o777 == 0o700
    (place.run_dir / "supervisor.sock").unlink()
    place.run_dir.chmod(0o777)
    assert subprocess.run(["sh", "-c", boot_script(place, daemon)], check=False).returncode == 1
    assert not (place.run_dir / "supervisor.sock").exists()


def test_a_log_that_systemd_appends_to_does_not_grow_for_ever(place: Place) -> None:
    (place.base / "logs").mkdir(parents=True)
    log, other = place.log("frontend-0"), place.log("it's another")
    other.write_text("short\n")
    with log.open("ab") as writer:
        writer.write(b"x" * 50_000 + b"\n")
        writer.flush()
        program = subprocess.Popen(["sh", "-c", log_limit(place, kilobytes=40, every_s=0.05)])
        try:
            until(lambda: log.stat().st_size == 0, 30, "it was not cut")
        finally:
            program.kill()
            program.wait()
        writer.write(b"next\n")
    assert log.read_text() == "next\n"
    assert log.with_name("frontend-0.log.1").stat().st_size == 50_001
    assert other.read_text() == "short\n"


CRON = """#!/bin/sh
if [ "$1" = - ]; then {writes}; exit; fi
{listed}
"""


@pytest.mark.parametrize(
    ("listed", "written"),
    [
        ("echo '5 4 * * * backup'", "5 4 * * * backup\n@reboot boot.sh\n"),
        ("printf '# caf\\351\\n1 2 * * * x\\014y\\n'", "# caf\xe9\n1 2 * * * x\x0cy\n@reboot boot.sh\n"),
        ("printf '1 2 * * * x'", "1 2 * * * x\n@reboot boot.sh\n"),
        ("echo 'no crontab for me' >&2; exit 1", "@reboot boot.sh\n"),
        ("echo \"crontab: can't open 'me': No such file or directory\" >&2; exit 1", "@reboot boot.sh\n"),
        ("echo 'You are not allowed to use this program' >&2; exit 1", None),
        ("echo 'cannot read: Input/output error' >&2; exit 1", None),
        ("kill -9 $$", None),
    ],
    ids=[
        "others",
        "other bytes",
        "no last end",
        "none",
        "none of busybox",
        "not allowed",
        "broken disk",
        "killed",
    ],
)
def test_a_crontab_that_cannot_be_read_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, written: str | None
) -> None:
    program = tmp_path / "crontab"
    program.write_text(CRON.format(listed=listed, writes='cat > "$0.table"'), encoding="ascii")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    crontab(add="@reboot boot.sh")
    table = tmp_path / "crontab.table"
    assert (table.read_bytes() if table.exists() else None) == (written and written.encode("latin-1"))


@pytest.mark.parametrize(
    ("listed", "writes", "said"),
    [
        ("exit 0", "exec sleep 60", "stays as it is, so roles do not start with the host"),
        ("exec sleep 60", "exit 0", "stays as it is, so roles do not start with the host"),
        (
            "exit 0",
            "echo 'no space' >&2; exit 1",
            "cannot write the crontab, so roles do not start with the host: no space",
        ),
    ],
    ids=["write hangs", "read hangs", "write fails"],
)
def test_a_crontab_that_cannot_be_written_is_said_and_stops_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listed: str,
    writes: str,
    said: str,
) -> None:
    program = tmp_path / "crontab"
    program.write_text(CRON.format(listed=listed, writes=writes), encoding="ascii")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(managers, "ASK_LIMIT_S", 0.5)
    crontab(add="@reboot boot.sh")
    assert said in capsys.readouterr().out
