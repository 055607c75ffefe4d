"""`tenuto restart --rolling` says first which models it takes away for a while."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deploy.local.commands import down
from deploy.local.logs import logs
from fabric.errors import FabricError, PeerLost
from fabric.ids import Incarnation, ModelId, SliceId
from fabric.messages import Changed, RestartRoles, SchedulerStanding, SliceReport, SliceState, StatusListed
from roles.cli import restart as restart_module
from roles.runtime.process import RunFile, write_run_file
from roles.runtime.run_directory import UpFile, claim, write_up_file

BORN = Incarnation("1234abcd")


def on(slice_id: str, *models: str, state: SliceState = SliceState.READY) -> SliceReport:
    return SliceReport(SliceId(slice_id), state, "", tuple(map(ModelId, models)), 0, 0)


SLICES = (
    on("a/gpu0/0", "both", "one"),
    on("a/gpu1/0", "one"),
    on("b/gpu0/0", "both", "other", "going"),
    on("a/gpu2/0", "going", state=SliceState.STARTING),
    on("c/gpu0/0", "elsewhere"),
)


def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    says: StatusListed | None,
    drained: Sequence[str] = (),
    interrupted_after: str = "",
) -> Result:
    """Here are nodes a and b; c's agent is on another host. `interrupted_after`: Ctrl-C, when that role is restarted."""

    def ask_status(addresses: Sequence[str], limit_ms: float, *, server: str) -> StatusListed:
        del server
        assert (addresses, limit_ms <= 2_000.0) == (["ipc:///control"], True)
        if says is None:
            raise PeerLost("it hangs")
        return says

    def ask_supervisor(run_dir: Path, change: RestartRoles) -> Changed:
        if interrupted_after:
            write_run_file(run_dir, RunFile(interrupted_after, os.getpid(), Incarnation("5678abcd"), {}))
            raise KeyboardInterrupt
        return Changed(change.request_no, "ok", started=1)

    monkeypatch.setattr(restart_module, "ask_status", ask_status)
    monkeypatch.setattr(restart_module, "ask_supervisor", ask_supervisor)
    with claim(tmp_path):
        write_up_file(tmp_path, UpFile(os.getpid(), is_ready=True, endpoints={}, drained=drained))
        for role_id in ("scheduler-0", "node-a", "node-b"):
            write_run_file(tmp_path, RunFile(role_id, os.getpid(), BORN, {"control": ["ipc:///control"]}))
        result = CliRunner().invoke(restart_module.restart, ["--rolling", "--run-dir", str(tmp_path), *words])
        for path in tmp_path.glob("*.json"):
            path.unlink()
        return result


def status(state: str = "active") -> StatusListed:
    return StatusListed("scheduler-0", 1, SLICES, (), {}, standing=SchedulerStanding(state, 1, 1, 1, 0))


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_models_of_one_node_are_named_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    result = run(tmp_path, monkeypatch, *words, says=status())
    assert result.exit_code == 0
    assert result.stderr.splitlines()[:2] == [
        "tenuto: only node a serves one: requests for them fail while its agent restarts",
        "tenuto: only node b serves other, going: requests for them fail while its agent restarts",
    ]
    if not words:
        assert result.stderr.splitlines()[2] == "1 role restarted"
    result = run(tmp_path, monkeypatch, *words, "--json", says=status())
    assert json.loads(result.stdout)["away"] == ["one", "other", "going"]


def test_who_waits_no_longer_is_told_that_the_restart_goes_on_and_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(tmp_path, monkeypatch, says=None, interrupted_after="node-a")
    assert result.stderr.splitlines()[0] == (
        "tenuto: this command waits no longer, but `tenuto up` goes on with the restart until all are done; restarted: node-a;"
        " to come or under way: node-b, scheduler-0. `tenuto status` shows who serves, `tenuto down` ends all"
    )


@pytest.mark.parametrize("says", [None, status("standby")])
def test_a_scheduler_that_does_not_answer_or_stands_by_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: StatusListed | None
) -> None:
    result = run(tmp_path, monkeypatch, "--json", says=says)
    assert (json.loads(result.stdout)["away"], result.stderr) == ([], "")


def test_a_dry_run_says_that_a_role_is_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, "--dry-run", says=status(), drained=["frontend-1"])
    assert isinstance(result.exception, FabricError)
    assert str(result.exception) == (
        "Busy: frontend-1 is drained; first use it again: tenuto drain frontend-1 --back"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("down",),
        ("down", "--dry-run"),
        ("logs",),
        ("restart", "--rolling"),
        ("restart", "--rolling", "--dry-run"),
    ],
)
def test_roles_that_were_started_by_hand_are_named_by_who_wants_their_supervisor(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    name, *options = words
    command = {"down": down, "logs": logs, "restart": restart_module.restart}[name]
    with subprocess.Popen([sys.executable, "-c", "input()", "tenuto"], stdin=subprocess.PIPE) as role:
        write_run_file(tmp_path, RunFile("scheduler-0", role.pid, BORN, {}))
        result = CliRunner().invoke(command, [*options, "--run-dir", str(tmp_path)])
        role.kill()
    assert isinstance(result.exception, PeerLost)
    assert str(result.exception) == (
        f"no `tenuto up` runs in {tmp_path}: scheduler-0 was not started by it; end, restart and read such roles where they"
        " were started"
    )
