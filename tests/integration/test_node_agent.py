from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fabric.client import ask_status
from fabric.ids import ModelId, SliceId
from fabric.messages import ModelSpec, SliceSpec
from roles.runtime.identities import read_record
from roles.runtime.process import read_run_file
from tests.integration.agent_stage import Stage
from tests.integration.proc import CLOCK, until, zombies_of
from tests.scarcity import full_disk


def spec(name: str, how: str = "serve", gpu: int = 0) -> SliceSpec:
    return SliceSpec(SliceId(name), gpu, "cpu", None, (ModelSpec(ModelId(how), 50.0, 1),))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    opened = Stage(tmp_path)
    yield opened
    opened.close()


StageMaker = Callable[[Mapping[str, Any]], Stage]


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[StageMaker]:
    opened = []

    def make(options: Mapping[str, Any]) -> Stage:
        opened.append(Stage(tmp_path, options))
        return opened[-1]

    yield make
    for stage in opened:
        stage.close()


def test_a_wanted_slice_gets_a_process_and_becomes_ready(stage: Stage) -> None:
    stage.want(spec("x"))
    stage.until_state("x", "ready")
    assert stage.states("x")[0] == "starting"
    assert len(stage.workers()) == 1


def test_a_worker_killed_hard_is_reported_without_waiting_for_a_silence_and_replaced(stage: Stage) -> None:
    stage.want(spec("x"), spec("y", gpu=1))
    stage.until_state("x", "ready")
    stage.until_state("y", "ready")
    (first, second) = stage.workers()
    os.kill(first, signal.SIGKILL)
    took_ms = until(lambda: any("lost" in stage.states(name) for name in ("x", "y")))
    assert took_ms < 1_000.0  # a few ms on a host that is not busy
    lost = "x" if "lost" in stage.states("x") else "y"
    assert (
        stage.until_was(lost, "lost") == "its worker was killed by signal 9"
    )  # it may be starting again by now
    stage.until_state(lost, "ready")
    assert second in stage.workers()
    assert first not in stage.workers()
    assert zombies_of(stage.agent.pid) == []


def test_a_worker_that_crashes_is_given_up_with_its_last_words(stage: Stage) -> None:
    stage.want(spec("x", "crash"), spec("y", gpu=1))
    stage.until_state("x", "failed")
    assert stage.reason("x") == (
        "given up after 5 failures in a row: its worker exited with code 1; "
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
    stage.agent.send_signal(number)
    assert stage.agent.wait(30) == 0  # 1.5 s by the agent's limits
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


OUTLIVING = {"node": {"device": "emulated", "workers_outlive_agent": True}, "worker": "real"}


def emulated(name: str) -> SliceSpec:
    model = ModelSpec(ModelId("m"), 50.0, 1, exec_ms=(1.0,))
    return SliceSpec(SliceId(name), 0, "emulated", None, (model,))


def test_workers_that_outlive_their_agent_are_adopted_by_the_next_one(make_stage: StageMaker) -> None:
    stage = make_stage(OUTLIVING)
    stage.want(emulated("x"))
    stage.until_state("x", "ready")
    (worker,) = stage.workers()
    incarnation = stage.incarnation("x")
    stage.kill_agent()
    stage.changes.clear()
    stage.start_agent()
    # The first word of the new agent already has it: a scheduler never takes the slice for lost.
    (status,) = stage.hellos[0].slices
    assert (status.slice_id, status.incarnation) == ("x", incarnation)
    assert stage.hellos[0].workers_outlive_agent
    stage.until_state("x", "ready")
    assert stage.incarnation("x") == incarnation
    assert stage.workers() == [worker]
    # It obeys: the next death of an agent it survives as well, and an orderly end it does not.
    stage.kill_agent()
    stage.start_agent()
    stage.until_state("x", "ready")
    assert stage.workers() == [worker]
    stage.agent.send_signal(signal.SIGTERM)
    assert stage.agent.wait(30) == 0
    until(lambda: not stage.workers(), what="its end")
    assert not list(stage.run_dir.glob("workers-*"))


def test_an_agent_that_cannot_say_that_it_is_there_leaves_the_workers_to_the_next_one(
    make_stage: StageMaker,
) -> None:
    stage = make_stage(OUTLIVING)
    stage.want(emulated("x"))
    stage.until_state("x", "ready")
    (worker,) = stage.workers()
    incarnation = stage.incarnation("x")
    stage.kill_agent()
    with full_disk():
        failed = subprocess.run(
            stage.command, env=stage.child_environment, capture_output=True, timeout=60, check=False
        )
    assert b"cannot write the run file" in failed.stderr
    assert stage.workers() == [worker]
    stage.changes.clear()
    stage.start_agent()
    stage.until_state("x", "ready")
    assert stage.incarnation("x") == incarnation
    assert stage.workers() == [worker]


def test_an_adopted_worker_that_is_killed_is_seen_and_replaced(make_stage: StageMaker) -> None:
    stage = make_stage(OUTLIVING)
    stage.want(emulated("x"))
    stage.until_state("x", "ready")
    stage.kill_agent()
    stage.start_agent()
    stage.until_state("x", "ready")
    (worker,) = stage.workers()
    os.kill(worker, signal.SIGKILL)
    assert stage.until_was("x", "lost") == "its worker, adopted from a former agent, ended"
    stage.until_state("x", "ready")
    assert len(stage.workers()) == 1
    assert worker not in stage.workers()


def test_a_killed_worker_leaves_no_file_and_its_successor_has_its_own(make_stage: StageMaker) -> None:
    stage = make_stage({"node": {"device": "emulated"}, "worker": "real"})
    stage.want(emulated("x"))
    stage.until_state("x", "ready")
    (worker,) = stage.workers()
    assert list(stage.run_dir.glob("worker-a-1.*"))
    os.kill(worker, signal.SIGKILL)
    stage.until_was("x", "lost")
    stage.until_state("x", "ready")
    assert list(stage.run_dir.glob("worker-a-1.*")) == []
    assert list(stage.run_dir.glob("worker-a-2.sock"))


def test_a_worker_is_told_nothing_of_mps_that_was_meant_for_who_started_the_agent(tmp_path: Path) -> None:
    words = {"CUDA_MPS_PIPE_DIRECTORY": "/x", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G", "OTHER": "kept"}
    stage = Stage(tmp_path, environment=words)
    try:
        stage.want(spec("x"))
        stage.until_state("x", "ready")
        (worker,) = stage.workers()
        told = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
        assert b"OTHER=kept" in told
        assert not [one for one in told if one.startswith(b"CUDA_MPS_")]
    finally:
        stage.close()


def test_workers_that_nobody_adopts_end_when_their_time_is_over(make_stage: StageMaker) -> None:
    stage = make_stage({**OUTLIVING, "outlive_ms": 4_000.0})
    stage.want(emulated("x"))
    stage.until_state("x", "ready")
    workers = stage.workers()
    stage.kill_agent()
    killed_at_ms = CLOCK.now_ms()
    until(lambda: CLOCK.now_ms() > killed_at_ms + 1_000.0)
    assert stage.workers() == workers
    until(lambda: not stage.workers(), what="their end")


def test_a_worker_that_hosts_nothing_does_not_outlive_its_agent(make_stage: StageMaker) -> None:
    stage = make_stage({**OUTLIVING, "limits": {"hello_ms": 30_000.0}})
    stage.want(emulated("x"))
    until(lambda: bool(stage.workers()), what="a start")
    stage.kill_agent()  # most likely before the worker has said hello
    until(lambda: not stage.workers() or bool(list(stage.run_dir.glob("workers-*/*.json"))), what="an end")
    stage.start_agent()
    stage.until_state("x", "ready")
    assert len(stage.workers()) == 1


def test_an_agent_that_is_not_to_adopt_ends_what_it_finds(make_stage: StageMaker, tmp_path: Path) -> None:
    stage = make_stage(OUTLIVING)
    stage.want(emulated("x"))
    stage.until_state("x", "ready")
    (worker,) = stage.workers()
    stage.kill_agent()
    stage.options["node"] = {"device": "emulated"}
    stage.start_agent()
    assert stage.hellos[0].slices == ()
    until(lambda: len(stage.workers()) == 1 and worker not in stage.workers(), what="another worker")
    stage.until_state("x", "ready")
    assert not list(tmp_path.glob("workers-*/*.json"))


def test_a_stranger_under_an_orphans_name_is_not_adopted(make_stage: StageMaker) -> None:
    stage = make_stage(OUTLIVING)
    stage.want(emulated("x"))
    stage.until_state("x", "ready")
    (worker,) = stage.workers()
    stage.kill_agent()
    (record,) = stage.run_dir.glob("workers-a/*.json")
    record.write_text(record.read_text().replace(stage.incarnation("x"), "00000000"))
    stage.start_agent()
    assert stage.hellos[0].slices == ()
    stage.until_state("x", "ready")
    assert worker not in stage.workers()


@pytest.mark.parametrize("kind", ["stand-in", "real"])
def test_an_orphan_that_was_not_written_down_is_not_taken_for_the_next_agents_own_worker(
    make_stage: StageMaker, kind: str
) -> None:
    """As where the disk was full: the next agent counts from one again, and so gives out the orphan's name."""
    stage = make_stage({**OUTLIVING, "worker": kind})
    stage.want(emulated("x"))
    stage.until_state("x", "ready")
    (worker,) = stage.workers()
    stage.kill_agent()
    (record,) = stage.run_dir.glob("workers-a/*.json")
    record.unlink()
    stage.start_agent()
    stage.until_state("x", "ready")
    until(lambda: len(stage.workers()) == 1 and worker not in stage.workers(), what="the orphan's end")
    stage.until_state("x", "ready")


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_moment_leave_every_slice_served_and_no_worker_unknown(
    make_stage: StageMaker, seed: int
) -> None:
    patient = {"restart": {"first_ms": 50.0, "longest_ms": 200.0, "failures_max": 1_000}}
    stage = make_stage({**OUTLIVING, "limits": patient})
    stage.want(emulated("x"))
    stage.until_state("x", "ready")
    stage.want(emulated("x"), emulated("y"))  # in a process of its own
    draw = random.Random(seed)
    for _ in range(6):
        select.select([], [], [], draw.uniform(0.0, 1.0))
        victim = draw.choice([*stage.workers(), stage.agent.pid])
        if victim == stage.agent.pid:
            stage.kill_agent()
            stage.start_agent()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

    def is_settled() -> bool:
        ready = [stage.states(name)[-1:] for name in "xy"] == [["ready"], ["ready"]]
        known = {
            read_record(record).get("process", {}).get("pid")
            for record in stage.run_dir.glob("workers-a/*.json")
        }
        # Who was killed just now has not been reported yet: what was said last is that it is ready.
        return ready and known == set(stage.workers()) and not zombies_of(stage.agent.pid)

    until(is_settled)
    stage.agent.send_signal(signal.SIGTERM)
    assert stage.agent.wait(30) == 0
    until(lambda: not stage.workers(), what="their end")


def test_workers_are_pinned_to_cores_of_their_own(make_stage: StageMaker) -> None:
    cores = sorted(os.sched_getaffinity(0))
    stage = make_stage({"node": {"pin_cores": 1}})
    stage.want(spec("x"), spec("y", gpu=1))
    stage.until_state("x", "ready")
    stage.until_state("y", "ready")
    pinned = sorted(min(os.sched_getaffinity(pid)) for pid in stage.workers())
    assert pinned == sorted((cores * 2)[:2])
    assert all(len(os.sched_getaffinity(pid)) == 1 for pid in stage.workers())


def test_shares_over_a_whole_gpu_are_served_and_said(
    make_stage: StageMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage({})
    stage.want(*(SliceSpec(SliceId(name), 0, "cpu", 60.0, spec(name).models) for name in "xy"))
    stage.until_state("x", "ready")
    stage.until_state("y", "ready")
    assert "shares_over_100 gpu=0 sum_percent=120" in capfd.readouterr().err
