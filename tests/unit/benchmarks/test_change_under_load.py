from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.change_under_load import Change, found_in, section
from benchmarks.steady_load import Fate

EMULATED = Namespace(
    device="emulated", model="resnet50", batch_max=8, slo_ms=1_000.0, rate=300.0, quiet=2.0, batching="eager"
)
REAL = Namespace(**{**vars(EMULATED), "device": "cpu"})
# Each is watched from a second before it to three seconds after it.
CHANGES = [Change("add", 2_000.0, 4_000.0), Change("remove", 8_000.0, 9_000.0)]


def fates() -> list[Fate]:
    """One every 10 ms: 10 ms each, 15 ms while the model is added, 11 ms while it is removed."""

    def latency_ms(at_ms: float) -> float:
        if 2_000 <= at_ms < 5_000:
            return 15.0
        return 11.0 if 8_000 <= at_ms < 10_000 else 10.0

    return [Fate(at_ms, 0.0, latency_ms(at_ms), "ok") for at_ms in map(float, range(0, 13_000, 10))]


def test_adding_and_removing_are_held_to_the_time_before_each_for_itself() -> None:
    figures = found_in(fates(), CHANGES, EMULATED)
    assert [(line.what, line.measured, line.is_held) for line in figures.lines] == [
        ("p99 while a model is added, of that before", pytest.approx(1.5), False),
        ("p99 while it is removed, of that before", pytest.approx(1.1), True),
        ("refused of 1300 requests", 0, True),
    ]
    assert [(row[0], row[1]) for row in figures.tables[0].rows] == [
        ("before", 2),
        ("while a model is added", 3),
        ("while it is removed", 2),
        ("after", 4),
    ]
    assert figures.device == ""


def test_a_real_device_is_named_and_its_models_are_loaded() -> None:
    assert found_in(fates(), CHANGES, REAL).device.startswith("cpu, torch ")
    assert section("one", 5.0, REAL)["loader"] == {"zoo": "torchvision", "arch": "resnet50"}
    assert section("one", 5.0, REAL)["profile"]["max_batch"] == 8
    assert "loader" not in section("one", 5.0, EMULATED)
