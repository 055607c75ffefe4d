from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.detached import not_ready
from roles.runtime.run_directory import LOG_FILE

MOMENT = "2026-07-01 10:00:00,123"
BARE = "the cluster was not ready within 900 s"
DEFECT = "tenuto: a defect of Tenuto ended scheduler-0: no room"
STARTED_AGAIN = (
    f"{MOMENT} level=WARNING role=up role_restarts scheduler-0 was killed by signal 9; starting it again"
)
FAILED = f"{MOMENT} level=ERROR role=node-a gpu_lost gpu=0"
TOLD = f"{MOMENT} level=INFO role=frontend-0 listening address=x"
DUE = "up: role_restarts scheduler-0 was killed by signal 9; starting it again"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], ""),
        ([TOLD], ""),
        (["Traceback (most recent call last):", TOLD], ""),
        ([DEFECT, TOLD], DEFECT.removeprefix("tenuto: ")),
        ([DEFECT, STARTED_AGAIN, TOLD], DUE),
        ([STARTED_AGAIN, DEFECT, "", TOLD], DEFECT.removeprefix("tenuto: ")),
        ([STARTED_AGAIN, FAILED], "node-a: gpu_lost gpu=0"),
        ([STARTED_AGAIN, *[TOLD] * 100], DUE),
    ],
)
def test_a_start_that_takes_too_long_is_told_with_what_its_log_says_last(
    tmp_path: Path, lines: list[str], why: str
) -> None:
    (tmp_path / LOG_FILE).write_text("".join(f"{line}\n" for line in lines))
    assert str(not_ready(tmp_path, 900_000.0)) == BARE + (
        f"; the last that its log says: {why}" if why else ""
    )


def test_a_long_log_is_read_at_its_end_and_one_that_is_gone_not_at_all(tmp_path: Path) -> None:
    assert str(not_ready(tmp_path, 900_000.0)) == BARE
    (tmp_path / LOG_FILE).write_text(f"{TOLD}\n" * 50_000 + f"{FAILED} \xff\n{TOLD}\n", encoding="latin-1")
    assert "node-a: gpu_lost" in str(not_ready(tmp_path, 900_000.0))
