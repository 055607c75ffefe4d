"""Shares of one GPU for measuring processes: an MPS daemon of our own for as long as it takes."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from roles.node_agent.discovery import Nvml
from roles.node_agent.mps.control import (
    BINARY,
    LOG,
    PIPE,
    LegacyControl,
    MpsError,
    MpsPlace,
    MpsUnsupported,
    check_gpu,
)
from roles.node_agent.mps.environment import daemon_environment, device_environment, without_mps
from roles.runtime.process import child_environment

ANSWERS_WITHIN_S = 10.0
ENDS_WITHIN_S = 10.0

Environment = Callable[[float], Mapping[str, str]]


@contextmanager
def mps_shares(gpu: int, gpu_type: str) -> Iterator[Environment]:
    """What a process needs in its environment to have that share of the GPU.

    Raises MpsError or NvmlUnavailable, whose text says why there are no shares here.
    """
    info = Nvml.open().describe(gpu, gpu_type)
    if not check_gpu(info):
        raise MpsUnsupported(
            f"shares need compute capability 7.0, and this GPU has {info.compute_capability}"
        )
    with tempfile.TemporaryDirectory(prefix="tenuto-mps-") as directory:
        place = MpsPlace(Path(directory) / "gpu")
        place.make()
        environment = without_mps(child_environment()) | daemon_environment(place, info.uid)
        try:
            daemon = subprocess.Popen(  # noqa: S603  a fixed program, no words of anybody else's
                [BINARY, "-f"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise MpsError(f"{BINARY} cannot be started: {error.strerror}") from error
        control = LegacyControl(place)
        try:
            _wait_for_an_answer(daemon, control)
            common = {**device_environment(info), PIPE: str(place.pipe), LOG: str(place.log)}
            yield lambda share: {**common, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share:g}"}
        finally:
            _end(daemon, control)


def _wait_for_an_answer(daemon: subprocess.Popen[bytes], control: LegacyControl) -> None:
    error: MpsError | None = None
    for _ in range(int(ANSWERS_WITHIN_S / 0.2)):
        try:
            control.servers()
        except MpsError as silent:
            error = silent
        else:
            return
        try:
            daemon.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
        raise MpsError(f"the MPS daemon ended with code {daemon.returncode}")
    raise error or MpsError("the MPS daemon does not answer")


def _end(daemon: subprocess.Popen[bytes], control: LegacyControl) -> None:
    try:
        control.quit()
    except MpsError:
        daemon.terminate()
    try:
        daemon.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait(ENDS_WITHIN_S)
