"""What the scheduler is told of a plan: rank, target batches, weights; and what becomes of them in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import ConfigError
from fabric.ids import ModelId, NodeId
from policies.placement.common.base import Placement, PlannedModel, PlannedSlice
from roles.config.read_config import ClusterConfig, parse_config
from roles.scheduler.fleet import BATCHES_PER_SLICE, SliceRecord
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import SimulatedRun, simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

WINDOW = Window(1_000, 6_000)


def config(slices: list[dict[str, Any]], batching: object = "fixed", **model: Any) -> ClusterConfig:
    written = {"name": "a", "slo_ms": 100, "rate_rps": 600, "profile": {"alpha_ms": 1, "beta_ms": 5}, **model}
    document = {
        "models": [written, {**written, "name": "b", "rate_rps": 50}],
        "cluster": {"gpus": 3},
        "batching": batching,
        "placement": {"given": {"slices": slices}},
    }
    return parse_config(document, Path())


def on(gpu: int, *models: dict[str, Any], share: float | None = None) -> dict[str, Any]:
    return {"gpu": gpu, "share_percent": share, "models": list(models)}


def of(model: str, batch: int | None = None, rate_rps: float | None = None) -> dict[str, Any]:
    named = {"model": model, "batch": batch, "rate_rps": rate_rps}
    return {key: value for key, value in named.items() if value is not None}


def weights(cluster: ClusterConfig) -> list[float]:
    return [weight for _, weight in settings_from(cluster).hints.values()]


def served(run: SimulatedRun, model: str) -> dict[str, int]:
    """Requests of a model by slice, in the window."""
    counts: Counter[str] = Counter()
    for batch in run.batches:
        if batch.model_id == model and WINDOW.from_ms <= batch.started_at_ms < WINDOW.until_ms:
            counts[batch.slice_id] += batch.batch_size
    return dict(counts)


def play(cluster: ClusterConfig) -> SimulatedRun:
    return simulate(cluster, workload_of(cluster), WINDOW)


def test_a_plan_that_bounds_a_batch_binds_every_discipline() -> None:
    cluster = config([on(0, of("a", 8)), on(1, of("b"))], batching="deferred")
    bounded = PlannedSlice(0, None, (PlannedModel(ModelId("a"), 8, batch_max=8),))
    free = PlannedSlice(1, None, (PlannedModel(ModelId("b")),))
    settings = settings_from(cluster, Placement((bounded, free)))
    (a, b) = (spec.models[0] for _, spec in settings.slices)
    assert (a.batch_size_max, len(a.exec_ms), a.exec_ms[-1]) == (8, 8, 13.0)
    assert b.batch_size_max == len(b.exec_ms) == 512
    run = simulate(cluster, workload_of(cluster), WINDOW, settings)
    assert max(batch.batch_size for batch in run.batches if batch.model_id == "a") == 8


def test_a_plan_without_rates_weighs_replicas_by_their_batches() -> None:
    cluster = config([on(0, of("a", 8)), on(1, of("a", 4)), on(2, of("b", 2))])
    assert weights(cluster) == [8, 4, 2]


def test_a_plan_with_rates_weighs_replicas_by_them() -> None:
    assert weights(config([on(0, of("a", 8, 450)), on(1, of("a", 8, 150))])) == [450, 150]


def test_one_missing_rate_makes_the_others_incomparable() -> None:
    assert weights(config([on(0, of("a", 8, 450)), on(1, of("a", 4))])) == [8, 4]


@pytest.mark.parametrize(
    ("replicas", "part"),
    [
        # One batch a turn: 8 of every 12 requests (thesis section 4.3.3).
        ((of("a", 8), of("a", 4)), 8 / 12),
        # The plan's rates rule, whatever the batches.
        ((of("a", 8, 150), of("a", 8, 450)), 150 / 600),
    ],
)
def test_the_router_shares_requests_as_the_plan_says(
    replicas: tuple[dict[str, Any], dict[str, Any]], part: float
) -> None:
    # Shares and slices beside each other change run times, not turns.
    run = play(config([on(0, replicas[0], share=50), on(0, of("b", 4), share=50), on(1, replicas[1])]))
    by_slice = served(run, "a")
    assert by_slice["local/gpu0/0"] / sum(by_slice.values()) == pytest.approx(part, abs=0.01)
    assert run.outcome.bad_rate < 0.01


def test_the_router_waits_at_most_100_ms_for_its_target() -> None:
    # 5 requests/s never fill a batch of 64: one goes 100 ms after its first request, and takes 5 ms and 1 for each.
    run = play(config([on(0, of("a", 64)), on(1, of("b", 64))], slo_ms=200, rate_rps=5))
    latency_ms = run.outcome.models[run.traffic[0].model_id].p99_ms
    assert latency_ms is not None
    assert 100 < latency_ms <= 100 + 5 + 6


def test_slices_that_fewest_models_share_come_first() -> None:
    cluster = config([on(0, of("a"), of("b")), on(1, of("a")), on(2, of("a"))], "deferred")
    ids = [spec.slice_id for _, spec in settings_from(cluster).slices]
    assert ids == ["local/gpu1/0", "local/gpu2/0", "local/gpu0/0"]


@pytest.mark.parametrize("batching", ["deferred", "tenuto"])
def test_a_model_with_slices_of_its_own_leaves_the_shared_one_to_who_has_no_other(batching: str) -> None:
    """`a` needs most of three GPUs, `b` can only go to the one they share."""
    run = play(config([on(0, of("a"), of("b")), on(1, of("a")), on(2, of("a"))], batching, slo_ms=30))
    assert run.outcome.worst_bad_rate < 0.01


@pytest.mark.parametrize("batching", ["deferred", {"fixed": {"batch": 4}}])
def test_a_share_is_played_with_its_own_run_times(batching: object) -> None:
    """The igniter profile of ResNet50 knows every share: a smaller one takes longer, and no batch is faster."""
    from profiles.store import shipped_profile

    ref = "igniter-v100/resnet50"
    slices = [on(0, of("a", 4), share=30), on(0, of("b", 4), share=50)]
    cluster = config(slices, batching, profile={"ref": ref}, slo_ms=200, rate_rps=100)
    run = play(cluster)
    profile = shipped_profile(ref)
    for batch in run.batches:
        alone_ms = profile.exec_ms(batch.batch_size, 30 if batch.model_id == "a" else 50)
        assert batch.finished_at_ms - batch.started_at_ms == pytest.approx(alone_ms)
    assert run.outcome.bad_rate < 0.01


@pytest.mark.parametrize("batching", ["deferred", "tenuto"])
def test_slices_that_slow_each_other_down_a_little_still_meet_their_slos(batching: str) -> None:
    """What a batch takes then varies by a few percent; who holds it until the last moment must know them all."""
    uniform = {"arrival": {"process": "uniform"}}
    models = [
        {
            "name": "alexnet",
            "slo_ms": 15,
            "rate_rps": 500,
            "profile": {"ref": "igniter-v100/alexnet"},
            **uniform,
        },
        {
            "name": "resnet50",
            "slo_ms": 40,
            "rate_rps": 400,
            "profile": {"ref": "igniter-v100/resnet50"},
            **uniform,
        },
    ]
    slices = [on(0, of("alexnet"), share=40), on(0, of("resnet50"), share=40)]
    document = {
        "models": models,
        "cluster": {"gpus": 1, "gpu_type": "v100", "interference": "igniter"},
        "batching": batching,
        "placement": {"given": {"slices": slices}},
    }
    run = play(parse_config(document, Path()))
    taken_ms: dict[tuple[str, int], set[float]] = {}
    for batch in run.batches:
        run_ms = round(batch.finished_at_ms - batch.started_at_ms, 3)
        taken_ms.setdefault((batch.model_id, batch.batch_size), set()).add(run_ms)
    assert max(len(times) for times in taken_ms.values()) > 1, "neighbours are felt"
    assert run.outcome.worst_bad_rate < 0.01


def cut_models(
    loader: dict[str, Any],
    placement: Any,
    device: str = "cpu",
    beside: Sequence[dict[str, Any]] = (),
    **keys: Any,
) -> ClusterConfig:
    model = {"name": "a", "slo_ms": 100, "loader": {"python": "a.b:C", **loader}, **keys}
    document = {
        "models": [model, *beside],
        "cluster": {"nodes": [{"host": "a", "gpus": 3, "device": device}]},
        "placement": placement,
    }
    return parse_config(document, Path())


def test_a_pipeline_of_real_devices_needs_no_profile() -> None:
    pipeline = {"gpu": 0, "following": [1], "models": [{"model": "a"}]}
    cluster = cut_models({}, {"given": {"slices": [pipeline]}})
    ((_, spec),) = settings_from(cluster).slices
    assert (spec.following, spec.models[0].exec_ms, spec.models[0].stages_ms) == ((1,), (), ())


def test_a_model_is_cut_into_as_many_stages_as_its_loader_says() -> None:
    for stages in (2, ["net.1"]):
        cluster = cut_models({"stages": stages}, "exclusive")
        ((_, spec),) = settings_from(cluster).slices
        assert (spec.gpu, spec.following) == (0, (1,))
        loader = spec.models[0].loader
        assert loader is not None
        assert (loader.stages, loader.begin_at) == (2, () if stages == 2 else ("net.1",))


@pytest.mark.parametrize(("following", "where"), [([], "on one GPU"), ([1, 2], "on a pipeline of 3 GPUs")])
def test_a_model_on_more_or_fewer_gpus_than_its_stages_is_refused(following: list[int], where: str) -> None:
    pipeline = {"gpu": 0, "following": following, "models": [{"model": "a"}]}
    cluster = cut_models({"stages": 2}, {"given": {"slices": [pipeline]}})
    with pytest.raises(ConfigError, match=rf"model a must be cut into 2 stages .* puts it {where}"):
        settings_from(cluster)


def test_a_model_in_ranks_is_one_gang_whose_profile_is_of_all_of_them() -> None:
    cluster = cut_models({"ranks": 2}, "exclusive", profile={"table": {1: 10, 2: 15}})
    ((_, spec),) = settings_from(cluster).slices
    assert (spec.gpu, spec.following, spec.is_gang, spec.is_pipeline) == (0, (1,), True, False)
    assert (spec.models[0].exec_ms, spec.models[0].stages_ms) == ((10.0, 15.0), ())
    record = SliceRecord(spec, NodeId("a"), 0)
    assert record.batches_max == BATCHES_PER_SLICE, "one runs on all its GPUs, one waits"


@pytest.mark.parametrize(("following", "where"), [([], "one GPU"), ([1, 2], "3 GPUs")])
def test_a_model_on_more_or_fewer_gpus_than_its_ranks_is_refused(following: list[int], where: str) -> None:
    gang = {"gpu": 0, "following": following, "models": [{"model": "a"}]}
    cluster = cut_models({"ranks": 2}, {"given": {"slices": [gang]}})
    with pytest.raises(ConfigError, match=rf"model a runs in 2 ranks .* puts it on {where}; each rank"):
        settings_from(cluster)


def test_a_gang_shares_its_slice_with_no_other_model() -> None:
    gang = {"gpu": 0, "following": [1], "models": [{"model": "a"}, {"model": "b"}]}
    other = {"name": "b", "slo_ms": 100, "loader": {"python": "a.b:C"}}
    cluster = cut_models({"ranks": 2}, {"given": {"slices": [gang]}}, beside=[other])
    with pytest.raises(ConfigError, match=r"model a runs in ranks .* needs its slice for itself"):
        settings_from(cluster)
