"""A disk that is full for a moment keeps nobody waiting for a cluster that serves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from deploy.local.kept_up_file import TRY_EVERY_MS, KeptUpFile
from roles.runtime.run_directory import UpFile, read_up_file
from tests.scarcity import full_disk


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptUpFile(tmp_path)
    looks = [kept.wake_at_ms]
    with full_disk():
        kept.say(UpFile(os.getpid(), True, {"client": ["tcp://127.0.0.1:5"]}))
        assert kept.take(9, 5_000.0) == ()
        looks.append(kept.wake_at_ms)
        kept.say(replace(kept.said, drained=("node-a",)))
    started = read_up_file(tmp_path)
    assert started is not None
    assert not started.is_ready
    assert kept.wake_at_ms is not None
    kept.take(9, kept.wake_at_ms)
    assert [*looks, kept.wake_at_ms] == [None, 5_000.0 + TRY_EVERY_MS, None]
    serving = read_up_file(tmp_path)
    assert serving is not None
    assert (serving.is_ready, serving.endpoints) == (True, {"client": ["tcp://127.0.0.1:5"]})
    assert serving.drained == ["node-a"]
    assert [line.split()[0] for line in caplog.messages] == ["up_file_not_written"]


def test_a_cluster_that_cannot_even_say_that_it_starts_is_none(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(OSError, match="File too large"):
        KeptUpFile(tmp_path)
    assert not list(tmp_path.iterdir())
