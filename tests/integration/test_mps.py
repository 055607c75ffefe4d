"""The agent and MPS: real processes throughout, with stand-ins for NVML and for NVIDIA's control program."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fabric.client import ask_status
from fabric.ids import ModelId, SliceId
from fabric.messages import GpuReport, GpuSample, GpuSharing, ModelSpec, SliceSpec
from roles.node_agent.mps.control import MARK, PIPE, LegacyControl, MpsError, MpsPlace, end_client
from roles.runtime.identities import identity_of, processes_with
from roles.runtime.process import read_run_file
from tests.gpu_stand_ins import MPS_CONTROL, a100, gpu_environment, write_gpus
from tests.integration.agent_stage import Stage
from tests.integration.proc import WAIT_MS, until, zombies_of

NODE = {"gpus": 2, "device": "cuda", "type": "a100"}
QUICK = {"daemon_check_ms": 200.0, "daemon_misses_max": 1, "restart": {"first_ms": 50.0, "longest_ms": 200.0}}


def spec(name: str, share: float | None = 40.0, gpu: int = 0, how: str = "serve") -> SliceSpec:
    return SliceSpec(SliceId(name), gpu, "cuda", share, (ModelSpec(ModelId(how), 50.0, 1),))


class MpsStage(Stage):
    """An agent on a host with two A100s that are not there."""

    def __init__(self, tmp_path: Path, *gpus: dict[str, Any], has_mps: bool = True, **options: Any) -> None:
        self.gpus_file = tmp_path / "gpus.json"
        write_gpus(self.gpus_file, *(gpus or (a100(0), a100(1))))
        run_dir = tmp_path / "r"
        run_dir.mkdir(exist_ok=True)
        self.run_dir = run_dir
        before = options.pop("before", "")
        if before:
            self.misbehave(before)
        limits = {**QUICK, **options.pop("limits", {})}
        node = {**NODE, "gpus": len(gpus) or 2, **options.pop("node", {})}
        environment = gpu_environment(self.gpus_file, has_mps=has_mps)
        super().__init__(run_dir, {"node": node, "limits": limits, **options}, environment)

    def place(self, gpu: int = 0) -> MpsPlace:
        return MpsPlace.of(self.run_dir, "a", gpu)

    def control(self, gpu: int = 0) -> LegacyControl:
        return LegacyControl(self.place(gpu), str(MPS_CONTROL), limit_s=10.0)

    def misbehave(self, how: str, gpu: int = 0) -> None:
        self.place(gpu).log.mkdir(parents=True, exist_ok=True)
        (self.place(gpu).log / "misbehave").write_text(how)

    def ours(self, gpu: int = 0) -> list[int]:
        """Daemon and server of a GPU."""
        return sorted(one.pid for one in processes_with(MARK, str(self.place(gpu).directory)))

    def daemon(self, gpu: int = 0) -> int:
        return int((self.place(gpu).pipe / "nvidia-cuda-mps-control.pid").read_text())

    def guards(self) -> list[int]:
        pids = [pid for gpu in (0, 1) for pid in processes_of_guard(self.place(gpu))]
        return [pid for pid in pids if identity_of(pid) is not None]

    def clients(self, gpu: int = 0) -> dict[int, tuple[str, str]]:
        """Each living worker that was told of this daemon: the share and memory limit it was told."""
        found = {}
        for one in processes_with(PIPE, str(self.place(gpu).pipe)):
            variables = environment_of(one.pid)
            if MARK not in variables and str(MPS_CONTROL) not in command_of(one.pid):
                found[one.pid] = (
                    variables.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""),
                    variables.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", ""),
                )
        return found

    def heard_clients(self) -> dict[int, tuple[str, str]]:
        """The same, and the agent is answered meanwhile."""
        self.listen()
        return self.clients()

    def has_right_shares(self, gpu: int = 0) -> bool:
        """Every worker of the GPU is a client of the one daemon that serves there."""
        (server,) = self.control(gpu).servers()
        return set(self.control(gpu).clients(server)) == set(self.clients(gpu)) != set()

    def unsettled(self) -> str:
        """What keeps it from being settled: both slices ready, and every worker with its share; empty: nothing."""
        told = {name: self.states(name)[-1:] for name in "xy"}
        control = self.control()
        try:
            listed = {server: sorted(control.clients(server)) for server in control.servers()}
        except MpsError as error:
            return f"slices {told}, daemon: {error}"
        workers = sorted(self.clients())
        # Two of them: of one that was killed a moment ago the last word is still that it is ready.
        if [*told.values()] == [["ready"]] * 2 and len(workers) == 2 and [*listed.values()] == [workers]:
            return ""
        return f"slices {told}, servers with their clients {listed}, workers {workers}, processes of MPS {self.ours()}"

    def until_settled(self, limit_ms: float = WAIT_MS) -> None:
        found: list[str] = []

        def is_settled() -> bool:
            found[:] = [self.unsettled()]
            return not found[0]

        try:
            until(is_settled, limit_ms)
        except AssertionError:
            pytest.fail(f"not settled within {limit_ms:g} ms: {found[0]}")

    def until_sharing(self, gpu: int, mode: str, limit_ms: float = WAIT_MS) -> str:
        """The reason that comes with it."""
        found: list[GpuSharing] = []

        def is_so() -> bool:
            self.listen()
            found[:] = [one for told in self.telemetry[-1:] for one in told.sharing if one.gpu == gpu]
            return any(one.mode == mode for one in found)

        until(is_so, limit_ms, f"gpu {gpu} {mode}")
        return found[0].reason

    def samples(self) -> tuple[GpuSample, ...]:
        """The newest."""
        self.listen()
        return next((told.samples for told in reversed(self.telemetry) if told.samples), ())

    def status(self) -> tuple[GpuReport, ...]:
        run_file = read_run_file(self.run_dir / "node-a.json")
        assert run_file is not None
        return ask_status(run_file.addresses["control"]).gpus

    def close(self) -> None:
        super().close()
        for (
            guard
        ) in self.guards():  # theirs is a longer heartbeats than a test's, where workers outlive their agent
            with contextlib.suppress(ProcessLookupError):
                os.kill(guard, signal.SIGTERM)
        until(lambda: not self.guards() + self.ours(0) + self.ours(1), what="the end of all daemons")


def processes_of_guard(place: MpsPlace) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            command = command_of(int(entry.name))
            if "roles.node_agent.mps.daemon_keeper" in command and str(place.directory) in command:
                found.append(int(entry.name))
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def environment_of(pid: int) -> dict[str, str]:
    try:
        said = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return {}
    return dict(pair.partition("=")[::2] for pair in said.split("\0") if "=" in pair)


StageMaker = Callable[..., MpsStage]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[StageMaker]:
    opened: list[MpsStage] = []

    def open_stage(*gpus: dict[str, Any], **options: Any) -> MpsStage:
        opened.append(MpsStage(tmp_path, *gpus, **options))
        return opened[-1]

    yield open_stage
    for stage in opened:
        stage.close()


def serving(stage: MpsStage, *specs: SliceSpec) -> MpsStage:
    stage.want(*specs)
    for one in specs:
        stage.until_state(one.slice_id, "ready")
    return stage


def test_each_gpu_has_a_daemon_of_its_own_and_each_worker_its_share(make: StageMaker) -> None:
    stage = serving(make(), spec("x", 40.0), spec("y", 60.0), spec("z", None, gpu=1))
    assert sorted(stage.clients(0).values()) == [("40", ""), ("60", "")]
    assert list(stage.clients(1).values()) == [("100", "")]
    assert stage.daemon(0) != stage.daemon(1)
    assert stage.has_right_shares(0)
    assert stage.has_right_shares(1)
    for gpu, uid in ((0, "GPU-0"), (1, "GPU-1")):
        assert environment_of(stage.daemon(gpu))["CUDA_VISIBLE_DEVICES"] == uid
        assert {environment_of(pid)["CUDA_VISIBLE_DEVICES"] for pid in stage.clients(gpu)} == {uid}
        assert stage.place(gpu).pipe.stat().st_mode & 0o777 == 0o700
        assert stage.place(gpu).log.stat().st_mode & 0o777 == 0o700


def test_an_orderly_end_quits_the_daemons_and_leaves_no_file(make: StageMaker) -> None:
    stage = serving(make(), spec("x"), spec("y", gpu=1))
    stage.agent.send_signal(signal.SIGTERM)
    assert stage.agent.wait(20) == 0
    assert not stage.workers() + stage.guards() + stage.ours(0) + stage.ours(1)
    assert not list(stage.run_dir.glob("mps-*"))


def test_telemetry_comes_once_a_second_and_is_in_the_status(make: StageMaker) -> None:
    stage = make(a100(0), a100(1, milliwatts=None, throttle=None))
    until(lambda: bool(stage.samples()), what="a sample")
    first, second = stage.samples()
    assert (first.busy_percent, first.memory_used_bytes, first.power_w) == (37.0, 3 << 30, 151.5)
    assert (first.sm_mhz, first.memory_mhz, first.temperature_c) == (1410, 1215, 41)
    assert first.throttle == ("sw_power_cap",)
    assert (second.power_w, second.throttle) == (None, ())
    write_gpus(stage.gpus_file, a100(0, busy_percent=99), a100(1))
    until(lambda: stage.samples()[0].busy_percent == 99, what="the next sample")
    report = stage.status()[0]
    assert (report.info.name, report.info.uid, report.info.sm_count) == (
        "NVIDIA A100-SXM4-40GB",
        "GPU-0",
        108,
    )
    assert (report.info.compute_capability, report.info.driver) == ("8.0", "550.54.15")
    assert report.sample is not None
    assert report.sampled_ago_ms is not None


def test_a_worker_that_hangs_leaves_its_gpu_through_the_daemon_before_it_is_killed(make: StageMaker) -> None:
    stage = serving(make(), spec("x", how="hang"))
    (worker,) = stage.clients()
    stage.want()
    until(lambda: not stage.workers(), what="its end")
    commands = (stage.place().log / "commands").read_text().splitlines()
    terminated = next(line for line in commands if line.startswith("terminate_client"))
    assert terminated.endswith(f" {worker}")


def test_a_daemon_that_will_not_terminate_a_client_does_not_hold_its_end_up(
    make: StageMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    stage = serving(make(), spec("x", how="hang"))
    stage.misbehave("busy")
    stage.want()
    until(lambda: not stage.workers(), what="its end")
    assert "client_not_terminated" in capfd.readouterr().err


@pytest.mark.parametrize("victim", ["daemon", "guard", "server"])
def test_whatever_of_mps_is_killed_hard_no_worker_runs_without_its_share(
    make: StageMaker, victim: str
) -> None:
    stage = serving(make(), spec("x", 30.0), spec("y", 50.0), spec("other", 20.0, gpu=1))
    former, (other,) = set(stage.clients()), stage.clients(1)
    if victim == "server":
        (pid,) = stage.control().servers()
    else:
        pid = stage.daemon() if victim == "daemon" else processes_of_guard(stage.place())[0]
    os.kill(pid, signal.SIGKILL)
    # Not by its words: one that comes while this scheduler is thought silent is lost, and what a hello makes up
    # for is the newest state only.
    until(lambda: not former & set(stage.heard_clients()), what="the end of its clients")
    stage.until_settled()
    assert sorted(stage.clients().values()) == [("30", ""), ("50", "")]
    assert list(stage.clients(1)) == [other], "a fault stays on its GPU"
    assert len(stage.ours()) == 2, "one daemon, one server"
    assert zombies_of(stage.agent.pid) == []


def test_a_daemon_that_hangs_is_replaced(make: StageMaker) -> None:
    stage = serving(make(), spec("x"))
    hung = stage.daemon()
    stage.misbehave("hang")
    reason = stage.until_was("x", "lost")
    assert reason.startswith("its MPS daemon is sick: no answer to 'get_server_list' within 5 s")
    stage.misbehave("")
    stage.until_state("x", "ready")
    assert hung not in stage.ours()
    until(stage.has_right_shares, what="shares")


def test_an_agent_killed_hard_leaves_neither_worker_nor_daemon(make: StageMaker) -> None:
    stage = serving(make(), spec("x"), spec("y", gpu=1))
    stage.kill_agent()
    until(lambda: not stage.workers(), 2_000.0, "the end of all workers")
    until(lambda: not stage.guards() + stage.ours(0) + stage.ours(1), what="the end of all daemons")


def test_an_agent_that_starts_again_at_once_has_new_daemons_and_the_right_shares(make: StageMaker) -> None:
    stage = serving(make(), spec("x"), spec("y", gpu=1))
    former = stage.ours(0) + stage.ours(1)
    stage.kill_agent()
    stage.changes.clear()
    stage.start_agent()
    for name in "xy":
        stage.until_state(name, "ready")
    assert not set(former) & set(stage.ours(0) + stage.ours(1))
    until(
        lambda: stage.has_right_shares(0) and stage.has_right_shares(1),
        what="the end of the former agent's workers",
    )


def test_an_agent_and_its_guards_killed_together_leave_servers_that_the_next_agent_ends(
    make: StageMaker,
) -> None:
    stage = serving(make(), spec("x"))
    (server,) = stage.control().servers()
    guards = stage.guards()
    stage.agent.send_signal(signal.SIGSTOP)  # so that it does not see its guards go
    for guard in guards:
        os.kill(guard, signal.SIGKILL)
    stage.kill_agent()
    until(lambda: stage.ours() == [server], what="the end of the daemon")
    stage.changes.clear()
    stage.start_agent()
    stage.until_state("x", "ready")
    assert server not in stage.ours()
    assert stage.has_right_shares()


def test_a_daemon_serves_on_with_the_workers_that_outlive_their_agent(make: StageMaker) -> None:
    stage = serving(make(node={"workers_outlive_agent": True}), spec("x"), spec("y", gpu=1))
    workers, daemons = stage.workers(), stage.ours(0) + stage.ours(1)
    stage.kill_agent()
    stage.changes.clear()
    stage.start_agent()
    for name in "xy":
        stage.until_state(name, "ready")
    assert stage.workers() == workers
    assert stage.ours(0) + stage.ours(1) == daemons
    stage.until_sharing(0, "mps")
    assert stage.has_right_shares(0)
    stage.agent.send_signal(signal.SIGTERM)
    assert stage.agent.wait(20) == 0
    assert not stage.workers() + stage.guards() + stage.ours(0) + stage.ours(1)


def test_an_agent_that_is_not_to_adopt_ends_workers_and_daemons_and_starts_anew(make: StageMaker) -> None:
    stage = serving(make(node={"workers_outlive_agent": True}), spec("x"))
    former = [*stage.workers(), *stage.ours()]
    stage.kill_agent()
    stage.changes.clear()
    stage.options["node"]["workers_outlive_agent"] = False
    stage.start_agent()
    stage.until_state("x", "ready")
    assert not set(former) & {*stage.workers(), *stage.ours()}
    assert stage.has_right_shares()


def test_orphans_without_their_daemon_are_not_adopted(make: StageMaker) -> None:
    stage = serving(make(node={"workers_outlive_agent": True}), spec("x"))
    former = stage.workers()
    stage.kill_agent()
    for guard in stage.guards():
        os.kill(guard, signal.SIGKILL)
    stage.changes.clear()
    stage.start_agent()
    stage.until_state("x", "ready")
    assert not set(former) & set(stage.workers())
    assert stage.has_right_shares()


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_moment_leave_no_orphan_and_no_wrong_share(make: StageMaker, seed: int) -> None:
    patient = {"first_ms": 50.0, "longest_ms": 200.0, "failures_max": 1_000}
    stage = serving(make(a100(0), limits={"restart": patient}), spec("x", 30.0), spec("y", 50.0))
    draw = random.Random(seed)
    for _ in range(6):
        select.select([], [], [], draw.uniform(0.0, 1.5))
        victims = [*stage.guards(), *stage.ours(), *stage.workers(), stage.agent.pid]
        victim = draw.choice(victims)
        if victim == stage.agent.pid:
            stage.kill_agent()
            stage.start_agent()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
    stage.until_settled()
    assert sorted(stage.clients().values()) == [("30", ""), ("50", "")]
    assert (len(stage.workers()), len(stage.guards()), len(stage.ours())) == (2, 1, 2)
    assert zombies_of(stage.agent.pid) == []


@pytest.mark.parametrize(
    ("how", "reason"),
    [("refuse", "the daemon must be run by another user"), ("crash", "it crashed on purpose")],
)
def test_a_daemon_that_does_not_start_is_given_up_and_the_gpu_shared_in_time(
    make: StageMaker, capfd: pytest.CaptureFixture[str], how: str, reason: str
) -> None:
    stage = make(a100(0), before=how)
    assert reason in stage.until_sharing(0, "time-sharing")
    serving(stage, spec("x", 30.0))
    assert stage.clients() == {}
    said = capfd.readouterr().err
    assert "mps_given_up gpu=0 sharing=time-sharing" in said
    assert "share_not_enforced slice=x share_percent=30" in said


def test_a_server_whose_guard_was_killed_ends_where_no_guard_follows(make: StageMaker) -> None:
    stage = serving(make(a100(0), limits={"restart": {"failures_max": 1}}), spec("x"))
    (guard,) = stage.guards()
    os.kill(guard, signal.SIGKILL)
    assert "was killed by signal 9" in stage.until_sharing(0, "time-sharing")
    until(lambda: not stage.ours(), what="the end of daemon and server")
    stage.until_state("x", "ready")
    assert stage.clients() == {}


def test_a_daemon_of_somebody_else_in_our_directory_is_left_alone(make: StageMaker, tmp_path: Path) -> None:
    place = MpsPlace.of(tmp_path / "r", "a", 0)
    (tmp_path / "r").mkdir()
    place.make()
    variables = {PIPE: str(place.pipe), "CUDA_MPS_LOG_DIRECTORY": str(place.log)}
    stranger = subprocess.Popen([sys.executable, str(MPS_CONTROL), "-f"], env={**os.environ, **variables})
    try:
        until((place.pipe / "nvidia-cuda-mps-control.pid").exists, what="the stranger")
        stage = make(a100(0))
        reason = stage.until_sharing(0, "time-sharing")
        assert f"a daemon that we did not start (process {stranger.pid}) serves in" in reason
        serving(stage, spec("x"))
        assert stage.clients() == {}
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize(
    ("gpu", "has_mps", "mode", "reason"),
    [
        (a100(0), False, "time-sharing", "no MPS: nvidia-cuda-mps-control is not on the PATH"),
        (a100(0, capability="3.0"), True, "time-sharing", "no MPS: compute capability 3.0 is below 3.5"),
        (a100(0, mig=1), True, "mig", "MIG is on: its partitions are left as they are"),
        (a100(0, capability="6.1"), True, "mps", "no shares below compute capability 7.0 (this is 6.1)"),
    ],
)
def test_what_a_gpu_cannot_do_is_said_loudly_and_its_slices_are_served(
    make: StageMaker,
    capfd: pytest.CaptureFixture[str],
    gpu: dict[str, Any],
    has_mps: bool,
    mode: str,
    reason: str,
) -> None:
    stage = make(gpu, has_mps=has_mps)
    serving(stage, spec("x", 30.0))
    assert stage.until_sharing(0, mode) == reason
    said = capfd.readouterr().err
    assert f"gpu_without_shares gpu=0 sharing={mode}" in said
    assert "share_not_enforced slice=x share_percent=30" in said
    assert all(share == "" for share, _ in stage.clients().values())


def test_shares_over_a_whole_gpu_are_allowed_and_said(make: StageMaker) -> None:
    stage = serving(make(a100(0)), spec("x", 60.0), spec("y", 70.0))
    assert stage.until_sharing(0, "mps") == "the shares of its slices add up to 130 %"
    assert sorted(stage.clients().values()) == [("60", ""), ("70", "")]


def test_a_slice_for_a_gpu_that_is_not_there_fails_with_the_reason(make: StageMaker) -> None:
    stage = serving(make(), spec("x"))
    stage.want(spec("x"), spec("y", gpu=7))
    stage.until_state("y", "failed")
    assert stage.reason("y") == "node a has no gpu 7 (it has 2)"
    assert stage.states("x")[-1] == "ready"


def test_a_client_is_ended_only_where_it_is_one(make: StageMaker) -> None:
    stage = serving(make(a100(0)), spec("x"))
    (worker,) = stage.clients()
    assert end_client(stage.control(), worker)
    assert not end_client(stage.control(), worker)
