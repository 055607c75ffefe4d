"""MPS on a real GPU: a guard, its daemon, and clients with a share. Skipped where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric.ids import ModelId, SliceId
from fabric.messages import GpuInfo, ModelSpec, SliceSpec
from roles.node_agent.discovery import Nvml, NvmlUnavailable
from roles.node_agent.mps.control import (
    BINARY,
    MARK,
    LegacyControl,
    MpsError,
    MpsPlace,
    check_gpu,
    end_client,
)
from roles.node_agent.mps.environment import client_environment, device_environment
from roles.runtime.identities import identity_of, processes_with, write_record
from tests.integration.proc import until

pytestmark = pytest.mark.gpu

CLIENT = """
import sys, torch
torch.zeros(1, device="cuda")
print(torch.cuda.get_device_properties(0).multi_processor_count, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def info() -> GpuInfo:
    pytest.importorskip("torch")
    if shutil.which(BINARY) is None:
        pytest.skip(f"{BINARY} is not on the PATH")
    try:
        found = Nvml.open().describe(0, "here")
        if not check_gpu(found):
            pytest.skip("this GPU has no shares")
    except (NvmlUnavailable, MpsError) as error:
        pytest.skip(str(error))
    return found


@pytest.fixture
def place(info: GpuInfo, tmp_path: Path) -> Iterator[MpsPlace]:
    made = MpsPlace.of(tmp_path, "a", 0)
    made.make()
    write_record(made.owner_file, {"owner": identity_of(os.getpid())})
    command = [
        sys.executable,
        "-m",
        "roles.node_agent.mps.daemon_keeper",
        str(made.directory),
        "--uid",
        info.uid,
    ]
    guard = subprocess.Popen(command)
    try:
        until(lambda: answers(made), 20_000.0, "an answer of the daemon")
        yield made
    finally:
        guard.terminate()
        assert guard.wait(20) == 0
    assert not list(processes_with(MARK, str(made.directory)))


def answers(place: MpsPlace) -> bool:
    try:
        LegacyControl(place).servers()
    except MpsError:
        return False
    return True


def client(place: MpsPlace, info: GpuInfo, share: float | None) -> tuple[subprocess.Popen[str], int]:
    """A CUDA process with that share, and how many multiprocessors it sees."""
    spec = SliceSpec(SliceId("x"), 0, "cuda", share, (ModelSpec(ModelId("m"), 25.0, 8),))
    variables = device_environment(info) | client_environment(place, info, spec, has_shares=True)
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_client_sees_its_share_of_the_multiprocessors_and_leaves_through_the_daemon(
    place: MpsPlace, info: GpuInfo
) -> None:
    control = LegacyControl(place)
    half, half_count = client(place, info, 50.0)
    whole, whole_count = client(place, info, None)
    try:
        (server,) = control.servers()
        assert {half.pid, whole.pid} <= set(control.clients(server))
        assert info.sm_count in (0, whole_count)
        assert 0.4 * whole_count <= half_count <= 0.6 * whole_count
        assert end_client(control, half.pid)
    finally:
        for process in (half, whole):
            process.kill()
            process.communicate()
