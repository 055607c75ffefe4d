"""`tenuto profile --kernels` on a GPU that is not there: it answers what the records of a P100 say."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fabric.errors import ConfigError, ProfileError
from fabric.messages import LoaderSpec
from profiles.estimator.estimate import Estimator, samples_of
from profiles.estimator.gpus import GpuSpec, gpu_spec
from profiles.estimator.own_records import own_gpu
from profiles.estimator.records import KernelRecord, gpu_of_records, read_records, shipped_records
from profiles.estimator.work import OPS, Work
from profiles.kernel_trace import limits_of
from profiles.profilers.torch import MeasuredBatch
from roles.cli.profile import profile
from roles.profiling import kernel_records
from roles.profiling.estimating import EstimateAsk, estimated
from roles.profiling.kernel_records import measured_kernels, records_of_works
from tests.unit.profiles.estimator.trained import ROUNDS

P100 = gpu_spec("p100")
NAME = "NVIDIA Abacus 9"


class OnP100:
    """Runs nothing. Operators over `memory_bytes` do not fit it."""

    def __init__(self, *, is_traced: bool = True, memory_bytes: float = 1e9) -> None:
        self._is_traced = is_traced
        self._memory_bytes = memory_bytes

    @contextmanager
    def memory(self) -> Iterator[None]:
        yield

    def run_times_ms(self, batch: MeasuredBatch, for_ms: float) -> list[float]:
        record = batch()
        assert isinstance(record, KernelRecord)
        if record.work.size_bytes > self._memory_bytes:
            raise torch.OutOfMemoryError
        return [record.latency_ms] * 5

    def trace(self, batch: MeasuredBatch) -> Mapping[str, Any]:
        record = batch()
        assert isinstance(record, KernelRecord)
        args = {"grid": [record.blocks, 1, 1], "block": [record.threads, 1, 1]}
        events = [
            {"cat": "kernel", "name": name, "ts": place, "dur": 1.0, "args": args}
            for place, name in enumerate(record.kernels)
        ]
        host = {"cat": "cpu_op", "name": "aten::add", "ts": 0.0, "dur": 1.0, "args": {}}
        limits = P100.limits
        device = {
            "id": 0, "computeMajor": 6, "computeMinor": 0, "numSms": limits.sm_count,
            "maxThreadsPerMultiprocessor": limits.threads_per_sm, "regsPerMultiprocessor": limits.registers_per_sm,
            "sharedMemPerMultiprocessor": limits.shared_bytes_per_sm,
        }  # fmt: skip
        return {"traceEvents": [host, *events] if self._is_traced else [host], "deviceProperties": [device]}

    def copy_bytes_per_ms(self) -> float:
        return 11e6


@cache
def by_work() -> Mapping[Work, KernelRecord]:
    return {record.work: record for record in shipped_records("p100")[::20]}


def gpu_of(records: Sequence[KernelRecord], trace: Mapping[str, Any], copy_gbps: float) -> GpuSpec:
    return own_gpu(NAME, None, P100.memory_bytes, limits_of(trace), copy_gbps, records)


def measured(on: OnP100, warn: list[str]) -> tuple[GpuSpec, list[KernelRecord]]:
    works = list(by_work())
    return records_of_works(
        works, on, lambda work: lambda: by_work()[work], gpu_of, lambda _: None, warn.append
    )


def test_records_come_out_of_the_traces_events() -> None:
    warned: list[str] = []
    gpu, records = measured(OnP100(), warned)
    fitting = [record for record in by_work().values() if record.work.size_bytes <= 1e9]
    assert [one.work for one in records] == [one.work for one in fitting]
    for found, shipped in zip(records, fitting, strict=True):
        assert found.latency_ms == shipped.latency_ms
        assert (found.blocks, found.threads) == (shipped.blocks, shipped.threads)
    assert (gpu.gpu_type, gpu.limits, gpu.copy_gbps) == ("abacus-9", P100.limits, 11.0)
    assert len(fitting) < len(by_work())
    assert warned == [f"left out: {len(by_work()) - len(fitting)} operators that ran out of memory"]


def test_nothing_of_an_operator_is_held_while_the_next_one_is_made() -> None:
    class Operator:
        def __init__(self, work: Work) -> None:
            self._work = work

        def __call__(self) -> KernelRecord:
            return by_work()[self._work]

    made: list[weakref.ref[Operator]] = []

    def operator(work: Work) -> Operator:
        assert all(one() is None for one in made)
        new = Operator(work)
        made.append(weakref.ref(new))
        return new

    works = [work for work in by_work() if work.size_bytes <= 1e9][:5]
    records_of_works(works, OnP100(), operator, lambda *_: P100, lambda _: None, lambda _: None)
    assert len(made) == 5


def test_a_tracer_that_may_not_look_is_said() -> None:
    with pytest.raises(ProfileError, match="saw no kernel"):
        measured(OnP100(is_traced=False), [])


def test_a_gpu_that_holds_nothing_is_said() -> None:
    with pytest.raises(ProfileError):
        measured(OnP100(memory_bytes=1), [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_cuda_it_says_so() -> None:
    with pytest.raises(ConfigError, match="torch finds no CUDA here"):
        measured_kernels("cuda", None, lambda _: None, lambda _: None)
    result = CliRunner().invoke(profile, ["--device", "cuda", "--kernels"])
    assert isinstance(result.exception, ConfigError)


def test_a_cpu_has_no_kernels() -> None:
    with pytest.raises(ConfigError, match="needs --device cuda, not cpu"):
        measured_kernels("cpu", None, lambda _: None, lambda _: None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["resnet50"],
        ["--estimate"],
        ["--shares", "50"],
        ["--batches", "1"],
        ["--gpu", "a100"],
        ["--limit", "300"],
    ],
)
def test_what_does_not_go_with_kernels_is_a_usage_error(arguments: list[str]) -> None:
    result = CliRunner().invoke(profile, ["--kernels", "--device", "cuda", *arguments])
    assert result.exit_code == 2
    assert "--kernels does not go with" in result.output
    assert "it takes '--device', '--gpu-type', '--out', '--json'" in " ".join(result.output.split())


def test_the_command_writes_them_retrains_and_estimates_take_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_records, "measured_kernels", lambda *_: measured(OnP100(), []))
    path = tmp_path / "own.csv.gz"
    result = CliRunner().invoke(profile, ["--kernels", "--device", "cuda", "--out", str(path), "--json"])
    said = json.loads(result.stdout)
    assert (said["gpu"]["gpu_type"], said["file"]) == ("abacus-9", str(path))
    assert set(said["errors"]) == set(OPS)
    records = read_records(path)
    assert said["records"] == len(records)
    assert sum(one["median_error"] < one["roofline_median_error"] for one in said["errors"].values()) > 9

    def quickly(gpu: GpuSpec, own: Sequence[KernelRecord]) -> Estimator:
        assert gpu == gpu_of_records("abacus-9", path)
        return Estimator(gpu, samples_of(gpu, own), rounds=ROUNDS)

    ask = EstimateAsk(
        "digits", LoaderSpec(python="deploy.local.demo.digits_model:Digits"), "abacus-9", (1, 4), path
    )
    notes: list[str] = []
    found = estimated(ask, lambda _: None, notes.append, quickly)
    assert (found.subject.gpu_type, found.subject.gpu) == ("abacus-9", NAME)
    assert f"learned from {len(records)} kernel records of your own" in notes
    assert [point.batch_size for point in found.points] == [1, 4]
