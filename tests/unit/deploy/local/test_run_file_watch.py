from __future__ import annotations

import os
from pathlib import Path

from deploy.local.events import RoleServes
from deploy.local.shell import LOOK_EVERY_MS, RunFileWatch
from roles.runtime.children import Processes
from roles.runtime.process import RunFile, remove_file, write_run_file

ROLE = "frontend-0"
ADDRESSES = {"client": ["tcp://127.0.0.1:5"], "http": ["http://127.0.0.1:6"]}
FLAGS = ("--client", "tcp://127.0.0.1:5", "--http", "127.0.0.1:6")


class OurselvesAsChild(Processes):
    """Every process of the role has the same pid, as in a small pid namespace, or when the numbers begin again."""

    is_alive = False

    def pid(self, name: str) -> int | None:
        assert name == ROLE
        return os.getpid() if self.is_alive else None


def test_each_process_of_a_role_is_told_of_once_also_where_it_has_the_pid_of_the_one_before(
    tmp_path: Path,
) -> None:
    processes = OurselvesAsChild()
    watch = RunFileWatch([ROLE], tmp_path, processes)
    for start in range(3):
        assert watch.begins(ROLE) == (FLAGS if start else ())
        processes.is_alive = True
        assert watch.take(9, 0.0) == []
        looks = [watch.wake_at_ms]
        file = write_run_file(tmp_path, RunFile(ROLE, os.getpid(), f"life{start}", ADDRESSES))
        assert watch.take(9, 0.0) == [RoleServes(ROLE)]
        assert watch.take(9, 0.0) == []
        assert [*looks, watch.wake_at_ms] == [LOOK_EVERY_MS, None]
        processes.is_alive = False
        remove_file(file)
    processes.close()
