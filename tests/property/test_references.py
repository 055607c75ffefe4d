"""Each discipline makes the choices that a plain reference, written from its paper, makes: event by event."""

from __future__ import annotations

import pytest

from policies.batching.baselines.squishy import homes_of, pack
from tests.references.packing import Demand, fits
from tests.references.pairs import PAIRS, kinds_of, loads_and_bins
from tests.references.playing import differences, play_ours, random_setting

SETTINGS = 50
REQUESTS = 150


@pytest.mark.parametrize("name", PAIRS)
def test_every_batch_is_the_one_that_the_paper_says(name: str) -> None:
    pair = PAIRS[name]
    for seed in range(SETTINGS):
        setting = random_setting(seed, requests=REQUESTS, classes=pair.classes)
        theirs, ours = pair.reference(setting).play(), play_ours(pair.ours(), setting)
        kinds = kinds_of(setting) if pair.has_ties else None
        assert differences(theirs, ours, kinds) == [], f"setting {seed}"


CENTRAL = [name for name, pair in PAIRS.items() if pair.is_central]


@pytest.mark.parametrize("name", [name for name in CENTRAL if PAIRS[name].classes is None])
def test_also_where_run_times_cross(name: str) -> None:
    pair = PAIRS[name]
    for seed in range(SETTINGS):
        setting = random_setting(seed, requests=REQUESTS, is_crossed=True)
        found = differences(pair.reference(setting).play(), play_ours(pair.ours(), setting))
        assert found == [], f"setting {seed}"


@pytest.mark.parametrize("name", PAIRS)
def test_also_where_requests_are_announced_before_they_are_ready(name: str) -> None:
    pair = PAIRS[name]
    for seed in range(SETTINGS):
        setting = random_setting(seed, requests=REQUESTS, classes=pair.classes, is_prepared=True)
        theirs, ours = pair.reference(setting).play(), play_ours(pair.ours(), setting)
        kinds = kinds_of(setting) if pair.has_ties else None
        assert differences(theirs, ours, kinds) == [], f"setting {seed}"


@pytest.mark.parametrize("name", CENTRAL)
def test_also_with_a_delay_of_each_models_own_in_nearly_all_settings(name: str) -> None:
    """Who has become less urgent is seen late, and what waits for one slice leaves another free one to it. So a few settings differ; half of them did where who has a longer way was overlooked."""
    pair = PAIRS[name]
    apart = []
    for seed in range(SETTINGS):
        setting = random_setting(seed, requests=REQUESTS, classes=pair.classes, has_own_delays=True)
        if differences(pair.reference(setting).play(), play_ours(pair.ours(), setting)):
            apart.append(seed)
    assert len(apart) <= SETTINGS // 8, f"settings {apart}"


ONCE_APART = {"shepherd": (222, 382, 509, 592, 667)}
"""Of 2,000 settings those that found something. Shepherd: a request that came too late itself stood before others until the
next tick, and hid them; what it had just stopped came back after others had taken the idle slices."""


@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name, seeds in ONCE_APART.items() for seed in seeds]
)
def test_settings_that_found_something_once(name: str, seed: int) -> None:
    pair = PAIRS[name]
    setting = random_setting(seed, classes=pair.classes)
    found = differences(pair.reference(setting).play(), play_ours(pair.ours(), setting), kinds_of(setting))
    assert found == []


def test_nexus_packs_what_a_plain_packing_finds_room_for() -> None:
    verdicts = []
    for seed in range(SETTINGS):
        setting = random_setting(seed, requests=1)
        slices = {gpu.name: gpu.run_ms for gpu in setting.gpus}
        demands = [
            Demand(model.name, model.slo_ms - model.delay_ms, (place + 1) / 10)
            for place, model in enumerate(setting.models)
        ]
        for factor in (0.01 * 1.5**step for step in range(12)):
            scaled = [Demand(one.model, one.slo_ms, one.rate * factor) for one in demands]
            loads, bins = loads_and_bins(setting, {one.model: one.rate for one in scaled})
            is_whole = not pack(loads, homes_of(loads, bins)).left
            assert fits(scaled, slices) is is_whole, f"setting {seed}, factor {factor}"
            verdicts.append(is_whole)
    assert 0.2 < sum(verdicts) / len(verdicts) < 0.8
