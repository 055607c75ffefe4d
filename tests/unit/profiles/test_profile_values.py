"""Profile files are checked as they are read: a value that cannot be is refused there, by its name."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from fabric.errors import ProfileError
from profiles.igniter.performance_model import read_coefficients, read_hardware
from profiles.model import ModelProfile
from profiles.store import read_measured, read_profile, shipped_data, shipped_profile, shipped_refs

RAW = shipped_data("igniter_v100")
HARDWARE = {name: value for name, value in RAW["hardware"].items() if isinstance(value, float | int)}
ACTIVE = ("k1_ms_pct", "k2_ms_pct", "k3_ms_pct", "k4_pct", "k5_ms")
NEEDS = {
    "achieved_occupancy_percent": 80.0,
    "weighted_occupancy_percent": 20.0,
    "weighted_sm_percent": 40.0,
    "memory_percent": None,
}
KERNEL = {
    "name": "gemm",
    "launches": 3,
    "duration_ms": 0.5,
    "grid": [160, 1, 1],
    "block": [256, 1, 1],
    "registers_per_thread": 64,
    "shared_bytes": 1024,
    "occupancy_percent": 23.5,
    "sm_percent": 50.0,
}
VALID: dict[str, Any] = {
    "version": 2,
    "subject": {"model": "m", "model_hash": "h", "device": "cuda", "gpu_type": "v100", "notes": ["none"]},
    "points": [
        {
            "share_percent": 100.0,
            "batch_size": size,
            "p50_ms": 1.0 + size,
            "p95_ms": 2.0 + size,
            "p99_ms": 3.0 + size,
            "runs": 5,
            "memory_bytes": 1000 * size,
            "power_w": 100.0,
            "frequency_mhz": None,
            "low_ms": 1.0,
            "high_ms": 9.0,
        }
        for size in (1, 4)
    ],
    "load_bytes": 10,
    "feedback_bytes": 10,
    "requirements": {"4": NEEDS},
    "kernels": {"4": [KERNEL]},
    "igniter": {"hardware": HARDWARE, "coefficients": RAW["workload_coefficients"]["resnet50"]},
    "stages_ms": {"2": [1.0, 1.5]},
}
OLDER: dict[str, Any] = {
    "version": 1,
    "source": "measured",
    "exec_ms": {"50": {"1": 2.0, "8": 9.25}, "100": {"1": 1.0, "8": 5.0}},
    "memory_bytes": {"1": 10, "8": 80},
}


def places(document: Any) -> Iterator[tuple[str | int, ...]]:
    """The way to every value in a document."""
    yield ()
    entries = document.items() if isinstance(document, dict) else ()
    for step, inner in enumerate(document) if isinstance(document, list) else entries:
        yield from ((step, *way) for way in places(inner))


def changed(document: Any, way: tuple[str | int, ...], value: Any) -> Any:
    """A copy with another value there."""
    if not way:
        return value
    result = copy.deepcopy(document)
    inner = result
    for step in way[:-1]:
        inner = inner[step]
    inner[way[-1]] = value
    return result


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "value", "said"),
    [
        (("points", 1, "batch_size"), 2.5, "points[1].batch_size is 2.5; it must be a whole number"),
        (("points", 1, "batch_size"), 4.0, "points[1].batch_size is 4.0; it must be a whole number"),
        (("points", 0, "memory_bytes"), math.inf, "points[0].memory_bytes is inf; it must be a whole number"),
        (("points", 0, "memory_bytes"), -5, "points[0].memory_bytes is -5; it must be a whole number >= 0"),
        (("points", 0, "p50_ms"), 0, "points[0].p50_ms is 0; it must be a number >= 1e-09"),
        (("points", 0, "p50_ms"), math.nan, "points[0].p50_ms is nan; it must be a number >= 1e-09"),
        (("points", 0, "low_ms"), math.inf, "points[0].low_ms is inf; it must be a number <= 9007"),
        (("points", 0, "share_percent"), 101, "points[0].share_percent is 101; it must be a number <= 100"),
        (("load_bytes",), math.inf, "load_bytes is inf; it must be a whole number"),
        (("load_bytes",), 10**400, "load_bytes is "),
        (
            ("requirements", "4", "weighted_sm_percent"),
            "x",
            "requirements[4].weighted_sm_percent is 'x'; it must be a number or null",
        ),
        (("requirements", "four"), {}, "requirements has the key 'four'; it must be a whole number"),
        (("kernels", "4", 0, "grid"), [1], "kernels[4][0].grid is [1]; it must be a list of length 3"),
        (("subject", "model_hash"), 5, "subject.model_hash is 5; it must be text"),
        (("points", 0, "p51_ms"), 5, "`p51_ms` is none of its fields"),
        (("stages_ms", "2"), [1, 0], "stages_ms[2][1] is 0; it must be a number >= 1e-09"),
        (("igniter", "hardware", "B_pcie_bytes_per_ms"), 0, "B_pcie_bytes_per_ms is 0; it must be a number"),
        (("igniter", "coefficients"), {}, "d_load_bytes is None; it must be a number"),
        (("igniter",), {}, "igniter has no 'hardware'; it must have hardware and coefficients"),
        (("points",), [], "points is empty"),
        (("version",), "2", "version is '2'; it must be a whole number"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name(
    tmp_path: Path, way: tuple[str | int, ...], value: Any, said: str
) -> None:
    assert said in refused(tmp_path, json.dumps(changed(VALID, way, value)))


@pytest.mark.parametrize(
    ("way", "value", "said"),
    [
        (("memory_bytes", "8"), -1, "memory_bytes[8] is -1; it must be a number >= 0"),
        (("exec_ms", "50", "1"), math.inf, "exec_ms[50]"),
        (("exec_ms", "x"), {}, "exec_ms has the key 'x'; it must be a number"),
        (("memory_bytes", "0"), 1, "memory_bytes has the key '0'; it must be a whole number >= 1"),
    ],
)
def test_so_it_is_in_a_file_of_the_first_version(
    tmp_path: Path, way: tuple[str | int, ...], value: Any, said: str
) -> None:
    assert said in refused(tmp_path, json.dumps(changed(OLDER, way, value)))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "3", "", '{"version": 2', '{"version": 1' + "0" * 5000 + "}"]
)
def test_what_is_no_profile_at_all_is_refused(tmp_path: Path, text: str) -> None:
    refused(tmp_path, text)


def test_requirements_of_a_batch_that_has_no_run_time_are_left_out(tmp_path: Path) -> None:
    """As where a smaller share had no memory for it: placements ask for the run time of each of them."""
    path = tmp_path / "m.json"
    path.write_text(json.dumps(changed(VALID, ("requirements", "8"), NEEDS)))
    assert list(read_profile(path).requirements) == [4]
    assert sorted(read_measured(path).requirements) == [4, 8]


ODD: list[Any] = [None, True, 0, -1, 2.5, 4.0, 5e-324, 1e308, math.inf, math.nan, 10**400, "x", [], {}]
values = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


@pytest.mark.parametrize("document", [VALID, OLDER], ids=["version 2", "version 1"])
@settings(max_examples=10)
@given(drawn=values)
@example(drawn=math.inf)
@example(drawn=-1)
@example(drawn=0)
@example(drawn=5e-324)
@example(drawn=2.5)
@example(drawn="x")
def test_any_value_anywhere_is_a_profile_of_good_numbers_or_refused(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any], drawn: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    for way in places(document):
        path.write_text(json.dumps(changed(document, way, drawn)))
        try:
            profile = read_profile(path)
        except ProfileError:
            continue
        check_numbers(profile)


def check_numbers(profile: ModelProfile) -> None:
    cuts = (1, *profile.cuts)
    assert all(0 < ms < math.inf for cut in cuts for stage in profile.stage_tables(cut) for ms in stage)
    assert all(profile.memory_bytes(size) >= 0 for size in (1, 2, profile.batch_size_max))
    assert profile.error is None or 0 <= profile.error < math.inf
    for size, needs in profile.requirements.items():
        assert profile.exec_ms(size) > 0
        assert all(percent is None or 0 <= percent < math.inf for percent in astuple(needs))


def test_every_shipped_file_is_read_to_the_values_that_it_holds() -> None:
    names = [one.name for one in files("profiles").joinpath("data").iterdir() if one.name.endswith(".json")]
    for name in names:
        raw = shipped_data(name.removesuffix(".json"))
        if "workload_coefficients" not in raw:
            continue
        for entry in raw["workload_coefficients"].values():
            found = read_coefficients(entry)
            assert (found.load_bytes, found.kernels) == (entry["d_load_bytes"], entry["n_k"])
            assert found.active == tuple(entry[name] for name in ACTIVE)
    assert read_hardware(RAW["hardware"]).frequency_mhz_per_w == RAW["hardware"]["alpha_f_mhz_per_w"]
    assert all(shipped_profile(ref).exec_ms(1) > 0 for ref in shipped_refs())
