"""Symphony section 3.3, event by event: 3 GPUs, l(b) = b + 5, SLO 12, request R_i at 0.75·(i - 1).

The schedules are worked out by hand from the paper's text and figures 4 and 5. A moment of R_i is 0.75·(i - 1),
its deadline 12 later. A batch of four takes 9, a batch of one 6.
"""

from __future__ import annotations

import pytest

from policies.batching.registry import make_discipline
from tests.batching_stage import Stage, hosted, linear

GAP_MS = 0.75
SLO_MS = 12.0
MISSING = (13, 14, 15)

Batch = tuple[float, str, list[int]]


def stage(name: str, free_at_ms: tuple[float, float, float] = (0.0, 0.0, 0.0), **options: str) -> Stage:
    made = Stage(make_discipline(name, options))
    made.model("m", SLO_MS)
    for order, free in enumerate(free_at_ms):
        made.slice(f"GPU {order + 1}", hosted("m", linear(1, 5, 64)), order=order, free_at_ms=free)
    return made


def send(to: Stage, first: int, last: int, missing: tuple[int, ...] = ()) -> None:
    """Requests R_first … R_last at their moments, but for the missing ones."""
    for number in range(first, last + 1):
        to.until(GAP_MS * (number - 1), is_inclusive=False)  # of one moment, arrivals come first
        if number not in missing:
            to.arrive("m", SLO_MS, seq=number)


def schedule(of: Stage) -> list[Batch]:
    return [(batch.start_at_ms, batch.slice_id, batch.seqs) for batch in of.batches]


def test_the_first_batch_goes_when_the_fourth_request_arrives() -> None:
    """R_1's deadline is 12: with four requests frontrun is 12 - l(5) = 2 and latest 12 - l(4) = 3."""
    to = stage("deferred", drop="simple")
    send(to, 1, 3)
    to.until(2.2499)
    assert schedule(to) == []
    send(to, 4, 4)
    assert schedule(to) == [(2.25, "GPU 1", [1, 2, 3, 4])]


@pytest.mark.parametrize("drop", ["simple", "window"])
def test_deferred_scheduling_forms_a_staggered_execution(drop: str) -> None:
    """Figure 4: every 3 ms a batch of four, the three GPUs in turn, each busy 9 of 9 ms, nobody dropped."""
    to = stage("deferred", drop=drop)
    send(to, 1, 48)
    assert schedule(to) == [
        (2.25, "GPU 1", [1, 2, 3, 4]),
        (5.25, "GPU 2", [5, 6, 7, 8]),
        (8.25, "GPU 3", [9, 10, 11, 12]),
        (11.25, "GPU 1", [13, 14, 15, 16]),
        (14.25, "GPU 2", [17, 18, 19, 20]),
        (17.25, "GPU 3", [21, 22, 23, 24]),
        (20.25, "GPU 1", [25, 26, 27, 28]),
        (23.25, "GPU 2", [29, 30, 31, 32]),
        (26.25, "GPU 3", [33, 34, 35, 36]),
        (29.25, "GPU 1", [37, 38, 39, 40]),
        (32.25, "GPU 2", [41, 42, 43, 44]),
        (35.25, "GPU 3", [45, 46, 47, 48]),
    ]
    assert to.drops == []


@pytest.mark.parametrize("drop", ["simple", "window"])
def test_deferred_scheduling_regains_the_stagger_after_three_missing_requests(drop: str) -> None:
    """Figure 5b. GPU 1 is free at 11.25 when R_16 comes (deadline 23.25), and idles until four are there:
    R_19 comes at 13.5, when frontrun is 23.25 - l(5) = 13.25. From there the pattern is the old one."""
    to = stage("deferred", drop=drop)
    send(to, 1, 43, MISSING)
    assert schedule(to) == [
        (2.25, "GPU 1", [1, 2, 3, 4]),
        (5.25, "GPU 2", [5, 6, 7, 8]),
        (8.25, "GPU 3", [9, 10, 11, 12]),
        (13.5, "GPU 1", [16, 17, 18, 19]),
        (16.5, "GPU 2", [20, 21, 22, 23]),
        (19.5, "GPU 3", [24, 25, 26, 27]),
        (22.5, "GPU 1", [28, 29, 30, 31]),
        (25.5, "GPU 2", [32, 33, 34, 35]),
        (28.5, "GPU 3", [36, 37, 38, 39]),
        (31.5, "GPU 1", [40, 41, 42, 43]),
    ]
    assert to.drops == []


def test_eager_scheduling_deteriorates_after_three_missing_requests() -> None:
    """Figure 5a: eager from R_16 on, while the staggered batches of R_5 … R_12 and R_1 … R_4 still run.

    11.25  GPU 1 is free as R_16 comes: alone, until 17.25.
    14.25  GPU 2 takes R_17 … R_20, until 23.25.
    17.25  R_21 … R_24 wait; GPU 1 and GPU 3 become free together. The figure draws the batch on GPU 3; we take the
           lowest id, so here the names of these two are exchanged from now on. Until 26.25.
    18     R_25 comes, the other one is idle: alone, until 24.
    23.25  seven wait (R_26 … R_32), but R_26 is due at 30.75: only 30.75 - 23.25 - 5 → 2 fit. Until 30.25.
    24     R_28 is due at 32.25: 3 fit, until 32.   26.25  R_31 is due at 34.5: 3 fit, until 34.25.
    30.25  R_34 is due at 36.75: 1 fits, until 36.25.
    31.5   R_35 (due 37.5) cannot finish alone any more: dropped.   32  R_36 is due at 38.25: 1 fits, until 38.
    33, 33.75  R_37 and R_38 expire.   34.25  R_39 is due at 40.5: 1 fits.
    """
    to = stage("eager", (11.25, 14.25, 17.25))
    to.until(11.25)
    send(to, 16, 47)
    assert schedule(to) == [
        (11.25, "GPU 1", [16]),
        (14.25, "GPU 2", [17, 18, 19, 20]),
        (17.25, "GPU 1", [21, 22, 23, 24]),
        (18.0, "GPU 3", [25]),
        (23.25, "GPU 2", [26, 27]),
        (24.0, "GPU 3", [28, 29, 30]),
        (26.25, "GPU 1", [31, 32, 33]),
        (30.25, "GPU 2", [34]),
        (32.0, "GPU 3", [36]),
        (34.25, "GPU 1", [39]),
    ]
    assert [(at_ms, seqs) for at_ms, _, seqs in to.drops] == [
        (31.5, [35]),
        (33.0, [37]),
        (33.75, [38]),
    ]


def test_only_eager_scheduling_loses_requests_over_a_longer_run() -> None:
    eager = stage("eager", (11.25, 14.25, 17.25))
    eager.until(11.25)
    send(eager, 16, 200)
    eager.drain()
    deferred = stage("deferred", drop="simple")
    send(deferred, 1, 200, MISSING)
    deferred.drain()
    assert eager.count("expired") > 50
    assert deferred.count("ran") == 197
