"""How long a look at a cluster waits for roles that are there and hang, on a clock that only questions and waits move."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import PeerLost
from fabric.messages import SchedulerStanding, StatusListed
from roles.runtime.process import RunFile, write_run_file
from roles.runtime.running_cluster import (
    LEAST_LIMIT_MS,
    LOOK_MS,
    ProcessReport,
    active_schedulers,
    endpoints_in,
    look,
)


class Roles:
    """Of a run directory: those in `answers` answer at once, all others hang."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir = run_dir
        self.at_ms = 0.0
        self.answers: dict[str, StatusListed] = {}
        self.processes: list[ProcessReport] = []
        monkeypatch.setattr("roles.runtime.running_cluster.processes_in", lambda _: self.processes)
        monkeypatch.setattr("roles.runtime.running_cluster.ask_status", self._ask)
        monkeypatch.setattr("roles.runtime.running_cluster.MonotonicClock", lambda: self)
        monkeypatch.setattr(select, "select", self._wait)

    def now_ms(self) -> float:
        return self.at_ms

    def here(self, *role_ids: str) -> None:
        self.processes = [
            ProcessReport(role_id, 7, True, {"control": [f"ipc://{role_id}"]}) for role_id in role_ids
        ]

    def says(self, number: int, state: str) -> None:
        standing = SchedulerStanding(state, 16, 1, 1, 1, ())
        self.answers[f"ipc://scheduler-{number}"] = StatusListed(
            f"scheduler-{number}", 7, (), (), {}, standing=standing
        )

    def _ask(self, addresses: Sequence[str], limit_ms: float, **_: Any) -> StatusListed:
        answer = self.answers.get(addresses[0])
        if answer is None:
            self.at_ms += limit_ms
            raise PeerLost("it hangs")
        return answer

    def _wait(self, _read: object, _write: object, _other: object, seconds: float) -> None:
        self.at_ms += seconds * 1e3


@pytest.fixture
def roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Roles:
    return Roles(tmp_path, monkeypatch)


@pytest.mark.parametrize("schedulers", [1, 2, 16])
def test_schedulers_that_hang_are_waited_for_once_and_not_each(roles: Roles, schedulers: int) -> None:
    roles.here(*(f"scheduler-{number}" for number in range(schedulers)))
    with pytest.raises(PeerLost, match="no active scheduler answers"):
        active_schedulers(roles.run_dir)
    assert roles.at_ms <= LOOK_MS + schedulers * LEAST_LIMIT_MS


def test_one_that_answers_is_heard_behind_all_that_hang(roles: Roles) -> None:
    roles.here(*(f"scheduler-{number:02}" for number in range(15)), "scheduler-15")
    roles.says(15, "active")
    assert active_schedulers(roles.run_dir)[0].status.role_id == "scheduler-15"


def test_a_standby_has_the_time_to_take_over_from_one_that_hangs(roles: Roles) -> None:
    roles.here("scheduler-0", "scheduler-1")
    roles.says(1, "standby")
    with pytest.raises(PeerLost, match="none is active"):
        active_schedulers(roles.run_dir)
    assert LOOK_MS <= roles.at_ms <= LOOK_MS + 1_000.0


def test_other_roles_that_hang_are_waited_for_once_and_not_each(roles: Roles) -> None:
    roles.here("scheduler-0", *(f"frontend-{number}" for number in range(30)))
    roles.says(0, "active")
    assert not look(roles.run_dir).counters["scheduler-0"]
    assert roles.at_ms <= LOOK_MS + 30 * LEAST_LIMIT_MS


def test_a_role_that_was_killed_is_reached_nowhere(tmp_path: Path) -> None:
    """Its run file is there until another one of its name starts."""
    with subprocess.Popen(["/bin/true"]) as killed:
        killed.wait()
    for number, pid in enumerate((os.getpid(), killed.pid)):
        addresses = {
            "client": [f"tcp://127.0.0.1:{5_000 + number}"],
            "metrics": [f"127.0.0.1:{6_000 + number}"],
        }
        write_run_file(tmp_path, RunFile(f"frontend-{number}", pid, "x", addresses))
    assert endpoints_in(tmp_path) == {"client": ["tcp://127.0.0.1:5000"], "metrics": ["127.0.0.1:6000"]}
