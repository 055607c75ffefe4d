"""Where profiles come from: shipped ones by their ref, measured ones from versioned JSON files.

A ref is ``family/model`` in lower case, such as ``thesis-v100/resnet50``; `profiles/data/README.md` lists
the families with their sources. Shipped files are read on first use and kept.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from fabric.errors import ProfileError
from profiles.documents import BatchSize, NotNegative, Positive, SharePercent, converted
from profiles.gpu import MIB, gpu_profile
from profiles.igniter.performance_model import (
    EstimatedIgniterProfile,
    IgniterProfile,
    read_coefficients,
    read_hardware,
)
from profiles.measured import MeasuredProfile, measured_from
from profiles.model import WHOLE_GPU_PERCENT, LinearProfile, ModelProfile, TableProfile
from profiles.requirements import Bandwidths, BandwidthTable, LinearCoefficients, Requirements, Usage

FILE_VERSION: Final = 2
OLDER_VERSION: Final = 1  # run times and memory alone; still read


def shipped_profile(ref: str) -> ModelProfile:
    """The shipped profile of that ref; ProfileError with the closest ones where there is none."""
    family, _, model = ref.lower().partition("/")
    profiles = _family(family) if family in _FAMILIES else {}
    profile = profiles.get(model)
    if profile is not None:
        return profile
    close = difflib.get_close_matches(ref.lower(), shipped_refs(), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else f"families: {', '.join(_FAMILIES)}"
    raise ProfileError(f"there is no shipped profile {ref[:60]!r}; {hint}")


def shipped_refs() -> tuple[str, ...]:
    """Every ref that `shipped_profile` knows."""
    return tuple(_ref(family, model) for family in _FAMILIES for model in _family(family))


@cache
def shipped_data(name: str) -> Mapping[str, Any]:
    """A shipped JSON file as it is, such as ``symphony_profiles``; not to be changed by the caller."""
    text = files("profiles").joinpath("data", f"{name}.json").read_text(encoding="utf-8")
    document: Mapping[str, Any] = json.loads(text)
    return document


@cache
def _family(family: str) -> Mapping[str, ModelProfile]:
    return _FAMILIES[family](family)


def _ref(family: str, model: str) -> str:
    return f"{family}/{model}"


def _thesis(family: str) -> dict[str, TableProfile]:
    """Table A.1: batches 4 … 128 on the whole GPU; sizes that ran out of memory are absent."""
    data = shipped_data("thesis_table_a1_v100")
    gpu_bytes = gpu_profile("v100").memory_bytes
    source = (
        f"{data['source']} {data['gpu']}. Run times: batch / printed throughput, which has more digits than the "
        "printed latency. Batches below 4 were not measured: padded to 4."
    )
    latency: dict[str, dict[int, float]] = {}
    memory: dict[str, dict[int, float]] = {}
    needs: dict[str, dict[int, Requirements]] = {}
    for row in data["rows"]:
        model, batch_size = row["model"], row["batch"]
        latency.setdefault(model, {})[batch_size] = _thesis_ms(row)
        if row["mem_pct"] is not None:  # one cell is unreadable; its neighbours are joined by a line
            memory.setdefault(model, {})[batch_size] = row["mem_pct"] / 100 * gpu_bytes
        needs.setdefault(model, {})[batch_size] = Requirements(
            row["ach_occ_pct"], row["wavg_ach_occ_pct"], row["wavg_sm_util_pct"], row["mem_pct"]
        )
    return {
        model: TableProfile(
            {WHOLE_GPU_PERCENT: column},
            source=source,
            memory_by_batch=memory[model],
            is_padded=True,
            usage=Usage(needs[model]),
            ref=_ref(family, model),
        )
        for model, column in latency.items()
    }


def _thesis_ms(row: Mapping[str, Any]) -> float:
    """Batch over throughput, inside what the printed latency leaves open.

    Latencies are printed to 0.1 ms and throughputs to 0.01 a second, so the second says more of all but the slowest
    rows: alexnet 4 took 4 / 2801.75 s = 1.4277 ms and is printed as 0.0014 s. The thesis' goodputs are sums of
    these throughputs.
    """
    printed_ms = 1000 * row["latency_s"]
    measured_ms = 1000 * row["batch"] / row["throughput_rps"]
    return float(min(max(measured_ms, printed_ms - 0.05), printed_ms + 0.05))


def _igniter(family: str, data: Mapping[str, Any], source: str) -> dict[str, ModelProfile]:
    hardware = read_hardware(data["hardware"])
    return {
        model: IgniterProfile(hardware, read_coefficients(entry), source, _ref(family, model))
        for model, entry in data["workload_coefficients"].items()
    }


def _igniter_v100(family: str) -> dict[str, ModelProfile]:
    data = shipped_data("igniter_v100")
    return _igniter(family, data, f"{data['source']}; {data['gpu']}")


def _thesis_estimate(family: str) -> dict[str, ModelProfile]:
    """Table A.1 with estimated iGniter coefficients, which is how iGniter takes part in the thesis' settings."""
    data = shipped_data("thesis_igniter_estimate_v100")
    hardware = read_hardware(shipped_data("igniter_v100")["hardware"])
    measured = _thesis("thesis-v100")
    return {
        model: EstimatedIgniterProfile(
            hardware,
            read_coefficients(entry),
            f"{data['source']}. {data['warning']} Run times: {measured[model].source}",
            measured[model],
            _ref(family, model),
        )
        for model, entry in data["workload_coefficients"].items()
    }


def _igniter_t4(family: str) -> dict[str, ModelProfile]:
    data = shipped_data("igniter_t4")
    return _igniter(family, data["synthetic_estimate"], f"SYNTHETIC, not measured. {data['warning']}")


def _gpulet_2080ti(family: str) -> dict[str, ModelProfile]:
    data = shipped_data("gpulet_2080ti")
    source = f"SYNTHETIC, not measured: {data['latency_ms_synthetic_note']}. {data['source']}"
    used = data["util_2080ti"] | {"lenet1": data["util_2080ti"]["lenet"]}  # the repository's two names for it
    constants = data["interference"]["constants_2080ti"]
    linear = LinearCoefficients(
        constants["c1_l2_self"],
        constants["c2_l2_other"],
        constants["c3_dram_self"],
        constants["c4_dram_other"],
        constants["c5_const"],
        is_scaled_by_share=True,
    )
    return {
        model: TableProfile(
            _by_share(column, data["partition_sizes_pct"]),
            source=source,
            memory_by_batch={1: data["models"][model]["mem_mb"] * MIB},
            usage=Usage(
                bandwidths=_gpulet_bandwidths(used[model], linear),
                batching_overhead_ms=_gpulet_overhead_ms(data["batching_overhead_ms"], model),
            ),
            ref=_ref(family, model),
        )
        for model, column in data["latency_ms_synthetic"].items()
    }


def _gpulet_overhead_ms(given: Mapping[str, Any], model: str) -> tuple[float, ...]:
    """Measured by input size; the authors' code takes a multiple of it or adds a constant, by model."""
    if model == "bert":
        return (given["constant_ms"]["bert"],) * len(given["input_224"])
    if model == "lenet1":
        return tuple(ms + given["constant_ms"]["lenet"] for ms in given["input_28"])
    if model == "ssd-mobilenetv1":
        return tuple(ms * given["multiplier"]["ssd-mobilenetv1"] for ms in given["input_300"])
    return tuple(ms * given["multiplier"]["224 models"] for ms in given["input_224"])


def _gpulet_bandwidths(rows: Mapping[str, Mapping[str, float]], linear: LinearCoefficients) -> BandwidthTable:
    """Measured on the whole GPU; the authors' code looks at powers of two only, up to 32."""
    column = {
        batch_size: Bandwidths(rows[str(batch_size)]["l2_util_pct"], rows[str(batch_size)]["dram_util_pct"])
        for batch_size in (1, 2, 4, 8, 16, 32)
    }
    return BandwidthTable({WHOLE_GPU_PERCENT: column}, linear)


def _gpulet_v100(family: str) -> dict[str, ModelProfile]:
    """Measured at gpulet's partition sizes below 100 %; the 100 % column is the file's interpolation."""
    data = shipped_data("igniter_gpulet_profiles_v100")
    source = f"{data['source']}. At 100 %: {data['latency_ms_p100_note']}"
    l2_self, l2_other, dram_self, dram_other, added = data["linear_interference_fit"]["coefficients"]
    linear = LinearCoefficients(  # fitted to utilisations in percent, as what is added to 1
        100 * l2_self, 100 * l2_other, 100 * dram_self, 100 * dram_other, 1 + added, is_scaled_by_share=False
    )
    profiles: dict[str, ModelProfile] = {}
    for model, entries in data["latency_ms"].items():
        columns = _by_share(entries, [20, 40, 50, 60, 80])
        whole = data["latency_ms_p100_interpolated"][model]
        columns[WHOLE_GPU_PERCENT] = {int(batch_size): exec_ms for batch_size, exec_ms in whole.items()}
        dram = data["dram_util_pct"][model]
        bandwidths: dict[float, dict[int, Bandwidths]] = {}
        for batch_size, by_share in data["l2_util_pct"][model].items():
            for share, l2_percent in by_share.items():
                used = Bandwidths(l2_percent, dram[batch_size][share])
                bandwidths.setdefault(float(share), {})[int(batch_size)] = used
        profiles[model] = TableProfile(
            columns,
            source=source,
            usage=Usage(bandwidths=BandwidthTable(bandwidths, linear)),
            ref=_ref(family, model),
        )
    return profiles


def _symphony(family: str, table: str) -> dict[str, ModelProfile]:
    data = shipped_data("symphony_profiles")
    return {
        row["name"].lower(): LinearProfile(
            row["alpha_ms"],
            row["beta_ms"],
            source=f"{data['source']} ({table})",
            ref=_ref(family, row["name"].lower()),
        )
        for row in data[table]
    }


_FAMILIES: Final[Mapping[str, Callable[[str], Mapping[str, ModelProfile]]]] = {
    "thesis-v100": _thesis,
    "thesis-v100-estimate": _thesis_estimate,
    "igniter-v100": _igniter_v100,
    "igniter-t4": _igniter_t4,
    "gpulet-2080ti": _gpulet_2080ti,
    "gpulet-v100": _gpulet_v100,
    "symphony-a100": lambda family: _symphony(family, "a100"),
    "symphony-1080ti": lambda family: _symphony(family, "gtx1080ti"),
}


def _by_share(entries: Mapping[str, Mapping[str, float]], shares: list[int]) -> dict[float, dict[int, float]]:
    """The shipped files' {batch: {share: ms}} by share first; four decimals, as the files ask for."""
    return {
        float(share): {int(batch): round(row[str(share)], 4) for batch, row in entries.items()}
        for share in shares
    }


# ---------------------------------------------------------------- profiles that were measured here


def write_measured(path: Path, measured: MeasuredProfile) -> None:
    """Write everything a profiler saw as versioned JSON, whole or not at all."""
    _write(path, {"version": FILE_VERSION, **measured.document()})


def read_measured(path: Path) -> MeasuredProfile:
    """Read what `write_measured` wrote; ProfileError naming the file for anything else."""
    with _named(path):
        document, version = _versioned(path)
        if version != FILE_VERSION:
            raise ProfileError(
                f"has profile version {version}; everything that was seen is in version {FILE_VERSION}"
            )
        return measured_from(document)


def read_profile(path: Path) -> ModelProfile:
    """The profile in a file of any version; ProfileError naming the file for anything else."""
    with _named(path):
        document, version = _versioned(path)
        if version == FILE_VERSION:
            return measured_from(document).profile()
        if version != OLDER_VERSION:
            raise ProfileError(
                f"has profile version {version}; this Tenuto reads {OLDER_VERSION} and {FILE_VERSION}"
            )
        older = converted(document, _OlderProfile)
        return TableProfile(
            older.exec_ms,
            source=f"{older.source} ({path.name})",
            memory_by_batch=older.memory_bytes,
        )


class _Versioned(Struct, frozen=True):
    version: int


class _OlderProfile(Struct, frozen=True):
    """A file of `OLDER_VERSION`."""

    source: str
    exec_ms: Mapping[SharePercent, Mapping[BatchSize, Positive]]
    memory_bytes: Mapping[BatchSize, NotNegative]


def _versioned(path: Path) -> tuple[Mapping[str, Any], int]:
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document, converted(document, _Versioned).version


def _write(path: Path, document: Mapping[str, Any]) -> None:
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file is a ProfileError with its name."""
    try:
        yield
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from error
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ProfileError(f"{path} is not a profile: {error}") from error
