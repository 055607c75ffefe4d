"""Kernel records: measured operators with their sizes, run times and kernels, from a CSV of one GPU.

The shipped ones are NeuSight's (`profiles/data/kernels/README.md`). A user's own file has the same columns.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fabric.errors import ProfileError
from profiles.estimator.work import (
    ELEMENTWISE_OPS,
    MATRIX_OPS,
    ROW_OPS,
    Work,
    convolution_work,
    elementwise_work,
    matrix_work,
)

RECORDS_MAX: Final = 1_000_000
FILE_BYTES_MAX: Final = 1 << 30  # unpacked: a few bytes of gzip can say gigabytes
SIZE_MAX: Final = 1 << 31
_SHIPPED: Final = Path(__file__).resolve().parent.parent / "data" / "kernels"
_TWO_OPERANDS: Final = frozenset({"add", "mul", "div", "pow"})


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
    except (ValueError, KeyError, TypeError, EOFError, AttributeError, csv.Error) as error:
        raise ProfileError(f"{path}, record {len(records) + 1} is no kernel record: {error!r}") from error
    if not records:
        raise ProfileError(f"{path} has no kernel record")
    return records


def _lines(opened: Iterable[str], path: Path) -> Iterator[str]:
    read = 0
    for line in opened:
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
        if (size("Kernel_Size"), size("Stride"), size("Padding")) != (3, 1, 1):
            raise ProfileError("records of convolutions are 3 x 3, of stride 1 and padding 1")
        return convolution_work(size("B"), size("Input_Channel"), size("Output_Channel"), size("Input_Size"))
    if op in ELEMENTWISE_OPS or op in ROW_OPS:
        return elementwise_work(op, size("B"), size("H"), 2 if op in _TWO_OPERANDS else 1)
    raise ProfileError(f"there are no records of operator {op[:40]!r}")


def _product(text: str) -> int:
    product = math.prod(int(part) for part in text.split("x"))
    if product < 1:
        raise ProfileError(f"{text!r} is no launch configuration")
    return product
