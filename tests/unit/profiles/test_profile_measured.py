"""A measured profile: written, read, and used where a configuration names its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from fabric.errors import ConfigError, ProfileError
from profiles.igniter.performance_model import EstimatedIgniterProfile
from profiles.measured import KernelRow, MeasuredProfile, Point, Subject
from profiles.model import TableProfile
from profiles.profilers.plan import ShareRuns, percentile, powers_of_two, runs_of
from profiles.requirements import Requirements
from profiles.store import read_measured, read_profile, shipped_data, write_measured
from roles.config.read_config import parse_config

SUBJECT = Subject(
    "resnet50", "ab" * 32, "cuda", "v100", "Tesla V100", "550.54", "2.11", "2026-11-21", ("no L2 counters",)
)
KERNEL = KernelRow("gemm", 3, 0.5, (160, 1, 1), (256, 1, 1), 64, 1024, 23.5, 50.0)


def point(share: float, batch_size: int, p50_ms: float) -> Point:
    return Point(share, batch_size, p50_ms, p50_ms * 1.1, p50_ms * 1.2, 40, batch_size << 20, 150.0, 1530.0)


def measured(igniter: bool = False) -> MeasuredProfile:
    raw = shipped_data("igniter_v100")
    sections = {"hardware": raw["hardware"], "coefficients": raw["workload_coefficients"]["resnet50"]}
    return MeasuredProfile(
        SUBJECT,
        [
            point(100, 1, 3.0),
            point(100, 2, 2.5),
            point(100, 4, 5.0),
            point(50, 1, 5.0),
            point(50, 2, 6.0),
            point(50, 4, 9.0),
        ],
        602_112,
        4_000,
        {4: Requirements(80.0, 20.0, 40.0, 2.0)},
        {4: [KERNEL]},
        sections if igniter else None,
    )


@pytest.mark.parametrize("igniter", [False, True])
def test_what_was_seen_is_read_as_it_was_written(tmp_path: Path, igniter: bool) -> None:
    path = tmp_path / "m.json"
    write_measured(path, measured(igniter))
    assert read_measured(path) == measured(igniter)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.json"]


def test_run_times_are_the_medians_by_share_and_never_fall() -> None:
    profile = measured().profile()
    assert isinstance(profile, TableProfile)
    assert profile.columns == {100.0: {1: 3.0, 2: 3.0, 4: 5.0}, 50.0: {1: 5.0, 2: 6.0, 4: 9.0}}
    assert profile.exec_ms(3) == 4.0  # between 3 and 5
    assert profile.exec_ms(1, 75) == 4.0  # between 3 and 5
    assert profile.memory_bytes(4) == 4 << 20
    assert profile.requirements[4].weighted_sm_percent == 40.0
    assert "measured 2026-11-21 on Tesla V100: resnet50 abababababab" in profile.source


def test_coefficients_make_it_igniters() -> None:
    profile = measured(igniter=True).profile()
    assert isinstance(profile, EstimatedIgniterProfile)
    assert profile.exec_ms(4, 50) == 9.0  # run times stay those that were measured
    assert profile.coefficients.kernels == 80
    assert profile.requirements[4].memory_percent == 2.0


def test_a_configuration_names_the_file_and_plans_with_it(tmp_path: Path) -> None:
    write_measured(tmp_path / "m.json", measured(igniter=True))
    model = {"name": "resnet50", "slo_ms": 40, "rate_rps": 100, "profile": {"ref": "m.json"}}
    document = {"models": [model], "cluster": {"gpus": 1, "gpu_type": "v100"}, "placement": "igniter"}
    placement = parse_config(document, tmp_path).place()
    (slice_,) = placement.slices
    assert [planned.model_id for planned in slice_.models] == ["resnet50"]
    with pytest.raises(ConfigError, match=r"gone\.json cannot be read"):
        parse_config({**document, "models": [{**model, "profile": {"ref": "gone.json"}}]}, tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [
        {"points": []},
        {"points": [{"batch": 1}]},
        {"subject": {"model": "x"}},
        {"requirements": {"four": {}}},
        {"kernels": {"4": [{}]}},
        {"igniter": {"hardware": {}}},
    ],
)
def test_a_spoiled_file_is_named(tmp_path: Path, spoil: dict[str, object]) -> None:
    path = tmp_path / "m.json"
    write_measured(path, measured())
    path.write_text(json.dumps(json.loads(path.read_text()) | spoil))
    with pytest.raises(ProfileError):
        read_profile(path)


def test_a_file_of_the_first_version_has_no_more_than_run_times(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"version": 1, "source": "", "memory_bytes": {"1": 0}, "exec_ms": {"100": {"1": 3}}}')
    assert read_profile(path).exec_ms(1) == 3
    with pytest.raises(ProfileError, match="is in version 2"):
        read_measured(path)


def test_a_larger_share_that_was_slower_stays_what_was_measured() -> None:
    slower = replace(measured(), points=[point(100, 1, 6.0), point(50, 1, 5.0)])
    assert slower.profile().exec_ms(1, 100) == 6.0


# ---------------------------------------------------------------- what to measure


def test_every_share_is_a_process_with_the_same_batches_and_the_whole_gpu_is_traced() -> None:
    assert runs_of([4, 2], [50]) == [ShareRuns(100, (1, 2, 4), (1, 2, 4)), ShareRuns(50, (1, 2, 4), ())]


def test_igniter_adds_its_configurations() -> None:
    runs = runs_of([4], [], for_igniter=True)
    assert [run.share_percent for run in runs] == [100, 50, 10]
    assert {run.batch_sizes for run in runs} == {(1, 4, 16, 32)}


@pytest.mark.parametrize(("sizes", "shares"), [([], []), ([0], []), ([1], [0]), ([1], [101]), ([70_000], [])])
def test_what_cannot_be_measured_is_refused(sizes: list[int], shares: list[float]) -> None:
    with pytest.raises(ProfileError):
        runs_of(sizes, shares)


def test_percentiles_are_values_that_were_seen() -> None:
    """Nearest rank: of ten values the 95th and 99th percent are the tenth, the 50th the fifth."""
    values = [float(value) for value in range(10, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 50, 95, 99)] == [1, 5, 10, 10]
    with pytest.raises(ProfileError):
        percentile([], 50)
    assert powers_of_two(6) == [1, 2, 4, 6]
