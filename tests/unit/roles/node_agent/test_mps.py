"""Speaking to MPS through its control program, and what its clients are told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric.ids import ModelId, SliceId
from fabric.messages import GpuInfo, ModelSpec, SliceSpec
from roles.node_agent.mps import control as control_module
from roles.node_agent.mps import daemon_keeper
from roles.node_agent.mps.control import (
    LegacyControl,
    MpsError,
    MpsMissing,
    MpsPlace,
    MpsRefused,
    MpsSilent,
    MpsUnsupported,
    MpsWrongUser,
    check_gpu,
    end_client,
)
from roles.node_agent.mps.environment import client_environment, daemon_environment, without_mps
from roles.runtime.exit_codes import EXIT_FAILURE, EXIT_GUARD_REFUSED

A100 = GpuInfo(0, "a100", "cuda", 40 << 30, "GPU-7", "NVIDIA A100", 108, "8.0")
MIB = 1 << 20


def spec(share: float | None, *memory_bytes: int) -> SliceSpec:
    models = [ModelSpec(ModelId(f"m{i}"), 25.0, 8, memory_bytes=size) for i, size in enumerate(memory_bytes)]
    return SliceSpec(SliceId("x"), 0, "cuda", share, tuple(models))


def program(path: Path, script: str) -> str:
    """A control program of one's own."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def place(tmp_path: Path) -> MpsPlace:
    made = MpsPlace.of(tmp_path, "a", 0)
    made.make()
    return made


@pytest.fixture
def kept_signals() -> Iterator[None]:
    """A guard that has ended ignores signals, and here goes on as the test's own process."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_answers_are_pids_and_questions_go_to_the_daemon_of_that_directory(
    place: MpsPlace, tmp_path: Path
) -> None:
    script = f'read said; echo "$said in $CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/asked; echo 11; echo 12'
    control = LegacyControl(place, program(tmp_path / "control", script))
    assert control.servers() == (11, 12)
    assert control.clients(11) == (11, 12)
    control.terminate_client(11, 99)
    control.quit()
    asked = (tmp_path / "asked").read_text().splitlines()
    words = ("get_server_list", "get_client_list 11", "terminate_client 11 99", "quit")
    assert asked == [f"{said} in {place.pipe}" for said in words]


def test_a_client_is_ended_on_the_server_that_has_it(place: MpsPlace, tmp_path: Path) -> None:
    script = f"""read word server client
    case $word in
      get_server_list) echo 11; echo 12;;
      get_client_list) [ $server = 12 ] && echo 99;;
      terminate_client) echo "$server $client" > {tmp_path}/ended;;
    esac
    exit 0"""
    control = LegacyControl(place, program(tmp_path / "control", script))
    assert end_client(control, 99)
    assert (tmp_path / "ended").read_text() == "12 99\n"
    assert not end_client(control, 98)


def test_what_goes_wrong_has_a_type_and_says_what(place: MpsPlace, tmp_path: Path) -> None:
    with pytest.raises(MpsMissing, match="no-such-program is not installed here"):
        LegacyControl(place, "no-such-program").servers()
    with pytest.raises(MpsError, match="cannot be run"):
        LegacyControl(place, str(tmp_path)).servers()
    refusing = program(tmp_path / "refusing", "echo Cannot find MPS control daemon process; exit 1")
    with pytest.raises(MpsRefused, match="'get_server_list' failed with code 1: Cannot find MPS control"):
        LegacyControl(place, refusing).servers()
    silent = program(tmp_path / "silent", "exec sleep 60")
    with pytest.raises(MpsSilent, match=r"no answer to 'quit' within 0\.05 s"):
        LegacyControl(place, silent, limit_s=0.05).quit()


@pytest.mark.parametrize(
    ("capability", "has_shares"), [("3.5", False), ("6.1", False), ("7.0", True), ("10.0", True)]
)
def test_shares_need_compute_capability_7(capability: str, *, has_shares: bool) -> None:
    assert check_gpu(GpuInfo(0, "t", "cuda", compute_capability=capability)) == has_shares


def test_mps_needs_compute_capability_3_5_and_no_mig() -> None:
    with pytest.raises(MpsUnsupported, match=r"compute capability 3\.0 is below 3\.5"):
        check_gpu(GpuInfo(0, "t", "cuda", compute_capability="3.0"))
    with pytest.raises(MpsUnsupported, match="MIG is on"):
        check_gpu(GpuInfo(0, "t", "cuda", compute_capability="8.0", is_mig=True))


def test_directories_are_ours_alone(place: MpsPlace) -> None:
    for path in (place.directory.parent, place.directory, place.pipe, place.log):
        assert path.stat().st_mode & 0o777 == 0o700
    place.pipe.chmod(0o755)
    place.make()
    assert place.pipe.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mps-a").symlink_to("/", target_is_directory=True)  # as somebody else would have it
    with pytest.raises(MpsWrongUser, match=f"is no directory of user {os.getuid()}"):
        MpsPlace.of(tmp_path, "a", 0).make()


def test_a_directory_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MpsError, match="set TENUTO_RUN_DIR to a shorter directory"):
        MpsPlace.of(tmp_path / ("d" * 100), "a", 0).make()


def test_a_client_is_told_its_share_and_that_it_may_take_what_the_others_do_not_need(place: MpsPlace) -> None:
    own, other = spec(12.5, 2048 * MIB, 1024 * MIB), spec(50.0, 8 << 30)
    told = client_environment(place, A100, own, has_shares=True, beside=(other,))
    left_mib = (A100.memory_bytes >> 20) - 13 * 1024  # without half as much again as 8 GiB, and 1 GiB
    assert told == {
        "CUDA_MPS_PIPE_DIRECTORY": str(place.pipe),
        "CUDA_MPS_LOG_DIRECTORY": str(place.log),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={left_mib}M",
    }


def test_a_client_may_take_half_as_much_again_as_it_needs_however_much_the_others_need(
    place: MpsPlace,
) -> None:
    own, other = spec(12.5, 2048 * MIB, 1024 * MIB), spec(50.0, 40 << 30)
    told = client_environment(place, A100, own, has_shares=True, beside=(other,))
    assert told["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=5632M"


def test_who_is_alone_on_its_gpu_may_take_all_of_it(place: MpsPlace) -> None:
    told = client_environment(place, A100, spec(12.5, 2048 * MIB), has_shares=True)
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in told


def test_no_memory_limit_where_a_need_is_not_known_or_beyond_the_gpu(place: MpsPlace) -> None:
    for one in (spec(50.0), spec(50.0, 2048 * MIB, 0), spec(50.0, 30 << 30)):
        told = client_environment(place, A100, one, has_shares=True, beside=(spec(50.0, 2048 * MIB),))
        assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in told


def test_no_share_is_all_of_the_gpu_and_a_gpu_without_shares_is_told_none(place: MpsPlace) -> None:
    whole = client_environment(place, A100, spec(None), has_shares=True)
    assert whole["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"
    without = client_environment(place, A100, spec(40.0), has_shares=False)
    assert set(without) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}


def test_a_daemon_serves_one_gpu_and_hears_nothing_meant_for_another(place: MpsPlace) -> None:
    assert daemon_environment(place, "GPU-7")["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert without_mps({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "5", "HOME": "/h"}) == {"HOME": "/h"}


def test_a_question_that_even_sigkill_does_not_end_is_left_behind(
    place: MpsPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs in the driver."""
    stuck: list[subprocess.Popen[str]] = []

    def kill(process: subprocess.Popen[str]) -> None:
        stuck.append(process)

    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    monkeypatch.setattr(control_module, "KILL_LIMIT_S", 0.01)
    control = LegacyControl(place, program(tmp_path / "control", "exec sleep 20"), limit_s=0.01)
    with pytest.raises(MpsSilent):
        control.servers()
    assert [one.poll() for one in stuck] == [None]
    os.kill(stuck[0].pid, signal.SIGKILL)
    stuck[0].wait(20)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((number, EXIT_GUARD_REFUSED) for number in (errno.ENOENT, errno.EACCES, errno.ENOEXEC)),
        *((number, EXIT_FAILURE) for number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)),
    ],
)
@pytest.mark.usefixtures("kept_signals")
def test_only_a_program_that_cannot_be_run_at_all_gives_mps_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    code: int,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("sys.argv", ["guard", str(tmp_path / "mps-a" / "gpu0"), "--uid", "GPU-7"])
    assert daemon_keeper.main() == code
    assert capsys.readouterr().err == f"{control_module.BINARY} cannot be run: {os.strerror(number)}\n"


@pytest.mark.usefixtures("kept_signals")
def test_a_log_that_cannot_be_written_now_does_not_give_mps_up(
    place: MpsPlace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.log / "daemon.out").mkdir()
    monkeypatch.setattr("sys.argv", ["guard", str(place.directory), "--uid", "GPU-7"])
    assert daemon_keeper.main() == EXIT_FAILURE
    assert "daemon.out cannot be written" in capsys.readouterr().err
