"""Workers that are written down for the next agent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fabric.ids import Incarnation
from roles.node_agent.events import Orphan
from roles.node_agent.workers.adoption import WorkerRecords
from tests.scarcity import full_disk, read_only_disk


def test_a_worker_that_cannot_be_written_down_serves_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = WorkerRecords(tmp_path, "here")
    worker = Orphan("worker-here-1", os.getpid(), Incarnation("x"), is_mps=False)
    with full_disk():
        records.write(worker, None)
    assert "worker_not_written_down" in caplog.text
    assert list((tmp_path / "workers-here").iterdir()) == []
    records.write(worker, None)
    assert [path.name for path in (tmp_path / "workers-here").iterdir()] == ["worker-here-1.json"]


def test_a_worker_that_ended_and_cannot_be_forgotten_ends_no_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = WorkerRecords(tmp_path, "here")
    records.write(Orphan("worker-here-1", os.getpid(), Incarnation("x"), is_mps=False), None)
    with read_only_disk():
        records.forget("worker-here-1")
    assert "file_not_removed" in caplog.text
    records.forget("worker-here-1")
    assert not list((tmp_path / "workers-here").iterdir())
