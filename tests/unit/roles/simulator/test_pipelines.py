"""Pipelines in the fast simulation: golden runs by hand, and what holds in every run."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import ConfigError
from policies.batching.registry import DISCIPLINES
from roles.config.read_config import parse_config
from roles.simulator.simulation import SimulatedRun, simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import ROUNDING_MS, Window

STAGES = {2: [10, 10], 3: [4, 12, 6]}


def document(tmp_path: Path, gpus: int, at_ms: list[float] | None, **keys: Any) -> dict[str, Any]:
    """Model `m` cut over the first `gpus` of four GPUs; its requests come at these moments, or 120 a second at random."""
    trace = tmp_path / "trace.csv"
    times_ms = [*(at_ms or ()), 1e6]  # and none for so long, as a trace repeats
    trace.write_text("at_ms\n" + "".join(f"{one}\n" for one in times_ms))
    asked: dict[str, Any] = (
        {"arrival": {"process": "trace", "path": str(trace)}} if at_ms else {"rate_rps": 120}
    )
    size_max = keys.pop("size_max", 1)
    table = {1: 19} if size_max == 1 else {1: 19, size_max: 30}
    model: dict[str, Any] = {"name": "m", "slo_ms": 100, "profile": {"table": table, "stages": STAGES}}
    sliced = {"gpu": 0, "following": list(range(1, gpus)), "models": [{"model": "m", "batch": size_max}]}
    return {
        "models": [model | asked],
        "cluster": {"gpus": 4},
        "batching": "eager",
        "placement": {"given": {"slices": [sliced]}},
        **keys,
    }


def played(written: dict[str, Any], until_ms: float = 200.0) -> SimulatedRun:
    config = parse_config(written, Path())
    return simulate(config, workload_of(config), Window(0.0, until_ms))


def ends_ms(run: SimulatedRun) -> list[float]:
    ends: list[float] = run.traffic[0].finished_at_ms.tolist()
    return ends


def test_stages_run_different_batches_at_once(tmp_path: Path) -> None:
    run = played(document(tmp_path, 2, [0, 0, 0]))
    assert ends_ms(run) == pytest.approx([20.0, 30.0, 40.0])
    assert run.batches[1].stages == ((0, 10.0, 20.0), (1, 20.0, 30.0))


def test_the_slowest_stage_sets_the_pace(tmp_path: Path) -> None:
    run = played(document(tmp_path, 3, [0, 0, 0, 50]))
    assert ends_ms(run) == pytest.approx(
        [22.0, 34.0, 46.0, 72.0]
    )  # one every 12 ms; the last one finds it empty
    # A batch is sent when its slowest stage will have room, so it waits nowhere in between.
    assert run.batches[1].stages == ((0, 12.0, 16.0), (1, 16.0, 28.0), (2, 28.0, 34.0))


def test_each_gpu_is_busy_for_its_own_stage(tmp_path: Path) -> None:
    run = played(document(tmp_path, 3, [0, 0, 0, 50]))
    assert run.outcome.gpus.busy_fraction == pytest.approx((4 * 4 / 200, 4 * 12 / 200, 4 * 6 / 200, 0.0))
    assert run.outcome.gpus.used == 3
    assert run.outcome.gpus_of("m") == pytest.approx(4 * (4 + 12 + 6) / 200)


def test_what_cannot_get_through_in_time_is_given_up_before_it_starts(tmp_path: Path) -> None:
    run = played(document(tmp_path, 2, [0.0] * 20))
    ended = [one for one in run.traffic[0].finished_at_ms.tolist() if not math.isnan(one)]
    assert ended == pytest.approx([20.0 + 10.0 * k for k in range(9)])  # the ninth ends just in time, at 100
    assert run.outcome.fates["m"].late == 0


@pytest.mark.parametrize("size_max", [1, 8])
@pytest.mark.parametrize("name", sorted(DISCIPLINES))
def test_a_stage_has_one_batch_at_a_time_in_their_order_and_every_request_one_fate(
    tmp_path: Path, name: str, size_max: int
) -> None:
    options = {"timeout": {"timeout_ms": 5}, "fixed": {"max_wait_ms": 10}}
    batching = {name: options[name]} if name in options else name
    written = document(tmp_path, 3, None, size_max=size_max, batching=batching)
    run = played(written, 5_000.0)
    outcome = run.outcome.fates["m"]
    assert outcome.offered == outcome.good + outcome.late + outcome.dropped > 500
    assert outcome.good > 0.5 * 5 * 1000 / 12  # it keeps most of its stages' pace whoever rules it
    spans = defaultdict(list)
    for batch in run.batches:
        ends = [end for _, _, end in batch.stages]
        assert all(
            start >= end - ROUNDING_MS for (_, start, _), end in zip(batch.stages[1:], ends, strict=False)
        )
        for gpu, start, end in batch.stages:
            spans[gpu].append((start, end))
    for own in spans.values():
        assert own == sorted(own), "batches do not overtake each other"
        assert all(after[0] >= before[1] - ROUNDING_MS for before, after in pairwise(own))


def test_the_default_discipline_gets_nearly_the_pace_of_the_slowest_stage(tmp_path: Path) -> None:
    """It counts a pipeline as the several batches that it runs at once: as one slice it would refuse half of them."""
    run = played(document(tmp_path, 3, None, batching="tenuto"), 20_000.0)
    assert run.outcome.good / 20 > 0.97 * 1000 / 12


@pytest.mark.parametrize(
    ("sliced", "said"),
    [
        ({"gpu": 0, "following": [1, 2, 3]}, "no cut into 4 stages"),
        ({"gpu": 0, "following": [9]}, "following is 9; GPUs are numbered 0 to 3"),
        ({"gpu": 0, "following": [0]}, "each stage needs a GPU of its own"),
        ({"gpu": 0, "following": [1], "share_percent": 50}, "a stage has its whole GPU"),
        ({"gpu": 0, "following": "1"}, "must list the GPUs of the other stages"),
    ],
)
def test_a_pipeline_that_cannot_be_is_one_clear_error(
    tmp_path: Path, sliced: dict[str, Any], said: str
) -> None:
    written = document(tmp_path, 2, [0.0])
    written["placement"] = {"given": {"slices": [{**sliced, "models": [{"model": "m"}]}]}}
    if "no cut" in said:  # of one model: it is left out, and the others are served
        assert said in next(iter(played(written).unplaced.values()))
        return
    with pytest.raises(ConfigError, match=said):
        played(written)


def test_a_pipeline_over_two_hosts_is_refused(tmp_path: Path) -> None:
    written = document(tmp_path, 2, [0.0], cluster={"nodes": [{"host": "a"}, {"host": "b"}]})
    with pytest.raises(ConfigError, match="on hosts a and b; all its stages must be on one"):
        played(written)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({1: [19]}, "not a number of stages"),
        ({"two": [9, 9]}, "not a number of stages"),
        ({2: [19]}, "has 1 times"),
        ({2: [19, 0]}, r"stages\.2\[1\]"),
        ({2: [10, 10], "2": [9, 9]}, "twice"),
    ],
)
def test_a_cut_that_is_none_is_refused(tmp_path: Path, stages: dict[Any, list[float]], said: str) -> None:
    written = document(tmp_path, 2, [0.0])
    written["models"][0]["profile"]["stages"] = stages
    with pytest.raises(ConfigError, match=said):
        parse_config(written, Path())
