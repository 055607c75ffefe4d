"""Ranks in lock step, on virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fabric.ids import ModelId, SliceId
from roles.gpu_worker.executors.gang import (
    FAILED_LOAD_MS,
    FAILED_STEP_MS,
    Gang,
    LockStep,
    RankFailed,
)

OF = SliceId("s"), ModelId("m")


def loaded(ranks: int = 3) -> LockStep:
    step = LockStep(ranks)
    for rank in range(1, ranks):
        step.loaded(rank, "", 0.0)
    step.end_load()
    return step


def test_no_step_begins_before_every_rank_has_the_model() -> None:
    step = LockStep(3)
    assert not step.has_settled()
    step.loaded(2, "", 0.0)
    assert not step.has_settled()
    assert step.problem() == "rank 1 of 3: it did not load within 120 s"
    step.loaded(1, "", 9.0)
    assert step.has_settled()
    assert step.problem() == ""


def test_a_rank_that_cannot_load_leaves_the_model_out_and_breaks_nothing() -> None:
    step = LockStep(3)
    step.loaded(2, "no file", 5.0)
    assert step.has_settled()
    assert step.problem() == "rank 2 of 3: no file"
    assert step.broken == ""


def test_a_first_rank_that_waits_in_its_load_for_one_that_failed_is_given_up() -> None:
    step = LockStep(2)
    step.loaded(1, "no file", 5.0)
    assert (step.fails_at_ms, step.fails_for) == (5.0 + FAILED_LOAD_MS, "rank 1 of 2: no file")
    step.end_load()
    assert step.fails_at_ms is None, "it does not wait any more"
    step.loaded(1, "no file", 6.0)
    assert step.fails_at_ms is None


def test_the_next_step_waits_for_all_ranks_and_not_for_what_they_say_of_former_ones() -> None:
    step = loaded()
    assert step.begin() == 1
    for rank in (0, 1):
        step.ended(rank, 1, "", 1.0)
    step.ended(2, 0, "", 1.0)
    assert not step.has_settled()
    step.ended(2, 1, "", 1.0)
    assert step.has_settled()
    assert step.problem() == ""
    assert step.begin() == 2
    assert not step.has_settled()


def test_a_rank_that_never_ends_a_step_breaks_the_gang_for_good() -> None:
    step = loaded(2)
    step.begin()
    step.ended(0, 1, "ValueError: x", 1.0)
    said = "rank 1 of 2: it did not end a batch within 2 s of rank 0, which raised ValueError: x"
    assert step.problem() == said
    step.ended(1, 1, "ValueError: x", 9_000.0)
    assert step.broken == step.problem() == said


def test_what_all_ranks_raise_on_leaves_them_in_step() -> None:
    step = loaded()
    step.begin()
    step.ended(1, 1, "ValueError: x", 1.0)
    assert (step.fails_at_ms, step.fails_for) == (1.0 + FAILED_STEP_MS, "rank 1 of 3: ValueError: x")
    step.ended(0, 1, "ValueError: x", 2.0)
    step.ended(2, 1, "ValueError: x", 3.0)
    assert step.fails_at_ms is None
    assert step.problem() == ""


def test_a_rank_that_raises_alone_is_told_when_the_first_one_has_waited_or_went_on() -> None:
    step = loaded(2)
    step.begin()
    step.ended(1, 1, "ValueError: x", 10.0)
    assert (step.fails_at_ms, step.fails_for) == (10.0 + FAILED_STEP_MS, "rank 1 of 2: ValueError: x")
    step = loaded(2)
    step.begin()
    step.ended(0, 1, "", 5.0)
    step.ended(1, 1, "ValueError: x", 10.0)
    assert step.fails_at_ms == 10.0
    assert step.problem() == "rank 1 of 2: ValueError: x"


def test_a_rank_that_ran_what_the_first_one_raised_on_is_out_of_step() -> None:
    step = loaded(2)
    step.begin()
    step.ended(1, 1, "", 5.0)
    step.ended(0, 1, "ValueError: x", 6.0)
    assert step.problem() == "rank 1 of 2: it ran a batch on which rank 0 raised ValueError: x"


@pytest.mark.parametrize("seed", range(50))
def test_whatever_ranks_say_a_step_begins_only_where_all_ended_the_one_before_alike(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(2, 4)
    step = loaded(ranks)
    truth: dict[int, str] = {}
    for now_ms in range(200):
        if rng.random() < 0.3:
            is_all = set(truth) == set(range(ranks)) or step.number == 0
            assert step.has_settled() == (is_all or bool(step.broken) or set(truth) == set(range(1, ranks)))
            if 0 in truth or step.number == 0:
                same = is_all and len({bool(why) for why in truth.values()}) <= 1
                if step.problem() == "":
                    assert same
                    step.begin()
                    truth = {}
                else:
                    assert not same
                    return
        else:
            rank = rng.randrange(ranks)
            if rank not in truth and step.number:
                truth[rank] = rng.choice(("", "", "", "ValueError"))
                step.ended(rank, step.number, truth[rank], float(now_ms))


def gang(tell: Callable[[Gang], None] = lambda gang: gang.loaded(1, "")) -> Gang:
    found = Gang(lambda: 0.0)
    found.start(2)
    tell(found)
    return found


def test_steps_are_posted_in_order_and_failures_raised() -> None:
    ranks = gang()
    for number in (1, 2):
        ranks.begin(*OF, ())
        ranks.end("")
        ranks.ended(1, number, "")
    assert [one.number for one in ranks.take(9, 0.0)] == [1, 2]
    ranks.begin(*OF, ())
    ranks.ended(1, 3, "ValueError: x")
    assert ranks.failure(FAILED_STEP_MS - 1) == ""
    assert ranks.failure(FAILED_STEP_MS) == "rank 1 of 2: ValueError: x"
    ranks.end("")
    with pytest.raises(RankFailed, match="rank 1 of 2: ValueError: x"):
        ranks.begin(*OF, ())
    assert ranks.broken
    ranks.close()


def test_a_load_that_failed_elsewhere_is_raised_where_the_first_step_would_begin() -> None:
    ranks = gang(lambda gang: gang.loaded(1, "no file"))
    assert ranks.problems_of_load() == ["rank 1 of 2: no file"]
    with pytest.raises(RankFailed, match="rank 1 of 2: no file"):
        ranks.begin(*OF, ())
    assert not ranks.broken
    assert not ranks.take(9, 0.0)
    ranks.close()
