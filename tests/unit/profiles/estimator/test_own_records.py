"""Records of the user's own GPU, without one: what would be measured, and what is made of a trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fabric.errors import ProfileError
from profiles.estimator.estimate import ENOUGH, samples_of
from profiles.estimator.gpus import gpu_spec
from profiles.estimator.operators import work_of
from profiles.estimator.own_records import MEMORY_SHARE, OF_EACH_CLASS, own_gpu, record_of, works_to_measure
from profiles.estimator.records import KernelRecord, shipped_records
from profiles.estimator.work import MATRIX_OPS, OPS, Work
from profiles.gpu import GIB
from profiles.occupancy import Kernel
from profiles.profilers.kernel_operators import operator_of
from profiles.profilers.operator_graph import fake_tensors, operator_graph

T4 = gpu_spec("t4")


def test_as_many_of_each_class_from_the_smallest_to_the_largest_that_fits() -> None:
    works = works_to_measure(8 * GIB)
    assert Counter(work.op for work in works) == dict.fromkeys(OPS, OF_EACH_CLASS)
    assert len(set(works)) == len(works)
    assert max(work.size_bytes for work in works) <= MEMORY_SHARE * 8 * GIB
    adds = [work for work in works if work.op == "add"]
    assert adds[0].size_bytes < 1e4
    assert adds[-1].size_bytes > 1e8
    assert works == works_to_measure(8 * GIB)
    assert max(work.size_bytes for work in works_to_measure(64 << 20)) <= 16 << 20


@pytest.mark.parametrize("op", OPS)
def test_what_runs_is_the_work_that_the_estimator_sees_in_a_model(op: str) -> None:
    wanted = next(work for work in works_to_measure(8 * GIB, 3) if work.op == op and work.dims[0] > 0)
    with fake_tensors():
        graph = operator_graph(
            lambda _: {"out": operator_of(wanted, torch.device("cpu"))()}, {"none": torch.zeros(1)}, 1
        )
    (found,) = [work for work in work_of(graph.calls) if work.basis == "recorded"]
    (piece,) = found.pieces
    assert piece.op == op
    assert piece.output_elements == wanted.output_elements
    if op in (*MATRIX_OPS, "conv", "ln", "softmax"):
        assert piece == wanted
    else:
        assert piece.size_bytes == wanted.size_bytes


def kernel(name: str, duration_ms: float, blocks: int) -> Kernel:
    return Kernel(name, 0.0, duration_ms, (blocks, 2, 1), (128, 1, 1))


def test_a_record_has_the_median_time_and_the_launch_of_its_longest_kernel() -> None:
    (work,) = {record.work for record in shipped_records("v100")[:1]}
    kernels = [kernel("void splitk<32; 16>(float*, int)", 0.1, 7), kernel("volta_sgemm_128x64_tn", 0.4, 40)]
    found = record_of(work, [0.9, 0.5, 0.6], kernels)
    assert found == KernelRecord(work, 0.6, ("splitk<32, 16>", "volta_sgemm_128x64_tn"), 80, 128)
    with pytest.raises(ProfileError, match="saw no kernel"):
        record_of(work, [0.9], [])


def records_like(works: list[Work], gflops: float, gbps: float) -> list[KernelRecord]:
    rates = replace(T4, gflops=gflops, bandwidth_gbps=gbps)
    return [KernelRecord(work, 0.01 + rates.roofline_ms(work), ("k",), 8, 128) for work in works]


@pytest.mark.parametrize(
    ("name", "gpu_type"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
    ],
)
def test_a_gpu_is_called_as_the_estimator_knows_it_or_by_its_own_name(name: str, gpu_type: str) -> None:
    records = records_like(works_to_measure(8 * GIB, 9), 20_000, 500)
    assert own_gpu(name, None, 8 * GIB, T4.limits, 12.0, records).gpu_type == gpu_type
    assert own_gpu(name, "mine", 8 * GIB, T4.limits, 12.0, records).gpu_type == "mine"


def test_peak_rates_of_an_unknown_gpu_are_what_its_records_reach() -> None:
    records = records_like(works_to_measure(8 * GIB), 20_000, 500)
    found = own_gpu("Abacus", None, 8 * GIB, T4.limits, 12.0, records)
    assert (found.memory_bytes, found.limits, found.copy_gbps, found.records) == (
        8 * GIB,
        T4.limits,
        12.0,
        None,
    )
    assert found.gflops == pytest.approx(20_000, rel=0.05)
    assert found.bandwidth_gbps == pytest.approx(500, rel=0.05)
    assert {sample.gpu for sample in samples_of(found, records)} == {found}, "nothing of another GPU"
    with pytest.raises(ProfileError, match="nothing says what it reaches"):
        own_gpu("Abacus", None, 8 * GIB, T4.limits, 12.0, [])


def test_enough_records_of_ones_own_are_not_outvoted() -> None:
    v100 = gpu_spec("v100")
    adds = [KernelRecord(work, 1.0, ("k",), 8, 128) for work in works_to_measure(8 * GIB) if work.op == "add"]
    enough, few = samples_of(v100, adds[:ENOUGH]), samples_of(v100, adds[: ENOUGH - 1])
    assert sum(sample.record.work.op == "add" for sample in enough) == ENOUGH
    assert len(few) == ENOUGH - 1 + len(shipped_records("v100"))
    assert {sample.record.work.op for sample in enough} == set(OPS)
