"""Kernel records: measured operators with their sizes, run times and kernels, from a CSV of one GPU.

The shipped ones are NeuSight's (`profiles/data/kernels/README.md`). A user's own file has the same columns; where `tenuto
profile --kernels` wrote it, a line before them says which GPU they are of, since the estimator may know nothing of it.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from fabric.errors import ProfileError
from profiles.estimator.gpus import GPU_SPECS, GpuSpec, gpu_spec
from profiles.estimator.work import (
    ELEMENTWISE_OPS,
    MATRIX_OPS,
    ROW_OPS,
    Work,
    convolution_work,
    elementwise_work,
    matrix_work,
)
from profiles.occupancy import WARP_THREADS, DeviceLimits

RECORDS_MAX: Final = 1_000_000
FILE_BYTES_MAX: Final = 1 << 30  # unpacked: a few bytes of gzip can say gigabytes
SIZE_MAX: Final = 1 << 31
_SHIPPED: Final = Path(__file__).resolve().parent.parent / "data" / "kernels"
TWO_OPERANDS: Final = frozenset({"add", "mul", "div", "pow"})
_GPU_LINE: Final = "# "
_GPU_LINE_MAX: Final = 4096
_COLUMNS: Final = (
    "op", "shape", "latency_ms", "kernels", "warps_per_sm", "blocks_per_sm", "grid", "block"
)  # fmt: skip
_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(MATRIX_OPS, ("B", "M", "N", "K")),
    "conv": ("B", "Input_Channel", "Output_Channel", "Input_Size"),
    **dict.fromkeys((*ELEMENTWISE_OPS, *ROW_OPS), ("B", "H")),
}
_WINDOW: Final = {"Kernel_Size": 3, "Stride": 1, "Padding": 1}


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One measured operator. `blocks` and `threads` are of its longest kernel."""

    work: Work
    latency_ms: float
    kernels: tuple[str, ...]
    blocks: int
    threads: int


@cache
def shipped_records(gpu_type: str) -> Sequence[KernelRecord]:
    """Of a GPU that has some."""
    return read_records(_SHIPPED / f"{gpu_type}.csv.gz")


def read_records(path: Path) -> Sequence[KernelRecord]:
    """Raises ProfileError naming the file and the row for anything that is no record."""
    records: list[KernelRecord] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as opened:
            for row in csv.DictReader(_lines(opened, path)):
                records.append(_record(row))
                if len(records) > RECORDS_MAX:
                    raise ProfileError(f"{path} has over {RECORDS_MAX} records")
    except OSError as error:
        raise ProfileError(f"{path} cannot be read as gzip: {error}") from error
    except (ValueError, KeyError, TypeError, EOFError, AttributeError, RecursionError, csv.Error) as error:
        raise ProfileError(f"{path}, record {len(records) + 1} is no kernel record: {error!r}") from error
    if not records:
        raise ProfileError(f"{path} has no kernel record")
    return records


def write_records(path: Path, gpu: GpuSpec, records: Iterable[KernelRecord]) -> None:
    """What `read_records` and `gpu_of_records` read."""
    with gzip.open(path, "wt", encoding="utf-8", newline="") as opened:
        opened.write(f"{_GPU_LINE}{json.dumps(asdict(gpu))}\n")
        writer = csv.writer(opened)
        writer.writerow(_COLUMNS)
        for one in records:
            blocks_per_sm = one.blocks / gpu.limits.sm_count
            shape = dict(zip(_SIZES[one.work.op], one.work.dims, strict=False))
            shape |= _WINDOW if one.work.op == "conv" else {}
            writer.writerow(
                (
                    one.work.op,
                    json.dumps(shape),
                    one.latency_ms,
                    ";".join(one.kernels),
                    blocks_per_sm * one.threads / WARP_THREADS,
                    blocks_per_sm,
                    f"{one.blocks}x1x1",
                    f"{one.threads}x1x1",
                )
            )


def gpu_of_records(gpu_type: str, path: Path | None) -> GpuSpec:
    """The GPU of that name: one that the estimator knows, or the one that the file says its records are of.

    Raises ProfileError where neither is, or where the file says that its records are of another GPU.
    """
    own = None if path is None else _gpu_line(path)
    wanted = gpu_type.lower()
    if own is None:
        return gpu_spec(wanted)
    if own.gpu_type != wanted:
        raise ProfileError(f"{path} has records of {own.gpu_type}, not of {wanted[:40]!r}")
    return GPU_SPECS.get(wanted, own)


def _gpu_line(path: Path) -> GpuSpec | None:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as opened:
            line = opened.readline(_GPU_LINE_MAX)
        return _gpu(json.loads(line.removeprefix(_GPU_LINE))) if line.startswith(_GPU_LINE) else None
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProfileError(f"{path} does not say which GPU its records are of: {error!r}") from error


def _gpu(said: Mapping[str, Any]) -> GpuSpec:
    def over_0(value: Any) -> float:
        if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
            raise ValueError(f"{value!r} is no number over 0")
        return float(value)

    return GpuSpec(
        str(said["gpu_type"]),
        str(said["name"]),
        int(over_0(said["memory_bytes"])),
        over_0(said["bandwidth_gbps"]),
        over_0(said["gflops"]),
        DeviceLimits(**{one.name: int(over_0(said["limits"][one.name])) for one in fields(DeviceLimits)}),
        copy_gbps=over_0(said["copy_gbps"]),
    )


def _lines(opened: Iterable[str], path: Path) -> Iterator[str]:
    read = 0
    for line in opened:
        if not read and line.startswith(_GPU_LINE):
            continue
        read += len(line)
        if read > FILE_BYTES_MAX:
            raise ProfileError(f"{path} unpacks to over {FILE_BYTES_MAX >> 20} MiB")
        yield line


def _record(row: Mapping[str, str]) -> KernelRecord:
    latency_ms = float(row["latency_ms"])
    if not (math.isfinite(latency_ms) and latency_ms > 0):
        raise ProfileError(f"latency_ms is {latency_ms:g}; it must be over 0")
    return KernelRecord(
        _work(row["op"], json.loads(row["shape"])),
        latency_ms,
        tuple(row["kernels"].split(";")),
        _product(row["grid"]),
        _product(row["block"]),
    )


def _work(op: str, shape: Mapping[str, object]) -> Work:
    def size(name: str) -> int:
        value = shape[name]
        if not isinstance(value, int) or not 0 < value < SIZE_MAX:
            raise ProfileError(f"{op} has {name} {value!r}; it must be a whole number over 0")
        return value

    if op in MATRIX_OPS:
        has_bias = op == "linear"
        return matrix_work(op, size("B"), size("M"), size("N"), size("K"), has_bias=has_bias)
    if op == "conv":
        if {name: size(name) for name in _WINDOW} != _WINDOW:
            raise ProfileError("records of convolutions are 3 x 3, of stride 1 and padding 1")
        return convolution_work(size("B"), size("Input_Channel"), size("Output_Channel"), size("Input_Size"))
    if op in ELEMENTWISE_OPS or op in ROW_OPS:
        return elementwise_work(op, size("B"), size("H"), 2 if op in TWO_OPERANDS else 1)
    raise ProfileError(f"there are no records of operator {op[:40]!r}")


def _product(text: str) -> int:
    product = math.prod(int(part) for part in text.split("x"))
    if product < 1:
        raise ProfileError(f"{text!r} is no launch configuration")
    return product
