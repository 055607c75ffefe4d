from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric.client import ask_status
from fabric.ids import ModelId, PeerId, SliceId
from fabric.messages import ModelSpec, NodeHello, Ping, Pong, SliceChanged, SliceSpec, Want
from fabric.sockets import RouterLink
from roles.process import RunFile, child_environment, read_run_file, write_run_file
from tests.integration.proc import CLOCK, processes_naming, until, zombies_of

AGENT_SCRIPT = Path(__file__).with_name("stand_in_agent.py")


def spec(name: str, how: str = "serve", gpu: int = 0) -> SliceSpec:
    return SliceSpec(SliceId(name), gpu, "cpu", None, (ModelSpec(ModelId(how), 50.0, 1),))


class Stage:
    """A real agent with real child processes; the scheduler is this test."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.hellos: list[NodeHello] = []
        self.changes: list[SliceChanged] = []
        self.agent_peer = PeerId("")
        self.wanted: tuple[SliceSpec, ...] = ()
        self.open_scheduler("one")
        environment = child_environment() | {"PYTHONPATH": str(Path(__file__).parents[2])}
        self.agent = subprocess.Popen([sys.executable, str(AGENT_SCRIPT), str(run_dir)], env=environment)
        until(self.heard_hello, what="a hello")

    def open_scheduler(self, incarnation: str) -> None:
        self.link = RouterLink.bind([f"ipc://{self.run_dir}/scheduler-{incarnation}"])
        addresses = {"control": list(self.link.addresses)}
        write_run_file(self.run_dir, RunFile("scheduler-0", os.getpid(), incarnation, addresses))

    def listen(self) -> None:
        for received in self.link.receive(100):
            match received.message:
                case NodeHello() as hello:
                    self.hellos.append(hello)
                    self.agent_peer = received.peer
                    self.link.send(received.peer, Want(1, self.wanted))
                case Ping(number):
                    self.link.send(received.peer, Pong(number))
                case SliceChanged() as change:
                    self.changes.append(change)

    def heard_hello(self) -> bool:
        self.listen()
        return bool(self.hellos)

    def want(self, *specs: SliceSpec) -> None:
        self.wanted = specs
        self.link.send(self.agent_peer, Want(1, specs))

    def states(self, slice_id: str) -> list[str]:
        self.listen()
        return [change.status.state for change in self.changes if change.status.slice_id == slice_id]

    def until_state(self, slice_id: str, state: str, limit_ms: float = 10_000.0) -> float:
        return until(lambda: state in self.states(slice_id)[-1:], limit_ms, f"{slice_id} {state}")

    def reason(self, slice_id: str) -> str:
        return [change.status.reason for change in self.changes if change.status.slice_id == slice_id][-1]

    @property
    def mark(self) -> str:
        """What is in the command line of every worker here and nowhere else."""
        return f"ipc://{self.run_dir}/node-a.control"

    def workers(self) -> list[int]:
        return sorted(processes_naming(self.mark))

    def close(self) -> None:
        self.agent.kill()
        self.agent.wait(10)
        self.link.close()
        until(lambda: not self.workers(), what="the end of all workers")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    opened = Stage(tmp_path)
    yield opened
    opened.close()


def test_a_wanted_slice_gets_a_process_and_becomes_ready(stage: Stage) -> None:
    stage.want(spec("x"))
    stage.until_state("x", "ready")
    assert stage.states("x")[0] == "starting"
    assert len(stage.workers()) == 1


def test_a_worker_killed_hard_is_reported_within_100_ms_and_replaced(stage: Stage) -> None:
    stage.want(spec("x"), spec("y", gpu=1))
    stage.until_state("x", "ready")
    stage.until_state("y", "ready")
    (first, second) = stage.workers()
    os.kill(first, signal.SIGKILL)
    took_ms = until(lambda: any("lost" in stage.states(name) for name in ("x", "y")))
    assert took_ms < 100.0
    lost = "x" if "lost" in stage.states("x") else "y"
    assert stage.reason(lost) == "its worker was killed by signal 9"
    stage.until_state(lost, "ready")
    assert second in stage.workers()
    assert first not in stage.workers()
    assert zombies_of(stage.agent.pid) == []


def test_a_worker_that_crashes_is_given_up_with_its_last_words(stage: Stage) -> None:
    stage.want(spec("x", "crash"), spec("y", gpu=1))
    stage.until_state("x", "failed", limit_ms=30_000.0)
    assert stage.reason("x") == (
        "given up after 5 failures within 60 s: its worker exited with code 1; "
        "its last words: ValueError: it crashed on purpose"
    )
    assert stage.states("x").count("lost") == 5
    stage.until_state("y", "ready")
    until(lambda: len(stage.workers()) == 1)
    assert zombies_of(stage.agent.pid) == []


def test_a_loader_that_fails_is_reported_and_its_process_ends(stage: Stage) -> None:
    stage.want(spec("x", "fail"))
    stage.until_state("x", "failed")
    assert stage.reason("x") == "the loader raised"
    until(lambda: not stage.workers(), what="its end")


def test_a_slice_no_longer_wanted_is_ended_and_the_others_stay(stage: Stage) -> None:
    stage.want(spec("x"), spec("y", gpu=1))
    stage.until_state("x", "ready")
    stage.until_state("y", "ready")
    stage.want(spec("y", gpu=1))
    stage.until_state("x", "stopped")
    until(lambda: len(stage.workers()) == 1, what="the end of one worker")
    assert stage.states("y")[-1] == "ready"


def test_another_scheduler_is_found_and_hears_what_runs(stage: Stage) -> None:
    stage.want(spec("x"))
    stage.until_state("x", "ready")
    workers = stage.workers()
    stage.link.close()
    stage.hellos.clear()
    stage.open_scheduler("two")
    until(stage.heard_hello, what="another hello")
    (status,) = stage.hellos[-1].slices
    assert (status.slice_id, status.state) == ("x", "ready")
    assert stage.workers() == workers


def test_a_scheduler_that_was_deaf_for_a_while_hears_what_runs(stage: Stage) -> None:
    stage.want(spec("x"))
    stage.until_state("x", "ready")
    stage.hellos.clear()
    deaf_until_ms = CLOCK.now_ms() + 4_000.0  # over twice as long as it takes to be given up
    until(lambda: CLOCK.now_ms() > deaf_until_ms)
    until(stage.heard_hello, what="another hello")
    stage.changes.clear()
    stage.want()
    stage.until_state("x", "stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_every_worker_in_order_and_leaves_no_file(stage: Stage, number: signal.Signals) -> None:
    stage.want(spec("x"), spec("y", "hang", gpu=1))
    stage.until_state("x", "ready")
    stage.until_state("y", "ready")
    began_ms = CLOCK.now_ms()
    stage.agent.send_signal(number)
    assert stage.agent.wait(10) == 0
    assert CLOCK.now_ms() - began_ms < 4_000.0
    assert stage.workers() == []
    assert not [path.name for path in stage.run_dir.iterdir() if path.name.startswith("node-a")]


def test_an_agent_killed_hard_takes_its_workers_with_it(stage: Stage) -> None:
    stage.want(spec("x"), spec("y", "hang", gpu=1))
    stage.until_state("x", "ready")
    stage.until_state("y", "ready")
    stage.agent.kill()
    until(lambda: not stage.workers(), 2_000.0, "the end of all workers")


def test_the_agent_answers_an_operator(stage: Stage) -> None:
    stage.want(spec("x"))
    stage.until_state("x", "ready")
    run_file = read_run_file(stage.run_dir / "node-a.json")
    assert run_file is not None
    listed = ask_status(run_file.addresses["control"])
    assert (listed.role_id, listed.pid) == ("node-a", stage.agent.pid)
    assert [(report.slice_id, report.state) for report in listed.slices] == [("x", "ready")]
