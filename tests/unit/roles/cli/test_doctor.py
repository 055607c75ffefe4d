"""What `tenuto doctor` finds beside the versions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from roles.cli.doctor import examine
from roles.cli.host_checks import FAIL, OK, WARN, Finding, gpus, mps


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> None:
    for name, source in sources.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("source", "state", "detail"),
    [
        ("import torch", OK, "works"),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            WARN,
            "RuntimeError: operator torchvision::nms does not exist; the zoo's classifiers run even so",
        ),
        ("import sys; sys.exit(3)", WARN, "ended with code 3"),
    ],
)
def test_a_pair_of_wheels_that_does_not_go_together_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, state: str, detail: str
) -> None:
    installed(tmp_path, monkeypatch, torch="", torchvision=source)
    (finding,) = [one for one in examine() if one.name == "import torchvision"]
    assert finding.state == state
    assert detail in finding.detail


def test_whatever_is_not_well_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    findings = examine()
    assert all(finding.remedy for finding in findings if finding.state != OK)
    names = {finding.name for finding in findings}
    wanted = {
        "clock",
        "timers",
        "cores",
        "idle cores",
        "interpreter",
        "libzmq",
        "crypto",
        "shared memory",
        "open files",
    }
    assert wanted | {"import fabric", "run directory"} <= names
    with pytest.raises(AssertionError, match="nobody is told what to do"):
        Finding("x", FAIL, "broken")
    from roles.cli.doctor import _print

    _print([Finding("x", FAIL, "broken", "mend it"), Finding("y", OK, "fine")])
    out = capsys.readouterr().out
    assert "x: mend it" in out
    assert max(map(len, out.splitlines())) <= 80


def test_shared_memory_that_was_forbidden_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from roles.cli.host_checks import memory

    monkeypatch.setenv("TENUTO_SHARED_MEMORY", "0")
    (found,) = memory()
    assert (found.state, "unset TENUTO_SHARED_MEMORY" in found.remedy) == (WARN, True)


SICK = """
class NVMLError(Exception): ...
NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 2, 3
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetComputeMode = nvmlDeviceGetRetiredPagesPendingStatus = lambda handle: 0
nvmlDeviceGetPersistenceMode = lambda handle: 1
nvmlDeviceGetName = lambda handle: "V100"
def nvmlDeviceGetHandleByIndex(index):
    if index == 0:
        raise NVMLError("GPU is lost")
    return index
"""


def test_a_gpu_that_the_driver_has_lost_is_found_beside_those_that_are_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, pynvml=SICK)
    lost, well = (one for one in gpus() if one.name.startswith("gpu"))
    assert (lost.name, lost.state) == ("gpu 0", FAIL)
    assert "GPU is lost" in lost.detail
    assert (well.name, well.state, well.detail) == ("gpu 1", OK, "V100")


def test_another_users_mps_daemon_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tmp_path / "123"
    entry.mkdir()
    (entry / "comm").write_text("nvidia-cuda-mps-control\n", encoding="utf-8")
    (tmp_path / "self").mkdir()
    assert [one.state for one in mps(tmp_path) if one.name == "mps users"] == [OK]
    monkeypatch.setattr(os, "getuid", lambda: entry.stat().st_uid + 1)
    (found,) = [one for one in mps(tmp_path) if one.name == "mps users"]
    assert found.state == WARN
