"""Kernel records: what is shipped is whole, what is broken is named."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fabric.errors import ProfileError
from profiles.estimator.gpus import RECORDED, gpu_spec
from profiles.estimator.launches import ELEMENTS_A_BLOCK, THREADS
from profiles.estimator.records import gpu_of_records, read_records, shipped_records, write_records
from profiles.estimator.work import ELEMENTWISE_OPS, OPS

HEADER = "op,shape,latency_ms,kernels,warps_per_sm,blocks_per_sm,grid,block"
GOOD = 'add,"{""B"":10,""H"":2016}",0.03,some_kernel,2.0,0.5,40x1x1,128x1x1'


def file_of(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "records.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


@pytest.mark.parametrize("gpu_type", RECORDED)
def test_what_is_shipped_has_every_class(gpu_type: str) -> None:
    records = shipped_records(gpu_type)
    assert len(records) > 30_000
    assert {record.work.op for record in records} == set(OPS)


@pytest.mark.parametrize("gpu_type", RECORDED)
def test_no_record_but_winograds_beats_the_roofline(gpu_type: str) -> None:
    gpu = gpu_spec(gpu_type)
    faster = [r for r in shipped_records(gpu_type) if r.latency_ms < gpu.roofline_ms(r.work)]
    assert {record.work.op for record in faster} <= {"conv"}


def test_elementwise_launches_follow_torchs_rule() -> None:
    for record in shipped_records("v100"):
        if record.work.op in ELEMENTWISE_OPS:
            assert record.blocks == -(-record.work.output_elements // ELEMENTS_A_BLOCK)
            assert record.threads == THREADS


def test_a_good_line_is_read(tmp_path: Path) -> None:
    (record,) = read_records(file_of(tmp_path, HEADER, GOOD))
    assert (record.work.op, record.work.dims, record.latency_ms) == ("add", (10, 2016, 1, 1), 0.03)
    assert (record.blocks, record.threads, record.kernels) == (40, 128, ("some_kernel",))


@pytest.mark.parametrize(
    "line",
    [
        GOOD.replace("add", "fft"),
        GOOD.replace("0.03", "0"),
        GOOD.replace("0.03", "nan"),
        GOOD.replace("0.03", "soon"),
        GOOD.replace("10", "-10", 1),
        GOOD.replace("10", "1.5", 1),
        GOOD.replace('""B"":10', '""A"":10'),
        GOOD.replace("40x1x1", "0x1x1"),
        GOOD.replace('"{""B"":10,""H"":2016}"', "[]"),
        GOOD.replace('"{""B"":10,""H"":2016}"', "[" * 9_999),
        "add",
    ],
)
def test_what_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ProfileError):
        read_records(file_of(tmp_path, HEADER, GOOD, line))


def test_a_file_that_is_no_gzip_or_empty_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    path.write_text(HEADER)
    with pytest.raises(ProfileError, match="gzip"):
        read_records(path)
    with pytest.raises(ProfileError, match="no kernel record"):
        read_records(file_of(tmp_path, HEADER))
    path.write_bytes(gzip.compress(b"\n".join([HEADER.encode(), GOOD.encode()] * 99))[:-30])
    with pytest.raises(ProfileError):
        read_records(path)


OWN = replace(gpu_spec("t4"), gpu_type="own", name="A GPU of one's own")


def test_what_is_written_is_read_again_with_its_gpu(tmp_path: Path) -> None:
    records = shipped_records("v100")[::97]
    path = tmp_path / "own.csv.gz"
    write_records(path, OWN, records)
    assert {record.work.op for record in records} == set(OPS)
    assert read_records(path) == records
    assert gpu_of_records("OWN", path) == OWN
    write_records(path, replace(OWN, gpu_type="t4"), records)
    assert gpu_of_records("t4", path) == gpu_spec("t4"), "the maker's rates rather than the file's"


def test_records_of_another_gpu_are_refused_and_a_file_that_names_none_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "own.csv.gz"
    write_records(path, OWN, shipped_records("v100")[:1])
    with pytest.raises(ProfileError, match="has records of own, not of 'v100'"):
        gpu_of_records("v100", path)
    assert gpu_of_records("v100", file_of(tmp_path, HEADER, GOOD)) == gpu_spec("v100")
    with pytest.raises(ProfileError, match="knows no GPU 'abacus'"):
        gpu_of_records("abacus", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gflops", 0),
        ("gflops", "1e400"),
        ("memory_bytes", True),
        ("limits", []),
        ("limits", {}),
        ("copy_gbps", None),
    ],
)
def test_a_gpu_that_is_none_is_named(tmp_path: Path, name: str, value: object) -> None:
    line = f"# {json.dumps({**asdict(OWN), name: value})}"
    with pytest.raises(ProfileError, match="does not say which GPU"):
        gpu_of_records("own", file_of(tmp_path, line, HEADER, GOOD))


@pytest.mark.parametrize("line", ["# {", "# []", "# 1", "# " + "[" * 9_999])
def test_a_line_that_is_no_gpu_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ProfileError, match="does not say which GPU"):
        gpu_of_records("own", file_of(tmp_path, line, HEADER, GOOD))
