"""What becomes of a killed worker's files."""

from __future__ import annotations

from pathlib import Path

from roles.node_agent.workers.sockets import WorkerSockets

ENDINGS = ("sock", "sock.stream", "sock.lock", "ranks", "1", "1.stream", "1.lock", "15")
OTHERS = (
    "worker-a-10.sock",
    "worker-a-1.b-3.sock",
    "worker-a-1.log",
    "worker-a-1-77.defect",
    "node-a.control",
    "scheduler-0.json",
)


def test_the_files_of_that_worker_go_and_no_others(tmp_path: Path) -> None:
    for name in (*(f"worker-a-1.{ending}" for ending in ENDINGS), *OTHERS):
        (tmp_path / name).touch()
    (tmp_path / "worker-a-1.2").mkdir()  # not ours: it is left, and in nobody's way
    WorkerSockets(tmp_path).remove("worker-a-1")
    assert {path.name for path in tmp_path.iterdir()} == {*OTHERS, "worker-a-1.2"}
    WorkerSockets(tmp_path / "gone").remove("worker-a-1")


def test_the_files_stay_where_a_former_agents_worker_lives_under_that_id(tmp_path: Path) -> None:
    for worker_id in ("worker-a-1", "worker-a-2"):
        (tmp_path / f"{worker_id}.sock").touch()
    sockets = WorkerSockets(tmp_path)
    sockets.share("worker-a-1")
    for worker_id in ("worker-a-1", "worker-a-2"):
        sockets.remove(worker_id)
    assert [path.name for path in tmp_path.iterdir()] == ["worker-a-1.sock"]
