"""Every real core on a virtual clock, beside the fast simulator: each request meets the same fate at the same moment."""

from __future__ import annotations

import pytest

from tests.references.simulations import (
    fates_apart,
    play,
    random_cluster,
    with_application,
    with_heads,
    with_pipeline,
    with_ranks,
)

CASES, OF = 300, 10
REQUESTS = 60
APPLICATION_CASES = 40
HEADS_CASES = 60
PIPELINE_CASES = 60


@pytest.mark.parametrize("first", range(0, CASES, CASES // OF))
def test_both_simulators_give_every_request_the_same_fate(first: int) -> None:
    crossed = 0
    for seed in range(first, first + CASES // OF):
        document = random_cluster(seed)
        fast = play(document, seed, REQUESTS, is_full=False)
        full = play(document, seed, REQUESTS, is_full=True)
        if (
            fast.late_preemptions
        ):  # a stop crossed an end: what follows differs, as docs/operate/replay.md says
            crossed += 1
        else:
            assert fates_apart(fast, full) == [], f"setting {seed}"
    assert crossed < CASES / OF / 5


@pytest.mark.parametrize("first", range(0, PIPELINE_CASES, PIPELINE_CASES // 4))
def test_both_simulators_run_pipelines_alike(first: int) -> None:
    crossed = 0
    for seed in range(first, first + PIPELINE_CASES // 4):
        document = with_pipeline(random_cluster(seed), seed)
        fast = play(document, seed, REQUESTS, is_full=False)
        assert any(batch.stages for batch in fast.batches)
        if fast.late_preemptions:
            crossed += 1
            continue
        full = play(document, seed, REQUESTS, is_full=True)
        assert fates_apart(fast, full) == [], f"setting {seed}"
        assert full.outcome.gpus.busy_fraction == pytest.approx(fast.outcome.gpus.busy_fraction), (
            f"setting {seed}"
        )
        assert full.outcome.gpus.used == fast.outcome.gpus.used
    assert crossed < PIPELINE_CASES / 4 / 5


@pytest.mark.parametrize("first", range(0, PIPELINE_CASES, PIPELINE_CASES // 4))
def test_both_simulators_run_ranks_alike_and_keep_all_their_gpus_busy(first: int) -> None:
    crossed = busy_runs = 0
    for seed in range(first, first + PIPELINE_CASES // 4):
        document = with_ranks(random_cluster(seed), seed)
        ranks = document["models"][0]["loader"]["ranks"]
        fast = play(document, seed, REQUESTS, is_full=False)
        if fast.late_preemptions:
            crossed += 1
            continue
        full = play(document, seed, REQUESTS, is_full=True)
        assert fates_apart(fast, full) == [], f"setting {seed}"
        for run in (fast, full):
            busy = run.outcome.gpus.busy_fraction[:ranks]
            assert min(busy) == max(busy)
        busy_runs += max(fast.outcome.gpus.busy_fraction[:ranks]) > 0
        assert fast.outcome.gpus.busy_fraction == pytest.approx(full.outcome.gpus.busy_fraction)
    assert crossed < PIPELINE_CASES / 4 / 5
    assert busy_runs > PIPELINE_CASES / 4 / 2


@pytest.mark.parametrize("first", range(0, APPLICATION_CASES, APPLICATION_CASES // 5))
def test_both_simulators_do_the_same_with_applications(first: int) -> None:
    """But where tasks are given up: what of a run is withdrawn, and when, only the full one knows to the digit."""
    compared = 0
    for seed in range(first, first + APPLICATION_CASES // 5):
        document = with_application(random_cluster(seed), seed)
        fast = play(document, seed, REQUESTS, is_full=False)
        (one,) = fast.outcome.applications.values()
        is_cut = fast.late_preemptions or any(told.cancelled or told.dropped for told in one.stages.values())
        if is_cut or fast.unplaced:  # frontends refuse what nothing hosts, as the fast one's do not
            continue
        compared += 1
        full = play(document, seed, REQUESTS, is_full=True)
        (other,) = full.outcome.applications.values()
        assert fates_apart(fast, full) == [], f"setting {seed}"
        assert one.requests.good == other.requests.good, f"setting {seed}"
        asked = {name: (told.asked, told.answered) for name, told in one.stages.items()}
        assert asked == {name: (told.asked, told.answered) for name, told in other.stages.items()}
        judged = [
            {name: (told.offered, told.good) for name, told in run.outcome.with_stages.items()}
            for run in (fast, full)
        ]
        assert judged[0] == judged[1], f"setting {seed}"
    assert compared > APPLICATION_CASES / 5 / 3


@pytest.mark.parametrize("first", range(0, HEADS_CASES, HEADS_CASES // 4))
def test_a_model_fares_with_heads_as_it_does_without_and_each_request_has_one_fate(first: int) -> None:
    """Frontends and workers know of heads, the scheduler batches all of a model's requests alike."""
    crossed = mixed = 0
    for seed in range(first, first + HEADS_CASES // 4):
        plain = random_cluster(seed)
        document = with_heads(plain, seed)
        fast = play(plain, seed, REQUESTS, is_full=False)
        if fast.late_preemptions:
            crossed += 1
            continue
        full = play(document, seed, REQUESTS, is_full=True)
        assert fates_apart(fast, full) == [], f"setting {seed}"
        mixed += any(
            batch.batch_size > 1 and batch.model_id == document["models"][0]["name"] for batch in full.batches
        )
    assert crossed < HEADS_CASES / 4 / 5
    assert mixed > HEADS_CASES / 4 / 5, (
        "requests of several heads, which clients ask in turn, run in one batch"
    )
