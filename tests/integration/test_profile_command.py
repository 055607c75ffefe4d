"""`tenuto profile` with its real processes: on a CPU what it writes and refuses, on stand-ins how shares come about."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fabric.errors import ConfigError
from fabric.messages import LoaderSpec
from profiles.store import read_measured, read_profile
from roles.cli.profile import profile
from roles.profiling.process import MeasuringProcess, MeasuringRequest, ProfilingFailed
from tests.gpu_stand_ins import a100, gpu_environment, write_gpus

pytestmark = pytest.mark.timeout(180)

DIGITS = "deploy.local.demo.digits_model:Digits"
MODELS = "tests.unit.roles.gpu_worker.executors.models_for_tests"


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(profile, [*arguments, "--seconds", "0.05"])
    return result.exit_code, result.output, result.exception


def test_a_profile_of_a_cpu_has_run_times_and_memory_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "digits.json"
    result = CliRunner().invoke(
        profile,
        [DIGITS, "--batches", "1,4", "--seconds", "0.05", "--shares", "50", "--out", str(path), "--json"],
    )
    assert result.exit_code == 0, result.output
    seen = read_measured(path)
    assert [(p.share_percent, p.batch_size) for p in seen.points] == [(100, 1), (100, 4)]
    assert all(0 < p.p50_ms <= p.p95_ms <= p.p99_ms and p.runs >= 5 for p in seen.points)
    assert all(p.memory_bytes > 0 and p.power_w is None for p in seen.points)
    assert (seen.load_bytes, seen.feedback_bytes) == (8 * 8 * 4, 8 + 10 * 4)
    assert (len(seen.subject.model_hash), seen.subject.torch) == (64, torch.__version__)
    assert seen.subject.notes == ("shares and iGniter's coefficients: a CPU has no MPS shares",)
    assert "left out: shares" in result.stderr
    assert json.loads(result.stdout)["subject"]["device"] == "cpu"
    assert read_profile(path).batch_size_max == 4


HEADS = """
models:
 - name: family
   slo_ms: 2000
   MERGE
   heads:
    - {name: two, loader: {python: "tests.models.heads:Tuned"}}
    - {name: three, loader: {python: "tests.models.heads:CLASS"}}
cluster: {nodes: [{host: one, gpus: 1, device: cpu}]}
"""


@pytest.mark.parametrize(
    ("merge", "other", "missing"),
    [
        ("", "Three", ()),
        ("merge: operators", "Three", ()),
        (
            "",
            "Stranger",
            (
                "running the heads together: their first layers differ already: nothing could be run for all of them",
            ),
        ),
        (
            "merge: stacked",
            "Three",
            (
                "running the heads together: their 4.weight has other shapes ([2, 16], [3, 16]): they are not of one architecture",
            ),
        ),
    ],
)
def test_a_model_with_heads_is_measured_in_joint_batches(
    merge: str, other: str, missing: tuple[str, ...], tmp_path: Path
) -> None:
    file, path = tmp_path / "cluster.yaml", tmp_path / "family.json"
    file.write_text(HEADS.replace("MERGE", merge).replace("CLASS", other), encoding="utf-8")
    code, output, _ = run("family", "--file", str(file), "--batches", "1,4", "--out", str(path))
    assert code == 0, output
    seen = read_measured(path)
    assert [point.batch_size for point in seen.points] == [1, 4]
    assert (seen.load_bytes, seen.feedback_bytes, seen.subject.model) == (16 * 4, 3 * 4, "family")
    assert seen.subject.notes == missing
    code, output, _ = run("family", "--file", str(file), "--estimate", "--gpu", "v100")
    assert code == 2
    assert "it is measured, and whole" in output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["torchvision/resnet5O"], "did you mean 'resnet50'"),
        ([f"{MODELS}:NoExample"], "no method 'example'"),
        ([f"{MODELS}:RaisesInLoad"], "RuntimeError: no weights today"),
        (
            [DIGITS, "--device", "cuda:99"],
            "torch finds no CUDA here" if not torch.cuda.is_available() else "there are",
        ),
    ],
)
def test_a_model_that_cannot_be_had_is_explained(arguments: list[str], reason: str, tmp_path: Path) -> None:
    code, _, error = run(*arguments, "--batches", "1", "--out", str(tmp_path / "m.json"))
    assert code == 1
    assert isinstance(error, ConfigError)
    assert reason in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FourRowsAtMost", "ValueError: four rows at most"),
        ("OutOfHostMemoryAboveFour", "out of memory"),
    ],
)
def test_what_a_model_raises_for_large_batches_leaves_the_others_in_its_profile(
    name: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.json"
    code, output, _ = run(f"{MODELS}:{name}", "--batches", "1,4,8,16", "--out", str(path))
    assert code == 0, output
    seen = read_measured(path)
    assert [point.batch_size for point in seen.points] == [1, 4]
    assert seen.subject.notes == (f"batches of 8 and more: {reason}",)


def test_a_model_that_raises_for_the_smallest_batch_has_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    code, _, error = run(f"{MODELS}:WrongBatch", "--batches", "1,4", "--out", str(path))
    assert (code, path.exists()) == (1, False)
    assert "the first axis must be the batch" in str(error)


def test_answers_have_the_size_in_which_a_worker_copies_them(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    code, output, _ = run(f"{MODELS}:HalfAnswers", "--batches", "1", "--out", str(path))
    assert code == 0, output
    assert read_measured(path).feedback_bytes == 4


def test_a_model_in_the_current_directory_is_found_and_modules_of_our_names_there_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fabric.py").write_text("raise SystemExit('another one')")
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Mine:\n"
        "    def load(self, device): pass\n"
        "    def infer(self, batch): return {'y': batch['x'] + 1}\n"
        "    def example(self): return {'x': torch.zeros(2)}\n"
    )
    monkeypatch.chdir(tmp_path)
    code, output, _ = run("mine:Mine", "--batches", "1", "--out", "m.json")
    assert code == 0, output
    assert [point.batch_size for point in read_measured(tmp_path / "m.json").points] == [1]


def test_a_model_that_hangs_is_ended_in_bounded_time() -> None:
    request = MeasuringRequest(LoaderSpec(python=f"{MODELS}:HangsInLoad"), "cpu", (1,), limit_ms=500.0)
    process = MeasuringProcess(request, {})
    with pytest.raises(ProfilingFailed, match=r"has said nothing for 0\.5 s and was ended"), process:
        process.answer()
    assert process.is_over


def test_a_process_that_dies_leaves_its_last_words() -> None:
    request = MeasuringRequest(LoaderSpec(python=f"{MODELS}:DiesInLoad"), "cpu", (1,), limit_ms=100_000.0)
    process = MeasuringProcess(request, {})
    with pytest.raises(ProfilingFailed, match="ended without a word: exit code 7"), process:
        process.answer()


SHARES = """
from roles.node_agent.mps.control import LegacyControl, MpsPlace
from pathlib import Path
from roles.profiling.sensors import Sensors
from roles.profiling.shares import mps_shares
with mps_shares(0, "a100") as environment:
    said = environment(37.5)
    pipe = Path(said["CUDA_MPS_PIPE_DIRECTORY"])
    print(said["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], said["CUDA_VISIBLE_DEVICES"], pipe.is_dir())
print(pipe.exists(), Sensors.open(0).power_w(), Sensors.open(0).driver, Sensors.open(0).power_max_w())
"""


def of_stand_ins(tmp_path: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    gpus = tmp_path / "gpus.json"
    write_gpus(gpus, a100(**changes))
    environment = gpu_environment(gpus, has_mps=True)
    return subprocess.run(
        [sys.executable, "-c", SHARES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_shares_come_from_an_mps_daemon_that_ends_with_them(tmp_path: Path) -> None:
    ended = of_stand_ins(tmp_path, milliwatts_max=None)  # as GPUs say that have no limit of power
    assert ended.stdout.splitlines() == ["37.5 GPU-0 True", "False 151.5 550.54.15 None"], ended.stderr


def test_a_gpu_without_shares_says_so(tmp_path: Path) -> None:
    assert "shares need compute capability 7.0" in of_stand_ins(tmp_path, capability="6.1").stderr
    assert "MIG is on" in of_stand_ins(tmp_path, mig=1).stderr
